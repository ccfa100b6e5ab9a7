//! What a keeper and its worker send each other over a socket of whole messages: [`Order`] one way,
//! [`Report`] the other. The worker asks for each connection, so the keeper never waits for it.
//!
//! Each message starts with a line of JSON, and descriptors come along. So do those of two keepers, and of a keeper or a
//! worker and its clients.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use uzone_os::descriptors::is_shortage;
use uzone_os::uffd::EventSet;
use uzone_os::unix_socket::{Message, MessageSocket};

use crate::connection::{Kept, TAKEN_BYTES};
use crate::event::ServeEvent;
use crate::sandbox::Sandbox;
use crate::status::SessionStats;
use crate::totals::Totals;

/// How long the parts of a message beside those of a monitor may be.
const OTHER_BYTES: usize = 4096;
/// How often a message is sent again where the system lacks something, and after how long.
const SHORTAGES: u32 = 300;
pub(crate) const SHORTAGE: Duration = Duration::from_millis(10);
/// How many blocks a report has at most.
pub(crate) const BLOCKS: usize = 16;

/// What the keeper sends.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Order {
    /// How a worker starts, before all else: the names of the files that come along, by which it opens the image, or none
    /// if it opens what is there by their names; and whether machines wait for it.
    Start { names: Vec<String>, has_machines: bool },
    /// What the next keeper needs, should this one die: which descriptors come along, and where the folder is with what
    /// is kept of machines ([`Heirlooms`](crate::keeper::estate::Heirlooms)).
    Keep { has: [bool; 4], folder: Option<PathBuf>, totals: Totals },
    /// A connection, whose message may not be whole yet.
    Take(Kept),
    /// It reports the counts of each session before it asks for more.
    Stats,
    /// Whether the keeper has the log of the session that is about to be read.
    Log { is_kept: bool },
    /// A client may ask by a socket that the pages of a session are kept before they change. That comes along, and the
    /// count of the pending faults of the session.
    Capture(u64),
}

/// What the worker sends.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Report {
    /// Which image it serves, before all else: what tells it from others, where it is, and the names of its files, which
    /// come along; and how it is confined.
    Opened { image: String, path: String, names: Vec<String>, sandbox: Sandbox },
    /// It can take a connection.
    Next,
    /// It is about to read the events of a session; what it reads is in the log that comes along.
    Reading(u64),
    /// A connection was a probe of whether there is a server.
    Probe(u64),
    /// What was done for a session so far.
    Stats(u64, SessionStats),
    /// The worker's totals for all sessions so far.
    Totals(Totals),
    /// The addresses of blocks of a session of which huge pages can be made.
    Blocks(u64, Vec<u64>),
    /// Something happened. Of a failure, whether the process was killed is for the keeper to fill in.
    Event(ServeEvent),
}

/// What a client asks a worker for that reads the memory of a session, by the socket that its keeper passed on.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum CaptureRequest {
    /// Protect the memory, and keep pages before they change: the memory and the file for them come along.
    Protect,
    /// What is before this byte of the image has been read.
    Read(u64),
    /// All has been read.
    End,
}

/// What a worker answers it.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum CaptureReply {
    Protected,
    Refused {
        reason: String,
    },
    /// The machine waits for the end.
    Hurry,
    Ended {
        kept_pages: u64,
        lost: Option<String>,
    },
}

/// Sends a message. One without descriptors is sent again for a while where the system lacks something.
pub(crate) fn send(
    socket: &MessageSocket,
    title: &impl Serialize,
    fds: &[BorrowedFd<'_>],
) -> io::Result<()> {
    if fds.is_empty() {
        send_patiently(socket, title, fds)
    } else {
        send_with(socket, title, fds, &[])
    }
}

/// Sends a message, again for a while where the system lacks something: other processes of this user may have as many
/// descriptors on their way as there may be, for a moment.
pub(crate) fn send_patiently(
    socket: &MessageSocket,
    title: &impl Serialize,
    fds: &[BorrowedFd<'_>],
) -> io::Result<()> {
    for _ in 0..SHORTAGES {
        match send_with(socket, title, fds, &[]) {
            Err(cause) if is_shortage(&cause) => thread::sleep(SHORTAGE),
            sent => return sent,
        }
    }
    send_with(socket, title, fds, &[])
}

/// Sends a message with the bytes of a monitor's.
pub(crate) fn send_with(
    socket: &MessageSocket,
    title: &impl Serialize,
    fds: &[BorrowedFd<'_>],
    bytes: &[u8],
) -> io::Result<()> {
    socket.send(&titled(title, bytes)?, fds)
}

/// Returns bytes that start with a line of JSON.
pub(crate) fn titled(title: &impl Serialize, bytes: &[u8]) -> io::Result<Vec<u8>> {
    let mut message = serde_json::to_vec(title)?;
    message.push(b'\n');
    message.extend_from_slice(&bytes[..bytes.len().min(TAKEN_BYTES)]);
    Ok(message)
}

/// Returns the line of JSON that bytes start with, and what follows.
pub(crate) fn parse_titled<T: DeserializeOwned>(bytes: &[u8]) -> io::Result<(T, &[u8])> {
    let line = bytes.iter().position(|byte| *byte == b'\n').ok_or(io::ErrorKind::InvalidData)?;
    let title = serde_json::from_slice(&bytes[..line]);
    // A line that is cut off would be the end of the other side otherwise.
    let title = title.map_err(|cause| io::Error::new(io::ErrorKind::InvalidData, cause))?;
    Ok((title, &bytes[line + 1..]))
}

/// A message that came.
#[derive(Debug)]
pub(crate) struct Titled<T> {
    pub(crate) title: T,
    pub(crate) fds: Vec<OwnedFd>,
    pub(crate) bytes: Vec<u8>,
    /// Whether this process had no room for the descriptors that came along.
    pub(crate) lacks_fds: bool,
}

/// Waits for a message. The error is [`io::ErrorKind::UnexpectedEof`] if the other side has ended,
/// [`io::ErrorKind::InvalidData`] if the message is malformed, and `EMFILE` if it lacks its descriptors.
pub(crate) fn receive<T: DeserializeOwned>(socket: &MessageSocket) -> io::Result<Titled<T>> {
    let message = receive_any(socket)?;
    if message.lacks_fds {
        return Err(io::Error::from_raw_os_error(libc::EMFILE));
    }
    Ok(message)
}

/// Waits for a message as [`receive`] does, also for one that lacks its descriptors: the other side waits for an answer.
pub(crate) fn receive_any<T: DeserializeOwned>(socket: &MessageSocket) -> io::Result<Titled<T>> {
    let mut room = vec![0; TAKEN_BYTES + OTHER_BYTES];
    let Message { bytes, fds, lacks_fds } =
        socket.receive(&mut room)?.ok_or(io::ErrorKind::UnexpectedEof)?;
    let (title, bytes) = parse_titled(&room[..bytes])?;
    Ok(Titled { title, fds, bytes: bytes.to_vec(), lacks_fds })
}

/// Waits for a message for a time; as [`receive`], and [`io::ErrorKind::TimedOut`] if none came.
pub(crate) fn receive_within<T: DeserializeOwned>(
    socket: &MessageSocket,
    patience: Duration,
) -> io::Result<Titled<T>> {
    let (set, mut ready) = (EventSet::new()?, Vec::new());
    set.add(socket, 0)?;
    set.wait(&mut ready, Some(patience))?;
    if ready.is_empty() {
        return Err(io::ErrorKind::TimedOut.into());
    }
    receive(socket)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use uzone_os::peer::{self, Peer};

    use super::*;
    use crate::connection::{Connection, MESSAGE_BYTES};
    use crate::keeper::estate::Heirlooms;

    #[test]
    fn the_longest_message_and_the_most_descriptors_come_over_whole() {
        let (keeper, worker) = MessageSocket::pair().unwrap();
        let (near, far) = UnixStream::pair().unwrap();
        near.set_nonblocking(true).unwrap();
        let peer = Peer::of(&near).unwrap();
        let pid = peer.pid();
        let mut connection = Connection::new(near, peer);
        let writes = thread::scope(|scope| {
            let writer = scope.spawn(|| {
                let mut left = &vec![b'\n'; 2 * MESSAGE_BYTES][..];
                while let Ok(sent) = peer::send(&far, left, &[far.as_fd(); 4]) {
                    left = &left[sent..];
                }
                left.len()
            });
            while !connection.known.is_ended {
                connection.read();
            }
            // So that the writer ends.
            connection.stream.shutdown(std::net::Shutdown::Both).unwrap();
            writer.join().unwrap()
        });
        assert!(writes < 2 * MESSAGE_BYTES);
        let next = || receive::<Order>(&worker).unwrap();
        let take = |order: Titled<Order>| {
            let Order::Take(kept) = order.title else { panic!("{order:?}") };
            Connection::from_kept(&kept, order.fds, order.bytes).unwrap()
        };
        let hand_over = |number, connection: &Connection| {
            let (title, fds) = (Order::Take(connection.kept(number)), connection.descriptors());
            send_with(&keeper, &title, &fds, &connection.bytes).unwrap();
        };
        hand_over(u64::MAX, &connection);
        let (session, came) = take(next());
        assert_eq!((session, came.peer.pid(), came.log.is_none()), (u64::MAX, pid, true));
        assert_eq!(came.bytes, connection.bytes[..connection.bytes.len().min(TAKEN_BYTES)]);
        assert_eq!(came.count_descriptors(), connection.count_descriptors());
        connection.log = Some(far.as_fd().try_clone_to_owned().unwrap());
        hand_over(1, &connection);
        let (_, came) = take(next());
        assert!(came.log.is_some() && came.count_descriptors() == connection.count_descriptors());
        send(&keeper, &Order::Stats, &[]).unwrap();
        assert!(matches!(next().title, Order::Stats));
        let totals = Totals::default();
        let fds = [None, None, None, Some(far.as_fd())];
        Heirlooms::hand_over(&keeper, fds, None, totals).unwrap();
        let heirlooms = Heirlooms::take(next()).unwrap();
        assert!(heirlooms.manager.is_some() && heirlooms.socket.is_none());
        let names = ["a", "b"].map(str::to_owned).to_vec();
        let start = Order::Start { names: names.clone(), has_machines: true };
        send(&keeper, &start, &[far.as_fd(); 2]).unwrap();
        let came = next();
        let Order::Start { names: of_files, has_machines: true } = came.title else { panic!() };
        assert!(of_files == names && came.fds.len() == 2);
        send(&worker, &Report::Reading(7), &[far.as_fd()]).unwrap();
        let came = receive(&keeper).unwrap();
        assert!(matches!(came.title, Report::Reading(7)) && came.fds.len() == 1, "{came:?}");
        worker.send(b"{\"Reading\":\n", &[]).unwrap();
        let cut = receive::<Report>(&keeper).unwrap_err();
        assert_eq!(cut.kind(), io::ErrorKind::InvalidData, "{cut}");
        drop(worker);
        let ended = receive::<Report>(&keeper).unwrap_err();
        assert_eq!(ended.kind(), io::ErrorKind::UnexpectedEof);
    }
}
