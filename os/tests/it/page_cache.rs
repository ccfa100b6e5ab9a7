//! The pages of a file in the page cache.

use std::io::Write;
use std::num::NonZeroU64;
use std::time::{Duration, Instant};

use tempfile::tempfile_in;
use uzone_os::page_cache::{cached, forget, read_ahead, read_cached};

use crate::{page, skip};

#[test]
fn what_was_read_is_cached_and_what_was_forgotten_is_not() {
    let name = "what_was_read_is_cached";
    // In the build's directory: the one for temporary files may be of memory, which forgets nothing.
    let program = std::env::current_exe().unwrap();
    let (pages, len) = (64, NonZeroU64::new(64 * page()).unwrap());
    let mut file = tempfile_in(program.parent().unwrap()).unwrap();
    file.write_all(&vec![5; usize::try_from(len.get()).unwrap()]).unwrap();
    file.sync_all().unwrap();
    let Some(count) = cached(&file, 0, len).unwrap() else {
        return skip(name, "cachestat needs Linux 6.5");
    };
    assert_eq!(count, pages);
    let mut out = vec![0; usize::try_from(2 * page()).unwrap()];
    assert_eq!(read_cached(&file, page(), &mut out).unwrap(), Some(out.len()));
    assert!(out.iter().all(|&byte| byte == 5));
    // A read that meets the end of the file is short, and behind it there is nothing.
    let last = len.get() - page();
    assert_eq!(read_cached(&file, last, &mut out).unwrap(), Some(out.len() / 2));
    assert_eq!(read_cached(&file, len.get() + page(), &mut out).unwrap(), Some(0));

    forget(&file, 0, len).unwrap();
    if cached(&file, 0, len).unwrap() != Some(0) {
        return skip(name, "this file system keeps cached pages after POSIX_FADV_DONTNEED");
    }
    // A device that answers at once is never waited for.
    let at_once = Some(out.len());
    let answer = read_cached(&file, page(), &mut out).unwrap();
    assert!(answer.is_none() || answer == at_once, "{answer:?}");
    read_ahead(&file, 0, len).unwrap();
    let patience = Instant::now() + Duration::from_secs(20);
    // Pages count as cached from when the device is asked for them, before they can be read.
    while cached(&file, 0, len).unwrap() != Some(pages)
        || read_cached(&file, page(), &mut out).unwrap() != at_once
    {
        assert!(Instant::now() < patience, "the device was not asked");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_pipe_has_no_page_cache() {
    let (reader, _writer) = std::io::pipe().unwrap();
    let one = NonZeroU64::new(1).unwrap();
    assert!(matches!(cached(&reader, 0, one), Ok(None | Some(0)) | Err(_)));
    assert!(read_cached(&reader, 0, &mut [0; 8]).is_err());
    assert!(read_ahead(&reader, 0, one).is_err() && forget(&reader, 0, one).is_err());
}
