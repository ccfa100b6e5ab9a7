//! Guest memory of uzone beside `GuestMemoryMmap`, which is the oracle: the same accesses have the same answers, the
//! same bytes and the same written pages.
#![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]

#[path = "../../../os/tests/common/needs.rs"]
mod needs;

use std::fmt::Debug;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use proptest::prelude::*;
use uzone::hostpool::{HostPool, HostPoolOptions};
use uzone::lazy::{Engine, FunctionBacking, LazyMapping, LazyOptions, WriteTracking};
use uzone::{BindOptions, ByteLen, MemoryKind, Region, Zone};
use uzone_vm_memory::{GuestMemory, GuestRegion, HostMemory};
use vm_memory::bitmap::{AtomicBitmap, Bitmap};
use vm_memory::{
    Address, Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion,
    MemoryRegionAddress,
};

use crate::needs::or_skip;

const PAGE: u64 = 4096;
/// Where the regions start, and how many pages they have: the first two are neighbours, and so are the last two.
const REGIONS: [(u64, u64); 4] = [(0x10_0000, 16), (0x11_0000, 8), (0x20_0000, 8), (0x20_8000, 8)];

fn byte(at: usize) -> u8 {
    (at / 4096 * 7 + at % 251).to_le_bytes()[0]
}

fn image(pages: u64) -> Vec<u8> {
    (0..usize::try_from(pages * PAGE).unwrap()).map(byte).collect()
}

fn lazy(engine: &Engine, pages: u64, tracking: Option<WriteTracking>) -> Option<LazyMapping> {
    let backing = FunctionBacking::quick(|offset: u64, out: &mut [u8]| {
        let first = usize::try_from(offset).unwrap();
        out.iter_mut().zip(first..).for_each(|(out, at)| *out = byte(at));
        Ok(())
    });
    let options = LazyOptions::default().track_writes(tracking);
    let mapped = engine.map(ByteLen::new(pages * PAGE), Arc::new(backing), &options);
    or_skip("guest memory that is mapped lazily", mapped)
}

/// A guest's memory of all kinds, and the oracle with the same bytes.
fn memories(tracking: WriteTracking) -> Option<(GuestMemory, GuestMemoryMmap<AtomicBitmap>)> {
    let engine = or_skip("guest memory that is mapped lazily", Engine::new(NonZeroUsize::MIN))?;
    let len = |pages: u64| ByteLen::new(pages * PAGE);
    let pool = HostPool::open(len(8), HostPoolOptions::default().block(len(8))).unwrap();
    let block = pool.take(Duration::from_secs(60)).unwrap();
    let region = Region::anonymous(len(8)).unwrap();
    let pagemap = Zone::new().bind(region, BindOptions::new(MemoryKind::Generic)).unwrap();
    let memory: [HostMemory; 4] = [
        lazy(&engine, 16, Some(tracking))?.into(),
        pagemap.into(),
        Region::memfd("guest", len(8)).unwrap().into(),
        block.into(),
    ];
    let regions = REGIONS.iter().zip(memory);
    let regions =
        regions.map(|((start, _), memory)| GuestRegion::new(GuestAddress(*start), memory).unwrap());
    let ours = GuestMemory::from_regions(regions.collect()).unwrap();

    let ranges =
        REGIONS.map(|(start, pages)| (GuestAddress(start), usize::try_from(pages * PAGE).unwrap()));
    let theirs = GuestMemoryMmap::<AtomicBitmap>::from_ranges(&ranges).unwrap();
    theirs.write_slice(&image(16), GuestAddress(REGIONS[0].0)).unwrap();
    theirs.iter().for_each(|region| region.get_mmap().bitmap().reset());
    Some((ours, theirs))
}

/// Returns whether each page was written.
fn written<R: GuestMemoryRegion>(region: &R) -> Vec<bool> {
    let pages = 0..region.len() / PAGE;
    pages.map(|page| region.bitmap().dirty_at(usize::try_from(page * PAGE).unwrap())).collect()
}

/// Returns the pages of ranges.
fn pages(ranges: &[std::ops::Range<u64>]) -> Vec<u64> {
    ranges.iter().flat_map(|range| range.start / PAGE..range.end / PAGE).collect()
}

#[derive(Clone, Debug)]
enum Access {
    Read {
        at: u64,
        len: usize,
    },
    Write {
        at: u64,
        len: usize,
        byte: u8,
    },
    Store {
        at: u64,
        value: u32,
    },
    Load {
        at: u64,
    },
    /// Through a slice of one region.
    Fill {
        at: u64,
        len: usize,
        byte: u8,
    },
    Check {
        at: u64,
        len: usize,
    },
}

/// Addresses near the borders of regions and pages, also ones that no region has.
fn addresses() -> impl Strategy<Value = u64> {
    let near = |starts: Vec<u64>| {
        (prop::sample::select(starts), -70_i64..70)
            .prop_map(|(start, by)| start.saturating_add_signed(by))
    };
    let borders =
        REGIONS.iter().flat_map(|(start, pages)| [*start, start + pages * PAGE]).collect();
    prop_oneof![
        2 => near(borders),
        2 => (0..40_u64, 0..PAGE).prop_map(|(page, inside)| REGIONS[0].0 + page * PAGE + inside),
        2 => (0..20_u64, 0..PAGE).prop_map(|(page, inside)| REGIONS[2].0 + page * PAGE + inside),
        1 => near(vec![0, 70, u64::MAX - 70, u64::MAX]),
    ]
}

fn accesses() -> impl Strategy<Value = Access> {
    let len = prop_oneof![0..100_usize, 4000..20_000_usize];
    (addresses(), len, any::<u8>(), any::<u32>(), 0..6).prop_map(|(at, len, byte, value, kind)| {
        match kind {
            0 => Access::Read { at, len },
            1 => Access::Write { at, len, byte },
            2 => Access::Store { at: at & !3, value },
            3 => Access::Load { at: at & !3 },
            4 => Access::Fill { at, len, byte },
            _ => Access::Check { at, len },
        }
    })
}

/// Makes an access. Returns its answer, with the bytes of a read.
fn make<M>(memory: &M, access: &Access) -> String
where
    M: GuestMemoryBackend + Bytes<GuestAddress>,
    M::E: Debug,
{
    let at = GuestAddress;
    match *access {
        Access::Read { at: start, len } => {
            let mut bytes = vec![0xee; len];
            let read = memory.read(&mut bytes, at(start));
            format!("{read:?} {bytes:?}")
        }
        Access::Write { at: start, len, byte } => {
            format!("{:?}", memory.write(&vec![byte; len], at(start)))
        }
        Access::Store { at: start, value } => {
            format!("{:?}", memory.store(value, at(start), Ordering::Release))
        }
        Access::Load { at: start } => {
            format!("{:?}", memory.load::<u32>(at(start), Ordering::Acquire))
        }
        Access::Fill { at: start, len, byte } => {
            let Some(region) = memory.find_region(at(start)) else { return "nowhere".to_owned() };
            let offset = MemoryRegionAddress(start - region.start_addr().raw_value());
            match region.get_slice(offset, len) {
                Ok(slice) => {
                    slice.copy_from(&vec![byte; len]);
                    "filled".to_owned()
                }
                Err(error) => format!("{error:?}"),
            }
        }
        Access::Check { at: start, len } => {
            format!("{:?} {}", memory.check_address(at(start)), memory.check_range(at(start), len))
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn random_accesses_have_the_answers_bytes_and_written_pages_of_the_oracle(
        accesses in prop::collection::vec(accesses(), 1..60),
        taken_at in 0..60_usize,
        is_async in any::<bool>(),
    ) {
        let tracking = if is_async { WriteTracking::Async } else { WriteTracking::Sync };
        let Some((ours, theirs)) = memories(tracking) else { return Ok(()) };
        for (number, access) in accesses.iter().enumerate() {
            prop_assert_eq!(make(&ours, access), make(&theirs, access), "{:?}", access);
            if number == taken_at {
                compare(&ours, &theirs, tracking, true)?;
            }
        }
        compare(&ours, &theirs, tracking, false)?;
        for ((start, pages), region) in REGIONS.iter().zip(ours.iter()) {
            let len = usize::try_from(pages * PAGE).unwrap();
            let (mut our, mut their) = (vec![1; len], vec![2; len]);
            region.read_slice(&mut our, MemoryRegionAddress(0)).unwrap();
            theirs.read_slice(&mut their, GuestAddress(*start)).unwrap();
            prop_assert!(our == their, "the bytes of the region at {start:#x}");
        }
    }
}

/// Compares the written pages, and takes them if that is asked for.
fn compare(
    ours: &GuestMemory,
    theirs: &GuestMemoryMmap<AtomicBitmap>,
    tracking: WriteTracking,
    takes: bool,
) -> Result<(), TestCaseError> {
    for (our, their) in ours.iter().zip(theirs.iter()) {
        let (seen, expected) = (written(our), written(their));
        // A write that is an event may have let its writer in to pages next to it.
        if our.written().sees_all_writers() && tracking == WriteTracking::Sync {
            prop_assert!(seen.iter().zip(&expected).all(|(seen, expected)| seen >= expected));
        } else {
            prop_assert_eq!(&seen, &expected);
        }
        if takes {
            let taken = pages(&our.written().take().unwrap());
            let listed = (0..).zip(&seen).filter(|(_, is_written)| **is_written);
            prop_assert!(taken.iter().copied().eq(listed.map(|(page, _)| page)));
            prop_assert!(written(our).iter().all(|is_written| !is_written));
            their.get_mmap().bitmap().reset();
        }
    }
    Ok(())
}

#[test]
fn a_region_that_ends_beyond_every_address_is_refused() {
    let region = || Region::anonymous(ByteLen::new(PAGE)).unwrap();
    assert!(GuestRegion::new(GuestAddress(u64::MAX - PAGE + 2), region()).is_none());
    let last = GuestRegion::new(GuestAddress(u64::MAX - PAGE + 1), region()).unwrap();
    assert_eq!(last.last_addr(), GuestAddress(u64::MAX));
    assert!(last.get_slice(MemoryRegionAddress(PAGE - 4), 4).is_ok());
    assert!(last.get_slice(MemoryRegionAddress(PAGE - 4), 5).is_err());
    assert!(last.get_slice(MemoryRegionAddress(u64::MAX), 2).is_err());
}

#[test]
fn writes_past_the_crate_are_seen_of_a_tracked_mapping_alone() {
    const NAME: &str = "writes_past_the_crate_are_seen_of_a_tracked_mapping_alone";
    let Some(engine) = or_skip(NAME, Engine::new(NonZeroUsize::MIN)) else { return };
    for tracking in [Some(WriteTracking::Async), Some(WriteTracking::Sync), None] {
        let Some(mapping) = lazy(&engine, 16, tracking) else { return };
        let region = GuestRegion::new(GuestAddress(0), mapping).unwrap();
        assert_eq!(region.written().sees_all_writers(), tracking.is_some());
        let HostMemory::Lazy(mapping) = region.memory() else { unreachable!() };
        mapping.write_at(5 * PAGE, &[1]).unwrap();
        region.write_obj(7_u8, MemoryRegionAddress(9 * PAGE)).unwrap();
        let taken = pages(&region.written().take().unwrap());
        match tracking {
            Some(_) => assert!(taken.contains(&5) && taken.contains(&9), "{taken:?}"),
            None => assert_eq!(taken, [9]),
        }
    }
}

#[test]
fn a_memory_file_is_shown_to_devices_of_other_processes() {
    let region = Region::memfd("guest", ByteLen::new(4 * PAGE)).unwrap();
    let region = GuestRegion::new(GuestAddress(0), region).unwrap();
    region.write_obj(0x1234_u16, MemoryRegionAddress(PAGE)).unwrap();
    let file = region.file_offset().unwrap();
    let mut seen = [0; 2];
    let at = file.start() + PAGE;
    std::os::unix::fs::FileExt::read_exact_at(file.file(), &mut seen, at).unwrap();
    assert_eq!(u16::from_ne_bytes(seen), 0x1234);
    let private = Region::anonymous(ByteLen::new(PAGE)).unwrap();
    assert!(GuestRegion::new(GuestAddress(0), private).unwrap().file_offset().is_none());
}

#[test]
fn pages_of_a_bound_region_are_pinned_while_a_guest_has_it() {
    let zone = Zone::new();
    let region = Region::anonymous(ByteLen::mib(2)).unwrap();
    let pagemap = zone.bind(region, BindOptions::new(MemoryKind::Generic)).unwrap();
    let region = GuestRegion::new(GuestAddress(0), pagemap).unwrap();
    let host = region.get_host_address(MemoryRegionAddress(PAGE)).unwrap();
    let pinned = zone.pin(host.addr(), ByteLen::new(PAGE)).unwrap();
    region.write_obj(5_u64, MemoryRegionAddress(PAGE + 8)).unwrap();
    let pinned = pinned.into_single().unwrap();
    let mut seen = [0; 8];
    pinned.read_at(8, &mut seen).unwrap();
    assert_eq!(u64::from_ne_bytes(seen), 5);
    let HostMemory::Pagemap(pagemap) = region.into_memory() else { unreachable!() };
    let busy = pagemap.unbind().unwrap_err();
    drop(pinned);
    assert!(busy.pagemap.unbind().is_ok());
}
