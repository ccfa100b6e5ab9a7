//! Facts about this kernel that the library relies on.
//!
//! A case that needs something the host may lack is skipped by name with the reason, and fails
//! instead where `REQUIRE_ALL=1` is set. A case that looks at the whole process, or limits it, runs
//! alone in a process of its own: this program, started again for that one test.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail by panicking, as tests do")]

mod adopt;
mod cgroup;
mod cut;
mod dax;
mod host;
mod huge;
mod in_thread;
mod kernel_pins;
mod mapping;
#[path = "../common/needs.rs"]
mod needs;
mod page_cache;
mod populate;
mod sigbus;
mod uffd;

use std::ffi::OsStr;
use std::process::{Command, Output};

use uzone_os::{Anonymous, HugeAdvice, Mapping, probe};

use needs::skip;

const CHILD: &str = "UZONE_OS_TEST_CHILD";

/// Returns whether this process is the one that is to run the case `name`, a path from the root of
/// this program; if not, another is started that does, and this fails if that did.
fn is_alone(name: &str) -> bool {
    if is_child(name) {
        return true;
    }
    run_alone(name, &[]);
    false
}

/// Returns whether this process was started by [`run_alone`] for the case `name`.
fn is_child(name: &str) -> bool {
    std::env::var(CHILD).is_ok_and(|child| child == name)
}

/// Starts this program for the one case `name`, with more in its environment, and fails if that
/// did.
fn run_alone(name: &str, environment: &[(&str, &OsStr)]) {
    let output = run_child(name, environment);
    let (out, err) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{out}{err}");
    assert!(out.contains("1 passed"), "{name} ran nothing: {out}{err}");
    for line in err.lines().filter(|line| line.starts_with("skipped")) {
        eprintln!("{line}");
    }
}

/// Starts this program for the one case `name`, with more in its environment, and returns how it
/// ended.
fn run_child(name: &str, environment: &[(&str, &OsStr)]) -> Output {
    Command::new(std::env::current_exe().unwrap())
        .args([name, "--exact", "--nocapture", "--test-threads=1"])
        .env(CHILD, name)
        .envs(environment.iter().copied())
        .output()
        .unwrap()
}

fn page() -> u64 {
    probe::page_size().bytes()
}

fn small_pages() -> Anonymous {
    Anonymous { huge: HugeAdvice::Never, ..Anonymous::default() }
}

/// Returns bytes of a mapping.
fn read<const N: usize>(mapping: &Mapping, offset: u64) -> [u8; N] {
    let mut bytes = [0xee; N];
    mapping.read_at(offset, &mut bytes).unwrap();
    bytes
}

fn file_of(text: &str, field: &str) -> u64 {
    let line = text.lines().find(|line| line.starts_with(field)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// Returns the flags that the kernel has for the memory in which a mapping starts (`VmFlags` of smaps), if it shows them.
fn vm_flags(mapping: &Mapping) -> Option<String> {
    let (start, mut is_ours) = (mapping.addr().get(), false);
    let smaps = std::fs::read_to_string("/proc/self/smaps").ok()?;
    smaps.lines().find_map(|line| {
        let bounds = line.split(' ').next().and_then(|range| range.split_once('-'));
        if let Some((first, end)) = bounds
            && let (Ok(first), Ok(end)) =
                (usize::from_str_radix(first, 16), usize::from_str_radix(end, 16))
        {
            is_ours = (first..end).contains(&start);
        }
        line.strip_prefix("VmFlags:").filter(|_| is_ours).map(str::to_owned)
    })
}
