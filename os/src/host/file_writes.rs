//! Whether reads of a file are of the page cache, and writes go where they belong: [`check_readable`],
//! [`check_writable`].
//!
//! Direct reads pass the page cache, and fail unless the buffer is aligned as the file system wants.
//! A file that is open for appending is written at its end, whatever offset pwrite(2) is given.
//! Source: open(2) on `O_DIRECT`, pwrite(2) "BUGS".

use std::io;
use std::os::fd::AsFd;

use rustix::fs::OFlags;

/// Checks that reads through a descriptor are of the page cache.
///
/// # Errors
/// [`io::ErrorKind::PermissionDenied`] if it is not open for reading, [`io::ErrorKind::InvalidInput`] if it is with
/// `O_DIRECT`, and the error of fcntl(2).
pub fn check_readable(file: impl AsFd) -> io::Result<()> {
    let flags = rustix::fs::fcntl_getfl(file)?;
    let (kind, why) = if flags & OFlags::RWMODE == OFlags::WRONLY {
        (io::ErrorKind::PermissionDenied, "the file is not open for reading")
    } else if flags.contains(OFlags::DIRECT) {
        (io::ErrorKind::InvalidInput, "the file is open with O_DIRECT: open it without that")
    } else {
        return Ok(());
    };
    Err(io::Error::new(kind, why))
}

/// Checks that a descriptor writes at any offset that it is given.
///
/// # Errors
/// [`io::ErrorKind::PermissionDenied`] if it is not open for writing, or is for appending, and the error of fcntl(2).
pub fn check_writable(file: impl AsFd) -> io::Result<()> {
    let flags = rustix::fs::fcntl_getfl(file)?;
    let why = if flags & OFlags::RWMODE == OFlags::RDONLY {
        "the file is not open for writing"
    } else if flags.contains(OFlags::APPEND) {
        "the file is open for appending: open it without that"
    } else {
        return Ok(());
    };
    Err(io::Error::new(io::ErrorKind::PermissionDenied, why))
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn a_descriptor_says_why_it_cannot_read_or_write_at_an_offset() {
        let path = std::env::temp_dir().join(format!("uzone-file-writes-{}", std::process::id()));
        let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
        check_writable(&file).unwrap();
        check_readable(&file).unwrap();
        let file = File::options().append(true).open(&path).unwrap();
        assert!(check_writable(&file).unwrap_err().to_string().contains("appending"));
        assert!(check_readable(&file).unwrap_err().to_string().contains("reading"));
        let file = File::open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert!(check_writable(&file).unwrap_err().to_string().contains("not open for writing"));
    }
}
