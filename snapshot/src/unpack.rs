//! The raw bytes of an image, written to a file.

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::each_frame::each_frame;
use crate::error::SnapshotError;
use crate::image::Image;
use crate::output::OutputFile;
use crate::source::Source;

impl Image {
    /// Writes the bytes of the image to a file, with `threads` threads; a file that is there is replaced as a
    /// whole, by one that no more users may read than the files of the image. Frames of zeroes are holes. The path
    /// may be that of a pipe or a device, `-` for standard output, or with the feature `object-storage` a URL: one
    /// thread decodes then, and an object appears when it is whole. `progress` is called now and then with how many
    /// bytes are behind it, and cancels by returning `false`.
    ///
    /// # Errors
    /// [`SnapshotError`] if a frame cannot be had or the file cannot be written. Then a file or an object at
    /// `path` is as before.
    pub fn unpack(
        &self,
        path: &Path,
        threads: usize,
        progress: &(dyn Fn(u64) -> bool + Sync),
    ) -> Result<(), SnapshotError> {
        let new = OutputFile::create(path, |group| self.mode_for(group))?;
        match new.file() {
            Some(file) => {
                let failed = |step| SnapshotError::write(path, step);
                file.set_len(self.byte_len()).map_err(failed("make room in"))?;
                let write = |raw: &[u8], at| file.write_all_at(raw, at).map_err(failed("write"));
                self.read_all(threads, write, progress)?;
            }
            None => self.append_all(&new, progress)?,
        }
        new.finish()
    }

    /// Hands each frame that is not zero to `write`, with the offset of its first byte, on as many threads.
    fn read_all(
        &self,
        threads: usize,
        write: impl Fn(&[u8], u64) -> Result<(), SnapshotError> + Sync,
        progress: &(dyn Fn(u64) -> bool + Sync),
    ) -> Result<(), SnapshotError> {
        let frames = self.byte_len().div_ceil(self.frame_bytes());
        let done = AtomicU64::new(0);
        each_frame(threads, frames, |raw: &mut Vec<u8>, frame| {
            let start = frame * self.frame_bytes();
            let len = self.frame_bytes().min(self.byte_len() - start);
            self.reads_in_order(&(start..start + len), &(0..self.byte_len()));
            let pages = start / self.page_bytes()..(start + len).div_ceil(self.page_bytes());
            if !pages.into_iter().all(|page| self.is_zero_page(page)) {
                // All frames but the last are as long.
                raw.resize(usize::try_from(len).unwrap_or(usize::MAX), 0);
                self.read_through(start, raw)?;
                write(raw, start)?;
            }
            // Relaxed: a statistic; files order their own writes.
            if progress(done.fetch_add(len, Ordering::Relaxed) + len) {
                Ok(())
            } else {
                Err(SnapshotError::Cancelled)
            }
        })
    }

    /// Appends all bytes in order.
    fn append_all(
        &self,
        object: &OutputFile,
        progress: &(dyn Fn(u64) -> bool + Sync),
    ) -> Result<(), SnapshotError> {
        let most = self.frame_bytes().max(1 << 20);
        let (mut at, mut raw) = (0, Vec::new());
        while at < self.byte_len() {
            let len = most.min(self.byte_len() - at);
            raw.resize(usize::try_from(len).unwrap_or(usize::MAX), 0);
            self.reads_in_order(&(at..at + len), &(0..self.byte_len()));
            self.read_through(at, &mut raw)?;
            object.append(&raw)?;
            at += len;
            if !progress(at) {
                return Err(SnapshotError::Cancelled);
            }
        }
        Ok(())
    }
}
