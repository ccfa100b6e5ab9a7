//! What came by a connection: [`Said`]. A monitor sends its regions and its userfaultfd at once; a program
//! that attaches asks for the image before ([`uzone_attach::protocol`]).

use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;

use uzone_attach::protocol::{Reply, Request};
use uzone_fault::{PageSize, RemoteRegion};
use uzone_os::peer;

use crate::connection::Connection;
use crate::handshake::{self, HandshakeError, MESSAGE_BYTES};

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
    pub(crate) page: PageSize,
    /// What a program asked for before; a monitor asks for nothing.
    pub(crate) request: Option<Request>,
}

impl Memory {
    /// Returns whether it is a private mapping of the server's memory file, where a page of a file was not
    /// written.
    pub(crate) fn is_shared(&self) -> bool {
        matches!(self.request, Some(Request::Attach { share: true, .. }))
    }
}

/// Returns what came by a connection.
///
/// # Errors
/// [`HandshakeError`] if it is none of the two.
pub(crate) fn read(connection: &Connection) -> Result<Said, HandshakeError> {
    let bytes = &connection.bytes;
    if bytes.len() > MESSAGE_BYTES {
        return Err(HandshakeError::TooLong);
    }
    let descriptors = connection.count_descriptors();
    let (request, rest) = match request(bytes)? {
        Asked::No => (None, &bytes[..]),
        Asked::Part => return part(connection, 0),
        Asked::For(request, len) => (Some(request), &bytes[len..]),
    };
    if let Some(request) = &request
        && rest.trim_ascii().is_empty()
        && !connection.is_ended
    {
        return Ok(Said::Asks(request.clone()));
    }
    // A program sends the log of an earlier server too, if there was one.
    let most = if request.is_some() { 2 } else { 1 };
    match handshake::regions(rest)? {
        None => part(connection, most),
        Some(_) if !(1..=most).contains(&descriptors) => {
            Err(HandshakeError::Descriptors(descriptors))
        }
        Some((regions, page)) => Ok(Said::Memory(Memory { regions, page, request })),
    }
}

/// Returns the memory that was handed over by a whole message.
pub(crate) fn memory_of(bytes: &[u8]) -> Option<Memory> {
    let (request, rest) = match request(bytes).ok()? {
        Asked::No => (None, bytes),
        Asked::Part => return None,
        Asked::For(request, len) => (Some(request), &bytes[len..]),
    };
    let (regions, page) = handshake::regions(rest).ok()??;
    Some(Memory { regions, page, request })
}

/// Returns that a message is not whole, unless it will never be.
fn part(connection: &Connection, most: usize) -> Result<Said, HandshakeError> {
    let descriptors = connection.count_descriptors();
    if connection.is_ended {
        Err(HandshakeError::Ended(connection.bytes.len()))
    } else if descriptors > most.max(1) {
        Err(HandshakeError::Descriptors(descriptors))
    } else {
        Ok(Said::Part)
    }
}

enum Asked {
    /// It is a monitor.
    No,
    Part,
    /// With the length of the request.
    For(Request, usize),
}

fn request(bytes: &[u8]) -> Result<Asked, HandshakeError> {
    if bytes.trim_ascii_start().first() != Some(&b'{') {
        return Ok(Asked::No);
    }
    let mut values = serde_json::Deserializer::from_slice(bytes).into_iter();
    match values.next() {
        None => Ok(Asked::Part),
        Some(Err(error)) if error.is_eof() => Ok(Asked::Part),
        Some(Err(error)) => Err(HandshakeError::NotARequest(error.to_string())),
        Some(Ok(request)) => Ok(Asked::For(request, values.byte_offset())),
    }
}

/// Sends a program a reply, and the descriptor that belongs to it. It waits for none: a program that takes
/// nothing is not answered.
pub(crate) fn reply(
    stream: &UnixStream,
    reply: &Reply,
    fd: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    let mut line = serde_json::to_vec(reply)?;
    line.push(b'\n');
    match peer::send(stream, &line, fd.as_slice())? {
        sent if sent == line.len() => Ok(()),
        _ => Err(io::ErrorKind::WouldBlock.into()),
    }
}
