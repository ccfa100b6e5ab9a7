//! The naive way to initialise Linux's 64-byte descriptors: a call for each page that sets field
//! after field in place, as the kernel's slow path does and as a port of it would. It knows nothing
//! of templates, and shares no code with ours: a baseline may not profit from what is measured.

use uzone_pages::{LinuxPage, LinuxSeed, MemoryKind, Order, Pfn, Template};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// A descriptor as its fields, in memory order; all of them plain numbers.
#[derive(Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct NaivePage {
    flags: u64,
    compound_head_or_pagemap: u64,
    private_data: u64,
    mapping: u64,
    index: u64,
    private: u64,
    mapcount: i32,
    refcount: u32,
    memcg: u64,
}

const _: () = assert!(size_of::<NaivePage>() == 64);

/// What all pages of a memmap have in common.
#[derive(Clone, Copy)]
pub(crate) struct NaiveZone {
    pub(crate) node: u64,
    pub(crate) pagemap_address: u64,
    pub(crate) refcount: u32,
}

const ZONE_DEVICE: u64 = 4;
const RESERVED: u64 = 1 << 13;
const HEAD: u64 = 1 << 6;

impl NaivePage {
    /// Initialises a page of the device zone.
    #[inline(never)]
    fn init(&mut self, zone: &NaiveZone) {
        *self = Self::default();
        self.flags |= zone.node << 54;
        self.flags |= ZONE_DEVICE << 51;
        self.flags |= 0x1f_ffff << 30;
        self.refcount = 1;
        self.mapcount = -1;
        self.flags |= RESERVED;
        self.compound_head_or_pagemap = zone.pagemap_address;
        self.private_data = 0;
        self.refcount = zone.refcount;
    }

    /// Makes an initialised page a tail.
    #[inline(never)]
    fn make_tail(&mut self, head_address: u64) {
        self.mapping = 0xdead_0000_0000_0400;
        self.compound_head_or_pagemap = head_address + 1;
        self.private = 0;
        self.refcount = 0;
    }

    /// Writes what belongs to the folio into its first tail.
    #[inline(never)]
    fn prepare_folio(&mut self, order: Order) {
        self.flags |= u64::from(order.get());
        self.private_data = u64::MAX;
        self.mapping = 0;
        self.index = order.pages().get();
    }
}

/// Writes descriptors for folios of `order`, the first of which will be at `address`.
pub(crate) fn stamp(pages: &mut [NaivePage], order: Order, zone: &NaiveZone, address: u64) {
    if order == Order::BASE {
        for page in pages {
            page.init(zone);
        }
        return;
    }
    let folio_pages = usize::try_from(order.pages().get()).unwrap_or(usize::MAX);
    let mut head_address = address;
    for folio in pages.chunks_mut(folio_pages) {
        let Some((head, tails)) = folio.split_first_mut() else { return };
        head.init(zone);
        head.flags |= HEAD;
        for tail in &mut *tails {
            tail.init(zone);
            tail.make_tail(head_address);
        }
        if let Some(first) = tails.first_mut() {
            first.prepare_folio(order);
        }
        head_address += order.pages().get() * 64;
    }
}

/// Returns the first page whose descriptor is not what the slow path of `uzone-pages` makes it.
pub(crate) fn first_wrong(pages: &[NaivePage], template: &Template<LinuxPage>) -> Option<Pfn> {
    template.layout().range().iter().zip(pages).find_map(|(pfn, page)| {
        let fresh = template.fresh(pfn)?;
        let is_right = page.as_bytes()[..size_of::<LinuxPage>()] == *fresh.as_bytes();
        (!is_right || page.memcg != 0).then_some(pfn)
    })
}

impl NaiveZone {
    pub(crate) fn new(seed: &LinuxSeed) -> Self {
        Self {
            node: u64::from(seed.node),
            pagemap_address: seed.pagemap_address,
            refcount: seed.release.initial_references(MemoryKind::Generic),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use uzone_pages::{Layout, PageCount, PfnRange, Tails};

    #[test]
    fn the_naive_way_writes_what_the_slow_path_writes() {
        let seed = LinuxSeed { pagemap_address: 0x1234, ..LinuxSeed::default() };
        for order in [0, 1, 2, 9] {
            let range = PfnRange::try_new(Pfn::new(1 << 20), PageCount::new(2048)).unwrap();
            let layout = Layout::try_new(range, Order::new(order), Tails::Stored).unwrap();
            let template =
                Template::<LinuxPage>::new(layout, MemoryKind::Generic, seed, 0x7000_0000);
            let mut pages: Vec<NaivePage> = (0..2048).map(|_| NaivePage::default()).collect();
            let zone = NaiveZone::new(&seed);
            stamp(&mut pages, Order::new(order), &zone, 0x7000_0000);
            assert_eq!(first_wrong(&pages, &template), None, "order {order}");
        }
    }
}
