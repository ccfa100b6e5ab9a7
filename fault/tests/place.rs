//! Which threads answer faults, and where they run.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail by panicking, as tests do")]

mod common;

use std::fs;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use common::{check_page, file_of, map, options, page};
use uzone_fault::{Engine, EngineOptions, FileBacking};
use uzone_os::numa;
use uzone_pages::Advice;

const PAGES: u64 = 4096;

/// Returns the CPUs of each thread of this process whose name begins so.
fn cpus_of(name: &str) -> Vec<String> {
    let tasks = fs::read_dir("/proc/self/task").unwrap().flatten().map(|task| task.path());
    let named = tasks.filter(|task| {
        // A thread may end meanwhile.
        fs::read_to_string(task.join("comm")).is_ok_and(|comm| comm.starts_with(name))
    });
    let status = named.filter_map(|task| fs::read_to_string(task.join("status")).ok());
    let field = |status: String| {
        let line = status.lines().find(|line| line.starts_with("Cpus_allowed_list:"))?;
        Some(line.split_whitespace().last()?.to_owned())
    };
    status.filter_map(field).collect()
}

// One test: others would have threads of these names too.
#[test]
fn a_reader_follows_a_thread_that_is_kept_to_a_cpu_and_engines_share_their_threads() {
    let name = "a_reader_follows_a_thread_that_is_kept_to_a_cpu_and_engines_share_their_threads";
    let cpus = numa::usable(&(0..1024).collect::<Vec<_>>()).unwrap();
    let engine = Engine::with(EngineOptions::default()).unwrap();
    let readers = cpus_of("uzone-fault").len();
    assert!((1..=4).contains(&readers), "{readers} threads answer faults");
    let another = Engine::with(EngineOptions::default()).unwrap();
    assert_eq!(cpus_of("uzone-fault").len(), readers, "the engines share their threads");
    let own = Engine::with(EngineOptions::default().own_threads()).unwrap();
    assert_eq!(cpus_of("uzone-fault").len(), 2 * readers, "that one has its own");
    drop((own, another));
    let backing = FileBacking::new(file_of(PAGES * page())).unwrap();
    let options = options(Advice::Random, 1);
    let Some(memory) = map(name, &engine, PAGES * page(), backing, &options) else { return };
    let memory = Arc::new(memory);
    let anywhere = cpus_of("uzone-fault");
    let third = PAGES / 3;
    let turns = [Some(cpus[cpus.len() - 1]), None, Some(cpus[0])];
    for (kept, from) in turns.into_iter().zip([0, third, 2 * third]) {
        let memory = memory.clone();
        let touches = move || {
            if let Some(cpu) = kept {
                numa::keep_thread_to(&[cpu]).unwrap();
            }
            for at in from..from + third {
                if at == from + third / 2 {
                    // A place is kept for some milliseconds.
                    thread::sleep(Duration::from_millis(10));
                }
                check_page(&memory, at * page());
            }
        };
        thread::spawn(touches).join().unwrap();
        let now = cpus_of("uzone-fault");
        if kept.is_none() {
            assert_eq!(now, anywhere, "a thread that may run anywhere is not followed");
        }
        let moved = now.iter().filter(|now| !anywhere.contains(now)).count();
        assert!(moved <= 1, "{now:?} of {anywhere:?}");
    }
}
