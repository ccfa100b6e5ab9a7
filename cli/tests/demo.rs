//! `uzone demo`, on images that take a second: what it prints and writes, what it refuses before it
//! begins, and that nothing is left however it ends.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail by panicking, as tests do")]

mod common;

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use common::{
    Dir, UNPRIVILEGED, has_failed, keeps_to, no_disk, object_of, skip, small_disk, text, uzone,
};
use rustix::process::{Pid, Signal, geteuid, kill_process};
use serde_json::Value;

/// How long anything may take before it counts as hanging.
const PATIENCE: Duration = Duration::from_secs(120);

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

/// Waits for a process to end by itself.
fn end(child: &mut Child) -> ExitStatus {
    let until = Instant::now() + PATIENCE;
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status;
        }
        if Instant::now() > until {
            let _ = child.kill();
            let _ = child.wait();
            panic!("the demo hangs");
        }
        sleep(Duration::from_millis(2));
    }
}

fn said(child: &mut Child) -> String {
    let mut said = String::new();
    child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    said
}

/// Waits until the demo maps its image lazily, or has ended. Returns whether it does.
fn maps_lazily(child: &mut Child, directory: &Path) -> bool {
    while child.try_wait().unwrap().is_none() {
        // The demo opens a userfaultfd before there is an image too, to see whether it may.
        if image_of(child.id(), directory).is_some() && has_userfaultfd(child.id()) {
            return true;
        }
        sleep(Duration::from_micros(200));
    }
    false
}

fn has_userfaultfd(pid: u32) -> bool {
    let descriptors = fs::read_dir(format!("/proc/{pid}/fd"));
    descriptors.into_iter().flatten().filter_map(Result::ok).any(|entry| {
        fs::read_link(entry.path()).is_ok_and(|link| link.ends_with("anon_inode:[userfaultfd]"))
    })
}

/// Returns the nameless file that a process has in a directory, once it has one.
fn image_of(pid: u32, directory: &Path) -> Option<PathBuf> {
    let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).ok()?;
    descriptors.filter_map(Result::ok).map(|entry| entry.path()).find(|path| {
        let link = fs::read_link(path).unwrap_or_default();
        link.starts_with(directory) && link.to_string_lossy().ends_with("(deleted)")
    })
}

#[test]
fn every_byte_is_right_and_the_object_keeps_to_its_schema_and_the_files_can_be_read() {
    let name = "every_byte_is_right";
    let dir = Dir::new("demo-json");
    let output = run(&dir, &["--size=64M", "--reserve=1G", "--json"]);
    if has_no_faults(name, &output) {
        return;
    }
    let object = object_of(&output);
    keeps_to("uzone.demo-1", &object);
    assert_eq!((&object["is_intact"], &object["is_clear"]), (&true.into(), &true.into()));
    assert_eq!(object["image"]["hash"], object["touch"]["hash"]);
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
    let mut steps: Vec<_> = object["steps"].as_array().expect("an array").iter().collect();
    steps.retain(|step| step["name"] == "refuse");
    assert_eq!(steps.len(), 1, "memory that is pinned is not given back");

    assert_eq!(dir.names(), ["uzone-demo.html", "uzone-demo.trace.json"]);
    let page = fs::read_to_string(dir.path().join("uzone-demo.html")).unwrap();
    assert!(page.contains("found every byte right") && page.contains("Where faults were"));
    let trace = fs::read(dir.path().join("uzone-demo.trace.json")).unwrap();
    keeps_to("uzone.trace-1", &serde_json::from_slice(&trace).expect("JSON"));
    let result = dir.file("result.json", &output.stdout);
    for file in [dir.name("uzone-demo.trace.json"), result] {
        let shown = common::run(&["report", &file]);
        assert!(shown.status.success() && !shown.stdout.is_empty(), "{}", text(&shown.stderr));
    }
}

#[test]
fn the_text_fits_a_screen_and_names_what_was_written() {
    let dir = Dir::new("demo-text");
    let output = run(&dir, &["--size=8M", "--reserve=1G", "--quiet", "--output=."]);
    if has_no_faults("the_text_fits_a_screen", &output) {
        return;
    }
    let shown = text(&output.stdout);
    assert!(output.status.success() && output.stderr.is_empty(), "{}", text(&output.stderr));
    for part in ["plain way", "of the limit", "Every byte is as it should be", "./uzone-demo.html"]
    {
        assert!(shown.contains(part), "{part}: {shown}");
    }
    // The page shows the same ratios.
    let page = fs::read_to_string(dir.path().join("uzone-demo.html")).unwrap();
    let rows = shown.lines().filter(|line| line.contains(" x ") && !line.contains("how fast"));
    let ratios: Vec<&str> =
        rows.filter_map(|line| line.split(" x ").next()?.split_whitespace().last()).collect();
    assert!(ratios.len() >= 4, "{shown}");
    for ratio in ratios {
        assert!(page.contains(&format!("{ratio} x")), "{ratio}: {shown}");
    }
    assert!(shown.lines().count() <= 40, "{shown}");
    assert!(shown.lines().all(|line| line.chars().count() <= 100), "{shown}");
}

/// Asserts that a demo without sizes ended well and said that it did less than by default.
fn adapted(output: &Output) {
    let stderr = text(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    assert!(stderr.contains("smaller than by default, because"), "{stderr}");
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
    let mut child = demo(&dir, &["--size=256M", "--reserve=1G", "--json"]).spawn().unwrap();
    // While the image is being made, a byte of what is written already becomes another.
    let mut changed = false;
    while !changed && child.try_wait().unwrap().is_none() {
        let image = image_of(child.id(), dir.path());
        let Some(path) =
            image.filter(|path| fs::metadata(path).is_ok_and(|file| file.len() > 8192))
        else {
            sleep(Duration::from_micros(200));
            continue;
        };
        let file = File::options().read(true).write(true).open(path).unwrap();
        let mut byte = [0];
        file.read_exact_at(&mut byte, CHANGED).unwrap();
        file.write_all_at(&[!byte[0]], CHANGED).unwrap();
        changed = true;
    }
    let output = child.wait_with_output().unwrap();
    if has_no_faults("a_byte_that_changed", &output) {
        return;
    }
    assert!(changed, "{}", text(&output.stderr));
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    let object: Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
    keeps_to("uzone.demo-1", &object);
    assert_eq!((&object["is_intact"], &object["is_clear"]), (&false.into(), &true.into()));
    assert_eq!(object["touch"]["first_difference_bytes"], 0);
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
        (&["--reserve", "100M"], 2, "multiple of 1 GiB"),
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
    let output = run(&dir, &["--size=64M", "--output", &disk]);
    let left = fs::read_dir(&disk).map(Iterator::count);
    no_disk(&disk);
    if has_no_faults(name, &small) {
        return;
    }
    has_failed(&small, 74, "8 MiB are free in");
    has_failed(&output, 74, "with --output");
    assert_eq!(left.unwrap(), 0);
    assert_eq!(dir.names(), ["disk"]);
}

#[test]
fn an_interrupt_at_any_moment_leaves_no_file() {
    let dir = Dir::new("demo-interrupt");
    let mut interrupted = 0;
    let signals = [Signal::INT, Signal::TERM, Signal::KILL, Signal::HUP];
    for (step, signal) in signals.into_iter().cycle().take(9).enumerate() {
        let mut child = demo(&dir, &["--size=64M", "--reserve=1G"]).spawn().unwrap();
        // Once by each as soon as memory is mapped lazily, and otherwise later and later. SIGKILL cannot
        // be held back while a file is written, so it does not come later.
        if step < 4 || signal == Signal::KILL {
            maps_lazily(&mut child, dir.path());
        } else {
            sleep(Duration::from_millis(20 << step) / 4);
        }
        let _ = kill_process(Pid::from_child(&child), signal); // it may have ended
        let status = end(&mut child);
        if status.signal().is_none() {
            // It was ready before.
            let _ = fs::remove_file(dir.path().join("uzone-demo.html"));
            let _ = fs::remove_file(dir.path().join("uzone-demo.trace.json"));
        } else {
            interrupted += 1;
        }
        assert!(dir.names().is_empty(), "{:?}", dir.names());
    }
    if interrupted == 0 {
        skip("an_interrupt_at_any_moment", "the demo does not run here");
    }
}

#[test]
fn a_page_that_cannot_be_had_is_an_error_that_says_why() {
    let name = "a_page_that_cannot_be_had";
    let dir = Dir::new("demo-short");
    // The image becomes empty while it is touched. When that is depends on the machine: sooner there is
    // nothing to map, and later nothing is missed.
    for attempt in 1..=20 {
        let mut child = demo(&dir, &["--size=256M", "--reserve=1G"]).spawn().unwrap();
        if maps_lazily(&mut child, dir.path()) {
            sleep(Duration::from_millis(10 * attempt));
            if let Some(image) = image_of(child.id(), dir.path()) {
                let file = File::options().write(true).open(image).unwrap();
                file.set_len(0).unwrap();
            }
        }
        let status = end(&mut child);
        let said = said(&mut child);
        assert!(!status.success() && dir.names().is_empty(), "{status}: {said}");
        if said.contains("vm.unprivileged_userfaultfd") {
            return skip(name, said);
        }
        if said.contains("a page could not be had: the backing ends at 0x0") {
            assert_eq!(status.code(), Some(71), "{said}");
            return;
        }
        println!("after {attempt}0 ms: {said}");
    }
    panic!("no page was missed");
}

#[test]
fn a_user_without_rights_runs_it_too_and_what_it_cannot_have_is_named() {
    let name = "a_user_without_rights_runs_it_too";
    let dir = Dir::new("demo-without-rights");
    let mut command = demo(&dir, &["--size=32M", "--reserve=1G", "--json"]);
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
    let cannot = object["mode"]["cannot"].as_array().expect("an array");
    if object["mode"]["sees_kernel_faults"] == true {
        assert!(cannot.is_empty());
    } else {
        assert!(cannot[0].as_str().is_some_and(|what| what.contains("EFAULT")), "{cannot:?}");
    }
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
