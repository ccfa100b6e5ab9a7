//! What the tests of lazily mapped memory share.

#![allow(dead_code, reason = "each test program uses its part")]
#![allow(clippy::unwrap_used, reason = "helpers of tests fail by panicking, as tests do")]

mod skip;

use std::fs::File;
use std::io::{BufRead, BufReader, Lines, Write};
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use tempfile::tempfile_in;
use uzone_fault::{
    Backing, BackingError, Engine, FaultStats, FunctionBacking, LazyMapping, LazyOptions, MapError,
    RemoteRegion, Window,
};
use uzone_os::peer::Peer;
use uzone_os::uffd::{Modes, Registered, Remote, Uffd, UffdError};
use uzone_os::{AccessError, Anonymous, Mapping, SystemRoot, Vaddr, hugepages, probe};
use uzone_pages::{Advice, ByteLen, FaultAround};

#[allow(unused_imports, reason = "each test program uses its part")]
pub(crate) use self::skip::{Pool, or_skip, skip, userfaultfd};

/// Which test a child is to be.
pub(crate) const CHILD: &str = "UZONE_FAULT_TEST_CHILD";
/// How long anything may take before it counts as hanging.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) fn engine() -> Engine {
    Engine::new(NonZeroUsize::new(2).unwrap()).unwrap()
}

/// Maps, or prints that the case cannot run.
pub(crate) fn map(
    name: &str,
    engine: &Engine,
    len: u64,
    backing: impl Backing + 'static,
    options: &LazyOptions,
) -> Option<LazyMapping> {
    mapped(name, engine.map(ByteLen::new(len), Arc::new(backing), options))
}

/// Returns the mapping, or prints that the case cannot run.
pub(crate) fn mapped(name: &str, answer: Result<LazyMapping, MapError>) -> Option<LazyMapping> {
    match answer {
        Ok(memory) => Some(memory),
        Err(MapError::Open(
            error @ (UffdError::Missing { .. }
            | UffdError::NoUserfaultfd { .. }
            | UffdError::Probe { .. }),
        )) => {
            skip(name, &error.to_string());
            None
        }
        Err(error) => panic!("{name}: {error:?}"),
    }
}

pub(crate) fn anonymous(pages: u64) -> Mapping {
    Mapping::anonymous(ByteLen::new(pages * page()), Anonymous::default()).unwrap()
}

/// Memory that another process could have registered.
pub(crate) fn registered(uffd: &Arc<Uffd>, mapping: Mapping) -> Registered {
    Registered::new(uffd.clone(), mapping, Modes::MISSING).unwrap()
}

/// The descriptor of such memory for its server.
pub(crate) fn remote(memory: &Registered) -> Remote {
    Remote::adopt(memory.uffd().as_fd().try_clone_to_owned().unwrap()).unwrap()
}

/// The region of such memory that is at `offset` of the backing.
pub(crate) fn region_at(offset: u64, memory: &Registered) -> RemoteRegion {
    let mapping = memory.mapping();
    let start = Vaddr::new(mapping.addr().get() as u64);
    RemoteRegion { start, len: mapping.len(), offset, page: mapping.page_size() }
}

pub(crate) fn page() -> u64 {
    probe::page_size().bytes()
}

pub(crate) fn usize_of(number: u64) -> usize {
    usize::try_from(number).unwrap()
}

/// The oracle: the 8 bytes at an offset; never zero.
pub(crate) fn word(offset: u64) -> u64 {
    (offset / 8 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

pub(crate) fn write_words(offset: u64, out: &mut [u8]) {
    for (index, chunk) in out.chunks_mut(8).enumerate() {
        let bytes = word(offset + index as u64 * 8).to_ne_bytes();
        chunk.copy_from_slice(&bytes[..chunk.len()]);
    }
}

pub(crate) fn words_at(offset: u64, len: u64) -> Vec<u8> {
    let mut bytes = vec![0; usize_of(len)];
    write_words(offset, &mut bytes);
    bytes
}

pub(crate) fn words(len: u64) -> Vec<u8> {
    words_at(0, len)
}

pub(crate) fn function() -> impl Backing + 'static {
    FunctionBacking::quick(|offset, out: &mut [u8]| {
        write_words(offset, out);
        Ok(())
    })
}

/// The same, whose page at this offset cannot be had.
pub(crate) fn failing_at(bad: u64) -> impl Backing + 'static {
    FunctionBacking::quick(move |offset, out: &mut [u8]| {
        if (offset..offset + out.len() as u64).contains(&bad) {
            return Err(BackingError::Other("this page is lost".into()));
        }
        write_words(offset, out);
        Ok(())
    })
}

/// The same, of which no page is ready.
pub(crate) fn slow() -> impl Backing + 'static {
    FunctionBacking::slow(|offset, out: &mut [u8]| {
        write_words(offset, out);
        Ok(())
    })
}

/// Reads a page and compares all of it. `Err` means that the page is bad, which takes the handler of
/// SIGBUS.
pub(crate) fn try_page(memory: &LazyMapping, offset: u64) -> Result<(), AccessError> {
    let mut seen = vec![0; usize_of(page())];
    match memory.read_at(offset, &mut seen) {
        Ok(()) => {}
        Err(uzone_fault::LazyError::Access(error @ AccessError::Bus { .. })) => return Err(error),
        Err(error) => panic!("{error:?}"),
    }
    assert!(seen == words_at(offset, page()), "wrong bytes at {offset:#x}");
    Ok(())
}

pub(crate) fn check_page(memory: &LazyMapping, offset: u64) {
    try_page(memory, offset).unwrap();
}

pub(crate) fn check_all(memory: &LazyMapping) {
    for offset in (0..memory.len().get()).step_by(usize_of(page())) {
        check_page(memory, offset);
    }
}

/// Numbers below `end` that look random, the same in every run.
pub(crate) fn scattered(seed: u64, end: u64) -> impl Iterator<Item = u64> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    std::iter::repeat_with(move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state % end
    })
}

/// The same, until `stop` is set.
pub(crate) fn scattered_until(stop: &AtomicBool, seed: u64, end: u64) -> impl Iterator<Item = u64> {
    scattered(seed, end).take_while(|_| !stop.load(Ordering::Relaxed))
}

/// Returns whether the kernel has a page at an address: bit 63 of its entry of the procfs pagemap.
pub(crate) fn is_present(pagemap: &File, address: u64) -> bool {
    let mut entry = [0; 8];
    pagemap.read_exact_at(&mut entry, address / page() * 8).unwrap();
    u64::from_ne_bytes(entry) >> 63 == 1
}

/// A file without a name beside this program: where temporary files go may be memory.
pub(crate) fn unnamed_file() -> File {
    tempfile_in(std::env::current_exe().unwrap().parent().unwrap()).unwrap()
}

/// The same with these bytes in it.
pub(crate) fn file_with(bytes: &[u8]) -> File {
    let mut file = unnamed_file();
    file.write_all(bytes).unwrap();
    file.sync_all().unwrap();
    file
}

/// The same with the words in it.
pub(crate) fn file_of(len: u64) -> File {
    file_with(&words(len))
}

/// A memory file with the words in it.
pub(crate) fn memfd_of(len: u64) -> Arc<Mapping> {
    let file = Mapping::memfd("words", ByteLen::new(len), None).unwrap();
    file.write_at(0, &words(len)).unwrap();
    Arc::new(file)
}

pub(crate) fn options(advice: Advice, pages: u64) -> LazyOptions {
    let fault_around = FaultAround::try_new(ByteLen::new(pages * page())).unwrap();
    LazyOptions::default().advice(advice).fault_around(fault_around)
}

/// Waits for something that happens in another thread.
pub(crate) fn wait_for(what: &str, mut holds: impl FnMut() -> bool) {
    let give_up = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < give_up, "{what} did not come");
        std::thread::yield_now();
    }
}

/// Waits until the counts are as expected: neighbours come after the page that was touched.
pub(crate) fn settles(memory: &LazyMapping, expected: impl Fn(&FaultStats) -> bool) {
    let give_up = Instant::now() + PATIENCE;
    while !expected(&memory.stats()) {
        assert!(Instant::now() < give_up, "{:?}", memory.stats());
        std::thread::yield_now();
    }
}

/// Something that is shut and is opened once.
#[derive(Default)]
pub(crate) struct Gate {
    is_open: Mutex<bool>,
    opened: Condvar,
}

impl Gate {
    pub(crate) fn open(&self) {
        *self.is_open.lock().unwrap() = true;
        self.opened.notify_all();
    }

    /// Waits for that; not for ever, or a test that failed would hang instead of saying so.
    pub(crate) fn pass(&self) {
        let is_open = self.is_open.lock().unwrap();
        drop(self.opened.wait_timeout_while(is_open, PATIENCE, |is_open| !*is_open).unwrap());
    }
}

/// Fills what is offered of a window page by page, but for those that are not ready.
pub(crate) fn fill_but(window: &mut Window<'_>, is_away: impl Fn(u64) -> bool) {
    while let Some(run) = window.next_run() {
        for at in (run.start..run.end).step_by(usize_of(page())) {
            if is_away(at) {
                continue;
            }
            let _ = window.copy_with(at..at + page(), |out| {
                write_words(at, out);
                Ok::<_, BackingError>(out.len())
            });
        }
    }
}

/// Fills the page that a thread waits for.
pub(crate) fn fill_wanted(window: &mut Window<'_>) -> Result<(), BackingError> {
    let range = window.range();
    let start = range.start;
    let _ = window.copy_with(range, |out| {
        write_words(start, out);
        Ok::<_, BackingError>(out.len())
    })?;
    Ok(())
}

/// Fills like the function, but a thread that asks for one of some pages is held up until it is released.
pub(crate) struct Stalling {
    is_stalled: Box<dyn Fn(u64) -> bool + Send + Sync>,
    gate: Arc<Gate>,
    asked: Arc<AtomicU64>,
}

impl Stalling {
    /// Holds up the threads that ask for the page at this offset. Returns what releases them as
    /// well, and how often the page was asked for.
    pub(crate) fn new(stalled: u64) -> (Self, Arc<Gate>, Arc<AtomicU64>) {
        Self::at(move |offset| offset == stalled)
    }

    /// The same for the pages at such offsets.
    pub(crate) fn at(
        is_stalled: impl Fn(u64) -> bool + Send + Sync + 'static,
    ) -> (Self, Arc<Gate>, Arc<AtomicU64>) {
        let (gate, asked) = (Arc::<Gate>::default(), Arc::<AtomicU64>::default());
        let is_stalled = Box::new(is_stalled);
        (Self { is_stalled, gate: gate.clone(), asked: asked.clone() }, gate, asked)
    }
}

impl Backing for Stalling {
    fn map_pages(&self, window: &mut Window<'_>) {
        fill_but(window, &self.is_stalled);
    }

    fn fault(&self, window: &mut Window<'_>) -> Result<(), BackingError> {
        if (self.is_stalled)(window.range().start) {
            self.asked.fetch_add(1, Ordering::SeqCst);
            self.gate.pass();
        }
        fill_wanted(window)
    }
}

/// This test program again, for one case; its name is part of no other.
pub(crate) fn again(name: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([name, "--nocapture", "--include-ignored", "--test-threads=1"]);
    command.env(CHILD, name);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

pub(crate) fn is_child(name: &str) -> bool {
    std::env::var(CHILD).is_ok_and(|child| child == name)
}

/// Waits for a child to end; `None` if it hangs, and then it is ended.
pub(crate) fn ends(child: &mut Child) -> Option<ExitStatus> {
    let give_up = Instant::now() + PATIENCE;
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return Some(status);
        }
        if Instant::now() >= give_up {
            child.kill().unwrap();
            child.wait().unwrap();
            return None;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Returns a closure that prints a line of a child and waits until the parent goes on.
pub(crate) fn turns() -> impl FnMut(&str) {
    let mut lines = std::io::stdin().lines();
    move |say| {
        println!("{say}");
        std::io::stdout().flush().unwrap();
        lines.next().unwrap().unwrap();
    }
}

/// This test program again, for a case in which it says lines and waits after each. Killed when
/// dropped.
pub(crate) struct Client {
    pub(crate) child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Client {
    pub(crate) fn start(name: &str) -> Self {
        let mut child = again(name).stdin(Stdio::piped()).stderr(Stdio::inherit()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, lines }
    }

    /// Waits for a line with this word. Returns it from there on: a test's first line begins with
    /// its name.
    pub(crate) fn line(&mut self, word: &str) -> String {
        loop {
            let line = self.lines.next().expect("the other process ended").unwrap();
            if let Some(at) = line.find(word) {
                return line[at..].to_owned();
            }
        }
    }

    /// Waits for a line that begins with `ready`. Returns its numbers.
    pub(crate) fn ready(&mut self) -> Vec<u64> {
        let line = self.line("ready");
        line.split_whitespace().skip(1).map(|number| number.parse().unwrap()).collect()
    }

    pub(crate) fn go_on(&mut self) {
        writeln!(self.child.stdin.as_mut().unwrap(), "go on").unwrap();
    }

    /// Takes a descriptor of it, as a server does that takes over from one that died.
    pub(crate) fn take(&self, name: &str, number: u64) -> Option<OwnedFd> {
        let pid = rustix::process::Pid::from_child(&self.child);
        let pidfd = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).unwrap();
        let peer = Peer::from_parts(self.child.id(), 0, pidfd).unwrap();
        let taken = peer.descriptor(u32::try_from(number).unwrap());
        or_skip(name, taken.map_err(|error| format!("pidfd_getfd: {error}: run as root")))
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        // If it ended well there is no such process.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub(crate) fn bytes_of(memory: &LazyMapping, offset: u64, len: u64) -> Vec<u8> {
    let mut seen = vec![0xee; usize_of(len)];
    memory.read_at(offset, &mut seen).unwrap();
    seen
}

/// Returns the 8 bytes at an offset.
pub(crate) fn word_in(memory: &LazyMapping, offset: u64) -> u64 {
    let mut seen = [0xee; 8];
    memory.read_at(offset, &mut seen).unwrap();
    u64::from_ne_bytes(seen)
}

pub(crate) const HUGE: u64 = 2 << 20;

/// Returns whether the host has transparent huge pages of 2 MiB, and prints it if the case cannot run.
pub(crate) fn has_huge_pages(name: &str) -> bool {
    match hugepages::thp(&SystemRoot::host()) {
        Ok(Some(thp)) if thp.pmd_size.get() == HUGE => true,
        answer => {
            skip(name, &format!("transparent huge pages of 2 MiB are wanted: {answer:?}"));
            false
        }
    }
}

/// Returns the fields in bytes that `smaps` has of the mappings in some memory of this process.
pub(crate) fn smaps(start: u64, len: u64) -> Vec<(String, u64)> {
    let (mut is_ours, mut fields) = (false, Vec::new());
    for line in std::fs::read_to_string("/proc/self/smaps").unwrap().lines() {
        let mut words = line.split_whitespace();
        let first = words.next().unwrap_or_default();
        if let Some((from, to)) = first.split_once('-') {
            let number = |digits| u64::from_str_radix(digits, 16).unwrap_or(0);
            is_ours = number(from) < start + len && number(to) > start;
        } else if is_ours && let Some(kib) = words.next().and_then(|kib| kib.parse::<u64>().ok()) {
            fields.push((first.to_owned(), kib << 10));
        }
    }
    fields
}

/// Returns how many bytes of a mapping `smaps` has as anonymous huge pages.
pub(crate) fn anonymous_huge(memory: &LazyMapping) -> u64 {
    let fields = smaps(memory.addr().get() as u64, memory.len().get()).into_iter();
    fields.filter(|(name, _)| name == "AnonHugePages:").map(|(_, bytes)| bytes).sum()
}
