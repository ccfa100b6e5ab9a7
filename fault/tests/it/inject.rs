//! A program that does a little of all, while one of its system calls fails: each in turn, at its first to
//! its `INJECT_MOST`th time in each thread (12 unless set). It succeeds, or its error names what failed; no
//! byte is wrong, nothing hangs, and no pin or mapping is lost.
//!
//! The failures are strace's, which attaches to the program when it is about to begin. Without strace, or
//! where it may not attach, the test is skipped by name.

use std::collections::BTreeSet;
use std::error::Error;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

use crate::common::{again, ends, function, is_child, page, region_at, skip, usize_of, word};
use tempfile::tempfile_in;
use uzone_fault::{
    Engine, EngineOptions, FileBacking, LazyMapping, LazyOptions, MemoryBacking, WriteTracking,
};
use uzone_os::uffd::{Features, KernelFaults, Modes, Registered, Remote, Uffd};
use uzone_os::{Anonymous, Mapping, Sharing, sigbus};
use uzone_pages::Order;
use uzone_pages::{ByteLen, MemoryKind};
use uzone_zone::{BindOptions, Pool, PoolOptions, Region, ZeroOptions, Zone};

const NAME: &str = "every_failing_system_call_is_a_named_error_or_a_success";

/// The calls, and what each fails with. Calls that only std and the allocator make, and whose failure those
/// answer by ending the process, are not here.
const CALLS: [(&str, &str); 30] = [
    ("mmap", "ENOMEM"),
    ("munmap", "ENOMEM"),
    ("madvise", "EAGAIN"),
    ("madvise", "EPERM"),
    ("mprotect", "ENOMEM"),
    ("userfaultfd", "EMFILE"),
    ("ioctl", "ENOMEM"),
    ("ioctl", "EAGAIN"),
    ("ioctl", "EPERM"),
    ("openat", "EMFILE"),
    ("openat", "ENOMEM"),
    ("read", "EIO"),
    ("read", "EINTR"),
    ("pread64", "EIO"),
    ("preadv2", "EIO"),
    ("pwrite64", "ENOSPC"),
    ("write", "EAGAIN"),
    ("statx", "EIO"),
    ("fstat", "EIO"),
    ("fstatfs", "EIO"),
    ("fcntl", "EMFILE"),
    ("memfd_create", "EMFILE"),
    ("ftruncate", "EINVAL"),
    ("cachestat", "EPERM"),
    ("eventfd2", "EMFILE"),
    ("epoll_create1", "EMFILE"),
    ("epoll_ctl", "ENOMEM"),
    ("epoll_wait", "EINTR"),
    ("clone3", "EAGAIN"),
    ("sched_setaffinity", "EPERM"),
];

/// How a part of the program ends.
type Done = Result<(), Box<dyn Error>>;
/// A part of the program, and its name.
type Part = (&'static str, fn() -> Done);

/// Bytes that are not those of the backing: the one thing that no failure explains.
const WRONG: i32 = 3;

fn check(memory: &LazyMapping, offset: u64) -> Done {
    let mut seen = [0; 8];
    memory.read_at(offset, &mut seen)?;
    if u64::from_ne_bytes(seen) != word(offset) {
        std::process::exit(WRONG);
    }
    Ok(())
}

/// Returns a file without a name beside this program, with the words in it.
fn file_of(len: u64) -> io::Result<File> {
    let mut file = tempfile_in(std::env::current_exe()?.parent().unwrap())?;
    file.write_all(&crate::common::words(len))?;
    Ok(file)
}

fn bind_and_pin() -> Done {
    let zone = Zone::new();
    let region = Region::anonymous(ByteLen::mib(4))?;
    let address = region.mapping().addr().get();
    let pagemap = zone.bind(region, BindOptions::new(MemoryKind::Generic))?;
    pagemap.pin_and_write(0, b"some bytes")?;
    let pinned = zone.pin(address, ByteLen::mib(1))?;
    let mut seen = [0; 10];
    pagemap.region().read_at(0, &mut seen)?;
    if seen != *b"some bytes" {
        std::process::exit(WRONG);
    }
    if pagemap.zero(pagemap.range(), &ZeroOptions::default()).is_ok_and(|done| done.left.is_empty())
    {
        std::process::exit(WRONG); // it is pinned
    }
    drop(pinned);
    drop(pagemap.zero(pagemap.range(), &ZeroOptions::default())?);
    pagemap.region().read_at(0, &mut seen)?;
    pagemap.unbind().map_err(|busy| busy.to_string())?;
    Ok(())
}

fn take_from_a_pool() -> Done {
    let region = Region::anonymous(ByteLen::mib(8))?;
    let options = BindOptions::new(MemoryKind::Generic).order(Order::PMD);
    let pagemap = Zone::new().bind(region, options)?;
    let pool = Pool::new(pagemap, PoolOptions::default()).map_err(|(_, cause)| cause)?;
    for _ in 0..6 {
        let folio = pool.take()?;
        let mut seen = [1; 64];
        folio.read_at(4096, &mut seen)?;
        if seen != [0; 64] {
            std::process::exit(WRONG);
        }
        folio.write_at(4096, &[7; 64])?;
    }
    Ok(())
}

fn map_lazily() -> Done {
    let engine = Engine::with(EngineOptions::default())?;
    let len = ByteLen::new(64 * page());
    let memory = engine.map(len, Arc::new(function()), &LazyOptions::default())?;
    for at in [0, 1, 17, 40, 63] {
        check(&memory, at * page())?;
    }
    let address = memory.addr().get() + usize_of(30 * page());
    drop(engine.zone().pin(address, ByteLen::new(4 * page()))?);
    memory.populate(0..len.get())?;
    memory.evict(0..len.get())?;
    check(&memory, 5 * page())?;
    let slow = crate::common::slow();
    let memory = engine.map(len, Arc::new(slow), &LazyOptions::default())?;
    check(&memory, 9 * page())
}

fn map_files() -> Done {
    let engine = Engine::with(EngineOptions::default())?;
    let len = 64 * page();
    let backing = FileBacking::writable(file_of(len)?)?;
    let options = LazyOptions::default().track_writes(WriteTracking::Sync);
    let memory = engine.map(ByteLen::new(len), Arc::new(backing), &options)?;
    check(&memory, 3 * page())?;
    memory.write_at(8 * page(), &word(8 * page()).to_ne_bytes())?;
    memory.write_back(0..len)?;
    memory.evict(0..len)?;
    check(&memory, 8 * page())?;
    let file = Arc::new(Mapping::memfd("injected", ByteLen::new(len), None)?);
    for at in 0..32 {
        file.write_at(at * page(), &word(at * page()).to_ne_bytes())?;
    }
    let backing = MemoryBacking::new(file, Sharing::Shared)?;
    let memory = engine.map(ByteLen::new(len), Arc::new(backing), &LazyOptions::default())?;
    check(&memory, 7 * page())?;
    let mut seen = [1; 8];
    memory.read_at(50 * page(), &mut seen)?;
    if seen != [0; 8] {
        std::process::exit(WRONG);
    }
    Ok(())
}

fn adopt() -> Done {
    let engine = Engine::with(EngineOptions::default())?;
    let features = Features::EVENT_REMOVE | Features::POISON;
    let uffd = Arc::new(Uffd::open(features, Features::NONE, KernelFaults::IfAllowed)?);
    let mapping = Mapping::anonymous(ByteLen::new(16 * page()), Anonymous::default())?;
    let memory = Registered::new(uffd.clone(), mapping, Modes::MISSING)?;
    // It stays until the last server has gone: a closed descriptor would mean zeroes.
    let remote = Remote::adopt(uffd.as_fd().try_clone_to_owned()?)?;
    let options = LazyOptions::default();
    let server =
        engine.adopt(remote, vec![region_at(0, &memory)], Arc::new(function()), &options, None)?;
    let mut seen = [0; 8];
    memory.mapping().read_at(3 * page(), &mut seen)?;
    if u64::from_ne_bytes(seen) != word(3 * page()) {
        std::process::exit(WRONG);
    }
    memory.mapping().discard(0..8 * page())?;
    memory.mapping().read_at(3 * page(), &mut seen)?;
    if seen != [0; 8] {
        std::process::exit(WRONG);
    }
    drop(server.stop()?);
    Ok(())
}

/// Does all, and returns what failed.
fn be_the_program() {
    sigbus::install().unwrap();
    // In a thread of its own, which has started before its calls are counted.
    let (go, goes) = std::sync::mpsc::channel();
    let program = thread::spawn(move || {
        let () = goes.recv().unwrap();
        let parts: [Part; 5] = [
            ("bind and pin", bind_and_pin),
            ("take from a pool", take_from_a_pool),
            ("map lazily", map_lazily),
            ("map files", map_files),
            ("adopt", adopt),
        ];
        for (name, part) in parts {
            if let Err(error) = part() {
                let text = error.to_string();
                assert!(!text.is_empty());
                let _ = writeln!(io::stderr(), "failed: {name}: {text}");
            }
        }
    });
    println!("begin");
    io::stdout().flush().unwrap();
    // A failure of this read is injected as well, and means the same.
    let _ = io::stdin().lock().lines().next();
    go.send(()).unwrap();
    let ended = program.join();
    std::process::exit(if ended.is_ok() { 0 } else { 4 });
}

/// Runs the program while a call fails. Returns how it ended and what it said, or `None` if strace may not
/// attach.
fn run(call: &str, error: &str, when: u32) -> Option<(Option<ExitStatus>, String)> {
    let mut child = again(NAME).stdin(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    while !lines.next().expect("the program begins").unwrap().contains("begin") {}
    let strace = Command::new("strace")
        .args(["-f", "-e", &format!("trace={call}"), "-o", "/dev/null"])
        .args(["-e", &format!("inject={call}:error={error}:when={when}")])
        .args(["-p", &child.id().to_string()])
        .stderr(Stdio::piped())
        .spawn();
    let end = |child: &mut Child| {
        child.kill().unwrap();
        child.wait().unwrap();
    };
    let Ok(mut strace) = strace else {
        end(&mut child);
        return None;
    };
    let mut said = BufReader::new(strace.stderr.take().unwrap()).lines();
    let is_attached =
        said.next().is_some_and(|line| line.is_ok_and(|line| line.contains("attached")));
    if !is_attached {
        end(&mut child);
        strace.wait().unwrap();
        return None;
    }
    let drained = thread::spawn(move || said.for_each(drop));
    let mut stderr = child.stderr.take().unwrap();
    let text = thread::spawn(move || {
        let mut text = String::new();
        let _ = stderr.read_to_string(&mut text);
        text
    });
    // The program may be gone already, if a call of its own fails.
    let _ = child.stdin.take().unwrap().write_all(b"go on\n");
    let status = ends(&mut child);
    strace.wait().unwrap();
    drained.join().unwrap();
    Some((status, text.join().unwrap()))
}

/// Returns what is wrong with an end of the program.
fn complaint(status: Option<ExitStatus>, text: &str) -> Option<String> {
    let Some(status) = status else { return Some("it hangs".to_owned()) };
    // The standard library ends a process without memory for a value or for the stack of a signal handler.
    let is_of_std =
        ["memory allocation of", "alternative stack"].iter().any(|end| text.contains(end));
    match (status.code(), status.signal()) {
        (Some(0), _) => None,
        (_, Some(6)) if is_of_std => None,
        (Some(WRONG), _) => Some("wrong bytes".to_owned()),
        _ => Some(format!("{status}")),
    }
}

#[test]
fn every_failing_system_call_is_a_named_error_or_a_success() {
    if is_child(NAME) {
        return be_the_program();
    }
    if let Err(error) = Uffd::open(Features::POISON, Features::NONE, KernelFaults::IfAllowed) {
        return skip(NAME, &error.to_string());
    }
    if Command::new("strace").arg("-V").stdout(Stdio::null()).status().is_err() {
        return skip(NAME, "strace is missing: apt-get install strace");
    }
    if run("gettid", "EPERM", 1000).is_none() {
        return skip(
            NAME,
            "strace may not attach: run as root, or set kernel.yama.ptrace_scope to 0",
        );
    }
    let most: u32 =
        std::env::var("INJECT_MOST").ok().and_then(|text| text.parse().ok()).unwrap_or(12);
    let cases: Vec<_> = (1..=most)
        .flat_map(|when| CALLS.iter().map(move |&(call, error)| (call, error, when)))
        .collect();
    let (next, failed) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let unknown = Mutex::new(BTreeSet::new());
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while let Some(&(call, error, when)) =
                    cases.get(next.fetch_add(1, Ordering::Relaxed))
                {
                    let Some((status, text)) = run(call, error, when) else {
                        unknown.lock().unwrap().insert(call);
                        continue;
                    };
                    if text.contains("failed: ") {
                        failed.fetch_add(1, Ordering::Relaxed);
                    }
                    if let Some(complaint) = complaint(status, &text) {
                        panic!(
                            "{call} fails with {error} at its {when}. time: {complaint}\n{text}"
                        );
                    }
                }
            });
        }
    });
    let (failed, unknown) = (failed.into_inner(), unknown.into_inner().unwrap());
    // One that is older than a call cannot make it fail.
    assert!(unknown.len() < 3, "strace cannot make these fail: {unknown:?}");
    eprintln!(
        "{} runs, in {failed} of which a request failed by name; not known to strace: {unknown:?}",
        cases.len()
    );
    assert!(failed > 0, "no failure came to a request");
}
