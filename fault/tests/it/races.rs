//! What goes on at the same time ends well: eviction, population, advice, failure and the end of a mapping,
//! with threads that fault on it; backings that are slow, short, failing and gone; options that no caller
//! should give. A reader gets the right bytes or an error, never zeroes, and nothing hangs.

use std::os::unix::process::ExitStatusExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::common::{
    Gate, Stalling, again, check_all, check_page, ends, engine, file_of, fill_wanted, function,
    is_child, map, options, page, scattered, scattered_until, settles, skip, try_page, usize_of,
    wait_for, word, write_words,
};
use uzone_fault::{
    Answer, Backing, BackingError, FileBacking, FunctionBacking, LazyError, LazyMapping,
    LazyOptions, Window, ZeroBacking,
};
use uzone_os::{AccessError, sigbus};
use uzone_pages::{Advice, ByteLen, Content, FaultAround};

/// Makes copies out of bad pages an error. Returns whether that is possible here.
fn survives(name: &str) -> bool {
    if sigbus::recovers_copies() && sigbus::install().is_ok() {
        return true;
    }
    skip(name, "a copy out of a bad page ends the process: this CPU or build cannot recover it");
    false
}

/// Pages whose backing panics where it is asked what comes with them.
struct Guessing;

impl Backing for Guessing {
    fn fault(&self, window: &mut Window<'_>) -> Result<(), BackingError> {
        fill_wanted(window)
    }

    fn made_with(&self, _: u64) -> Option<std::ops::Range<u64>> {
        panic!("it does not know")
    }
}

#[test]
fn a_hint_that_panics_leaves_the_pages_as_they_are() {
    let name = "a_hint_that_panics";
    let Some(memory) = map(name, &engine(), 16 * page(), Guessing, &LazyOptions::default()) else {
        return;
    };
    for at in [3, 9, 0, 15, 7] {
        check_page(&memory, at * page());
    }
    assert!(!memory.stats().has_failed, "{memory:?}");
}

/// A thread of foreign code: it reads an address, and what it read is wrong if it is zero.
fn read_as_foreign_code_does(memory: &LazyMapping, offset: u64) -> thread::JoinHandle<u64> {
    let address = memory.addr().get() + usize_of(offset);
    thread::spawn(move || {
        let pointer = std::ptr::with_exposed_provenance::<u64>(address);
        // SAFETY: 8 aligned bytes have to be readable for as long as the load takes.
        // 1. Aligned: the mapping starts at a page and the offset is a multiple of one.
        // 2. Readable: that is what the test asks. If the memory is gone or bad, the thread gets a
        //    signal and the load never ends, which is what foreign code would see as well.
        unsafe { pointer.read_volatile() }
    })
}

#[test]
fn a_thread_that_waits_gets_a_signal_when_the_mapping_goes() {
    let name = "a_thread_that_waits_gets_a_signal_when_the_mapping_goes";
    if is_child(name) {
        let (backing, _gate, _) = Stalling::new(5 * page());
        let engine = engine();
        let Some(memory) = map(name, &engine, 64 * page(), backing, &LazyOptions::default()) else {
            return;
        };
        let reader = read_as_foreign_code_does(&memory, 5 * page());
        wait_for("the fault", || memory.stats().queued > 0);
        drop(memory);
        // The backing stalls for ever, so the reader has nothing to wait for but its end.
        let give_up = Instant::now() + Duration::from_secs(20);
        while !reader.is_finished() && Instant::now() < give_up {
            thread::yield_now();
        }
        let end = if reader.is_finished() { 3 } else { 4 };
        std::process::exit(end);
    }
    let (backing, _, _) = Stalling::new(0);
    if map(name, &engine(), page(), backing, &LazyOptions::default()).is_none() {
        return;
    }
    let mut child = again(name).spawn().unwrap();
    let status = ends(&mut child).expect("the process hangs");
    let (bus, segv) = (7, 11);
    assert_ne!(status.code(), Some(3), "the thread read something of memory that is gone");
    assert_ne!(status.code(), Some(4), "the thread waits for ever");
    assert!(status.signal().is_some_and(|signal| [bus, segv].contains(&signal)), "{status}");
}

#[test]
fn a_page_is_asked_for_once_however_many_wait_and_however_it_is_evicted() {
    let name = "a_page_is_asked_for_once";
    let engine = engine();
    for (pages, options) in [(64, options(Advice::Normal, 16)), (1024, LazyOptions::default())] {
        let (backing, gate, asked) = Stalling::new(20 * page());
        let Some(memory) = map(name, &engine, pages * page(), backing, &options) else { return };
        let memory = &memory;
        thread::scope(|scope| {
            let waiters: Vec<_> =
                (0..8).map(|_| scope.spawn(|| check_page(memory, 20 * page()))).collect();
            wait_for("eight faults", || memory.stats().faults >= 8);
            // A page that is being produced is not given back.
            memory.evict(16 * page()..32 * page()).unwrap();
            // It holds up no other page.
            for at in (0..pages).filter(|at| *at != 20) {
                check_page(memory, at * page());
            }
            assert_eq!(memory.content(20 * page()), Some(Content::Filling));
            assert!(waiters.iter().all(|waiter| !waiter.is_finished()));
            gate.open();
        });
        // Its waiters are woken a moment before that is noted.
        settles(memory, |_| memory.content(20 * page()) == Some(Content::Present));
        assert_eq!(asked.load(Ordering::SeqCst), 1);
        check_all(memory);
    }
}

#[test]
fn a_mapping_may_be_dropped_by_any_thread_and_after_its_engine() {
    let name = "a_mapping_may_be_dropped_by_any_thread";
    for round in 0..40 {
        let engine = engine();
        let slow = FunctionBacking::slow(|offset, out: &mut [u8]| {
            thread::sleep(Duration::from_micros(100));
            write_words(offset, out);
            Ok(())
        });
        let options = LazyOptions::default();
        let memory = if round % 2 == 0 {
            map(name, &engine, 64 * page(), slow, &options)
        } else {
            map(name, &engine, 64 * page(), function(), &options)
        };
        let Some(memory) = memory else { return };
        let memory = Arc::new(memory);
        drop(engine);
        let readers: Vec<_> = (0..4)
            .map(|seed| {
                let memory = memory.clone();
                thread::spawn(move || {
                    for at in scattered(seed + round * 4 + 1, 64).take(10) {
                        check_page(&memory, at * page());
                    }
                    drop(memory);
                })
            })
            .collect();
        drop(memory);
        for reader in readers {
            reader.join().unwrap();
        }
    }
}

/// Writes half of what it is given, down to no page at all.
struct Short {
    in_fault: bool,
}

impl Backing for Short {
    fn map_pages(&self, window: &mut Window<'_>) {
        while let Some(run) = window.next_run() {
            let start = run.start;
            let _ = window.copy_with(run, |out| {
                // What it did not write holds something that must never be seen.
                out.fill(0);
                let half = out.len() / 2;
                write_words(start, &mut out[..half]);
                Ok::<_, BackingError>(half)
            });
        }
    }

    fn fault(&self, window: &mut Window<'_>) -> Result<(), BackingError> {
        let range = window.range();
        let start = range.start;
        let _ = window.copy_with(range, |out| {
            write_words(start, out);
            Ok::<_, BackingError>(if self.in_fault { out.len() / 2 } else { out.len() })
        })?;
        Ok(())
    }
}

#[test]
fn a_backing_that_writes_too_little_fills_no_page_with_what_it_did_not_write() {
    let name = "a_backing_that_writes_too_little";
    let engine = engine();
    for advice in [Advice::Normal, Advice::Random, Advice::Auto] {
        let short = Short { in_fault: false };
        let options = options(advice, 16);
        let Some(memory) = map(name, &engine, 256 * page(), short, &options) else { return };
        check_all(&memory);
        assert_eq!(memory.stats().poisoned, 0);
    }
    let short = Short { in_fault: true };
    let Some(memory) = map(name, &engine, 4 * page(), short, &options(Advice::Random, 1)) else {
        return;
    };
    let error = memory.populate(0..page()).unwrap_err();
    assert!(matches!(error, LazyError::Backing { offset: 0, .. }), "{error:?}");
    assert_eq!(memory.content(0), Some(Content::Poisoned));
    if survives(name) {
        assert!(try_page(&memory, 0).is_err());
        assert!(try_page(&memory, 2 * page()).is_err());
    }
}

#[test]
fn a_file_that_goes_while_it_is_read_is_an_error_and_never_zero() {
    let name = "a_file_that_goes_while_it_is_read_is_an_error_and_never_zero";
    if !survives(name) {
        return;
    }
    let engine = engine();
    for seed in 0..5 {
        let pages = 4096;
        let file = file_of(pages * page());
        let backing = FileBacking::new(file.try_clone().unwrap()).unwrap();
        let options = options(Advice::Auto, 16);
        let Some(memory) = map(name, &engine, pages * page(), backing, &options) else { return };
        let memory = &memory;
        let read = AtomicU64::new(0);
        let read = &read;
        thread::scope(|scope| {
            for reader in 0..3 {
                scope.spawn(move || {
                    // The second half is left alone, so that something is missing even if all of the
                    // readers are done before the file goes.
                    for at in scattered(seed * 3 + reader + 1, pages / 2).take(1000) {
                        let _ = try_page(memory, at * page());
                        read.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
            wait_for("some reads", || read.load(Ordering::Relaxed) > 200);
            file.set_len(0).unwrap();
        });
        // What was read before stays, and what was not cannot be had any more.
        let bad = (0..pages).filter(|at| try_page(memory, at * page()).is_err()).count();
        assert!(bad > 0, "the file is gone");
    }
}

#[test]
fn a_page_that_misses_its_deadline_is_an_error_and_a_late_answer_changes_nothing_for_the_worse() {
    let name = "a_page_that_misses_its_deadline";
    if !survives(name) {
        return;
    }
    let engine = engine();
    for deadline in [Duration::ZERO, Duration::from_millis(30)] {
        let (backing, gate, _) = Stalling::new(3 * page());
        let options = LazyOptions::default().deadline(deadline);
        let Some(memory) = map(name, &engine, 16 * page(), backing, &options) else { return };
        let begin = Instant::now();
        assert!(matches!(try_page(&memory, 3 * page()), Err(AccessError::Bus { .. })));
        assert!(begin.elapsed() >= deadline, "it was given up too early");
        // The signal may be a moment ahead of what is known.
        settles(&memory, |_| memory.content(3 * page()) == Some(Content::Poisoned));
        settles(&memory, |it| (it.pending, it.oldest_pending, it.poisoned) == (0, None, 1));
        let failure = memory.last_failure().expect("it is known");
        assert_eq!(failure.offset, 3 * page());
        assert!(failure.reason.contains(&format!("{deadline:?}")), "{}", failure.reason);
        gate.open();
        // Whether the late page mends it or not: it is right or bad.
        for _ in 0..100 {
            let _ = try_page(&memory, 3 * page());
            thread::yield_now();
        }
        check_page(&memory, 4 * page());
    }
}

#[test]
fn a_mapping_goes_while_its_pages_wait_in_the_queue() {
    let name = "a_mapping_goes_while_its_pages_wait_in_the_queue";
    let engine = Arc::new(engine());
    let gate = Arc::new(Gate::default());
    let held = gate.clone();
    let stalling = FunctionBacking::slow(move |offset, out: &mut [u8]| {
        held.pass();
        write_words(offset, out);
        Ok(())
    });
    let Some(stalled) = map(name, &engine, 64 * page(), stalling, &LazyOptions::default()) else {
        return;
    };
    let stalled = Arc::new(stalled);
    // All threads that wait for devices wait for the gate, and there are pages behind them.
    let waiters: Vec<_> = (0..8)
        .map(|at| {
            let stalled = stalled.clone();
            thread::spawn(move || check_page(&stalled, at * page()))
        })
        .collect();
    wait_for("eight pages", || stalled.stats().queued >= 8);
    // Another mapping is made, read and dropped meanwhile: what is ready does not queue.
    for _ in 0..20 {
        let other = map(name, &engine, 64 * page(), function(), &LazyOptions::default()).unwrap();
        check_all(&other);
    }
    gate.open();
    for waiter in waiters {
        waiter.join().unwrap();
    }
    check_all(&stalled);
}

#[test]
fn absurd_options_are_refused_or_harmless() {
    let name = "absurd_options";
    let engine = engine();
    let plain = LazyOptions::default();
    if map(name, &engine, page(), ZeroBacking, &plain).is_none() {
        return;
    }
    for len in [0, 1, page() - 1, page() + 1, 1 << 62, 1 << 63, u64::MAX - page() + 1, u64::MAX] {
        let error = engine.map(ByteLen::new(len), Arc::new(ZeroBacking), &plain).unwrap_err();
        assert!(!error.to_string().is_empty(), "{len}");
    }
    for bytes in [0, 1, 4095, (2 << 20) + 1, (2 << 20) + page(), 4 << 20, u64::MAX] {
        let size = FaultAround::try_new(ByteLen::new(bytes));
        // As the kernel's: more pages than a page table has are refused, and less than one is one.
        assert_eq!(size.is_err(), bytes / page() > 512, "{bytes}");
    }
    // A window that is larger than the memory.
    let options = plain.fault_around(FaultAround::MAX);
    check_all(&map(name, &engine, 3 * page(), function(), &options).unwrap());
}

#[test]
fn a_process_without_descriptors_gets_an_error_that_names_them_and_goes_on() {
    let name = "a_process_without_descriptors_gets_an_error_that_names_them_and_goes_on";
    if !is_child(name) {
        let mut child = again(name).spawn().unwrap();
        let status = ends(&mut child).expect("the process hangs");
        assert!(status.success(), "{status}: {:?}", child.wait_with_output());
        return;
    }
    let engine = engine();
    let few = rustix::process::Rlimit { current: Some(48), maximum: Some(48) };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, few).unwrap();
    let mut memories = Vec::new();
    let refused = loop {
        match engine.map(ByteLen::new(16 * page()), Arc::new(function()), &LazyOptions::default()) {
            Ok(memory) => memories.push(memory),
            Err(error) => break error,
        }
        assert!(memories.len() < 1000, "a mapping takes a descriptor");
    };
    if memories.is_empty() {
        return skip(name, &refused.to_string());
    }
    assert!(!refused.to_string().is_empty());
    for memory in &memories {
        check_all(memory);
    }
    memories.pop();
    let again =
        engine.map(ByteLen::new(16 * page()), Arc::new(function()), &LazyOptions::default());
    check_all(&again.unwrap());
}

#[test]
fn memory_that_is_written_and_evicted_by_turns_holds_what_was_written_or_what_was_there() {
    let name = "memory_that_is_written_and_evicted_by_turns";
    let engine = engine();
    let pages = 64;
    let Some(memory) = map(name, &engine, pages * page(), function(), &options(Advice::Auto, 16))
    else {
        return;
    };
    let (memory, stop) = (&memory, &AtomicBool::new(false));
    thread::scope(|scope| {
        for seed in 0..2 {
            scope.spawn(move || {
                for at in scattered_until(stop, seed + 5, pages).map(|at| at * page()) {
                    // Only ever the complement of what the backing has.
                    memory.write_at(at, &(!word(at)).to_ne_bytes()).unwrap();
                    let seen = crate::common::word_in(memory, at);
                    assert!(seen == word(at) || seen == !word(at), "{seen:#x} at {at:#x}");
                    memory.read_at(at + 8, seen.to_ne_bytes().as_mut_slice()).unwrap();
                }
            });
        }
        scope.spawn(move || {
            for at in scattered(6, pages).take(3000) {
                memory.evict(at * page()..(at + 1) * page()).unwrap();
            }
            stop.store(true, Ordering::Relaxed);
        });
    });
    // One that was touched a moment ago may stay: its thread goes on before that is noted.
    thread::sleep(Duration::from_millis(100));
    wait_for("the end of every page", || {
        memory.evict(0..pages * page()).unwrap();
        (0..pages).all(|at| {
            let content = memory.content(at * page());
            [Some(Content::Unknown), Some(Content::Absent)].contains(&content)
        })
    });
    check_all(memory);
}

/// Where the handler of SIGUSR1 reads next, and how often it has.
static NEXT: AtomicUsize = AtomicUsize::new(0);
static READ: AtomicU64 = AtomicU64::new(0);

/// Reads a page that no thread has read before.
extern "C" fn read_the_next(_: i32) {
    let step = usize_of(page());
    let pointer = std::ptr::with_exposed_provenance::<u8>(NEXT.fetch_add(step, Ordering::Relaxed));
    // SAFETY: the byte is of a mapping that lives until the last signal was handled, and that no thread writes to.
    let _ = unsafe { pointer.read_volatile() };
    READ.fetch_add(1, Ordering::Release);
}

#[test]
fn a_handler_that_interrupts_a_change_of_the_advice_touches_memory_of_the_same_reader() {
    const SIGNALS: u64 = 3000;
    let name = "a_handler_that_interrupts_a_change_of_the_advice_touches_memory_of_the_same_reader";
    let options = LazyOptions::default().answer(Answer::Reader);
    let len = (SIGNALS + 1) * page();
    let Some(memory) = map(name, &engine(), len, ZeroBacking, &options) else { return };
    if !is_child(name) {
        // It would wait for ever.
        let mut child = again(name).spawn().unwrap();
        let status = ends(&mut child).expect("the reader waits for the interrupted thread");
        assert!(status.success(), "{status}");
        return;
    }
    NEXT.store(memory.addr().get(), Ordering::Relaxed);
    let handler: extern "C" fn(i32) = read_the_next;
    // SAFETY: all zero is the default action with an empty mask.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = handler as libc::sighandler_t;
    action.sa_flags = libc::SA_RESTART;
    // SAFETY: the action lives over the call, and its handler does what handlers may do.
    assert_eq!(unsafe { libc::sigaction(libc::SIGUSR1, &action, std::ptr::null_mut()) }, 0);
    let is_done = AtomicBool::new(false);
    thread::scope(|scope| {
        let (sender, receiver) = std::sync::mpsc::channel();
        let (memory, is_done) = (&memory, &is_done);
        scope.spawn(move || {
            // SAFETY: it wants nothing.
            sender.send(unsafe { libc::pthread_self() }).unwrap();
            while !is_done.load(Ordering::Relaxed) {
                memory.advise(Advice::Random, FaultAround::DEFAULT);
                memory.advise(Advice::Normal, FaultAround::MIN);
            }
        });
        let thread = receiver.recv().unwrap();
        for signal in 0..SIGNALS {
            // SAFETY: the thread runs until the other one sends that all is done.
            assert_eq!(unsafe { libc::pthread_kill(thread, libc::SIGUSR1) }, 0);
            while READ.load(Ordering::Acquire) <= signal {
                thread::yield_now();
            }
        }
        is_done.store(true, Ordering::Relaxed);
    });
}
