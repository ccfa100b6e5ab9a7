//! The naive way to initialise Linux's 64-byte descriptors: a call for each page that sets field
//! after field in place, as the kernel's slow path does and as a port of it would. It knows nothing
//! of templates, and shares no code with ours: a baseline may not profit from an optimisation of ours.

use std::time::{Duration, Instant};

use uzone_os::{Addr, Anonymous, Exclusive, HugeAdvice};
use uzone_pages::{
    ByteLen, Layout, LinuxPage, LinuxSeed, MemoryKind, Order, PageCount, Pfn, PfnRange, Tails,
    Template,
};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::bind::seed;
use crate::{BenchError, Result, index, timed};

/// A descriptor as its fields, in memory order; all of them plain numbers.
#[derive(Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct NaivePage {
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

/// The values that all pages of a memmap share.
#[derive(Clone, Copy)]
struct NaiveZone {
    node: u64,
    pagemap_address: u64,
    refcount: u32,
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

    /// Writes the folio's own fields into its first tail.
    #[inline(never)]
    fn prepare_folio(&mut self, order: Order) {
        self.flags |= u64::from(order.get());
        self.private_data = u64::MAX;
        self.mapping = 0;
        self.index = order.pages().get();
    }
}

/// Writes descriptors for folios of `order`, the first of which will be at `address`.
fn stamp_pages(pages: &mut [NaivePage], order: Order, zone: &NaiveZone, address: u64) {
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

/// Returns the first page whose descriptor differs from the slow path of `uzone-pages`.
fn first_wrong(pages: &[NaivePage], template: &Template<LinuxPage>) -> Option<Pfn> {
    template.layout().range().iter().zip(pages).find_map(|(pfn, page)| {
        let fresh = template.fresh(pfn)?;
        let is_right = page.as_bytes()[..size_of::<LinuxPage>()] == *fresh.as_bytes();
        (!is_right || page.memcg != 0).then_some(pfn)
    })
}

impl NaiveZone {
    fn new(seed: &LinuxSeed) -> Self {
        Self {
            node: u64::from(seed.node),
            pagemap_address: seed.pagemap_address,
            refcount: MemoryKind::Generic.initial_references(),
        }
    }
}

/// Returns the template of the right descriptors at `address`, if the address is known.
pub fn template(size: ByteLen, order: Order, address: Option<Addr>) -> Result<Template<LinuxPage>> {
    let pages = PageCount::new(size.get() >> 12);
    let laid_out = PfnRange::try_new(Pfn::new(1 << 20), pages)
        .and_then(|range| Layout::try_new(range, order, Tails::Stored));
    let layout = laid_out.map_err(|_| BenchError::size(size))?;
    // An address is at most 64 bits.
    let address = address.map_or(0, |address| address.get() as u64);
    Ok(Template::new(layout, MemoryKind::Generic, seed(), address))
}

/// Writes descriptors into memory that is present.
pub fn rebind(template: &Template<LinuxPage>, memory: &mut Exclusive) -> Result<Duration> {
    let bytes = index(template.layout().descriptors() * 64);
    let started = Instant::now();
    stamp(template, &mut memory.as_bytes_mut()[..bytes]);
    Ok(started.elapsed())
}

/// Maps pages and writes descriptors into them, without asking for a page before.
pub fn first_bind(template: &Template<LinuxPage>) -> Result<Duration> {
    let len = ByteLen::new(template.layout().descriptors() * 64);
    timed(|| {
        let how = Anonymous { huge: HugeAdvice::Never, ..Anonymous::default() };
        let mut memory = Exclusive::anonymous(len, how)?;
        stamp(template, &mut memory.as_bytes_mut()[..index(len.get())]);
        Ok(memory)
    })
}

fn stamp(template: &Template<LinuxPage>, bytes: &mut [u8]) {
    let address = bytes.as_ptr().addr() as u64;
    if let Ok(pages) = <[NaivePage]>::mut_from_bytes(bytes) {
        stamp_pages(pages, template.layout().order(), &NaiveZone::new(&seed()), address);
    }
}

/// Checks the descriptors that the naive way writes into memory that is present.
pub fn check(template: &Template<LinuxPage>, memory: &mut Exclusive, row: &str) -> Result {
    rebind(template, memory)?;
    let bytes = index(template.layout().descriptors() * 64);
    let wrong = match <[NaivePage]>::ref_from_bytes(&memory.as_bytes()[..bytes]) {
        Ok(pages) => first_wrong(pages, template),
        Err(_) => Some(template.layout().range().start()),
    };
    wrong.map_or(Ok(()), |pfn| Err(BenchError::wrong_page(row, pfn)))
}

#[cfg(test)]
mod tests {
    use super::*;

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
            stamp_pages(&mut pages, Order::new(order), &zone, 0x7000_0000);
            assert_eq!(first_wrong(&pages, &template), None, "order {order}");
        }
    }
}
