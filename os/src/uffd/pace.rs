//! A limit of the faults that threads answer themselves in a second, and of the bytes that they fill: [`Paced`].
//!
//! Each rate is kept by the time until which it is paid for: a fault and the bytes that it filled move that on, and
//! while it is in the future a thread waits before it answers. A time in the past is credit, of [`BURST`] at most.

use core::num::{NonZeroU32, NonZeroU64};
use core::sync::atomic::{AtomicU64, Ordering};
use core::time::Duration;

/// The longest time for which a mapping may save up its allowance.
const BURST: u64 = 100_000_000;
const SECOND: u128 = 1_000_000_000;
/// The attempts of a thread to be the next of several, before it waits.
const TRIES: u32 = 8;
/// The wait of a thread that was not the next.
const TURN: Duration = Duration::from_micros(100);

/// The most work in a second, and the rest of it.
#[derive(Debug)]
pub(crate) struct Paced {
    faults: Option<NonZeroU32>,
    bytes: Option<NonZeroU64>,
    /// Until when faults and bytes are paid for, in nanoseconds since [`BURST`] before the start.
    faults_paid: AtomicU64,
    bytes_paid: AtomicU64,
    /// The number of times that a thread waited.
    held: AtomicU64,
}

/// Returns the time that `used` takes at a rate.
fn cost(used: u64, rate: u64) -> u64 {
    u64::try_from(u128::from(used) * SECOND / u128::from(rate.max(1))).unwrap_or(u64::MAX)
}

/// Returns until when is paid for after `cost` more.
fn pay(paid: u64, now: u64, cost: u64) -> u64 {
    paid.max(now.saturating_sub(BURST)).saturating_add(cost)
}

impl Paced {
    /// Limits the faults that are answered in a second, and the bytes that are filled.
    pub(crate) fn new((faults, bytes): (Option<NonZeroU32>, Option<NonZeroU64>)) -> Self {
        let [faults_paid, bytes_paid, held] = [const { AtomicU64::new(0) }; 3];
        Self { faults, bytes, faults_paid, bytes_paid, held }
    }

    /// Returns the number of times that a thread waited.
    pub(crate) fn held(&self) -> u64 {
        self.held.load(Ordering::Relaxed) // a statistic
    }

    /// Lets a fault be answered that came `since_start`, or returns the time that its thread has to wait before it
    /// asks again. It waits for `most` at a time.
    pub(crate) fn admit(&self, since_start: Duration, most: Duration) -> Result<(), Duration> {
        let now = u64::try_from(since_start.as_nanos()).unwrap_or(u64::MAX).saturating_add(BURST);
        for _ in 0..TRIES {
            // Relaxed: each is a number of its own.
            let paid = self.faults_paid.load(Ordering::Relaxed);
            let until = paid.max(self.bytes_paid.load(Ordering::Relaxed));
            if until > now {
                let left = Duration::from_nanos(until - now);
                if left <= most {
                    self.held.fetch_add(1, Ordering::Relaxed); // a statistic: once for each wait
                }
                return Err(left.min(most));
            }
            let Some(rate) = self.faults else { return Ok(()) };
            let next = pay(paid, now, cost(1, rate.get().into()));
            let answer =
                self.faults_paid.compare_exchange(paid, next, Ordering::Relaxed, Ordering::Relaxed);
            if answer.is_ok() {
                return Ok(());
            }
        }
        Err(TURN)
    }

    /// Notes that bytes were filled for a fault that came `since_start`.
    pub(crate) fn filled(&self, since_start: Duration, bytes: u64) {
        let Some(rate) = self.bytes else { return };
        let now = u64::try_from(since_start.as_nanos()).unwrap_or(u64::MAX).saturating_add(BURST);
        let cost = cost(bytes, rate.get());
        // Relaxed, and it always succeeds: a number of its own.
        let _ = self
            .bytes_paid
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |paid| Some(pay(paid, now, cost)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOST: Duration = Duration::from_millis(20);

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn a_rate_is_kept_after_a_burst_and_unused_time_is_saved_up_to_a_limit() {
        let paced = Paced::new((NonZeroU32::new(1000), None));
        for _ in 0..=100 {
            // A tenth of a second of them at once, and the one that is not paid for yet.
            paced.admit(ms(0), MOST).unwrap();
        }
        assert_eq!(paced.admit(ms(0), MOST), Err(ms(1)));
        assert_eq!(paced.held(), 1);
        paced.admit(ms(1), MOST).unwrap();
        for _ in 0..101 {
            paced.admit(ms(5000), MOST).unwrap();
        }
        assert_eq!(paced.admit(ms(5000), MOST), Err(ms(1)));
    }

    #[test]
    fn bytes_hold_a_thread_up_as_well_and_a_long_wait_is_made_of_short_ones() {
        let paced = Paced::new((None, NonZeroU64::new(1 << 20)));
        paced.admit(ms(0), MOST).unwrap();
        paced.filled(ms(0), 1 << 20);
        assert_eq!(paced.admit(ms(0), MOST), Err(MOST));
        assert_eq!((paced.admit(ms(890), MOST), paced.held()), (Err(ms(10)), 1));
        paced.admit(ms(900), MOST).unwrap();
        paced.filled(ms(900), u64::MAX);
        assert_eq!(paced.admit(ms(900), MOST), Err(MOST));
    }
}
