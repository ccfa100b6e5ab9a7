//! Two threads that hold at once: halves of the region, which share no word but the pagemap's, and
//! all of it, where they meet on every word.
//!
//! The second thread is started once and meets the first at a barrier, before and after a sample;
//! a sample is as many passes as make that small beside it.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use uzone_pages::{ByteLen, HoldKind, Order, PageCount, PfnRange};
use uzone_zone::{Pagemap, Zone};

use super::shared::{CALL_PAGES, bare_add, bare_sub, bind, words};
use crate::harness::settings::PinSettings as Settings;
use crate::harness::suite::{BenchError, Role, Session, Suite, timed};

/// How many pages' worth of passes a sample is: milliseconds.
const SAMPLE_PAGES: u64 = 1 << 28;

/// What both threads do in one sample.
#[derive(Clone, Copy)]
enum Work<'a> {
    Hold(&'a Pagemap, HoldKind, [PfnRange; 2]),
    Bare([&'a [AtomicU64]; 2]),
}

impl Work<'_> {
    /// Does one thread's part `passes` times.
    fn run(self, thread: usize, passes: u64) -> Result<(), BenchError> {
        for _ in 0..passes {
            match self {
                Work::Hold(pagemap, HoldKind::Pin, ranges) => drop(pagemap.pin(ranges[thread])?),
                Work::Hold(pagemap, HoldKind::Reference, ranges) => {
                    drop(pagemap.get(ranges[thread])?);
                }
                Work::Bare(words) => {
                    bare_add(words[thread]);
                    bare_sub(words[thread]);
                }
            }
        }
        Ok(())
    }
}

/// A row, its name, what the threads do, how many these are, and how many times the region is held in a pass
/// of all of them together. It is compared with the same by one thread.
type Sample<'a> = (&'static str, &'static str, Work<'a>, usize, u64);

/// The second thread: what it is to do, and where it meets the first.
struct Second {
    start: Barrier,
    end: Barrier,
    sample: AtomicU64,
    has_failed: AtomicBool,
}

const STOP: u64 = u64::MAX;

impl Second {
    /// Does samples of `work` until it is stopped.
    fn run(&self, work: &[Work<'_>], passes: u64) {
        loop {
            self.start.wait();
            // Relaxed, as the flag below: the barriers order it.
            let Ok(sample) = usize::try_from(self.sample.load(Ordering::Relaxed)) else { return };
            let Some(work) = work.get(sample) else { return };
            if work.run(1, passes).is_err() {
                self.has_failed.store(true, Ordering::Relaxed);
            }
            self.end.wait();
        }
    }

    /// Does a sample by both threads.
    fn sample(&self, number: u64, work: Work<'_>, passes: u64) -> Result<Duration, BenchError> {
        self.sample.store(number, Ordering::Relaxed);
        self.start.wait();
        let started = Instant::now();
        let mine = work.run(0, passes);
        self.end.wait();
        let elapsed = started.elapsed();
        mine?;
        if self.has_failed.load(Ordering::Relaxed) {
            // The second thread alone had an error; the first has none to return.
            return Err(BenchError::threads(2));
        }
        Ok(elapsed)
    }
}

pub(super) fn run(settings: &Settings, session: &mut Session<'_>) -> Result<(), BenchError> {
    if session.bench.machine.cpus < 2 {
        session.skip("pin-threads", "this process may use one CPU only");
        return Ok(());
    }
    let size = settings.size;
    let zone = Zone::with_keep_limit(ByteLen::ZERO);
    let folios = bind(&zone, size, Order::PMD)?;
    let range = folios.range();
    let pages = range.pages().get();
    // The size is whole GiB, so that the middle is at a folio.
    let half = PageCount::new(pages / 2);
    let halves = range
        .start()
        .checked_add(half)
        .and_then(|middle| {
            Ok([PfnRange::try_new(range.start(), half)?, PfnRange::try_new(middle, half)?])
        })
        .unwrap_or([range; 2]);
    let words = words(size)?;
    let (front, back) = words.split_at(words.len() / 2);
    let passes = (SAMPLE_PAGES / pages).max(1);

    let whole = [range; 2];
    let pin = |ranges| Work::Hold(&folios, HoldKind::Pin, ranges);
    let get = |ranges| Work::Hold(&folios, HoldKind::Reference, ranges);
    let (bare, same) = (Work::Bare([front, back]), Work::Bare([&words[..], &words[..]]));
    let samples: [Sample<'_>; 9] = [
        ("pin-one", "pin and unpin, one thread", pin(whole), 1, 1),
        ("pin-halves", "pin and unpin, two threads, a half each", pin(halves), 2, 1),
        ("pin-same", "pin and unpin, two threads, the same range", pin(whole), 2, 2),
        ("get-one", "get and put, one thread", get(whole), 1, 1),
        ("get-halves", "get and put, two threads, a half each", get(halves), 2, 1),
        ("get-same", "get and put, two threads, the same range", get(whole), 2, 2),
        ("limit-one", "bare atomics, one thread", same, 1, 1),
        ("limit-halves", "bare atomics, halves", bare, 2, 1),
        ("limit-same", "bare atomics, same words", same, 2, 2),
    ];
    session.table("pin-threads", "2 MiB folios, two threads", format!(
            "taking and giving back, {passes} times a sample; naive is one thread, for the same work; \
             on the same range each thread holds all of it, so that the work is twice as much"
        ));
    measure(&samples, size, passes, session)
}

/// Measures the rows, of which the second thread does its part.
fn measure(
    samples: &[Sample<'_>],
    size: ByteLen,
    passes: u64,
    session: &mut Session<'_>,
) -> Result<(), BenchError> {
    let (start, end) = (Barrier::new(2), Barrier::new(2));
    let (sample, has_failed) = (AtomicU64::new(STOP), AtomicBool::new(false));
    let second = &Second { start, end, sample, has_failed };
    let work: Vec<Work<'_>> = samples.iter().map(|sample| sample.2).collect();
    std::thread::scope(|scope| {
        let builder = std::thread::Builder::new().name("second".to_owned());
        if builder.spawn_scoped(scope, || second.run(&work, passes)).is_err() {
            return Err(BenchError::threads(2));
        }
        let mut suite = Suite::new("pin-threads", size);
        for (number, &(row, name, work, threads, times)) in (0..).zip(samples) {
            let role = match work {
                Work::Hold(..) => Role::Ours,
                Work::Bare(_) => Role::Limit,
            };
            suite.threads = threads;
            let spec = suite.add(role, row, name, move |_| match threads {
                1 => timed(|| work.run(0, passes)),
                _ => second.sample(number, work, passes),
            });
            let (sort, _) = row.split_once('-').unwrap_or((row, ""));
            spec.row.items *= passes * times;
            spec.row.folios = Some(spec.row.items / CALL_PAGES);
            spec.naive(&format!("{sort}-one"));
        }
        let done = session.run(suite, "threads");
        // Also after a failure, or the scope would wait for a thread that waits for us.
        second.sample.store(STOP, Ordering::Relaxed);
        second.start.wait();
        done
    })
}
