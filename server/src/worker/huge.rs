//! Blocks of 2 MiB that are filled, in VMs whose pages are small: [`Finder`]. The keeper has the kernel make huge
//! pages of them (`keeper/huge.rs`).
//!
//! Faults go first. While the kernel makes a huge page, for one to four milliseconds, the faults of its VM wait. So a VM
//! that had a fault since the last look gets two in 100 ms, and all VMs of a worker 16.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use uzone_os::Vaddr;

use super::session::Session;
use crate::messages::BLOCKS;

/// The pause between two looks for blocks, and the pause while no page is filled.
const EVERY: Duration = Duration::from_millis(100);
const IDLE: Duration = Duration::from_secs(1);
/// The most blocks of a VM with faults at one look.
const BESIDE_FAULTS: usize = 2;

/// Finds blocks of which huge pages can be made.
#[derive(Debug)]
pub(crate) struct Finder {
    looked: Instant,
    is_idle: bool,
    /// The session that was served last.
    last: u64,
}

impl Finder {
    pub(crate) fn new() -> Self {
        Self { looked: Instant::now(), is_idle: false, last: 0 }
    }

    /// Returns the time until the next look, if there may be blocks.
    pub(crate) fn timeout(&self, sessions: &HashMap<u64, Session>) -> Option<Duration> {
        let every = if self.is_idle { IDLE } else { EVERY };
        let may_find = sessions.values().any(|session| session.memory.blocks_left() > 0);
        may_find.then(|| every.saturating_sub(self.looked.elapsed()))
    }

    /// Returns the blocks of each session that were filled, if it is time.
    pub(crate) fn find(&mut self, sessions: &mut HashMap<u64, Session>) -> Vec<(u64, Vec<Vaddr>)> {
        if self.timeout(sessions) != Some(Duration::ZERO) {
            return Vec::new();
        }
        (self.looked, self.is_idle) = (Instant::now(), true);
        let (mut found, mut left) = (Vec::new(), BLOCKS);
        // In turns, so that none is left out for long.
        let mut numbers: Vec<u64> = sessions.keys().copied().collect();
        numbers.sort_unstable();
        let next = numbers.partition_point(|number| *number <= self.last);
        numbers.rotate_left(next);
        for number in numbers {
            let Some(session) = sessions.get_mut(&number) else { continue };
            let has_faults = session.was_filled();
            let most = if has_faults { left.min(BESIDE_FAULTS) } else { left };
            let blocks = session.memory.take_filled_blocks(most);
            self.is_idle &= !has_faults && blocks.is_empty();
            if !blocks.is_empty() {
                left -= blocks.len();
                self.last = number;
                found.push((number, blocks));
            }
        }
        found
    }
}
