//! Waiting for many descriptors at once: [`EventSet`], an epoll set.
//!
//! Each descriptor has a key, which a wait returns if it has something to read. It is level-triggered: a descriptor that
//! is not read is returned again.
//!
//! Source: epoll(7).

use core::time::Duration;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};

use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::io::Errno;

/// Descriptors that are waited for.
#[derive(Debug)]
pub struct EventSet(OwnedFd);

impl EventSet {
    /// The most keys that a wait returns; the others are returned by the next.
    pub const MOST: usize = 64;

    /// Makes an empty one.
    ///
    /// # Errors
    /// The error of epoll_create1(2): the process has as many descriptors as it may.
    pub fn new() -> io::Result<Self> {
        Ok(Self(epoll::create(CreateFlags::CLOEXEC)?))
    }

    /// Waits for `fd` too, by the key `key`.
    ///
    /// # Errors
    /// The error of epoll_ctl(2): there is no memory, or the user watches as many as he may.
    pub fn add(&self, fd: impl AsFd, key: u64) -> io::Result<()> {
        Ok(epoll::add(&self.0, fd, EventData::new_u64(key), EventFlags::IN)?)
    }

    /// Waits for `fd` no longer.
    ///
    /// # Errors
    /// The error of epoll_ctl(2): it is not waited for.
    pub fn remove(&self, fd: impl AsFd) -> io::Result<()> {
        Ok(epoll::delete(&self.0, fd)?)
    }

    /// Waits until one of the descriptors has something to read, hung up, or `timeout` is over;
    /// without one, for as long as it takes. `ready` has their keys then; a signal may end it with none. Nothing
    /// is allocated where `ready` has room for [`EventSet::MOST`].
    ///
    /// # Errors
    /// The error of epoll_wait(2).
    pub fn wait(&self, ready: &mut Vec<u64>, timeout: Option<Duration>) -> io::Result<()> {
        ready.clear();
        let mut events = [MaybeUninit::uninit(); Self::MOST];
        // A time that is too long is as good as none.
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        match epoll::wait(&self.0, &mut events[..], timeout.as_ref()) {
            Ok((events, _)) => {
                ready.extend(events.iter().map(|event| event.data.u64()));
                Ok(())
            }
            // The caller looks around and waits again.
            Err(Errno::INTR) => Ok(()),
            Err(cause) => Err(cause.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::uffd::Doorbell;

    #[test]
    fn the_keys_of_those_that_ring_are_returned() {
        let set = EventSet::new().unwrap();
        let bells = [Doorbell::new().unwrap(), Doorbell::new().unwrap(), Doorbell::new().unwrap()];
        for (bell, key) in bells.iter().zip([7, u64::MAX, 0]) {
            set.add(bell, key).unwrap();
        }
        let mut ready = Vec::new();
        set.wait(&mut ready, Some(Duration::ZERO)).unwrap();
        assert_eq!(ready, []);
        bells[0].ring().unwrap();
        bells[1].ring().unwrap();
        for _ in 0..2 {
            set.wait(&mut ready, None).unwrap();
            ready.sort_unstable();
            assert_eq!(ready, [7, u64::MAX], "what is not read is returned again");
        }
        bells[0].silence().unwrap();
        set.remove(&bells[1]).unwrap();
        assert!(set.remove(&bells[1]).is_err(), "it is not waited for");
        set.wait(&mut ready, Some(Duration::from_millis(1))).unwrap();
        assert_eq!(ready, []);
    }
}
