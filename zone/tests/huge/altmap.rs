//! Descriptors in the region's own pages: where they lie, who may have the memory, and that neither
//! old bytes show through nor descriptors are left behind.
//!
//! Needs, for two cases: root, and 16 MiB that can be had in huge pages.

use std::fs::File;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::common::needs::{Pool, is_dax_required, or_skip, skip_dax};
use crate::common::{
    Temporary, assert_fresh, bytes, cause, descriptor_count, is_zero, mapped, read,
};
use uzone_os::{Exclusivity, MappingError};
use uzone_pages::{
    AddrError, ByteLen, LinuxPage, LinuxSeed, MemoryKind, Order, PageCount, PageSize, PageView,
    Payload, Pfn, PfnRange, Refresh, Slot, Tails, Word,
};
use uzone_zone::{
    AltmapOptions, BindError, BindOptions, Init, MemmapPages, Pagemap, PinError, Region,
    RegionSource, WriteError, ZeroOptions, Zone,
};
use zerocopy::{FromBytes, IntoBytes, KnownLayout};

fn generic() -> BindOptions {
    BindOptions::new(MemoryKind::Generic).altmap(AltmapOptions::new())
}

fn linux() -> BindOptions<LinuxPage> {
    let seed = LinuxSeed { pagemap_address: 0xffff_8881_0abc_d000, ..LinuxSeed::default() };
    BindOptions::with_payload(MemoryKind::Generic, seed).altmap(AltmapOptions::new())
}

fn anonymous(pages: u64) -> Region {
    Region::anonymous(ByteLen::new(pages * 4096)).expect("reserved memory")
}

fn reserve(pages: u64) -> AltmapOptions {
    AltmapOptions::new().reserve(PageCount::new(pages))
}

/// Promises that no other process changes the pages of a region.
fn promised(region: &Region) -> AltmapOptions {
    // SAFETY: the memory is this test's: a memory file or file that no other process has, whose
    // descriptor is used by nothing else while it is bound.
    AltmapOptions::new().exclusive(unsafe { Exclusivity::assert(region.mapping()) })
}

fn fill(region: &Region, byte: u8) {
    let bytes = vec![byte; 1 << 20];
    let len = region.len().get();
    for offset in (0..len).step_by(1 << 20) {
        let part = usize::try_from((len - offset).min(1 << 20)).unwrap();
        region.write_at(offset, &bytes[..part]).unwrap();
    }
}

#[test]
fn the_data_starts_behind_the_reserve_and_the_descriptors() {
    let zone = Zone::new();
    // Pages, order, reserve; descriptor pages, first data page, lost.
    for (pages, order, kept, descriptors, data, lost) in [
        (1 << 18, 0, 0, 511, 512, 1),
        (1 << 18, 9, 0, 1, 512, 511),
        (1 << 18, 9, 2, 1, 512, 509),
        (1 << 20, 18, 2, 1, 1 << 18, (1 << 18) - 3),
        (1 << 10, 0, 3, 2, 5, 0),
    ] {
        let options = generic().order(Order::new(order)).altmap(reserve(kept));
        let pagemap = zone.bind(anonymous(pages), options).unwrap();
        let report = pagemap.report().clone();
        let altmap = report.altmap.expect("an altmap");
        assert_eq!(
            (altmap.reserve().get(), altmap.descriptors().pages().get(), altmap.lost().get()),
            (kept, descriptors, lost)
        );
        let metadata = pagemap.metadata_range().expect("an altmap");
        assert_eq!((metadata.pages(), metadata.pages().get()), (altmap.data_at(), data));
        assert_eq!(pagemap.range().start(), metadata.end());
        assert_eq!(pagemap.range().pages().get(), pages - data);
        // Only the data is described: fewer descriptors than without.
        assert_eq!(descriptor_count(&pagemap), (pages - data) >> order);
        assert_eq!(pagemap.region().len(), ByteLen::new((pages - data) * 4096));
        assert_eq!((report.memmap_pages, report.is_kept), (MemmapPages::Region, false));
        assert_eq!(report.init, Init::OnTouch);
        assert_eq!(
            pagemap.reserve().map(|reserve| reserve.len().get()),
            (kept > 0).then_some(kept * 4096)
        );
        assert_eq!(pagemap.metadata_resident().unwrap(), ByteLen::ZERO);
        // The zone knows all pages as taken.
        assert_eq!(
            zone.bound(),
            [PfnRange::try_new(metadata.start(), PageCount::new(pages)).unwrap()]
        );
        let text = report.to_string();
        assert!(text.contains(&format!("{kept} are reserved and {lost} are lost")), "{text}");
        let whole = pagemap.unbind().unwrap();
        assert_eq!(whole.pages().get(), pages);
    }
}

#[test]
fn offsets_and_segments_count_from_the_first_page_that_is_described() {
    let zone = Zone::new();
    let region = anonymous(1 << 12);
    let start = region.mapping().addr().get();
    let pagemap = zone.bind(region, generic().order(Order::new(4)).altmap(reserve(7))).unwrap();
    let data = pagemap.metadata_range().unwrap().pages().get();
    assert_eq!(data, 16);
    assert_eq!(pagemap.page_at(0).unwrap().pfn(), pagemap.range().start());
    assert!(pagemap.page_at(((1 << 12) - data) * 4096).is_none());
    pagemap.pin_and_write(5 * 4096, b"device").unwrap();
    let range = pagemap.range_at(5 * 4096, ByteLen::new(6)).unwrap();
    let pinned = pagemap.pin(range).unwrap();
    let segment = pinned.segments().next().unwrap();
    let at = usize::try_from((data + 5) * 4096).unwrap();
    assert_eq!((segment.address, segment.pfn), (start + at, range.start()));
    drop(pinned);
    let whole = pagemap.unbind().unwrap();
    assert_eq!(&read(|out| whole.read_at((data + 5) * 4096, out)), b"device");
}

#[test]
fn a_page_that_holds_descriptors_cannot_be_held_and_is_not_described() {
    let zone = Zone::new();
    let pagemap = zone.bind(anonymous(1 << 12), generic().altmap(reserve(3))).unwrap();
    let metadata = pagemap.metadata_range().unwrap();
    assert_eq!(metadata.pages().get(), 3 + 8);
    for pfn in metadata.iter() {
        assert!(pagemap.page(pfn).is_none());
        let range = PfnRange::try_single(pfn).unwrap();
        let refused = PinError::Metadata { pfn, metadata };
        assert_eq!(pagemap.pin(range).unwrap_err(), refused);
        assert_eq!(pagemap.get(range).unwrap_err(), refused);
        assert_eq!(pagemap.hand_out(pfn).unwrap_err(), refused);
        assert!(!pagemap.maybe_pinned(pfn));
        assert!(refused.to_string().contains(&format!("page {pfn} holds the descriptors")));
    }
    // A range that only reaches into them names the first of them.
    let last = Pfn::new(metadata.end().get() - 1);
    let across = PfnRange::try_new(last, PageCount::new(2)).unwrap();
    assert_eq!(pagemap.pin(across).unwrap_err(), PinError::Metadata { pfn: last, metadata });
    let before = Pfn::new(metadata.start().get() - 1);
    let around = PfnRange::try_new(before, PageCount::new(100)).unwrap();
    assert_eq!(
        pagemap.pin(around).unwrap_err(),
        PinError::Metadata { pfn: metadata.start(), metadata }
    );
    // What is not the region's at all is something else, as before.
    for pfn in [before, pagemap.range().end()] {
        let asked = PfnRange::try_single(pfn).unwrap();
        assert_eq!(
            pagemap.pin(asked).unwrap_err(),
            PinError::NotHere { asked, region: pagemap.range() }
        );
    }
    assert!(pagemap.pin(PfnRange::try_single(metadata.end()).unwrap()).is_ok());
    let plain = BindOptions::new(MemoryKind::Generic);
    assert!(zone.bind(anonymous(4), plain).unwrap().metadata_range().is_none());
}

#[test]
fn the_reserve_is_its_owners_before_while_and_after_the_region_is_bound() {
    let zone = Zone::new();
    let region = anonymous(1 << 12);
    region.write_at(4096 - 3, b"label").unwrap();
    let pagemap = zone.bind(region, linux().altmap(reserve(2))).unwrap();
    let kept = pagemap.reserve().unwrap();
    assert_eq!(&read(|out| kept.read_at(4096 - 3, out)), b"label");
    kept.write_at(8192 - 5, b"super").unwrap();
    assert!(kept.write_at(8192 - 4, b"block").is_err(), "the next page is a descriptor's");
    assert_fresh(&pagemap, "altmap");
    let region = pagemap.unbind().unwrap();
    assert_eq!(&read(|out| region.read_at(8192 - 5, out)), b"super");
    assert_eq!(&read(|out| region.read_at(4096 - 3, out)), b"label");
}

/// What a database keeps for each of its frames, written through a shared reference.
#[derive(FromBytes, IntoBytes, KnownLayout)]
#[repr(C)]
struct Frame {
    page_id: AtomicU64,
    last_write: AtomicU64,
}

impl Payload for Frame {
    type Seed = ();

    fn init(&mut self, _seed: &(), slot: &Slot) {
        *self.page_id.get_mut() = slot.pfn.get() * 3;
    }

    fn refresh(_seed: &()) -> Refresh {
        Refresh::Linear
    }
}

fn frames<'a>(pagemap: &'a Pagemap<Frame>) -> impl Iterator<Item = (u64, u64, Word)> + 'a {
    pagemap.pages().filter_map(|page| {
        let frame = page.payload()?;
        let number = |word: &AtomicU64| word.load(Ordering::Relaxed);
        Some((number(&frame.page_id), number(&frame.last_write), page.word()))
    })
}

#[test]
fn a_rebind_after_payloads_and_holds_were_written_is_the_first_bind() {
    let zone = Zone::new();
    for (order, tails) in [(0, Tails::Derived), (9, Tails::Derived), (4, Tails::Stored)] {
        for make in
            [|| anonymous(1 << 13), || Region::memfd("uzone-test", ByteLen::mib(32)).unwrap()]
        {
            let mut region = make();
            let mut first = None;
            for round in 0..3 {
                let options = BindOptions::<Frame>::with_payload(MemoryKind::Generic, ())
                    .order(Order::new(order))
                    .tails(tails)
                    .altmap(promised(&region).reserve(PageCount::new(1)));
                let pagemap = zone.bind(region, options).unwrap();
                let found: Vec<_> = frames(&pagemap).collect();
                assert!(found.iter().all(|(_, last_write, _)| *last_write == 0), "round {round}");
                assert_eq!(first.get_or_insert_with(|| found.clone()), &found, "round {round}");
                // Written, held, let go; what is behind the descriptors as well.
                for page in pagemap.pages().filter_map(PageView::payload) {
                    page.page_id.fetch_add(99, Ordering::Relaxed);
                    page.last_write.store(u64::MAX, Ordering::Relaxed);
                }
                let pinned = pagemap.pin(pagemap.range()).unwrap();
                let bytes = vec![0xa5; 1 << 20];
                let len = pagemap.region().len().get();
                for offset in (0..len).step_by(1 << 20) {
                    let part = usize::try_from((len - offset).min(1 << 20)).unwrap();
                    pinned.write_at(offset, &bytes[..part]).unwrap();
                }
                drop(pinned);
                region = pagemap.unbind().unwrap();
            }
        }
    }
}

/// Whatever stood where the descriptors come to lie (the defect of CVE-2026-72172 was descriptors
/// over old ones that were not initialised), every one of them is fresh.
#[test]
fn old_bytes_never_show_through_descriptors() {
    let zone = Zone::new();
    for stored in [Tails::Derived, Tails::Stored] {
        for order in [Order::BASE, Order::new(3), Order::PMD] {
            for make in
                [|| anonymous(1 << 13), || Region::memfd("uzone-test", ByteLen::mib(32)).unwrap()]
            {
                let region = make();
                fill(&region, 0xff);
                let altmap = promised(&region);
                let options = generic().order(order).tails(stored).altmap(altmap);
                let pagemap = zone.bind(region, options).unwrap();
                // Private memory is given back and reads as zero; of a file it is written.
                let is_private = *pagemap.region().backing() == RegionSource::Anonymous;
                let init = if is_private { Init::OnTouch } else { Init::Eager };
                assert_eq!(pagemap.report().init, init);
                assert_fresh(&pagemap, "altmap");
                let region = pagemap.unbind().unwrap();
                fill(&region, 0xff);
                let pagemap =
                    zone.bind(region, linux().order(order).tails(stored).altmap(altmap)).unwrap();
                assert_fresh(&pagemap, "altmap");
                // One shape over another, and smaller descriptors over larger ones.
                let region = pagemap.unbind().unwrap();
                let options = generic().init(Init::Eager).altmap(altmap);
                let pagemap = zone.bind(region, options).unwrap();
                assert_fresh(&pagemap, "altmap");
            }
        }
    }
}

#[test]
fn no_descriptor_is_left_to_the_next_user_of_the_memory() {
    let zone = Zone::new();
    let scratch = Temporary::sparse("altmap", 1 << 24);
    let file = || Region::file(&scratch.0, 0, ByteLen::mib(16)).unwrap();
    for ends_by_drop in [false, true] {
        let region = file();
        fill(&region, 0xff);
        let altmap = promised(&region).reserve(PageCount::new(1));
        let pagemap = zone.bind(region, linux().altmap(altmap)).unwrap();
        let metadata = pagemap.metadata_range().unwrap();
        let report = pagemap.report().altmap.unwrap();
        let len = pagemap.report().bytes.get();
        if ends_by_drop {
            // A guard keeps the pagemap; its descriptors go with the last one.
            let pinned = pagemap.pin(pagemap.range()).unwrap();
            drop(pagemap);
            drop(pinned);
        } else {
            let region = pagemap.unbind().unwrap();
            assert_eq!(region.len(), ByteLen::mib(16));
        }
        let bytes = std::fs::read(&scratch.0).unwrap();
        let at = |page: u64| usize::try_from(page * 4096).unwrap();
        let first = at(1);
        let end = first + usize::try_from(len).unwrap();
        assert!(bytes[..first].iter().all(|byte| *byte == 0xff), "the reserve is untouched");
        assert!(bytes[first..end].iter().all(|byte| *byte == 0), "{metadata:?}");
        // What was not written is as it was: the rest of the last page, and the data.
        assert!(bytes[end..].iter().all(|byte| *byte == 0xff));
        assert_eq!(report.descriptors().pages().get(), len.div_ceil(4096));
    }
    // Private memory that was written stays present for the next bind, and no byte of it is left.
    let mut region = anonymous(1 << 12);
    for threads in [1, 3] {
        let options = linux().threads(NonZeroUsize::new(threads).unwrap());
        let pagemap = zone.bind(region, options).unwrap();
        let metadata = pagemap.report().bytes;
        assert!(pagemap.metadata_resident().unwrap() >= metadata);
        region = pagemap.unbind().unwrap();
        assert!(region.mapping().resident_in(0..metadata.get()).unwrap() >= metadata);
        assert!(bytes(&region).iter().all(|byte| *byte == 0));
    }
    // Of descriptors that were initialised on touch nothing is even resident.
    let pagemap = zone.bind(region, generic()).unwrap();
    assert_eq!(pagemap.report().init, Init::OnTouch);
    pagemap.pin(pagemap.range()).unwrap();
    let metadata = pagemap.report().bytes;
    let region = pagemap.unbind().unwrap();
    assert_eq!(region.mapping().resident_in(0..metadata.get()).unwrap(), ByteLen::ZERO);
    assert!(bytes(&region).iter().all(|byte| *byte == 0));
}

#[test]
fn memory_that_others_may_have_is_taken_only_on_a_promise_about_it() {
    let zone = Zone::new();
    let shared = || Region::memfd("uzone-test", ByteLen::mib(4)).unwrap();
    let refused = zone.bind(shared(), generic()).unwrap_err();
    assert!(matches!(refused.cause, BindError::NoPromise), "{}", refused.cause);
    assert_eq!(refused.region.len(), ByteLen::mib(4), "whole again");
    assert!(refused.cause.to_string().contains("AltmapOptions::exclusive"));
    // The same, whatever the payload and the time of writing.
    assert!(matches!(cause(zone.bind(shared(), linux())), BindError::NoPromise));
    let another = promised(&shared());
    assert!(matches!(
        cause(zone.bind(shared(), generic().altmap(another))),
        BindError::Promise(MappingError::AnotherMapping)
    ));
    let region = shared();
    let altmap = promised(&region);
    let insisting = zone.bind(region, generic().init(Init::OnTouch).altmap(altmap)).unwrap_err();
    assert!(matches!(insisting.cause, BindError::OldBytes), "{}", insisting.cause);
    // The region that came back is the one that the promise was made about.
    let pagemap = zone.bind(*insisting.region, generic().altmap(altmap)).unwrap();
    assert_eq!(pagemap.report().init, Init::Eager);
    assert_fresh(&pagemap, "altmap");
    assert_eq!(zone.bound().len(), 1);
}

#[test]
fn a_region_that_is_too_small_for_its_descriptors_is_refused_with_the_numbers() {
    let zone = Zone::new();
    for (pages, order, kept) in [(1, 0, 0), (2, 0, 1), (512, 9, 0), (1024, 9, 512), (4, 0, 1 << 50)]
    {
        let options = generic().order(Order::new(order)).altmap(reserve(kept));
        let refused = zone.bind(anonymous(pages), options).unwrap_err();
        let BindError::Addr(AddrError::NoFolioLeft { pages: all, reserve, folio, .. }) =
            refused.cause
        else {
            panic!("{}", refused.cause);
        };
        assert_eq!((all.get(), reserve.get(), folio.get()), (pages, kept, 1 << order));
        assert_eq!(refused.region.pages().get(), pages);
    }
    assert!(zone.bound().is_empty(), "a bind that fails claims nothing");
}

#[test]
fn dropping_a_pagemap_unmaps_every_part_of_the_region() {
    let zone = Zone::new();
    let region = anonymous(1 << 16);
    let start = region.mapping().addr().get() as u64;
    let addresses = start..start + (1 << 28);
    let pagemap = zone.bind(region, linux().altmap(reserve(3))).unwrap();
    assert_eq!(mapped(addresses.clone()), 1 << 28);
    let pinned = pagemap.pin(PfnRange::try_single(pagemap.range().start()).unwrap()).unwrap();
    drop(pagemap);
    assert_eq!(mapped(addresses.clone()), 1 << 28, "a guard keeps all of it");
    drop(pinned);
    // Another test may map something there, but not all of it.
    assert!(mapped(addresses) < 1 << 28);
}

#[test]
fn bad_pages_are_counted_from_the_regions_first_page_and_hold_no_descriptors() {
    let zone = Zone::new();
    let pagemap = zone.bind(anonymous(1 << 12), generic()).unwrap();
    let start = pagemap.metadata_range().unwrap().start();
    let bad = Pfn::new(start.get() + 100);
    pagemap.poison(bad).unwrap();
    let region = pagemap.unbind().unwrap();
    assert_eq!(region.bad_pages(), [PageCount::new(100)]);
    // A reserve of 99 pages would put the descriptors on pages 99 to 106.
    let refused = zone.bind(region, generic().altmap(reserve(99))).unwrap_err();
    assert!(
        matches!(refused.cause, BindError::BadPage { page } if page.get() == 100),
        "{}",
        refused.cause
    );
    // In the reserve it is its owner's business, and still known.
    let pagemap = zone.bind(*refused.region, generic().altmap(reserve(101))).unwrap();
    let region = pagemap.unbind().unwrap();
    assert_eq!(region.bad_pages(), [PageCount::new(100)]);
    let options = generic().keep_poison();
    let pagemap = zone.bind(region, options).unwrap();
    let first = pagemap.metadata_range().unwrap().start();
    assert!(pagemap.is_poisoned(Pfn::new(first.get() + 100)));
}

#[test]
fn frame_numbers_inside_a_folio_are_filled_with_descriptors() {
    let zone = Zone::new();
    let options = generic().order(Order::PMD).base(Pfn::new((1 << 20) + 7));
    let pagemap = zone.bind(anonymous(2 * 512 - 7), options).unwrap();
    assert_eq!(pagemap.range().start(), Pfn::new((1 << 20) + 512));
    assert_eq!(pagemap.range().pages().get(), 512);
    assert_eq!(pagemap.report().altmap.unwrap().lost().get(), 504);
}

#[test]
fn a_file_from_an_offset_on_is_the_same_after_unbind_and_bound_only_once() {
    let zone = Zone::new();
    let scratch = Temporary::sparse("altmap-offset", 1 << 23);
    let open = |offset| Region::file(&scratch.0, offset, ByteLen::mib(4)).unwrap();
    let offset_of = |backing: &RegionSource| match backing {
        RegionSource::File { offset_bytes, .. } => *offset_bytes,
        other => panic!("{other}"),
    };
    let region = open(4096);
    let altmap = promised(&region).reserve(PageCount::new(2));
    let pagemap = zone.bind(region, generic().altmap(altmap)).unwrap();
    let data = pagemap.metadata_range().unwrap().pages().get();
    assert_eq!(offset_of(pagemap.region().backing()), 4096 * (1 + data));
    // The bytes of the reserve, the descriptors and the data are all taken.
    for offset in [0, 4096, 4096 * 4, 1 << 22] {
        let refused = cause(zone.bind(open(offset), BindOptions::new(MemoryKind::Generic)));
        assert!(matches!(refused, BindError::SameBytes { .. }), "{offset}: {refused}");
    }
    let region = pagemap.unbind().unwrap();
    assert_eq!((offset_of(region.backing()), region.len()), (4096, ByteLen::mib(4)));
    assert!(zone.bind(region, generic().altmap(altmap)).is_ok());
}

#[test]
fn more_descriptors_than_there_is_memory_are_refused_before_they_are_written() {
    let zone = Zone::new();
    // 16 TiB, which are only reserved; 64 bytes for each of their pages are not.
    let refused = zone.bind(anonymous(1 << 32), linux()).unwrap_err();
    assert!(
        matches!(refused.cause, BindError::TooLittleMemory { needed, .. } if needed > ByteLen::gib(200)),
        "{}",
        refused.cause
    );
    assert_eq!(refused.region.pages().get(), 1 << 32);
    // On touch they are no more than addresses.
    let pagemap = zone.bind(*refused.region, generic()).unwrap();
    assert_eq!(pagemap.metadata_resident().unwrap(), ByteLen::ZERO);
    drop(pagemap.pin(PfnRange::try_single(pagemap.range().start()).unwrap()).unwrap());
    assert!(pagemap.metadata_resident().unwrap() <= ByteLen::mib(2));
}

/// A small tmpfs, gone when dropped.
struct Tmpfs(PathBuf);

impl Tmpfs {
    fn mount(name: &str, size: &str) -> Result<Self, String> {
        let path = std::env::temp_dir().join(format!("uzone-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).map_err(|error| error.to_string())?;
        let mount = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &format!("size={size}"), "tmpfs"])
            .arg(&path)
            .output()
            .map_err(|error| error.to_string())?;
        if mount.status.success() {
            Ok(Self(path))
        } else {
            let _ = std::fs::remove_dir(&path);
            Err(String::from_utf8_lossy(&mount.stderr).trim().to_owned())
        }
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).status();
        let _ = std::fs::remove_dir(&self.0);
    }
}

#[test]
fn a_file_system_that_is_full_is_an_error_and_no_signal() {
    let name = "a_file_system_that_is_full_is_an_error_and_no_signal";
    let Some(mount) = or_skip(name, Tmpfs::mount("altmap-full", "5m")) else { return };
    let path = mount.0.join("sparse");
    File::create(&path).unwrap().set_len(1 << 30).unwrap();
    let region = Region::file(&path, 0, ByteLen::gib(1)).unwrap();
    let altmap = promised(&region);
    let refused = Zone::new().bind(region, linux().altmap(altmap)).unwrap_err();
    assert!(matches!(refused.cause, BindError::Populate(_)), "{}", refused.cause);
    // What had been written before it was full is cleared.
    assert!(is_zero(&refused.region, 0..4 << 20));
    drop(refused);
}

#[test]
fn a_region_of_huge_pages_gives_whole_ones_and_is_read_as_zero_only_untouched() {
    let name = "a_region_of_huge_pages_gives_whole_ones_and_is_read_as_zero_only_untouched";
    let Some(_pool) = Pool::grow(name, PageSize::MIB_2, 8) else { return };
    let zone = Zone::new();
    // Another test program may bind while the pool is raised, and take pages of it.
    let region = or_skip(name, Region::hugetlb(ByteLen::mib(16), PageSize::MIB_2));
    let Some(region) = region else { return };
    let refused = zone.bind(region, generic().altmap(reserve(1))).unwrap_err();
    let align = Order::PMD.pages();
    assert!(matches!(
        refused.cause,
        BindError::Addr(AddrError::ReserveInsidePage { align: found, .. }) if found == align
    ));
    let refused = zone.bind(*refused.region, generic().base(Pfn::new(7))).unwrap_err();
    assert!(matches!(
        refused.cause,
        BindError::Addr(AddrError::StartInsidePage { align: found, .. }) if found == align
    ));
    // Untouched memory is initialised on touch.
    let pagemap = zone.bind(*refused.region, generic().altmap(reserve(512))).unwrap();
    assert_eq!(pagemap.report().init, Init::OnTouch);
    let altmap = pagemap.report().altmap.unwrap();
    assert_eq!(
        (altmap.reserve().get(), altmap.descriptors().pages().get(), altmap.lost().get()),
        (512, 512, 0)
    );
    assert_eq!(pagemap.metadata_resident().unwrap(), ByteLen::ZERO);
    drop(pagemap.pin(pagemap.range()).unwrap());
    let region = pagemap.unbind().unwrap();
    assert!(bytes(&region).iter().all(|byte| *byte == 0));
    // What was touched is written, also where it was cleared.
    let pagemap = zone.bind(region, generic()).unwrap();
    assert_eq!(pagemap.report().init, Init::Eager);
    assert_fresh(&pagemap, "altmap");
    let region = pagemap.unbind().unwrap();
    fill(&region, 0xff);
    let refused = zone.bind(region, generic().init(Init::OnTouch)).unwrap_err();
    assert!(matches!(refused.cause, BindError::OldBytes));
    let pagemap = zone.bind(*refused.region, generic()).unwrap();
    assert_fresh(&pagemap, "altmap");
    let region = pagemap.unbind().unwrap();
    assert!(is_zero(&region, 0..7 * 512 * 8), "nothing is left of descriptors");
}

/// DAX is not asked for by `REQUIRE_ALL`: see the live tests of `os`.
#[test]
fn a_file_on_a_dax_mount_holds_its_own_descriptors() {
    let name = "a_file_on_a_dax_mount_holds_its_own_descriptors";
    let Some(directory) = std::env::var_os("DAX_DIR").map(PathBuf::from) else {
        return skip_dax(name, "DAX_DIR names no directory on a DAX mount");
    };
    let path = directory.join(format!("uzone-altmap-{}", std::process::id()));
    File::create(&path).unwrap().set_len(32 << 20).unwrap();
    let region = Region::fsdax(&path, 0, ByteLen::mib(32)).unwrap();
    std::fs::remove_file(&path).unwrap();
    binds_over_old_bytes(region, 2);
}

#[test]
fn a_dax_device_holds_its_own_descriptors() {
    let name = "a_dax_device_holds_its_own_descriptors";
    if !is_dax_required() {
        return skip_dax(name, "it overwrites the device: set REQUIRE_DAX=1 to let it");
    }
    let Some(path) =
        (0..16).map(|index| format!("/dev/dax{index}.0")).find(|path| Path::new(path).exists())
    else {
        return skip_dax(name, "there is no DAX device");
    };
    let region = Region::devdax(Path::new(&path)).unwrap();
    let reserve = region.folio_order().pages().get();
    binds_over_old_bytes(region, reserve);
}

fn binds_over_old_bytes(mut region: Region, kept: u64) {
    let zone = Zone::new();
    let altmap = promised(&region).reserve(PageCount::new(kept));
    region.write_at(0, b"label").unwrap();
    for _ in 0..2 {
        region.write_at(kept * 4096, &[0xff; 4096]).unwrap();
        let options = linux().order(region.folio_order()).tails(Tails::Stored).altmap(altmap);
        let pagemap = zone.bind(region, options).unwrap();
        assert_fresh(&pagemap, "altmap");
        region = pagemap.unbind().unwrap();
        assert!(is_zero(&region, kept * 4096..(kept + 1) * 4096));
    }
    assert_eq!(&read(|out| region.read_at(0, out)), b"label");
}

/// Pins by address or number find the data pages where they are, and refuse those in front; so do
/// poison and clearing.
#[test]
fn pages_in_front_are_refused_by_every_call_and_the_others_found() {
    for order in [0_u8, 9] {
        let zone = Zone::new();
        let region = anonymous(16 << 10);
        let start = region.mapping().addr().get();
        let options = generic().altmap(reserve(3)).order(Order::new(order)).base(Pfn::new(0x4000));
        let pagemap = zone.bind(region, options).unwrap();
        let metadata = pagemap.metadata_range().unwrap();
        assert_eq!(metadata.start(), Pfn::new(0x4000));
        let address = |pfn: Pfn| start + usize::try_from((pfn.get() - 0x4000) * 4096).unwrap();
        let data = pagemap.range().start();
        for pfn in [data, Pfn::new(data.get() + 700), Pfn::new(pagemap.range().end().get() - 1)] {
            let pinned = zone.pin(address(pfn), ByteLen::new(4096)).unwrap();
            let pinned = pinned.into_single().unwrap();
            assert_eq!(pinned.range(), PfnRange::try_single(pfn).unwrap());
            assert_eq!(pinned.segments().next().unwrap().address, address(pfn));
            pagemap.pin_and_write((pfn.get() - data.get()) * 4096, &[9]).unwrap();
        }
        let last = Pfn::new(metadata.end().get() - 1);
        for pfn in [metadata.start(), last] {
            let single = PfnRange::try_single(pfn).unwrap();
            for failure in [
                zone.pin(address(pfn), ByteLen::new(1)).unwrap_err(),
                zone.get(address(pfn), ByteLen::new(1)).unwrap_err(),
                pagemap.pin(single).unwrap_err(),
            ] {
                assert!(matches!(failure, PinError::Metadata { .. }), "{failure}");
            }
            assert_eq!(pagemap.poison(pfn), Err(PinError::Metadata { pfn, metadata }));
            assert!(!pagemap.is_poisoned(pfn));
        }
        let all = PfnRange::try_new(metadata.start(), PageCount::new(16 << 10)).unwrap();
        let failure = pagemap.zero(all, &ZeroOptions::default()).unwrap_err();
        assert!(matches!(failure, WriteError::Pin(PinError::Metadata { .. })), "{failure}");
        assert!(pagemap.zero(pagemap.range(), &ZeroOptions::default()).unwrap().is_whole());
        // Long ranges, by the block where there are any.
        let pinned = pagemap.pin(pagemap.range()).unwrap();
        assert!(pinned.pfns().all(|pfn| pinned.word(pfn).pins() == 1));
        drop(pinned);
        assert!(pagemap.unbind().is_ok());
    }
}

#[test]
fn data_starts_at_a_boundary_of_huge_pages_where_that_is_asked_for() {
    let zone = Zone::new();
    let gib = Order::new(18);
    for (pages, align, data) in [
        (1 << 12, Order::BASE, 8),
        (1 << 12, Order::PMD, 512),
        ((1 << 18) + 4711, Order::PMD, 1024),
        (5 << 17, gib, 1 << 18),
    ] {
        let region = anonymous(pages);
        let altmap = AltmapOptions::new().align(align);
        let pagemap = zone.bind(region, generic().altmap(altmap)).unwrap();
        let metadata = pagemap.metadata_range().unwrap();
        assert_eq!(metadata.pages().get(), data, "{pages} {align}");
        assert!(pagemap.range().start().is_aligned(align));
        let region = pagemap.unbind().unwrap();
        assert_eq!(region.pages().get(), pages, "whole again");
    }
    let none_left = anonymous(1 << 18);
    let refused = zone.bind(none_left, generic().altmap(AltmapOptions::new().align(gib)));
    let text = refused.unwrap_err().cause.to_string();
    assert!(text.contains("262144 pages") && text.contains("aligned to less"), "{text}");
}
