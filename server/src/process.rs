//! The process of a client beside its socket: found again after a restart, its userfaultfd, its memory, and its end.
//!
//! Source: pidfd_open(2), pidfd_send_signal(2), proc_pid_fd(5), proc_pid_stat(5), proc_pid_mem(5), proc_pid_pagemap(5).

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;

use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal};
use uzone_os::peer::Peer;

/// The most descriptors of a process that are looked at: more take this process too long.
const COMPARED: usize = 1 << 16;
/// The name of a userfaultfd in `/proc/PID/fd`.
const USERFAULTFD: &str = "anon_inode:[userfaultfd]";

/// Returns the process of this number that started then ([`started`]), of that user.
///
/// # Errors
/// [`io::ErrorKind::NotFound`] if it has ended, and otherwise the error of the system.
pub(crate) fn of_number(number: u32, uid: u32, started: u64) -> io::Result<Peer> {
    let pid = Pid::from_raw(number.cast_signed()).ok_or(io::ErrorKind::InvalidInput)?;
    let pidfd = rustix::process::pidfd_open(pid, PidfdFlags::empty())?;
    let peer = Peer::from_parts(number, uid, pidfd).ok_or(io::ErrorKind::InvalidInput)?;
    if self::started(&peer)? == started { Ok(peer) } else { Err(io::ErrorKind::NotFound.into()) }
}

/// Returns the time of its start, in clock ticks since the system did.
///
/// # Errors
/// [`io::ErrorKind::NotFound`] if it has ended, and otherwise the error of the system.
pub(crate) fn started(peer: &Peer) -> io::Result<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", peer.pid()))?;
    is_there(peer)?;
    // Its name, in parentheses, may have any bytes; the state behind it is the third field.
    let fields = stat.rsplit_once(") ").map_or("", |(_, fields)| fields);
    let started = fields.split(' ').nth(22 - 3).and_then(|field| field.parse().ok());
    started.ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// Fails if it has ended: facts that were read by its number may be about another process.
fn is_there(peer: &Peer) -> io::Result<()> {
    if peer.is_alive() { Ok(()) } else { Err(io::ErrorKind::NotFound.into()) }
}

/// Takes another descriptor of a userfaultfd that it has, by its inode ([`inode_of`]), whatever its numbers are there.
///
/// # Errors
/// [`io::ErrorKind::NotFound`] if it has closed it, and [`io::ErrorKind::QuotaExceeded`] if it is not among 65,536
/// descriptors that were looked at. Otherwise the error of the system: this process may not take its descriptors,
/// which takes the same user, or `CAP_SYS_PTRACE` and `CAP_DAC_READ_SEARCH`.
pub(crate) fn userfaultfd(peer: &Peer, inode: u64) -> io::Result<OwnedFd> {
    for (count, entry) in std::fs::read_dir(format!("/proc/{}/fd", peer.pid()))?.enumerate() {
        if count >= COMPARED {
            return Err(io::ErrorKind::QuotaExceeded.into());
        }
        let path = entry?.path();
        // Other files may be of a file system that does not answer. It may have been closed meanwhile.
        let found = std::fs::read_link(&path).and_then(|link| match link.to_str() {
            Some(USERFAULTFD) => Ok(std::fs::metadata(&path)?.ino() == inode),
            _ => Ok(false),
        });
        match found {
            Ok(true) => {}
            Err(cause) if cause.kind() != io::ErrorKind::NotFound => return Err(cause),
            _ => continue,
        }
        let number = path.file_name().and_then(|name| name.to_str()?.parse().ok());
        // The pidfd may be of another process, as a caller may have made the two one peer.
        match peer.descriptor(number.ok_or(io::ErrorKind::InvalidData)?) {
            Ok(taken) if inode_of(&taken)? == inode => return Ok(taken),
            Err(cause) if cause.raw_os_error() != Some(Errno::BADF.raw_os_error()) => {
                return Err(cause);
            }
            _ => {}
        }
    }
    is_there(peer)?;
    Err(io::ErrorKind::NotFound.into())
}

/// Opens its memory for reading, by its addresses, and its page table (`/proc/PID/mem` and `pagemap`).
///
/// # Errors
/// The error of the system: it has ended, or this process may not read it. That takes the same user, or
/// `CAP_SYS_PTRACE` and, since the files are its user's, `CAP_DAC_READ_SEARCH`.
pub(crate) fn open_memory(peer: &Peer) -> io::Result<(File, File)> {
    let open = |name| File::open(format!("/proc/{}/{name}", peer.pid()));
    let opened = (open("mem")?, open("pagemap")?);
    is_there(peer)?;
    Ok(opened)
}

/// Returns whether this process may end it, or it has ended.
pub(crate) fn can_be_killed(peer: &Peer) -> bool {
    let Some(pid) = Pid::from_raw(peer.pid().cast_signed()) else { return false };
    // By the number, since a pidfd cannot be asked before it has ended: a wrong answer for another
    // process of the same number is of one that has.
    rustix::process::test_kill_process(pid) != Err(Errno::PERM)
}

/// Ends the process of a pidfd.
///
/// # Errors
/// The error of pidfd_send_signal(2): this process may not, or it has ended.
pub(crate) fn kill(pidfd: impl AsFd) -> io::Result<()> {
    Ok(rustix::process::pidfd_send_signal(pidfd, Signal::KILL)?)
}

/// Returns the inode of an open file; no two userfaultfds have the same.
///
/// # Errors
/// The error of fstat(2).
pub(crate) fn inode_of(fd: impl AsFd) -> io::Result<u64> {
    Ok(rustix::fs::fstat(fd)?.st_ino)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    /// Returns a userfaultfd, unless this user may have none.
    fn new_userfaultfd() -> Option<OwnedFd> {
        use uzone_os::uffd::{Features, KernelFaults, Uffd};
        let opened = Uffd::open(Features::NONE, Features::NONE, KernelFaults::IfAllowed);
        Some(opened.ok()?.as_fd().try_clone_to_owned().unwrap())
    }

    #[test]
    fn a_number_of_one_process_and_the_pidfd_of_another_are_no_peer_that_has_a_file() {
        let Some(own) = new_userfaultfd() else { return };
        let (reader, _writer) = io::pipe().unwrap();
        let mut command = std::process::Command::new("/bin/cat");
        let mut other = command.stdin(reader).spawn().unwrap();
        let pidfd = rustix::process::pidfd_open(Pid::from_child(&other), PidfdFlags::empty());
        let peer = Peer::from_parts(std::process::id(), 0, pidfd.unwrap()).unwrap();
        let taken = userfaultfd(&peer, inode_of(&own).unwrap()).map_err(|cause| cause.kind());
        other.kill().unwrap();
        other.wait().unwrap();
        assert_eq!(taken.unwrap_err(), io::ErrorKind::NotFound);
    }

    #[test]
    fn a_process_is_found_again_by_its_number_and_start_and_so_is_its_userfaultfd_by_any_number() {
        let (one, _other) = UnixStream::pair().unwrap();
        let peer = Peer::of(&one).unwrap();
        let started = started(&peer).unwrap();
        let again = of_number(peer.pid(), peer.uid(), started).unwrap();
        let earlier = of_number(peer.pid(), peer.uid(), started - 1);
        assert_eq!(earlier.unwrap_err().kind(), io::ErrorKind::NotFound);
        let Some((first, second)) = new_userfaultfd().zip(new_userfaultfd()) else { return };
        let [of_first, of_second] = [&first, &second].map(|fd| inode_of(fd).unwrap());
        assert_ne!(of_first, of_second);
        let other = first.try_clone().unwrap();
        drop(first);
        assert_eq!(inode_of(userfaultfd(&again, of_first).unwrap()).unwrap(), of_first);
        drop(other);
        let closed = userfaultfd(&again, of_first).map_err(|cause| cause.kind());
        assert_eq!(closed.unwrap_err(), io::ErrorKind::NotFound);
        assert_eq!(inode_of(userfaultfd(&again, of_second).unwrap()).unwrap(), of_second);
    }
}
