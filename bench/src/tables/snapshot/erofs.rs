//! The rival in the kernel: the same bytes as a file of EROFS, a read-only file system that is compressed.

use std::fs::{self, File};
use std::io::{self, Read};
use std::num::NonZeroU64;
use std::path::Path;
use std::process::{Command, Stdio};

use uzone_os::{file_system, page_cache};

use super::frames::{FRAME, LEVEL, failed};
use crate::harness::Result;

/// What the image holds.
const NAME: &str = "raw";

/// The bytes of the image in an EROFS that is mounted as long as this value lives.
#[derive(Debug)]
pub(crate) struct Erofs {
    file: File,
    codec: &'static str,
}

impl Erofs {
    /// Makes the file system of the bytes of `input`, and mounts it. `Ok(Err(_))` is why this host cannot do that.
    pub(super) fn new(directory: &Path, mut input: impl Read) -> Result<Result<Self, String>> {
        let directory = directory.join(format!("uzone-bench-erofs-{}", std::process::id()));
        fs::create_dir(&directory).map_err(failed)?;
        let made = make(&mut input, &directory).map_err(|cause| cause.to_string());
        // The mount keeps the file that it is of.
        fs::remove_dir_all(&directory).map_err(failed)?;
        Ok(made)
    }

    /// Returns the file. The page cache has its compressed bytes, and has forgotten the others.
    pub(super) fn open(&self) -> Result<&File> {
        let forget = |len| match NonZeroU64::new(len) {
            Some(len) => page_cache::forget(&self.file, 0, len),
            None => Ok(()),
        };
        let len = self.file.metadata().map(|metadata| metadata.len());
        len.and_then(forget).map(|()| &self.file).map_err(failed)
    }

    /// Returns the name of a row.
    pub(super) fn name(&self, what: &str) -> String {
        format!("{what} EROFS, {} in clusters of 64 KiB", self.codec)
    }
}

fn make(input: &mut impl Read, directory: &Path) -> io::Result<Erofs> {
    let (source, image) = (directory.join("source"), directory.join("image"));
    fs::create_dir(&source)?;
    io::copy(input, &mut File::create(source.join(NAME))?)?;
    let zstd = format!("-zzstd,level={LEVEL}");
    // Older ones do not know zstd.
    let codec = match mkfs(&zstd, &image, &source) {
        Ok(()) => "zstd",
        Err(cause) if cause.kind() == io::ErrorKind::NotFound => {
            return Err(io::Error::other("the command mkfs.erofs is not installed"));
        }
        Err(_) => {
            mkfs("-zlz4", &image, &source)?;
            "lz4"
        }
    };
    let mounted = file_system::file_of_image(&image, c"erofs", &source, Path::new(NAME));
    let file = mounted.map_err(|cause| {
        io::Error::other(format!("a file of EROFS cannot be mounted (root, Linux 6.12): {cause}"))
    })?;
    Ok(Erofs { file, codec })
}

fn mkfs(codec: &str, image: &Path, source: &Path) -> io::Result<()> {
    let mut command = Command::new("mkfs.erofs");
    command.arg(codec).arg(format!("-C{FRAME}")).args([image, source]);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    match command.status()? {
        status if status.success() => Ok(()),
        status => Err(io::Error::other(format!("mkfs.erofs ended with {status}"))),
    }
}
