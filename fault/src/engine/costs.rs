//! The cost of faults for the threads that take them, measured by the thread that answers: [`CostMeter`].
//!
//! The time of a fault is the time from reading one fault to reading the next, where the second did not wait
//! for neighbours of the first to be mapped. It contains the work of the faulting thread after it was woken, so
//! it is an upper bound; the meter follows the short ones and forgets them slowly. A program that
//! computes for long between two touches makes the bound large, and then neighbours cost little beside
//! the program's own work.

use std::time::{Duration, Instant};

use uzone_pages::FaultCosts;

/// Longer times of a fault count as this: a wake-up of another processor takes less.
const MOST_FAULT_NS: u32 = 100_000;
/// Longer times of a page count as this.
const MOST_PAGE_NS: u32 = 20_000;
/// Of fewer pages at once the time is mostly that of the calls.
const LEAST_PAGES: u64 = 8;

/// How long a page takes that is copied, on the machines that were measured.
pub(crate) const COPIED_NS: u32 = 1_700;
/// How long one takes that is mapped from the page cache.
pub(crate) const CONTINUED_NS: u32 = 250;

/// Measures faults and pages.
pub(crate) struct CostMeter {
    costs: FaultCosts,
    /// When the last fault was read, if it was the only one and nothing has delayed the next since.
    last: Option<Instant>,
}

impl CostMeter {
    /// Starts with the facts before any fault: the nanoseconds for a page, and whether
    /// neighbours are mapped on another CPU while the faulting thread is woken.
    pub(crate) fn new(page_ns: u32, is_parallel: bool) -> Self {
        Self { costs: FaultCosts { page_ns, is_parallel, ..FaultCosts::default() }, last: None }
    }

    /// Notes whether neighbours are mapped on another CPU from now on.
    pub(crate) fn set_parallel(&mut self, is_parallel: bool) {
        let FaultCosts { page_ns, .. } = self.costs;
        *self = Self::new(page_ns, is_parallel);
    }

    pub(crate) fn costs(&self) -> FaultCosts {
        self.costs
    }

    /// Notes that faults were read, and whether they had to wait for neighbours to be mapped.
    pub(crate) fn read(&mut self, faults: usize, now: Instant, has_waited: bool) {
        let last = self.last.take().filter(|_| !has_waited);
        if faults == 1 {
            if let Some(last) = last {
                let took = clamped(now.saturating_duration_since(last).as_nanos(), MOST_FAULT_NS);
                follow(&mut self.costs.fault_ns, took);
            }
            self.last = Some(now);
        }
    }

    /// Notes that pages were mapped for which no thread waited, in that time.
    pub(crate) fn mapped(&mut self, pages: u64, took: Duration) {
        if !self.costs.is_parallel {
            self.last = None;
        }
        if pages >= LEAST_PAGES {
            let each = took.as_nanos() / u128::from(pages);
            follow(&mut self.costs.page_ns, clamped(each, MOST_PAGE_NS));
        }
    }
}

fn clamped(nanos: u128, most: u32) -> u32 {
    u32::try_from(nanos).map_or(most, |nanos| nanos.min(most))
}

/// Moves a value towards a measurement: a quarter of the way down, a 32nd of it up. A
/// disturbance only makes a measurement longer.
fn follow(value: &mut u32, measured: u32) {
    if measured < *value {
        *value -= (*value - measured).div_ceil(4);
    } else {
        *value += (measured - *value) / 32;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_of_a_fault_follows_the_short_ones_and_no_batch_or_neighbour_counts() {
        let mut meter = CostMeter::new(COPIED_NS, false);
        let mut now = Instant::now();
        let mut step = |meter: &mut CostMeter, micros: u64, faults: usize| {
            now += Duration::from_micros(micros);
            meter.read(faults, now, false);
        };
        (0..100).for_each(|_| step(&mut meter, 5, 1));
        assert!((5_000..5_100).contains(&meter.costs().fault_ns), "{:?}", meter.costs());
        // One that was disturbed moves it by little, and several at once are not measured.
        step(&mut meter, 3_600_000_000, 1);
        assert!(meter.costs().fault_ns < 9_000, "{:?}", meter.costs());
        let before = meter.costs().fault_ns;
        step(&mut meter, 1, 3);
        step(&mut meter, 1, 1);
        assert_eq!(meter.costs().fault_ns, before);
        meter.mapped(16, Duration::from_micros(16));
        step(&mut meter, 1, 1);
        assert_eq!(meter.costs().fault_ns, before, "neighbours were mapped in between");
        (0..100).for_each(|_| meter.mapped(8, Duration::from_micros(16)));
        assert!((1_800..2_100).contains(&meter.costs().page_ns), "{:?}", meter.costs());
        meter.mapped(0, Duration::ZERO);
        meter.mapped(9, Duration::MAX);
    }
}
