//! What a keeper and its worker send each other over a socket of whole messages: [`Order`] one way,
//! [`Report`] the other. The worker asks for each connection, so the keeper never waits for it.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use uzone_os::MessageSocket;
use uzone_os::uffd::PendingFaults;

use crate::connection::{Connection, Kept, TAKEN_BYTES};
use crate::event::ServeEvent;
use crate::keeper::held_folder::HeldFolder;
use crate::sandbox::Sandbox;
use crate::status::SessionStats;

/// How long the parts of a message beside those of a monitor may be.
const OTHER_BYTES: usize = 4096;
/// How many blocks a report has at most.
pub(crate) const BLOCKS: usize = 16;

/// What starts each message of the keeper.
#[derive(Debug, Serialize, Deserialize)]
enum Title {
    Socket(HeirloomKinds),
    Connection(Kept),
    Stats,
    LogIsKept,
    Capture(u64),
}

/// Which descriptors come along.
#[derive(Debug, Serialize, Deserialize)]
struct HeirloomKinds {
    has_socket: bool,
    has_control: bool,
    has_metrics: bool,
    has_manager: bool,
    /// Where the folder is with what is kept of machines.
    folder: Option<PathBuf>,
}

/// What the next keeper needs: a worker could not make it.
#[derive(Debug)]
pub(crate) struct Heirlooms {
    /// The socket that monitors connect to, unless no more are accepted.
    pub(crate) socket: Option<OwnedFd>,
    /// That of questions, and the one of metrics.
    pub(crate) control: Option<OwnedFd>,
    pub(crate) metrics: Option<OwnedFd>,
    /// The socket to the service manager.
    pub(crate) manager: Option<OwnedFd>,
    /// The folder with what is kept of machines.
    pub(crate) folder: Option<HeldFolder>,
}

impl Heirlooms {
    fn from_fds(kinds: &HeirloomKinds, fds: Vec<OwnedFd>) -> Option<Self> {
        let mut fds = fds.into_iter();
        let mut next = |is_there: bool| if is_there { fds.next().map(Some) } else { Some(None) };
        let socket = next(kinds.has_socket)?;
        let (control, metrics) = (next(kinds.has_control)?, next(kinds.has_metrics)?);
        let (manager, lock) = (next(kinds.has_manager)?, next(kinds.folder.is_some())?);
        let folder = kinds.folder.clone().zip(lock).map(|(path, lock)| HeldFolder::of(path, lock));
        Some(Self { socket, control, metrics, manager, folder })
    }
}

/// What the worker receives.
#[derive(Debug)]
pub(crate) enum Order {
    /// What the next keeper needs, should this one die.
    Keep(Heirlooms),
    /// A connection with its number, whose message may not be whole yet.
    Take(u64, Box<Connection>),
    /// It reports the counts of each session before it asks for more.
    Stats,
    /// The keeper has the log of the session that is about to be read.
    LogIsKept,
    /// A client may ask by a socket that the pages of a session are kept before they change. The count of
    /// its pending faults comes along.
    Capture(u64, MessageSocket, PendingFaults),
}

/// What the worker sends.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Report {
    /// Which image it serves, before all else: what tells it from others, where it is, and the names of its files,
    /// which come along.
    Image(String, String, Vec<String>),
    /// How it is confined.
    Sandbox(Sandbox),
    /// It can take a connection.
    Next,
    /// It is about to read the events of a session; what it reads is in the log that comes along.
    Reading(u64),
    /// A connection was a probe of whether there is a server.
    Probe(u64),
    /// What was done for a session so far.
    Stats(u64, SessionStats),
    /// The addresses of blocks of a session of which huge pages can be made.
    Blocks(u64, Vec<u64>),
    /// Something happened. Of a failure, whether the process was killed is for the keeper to fill in.
    Event(ServeEvent),
}

/// Sends a message that starts with a line of JSON.
pub(crate) fn send_titled(
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
    Ok((serde_json::from_slice(&bytes[..line])?, &bytes[line + 1..]))
}

/// A message that starts with a line of JSON.
#[derive(Debug)]
pub(crate) struct Titled<T> {
    pub(crate) title: T,
    pub(crate) fds: Vec<OwnedFd>,
    pub(crate) bytes: Vec<u8>,
}

/// Waits for a message that starts with a line of JSON. `None` if the other side has ended.
pub(crate) fn receive_titled<T: DeserializeOwned>(
    socket: &MessageSocket,
    room: &mut [u8],
) -> io::Result<Option<Titled<T>>> {
    let Some((len, fds)) = socket.receive(room)? else { return Ok(None) };
    let (title, bytes) = parse_titled(&room[..len])?;
    Ok(Some(Titled { title, fds, bytes: bytes.to_vec() }))
}

/// Hands a connection over.
pub(crate) fn hand_over(
    socket: &MessageSocket,
    session: u64,
    connection: &Connection,
) -> io::Result<()> {
    let (title, fds) = (Title::Connection(connection.kept(session)), connection.descriptors());
    send_titled(socket, &title, &fds, &connection.bytes)
}

/// Hands over what the next keeper needs.
pub(crate) fn hand_heirlooms_over(
    socket: &MessageSocket,
    listener: Option<BorrowedFd<'_>>,
    (control, metrics): (Option<BorrowedFd<'_>>, Option<BorrowedFd<'_>>),
    manager: Option<BorrowedFd<'_>>,
    folder: Option<&HeldFolder>,
) -> io::Result<()> {
    let kinds = HeirloomKinds {
        has_socket: listener.is_some(),
        has_control: control.is_some(),
        has_metrics: metrics.is_some(),
        has_manager: manager.is_some(),
        folder: folder.map(|folder| folder.path.clone()),
    };
    let lock = folder.map(AsFd::as_fd);
    let fds: Vec<_> = [listener, control, metrics, manager, lock].into_iter().flatten().collect();
    send_titled(socket, &Title::Socket(kinds), &fds, &[])
}

/// Asks for the counts of each session.
pub(crate) fn ask_for_stats(socket: &MessageSocket) -> io::Result<()> {
    send_titled(socket, &Title::Stats, &[], &[])
}

/// States that the log that came with a report is kept.
pub(crate) fn log_is_kept(socket: &MessageSocket) -> io::Result<()> {
    send_titled(socket, &Title::LogIsKept, &[], &[])
}

/// Passes a client on that reads the memory of a session.
pub(crate) fn pass_on(
    socket: &MessageSocket,
    session: u64,
    client: &MessageSocket,
    pending: &PendingFaults,
) -> io::Result<()> {
    send_titled(socket, &Title::Capture(session), &[client.as_fd(), pending.as_fd()], &[])
}

/// Sends a report, and what comes along.
pub(crate) fn report(
    socket: &MessageSocket,
    report: &Report,
    fds: &[BorrowedFd<'_>],
) -> io::Result<()> {
    send_titled(socket, report, fds, &[])
}

/// How a worker starts, but for the files that come along.
#[derive(Debug, Serialize, Deserialize)]
struct Starts {
    names: Vec<String>,
    has_machines: bool,
}

/// Hands the files over that a worker opens the image by; none if it opens what is there by their names. It is the
/// first message to a worker.
pub(crate) fn hand_files_over(
    socket: &MessageSocket,
    files: &[(String, File)],
    has_machines: bool,
) -> io::Result<()> {
    let names = files.iter().map(|(name, _)| name.clone()).collect();
    let fds: Vec<_> = files.iter().map(|(_, file)| file.as_fd()).collect();
    send_titled(socket, &Starts { names, has_machines }, &fds, &[])
}

/// Waits for the files that the keeper hands over, and whether machines wait for the worker.
pub(crate) fn receive_files(
    socket: &MessageSocket,
    room: &mut [u8],
) -> io::Result<(Vec<(String, File)>, bool)> {
    let message = receive_titled::<Starts>(socket, room)?;
    let Titled { title, fds, .. } = message.ok_or(io::ErrorKind::UnexpectedEof)?;
    let files = title.names.into_iter().zip(fds.into_iter().map(File::from));
    Ok((files.collect(), title.has_machines))
}

/// Room for a message of either side.
pub(crate) fn room() -> Vec<u8> {
    vec![0; TAKEN_BYTES + OTHER_BYTES]
}

/// Waits for an order. `None` if the keeper has ended.
pub(crate) fn receive(socket: &MessageSocket, room: &mut [u8]) -> io::Result<Option<Order>> {
    let Some(Titled { title, fds, bytes }) = receive_titled(socket, room)? else {
        return Ok(None);
    };
    let order = match title {
        Title::Stats => Some(Order::Stats),
        Title::LogIsKept => Some(Order::LogIsKept),
        Title::Socket(kinds) => Heirlooms::from_fds(&kinds, fds).map(Order::Keep),
        Title::Capture(session) => {
            let mut fds = fds.into_iter();
            fds.next().zip(fds.next()).and_then(|(client, pending)| {
                let client = MessageSocket::from_fd(client).ok()?;
                Some(Order::Capture(session, client, pending.into()))
            })
        }
        Title::Connection(kept) => Connection::from_kept(&kept, fds, bytes)
            .map(|(session, connection)| Order::Take(session, Box::new(connection))),
    };
    order.map(Some).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// Waits for a report, and what may come along. `None` if the worker has ended.
pub(crate) fn receive_report(
    socket: &MessageSocket,
    room: &mut [u8],
) -> io::Result<Option<(Report, Vec<OwnedFd>)>> {
    let received = receive_titled(socket, room)?;
    Ok(received.map(|Titled { title, fds, .. }| (title, fds)))
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use uzone_os::peer::{self, Peer};

    use super::*;
    use crate::connection::MESSAGE_BYTES;

    #[test]
    fn the_longest_message_and_the_most_descriptors_come_over_whole() {
        let (keeper, worker) = MessageSocket::pair().unwrap();
        let (near, far) = UnixStream::pair().unwrap();
        near.set_nonblocking(true).unwrap();
        let peer = Peer::of(&near).unwrap();
        let pid = peer.pid();
        let mut connection = Connection::new(near, peer);
        let writes = std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                let mut left = &vec![b'\n'; 2 * MESSAGE_BYTES][..];
                while let Ok(sent) = peer::send(&far, left, &[far.as_fd(); 4]) {
                    left = &left[sent..];
                }
                left.len()
            });
            while !connection.is_ended {
                connection.read();
            }
            // So that the writer ends.
            connection.stream.shutdown(std::net::Shutdown::Both).unwrap();
            writer.join().unwrap()
        });
        assert!(writes < 2 * MESSAGE_BYTES);
        let mut room = room();
        let mut next = || match receive(&worker, &mut room).unwrap() {
            Some(Order::Take(session, connection)) => (session, connection),
            other => panic!("{other:?}"),
        };
        hand_over(&keeper, u64::MAX, &connection).unwrap();
        let (session, came) = next();
        assert_eq!((session, came.peer.pid(), came.log.is_none()), (u64::MAX, pid, true));
        assert_eq!(came.bytes, connection.bytes[..connection.bytes.len().min(TAKEN_BYTES)]);
        assert_eq!(came.count_descriptors(), connection.count_descriptors());
        connection.log = Some(far.as_fd().try_clone_to_owned().unwrap());
        hand_over(&keeper, 1, &connection).unwrap();
        let (_, came) = next();
        assert!(came.log.is_some() && came.count_descriptors() == connection.count_descriptors());
        ask_for_stats(&keeper).unwrap();
        assert!(matches!(receive(&worker, &mut room).unwrap(), Some(Order::Stats)));
        hand_heirlooms_over(&keeper, None, (None, None), Some(far.as_fd()), None).unwrap();
        let Some(Order::Keep(heirlooms)) = receive(&worker, &mut room).unwrap() else { panic!() };
        assert!(heirlooms.manager.is_some() && heirlooms.socket.is_none());
        report(&worker, &Report::Reading(7), &[far.as_fd()]).unwrap();
        let came = receive_report(&keeper, &mut room).unwrap().unwrap();
        assert!(matches!(came, (Report::Reading(7), ref fds) if fds.len() == 1), "{came:?}");
        let files: Vec<_> =
            ["a", "b"].map(|name| (name.to_owned(), File::open("/dev/null").unwrap())).into();
        hand_files_over(&keeper, &files, true).unwrap();
        let (came, has_machines) = receive_files(&worker, &mut room).unwrap();
        assert!(has_machines && came.iter().map(|(name, _)| &**name).eq(["a", "b"]));
        drop(worker);
        assert!(receive_report(&keeper, &mut room).unwrap().is_none());
    }
}
