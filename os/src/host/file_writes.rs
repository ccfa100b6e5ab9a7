//! Whether reads of a file are of the page cache, and writes go where they belong: [`check_file`].
//!
//! Direct reads pass the page cache, and fail unless the buffer is aligned as the file system wants.
//! A file that is open for appending is written at its end, whatever offset pwrite(2) is given.
//! Source: open(2) on `O_DIRECT`, pwrite(2) "BUGS".

use std::io;
use std::os::fd::AsFd;

use rustix::fs::OFlags;

/// Checks that reads through a descriptor are of the page cache, or with `is_written` that it
/// writes at any offset that it is given.
///
/// # Errors
/// [`io::ErrorKind::PermissionDenied`] if it is not open for that, or is for appending and written,
/// [`io::ErrorKind::InvalidInput`] if it is read and open with `O_DIRECT`, and the error of
/// fcntl(2).
pub fn check_file(file: impl AsFd, is_written: bool) -> io::Result<()> {
    let flags = rustix::fs::fcntl_getfl(file)?;
    let mode = flags & OFlags::RWMODE;
    let (kind, why) = match is_written {
        false if mode == OFlags::WRONLY => {
            (io::ErrorKind::PermissionDenied, "the file is not open for reading")
        }
        false if flags.contains(OFlags::DIRECT) => {
            (io::ErrorKind::InvalidInput, "the file is open with O_DIRECT: open it without that")
        }
        true if mode == OFlags::RDONLY => {
            (io::ErrorKind::PermissionDenied, "the file is not open for writing")
        }
        true if flags.contains(OFlags::APPEND) => (
            io::ErrorKind::PermissionDenied,
            "the file is open for appending: open it without that",
        ),
        _ => return Ok(()),
    };
    Err(io::Error::new(kind, why))
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn a_descriptor_says_why_it_cannot_read_or_write_at_an_offset() {
        let path = std::env::temp_dir().join(format!("uzone-file-writes-{}", std::process::id()));
        let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
        check_file(&file, true).unwrap();
        check_file(&file, false).unwrap();
        let file = File::options().append(true).open(&path).unwrap();
        assert!(check_file(&file, true).unwrap_err().to_string().contains("appending"));
        assert!(check_file(&file, false).unwrap_err().to_string().contains("reading"));
        let file = File::open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert!(check_file(&file, true).unwrap_err().to_string().contains("not open for writing"));
    }
}
