//! Clients until a worker has them: users that may connect, the number of waiting clients, and the clients that make
//! room.

use std::io;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::Duration;

use crate::descriptors::{self, is_shortage};
use uzone_os::peer::{self, Peer};
use uzone_os::uffd::{Remote, UffdError};

use super::Keeper;
use super::room::Room;
use crate::event::ServeEvent;
use crate::machine::{Machine, Step, memory_of};

/// A connection that has sent no descriptor for this long makes room for another one.
const SILENT: Duration = Duration::from_millis(500);
/// The pause after a connection that could not be accepted.
const ACCEPT_AGAIN: Duration = Duration::from_millis(10);

/// The remedy for a server that cannot see a monitor.
const UNSEEN: &str = ", so it can be neither ended nor waited for: run this server in the PID namespace of the monitors, or \
                      in one around it";

/// Shuts a connection down, so that a monitor which sends its memory afterwards gets an error. Returns the memory that had
/// come.
fn take_memory(stream: &UnixStream) -> Option<Result<Remote, UffdError>> {
    let (mut part, mut fds) = ([0; 4096], Vec::new());
    let ended = stream.shutdown(Shutdown::Both).and_then(|()| stream.set_nonblocking(true));
    while ended.is_ok()
        && fds.is_empty()
        && peer::receive(stream, &mut part, &mut fds).is_ok_and(|len| len > 0)
    {}
    fds.into_iter().find_map(memory_of)
}

impl Keeper {
    /// Returns the number of connections without a whole message.
    pub(super) fn greetings(&self) -> usize {
        self.machines.values().filter(|machine| machine.is_new()).count()
    }

    /// Returns whether one more connection can be waited for. A silent one may make room for it.
    pub(super) fn has_room(&mut self) -> bool {
        self.greetings() < self.room().greetings || self.make_room()
    }

    /// Refuses the oldest connection that has been silent for a while: a monitor sends its message at once. Returns
    /// whether there was one.
    fn make_room(&mut self) -> bool {
        let is_silent = |machine: &Machine| machine.is_new() && !machine.has_descriptors();
        loop {
            let silent = self.machines.iter().filter(|(_, machine)| is_silent(machine));
            // A program that attaches has asked for the image, and maps memory before it hands that over.
            let oldest = silent.min_by_key(|(_, one)| (!one.bytes.is_empty(), one.since));
            let oldest = oldest.filter(|(_, machine)| machine.since.elapsed() >= SILENT);
            let Some(key) = oldest.map(|(key, _)| *key) else { return false };
            if self.is_silent_to_the_end(key) {
                let most = self.room().greetings;
                let reason =
                    format!("it sent no whole message, and at most {most} connections wait");
                self.refuse(key, reason);
                return true;
            }
        }
    }

    /// Shuts a connection down, and reads the bytes that have come: a VM that has handed its memory over waits for its
    /// pages, and is not forgotten. Returns whether no descriptor came.
    pub(super) fn is_silent_to_the_end(&mut self, key: u64) -> bool {
        let is_silent = |keeper: &Self| {
            keeper.machines.get(&key).is_some_and(|machine| !machine.has_descriptors())
        };
        self.read(key);
        if is_silent(self)
            && let Some(machine) = self.machines.get_mut(&key)
            && machine.stream.shutdown(Shutdown::Both).is_ok()
        {
            machine.read();
            if machine.has_descriptors() {
                self.read(key);
            }
        }
        is_silent(self)
    }

    pub(super) fn accept(&mut self) {
        loop {
            let has_room = self.has_room();
            let Some(socket) = &self.socket else { return };
            if !has_room {
                // Waiting connections are accepted when there is room.
                self.is_accepting = self.set.remove(&socket.listener).is_err();
                return;
            }
            let stream = match socket.listener.accept() {
                Ok((stream, _)) => stream,
                Err(cause) if cause.kind() == io::ErrorKind::WouldBlock => return,
                // The client has gone, or no descriptor is free: the next wait tries again, a little later.
                Err(_) => return thread::sleep(ACCEPT_AGAIN),
            };
            self.admit(stream);
        }
    }

    /// Takes a connection of a user that may connect.
    pub(super) fn admit(&mut self, stream: UnixStream) {
        let key = self.next;
        let peer = match Peer::of(&stream) {
            Ok(peer) => peer,
            Err(cause) if cause.kind() == io::ErrorKind::Unsupported => {
                let mut reason = format!("{cause}{UNSEEN}");
                if let Some(memory) = take_memory(&stream) {
                    self.poison(key, memory, &mut reason);
                }
                return self.turn_down(0, reason);
            }
            Err(cause) if is_shortage(&cause) => return self.turn_down(0, cause.to_string()),
            // A process that has ended is not waited for.
            Err(_) => return,
        };
        if !self.options.admits(peer.uid(), self.user) {
            self.next += 1;
            return self.turn_away(key, Machine::new(stream, peer));
        }
        if let Err(cause) = stream.set_nonblocking(true).and_then(|()| self.set.add(&stream, key)) {
            return self.turn_down(peer.pid(), cause.to_string());
        }
        self.next += 1;
        self.machines.insert(key, Machine::new(stream, peer));
        // At once: the store has an accepted client before this process may be killed.
        self.read(key);
    }

    /// Closes a connection that this process can do nothing with.
    fn turn_down(&mut self, pid: u32, reason: String) {
        let session = self.next;
        self.next += 1;
        (self.log)(&ServeEvent::Refused { session, pid, reason, was_killed: false });
    }

    /// Returns the most VMs and connections.
    pub(super) fn room(&self) -> Room {
        Room::new(descriptors::limit(), self.opened.files.len())
    }

    /// Refuses a client that is about to be one VM too many. Returns whether it is.
    fn is_too_many(&mut self, key: u64) -> bool {
        let is_new = |machine: &Machine| machine.is_new() && machine.has_descriptors();
        if !self.machines.get(&key).is_some_and(is_new) {
            return false;
        }
        self.make_room_for_memory(0);
        let (room, all) = (self.room(), self.machines.values());
        let is_too_many = all.filter(|one| one.has_descriptors()).count() > room.machines;
        if is_too_many {
            self.refuse(key, room.is_full());
        }
        is_too_many
    }

    /// Refuses a client of a user that may not connect.
    fn turn_away(&mut self, key: u64, mut machine: Machine) {
        // A monitor that sends its memory afterwards gets an error, and one that has sent it is ended like any refused
        // VM: neither waits for a page for ever.
        let ended = machine.stream.shutdown(Shutdown::Both);
        if ended.and_then(|()| machine.stream.set_nonblocking(true)).is_ok() {
            machine.read();
        }
        let reason = format!(
            "user {} may not connect to this server: name it with --allow-uid",
            machine.peer.uid()
        );
        self.machines.insert(key, machine);
        self.refuse(key, reason);
    }

    /// Reads the bytes that a client has sent, stores them, and offers it to the worker if its message may be whole.
    pub(super) fn read(&mut self, key: u64) {
        let Some(machine) = self.machines.get_mut(&key) else { return };
        machine.read();
        if machine.is_ended {
            let _ = self.set.remove(&machine.stream);
        }
        if machine.is_probe() {
            return drop(self.forget(key));
        }
        if self.is_too_many(key) {
            return;
        }
        let Some(machine) = self.machines.get_mut(&key) else { return };
        self.store.put(&self.opened.image, key, machine);
        if machine.may_be_whole() && machine.is_new() && !self.news.contains(&key) {
            if !machine.may_be_offered() {
                let reason = "its message came in too many parts that could have been the last";
                return self.refuse(key, reason.to_owned());
            }
            machine.step(Step::Whole);
            self.news.push_back(key);
        }
    }

    /// Stops reading from a client that is served. More of its stream means nothing, and nor does its end: older monitors
    /// close it at once.
    pub(super) fn stop_reading(&mut self, key: u64) {
        if let Some(machine) = self.machines.get_mut(&key).filter(|one| !one.is_ended) {
            let _ = self.set.remove(&machine.stream);
            machine.is_ended = true;
        }
    }
}
