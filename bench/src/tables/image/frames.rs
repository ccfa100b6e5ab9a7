//! The limit: independent zstd frames, written and decoded by threads that do nothing else. There are no
//! hashes, no index, and no order in the file.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use zstd::bulk::{Compressor, Decompressor};

use uzone_harness::Result;

/// The length of a frame, and the level of zstd of every row.
pub(crate) const FRAME: usize = 64 << 10;
pub(crate) const LEVEL: i32 = 3;

/// The number of frames that a thread reads or writes with one call.
const BATCH: usize = 16;

/// The place of a stored frame.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Stored {
    pub(crate) offset: u64,
    pub(crate) len: usize,
}

/// Calls `work` with each number below `count` on one of `threads` threads, each with a value that `own` makes. Returns
/// the first error.
pub(crate) fn share<T>(
    threads: usize,
    count: usize,
    own: impl Fn() -> io::Result<T> + Sync,
    work: impl Fn(&mut T, usize) -> Result + Sync,
) -> Result {
    let (next, first) = (AtomicUsize::new(0), Mutex::new(None));
    let take_turns = || -> Result {
        let mut mine = own()?;
        loop {
            // Relaxed: the number alone is shared, and the scope ends with a join.
            let turn = next.fetch_add(1, Ordering::Relaxed);
            if turn >= count {
                return Ok(());
            }
            work(&mut mine, turn)?;
        }
    };
    let run = || {
        if let Err(error) = take_turns() {
            // The other threads end at their next number.
            next.fetch_max(count, Ordering::Relaxed);
            first.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..threads {
            scope.spawn(run);
        }
        run();
    });
    first.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
}

/// Compresses the first `count` frames of `raw` into `to`. Returns the place of each, and the length of the file.
pub(crate) fn pack(
    raw: &File,
    to: &File,
    count: usize,
    threads: usize,
) -> Result<(Vec<Stored>, u64)> {
    let stored = Mutex::new(vec![Stored::default(); count]);
    let end = AtomicU64::new(0);
    let own = || {
        let compressor = Compressor::new(LEVEL)?;
        Ok((compressor, vec![0; BATCH * FRAME], Vec::new(), Vec::with_capacity(2 * FRAME)))
    };
    share(threads, count.div_ceil(BATCH), own, |(compressor, bytes, out, one), batch| {
        let first = batch * BATCH;
        let frames = BATCH.min(count - first);
        let bytes = &mut bytes[..frames * FRAME];
        raw.read_exact_at(bytes, (first * FRAME) as u64)?;
        out.clear();
        let mut places = Vec::with_capacity(frames);
        for frame in bytes.chunks_exact(FRAME) {
            one.clear();
            let len = compressor.compress_to_buffer(frame, one)?;
            places.push(Stored { offset: out.len() as u64, len });
            out.extend_from_slice(one);
        }
        // Relaxed: it reserves room, and shares nothing else.
        let start = end.fetch_add(out.len() as u64, Ordering::Relaxed);
        to.write_all_at(out, start)?;
        let mut stored = stored.lock().unwrap_or_else(PoisonError::into_inner);
        for (to, place) in stored[first..].iter_mut().zip(places) {
            *to = Stored { offset: start + place.offset, ..place };
        }
        Ok(())
    })?;
    let stored = stored.into_inner().unwrap_or_else(PoisonError::into_inner);
    Ok((stored, end.into_inner()))
}

/// A thread's decoder and its buffers.
pub(crate) struct Reader {
    decompressor: Decompressor<'static>,
    stored: Vec<u8>,
    raw: Vec<u8>,
}

impl Reader {
    pub(crate) fn new() -> io::Result<Self> {
        let decompressor = Decompressor::new()?;
        Ok(Self { decompressor, stored: Vec::new(), raw: vec![0; FRAME] })
    }

    /// Reads and decodes a frame.
    pub(crate) fn read(&mut self, from: &File, place: Stored) -> io::Result<&[u8]> {
        self.stored.resize(place.len, 0);
        from.read_exact_at(&mut self.stored, place.offset)?;
        let len = self.decompressor.decompress_to_buffer(&self.stored, &mut self.raw[..])?;
        self.raw
            .get(..len)
            .filter(|raw| raw.len() == FRAME)
            .ok_or(io::ErrorKind::InvalidData.into())
    }
}
