//! Which threads answer faults, and where they run.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail by panicking, as tests do")]

mod common;

use std::fs;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use common::{
    anonymous, check_page, file_of, map, options, page, region_at, registered, remote, skip,
    userfaultfd, wait_for,
};
use uzone_fault::{AdoptedMemory, Engine, EngineOptions, FileBacking, LazyOptions, ZeroBacking};
use uzone_os::numa;
use uzone_os::uffd::{Features, KernelFaults, Registered};
use uzone_pages::Advice;

const PAGES: u64 = 4096;

/// Held by each test: others would have threads of these names too.
static ALONE: Mutex<()> = Mutex::new(());

fn usable() -> Vec<u32> {
    numa::usable(0..1024).unwrap().collect()
}

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

#[test]
fn a_reader_follows_a_thread_that_is_kept_to_a_cpu_and_engines_share_their_threads() {
    let name = "a_reader_follows_a_thread_that_is_kept_to_a_cpu_and_engines_share_their_threads";
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let cpus = usable();
    let engine = Engine::with(EngineOptions::default()).unwrap();
    let readers = thread::available_parallelism().unwrap().get().min(4);
    // A thread takes its name once it runs.
    let has_readers = |count| cpus_of("uzone-fault").len() == count;
    wait_for("the threads that answer faults", || has_readers(readers));
    let another = Engine::with(EngineOptions::default()).unwrap();
    assert_eq!(cpus_of("uzone-fault").len(), readers, "the engines share their threads");
    let own = Engine::with(EngineOptions::default().own_threads()).unwrap();
    wait_for("threads of its own", || has_readers(2 * readers));
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

/// Memory that is answered for as that of another process is.
struct Other {
    // Dropped first: no fault is answered afterwards.
    server: AdoptedMemory,
    memory: Registered,
}

fn other(engine: &Engine, options: &LazyOptions) -> Option<Other> {
    let (name, faults) = ("memory of another process", KernelFaults::IfAllowed);
    let memory = registered(&userfaultfd(name, Features::EVENT_REMOVE, faults)?, anonymous(PAGES));
    let (regions, zeroes) = (vec![region_at(0, &memory)], Arc::new(ZeroBacking));
    let server = engine.adopt(remote(&memory), regions, zeroes, options, None).unwrap();
    Some(Other { server, memory })
}

impl Other {
    /// Touches pages, and returns the median time of a touch.
    fn touch(&self, pages: std::ops::Range<u64>) -> Duration {
        let touch = |at: u64| {
            let begin = Instant::now();
            self.memory.mapping().read_at(at * page(), &mut [0]).unwrap();
            begin.elapsed()
        };
        let mut times: Vec<_> = pages.map(touch).collect();
        times.sort_unstable();
        times[times.len() / 2]
    }
}

/// Returns the number of this thread.
fn own_number() -> u32 {
    let link = fs::read_link("/proc/thread-self").unwrap();
    link.file_name().unwrap().to_str().unwrap().parse().unwrap()
}

#[test]
fn the_reader_of_a_process_that_is_kept_to_a_cpu_goes_there_and_comes_back() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let cpus = usable();
    if cpus.len() < 2 {
        return skip("the_reader_of_a_process", "one CPU");
    }
    let half = PAGES / 2;
    // Its threads may use each CPU.
    let engine = Engine::with(EngineOptions::default().own_threads()).unwrap();
    let random = LazyOptions::default().advice(Advice::Random);
    // Where others use the CPUs too, it may be there already, and faults take no less time then.
    let rounds = cpus.iter().cycle().take(20);
    let follows = |&cpu: &u32| {
        numa::keep_thread_to(&[cpu]).unwrap();
        let anywhere = other(&engine, &random)?;
        println!("anywhere: {:?}", anywhere.touch(0..PAGES));
        assert!(!anywhere.server.stats().shares_cpu, "it follows none");
        let other = other(&engine, &random.clone().process(own_number()))?;
        println!("the process: {:?}", other.touch(0..half));
        other.server.stats().shares_cpu.then_some((other, cpu))
    };
    thread::scope(|scope| {
        let touches = || {
            let (other, cpu) = rounds.into_iter().find_map(follows)?;
            assert!(cpus_of("uzone-fault").contains(&cpu.to_string()), "it is elsewhere");
            numa::keep_thread_to(&cpus).unwrap();
            thread::sleep(Duration::from_millis(10)); // a place is kept for some milliseconds
            other.touch(half..PAGES);
            assert!(!other.server.stats().shares_cpu, "the process may run anywhere");
            assert!(!cpus_of("uzone-fault").contains(&cpu.to_string()), "it stayed");
            Some(())
        };
        scope.spawn(touches).join().unwrap()
    });
}
