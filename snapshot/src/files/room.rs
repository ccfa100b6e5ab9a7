//! The room in a directory: [`room`].
//!
//! It is a snapshot: other processes write too, and a quota of the user is not in it, so a write can still fail.
//!
//! Source: statfs(2), getrlimit(2) "RLIMIT_FSIZE".

use std::io;
use std::path::Path;

use rustix::process::{Resource, getrlimit};
use uzone_pages::ByteLen;

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_says_what_there_is_room_for_and_whether_it_is_memory() {
        let here = room(&std::env::temp_dir()).unwrap();
        assert!(here.free > ByteLen::ZERO, "{here:?}");
        assert!(room(Path::new("/dev/shm")).is_ok_and(|room| room.is_memory));
        assert!(!room(Path::new("/proc")).unwrap().is_memory);
        assert_eq!(room(Path::new("/none")).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
