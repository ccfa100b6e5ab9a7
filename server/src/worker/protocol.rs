//! The messages of a client that hands memory over, and the answers: of a monitor as Firecracker sends them
//! ([`firecracker`]), of a program that attaches by [`uzone_attach::protocol`]. A session is the same for both.
//!
//! A program sends a request, and after the answer its regions as Firecracker sends them, with its
//! userfaultfd and the log of an earlier server, if there was one. A monitor expects no answer.

use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;

use uzone_attach::protocol::{Reply, Request};
use uzone_fault::RemoteRegion;
use uzone_os::peer;
use uzone_pages::ByteLen;

use super::firecracker;
use crate::error::ServeError;
use crate::machine::{MESSAGE_BYTES, Machine, is_of_program};

/// The message of a client so far.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Message {
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
    /// The earlier request of a program; a monitor has none.
    pub(crate) request: Option<Request>,
}

impl Memory {
    /// Returns whether it is a private mapping of the server's memory file. Then a page of a file was not written.
    pub(crate) fn is_shared(&self) -> bool {
        matches!(self.request, Some(Request::Attach { share: true, .. }))
    }

    /// Returns whether the kernel notes written pages.
    pub(crate) fn is_tracked(&self) -> bool {
        matches!(self.request, Some(Request::Attach { tracks: true, .. }))
    }
}

/// Returns the message so far: a pure function of the bytes.
///
/// # Errors
/// [`ServeError`] if it is neither a message of a monitor nor of a program.
fn parse(bytes: &[u8]) -> Result<Message, ServeError> {
    let (request, rest) = if is_of_program(bytes) {
        let mut values = serde_json::Deserializer::from_slice(bytes).into_iter::<Request>();
        let request = match values.next() {
            None => return Ok(Message::Part),
            Some(Err(error)) if error.is_eof() => return Ok(Message::Part),
            Some(Err(error)) => {
                let reason = format!("the message is no request to attach: {error}");
                return Err(ServeError::Message(reason));
            }
            Some(Ok(request)) => request,
        };
        let rest = &bytes[values.byte_offset()..];
        if rest.trim_ascii().is_empty() {
            return Ok(Message::Asks(request));
        }
        (Some(request), rest)
    } else {
        (None, bytes)
    };
    let regions = firecracker::regions(rest)?;
    Ok(regions.map_or(Message::Part, |regions| Message::Memory(Memory { regions, request })))
}

/// Sends a program a reply, and the descriptor that belongs to it, without waiting.
///
/// # Errors
/// The program does not take it.
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

/// Returns the message of a client.
pub(crate) fn read(machine: &Machine) -> Result<Message, ServeError> {
    let bytes = &machine.bytes;
    if bytes.len() > MESSAGE_BYTES {
        let reason = format!("the message is longer than {MESSAGE_BYTES} bytes");
        return Err(ServeError::Message(reason));
    }
    let said = parse(bytes)?;
    let descriptors = machine.count_descriptors();
    let wrong_number = |count| format!("expected 1 file descriptor (a userfaultfd), got {count}");
    let most = if machine.is_program() { 2 } else { 1 };
    let reason = match said {
        Message::Part if descriptors > most => wrong_number(descriptors),
        // More will not come.
        Message::Part | Message::Asks(_) if machine.is_ended => {
            format!("the connection ended after {} bytes of a message", bytes.len())
        }
        Message::Memory(_) if !(1..=most).contains(&descriptors) => wrong_number(descriptors),
        said => return Ok(said),
    };
    Err(ServeError::Message(reason))
}

/// Checks that regions are whole pages, and that the image has their bytes.
pub(crate) fn check(regions: &[RemoteRegion], image: ByteLen) -> Result<(), ServeError> {
    for (index, region) in regions.iter().enumerate() {
        let &RemoteRegion { start, len, offset, page } = region;
        let page_bytes = page.bytes();
        for (what, bytes) in [("address", start.get()), ("size", len.get()), ("offset", offset)] {
            if !bytes.is_multiple_of(page_bytes) {
                return Err(ServeError::Message(format!(
                    "region {index} has {what} {bytes:#x}, which is no multiple of its pages of {page_bytes} bytes"
                )));
            }
        }
        // The last page of an image may be a part of one.
        let end = offset.checked_add(len.get());
        let has = image.align_up(page_bytes).unwrap_or(image).get();
        if len.is_zero() || end.is_none_or(|end| end > has) {
            return Err(ServeError::Message(format!(
                "region {index} has {len} at offset {offset:#x} of the image, which has {image}"
            )));
        }
    }
    Ok(())
}

/// Returns the memory that was handed over by a whole message.
pub(crate) fn memory_of(bytes: &[u8]) -> Option<Memory> {
    match parse(bytes).ok()? {
        Message::Memory(memory) => Some(memory),
        Message::Part | Message::Asks(_) => None,
    }
}
