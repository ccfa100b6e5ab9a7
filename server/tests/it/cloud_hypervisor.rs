//! VMs of Cloud Hypervisor are restored by faults. The other side does the same as its process: it takes the VM and its
//! memory files, and asks for pages, some of them before it has taken
//! the state.

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::{io, thread};

use rustix::fs::FallocateFlags;
use uzone_os::uffd::{Features, KernelFaults, Uffd};
use uzone_server::{Offload, Offloaded, ServeError, ServerOptions, Worker};
use uzone_snapshot::{Image, OpenOptions};

use crate::common::needs::skip;
use crate::common::{Folder, damage, outcome_of, page_of, report, to_try, was_ended};
use crate::receiver::{ERROR, Machine, OK};

const PAGE: u64 = 4096;
const PAGES: u64 = 256;
/// The guest addresses of two slots; the second starts in its file behind a page of another.
const LOW: (u32, u64, u64, u64) = (0, 0, 192 * PAGE, 0);
const HIGH: (u32, u64, u64, u64) = (1, 4 << 30, 64 * PAGE, PAGE);
const STATE: &[u8] = b"the state";

fn config() -> Vec<u8> {
    let slot = |(slot, gpa, size, offset)| {
        format!(r#"{{"slot":{slot},"gpa":{gpa},"size":{size},"file_offset":{offset}}}"#)
    };
    let slots = format!("{},{}", slot(HIGH), slot(LOW));
    format!(r#"{{"vm_config":{{}},"memory_manager_data":{{"guest_ram_mappings":[{slots}]}}}}"#)
        .into_bytes()
}

fn packed(folder: &Path) -> Offload {
    let image = Image::open(folder.join("packed"), &OpenOptions::default()).unwrap();
    Offload::new(image, config(), STATE.to_vec()).unwrap()
}

impl Machine {
    /// Returns the file of a page of the image, where it is there, and its guest address.
    fn place(&self, index: u64) -> (&File, u64, u64) {
        match index.checked_sub(LOW.2 / PAGE) {
            None => (&self.files[0], index * PAGE, index * PAGE),
            Some(index) => (&self.files[1], HIGH.3 + index * PAGE, HIGH.1 + index * PAGE),
        }
    }

    fn seen(&self, index: u64) -> Vec<u8> {
        let (file, at, _) = self.place(index);
        let mut page = vec![1; 4096];
        file.read_exact_at(&mut page, at).unwrap();
        page
    }

    /// Has a page, as a guest that touches it has.
    fn touch(&mut self, index: u64) -> Vec<u8> {
        let address = self.place(index).2;
        assert_eq!(self.ask(address, PAGE), OK);
        self.seen(index)
    }
}

/// Restores a VM, which does something.
fn restored(
    offload: &Offload,
    socket: &Path,
    resumes: bool,
    machine: impl FnOnce(Machine) + Send,
) -> Result<Offloaded, ServeError> {
    let listener = UnixListener::bind(socket).unwrap();
    let restored = thread::scope(|scope| {
        let other =
            scope.spawn(|| machine(Machine::receive(&listener, &[LOW.0, HIGH.0], &config())));
        let restored = offload.restore(socket, resumes);
        other.join().unwrap();
        restored
    });
    fs::remove_file(socket).unwrap();
    restored
}

#[test]
fn each_page_has_the_bytes_of_the_image_when_it_was_asked_for() {
    let folder = Folder::new("offload-bytes", PAGES);
    let socket = folder.join("sock");
    let raw = Image::open_or_raw(folder.join("raw"), &OpenOptions::default()).unwrap();
    let raw = Offload::new(raw, config(), STATE.to_vec()).unwrap();
    for (offload, resumes) in [(&packed(&folder), true), (&raw, false)] {
        let done = restored(offload, &socket, resumes, |mut machine| {
            // Like the other side while it takes the state.
            assert!(machine.touch(7) == page_of(7));
            assert_eq!(machine.complete(STATE), if resumes { 5 } else { 8 });
            for step in 0..PAGES {
                let index = (step * 37 + 11) % PAGES;
                assert!(machine.touch(index) == page_of(index), "page {index}");
            }
            assert_eq!(machine.ask(LOW.1, LOW.2), OK, "as many as there are");
        });
        let done = done.unwrap();
        assert_eq!(done.faults, PAGES + 2);
        assert!(done.asked_bytes + done.around_bytes <= PAGES * PAGE, "written once: {done:?}");
    }
}

#[test]
fn two_clones_that_write_the_same_page_do_not_see_each_other() {
    let folder = Folder::new("offload-clones", PAGES);
    let offload = packed(&folder);
    let written = |number: u8| vec![number; 4096];
    thread::scope(|scope| {
        for number in [1, 2] {
            let (offload, folder) = (&offload, &folder);
            scope.spawn(move || {
                let socket = folder.join(format!("sock-{number}"));
                let clone = |mut machine: Machine| {
                    machine.complete(STATE);
                    assert!(machine.touch(9) == page_of(9), "another's page");
                    machine.files[0].write_all_at(&written(number), 9 * PAGE).unwrap();
                    for index in 0..PAGES {
                        let seen = machine.touch(index);
                        let expected = if index == 9 { written(number) } else { page_of(index) };
                        assert!(seen == expected, "page {index} of clone {number}");
                    }
                };
                restored(offload, &socket, true, clone).unwrap();
            });
        }
    });
}

#[test]
fn what_a_machine_wrote_stays_and_what_it_gave_back_is_zero() {
    let folder = Folder::new("offload-once", PAGES);
    let done = restored(&packed(&folder), &folder.join("sock"), true, |mut machine| {
        machine.complete(STATE);
        assert!(machine.touch(20) == page_of(20));
        machine.files[0].write_all_at(&[7; 4096], 20 * PAGE).unwrap();
        assert!(machine.touch(20) == [7; 4096], "it was written over");
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(&machine.files[0], hole, 20 * PAGE, PAGE).unwrap();
        // Its neighbours do not bring it back.
        assert!(machine.touch(21) == page_of(21));
        assert!(machine.touch(20) == [0; 4096], "it has old bytes");
        assert!(machine.touch(22) == page_of(22));
    });
    assert_eq!(done.unwrap().faults, 5);
}

#[test]
fn a_request_brings_the_pages_around_it_that_are_not_zero() {
    let folder = Folder::new("offload-around", PAGES);
    let done = restored(&packed(&folder), &folder.join("sock"), true, |mut machine| {
        machine.complete(STATE);
        assert!(machine.touch(20) == page_of(20));
        for index in 16..32 {
            assert!(machine.seen(index) == page_of(index), "page {index}");
        }
        for index in [15, 32] {
            assert!(machine.seen(index) == [0; 4096], "page {index} is behind the block");
        }
    });
    let done = done.unwrap();
    let others = (16..32).filter(|index| *index != 20 && page_of(*index) != [0; 4096]).count();
    assert_eq!((done.faults, done.asked_bytes), (1, PAGE));
    assert_eq!(done.around_bytes, others as u64 * PAGE);
}

#[test]
fn a_page_that_cannot_be_produced_is_answered_by_an_error_and_is_not_there() {
    let folder = Folder::new("offload-damaged", PAGES);
    let offload = packed(&folder);
    damage(&folder.join("packed"));
    let result = restored(&offload, &folder.join("sock"), true, |mut machine| {
        machine.complete(STATE);
        let failed = (0..PAGES).find(|index| {
            let address = machine.place(*index).2;
            let failed = machine.ask(address, PAGE) == ERROR;
            let expected = if failed { vec![0; 4096] } else { page_of(*index) };
            assert!(machine.seen(*index) == expected, "page {index}");
            failed
        });
        assert!(failed.is_some(), "the damage is in a page");
    });
    let error = result.unwrap_err();
    assert!(matches!(error, ServeError::Page { .. }), "{error}");
}

#[test]
fn what_is_no_request_is_answered_by_an_error_and_a_refusal_is_named() {
    let folder = Folder::new("offload-rubbish", PAGES);
    let (socket, offload) = (folder.join("sock"), packed(&folder));
    for (address, len) in [
        (LOW.2, PAGE),
        (LOW.2 - PAGE, 2 * PAGE),
        (1, PAGE),
        (0, 0),
        (0, 1 << 40),
        (!0xfff, PAGE),
        (HIGH.1 - PAGE, 2 * PAGE),
    ] {
        let result = restored(&offload, &socket, true, |mut machine| {
            machine.complete(STATE);
            assert_eq!(machine.ask(address, len), ERROR, "{len} bytes at {address:#x}");
        });
        assert!(matches!(result, Err(ServeError::Broken { .. })), "{result:?}");
    }
    let refused = restored(&offload, &socket, true, |mut machine| {
        let (code, len) = Machine::header(&mut machine.stream);
        let mut state = vec![0; usize::try_from(len).unwrap()];
        machine.stream.read_exact(&mut state).unwrap();
        assert_eq!(code, 3);
        Machine::answer(&mut machine.stream, ERROR);
    });
    assert!(matches!(refused, Err(ServeError::Refused { what: "its state" })), "{refused:?}");
    let nowhere = offload.restore(&folder.join("nowhere"), true);
    assert!(matches!(nowhere, Err(ServeError::Connect { .. })), "{nowhere:?}");
    fs::write(folder.join("short"), page_of(1)).unwrap();
    let short = Image::open_or_raw(folder.join("short"), &OpenOptions::default()).unwrap();
    let short = Offload::new(short, config(), Vec::new());
    assert!(matches!(short, Err(ServeError::OtherMachine { .. })), "{short:?}");
}

const REFUSED: [&str; 6] = [
    "to read a secret beside the image",
    "to read the memory of its parent",
    "to list a folder",
    "to write to the image",
    "to make a file beside the image",
    "to remove the socket",
];
/// These end the process.
const ENDED: [&str; 4] =
    ["to connect again", "to have another root", "to be another user", "to have a userfaultfd"];

fn attempt(what: &str, folder: &Path) -> io::Result<()> {
    match what {
        "to read a secret beside the image" => fs::read(folder.join("raw")).map(drop),
        "to remove the socket" => fs::remove_file(folder.join("sock")),
        "to connect again" => UnixStream::connect(folder.join("sock")).map(drop),
        "to have a userfaultfd" => {
            let (none, faults) = (Features::NONE, KernelFaults::Required);
            Uffd::open(none, none, faults).map(drop).map_err(io::Error::other)
        }
        what => crate::common::attempt(what, folder),
    }
}

/// No test, but the process that others start.
#[test]
fn a_process_that_restores_a_machine_and_tries_to_break_out() {
    let Some((what, folder)) = to_try() else { return };
    if what == "to be confined" {
        let worker = Worker::open(&folder.join("packed"), ServerOptions::default(), None).unwrap();
        return println!("outcome: not in force: {}", worker.sandbox().missing.join("; "));
    }
    let offload = packed(&folder).sandbox(true);
    assert_eq!(offload.restore(&folder.join("sock"), true).unwrap().faults, 1);
    report(attempt(&what, &folder));
}

#[test]
fn a_process_that_restores_a_machine_reads_its_image_and_does_nothing_else() {
    let folder = Folder::new("offload-break-out", PAGES);
    let listener = UnixListener::bind(folder.join("sock")).unwrap();
    let test = "cloud_hypervisor::a_process_that_restores_a_machine_and_tries_to_break_out";
    let run = |what: &str| outcome_of(test, what, &folder);
    let outcome = |what: &str| {
        thread::scope(|scope| {
            let process = scope.spawn(|| run(what));
            let mut machine = Machine::receive(&listener, &[LOW.0, HIGH.0], &config());
            machine.complete(STATE);
            assert!(machine.touch(7) == page_of(7));
            drop(machine);
            process.join().unwrap()
        })
    };
    let (missing, output) = run("to be confined");
    if missing.as_deref() != Some("not in force: ") {
        let name = "a_process_that_restores_a_machine_reads_its_image_and_does_nothing_else";
        return skip(name, &format!("{missing:?}: {output:?}"));
    }
    let (line, output) = outcome("to read the image");
    assert_eq!(line.as_deref(), Some("done"), "{output:?}");
    for what in REFUSED {
        let (line, output) = outcome(what);
        assert_eq!(line.as_deref(), Some("refused"), "{what}: {output:?}");
    }
    ENDED.into_iter().for_each(|what| was_ended(what, outcome(what)));
    // The C library holds signals back while it starts a program, so this one ends without a line.
    let (line, output) = outcome("to start a shell");
    assert_eq!((line, output.status.signal()), (None, Some(31)), "{output:?}");
    assert!(folder.join("sock").exists() && !folder.join("new").exists());
}
