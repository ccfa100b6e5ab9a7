//! What a row finds out beyond its time: its page faults, its pauses, and how long single calls took.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use uzone_report::results::{Faults, Spread};

use crate::harness::group::{Samples, float, median, nanoseconds};

/// What a case that takes faults finds out in a round.
#[derive(Debug, Default)]
pub(crate) struct Found {
    pub(crate) elapsed: Duration,
    /// How much of that was before the first touch.
    pub(crate) before: Duration,
    pub(crate) faults: u64,
    /// How many pages were mapped and never touched.
    pub(crate) wasted: u64,
    /// How many bytes came from object storage, and from devices.
    pub(crate) read_bytes: u64,
    /// How long each touch took, where that is asked for.
    pub(crate) touches_ns: Vec<u64>,
    /// The same of those that took a page fault.
    pub(crate) demand_ns: Vec<u64>,
    /// How much memory each of several clones takes, in bytes.
    pub(crate) clone_bytes: Option<u64>,
}

impl Found {
    /// Adds what was done before the first touch.
    pub(crate) fn after(self, before: Duration) -> Self {
        Self { elapsed: self.elapsed + before, before: self.before + before, ..self }
    }
}

/// What a case that takes faults finds out, round by round.
#[derive(Debug, Default)]
pub(crate) struct FaultLog {
    /// Whether the round that is not counted is over.
    is_warm: bool,
    counts: Vec<u64>,
    wasted: Vec<u64>,
    firsts_ns: Vec<u64>,
    halves_ns: Vec<u64>,
    cpus_ns: Vec<u64>,
    read_bytes: Vec<u64>,
    touches_ns: Vec<u64>,
    demand_ns: Vec<u64>,
    clone_bytes: Vec<u64>,
    /// The median touch of each round.
    medians_ns: Vec<u64>,
}

impl FaultLog {
    /// Takes what one round found; the first does not count.
    pub(crate) fn push(&mut self, found: Found, cpu: Duration) {
        let Found { elapsed: _, before, faults, wasted, read_bytes, mut touches_ns, .. } = found;
        if !self.is_warm {
            self.is_warm = true;
            return;
        }
        self.counts.push(faults);
        self.wasted.push(wasted);
        self.cpus_ns.push(nanoseconds(cpu));
        self.read_bytes.push(read_bytes);
        self.demand_ns.extend(found.demand_ns);
        self.clone_bytes.extend(found.clone_bytes);
        if !touches_ns.is_empty() {
            // Of what is done between touches nothing counts.
            let until =
                |touch: usize| nanoseconds(before) + touches_ns[..touch].iter().sum::<u64>();
            self.firsts_ns.push(until(1));
            self.halves_ns.push(until(touches_ns.len().div_ceil(2)));
        }
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
        let ratio = |mine: f64, naive: f64| naive / mine.max(1.0);
        Faults {
            count,
            ns_per_fault: is_alone.then(|| float(median_ns) / float(count)),
            wasted_pages: middle(&log.wasted),
            first_ns: (threads == 1 && !log.firsts_ns.is_empty()).then(|| middle(&log.firsts_ns)),
            half_ns: (threads == 1 && !log.halves_ns.is_empty()).then(|| middle(&log.halves_ns)),
            cpu_ns: middle(&log.cpus_ns),
            read_bytes: middle(&log.read_bytes),
            ratio_waiting_alike: self
                .waiting_alike
                .as_ref()
                .and_then(|other| samples.ratio(other, row)),
            touch: latency(log.touches_ns.clone()),
            demand: latency(log.demand_ns.clone()),
            clone_resident_bytes: (!log.clone_bytes.is_empty()).then(|| middle(&log.clone_bytes)),
            touch_ratio_naive: self.naive.as_ref().and_then(|naive| log.compared(naive, ratio)),
            beyond_ns: self
                .beyond
                .as_ref()
                .and_then(|other| log.compared(other, |mine, other| mine - other)),
        }
    }
}

/// Returns the smallest of times in ascending order that at least so many of 1000 do not exceed.
fn not_exceeded(sorted: &[u64], of_1000: usize) -> u64 {
    let rank = (sorted.len() * of_1000).div_ceil(1000).max(1);
    sorted.get(rank - 1).copied().unwrap_or(0)
}

/// Sums up times in any order; `None` if there is none.
fn spread(mut ns: Vec<u64>) -> Option<(Vec<u64>, Spread)> {
    ns.sort_unstable();
    let (p50_ns, worst_ns, count) = (median(&ns), *ns.last()?, ns.len());
    Some((ns, Spread { p50_ns, p99_ns: None, p999_ns: None, worst_ns, count }))
}

/// Sums up the times of single calls, with what one in a hundred and one in a thousand
/// exceed.
pub(super) fn latency(ns: Vec<u64>) -> Option<Spread> {
    spread(ns).map(|(ns, spread)| {
        let (p99_ns, p999_ns) = (not_exceeded(&ns, 990), not_exceeded(&ns, 999));
        Spread { p99_ns: Some(p99_ns), p999_ns: Some(p999_ns), ..spread }
    })
}

/// Sums up the times between two yield points, with what one in a thousand exceeds.
pub(super) fn pauses(ns: Vec<u64>) -> Option<Spread> {
    spread(ns).map(|(ns, spread)| Spread { p999_ns: Some(not_exceeded(&ns, 999)), ..spread })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn touches_are_compared_round_by_round_and_the_first_round_does_not_count() {
        let log = |rounds: &[[u64; 3]]| {
            let log = Log::default();
            for touches in rounds {
                let touches_ns = touches.to_vec();
                let (faults, read_bytes) = (touches[0], touches[0] * 7);
                let (demand_ns, clone_bytes) = (touches[..1].to_vec(), Some(touches[0] * 11));
                let found = Found { faults, wasted: 1, read_bytes, touches_ns, ..Found::default() };
                let found = Found { demand_ns, clone_bytes, ..found };
                let found = found.after(Duration::from_nanos(5));
                log.borrow_mut().push(found, Duration::from_nanos(touches[0] * 3));
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
        assert_eq!((faults.count, faults.wasted_pages, faults.read_bytes), (20, 1, 140));
        assert_eq!(faults.ns_per_fault, Some(10.0));
        assert_eq!((faults.first_ns, faults.half_ns, faults.cpu_ns), (Some(25), Some(45), 60));
        assert_eq!((faults.touch_ratio_naive, faults.beyond_ns), (Some(2.0), Some(-20.0)));
        assert_eq!(faults.clone_resident_bytes, Some(220));
        let demand = faults.demand.expect("some");
        assert_eq!((demand.p50_ns, demand.worst_ns, demand.count), (20, 30, 3));
        let touch = faults.touch.expect("some");
        assert_eq!(
            (touch.p50_ns, touch.p99_ns, touch.p999_ns, touch.worst_ns, touch.count),
            (20, Some(900), Some(900), 900, 9)
        );
    }

    #[test]
    fn pauses_and_calls_are_summed_up_by_their_quantiles() {
        assert!(pauses(Vec::new()).is_none());
        let several = pauses((1..=1000).rev().collect()).expect("some");
        assert_eq!(
            (several.p50_ns, several.p999_ns, several.worst_ns, several.count),
            (501, Some(999), 1000, 1000)
        );
        let one = pauses(vec![7]).expect("one");
        assert_eq!((one.p50_ns, one.p999_ns, one.worst_ns), (7, Some(7), 7));
        let calls = latency((1..=1000).rev().collect()).expect("some");
        assert_eq!(
            (calls.p50_ns, calls.p99_ns, calls.worst_ns, calls.count),
            (501, Some(990), 1000, 1000)
        );
        assert!(latency(Vec::new()).is_none());
    }
}
