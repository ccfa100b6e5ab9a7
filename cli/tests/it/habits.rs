//! Commands on a terminal, and on hosts that lack something.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::thread;

use crate::common::{Dir, UNPRIVILEGED, run, skip, text, uzone};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch,
};

/// A terminal: its writing end, and a thread that reads until that is closed.
fn terminal() -> (OwnedFd, thread::JoinHandle<Vec<u8>>) {
    let ours = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).expect("a pseudoterminal");
    grantpt(&ours).expect("it is ours");
    unlockpt(&ours).expect("it is ours");
    let name = ptsname(&ours, Vec::new()).expect("it has a name");
    let theirs = File::options()
        .read(true)
        .write(true)
        .open(name.to_str().expect("a path of letters"))
        .expect("the other end");
    let reader = thread::spawn(move || {
        let mut seen = Vec::new();
        // It ends with an error when the last writer is gone.
        let _ = File::from(ours).read_to_end(&mut seen);
        seen
    });
    (theirs.into(), reader)
}

/// Runs with standard output and error on a terminal, and returns what it showed.
fn shown(arguments: &[&str], variables: &[(&str, &str)]) -> Vec<u8> {
    let (terminal, reader) = terminal();
    let other = terminal.try_clone().expect("a descriptor");
    let mut command = uzone(arguments);
    command.env("TERM", "xterm").envs(variables.iter().copied());
    let status = command.stdout(terminal).stderr(other).status().expect("the binary runs");
    assert!(status.success(), "{arguments:?}");
    // The command holds descriptors of the terminal, too.
    drop(command);
    reader.join().expect("the reader")
}

fn has(bytes: &[u8], part: &str) -> bool {
    bytes.windows(part.len()).any(|window| window == part.as_bytes())
}

#[test]
fn a_terminal_gets_progress_and_colour_unless_that_is_turned_off() {
    let plain = shown(&["doctor"], &[]);
    assert!(has(&plain, "\x1b[32mok\x1b[0m"), "{}", text(&plain));
    for (arguments, variables) in
        [(&["doctor"][..], &[("NO_COLOR", "1")][..]), (&["doctor", "--color", "never"], &[])]
    {
        let seen = shown(arguments, variables);
        assert!(!has(&seen, "\x1b[32m"), "{arguments:?}: {}", text(&seen));
    }
    // A bar is drawn over itself.
    let bars = |seen: &[u8]| {
        has(seen, "\x1b[2K") || seen.windows(2).any(|two| two[0] == b'\r' && two[1] != b'\n')
    };
    let dir = Dir::new("habits-bars");
    let (raw, image) = (dir.file("raw", vec![7; 32 << 20]), dir.name("image"));
    let pack = ["pack", &raw, &image];
    let seen = shown(&pack, &[]);
    assert!(bars(&seen), "{}", text(&seen));
    let quiet = shown(&[&pack[..], &["--quiet"]].concat(), &[]);
    assert!(!bars(&quiet), "{}", text(&quiet));
}

/// Forbids the calling thread, and what it starts, to make a userfaultfd.
fn forbid_userfaultfd() {
    const NEW: u64 = 0xAA00; // of /dev/userfaultfd
    let made = SeccompCondition::new(1, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, NEW);
    let rule = SeccompRule::new(vec![made.expect("a condition")]).expect("a rule");
    forbid(BTreeMap::from([(libc::SYS_userfaultfd, vec![]), (libc::SYS_ioctl, vec![rule])]));
}

/// Has system calls of the calling thread, and of what it starts, answer EPERM.
fn forbid(rules: BTreeMap<i64, Vec<SeccompRule>>) {
    let arch = TargetArch::try_from(std::env::consts::ARCH).expect("a known architecture");
    let refused = SeccompAction::Errno(libc::EPERM.unsigned_abs());
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, refused, arch).expect("a filter");
    let program = BpfProgram::try_from(filter).expect("a program");
    seccompiler::apply_filter(&program).expect("the kernel takes filters");
}

#[test]
fn without_a_userfaultfd_what_needs_one_says_so_before_it_makes_anything() {
    forbid_userfaultfd();
    let dir = Dir::new("habits-faults");
    let output = run(&["demo", "--size=64M", "--output", &dir.name(""), "--dir", &dir.name("")]);
    let stderr = text(&output.stderr);
    assert!(matches!(output.status.code(), Some(69 | 77)), "{stderr}");
    assert!(stderr.contains("userfaultfd"), "{stderr}");
    assert!(output.stdout.is_empty());
    assert_eq!(dir.names(), [""; 0]);
    let doctor = run(&["doctor"]);
    let line = text(&doctor.stdout).lines().find(|line| line.contains("userfaultfd"));
    assert!(line.is_some_and(|line| !line.starts_with("ok")), "{line:?}");
    // An image needs none.
    let (raw, image) = (dir.file("raw", [7; 8192]), dir.name("image"));
    assert!(run(&["pack", &raw, &image]).status.success());
}

#[test]
fn without_threads_an_image_is_packed_verified_and_unpacked_by_one() {
    let name = "without_threads_an_image_is_packed";
    let dir = Dir::new("habits-threads");
    fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o777)).expect("it is ours");
    let bytes: Vec<u8> = (0..8_u32 << 20).map(|at| (at >> 6).to_le_bytes()[0]).collect();
    let (raw, image, back) = (dir.file("raw", &bytes), dir.name("image"), dir.name("back"));
    for arguments in [&["pack", &raw, &image][..], &["verify", &image], &["unpack", &image, &back]]
    {
        // The limit does not hold for root.
        let program = uzone(&[arguments, &["--threads=4"]].concat());
        let mut limited = Command::new("prlimit");
        limited.arg("--nproc=1").arg(program.get_program()).args(program.get_args());
        let output = match limited.uid(UNPRIVILEGED).gid(UNPRIVILEGED).output() {
            Ok(output) => output,
            Err(error) => return skip(name, error),
        };
        if output.status.code() == Some(126) {
            return skip(name, "that user cannot start this program");
        }
        assert!(output.status.success(), "{arguments:?}: {output:?}");
    }
    assert!(fs::read(&back).expect("a file") == bytes);
}
