//! The traces that a signal leaves behind: none.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::common::{Dir, array, document, pool, skip, uzone_bench};

/// How long anything may take before it counts as hanging.
const PATIENCE: Duration = Duration::from_secs(60);

fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let give_up = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < give_up, "{what} is waited for");
        thread::sleep(Duration::from_millis(1));
    }
}

/// Returns whether an interrupt ends the processes that this one starts, or reports that a case cannot run:
/// a shell has its background commands ignore interrupts, and their children ignore them too.
fn interrupts_arrive(name: &str) -> bool {
    let status = fs::read_to_string("/proc/self/status").expect("it can be read");
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).expect("a mask");
    let ignored = u64::from_str_radix(ignored.trim(), 16).expect("a hexadecimal number");
    let arrive = ignored & 1 << (2 - 1) == 0; // SIGINT is 2
    if !arrive {
        skip(name, "interrupts are ignored here, as in a background command");
    }
    arrive
}

/// A run that goes on until it is ended.
struct Running(Child);

impl Running {
    fn new(arguments: &[&str]) -> Self {
        let child = uzone_bench(arguments).stdout(Stdio::null()).stderr(Stdio::piped()).spawn();
        Self(child.expect("the binary under test runs"))
    }

    /// Waits until `is_so`, and returns whether it came to that before the run ended.
    fn wait_until(&mut self, is_so: impl Fn(u32) -> bool) -> bool {
        let mut came = false;
        wait_until("what the run does", || {
            came = is_so(self.0.id());
            came || self.0.try_wait().expect("it is ours").is_some()
        });
        came
    }

    /// Sends a signal, and returns the number of the one that ended the run.
    fn end(mut self, signal: Signal) -> Option<i32> {
        kill_process(Pid::from_child(&self.0), signal).expect("it runs");
        self.0.wait().expect("it is ours").signal()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Also where an assertion failed.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_signal_in_the_middle_of_clearing_leaves_the_pool_of_huge_pages_as_it_was() {
    const NAME: &str = "a_signal_in_the_middle_of_clearing_leaves_the_pool_of_huge_pages_as_it_was";
    const FILE: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";
    let _pool = pool();
    let read = || fs::read_to_string(FILE).unwrap_or_default();
    let before = read();
    if fs::write(FILE, &before).is_err() {
        return skip(NAME, format_args!("{FILE} cannot be written"));
    }
    let zero = ["zero", "--size=4K", "--table=zero-demand-2m", "--populate-size=256M"];
    let tried = document(&[&zero[..], &["--first-touches=1"]].concat());
    if array(&tried, "results").is_empty() {
        return skip(NAME, "the pool cannot be made larger: free memory is in small pieces");
    }
    for signal in [Signal::INT, Signal::TERM] {
        if signal == Signal::INT && !interrupts_arrive(NAME) {
            continue;
        }
        let arguments = [&zero[..], &["--first-touches=10000", "--quiet"]].concat();
        let mut running = Running::new(&arguments);
        assert!(running.wait_until(|_| read() != before), "the pool is made larger");
        assert_eq!(running.end(signal), Some(signal.as_raw()), "it dies of the signal that it got");
        // The rest of its pool goes with the last of its memory.
        wait_until("the pool as it was", || read() == before);
    }
}

#[test]
fn a_signal_in_the_middle_of_mapping_a_file_leaves_its_directory_empty() {
    if !interrupts_arrive("a_signal_in_the_middle_of_mapping_a_file") {
        return;
    }
    let dir = Dir::new("bench-signal");
    let path = dir.path().to_str().expect("UTF-8");
    let arguments =
        ["fault", "--size=64M", "--rounds=10000", "--table=fault-seq-file", "--dir", path];
    let mut running = Running::new(&arguments);
    let has_file = |process: u32| {
        let open = fs::read_dir(Path::new("/proc").join(process.to_string()).join("fd"));
        let is_inside = |link: fs::DirEntry| {
            fs::read_link(link.path()).is_ok_and(|target| target.starts_with(dir.path()))
        };
        open.is_ok_and(|links| links.flatten().any(is_inside))
    };
    assert!(running.wait_until(has_file), "the file is made");
    assert_eq!(dir.names(), [""; 0], "it has no name");
    assert_eq!(running.end(Signal::INT), Some(Signal::INT.as_raw()));
    assert_eq!(dir.names(), [""; 0]);
}
