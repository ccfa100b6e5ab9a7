//! How much to map around a fault when nothing is known about the order of faults: [`Densities`].
//!
//! A window that is too small costs a fault for each page that is touched next; one that is too large
//! costs the time to map pages that are never touched. Which of the two costs more depends on how
//! many pages will be touched, and that is not known. This is the problem of renting or buying. So each
//! fault in a block of 2 MiB gets its page alone, until the faults of the block have cost half of the
//! price of the whole block; the next fault maps the rest of it. Where neighbours are mapped
//! while the faulting thread is woken on another CPU, a fault gets the window that was set and not its page
//! alone.
//!
//! With all of the price instead of half, no order of touches could cost more than twice the best fixed
//! window, and a block of which every page is touched would cost just that. With half of it such a block
//! costs at most 1.5 times the best, and a block that is not touched again after it was mapped three times.
//! These hold for constant prices. In random order the cost is then at most twice the best for most densities and 2.7 times for the worst;
//! `tests/window.rs` computes it.
//!
//! Cost: 2 bytes for each block of 2 MiB.

use alloc::boxed::Box;
use core::ops::Range;

use crate::sync::{AtomicU16, Ordering};

/// The cost of faults, measured by the thread that answers them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FaultCosts {
    /// How long a fault takes that is answered with one page, in nanoseconds, from one touch to the
    /// next.
    pub fault_ns: u32,
    /// How long it takes to map one more page along with it, in nanoseconds.
    pub page_ns: u32,
    /// Whether neighbours are mapped while the faulting thread is woken, on another CPU. Then a few of them
    /// cost it nothing, and a window of the size that was set is better than one page.
    pub is_parallel: bool,
}

impl FaultCosts {
    /// Returns whether so many faults have cost half of the price of so many pages: then the next one had
    /// better map them.
    #[must_use]
    pub fn pays(self, faults: u64, pages: u64) -> bool {
        let rent = faults.saturating_mul(u64::from(self.fault_ns));
        rent.saturating_mul(2) >= pages.saturating_mul(u64::from(self.page_ns))
    }
}

impl Default for FaultCosts {
    /// Returns the cost of faults before any was measured: values between those of the slowest and of the
    /// fastest machines.
    fn default() -> Self {
        Self { fault_ns: 8_000, page_ns: 1_700, is_parallel: false }
    }
}

/// How many faults the blocks of some areas have had.
#[derive(Debug)]
pub(crate) struct Densities {
    faults: Box<[AtomicU16]>,
    /// log2 of the pages of a block.
    shift: u32,
}

impl Densities {
    /// Makes room for `blocks` blocks of `1 << shift` pages, in which there was no fault yet.
    pub(crate) fn new(blocks: usize, shift: u32) -> Self {
        Self { faults: (0..blocks).map(|_| AtomicU16::new(0)).collect(), shift }
    }

    /// Counts a fault in a block. Returns log2 of how many pages its window has: those of the block, or
    /// one.
    pub(crate) fn window(&self, block: usize, costs: FaultCosts) -> u32 {
        let Some(count) = self.faults.get(block) else { return 0 };
        // Relaxed: a hint, of which a fault of another thread may be lost.
        let faults = count.load(Ordering::Relaxed).saturating_add(1);
        count.store(faults, Ordering::Relaxed);
        let pays = faults > 1 && costs.pays(u64::from(faults), 1 << self.shift);
        if pays { self.shift } else { 0 }
    }

    /// Notes that pages of blocks were given back: their faults are forgotten.
    pub(crate) fn forget(&self, blocks: Range<usize>) {
        for count in self.faults.get(blocks).unwrap_or_default() {
            count.store(0, Ordering::Relaxed); // a hint
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAME_CPU: FaultCosts = FaultCosts { fault_ns: 5_200, page_ns: 1_400, is_parallel: false };

    #[test]
    fn faults_get_one_page_until_their_block_has_cost_half_of_its_price() {
        let densities = Densities::new(2, 9);
        let alone = (0..100).take_while(|_| densities.window(0, SAME_CPU) == 0).count();
        // 512 pages cost as much as 138 faults.
        assert_eq!(alone, 68);
        assert_eq!(densities.window(0, SAME_CPU), 9);
        assert_eq!(densities.window(1, SAME_CPU), 0, "the other block has had no fault");
        densities.forget(0..1);
        assert_eq!(densities.window(0, SAME_CPU), 0);
    }

    #[test]
    #[cfg_attr(miri, ignore = "arithmetic, and long")]
    fn a_first_fault_gets_its_page_alone_whatever_it_costs_and_nothing_overflows() {
        for shift in [0, 1, 5, 9] {
            for costs in [(u32::MAX, 0), (0, u32::MAX), (u32::MAX, u32::MAX)] {
                let (fault_ns, page_ns) = costs;
                let costs = FaultCosts { fault_ns, page_ns, is_parallel: false };
                let densities = Densities::new(1, shift);
                assert_eq!(densities.window(0, costs), 0);
                for _ in 0..100_000 {
                    assert!([0, shift].contains(&densities.window(0, costs)));
                }
            }
        }
        let none = Densities::new(0, 9);
        assert_eq!(none.window(0, SAME_CPU), 0);
        none.forget(0..1);
    }
}
