//! How one keeper hands everything to the next: the socket and the connections. The worker of the first has
//! ended before, so that what it read is known. Either of them may die at any point but one: until the first
//! has sent [`Piece::Go`], everything is its own, and afterwards the next one's.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use uzone_os::unix_socket::MessageSocket;

use super::estate::{Estate, Heirlooms};
use super::held_folder::HeldFolder;
use crate::connection::{Connection, Kept};
use crate::link::{self, Titled};
use crate::totals::Totals;

/// How long the other side may take for a message.
const PATIENCE: Duration = Duration::from_secs(3);

/// A message between two keepers.
#[derive(Debug, Serialize, Deserialize)]
enum Piece {
    /// What the image of the first is, so that the next one serves no other; how many sessions it had; and the folder
    /// with what it keeps of machines, which comes along locked.
    Start {
        image: String,
        next: u64,
        #[serde(default)]
        folder: Option<PathBuf>,
        /// The totals of this worker and of the workers before it.
        #[serde(default)]
        totals: Totals,
    },
    /// The socket that monitors connect to comes along.
    Socket,
    /// A connection comes along.
    Connection(Kept),
    /// That was all.
    End,
    /// The next one has it all.
    Taken,
    /// It is the next one's.
    Go,
}

/// Receives a message.
fn receive(socket: &MessageSocket) -> io::Result<Titled<Piece>> {
    link::receive_within(socket, PATIENCE)
}

fn unexpected<T>(piece: &Piece) -> io::Result<T> {
    Err(io::Error::other(format!("a message of another version: {piece:?}")))
}

/// Hands everything over. If it fails, all is the caller's still.
pub(crate) fn give(
    to: &MessageSocket,
    image: &str,
    socket: BorrowedFd<'_>,
    connections: &BTreeMap<u64, Connection>,
    next: u64,
    folder: Option<&HeldFolder>,
    totals: Totals,
) -> io::Result<()> {
    let path = folder.map(|folder| folder.path.clone());
    let start = Piece::Start { image: image.to_owned(), next, folder: path, totals };
    link::send(to, &start, folder.map(AsFd::as_fd).as_slice())?;
    link::send(to, &Piece::Socket, &[socket])?;
    for (number, connection) in connections {
        let (piece, fds) = (Piece::Connection(connection.kept(*number)), connection.descriptors());
        link::send_with(to, &piece, &fds, &connection.bytes)?;
    }
    link::send(to, &Piece::End, &[])?;
    match receive(to)?.title {
        Piece::Taken => link::send(to, &Piece::Go, &[]),
        other => unexpected(&other),
    }
}

/// Takes everything over, if it is served from the same image. `will_absorb` is called before with the folder of the
/// other one; if it fails, nothing is taken.
pub(crate) fn take(
    from: &MessageSocket,
    image: &str,
    will_absorb: impl FnOnce(&Path) -> io::Result<()>,
) -> io::Result<Estate> {
    let (mut socket, mut connections) = (None, BTreeMap::new());
    let Titled { title, fds, .. } = receive(from)?;
    let (next, folder, totals) = match title {
        Piece::Start { image: other, next, folder, totals } if other == image => {
            (next, folder.zip(fds.into_iter().next()), totals)
        }
        Piece::Start { .. } => {
            return Err(io::Error::other("it serves another image, or its file was replaced"));
        }
        other => return unexpected(&other),
    };
    loop {
        let Titled { title, fds, bytes, .. } = receive(from)?;
        match title {
            Piece::Socket => socket = fds.into_iter().next(),
            Piece::Connection(kept) => {
                let connection = Connection::from_kept(&kept, fds, bytes);
                connections.extend([connection.ok_or(io::ErrorKind::InvalidData)?]);
            }
            Piece::End => break,
            other => return unexpected(&other),
        }
    }
    let socket = socket.ok_or(io::ErrorKind::InvalidData)?;
    folder.as_ref().map_or(Ok(()), |(path, _)| will_absorb(path))?;
    link::send(from, &Piece::Taken, &[])?;
    match receive(from)?.title {
        Piece::Go => {
            let folder = folder.map(|(path, lock)| HeldFolder::of(path, lock));
            let socket = Some(socket);
            let heirlooms = Heirlooms { socket, folder, totals, ..Heirlooms::default() };
            Ok(Estate { next, ..Estate::new(heirlooms, connections) })
        }
        other => unexpected(&other),
    }
}
