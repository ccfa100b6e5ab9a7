//! Memory for decoded frames: [`Frame`], [`FrameRoom`].
//!
//! A frame that is decoded into memory which the kernel has yet to give takes a fault a page, as long as a
//! quarter of its decoding. So memory is taken from the kernel in blocks of 2 MiB, of huge pages where it has
//! them, and what frames are given up leave is used again.

use std::collections::HashMap;
use std::ops::Deref;
use std::sync::Arc;

use uzone_os::{Anonymous, Exclusive, HugeAdvice, probe};
use uzone_pages::ByteLen;

/// How much is taken from the kernel at once.
const BLOCK: u64 = 2 << 20;

/// The bytes of a decoded frame, for any number of readers.
#[derive(Clone, Debug)]
pub(crate) struct Frame(Arc<Memory>);

#[derive(Debug)]
enum Memory {
    /// A part of a block.
    Part(Exclusive),
    /// Of a length that blocks have no parts of.
    Own(Box<[u8]>),
}

impl Memory {
    fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Self::Part(memory) => memory.as_bytes_mut(),
            Self::Own(bytes) => bytes,
        }
    }
}

impl Frame {
    /// Returns the bytes if there is no other reader.
    pub(crate) fn get_mut(&mut self) -> Option<&mut [u8]> {
        Arc::get_mut(&mut self.0).map(Memory::bytes_mut)
    }
}

impl Deref for Frame {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &*self.0 {
            Memory::Part(memory) => memory.as_bytes(),
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
pub(crate) struct FrameRoom {
    parts: HashMap<usize, Vec<Frame>>,
}

impl FrameRoom {
    /// Takes memory for a frame of `len` bytes, which hold anything.
    pub(crate) fn take(&mut self, len: usize) -> Option<Frame> {
        self.parts.get_mut(&len)?.pop()
    }

    /// Adds parts of a block, which are `len` bytes long each.
    pub(crate) fn add(&mut self, len: usize, parts: Vec<Frame>) {
        self.parts.entry(len).or_default().extend(parts);
    }

    /// Keeps the memory of a frame that is given up, if it is a part of a block, no other reader has it, and not
    /// much is kept already.
    pub(crate) fn put_back(&mut self, frame: Frame) {
        let len = frame.len();
        if let Some(parts) = self.parts.get_mut(&len)
            && (parts.len() * len) as u64 <= BLOCK
            && Arc::strong_count(&frame.0) == 1
        {
            parts.push(frame);
        }
    }
}

/// Takes memory for frames of `len` bytes from the kernel: a block of them, or one whose length it has no
/// parts of, or where it refuses.
pub(crate) fn block(len: usize) -> Vec<Frame> {
    let part = ByteLen::new(len as u64);
    let is_part = part.get() <= BLOCK / 2 && part.get().is_multiple_of(probe::page_size().bytes());
    let how = Anonymous { huge: HugeAdvice::Advise, ..Anonymous::default() };
    let whole = ByteLen::new(if part.is_zero() { 0 } else { BLOCK / part.get() * part.get() });
    let Some(mut rest) = is_part.then(|| Exclusive::anonymous(whole, how).ok()).flatten() else {
        return vec![vec![0; len].into()];
    };
    let mut parts = Vec::new();
    while rest.len() > part {
        match rest.cut(part) {
            Ok((front, behind)) => {
                parts.push(front);
                rest = behind;
            }
            Err(_) => unreachable!("a part is whole pages, and shorter than what is left"),
        }
    }
    parts.push(rest);
    // The first is taken first.
    parts.into_iter().rev().map(|part| Frame(Arc::new(Memory::Part(part)))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_of_a_block_are_disjoint_and_are_used_again() {
        let len = 64 << 10;
        let mut room = FrameRoom::default();
        room.add(len, block(len));
        let mut frames: Vec<Frame> = std::iter::from_fn(|| room.take(len)).collect();
        assert_eq!(frames.len(), 32);
        for (number, frame) in (0..).zip(&mut frames) {
            frame.get_mut().unwrap().fill(number);
        }
        for (number, frame) in (0..).zip(&frames) {
            assert!(frame.iter().all(|byte| *byte == number) && frame.len() == len);
        }
        let (first, second) = (frames[0].as_ptr(), frames[1].clone());
        frames.truncate(2);
        frames.into_iter().for_each(|frame| room.put_back(frame));
        assert_eq!(room.take(len).unwrap().as_ptr(), first);
        assert!(room.take(len).is_none(), "the other is read still");
        assert_eq!(second[0], 1);
    }

    #[test]
    fn a_length_that_cuts_a_page_or_a_block_has_memory_of_its_own() {
        for len in [1, 5000, 2 << 20, 3 << 20] {
            let mut frames = block(len);
            assert_eq!(frames.iter().map(|frame| frame.len()).collect::<Vec<_>>(), [len]);
            frames[0].get_mut().unwrap().fill(7);
            let mut room = FrameRoom::default();
            frames.into_iter().for_each(|frame| room.put_back(frame));
            assert!(room.take(len).is_none());
        }
    }
}
