//! Threads that each read their part of the memory in order: however many, they take about as many faults as one
//! thread that reads all of it.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail by panicking, as tests do")]

mod common;

use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex};
use std::thread;

use common::page;
use uzone_fault::{Answer, Backing, Engine, LazyMapping, LazyOptions, MemoryBacking, ZeroBacking};
use uzone_os::uffd::{Features, KernelFaults};
use uzone_os::{Mapping, Sharing};
use uzone_pages::ByteLen;

/// Each thread reads its part page by page. Returns how many faults they take.
fn faults_of(threads: u64, memory: &LazyMapping) -> u64 {
    let pages = memory.len().get() / page();
    thread::scope(|scope| {
        for part in 0..threads {
            scope.spawn(move || {
                for at in pages * part / threads..pages * (part + 1) / threads {
                    memory.read_at(at * page(), &mut [0]).unwrap();
                }
            });
        }
    });
    memory.stats().faults
}

/// The most faults that a thread may have before its windows are the largest ones. Alone it has six: its first block takes
/// windows of 16, 16, 16, 16, 64, 128 and 256 pages in place of one of 512.
///
/// Most threads leap earlier, once others of the memory have gone on (`pages/src/streams.rs`): 120 threads have 0.3 to 1
/// each in the thread, and 1.2 to 2.3 by a reader, which answers all of them in step, so that more of them start before one
/// has gone on; of 9, they have 0.3 to 2 and 1.3 to 3.4.
const START_UP: u64 = 5;

/// Held by one test at a time: faults that wait for a CPU are other faults.
static ALONE: Mutex<()> = Mutex::new(());

/// Counts the faults of one thread and of many, in the thread and by a reader.
///
/// Each largest window is a fault, and many threads have no fewer. One thread has, by a reader: while it reads, the reader
/// installs the next block, and up to half of the blocks come without a fault. A reader of many threads has a fault to
/// answer at any time. So the faults are compared with the number of windows.
fn compare(name: &str, len: ByteLen, threads: u64, backing: impl Fn() -> Arc<dyn Backing>) {
    let wanted = Features::SIGBUS | Features::POISON;
    if common::userfaultfd(name, wanted, KernelFaults::Never).is_none() {
        return;
    }
    let _alone = ALONE.lock();
    let engine = Engine::new(NonZeroUsize::MIN).unwrap();
    for answer in [Answer::InThread, Answer::Reader] {
        let faults = |threads| {
            let options = LazyOptions::default().answer(answer);
            let memory = engine.map(len, backing(), &options).unwrap();
            assert_eq!(memory.answered_in_thread().is_ok(), answer == Answer::InThread);
            faults_of(threads, &memory)
        };
        let (one, many) = (faults(1), faults(threads));
        eprintln!("{answer:?}: {one} faults of one thread, {many} of {threads}");
        let windows = len.get() >> 21;
        let most = windows + START_UP * threads;
        assert!(most * 10 <= windows * 11, "as many as 1.1 times the windows are too many");
        assert!(one <= most, "{answer:?}: {one} of one");
        assert!(many <= most, "{answer:?}: {many} of {threads}, {one} of one");
    }
}

#[test]
fn a_hundred_and_twenty_threads_in_order_take_as_many_faults_as_one() {
    let name = "a_hundred_and_twenty_threads_in_order_take_as_many_faults_as_one";
    // Zeroes, which take no memory but page tables.
    compare(name, ByteLen::gib(12), 120, || Arc::new(ZeroBacking));
}

#[test]
fn nine_threads_in_order_take_as_many_faults_of_a_memory_file_as_one() {
    let name = "nine_threads_in_order_take_as_many_faults_of_a_memory_file_as_one";
    let len = ByteLen::mib(9 * 100);
    let file = Arc::new(Mapping::memfd("in order", len, None).unwrap());
    let part = vec![1; 1 << 20];
    (0..len.get()).step_by(part.len()).for_each(|at| file.write_at(at, &part).unwrap());
    let backing = || MemoryBacking::new(file.clone(), Sharing::Private).unwrap();
    compare(name, len, 9, || Arc::new(backing()));
}
