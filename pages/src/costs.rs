//! The costs of a fault and of a page: [`Costs`], measured by the threads that answer faults, and the number of faults
//! after which a block is mapped whole.
//!
//! A fault that maps too little costs a fault for each page that is touched next; one that maps too much costs the time
//! for pages that are never touched. Which of the two costs more depends on how many pages will be touched, and that is
//! not known. This is the problem of renting or buying (ski rental): each fault of a block of 2 MiB rents one page, until
//! the rent has reached a share of the price of the block's other pages; the next fault buys them.
//!
//! With a share of 1 no number of touches costs more than twice the best. A share that is drawn for each block does
//! better. With the distribution function
//!
//! ```text
//! F(x) = 0 below 0.3, and K eˣ − d from 0.3 to 1,   d = 1 / (1.3 e⁰·⁷ − 1) = 0.618,   K = 1.3 d / e⁰·³
//! ```
//!
//! the expected cost is that of the best where at most 0.3 of the break-even number of pages are touched, and at most
//! 1 + d = 1.62 times the best for each other number; hundreds of blocks average it. (Karlin and others, "Competitive
//! randomized algorithms for nonuniform problems", 1994, give the case without the 0.3: 1.58 for every number.)

use core::time::Duration;

use crate::sync::{AtomicU32, Ordering};

/// Longer times of a fault count as this: waking a thread on another CPU takes less.
const MOST_FAULT_NS: u32 = 100_000;
/// Longer times of a page count as this.
const MOST_PAGE_NS: u32 = 20_000;
/// Of fewer pages at once the time is mostly that of the calls.
const LEAST_PAGES: u64 = 8;

/// F at equal steps, inverted, in 256ths.
const SHARES: [u64; 16] =
    [77, 77, 77, 87, 106, 123, 139, 154, 168, 182, 195, 207, 219, 230, 241, 251];

/// The cost of a fault that maps one page, and of each page more, for the thread that waits for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FaultCosts {
    /// The nanoseconds of a fault that is answered with one page, from one touch to the next.
    pub fault_ns: u32,
    /// The nanoseconds for mapping one page more along with it.
    pub page_ns: u32,
}

impl FaultCosts {
    /// Returns whether a fault of a block of `pages` pages, which has had `faults` faults with it, maps the rest of the
    /// block, too.
    #[must_use]
    pub fn buys(self, block: u64, faults: u64, pages: u64) -> bool {
        // The upper bits of the product are the mixed ones.
        let drawn = block.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 60;
        let share = SHARES[usize::try_from(drawn).unwrap_or(0)];
        let rent = faults.saturating_mul(u64::from(self.fault_ns)).saturating_mul(256);
        faults > 1 && rent >= pages.saturating_mul(u64::from(self.page_ns)).saturating_mul(share)
    }
}

/// The costs of some memory, as measured.
#[derive(Debug)]
pub(crate) struct Costs {
    fault_ns: AtomicU32,
    page_ns: AtomicU32,
}

impl Costs {
    /// Starts with the costs before any was measured.
    pub(crate) fn new(costs: FaultCosts) -> Self {
        let FaultCosts { fault_ns, page_ns } = costs;
        Self { fault_ns: AtomicU32::new(fault_ns), page_ns: AtomicU32::new(page_ns) }
    }

    pub(crate) fn get(&self) -> FaultCosts {
        // Relaxed, as everywhere here: a measurement that is lost is followed by others.
        let get = |value: &AtomicU32| value.load(Ordering::Relaxed);
        FaultCosts { fault_ns: get(&self.fault_ns), page_ns: get(&self.page_ns) }
    }

    pub(crate) fn fault_took(&self, time: Duration) {
        follow(&self.fault_ns, clamped(time.as_nanos(), MOST_FAULT_NS));
    }

    pub(crate) fn pages_took(&self, pages: u64, time: Duration) {
        if pages >= LEAST_PAGES {
            follow(&self.page_ns, clamped(time.as_nanos() / u128::from(pages), MOST_PAGE_NS));
        }
    }
}

fn clamped(nanos: u128, most: u32) -> u32 {
    u32::try_from(nanos).map_or(most, |nanos| nanos.min(most))
}

/// Moves a value towards a measurement: a quarter of the way down, a 32nd of it up. A disturbance only makes a
/// measurement longer.
fn follow(value: &AtomicU32, measured: u32) {
    let old = value.load(Ordering::Relaxed);
    let new = if measured < old {
        old - (old - measured).div_ceil(4)
    } else {
        old + (measured - old) / 32
    };
    if new != old {
        value.store(new, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec::Vec;

    use super::*;

    #[test]
    fn costs_follow_short_times_at_once_and_long_ones_slowly() {
        let costs = Costs::new(FaultCosts { fault_ns: 8_000, page_ns: 1_700 });
        (0..100).for_each(|_| costs.fault_took(Duration::from_micros(5)));
        assert!((5_000..5_100).contains(&costs.get().fault_ns), "{:?}", costs.get());
        costs.fault_took(Duration::from_secs(3600));
        assert!(costs.get().fault_ns < 9_000, "{:?}", costs.get());
        (0..100).for_each(|_| costs.pages_took(64, Duration::from_micros(32)));
        assert!((500..510).contains(&costs.get().page_ns), "{:?}", costs.get());
        // Of so few pages the time is that of the call.
        costs.pages_took(7, Duration::ZERO);
        assert!(costs.get().page_ns >= 500);
    }

    #[test]
    fn shares_are_drawn_from_the_distribution_of_the_least_expected_cost() {
        let excess = 1.0 / (1.3 * 0.7_f64.exp() - 1.0);
        let factor = 1.3 * excess / 0.3_f64.exp();
        for (step, share) in SHARES.into_iter().enumerate() {
            let at = (f64::from(u32::try_from(step).unwrap()) + 0.5) / 16.0;
            let drawn = (((at + excess) / factor).ln()).max(0.3) * 256.0;
            assert!((drawn - f64::from(u32::try_from(share).unwrap())).abs() < 0.51, "{step}");
        }
        // Each share has as many blocks.
        let costs = FaultCosts { fault_ns: 1, page_ns: 1 };
        let bought_at = |block| (2..=256).find(|&faults| costs.buys(block, faults, 256)).unwrap();
        let mut drawn: Vec<u64> = (0..1600).map(bought_at).collect();
        drawn.sort_unstable();
        for (step, share) in SHARES.into_iter().enumerate() {
            let middle = drawn[step * 100 + 50];
            assert!(middle.abs_diff(share) <= 16, "{step}: {middle}, {share}");
        }
    }
}
