//! The pages that VMs touched, in that order, in a text file: a page number a line, as `uzone pack
//! --working-set` takes it. A set that is wrong, stale or damaged costs time: lines that are no number are
//! passed over.

use std::collections::HashSet;
use std::fmt::Write as _;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use uzone_fault::FaultRecord;
use uzone_os::uffd::FaultKind;
use uzone_snapshot::Root;
use uzone_snapshot::files::NewFile;

/// The longest file: a line for each page of 4 KiB of 64 GiB.
const FILE_BYTES: u64 = 256 << 20;

/// Returns the file of an image with this root hash: `path`, or in a folder the file that is named by the hash.
pub(crate) fn file_of(path: &Path, root: Root) -> PathBuf {
    if path.is_dir() { path.join(format!("{root}.pages")) } else { path.to_owned() }
}

/// Reads the page numbers of a file.
pub(crate) fn read(path: &Path) -> io::Result<Vec<u64>> {
    let metadata = std::fs::metadata(path)?;
    // Opening a FIFO would wait for a writer.
    if !metadata.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file"));
    }
    if metadata.len() > FILE_BYTES {
        return Err(io::Error::other("it is longer than a list of pages can be"));
    }
    let bytes = std::fs::read(path)?;
    let lines = bytes.split(|byte| *byte == b'\n');
    Ok(lines.filter_map(|line| str::from_utf8(line).ok()?.trim().parse().ok()).collect())
}

/// The pages that are recorded, of all sessions.
#[derive(Debug)]
pub(crate) struct Recording {
    path: PathBuf,
    page_bytes: u64,
    pages: Vec<u64>,
    known: HashSet<u64>,
    is_changed: bool,
}

impl Recording {
    /// Goes on with the pages of a file, if there is one.
    pub(crate) fn open(path: PathBuf, page_bytes: u64) -> io::Result<Self> {
        let before = match read(&path) {
            Err(cause) if cause.kind() == io::ErrorKind::NotFound => Vec::new(),
            before => before?,
        };
        let (pages, known) = (Vec::new(), HashSet::new());
        let mut recording = Self { path, page_bytes, pages, known, is_changed: true };
        before.into_iter().for_each(|page| recording.push(page));
        // A folder that cannot be written is found at the start, and not when the first VM ends.
        recording.write()?;
        Ok(recording)
    }

    fn push(&mut self, page: u64) {
        if self.known.insert(page) {
            self.pages.push(page);
            self.is_changed = true;
        }
    }

    /// Adds the pages of faults that are new.
    pub(crate) fn add(&mut self, faults: &[FaultRecord]) {
        for record in faults {
            if record.class != FaultKind::WriteProtect {
                self.push(record.offset / self.page_bytes);
            }
        }
    }

    /// Writes the file, if there is something new: as a whole or not at all.
    pub(crate) fn write(&mut self) -> io::Result<()> {
        if !std::mem::take(&mut self.is_changed) {
            return Ok(());
        }
        let mut text = String::with_capacity(self.pages.len() * 8);
        for page in &self.pages {
            // Memory takes it all.
            let _ = writeln!(text, "{page}");
        }
        let new = NewFile::create(&self.path)?;
        new.file().write_all(text.as_bytes())?;
        new.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_merged_and_what_is_no_number_is_passed_over() {
        let path = std::env::temp_dir().join(format!("uzone-set-{}", std::process::id()));
        std::fs::write(&path, b"7\n# a note\n\xff\n 3 \n-1\n7\n99999999999999999999\n5").unwrap();
        assert_eq!(read(&path).unwrap(), [7, 3, 7, 5]);
        let mut recording = Recording::open(path.clone(), 4096).unwrap();
        recording.push(9);
        recording.push(3);
        recording.write().unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "7\n3\n5\n9\n");
        std::fs::remove_file(&path).unwrap();
        recording.write().unwrap();
        assert!(!path.exists(), "nothing was new");
        let nowhere = path.join("below");
        assert!(Recording::open(nowhere, 4096).is_err());
    }
}
