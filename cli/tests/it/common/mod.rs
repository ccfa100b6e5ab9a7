//! Helpers of the tests of the commands.
#![allow(dead_code, reason = "a test program uses a part of them")]

mod base;
pub(crate) mod served;

use std::fs;
use std::path::Path;
use std::process::{Command, Output};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;
use uzone_attach::{AttachError, AttachOptions, AttachedMemory};

pub(crate) use self::base::*;

/// How long anything may take before it counts as hanging.
const PATIENCE: Duration = Duration::from_secs(60);
/// The user and the group without rights, by their number on every system.
pub(crate) const UNPRIVILEGED: u32 = 65534;

/// Returns the command with nothing to read.
pub(crate) fn uzone(arguments: &[&str]) -> Command {
    bare(env!("CARGO_BIN_EXE_uzone"), arguments)
}

pub(crate) fn run(arguments: &[&str]) -> Output {
    uzone(arguments).output().expect("the binary under test runs")
}

/// Returns the object that a successful command printed.
pub(crate) fn object_of(output: &Output) -> Value {
    assert!(output.status.success(), "{}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("one JSON object and nothing else")
}

/// Runs a command that must succeed, and returns the object that it prints.
pub(crate) fn object(arguments: &[&str]) -> Value {
    object_of(&run(arguments))
}

/// Runs a command that must fail with this code and this text.
pub(crate) fn refuses(arguments: &[&str], code: i32, part: &str) -> Output {
    let output = run(arguments);
    println!("{arguments:?}");
    has_failed(&output, code, part);
    output
}

pub(crate) fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let give_up = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < give_up, "{what} is waited for");
        thread::sleep(Duration::from_millis(1));
    }
}

/// Mounts a file system in memory of this size at a new directory, if this user may.
pub(crate) fn small_disk(at: &str, size: &str) -> bool {
    fs::create_dir_all(at).expect("a directory is made");
    let options = ["-t", "tmpfs", "-o", size, "tmpfs", at];
    Command::new("mount").args(options).output().is_ok_and(|output| output.status.success())
}

/// Unmounts it.
pub(crate) fn no_disk(at: &str) {
    let unmounted = Command::new("umount").arg(at).status();
    assert!(unmounted.is_ok_and(|status| status.success()), "a process still has a file there");
}

/// Returns whether an interrupt ends the processes that this one starts, or reports that a case cannot run:
/// a shell has its background commands ignore interrupts, and what they start ignores them too.
pub(crate) fn interrupts_arrive(name: &str) -> bool {
    let status = fs::read_to_string("/proc/self/status").expect("it can be read");
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).expect("a mask");
    let ignored = u64::from_str_radix(ignored.trim(), 16).expect("a hexadecimal number");
    let arrive = ignored & 1 << (2 - 1) == 0; // SIGINT is 2
    if !arrive {
        skip(name, "interrupts are ignored here, as in a background command");
    }
    arrive
}

/// Returns `len` bytes that do not compress, others for each seed, with zeroes from a quarter to `zeroes_end`.
pub(crate) fn incompressible(len: usize, seed: u64, zeroes_end: usize) -> Vec<u8> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 56) as u8
    };
    let mut bytes: Vec<u8> = (0..len).map(|_| next()).collect();
    bytes[len / 4..zeroes_end].fill(0);
    bytes
}

/// Attaches to a server, if this user may.
pub(crate) fn attach(name: &str, socket: &str, options: &AttachOptions) -> Option<AttachedMemory> {
    match AttachedMemory::attach(Path::new(socket), options) {
        Ok(memory) => Some(memory),
        Err(AttachError::Open(error)) => {
            skip(name, error);
            None
        }
        Err(error) => panic!("{name}: {error}"),
    }
}
