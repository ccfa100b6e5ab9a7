//! Programs under stress: sixteen threads that map, bind, pin and drop; backings that fail, panic and are
//! slow; writers whose pages are brought back and evicted. Each runs for `UZONE_TEST_SECONDS` seconds, 2 unless
//! set. No byte is wrong, no request is refused, no pin is lost, no thread hangs, and memory, descriptors
//! and threads are as many afterwards as before.

use std::num::NonZeroUsize;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use crate::common::{
    PATIENCE, again, check_page, ends, file_of, fill_but, fill_wanted, function, is_child, map,
    page, scattered, skip, try_page, usize_of, wait_for, word, word_in,
};
use uzone_fault::{
    Answer, Backing, BackingError, Engine, FileBacking, LazyError, Window, WriteTracking,
};
use uzone_os::sigbus;
use uzone_os::uffd::{Features, KernelFaults, Uffd};
use uzone_pages::{Advice, ByteLen, FaultAround, MemoryKind};

const THREADS: u64 = 16;

fn seconds() -> Duration {
    let text = std::env::var("UZONE_TEST_SECONDS").unwrap_or_default();
    Duration::from_secs(text.parse().unwrap_or(2))
}

/// What a process must have as much of afterwards as before.
#[derive(Clone, Copy, Debug)]
struct Holdings {
    descriptors: usize,
    threads: usize,
    mappings: usize,
    resident_kib: u64,
}

impl Holdings {
    fn now() -> Self {
        let count = |path| std::fs::read_dir(path).unwrap().count();
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        Self {
            descriptors: count("/proc/self/fd"),
            threads: count("/proc/self/task"),
            mappings: std::fs::read_to_string("/proc/self/maps").unwrap().lines().count(),
            resident_kib: resident.split_whitespace().next().unwrap().parse().unwrap(),
        }
    }

    /// Waits until there is no more than in `before`, but for what an allocator keeps.
    fn are_back(before: Self) {
        let give_up = Instant::now() + PATIENCE;
        loop {
            let now = Self::now();
            let is_back = now.descriptors <= before.descriptors
                && now.threads <= before.threads
                // The allocator keeps two mappings for each of up to 8 arenas a CPU.
                && now.mappings <= before.mappings + 128
                && now.resident_kib <= before.resident_kib + (64 << 10);
            if is_back {
                return;
            }
            assert!(Instant::now() < give_up, "{now:?} and {before:?} before");
            thread::sleep(Duration::from_millis(10));
        }
    }
}

/// Runs a program in a process of its own, where it may take its own counts and where a hang ends.
fn alone(name: &str, program: impl FnOnce()) {
    if is_child(name) {
        program();
        assert_eq!(uzone_os::leaked(), ByteLen::ZERO);
        std::process::exit(0);
    }
    if let Err(error) = Uffd::open(Features::POISON, Features::NONE, KernelFaults::IfAllowed) {
        return skip(name, &error.to_string());
    }
    let mut child = again(name);
    let mut child = child.stdout(std::process::Stdio::inherit());
    child = child.stderr(std::process::Stdio::inherit());
    let mut child = child.spawn().unwrap();
    // `ends` waits for a minute, which is too short for a long run.
    thread::sleep(seconds().saturating_sub(Duration::from_secs(5)));
    let status = ends(&mut child).expect("a thread hangs");
    assert!(status.success(), "{status}");
}

/// Lets every thread do its steps, by its number and a step's, until the time is over. Returns how many
/// steps there were.
fn run(time: Duration, step: impl Fn(u64, u64) + Sync) -> u64 {
    let (end, steps) = (Instant::now() + time, AtomicU64::new(0));
    thread::scope(|scope| {
        for id in 0..THREADS {
            let (step, steps) = (&step, &steps);
            scope.spawn(move || {
                for number in scattered(id + 1, 1 << 40) {
                    step(id, number);
                    steps.fetch_add(1, Ordering::Relaxed);
                    if Instant::now() >= end {
                        break;
                    }
                }
            });
        }
    });
    steps.into_inner()
}

/// One thread maps memory lazily, another binds a region; each pins what it has by its address.
fn map_bind_pin_drop() {
    let before = Holdings::now();
    let engine = Engine::new(NonZeroUsize::new(2).unwrap()).unwrap();
    let zone = engine.zone().clone();
    let steps = run(seconds(), |_, number| {
        let pages = 1 + number % 40;
        let at = number / 64 % pages;
        if number.is_multiple_of(2) {
            let options = crate::common::options(Advice::Auto, 16);
            let memory = map("stress", &engine, pages * page(), function(), &options).unwrap();
            check_page(&memory, at * page());
            let address = memory.addr().get() + usize_of(at * page());
            let pinned = zone.pin(address, ByteLen::new(page())).unwrap();
            assert_eq!(pinned.segments().next().unwrap().address, address);
            if number.is_multiple_of(3) {
                memory.evict(0..pages * page()).unwrap();
                check_page(&memory, at * page());
            }
            if number.is_multiple_of(5) {
                // The memory lives until its guard goes.
                drop(memory);
            }
        } else {
            let region = uzone_zone::Region::anonymous(ByteLen::new(pages * page())).unwrap();
            let address = region.mapping().addr().get() + usize_of(at * page());
            region.write_at(at * page(), &number.to_ne_bytes()).unwrap();
            let options = uzone_zone::BindOptions::new(MemoryKind::Generic);
            let pagemap = zone.bind(region, options).unwrap();
            let pinned = zone.pin(address, ByteLen::new(page())).unwrap();
            let held = pagemap.page_at(at * page()).unwrap().pfn();
            assert!(pagemap.maybe_pinned(held));
            let mut seen = [0; 8];
            pagemap.region().read_at(at * page(), &mut seen).unwrap();
            assert_eq!(seen, number.to_ne_bytes());
            if number.is_multiple_of(3) {
                // The region lives until its guard goes.
                drop(pagemap);
                drop(pinned);
            } else {
                drop(pinned);
                pagemap.unbind().unwrap();
            }
        }
    });
    assert!(zone.bound().is_empty());
    zone.trim();
    drop((zone, engine));
    Holdings::are_back(before);
    eprintln!("map, bind, pin, drop: {steps} steps");
}

#[test]
fn threads_that_map_bind_pin_and_drop_are_never_refused() {
    alone("threads_that_map_bind_pin_and_drop_are_never_refused", map_bind_pin_drop);
}

/// A backing of which some pages fail, some panic, some are slow and some are not ready. Each does so now
/// and then, but for pages that never fail.
struct Moody {
    asked: AtomicU64,
}

impl Moody {
    /// Whether a page may fail.
    fn may_fail(at: u64) -> bool {
        at / page() % 8 == 5
    }

    fn is_away(at: u64) -> bool {
        at / page() % 4 == 1
    }
}

impl Backing for Moody {
    fn map_pages(&self, window: &mut Window<'_>) {
        let asked = self.asked.fetch_add(1, Ordering::Relaxed);
        fill_but(window, Self::is_away);
        if asked.is_multiple_of(97) {
            std::panic::resume_unwind(Box::new("a panic of the stress test"));
        }
    }

    fn fault(&self, window: &mut Window<'_>) -> Result<(), BackingError> {
        let at = window.range().start;
        let asked = self.asked.fetch_add(1, Ordering::Relaxed);
        if Self::may_fail(at) {
            match asked % 7 {
                0 => return Err(BackingError::Other("this page is lost for now".into())),
                1 => std::panic::resume_unwind(Box::new("a panic of the stress test")),
                _ => {}
            }
        }
        if asked.is_multiple_of(11) {
            thread::sleep(Duration::from_micros(asked % 3000));
        }
        fill_wanted(window)
    }

    fn read_ahead(&self, range: std::ops::Range<u64>) {
        assert!(range.start < range.end);
    }
}

fn moody_backings() {
    let before = Holdings::now();
    sigbus::install().unwrap();
    let (right, bad) = (AtomicU64::new(0), AtomicU64::new(0));
    let engine = Engine::new(NonZeroUsize::new(4).unwrap()).unwrap();
    let pages = 2048;
    let make = || {
        let deadline = Some(Duration::from_secs(20));
        let options = crate::common::options(Advice::Auto, 16).deadline(deadline);
        let moody = Moody { asked: AtomicU64::new(0) };
        Arc::new(map("stress", &engine, pages * page(), moody, &options).unwrap())
    };
    // Bad pages stay bad, so the memory is made anew now and then, while others read the old one.
    let memory = Mutex::new(make());
    run(seconds(), |id, number| {
        let mine = memory.lock().unwrap().clone();
        let at = number % pages * page();
        let run = at..(at + (1 + number / pages % 64) * page()).min(pages * page());
        match (id, number / 4096 % 64) {
            (0, 0) => *memory.lock().unwrap() = make(),
            (1..=3, 1..8) => drop(mine.evict(run).unwrap()),
            (4..=6, 1..8) => match mine.populate(run) {
                Ok(_) => {}
                Err(LazyError::Backing { offset, .. } | LazyError::Poisoned { offset }) => {
                    assert!(Moody::may_fail(offset), "{offset:#x}");
                }
                Err(error) => panic!("{error}"),
            },
            (7..=9, 1..8) => match mine.pin(at..at + page()) {
                Ok(pinned) => {
                    let mut seen = [0; 8];
                    pinned.read_at(0, &mut seen).unwrap();
                    assert_eq!(u64::from_ne_bytes(seen), word(at), "a pinned page at {at:#x}");
                }
                Err(error) => assert!(Moody::may_fail(at), "{error} at {at:#x}"),
            },
            (10, 1..8) => {
                let advices = [Advice::Random, Advice::Auto, Advice::Normal, Advice::Sequential];
                let size = ByteLen::new(page() << (number % 8));
                mine.advise(advices[usize_of(number / 8 % 4)], FaultAround::try_new(size).unwrap());
            }
            _ => match try_page(&mine, at) {
                Ok(()) => drop(right.fetch_add(1, Ordering::Relaxed)),
                Err(error) => {
                    assert!(Moody::may_fail(at), "{error} at {at:#x}");
                    bad.fetch_add(1, Ordering::Relaxed);
                }
            },
        }
        assert!(!mine.stats().has_failed);
    });
    // Nothing is left that is neither right nor bad.
    let last = memory.into_inner().unwrap();
    for at in (0..pages).map(|at| at * page()) {
        assert!(try_page(&last, at).is_ok() || Moody::may_fail(at), "{at:#x}");
    }
    wait_for("the end of each fault", || last.stats().pending == 0);
    let (right, bad) = (right.into_inner(), bad.into_inner());
    assert!(right > 0 && bad > 0, "{right} right, {bad} bad");
    drop((last, engine));
    Holdings::are_back(before);
    eprintln!("moody backings: {right} pages right, {bad} bad");
}

#[test]
fn backings_that_fail_panic_and_are_slow_give_right_bytes_or_signals() {
    let name = "backings_that_fail_panic_and_are_slow_give_right_bytes_or_signals";
    if !sigbus::recovers_copies() {
        return skip(name, "a copy out of a bad page ends the process here");
    }
    alone(name, moody_backings);
}

/// Each thread writes numbers to pages of its own and reads them, while others bring pages back and evict
/// them.
fn write_back_and_evict() {
    let before = Holdings::now();
    let pages = 512;
    let engine = Engine::new(NonZeroUsize::new(4).unwrap()).unwrap();
    let ways = [
        (WriteTracking::Sync, Answer::Reader),
        (WriteTracking::Sync, Answer::InThread),
        (WriteTracking::Async, Answer::Reader),
        (WriteTracking::Async, Answer::InThread),
    ];
    for (track, answer) in ways {
        let file = file_of(pages * page());
        let backing = FileBacking::writable(file.try_clone().unwrap()).unwrap();
        let options = crate::common::options(Advice::Auto, 16).track_writes(track).answer(answer);
        let memory = map("stress", &engine, pages * page(), backing, &options).unwrap();
        let written: Vec<_> = (0..pages).map(|at| AtomicU64::new(word(at * page()))).collect();
        let steps = run(seconds() / 4, |id, number| {
            let mine = number % (pages / THREADS) * THREADS + id;
            let at = mine * page();
            let run = at..(at + (1 + number / pages % 64) * page()).min(pages * page());
            match number / 4096 % 16 {
                // A page that is written meanwhile would be lost where its write is only recorded.
                0 if track == WriteTracking::Sync => drop(memory.evict(run).unwrap()),
                0..2 => drop(memory.write_back(run).unwrap()),
                2..9 => {
                    // No other thread writes to this page.
                    memory.write_at(at, &number.to_ne_bytes()).unwrap();
                    written[usize_of(mine)].store(number, Ordering::Relaxed);
                }
                _ => {
                    let expected = written[usize_of(mine)].load(Ordering::Relaxed);
                    assert_eq!(word_in(&memory, at), expected, "page {mine}");
                    assert_eq!(word_in(&memory, at + 8), word(at + 8), "page {mine}");
                }
            }
        });
        memory.write_back(0..pages * page()).unwrap();
        assert_eq!(memory.dirty(0..pages * page()).unwrap(), []);
        for (at, written) in written.iter().enumerate() {
            let mut seen = [0; 8];
            file.read_exact_at(&mut seen, at as u64 * page()).unwrap();
            assert_eq!(u64::from_ne_bytes(seen), written.load(Ordering::Relaxed), "page {at}");
        }
        let stats = memory.stats();
        assert_eq!(stats.poisoned, 0);
        assert!(stats.evicted > 0 || track == WriteTracking::Async, "{stats:?}");
        eprintln!("write back and evict, {track:?}, {answer:?}: {steps} steps");
    }
    drop(engine);
    Holdings::are_back(before);
}

#[test]
fn what_is_written_is_never_lost_while_pages_are_brought_back_and_evicted() {
    alone(
        "what_is_written_is_never_lost_while_pages_are_brought_back_and_evicted",
        write_back_and_evict,
    );
}
