//! `uzone demo`, on images that take a second: what it prints and writes, what it refuses before it
//! begins, and that nothing is left however it ends.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail by panicking, as tests do")]

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use crate::common::{
    Dir, UNPRIVILEGED, has_failed, interrupts_arrive, keeps_to, no_disk, object_of, skip,
    small_disk, text, uzone,
};
use rustix::process::{Pid, Signal, WaitOptions, geteuid, kill_process, waitpid};
use serde_json::Value;

fn demo(dir: &Dir, arguments: &[&str]) -> Command {
    let mut command = uzone(&[&["demo"], arguments].concat());
    // Images go there too, so that what is left would be seen.
    command.current_dir(dir.path()).env("TMPDIR", dir.path());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Returns whether this host has no userfaultfd, which the demo reports before it begins.
fn has_no_faults(name: &str, output: &Output) -> bool {
    let stderr = text(&output.stderr);
    let is_so = stderr.contains("vm.unprivileged_userfaultfd to 1 (sysctl)");
    if is_so {
        skip(name, stderr);
    }
    is_so
}

fn run(dir: &Dir, arguments: &[&str]) -> Output {
    demo(dir, arguments).output().expect("the binary under test runs")
}

/// Runs the demo in a shell that limits it before.
fn run_after(dir: &Dir, before: &str, arguments: &str) -> Output {
    let script = format!("{before} && exec \"$0\" demo {arguments}");
    let mut command = Command::new("sh");
    command.args(["-c", &script, env!("CARGO_BIN_EXE_uzone")]).env("NO_COLOR", "1");
    command.current_dir(dir.path()).env("TMPDIR", dir.path()).stdin(Stdio::null());
    command.output().expect("a shell runs")
}

fn said(child: &mut Child) -> String {
    let mut said = String::new();
    child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    said
}

/// Starts a demo that stops itself at a point, and waits for that. Returns nothing where it does not run.
fn stopped_at(point: &str, dir: &Dir) -> Option<Child> {
    let arguments = ["--size=64M", "--json", "--stop-at", point];
    let mut child = demo(dir, &arguments).spawn().unwrap();
    let pid = Pid::from_child(&child);
    let status = waitpid(Some(pid), WaitOptions::UNTRACED).unwrap();
    if status.is_some_and(|(_, status)| status.stopped()) {
        return Some(child);
    }
    skip(point, said(&mut child));
    None
}

/// Lets a demo go on, and waits for its end.
fn go_on(child: Child) -> Output {
    kill_process(Pid::from_child(&child), Signal::CONT).unwrap();
    child.wait_with_output().unwrap()
}

/// Opens the nameless file that a process has in a directory.
fn image_of(child: &Child, directory: &Path) -> File {
    let descriptors = fs::read_dir(format!("/proc/{}/fd", child.id())).unwrap();
    let is_image = |path: &PathBuf| {
        let link = fs::read_link(path).unwrap_or_default();
        link.starts_with(directory) && link.to_string_lossy().ends_with("(deleted)")
    };
    let image = descriptors.map(|entry| entry.unwrap().path()).find(is_image);
    File::options().read(true).write(true).open(image.expect("an image")).unwrap()
}

#[test]
fn every_byte_is_right_and_the_object_keeps_to_its_schema_and_the_files_can_be_read() {
    let name = "every_byte_is_right";
    let dir = Dir::new("demo-json");
    let output = run(&dir, &["--size=64M", "--json"]);
    if has_no_faults(name, &output) {
        return;
    }
    let object = object_of(&output);
    keeps_to("uzone.demo-1", &object);
    assert_eq!(object["is_intact"], true);
    let number = |path: &str| object.pointer(path).and_then(Value::as_u64).expect("a number");
    // Every page came once, by a wait or along with one that was waited for.
    let (pages, faults) = (number("/touch/pages"), number("/touch/faults"));
    assert_eq!(pages, (64 << 20) / 4096);
    assert!(faults + number("/touch/pages_around") >= pages && faults < pages / 2, "{object}");
    let rows = object["bench"]["results"].as_array().expect("an array");
    for table in ["demo-map", "demo-bind", "demo-zero", "demo-pin"] {
        let [_, ours, limit] = ["naive", "ours", "limit"].map(|row| {
            let id = format!("{table}/{row}");
            rows.iter()
                .find(|row| row["id"] == id.as_str())
                .unwrap_or_else(|| panic!("no row {id}"))
        });
        let took = |row: &Value| row["median_ns"].as_u64().expect("a time");
        // A limit that one round was faster than is no limit, and has no share.
        let has_limit = ours["share_of_limit"].is_f64() || took(ours) < took(limit);
        assert!(ours["ratio_naive"].is_f64() && has_limit, "{ours} {limit}");
    }
    assert!(rows.iter().all(|row| row["median_ns"].as_u64() > Some(0)), "{rows:?}");
    // One page for each fault is what makes the plain way plain.
    let of = |id: &str| {
        rows.iter().find(|row| row["id"] == id).expect("a row")["faults"]["count"].clone()
    };
    let [naive, ours] =
        ["demo-map/naive", "demo-map/ours"].map(|id| of(id).as_u64().expect("faults"));
    assert_eq!(naive, (16 << 20) / 4096);
    assert!(ours < naive / 2, "{ours} faults");
    assert_eq!(dir.names(), ["uzone-demo.html", "uzone-demo.trace.json"]);
    let page = fs::read_to_string(dir.path().join("uzone-demo.html")).unwrap();
    assert!(page.contains("found every byte right") && page.contains("Where faults were"));
    let trace = fs::read(dir.path().join("uzone-demo.trace.json")).unwrap();
    keeps_to("uzone.trace-1", &serde_json::from_slice(&trace).expect("JSON"));
    let result = dir.file("result.json", &output.stdout);
    for file in [dir.name("uzone-demo.trace.json"), result] {
        let shown = crate::common::run(&["report", &file]);
        assert!(shown.status.success() && !shown.stdout.is_empty(), "{}", text(&shown.stderr));
    }
}

#[test]
fn the_text_fits_a_screen_and_names_what_was_written() {
    let dir = Dir::new("demo-text");
    let output = run(&dir, &["--size=8M", "--quiet", "--output=."]);
    if has_no_faults("the_text_fits_a_screen", &output) {
        return;
    }
    let shown = text(&output.stdout);
    assert!(output.status.success() && output.stderr.is_empty(), "{}", text(&output.stderr));
    for part in ["plain way", "of the limit", "Every byte is as it should be", "./uzone-demo.html"]
    {
        assert!(shown.contains(part), "{part}: {shown}");
    }
    assert!(shown.lines().count() <= 40, "{shown}");
    assert!(shown.lines().all(|line| line.chars().count() <= 100), "{shown}");
}

/// Asserts that a demo without sizes ended well and said that it did less than by default.
fn adapted(output: &Output) {
    let stderr = text(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    assert!(stderr.contains("an image of "), "{stderr}");
    assert!(text(&output.stdout).contains("Every byte is as it should be"), "{output:?}");
}

#[test]
fn a_limit_of_addresses_makes_the_demo_smaller_and_not_fail() {
    let dir = Dir::new("demo-addresses");
    let output = run_after(&dir, "ulimit -v 4194304", "");
    if !has_no_faults("a_limit_of_addresses", &output) {
        adapted(&output);
    }
}

#[test]
fn a_control_group_of_512_mib_makes_the_demo_smaller_and_not_fail() {
    let name = "a_control_group_of_512_mib";
    // Where the second version of control groups is mounted, and where the first.
    let places =
        [("/sys/fs/cgroup", "memory.max"), ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")];
    let made = places.into_iter().find_map(|(place, limit)| {
        let group = Path::new(place).join(format!("uzone-demo-{}", std::process::id()));
        fs::create_dir(&group).ok()?;
        // A folder that is no control group does not have the file.
        let limited = File::options().write(true).open(group.join(limit));
        if limited.and_then(|mut file| file.write_all(b"536870912")).is_err() {
            let _ = fs::remove_dir(&group);
            return None;
        }
        Some(group)
    });
    let Some(group) = made else {
        return skip(name, "no control group with a memory controller can be made: run as root");
    };
    let dir = Dir::new("demo-group");
    let enter = format!("echo $$ > {}", group.join("cgroup.procs").display());
    let output = run_after(&dir, &enter, "");
    let _ = fs::remove_dir(&group);
    if !has_no_faults(name, &output) {
        adapted(&output);
    }
}

#[test]
fn a_byte_that_changed_is_found_and_makes_the_exit_code_1() {
    // Of the number that the second page starts with, which is looked at when it is touched.
    const CHANGED: u64 = 4096;
    let dir = Dir::new("demo-wrong");
    let Some(child) = stopped_at("made", &dir) else { return };
    let file = image_of(&child, dir.path());
    let mut byte = [0];
    file.read_exact_at(&mut byte, CHANGED).unwrap();
    file.write_all_at(&[!byte[0]], CHANGED).unwrap();
    let output = go_on(child);
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    let object: Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
    keeps_to("uzone.demo-1", &object);
    assert_eq!(object["is_intact"], false);
    assert_eq!(object["touch"]["first_difference_bytes"], 0, "a chunk");
}

#[test]
fn what_cannot_be_is_refused_before_anything_is_made() {
    let dir = Dir::new("demo-refused");
    let file = dir.file("file", "");
    for (arguments, code, part) in [
        (&["--size", "1000"][..], 2, "multiple of 8 MiB"),
        (&["--size", "0"], 2, "multiple of 8 MiB"),
        (&["--size=-1"], 2, "a size is a number of bytes"),
        (&["--size", "1X"], 2, "one of K, M, G"),
        (&["--size", "16E"], 2, "does not fit in 64 bits"),
        (&["--size", "1G", "--size", "2G"], 2, "cannot be used multiple times"),
        (&["--size", "64T"], 74, "ask for less with --size"),
        (&["--size", "64T", "--json"], 74, "65 TiB"),
        (&["--dir", "/none"], 66, "name another directory with --dir"),
        (&["--output", "/none"], 74, "make its directory first"),
        (&["--output", &file], 74, "make its directory first"),
        (&["--output", "/proc"], 74, "/proc"),
    ] {
        let output = run(&dir, arguments);
        if has_no_faults("what_cannot_be_is_refused", &output) {
            continue;
        }
        println!("{arguments:?}");
        has_failed(&output, code, part);
        if arguments.contains(&"--json") {
            keeps_to("uzone.error-1", &serde_json::from_slice(&output.stdout).expect("JSON"));
        } else {
            assert!(output.stdout.is_empty());
        }
    }
    // More than there is room for, in a directory that is memory, is too much of one or the other.
    let output = run(&dir, &["--size", "4T", "--dir", "/dev/shm"]);
    if !has_no_faults("what_cannot_be_is_refused", &output) {
        let stderr = text(&output.stderr);
        assert!(matches!(output.status.code(), Some(71 | 74)), "{stderr}");
        assert!(stderr.contains("ask for less with --size"), "{stderr}");
    }
    fs::create_dir(dir.path().join("uzone-demo.html")).unwrap();
    let output = run(&dir, &["--size", "8M"]);
    assert_eq!(output.status.code(), Some(2), "{}", text(&output.stderr));
    assert_eq!(dir.names(), ["file", "uzone-demo.html"]);
}

#[test]
fn too_little_memory_is_said_with_its_numbers() {
    let dir = Dir::new("demo-memory");
    let output = run_after(&dir, "ulimit -v 1000000", "--size 64M");
    if has_no_faults("too_little_memory", &output) {
        return;
    }
    ["limited by RLIMIT_AS", "GiB"].iter().for_each(|part| has_failed(&output, 71, part));
    has_failed(&run_after(&dir, "ulimit -f 1000", "--size 64M"), 74, "raise `ulimit -f`");
    assert!(dir.names().is_empty());
}

#[test]
fn a_disk_that_is_too_small_is_noticed_before_anything_is_made() {
    let name = "a_disk_that_is_too_small";
    let dir = Dir::new("demo-disk");
    let disk = dir.name("disk");
    if !small_disk(&disk, "size=8m") {
        return skip(name, "it needs to mount a tmpfs");
    }
    let small = run(&dir, &["--size=64M", "--dir", &disk]);
    let left = fs::read_dir(&disk).map(Iterator::count);
    no_disk(&disk);
    if has_no_faults(name, &small) {
        return;
    }
    has_failed(&small, 74, "8 MiB are free in");
    assert_eq!(left.unwrap(), 0);
    assert_eq!(dir.names(), ["disk"]);
}

#[test]
fn an_interrupt_at_any_moment_leaves_no_half() {
    if !interrupts_arrive("an_interrupt_at_any_moment") {
        return;
    }
    let dir = Dir::new("demo-interrupt");
    for point in ["made", "mapped"] {
        for signal in [Signal::INT, Signal::TERM, Signal::HUP, Signal::KILL] {
            let Some(child) = stopped_at(point, &dir) else { return };
            kill_process(Pid::from_child(&child), signal).unwrap();
            let output = go_on(child);
            assert_eq!(output.status.signal(), Some(signal.as_raw()), "{point}");
            assert!(dir.names().is_empty(), "{point}: {:?}", dir.names());
        }
    }
    // It is held back until both files are there.
    let Some(child) = stopped_at("half-written", &dir) else { return };
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    assert_eq!(go_on(child).status.signal(), Some(Signal::INT.as_raw()));
    assert_eq!(dir.names(), ["uzone-demo.html", "uzone-demo.trace.json"]);
}

#[test]
fn a_page_that_cannot_be_had_is_an_error_that_says_why() {
    let dir = Dir::new("demo-short");
    let Some(child) = stopped_at("mapped", &dir) else { return };
    image_of(&child, dir.path()).set_len(0).unwrap();
    let output = go_on(child);
    has_failed(&output, 71, "cannot read a page: the backing ends at 0x0");
    assert!(dir.names().is_empty());
}

#[test]
fn a_user_without_rights_runs_it_too_and_what_it_cannot_have_is_named() {
    let name = "a_user_without_rights_runs_it_too";
    let dir = Dir::new("demo-without-rights");
    let mut command = demo(&dir, &["--size=32M", "--json"]);
    if geteuid().is_root() {
        fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o777)).unwrap();
        command.uid(UNPRIVILEGED).gid(UNPRIVILEGED);
    }
    let output = match command.output() {
        Ok(output) => output,
        // That user may not search the directory of this program.
        Err(error) => {
            return skip(name, format_args!("that user cannot start this program: {error}"));
        }
    };
    if has_no_faults(name, &output) {
        return;
    }
    let object = object_of(&output);
    keeps_to("uzone.demo-1", &object);
    assert_eq!(object["is_intact"], true);
    assert!(object["sees_kernel_faults"].is_boolean());
    assert_eq!(dir.names(), ["uzone-demo.html", "uzone-demo.trace.json"]);
    // A directory without write permission is reported before the work.
    fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o555)).unwrap();
    let mut command = demo(&dir, &["--size=32M", "--dir=/tmp"]);
    if geteuid().is_root() {
        command.uid(UNPRIVILEGED).gid(UNPRIVILEGED);
    }
    let output = command.output().unwrap();
    has_failed(&output, 77, "may be written to");
    fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o755)).unwrap();
}
