//! Faults answered by the threads that take them: the same bytes, pins, evictions and errors as with a
//! reader, and a reader where that cannot be.

use std::fs::File;
use std::io;
use std::num::{NonZeroU32, NonZeroU64, NonZeroUsize};
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use crate::common::{bytes_of, file_of, is_present, memfd_of, page, skip, usize_of, word_in};
use uzone_fault::{
    Answer, Backing, Budget, Engine, EngineOptions, FaultOutcome, FileBacking, FunctionBacking,
    LazyError, LazyMapping, LazyOptions, MapError, MemoryBacking, Refusal, WriteTracking,
    ZeroBacking,
};
use uzone_os::uffd::{FaultKind, Features, KernelFaults};
use uzone_os::{Access, Mapping, Sharing, page_cache, sigbus};
use uzone_pages::{Advice, ByteLen, Content, FaultAround};

const PAGES: u64 = 2048;
/// For how many seconds the stress test runs: 2 by default.
const STRESS: &str = "UZONE_TEST_SECONDS";

fn byte(at: u64) -> u8 {
    crate::common::word(at).to_ne_bytes()[usize_of(at % 8)]
}

fn len() -> u64 {
    PAGES * page()
}

fn memory_file() -> Arc<dyn Backing> {
    Arc::new(MemoryBacking::new(memfd_of(len()), Sharing::Private).unwrap())
}

/// Returns an engine, or prints that the case cannot run.
fn engine(name: &str) -> Option<Engine> {
    crate::common::userfaultfd(name, Features::SIGBUS | Features::POISON, KernelFaults::Never)?;
    if !sigbus::recovers_copies() {
        skip(name, "copies do not recover from SIGBUS in this build");
        return None;
    }
    Some(Engine::new(NonZeroUsize::MIN).unwrap())
}

fn in_thread() -> LazyOptions {
    LazyOptions::default().answer(Answer::InThread)
}

fn check(memory: &LazyMapping, at: u64) {
    crate::common::check_page(memory, at * page());
}

#[test]
fn every_window_and_backing_has_the_same_bytes_pins_and_evictions() {
    let Some(engine) = engine("every_window_and_backing_has_the_same_bytes") else { return };
    let source = file_of(len());
    let file =
        || -> Arc<dyn Backing> { Arc::new(FileBacking::new(source.try_clone().unwrap()).unwrap()) };
    let small = FaultAround::try_new(ByteLen::new(page())).unwrap();
    for (advice, size) in [
        (Advice::Auto, FaultAround::DEFAULT),
        (Advice::Normal, FaultAround::MAX),
        (Advice::Normal, small),
        (Advice::Random, FaultAround::DEFAULT),
        (Advice::Sequential, FaultAround::DEFAULT),
    ] {
        for backing in [file(), memory_file()] {
            let options = in_thread().advice(advice).fault_around(size);
            let memory = engine.map(ByteLen::new(len()), backing, &options).unwrap();
            assert_eq!(memory.answered_in_thread(), Ok(()));
            assert_eq!(memory.content(0), Some(Content::Absent));
            // Pinned before any touch, and after.
            let early = memory.pin(5 * page()..9 * page()).unwrap();
            thread::scope(|scope| {
                for seed in 0..4 {
                    let memory = &memory;
                    scope.spawn(move || {
                        (0..PAGES / 2).for_each(|at| check(memory, (at * 37 + seed * 11) % PAGES));
                        (0..PAGES).for_each(|at| check(memory, at));
                    });
                }
            });
            let stats = memory.stats();
            assert!(stats.faults > 0 && stats.demand + stats.around + stats.populated >= PAGES);
            assert_eq!(memory.content(100 * page()), Some(Content::Present));
            let late = memory.pin(100 * page()..200 * page()).unwrap();
            let faults = memory.stats().faults;
            (100..200).for_each(|at| check(&memory, at));
            assert_eq!(memory.stats().faults, faults, "what is pinned is present");
            // All but what is pinned is given back.
            let evicted = memory.evict(0..len()).unwrap();
            assert_eq!(evicted, PAGES - 104, "{advice:?} {size:?}");
            assert_eq!(memory.stats().evicted, evicted);
            assert_eq!(memory.content(300 * page()), Some(Content::Absent));
            drop((early, late));
            memory.write_at(300 * page(), &[byte(300 * page())]).unwrap();
            memory.populate(0..len()).unwrap();
            let faults = memory.stats().faults;
            (0..PAGES).for_each(|at| check(&memory, at));
            assert_eq!(memory.stats().faults, faults, "what is populated is present");
            assert_eq!(memory.evict(0..len()).unwrap(), PAGES);
            (0..PAGES).for_each(|at| check(&memory, at));
        }
    }
}

#[test]
fn a_reader_answers_where_a_thread_cannot_and_states_why() {
    let Some(engine) = engine("a_reader_answers_where_a_thread_cannot") else { return };
    let forbidding = Engine::with(EngineOptions::default().handles_sigbus(false)).unwrap();
    let zero = || -> Arc<dyn Backing> { Arc::new(ZeroBacking) };
    let function = Arc::new(FunctionBacking::quick(|_, out: &mut [u8]| {
        out.fill(0);
        Ok(())
    }));
    let by = |engine: &Engine, backing: Arc<dyn Backing>, options: LazyOptions| {
        let memory = engine.map(ByteLen::new(4 * page()), backing, &options).unwrap();
        assert_eq!(bytes_of(&memory, page(), 1), [0]);
        memory.answered_in_thread()
    };
    let auto = LazyOptions::default();
    assert_eq!(by(&engine, zero(), auto.clone().kernel_faults(KernelFaults::Never)), Ok(()));
    let slow = Budget::default().bytes_per_second(ByteLen::mib(1));
    for options in [
        in_thread().track_writes(WriteTracking::Sync),
        in_thread().trace(8),
        in_thread().deadline(Duration::from_secs(9)),
        in_thread().budget(slow),
        in_thread().on_failure(|_| Refusal::Poison),
    ] {
        assert_eq!(by(&engine, zero(), options), Ok(()));
    }
    for (reason, answered) in [
        ("asked for", by(&engine, zero(), auto.clone().answer(Answer::Reader))),
        ("must not handle SIGBUS", by(&forbidding, zero(), in_thread())),
        ("runs code", by(&engine, function, in_thread())),
        ("wanted", by(&engine, zero(), in_thread().kernel_faults(KernelFaults::Required))),
    ] {
        let why = answered.unwrap_err();
        assert!(why.contains(reason), "{why}");
    }
}

#[test]
fn a_page_of_a_file_that_was_cut_is_an_error_and_never_zero() {
    let Some(engine) = engine("a_page_of_a_file_that_was_cut_is_an_error") else { return };
    let source = file_of(len());
    let backing = Arc::new(FileBacking::new(source.try_clone().unwrap()).unwrap());
    let memory = engine.map(ByteLen::new(len()), backing, &in_thread()).unwrap();
    check(&memory, 3);
    source.set_len(50 * page() + 3).unwrap();
    for at in [50, 51, PAGES - 1] {
        memory.read_at(at * page(), &mut [0]).unwrap_err();
        memory.pin(at * page()..(at + 1) * page()).unwrap_err();
        memory.populate(at * page()..(at + 1) * page()).unwrap_err();
    }
    (0..50).for_each(|at| check(&memory, at));
}

#[test]
fn with_a_deadline_pages_that_are_ready_and_those_that_are_not_have_the_same_bytes() {
    let Some(engine) = engine("with_a_deadline_pages_have_the_same_bytes") else { return };
    // One page more, of which the file has a part.
    let part = usize::try_from(page() / 2).unwrap();
    let source = crate::common::file_with(&(0..len() + page() / 2).map(byte).collect::<Vec<_>>());
    let whole = NonZeroU64::new(len()).unwrap();
    let backing = Arc::new(FileBacking::new(source.try_clone().unwrap()).unwrap());
    for track in [None, Some(WriteTracking::Sync)] {
        for advice in [Advice::Auto, Advice::Random, Advice::Normal] {
            let mut options = in_thread().advice(advice).deadline(Duration::from_secs(60));
            options = track.into_iter().fold(options, LazyOptions::track_writes);
            let mapped = ByteLen::new(len() + page());
            let memory = engine.map(mapped, backing.clone(), &options).unwrap();
            assert_eq!(memory.answered_in_thread(), Ok(()));
            // What is still mapped by a copy stays cached.
            page_cache::forget(&source, 0, whole).unwrap();
            thread::scope(|scope| {
                for seed in 0..4 {
                    let memory = &memory;
                    scope.spawn(move || {
                        (0..PAGES).for_each(|at| check(memory, (at * 37 + seed * 511) % PAGES));
                    });
                }
            });
            let last = bytes_of(&memory, len(), page());
            assert!(last[..part].iter().copied().eq((len()..len() + page() / 2).map(byte)));
            assert!(last[part..].iter().all(|&byte| byte == 0));
            // A thread goes on before the thread that produced its page has taken it off the list.
            crate::common::settles(&memory, |stats| stats.pending == 0);
            assert_eq!(memory.stats().poisoned, 0, "{:?}", memory.stats());
            let pinned = memory.pin(0..9 * page()).unwrap();
            crate::common::wait_for("the last page", || {
                memory.content(len()) == Some(Content::Present)
            });
            // The reader may still fill windows of the faults that it was handed.
            crate::common::wait_for("all but the pinned pages to be given back", || {
                assert!(memory.evict(0..mapped.get()).unwrap() <= PAGES + 1 - 9);
                let absent = |at: &u64| memory.content(at * page()) == Some(Content::Absent);
                (0..=PAGES).filter(absent).eq(9..=PAGES)
            });
            drop(pinned);
            (0..PAGES).for_each(|at| check(&memory, at));
            if track.is_some() {
                memory.write_at(3 * page(), &[byte(3 * page())]).unwrap();
                let dirty = memory.dirty(0..mapped.get()).unwrap();
                assert!(dirty.len() == 1 && dirty[0] == (3 * page()..4 * page()), "{dirty:?}");
            }
        }
    }
}

#[test]
fn a_page_of_a_file_that_was_cut_is_bad_where_its_failure_is_decided_about() {
    let Some(engine) = engine("a_page_of_a_file_that_was_cut_is_bad") else { return };
    let source = file_of(len());
    let backing = Arc::new(FileBacking::new(source.try_clone().unwrap()).unwrap());
    let seen = Arc::new(Mutex::new(Vec::new()));
    let noted = seen.clone();
    let options = in_thread().advice(Advice::Normal).fault_around(FaultAround::MAX);
    let options = options.on_failure(move |failure| {
        noted.lock().unwrap().push(failure.offset / page());
        Refusal::Poison
    });
    let memory = engine.map(ByteLen::new(len()), backing, &options).unwrap();
    source.set_len(50 * page() + 3).unwrap();
    for at in [50, 51, PAGES - 1] {
        for _ in 0..2 {
            memory.read_at(at * page(), &mut [0]).unwrap_err();
        }
        assert_eq!(memory.content(at * page()), Some(Content::Poisoned));
    }
    (0..50).for_each(|at| check(&memory, at));
    assert_eq!(*seen.lock().unwrap(), [50, 51, PAGES - 1]);
    assert_eq!(memory.stats().poisoned, 3);
    // It stays bad, and no window of its neighbours fills it.
    source.set_len(len()).unwrap();
    (60..PAGES - 1).for_each(|at| memory.read_at(at * page(), &mut [0]).unwrap());
    memory.read_at(51 * page(), &mut [0]).unwrap_err();
}

#[test]
fn threads_keep_the_budget_of_their_mapping_and_not_those_beside_it() {
    let Some(engine) = engine("threads_keep_the_budget_of_their_mapping") else { return };
    let source = file_of(len());
    let map = |options: &LazyOptions| {
        let backing = Arc::new(FileBacking::new(source.try_clone().unwrap()).unwrap());
        engine.map(ByteLen::new(len()), backing, options).unwrap()
    };
    let one_page = in_thread().advice(Advice::Random);
    let faults = Budget::default().faults_per_second(NonZeroU32::new(1000));
    let (noisy, quiet) = (map(&one_page.clone().budget(faults)), map(&one_page));
    let begin = Instant::now();
    thread::scope(|scope| {
        for part in 0..2 {
            let noisy = &noisy;
            scope.spawn(move || (0..200).for_each(|at| check(noisy, 2 * at + part)));
        }
        crate::common::wait_for("a thread that is held", || noisy.stats().held > 0);
        let before = noisy.stats().faults;
        (0..400).for_each(|at| check(&quiet, at));
        let meanwhile = noisy.stats().faults - before;
        assert!(meanwhile < 200, "{meanwhile}");
    });
    // A tenth of a second is saved up.
    assert!(begin.elapsed() >= Duration::from_millis(299), "{:?}", begin.elapsed());
    assert_eq!((noisy.stats().demand, quiet.stats().held), (400, 0));
    let bytes = Budget::default().bytes_per_second(ByteLen::new(1000 * page()));
    let noisy = map(&in_thread().budget(bytes));
    let begin = Instant::now();
    (0..400).for_each(|at| check(&noisy, at));
    assert!(begin.elapsed() >= Duration::from_millis(150), "{:?}", begin.elapsed());
    assert!(noisy.stats().faults < 100, "windows as ever: {:?}", noisy.stats());
}

#[test]
fn faults_that_threads_answer_are_recorded() {
    let Some(engine) = engine("faults_that_threads_answer_are_recorded") else { return };
    let options = in_thread().advice(Advice::Random).trace(16).track_writes(WriteTracking::Sync);
    let source = file_of(len());
    let backing = Arc::new(FileBacking::new(source.try_clone().unwrap()).unwrap());
    let memory = engine.map(ByteLen::new(len()), backing, &options).unwrap();
    check(&memory, 7);
    memory.write_at(7 * page(), &[byte(7 * page())]).unwrap();
    memory.write_at(9 * page(), &[byte(9 * page())]).unwrap();
    source.set_len(10 * page()).unwrap();
    memory.read_at(20 * page(), &mut [0]).unwrap_err();
    let (records, lost) = memory.take_trace();
    assert_eq!(lost, 0);
    let seen: Vec<_> = records
        .iter()
        .map(|fault| (fault.offset / page(), fault.class, fault.is_write, fault.outcome))
        .collect();
    let (ready, failed) = (FaultOutcome::Ready, FaultOutcome::Failed);
    assert_eq!(seen[0], (7, FaultKind::Missing, false, ready));
    assert_eq!(seen[1], (7, FaultKind::WriteProtect, true, ready));
    // A page that is missing is read before it is written to.
    assert_eq!(seen[2], (9, FaultKind::Missing, false, ready));
    assert_eq!(seen[3], (9, FaultKind::WriteProtect, true, ready));
    assert_eq!((seen[4].0, seen[4].3), (20, failed));
    assert!(records.is_sorted_by_key(|fault| fault.at));
    assert_eq!(memory.dirty(0..len()).unwrap().len(), 2);
    let stats = memory.stats();
    assert_eq!((stats.faults, stats.write_protect), (5, 2), "{stats:?}");
    assert_eq!(memory.latencies().iter().map(|latency| latency.count).sum::<u64>(), 5);
    // The last ones are kept.
    source.set_len(len()).unwrap();
    (100..150).for_each(|at| memory.read_at(at * page(), &mut [0]).unwrap());
    let (records, lost) = memory.take_trace();
    assert_eq!((records.len(), lost), (16, 34));
    assert_eq!(records[15].offset, 149 * page());
}

/// Bytes of an alternate stack, and what they are before it is used.
const STACK: usize = 256 << 10;
const PAINT: u8 = 0xa5;
/// How much of it the handler may take below the kernel's frame.
const MOST_STACK: usize = 2 << 10;
/// Where the kernel's frame of a signal was lowest.
static FRAME: AtomicUsize = AtomicUsize::new(0);

extern "C" fn note_frame(_: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    FRAME.store(info.addr().min(context.addr()), Ordering::Relaxed);
}

/// Runs `on` by an alternate stack of painted bytes. Returns how far below the kernel's frame of a signal
/// they were written over.
fn stack_taken(on: impl FnOnce()) -> usize {
    let mut bytes = vec![PAINT; STACK];
    let painted = libc::stack_t { ss_sp: bytes.as_mut_ptr().cast(), ss_flags: 0, ss_size: STACK };
    let handler: extern "C" fn(_, _, _) = note_frame;
    // SAFETY: all zero is the default action with an empty mask.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = handler as libc::sighandler_t;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    // SAFETY: all zero is no stack, and is written over.
    let mut before: libc::stack_t = unsafe { std::mem::zeroed() };
    // SAFETY: the bytes live until the stack of before is back, and nothing else is done with them meanwhile.
    assert_eq!(unsafe { libc::sigaltstack(&painted, &mut before) }, 0);
    // SAFETY: the action lives over the call, and its handler stores a number.
    assert_eq!(unsafe { libc::sigaction(libc::SIGUSR2, &action, std::ptr::null_mut()) }, 0);
    on();
    // SAFETY: it touches no memory but by that handler.
    assert_eq!(unsafe { libc::raise(libc::SIGUSR2) }, 0);
    // SAFETY: that stack is this thread's own, and lives as long as it does.
    assert_eq!(unsafe { libc::sigaltstack(&before, std::ptr::null_mut()) }, 0);
    let lowest = bytes.iter().position(|&byte| byte != PAINT).unwrap();
    let frame = FRAME.load(Ordering::Relaxed) - bytes.as_ptr().addr();
    assert!(
        frame < STACK && lowest > 0,
        "the frame is not on the stack, or there was too little of it"
    );
    frame - lowest
}

#[test]
fn the_handler_takes_at_most_2_kib_of_stack_for_each_backing_and_option() {
    let Some(engine) = engine("the_handler_takes_at_most_2_kib_of_stack") else { return };
    let source = file_of(len());
    let whole = || Arc::new(FileBacking::writable(source.try_clone().unwrap()).unwrap());
    let backings: [(&str, Arc<dyn Backing>); 3] =
        [("a file", whole()), ("a memory file", memory_file()), ("zeroes", Arc::new(ZeroBacking))];
    let budget = Budget::default().bytes_per_second(ByteLen::gib(64));
    let ways = [
        ("plain", in_thread()),
        ("tracked", in_thread().track_writes(WriteTracking::Sync)),
        ("recorded, paced", in_thread().trace(64).budget(budget)),
        ("with a deadline", in_thread().deadline(Duration::from_secs(60))),
    ];
    let engine = &engine;
    for (backing, of) in &backings {
        for (way, options) in &ways {
            // Its own thread has an alternate stack of its own.
            let taken = thread::scope(|scope| {
                let taken = || {
                    let options = options.clone();
                    let memory = engine.map(ByteLen::new(len()), of.clone(), &options).unwrap();
                    assert_eq!(memory.answered_in_thread(), Ok(()));
                    let (mut seen, mut faults) = ([0; 8], 0);
                    let taken = stack_taken(|| {
                        for at in (0..PAGES).step_by(7) {
                            memory.read_at(at * page(), &mut seen).unwrap();
                            memory.write_at(at * page(), &seen).unwrap();
                        }
                        faults = memory.stats().faults;
                    });
                    assert!(faults > 0, "{backing}, {way}: no fault");
                    taken
                };
                scope.spawn(taken).join().unwrap()
            });
            eprintln!("{backing}, {way}: {taken} bytes below the frame");
            assert!((1..=MOST_STACK).contains(&taken), "{backing}, {way}: {taken} bytes");
        }
    }
}

/// A handler of SIGBUS of another library, which passes nothing on.
extern "C" fn foreign(_: i32) {
    // SAFETY: _exit(2) may be called in a handler.
    unsafe { libc::_exit(3) }
}

#[test]
fn a_reader_answers_where_another_handler_of_sigbus_came_later() {
    let name = "a_reader_answers_where_another_handler_of_sigbus_came_later";
    let Some(engine) = engine(name) else { return };
    if !crate::common::is_child(name) {
        // The handler is for all of a process.
        let mut child = crate::common::again(name).spawn().unwrap();
        let status = crate::common::ends(&mut child).expect("it hangs");
        assert!(status.success(), "{status}");
        return;
    }
    let source = file_of(len());
    let map = |options: &LazyOptions| {
        let backing = Arc::new(FileBacking::new(source.try_clone().unwrap()).unwrap());
        engine.map(ByteLen::new(len()), backing, options).unwrap()
    };
    let first = map(&in_thread());
    assert_eq!(first.answered_in_thread(), Ok(()));
    (0..PAGES / 2).for_each(|at| check(&first, at));
    let handler: extern "C" fn(i32) = foreign;
    // SAFETY: all zero is the default action with an empty mask.
    let (mut action, mut ours): (libc::sigaction, libc::sigaction) = unsafe { std::mem::zeroed() };
    action.sa_sigaction = handler as libc::sighandler_t;
    // SAFETY: both live over the call, and the handler does what handlers may do.
    assert_eq!(unsafe { libc::sigaction(libc::SIGBUS, &action, &mut ours) }, 0);
    for options in [in_thread(), LazyOptions::default().kernel_faults(KernelFaults::Never)] {
        let memory = map(&options);
        let reason = "the process has another handler of SIGBUS";
        assert_eq!(memory.answered_in_thread(), Err(reason));
        (0..PAGES).for_each(|at| check(&memory, at));
        assert!(memory.stats().faults > 0);
    }
    // Once it is gone, threads answer again, also for what was mapped before.
    // SAFETY: the action is the one that was there.
    assert_eq!(unsafe { libc::sigaction(libc::SIGBUS, &ours, std::ptr::null_mut()) }, 0);
    let last = map(&in_thread());
    assert_eq!(last.answered_in_thread(), Ok(()));
    for memory in [&first, &last] {
        (0..PAGES).for_each(|at| check(memory, at));
    }
}

#[test]
fn a_call_names_the_handler_that_came_after_the_mapping_whose_faults_it_would_not_answer() {
    let name =
        "a_call_names_the_handler_that_came_after_the_mapping_whose_faults_it_would_not_answer";
    let Some(engine) = engine(name) else { return };
    if !crate::common::is_child(name) {
        let mut child = crate::common::again(name).spawn().unwrap();
        let status = crate::common::ends(&mut child).expect("it hangs");
        assert!(status.success(), "{status}");
        return;
    }
    let backing = Arc::new(FileBacking::new(file_of(len())).unwrap());
    let by_reader = LazyOptions::default().answer(Answer::Reader);
    let other = engine.map(ByteLen::new(len()), backing.clone(), &by_reader).unwrap();
    let options = in_thread().track_writes(WriteTracking::Sync);
    let memory = engine.map(ByteLen::new(len()), backing, &options).unwrap();
    check(&memory, 0);
    let handler: extern "C" fn(i32) = foreign;
    // SAFETY: all zero is the default action with an empty mask.
    let (mut action, mut ours): (libc::sigaction, libc::sigaction) = unsafe { std::mem::zeroed() };
    action.sa_sigaction = handler as libc::sighandler_t;
    // SAFETY: both live over the call, and the handler does what handlers may do.
    assert_eq!(unsafe { libc::sigaction(libc::SIGBUS, &action, &mut ours) }, 0);
    let range = || 0..8 * page();
    for error in [
        memory.populate(range()).unwrap_err(),
        memory.populate_cached(range()).unwrap_err(),
        memory.pin(range()).unwrap_err(),
        memory.evict(range()).unwrap_err(),
        memory.dirty(range()).unwrap_err(),
        memory.write_back(range()).unwrap_err(),
    ] {
        assert!(matches!(error, LazyError::HandlerReplaced), "{error}");
        assert!(error.to_string().contains("another handler of SIGBUS"), "{error}");
    }
    // Others do not need it.
    other.populate(range()).unwrap();
    // SAFETY: the action is the one that was there.
    assert_eq!(unsafe { libc::sigaction(libc::SIGBUS, &ours, std::ptr::null_mut()) }, 0);
    memory.populate(range()).unwrap();
    check(&memory, 100);
}

/// Where the handler of SIGUSR1 reads, how often it has, and how often the byte was wrong.
static LAZY: AtomicUsize = AtomicUsize::new(0);
static SIGNALS: AtomicU64 = AtomicU64::new(0);
static WRONG: AtomicU64 = AtomicU64::new(0);

/// Reads a byte of lazily mapped memory, wherever its thread is.
extern "C" fn read_a_byte(_: i32) {
    let signals = SIGNALS.fetch_add(1, Ordering::Relaxed);
    let at = signals.wrapping_mul(0x9e37_79b9_7f4a_7c15) % len();
    let address = LAZY.load(Ordering::Relaxed) + usize::try_from(at).unwrap_or(0);
    let pointer = std::ptr::with_exposed_provenance::<u8>(address);
    // SAFETY: the byte is of a mapping that lives until the last signal was handled, and that no thread
    // writes to.
    let seen = unsafe { pointer.read_volatile() };
    WRONG.fetch_add(u64::from(seen != byte(at)), Ordering::Relaxed);
}

/// Has SIGUSR1 read the memory.
fn read_by_signal(memory: &LazyMapping) {
    LAZY.store(memory.addr().get(), Ordering::Relaxed);
    let handler: extern "C" fn(i32) = read_a_byte;
    // SAFETY: all zero is the default action with an empty mask.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = handler as libc::sighandler_t;
    action.sa_flags = libc::SA_RESTART;
    // SAFETY: the action lives over the call, and its handler does what handlers may do.
    let answer = unsafe { libc::sigaction(libc::SIGUSR1, &action, std::ptr::null_mut()) };
    assert_eq!(answer, 0);
}

/// Forks; the child then is another program. Without what runs before that, std would not fork.
fn fork_once() {
    let mut command = Command::new("/bin/true");
    // SAFETY: what runs in the child after the fork may only make system calls, and this makes none.
    unsafe { command.pre_exec(|| Ok(())) };
    assert!(command.status().unwrap().success());
}

#[test]
fn what_others_wrote_behind_the_end_of_a_file_is_not_seen() {
    let Some(engine) = engine("what_others_wrote_behind_the_end_of_a_file") else { return };
    let source = file_of(len());
    let (end, last, len) = (5 * page() + 100, 5 * page()..6 * page(), ByteLen::new(6 * page()));
    let (access, sharing) = (Access::ReadWrite, Sharing::Shared);
    let other = Mapping::file(source.try_clone().unwrap(), 0, len, access, sharing).unwrap();
    source.set_len(end).unwrap();
    other.write_at(end + 100, &[77; 100]).unwrap();
    let backing: Arc<dyn Backing> = Arc::new(FileBacking::new(source).unwrap());
    let at = last.start;
    {
        let memory = engine.map(len, backing, &in_thread()).unwrap();
        let seen = bytes_of(&memory, at, page());
        assert!(seen[..100].iter().zip(last.start..).all(|(seen, at)| *seen == byte(at)));
        assert!(seen[100..].iter().all(|seen| *seen == 0));
    }
}

/// Whether dropping in a child that was forked off what has threads in its parent neither waits for them nor takes
/// anything from the parent.
#[test]
fn a_child_that_was_forked_off_drops_mappings_and_engines() {
    for answer in [Answer::Reader, Answer::InThread] {
        let options = LazyOptions::default().answer(answer);
        let backings: [Arc<dyn Backing>; 2] =
            [Arc::new(FileBacking::new(file_of(len())).unwrap()), memory_file()];
        for backing in backings {
            let options = options.clone().deadline(Duration::from_secs(100));
            let engine = Engine::with(EngineOptions::default().own_threads()).unwrap();
            let Ok(memory) = engine.map(ByteLen::new(len()), backing.clone(), &options) else {
                return skip("a_child_that_was_forked_off", "no userfaultfd to be had");
            };
            check(&memory, 1);
            let held = Arc::new(Mutex::new(Some((memory, engine))));
            let theirs = held.clone();
            let mut command = Command::new("/bin/true");
            let drops = move || {
                // SAFETY: alarm(2) touches no memory. It ends a child that waits for ever.
                unsafe { libc::alarm(20) };
                let (memory, engine) = theirs.lock().unwrap().take().unwrap();
                let refused = engine.map(ByteLen::new(len()), backing.clone(), &options);
                let is_refused = matches!(refused, Err(MapError::Forked));
                drop((memory, engine));
                if is_refused { Ok(()) } else { Err(io::ErrorKind::Other.into()) }
            };
            // SAFETY: the child has no other thread. It allocates, as no thread of this test does meanwhile, and the
            // C library keeps its allocator usable in a child.
            unsafe { command.pre_exec(drops) };
            assert!(command.status().unwrap().success(), "{answer:?}");
            let (memory, _engine) = held.lock().unwrap().take().unwrap();
            (0..PAGES).step_by(7).for_each(|at| check(&memory, at));
        }
    }
}

/// Maps a file, of which a part is cut off before it was read: each page behind the cut is an error.
fn map_and_cut(engine: &Engine) {
    let source = file_of(len());
    let backing = FileBacking::new(source.try_clone().unwrap()).unwrap();
    let memory = engine.map(ByteLen::new(len()), Arc::new(backing), &in_thread()).unwrap();
    (0..PAGES).step_by(67).for_each(|at| check(&memory, at));
    let left = PAGES / 2;
    source.set_len(left * page()).unwrap();
    memory.evict(0..len()).unwrap();
    (0..PAGES).step_by(31).for_each(|at| match at < left {
        true => check(&memory, at),
        false => assert!(memory.read_at(at * page(), &mut [0]).is_err(), "page {at}"),
    });
    // And where it was made bad.
    let behind = left * page()..(left + 1) * page();
    assert!(memory.populate(behind.clone()).is_err());
    assert!(memory.read_at(behind.start, &mut [0]).is_err());
}

/// Threads that read, write, pin, evict, populate, map and unmap, for a while; signals of which the handlers
/// take faults too, forks, and files that are cut.
#[test]
fn many_threads_over_mappings_that_come_and_go_see_the_right_bytes() {
    for answer in [Answer::InThread, Answer::Reader] {
        SIGNALS.store(0, Ordering::Relaxed);
        many_threads(answer);
    }
}

fn many_threads(answer: Answer) {
    let Some(engine) = engine("many_threads_over_mappings_that_come_and_go") else { return };
    let seconds = std::env::var(STRESS).map_or(2, |seconds| seconds.parse().unwrap());
    let engine = &engine;
    let in_thread = || LazyOptions::default().answer(answer);
    let pagemap = &File::open("/proc/self/pagemap").unwrap();
    let (source, written, cold) = (file_of(len()), file_of(len()), &file_of(len()));
    let file = || Arc::new(FileBacking::new(source.try_clone().unwrap()).unwrap());
    let long = &engine.map(ByteLen::new(len()), file(), &in_thread()).unwrap();
    let other = &engine.map(ByteLen::new(len()), memory_file(), &in_thread()).unwrap();
    // Its pages are not always cached, and are handed over then.
    let late = Arc::new(FileBacking::new(cold.try_clone().unwrap()).unwrap());
    let options = in_thread().deadline(Duration::from_secs(600));
    let late = &engine.map(ByteLen::new(len()), late, &options).unwrap();
    written.write_all_at(&vec![0; usize::try_from(len()).unwrap()], 0).unwrap();
    let options = in_thread().track_writes(WriteTracking::Sync);
    let writable = Arc::new(FileBacking::writable(written.try_clone().unwrap()).unwrap());
    let tracked = &engine.map(ByteLen::new(len()), writable, &options).unwrap();
    assert_eq!(tracked.answered_in_thread().is_ok(), answer == Answer::InThread);
    let memories = [long, other, late, tracked];
    let are_busy = |memories: &[&LazyMapping]| {
        memories.iter().all(|memory| {
            let stats = memory.stats();
            stats.faults > 100 && stats.evicted > 100
        })
    };
    let forks = &AtomicU64::new(0);
    let is_interrupted =
        || SIGNALS.load(Ordering::Relaxed) > 1000 && forks.load(Ordering::Relaxed) > 0;
    let (end, is_over) = (Instant::now() + Duration::from_secs(seconds), &AtomicBool::new(false));
    read_by_signal(other);
    let signalled = &Mutex::new(Vec::new());
    thread::scope(|scope| {
        let threads: Vec<_> = (0..12_u64)
            .map(|seed| {
                scope.spawn(move || {
                    // SAFETY: pthread_self(3) touches no memory.
                    signalled.lock().unwrap().push(unsafe { libc::pthread_self() });
                    let mut at = seed * 7919;
                    // What this thread wrote last to its word of each page.
                    let mut last = vec![0_u64; usize::try_from(PAGES).unwrap()];
                    while !is_over.load(Ordering::Acquire) {
                        at = at.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1442);
                        let page_number = (at >> 33) % PAGES;
                        let memory = [long, other, late, other][usize::try_from(at >> 62).unwrap()];
                        check(memory, page_number);
                        if seed % 4 == 0 {
                            let range = page_number * page()..(page_number + 1) * page();
                            let pinned = memory.pin(range).unwrap();
                            let address = memory.addr().get() as u64 + page_number * page();
                            assert!(is_present(pagemap, address), "a pinned page is absent");
                            check(memory, page_number);
                            drop(pinned);
                        }
                        let word = page_number * page() + 8 * seed;
                        let held = (seed % 4 == 1).then(|| {
                            tracked.pin_for_write(page_number * page()..(page_number + 1) * page())
                        });
                        let last = &mut last[usize::try_from(page_number).unwrap()];
                        assert_eq!(word_in(tracked, word), *last, "page {page_number}");
                        tracked.write_at(word, &u64::to_ne_bytes(at)).unwrap();
                        *last = at;
                        drop(held.transpose().unwrap());
                    }
                    // No signal comes after this.
                    signalled.lock().unwrap().clear();
                    last
                })
            })
            .collect();
        scope.spawn(|| {
            // SAFETY: as above.
            signalled.lock().unwrap().push(unsafe { libc::pthread_self() });
            while !is_over.load(Ordering::Acquire) {
                page_cache::forget(cold, 0, NonZeroU64::new(len()).unwrap()).unwrap();
                for memory in [long, other, late] {
                    memory.evict(0..len()).unwrap();
                    memory.populate(0..64 * page()).unwrap();
                }
                for at in (0..PAGES).step_by(64) {
                    let some = at * page()..(at + 64) * page();
                    tracked.write_back(some.clone()).unwrap();
                    tracked.evict(some).unwrap();
                }
            }
            signalled.lock().unwrap().clear();
        });
        scope.spawn(|| {
            while !is_over.load(Ordering::Acquire) {
                for &thread in &*signalled.lock().unwrap() {
                    // SAFETY: the thread runs: it takes itself off the list before it ends, under the lock.
                    assert_eq!(unsafe { libc::pthread_kill(thread, libc::SIGUSR1) }, 0);
                }
                thread::sleep(Duration::from_micros(500));
            }
        });
        scope.spawn(|| {
            while !is_over.load(Ordering::Acquire) {
                fork_once();
                forks.fetch_add(1, Ordering::Relaxed);
                map_and_cut(engine);
            }
        });
        scope.spawn(|| {
            // On a machine that is busy otherwise, until there was something to see.
            let late = end + Duration::from_secs(60);
            let is_enough = || are_busy(&memories) && is_interrupted();
            while Instant::now() < end || !is_enough() && Instant::now() < late {
                let memory = engine.map(ByteLen::new(len()), file(), &in_thread()).unwrap();
                (0..PAGES).step_by(31).for_each(|at| check(&memory, at));
            }
            is_over.store(true, Ordering::Release);
        });
        let lasts: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        tracked.write_back(0..len()).unwrap();
        for at in 0..PAGES {
            for (seed, last) in (0..).zip(&lasts) {
                let mut word = [0; 8];
                written.read_exact_at(&mut word, at * page() + 8 * seed).unwrap();
                assert_eq!(u64::from_ne_bytes(word), last[usize::try_from(at).unwrap()], "{at}");
            }
        }
    });
    let (signals, wrong) = (SIGNALS.load(Ordering::Relaxed), WRONG.load(Ordering::Relaxed));
    let forks = forks.load(Ordering::Relaxed);
    eprintln!("{answer:?}: {signals} signals, {forks} forks");
    assert!(wrong == 0 && is_interrupted(), "{wrong} of {signals}, {forks}");
    for memory in memories {
        let stats = memory.stats();
        assert!(are_busy(&[memory]), "{stats:?}");
        eprintln!(
            "{} faults, {} of writes, {} evicted",
            stats.faults, stats.write_protect, stats.evicted
        );
    }
}
