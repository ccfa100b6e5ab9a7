//! The image: a file without a name, whose pages start with their numbers and go on with numbers that follow from
//! these. No two pages are equal. Hashes are taken of the bytes that are written, not of bytes that are read back.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

use blake3::Hash;
use uzone_os::probe;
use uzone_pages::ByteLen;

use super::plan::Plan;
use crate::exit::{Exit, Failure};
use crate::output::Output;
use crate::progress::Progress;

/// The length of a hashed piece: a difference is located to one.
pub(super) const CHUNK: usize = 4 << 20;

/// A file without a name, and the hashes of its chunks.
pub(super) struct Image {
    pub(super) file: File,
    chunks: Vec<Hash>,
}

impl Image {
    /// Reads all bytes chunk by chunk. Returns the offset of the first chunk that differs, and the hash of all bytes.
    pub(super) fn compare(
        &self,
        mut read: impl FnMut(u64, &mut [u8]) -> Result<(), Failure>,
    ) -> Result<(Option<u64>, Hash), Failure> {
        let (mut bytes, mut first, mut all) = (vec![0; CHUNK], None, blake3::Hasher::new());
        for (number, hash) in self.chunks.iter().enumerate() {
            let offset = number as u64 * CHUNK as u64;
            read(offset, &mut bytes)?;
            all.update(&bytes);
            if blake3::hash(&bytes) != *hash {
                first.get_or_insert(offset);
            }
        }
        Ok((first, all.finalize()))
    }
}

/// Makes the image of a plan.
pub(super) fn make(plan: &Plan, out: &Output) -> Result<Image, Failure> {
    let directory = &plan.directory;
    let mut file = tempfile::tempfile_in(directory).map_err(|cause| no_file(directory, cause))?;
    let progress = Progress::new(out, "making the image", plan.size.get());
    let page = ByteLen::new(probe::page_size().bytes()).to_usize()?;
    let mut chunks = Vec::new();
    let mut chunk = vec![0; CHUNK];
    let mut number = 0_u64;
    for offset in (0..plan.size.get()).step_by(CHUNK) {
        for page in chunk.chunks_exact_mut(page) {
            fill(page, number);
            number += 1;
        }
        file.write_all(&chunk).map_err(|cause| {
            let text = format!(
                "cannot write the image of {} in {}: free space there, ask for less with --size, or name another \
                 directory with --dir",
                plan.size,
                directory.display()
            );
            Failure::of(text, cause).with(Exit::Io)
        })?;
        chunks.push(blake3::hash(&chunk));
        progress.set(offset + CHUNK as u64);
    }
    Ok(Image { file, chunks })
}

/// Fills a page: its number, then a sequence that starts with it.
fn fill(page: &mut [u8], number: u64) {
    let mut word = number;
    for place in page.as_chunks_mut::<8>().0 {
        *place = word.to_le_bytes();
        word = word.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
    }
}

/// Returns the error of a folder in which no file can be made.
pub(super) fn no_file(directory: &Path, cause: io::Error) -> Failure {
    let directory = directory.display();
    Failure::of(
        format!("cannot make a file in {directory}: name another directory with --dir"),
        cause,
    )
}
