//! A listener of the reference-set probe hears of every page: while one is attached, descriptors
//! are initialised one by one.
//!
//! The listener is the kernel's own: a uprobe through `perf_event_open(2)` on the probe's address
//! in this very binary, with the probe's semaphore, which the kernel raises while it listens.
//! Needs: the `uprobe` event source and the right to open it (root, or `CAP_PERFMON`).
#![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]

mod common;

use std::ffi::CString;
use std::fs::File;
use std::io::Read;
use std::os::fd::FromRawFd;
use std::os::unix::ffi::OsStrExt;

use common::needs::or_skip;
use object::read::elf::ElfFile64;
use object::{Object, ObjectSection};
use uzone_pages::{ByteLen, LinuxPage, LinuxSeed, MemoryKind, Order, Tails};
use uzone_zone::{BindOptions, Region, Zone};

/// Where a USDT probe is in its file.
#[derive(Debug)]
struct Probe {
    location_offset: u64,
    semaphore_offset: u64,
}

/// Finds `uzone:page_ref_set` in the notes of this binary.
fn find_probe() -> Probe {
    let path = std::env::current_exe().unwrap();
    let bytes = std::fs::read(path).unwrap();
    let elf = ElfFile64::<object::Endianness>::parse(&*bytes).unwrap();
    let base = elf.section_by_name(".stapsdt.base").unwrap().address();
    let notes = elf.section_by_name(".note.stapsdt").unwrap().data().unwrap();
    let word = |at: usize| {
        usize::try_from(u32::from_le_bytes(notes[at..at + 4].try_into().unwrap())).unwrap()
    };
    let long = |at: usize| u64::from_le_bytes(notes[at..at + 8].try_into().unwrap());
    let mut at = 0;
    while at < notes.len() {
        // A note is two lengths and a type, then the name and the description, each padded.
        let (name_len, description_len) = (word(at), word(at + 4));
        let description = at + 12 + name_len.next_multiple_of(4);
        let names = &notes[description + 24..description + description_len];
        let mut names = names.split(|byte| *byte == 0);
        if (names.next(), names.next()) == (Some(&b"uzone"[..]), Some(&b"page_ref_set"[..])) {
            let moved = base.wrapping_sub(long(description + 8));
            return Probe {
                location_offset: file_offset(&elf, long(description).wrapping_add(moved)),
                semaphore_offset: file_offset(&elf, long(description + 16).wrapping_add(moved)),
            };
        }
        at = description + description_len.next_multiple_of(4);
    }
    panic!("the probe is not in this binary");
}

fn file_offset(elf: &ElfFile64<'_, object::Endianness>, address: u64) -> u64 {
    use object::ObjectSegment;
    elf.segments()
        .find(|segment| (segment.address()..segment.address() + segment.size()).contains(&address))
        .map(|segment| address - segment.address() + segment.file_range().0)
        .expect("an address inside of a segment")
}

/// The part of `struct perf_event_attr` that a uprobe needs (`PERF_ATTR_SIZE_VER1`).
#[repr(C)]
#[derive(Default)]
struct PerfEventAttr {
    kind: u32,
    size: u32,
    config: u64,
    sample_period: u64,
    sample_type: u64,
    read_format: u64,
    flags: u64,
    wakeup_events: u32,
    breakpoint_type: u32,
    path: u64,
    offset: u64,
}

const _: () = assert!(size_of::<PerfEventAttr>() == 72);

/// Starts to count the hits of `probe` by this process.
fn listen(probe: &Probe) -> std::io::Result<File> {
    let kind: u32 = std::fs::read_to_string("/sys/bus/event_source/devices/uprobe/type")?
        .trim()
        .parse()
        .map_err(std::io::Error::other)?;
    let path = std::env::current_exe()?;
    let path = CString::new(path.as_os_str().as_bytes())?;
    let attr = PerfEventAttr {
        kind,
        size: 72,
        // Bits 32 to 63: the offset of the reference counter, that is, the semaphore.
        config: probe.semaphore_offset << 32,
        path: path.as_ptr() as u64,
        offset: probe.location_offset,
        // `inherit`, so that threads which are started later count too.
        flags: 1 << 1,
        ..PerfEventAttr::default()
    };
    // SAFETY: perf_event_open(2) reads `attr.size` bytes of `attr`, and the string behind `path`,
    // which ends with a zero byte; both outlive the call. It writes nothing.
    let fd = unsafe { libc::syscall(libc::SYS_perf_event_open, &raw const attr, 0, -1, -1, 8) };
    if fd < 0 {
        return Err(std::io::Error::last_os_error());
    }
    // SAFETY: the descriptor was just made, no other value has it, and it fits an `int`.
    Ok(unsafe { File::from_raw_fd(i32::try_from(fd).unwrap()) })
}

fn count(listener: &mut File) -> u64 {
    let mut bytes = [0; 8];
    listener.read_exact(&mut bytes).unwrap();
    u64::from_ne_bytes(bytes)
}

#[test]
fn a_listener_hears_of_every_page_and_no_template_is_copied() {
    let probe = find_probe();
    let listening =
        listen(&probe).map_err(|error| format!("a uprobe cannot be opened here: {error}"));
    let Some(mut listener) = or_skip("a_listener_hears_of_every_page", listening) else { return };
    let zone = Zone::new();
    let options = || {
        BindOptions::<LinuxPage>::with_payload(MemoryKind::Generic, LinuxSeed::default())
            .order(Order::PMD)
            .tails(Tails::Stored)
            .stamp(Some(uzone_stream::Path::Portable))
    };
    let region = Region::anonymous(ByteLen::mib(8)).unwrap();
    let pagemap = zone.bind(region, options()).unwrap();
    assert_eq!(count(&mut listener), 2048, "one event for each page");
    assert_eq!(pagemap.report().stores, None);
    let region = pagemap.unbind().expect("no page is held");

    drop(listener);
    let pagemap = zone.bind(region, options()).unwrap();
    assert_eq!(pagemap.report().stores, Some(uzone_stream::Path::Portable), "no listener is left");
}
