//! Whether reads of a file are of the page cache, and writes go where they belong: [`not_readable`], [`not_writable`].
//!
//! Direct reads pass the page cache, and fail unless the buffer is aligned as the file system wants.
//! A file that is open for appending is written at its end, whatever offset pwrite(2) is given.
//! Source: open(2) on `O_DIRECT`, pwrite(2) "BUGS".

use std::io;
use std::os::fd::AsFd;

use rustix::fs::OFlags;

/// Returns why reads through a descriptor are not of the page cache, or `None` if they are.
///
/// # Errors
/// The error of fcntl(2).
pub fn not_readable(file: impl AsFd) -> io::Result<Option<(io::ErrorKind, &'static str)>> {
    let flags = rustix::fs::fcntl_getfl(file)?;
    Ok(if flags & OFlags::RWMODE == OFlags::WRONLY {
        Some((io::ErrorKind::PermissionDenied, "the file is not open for reading"))
    } else if flags.contains(OFlags::DIRECT) {
        Some((io::ErrorKind::InvalidInput, "the file is open with O_DIRECT: open it without that"))
    } else {
        None
    })
}

/// Returns why a descriptor does not write at any offset that it is given, or `None` if it does.
///
/// # Errors
/// The error of fcntl(2).
pub fn not_writable(file: impl AsFd) -> io::Result<Option<&'static str>> {
    let flags = rustix::fs::fcntl_getfl(file)?;
    Ok(if flags & OFlags::RWMODE == OFlags::RDONLY {
        Some("the file is not open for writing")
    } else if flags.contains(OFlags::APPEND) {
        Some("the file is open for appending: open it without that")
    } else {
        None
    })
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn a_descriptor_says_why_it_cannot_read_or_write_at_an_offset() {
        let path = std::env::temp_dir().join(format!("uzone-file-writes-{}", std::process::id()));
        let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
        assert_eq!(not_writable(&file).unwrap(), None);
        assert_eq!(not_readable(&file).unwrap(), None);
        let file = File::options().append(true).open(&path).unwrap();
        assert!(not_writable(&file).unwrap().unwrap().contains("appending"));
        assert!(not_readable(&file).unwrap().unwrap().1.contains("reading"));
        let file = File::open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert!(not_writable(&file).unwrap().unwrap().contains("not open for writing"));
    }
}
