//! A signal handler may touch lazily mapped memory, whatever its thread was doing: each page comes, also while
//! the interrupted call evicts it, makes it clean or makes it present, and while it allocates.
//!
//! The allocator of this program has one lock, as the C library's have where threads share an arena. An engine thread
//! that allocated, or the owner of a page, would wait for the thread that a handler interrupted there.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail by panicking, as tests do")]

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::fs::File;
use std::hint::black_box;
use std::num::NonZeroU64;
use std::process::ExitStatus;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use common::{
    again, ends, engine, file_of, is_child, map, mapped, page, scattered, skip, usize_of,
};
use uzone_fault::{Answer, FileBacking, LazyMapping, LazyOptions, WriteTracking};
use uzone_os::{page_cache, sigbus};
use uzone_pages::ByteLen;

const PAGES: u64 = 64;
/// For how many milliseconds each case runs: 300 by default.
const MILLIS: &str = "UZONE_FAULT_TEST_SIGNALS_MS";

/// The first page of the memory that the handler touches, or 0 where there is none, and which one is next.
static START: AtomicUsize = AtomicUsize::new(0);
/// The number of handlers that may touch the memory now. A signal may arrive late, at a thread that had to wait for a CPU.
static INSIDE: AtomicUsize = AtomicUsize::new(0);
static NEXT: AtomicU64 = AtomicU64::new(0);
/// How often it was called, and whether it read something else than it had to.
static CALLS: AtomicU64 = AtomicU64::new(0);
static IS_WRONG: AtomicBool = AtomicBool::new(false);
/// Whether it writes as well.
static WRITES: AtomicBool = AtomicBool::new(false);

/// The system's allocator, for one thread at a time.
struct OneAtATime(AtomicBool);

#[global_allocator]
static ALLOCATOR: OneAtATime = OneAtATime(AtomicBool::new(false));

impl OneAtATime {
    fn locked<T>(&self, step: impl FnOnce() -> T) -> T {
        while self.0.swap(true, Ordering::Acquire) {
            thread::yield_now();
        }
        let done = step();
        self.0.store(false, Ordering::Release);
        done
    }
}

// SAFETY: it is the system's allocator. It does not unwind.
unsafe impl GlobalAlloc for OneAtATime {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as this function wants it.
        self.locked(|| unsafe { System.alloc(layout) })
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: as this function wants it.
        self.locked(|| unsafe { System.dealloc(block, layout) });
    }
}

extern "C" fn handler(_: libc::c_int) {
    // SeqCst, as in `work_under_signals`: it sees this handler, or this handler sees that there is no memory.
    INSIDE.fetch_add(1, Ordering::SeqCst);
    let start = START.load(Ordering::SeqCst);
    if start != 0 {
        touch(start);
    }
    INSIDE.fetch_sub(1, Ordering::SeqCst);
}

fn touch(start: usize) {
    let index = NEXT.fetch_add(7, Ordering::Relaxed) % PAGES;
    let offset = index * page();
    let address = start + usize_of(offset);
    let pointer = std::ptr::with_exposed_provenance_mut::<u64>(address);
    // SAFETY: `from_ptr` wants 8 aligned bytes that live as long as the reference and are accessed atomically.
    // 1. Aligned: a page.
    // 2. Alive: the mapping lives until no handler touches it.
    // 3. Atomic: other threads copy by atomics.
    let word = unsafe { AtomicU64::from_ptr(pointer) };
    if word.load(Ordering::Relaxed) != common::word(offset) {
        IS_WRONG.store(true, Ordering::Relaxed);
    }
    if WRITES.load(Ordering::Relaxed) {
        word.store(common::word(offset), Ordering::Relaxed);
    }
    CALLS.fetch_add(1, Ordering::Relaxed);
}

/// Has the handler called on SIGUSR1.
fn handle() {
    let handler: extern "C" fn(libc::c_int) = handler;
    // SAFETY: `zeroed` wants all bits zero to be a value, which they are for numbers and an empty set.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = handler as usize;
    action.sa_flags = libc::SA_RESTART;
    // SAFETY: sigaction(2) reads the action, whose function takes the number of the signal, and does what a
    // handler may: it touches memory and atomics.
    let answer = unsafe { libc::sigaction(libc::SIGUSR1, &raw const action, std::ptr::null_mut()) };
    assert_eq!(answer, 0);
}

/// Sends signals to this thread, to one that allocates, and to the whole process while `work` runs again and again.
fn work_under_signals(memory: &LazyMapping, mut work: impl FnMut(u64)) {
    let run =
        Duration::from_millis(std::env::var(MILLIS).map_or(300, |text| text.parse().unwrap()));
    START.store(memory.addr().get(), Ordering::SeqCst);
    CALLS.store(0, Ordering::Relaxed);
    let stop = AtomicBool::new(false);
    let process = libc::pid_t::try_from(std::process::id()).unwrap();
    let worker = uzone_os::thread_id();
    let allocating = AtomicU32::new(worker);
    thread::scope(|scope| {
        scope.spawn(|| {
            allocating.store(uzone_os::thread_id(), Ordering::Relaxed);
            while !stop.load(Ordering::Relaxed) {
                black_box(Vec::<u8>::with_capacity(4096));
            }
            allocating.store(worker, Ordering::Relaxed);
        });
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                for thread in [worker, allocating.load(Ordering::Relaxed)] {
                    // SAFETY: kill(2) and tgkill(2) take numbers; the process handles the signal.
                    unsafe { libc::syscall(libc::SYS_tgkill, process, thread, libc::SIGUSR1) };
                }
                // SAFETY: as above.
                unsafe { libc::kill(process, libc::SIGUSR1) };
                thread::yield_now();
            }
        });
        let begin = Instant::now();
        for at in scattered(5, PAGES).take_while(|_| begin.elapsed() < run) {
            work(at);
        }
        stop.store(true, Ordering::Relaxed);
    });
    START.store(0, Ordering::SeqCst);
    while INSIDE.load(Ordering::SeqCst) != 0 {
        thread::yield_now();
    }
    assert!(CALLS.load(Ordering::Relaxed) > 0, "no signal was handled");
    assert!(!IS_WRONG.load(Ordering::Relaxed), "the handler read other bytes");
}

/// Runs a test in a process of its own, since what is wrong hangs.
fn in_a_child(name: &str, run: impl FnOnce()) {
    if is_child(name) {
        handle();
        run();
        return;
    }
    let mut child = again(name).spawn().unwrap();
    let status = ends(&mut child);
    assert!(
        status.is_some_and(|status| ExitStatus::success(&status)),
        "hangs or failed: {status:?}"
    );
}

fn mapping(name: &str, file: &File, options: &LazyOptions) -> Option<LazyMapping> {
    let backing = Arc::new(FileBacking::new(file.try_clone().unwrap()).unwrap());
    mapped(name, engine().map(ByteLen::new(PAGES * page()), backing, options))
}

fn rounds(name: &str, answer: Answer) {
    WRITES.store(false, Ordering::Relaxed);
    let all = 0..PAGES * page();
    let file = file_of(all.end);
    let options = LazyOptions::default().answer(answer);
    let Some(memory) = mapping(name, &file, &options) else { return };
    work_under_signals(&memory, |at| {
        memory.evict(at * page()..all.end).unwrap();
        let _ = memory.stats();
        memory.populate(0..(at + 1) * page()).unwrap();
        drop(memory.pin(at * page()..(at + 1) * page()).unwrap());
        let _ = (memory.latencies(), memory.take_trace(), memory.last_failure());
        memory.evict(all.clone()).unwrap();
    });
    // Readers join the thread that answers for this memory, and leave it.
    work_under_signals(&memory, |at| {
        memory.evict(all.clone()).unwrap();
        let others = [at, at + 1].map(|_| mapping(name, &file, &options).unwrap());
        for other in &others {
            other.read_at(at * page(), &mut [0]).unwrap();
        }
    });
    // Pages that an I/O thread produces.
    let options = options.deadline(Duration::from_secs(600));
    let Some(cold) = mapping(name, &file, &options) else { return };
    work_under_signals(&cold, |at| {
        cold.evict(all.clone()).unwrap();
        page_cache::forget(&file, 0, NonZeroU64::new(all.end).unwrap()).unwrap();
        cold.read_at(at * page(), &mut [0]).unwrap();
    });
    WRITES.store(true, Ordering::Relaxed);
    let options = LazyOptions::default().answer(answer).track_writes(WriteTracking::Sync);
    let Some(memory) = mapping(name, &file_of(all.end), &options) else { return };
    work_under_signals(&memory, |at| {
        memory.take_dirty(all.clone()).unwrap();
        memory.evict(at * page()..all.end).unwrap();
        memory.populate(0..(at + 1) * page()).unwrap();
        memory.evict_all(all.clone()).unwrap();
    });
}

#[test]
fn a_handler_that_interrupts_an_eviction_gets_its_page_from_a_reader() {
    let name = "a_handler_that_interrupts_an_eviction_gets_its_page_from_a_reader";
    if map(name, &engine(), page(), common::function(), &LazyOptions::default()).is_none() {
        return;
    }
    in_a_child(name, || rounds(name, Answer::Reader));
}

#[test]
fn a_handler_that_interrupts_an_eviction_fills_its_page_itself() {
    let name = "a_handler_that_interrupts_an_eviction_fills_its_page_itself";
    if !sigbus::recovers_copies() {
        skip(name, "copies do not recover from SIGBUS in this build");
        return;
    }
    if map(name, &engine(), page(), common::function(), &LazyOptions::default()).is_none() {
        return;
    }
    in_a_child(name, || rounds(name, Answer::InThread));
}
