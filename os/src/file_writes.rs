//! Whether writes to a file go where they belong: [`not_writable`].
//!
//! A file that is open for appending is written at its end, whatever offset pwrite(2) is given.
//! Source: open(2), pwrite(2) "BUGS".

use std::io;
use std::os::fd::AsFd;

use rustix::fs::OFlags;

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
    fn a_descriptor_says_why_it_cannot_write_at_an_offset() {
        let path = std::env::temp_dir().join(format!("uzone-file-writes-{}", std::process::id()));
        let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
        assert_eq!(not_writable(&file).unwrap(), None);
        let file = File::options().append(true).open(&path).unwrap();
        assert!(not_writable(&file).unwrap().unwrap().contains("appending"));
        let file = File::open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert!(not_writable(&file).unwrap().unwrap().contains("not open for writing"));
    }
}
