//! The messages of a keeper and its worker, over a socket of whole messages: [`Order`] one way, [`Report`] the other. The
//! worker asks for each order, so the keeper never waits for it.
//!
//! Each message starts with a line of JSON, and descriptors come along. The messages between a keeper or a worker and its
//! clients have the same form.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::thread;
use std::time::Duration;

use crate::descriptors::is_shortage;
use crate::message_socket::{Message, MessageSocket};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use uzone_os::uffd::EventSet;

use crate::event::ServeEvent;
use crate::machine::{Offer, TAKEN_BYTES};
use crate::metrics::Totals;
use crate::sandbox::Sandbox;
use crate::status::SessionStats;

/// The longest part of a message beside the bytes of a monitor.
const OTHER_BYTES: usize = 32 << 10;
/// The number of attempts to send a message where the system lacks something, and the pause between two.
const SHORTAGES: u32 = 300;
pub(crate) const SHORTAGE: Duration = Duration::from_millis(10);
/// The most blocks of a report, and the most sessions.
pub(crate) const BLOCKS: usize = 16;
pub(crate) const SESSIONS: usize = 32;

/// A message of the keeper.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Order {
    /// Before all else: the names of the files that come along, by which the worker opens the image, or none if it opens
    /// the image by its name; and whether VMs wait for it.
    Start { names: Vec<String>, has_machines: bool },
    /// A client, whose message may not be whole yet.
    Serve(Offer),
    /// The worker reports its counts before it asks for more.
    Stats,
    /// A client that reads the memory of a session asks by the socket that comes along; so does the count of the pending
    /// faults of the session.
    Capture(u64),
}

/// A message of the worker.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Report {
    /// Before all else: the identity of the image, its path, the names of its files, which come along, and how the worker
    /// is confined.
    Opened { image: String, path: String, names: Vec<String>, sandbox: Sandbox },
    /// The worker takes an order. It did not serve the VM of `no_room`, as there is no room for its log.
    Ready { no_room: Option<u64> },
    /// The log of a program, before the first event of its memory is read.
    Log(u64),
    /// The totals of the worker so far, and the counts of some sessions.
    Stats { totals: Totals, sessions: Vec<(u64, SessionStats)> },
    /// The addresses of blocks of a session of which huge pages can be made.
    Blocks(u64, Vec<u64>),
    /// An event for the log. The keeper fills in whether a process was killed.
    Event(ServeEvent),
}

/// A request of a client that reads the memory of a session, to the worker.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum CaptureRequest {
    /// Protect the memory, and keep pages before they change: the memory and the file for them come along.
    Protect,
    /// The bytes of the image before this one have been read.
    Read(u64),
    /// All has been read.
    End,
}

/// An answer of the worker.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum CaptureReply {
    /// The memory is protected, or the reason why it is not.
    Begun(Result<(), String>),
    /// The VM waits for the end.
    Hurry,
    /// The number of pages that were kept, or the reason why the capture is lost.
    Ended(Result<u64, String>),
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

/// Returns the line of JSON that bytes start with, and the bytes behind it.
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
    use crate::machine::{MESSAGE_BYTES, Machine};

    #[test]
    fn the_longest_message_and_the_most_descriptors_come_over_whole() {
        let (keeper, worker) = MessageSocket::pair().unwrap();
        let (near, far) = UnixStream::pair().unwrap();
        near.set_nonblocking(true).unwrap();
        let peer = Peer::of(&near).unwrap();
        let pid = peer.pid();
        let mut machine = Machine::new(near, peer);
        let writes = thread::scope(|scope| {
            let writer = scope.spawn(|| {
                let mut left = &vec![b'\n'; 2 * MESSAGE_BYTES][..];
                while let Ok(sent) = peer::send(&far, left, &[far.as_fd(); 4]) {
                    left = &left[sent..];
                }
                left.len()
            });
            while !machine.is_ended {
                machine.read();
            }
            // So that the writer ends.
            machine.stream.shutdown(std::net::Shutdown::Both).unwrap();
            writer.join().unwrap()
        });
        assert!(writes < 2 * MESSAGE_BYTES);
        let next = || receive::<Order>(&worker).unwrap();
        let take = |order: Titled<Order>| {
            let Order::Serve(offer) = order.title else { panic!("{order:?}") };
            (offer.session, Machine::of_offer(offer, order.fds, order.bytes).unwrap())
        };
        let hand_over = |number, machine: &Machine| {
            let (title, fds) = (Order::Serve(machine.offer(number)), machine.descriptors());
            send_with(&keeper, &title, &fds, &machine.bytes).unwrap();
        };
        hand_over(u64::MAX, &machine);
        let (session, came) = take(next());
        assert_eq!((session, came.peer.pid(), came.log.is_none()), (u64::MAX, pid, true));
        assert_eq!(came.bytes, machine.bytes[..machine.bytes.len().min(TAKEN_BYTES)]);
        assert_eq!(came.count_descriptors(), machine.count_descriptors());
        machine.log = Some(far.as_fd().try_clone_to_owned().unwrap());
        hand_over(1, &machine);
        let (_, came) = take(next());
        assert!(came.log.is_some() && came.count_descriptors() == machine.count_descriptors());
        send(&keeper, &Order::Stats, &[]).unwrap();
        assert!(matches!(next().title, Order::Stats));
        let names = ["a", "b"].map(str::to_owned).to_vec();
        let start = Order::Start { names: names.clone(), has_machines: true };
        send(&keeper, &start, &[far.as_fd(); 2]).unwrap();
        let came = next();
        let Order::Start { names: of_files, has_machines: true } = came.title else { panic!() };
        assert!(of_files == names && came.fds.len() == 2);
        send(&worker, &Report::Log(7), &[far.as_fd()]).unwrap();
        let came = receive(&keeper).unwrap();
        assert!(matches!(came.title, Report::Log(7)) && came.fds.len() == 1, "{came:?}");
        worker.send(b"{\"Log\":\n", &[]).unwrap();
        let cut = receive::<Report>(&keeper).unwrap_err();
        assert_eq!(cut.kind(), io::ErrorKind::InvalidData, "{cut}");
        drop(worker);
        let ended = receive::<Report>(&keeper).unwrap_err();
        assert_eq!(ended.kind(), io::ErrorKind::UnexpectedEof);
    }
}
