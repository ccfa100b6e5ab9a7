//! Regions over memory that the caller mapped, over DAX devices and over files on DAX mounts.
//!
//! `REQUIRE_DAX=1` and `DAX_DIR` are explained in the live tests of `os`: where they are not set, the
//! cases that need DAX are skipped by name.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::ptr::{self, NonNull};

use crate::common::needs::{is_dax_required, skip_dax};
use crate::common::{Temporary, read};
use uzone_os::{
    Access, AccessError, Anonymous, Exclusivity, MapError, Mapping, Sharing, SystemRoot, mempolicy,
    numa, probe,
};
use uzone_pages::{ByteLen, LinuxPage, LinuxSeed, MemoryKind, Order, PageSize, Word};
use uzone_zone::{
    AltmapOptions, BindError, BindOptions, Init, PinError, Region, RegionSource, WriteError, Zone,
};

const HUGE: u64 = 2 << 20;

fn page() -> u64 {
    probe::page_size().bytes()
}

fn options() -> BindOptions {
    BindOptions::new(MemoryKind::Generic)
}

/// Memory of this test that starts at a multiple of 2 MiB.
fn owner(len: u64) -> Mapping {
    let how = Anonymous { align: Some(ByteLen::mib(2)), ..Anonymous::default() };
    Mapping::anonymous(ByteLen::new(len), how).unwrap()
}

/// Adopts the bytes from `offset` on. Every case drops what it adopts before `owner`.
fn adopt(owner: &Mapping, offset: u64, len: u64, page_len: u64) -> Region {
    assert!(offset + len <= owner.len().get());
    let start = owner.addr().get() + usize::try_from(offset).unwrap();
    let start = NonNull::new(ptr::with_exposed_provenance_mut(start)).unwrap();
    let page = PageSize::try_from_bytes(page_len).unwrap();
    // SAFETY: `adopt` wants the memory mapped, initialised and reached by nothing but mappings
    // until this one is dropped: it is anonymous, `owner` outlives the mapping, and nothing else
    // knows it.
    let mapping = unsafe { Mapping::adopt(start, ByteLen::new(len), page) };
    Region::adopt(mapping.unwrap()).unwrap()
}

/// Returns whether the kernel still has all of it mapped.
fn is_mapped(owner: &Mapping) -> bool {
    owner.populate(0..owner.len().get()).is_ok()
}

#[test]
fn adopted_memory_is_bound_written_unbound_and_still_mapped() {
    let own = owner(4 * HUGE);
    let region = adopt(&own, 0, 4 * HUGE, page());
    assert_eq!(region.backing(), &RegionSource::Adopted);
    assert_eq!(region.backing().to_string(), "adopted memory");
    assert_eq!(region.pages().get(), 4 * HUGE / page());
    let zone = Zone::new();
    let pagemap = zone.bind(region, options()).unwrap();
    pagemap.pin_and_write(HUGE - 2, b"over").unwrap();
    assert_eq!(&read(|out| pagemap.region().read_at(HUGE - 2, out)), b"over");
    let beyond = pagemap.pin_and_write(4 * HUGE - 1, b"xy").unwrap_err();
    assert!(matches!(beyond, WriteError::Pin(PinError::NotHere { .. })), "{beyond}");
    let region = pagemap.unbind().expect("no page is held");
    assert_eq!(region.len(), ByteLen::new(4 * HUGE));
    let mapping = region.into_mapping();
    assert!(mapping.is_adopted());
    drop(mapping);
    assert!(is_mapped(&own));
    assert_eq!(&read(|out| own.read_at(HUGE - 3, out)), b"\0over\0");
}

#[test]
fn adopted_memory_holds_its_own_descriptors_and_has_none_of_them_afterwards() {
    let own = owner(4 * HUGE);
    let zone = Zone::new();
    let order = probe::page_size().order_of(HUGE).unwrap();
    let region = adopt(&own, 0, 4 * HUGE, HUGE);
    region.write_at(0, b"label").unwrap();
    region.write_at(HUGE, &[0xff; 64]).unwrap();
    // SAFETY: the memory is this test's, and nothing else looks at it before the region is dropped.
    let promise = unsafe { Exclusivity::assert(region.mapping()) };
    let altmap = AltmapOptions::new().reserve(order.pages()).exclusive(promise);
    let pagemap = zone.bind(region, options().altmap(altmap)).unwrap();
    // A huge page to the owner, one to the descriptors, two to describe.
    assert_eq!(pagemap.region().len(), ByteLen::new(2 * HUGE));
    assert!(pagemap.pages().all(|page| page.word() == Word::initial(MemoryKind::Generic)));
    let pinned = pagemap.pin(pagemap.range()).unwrap();
    assert!(pagemap.pages().all(|page| page.word().pins() == 1));
    drop((pinned, pagemap));
    assert!(is_mapped(&own));
    assert_eq!(&read(|out| own.read_at(0, out)), b"label");
    let mut descriptors = vec![1; usize::try_from(2 * HUGE / 4096 * 8).unwrap()];
    own.read_at(HUGE, &mut descriptors).unwrap();
    assert!(descriptors.iter().all(|byte| *byte == 0));
}

#[test]
fn adopted_addresses_are_bound_once_at_a_time() {
    let own = owner(4 * HUGE);
    let zone = Zone::new();
    let first = zone.bind(adopt(&own, 0, 2 * HUGE, page()), options()).unwrap();
    let refused = zone.bind(adopt(&own, 2 * HUGE - page(), HUGE, page()), options()).unwrap_err();
    assert!(matches!(refused.cause, BindError::SameBytes { .. }), "{}", refused.cause);
    // What is beside them is free, and so are they afterwards.
    let second = zone.bind(adopt(&own, 2 * HUGE, HUGE, page()), options()).unwrap();
    drop(first.unbind());
    let again = zone.bind(*refused.region, options()).unwrap_err();
    assert!(matches!(again.cause, BindError::SameBytes { .. }), "it overlaps the second");
    drop(second.unbind());
    drop(zone.bind(*again.region, options()).unwrap().unbind());
}

#[test]
fn the_backing_suggests_the_order_of_its_pages() {
    let own = owner(2 * HUGE);
    let base = probe::page_size();
    let huge = adopt(&own, 0, 2 * HUGE, HUGE);
    assert_eq!(huge.folio_order(), base.order_of(HUGE).unwrap());
    let zone = Zone::new();
    let order = huge.folio_order();
    let pagemap = zone.bind(huge, options().order(order)).unwrap();
    assert!(pagemap.page_at(HUGE).is_some_and(|view| !view.is_tail()));
    drop(pagemap.unbind());
    for region in [
        adopt(&own, 0, 2 * HUGE, page()),
        Region::anonymous(ByteLen::mib(4)).unwrap(),
        Region::memfd("order", ByteLen::mib(4)).unwrap(),
    ] {
        assert_eq!(region.folio_order(), Order::BASE, "{}", region.backing());
    }
}

#[test]
fn any_mapping_is_adopted_if_it_has_whole_pages_and_given_back_if_not() {
    let cut = Mapping::anonymous(ByteLen::new(page() + 1), Anonymous::default()).unwrap();
    let addr = cut.addr();
    let refused = Region::adopt(cut).unwrap_err();
    assert!(matches!(refused.cause, BindError::Adopt { .. }), "{}", refused.cause);
    let text = refused.to_string();
    assert!(
        text.starts_with(&format!("cannot adopt the mapping of {} bytes at", page() + 1)),
        "{text}"
    );
    assert_eq!(refused.value.addr(), addr);

    let file = Temporary::sparse("adopt", 4 * page());
    let map = |offset: u64, pages: u64, access| {
        let opened = File::options().read(true).write(true).open(&file.0).unwrap();
        let len = ByteLen::new(pages * page());
        Mapping::file(opened, offset * page(), len, access, Sharing::Shared).unwrap()
    };
    let read_only = Region::adopt(map(0, 1, Access::ReadOnly)).unwrap();
    let error = read_only.write_at(0, b"x").unwrap_err();
    assert!(matches!(error, AccessError::ReadOnly { .. }), "{error}");
    // A file is known by its bytes, however it came to be a region.
    let zone = Zone::new();
    let tail = zone.bind(Region::adopt(map(2, 2, Access::ReadWrite)).unwrap(), options()).unwrap();
    let len = ByteLen::new(2 * page());
    let refused = zone.bind(Region::file(&file.0, page(), len).unwrap(), options()).unwrap_err();
    assert!(matches!(refused.cause, BindError::SameBytes { .. }), "{}", refused.cause);
    let head = zone.bind(Region::file(&file.0, 0, len).unwrap(), options()).unwrap();
    drop((head.unbind(), tail.unbind()));
}

#[test]
fn what_is_no_dax_device_is_refused_by_its_path() {
    let missing = Region::devdax(Path::new("/dev/dax-that-is-not")).unwrap_err();
    assert!(matches!(&missing, BindError::Open { .. }), "{missing}");
    assert!(missing.to_string().contains("/dev/dax-that-is-not"), "{missing}");
    let error = Region::devdax(Path::new("/dev/null")).unwrap_err();
    let BindError::Device { path, cause: cause @ MapError::DaxDevice { .. } } = &error else {
        panic!("{error:?}");
    };
    assert_eq!(path, Path::new("/dev/null"));
    assert!(cause.to_string().contains("is a device of \"mem\""), "{cause}");
}

#[test]
fn a_file_without_dax_is_refused_by_its_path() {
    let file = Temporary::sparse_in(Path::new("/dev/shm"), "fsdax", 4 * page());
    let error = Region::fsdax(&file.0, page(), ByteLen::new(2 * page())).unwrap_err();
    let BindError::Region { cause: MapError::NoDax { .. }, .. } = &error else {
        panic!("{error:?}");
    };
    let text = uzone_os::with_causes(&error);
    assert!(text.contains(&file.0.display().to_string()), "{text}");
    assert!(text.contains("by DAX: ") && text.contains("-o dax=always"), "{text}");
}

#[test]
fn a_dax_device_is_bound_in_folios_of_its_alignment() {
    let name = "a_dax_device_is_bound_in_folios_of_its_alignment";
    let path = Path::new("/dev/dax0.0");
    if !path.exists() {
        return skip_dax(name, "there is no /dev/dax0.0");
    }
    if !is_dax_required() {
        return skip_dax(name, "it overwrites the device: set REQUIRE_DAX=1 to let it");
    }
    let region = Region::devdax(path).unwrap();
    assert_eq!(region.backing().to_string(), "the DAX device /dev/dax0.0");
    let (order, len) = (region.folio_order(), region.len());
    assert_eq!(region.mapping().page_size().bytes(), order.pages().get() * page());
    let zone = Zone::new();
    let pagemap = zone.bind(region, options().order(order)).unwrap();
    let twice = zone.bind(Region::devdax(path).unwrap(), options()).unwrap_err();
    assert!(matches!(twice.cause, BindError::SameBytes { .. }), "{}", twice.cause);
    pagemap.pin_and_write(len.get() - 4, b"tail").unwrap();
    drop(pagemap.unbind());
    assert_eq!(&read(|out| twice.region.read_at(len.get() - 4, out)), b"tail");
}

#[test]
fn descriptors_of_dax_memory_come_from_its_node() {
    let name = "descriptors_of_dax_memory_come_from_its_node";
    let path = Path::new("/dev/dax0.0");
    if !path.exists() || !is_dax_required() {
        return skip_dax(name, "there is no /dev/dax0.0, or REQUIRE_DAX=1 is not set");
    }
    let device = Region::devdax(path).unwrap();
    let wanted: u32 = match std::env::var("DAX_NODE") {
        Ok(node) => node.parse().unwrap(),
        Err(_) => return skip_dax(name, "DAX_NODE does not say which node the device is on"),
    };
    assert_eq!(device.node(), Some(wanted));
    // Enough of them that the zone keeps their memory.
    let of_64_bytes = || {
        let options =
            BindOptions::<LinuxPage>::with_payload(MemoryKind::Generic, LinuxSeed::default());
        options.init(Init::Eager)
    };
    // Fresh memory, and then memory that the zone has kept.
    let zone = Zone::new();
    let mut region = device;
    for is_kept in [false, true] {
        let pagemap = zone.bind(region, of_64_bytes()).unwrap();
        let report = pagemap.report();
        assert_eq!((report.is_kept, report.node), (is_kept, Some(wanted)), "{report}");
        assert!(report.to_string().contains(&format!("on node {wanted}")), "{report}");
        assert!(report.bytes >= ByteLen::mib(2), "{report}");
        let (here, elsewhere) = pages_that_prefer(wanted);
        assert!(here > 0 && elsewhere == 0, "{here} pages there, {elsewhere} elsewhere");
        region = pagemap.unbind().unwrap();
    }
    let mount = PathBuf::from(std::env::var_os("DAX_DIR").unwrap());
    let file = Temporary::sparse_in(&mount, "node", 4 * HUGE);
    let region = Region::fsdax(&file.0, 0, ByteLen::new(4 * HUGE)).unwrap();
    assert_eq!(region.node(), Some(wanted));
    // Memory of no device comes from where it is touched first, and takes no kept memory of the node.
    let region = Region::anonymous(ByteLen::mib(256)).unwrap();
    assert_eq!(region.node(), None);
    let pagemap = zone.bind(region, of_64_bytes()).unwrap();
    assert_eq!((pagemap.report().is_kept, pagemap.report().node), (false, None));
}

#[test]
fn descriptors_come_from_the_node_that_most_pages_of_their_region_lie_on() {
    let name = "descriptors_come_from_the_node_that_most_pages_of_their_region_lie_on";
    let nodes = numa::nodes(&SystemRoot::host()).unwrap_or_default();
    let len = ByteLen::mib(128);
    let near = mempolicy::current_node();
    let has_room = |node: &&numa::Node| Some(node.number) != near && node.free > ByteLen::mib(160);
    let Some(far) = nodes.iter().find(has_room).map(|node| node.number) else {
        return skip_dax(name, "there is no second node with memory");
    };
    let of_64_bytes = || {
        let seed = LinuxSeed::default();
        BindOptions::<LinuxPage>::with_payload(MemoryKind::Generic, seed).init(Init::Eager)
    };
    let mapping = Mapping::anonymous(len, Anonymous::default()).unwrap();
    mapping.prefer_node(far).unwrap();
    let region = Region::adopt(mapping).unwrap();
    assert_eq!(region.node(), None, "no page of it is there");
    let zone = Zone::new();
    // Nothing is asked of a node for what is not there, so the descriptors come from where this thread runs.
    let pagemap = zone.bind(region, of_64_bytes()).unwrap();
    assert_eq!(pagemap.report().node, None);
    assert_eq!(pages_that_prefer(far), (0, 0));
    let region = pagemap.unbind().unwrap();
    let mapping = region.into_mapping();
    mapping.populate(0..len.get()).unwrap();
    let (before, _) = pages_that_prefer(far);
    assert!(before >= len.get() / page() / 4 * 3, "{before} pages lie there");
    let mut region = Region::adopt(mapping).unwrap();
    assert_eq!(region.node(), Some(far));
    // What the zone has kept lies on the other node.
    for is_kept in [false, true] {
        let pagemap = zone.bind(region, of_64_bytes()).unwrap();
        let report = pagemap.report();
        assert_eq!((report.is_kept, report.node), (is_kept, Some(far)), "{report}");
        assert!(report.to_string().contains(&format!("on node {far}")), "{report}");
        let (here, elsewhere) = pages_that_prefer(far);
        assert!(
            here - before >= 512 && elsewhere < 64,
            "{here} after {before}, {elsewhere} elsewhere"
        );
        region = pagemap.unbind().unwrap();
    }
    // A region that no page is of takes what was kept of the near node, and no other.
    let pagemap = zone.bind(Region::anonymous(len).unwrap(), of_64_bytes()).unwrap();
    assert_eq!((pagemap.report().is_kept, pagemap.report().node), (true, None));
}

/// Returns how many pages of memory that was asked of a node lie there, and how many elsewhere.
fn pages_that_prefer(node: u32) -> (u64, u64) {
    let policies = std::fs::read_to_string("/proc/self/numa_maps").unwrap();
    let (mut here, mut elsewhere) = (0, 0);
    for line in policies.lines().filter(|line| line.contains(&format!(" prefer:{node} "))) {
        for word in line.split_whitespace() {
            let Some((on, pages)) = word.strip_prefix('N').and_then(|word| word.split_once('='))
            else {
                continue;
            };
            let pages: u64 = pages.parse().unwrap();
            if on == node.to_string() { here += pages } else { elsewhere += pages }
        }
    }
    (here, elsewhere)
}

#[test]
fn a_file_on_a_dax_mount_is_a_region() {
    let Some(directory) = std::env::var_os("DAX_DIR").map(PathBuf::from) else {
        let reason = "DAX_DIR names no directory on a DAX mount";
        return skip_dax("a_file_on_a_dax_mount_is_a_region", reason);
    };
    let file = Temporary::sparse_in(&directory, "region", 4 * HUGE);
    let region = Region::fsdax(&file.0, HUGE, ByteLen::new(2 * HUGE)).unwrap();
    let pagemap = Zone::new().bind(region, options()).unwrap();
    pagemap.pin_and_write(3, b"lasting").unwrap();
    drop(pagemap.unbind());
    let bytes = std::fs::read(&file.0).unwrap();
    let at = usize::try_from(HUGE).unwrap() + 3;
    assert_eq!(&bytes[at..at + 7], b"lasting");
}
