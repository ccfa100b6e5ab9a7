//! What a row finds out beyond its time: its page faults, its pauses, and how long single calls took.

use std::cell::RefCell;
use std::rc::Rc;

use serde::Serialize;

use crate::group::{Samples, float, median};

/// The page faults of a row.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Faults {
    /// How many there were in a round, by the median: events that the handler read, or for the
    /// kernel's own mapping the kernel's count.
    pub count: u64,
    /// Nanoseconds for each, by the median; not where several threads fault at once.
    pub ns_per_fault: Option<f64>,
    /// How many pages were mapped and never touched, by the median.
    pub wasted_pages: u64,
    /// How many times the one-page handler that waits as ours does took this one's time; the median
    /// of the rounds' ratios.
    pub ratio_waiting_alike: Option<f64>,
    /// How long one touch took.
    pub touch: Option<Quantiles>,
    /// How many times the naive row's median touch took this one's; the median of the rounds' ratios.
    pub touch_ratio_naive: Option<f64>,
    /// By how many nanoseconds this row's median touch exceeds that of the row in its name;
    /// the median of the rounds' differences, which may be below zero by what the machine varies.
    pub beyond_ns: Option<f64>,
}

/// The times of single touches, of all rounds together.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Quantiles {
    /// The median.
    pub p50_ns: u64,
    /// What one in a hundred exceeds.
    pub p99_ns: u64,
    /// The longest.
    pub worst_ns: u64,
    /// How many there were.
    pub count: usize,
}

impl Quantiles {
    /// Takes times in ascending order; `None` if there is none.
    pub(crate) fn of(sorted: &[u64]) -> Option<Self> {
        let (count, worst_ns) = (sorted.len(), *sorted.last()?);
        Some(Self { p50_ns: median(sorted), p99_ns: not_exceeded(sorted, 990), worst_ns, count })
    }
}

/// What a case that takes faults finds out, round by round.
#[derive(Debug, Default)]
pub(crate) struct FaultLog {
    /// Whether the round that is not counted is over.
    is_warm: bool,
    counts: Vec<u64>,
    wasted: Vec<u64>,
    touches_ns: Vec<u64>,
    /// The median touch of each round.
    medians_ns: Vec<u64>,
}

impl FaultLog {
    /// Takes what one round found; the first does not count.
    pub(crate) fn push(&mut self, count: u64, wasted: u64, mut touches_ns: Vec<u64>) {
        if !self.is_warm {
            self.is_warm = true;
            return;
        }
        self.counts.push(count);
        self.wasted.push(wasted);
        touches_ns.sort_unstable();
        self.medians_ns.push(median(&touches_ns));
        self.touches_ns.append(&mut touches_ns);
    }

    /// Returns the median, over the rounds, of what `compare` makes of the median touch of this row
    /// and that of another.
    fn compared(&self, other: &Log, compare: impl Fn(f64, f64) -> f64) -> Option<f64> {
        if self.touches_ns.is_empty() {
            return None;
        }
        let other = other.borrow();
        let rounds = self.medians_ns.iter().zip(&other.medians_ns);
        let mut found: Vec<f64> =
            rounds.map(|(mine, other)| compare(float(*mine), float(*other))).collect();
        found.sort_by(f64::total_cmp);
        found.get(found.len() / 2).copied()
    }
}

/// Where a case puts what it finds out about its faults.
pub(crate) type Log = Rc<RefCell<FaultLog>>;

/// What is known of the faults of a row before its case runs.
#[derive(Default)]
pub(crate) struct FaultSpec {
    pub(crate) log: Log,
    /// Where the naive row's touches are.
    pub(crate) naive: Option<Log>,
    /// Where the touches are that this row's go beyond.
    pub(crate) beyond: Option<Log>,
    /// The id of the one-page handler that waits as ours does.
    pub(crate) waiting_alike: Option<String>,
}

impl FaultSpec {
    pub(super) fn faults(
        &self,
        row: &str,
        median_ns: u64,
        threads: usize,
        samples: &Samples,
    ) -> Faults {
        let log = self.log.borrow();
        let middle = |counts: &[u64]| {
            let mut counts = counts.to_vec();
            counts.sort_unstable();
            median(&counts)
        };
        let count = middle(&log.counts);
        let is_alone = threads == 1 && count > 0;
        let mut touches_ns = log.touches_ns.clone();
        touches_ns.sort_unstable();
        let ratio = |mine: f64, naive: f64| naive / mine.max(1.0);
        Faults {
            count,
            ns_per_fault: is_alone.then(|| float(median_ns) / float(count)),
            wasted_pages: middle(&log.wasted),
            ratio_waiting_alike: self
                .waiting_alike
                .as_ref()
                .and_then(|other| samples.ratio(other, row)),
            touch: Quantiles::of(&touches_ns),
            touch_ratio_naive: self.naive.as_ref().and_then(|naive| log.compared(naive, ratio)),
            beyond_ns: self
                .beyond
                .as_ref()
                .and_then(|other| log.compared(other, |mine, other| mine - other)),
        }
    }
}

/// Returns times in ascending order.
pub(super) fn sorted(mut ns: Vec<u64>) -> Vec<u64> {
    ns.sort_unstable();
    ns
}

/// Returns the smallest of times in ascending order that at least so many of 1000 do not exceed.
fn not_exceeded(sorted: &[u64], of_1000: usize) -> u64 {
    let rank = (sorted.len() * of_1000).div_ceil(1000).max(1);
    sorted.get(rank - 1).copied().unwrap_or(0)
}

/// The times between two yield points, of all rounds together.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Pauses {
    /// The median.
    pub p50_ns: u64,
    /// What one in a thousand exceeds.
    pub p999_ns: u64,
    /// The longest.
    pub worst_ns: u64,
    /// How many there were.
    pub count: usize,
}

impl Pauses {
    /// Takes pauses in any order; `None` if there was none.
    pub(crate) fn of(mut ns: Vec<u64>) -> Option<Self> {
        ns.sort_unstable();
        let (count, worst_ns) = (ns.len(), *ns.last()?);
        let (p50_ns, p999_ns) = (median(&ns), not_exceeded(&ns, 999));
        Some(Self { p50_ns, p999_ns, worst_ns, count })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn touches_are_compared_round_by_round_and_the_first_round_does_not_count() {
        let log = |rounds: &[[u64; 3]]| {
            let log = Log::default();
            for touches in rounds {
                log.borrow_mut().push(touches[0], 1, touches.to_vec());
            }
            log
        };
        let naive = log(&[[1000, 1000, 1000], [40, 40, 90], [60, 60, 10], [50, 50, 50]]);
        let mine = log(&[[1, 1, 1], [20, 20, 20], [20, 20, 20], [30, 30, 900]]);
        let spec = FaultSpec {
            log: mine,
            naive: Some(naive.clone()),
            beyond: Some(naive),
            waiting_alike: None,
        };
        let faults = spec.faults("mine", 200, 1, &Samples::default());
        assert_eq!((faults.count, faults.wasted_pages), (20, 1));
        assert_eq!(faults.ns_per_fault, Some(10.0));
        assert_eq!((faults.touch_ratio_naive, faults.beyond_ns), (Some(2.0), Some(-20.0)));
        let touch = faults.touch.expect("some");
        assert_eq!((touch.p50_ns, touch.p99_ns, touch.worst_ns, touch.count), (20, 900, 900, 9));
    }

    #[test]
    fn pauses_are_told_by_their_quantiles() {
        assert!(Pauses::of(Vec::new()).is_none());
        let pauses = Pauses::of((1..=1000).rev().collect()).expect("some");
        assert_eq!(
            (pauses.p50_ns, pauses.p999_ns, pauses.worst_ns, pauses.count),
            (501, 999, 1000, 1000)
        );
        let one = Pauses::of(vec![7]).expect("one");
        assert_eq!((one.p50_ns, one.p999_ns, one.worst_ns), (7, 7, 7));
        let latency = Quantiles::of(&sorted((1..=1000).rev().collect())).expect("some");
        assert_eq!(
            (latency.p50_ns, latency.p99_ns, latency.worst_ns, latency.count),
            (501, 990, 1000, 1000)
        );
        assert!(Quantiles::of(&[]).is_none());
    }
}
