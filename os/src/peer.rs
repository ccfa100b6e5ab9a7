//! The process at the other end of a Unix socket: [`Peer`], which is distinguished from every later process of the
//! same number, and the descriptors that go to it and come from it ([`send`], [`receive`]).
//!
//! Unsafe: getsockopt(2) with `SO_PEERPIDFD`, which rustix does not wrap, and with `SO_PEERCRED`; process_madvise(2).
//! Source: unix(7), pidfd_open(2), pidfd_getfd(2), process_madvise(2).

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
pub use rustix::net::ReturnFlags;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags};

use uzone_pages::ByteLen;

use crate::host::kernel::MADV_COLLAPSE;
use crate::map::advise;
use crate::map::options::Vaddr;

/// `SO_PEERPIDFD`: asm-generic/socket.h.
const PEER_PIDFD: libc::c_int = 77;

/// The most descriptors that go with one message; the kernel closes further ones.
const DESCRIPTORS: usize = 20;

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
        let mut ended = [PollFd::new(&self.pidfd, PollFlags::IN)];
        rustix::event::poll(&mut ended, Some(&Timespec::default())).is_ok_and(|ready| ready == 0)
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
/// [`io::ErrorKind::InvalidData`] if more than 20 descriptors came at once, of which those beyond are
/// closed; otherwise the error of recvmsg(2), as [`io::ErrorKind::WouldBlock`] of a socket that does not
/// wait.
pub fn receive(stream: impl AsFd, buffer: &mut [u8], fds: &mut Vec<OwnedFd>) -> io::Result<usize> {
    let (bytes, flags) = receive_message(stream, buffer, fds)?;
    if flags.contains(ReturnFlags::CTRUNC) {
        return Err(io::ErrorKind::InvalidData.into());
    }
    Ok(bytes)
}

/// Receives bytes and descriptors as [`receive`] does. Returns the number of bytes, and the kernel's flags, which state
/// whether bytes or descriptors were cut off.
///
/// # Errors
/// The error of recvmsg(2).
pub fn receive_message(
    socket: impl AsFd,
    buffer: &mut [u8],
    fds: &mut Vec<OwnedFd>,
) -> io::Result<(usize, ReturnFlags)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
    loop {
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut parts = [IoSliceMut::new(buffer)];
        let flags = RecvFlags::CMSG_CLOEXEC;
        let received = match rustix::net::recvmsg(&socket, &mut parts, &mut control, flags) {
            Err(Errno::INTR) => continue,
            received => received?,
        };
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(came) = message {
                fds.extend(came);
            }
        }
        return Ok((received.bytes, received.flags));
    }
}

/// Sends bytes, at least one, and up to 20 descriptors with the first of them. Returns the number of bytes that were
/// taken.
///
/// # Errors
/// [`io::ErrorKind::InvalidInput`] for no byte or more descriptors; otherwise the error of sendmsg(2). No
/// signal is raised if the other side has ended.
pub fn send(socket: impl AsFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<usize> {
    if bytes.is_empty() || fds.len() > DESCRIPTORS {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        unreachable!("there is room for that many");
    }
    let parts = [IoSlice::new(bytes)];
    loop {
        match rustix::net::sendmsg(&socket, &parts, &mut control, SendFlags::NOSIGNAL) {
            Err(Errno::INTR) => {}
            sent => return Ok(sent?),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn the_other_end_is_this_process_and_can_be_waited_for() {
        let (one, _other) = UnixStream::pair().unwrap();
        let peer = Peer::of(&one).unwrap();
        assert_eq!(peer.pid(), std::process::id());
        assert!(peer.is_alive());
        let set = crate::uffd::EventSet::new().unwrap();
        set.add(&peer, 1).unwrap();
        let mut ready = Vec::new();
        set.wait(&mut ready, Some(std::time::Duration::ZERO)).unwrap();
        assert_eq!(ready, [], "it has not ended");
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
        assert!(send(&one, b"ab", &[one.as_fd(); 21]).is_err() && send(&one, b"", &[]).is_err());
        send_many(24);
        let error = receive(&other, &mut buffer, &mut fds).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        other.write_all(b"x").unwrap();
        fds.clear();
        assert_eq!(receive(&one, &mut buffer, &mut fds).unwrap(), 1);
        drop(other);
        assert_eq!(receive(&one, &mut buffer, &mut fds).unwrap(), 0);
    }
}
