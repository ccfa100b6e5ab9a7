//! Pages that are not ready: a thread that waits for them holds up no other, and does not wait for ever.
//!
//! A case that needs something the host lacks is skipped by name with the reason, and fails instead
//! where `REQUIRE_ALL=1` is set.

use std::fs::File;
use std::num::{NonZeroU32, NonZeroUsize};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use crate::common::{
    Gate, Stalling, anonymous, check_page, function, mapped, page, region_at, registered, remote,
    skip, try_page, userfaultfd, wait_for, words, words_at, write_words,
};
use uzone_fault::{
    Backing, BackingError, Budget, Engine, EngineOptions, FaultOutcome, FileBacking,
    FunctionBacking, LazyMapping, LazyOptions, Window,
};
use uzone_os::uffd::{FaultKind, Features, KernelFaults, Registered};
use uzone_os::{Mapping, page_cache, sigbus};
use uzone_pages::{Advice, ByteLen, Content, FaultAround};

fn size() -> usize {
    usize::try_from(page()).unwrap()
}

fn is_right(memory: &Mapping, at: u64) -> bool {
    let mut seen = vec![0; size()];
    memory.read_at(at * page(), &mut seen).unwrap();
    seen == words_at(at * page(), page())
}

fn engine(options: EngineOptions) -> Engine {
    Engine::with(options).unwrap()
}

fn two() -> NonZeroUsize {
    NonZeroUsize::new(2).unwrap()
}

#[test]
fn a_mapping_with_a_budget_is_held_up_and_not_the_one_beside_it() {
    let check = |memory: &LazyMapping, at: u64| check_page(memory, at * page());
    let engine = engine(EngineOptions::default().readers(NonZeroUsize::MIN));
    let backing = || Arc::new(function());
    let len = ByteLen::new(400 * page());
    let one_page = LazyOptions::default().advice(Advice::Random);
    let rate = |faults| Budget::default().faults_per_second(NonZeroU32::new(faults));
    let limited = one_page.clone().budget(rate(1000));
    let Some(noisy) = mapped("a budget", engine.map(len, backing(), &limited)) else { return };
    let quiet = engine.map(len, backing(), &one_page).unwrap();
    let begin = Instant::now();
    thread::scope(|scope| {
        let noise = scope.spawn(|| (0..400).for_each(|at| check(&noisy, at)));
        wait_for("it is held up", || noisy.stats().held > 0);
        let (before, begun) = (noisy.stats().faults, Instant::now());
        (0..400).for_each(|at| check(&quiet, at));
        // In the time of as many as the other one was let have.
        let meanwhile = noisy.stats().faults - before;
        let most = 150 + begun.elapsed().as_millis();
        assert!(u128::from(meanwhile) < most, "{meanwhile} of {most}");
        noise.join().unwrap();
    });
    // A tenth of a second is saved up.
    assert!(begin.elapsed() >= Duration::from_millis(299), "{:?}", begin.elapsed());
    // A page is counted a moment after its waiter is woken.
    wait_for("all are counted", || noisy.stats().demand == 400);
    assert_eq!(quiet.stats().held, 0);
    // What is given back waits for its turn too, and is missing afterwards.
    noisy.evict(0..8 * page()).unwrap();
    (0..8).for_each(|at| check(&noisy, at));
    drop(noisy);

    // Pages that are being produced, and bytes.
    let (slow, gate, _) = Stalling::new(0);
    let options = one_page.budget(Budget::default().pending(NonZeroUsize::MIN));
    let noisy = engine.map(len, Arc::new(slow), &options).unwrap();
    thread::scope(|scope| {
        let first = scope.spawn(|| check(&noisy, 0));
        wait_for("it is produced", || noisy.stats().pending == 1);
        let second = scope.spawn(|| check(&noisy, 1));
        wait_for("it waits", || noisy.stats().held == 1);
        assert!(!second.is_finished());
        gate.open();
        first.join().unwrap();
        second.join().unwrap();
    });
    let options = LazyOptions::default()
        .budget(Budget::default().bytes_per_second(ByteLen::new(1000 * page())));
    let noisy = engine.map(len, backing(), &options).unwrap();
    let begin = Instant::now();
    (0..400).for_each(|at| check(&noisy, at));
    assert!(begin.elapsed() >= Duration::from_millis(150), "{:?}", begin.elapsed());
    assert!(noisy.stats().faults < 100, "windows as ever: {:?}", noisy.stats());
}

/// As a closure does that allocates, for a fault inside the allocator.
#[test]
fn a_closure_that_needs_what_the_faulting_thread_holds_is_given_up_at_the_deadline() {
    sigbus::install().unwrap();
    let held = Arc::new(Mutex::new(()));
    let backing = {
        let held = held.clone();
        FunctionBacking::slow(move |offset, out: &mut [u8]| {
            let _held = held.lock().unwrap();
            write_words(offset, out);
            Ok::<_, BackingError>(())
        })
    };
    let options = LazyOptions::default().deadline(Duration::from_millis(50)).advice(Advice::Random);
    let engine = engine(EngineOptions::default().producers(NonZeroUsize::MIN));
    let answer = engine.map(ByteLen::new(8 * page()), Arc::new(backing), &options);
    let Some(memory) = mapped("a closure that needs a lock", answer) else { return };
    let holds = held.lock().unwrap();
    let mut word = [0; 8];
    assert!(memory.read_at(2 * page(), &mut word).is_err(), "it is given up");
    assert_eq!(word, [0; 8], "nothing was read");
    drop(holds);
    // The thread that waited for the lock goes on, and so do other pages.
    check_page(&memory, 3 * page());
    // The page is bad, or the closure has brought it after all.
    let _ = try_page(&memory, 2 * page());
}

#[test]
fn a_deadline_is_kept_while_other_faults_never_end() {
    sigbus::install().unwrap();
    let engine = engine(EngineOptions::default().producers(two()));
    let pages = 64 << 10;
    let (backing, gate, _) = Stalling::new(0);
    let deadline = Some(Duration::from_millis(30));
    let options = LazyOptions::default().deadline(deadline).advice(Advice::Random);
    let answer = engine.map(ByteLen::new(pages * page()), Arc::new(backing), &options);
    let Some(memory) = mapped("a deadline among faults", answer) else { return };
    let (memory, stop) = (&memory, &AtomicBool::new(false));
    thread::scope(|scope| {
        for part in 0..4 {
            scope.spawn(move || {
                let pages = (1..pages).filter(|at| at % 4 == part).cycle();
                for at in pages.take_while(|_| !stop.load(Ordering::Relaxed)) {
                    memory.read_at(at * page(), &mut [0; 8]).unwrap();
                    memory.evict(at * page()..(at + 1) * page()).unwrap();
                }
            });
        }
        let begin = Instant::now();
        let refused = memory.read_at(0, &mut [0; 8]);
        // Whatever came of it, or the others would go on for ever.
        stop.store(true, Ordering::Relaxed);
        eprintln!("refused after {:?}", begin.elapsed());
        assert!(refused.is_err() && begin.elapsed() < crate::common::PATIENCE / 2, "{refused:?}");
    });
    gate.open();
}

/// Zeroes that come when they are let go.
struct LateZeroes {
    gate: Arc<Gate>,
    have_come: Arc<AtomicBool>,
}

impl Backing for LateZeroes {
    fn fault(&self, window: &mut Window<'_>) -> Result<(), BackingError> {
        self.gate.pass();
        let answer = window.zero(window.range());
        self.have_come.store(true, Ordering::SeqCst);
        let _ = answer?;
        Ok(())
    }
}

#[test]
fn zeroes_that_come_too_late_leave_a_page_bad_and_say_so() {
    sigbus::install().unwrap();
    let engine = engine(EngineOptions::default().producers(two()));
    let (gate, have_come) = (Arc::<Gate>::default(), Arc::<AtomicBool>::default());
    let backing = LateZeroes { gate: gate.clone(), have_come: have_come.clone() };
    let deadline = Some(Duration::from_millis(20));
    let options = LazyOptions::default().deadline(deadline);
    let answer = engine.map(ByteLen::new(16 * page()), Arc::new(backing), &options);
    let Some(memory) = mapped("zeroes that come too late", answer) else { return };
    memory.read_at(5 * page(), &mut [0; 8]).unwrap_err();
    gate.open();
    wait_for("they have come", || have_come.load(Ordering::SeqCst));
    // The kernel takes no zero page where a signal stands: what is said is what a touch finds.
    for _ in 0..50 {
        assert_eq!(memory.content(5 * page()), Some(Content::Poisoned));
        memory.read_at(5 * page(), &mut [0; 8]).unwrap_err();
        thread::sleep(Duration::from_micros(200));
    }
    assert!(memory.populate(5 * page()..6 * page()).is_err());
}

#[test]
fn a_deadline_is_kept_where_the_page_is_produced_for_a_thread_that_populates() {
    sigbus::install().unwrap();
    let engine = engine(EngineOptions::default().producers(two()));
    let (backing, gate, asked) = Stalling::new(5 * page());
    let deadline = Some(Duration::from_millis(30));
    let options = LazyOptions::default().deadline(deadline);
    let answer = engine.map(ByteLen::new(16 * page()), Arc::new(backing), &options);
    let Some(memory) = mapped("a deadline of a page that is populated", answer) else { return };
    thread::scope(|scope| {
        let populates = scope.spawn(|| memory.populate(5 * page()..6 * page()));
        wait_for("it is asked for", || asked.load(Ordering::SeqCst) == 1);
        memory.read_at(5 * page(), &mut [0; 8]).unwrap_err();
        assert!(!populates.is_finished());
        gate.open();
        // It comes late, and is right.
        assert_eq!(populates.join().unwrap().unwrap(), 1);
    });
    assert_eq!(memory.content(5 * page()), Some(Content::Present));
    assert_eq!(crate::common::word_in(&memory, 5 * page()), crate::common::word(5 * page()));
    assert_eq!(memory.stats().pending, 0);
}

#[test]
fn what_is_waited_for_is_counted_with_its_age() {
    let engine = engine(EngineOptions::default().producers(two()));
    let (backing, gate, _) = Stalling::at(|at| at == 3 * page() || at == 9 * page());
    let len = ByteLen::new(16 * page());
    let answer = engine.map(len, Arc::new(backing), &LazyOptions::default());
    let Some(memory) = mapped("pending pages", answer) else { return };
    thread::scope(|scope| {
        for at in [3, 9] {
            let memory = &memory;
            scope.spawn(move || memory.read_at(at * page(), &mut [0; 8]).unwrap());
        }
        wait_for("two pages are pending", || memory.stats().pending == 2);
        thread::sleep(Duration::from_millis(2));
        assert!(memory.stats().oldest_pending.unwrap() >= Duration::from_millis(2));
        gate.open();
    });
    wait_for("none is", || memory.stats().pending == 0);
    assert_eq!(memory.stats().oldest_pending, None);
    wait_for("both are timed", || {
        memory.latencies().iter().any(|latency| {
            latency.outcome == FaultOutcome::Produced
                && latency.count == 2
                && latency.p50 >= Duration::from_millis(2)
        })
    });
}

#[test]
fn a_trace_has_every_fault_with_its_page_and_outcome() {
    let engine = engine(EngineOptions::default().producers(two()));
    let (backing, gate, _) = Stalling::new(6 * page());
    gate.open();
    let options = LazyOptions::default().advice(Advice::Random).trace(100);
    let answer = engine.map(ByteLen::new(16 * page()), Arc::new(backing), &options);
    let Some(memory) = mapped("a trace", answer) else { return };
    let pages = [3, 6, 1, 15];
    for at in pages {
        memory.read_at(at * page(), &mut [0; 8]).unwrap();
    }
    memory.write_at(2 * page(), &[1; 8]).unwrap();
    wait_for("all are noted", || {
        memory.stats().faults == 5 && memory.latencies().iter().map(|it| it.count).sum::<u64>() == 5
    });
    let (records, lost) = memory.take_trace();
    assert_eq!(lost, 0);
    let mut seen: Vec<_> = records.iter().map(|it| (it.offset / page(), it.is_write)).collect();
    seen.sort_unstable();
    assert_eq!(seen, [(1, false), (2, true), (3, false), (6, false), (15, false)]);
    for record in &records {
        let right =
            if record.offset == 6 * page() { FaultOutcome::Produced } else { FaultOutcome::Ready };
        assert_eq!((record.class, record.outcome), (FaultKind::Missing, right));
        assert!(record.latency > Duration::ZERO && record.at < Duration::from_secs(60));
    }
    assert!(memory.take_trace().0.is_empty());
}

#[test]
fn one_loop_answers_many_mappings_while_some_come_and_go() {
    const MAPPINGS: u64 = 40;
    let one = NonZeroUsize::MIN;
    let engine = engine(EngineOptions::default().producers(two()).readers(one));
    let len = ByteLen::new(64 * page());
    let map = || engine.map(len, Arc::new(function()), &LazyOptions::default());
    let Some(first) = mapped("many mappings", map()) else { return };
    let mut memories: Vec<_> = (1..MAPPINGS).map(|_| map().unwrap()).collect();
    memories.push(first);
    thread::scope(|scope| {
        for part in memories.chunks(10) {
            scope.spawn(move || {
                for at in 0..64 {
                    part.iter().for_each(|memory| check_page(memory, (at * 37 % 64) * page()));
                }
            });
        }
        // Others come and go on the same thread meanwhile.
        for _ in 0..50 {
            let memory = map().unwrap();
            memory.read_at(7 * page(), &mut [0; 8]).unwrap();
        }
    });
    for memory in &memories {
        // A page is counted a moment after its waiter is woken.
        wait_for("every page is counted once", || {
            let stats = memory.stats();
            stats.faults >= 1 && stats.demand + stats.around == 64
        });
    }
}

#[test]
fn what_is_read_in_order_and_not_cached_is_read_ahead() {
    let path = std::env::temp_dir().join(format!("uzone-ahead-{}", std::process::id()));
    let len = 8 << 20;
    let bytes = words(len);
    std::fs::write(&path, &bytes).unwrap();
    let file = File::open(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    file.sync_all().unwrap();
    let whole = std::num::NonZeroU64::new(len).unwrap();
    page_cache::forget(&file, 0, whole).unwrap();
    if page_cache::cached(&file, 0, whole).unwrap() != Some(0) {
        return skip("reading ahead", "the file cannot be taken out of the page cache");
    }
    let engine = engine(EngineOptions::default().producers(two()));
    let options =
        LazyOptions::default().advice(Advice::Sequential).fault_around(FaultAround::DEFAULT);
    let backing = Arc::new(FileBacking::new(file).unwrap());
    let answer = engine.map(ByteLen::new(len), backing, &options);
    let Some(memory) = mapped("reading ahead", answer) else { return };
    let mut out = vec![0; size()];
    for (at, right) in (0..).zip(bytes.chunks(size())) {
        memory.read_at(at * page(), &mut out).unwrap();
        assert!(out == right, "page {at}");
    }
    let stats = memory.stats();
    // A device may be so fast that what a read which does not wait had begun is there at once.
    assert!(stats.read_ahead > 0 || stats.queued == 0, "{stats:?}");
    assert!(stats.queued < len / page() / 16, "each window waited for a device: {stats:?}");
}

/// Memory of this process that is answered for as if it were another's.
struct Adopted {
    memory: Arc<Registered>,
    server: uzone_fault::AdoptedMemory,
    gate: Arc<Gate>,
    asked: Arc<AtomicU64>,
}

fn adopted(name: &str, pages: u64, is_slow: fn(u64) -> bool) -> Option<Adopted> {
    let wanted = Features::EVENT_REMOVE | Features::POISON;
    let uffd = userfaultfd(name, wanted, KernelFaults::IfAllowed)?;
    let memory = Arc::new(registered(&uffd, anonymous(pages)));
    let (backing, gate, asked) = Stalling::at(move |at| is_slow(at / page()));
    let engine = engine(EngineOptions::default().producers(two()));
    let options = LazyOptions::default().fault_around(FaultAround::MIN);
    let regions = vec![region_at(0, &memory)];
    let server = engine.adopt(remote(&memory), regions, Arc::new(backing), &options, None).unwrap();
    Some(Adopted { memory, server, gate, asked })
}

#[test]
fn a_slow_page_of_another_process_holds_up_no_other() {
    let Some(adopted) = adopted("a slow page", 64, |page| page == 10) else { return };
    thread::scope(|scope| {
        let memory = adopted.memory.clone();
        let waiter = scope.spawn(move || is_right(memory.mapping(), 10));
        wait_for("the page is asked for", || adopted.asked.load(Ordering::SeqCst) == 1);
        for at in (0..64).filter(|&at| at != 10) {
            assert!(is_right(adopted.memory.mapping(), at), "page {at}");
        }
        assert!(!waiter.is_finished());
        assert_eq!(adopted.server.stats().pending, 1);
        adopted.gate.open();
        assert!(waiter.join().unwrap());
    });
}

#[test]
fn a_page_that_is_given_back_while_it_is_produced_is_zero() {
    let Some(adopted) = adopted("a removed page", 64, |page| page == 10) else { return };
    thread::scope(|scope| {
        let memory = adopted.memory.clone();
        let waiter = scope.spawn(move || {
            let mut seen = vec![1; size()];
            memory.mapping().read_at(10 * page(), &mut seen).unwrap();
            seen
        });
        wait_for("the page is asked for", || adopted.asked.load(Ordering::SeqCst) == 1);
        adopted.memory.mapping().discard(8 * page()..12 * page()).unwrap();
        // The waiting thread does not wait for the old bytes any more.
        assert!(waiter.join().unwrap().iter().all(|&byte| byte == 0));
        adopted.gate.open();
    });
    let mut seen = vec![1; size()];
    for at in 8..12 {
        adopted.memory.mapping().read_at(at * page(), &mut seen).unwrap();
        assert!(seen.iter().all(|&byte| byte == 0), "page {at} has come back");
    }
    assert!(is_right(adopted.memory.mapping(), 12));
    wait_for("no page is produced any more", || adopted.server.stats().pending == 0);
}

#[test]
fn a_server_that_stops_leaves_what_is_pending_to_the_next() {
    let Some(adopted) = adopted("a second server", 16, |page| page == 10) else { return };
    let Adopted { memory, server, gate, asked } = adopted;
    thread::scope(|scope| {
        let waiting = memory.clone();
        let waiter = scope.spawn(move || is_right(waiting.mapping(), 10));
        wait_for("the page is asked for", || asked.load(Ordering::SeqCst) == 1);
        let remote = server.stop().unwrap();
        let engine = engine(EngineOptions::default().producers(two()));
        let (regions, backing) = (vec![region_at(0, &memory)], Arc::new(function()));
        let next = engine.adopt(remote, regions, backing, &LazyOptions::default(), None).unwrap();
        assert!(waiter.join().unwrap());
        assert!(next.stats().faults >= 1);
        gate.open();
    });
}

#[test]
fn the_pages_of_a_mapping_do_not_wait_for_all_those_of_another() {
    const NOISY: u64 = 48;
    let one = NonZeroUsize::MIN;
    let engine = engine(EngineOptions::default().producers(one).readers(one));
    let gate = Arc::new(Gate::default());
    let order = Arc::new(Mutex::new(Vec::new()));
    let map = |is_noisy: bool| {
        let (gate, order) = (gate.clone(), order.clone());
        let backing = FunctionBacking::slow(move |offset, out: &mut [u8]| {
            gate.pass();
            order.lock().unwrap().push(is_noisy);
            write_words(offset, out);
            Ok::<_, BackingError>(())
        });
        let options = LazyOptions::default().advice(Advice::Random);
        let answer = engine.map(ByteLen::new(NOISY * page()), Arc::new(backing), &options);
        mapped("the pages of a mapping do not wait", answer)
    };
    let (Some(noisy), Some(quiet)) = (map(true), map(false)) else { return };
    thread::scope(|scope| {
        let read = |memory: &LazyMapping, at: u64| check_page(memory, at * page());
        let (noisy, quiet) = (&noisy, &quiet);
        for at in 0..NOISY {
            scope.spawn(move || read(noisy, at));
        }
        wait_for("all of the noisy one wait", || noisy.stats().queued == NOISY);
        for at in 0..2 {
            scope.spawn(move || read(quiet, at));
        }
        wait_for("both of the quiet one wait", || quiet.stats().queued == 2);
        gate.open();
    });
    let order = order.lock().unwrap();
    let places = order.iter().enumerate().filter(|(_, is_noisy)| !**is_noisy);
    let places: Vec<usize> = places.map(|(at, _)| at).collect();
    // One of the noisy one was being produced, and one came with each of the quiet one.
    assert!(order.len() == 50 && places.len() == 2 && places[1] <= 4, "{places:?}");
}
