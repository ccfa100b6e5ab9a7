//! The socket that monitors connect to: [`ListeningSocket`]. It has its group and its mode from the first moment on,
//! since a monitor that may not connect ends its VM, and a socket that a dead server left is replaced.

use std::fs::{self, File};
use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, chown};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_encode};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::error::ServeError;

/// The longest time to wait for another server that makes its socket, and the pause between two looks.
const TURN: Duration = Duration::from_secs(1);
const PAUSE: Duration = Duration::from_millis(1);
/// The longest path of a socket: unix(7).
const LONGEST: usize = 107;
/// The number of sockets that were made: their first names differ by it.
static NEXT: AtomicU64 = AtomicU64::new(0);

/// The most connections that may wait to be accepted.
const BACKLOG: i32 = 4096;

/// Makes a socket with a name that does not exist yet. It refuses connections until [`listen`], so that it can be
/// given its owner and its mode before.
///
/// # Errors
/// The error of socket(2) or bind(2).
fn named(path: &Path) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (family, kind) = (AddressFamily::UNIX, SocketType::STREAM);
    let socket = rustix::net::socket_with(family, kind, flags, None)?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

/// Listens on a socket of [`named`]; accepting a connection does not wait for one.
///
/// # Errors
/// The error of listen(2).
fn listen(socket: OwnedFd) -> io::Result<UnixListener> {
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(UnixListener::from(socket))
}

/// A socket with a name, which is removed when this is dropped.
#[derive(Debug)]
pub(crate) struct ListeningSocket {
    pub(crate) listener: UnixListener,
    path: PathBuf,
    /// The identity of the file with the name: another process may have taken the name meanwhile.
    file: Option<(u64, u64)>,
    /// Whether another process has the name.
    is_left: bool,
}

/// Waits until no other server makes a socket in a folder; not for long, since any user may hold that up.
pub(crate) fn turn_in(folder: Option<&Path>) -> Option<File> {
    let folder = folder.filter(|folder| !folder.as_os_str().is_empty());
    let lock = File::open(folder.unwrap_or(Path::new("."))).ok()?;
    let begun = Instant::now();
    while lock.try_lock().is_err() {
        if begun.elapsed() >= TURN {
            return None;
        }
        thread::sleep(PAUSE);
    }
    Some(lock)
}

/// Returns the identity of a file: its device and inode.
fn file_at(path: &Path) -> Option<(u64, u64)> {
    fs::symlink_metadata(path).ok().map(|metadata| (metadata.dev(), metadata.ino()))
}

/// The bytes of the path of a socket that a name has as `%` and two digits.
const ESCAPED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'/').remove(b'.').remove(b'-').remove(b'_');

/// Returns the path of a socket for a name.
pub(crate) fn escaped(path: &Path) -> String {
    percent_encode(path.as_os_str().as_bytes(), ESCAPED).to_string()
}

impl ListeningSocket {
    /// Listens on `path`. `mode` is the mode of the socket's file: connecting takes the right to write. Its group is the
    /// group of this process unless `group` names another.
    pub(crate) fn bind(path: &Path, mode: u32, group: Option<u32>) -> Result<Self, ServeError> {
        // Of two servers that start at once, the second finds the first.
        let _turn = turn_in(path.parent());
        if UnixStream::connect(path).is_ok() {
            return Err(ServeError::InUse { path: path.to_owned() });
        }
        Self::replace(path, mode, group)
    }

    /// Listens on `path` as [`ListeningSocket::bind`] does, also in the place of a process that listens there
    /// and leaves the name to this one.
    pub(crate) fn replace(path: &Path, mode: u32, group: Option<u32>) -> Result<Self, ServeError> {
        let failed = ServeError::at("listen on", path);
        match fs::symlink_metadata(path) {
            Ok(metadata) if !metadata.file_type().is_socket() => {
                return Err(ServeError::NotASocket { path: path.to_owned() });
            }
            Ok(_) => {}
            Err(cause) if cause.kind() == io::ErrorKind::NotFound => {}
            Err(cause) => return Err(failed(cause)),
        }
        if path.as_os_str().len() > LONGEST {
            let reason = format!("no client can connect to a path of more than {LONGEST} bytes");
            return Err(failed(io::Error::new(io::ErrorKind::InvalidInput, reason)));
        }
        // It gets its name when it has its group and then its mode: no other group has the rights of that.
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let hidden = path.with_file_name(format!(".{}-{number}", std::process::id()));
        let _ = fs::remove_file(&hidden);
        // It is listened on afterwards, so that no process has connected before.
        let bound = named(&hidden).map_err(failed).and_then(|socket| {
            if let Some(group) = group {
                chown(&hidden, None, Some(group)).map_err(|cause| ServeError::Group {
                    path: path.to_owned(),
                    group,
                    cause,
                })?;
            }
            fs::set_permissions(&hidden, fs::Permissions::from_mode(mode)).map_err(failed)?;
            let listener = listen(socket).map_err(failed)?;
            let file = file_at(&hidden);
            fs::rename(&hidden, path).map_err(failed)?;
            Ok((listener, file))
        });
        if bound.is_err() {
            let _ = fs::remove_file(&hidden);
        }
        let (listener, file) = bound?;
        Ok(Self { listener, path: path.to_owned(), file, is_left: false })
    }

    /// Takes the socket that a service manager passed. Its name is this process's to remove if `is_named`.
    pub(crate) fn passed(path: &Path, fd: OwnedFd, is_named: bool) -> Result<Self, ServeError> {
        let listener = UnixListener::from(fd);
        // A socket that the manager made may wait.
        listener.set_nonblocking(true).map_err(ServeError::at("listen on", path))?;
        Ok(Self { listener, path: path.to_owned(), file: file_at(path), is_left: !is_named })
    }

    /// Returns whether the name is this process's to remove.
    pub(crate) fn is_named(&self) -> bool {
        !self.is_left
    }

    /// Stops connections to the socket, in every process that has it. Connections that are made already can
    /// still be accepted.
    pub(crate) fn close(&self) {
        self.remove_name();
        // std has shutdown(2) for streams alone; it fails only without a descriptor for it.
        let _ = self
            .listener
            .as_fd()
            .try_clone_to_owned()
            .and_then(|socket| UnixStream::from(socket).shutdown(Shutdown::Both));
    }

    fn remove_name(&self) {
        if !self.is_left && self.file == file_at(&self.path) {
            // If it is gone already, there is nothing to remove.
            let _ = fs::remove_file(&self.path);
        }
    }

    /// Leaves the name to another process.
    pub(crate) fn leave(mut self) {
        self.is_left = true;
    }
}

impl Drop for ListeningSocket {
    fn drop(&mut self) {
        self.remove_name();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A child that another test forked has a descriptor of the socket until it executes its program.
    fn wait_until_dead(socket: &Path) {
        let give_up = Instant::now() + Duration::from_secs(20);
        while UnixStream::connect(socket).is_ok() {
            assert!(Instant::now() < give_up, "the socket is listened on");
            thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn of_servers_that_start_at_once_one_has_the_socket() {
        let folder = std::env::temp_dir().join(format!("uzone-at-once-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let (path, together) = (folder.join("s"), std::sync::Barrier::new(4));
        for round in 0..20 {
            let bind = || {
                together.wait();
                ListeningSocket::bind(&path, 0o600, None)
            };
            let bound = thread::scope(|scope| {
                let all = [(); 4].map(|()| scope.spawn(bind));
                all.map(|one| one.join().unwrap().ok())
            });
            assert_eq!(bound.iter().flatten().count(), 1, "round {round}");
            assert!(UnixStream::connect(&path).is_ok());
            // Like a server that was killed: the name stays.
            for socket in bound.into_iter().flatten() {
                if round % 2 == 0 {
                    socket.leave();
                }
            }
            wait_until_dead(&path);
        }
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_socket_has_its_mode_replaces_a_dead_one_and_leaves_a_living_one() {
        let folder = std::env::temp_dir().join(format!("uzone-socket-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let path = folder.join("s");
        let first = ListeningSocket::bind(&path, 0o620, None).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o620);
        let error = ListeningSocket::bind(&path, 0o600, None).unwrap_err();
        assert!(matches!(error, ServeError::InUse { .. }), "{error}");
        // Like a server that was killed: the name stays.
        let ListeningSocket { listener, .. } = &first;
        let _ = listener.accept();
        drop(UnixListener::bind(folder.join("dead")).unwrap());
        wait_until_dead(&folder.join("dead"));
        drop(ListeningSocket::bind(&folder.join("dead"), 0o600, None).unwrap());
        assert!(!folder.join("dead").exists(), "it was removed when it was dropped");
        fs::write(folder.join("file"), "kept").unwrap();
        let error = ListeningSocket::bind(&folder.join("file"), 0o600, None).unwrap_err();
        assert!(matches!(error, ServeError::NotASocket { .. }), "{error}");
        assert_eq!(fs::read(folder.join("file")).unwrap(), b"kept");
        // Nor does a server remove the name of the one after it.
        fs::remove_file(&path).unwrap();
        let second = ListeningSocket::bind(&path, 0o600, None).unwrap();
        drop(first);
        assert!(UnixStream::connect(&path).is_ok());
        drop(second);
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 1, "nothing else is left");
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn a_socket_refuses_connections_until_it_is_prepared() {
        let path = std::env::temp_dir().join(format!("uzone-socket-{}", std::process::id()));
        let connected = || UnixStream::connect(&path).map(drop).map_err(|cause| cause.kind());
        let socket = named(&path).unwrap();
        assert_eq!(connected(), Err(io::ErrorKind::ConnectionRefused));
        let listener = listen(socket).unwrap();
        assert_eq!(connected(), Ok(()));
        assert!(listener.accept().is_ok());
        assert_eq!(listener.accept().unwrap_err().kind(), io::ErrorKind::WouldBlock);
        assert_eq!(named(&path).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        fs::remove_file(&path).unwrap();
    }
}
