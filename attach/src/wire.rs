//! A connection to a page server: [`Wire`], lines of JSON and descriptors.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use serde::Serialize;
use uzone_os::peer;

use crate::protocol::Reply;

/// How long a reply may be.
const LINE: usize = 64 << 10;

#[derive(Debug)]
pub(crate) struct Wire {
    pub(crate) stream: UnixStream,
    bytes: Vec<u8>,
    fds: VecDeque<OwnedFd>,
}

impl Wire {
    pub(crate) fn connect(path: &Path, timeout: Duration) -> io::Result<Self> {
        let stream = UnixStream::connect(path)?;
        stream.set_read_timeout(Some(timeout))?;
        stream.set_write_timeout(Some(timeout))?;
        Ok(Self { stream, bytes: Vec::new(), fds: VecDeque::new() })
    }

    pub(crate) fn send(&self, message: &impl Serialize, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let mut line = serde_json::to_vec(message)?;
        line.push(b'\n');
        let (mut left, mut fds) = (&line[..], fds);
        while !left.is_empty() {
            left = &left[peer::send(&self.stream, left, fds)?..];
            fds = &[];
        }
        Ok(())
    }

    /// Returns the next reply that came whole, and the descriptor that belongs to it.
    fn next_line(&mut self) -> io::Result<Option<(Reply, Option<OwnedFd>)>> {
        let Some(end) = self.bytes.iter().position(|byte| *byte == b'\n') else {
            let is_too_long = self.bytes.len() > LINE;
            return if is_too_long { Err(io::ErrorKind::InvalidData.into()) } else { Ok(None) };
        };
        let line: Vec<u8> = self.bytes.drain(..=end).collect();
        let reply = serde_json::from_slice(&line)?;
        let has_descriptor = matches!(reply, Reply::Served | Reply::Image { shares: true, .. });
        let fd = if has_descriptor { self.fds.pop_front() } else { None };
        if has_descriptor && fd.is_none() {
            return Err(io::ErrorKind::InvalidData.into());
        }
        Ok(Some((reply, fd)))
    }

    /// Waits for a reply.
    ///
    /// # Errors
    /// [`io::ErrorKind::UnexpectedEof`] at the end of the stream, [`io::ErrorKind::InvalidData`] for bytes that are
    /// no reply, and [`io::ErrorKind::WouldBlock`] if none came in time.
    pub(crate) fn receive(&mut self) -> io::Result<(Reply, Option<OwnedFd>)> {
        loop {
            if let Some(reply) = self.next_line()? {
                return Ok(reply);
            }
            let (mut part, mut fds) = ([0; 4096], Vec::new());
            let len = peer::receive(&self.stream, &mut part, &mut fds)?;
            self.fds.extend(fds);
            if len == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            self.bytes.extend_from_slice(&part[..len]);
        }
    }
}
