//! The outcome of each fault: latencies by class ([`Latency`]), a trace of the last ones
//! ([`FaultRecord`]), and a USDT probe.
//!
//! A latency is the time from when the thread that answers had read the fault to when the page was in
//! place; the kernel's time before that is not in it. The thread records its faults after it has
//! answered all that it read, so no fault waits for that.
//!
//! The probe is `uzone:fault`, with the offset in the backing, the latency in nanoseconds, and the
//! numbers of class and outcome; `bpftrace` and `perf probe` see it. Without a listener it costs a load.
//!
//! Locks: one, held while some numbers are noted or copied, over nothing else.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use uzone_os::signals::lock_uninterrupted;
use uzone_os::uffd::FaultKind;

use crate::error::Failure;

/// The longest latency that is distinguished from longer ones.
const LONGEST: Duration = Duration::from_secs(60);
/// The shortest.
const SHORTEST: Duration = Duration::from_nanos(64);

/// The outcome of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum FaultOutcome {
    /// The page was ready, or present already: the reader installed it.
    Ready,
    /// Another thread was producing the page already, and woke its waiter when it was done.
    Coalesced,
    /// The page was produced by an I/O thread.
    Produced,
    /// The page could not be produced, and is bad.
    Failed,
    /// The kernel or a full queue deferred it: the fault is reported again.
    Deferred,
}

/// One fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FaultRecord {
    /// When it had been read, since the mapping was made.
    pub at: Duration,
    /// Where the page starts in the backing.
    pub offset: u64,
    /// The kind of fault.
    pub class: FaultKind,
    /// Whether it was a write.
    pub is_write: bool,
    /// Its outcome.
    pub outcome: FaultOutcome,
    /// How long that took. Of a page that others produced, how long it took to find that out.
    pub latency: Duration,
}
// The documentation of `LazyOptions::trace` has this size.
const _: () = assert!(size_of::<FaultRecord>() == 48);

/// How long faults of one class took that ended in one way.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Latency {
    /// The kind of fault.
    pub class: FaultKind,
    /// How they ended.
    pub outcome: FaultOutcome,
    /// How many there were.
    pub count: u64,
    /// Half of them took at most so long.
    pub p50: Duration,
    /// 99 of 100 did.
    pub p99: Duration,
    /// 999 of 1000 did.
    pub p999: Duration,
    /// All did.
    pub max: Duration,
    /// How many took at most so long and longer than those before, in ascending order, within 1 %, or 10 % if their
    /// page did not come by them; where there are none, there is no entry.
    pub buckets: Vec<(Duration, u64)>,
}

const OUTCOMES: [FaultOutcome; 5] = [
    FaultOutcome::Ready,
    FaultOutcome::Coalesced,
    FaultOutcome::Produced,
    FaultOutcome::Failed,
    FaultOutcome::Deferred,
];

/// How many nanoseconds the faults of one class took that ended in one way.
struct Series {
    class: FaultKind,
    outcome: FaultOutcome,
    nanoseconds: Histogram<u32>,
}

struct Records {
    series: Vec<Series>,
    trace: VecDeque<FaultRecord>,
    /// How many records the trace keeps.
    keeps: usize,
    /// How many it had no room for.
    lost: u64,
    last_failure: Option<Arc<Failure>>,
}

/// The faults of one mapping. A thread that notes a fault of an expected class allocates nothing, and no thread holds the
/// lock while it allocates.
pub(crate) struct Recorder {
    started: Instant,
    records: Mutex<Records>,
}

impl Series {
    /// Starts with no fault. The times of faults by which their page came are within 1 %, and others within 10 %.
    fn new(class: FaultKind, outcome: FaultOutcome) -> Self {
        let digits = match outcome {
            FaultOutcome::Ready | FaultOutcome::Produced => 2,
            _ => 1,
        };
        let bounds = (nanoseconds(SHORTEST), nanoseconds(LONGEST));
        match Histogram::new_with_bounds(bounds.0, bounds.1, digits) {
            Ok(nanoseconds) => Self { class, outcome, nanoseconds },
            Err(_) => unreachable!("the bounds are constants that it takes"),
        }
    }

    fn latency(&self) -> Latency {
        let Self { class, outcome, nanoseconds } = self;
        let at = |quantile| Duration::from_nanos(nanoseconds.value_at_quantile(quantile));
        let buckets = nanoseconds.iter_recorded().map(|step| {
            let longest = Duration::from_nanos(step.value_iterated_to());
            (longest, step.count_since_last_iteration())
        });
        Latency {
            class: *class,
            outcome: *outcome,
            count: nanoseconds.len(),
            p50: at(0.5),
            p99: at(0.99),
            p999: at(0.999),
            max: Duration::from_nanos(nanoseconds.max()),
            buckets: buckets.collect(),
        }
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

impl Recorder {
    /// Starts with no fault, expects faults of some classes, and keeps a trace of the last `keeps`.
    pub(crate) fn new(classes: &[FaultKind], keeps: usize) -> Self {
        let of = |class: &FaultKind| OUTCOMES.map(|outcome| Series::new(*class, outcome));
        let records = Records {
            series: classes.iter().flat_map(of).collect(),
            trace: VecDeque::with_capacity(keeps),
            keeps,
            lost: 0,
            last_failure: None,
        };
        Self { started: Instant::now(), records: Mutex::new(records) }
    }

    /// Returns the time from when the mapping was made to an instant.
    pub(crate) fn since_start(&self, moment: Instant) -> Duration {
        moment.saturating_duration_since(self.started)
    }

    /// Records faults that were answered.
    pub(crate) fn note(&self, faults: &[FaultRecord]) {
        for fault in faults {
            fire(fault);
        }
        let mut records = lock_uninterrupted(&self.records);
        for fault in faults {
            records.note(fault);
        }
    }

    /// Records faults that were noted elsewhere. `take` hands them over, and returns how many were lost.
    pub(crate) fn absorb(&self, take: impl FnOnce(&mut dyn FnMut(FaultRecord)) -> u64) {
        let mut records = lock_uninterrupted(&self.records);
        let lost = take(&mut |fault| {
            fire(&fault);
            records.note(&fault);
        });
        records.lost += lost;
    }

    /// Returns how long faults took, by class and outcome.
    pub(crate) fn latencies(&self) -> Vec<Latency> {
        let mut latencies = Vec::new();
        let mut at = 0;
        loop {
            let records = lock_uninterrupted(&self.records);
            let Some(&Series { class, outcome, .. }) = records.series.get(at) else { break };
            drop(records);
            let mut copy = Series::new(class, outcome);
            // It has the bounds of the copy.
            let _ = copy.nanoseconds.add(&lock_uninterrupted(&self.records).series[at].nanoseconds);
            if !copy.nanoseconds.is_empty() {
                latencies.push(copy.latency());
            }
            at += 1;
        }
        latencies.sort_by_key(|latency| (latency.class, latency.outcome));
        latencies
    }

    /// Notes why a page could not be produced.
    pub(crate) fn note_failure(&self, failure: Failure) {
        let last = Some(Arc::new(failure));
        let before = std::mem::replace(&mut lock_uninterrupted(&self.records).last_failure, last);
        drop(before);
    }

    /// Returns the failure that was noted last.
    pub(crate) fn last_failure(&self) -> Option<Failure> {
        let last = lock_uninterrupted(&self.records).last_failure.clone();
        last.map(Arc::unwrap_or_clone)
    }

    /// Takes the trace out, and returns how many faults were forgotten before it.
    pub(crate) fn take_trace(&self) -> (Vec<FaultRecord>, u64) {
        let keeps = lock_uninterrupted(&self.records).keeps;
        let mut trace = VecDeque::with_capacity(keeps);
        let mut records = lock_uninterrupted(&self.records);
        std::mem::swap(&mut records.trace, &mut trace);
        let lost = std::mem::take(&mut records.lost);
        drop(records);
        (trace.into(), lost)
    }
}

impl Records {
    fn note(&mut self, fault: &FaultRecord) {
        let is_of =
            |series: &&mut Series| (series.class, series.outcome) == (fault.class, fault.outcome);
        let took = nanoseconds(fault.latency);
        if let Some(series) = self.series.iter_mut().find(is_of) {
            series.nanoseconds.saturating_record(took);
        } else {
            let mut series = Series::new(fault.class, fault.outcome);
            series.nanoseconds.saturating_record(took);
            self.series.push(series);
        }
        if self.keeps == 0 {
            return;
        }
        if self.trace.len() == self.keeps {
            self.trace.pop_front();
            self.lost += 1;
        }
        self.trace.push_back(*fault);
    }
}

// Never inlined: each expansion of the probe would be a probe with a semaphore of its own.
#[inline(never)]
fn fire(fault: &FaultRecord) {
    probe::probe_lazy!(
        uzone,
        fault,
        fault.offset,
        nanoseconds(fault.latency),
        fault.class as u64,
        fault.outcome as u64
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fault(offset: u64, outcome: FaultOutcome, micros: u64) -> FaultRecord {
        FaultRecord {
            at: Duration::from_secs(offset),
            offset,
            class: FaultKind::Missing,
            is_write: false,
            outcome,
            latency: Duration::from_micros(micros),
        }
    }

    #[test]
    fn latencies_are_kept_by_class_and_outcome() {
        let recorder = Recorder::new(&[FaultKind::Missing], 0);
        for at in 0..1000 {
            recorder.note(&[fault(at, FaultOutcome::Ready, at + 1)]);
        }
        recorder.note(&[fault(1, FaultOutcome::Failed, u64::MAX / 2000)]);
        let latencies = recorder.latencies();
        let [at_hand, failed] = &latencies[..] else { panic!("{latencies:?}") };
        assert_eq!((at_hand.outcome, at_hand.count), (FaultOutcome::Ready, 1000));
        let near = |seen: Duration, micros: u64| {
            let right = Duration::from_micros(micros);
            assert!(
                seen >= right.mul_f64(0.98) && seen <= right.mul_f64(1.02),
                "{seen:?}, {right:?}"
            );
        };
        near(at_hand.p50, 500);
        near(at_hand.p99, 990);
        near(at_hand.max, 1000);
        assert_eq!(at_hand.buckets.iter().map(|(_, count)| count).sum::<u64>(), 1000);
        assert!(at_hand.buckets.is_sorted());
        // Longer than there is a number for.
        assert_eq!(failed.count, 1);
        assert!(failed.max >= LONGEST.mul_f64(0.9));
        assert_eq!(recorder.take_trace(), (Vec::new(), 0));
    }

    #[test]
    fn a_trace_keeps_the_last_and_says_how_many_are_lost() {
        let recorder = Recorder::new(&[], 3);
        let faults: Vec<_> = (0..5).map(|at| fault(at, FaultOutcome::Ready, 1)).collect();
        recorder.note(&faults);
        assert_eq!(recorder.take_trace(), (faults[2..].to_vec(), 2));
        assert_eq!(recorder.take_trace(), (Vec::new(), 0), "it was taken");
        recorder.note(&faults[..1]);
        assert_eq!(recorder.take_trace().0, faults[..1]);
    }
}
