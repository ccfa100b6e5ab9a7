//! What a keeper has, for the next one: [`Estate`].

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::OwnedFd;

use super::held_folder::HeldFolder;
use super::recovery::Recovery;
use crate::connection::Connection;

/// What a keeper has, for the next one.
#[derive(Debug)]
pub struct Estate {
    /// Where monitors connect, unless no more are accepted.
    pub(crate) socket: Option<OwnedFd>,
    /// Whether the name of the socket is the server's to remove.
    pub(crate) is_named: bool,
    /// Whether the process that goes on with it was a worker, which may do less.
    pub(crate) is_confined: bool,
    /// The sockets for questions and for metrics, unless the next one makes its own.
    pub(crate) control: Option<OwnedFd>,
    pub(crate) metrics: Option<OwnedFd>,
    pub(crate) manager: Option<OwnedFd>,
    pub(crate) connections: BTreeMap<u64, Connection>,
    /// The number of the next connection.
    pub(crate) next: u64,
    /// The folder of the keeper before with what it kept of machines, or that of this one, with these machines.
    pub(crate) folder: Option<HeldFolder>,
    pub(crate) recovery: Option<Recovery>,
    /// The files that the image is opened by, unless they are opened by their names.
    pub(crate) files: Vec<(String, File)>,
}

impl Estate {
    /// What a keeper has that was started with all rights: a socket with a name of its own, and machines.
    pub(crate) fn new(
        socket: Option<OwnedFd>,
        connections: BTreeMap<u64, Connection>,
        next: u64,
    ) -> Self {
        Self {
            socket,
            is_named: true,
            is_confined: false,
            control: None,
            metrics: None,
            manager: None,
            connections,
            next,
            folder: None,
            recovery: None,
            files: Vec::new(),
        }
    }
}
