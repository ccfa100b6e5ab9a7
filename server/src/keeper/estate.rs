//! What a keeper has, for the next one: [`Estate`].

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use uzone_os::unix_socket::MessageSocket;

use super::held_folder::HeldFolder;
use super::recovery::Recovery;
use crate::connection::Connection;
use crate::link::{self, Order, Titled};
use crate::totals::Totals;

/// What a keeper has, for the next one.
#[derive(Debug)]
pub struct Estate {
    pub(crate) heirlooms: Heirlooms,
    /// Whether the name of the socket is the server's to remove.
    pub(crate) is_named: bool,
    /// Whether the process that goes on with it was a worker, which may do less.
    pub(crate) is_confined: bool,
    pub(crate) connections: BTreeMap<u64, Connection>,
    /// The number of the next connection.
    pub(crate) next: u64,
    pub(crate) recovery: Option<Recovery>,
    /// The files that the image is opened by, unless they are opened by their names.
    pub(crate) files: Vec<(String, File)>,
}

impl Estate {
    /// What a keeper has that was started with all rights: a socket with a name of its own, and machines.
    pub(crate) fn new(heirlooms: Heirlooms, connections: BTreeMap<u64, Connection>) -> Self {
        let next = next_number(&connections);
        let (is_named, is_confined) = (true, false);
        let (recovery, files) = (None, Vec::new());
        Self { heirlooms, is_named, is_confined, connections, next, recovery, files }
    }
}

/// Returns the number of a connection that comes after all of these.
pub(crate) fn next_number(connections: &BTreeMap<u64, Connection>) -> u64 {
    connections.last_key_value().map_or(1, |(last, _)| last + 1)
}

/// Adds a connection by the number that it had, or by the next one if another has that.
pub(crate) fn add(
    connections: &mut BTreeMap<u64, Connection>,
    (number, connection): (u64, Connection),
) {
    let is_taken = connections.contains_key(&number);
    let number = if is_taken { next_number(connections) } else { number };
    connections.insert(number, connection);
}

/// What the next keeper needs, and a worker could not make.
#[derive(Debug, Default)]
pub(crate) struct Heirlooms {
    /// The socket that monitors connect to, unless no more are accepted.
    pub(crate) socket: Option<OwnedFd>,
    /// That of questions, and the one of metrics, unless the next keeper makes its own.
    pub(crate) control: Option<OwnedFd>,
    pub(crate) metrics: Option<OwnedFd>,
    /// The socket to the service manager.
    pub(crate) manager: Option<OwnedFd>,
    /// The folder with what is kept of machines.
    pub(crate) folder: Option<HeldFolder>,
    /// The totals from before.
    pub(crate) totals: Totals,
}

impl Heirlooms {
    /// Hands them over to a worker, in case that its keeper dies.
    pub(crate) fn hand_over(
        to: &MessageSocket,
        fds: [Option<BorrowedFd<'_>>; 4],
        folder: Option<&HeldFolder>,
        totals: Totals,
    ) -> io::Result<()> {
        let (has, path) = (fds.map(|fd| fd.is_some()), folder.map(|folder| folder.path.clone()));
        let lock = folder.map(AsFd::as_fd);
        let fds: Vec<_> = fds.into_iter().chain([lock]).flatten().collect();
        link::send(to, &Order::Keep { has, folder: path, totals }, &fds)
    }

    /// Takes them from a message of the keeper. `None` if a descriptor is missing.
    pub(crate) fn take(order: Titled<Order>) -> Option<Self> {
        let Order::Keep { has, folder, totals } = order.title else { return None };
        let mut fds = order.fds.into_iter();
        let mut next = |is_there: bool| if is_there { fds.next().map(Some) } else { Some(None) };
        let [socket, control, metrics, manager] = has.map(&mut next);
        let lock = next(folder.is_some())?;
        Some(Self {
            socket: socket?,
            control: control?,
            metrics: metrics?,
            manager: manager?,
            folder: folder.zip(lock).map(|(path, lock)| HeldFolder::of(path, lock)),
            totals,
        })
    }
}
