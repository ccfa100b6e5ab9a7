//! Whether there is memory left for the rest of a request, looked up again as it shrinks.
//!
//! The kernel answers a limit that is passed by killing a process, and of two processes under one
//! limit each finds enough at first.

use std::num::NonZeroUsize;
use std::sync::{Mutex, PoisonError};

use uzone_os::memory::{self, Available};
use uzone_os::{SystemRoot, lock};
use uzone_pages::ByteLen;

/// What is asked for at a time, at least and at most: little where little is left, so that what is under
/// way when the shortage is seen does not cause it.
const LEAST_CHUNK: u64 = 2 << 20;
const MOST_CHUNK: u64 = 64 << 20;

/// Looks again and again whether there is enough memory for the rest of a request.
///
/// As long as what can be had shrinks by no more than what was populated, it may be used up to the
/// last byte. Once others have taken some as well, a distance is kept, of what all threads may have
/// under way, twice: the others may be populating as well.
pub(super) struct Watched<'a> {
    root: &'a SystemRoot,
    /// What could be had before.
    before: u64,
    /// What was needed then.
    needed: u64,
    /// How much is populated at a time.
    pub(super) chunk: ByteLen,
    /// What is kept free once others take memory.
    distance: u64,
    seen: Mutex<Seen>,
}

/// What was seen so far.
struct Seen {
    /// What was begun, finished or not.
    begun: u64,
    /// How much may be begun before it is looked up again.
    trusted: u64,
    /// What was left when that was too little.
    shortage: Option<Available>,
}

impl<'a> Watched<'a> {
    pub(super) fn new(
        root: &'a SystemRoot,
        available: &Available,
        needed: ByteLen,
        threads: NonZeroUsize,
    ) -> Self {
        let threads = u64::try_from(threads.get()).unwrap_or(u64::MAX);
        let before = available.bytes.get();
        let chunk = (before / 32 / threads).clamp(LEAST_CHUNK, MOST_CHUNK);
        Self {
            root,
            before,
            needed: needed.get(),
            chunk: ByteLen::new(chunk),
            distance: chunk.saturating_mul(threads).saturating_mul(2),
            seen: Mutex::new(Seen { begun: 0, trusted: 0, shortage: None }),
        }
    }

    /// Returns whether another chunk may be begun.
    pub(super) fn may_begin(&self, chunk: ByteLen) -> bool {
        // A panic of another thread left numbers that are right or too large by a chunk.
        let mut seen = lock(&self.seen);
        if seen.shortage.is_some() {
            return false;
        }
        if seen.trusted < chunk.get() {
            // What cannot be read is not known to be short.
            if let Ok(left) = memory::available(self.root) {
                match room(self.before, self.needed, seen.begun, left.bytes.get(), self.distance) {
                    // Others may take as much as we do meanwhile, so a part of it is trusted.
                    Some(room) => seen.trusted = room / 4,
                    None => {
                        seen.shortage = Some(left);
                        return false;
                    }
                }
            }
        }
        seen.trusted = seen.trusted.saturating_sub(chunk.get());
        seen.begun = seen.begun.saturating_add(chunk.get());
        true
    }

    /// Returns what was left when that was too little, if it ever was.
    pub(super) fn into_shortage(self) -> Option<Available> {
        self.seen.into_inner().unwrap_or_else(PoisonError::into_inner).shortage
    }
}

/// Returns how much can be had beyond what the rest of a request needs, or `None` if that is too
/// little. `before` could be had when `needed` were needed; `begun` of these were begun since, and `left`
/// can be had now.
fn room(before: u64, needed: u64, begun: u64, left: u64, distance: u64) -> Option<u64> {
    let rest = needed.saturating_sub(begun);
    // Page tables, and counters that the kernel keeps by the lot, are this process's alone.
    let tolerance = before / 32;
    let others = before.saturating_sub(begun).saturating_sub(left);
    if others <= tolerance {
        return Some(left.saturating_sub(rest));
    }
    left.checked_sub(rest)?.checked_sub(distance)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_others_take_is_missed_before_it_is_needed() {
        for (what, before, needed, begun, left, expected) in [
            ("all of it, alone", 1000, 1000, 0, 1000, Some(0)),
            ("halfway, alone", 1000, 1000, 500, 500, Some(0)),
            ("at the end, alone, after page tables", 1000, 1000, 990, 0, Some(0)),
            ("plenty, beside others", 1000, 100, 50, 500, Some(410)),
            ("two who want 60 % each, at 30 %", 1000, 600, 300, 400, Some(60)),
            ("two who want 60 % each, at 38 %", 1000, 600, 380, 240, None),
            ("two who want half each, at 45 %", 1000, 500, 450, 100, Some(10)),
            ("two who want half each, at 47 %", 1000, 500, 470, 60, None),
            ("another took all", 1000, 600, 0, 0, None),
            ("more than was asked for was begun", 1000, 100, 200, 500, Some(460)),
        ] {
            assert_eq!(room(before, needed, begun, left, 40), expected, "{what}");
        }
    }
}
