//! Threads that each read their part of the memory in order: however many, they take about as many faults as one
//! thread that reads all of it.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail by panicking, as tests do")]

mod common;

use std::num::NonZeroUsize;
use std::sync::Arc;
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

/// Compares many threads with one, in the thread and by a reader.
fn compare(name: &str, len: ByteLen, threads: u64, backing: impl Fn() -> Arc<dyn Backing>) {
    let wanted = Features::SIGBUS | Features::POISON;
    if common::userfaultfd(name, wanted, KernelFaults::Never).is_none() {
        return;
    }
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
        // One thread has less than one fault a block where a reader installs the next block while it reads.
        let least = one.max(len.get() >> 21);
        assert!(many * 10 <= least * 11, "{answer:?}: {many} of {threads}, {one} of one");
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
    let len = ByteLen::mib(9 * 72);
    let file = Arc::new(Mapping::memfd("in order", len, None).unwrap());
    let part = vec![1; 1 << 20];
    (0..len.get()).step_by(part.len()).for_each(|at| file.write_at(at, &part).unwrap());
    let backing = || MemoryBacking::new(file.clone(), Sharing::Private).unwrap();
    compare(name, len, 9, || Arc::new(backing()));
}
