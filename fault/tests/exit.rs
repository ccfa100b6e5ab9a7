//! The end of a process with lazily mapped memory: no backing is called once what programs have registered for the
//! end runs.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail by panicking, as tests do")]

mod common;

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use common::page;
use uzone_fault::{Answer, Engine, FunctionBacking, LazyMapping, LazyOptions};
use uzone_pages::{Advice, ByteLen, FaultAround};

const PAGES: u64 = 1 << 18;

/// Whether the process has begun to take things apart.
static IS_GONE: AtomicBool = AtomicBool::new(false);
/// How often a backing was called.
static CALLS: AtomicU64 = AtomicU64::new(0);

/// Stands for the destructor of a static of a C++ library, whose functions must not be called from here on.
extern "C" fn take_apart() {
    IS_GONE.store(true, Ordering::SeqCst);
    thread::sleep(Duration::from_millis(20));
}

fn fill(out: &mut [u8]) {
    CALLS.fetch_add(1, Ordering::Relaxed);
    // So that the end comes while it works.
    thread::sleep(Duration::from_micros(100));
    if IS_GONE.load(Ordering::SeqCst) {
        std::process::abort();
    }
    out.fill(1);
}

/// Threads that touch memory as long as the process lives.
fn touch_for_ever(memory: &Arc<LazyMapping>) {
    for seed in 0..4 {
        let memory = memory.clone();
        thread::spawn(move || {
            for at in common::scattered(seed, PAGES) {
                memory.read_at(at * page(), &mut [0]).unwrap();
            }
        });
    }
}

#[test]
fn no_backing_is_called_once_the_process_is_taken_apart() {
    let name = "no_backing_is_called_once_the_process_is_taken_apart";
    if common::userfaultfd(
        name,
        uzone_os::uffd::Features::POISON,
        uzone_os::uffd::KernelFaults::IfAllowed,
    )
    .is_none()
    {
        return;
    }
    if !common::is_child(name) {
        for _ in 0..10 {
            let mut child = common::again(name).spawn().unwrap();
            let status = common::ends(&mut child).expect("it hangs");
            assert_eq!(status.code(), Some(7), "{status}");
        }
        return;
    }
    // SAFETY: the function may be called at any time.
    assert_eq!(unsafe { libc::atexit(take_apart) }, 0);
    let engine = Engine::new(NonZeroUsize::new(2).unwrap()).unwrap();
    let small = FaultAround::MIN;
    let options =
        LazyOptions::default().answer(Answer::Reader).advice(Advice::Random).fault_around(small);
    let quick = FunctionBacking::quick(|_, out: &mut [u8]| {
        fill(out);
        Ok(())
    });
    let slow = FunctionBacking::slow(|_, out: &mut [u8]| {
        fill(out);
        Ok(())
    });
    let len = ByteLen::new(PAGES * page());
    let quick = Arc::new(engine.map(len, Arc::new(quick), &options).unwrap());
    let slow = Arc::new(engine.map(len, Arc::new(slow), &options).unwrap());
    touch_for_ever(&quick);
    touch_for_ever(&slow);
    while CALLS.load(Ordering::Relaxed) < 100 {
        thread::sleep(Duration::from_micros(100));
    }
    std::process::exit(7);
}
