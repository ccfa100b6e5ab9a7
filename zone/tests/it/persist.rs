//! Bytes that last, and all that is done with DAX memory: pins, poison, clearing, a pool.
//!
//! `REQUIRE_DAX=1` and `DAX_DIR` are explained in the live tests of `os`. With `DAX_LASTING=write`, one test
//! writes files in `DAX_DIR` and waits to be killed together with its machine; with `DAX_LASTING=check`,
//! another finds after the next boot what has lasted. `scripts/dax-vm.sh` does both.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use crate::common::needs::{is_dax_required, skip_dax};
use crate::common::{pages_in, read};
use uzone_os::{Access, Mapping, Sharing, probe};
use uzone_pages::{ByteLen, MemoryKind};
use uzone_zone::{
    BindOptions, Pagemap, PinError, Pool, PoolOptions, Region, WriteError, ZeroOptions, Zone,
};

/// How long the files are: some extents of a file system.
const LEN: ByteLen = ByteLen::mib(8);

fn page() -> u64 {
    probe::page_size().bytes()
}

fn bind(region: Region) -> Pagemap {
    let order = region.folio_order();
    Zone::new().bind(region, BindOptions::new(MemoryKind::Generic).order(order)).unwrap()
}

fn new_file(path: &Path) {
    File::create(path).unwrap().set_len(LEN.get()).unwrap();
}

/// A word of a file that has lasted, which differs from page to page.
fn word(seed: u64, page: u64) -> [u8; 8] {
    (seed ^ page.wrapping_mul(0x9e37_79b9_7f4a_7c15)).to_le_bytes()
}

fn write_durably(pagemap: &Pagemap, offset: u64, bytes: &[u8]) -> Result<(), WriteError> {
    pagemap.pin_and_write(offset, bytes)?;
    pagemap.persist(pagemap.range_at(offset, ByteLen::new(bytes.len() as u64))?)
}

#[test]
fn a_file_is_written_to_its_device_and_memory_without_storage_is_refused() {
    let path = std::env::temp_dir().join(format!("uzone-persist-{}", std::process::id()));
    new_file(&path);
    let pagemap = bind(Region::file(&path, 0, LEN).unwrap());
    std::fs::remove_file(&path).unwrap();
    write_durably(&pagemap, 3 * page() - 2, b"across").unwrap();
    assert_eq!(&read(|out| pagemap.region().read_at(3 * page() - 2, out)), b"across");
    pagemap.persist(pagemap.range()).unwrap();
    let beyond = pages_in(&pagemap, LEN.get() / page() - 1, 2);
    let failure = pagemap.persist(beyond).unwrap_err();
    assert!(matches!(failure, WriteError::Pin(PinError::NotHere { .. })), "{failure}");
    let bad = pages_in(&pagemap, 5, 1).start();
    let _ = pagemap.poison(bad).unwrap();
    match pagemap.persist(pagemap.range()).unwrap_err() {
        WriteError::Poisoned { pfn } => assert_eq!(pfn, bad),
        other => panic!("{other}"),
    }
    pagemap.persist(pages_in(&pagemap, 6, 4)).unwrap();
    for region in [Region::anonymous(LEN).unwrap(), Region::memfd("persist", LEN).unwrap()] {
        let pagemap = bind(region);
        let failure = pagemap.persist(pagemap.range()).unwrap_err();
        assert!(matches!(failure, WriteError::NoStorage { .. }), "{failure}");
    }
}

#[test]
fn the_lines_of_a_mapping_are_written_back_and_no_byte_changes() {
    let path = std::env::temp_dir().join(format!("uzone-lines-{}", std::process::id()));
    new_file(&path);
    let file = File::options().read(true).write(true).open(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    let mapping = Mapping::file(file, 0, LEN, Access::ReadWrite, Sharing::Shared).unwrap();
    mapping.write_at(100, &[7; 5000]).unwrap();
    mapping.flush_lines(96..5104).unwrap();
    mapping.flush_lines(8..8).unwrap();
    let mut seen = [0; 5002];
    mapping.read_at(99, &mut seen).unwrap();
    assert!(seen[0] == 0 && seen[5001] == 0 && seen[1..5001].iter().all(|byte| *byte == 7));
    assert!(mapping.flush_lines(0..LEN.get() + 8).is_err());
    assert!(mapping.flush_lines(1..9).is_err(), "they are no words");
}

#[test]
fn dax_memory_is_pinned_poisoned_cleared_pooled_and_lasting() {
    let name = "dax_memory_is_pinned_poisoned_cleared_pooled_and_lasting";
    let Some(directory) = std::env::var_os("DAX_DIR").map(PathBuf::from) else {
        return skip_dax(name, "DAX_DIR names no directory on a DAX mount");
    };
    let path = directory.join("uzone-uses");
    new_file(&path);
    let mut regions = vec![Region::fsdax(&path, 0, LEN).unwrap()];
    std::fs::remove_file(&path).unwrap();
    if is_dax_required() {
        regions.push(Region::devdax(Path::new("/dev/dax0.0")).unwrap());
    }
    for region in regions {
        uses(region);
    }
}

fn uses(region: Region) {
    let what = region.backing().to_string();
    let folio = region.folio_order().pages().get();
    let pagemap = bind(region);
    let (first, second) = (pages_in(&pagemap, 0, folio), pages_in(&pagemap, folio, folio));
    let both = pages_in(&pagemap, 0, 2 * folio);
    pagemap.pin_and_write(0, &vec![0xa5; usize::try_from(2 * folio * page()).unwrap()]).unwrap();
    let pinned = pagemap.pin(first).unwrap();
    let zeroed = pagemap.zero(both, &ZeroOptions::default()).unwrap();
    assert!(!zeroed.is_whole(), "{what}: a pinned folio is not cleared");
    assert_eq!(read(|out| pinned.read_at(7, out)), [0xa5; 2], "{what}");
    assert_eq!(
        read(|out| pagemap.region().read_at(folio * page(), out)),
        [0; 2],
        "{what}: its neighbour is"
    );
    drop(pinned);
    let _ = pagemap.poison(second.start()).unwrap();
    assert!(pagemap.pin(second).is_err(), "{what}: a bad page is not pinned");
    assert!(pagemap.persist(both).is_err(), "{what}: a bad page does not last");
    pagemap.unpoison(second.start()).unwrap();
    write_durably(&pagemap, 0, b"lasts").unwrap();
    pagemap.persist(both).unwrap();
    let pool = Pool::new(pagemap, PoolOptions::default().without_worker()).unwrap();
    let pooled = pool.take().unwrap();
    let mut bytes = vec![1; usize::try_from(folio * page()).unwrap()];
    pooled.read_at(0, &mut bytes).unwrap();
    assert!(bytes.iter().all(|byte| *byte == 0), "{what}: a pool hands out zeroes");
}

/// Writes a word of each page, into extents that the file system allocates meanwhile.
fn write(path: &Path, is_dax: bool, is_durable: bool) {
    let region = if is_dax { Region::fsdax } else { Region::file };
    let pagemap = bind(region(path, 0, LEN).unwrap());
    for at in 0..LEN.get() / page() {
        let (offset, bytes) = (at * page() + 40, word(1, at));
        if is_durable {
            write_durably(&pagemap, offset, &bytes).unwrap();
        } else {
            pagemap.pin_and_write(offset, &bytes).unwrap();
        }
    }
}

#[test]
fn what_is_written_durably_outlives_the_machine_and_nothing_else_does() {
    let name = "what_is_written_durably_outlives_the_machine_and_nothing_else_does";
    let step = std::env::var("DAX_LASTING").unwrap_or_default();
    let directory = std::env::var_os("DAX_DIR").map(PathBuf::from);
    let (Some(directory), "write" | "check") = (directory, step.as_str()) else {
        return eprintln!("skipped: {name}: scripts/dax-vm.sh runs it, and kills the machine");
    };
    // How a file is made durable, whether its memory is the device, and whether it is made durable at all.
    let files = [("sync", true, true), ("msync", false, true), ("neither", false, false)];
    if step == "write" {
        // The files themselves last, and have no extent yet. All of them are made first: a sync that comes later
        // writes what the file system noted of each file, also of one that nobody made durable.
        for (id, ..) in files {
            new_file(&directory.join(id));
            File::open(directory.join(id)).unwrap().sync_all().unwrap();
        }
        File::open(&directory).unwrap().sync_all().unwrap();
        for (id, is_dax, is_durable) in files {
            write(&directory.join(id), is_dax, is_durable);
        }
        println!("dax-vm: WRITTEN");
        std::io::stdout().flush().unwrap();
        std::thread::sleep(std::time::Duration::from_secs(600));
        return;
    }
    for (id, _, is_durable) in files {
        let path = directory.join(id);
        let bytes = std::fs::read(&path).unwrap();
        let page = usize::try_from(page()).unwrap();
        let lasted =
            bytes.chunks(page).zip(0..).filter(|(bytes, at)| bytes[40..48] == word(1, *at));
        let (lasted, all) = (lasted.count(), bytes.len() / page);
        println!("{id}: {lasted} of {all} pages lasted");
        assert_eq!(lasted == all, is_durable, "{id}: {lasted} of {all} pages lasted");
    }
}
