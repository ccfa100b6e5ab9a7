//! What a keeper and its worker send each other over a socket of whole messages: [`Handover`] one way,
//! [`Report`] the other. The worker asks for each connection, so the keeper never waits for it.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use uzone_os::MessageSocket;

use crate::event::ServeEvent;
use crate::handshake::MESSAGE_BYTES;
use crate::status::SessionStats;

/// How long the parts of a message beside those of a monitor may be.
const OTHER_BYTES: usize = 4096;
/// How much of a monitor's message is handed over: more than it may have, so that the worker refuses it.
pub(crate) const TAKEN_BYTES: usize = MESSAGE_BYTES + 1;
/// How many descriptors of a monitor are handed over.
pub(crate) const TAKEN_FDS: usize = 16;

/// What is known of a connection.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Header {
    pub(crate) session: u64,
    pub(crate) pid: u32,
    pub(crate) uid: u32,
    pub(crate) can_be_killed: bool,
    /// Whether nothing more will come.
    pub(crate) is_ended: bool,
    /// How many descriptors came.
    pub(crate) descriptors: usize,
    /// Whether the first descriptor behind the pidfd is a log of removals.
    pub(crate) has_log: bool,
}

/// A connection as the worker gets it.
#[derive(Debug)]
pub(crate) struct Handover {
    pub(crate) header: Header,
    pub(crate) pidfd: OwnedFd,
    pub(crate) log: Option<OwnedFd>,
    pub(crate) fds: Vec<OwnedFd>,
    pub(crate) bytes: Vec<u8>,
}

/// What starts each message of the keeper.
#[derive(Debug, Serialize, Deserialize)]
enum Title {
    Connection(Header),
    Stats,
}

/// What the worker receives.
#[derive(Debug)]
pub(crate) enum Order {
    Take(Handover),
    /// It reports the counts of each session before it asks for more.
    Stats,
}

/// What the worker sends.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Report {
    /// Which image it serves, before all else.
    Image(String),
    /// It can take a connection.
    Next,
    /// It is about to read the events of a session; what it reads is in the log that comes along.
    Reading(u64),
    /// A connection was a probe of whether there is a server.
    Probe(u64),
    /// What was done for a session so far.
    Stats(u64, SessionStats),
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
    let mut message = serde_json::to_vec(title)?;
    message.push(b'\n');
    message.extend_from_slice(&bytes[..bytes.len().min(TAKEN_BYTES)]);
    socket.send(&message, fds)
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
    let Some(message) = socket.receive(room)? else { return Ok(None) };
    let bytes = &room[..message.len];
    let line = bytes.iter().position(|byte| *byte == b'\n').ok_or(io::ErrorKind::InvalidData)?;
    let title = serde_json::from_slice(&bytes[..line])?;
    Ok(Some(Titled { title, fds: message.fds, bytes: bytes[line + 1..].to_vec() }))
}

/// Hands a connection over. The descriptors are the pidfd, the log if there is one, and what the monitor
/// sent.
pub(crate) fn hand_over(
    socket: &MessageSocket,
    header: &Header,
    fds: &[BorrowedFd<'_>],
    bytes: &[u8],
) -> io::Result<()> {
    send_titled(socket, &Title::Connection(*header), fds, bytes)
}

/// Asks for the counts of each session.
pub(crate) fn ask_for_stats(socket: &MessageSocket) -> io::Result<()> {
    send_titled(socket, &Title::Stats, &[], &[])
}

/// Sends a report.
pub(crate) fn report(
    socket: &MessageSocket,
    report: &Report,
    log: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    send_titled(socket, report, log.as_slice(), &[])
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
    let Title::Connection(header) = title else { return Ok(Some(Order::Stats)) };
    let mut fds = fds.into_iter();
    let pidfd = fds.next().ok_or(io::ErrorKind::InvalidData)?;
    let log = if header.has_log { fds.next() } else { None };
    Ok(Some(Order::Take(Handover { header, pidfd, log, fds: fds.collect(), bytes })))
}

/// Waits for a report, and the log that may come along. `None` if the worker has ended.
pub(crate) fn receive_report(
    socket: &MessageSocket,
    room: &mut [u8],
) -> io::Result<Option<(Report, Option<OwnedFd>)>> {
    let received = receive_titled(socket, room)?;
    Ok(received.map(|Titled { title, fds, .. }| (title, fds.into_iter().next())))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn the_longest_message_and_the_most_descriptors_come_over_whole() {
        let (keeper, worker) = MessageSocket::pair().unwrap();
        let null = || OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        let fds: Vec<OwnedFd> = (0..TAKEN_FDS + 2).map(|_| null()).collect();
        let all: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        let bytes = vec![b'\n'; 2 * MESSAGE_BYTES];
        let mut header = Header {
            session: u64::MAX,
            pid: u32::MAX,
            uid: u32::MAX,
            can_be_killed: false,
            is_ended: false,
            descriptors: 40,
            has_log: true,
        };
        hand_over(&keeper, &header, &all, &bytes).unwrap();
        let mut room = room();
        let mut next = || match receive(&worker, &mut room).unwrap() {
            Some(Order::Take(handover)) => handover,
            other => panic!("{other:?}"),
        };
        let came = next();
        assert_eq!((came.bytes.len(), came.fds.len()), (TAKEN_BYTES, TAKEN_FDS));
        assert!(came.log.is_some() && came.header.session == u64::MAX);
        header.has_log = false;
        hand_over(&keeper, &header, &all[..2], b"[").unwrap();
        let came = next();
        assert_eq!((came.bytes, came.fds.len(), came.log.is_none()), (b"[".to_vec(), 1, true));
        ask_for_stats(&keeper).unwrap();
        assert!(matches!(receive(&worker, &mut room).unwrap(), Some(Order::Stats)));
        report(&worker, &Report::Reading(7), Some(all[0])).unwrap();
        let came = receive_report(&keeper, &mut room).unwrap().unwrap();
        assert!(matches!(came, (Report::Reading(7), Some(_))), "{came:?}");
        drop(worker);
        assert!(receive_report(&keeper, &mut room).unwrap().is_none());
    }
}
