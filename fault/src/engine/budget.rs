//! How much of its thread's time one mapping may have: [`Budget`]. A client that faults without end is held up
//! by its own, and not those beside it.
//!
//! A rate is kept by the time until which it is paid for: each fault and each byte moves that on, and while it
//! is in the future no more is read. A time in the past is credit, of [`BURST`] at most.

use std::num::{NonZeroU32, NonZeroU64, NonZeroUsize};
use std::time::{Duration, Instant};

use uzone_pages::ByteLen;

/// The time for which a mapping may save up its unused budget.
const BURST: Duration = Duration::from_millis(100);
/// For how long it is held up at least, so that each time is worth it.
const HOLD: Duration = Duration::from_millis(1);
const SECOND: u128 = Duration::from_secs(1).as_nanos();

/// The most that is done for one mapping. By default there is no limit.
///
/// A mapping that has used its budget waits, and so do its removals: for a millisecond, or until there
/// is some again. It may save up a tenth of a second of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Budget {
    faults: Option<NonZeroU32>,
    bytes: Option<ByteLen>,
    pending: Option<NonZeroUsize>,
}

impl Budget {
    /// Limits how many faults are read a second.
    #[must_use]
    pub fn faults_per_second(mut self, faults: impl Into<Option<NonZeroU32>>) -> Self {
        self.faults = faults.into();
        self
    }

    /// The lowest limit of bytes: with less, one window would hold a mapping up for longer than any client
    /// waits.
    pub const LEAST_BYTES: ByteLen = ByteLen::mib(1);

    /// Limits how many bytes are installed a second, with those around a fault and those ahead of it. Less
    /// than [`Budget::LEAST_BYTES`] counts as that.
    #[must_use]
    pub fn bytes_per_second(mut self, bytes: impl Into<Option<ByteLen>>) -> Self {
        self.bytes = bytes.into();
        self
    }

    /// Limits how many pages are produced at once by the I/O threads, which the mappings share: no fault is
    /// read while there are as many.
    #[must_use]
    pub fn pending(mut self, pages: impl Into<Option<NonZeroUsize>>) -> Self {
        self.pending = pages.into();
        self
    }

    /// Returns how many faults and bytes a second threads have at most that answer their faults
    /// themselves.
    pub(crate) fn pace(self) -> (Option<NonZeroU32>, Option<NonZeroU64>) {
        let bytes = self.bytes.map(|rate| rate.max(Self::LEAST_BYTES).get());
        (self.faults, bytes.and_then(NonZeroU64::new))
    }

    /// Returns whether there is a limit.
    pub(crate) fn is_limited(self) -> bool {
        self != Self::default()
    }
}

/// The rest of a budget.
#[derive(Debug)]
pub(crate) struct Allowance {
    budget: Budget,
    /// Until when faults and bytes are paid for.
    paid: [Instant; 2],
    /// The use at the last look: faults, and bytes.
    used: [u64; 2],
}

impl Allowance {
    pub(crate) fn new(budget: Budget, now: Instant) -> Self {
        let paid = now.checked_sub(BURST).unwrap_or(now);
        Self { budget, paid: [paid; 2], used: [0; 2] }
    }

    /// Notes the use so far, in faults and bytes, and returns until when nothing more is read.
    pub(crate) fn held_until(
        &mut self,
        used: [u64; 2],
        pending: usize,
        now: Instant,
    ) -> Option<Instant> {
        let Budget { faults, bytes, pending: most } = self.budget;
        let bytes = bytes.map(|rate| rate.max(Budget::LEAST_BYTES).get());
        let rates = [faults.map(|rate| rate.get().into()), bytes];
        for ((paid, rate), (used, before)) in
            self.paid.iter_mut().zip(rates).zip(used.into_iter().zip(&mut self.used))
        {
            let new = used.wrapping_sub(std::mem::replace(before, used));
            let Some(rate) = rate else { continue };
            let cost = u64::try_from(u128::from(new) * SECOND / u128::from(rate));
            let cost = Duration::from_nanos(cost.unwrap_or(u64::MAX));
            let start = now.checked_sub(BURST).map_or(now, |oldest| oldest.max(*paid));
            // Beyond the range of the clock it waits for as long as a second try takes.
            *paid = start.checked_add(cost).unwrap_or(start);
        }
        let paid = self.paid[0].max(self.paid[1]);
        let is_full = most.is_some_and(|most| pending >= most.get());
        (is_full || paid > now).then(|| paid.max(now + HOLD))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_kept_after_a_burst_and_unused_time_is_saved_up_to_a_limit() {
        let start = Instant::now() + Duration::from_secs(10);
        let budget = Budget::default().faults_per_second(NonZeroU32::new(1000));
        let mut allowance = Allowance::new(budget, start);
        let mut held = |used, ms| {
            let now = start + Duration::from_millis(ms);
            allowance.held_until([used, u64::MAX / 2], 0, now).map(|until| until - start)
        };
        assert_eq!(held(100, 0), None, "a tenth of a second of them at once");
        assert_eq!(held(150, 0), Some(Duration::from_millis(50)));
        assert_eq!(held(150, 49), Some(Duration::from_millis(50)));
        assert_eq!(held(150, 50), None);
        assert_eq!(held(151, 50), Some(Duration::from_millis(51)));
        // After a long time no more is saved up than at first.
        assert_eq!(held(151, 5000), None);
        assert_eq!(held(251, 5000), None);
        assert_eq!(held(252, 5000), Some(Duration::from_millis(5001)));
    }

    #[test]
    fn bytes_and_pages_that_are_produced_hold_it_up_as_well() {
        let start = Instant::now() + Duration::from_secs(10);
        // It counts as 1 MiB.
        let budget = Budget::default().bytes_per_second(ByteLen::ZERO).pending(NonZeroUsize::MIN);
        assert!(budget.is_limited() && !Budget::default().is_limited());
        let mut allowance = Allowance::new(budget, start);
        assert_eq!(allowance.held_until([9, 0], 0, start), None);
        assert_eq!(allowance.held_until([9, 0], 1, start), Some(start + HOLD));
        let until = allowance.held_until([9, 1 << 20], 0, start);
        assert_eq!(until, Some(start + Duration::from_millis(900)));
        let forever = allowance.held_until([9, u64::MAX], 0, start).unwrap();
        assert!(forever > start);
        // Nothing else counts without a limit.
        let mut allowance = Allowance::new(Budget::default(), start);
        assert_eq!(allowance.held_until([u64::MAX, u64::MAX], usize::MAX, start), None);
    }
}
