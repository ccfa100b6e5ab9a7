//! Files without a name: [`nameless_file`].
//!
//! Source: `O_TMPFILE` in open(2).

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

/// Makes a file in a directory's file system that has no name there, open to read and write.
///
/// It goes when the last descriptor and mapping of it go, also if the process is killed. On file systems
/// that make none without a name (`O_TMPFILE`), it has one for the moment until it is removed.
///
/// # Errors
/// What the system answered: the directory is not there, nobody may write to it, or it has no room.
pub fn nameless_file(directory: &Path) -> io::Result<File> {
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    match rustix::fs::open(directory, flags, Mode::RUSR | Mode::WUSR) {
        // Kernels before 3.11 take the flag for opening a directory to write; network file systems
        // say that they do not support it.
        Err(Errno::OPNOTSUPP | Errno::ISDIR) => for_a_moment(directory),
        answer => Ok(File::from(answer?)),
    }
}

/// Makes a file and removes its name.
fn for_a_moment(directory: &Path) -> io::Result<File> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed); // a name, and nothing else
    let path = directory.join(format!(".uzone-{}-{number}", std::process::id()));
    let file = File::options().read(true).write(true).create_new(true).open(&path)?;
    std::fs::remove_file(&path)?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{FileExt, MetadataExt};

    #[test]
    fn a_nameless_file_holds_bytes_and_its_directory_stays_empty() {
        let directory = std::env::temp_dir().join(format!("uzone-nameless-{}", std::process::id()));
        std::fs::create_dir(&directory).expect("a directory of our own");
        for make in [nameless_file, for_a_moment] {
            let file = make(&directory).expect("a file");
            file.write_all_at(b"bytes", 3).expect("it can be written");
            let mut bytes = [0; 5];
            file.read_exact_at(&mut bytes, 3).expect("it can be read");
            assert_eq!(&bytes, b"bytes");
            assert_eq!(file.metadata().expect("it is there").nlink(), 0);
            assert_eq!(std::fs::read_dir(&directory).expect("the directory").count(), 0);
        }
        std::fs::remove_dir(&directory).expect("it is ours, and empty");
        for make in [nameless_file, for_a_moment] {
            let missing = make(&directory).expect_err("there is no directory");
            assert_eq!(missing.kind(), io::ErrorKind::NotFound);
        }
    }
}
