//! Room in a directory, and files in it that have no name, for good or until they are finished: [`room`],
//! [`nameless_file`], [`NewFile`], [`OutFile`]. Files of a directory
//! that others may write to: [`Folder`]. The holes of sparse files: [`next_data`], [`data_from`],
//! [`hole_problem`].
//!
//! The room is a snapshot: other processes write too, and a quota of the user is not in it, so a write can
//! still fail. A file without a name is gone with its last descriptor, however the process ends.
//!
//! Source: statfs(2), getrlimit(2) "RLIMIT_FSIZE", open(2) "O_TMPFILE".

mod folder;
mod holes;
mod new_file;

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::thread;
use std::time::Duration;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};
use uzone_pages::ByteLen;

use crate::host::signals::Held;

pub use folder::{Folder, lock_within};
pub use holes::{data_from, hole_problem, next_data};
pub use new_file::{NewFile, OutFile, is_stdout, mode_for};

/// `TMPFS_MAGIC` and `RAMFS_MAGIC` of linux/magic.h.
const IN_MEMORY: [i128; 2] = [0x0102_1994, 0x8584_58f6];

/// The room in a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// The bytes that the file system has left for this user.
    pub free: ByteLen,
    /// The longest file by the limits of this process (`ulimit -f`); `None` is as long as there
    /// is room. A write behind that raises a signal.
    pub longest_file: Option<ByteLen>,
    /// Whether files there take memory: it is a tmpfs.
    pub is_memory: bool,
}

/// Returns the room in a directory.
///
/// # Errors
/// The error of statfs(2): there is no such directory, or it may not be looked into.
pub fn room(directory: &Path) -> io::Result<Room> {
    let stat = rustix::fs::statfs(directory)?;
    let whole = rustix::fs::statvfs(directory)?;
    Ok(Room {
        free: ByteLen::new(whole.f_bavail.saturating_mul(whole.f_frsize)),
        longest_file: getrlimit(Resource::Fsize).current.map(ByteLen::new),
        is_memory: IN_MEMORY.contains(&i128::from(stat.f_type)),
    })
}

/// Makes a file without a name in a directory, open for reading and writing, for this user alone.
///
/// # Errors
/// The error of open(2).
pub fn nameless_file(directory: &Path) -> io::Result<File> {
    open_nameless(directory, Mode::RUSR | Mode::WUSR)?.map_or_else(|| renounce_name(directory), Ok)
}

/// Makes a file without a name, or returns `None` where the file system has none: it refuses them, or it or the
/// kernel ignores the flag and opens the directory.
fn open_nameless(directory: &Path, mode: Mode) -> io::Result<Option<File>> {
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    match rustix::fs::open(directory, flags, mode) {
        Ok(fd) => Ok(Some(fd.into())),
        Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL) => Ok(None),
        Err(cause) => Err(cause.into()),
    }
}

/// Makes a file and takes its name away, where the file system knows no other way.
fn renounce_name(directory: &Path) -> io::Result<File> {
    // A signal that ends the process in between would leave the name.
    let _held = Held::hold();
    let mut made = NewFile::create_hidden(directory.join("uzone"), Mode::RUSR | Mode::WUSR)?;
    let file = made.file.try_clone()?;
    if let Some(hidden) = made.hidden.take() {
        std::fs::remove_file(hidden)?;
    }
    Ok(file)
}

/// The pause before a read that a device has failed is tried again.
const AGAIN: [Duration; 3] =
    [Duration::from_millis(10), Duration::from_millis(50), Duration::from_millis(250)];

/// Reads bytes of a file from `offset` on. Where the device fails (`EIO`), it is tried again a few times within a third of
/// a second: a path to a disk is lost and found again.
///
/// # Errors
/// The errors of [`FileExt::read_exact_at`].
pub fn read_exact_at(file: &File, out: &mut [u8], offset: u64) -> io::Result<()> {
    patiently(|| file.read_exact_at(out, offset))
}

fn patiently(mut read: impl FnMut() -> io::Result<()>) -> io::Result<()> {
    for pause in AGAIN {
        match read() {
            Err(cause) if cause.raw_os_error() == Some(libc::EIO) => thread::sleep(pause),
            read => return read,
        }
    }
    read()
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Seek, Write};

    use super::*;

    #[test]
    fn a_read_that_a_device_has_failed_is_tried_again_and_another_error_is_not() {
        let times = |failures: u32, error: i32| {
            let mut count = 0;
            let read = patiently(|| {
                count += 1;
                if count <= failures { Err(io::Error::from_raw_os_error(error)) } else { Ok(()) }
            });
            (count, read.is_ok())
        };
        assert_eq!(times(0, libc::EIO), (1, true));
        assert_eq!(times(2, libc::EIO), (3, true));
        assert_eq!(times(9, libc::EIO), (4, false));
        assert_eq!(times(1, libc::EACCES), (1, false));
        // Memory that is not mapped is such a device.
        let memory = File::open("/proc/self/mem").unwrap();
        let cause = read_exact_at(&memory, &mut [0; 8], 0).unwrap_err();
        assert_eq!(cause.raw_os_error(), Some(libc::EIO));
    }

    #[test]
    fn a_file_without_a_name_holds_bytes_and_is_in_no_directory() {
        let directory = std::env::temp_dir().join(format!("uzone-nameless-{}", std::process::id()));
        std::fs::create_dir(&directory).unwrap();
        let ways: [fn(&Path) -> io::Result<File>; 2] = [nameless_file, renounce_name];
        for make in ways {
            let mut file = make(&directory).unwrap();
            file.write_all(b"bytes").unwrap();
            file.rewind().unwrap();
            let mut text = String::new();
            file.read_to_string(&mut text).unwrap();
            assert_eq!(text, "bytes");
            assert_eq!(std::fs::read_dir(&directory).unwrap().count(), 0);
        }
        std::fs::remove_dir(&directory).unwrap();
        let missing = nameless_file(&directory).unwrap_err();
        assert_eq!(missing.kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn a_directory_says_what_there_is_room_for_and_whether_it_is_memory() {
        let here = room(&std::env::temp_dir()).unwrap();
        assert!(here.free > ByteLen::ZERO, "{here:?}");
        assert!(room(Path::new("/dev/shm")).is_ok_and(|room| room.is_memory));
        assert!(!room(Path::new("/proc")).unwrap().is_memory);
        assert_eq!(room(Path::new("/none")).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
