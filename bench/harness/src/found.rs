//! Samples of a row beyond its time: its page faults, and the times of single calls.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use uzone_report::results::{Faults, Spread};
use uzone_report::{float, nanoseconds};

use super::rounds::median;

/// The sample of one round of a case that takes page faults.
#[derive(Debug, Default)]
pub struct Found {
    /// The measured time.
    pub elapsed: Duration,
    /// The part of it before the first touch.
    pub before: Duration,
    /// The number of page faults.
    pub faults: u64,
    /// The number of pages that were mapped and never touched.
    pub wasted: u64,
    /// The number of bytes from object storage and devices.
    pub read_bytes: u64,
    /// The time of each touch, where touches are timed.
    pub touches_ns: Vec<u64>,
    /// The time of each touch that caused a page fault.
    pub demand_ns: Vec<u64>,
    /// The memory of each of several clones, in bytes.
    pub clone_bytes: Option<u64>,
    /// The CPU time of the process, with making the memory. The suite sets it.
    pub cpu: Duration,
}

impl Found {
    /// Adds the time of work before the first touch.
    pub fn after(self, before: Duration) -> Self {
        Self { elapsed: self.elapsed + before, before: self.before + before, ..self }
    }

    /// Adds the sample of another thread or clone.
    pub fn add(&mut self, other: Self) {
        self.elapsed += other.elapsed;
        self.faults += other.faults;
        self.wasted += other.wasted;
        self.touches_ns.extend(other.touches_ns);
        self.demand_ns.extend(other.demand_ns);
    }

    /// Returns the time until `touches` touches were done, without the time between touches.
    fn until(&self, touches: usize) -> u64 {
        nanoseconds(self.before) + self.touches_ns.iter().take(touches).sum::<u64>()
    }
}

/// The samples of a case, one a round. The first round does not count.
pub(crate) type Log = Rc<RefCell<Vec<Found>>>;

/// Returns the middle one of some values.
fn middle(values: impl Iterator<Item = u64>) -> u64 {
    let mut values: Vec<u64> = values.collect();
    values.sort_unstable();
    median(&values)
}

/// Sums up the samples of a row.
pub(super) fn faults(log: &Log, median_ns: u64, threads: usize) -> Faults {
    let log = log.borrow();
    let rounds = log.get(1..).unwrap_or_default();
    let of_rounds = |of: &dyn Fn(&Found) -> u64| middle(rounds.iter().map(of));
    let all = |of: fn(&Found) -> &[u64]| rounds.iter().flat_map(of).copied().collect::<Vec<_>>();
    let touches_ns = all(|found| &found.touches_ns);
    let is_timed = threads == 1 && !touches_ns.is_empty();
    let half = |found: &Found| found.until(found.touches_ns.len().div_ceil(2));
    let count = of_rounds(&|found| found.faults);
    let clones = rounds.iter().filter_map(|found| found.clone_bytes);
    Faults {
        count,
        ns_per_fault: (threads == 1 && count > 0).then(|| float(median_ns) / float(count)),
        wasted_pages: of_rounds(&|found| found.wasted),
        first_ns: is_timed.then(|| of_rounds(&|found| found.until(1))),
        half_ns: is_timed.then(|| of_rounds(&half)),
        cpu_ns: of_rounds(&|found| nanoseconds(found.cpu)),
        read_bytes: of_rounds(&|found| found.read_bytes),
        touch: latency(touches_ns),
        demand: latency(all(|found| &found.demand_ns)),
        clone_resident_bytes: clones.clone().next().map(|_| middle(clones)),
    }
}

/// Returns the smallest of times in ascending order that at least `of_1000` of 1000 do not exceed.
fn not_exceeded(sorted: &[u64], of_1000: usize) -> u64 {
    let rank = (sorted.len() * of_1000).div_ceil(1000).max(1);
    sorted.get(rank - 1).copied().unwrap_or(0)
}

/// Sums up the times of single calls, in any order, with the 99th percentile and the 99.9th; `None` without a call.
pub(super) fn latency(mut ns: Vec<u64>) -> Option<Spread> {
    ns.sort_unstable();
    let (p50_ns, worst_ns, count) = (median(&ns), *ns.last()?, ns.len());
    let [p99_ns, p999_ns] = [990, 999].map(|of_1000| not_exceeded(&ns, of_1000));
    Some(Spread { p50_ns, p99_ns, p999_ns, worst_ns, count })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_summed_up_by_their_medians_and_the_first_round_does_not_count() {
        let log = |rounds: &[[u64; 3]]| {
            let log = Log::default();
            for touches in rounds {
                let found = Found {
                    faults: touches[0],
                    wasted: 1,
                    read_bytes: touches[0] * 7,
                    touches_ns: touches.to_vec(),
                    demand_ns: touches[..1].to_vec(),
                    clone_bytes: Some(touches[0] * 11),
                    cpu: Duration::from_nanos(touches[0] * 3),
                    ..Found::default()
                };
                log.borrow_mut().push(found.after(Duration::from_nanos(5)));
            }
            log
        };
        let mine = log(&[[1, 1, 1], [20, 20, 20], [20, 20, 20], [30, 30, 900]]);
        let faults = faults(&mine, 200, 1);
        assert_eq!((faults.count, faults.wasted_pages, faults.read_bytes), (20, 1, 140));
        assert_eq!(faults.ns_per_fault, Some(10.0));
        assert_eq!((faults.first_ns, faults.half_ns, faults.cpu_ns), (Some(25), Some(45), 60));
        assert_eq!(faults.clone_resident_bytes, Some(220));
        let demand = faults.demand.expect("some");
        assert_eq!((demand.p50_ns, demand.worst_ns, demand.count), (20, 30, 3));
        let touch = faults.touch.expect("some");
        assert_eq!(
            (touch.p50_ns, touch.p99_ns, touch.p999_ns, touch.worst_ns, touch.count),
            (20, 900, 900, 900, 9)
        );
    }

    #[test]
    fn calls_are_summed_up_by_their_quantiles() {
        let calls = latency((1..=1000).rev().collect()).expect("some");
        assert_eq!(
            (calls.p50_ns, calls.p99_ns, calls.p999_ns, calls.worst_ns, calls.count),
            (501, 990, 999, 1000, 1000)
        );
        let one = latency(vec![7]).expect("one");
        assert_eq!((one.p50_ns, one.p999_ns, one.worst_ns), (7, 7, 7));
        assert!(latency(Vec::new()).is_none());
    }
}
