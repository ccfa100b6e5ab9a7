//! `uzone offload`, with a process that plays Cloud Hypervisor by its published protocol.

mod common;

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::Output;
use std::thread;

use common::{Dir, has_failed, keeps_to, object_of, run};
use uzone_os::peer::{self, Peer};

const CONFIG: &str = r#"{"memory_manager_data":{"guest_ram_mappings":[
    {"slot":0,"gpa":0,"size":1048576,"file_offset":0}]}}"#;

fn offload(dir: &Dir, image: &str, more: &[&str]) -> Output {
    let arguments = ["offload", image, "--socket", &dir.name("sock"), "--state", &dir.name("")];
    run(&[&arguments[..], more].concat())
}

/// Takes a request with what follows it, and answers.
fn take(mut stream: &UnixStream, command: u8) {
    let mut header = [0; 16];
    stream.read_exact(&mut header).expect("a request");
    assert_eq!(header[0], command);
    let len = u64::from_le_bytes(header[8..].try_into().expect("8 bytes"));
    let mut rest = vec![0; usize::try_from(len).expect("it fits")];
    if command == 7 {
        let mut fds = Vec::new();
        assert_eq!(peer::receive(stream, &mut rest, &mut fds).expect("a slot"), 4);
        assert_eq!(fds.len(), 1);
    } else {
        stream.read_exact(&mut rest).expect("what follows");
    }
    answer(stream);
}

fn answer(mut stream: &UnixStream) {
    let mut ok = [0; 16];
    ok[0] = 1;
    stream.write_all(&ok).expect("it is taken");
}

/// Writes the image and the state of a machine. Returns where the image is.
fn machine(dir: &Dir) -> String {
    let image = dir.name("raw");
    fs::write(&image, vec![7; 1 << 20]).expect("a file is written");
    dir.file("migration_config.json", CONFIG);
    dir.file("state.json", "{}");
    image
}

/// Returns the connection for the state, by which the memory has come, and the one for faults.
fn connections(listener: &UnixListener) -> (UnixStream, UnixStream) {
    let (stream, _) = listener.accept().expect("a daemon");
    [1, 7, 2].into_iter().for_each(|command| take(&stream, command));
    let (mut faults, _) = listener.accept().expect("a daemon");
    faults.read_exact(&mut [0; 2]).expect("a role");
    (stream, faults)
}

/// Asks for a page, and takes the answer.
fn fault(mut faults: &UnixStream) {
    let mut request = [0; 32];
    (request[0], request[8], request[25]) = (9, 16, 16);
    faults.write_all(&request).expect("it is taken");
    faults.read_exact(&mut [0; 16]).expect("an answer");
}

#[test]
fn a_machine_is_restored_by_its_faults_and_what_was_done_is_an_object() {
    let dir = Dir::new("offload");
    let image = machine(&dir);
    let listener = UnixListener::bind(dir.name("sock")).expect("it listens");
    let other = thread::spawn(move || {
        let (stream, faults) = connections(&listener);
        [3, 5].into_iter().for_each(|command| take(&stream, command));
        fault(&faults);
    });
    let output = offload(&dir, &image, &["--resume", "--json"]);
    let object = object_of(&output);
    other.join().expect("its own assertions");
    keeps_to("uzone.offload-1", &object);
    assert_eq!((&object["faults"], &object["asked_bytes"]), (&1.into(), &4096.into()));
}

#[test]
fn what_keeps_a_machine_from_being_restored_is_named_with_its_exit_code() {
    let dir = Dir::new("offload-not");
    let (image, short) = (dir.name("raw"), dir.name("short"));
    fs::write(&image, vec![7; 1 << 20]).expect("a file is written");
    fs::write(&short, vec![7; 4096]).expect("a file is written");
    let fails = |image: &str, code: i32, part: &str| {
        has_failed(&offload(&dir, image, &[]), code, part);
    };
    fails(&image, 66, "migration_config.json");
    dir.file("migration_config.json", "{}");
    dir.file("state.json", "{}");
    fails(&image, 65, "the configuration of the machine cannot be used");
    dir.file("migration_config.json", CONFIG);
    fails(&short, 65, "it is of another machine");
    fails(&image, 66, "have Cloud Hypervisor receive there");
}

#[test]
fn each_thread_that_answers_faults_is_confined_unless_that_is_turned_off() {
    let dir = Dir::new("offload-sandbox");
    let image = machine(&dir);
    for arguments in [&["--resume"][..], &["--resume", "--no-sandbox"]] {
        let listener = UnixListener::bind(dir.name("sock")).expect("it listens");
        let other = thread::spawn(move || {
            let (stream, faults) = connections(&listener);
            fault(&faults);
            // The thread that sends the state waits for its answer.
            let pid = Peer::of(&stream).expect("the daemon").pid();
            let tasks = fs::read_dir(format!("/proc/{pid}/task")).expect("it runs");
            let states = tasks.map(|task| {
                let path = task.expect("a thread").path().join("status");
                fs::read_to_string(path).expect("it is read")
            });
            let states: Vec<_> = states.collect();
            [3, 5].into_iter().for_each(|command| take(&stream, command));
            states
        });
        let output = offload(&dir, &image, arguments);
        assert!(output.status.success(), "{output:?}");
        let states = other.join().expect("its own assertions");
        let is_off = arguments.contains(&"--no-sandbox");
        let message = String::from_utf8_lossy(&output.stderr);
        // In a sandbox, one that starts the others as well.
        assert!(states.len() >= if is_off { 2 } else { 3 }, "{states:?}");
        for state in &states {
            assert_eq!(state.contains("NoNewPrivs:\t1\n"), !is_off, "{state}");
            assert!(is_off || state.contains("CapEff:\t0000000000000000\n"), "{state}");
            let is_filtered = !is_off && !message.contains("seccomp: ");
            assert_eq!(state.contains("Seccomp:\t2\n"), is_filtered, "{state}: {message}");
        }
        fs::remove_file(dir.name("sock")).expect("it is there");
    }
}
