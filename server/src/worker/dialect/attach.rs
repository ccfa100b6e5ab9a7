//! What a program sends that attaches ([`uzone_attach::protocol`]): a request, and when that was answered its
//! regions as Firecracker sends them, with its userfaultfd and the log of an earlier server, if there was one.

use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;

use uzone_attach::protocol::{Reply, Request};
use uzone_os::peer;

use super::{Dialect, Memory, Said, firecracker};
use crate::error::ServeError;

/// A request, and a message of regions.
pub(super) struct Attach;

impl Dialect for Attach {
    fn has(&self, first: u8) -> bool {
        first == b'{'
    }

    fn parse(&self, bytes: &[u8]) -> Result<Said, ServeError> {
        let mut values = serde_json::Deserializer::from_slice(bytes).into_iter::<Request>();
        let request = match values.next() {
            None => return Ok(Said::Part),
            Some(Err(error)) if error.is_eof() => return Ok(Said::Part),
            Some(Err(error)) => return Err(ServeError::NotARequest(error.to_string())),
            Some(Ok(request)) => request,
        };
        let rest = &bytes[values.byte_offset()..];
        if rest.trim_ascii().is_empty() {
            return Ok(Said::Asks(request));
        }
        Ok(match firecracker::regions(rest)? {
            None => Said::Part,
            Some(regions) => Said::Memory(Memory { regions, request: Some(request) }),
        })
    }

    fn descriptors(&self) -> usize {
        2
    }

    fn ends_with_stream(&self) -> bool {
        true
    }

    fn reply(
        &self,
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
}
