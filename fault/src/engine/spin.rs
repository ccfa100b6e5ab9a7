//! Polling for the next fault for as long as it pays: [`AdaptiveSpin`].

use std::time::{Duration, Instant};

/// After this many unsuccessful polls the reader stops polling, until a fault arrives within the polling
/// window.
const VAIN: u8 = 4;

/// Decides whether polling for the next fault pays: a sleep and a wake-up cost more than most answers, and
/// polling costs a CPU.
pub(crate) struct AdaptiveSpin {
    /// For how long at most.
    pub(crate) most: Duration,
    since: Instant,
    in_vain: u8,
    is_looking: bool,
}

impl AdaptiveSpin {
    pub(crate) fn new(most: Duration) -> Self {
        Self { most, since: Instant::now(), in_vain: 0, is_looking: false }
    }

    /// Records that faults were found.
    pub(crate) fn found(&mut self, now: Instant) {
        if self.is_looking || now.saturating_duration_since(self.since) < self.most {
            self.in_vain = 0;
        }
        (self.since, self.is_looking) = (now, true);
    }

    /// Records other work. Polling starts anew from now on; the count of unsuccessful polls stays.
    pub(crate) fn worked(&mut self, now: Instant) {
        (self.since, self.is_looking) = (now, true);
    }

    /// Records that nothing was found. Returns whether to poll again.
    pub(crate) fn again(&mut self, now: Instant) -> bool {
        if self.is_looking && self.in_vain < VAIN && now.duration_since(self.since) < self.most {
            return true;
        }
        if self.is_looking {
            (self.is_looking, self.since) = (false, now);
            self.in_vain = self.in_vain.saturating_add(1);
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_do_not_hide_that_no_fault_comes() {
        let most = Duration::from_micros(20);
        let mut look = AdaptiveSpin::new(most);
        let mut now = look.since;
        // A fault now and then, with neighbours to install after it.
        for round in 0..2 * VAIN {
            now += Duration::from_millis(1);
            look.found(now);
            look.worked(now);
            assert_eq!(look.again(now), round < VAIN, "round {round}");
            now += most;
            assert!(!look.again(now));
        }
        // One comes that a look would have met, and it pays again.
        let met = now - most / 2;
        look.found(met);
        assert!(look.again(met));
    }
}
