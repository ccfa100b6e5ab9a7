//! Programs that attach to `uzone serve`: each page has its bytes, programs share what they only read, and
//! none notices more than a pause when the server is killed, and another is started.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use crate::common::served::Server;
use crate::common::{Dir, attach, has_failed, keeps_to, run, text, wait_until};
use serde_json::Value;
use uzone_attach::{AttachError, AttachOptions, AttachedMemory, ServedBy};
use uzone_snapshot::Packer;

const PAGE: u64 = 4096;
const PAGES: u64 = 2048;

/// The oracle: a page of the image. Each fifth is zero.
fn page_of(index: u64) -> Vec<u8> {
    let word = |at: u64| match index % 5 {
        3 => [0; 8],
        _ => ((index * 512 + at + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)).to_le_bytes(),
    };
    (0..512).flat_map(word).collect()
}

fn check(memory: &AttachedMemory, page: u64, expected: &[u8]) {
    let mut seen = vec![1; 4096];
    memory.mapping().read_at(page * PAGE, &mut seen).expect("it is read");
    assert!(seen == expected, "wrong bytes in page {page}");
}

fn check_all(memory: &AttachedMemory, seed: u64) {
    for step in 0..PAGES {
        let page = (step * 37 + seed * 101) % PAGES;
        check(memory, page, &page_of(page));
    }
}

/// Writes the image, packed and raw.
fn images(dir: &Dir) -> (String, String) {
    let raw: Vec<u8> = (0..PAGES).flat_map(page_of).collect();
    let packed = dir.path().join("packed");
    Packer::default().pack(&mut &raw[..], &packed, None, &|_| true).expect("it is packed");
    fs::write(dir.path().join("raw"), raw).expect("it is written");
    (dir.name("packed"), dir.name("raw"))
}

/// Starts a server of an image. This program outlives a page that fails.
fn start(image: &str, socket: &str) -> Server {
    Server::start(&["--on-failure", "poison", image, "--socket", socket])
}

/// Kills both processes of a server at once: neither gets to taking the place of the other.
fn kill(server: Server, socket: &str) {
    server.kill();
    // The worker has the socket until the kernel has ended it.
    wait_until("the end of the socket", || UnixStream::connect(socket).is_err());
}

/// Returns how many bytes of the memory are copies of its own, by the kernel's count.
fn own_bytes(memory: &AttachedMemory) -> u64 {
    let start = format!("{:x}-", memory.mapping().addr().get());
    let smaps = fs::read_to_string("/proc/self/smaps").expect("it is read");
    let lines = smaps.lines().skip_while(|line| !line.starts_with(&start));
    let own = lines.skip(1).find_map(|line| line.strip_prefix("Anonymous:")).expect("a field");
    own.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") << 10
}

#[test]
fn programs_have_the_bytes_of_the_image_and_write_to_their_own() {
    let name = "programs_have_the_bytes_of_the_image_and_write_to_their_own";
    let dir = Dir::new("attach");
    let (packed, raw) = images(&dir);
    for (image, share) in [(&packed, false), (&packed, true), (&raw, false), (&raw, true)] {
        let socket = dir.name("sock");
        let mut server = start(image, &socket);
        let options = AttachOptions::default().share(share);
        let Some(first) = attach(name, &socket, &options) else { return };
        let others = (1..16).filter_map(|_| attach(name, &socket, &options));
        let memories: Vec<_> = [first].into_iter().chain(others).collect();
        thread::scope(|scope| {
            for (seed, memory) in (0..).zip(&memories) {
                assert_eq!((memory.is_shared(), memory.served_by()), (share, ServedBy::Server));
                assert_eq!(memory.mapping().len().get(), PAGES * PAGE);
                scope.spawn(move || check_all(memory, seed));
            }
        });
        for memory in &memories {
            let own = own_bytes(memory);
            assert!(if share { own == 0 } else { own >= PAGES * PAGE * 4 / 5 }, "{share}: {own}");
        }
        let (writer, reader) = (&memories[0], &memories[1]);
        writer.mapping().write_at(5 * PAGE, &[7; 4096]).expect("it is written");
        check(writer, 5, &[7; 4096]);
        check(reader, 5, &page_of(5));
        // What is given back is zero.
        writer.mapping().discard(0..2 * PAGE).expect("it is given back");
        check(writer, 1, &[0; 4096]);
        check(writer, 2, &page_of(2));
        check(reader, 1, &page_of(1));
        let own = own_bytes(writer);
        assert!(!share || own <= 2 * PAGE, "{own}");
        for _ in &memories {
            server.next_event("connected");
        }
        drop(memories);
        for _ in 0..16 {
            server.next_event("ended");
        }
    }
}

#[test]
fn programs_notice_a_pause_when_the_server_is_killed_and_started_again() {
    let name = "programs_notice_a_pause_when_the_server_is_killed_and_started_again";
    let dir = Dir::new("attach-again");
    let (packed, _) = images(&dir);
    for share in [false, true] {
        let socket = dir.name("sock");
        let server = start(&packed, &socket);
        let options = AttachOptions::default().share(share);
        let Some(memory) = attach(name, &socket, &options) else { return };
        (0..PAGES / 4).for_each(|page| check(&memory, page, &page_of(page)));
        let given_back = PAGES / 8..PAGES / 2;
        let bytes = given_back.start * PAGE..given_back.end * PAGE;
        memory.mapping().discard(bytes).expect("it is given back");
        server.kill_workers();
        (PAGES / 2..PAGES * 5 / 8).for_each(|page| check(&memory, page, &page_of(page)));
        check(&memory, given_back.start, &[0; 4096]);
        let has_ended = AtomicBool::new(false);
        let mut server = thread::scope(|scope| {
            let next = scope.spawn(|| {
                kill(server, &socket);
                wait_until("the end of the server", || memory.served_by() == ServedBy::Waiting);
                has_ended.store(true, Ordering::Release);
                start(&packed, &socket)
            });
            wait_until("the end of the server", || has_ended.load(Ordering::Acquire));
            // It waits for the next server.
            for page in PAGES / 8..PAGES {
                let is_zero = given_back.contains(&page);
                check(&memory, page, &if is_zero { vec![0; 4096] } else { page_of(page) });
            }
            next.join().expect("it starts")
        });
        assert_eq!(memory.served_by(), ServedBy::Server);
        server.next_event("connected");
    }
}

#[test]
fn memory_without_its_image_is_lost_and_raises_errors() {
    let name = "memory_without_its_image_is_lost_and_raises_errors";
    let dir = Dir::new("attach-lost");
    let (packed, raw) = images(&dir);
    let socket = dir.name("sock");
    let server = start(&packed, &socket);
    let options = AttachOptions::default().deadline(Duration::from_millis(500));
    let Some(memory) = attach(name, &socket, &options) else { return };
    uzone_os::sigbus::install().expect("a handler");
    check(&memory, 1, &page_of(1));
    let mut server = thread::scope(|scope| {
        // One that waits already.
        let waiting = scope.spawn(|| {
            wait_until("the end of the server", || memory.served_by() == ServedBy::Waiting);
            memory.mapping().read_at((PAGES - 1) * PAGE, &mut [0; 8])
        });
        kill(server, &socket);
        let next = start(&raw, &socket);
        let error = waiting.join().expect("it ends").expect_err("another image is no image");
        assert!(error.to_string().contains("no memory is behind the address"), "{error}");
        next
    });
    let ServedBy::Lost { reason } = memory.served_by() else { panic!("{memory:?}") };
    assert!(reason.contains("its memory is of another image"), "{reason}");
    memory.mapping().read_at((PAGES - 2) * PAGE, &mut [0; 8]).expect_err("it is bad");
    check(&memory, 1, &page_of(1));
    let refused = server.next_event("refused");
    assert_eq!(refused["was_killed"], false);
}

#[test]
fn what_is_no_page_server_is_named() {
    let dir = Dir::new("attach-none");
    let socket = dir.name("sock");
    let options = AttachOptions::default();
    let attach = || AttachedMemory::attach(Path::new(&socket), &options);
    let error = attach().expect_err("there is no server");
    assert!(matches!(error, AttachError::Unreachable { .. }), "{error}");
    let listener = UnixListener::bind(&socket).expect("it listens");
    thread::scope(|scope| {
        scope.spawn(|| {
            let (mut stream, _) = listener.accept().expect("one connects");
            stream.read_exact(&mut [0; 8]).expect("it asks");
            stream.write_all(b"SSH-2.0\n").expect("it is taken");
        });
        let error = attach().expect_err("it is another server");
        assert!(matches!(error, AttachError::NotAServer { .. }), "{error}");
    });
}

#[test]
fn what_a_program_changed_is_packed_while_it_is_served_and_is_the_image_of_the_next() {
    let name = "what_a_program_changed_is_packed_while_it_is_served_and_is_the_image_of_the_next";
    let dir = Dir::new("attach-diff");
    let (packed, raw) = images(&dir);
    for (image, share, tracks, paused) in [
        (&packed, false, false, false),
        (&packed, true, false, false),
        (&raw, false, false, false),
        (&packed, false, false, true),
        (&packed, true, false, true),
        (&packed, false, true, false),
        (&packed, true, true, false),
    ] {
        let (socket, changed) = (dir.name("sock"), dir.name("changed"));
        let server = start(image, &socket);
        let options = AttachOptions::default().share(share).track_writes(tracks);
        let Some(memory) = attach(name, &socket, &options) else { return };
        let mut expected: Vec<Vec<u8>> = (0..PAGES).map(page_of).collect();
        (0..PAGES / 2).for_each(|page| check(&memory, page, &page_of(page)));
        for page in [0, 17, 18, PAGES / 2, PAGES - 1] {
            expected[usize::try_from(page).expect("small")] = vec![0x5a; 4096];
            memory.mapping().write_at(page * PAGE, &[0x5a; 4096]).expect("it is written");
        }
        // Given back: for good, and with a write since.
        memory.mapping().discard(40 * PAGE..50 * PAGE).expect("it is given back");
        (40..50).for_each(|page: usize| expected[page] = vec![0; 4096]);
        memory.mapping().write_at(45 * PAGE, &[9; 8]).expect("it is written");
        expected[45][..8].copy_from_slice(&[9; 8]);
        let diff = |image: &str| {
            let arguments = ["diff", "1", image, "-o", &changed, "--socket", &socket, "--json"];
            run(&[&arguments[..], if paused { &["--paused"] } else { &[] }].concat())
        };
        let output = diff(image);
        assert!(output.status.success(), "{}", text(&output.stderr));
        let lines: Vec<Value> = text(&output.stdout)
            .lines()
            .map(|line| serde_json::from_str(line).expect("an object a line"))
            .collect();
        lines.iter().for_each(|line| keeps_to("uzone.diff-1", line));
        let (first, key) = match paused || tracks {
            true => ("copied", "copied_bytes"),
            false => ("protected", "present_bytes"),
        };
        assert_eq!((&lines[0]["event"], &lines[1]["event"]), (&first.into(), &"packed".into()));
        let own = lines[0][key].as_u64().expect("a number") / PAGE;
        if tracks {
            assert_eq!(own, 6, "the pages that were written to");
        } else if share {
            // Of shared memory, the pages that are its own: written, zero, or given back.
            assert!((6..PAGES / 2).contains(&own), "{own}");
        }
        let stored = lines[1]["written_frames"].as_u64().expect("a number");
        // Of a packed image, those of the pages that changed.
        assert!(if image == &packed { stored == 6 } else { stored > 100 }, "{stored}");

        // What was missing then, of which each fifth page is zero.
        (PAGES / 2 + 1..PAGES - 1).for_each(|page| check(&memory, page, &page_of(page)));
        // The next program starts as this one was, and a change of this one is its own.
        memory.mapping().write_at(0, &[1; 64]).expect("it is written");
        let next = dir.name("next");
        let _second = start(&changed, &next);
        let memory = attach(name, &next, &AttachOptions::default()).expect("it is served");
        for (page, bytes) in (0..).zip(&expected) {
            check(&memory, page, bytes);
        }
        let other = if image == &packed { &raw } else { &packed };
        has_failed(&diff(other), 65, "image mismatch");
        drop(server);
    }
    let (socket, changed) = (dir.name("sock"), dir.name("changed"));
    let _server = start(&packed, &socket);
    let output = run(&["diff", "7", &packed, "-o", &changed, "--socket", &socket]);
    let message = text(&output.stderr);
    assert!(!output.status.success() && message.contains("there is no session 7"), "{message}");
}
