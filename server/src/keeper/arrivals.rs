//! Connections until a worker has them: who may connect, how many are waited for, and which are dropped to make room.

use std::io;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::Duration;

use uzone_os::peer::Peer;

use super::Keeper;
use crate::connection::Connection;
use crate::event::ServeEvent;

/// How many connections may be without a whole message; further ones wait.
const GREETINGS: usize = 64;
/// After how long a connection that sent no descriptor makes room for another one, if there is none.
const SILENT: Duration = Duration::from_millis(500);
/// How long to wait after a connection that could not be accepted.
const ACCEPT_AGAIN: Duration = Duration::from_millis(10);

impl Keeper {
    /// Returns how many connections have sent no whole message.
    pub(super) fn greetings(&self) -> usize {
        self.connections.values().filter(|connection| connection.is_greeting()).count()
    }

    /// Returns whether one more connection can be waited for, for which a silent one may make room.
    pub(super) fn has_room(&mut self) -> bool {
        self.greetings() < GREETINGS || self.make_room()
    }

    /// Refuses the oldest connection that has been silent for a while: a monitor sends its message at once. Returns
    /// whether there was one.
    fn make_room(&mut self) -> bool {
        let is_silent =
            |connection: &Connection| connection.is_greeting() && !connection.has_descriptors();
        loop {
            let silent = self.connections.iter().filter(|(_, connection)| is_silent(connection));
            // A program that attaches has asked for the image, and maps memory before it hands that over.
            let oldest = silent.min_by_key(|(_, one)| (!one.bytes.is_empty(), one.since));
            let oldest = oldest.filter(|(_, connection)| connection.since.elapsed() >= SILENT);
            let Some(key) = oldest.map(|(key, _)| *key) else { return false };
            if self.is_silent_to_the_end(key) {
                let reason = format!(
                    "it sent no whole message, and {GREETINGS} connections are waited for at most"
                );
                self.refuse(key, reason);
                return true;
            }
        }
    }

    /// Lets nothing more come by a connection, and reads what has come since it was read last: a machine that has
    /// handed its memory over waits for its pages, and is not forgotten. Returns whether there is no descriptor.
    pub(super) fn is_silent_to_the_end(&mut self, key: u64) -> bool {
        let is_silent = |keeper: &Self| {
            keeper.connections.get(&key).is_some_and(|connection| !connection.has_descriptors())
        };
        self.read(key);
        if is_silent(self)
            && let Some(connection) = self.connections.get_mut(&key)
            && connection.stream.shutdown(Shutdown::Both).is_ok()
        {
            connection.read();
            if connection.has_descriptors() {
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
                // Those that wait are taken when there is room.
                self.is_accepting = self.set.remove(&socket.listener).is_err();
                return;
            }
            let stream = match socket.listener.accept() {
                Ok((stream, _)) => stream,
                Err(cause) if cause.kind() == io::ErrorKind::WouldBlock => return,
                // One that went again, or no descriptor is free: the next wait tries again, a little later.
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
                self.next += 1;
                let (pid, reason) = (0, cause.to_string());
                (self.log)(&ServeEvent::Refused { session: key, pid, reason, was_killed: false });
                return;
            }
            // A process that has ended is not waited for.
            Err(_) => return,
        };
        if !self.options.admits(peer.uid(), self.user) {
            self.next += 1;
            return self.turn_away(key, Connection::new(stream, peer));
        }
        if stream.set_nonblocking(true).and_then(|()| self.set.add(&stream, key)).is_err() {
            return;
        }
        self.next += 1;
        let mut connection = Connection::new(stream, peer);
        connection.known.must_be_served = self.is_confined;
        self.connections.insert(key, connection);
        // At once: what has been accepted is lost if this process is killed, unless it is kept.
        self.read(key);
    }

    /// Refuses a connection of a user that may not connect.
    fn turn_away(&mut self, key: u64, mut connection: Connection) {
        // A monitor that sends its memory from now on gets an error, and one that has sent it is ended as any
        // that is not served: neither waits for a page for ever.
        let ended = connection.stream.shutdown(Shutdown::Both);
        if ended.and_then(|()| connection.stream.set_nonblocking(true)).is_ok() {
            connection.read();
        }
        let reason = format!(
            "user {} may not connect to this server: name it with --allow-uid",
            connection.peer.uid()
        );
        self.connections.insert(key, connection);
        self.refuse(key, reason);
    }

    /// Reads what a monitor has sent.
    pub(super) fn read(&mut self, key: u64) {
        let Some(connection) = self.connections.get_mut(&key) else { return };
        connection.read();
        if connection.known.is_ended {
            let _ = self.set.remove(&connection.stream);
        }
        if connection.may_be_whole() && !self.news.contains(&key) {
            self.news.push_back(key);
        }
        self.keep_machine(key);
    }
}
