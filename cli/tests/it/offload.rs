//! `uzone offload`, with a process that plays Cloud Hypervisor by its published protocol.

use std::fs;
use std::os::unix::net::UnixListener;
use std::process::Output;
use std::thread;

use crate::common::{Dir, has_failed, keeps_to, object_of, run};
use crate::receiver::{Machine, OK};
use uzone_os::peer::Peer;

const CONFIG: &str = r#"{"memory_manager_data":{"guest_ram_mappings":[
    {"slot":0,"gpa":0,"size":1048576,"file_offset":0}]}}"#;

fn offload(dir: &Dir, image: &str, more: &[&str]) -> Output {
    let arguments = ["offload", image, "--socket", &dir.name("sock"), "--state", &dir.name("")];
    run(&[&arguments[..], more].concat())
}

/// Writes the image and the state of a machine. Returns where the image is.
fn machine(dir: &Dir) -> String {
    dir.file("migration_config.json", CONFIG);
    dir.file("state.json", "{}");
    dir.file("raw", vec![7; 1 << 20])
}

#[test]
fn a_machine_is_restored_by_its_faults_and_what_was_done_is_an_object() {
    let dir = Dir::new("offload");
    let image = machine(&dir);
    let listener = UnixListener::bind(dir.name("sock")).expect("it listens");
    let other = thread::spawn(move || {
        let mut machine = Machine::receive(&listener, &[0], CONFIG.as_bytes());
        assert_eq!(machine.complete(b"{}"), 5);
        assert_eq!(machine.ask(0, 4096), OK);
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
    let (image, short) = (dir.file("raw", vec![7; 1 << 20]), dir.file("short", vec![7; 4096]));
    let fails = |image: &str, code: i32, part: &str| {
        has_failed(&offload(&dir, image, &[]), code, part);
    };
    fails(&image, 66, "migration_config.json");
    dir.file("migration_config.json", "{}");
    dir.file("state.json", "{}");
    fails(&image, 65, "cannot use the configuration of the VM");
    dir.file("migration_config.json", CONFIG);
    fails(&short, 65, "the image of another VM");
    fails(&image, 66, "have Cloud Hypervisor receive there");
}

#[test]
fn each_thread_that_answers_faults_is_confined_unless_that_is_turned_off() {
    let dir = Dir::new("offload-sandbox");
    let image = machine(&dir);
    for arguments in [&["--resume"][..], &["--resume", "--no-sandbox"]] {
        let listener = UnixListener::bind(dir.name("sock")).expect("it listens");
        let other = thread::spawn(move || {
            let mut machine = Machine::receive(&listener, &[0], CONFIG.as_bytes());
            assert_eq!(machine.ask(0, 4096), OK);
            // The thread that sends the state waits for its answer.
            let pid = Peer::of(&machine.stream).expect("the daemon").pid();
            let tasks = fs::read_dir(format!("/proc/{pid}/task")).expect("it runs");
            let states = tasks.map(|task| {
                let path = task.expect("a thread").path().join("status");
                fs::read_to_string(path).expect("it is read")
            });
            let states: Vec<_> = states.collect();
            assert_eq!(machine.complete(b"{}"), 5);
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
