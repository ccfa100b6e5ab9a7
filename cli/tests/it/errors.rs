//! Errors name the thing that is wrong, as the user knows it, and the remedy.

use std::fs::{self, File};
use std::io::Read;
use std::process::Stdio;

use crate::common::{Dir, has_failed, object, refuses, run, text, uzone};

#[test]
fn each_error_names_what_is_wrong_and_what_helps() {
    let dir = Dir::new("errors");
    let (raw, image) = (dir.file("raw", vec![7; 200_000]), dir.name("image"));
    object(&["pack", &raw, &image, "--json"]);
    let packed = fs::read(&image).expect("an image");
    let cut = dir.file("cut", &packed[..packed.len() - 40]);
    let (none, out, socket) = (dir.name("none"), dir.name("out"), dir.name("socket"));
    let at = ["--socket", &socket];
    let binary = dir.file("binary", [0xff, 0xfe]);
    for (arguments, code, part) in [
        (&["inspect", &none][..], 66, format!("cannot open {none}: No such file")),
        (&["pack", &none, &out], 66, format!("cannot open {none}: No such file")),
        (&["pack", "--firecracker", &none, &out], 66, format!("cannot open {none}: ")),
        (&["verify", &cut], 65, format!("{cut} is a packed image that was cut: it does not end")),
        (&["verify", &raw], 65, "is not a packed image".to_owned()),
        (&[&["status"][..], &at].concat(), 66, format!("no server at {socket}: start one")),
        (&[&["drain"][..], &at].concat(), 66, format!("no server at {socket}: start one")),
        (&[&["diff", "1", "-o", &out][..], &at].concat(), 66, format!("no server at {socket}")),
        (
            &["diff", "one", "-o", &out],
            2,
            "a session is a number that `uzone status` shows".to_owned(),
        ),
        (&["serve", &image, "--mode", "rw"], 2, "a mode is octal digits, such as 660".to_owned()),
        (
            &["serve", &image, "--deadline", "500ms"],
            2,
            "a deadline is a number of seconds".to_owned(),
        ),
        (&["serve", &image, "--session-bytes=100"], 2, "at least 1 MiB".to_owned()),
        (&["serve", &image, "--session-faults=0"], 2, "zero".to_owned()),
        (
            &["inspect", "/dev/null"],
            2,
            "cannot open /dev/null: it is not a regular file".to_owned(),
        ),
        (&["inspect", "s3://bucket"], 2, "write the key behind the bucket".to_owned()),
        (&["pack", &raw, &out, "--order", &binary], 65, "line 1 of".to_owned()),
    ] {
        refuses(arguments, code, &part);
    }
}

#[test]
fn a_reader_of_data_that_goes_away_is_named() {
    let dir = Dir::new("errors-pipe");
    let (raw, image) = (dir.name("raw"), dir.name("image"));
    File::create(&raw).and_then(|file| file.set_len(64 << 20)).expect("a file");
    object(&["pack", &raw, &image, "--json"]);
    let mut unpack = uzone(&["unpack", &image, "-"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary under test runs");
    let mut first = [0; 10];
    let mut pipe = unpack.stdout.take().expect("a pipe");
    pipe.read_exact(&mut first).expect("bytes");
    drop(pipe);
    let output = unpack.wait_with_output().expect("it ends");
    has_failed(&output, 74, "cannot write standard output: Broken pipe");
}

#[test]
fn escapes_in_names_are_visible_in_errors_and_warnings() {
    for arguments in [
        &["inspect", "/none\x1b[31m\u{202e}"][..],
        &["pack", "/none\x1b]0;title\x07", "/none\r"],
        &["report", "/none\x1b[2J"],
        &["serve", "/none\x1b[31m", "--recover", "none", "--socket", "/none/\x1b[31m"],
    ] {
        let output = run(arguments);
        assert!(!output.status.success());
        let stderr = text(&output.stderr);
        let hidden = |char: char| (char.is_control() && char != '\n') || char == '\u{202e}';
        assert!(!stderr.contains(hidden), "{arguments:?}: {stderr:?}");
        assert!(stderr.contains("\\u{1b}"), "{arguments:?}: {stderr:?}");
    }
}

#[test]
fn more_threads_than_a_host_has_are_as_many_as_help() {
    let dir = Dir::new("errors-threads");
    let (raw, image) = (dir.name("raw"), dir.name("image"));
    // Threads that have nothing to do end at once, so their number shows while there is something to do.
    let mut pack = uzone(&["pack", "-", &image, "--threads", "100000"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .expect("the binary under test runs");
    let tasks = format!("/proc/{}/task", pack.id());
    let started = |threads: usize| fs::read_dir(&tasks).is_ok_and(|tasks| tasks.count() >= threads);
    crate::common::wait_until("threads of the packer", || started(3));
    std::thread::sleep(std::time::Duration::from_millis(300));
    let threads = fs::read_dir(&tasks).expect("it runs").count();
    drop(pack.stdin.take());
    assert!(pack.wait().expect("it ends").success());
    assert!(threads <= 80, "{threads} threads");
    drop(raw);
}
