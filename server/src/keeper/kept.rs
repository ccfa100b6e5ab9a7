//! Keeping machines across the death of both processes of a server: in a service manager, and in a folder.

use std::io;
use std::os::fd::AsFd;

use uzone_os::memory_file;

use super::Keeper;
use super::estate::{Estate, next_number};
use super::held_folder::HeldFolder;
use super::manager::ServiceManager;
use super::recovery::Recovery;
use crate::connection::Connection;
use crate::error::ServeError;

impl Keeper {
    /// Takes what the previous keeper has kept of machines, and adds the machines that it did not know.
    pub(super) fn take_what_is_kept(&mut self, estate: &mut Estate) {
        match (&self.recovery, estate.heirlooms.folder.take()) {
            (Some(recovery), folder) => {
                let connections = estate.connections.values_mut();
                if let Some(before) = folder {
                    let absorbed = recovery.absorb(&before);
                    // Also the notes about that folder, and about folders that an earlier server was to take over.
                    if let Err(cause) =
                        absorbed.and_then(|()| recovery.absorb_noted(&recovery.held().path))
                    {
                        let path = before.path.display();
                        tracing::warn!(%cause, %path, "what is kept of machines is kept anew elsewhere");
                    }
                    connections.for_each(|connection| recovery.find_log(connection, Some(&before)));
                    before.remove();
                } else if estate.heirlooms.manager.is_none() {
                    // What a service manager keeps has its own log.
                    connections.for_each(|connection| recovery.find_log(connection, None));
                }
                recovery.complete(&mut estate.connections);
                estate.next = estate.next.max(next_number(&estate.connections));
            }
            (None, folder) => self.folder = folder,
        }
    }

    /// Returns the folder with what is kept of machines.
    pub(super) fn folder(&self) -> Option<&HeldFolder> {
        self.recovery.as_ref().map(Recovery::held).or(self.folder.as_ref())
    }

    pub(super) fn open_recovery(&mut self) -> Result<(), ServeError> {
        if let Some(folder) = &self.options.recover {
            self.recovery = Some(Recovery::open(folder, &self.path)?);
        }
        Ok(())
    }

    /// Has a service manager keep the socket and the descriptors of all machines from now on, for a server
    /// that it starts when both processes of this one have died: [`Passed`](crate::Passed).
    pub fn kept_by(&mut self, manager: ServiceManager) {
        if let Some(socket) = self.socket.as_ref().filter(|socket| socket.is_named()) {
            manager.keep_socket(&self.path, socket.listener.as_fd());
        }
        self.manager = Some(manager);
        for key in self.connections.keys().copied().collect::<Vec<_>>() {
            if self.connections.get(&key).is_some_and(|one| one.kept_bytes.is_none()) {
                self.keep_machine(key);
            }
        }
        self.heirlooms_changed();
    }

    /// Has a machine kept, as far as its message has come.
    pub(super) fn keep_machine(&mut self, key: u64) {
        let (manager, connection) = (self.manager.as_ref(), self.connections.get_mut(&key));
        let Some(connection) = connection.filter(|one| one.is_worth_keeping() && one.may_be_kept())
        else {
            return;
        };
        if let Some(recovery) = &self.recovery {
            recovery.keep_machine(&self.image, key, connection);
        }
        if let Some(manager) = manager {
            // Without it, a warning was printed, or there is no memory for it.
            let _ = Self::make_log(self.recovery.as_ref(), connection);
            manager.keep_machine(&self.path, &self.image, key, connection);
        }
        if manager.is_some() || self.recovery.is_some() {
            connection.kept_bytes = Some(connection.bytes.len());
            connection.times_kept += 1;
        }
    }

    /// Keeps a machine whose worker begins to read what it gives back, if that is logged in the file for it. Otherwise
    /// what is kept of the machine is given up.
    pub(super) fn keep_logged(&mut self, key: u64) {
        let Some(connection) = self.connections.get_mut(&key) else { return };
        if !connection.may_be_a_machine() {
            return;
        }
        if connection.is_logged_in_its_file() {
            match &self.recovery {
                _ if connection.kept_bytes.is_none() => self.keep_machine(key),
                Some(recovery) if !recovery.has_machine(connection.known.id) => {
                    recovery.keep_machine(&self.image, key, connection);
                }
                _ => {}
            }
            return;
        }
        connection.log_file = None;
        if let Some(recovery) = &self.recovery {
            recovery.discard(connection.known.id);
        }
        if let (Some(manager), Some(_)) = (&self.manager, connection.kept_bytes.take()) {
            manager.discard_machine(&self.path, connection);
        }
    }

    /// Makes the file for the log of a machine, in the folder for recovery if there is one.
    pub(super) fn make_log(
        recovery: Option<&Recovery>,
        connection: &mut Connection,
    ) -> io::Result<()> {
        match recovery {
            Some(recovery) => recovery.make_log(connection),
            None => {
                if connection.log_file.is_none() {
                    connection.log_file = Some(memory_file("uzone-events", &[])?.into());
                }
                Ok(())
            }
        }
    }
}
