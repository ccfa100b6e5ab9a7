//! Rooms for bytes that a handler of a signal reads and copies: [`Rooms`].
//!
//! They are made beforehand. A handler takes one by one step and waits for none: if all are taken, it does without.
//! Memory is used for those that were taken at least once.

use core::ops::Range;
use core::sync::atomic::{AtomicU32, Ordering};

use uzone_pages::{ByteLen, PageSize};

use crate::MapError;
use crate::map::mapping::Mapping;
use crate::map::options::Anonymous;

/// The number of rooms: a bit of a word each.
const COUNT: u64 = 32;
/// The length of each, but at least a page.
const LEN: u64 = 64 << 10;

/// So many rooms, side by side.
pub(crate) struct Rooms {
    mapping: Mapping,
    len: u64,
    page: PageSize,
    /// A bit for each that is taken.
    taken: AtomicU32,
}

/// A room that is its owner's until it is dropped.
pub(crate) struct Room<'a> {
    rooms: &'a Rooms,
    index: u32,
}

impl Rooms {
    pub(crate) fn new(page: PageSize) -> Result<Self, MapError> {
        let len = LEN.max(page.bytes());
        let mapping = Mapping::anonymous(ByteLen::new(COUNT * len), Anonymous::default())?;
        Ok(Self { mapping, len, page, taken: AtomicU32::new(0) })
    }

    /// Returns the number of pages that a room has.
    pub(crate) fn pages(&self) -> u64 {
        self.len >> self.page.shift()
    }

    /// Returns the memory that has them all.
    pub(crate) fn mapping(&self) -> &Mapping {
        &self.mapping
    }

    /// Takes one that is free. Called by handlers.
    pub(crate) fn take(&self) -> Option<Room<'_>> {
        // Relaxed: a hint.
        let mut free = !self.taken.load(Ordering::Relaxed);
        while free != 0 {
            let index = free.trailing_zeros();
            // Acquire pairs with the Release of the last owner's drop: it has copied its bytes.
            let before = self.taken.fetch_or(1 << index, Ordering::Acquire);
            if before & 1 << index == 0 {
                return Some(Room { rooms: self, index });
            }
            // One fewer to try.
            free &= !before & !(1 << index);
        }
        None
    }
}

impl Room<'_> {
    /// Returns the addresses of its first `len` bytes, or of all if there are fewer.
    pub(crate) fn bytes(&self, len: ByteLen) -> Range<usize> {
        let start = u64::from(self.index) * self.rooms.len;
        let end = start + len.get().min(self.rooms.len);
        // The mapping has them all.
        let at = |at: u64| usize::try_from(at).unwrap_or(usize::MAX);
        at(start)..at(end)
    }
}

impl Drop for Room<'_> {
    fn drop(&mut self) {
        // Release pairs with the Acquire of `take`.
        self.rooms.taken.fetch_and(!(1 << self.index), Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "it maps memory")]
    fn a_room_has_one_owner_at_a_time_and_no_thread_waits_for_one() {
        let rooms = Rooms::new(crate::host::probe::page_size()).unwrap();
        let len = ByteLen::new(crate::host::probe::page_size().bytes());
        let mut taken: Vec<_> = std::iter::from_fn(|| rooms.take()).collect();
        assert_eq!(taken.len() as u64, COUNT);
        let mut starts: Vec<_> = taken.iter().map(|room| room.bytes(len).start).collect();
        starts.sort_unstable();
        starts.dedup();
        assert_eq!(starts.len() as u64, COUNT);
        let freed = taken.remove(5).bytes(len);
        assert_eq!(rooms.take().map(|room| room.bytes(len)), Some(freed));
        let threads: Vec<AtomicU32> = (0..COUNT).map(|_| AtomicU32::new(0)).collect();
        drop(taken);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..20_000 {
                        let Some(room) = rooms.take() else { continue };
                        let owners = &threads[usize::try_from(room.index).unwrap()];
                        assert_eq!(owners.fetch_add(1, Ordering::Relaxed), 0);
                        owners.fetch_sub(1, Ordering::Relaxed);
                    }
                });
            }
        });
    }
}
