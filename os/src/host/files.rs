//! Whether reads of a file are of the page cache, and writes go where they belong: [`check_file`]. Reads that are tried
//! again where a device fails: [`read_exact_at`].
//!
//! Direct reads pass the page cache, and fail unless the buffer is aligned as the file system wants.
//! A file that is open for appending is written at its end, whatever offset pwrite(2) is given.
//! Source: open(2) on `O_DIRECT`, pwrite(2) "BUGS".

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::thread;
use std::time::Duration;

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
}
