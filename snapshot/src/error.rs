//! Why an image was not written, opened or read: [`SnapshotError`].

use std::io;
use std::path::{Path, PathBuf};

use uzone_pages::ErrorKind;

use crate::format::Root;
use crate::source::Source;

/// An image that was not written, opened or read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SnapshotError {
    /// Bytes of a source were not read.
    #[error("cannot read {len_bytes} bytes at {offset:#x} of {name}")]
    Read {
        /// The name of the source.
        name: String,
        /// Where the bytes start.
        offset: u64,
        /// How many they are.
        len_bytes: u64,
        /// The error of the system.
        #[source]
        cause: io::Error,
    },
    /// A source was not opened.
    #[error("cannot open {name}")]
    Open {
        /// The name of the source.
        name: String,
        /// The error of the system.
        #[source]
        cause: io::Error,
    },
    /// The input of an image was not read.
    #[error("cannot read the input after {done} bytes")]
    Input {
        /// How many bytes were read before.
        done: u64,
        /// The error of the system.
        #[source]
        cause: io::Error,
    },
    /// The holes of a diff do not show which pages it has.
    #[error(
        "{path} cannot be merged by its holes: {why}; have the diff written on ext4, XFS, Btrfs or a plain tmpfs, or \
         take every byte of it with --all-data", path = path.display()
    )]
    Holes {
        /// The diff.
        path: PathBuf,
        /// Why not.
        why: String,
    },
    /// A diff is an object, which has no holes that show which pages it has.
    #[error(
        "{url} is in object storage, where a diff has no holes that show which pages it has: take the local file \
         that was written as the diff, or every byte of this one with --all-data", url = path.display()
    )]
    NoHoles {
        /// The URL of the diff.
        path: PathBuf,
    },
    /// A diff is not as long as the memory that it changes.
    #[error(
        "{path} has {len_bytes} bytes, and the memory below it has {below_bytes}: it is not a diff of that memory",
        path = path.display()
    )]
    OtherLength {
        /// The diff.
        path: PathBuf,
        /// How long it is.
        len_bytes: u64,
        /// How long the memory is.
        below_bytes: u64,
    },
    /// A file was not written.
    #[error("cannot {step} {path}", path = shown(path))]
    Write {
        /// The file.
        path: PathBuf,
        /// The step that failed.
        step: &'static str,
        /// The error of the system.
        #[source]
        cause: io::Error,
    },
    /// A source starts as an image does, and does not end as one.
    #[error("{name} is a packed image that was cut: {why}; copy it again")]
    Cut {
        /// The name of the source.
        name: String,
        /// The part that is missing.
        why: &'static str,
    },
    /// The source is not an image.
    #[error("{name} is not a packed image: {why}; `uzone pack` makes one")]
    NotAnImage {
        /// The name of the source.
        name: String,
        /// The part that is missing.
        why: &'static str,
    },
    /// The image has a version that this program does not read.
    #[error("{name} has version {major} of the format, and this program reads version {ours}: use a newer uzone", ours = crate::format::MAJOR)]
    Version {
        /// The name of the source.
        name: String,
        /// The major version of the image.
        major: u16,
    },
    /// The index of an image is damaged.
    #[error("the index of {name} is damaged: {why}; restore the file from a copy")]
    BadIndex {
        /// The name of the source.
        name: String,
        /// The defect.
        why: &'static str,
    },
    /// A frame of an image is damaged.
    #[error(
        "frame {frame} of {name}, at byte {offset:#x} of the file, is damaged: {why}; restore the file from a copy"
    )]
    BadFrame {
        /// The name of the source.
        name: String,
        /// The number of the frame.
        frame: u64,
        /// Where its stored bytes start in the file.
        offset: u64,
        /// The defect.
        why: &'static str,
    },
    /// The image has another root hash than the required one.
    #[error("root hash mismatch in {name}: expected {expected}, found {found}")]
    OtherRoot {
        /// The name of the source.
        name: String,
        /// The required root hash.
        expected: Root,
        /// The root hash of the image.
        found: Root,
    },
    /// The parent of an image was not opened.
    #[error("the parent {parent:?} of {name} cannot be used")]
    Parent {
        /// The name of the source.
        name: String,
        /// The name of the parent, as the image has it.
        parent: String,
        /// Why not.
        #[source]
        cause: Box<SnapshotError>,
    },
    /// The chain of parents is too long.
    #[error("{name} has more than {max} images below it: write it anew with `uzone pack --rebase`")]
    TooDeep {
        /// The name of the source.
        name: String,
        /// The longest chain.
        max: usize,
    },
    /// A range is not inside the image.
    #[error(
        "{len_bytes} bytes at {offset:#x} are not all inside the image, which has {image_len} bytes"
    )]
    Beyond {
        /// Where the range starts.
        offset: u64,
        /// How long it is.
        len_bytes: u64,
        /// How long the image is.
        image_len: u64,
    },
    /// Options that do not go together, or are out of range.
    #[error("{why}")]
    Options {
        /// The defect, and the choices.
        why: &'static str,
    },
    /// The codec did not compress.
    #[error("cannot compress with {codec}")]
    Codec {
        /// The codec.
        codec: &'static str,
        /// The answer of the compressor.
        #[source]
        cause: io::Error,
    },
    /// The caller cancelled.
    #[error("cancelled")]
    Cancelled,
}

/// Returns the name of an output.
fn shown(path: &Path) -> String {
    if path == Path::new("-") { "standard output".to_owned() } else { path.display().to_string() }
}

impl SnapshotError {
    /// Returns a function that turns the cause into an error of `path`, which was not opened.
    pub fn unopened(path: &Path) -> impl Fn(io::Error) -> Self + Copy {
        move |cause| {
            let name = path.display().to_string();
            Self::Open { name, cause }
        }
    }

    /// Returns a function that turns the cause of a failed `step` into an error of the file `path`.
    pub(crate) fn write(path: &Path, step: &'static str) -> impl Fn(io::Error) -> Self {
        move |cause| Self::Write { path: path.to_owned(), step, cause }
    }

    /// Returns a function that turns the cause of a failed read into an error of `source`.
    pub(crate) fn read(source: &dyn Source, offset: u64, len: usize) -> impl Fn(io::Error) -> Self {
        move |cause| Self::Read { name: source.name(), offset, len_bytes: len as u64, cause }
    }

    /// Returns the kind of the failure.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Read { cause, .. }
            | Self::Open { cause, .. }
            | Self::Input { cause, .. }
            | Self::Write { cause, .. } => {
                match cause.kind() {
                    // No system call answered that: it is about the name, which was looked at before.
                    io::ErrorKind::InvalidInput if cause.raw_os_error().is_none() => {
                        ErrorKind::InvalidInput
                    }
                    io::ErrorKind::NotFound => ErrorKind::NotFound,
                    io::ErrorKind::PermissionDenied => ErrorKind::PermissionDenied,
                    io::ErrorKind::OutOfMemory => ErrorKind::OutOfMemory,
                    _ => ErrorKind::Io,
                }
            }
            Self::NotAnImage { .. }
            | Self::Cut { .. }
            | Self::BadIndex { .. }
            | Self::BadFrame { .. }
            | Self::OtherRoot { .. }
            | Self::OtherLength { .. }
            | Self::TooDeep { .. } => ErrorKind::InvalidData,
            Self::Version { .. } | Self::Holes { .. } | Self::NoHoles { .. } => {
                ErrorKind::NotSupported
            }
            // The child names it, and no argument does.
            Self::Parent { cause, .. } if cause.kind() == ErrorKind::InvalidInput => {
                ErrorKind::InvalidData
            }
            Self::Parent { cause, .. } => cause.kind(),
            Self::Beyond { .. } | Self::Options { .. } => ErrorKind::InvalidInput,
            Self::Codec { .. } => ErrorKind::Other,
            Self::Cancelled => ErrorKind::Cancelled,
        }
    }
}
