//! How an image is verified: every stored frame, and the index and seek table behind them.

use std::sync::atomic::{AtomicU64, Ordering};

use super::{Image, Kind, READ_BYTES};
use crate::each_frame::each_frame;
use crate::error::SnapshotError;
use crate::format::{self, Record, bit, is_zero, stored_hash};

/// How much may be read for frames that are verified together: one of 16 MiB, or several with others between.
const LONGEST_READ: u64 = 17 << 20;

/// Buffers of one thread that verifies.
#[derive(Default)]
struct Room {
    /// Bytes of several stored frames, or of one that is decoded.
    whole: Vec<u8>,
    /// Those of one stored frame.
    stored: Vec<u8>,
}

impl Image {
    /// Reads every stored frame of this image and checks its hash, with `threads` threads; with `decode`, it
    /// is decoded as well, and compared with the map of zero pages. `progress` is called now and then with
    /// how many bytes of the file were read. Returns how many frames were checked. The parents are images of
    /// their own.
    ///
    /// # Errors
    /// [`SnapshotError::BadFrame`] for the first bad frame in the order of the file, or another one if the
    /// file cannot be read or its seek table is not that of its frames.
    pub fn verify(
        &self,
        threads: usize,
        decode: bool,
        progress: &(dyn Fn(u64) + Sync),
    ) -> Result<u64, SnapshotError> {
        self.check_tail()?;
        let frames: Vec<u64> =
            (0..self.index.frames()).filter(|frame| bit(&self.index.stored, *frame)).collect();
        // Frames that follow each other in the file are read together.
        let each = if decode { 1 } else { (READ_BYTES / self.frame_bytes()).clamp(1, 64) };
        let each = usize::try_from(each).unwrap_or(1);
        let (parts, done) = (frames.chunks(each), AtomicU64::new(0));
        each_frame(threads, parts.len() as u64, |room: &mut Room, part| {
            let part = usize::try_from(part).unwrap_or(usize::MAX);
            let (start, taken) = (part * each, parts.clone().nth(part).unwrap_or_default());
            let [first, last] =
                [taken.first(), taken.last()].map(|frame| frame.copied().unwrap_or(0));
            let bytes = first * self.frame_bytes()..(last + 1) * self.frame_bytes();
            self.reads_in_order(&bytes, &(0..self.index.frames() * self.frame_bytes()));
            let result = if decode {
                self.check_decoded(start, taken[0], room)
            } else {
                self.check_hashes(start, taken, room)
            };
            let records = &self.index.records[start..start + taken.len()];
            let read: u64 = records.iter().map(|record| u64::from(record.len)).sum();
            // Relaxed: a statistic.
            progress(done.fetch_add(read, Ordering::Relaxed) + read);
            result
        })?;
        Ok(frames.len() as u64)
    }

    /// Decodes a stored frame, and compares it with the map of zero pages.
    fn check_decoded(
        &self,
        number: usize,
        frame: u64,
        room: &mut Room,
    ) -> Result<(), SnapshotError> {
        room.whole.resize(usize::try_from(self.index.frame_len(frame)).unwrap_or(0), 0);
        self.read_stored(frame, number, &mut room.whole)?;
        self.check_zero_pages(frame, self.offsets[number], &room.whole)
    }

    /// Compares the hashes of stored frames that follow each other. One that does not match is read again,
    /// and so is each if they cannot be read together.
    fn check_hashes(
        &self,
        start: usize,
        frames: &[u64],
        room: &mut Room,
    ) -> Result<(), SnapshotError> {
        let numbers = start..start + frames.len();
        let parts = self.offsets[numbers.clone()].iter().zip(&self.index.records[numbers]);
        let from = self.offsets[start];
        let end = parts.clone().next_back().map_or(from, |(at, record)| at + u64::from(record.len));
        // With a disk cache, each frame is read alone: some are there. In raw memory, those of zeroes are in
        // between.
        let is_read = self.disk.is_none() && end - from <= LONGEST_READ && {
            room.whole.resize(usize::try_from(end - from).unwrap_or(usize::MAX), 0);
            self.source.read_at(from, &mut room.whole).is_ok()
        };
        for ((at, record), frame) in parts.zip(frames) {
            let inside = usize::try_from(at - from).unwrap_or(usize::MAX);
            let len = usize::try_from(record.len).unwrap_or(usize::MAX);
            room.stored.clear();
            if is_read {
                room.stored.extend_from_slice(&room.whole[inside..inside + len]);
            }
            if !is_read || stored_hash(&mut room.stored) != record.hash {
                self.check_hash(*frame, *at, *record, is_read, &mut room.stored)?;
            }
        }
        Ok(())
    }

    fn check_hash(
        &self,
        frame: u64,
        offset: u64,
        record: Record,
        is_again: bool,
        stored: &mut Vec<u8>,
    ) -> Result<(), SnapshotError> {
        if (!is_again && self.read_verified(offset, record, false, stored)?)
            || self.read_verified(offset, record, true, stored)?
        {
            return Ok(());
        }
        let why = "its bytes do not match their hash";
        Err(SnapshotError::BadFrame { name: self.source.name(), frame, offset, why })
    }

    /// Checks that the pages of a frame which the index has as zero are zero in its bytes.
    fn check_zero_pages(&self, frame: u64, offset: u64, raw: &[u8]) -> Result<(), SnapshotError> {
        let page_len = usize::try_from(self.page_bytes()).unwrap_or(usize::MAX);
        let places = self.index.pages_of(frame).zip(raw.chunks(page_len));
        let is_right = |(at, bytes): (u64, &[u8])| !bit(&self.index.zero, at) || is_zero(bytes);
        if places.into_iter().all(is_right) {
            return Ok(());
        }
        let why = "a page that the index has as zero is not: the writer was faulty";
        Err(SnapshotError::BadFrame { name: self.source.name(), frame, offset, why })
    }

    /// Checks that the bytes behind the frames are those that a writer makes of this index: the seek table, by which
    /// other programs find frames, is covered by no hash.
    fn check_tail(&self) -> Result<(), SnapshotError> {
        if self.is_raw() {
            let why = "raw memory has no hashes";
            return Err(SnapshotError::NotAnImage { name: self.source.name(), why });
        }
        let bad = |why| SnapshotError::BadIndex { name: self.source.name(), why };
        let (source, start) = match &self.kind {
            Kind::Hashed(hashes) => (hashes, 0),
            _ => (&self.source, self.index.data_len),
        };
        let end = source.byte_len();
        // The seek table of an older image has no entry for the index.
        for has_entry in [true, false] {
            let tail = self.tail(end.saturating_sub(start), has_entry);
            let tail = tail.ok_or_else(|| bad("it is longer than a frame can be"))?;
            let mut found = vec![0; tail.len()];
            let at = end.checked_sub(tail.len() as u64);
            let at = at.ok_or_else(|| bad("the file is too short"))?;
            let failed = SnapshotError::read(&**source, at, tail.len());
            source.read_at(at, &mut found).map_err(failed)?;
            if found == tail {
                return Ok(());
            }
        }
        Err(bad("the index and the seek table do not belong together"))
    }

    /// Returns the expected last bytes of the file, of which `behind` follow the frames.
    fn tail(&self, behind: u64, has_entry: bool) -> Option<Vec<u8>> {
        let table = |len: u64| format::seek_table(&self.index, has_entry.then_some(len));
        if self.index.minor == format::MINOR {
            let (mut tail, _) = format::index_frame(&self.index)?;
            tail.extend(table(tail.len() as u64)?);
            return Some(tail);
        }
        // The parts that a newer minor version adds to the index are unknown here; the start of the seek table is known.
        table(behind.checked_sub(table(0)?.len() as u64)?)
    }
}
