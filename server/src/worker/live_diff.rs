//! Clients that read the memory of a session: pages are kept for them before they change.

use std::fs::File;
use std::sync::Arc;

use crate::message_socket::MessageSocket;

use super::Worker;
use crate::messages::{self, CaptureReply, CaptureRequest, Titled};

/// A client that reads the memory of a session.
pub(super) struct Client {
    pub(super) session: u64,
    pub(super) socket: Arc<MessageSocket>,
    /// The count of pending faults, until it asks that pages are kept.
    pub(super) pending: Option<File>,
    /// Whether pages are kept for it.
    pub(super) captures: bool,
}

impl Worker {
    /// Handles a request of a client that reads the memory of a session. Returns whether more may come.
    pub(super) fn hear(&mut self, key: u64) -> bool {
        let Some(client) = self.clients.get_mut(&key) else { return false };
        let message = messages::receive(&client.socket);
        let (Ok(Titled { title, fds, .. }), Some(session)) =
            (message, self.sessions.get(&client.session))
        else {
            return false;
        };
        let mut fds = fds.into_iter();
        let reply = match (title, client.pending.take()) {
            (CaptureRequest::Protect, Some(pending)) => {
                let (Some(memory), Some(kept)) = (fds.next(), fds.next()) else { return false };
                let begun = session.capture(memory.into(), kept, pending, client.socket.clone());
                client.captures = begun.is_ok();
                CaptureReply::Begun(begun.map_err(|error| uzone_os::with_causes(&error)))
            }
            (CaptureRequest::Read(until), None) if client.captures => {
                session.memory.captured_until(until);
                return true;
            }
            (CaptureRequest::End, None) if client.captures => {
                client.captures = false;
                let Some(captured) = session.memory.end_capture() else { return false };
                CaptureReply::Ended(captured.map_err(|error| uzone_os::with_causes(&error)))
            }
            // Of a client that does not keep to the order.
            _ => return false,
        };
        messages::send(&client.socket, &reply, &[]).is_ok() && client.captures
    }

    /// Closes the socket of a client, and ends its capture.
    pub(super) fn forget_client(&mut self, key: u64) {
        let Some(client) = self.clients.remove(&key) else { return };
        let _ = self.set.remove(&client.socket);
        if let Some(session) = self.sessions.get(&client.session).filter(|_| client.captures) {
            drop(session.memory.end_capture());
        }
    }

    /// Ends captures for which a VM has waited too long, and captures of VMs that have ended.
    pub(super) fn end_slow_captures(&mut self) {
        let deadline = self.options.deadline;
        let is_slow = |client: &Client| match self.sessions.get(&client.session) {
            Some(session) => {
                client.captures
                    && session
                        .memory
                        .capture_waits()
                        .is_some_and(|since| since.elapsed() >= deadline)
            }
            None => true,
        };
        let slow = self.clients.iter().filter(|(_, client)| is_slow(client)).map(|(key, _)| *key);
        for key in slow.collect::<Vec<_>>() {
            self.forget_client(key);
        }
    }
}
