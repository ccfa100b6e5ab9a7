//! What the demo and the process that touches its image say to each other.
//!
//! One message each way at a time, but for [`Reply::Progress`] and [`Reply::Hashed`], of which there are
//! many before the last of a request. A descriptor travels with [`Request::Map`] (the image, where the
//! kernel is to map it) and with [`Reply::Mapped`] (the userfaultfd, where it is not).

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use uzone_os::MessageSocket;

/// How much is hashed at once, so that a difference has a place.
pub(super) const CHUNK: u64 = 4 << 20;

/// No message is longer.
const LONGEST: usize = 4096;

/// What the demo asks for.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) enum Request {
    /// Map so much memory: of the image that comes with this, or lazily if none does.
    Map { len_bytes: u64 },
    /// Touch all pages of it, each once: in order up to `in_order_bytes`, then here and there. Read all
    /// bytes afterwards if `is_hashed`, and unmap it.
    Touch { in_order_bytes: u64, is_hashed: bool },
}

/// What the other process answers.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum Reply {
    /// The memory starts there.
    Mapped { start: u64 },
    /// So many pages were touched.
    Progress { pages: u64 },
    /// All pages were touched.
    Touched(Touched),
    /// The hash of the bytes from `offset` on.
    Hashed { offset: u64, hash: String },
    /// The hash of all bytes.
    Whole { hash: String, elapsed_ns: u64 },
    /// It cannot go on, and ends.
    Failed { error: String },
}

/// What came of touching.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Touched {
    /// How long it took to touch the first part in order.
    pub(super) in_order_ns: u64,
    /// How long the rest took, here and there.
    pub(super) scattered_ns: u64,
    /// How many page faults of the thread the kernel counted.
    pub(super) kernel_faults: u64,
    /// The first page that was not the one it should be.
    pub(super) wrong_page: Option<u64>,
}

/// Sends a message.
pub(super) fn send(
    socket: &MessageSocket,
    message: &impl Serialize,
    fd: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    let bytes = serde_json::to_vec(message)?;
    socket.send(&bytes, fd)
}

/// Waits for a message; `None` if the other side has ended.
pub(super) fn receive<T: DeserializeOwned>(
    socket: &MessageSocket,
) -> io::Result<Option<(T, Option<OwnedFd>)>> {
    let mut buffer = [0; LONGEST];
    let Some(message) = socket.receive(&mut buffer)? else { return Ok(None) };
    Ok(Some((serde_json::from_slice(&buffer[..message.len])?, message.fd)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_arrives_as_it_was_and_one_that_is_none_is_an_error() {
        let (one, other) = MessageSocket::pair().unwrap();
        let touched = Touched { in_order_ns: 5, wrong_page: Some(7), ..Touched::default() };
        send(&one, &Reply::Touched(touched), None).unwrap();
        let (reply, fd) = receive::<Reply>(&other).unwrap().unwrap();
        assert!(matches!(reply, Reply::Touched(seen) if seen == touched) && fd.is_none());
        one.send(b"{", None).unwrap();
        assert!(receive::<Reply>(&other).is_err());
        drop(one);
        assert!(receive::<Reply>(&other).unwrap().is_none());
    }
}
