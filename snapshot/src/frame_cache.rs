//! Decoded frames, kept while there is room: [`FrameCache`].
//!
//! Each frame is decoded once however many threads wait for it: the first decodes, the others wait for it.
//! Room is made by the clock algorithm: a frame that was used since the hand passed it last stays.
//!
//! Locks: one mutex, held for a look at a table; never while a frame is read or decoded.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use uzone_os::lock;

use crate::format::Root;
use crate::frame_memory::{Frame, FrameRoom};

/// A stored frame: the root hash of the image that stores it, and its number in that. The root hash covers
/// the hash of the stored bytes, so images with one root hash have the same bytes in a frame.
type Key = (Root, u64);

/// The state of a frame, as it is known without waiting.
#[derive(Debug)]
pub(crate) enum Ready {
    /// Its bytes.
    Bytes(Frame),
    /// Another thread decodes it, and waits for no device.
    Soon,
    /// It has to be waited for.
    No,
}

/// Decoded frames of any number of images, within a limit.
#[derive(Debug)]
pub struct FrameCache {
    limit_bytes: u64,
    state: Mutex<State>,
    decoded: Condvar,
    /// Memory for the next frames.
    room: Arc<FrameRoom>,
}

#[derive(Debug, Default)]
struct State {
    frames: HashMap<Key, Slot>,
    /// The frames that are kept, from the hand of the clock on.
    clock: VecDeque<Key>,
    bytes: u64,
    /// How many threads wait for a frame: waking none takes a system call as well.
    waiting: usize,
    counts: CacheCounts,
}

/// The counts of a [`FrameCache`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CacheCounts {
    /// How often a frame was asked for that was kept.
    pub hits: u64,
    /// Frames that were read and decoded.
    pub decoded_frames: u64,
    /// How many bytes they have, decoded.
    pub decoded_bytes: u64,
    /// Stored bytes that were read of images for that, also a second time; bytes that a [`DiskCache`](crate::DiskCache)
    /// had are none.
    pub stored_bytes: u64,
}

#[derive(Clone, Debug)]
enum Slot {
    /// A thread decodes it. If that is brief, the stored bytes need no device.
    Decoding {
        is_brief: bool,
    },
    Kept {
        bytes: Frame,
        was_used: bool,
    },
}

impl FrameCache {
    /// Makes a cache that keeps `limit_bytes` of decoded frames.
    #[must_use]
    pub fn new(limit_bytes: u64) -> Arc<Self> {
        let (state, room) = (Mutex::default(), Arc::default());
        Arc::new(Self { limit_bytes, state, decoded: Condvar::new(), room })
    }

    /// Returns its counts so far.
    #[must_use]
    pub fn counts(&self) -> CacheCounts {
        lock(&self.state).counts
    }

    /// Counts stored bytes that were read.
    pub(crate) fn note_read(&self, stored_bytes: u64) {
        lock(&self.state).counts.stored_bytes += stored_bytes;
    }

    /// Waits until a thread has decoded a frame or given it up.
    fn wait<'a>(&self, mut state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        state.waiting += 1;
        let mut state = self.decoded.wait(state).unwrap_or_else(PoisonError::into_inner);
        state.waiting -= 1;
        state
    }

    /// Returns a frame if it is kept.
    pub(crate) fn get(&self, key: Key) -> Option<Frame> {
        match lock(&self.state).find(key)? {
            Slot::Kept { bytes, .. } => Some(bytes),
            Slot::Decoding { .. } => None,
        }
    }

    /// Returns a frame, decoded by `decode` unless it is kept or another thread decodes it, which is waited
    /// for then. If that thread fails, this one tries.
    pub(crate) fn get_or_decode<E>(
        &self,
        key: Key,
        decode: impl FnOnce() -> Result<Frame, E>,
    ) -> Result<Frame, E> {
        let mut state = lock(&self.state);
        loop {
            match state.find(key) {
                Some(Slot::Kept { bytes, .. }) => return Ok(bytes),
                Some(Slot::Decoding { .. }) => state = self.wait(state),
                None => break,
            }
        }
        state.frames.insert(key, Slot::Decoding { is_brief: false });
        drop(state);
        let attempt = Attempt { cache: self, key };
        let bytes = decode()?;
        attempt.keep(&bytes);
        Ok(bytes)
    }

    /// Returns a frame without waiting: if it is kept, or else decoded by `decode`, which returns `None` if
    /// it would have to wait itself.
    pub(crate) fn ready_or_decode(
        &self,
        key: Key,
        decode: impl FnOnce() -> Option<Frame>,
    ) -> Ready {
        let mut state = lock(&self.state);
        match state.find(key) {
            Some(Slot::Kept { bytes, .. }) => return Ready::Bytes(bytes),
            Some(Slot::Decoding { is_brief: true }) => return Ready::Soon,
            Some(Slot::Decoding { is_brief: false }) => return Ready::No,
            None => {}
        }
        state.frames.insert(key, Slot::Decoding { is_brief: true });
        drop(state);
        let attempt = Attempt { cache: self, key };
        let Some(bytes) = decode() else { return Ready::No };
        attempt.keep(&bytes);
        Ready::Bytes(bytes)
    }

    /// Returns a frame that was [`Ready::Soon`], after waiting for the thread that decodes it; `None` if it
    /// is not kept then.
    pub(crate) fn soon(&self, key: Key) -> Option<Frame> {
        let mut state = lock(&self.state);
        loop {
            match state.find(key)? {
                Slot::Kept { bytes, .. } => return Some(bytes),
                Slot::Decoding { is_brief: true } => state = self.wait(state),
                Slot::Decoding { is_brief: false } => return None,
            }
        }
    }

    /// Gives a frame up that is kept.
    pub(crate) fn forget(&self, key: Key) {
        let mut state = lock(&self.state);
        let given_up = state.give_up(key);
        // Mostly one of the latest.
        if given_up.is_some()
            && let Some(at) = state.clock.iter().rposition(|other| *other == key)
        {
            state.clock.remove(at);
        }
        drop(state);
        drop(given_up); // its memory has a lock of its own
    }

    /// Returns memory for a frame that is about to be decoded. Its bytes have no meaning.
    pub(crate) fn room(&self, len: usize) -> Frame {
        self.room.take(len)
    }

    /// Returns whether so many bytes can be kept.
    pub(crate) fn has_room_for(&self, len_bytes: u64) -> bool {
        len_bytes <= self.limit_bytes
    }
}

impl State {
    /// Returns the state of a frame. A frame that is kept counts as used.
    fn find(&mut self, key: Key) -> Option<Slot> {
        let slot = self.frames.get_mut(&key)?;
        if let Slot::Kept { was_used, .. } = slot {
            *was_used = true;
            self.counts.hits += 1;
        }
        Some(slot.clone())
    }

    /// Takes a frame out of the table, if it is kept.
    fn give_up(&mut self, key: Key) -> Option<Frame> {
        if !matches!(self.frames.get(&key), Some(Slot::Kept { .. })) {
            return None;
        }
        let Some(Slot::Kept { bytes, .. }) = self.frames.remove(&key) else { return None };
        self.bytes -= bytes.len() as u64;
        Some(bytes)
    }

    /// Keeps a frame. Returns those that are given up for it.
    fn keep(&mut self, key: Key, bytes: Frame, limit_bytes: u64) -> Vec<Frame> {
        let len = bytes.len() as u64;
        self.counts.decoded_frames += 1;
        self.counts.decoded_bytes += len;
        let mut given_up = Vec::new();
        if len > limit_bytes {
            return given_up;
        }
        while self.bytes + len > limit_bytes {
            let Some(oldest) = self.clock.pop_front() else { break };
            match self.frames.get_mut(&oldest) {
                Some(Slot::Kept { was_used, .. }) if *was_used => {
                    *was_used = false;
                    self.clock.push_back(oldest);
                }
                _ => given_up.extend(self.give_up(oldest)),
            }
        }
        self.bytes += len;
        self.clock.push_back(key);
        self.frames.insert(key, Slot::Kept { bytes, was_used: false });
        given_up
    }
}

/// A frame that a thread decodes. Dropping this wakes those that wait for it, whatever came of it.
struct Attempt<'a> {
    cache: &'a FrameCache,
    key: Key,
}

impl Attempt<'_> {
    /// Keeps the result.
    fn keep(self, bytes: &Frame) {
        let given_up =
            lock(&self.cache.state).keep(self.key, bytes.clone(), self.cache.limit_bytes);
        drop(given_up); // their memory has a lock of its own
    }
}

impl Drop for Attempt<'_> {
    fn drop(&mut self) {
        let mut state = lock(&self.cache.state);
        if let Some(Slot::Decoding { .. }) = state.frames.get(&self.key) {
            state.frames.remove(&self.key);
        }
        let has_waiters = state.waiting > 0;
        drop(state);
        if has_waiters {
            self.cache.decoded.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    fn frame(byte: u8) -> Frame {
        vec![byte; 100].into()
    }

    fn key(frame: u64) -> Key {
        (Root([1; 32]), frame)
    }

    #[test]
    fn a_frame_is_decoded_once_however_many_threads_wait_for_it() {
        let (cache, decoded) = (FrameCache::new(1000), AtomicU32::new(0));
        let together = Barrier::new(4);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    together.wait();
                    let bytes = cache.get_or_decode(key(1), || {
                        decoded.fetch_add(1, Ordering::Relaxed);
                        Ok::<_, ()>(frame(7))
                    });
                    assert_eq!(bytes.unwrap()[..], [7; 100]);
                });
            }
        });
        assert_eq!(decoded.into_inner(), 1);
        let expected =
            CacheCounts { hits: 3, decoded_frames: 1, decoded_bytes: 100, stored_bytes: 0 };
        assert_eq!(cache.counts(), expected);
    }

    #[test]
    fn a_thread_whose_predecessor_failed_or_panicked_tries_itself() {
        let cache = FrameCache::new(1000);
        assert_eq!(cache.get_or_decode(key(1), || Err(5)).unwrap_err(), 5);
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let _ = cache
                .get_or_decode(key(1), || -> Result<_, ()> { panic!("a decoder that panics") });
        }));
        assert!(panicked.is_err());
        assert_eq!(cache.get_or_decode(key(1), || Ok::<_, ()>(frame(1))).unwrap()[0], 1);
    }

    #[test]
    fn a_frame_that_is_ready_is_never_waited_for_unless_its_thread_waits_for_nothing() {
        let cache = FrameCache::new(1000);
        assert!(matches!(cache.ready_or_decode(key(1), || None), Ready::No));
        let while_brief = || {
            assert!(matches!(cache.ready_or_decode(key(1), || Some(frame(2))), Ready::Soon));
            Some(frame(1))
        };
        assert!(
            matches!(cache.ready_or_decode(key(1), while_brief), Ready::Bytes(bytes) if bytes[0] == 1)
        );
        assert!(matches!(cache.ready_or_decode(key(1), || None), Ready::Bytes(_)));
        let while_waiting = || {
            assert!(matches!(cache.ready_or_decode(key(2), || Some(frame(2))), Ready::No));
            assert!(cache.soon(key(2)).is_none(), "it may wait for long");
            Err(7)
        };
        assert_eq!(cache.get_or_decode(key(2), while_waiting).unwrap_err(), 7);
        let (begun, may_end) = (Barrier::new(2), Barrier::new(2));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                cache.ready_or_decode(key(3), || {
                    begun.wait();
                    may_end.wait();
                    Some(frame(3))
                });
            });
            begun.wait();
            let waiter = scope.spawn(|| cache.soon(key(3)));
            may_end.wait();
            assert_eq!(waiter.join().unwrap().unwrap()[0], 3);
        });
    }

    #[test]
    fn a_frame_that_was_given_up_is_memory_for_another_once_no_thread_reads_it() {
        const LEN: usize = 64 << 10;
        let cache = FrameCache::new(LEN as u64);
        let decode = |number: u8| {
            let mut room = cache.room(LEN);
            room.get_mut().unwrap().fill(number);
            cache.get_or_decode(key(number.into()), || Ok::<_, ()>(room)).unwrap()
        };
        let first = decode(1);
        drop(decode(2));
        assert_ne!(cache.room(LEN).as_ptr(), first.as_ptr(), "it is still read");
        assert!(first.iter().all(|byte| *byte == 1));
        let second = cache.get(key(2)).unwrap().as_ptr();
        drop(decode(3));
        let mut room = cache.room(LEN);
        assert_eq!(room.as_ptr(), second);
        assert!(room.get_mut().is_some());
        drop(decode(4));
        assert_eq!(cache.room(50).len(), 50, "a spare frame of another length is no room");
    }

    #[test]
    fn frames_that_are_used_stay_and_the_limit_holds() {
        let cache = FrameCache::new(350);
        for number in 0..3 {
            let _ = cache.get_or_decode(key(number), || Ok::<_, ()>(frame(1)));
        }
        assert!(cache.get(key(0)).is_some());
        let _ = cache.get_or_decode(key(3), || Ok::<_, ()>(frame(1)));
        assert!(cache.get(key(0)).is_some(), "it was used");
        assert!(cache.get(key(1)).is_none(), "it was the oldest that was not");
        assert_eq!(lock(&cache.state).bytes, 300);
        cache.forget(key(0));
        cache.forget(key(0));
        assert!(cache.get(key(0)).is_none() && cache.get(key(2)).is_some());
        assert_eq!(lock(&cache.state).bytes, 200);
        assert_eq!(lock(&cache.state).clock.len(), 2);
        let huge = cache.get_or_decode(key(9), || Ok::<_, ()>(vec![0; 400].into())).unwrap();
        assert_eq!(huge.len(), 400);
        assert!(cache.get(key(9)).is_none(), "more than the limit is not kept");
        assert!(cache.get(key(3)).is_some(), "and nothing makes room for it");
    }
}
