//! How a client hands memory over and is answered: a [`Dialect`], one for each kind of client. A session is the
//! same for all.
//!
//! A new kind of client is a new implementation, in [`DIALECTS`].

pub(crate) mod attach;
pub(crate) mod firecracker;

use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;

use uzone_attach::protocol::{Reply, Request};
use uzone_fault::RemoteRegion;
use uzone_pages::ByteLen;

use crate::connection::{Connection, MESSAGE_BYTES};
use crate::error::ServeError;

/// The dialects. The first one takes a message whose start is of several.
const DIALECTS: [&dyn Dialect; 2] = [&attach::Attach, &firecracker::Firecracker];

/// What one kind of client sends, and what it is sent.
pub(crate) trait Dialect: Sync {
    /// Returns whether a message may be of it that starts with this byte, leaving out white space.
    fn has(&self, first: u8) -> bool;

    /// Returns what came so far: a pure function of the bytes.
    fn parse(&self, bytes: &[u8]) -> Result<Said, ServeError>;

    /// Returns how many descriptors come with memory at most; the first is the userfaultfd.
    fn descriptors(&self) -> usize;

    /// Returns whether the end of its stream ends its session; otherwise the end of its process does.
    fn ends_with_stream(&self) -> bool {
        false
    }

    /// Sends a reply, and the descriptor that belongs to it, without waiting. By default a client expects none.
    fn reply(&self, _: &UnixStream, _: &Reply, _: Option<BorrowedFd<'_>>) -> io::Result<()> {
        Ok(())
    }
}

/// What came so far.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Said {
    /// A part of a message.
    Part,
    /// A program asks for the image.
    Asks(Request),
    /// Memory is to be filled.
    Memory(Memory),
}

/// Memory that is to be filled.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Memory {
    pub(crate) regions: Vec<RemoteRegion>,
    /// What a program asked for before; a monitor asks for nothing.
    pub(crate) request: Option<Request>,
}

impl Memory {
    /// Returns whether it is a private mapping of the server's memory file, where a page of a file was not
    /// written.
    pub(crate) fn is_shared(&self) -> bool {
        matches!(self.request, Some(Request::Attach { share: true, .. }))
    }

    /// Returns whether the kernel notes which pages are written to.
    pub(crate) fn is_tracked(&self) -> bool {
        matches!(self.request, Some(Request::Attach { tracks: true, .. }))
    }
}

/// Returns the dialect of a message, which is not known before it has a byte.
pub(crate) fn of(bytes: &[u8]) -> Option<&'static dyn Dialect> {
    let first = *bytes.trim_ascii_start().first()?;
    DIALECTS.into_iter().find(|dialect| dialect.has(first))
}

/// Returns what came by a connection.
pub(crate) fn read(connection: &Connection) -> Result<Said, ServeError> {
    let bytes = &connection.bytes;
    if bytes.len() > MESSAGE_BYTES {
        return Err(ServeError::MessageTooLong);
    }
    let dialect = of(bytes);
    let said = dialect.map_or(Ok(Said::Part), |dialect| dialect.parse(bytes))?;
    let descriptors = connection.count_descriptors();
    let most = dialect.map_or(1, Dialect::descriptors);
    match said {
        Said::Part if descriptors > most => Err(ServeError::Descriptors(descriptors)),
        // More will not come.
        Said::Part | Said::Asks(_) if connection.known.is_ended => {
            Err(ServeError::MessageEnded(bytes.len()))
        }
        Said::Memory(_) if !(1..=most).contains(&descriptors) => {
            Err(ServeError::Descriptors(descriptors))
        }
        said => Ok(said),
    }
}

/// Checks that regions are whole pages, and that the image has their bytes.
pub(crate) fn check(regions: &[RemoteRegion], image: ByteLen) -> Result<(), ServeError> {
    for (index, region) in regions.iter().enumerate() {
        let &RemoteRegion { start, len, offset, page } = region;
        let page_bytes = page.bytes();
        for (what, bytes) in [("address", start.get()), ("size", len.get()), ("offset", offset)] {
            if !bytes.is_multiple_of(page_bytes) {
                return Err(ServeError::RegionCutsPage { index, what, bytes, page_bytes });
            }
        }
        // The last page of an image may be a part of one.
        let end = offset.checked_add(len.get());
        let has = image.align_up(page_bytes).unwrap_or(image).get();
        if len.is_zero() || end.is_none_or(|end| end > has) {
            return Err(ServeError::RegionBeyond { index, len, offset, image });
        }
    }
    Ok(())
}

/// Returns the memory that was handed over by a whole message.
pub(crate) fn memory_of(bytes: &[u8]) -> Option<Memory> {
    match of(bytes)?.parse(bytes).ok()? {
        Said::Memory(memory) => Some(memory),
        Said::Part | Said::Asks(_) => None,
    }
}
