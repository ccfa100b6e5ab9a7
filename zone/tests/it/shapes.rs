//! Random shapes of memmap: whatever the payload, the order, the tails, the frame numbers, the store
//! and the threads, every descriptor is the slow path's, also in memory that another shape left dirty,
//! and in the region itself over bytes that stood there.

use std::num::NonZeroUsize;

use proptest::prelude::*;
use proptest::sample::select;
use uzone_pages::{
    ByteLen, MemoryKind, Order, PageCount, Payload, Pfn, Refresh, Slot, Tails, Word,
};
use uzone_stream::Path as StorePath;
use uzone_zone::{AltmapOptions, BindOptions, Init, Region, Zone};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

const MAX_WORDS: usize = 20;

/// Word `j` of class `c` is `a + b * head + c * pfn + d * (pfn >> block) + e * head address`.
#[derive(Clone, Debug)]
struct Coefficients {
    words: Vec<[[u64; 5]; 3]>,
    block: Option<u8>,
    is_scattered: bool,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
struct Words<const COUNT: usize>([u64; COUNT]);

impl<const COUNT: usize> Payload for Words<COUNT> {
    type Seed = Coefficients;

    fn init(&mut self, seed: &Coefficients, slot: &Slot) {
        use uzone_pages::Class;
        let class = match slot.class {
            Class::Base | Class::Head => 0,
            Class::FirstTail => 1,
            Class::Tail => 2,
        };
        let pfn = slot.pfn.get();
        let factors = [
            1,
            slot.pfn.align_down(slot.order).get(),
            pfn,
            seed.block.map_or(0, |order| pfn >> order),
            slot.head_address,
        ];
        for (word, coefficients) in self.0.iter_mut().zip(&seed.words) {
            *word =
                factors.iter().zip(coefficients[class]).fold(0, |sum, (factor, coefficient)| {
                    sum.wrapping_add(factor.wrapping_mul(coefficient))
                });
            if seed.is_scattered {
                *word = word.rotate_left(7) ^ pfn;
            }
        }
    }

    fn refresh(seed: &Coefficients) -> Refresh {
        match seed.block {
            _ if seed.is_scattered => Refresh::EachPage,
            Some(order) => Refresh::LinearWithin(Order::new(order)),
            None => Refresh::Linear,
        }
    }
}

#[derive(Clone, Debug)]
struct Shape {
    words: usize,
    seed: Coefficients,
    kind: MemoryKind,
    order: u8,
    tails: Tails,
    folios: u64,
    base: u64,
    stamp: Option<Option<StorePath>>,
    threads: usize,
    /// The reserve of an altmap, if the descriptors are to lie in the region.
    altmap: Option<u64>,
}

fn number() -> impl Strategy<Value = u64> {
    prop_oneof![Just(0), Just(1), 0..1000_u64, any::<u64>()]
}

fn coefficients() -> impl Strategy<Value = Coefficients> {
    let class = || [number(), number(), number(), number(), number()];
    (
        prop::collection::vec([class(), class(), class()], MAX_WORDS),
        prop::option::of(0..14_u8),
        prop::bool::weighted(0.1),
    )
        .prop_map(|(words, block, is_scattered)| Coefficients { words, block, is_scattered })
}

fn stamp() -> impl Strategy<Value = Option<Option<StorePath>>> {
    let mut stamps = vec![None, Some(None)];
    let available = StorePath::ALL.into_iter().filter(|path| path.is_available());
    stamps.extend(available.map(|path| Some(Some(path))));
    select(stamps)
}

fn shape() -> impl Strategy<Value = Shape> {
    (
        select(vec![0, 1, 2, 3, 5, 6, 7, 8, 9, 10, 11, 12, 20]),
        coefficients(),
        select(MemoryKind::ALL.to_vec()),
        0..13_u8,
        select(vec![Tails::Derived, Tails::Stored]),
        // At most 2^14 folios, and below at most 2^14 pages where tails are stored.
        1..1_u64 << 14,
        prop_oneof![4 => 0..1_u64 << 40, 1 => Just((1_u64 << 52) - 1), 1 => Just(u64::MAX)],
        stamp(),
        1..5_usize,
        prop::option::weighted(0.4, prop_oneof![1 => Just(0), 1 => 0..600_u64]),
    )
        .prop_map(|(words, seed, kind, order, tails, folios, base, stamp, threads, altmap)| {
            let most = if tails == Tails::Stored { (1 << 14) >> order } else { 1 << 14 };
            let folios = 1 + folios % most;
            let pages = folios << order;
            // The frame numbers end before the last 64-bit number.
            let base = base.min(u64::MAX - pages) >> order << order;
            Shape { words, seed, kind, order, tails, folios, base, stamp, threads, altmap }
        })
}

fn descriptors(shape: &Shape, pages: u64) -> u64 {
    if shape.tails == Tails::Stored { pages } else { shape.folios }
}

fn check<const COUNT: usize>(zone: &Zone, shape: &Shape) {
    let pages = shape.folios << shape.order;
    let mut options = BindOptions::<Words<COUNT>>::with_payload(shape.kind, shape.seed.clone())
        .init(Init::Eager)
        .order(Order::new(shape.order))
        .tails(shape.tails)
        .base(Pfn::new(shape.base))
        .threads(NonZeroUsize::new(shape.threads).expect("at least one"));
    if let Some(stamp) = shape.stamp {
        options = options.stamp(stamp);
    }
    let mut total = pages;
    if let Some(reserve) = shape.altmap {
        // So many more that at least as many as without are described.
        let size = (COUNT as u64 + 1) * 8;
        let room = reserve + 1024 + descriptors(shape, pages) * size / 4096 * 2;
        total += room.next_multiple_of(1 << shape.order);
        let base = shape.base.min((u64::MAX - total) >> shape.order << shape.order);
        let altmap = AltmapOptions::new().reserve(PageCount::new(reserve));
        options = options.base(Pfn::new(base)).altmap(altmap);
    }
    let region = Region::anonymous(ByteLen::new(total * 4096)).expect("reserved memory");
    if shape.altmap.is_some() {
        let dirt = vec![0xa5; region.len().get().min(1 << 20).try_into().expect("a length")];
        region.write_at(0, &dirt).expect("writable memory");
    }
    let pagemap = zone.bind(region, options).expect("a bind");
    let described = pagemap.range().pages().get();
    assert!(described >= pages && (described == pages || shape.altmap.is_some()));
    assert_eq!(pagemap.metadata_range().map_or(0, |range| range.pages().get()), total - described);
    let stride = if shape.tails == Tails::Stored { 1 } else { 1 << shape.order };
    let start = pagemap.range().start().get();
    let mut descriptors = 0;
    for offset in (0..described).step_by(stride) {
        let page = pagemap.page(Pfn::new(start + offset)).expect("a page of the region");
        let written = page.payload().expect("a descriptor");
        let fresh = pagemap.fresh_payload(page.pfn()).expect("a page of the region");
        assert!(written.as_bytes() == fresh.as_bytes(), "page {offset}: {:x?}", written.0);
        assert_eq!(page.word(), Word::initial(shape.kind), "page {offset}");
        descriptors += 1;
    }
    let bytes = descriptors * uzone_pages::Template::<Words<COUNT>>::DESCRIPTOR_BYTES as u64;
    assert_eq!(bytes, pagemap.report().bytes.get());
}

thread_local! {
    /// One zone for all cases, so that each finds what the one before left.
    static ZONE: Zone = Zone::with_keep_limit(ByteLen::mib(64));
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 300,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn every_shape_is_written_as_the_slow_path_writes_it(shape in shape()) {
        ZONE.with(|zone| match shape.words {
            0 => check::<0>(zone, &shape),
            1 => check::<1>(zone, &shape),
            2 => check::<2>(zone, &shape),
            3 => check::<3>(zone, &shape),
            5 => check::<5>(zone, &shape),
            6 => check::<6>(zone, &shape),
            7 => check::<7>(zone, &shape),
            8 => check::<8>(zone, &shape),
            9 => check::<9>(zone, &shape),
            10 => check::<10>(zone, &shape),
            11 => check::<11>(zone, &shape),
            12 => check::<12>(zone, &shape),
            _ => check::<20>(zone, &shape),
        });
    }
}
