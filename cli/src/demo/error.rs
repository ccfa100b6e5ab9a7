//! Errors of the demo itself: [`DemoError`].

use std::io;
use std::path::PathBuf;

use uzone_os::AccessError;
use uzone_os::uffd::UffdError;
use uzone_pages::ByteLen;
use uzone_zone::Limit;

use crate::exit::{Exit, Failure};

/// An error of the demo itself; libraries have their own.
#[derive(Debug, thiserror::Error)]
pub(super) enum DemoError {
    #[error("an image of {size} cannot be made: a size is a multiple of 8 MiB, such as 1G")]
    Size { size: ByteLen },
    #[error("{reserve} cannot be described: --reserve is a multiple of 1 GiB, such as 100G")]
    Reserve { reserve: ByteLen },
    #[error(
        "{needed:.1} of memory are needed and {available:.1} can be had, limited by {limited_by}: raise \
         that limit, or leave --size and --reserve out, so that they follow it"
    )]
    Memory { needed: ByteLen, available: ByteLen, limited_by: Limit },
    #[error(
        "the image takes {needed:.1} and {free:.1} are free in {}: ask for less with --size, or name \
         another directory with --dir",
        directory.display()
    )]
    Disk { needed: ByteLen, free: ByteLen, directory: PathBuf },
    #[error(
        "the results take up to {needed:.1} and {free:.1} are free in {}: name another directory with \
         --output",
        directory.display()
    )]
    Output { needed: ByteLen, free: ByteLen, directory: PathBuf },
    #[error(
        "an image of {size} is longer than a file may be here, which is {longest}: ask for less \
         with --size, or raise `ulimit -f`"
    )]
    FileLimit { size: ByteLen, longest: ByteLen },
    #[error("cannot make a file in {}: name another directory with --dir", directory.display())]
    Directory {
        directory: PathBuf,
        #[source]
        cause: io::Error,
    },
    #[error(
        "cannot write the image of {len} in {}: free space there, ask for less with --size, or \
         name another directory with --dir",
        directory.display()
    )]
    Image {
        len: ByteLen,
        directory: PathBuf,
        #[source]
        cause: io::Error,
    },
    #[error("cannot read the image again: {cause}")]
    Reread {
        #[source]
        cause: io::Error,
    },
    #[error("a page could not be had: {reason}")]
    Page {
        reason: String,
        #[source]
        cause: AccessError,
    },
    #[error(
        "memory cannot be mapped lazily: set vm.unprivileged_userfaultfd to 1 (sysctl), give \
         access to /dev/userfaultfd, or where a container forbids userfaultfd(2), allow that"
    )]
    NoFaults {
        #[source]
        cause: UffdError,
    },
    #[error("memory that is pinned was given back: this is a defect of uzone")]
    NotRefused,
    #[error("memory is held by {pins} pins although all are dropped: this is a defect of uzone")]
    Kept { pins: u32 },
}

impl DemoError {
    /// Returns the failure, with an exit code where no cause determines it.
    pub(super) fn failure(self) -> Failure {
        match self {
            Self::Size { .. } | Self::Reserve { .. } => Failure::with(Exit::Usage, self),
            Self::Page { .. } => Failure::with(Exit::Os, self),
            Self::Disk { .. }
            | Self::Output { .. }
            | Self::FileLimit { .. }
            | Self::Image { .. } => Failure::with(Exit::Io, self),
            other => Failure::from(other),
        }
    }
}
