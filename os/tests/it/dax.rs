//! DAX: a device and a mount where this machine has them, and refusals everywhere.
//!
//! Few machines have the hardware, so `REQUIRE_ALL=1` does not ask for it: `REQUIRE_DAX=1` makes these
//! skips failures. `DAX_DIR` names a directory on a DAX mount. `scripts/dax-vm.sh` runs all of it in a
//! virtual machine that has both. The first case overwrites the start of each device that it finds, and
//! only where `REQUIRE_DAX=1` allows it.

use std::fs::{File, OpenOptions};
use std::path::{Path, PathBuf};

use tempfile::tempfile_in;
use uzone_os::dax::{self, DaxDevice};
use uzone_os::{Access, Exclusive, MapError, Mapping, Sharing, SystemRoot};
use uzone_pages::ByteLen;

use crate::needs::{is_dax_required, skip_dax};
use crate::{page, read};

/// Returns the DAX devices of this machine, in order.
fn devices() -> Vec<PathBuf> {
    let mut paths: Vec<PathBuf> = std::fs::read_dir("/dev")
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.to_string_lossy().starts_with("/dev/dax"))
        .collect();
    paths.sort();
    paths
}

fn open(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).open(path).unwrap()
}

/// Opens a file of `len` bytes in `directory` that has no name.
fn unnamed(directory: &Path, len: u64) -> File {
    let file = tempfile_in(directory).unwrap();
    file.set_len(len).unwrap();
    file
}

#[test]
fn a_dax_device_is_mapped_in_pages_of_its_alignment() {
    let name = "a_dax_device_is_mapped_in_pages_of_its_alignment";
    let paths = devices();
    if paths.is_empty() {
        return skip_dax(name, "there is no /dev/dax*");
    }
    if !is_dax_required() {
        return skip_dax(name, "it overwrites the devices: set REQUIRE_DAX=1 to let it");
    }
    for path in paths {
        let DaxDevice { size, align, node } =
            dax::device(&SystemRoot::host(), open(&path)).unwrap();
        eprintln!("{}: {size} in pages of {align}, node {node:?}", path.display());
        let step = align.bytes();
        let whole = Mapping::devdax(open(&path), 0, size).unwrap();
        assert_eq!((whole.page_size(), whole.len()), (align, size));
        assert!(whole.addr().is_aligned(ByteLen::new(step)));
        let end = size.get();
        whole.write_at(end - 4, b"tail").unwrap();
        whole.write_at(step - 2, b"over").unwrap();
        // A second mapping shows the same bytes, and so does one from the second page on.
        let again = Mapping::devdax(open(&path), 0, size).unwrap();
        assert_eq!(again.file_id(), whole.file_id());
        assert_eq!(&read(&again, step - 2), b"over");
        let later = Mapping::devdax(open(&path), step, ByteLen::new(end - step)).unwrap();
        assert_eq!(later.file_offset(), Some(step));
        assert!(later.addr().is_aligned(ByteLen::new(step)));
        assert_eq!(&read(&later, end - step - 4), b"tail");
        assert_eq!(&read(&later, 0), b"er");
        later.populate(0..step).unwrap();
        drop(whole);
        assert_eq!(&read(&again, end - 4), b"tail");
        assert!(Exclusive::try_from_mapping(again).is_err());
        for (offset, len) in [(0, end + step), (end, step), (step, end)] {
            let error = Mapping::devdax(open(&path), offset, ByteLen::new(len)).unwrap_err();
            assert!(matches!(error, MapError::BeyondDax { .. }), "{error}");
        }
        for (offset, len) in [(0, step / 2), (step / 2, step)] {
            let error = Mapping::devdax(open(&path), offset, ByteLen::new(len)).unwrap_err();
            assert!(matches!(error, MapError::CutsPage { .. }), "{error}");
        }
        let read_only = File::open(&path).unwrap();
        let error = Mapping::devdax(read_only, 0, size).unwrap_err();
        assert!(matches!(error, MapError::NotOpenFor { .. }), "{error}");
        let error = Mapping::fsdax(open(&path), 0, size).unwrap_err();
        assert!(matches!(error, MapError::NotRegular), "{error}");
    }
}

#[test]
fn a_file_on_a_dax_mount_is_mapped_without_a_copy() {
    let Some(directory) = std::env::var_os("DAX_DIR").map(PathBuf::from) else {
        let reason = "DAX_DIR names no directory on a DAX mount";
        return skip_dax("a_file_on_a_dax_mount_is_mapped_without_a_copy", reason);
    };
    let file = unnamed(&directory, ByteLen::mib(4).get());
    assert!(dax::is_file(&file));
    let mapping = Mapping::fsdax(file.try_clone().unwrap(), page(), ByteLen::mib(2)).unwrap();
    assert_eq!(mapping.file_offset(), Some(page()));
    mapping.write_at(page() - 2, b"over").unwrap();
    // The page cache has no older copy to show.
    let other =
        Mapping::file(file, page(), ByteLen::mib(2), Access::ReadOnly, Sharing::Shared).unwrap();
    assert_eq!(&read(&other, page() - 2), b"over");
    assert_eq!(&read(&mapping, page() - 2), b"over");
}

#[test]
fn an_ordinary_file_system_offers_no_dax_and_the_error_names_one_that_does() {
    // A temporary directory may itself be on a DAX mount; shared memory is not.
    let mut directories = vec![PathBuf::from("/dev/shm")];
    if std::env::var_os("DAX_DIR").is_none() {
        directories.push(std::env::temp_dir());
    }
    for directory in directories {
        let file = unnamed(&directory, 4 * page());
        let again = file.try_clone().unwrap();
        assert!(!dax::is_file(&file), "{}", directory.display());
        let error = Mapping::fsdax(file, 0, ByteLen::new(4 * page())).unwrap_err();
        assert!(matches!(error, MapError::NoDax { .. }), "{}: {error}", directory.display());
        let text = error.to_string();
        assert!(text.contains("-o dax=always") && text.contains("chattr +x"), "{text}");
        // The way out that the message names.
        let len = ByteLen::new(4 * page());
        Mapping::file(again, 0, len, Access::ReadWrite, Sharing::Shared).unwrap();
    }
}

#[test]
fn a_file_for_dax_is_checked_like_any_other() {
    let shm = Path::new("/dev/shm");
    let fsdax = |len: u64, offset: u64, asked: u64| {
        Mapping::fsdax(unnamed(shm, len), offset, ByteLen::new(asked)).unwrap_err()
    };
    assert!(matches!(fsdax(page(), 0, 0), MapError::Empty));
    assert!(matches!(fsdax(page(), 0, page() + 1), MapError::BeyondEnd { .. }));
    assert!(matches!(fsdax(page(), page(), 1), MapError::BeyondEnd { .. }));
    assert!(matches!(fsdax(2 * page(), 8, page()), MapError::CutsPage { .. }));
    let directory = File::open(shm).unwrap();
    let error = Mapping::fsdax(directory, 0, ByteLen::new(page())).unwrap_err();
    assert!(matches!(error, MapError::NotMappable { .. }), "{error}");
    let null = Mapping::fsdax(open(Path::new("/dev/null")), 0, ByteLen::new(page())).unwrap_err();
    assert!(matches!(null, MapError::NotRegular), "{null}");
}

#[test]
fn what_is_no_dax_device_is_refused_with_the_fix() {
    let null = Path::new("/dev/null");
    let error = dax::device(&SystemRoot::host(), open(null)).unwrap_err();
    assert!(error.to_string().contains("/sys/dev/char/1:3 is a device of \"mem\""), "{error}");
    let refused = Mapping::devdax(open(null), 0, ByteLen::mib(2)).unwrap_err();
    for error in [error, refused] {
        assert!(matches!(error, MapError::DaxDevice { cause: None, .. }), "{error:?}");
    }
    assert!(matches!(Mapping::devdax(open(null), 0, ByteLen::ZERO), Err(MapError::Empty)));
    let file = unnamed(Path::new("/dev/shm"), page());
    let error = Mapping::devdax(file, 0, ByteLen::new(page())).unwrap_err();
    assert!(matches!(error, MapError::NotDaxDevice), "{error}");
    assert!(error.to_string().contains("fsdax"), "{error}");
}
