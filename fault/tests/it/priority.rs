//! A thread of a real-time priority on the CPU of an ordinary thread that is at work on the same page: each of its waits
//! sleeps, as the other thread runs only then.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use rustix::time::{ClockId, clock_gettime};
use uzone_fault::{Answer, FileBacking, LazyMapping, LazyOptions, WriteTracking};

use crate::common::{engine, file_of, map, page, skip};

const PAGES: u64 = 64;
const ROUNDS: u64 = 2000;
/// The CPU time that the rounds take at most. A thread that waits without sleeping has its CPU for nearly a second
/// before the kernel lets another thread run.
const MOST: Duration = Duration::from_millis(500);

/// Gives this thread the lowest real-time priority.
fn be_urgent() -> io::Result<()> {
    let parameters = libc::sched_param { sched_priority: 1 };
    // SAFETY: the structure lives over the call, and 0 names this thread.
    let result = unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO, &raw const parameters) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Keeps this thread to the first CPU that it may use.
fn keep_to_one_cpu() {
    let all = sched_getaffinity(None).unwrap();
    let mut one = CpuSet::new();
    one.set((0..CpuSet::MAX_CPU).find(|cpu| all.is_set(*cpu)).unwrap());
    sched_setaffinity(None, &one).unwrap();
}

/// Returns the CPU time of this thread.
fn cpu_time() -> Duration {
    clock_gettime(ClockId::ThreadCPUTime).try_into().unwrap()
}

/// Touches the pages that another thread of the same CPU writes to, makes clean and evicts. Returns the CPU time.
fn touch_beside(memory: &LazyMapping, at: &AtomicU64) -> io::Result<Duration> {
    keep_to_one_cpu();
    be_urgent()?;
    let begun = cpu_time();
    for round in 0..ROUNDS {
        // The other thread is interrupted anywhere.
        thread::sleep(Duration::from_micros(10 + round % 13 * 3));
        let offset = at.load(Ordering::Relaxed) * page();
        if round % 2 == 0 {
            memory.write_at(offset, &[1]).unwrap();
        } else {
            memory.read_at(offset, &mut [0]).unwrap();
        }
        if round % 16 == 0 {
            drop(memory.pin_for_write(offset..offset + page()).unwrap());
        }
        if cpu_time() - begun > MOST {
            break;
        }
    }
    Ok(cpu_time() - begun)
}

#[test]
fn a_real_time_thread_gets_each_page_that_an_ordinary_thread_of_its_cpu_is_at_work_on() {
    let name = "a_real_time_thread_gets_each_page_that_an_ordinary_thread_of_its_cpu_is_at_work_on";
    let len = PAGES * page();
    for (answer, tracking) in [
        (Answer::InThread, None),
        (Answer::InThread, Some(WriteTracking::Sync)),
        (Answer::Reader, None),
        (Answer::Reader, Some(WriteTracking::Sync)),
    ] {
        let options = LazyOptions::default().answer(answer).track_writes(tracking);
        let backing = FileBacking::new(file_of(len)).unwrap();
        let Some(memory) = map(name, &engine(), len, backing, &options) else { return };
        let memory = Arc::new(memory);
        let (at, is_over) = (AtomicU64::new(0), AtomicBool::new(false));
        let urgent = thread::scope(|scope| {
            scope.spawn(|| {
                keep_to_one_cpu();
                while !is_over.load(Ordering::Relaxed) {
                    for page_at in 0..PAGES {
                        at.store(page_at, Ordering::Relaxed);
                        memory.write_at(page_at * page(), &[2]).unwrap();
                    }
                    if tracking.is_some() {
                        memory.take_dirty(0..len).unwrap();
                    }
                    memory.evict(0..len).unwrap();
                }
            });
            let urgent = scope.spawn(|| touch_beside(&memory, &at)).join().unwrap();
            is_over.store(true, Ordering::Relaxed);
            urgent
        });
        match urgent {
            Ok(took) => assert!(took < MOST, "{answer:?}, {tracking:?}: it waits at work"),
            Err(cause) => {
                return skip(name, &format!("the kernel gives no real-time priority ({cause})"));
            }
        }
        let stats = memory.stats();
        assert!(stats.faults > ROUNDS / 16, "{answer:?}, {tracking:?}: {stats:?}");
    }
}
