//! Where writes to a file go: [`file_writes`].
//!
//! A file that is open for appending is written at its end, whatever offset pwrite(2) is given.
//! Source: open(2), pwrite(2) "BUGS".

use std::io;
use std::os::fd::AsFd;

use rustix::fs::OFlags;

/// Where writes through a descriptor go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FileWrites {
    /// Where they are asked to.
    Anywhere,
    /// To the end of the file, also if they are asked to go elsewhere.
    AtTheEnd,
    /// It is not open for writing.
    Nowhere,
}

/// Returns where writes through a descriptor go.
///
/// # Errors
/// The error of fcntl(2).
pub fn file_writes(file: impl AsFd) -> io::Result<FileWrites> {
    let flags = rustix::fs::fcntl_getfl(file)?;
    Ok(if flags & OFlags::RWMODE == OFlags::RDONLY {
        FileWrites::Nowhere
    } else if flags.contains(OFlags::APPEND) {
        FileWrites::AtTheEnd
    } else {
        FileWrites::Anywhere
    })
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn a_descriptor_says_where_its_writes_go() {
        let path = std::env::temp_dir().join(format!("uzone-file-writes-{}", std::process::id()));
        let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
        assert_eq!(file_writes(&file).unwrap(), FileWrites::Anywhere);
        let file = File::options().append(true).open(&path).unwrap();
        assert_eq!(file_writes(&file).unwrap(), FileWrites::AtTheEnd);
        let file = File::open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert_eq!(file_writes(&file).unwrap(), FileWrites::Nowhere);
    }
}
