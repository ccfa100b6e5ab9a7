//! The process at the other end of a Unix socket: [`Peer`], which is distinguished from every later process of the
//! same number, and the descriptors that go to it and come from it ([`send`], [`receive`]).
//!
//! Unsafe: getsockopt(2) with `SO_PEERPIDFD`, which rustix does not wrap, and with `SO_PEERCRED`; process_madvise(2).
//! Source: unix(7), pidfd_open(2), pidfd_send_signal(2), pidfd_getfd(2), process_madvise(2), proc_pid_fd(5),
//! proc_pid_stat(5), proc_pid_mem(5), proc_pid_pagemap(5).

use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::ReturnFlags;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, Signal};

use uzone_pages::ByteLen;

use crate::host::kernel::MADV_COLLAPSE;
use crate::ipc::unix_socket;
use crate::map::advise;
use crate::map::options::Vaddr;

/// `SO_PEERPIDFD`: asm-generic/socket.h.
const PEER_PIDFD: libc::c_int = 77;

/// The most descriptors that one receive takes; the kernel closes further ones.
const DESCRIPTORS: usize = 16;

/// The most descriptors of a process that are looked at: more take this process too long.
const COMPARED: usize = 1 << 16;
/// The name of a userfaultfd in `/proc/PID/fd`.
const USERFAULTFD: &str = "anon_inode:[userfaultfd]";

/// A process that connected to a Unix socket.
#[derive(Debug)]
pub struct Peer {
    pid: Pid,
    uid: u32,
    pidfd: OwnedFd,
}

impl Peer {
    /// Returns the process that made the other end of `stream`.
    ///
    /// # Errors
    /// [`io::ErrorKind::Unsupported`] if the process is of a PID namespace that this one cannot see into, and
    /// otherwise the error of the system: it has ended, or this process has as many descriptors as it may.
    pub fn of(stream: &UnixStream) -> io::Result<Self> {
        let (pid, uid) = peer_credentials(stream.as_fd())?;
        Ok(Self { pid, uid, pidfd: peer_pidfd(stream.as_fd())? })
    }

    /// Takes a peer from the facts of another process: its number, its user, and a pidfd of it. `None` for a number that
    /// no process has.
    #[must_use]
    pub fn from_parts(pid: u32, uid: u32, pidfd: OwnedFd) -> Option<Self> {
        let pid = Pid::from_raw(pid.cast_signed())?;
        Some(Self { pid, uid, pidfd })
    }

    /// Returns the process that has this number now.
    ///
    /// # Errors
    /// The error of pidfd_open(2): there is none.
    pub fn of_number_now(pid: u32) -> io::Result<Self> {
        let pid = Pid::from_raw(pid.cast_signed()).ok_or(io::ErrorKind::InvalidInput)?;
        let pidfd = rustix::process::pidfd_open(pid, PidfdFlags::empty())?;
        let uid = std::fs::metadata(format!("/proc/{}", pid.as_raw_nonzero()))?.uid();
        Ok(Self { pid, uid, pidfd })
    }

    /// Returns whether it has not ended.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        self.is_there().is_ok()
    }

    /// Returns the process of this number that started then ([`Peer::started`]), of that user.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotFound`] if it has ended, and otherwise the error of the system.
    pub fn of_number(pid: u32, uid: u32, started: u64) -> io::Result<Self> {
        let pid = Pid::from_raw(pid.cast_signed()).ok_or(io::ErrorKind::InvalidInput)?;
        let pidfd = rustix::process::pidfd_open(pid, PidfdFlags::empty())?;
        let peer = Self { pid, uid, pidfd };
        if peer.started()? == started { Ok(peer) } else { Err(io::ErrorKind::NotFound.into()) }
    }

    /// Returns the time of its start, in clock ticks since the system did.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotFound`] if it has ended, and otherwise the error of the system.
    pub fn started(&self) -> io::Result<u64> {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.pid()))?;
        self.is_there()?;
        // Its name, in parentheses, may have any bytes; the state behind it is the third field.
        let fields = stat.rsplit_once(") ").map_or("", |(_, fields)| fields);
        let started = fields.split(' ').nth(22 - 3).and_then(|field| field.parse().ok());
        started.ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    /// Fails if it has ended: facts that were read by its number may be about another process.
    fn is_there(&self) -> io::Result<()> {
        let mut ended = [PollFd::new(&self.pidfd, PollFlags::IN)];
        match rustix::event::poll(&mut ended, Some(&Timespec::default()))? {
            0 => Ok(()),
            _ => Err(io::ErrorKind::NotFound.into()),
        }
    }

    /// Takes another descriptor of a userfaultfd that it has, by the [inode](inode_of), whatever its numbers are there.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotFound`] if it has closed it, and [`io::ErrorKind::QuotaExceeded`] if it is not among 65,536
    /// descriptors that were looked at. Otherwise the error of the system: this process may not take its descriptors,
    /// which takes the same user, or `CAP_SYS_PTRACE` and `CAP_DAC_READ_SEARCH`.
    pub fn userfaultfd(&self, inode: u64) -> io::Result<OwnedFd> {
        for (count, entry) in std::fs::read_dir(format!("/proc/{}/fd", self.pid()))?.enumerate() {
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
            match self.descriptor(number.ok_or(io::ErrorKind::InvalidData)?) {
                Ok(taken) if inode_of(&taken)? == inode => return Ok(taken),
                Err(cause) if cause.raw_os_error() != Some(libc::EBADF) => return Err(cause),
                _ => {}
            }
        }
        self.is_there()?;
        Err(io::ErrorKind::NotFound.into())
    }

    /// Takes another descriptor of a file that it has open.
    ///
    /// # Errors
    /// The error of pidfd_getfd(2): it has ended, has no such descriptor, or this process may not.
    pub fn descriptor(&self, number: u32) -> io::Result<OwnedFd> {
        let flags = PidfdGetfdFlags::empty();
        Ok(rustix::process::pidfd_getfd(&self.pidfd, number.cast_signed(), flags)?)
    }

    /// Returns its number.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.pid.as_raw_nonzero().get().unsigned_abs()
    }

    /// Returns its user.
    #[must_use]
    pub fn uid(&self) -> u32 {
        self.uid
    }

    /// Ends it.
    ///
    /// # Errors
    /// The error of pidfd_send_signal(2): this process may not, or it has ended.
    pub fn kill(&self) -> io::Result<()> {
        kill(&self.pidfd)
    }

    /// Opens its memory for reading, by its addresses, and its page table (`/proc/PID/mem` and `pagemap`).
    ///
    /// # Errors
    /// The error of the system: it has ended, or this process may not read it. That takes the same user, or
    /// `CAP_SYS_PTRACE` and, since the files are its user's, `CAP_DAC_READ_SEARCH`.
    pub fn open_memory(&self) -> io::Result<(File, File)> {
        let open = |name| File::open(format!("/proc/{}/{name}", self.pid()));
        let opened = (open("mem")?, open("pagemap")?);
        self.is_there()?;
        Ok(opened)
    }

    /// Makes huge pages of its memory from `start` on (`MADV_COLLAPSE`), whatever the host is set to. Both the
    /// address and the length are multiples of a huge page. Returns `None` if all are made, and
    /// otherwise the kernel's error: there is no free huge page, or pages are in use.
    ///
    /// No byte changes. Where missing pages raise events of a userfaultfd, a huge page of which a part is
    /// missing, or is the kernel's page of zeroes, is not made.
    ///
    /// # Errors
    /// The error of process_madvise(2): it has ended, this process may not, which takes `CAP_SYS_NICE` and the
    /// same user or `CAP_SYS_PTRACE`, or the kernel cannot do that with this memory.
    pub fn collapse(&self, start: Vaddr, len: ByteLen) -> io::Result<Option<io::Error>> {
        let at = usize::try_from(start.get()).map_err(io::Error::other)?;
        let iov_len = usize::try_from(len.get()).map_err(io::Error::other)?;
        let range = libc::iovec { iov_base: std::ptr::without_provenance_mut(at), iov_len };
        let (count, flags): (usize, libc::c_uint) = (1, 0);
        // SAFETY: process_madvise(2) reads one `iovec`, which lives over the call, and takes its address for one of
        // the other process. This advice moves bytes there and changes none.
        let answer = unsafe {
            libc::syscall(
                libc::SYS_process_madvise,
                self.pidfd.as_raw_fd(),
                &raw const range,
                count,
                MADV_COLLAPSE,
                flags,
            )
        };
        advise::collapsed(answer >= 0)
    }

    /// Returns whether this process may end it, or it has ended.
    #[must_use]
    pub fn can_be_killed(&self) -> bool {
        // By the number, since a pidfd cannot be asked before it has ended: a wrong answer for another
        // process of the same number is of one that has.
        rustix::process::test_kill_process(self.pid) != Err(Errno::PERM)
    }
}

/// It can be waited for: a pidfd is readable once its process has ended.
impl AsFd for Peer {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }
}

impl From<Peer> for OwnedFd {
    fn from(peer: Peer) -> Self {
        peer.pidfd
    }
}

/// Ends the process of a pidfd.
///
/// # Errors
/// The error of pidfd_send_signal(2): this process may not, or it has ended.
pub fn kill(pidfd: impl AsFd) -> io::Result<()> {
    Ok(rustix::process::pidfd_send_signal(pidfd, Signal::KILL)?)
}

/// Returns the inode of an open file; no two userfaultfds have the same.
///
/// # Errors
/// The error of fstat(2).
pub fn inode_of(fd: impl AsFd) -> io::Result<u64> {
    Ok(rustix::fs::fstat(fd)?.st_ino)
}

fn peer_pidfd(stream: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    // SAFETY: an integer of any bytes is one.
    let fd: libc::c_int = unsafe { socket_option(stream, PEER_PIDFD, -1) }?;
    // SAFETY: the kernel has just opened this descriptor for us, and it is taken once.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Returns the number and the user of the process at the other end. rustix takes the number for one that is
/// never 0, which it is for a process that this one cannot see.
fn peer_credentials(stream: BorrowedFd<'_>) -> io::Result<(Pid, u32)> {
    let none = libc::ucred { pid: 0, uid: 0, gid: 0 };
    // SAFETY: three integers of any bytes are a `ucred`.
    let who = unsafe { socket_option(stream, libc::SO_PEERCRED, none) }?;
    let pid = Pid::from_raw(who.pid).ok_or_else(|| {
        let text = "the process is of another PID namespace, which this one cannot see into";
        io::Error::new(io::ErrorKind::Unsupported, text)
    })?;
    Ok((pid, who.uid))
}

/// Returns an option of a socket.
///
/// # Safety
/// Each pattern of bytes is a `T`.
unsafe fn socket_option<T>(
    stream: BorrowedFd<'_>,
    option: libc::c_int,
    mut value: T,
) -> io::Result<T> {
    let mut len = u32::try_from(size_of::<T>()).map_err(io::Error::other)?;
    // SAFETY: getsockopt(2) writes at most `len` bytes to where it is pointed at, which is a value of that
    // size, and the length; both live over the call.
    let answer = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            option,
            (&raw mut value).cast(),
            &raw mut len,
        )
    };
    if answer == 0 { Ok(value) } else { Err(io::Error::last_os_error()) }
}

/// Receives the pending bytes of a Unix socket into `buffer`, and appends the descriptors that came along to `fds`; they
/// are closed when a program is started. Returns the number of bytes: zero at the end.
///
/// # Errors
/// [`io::ErrorKind::InvalidData`] if more than 16 descriptors came at once, of which those beyond are
/// closed; otherwise the error of recvmsg(2), as [`io::ErrorKind::WouldBlock`] of a socket that does not
/// wait.
pub fn receive(stream: impl AsFd, buffer: &mut [u8], fds: &mut Vec<OwnedFd>) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
    let (bytes, flags) = unix_socket::receive(stream.as_fd(), &mut space, buffer, fds)?;
    if flags.contains(ReturnFlags::CTRUNC) {
        return Err(io::ErrorKind::InvalidData.into());
    }
    Ok(bytes)
}

/// Sends bytes, at least one, and up to 16 descriptors with the first of them. Returns the number of bytes that were
/// taken.
///
/// # Errors
/// [`io::ErrorKind::InvalidInput`] for no byte or more descriptors; otherwise the error of sendmsg(2). No
/// signal is raised if the other side has ended.
pub fn send(socket: impl AsFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<usize> {
    if bytes.is_empty() || fds.len() > DESCRIPTORS {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    Ok(unix_socket::send(socket.as_fd(), bytes, fds)?)
}

#[cfg(test)]
mod tests {
    use std::io::{IoSlice, Write};

    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

    use super::*;

    #[test]
    fn the_other_end_is_this_process_and_can_be_waited_for() {
        let (one, _other) = UnixStream::pair().unwrap();
        let peer = Peer::of(&one).unwrap();
        assert_eq!(peer.pid(), std::process::id());
        assert!(peer.can_be_killed());
        let set = crate::uffd::EventSet::new().unwrap();
        set.add(&peer, 1).unwrap();
        let mut ready = Vec::new();
        set.wait(&mut ready, Some(std::time::Duration::ZERO)).unwrap();
        assert_eq!(ready, [], "it has not ended");
    }

    /// Returns a userfaultfd, unless this user may have none.
    fn userfaultfd() -> Option<OwnedFd> {
        use crate::uffd::{Features, KernelFaults, Uffd};
        let opened = Uffd::open(Features::NONE, Features::NONE, KernelFaults::IfAllowed);
        Some(opened.ok()?.as_fd().try_clone_to_owned().unwrap())
    }

    #[test]
    #[cfg_attr(miri, ignore = "it starts a process")]
    fn a_number_of_one_process_and_the_pidfd_of_another_are_no_peer_that_has_a_file() {
        let Some(own) = userfaultfd() else { return };
        let (reader, _writer) = io::pipe().unwrap();
        let mut command = std::process::Command::new("/bin/cat");
        let mut other = command.stdin(reader).spawn().unwrap();
        let pidfd = rustix::process::pidfd_open(Pid::from_child(&other), PidfdFlags::empty());
        let peer = Peer::from_parts(std::process::id(), 0, pidfd.unwrap()).unwrap();
        let taken = peer.userfaultfd(inode_of(&own).unwrap()).map_err(|cause| cause.kind());
        other.kill().unwrap();
        other.wait().unwrap();
        assert_eq!(taken.unwrap_err(), io::ErrorKind::NotFound);
    }

    #[test]
    #[cfg_attr(miri, ignore = "it asks for userfaultfds")]
    fn a_process_is_found_again_by_its_number_and_start_and_so_is_its_userfaultfd_by_any_number() {
        let (one, _other) = UnixStream::pair().unwrap();
        let peer = Peer::of(&one).unwrap();
        let started = peer.started().unwrap();
        let again = Peer::of_number(peer.pid(), peer.uid(), started).unwrap();
        let earlier = Peer::of_number(peer.pid(), peer.uid(), started - 1);
        assert_eq!(earlier.unwrap_err().kind(), io::ErrorKind::NotFound);
        let Some((first, second)) = userfaultfd().zip(userfaultfd()) else { return };
        let [of_first, of_second] = [&first, &second].map(|fd| inode_of(fd).unwrap());
        assert_ne!(of_first, of_second);
        let other = first.try_clone().unwrap();
        drop(first);
        assert_eq!(inode_of(again.userfaultfd(of_first).unwrap()).unwrap(), of_first);
        drop(other);
        let closed = again.userfaultfd(of_first).map_err(|cause| cause.kind());
        assert_eq!(closed.unwrap_err(), io::ErrorKind::NotFound);
        assert_eq!(inode_of(again.userfaultfd(of_second).unwrap()).unwrap(), of_second);
    }

    #[test]
    fn descriptors_come_with_the_bytes_and_too_many_are_an_error() {
        let (one, mut other) = UnixStream::pair().unwrap();
        // More than `send` takes.
        let send_many = |count: usize| {
            let fds = vec![one.as_fd(); count];
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(32))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
            let parts = [IoSlice::new(b"ab")];
            rustix::net::sendmsg(&one, &parts, &mut control, SendFlags::empty()).unwrap();
        };
        let (mut buffer, mut fds) = ([0; 8], Vec::new());
        assert_eq!(send(&one, b"ab", &[one.as_fd(); 2]).unwrap(), 2);
        assert_eq!(receive(&other, &mut buffer, &mut fds).unwrap(), 2);
        assert_eq!((&buffer[..2], fds.len()), (&b"ab"[..], 2));
        assert!(send(&one, b"ab", &[one.as_fd(); 17]).is_err() && send(&one, b"", &[]).is_err());
        send_many(20);
        let error = receive(&other, &mut buffer, &mut fds).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        other.write_all(b"x").unwrap();
        fds.clear();
        assert_eq!(receive(&one, &mut buffer, &mut fds).unwrap(), 1);
        drop(other);
        assert_eq!(receive(&one, &mut buffer, &mut fds).unwrap(), 0);
    }
}
