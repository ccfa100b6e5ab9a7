//! What the tests of the page server share: an image of known pages, and a folder for it.
#![allow(dead_code, reason = "each test file is a program of its own and takes what it needs")]

use std::fmt::Display;
use std::fs::{self, File};
use std::ops::Deref;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use uzone_snapshot::Packer;

/// The oracle: a page of the image.
pub(crate) fn page_of(index: u64) -> Vec<u8> {
    if index % 5 == 3 {
        return vec![0; 4096];
    }
    let word = |at: u64| ((index * 512 + at + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)).to_le_bytes();
    (0..512).flat_map(word).collect()
}

/// The folder of one test, with an image in it, `raw` and `packed`. It is taken away at the end.
pub(crate) struct Folder(PathBuf);

impl Folder {
    pub(crate) fn new(name: &str, pages: u64) -> Self {
        let folder = std::env::temp_dir().join(format!("uzone-{name}-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let raw: Vec<u8> = (0..pages).flat_map(page_of).collect();
        fs::write(folder.join("raw"), &raw).unwrap();
        Packer::default().pack(&mut &raw[..], &folder.join("packed"), None, &|_| true).unwrap();
        Self(folder)
    }
}

impl Deref for Folder {
    type Target = Path;

    fn deref(&self) -> &Path {
        &self.0
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Makes a byte of a frame in the first half of a packed image another one.
pub(crate) fn damage(packed: &Path) {
    let file = File::options().read(true).write(true).open(packed).unwrap();
    let (mut byte, at) = ([0], file.metadata().unwrap().len() / 4);
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 1], at).unwrap();
}

/// Reports that a case cannot run here, which is an error where all have to.
pub(crate) fn skip(name: &str, reason: impl Display) {
    assert!(std::env::var("REQUIRE_ALL").as_deref() != Ok("1"), "{name}: {reason}");
    eprintln!("skipped: {name}: {reason}");
}
