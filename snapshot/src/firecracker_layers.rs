//! A memory file and the diffs of it as one source: [`Layers`].
//!
//! Firecracker writes a diff as a sparse file as long as the memory: the pages that were written since the
//! snapshot before it are data, all others are holes. So each page is that of the last diff which has it, or
//! that of the memory file. A hole is known from zeroes by lseek(2) alone, which is right only on the file
//! that Firecracker wrote: [`hole_problem`] finds such a copy. A copy cannot be
//! known: it may have other holes. An object has none.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use crate::files::{hole_problem, next_data};
use uzone_os::lock;

use crate::error::SnapshotError;
use crate::file_source::open_source;
use crate::source::{RequestOptions, Source, is_url};

/// The page of the guest, which a diff has or has not.
const PAGE_BYTES: u64 = 4096;

/// A memory file with diffs on top.
pub struct Layers {
    /// The memory file, then the diffs, the oldest first. The memory file has all bytes.
    layers: Vec<Layer>,
    len: u64,
}

struct Layer {
    source: Box<dyn Source>,
    has_all: bool,
    known: Mutex<Known>,
}

/// Data of a diff, and from where on there is none before it.
#[derive(Clone, Default)]
struct Known {
    from: u64,
    data: Range<u64>,
}

/// A layer that cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("cannot read {name}")]
struct LayerError {
    name: String,
    #[source]
    cause: io::Error,
}

impl Layers {
    /// Opens a memory file and its diffs, the oldest first. Each is a file or, with the feature
    /// `object-storage`, the URL of an object. With `takes_all`, every byte of a diff is taken, and its holes
    /// are zeroes; the diffs can be objects only then.
    ///
    /// # Errors
    /// [`SnapshotError::Holes`] or [`SnapshotError::NoHoles`] if a diff does not show which pages it has,
    /// [`SnapshotError::OtherLength`] if it is not one of this memory, [`SnapshotError::Read`] if one of them
    /// cannot be opened.
    pub fn open(
        base: &Path,
        diffs: &[PathBuf],
        takes_all: bool,
        requests: &RequestOptions,
    ) -> Result<Self, SnapshotError> {
        let base = Layer::open(base, true, requests)?;
        let len = base.source.byte_len();
        let mut layers = vec![base];
        for path in diffs {
            if !takes_all && is_url(path) {
                return Err(SnapshotError::NoHoles { path: path.clone() });
            }
            let diff = Layer::open(path, takes_all, requests)?;
            let len_bytes = diff.source.byte_len();
            if len_bytes != len {
                return Err(SnapshotError::OtherLength {
                    path: path.clone(),
                    len_bytes,
                    below_bytes: len,
                });
            }
            if let Some(why) = diff.hole_problem().map_err(SnapshotError::unopened(path))? {
                return Err(SnapshotError::Holes { path: path.clone(), why });
            }
            layers.push(diff);
        }
        Ok(Self { layers, len })
    }

    /// Returns which layer has the byte at `at`, and up to where, at most up to `end`.
    fn layer_at(&self, at: u64, mut end: u64) -> io::Result<(usize, u64)> {
        // The newest first: its data hides the others'.
        for (number, layer) in self.layers.iter().enumerate().rev() {
            let data = layer.data_at(at).map_err(|cause| layer.failed(cause))?;
            if data.start <= at {
                return Ok((number, end.min(data.end)));
            }
            end = end.min(data.start);
        }
        Ok((0, end))
    }
}

impl Layer {
    fn open(path: &Path, has_all: bool, requests: &RequestOptions) -> Result<Self, SnapshotError> {
        let source = open_source(path, requests).map_err(SnapshotError::unopened(path))?;
        Ok(Self { source, has_all, known: Mutex::default() })
    }

    /// Returns the file whose holes are the pages that the layer does not have.
    fn with_holes(&self) -> Option<&File> {
        self.source.file().filter(|_| !self.has_all)
    }

    fn hole_problem(&self) -> io::Result<Option<String>> {
        self.with_holes().map_or(Ok(None), |file| hole_problem(file, PAGE_BYTES))
    }

    /// Returns the next data that ends behind `at`; it starts behind the end if there is none.
    fn data_at(&self, at: u64) -> io::Result<Range<u64>> {
        let Some(file) = self.with_holes() else { return Ok(0..u64::MAX) };
        let known = || lock(&self.known);
        let Known { from, data } = known().clone();
        if from <= at && at < data.end {
            return Ok(data);
        }
        let data = next_data(file, at)?.unwrap_or(u64::MAX..u64::MAX);
        // A part that was cut off looks like a hole.
        if file.metadata()?.len() < self.source.byte_len() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        *known() = Known { from: at, data: data.clone() };
        Ok(data)
    }

    /// Returns an error with the name of the layer, which the packer does not know.
    fn failed(&self, cause: io::Error) -> io::Error {
        let kind = cause.kind();
        let cause = match kind {
            io::ErrorKind::UnexpectedEof if self.source.file().is_some() => {
                io::Error::new(kind, "the file became shorter while it was read")
            }
            _ => cause,
        };
        io::Error::new(kind, LayerError { name: self.source.name(), cause })
    }
}

impl Source for Layers {
    fn name(&self) -> String {
        self.layers[0].source.name()
    }

    fn byte_len(&self) -> u64 {
        self.len
    }

    fn mode_for(&self, group: u32) -> u32 {
        let modes = self.layers.iter().map(|layer| layer.source.mode_for(group));
        modes.fold(0o666, |all, mode| all & mode)
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let end = offset.checked_add(out.len() as u64).filter(|end| *end <= self.len);
        let end = end.ok_or(io::ErrorKind::UnexpectedEof)?;
        let (mut at, mut rest) = (offset, out);
        while at < end {
            let (number, part_end) = self.layer_at(at, end)?;
            let (part, behind) =
                rest.split_at_mut(usize::try_from(part_end - at).unwrap_or(usize::MAX));
            let layer = &self.layers[number];
            layer.source.read_at(at, part).map_err(|cause| layer.failed(cause))?;
            (at, rest) = (part_end, behind);
        }
        Ok(())
    }

    fn will_need(&self, ranges: &[Range<u64>]) {
        let mut wanted = vec![Vec::new(); self.layers.len()];
        for range in ranges {
            let (mut at, end) = (range.start, range.end.min(self.len));
            while at < end {
                // It is a hint; an error shows when the range is read.
                let Ok((number, part_end)) = self.layer_at(at, end) else { return };
                wanted[number].push(at..part_end);
                at = part_end;
            }
        }
        for (layer, ranges) in self.layers.iter().zip(wanted) {
            layer.source.will_need(&ranges);
        }
    }
}

impl std::fmt::Debug for Layers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let names: Vec<String> = self.layers.iter().map(|layer| layer.source.name()).collect();
        f.debug_struct("Layers").field("layers", &names).field("len", &self.len).finish()
    }
}
