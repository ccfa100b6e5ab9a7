//! Memory for decoded frames: [`Frame`], [`FrameRoom`].
//!
//! A frame that is decoded into memory which the kernel has yet to give takes a fault a page, as long as a
//! quarter of its decoding. So memory is taken from the kernel in blocks of 2 MiB, of huge pages where it has
//! them. A frame is a part of a block, and its memory is for another once no thread reads it. Parts stay mapped as long
//! as there is a list for them, so blocks stay whole.
//!
//! Lock: one mutex, held for a look at a list; never while memory is mapped.

use std::collections::HashMap;
use std::ops::Deref;
use std::sync::{Arc, Mutex, Weak};

use uzone_os::{Anonymous, Exclusive, HugeAdvice, lock, probe};
use uzone_pages::ByteLen;

/// How much is taken from the kernel at once.
const BLOCK: u64 = 2 << 20;

/// The bytes of a decoded frame, for any number of readers.
#[derive(Clone, Debug)]
pub(crate) struct Frame(Arc<Memory>);

#[derive(Debug)]
enum Memory {
    /// A part of a block: `None` when it has gone home.
    Part(Option<Exclusive>, Weak<FrameRoom>),
    /// Of a length that blocks have no parts of.
    Own(Box<[u8]>),
}

impl Drop for Memory {
    fn drop(&mut self) {
        if let Self::Part(part, home) = self
            && let (Some(part), Some(home)) = (part.take(), home.upgrade())
        {
            lock(&home.0).entry(part.as_bytes().len()).or_default().returned.push(part);
        }
    }
}

impl Frame {
    /// Returns the bytes if there is no other reader.
    pub(crate) fn get_mut(&mut self) -> Option<&mut [u8]> {
        match Arc::get_mut(&mut self.0)? {
            Memory::Part(part, _) => part.as_mut().map(Exclusive::as_bytes_mut),
            Memory::Own(bytes) => Some(bytes),
        }
    }
}

impl Deref for Frame {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &*self.0 {
            Memory::Part(part, _) => part.as_ref().map_or(&[], Exclusive::as_bytes),
            Memory::Own(bytes) => bytes,
        }
    }
}

impl From<Vec<u8>> for Frame {
    fn from(bytes: Vec<u8>) -> Self {
        Self(Arc::new(Memory::Own(bytes.into())))
    }
}

/// Parts of blocks that no frame is in, by their length.
#[derive(Debug, Default)]
pub(crate) struct FrameRoom(Mutex<HashMap<usize, Parts>>);

/// Parts of one length.
#[derive(Debug, Default)]
struct Parts {
    returned: Vec<Exclusive>,
    /// The rest, from which no part was cut yet.
    rest: Option<Exclusive>,
}

impl Parts {
    /// Takes a part of `len` bytes.
    fn take(&mut self, len: ByteLen) -> Option<Exclusive> {
        self.returned.pop().or_else(|| {
            let rest = self.rest.take()?;
            if rest.len() == len {
                return Some(rest);
            }
            let (part, rest) = rest.cut(len).ok()?;
            self.rest = Some(rest);
            Some(part)
        })
    }
}

impl FrameRoom {
    /// Returns memory for a frame of `len` bytes, which hold anything.
    pub(crate) fn take(self: &Arc<Self>, len: usize) -> Frame {
        let Some(part) = self.part(len) else { return vec![0; len].into() };
        Frame(Arc::new(Memory::Part(Some(part), Arc::downgrade(self))))
    }

    /// Takes a part of a block, if need be of a new one. There is none of a length that cuts pages or is longer than
    /// half a block, nor where the kernel refuses.
    fn part(&self, len: usize) -> Option<Exclusive> {
        let part = ByteLen::new(len as u64);
        let cuts_page = !part.get().is_multiple_of(probe::page_size().bytes());
        if part.is_zero() || part.get() > BLOCK / 2 || cuts_page {
            return None;
        }
        if let Some(kept) = lock(&self.0).get_mut(&len).and_then(|parts| parts.take(part)) {
            return Some(kept);
        }
        let whole = ByteLen::new(BLOCK / part.get() * part.get());
        let how = Anonymous { huge: HugeAdvice::Advise, ..Anonymous::default() };
        let (first, rest) = Exclusive::anonymous(whole, how).ok()?.cut(part).ok()?;
        // Another thread may have taken a block meanwhile, of which the rest goes then.
        let other = lock(&self.0).entry(len).or_default().rest.replace(rest);
        drop(other);
        Some(first)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_of_a_block_are_disjoint_and_are_used_again() {
        let (len, room) = (64 << 10, Arc::new(FrameRoom::default()));
        let mut frames: Vec<Frame> = (0..32).map(|_| room.take(len)).collect();
        assert!(lock(&room.0)[&len].rest.is_none(), "they are one block");
        for (number, frame) in (0..).zip(&mut frames) {
            frame.get_mut().unwrap().fill(number);
        }
        for (number, frame) in (0..).zip(&frames) {
            assert!(frame.iter().all(|byte| *byte == number) && frame.len() == len);
        }
        let (first, second) = (frames[0].as_ptr(), frames[1].clone());
        frames.truncate(2);
        drop(frames);
        assert_eq!(lock(&room.0)[&len].returned.len(), 31, "one is read still");
        assert_eq!(second[0], 1);
        let again = room.take(len);
        assert_eq!(again.as_ptr(), first);
        // Frames outlive the room.
        drop(room);
        assert!(second.iter().all(|byte| *byte == 1) && again.iter().all(|byte| *byte == 0));
    }

    #[test]
    fn a_length_that_cuts_a_page_or_a_block_has_memory_of_its_own() {
        let room = Arc::new(FrameRoom::default());
        for len in [0, 1, 5000, 2 << 20, 3 << 20] {
            let mut frame = room.take(len);
            frame.get_mut().unwrap().fill(7);
            assert_eq!(frame.len(), len);
        }
        assert!(lock(&room.0).is_empty());
    }
}
