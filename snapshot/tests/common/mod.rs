//! Helpers of the tests of images.
#![allow(dead_code, reason = "each test program uses its part")]
#![allow(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    reason = "helpers of tests fail by panicking, as tests do"
)]

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Arc;

use fastrand::Rng;
use uzone_fault::{Engine, LazyMapping, LazyOptions};
use uzone_os::sigbus;
use uzone_pages::ByteLen;
use uzone_snapshot::{Image, SnapshotBacking};

/// A directory of a test, removed with its files.
pub(crate) struct Directory(pub(crate) PathBuf);

impl Directory {
    pub(crate) fn new(name: &str) -> Self {
        let name = format!("uzone-snapshot-{name}-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// Returns the names of the files that are here.
    pub(crate) fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(&self.0).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Prints the attempt if the test fails in its scope.
pub(crate) struct Named(pub(crate) String);

impl Drop for Named {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", self.0);
        }
    }
}

/// Returns all bytes of an image.
pub(crate) fn all(image: &Image) -> Vec<u8> {
    let mut bytes = vec![0xaa; usize::try_from(image.byte_len()).unwrap()];
    image.read_at(0, &mut bytes).unwrap();
    bytes
}

/// Returns so many pages and 777 bytes: some pages are zero, some compress, and some do not.
pub(crate) fn random_memory(pages: usize, seed: u64) -> Vec<u8> {
    let mut random = Rng::with_seed(seed);
    let mut bytes = vec![0; pages * 4096 + 777];
    for (number, page) in bytes.chunks_mut(4096).enumerate() {
        match number % 7 {
            // Two pages, so that some frames are zero as a whole.
            2 | 3 => {}
            0 | 4 => page.iter_mut().for_each(|byte| *byte = random.u8(..)),
            _ => page.iter_mut().enumerate().for_each(|(at, byte)| *byte = (at % 97) as u8 + 1),
        }
    }
    bytes
}

/// Maps an image, or prints that `what` is skipped where the host has no userfaultfd.
pub(crate) fn map(what: &str, image: Arc<Image>, pages: u64) -> Option<LazyMapping> {
    sigbus::install().unwrap();
    let backing = Arc::new(SnapshotBacking::new(image));
    let mapped = Engine::new(NonZeroUsize::MIN).and_then(|engine| {
        engine.map(ByteLen::new(pages * 4096), backing, &LazyOptions::default())
    });
    match mapped {
        Ok(mapping) => Some(mapping),
        Err(error) => {
            eprintln!("skipped: {what}: {error}");
            None
        }
    }
}
