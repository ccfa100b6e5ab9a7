//! `uzone diff` of machines that go on: the image is what their memory was when they were paused, whatever they
//! write and give back meanwhile, or there is none.

use std::fs;
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use crate::common::served::{Machine, PAGE, PAGES, Server, page_of};
use crate::common::{Dir, object, run, text, uzone, wait_until};
use rustix::process::Signal;
use uzone_snapshot::Packer;

/// How often a command is started that ends before it is stopped.
const ROUNDS: u64 = 40;

/// A server of an image, and a machine that has touched all of it and changed a part.
struct Served {
    server: Server,
    machine: Machine,
    socket: String,
    changed: String,
    expected: Vec<u8>,
}

fn serve(dir: &Dir, options: &[&str]) -> Option<Served> {
    let (image, socket) = (dir.name("image"), dir.name("sock"));
    let mut expected: Vec<u8> = (0..PAGES).flat_map(page_of).collect();
    Packer::default()
        .pack(&mut &expected[..], image.as_ref(), None, &|_| true)
        .expect("it is packed");
    let arguments = ["--on-failure", "poison", &image, "--socket", &socket];
    let server = Server::start(&[&arguments[..], options].concat());
    let machine = Machine::connect(&socket)?;
    for page in 0..PAGES {
        let mapping = machine.memory.mapping();
        mapping.read_at(page * PAGE, &mut [0; 8]).expect("it is served");
        if page % 3 == 0 {
            mapping.write_at(page * PAGE, &[7; 100]).expect("it is written");
            let at = usize::try_from(page * PAGE).expect("small");
            expected[at..at + 100].copy_from_slice(&[7; 100]);
        }
    }
    Some(Served { server, machine, socket, changed: dir.name("changed"), expected })
}

/// Starts the command, and waits until the machine may go on.
fn start(socket: &str, changed: &str) -> Server {
    let mut command = uzone(&["diff", "1", "-o", changed, "--json", "--socket", socket]);
    let mut diff = Server::printing("uzone.diff-1", command.stderr(Stdio::piped()));
    let protected = diff.next_event("protected");
    assert!(protected["present_bytes"].as_u64().is_some_and(|bytes| bytes <= PAGES * PAGE));
    diff
}

/// Stops the command, does something, and has it fail then. It may have read all before it was stopped: then it
/// ends well, and is started again.
fn fails_while_stopped(socket: &str, changed: &str, mut meanwhile: impl FnMut()) {
    for _ in 0..ROUNDS {
        let mut diff = start(socket, changed);
        diff.signal(Signal::STOP);
        meanwhile();
        diff.signal(Signal::CONT);
        let (code, message) = diff.end();
        if code == Some(0) {
            fs::remove_file(changed).expect("it was written");
            continue;
        }
        assert_eq!(code, Some(75), "{message}");
        assert!(message.contains("nothing was written"), "{message}");
        assert!(!fs::exists(changed).expect("a folder"));
        return;
    }
    panic!("the command was never stopped before it had read all");
}

fn check_image(changed: &str, expected: &[u8]) {
    let output = run(&["unpack", changed, "-"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let mut pages = output.stdout.chunks(4096).zip(expected.chunks(4096)).enumerate();
    let wrong = pages.find(|(_, (seen, expected))| seen != expected);
    let wrong = wrong.map(|(page, _)| page);
    assert_eq!((wrong, output.stdout.len()), (None, expected.len()));
}

/// Returns a page that does not compress.
fn noise(seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_ne_bytes()
    };
    (0..512).flat_map(|_| next()).collect()
}

#[test]
fn a_diff_is_as_long_as_the_pages_that_changed_and_has_usual_frames_where_they_are_neighbours() {
    let dir = Dir::new("diff-frames");
    let (image, socket, changed) = (dir.name("image"), dir.name("sock"), dir.name("changed"));
    let mut expected: Vec<u8> = (0..PAGES).flat_map(noise).collect();
    let packer = Packer::default();
    packer.pack(&mut &expected[..], image.as_ref(), None, &|_| true).expect("it is packed");
    let arguments = ["--on-failure", "poison", &image, "--socket", &socket];
    let server = Server::start(&arguments);
    let Some(machine) = Machine::connect(&socket) else { return drop(server.stop()) };
    let mut write = |page: u64| {
        let at = usize::try_from(page * PAGE).expect("small");
        let bytes = noise(page + PAGES);
        machine.memory.mapping().write_at(page * PAGE, &bytes).expect("it is written");
        expected[at..at + 4096].copy_from_slice(&bytes);
    };
    // One page of each frame.
    (0..PAGES).step_by(16).for_each(|page| write(page + page / 16 % 16));
    start(&socket, &changed).next_event("packed");
    let len = fs::metadata(&changed).expect("it was written").len();
    assert!(len <= PAGES / 16 * PAGE * 11 / 10, "{len} bytes for {} pages", PAGES / 16);
    // All pages.
    (0..PAGES).for_each(&mut write);
    start(&socket, &changed).next_event("packed");
    check_image(&changed, &expected);
    let inspected = object(&["inspect", &changed, "--json"]);
    assert_eq!(inspected["chain"][0]["frame_bytes"], 65536, "{inspected}");
}

#[test]
fn an_image_is_of_the_moment_when_the_machine_was_paused_while_that_writes_to_all_pages() {
    let dir = Dir::new("diff-writes");
    let Some(served) = serve(&dir, &[]) else { return };
    let Served { server: _server, machine, socket, changed, mut expected } = served;
    let mapping = machine.memory.mapping();
    // The command may have read all before it was stopped.
    let is_kept = (0..ROUNDS).any(|round: u64| {
        let mut diff = start(&socket, &changed);
        diff.signal(Signal::STOP);
        for page in (0..PAGES).rev() {
            mapping
                .write_at(page * PAGE + 50, &(page + round).to_ne_bytes())
                .expect("it is written");
        }
        diff.signal(Signal::CONT);
        let kept = diff.next_event("packed")["kept_pages"].as_u64().expect("a number");
        assert!(diff.wait().success() && kept <= PAGES, "{kept}");
        check_image(&changed, &expected);
        for page in 0..PAGES {
            let at = usize::try_from(page * PAGE).expect("small") + 50;
            expected[at..at + 8].copy_from_slice(&(page + round).to_ne_bytes());
        }
        kept > 0
    });
    assert!(is_kept, "no page was written to before it was read");
    // What the machine wrote is there, and in the next image.
    for page in 0..PAGES {
        let at = usize::try_from(page * PAGE).expect("small");
        machine.check(page, &expected[at..at + 4096]);
    }
    start(&socket, &changed).next_event("packed");
    check_image(&changed, &expected);
}

#[test]
fn memory_that_is_given_back_while_it_is_read_is_in_the_image_as_it_was() {
    let dir = Dir::new("diff-balloon");
    let Some(served) = serve(&dir, &[]) else { return };
    let mut diff = start(&served.socket, &served.changed);
    let mapping = served.machine.memory.mapping();
    thread::scope(|scope| {
        scope.spawn(|| mapping.discard(PAGES / 2 * PAGE..PAGES * PAGE).expect("it is given back"));
        for page in (0..PAGES / 2).rev() {
            mapping.write_at(page * PAGE + 50, &[1; 8]).expect("it is written");
        }
    });
    diff.next_event("packed");
    assert!(diff.wait().success());
    check_image(&served.changed, &served.expected);
    for page in PAGES / 2..PAGES {
        let mut seen = [1; 8];
        mapping.read_at(page * PAGE, &mut seen).expect("it is zero");
        assert_eq!(seen, [0; 8], "page {page}");
    }
}

#[test]
fn without_the_worker_that_keeps_pages_there_is_no_image_and_the_machine_goes_on() {
    let dir = Dir::new("diff-killed");
    let Some(served) = serve(&dir, &[]) else { return };
    let Served { mut server, machine, socket, changed, mut expected } = served;
    let mapping = machine.memory.mapping();
    fails_while_stopped(&socket, &changed, || {
        server.kill_workers();
        server.event("worker_ended");
        server.event("taken_over");
        // What is protected still is let go by the next worker.
        for page in 0..PAGES {
            mapping.write_at(page * PAGE, &[5; 8]).expect("it is written");
        }
    });
    // The next worker keeps pages as well.
    mapping.read_at(0, &mut expected).expect("it is read");
    start(&socket, &changed).next_event("packed");
    check_image(&changed, &expected);
}

#[test]
fn a_machine_that_gives_memory_back_does_not_wait_for_ever_for_a_command_that_is_stopped() {
    let dir = Dir::new("diff-stopped");
    let Some(served) = serve(&dir, &["--deadline", "1"]) else { return };
    let mapping = served.machine.memory.mapping();
    fails_while_stopped(&served.socket, &served.changed, || {
        let is_back = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                let discarded = mapping.discard(0..10 * PAGE);
                is_back.store(discarded.is_ok(), Ordering::Release);
            });
            wait_until("memory that was given back", || is_back.load(Ordering::Acquire));
        });
    });
    served.machine.memory.mapping().write_at(20 * PAGE, &[5; 8]).expect("it is written");
}

#[test]
fn one_command_at_a_time_keeps_the_pages_of_a_machine() {
    let dir = Dir::new("diff-two");
    let Some(served) = serve(&dir, &[]) else { return };
    let first = start(&served.socket, &served.changed);
    first.signal(Signal::STOP);
    let output = run(&["diff", "1", "-o", &served.changed, "--json", "--socket", &served.socket]);
    let message = text(&output.stderr);
    // It states so, and copies.
    assert!(output.status.success() && message.contains("being captured already"), "{message}");
    let line = text(&output.stdout);
    assert!(line.starts_with("{") && line.contains("\"event\":\"copied\""), "{line}");
    check_image(&served.changed, &served.expected);
    first.signal(Signal::CONT);
    drop(first);
}
