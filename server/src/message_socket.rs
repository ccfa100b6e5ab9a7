//! Messages between two processes of one host, each with up to 20 descriptors: [`MessageSocket`]. A
//! message is received as a whole or not at all, and the end of the other side is reported: a receive
//! returns the end, a send fails and raises no signal. So neither of two processes waits for one that has
//! died.
//!
//! Units: lengths are bytes. Source: unix(7), "SCM_RIGHTS" and "SOCK_SEQPACKET".

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::{AddressFamily, SocketFlags, SocketType};
use uzone_os::peer::{self, ReturnFlags};

/// One end of a connection that carries whole messages.
#[derive(Debug)]
pub(crate) struct MessageSocket(OwnedFd);

/// A message that came.
#[derive(Debug)]
pub(crate) struct Message {
    /// The number of bytes that it has: never zero.
    pub(crate) bytes: usize,
    /// The descriptors that came with it, which are closed when a program is started.
    pub(crate) fds: Vec<OwnedFd>,
    /// Whether descriptors came that this process did not get, as it has as many as it may or they were more than 20:
    /// all of them are closed.
    pub(crate) lacks_fds: bool,
}

impl MessageSocket {
    /// Makes two ends that are connected with each other, and closed when a program is started. A
    /// child gets one by its standard input.
    ///
    /// # Errors
    /// The error of socketpair(2): the process has as many descriptors as it may.
    pub(crate) fn pair() -> io::Result<(Self, Self)> {
        let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
        let (one, other) = rustix::net::socketpair(family, kind, SocketFlags::CLOEXEC, None)?;
        Ok((Self(one), Self(other)))
    }

    /// Takes a descriptor that another process made one end of.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] if it carries no whole messages, and the error of the kernel if it
    /// is no socket.
    pub(crate) fn from_fd(fd: OwnedFd) -> io::Result<Self> {
        match rustix::net::sockopt::socket_type(&fd)? {
            SocketType::SEQPACKET => Ok(Self(fd)),
            _ => Err(io::ErrorKind::InvalidInput.into()),
        }
    }

    /// Returns the descriptor.
    pub(crate) fn into_fd(self) -> OwnedFd {
        self.0
    }

    /// Sends one message, and descriptors with it. It waits while the other side is far behind.
    ///
    /// # Errors
    /// [`io::ErrorKind::BrokenPipe`] if the other side has ended; [`io::ErrorKind::InvalidInput`] for no
    /// byte, which would look like an end, and for more than 20 descriptors; otherwise the error of
    /// sendmsg(2).
    pub(crate) fn send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        match peer::send(&self.0, bytes, fds) {
            Ok(_) => Ok(()), // all of it: the kernel does not cut such a message
            Err(cause) if cause.kind() == io::ErrorKind::ConnectionReset => {
                Err(io::ErrorKind::BrokenPipe.into())
            }
            Err(cause) => Err(cause),
        }
    }

    /// Waits for one message and puts it into `buffer`. `None` if the other side has ended, and everything that it had
    /// sent was received.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidData`] if the message is longer than the buffer (it is lost then, and its descriptors are
    /// closed); otherwise the error of recvmsg(2).
    pub(crate) fn receive(&self, buffer: &mut [u8]) -> io::Result<Option<Message>> {
        let mut fds = Vec::new();
        let (bytes, flags) = loop {
            match peer::receive_message(&self.0, buffer, &mut fds) {
                // Reported once, and before the messages of the other side.
                Err(cause) if cause.kind() == io::ErrorKind::ConnectionReset => {}
                received => break received?,
            }
        };
        if flags.contains(ReturnFlags::TRUNC) {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let lacks_fds = flags.contains(ReturnFlags::CTRUNC);
        if lacks_fds {
            // A part of them is of no use.
            fds.clear();
        }
        Ok((bytes != 0).then_some(Message { bytes, fds, lacks_fds }))
    }
}

impl AsFd for MessageSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Read;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn messages_stay_whole_and_a_descriptor_comes_with_its_own() {
        let (one, other) = MessageSocket::pair().unwrap();
        let (mut reader, writer) = io::pipe().unwrap();
        one.send(b"first", &[]).unwrap();
        one.send(b"second", &[writer.as_fd()]).unwrap();
        drop(writer);
        let mut buffer = [0; 16];
        let Message { bytes, fds, .. } = other.receive(&mut buffer).unwrap().unwrap();
        assert_eq!((&buffer[..bytes], fds.is_empty()), (&b"first"[..], true));
        let Message { bytes, fds, .. } = other.receive(&mut buffer).unwrap().unwrap();
        assert_eq!(&buffer[..bytes], b"second");
        // It is the same pipe: its reader sees the end only when this one is closed.
        let fd = fds.into_iter().next().unwrap();
        assert!(rustix::io::fcntl_getfd(&fd).unwrap().contains(rustix::io::FdFlags::CLOEXEC));
        rustix::io::write(&fd, b"x").unwrap();
        drop(fd);
        let mut read = Vec::new();
        reader.read_to_end(&mut read).unwrap();
        assert_eq!(read, b"x");
    }

    #[test]
    fn an_end_is_seen_after_the_last_message_and_sending_to_a_closed_socket_is_an_error() {
        let (one, other) = MessageSocket::pair().unwrap();
        one.send(b"last", &[]).unwrap();
        // An unreceived message is closed with the socket, without a report.
        other.send(b"unread", &[other.as_fd(); 3]).unwrap();
        drop(one);
        let mut buffer = [0; 16];
        assert_eq!(other.send(b"x", &[]).unwrap_err().kind(), io::ErrorKind::BrokenPipe);
        let mut received = Vec::new();
        while let Some(Message { bytes, .. }) = other.receive(&mut buffer).unwrap() {
            received.push(buffer[..bytes].to_vec());
        }
        assert_eq!(received, [b"last"]);
        // The same without a send in between.
        let (one, other) = MessageSocket::pair().unwrap();
        one.send(b"last", &[]).unwrap();
        other.send(b"unread", &[]).unwrap();
        drop(one);
        assert_eq!(other.receive(&mut buffer).unwrap().unwrap().bytes, 4);
        assert!(other.receive(&mut buffer).unwrap().is_none());
    }

    #[test]
    fn what_is_too_long_too_short_or_no_such_socket_is_refused() {
        let (one, other) = MessageSocket::pair().unwrap();
        assert_eq!(one.send(b"", &[]).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        one.send(b"longer", &[one.as_fd()]).unwrap();
        assert_eq!(
            one.send(b"many", &[one.as_fd(); 21]).unwrap_err().kind(),
            io::ErrorKind::InvalidInput
        );
        let cut = other.receive(&mut [0; 3]).unwrap_err();
        assert_eq!(cut.kind(), io::ErrorKind::InvalidData);
        one.send(b"next", &[]).unwrap();
        assert_eq!(other.receive(&mut [0; 8]).unwrap().unwrap().bytes, 4);
        assert!(MessageSocket::from_fd(one.into_fd()).is_ok());
        assert!(MessageSocket::from_fd(File::open("/dev/null").unwrap().into()).is_err());
        let (stream, _) = UnixStream::pair().unwrap();
        assert!(MessageSocket::from_fd(stream.into()).is_err());
    }
}
