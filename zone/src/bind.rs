//! Binding: from a region and options to a [`Pagemap`], or to an error and the region as it was.
//!
//! The steps, in order: check the options, claim frame numbers, find memory for the descriptors,
//! write them if they are to be written, call back for pageblocks. Each step's effect is undone by
//! dropping what it returned, so an early return leaves nothing behind.

use std::sync::Arc;
use std::time::Instant;

use uzone_os::{MapError, Mapped, MappedError, PopulateError, SystemRoot, memory};
use uzone_pages::{
    AddrError, ByteLen, Layout, LayoutError, Memmap, MemoryKind, Order, Page, PageCount, PageSize,
    Payload, Pfn, PfnRange, Template,
};

use crate::blocks::Blocks;
use crate::keep::{self, MemmapMemory, Source};
use crate::options::{BindOptions, Init};
use crate::pagemap::{Leased, Pagemap, Parts};
use crate::region::Region;
use crate::report::BindReport;
use crate::stamp::Stamp;
use crate::write::{self, Written};
use crate::zone::Shared;

/// Returns the order of a pageblock: the pages that one entry of a page middle directory maps. A
/// table is one page of entries of 8 bytes.
fn pageblock_order(page: PageSize) -> Order {
    // At most 63 - 3 by the size of a page; no host has one that would not fit.
    u8::try_from(page.shift() - 3)
        .ok()
        .and_then(|order| Order::try_new(order).ok())
        .unwrap_or_default()
}

/// Why a region could not be bound.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BindError {
    /// The region starts or ends inside a folio.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// A frame number beyond 64 bits.
    #[error(transparent)]
    Addr(#[from] AddrError),
    /// A folio is larger than the region.
    #[error("a folio of order {order} has {folio} pages, and the region only {pages}")]
    FolioLargerThanRegion {
        /// The order that was asked for.
        order: Order,
        /// Pages in a folio.
        folio: PageCount,
        /// Pages in the region.
        pages: PageCount,
    },
    /// Memory of that kind needs an owner.
    #[error("{kind} memory needs an owner: pass one with BindOptions::owner")]
    NoOwner {
        /// The kind that was asked for.
        kind: MemoryKind,
    },
    /// Memory of that kind needs to know what to do with a page that nobody holds any more.
    #[error("{kind} memory needs a callback for freed pages: pass one with PagemapOps::on_free")]
    NoFree {
        /// The kind that was asked for.
        kind: MemoryKind,
    },
    /// Private memory needs to know what to do with a page that the CPU touched.
    #[error(
        "private memory needs a callback that migrates pages to RAM: pass one with \
         PagemapOps::on_migrate_to_ram"
    )]
    NoMigrateToRam,
    /// The frame numbers belong to another region.
    #[error("{range} overlap {bound}, which are bound already")]
    Overlaps {
        /// The frame numbers that were asked for.
        range: PfnRange,
        /// Those that are taken.
        bound: PfnRange,
    },
    /// The bytes of the region's file are described already.
    #[error("the bytes of the region are bound already, as {bound}")]
    SameBytes {
        /// The frame numbers that they have.
        bound: PfnRange,
    },
    /// The region's pages have no frame numbers from there on.
    #[error("the {pages} pages of the region do not fit behind page {base}: choose a smaller base")]
    NoNumbers {
        /// The first frame number that was asked for.
        base: Pfn,
        /// Pages in the region.
        pages: PageCount,
    },
    /// The CPU does not have the store that was asked for.
    #[error("this CPU has no {path} stores: leave the choice to bind, or see `uzone doctor`")]
    NoStore {
        /// What was asked for.
        path: uzone_stream::Path,
    },
    /// Descriptors that nobody writes start at zero, and those of this payload do not.
    #[error("a payload with an initial value cannot be initialised on touch: ask for Init::Eager")]
    NotZero,
    /// There is not enough memory for descriptors that are all written.
    #[error(
        "the descriptors need {needed} of memory, and {available} can be had ({limited_by}): \
         describe larger folios, initialise on touch, or raise that limit"
    )]
    TooLittleMemory {
        /// Bytes of descriptors.
        needed: ByteLen,
        /// Bytes that this process may still take.
        available: ByteLen,
        /// What the limit is.
        limited_by: memory::Limit,
    },
    /// The memory for the descriptors could not be mapped.
    #[error("cannot map {len} for the descriptors")]
    Map {
        /// Bytes of descriptors.
        len: ByteLen,
        /// Which limit forbade it, and what would help.
        #[source]
        cause: MapError,
    },
    /// The memory for the descriptors could not be made present.
    #[error("cannot populate the memory for the descriptors")]
    Populate(#[source] PopulateError),
    /// The memory for the descriptors does not fit them. A bug of this crate's.
    #[error("the memory for the descriptors does not fit them")]
    Mapped(#[source] MappedError),
    /// The caller cancelled.
    #[error("the bind was cancelled after {done} of {total} of descriptors")]
    Cancelled {
        /// Bytes of descriptors that had been written, at least.
        done: ByteLen,
        /// Bytes of descriptors that should have been.
        total: ByteLen,
    },
}

/// A region that was not bound, given back with the reason.
#[derive(Debug, thiserror::Error)]
#[error("cannot bind a region of {len} of {backing}", len = region.len(), backing = region.backing())]
pub struct BindFailure {
    /// The region, as it was.
    // Boxed: a failure travels through many returns.
    pub region: Box<Region>,
    /// Why not.
    #[source]
    pub cause: BindError,
}

pub(crate) fn bind<P: Payload>(
    shared: &Arc<Shared>,
    region: Region,
    options: BindOptions<P>,
) -> Result<Pagemap<P>, BindFailure> {
    let keeps_poison = options.keeps_poison;
    match try_bind(shared, &region, options) {
        Ok(parts) => Ok(Pagemap::new(region, parts, keeps_poison)),
        Err(cause) => Err(BindFailure { region: Box::new(region), cause }),
    }
}

fn try_bind<P: Payload>(
    shared: &Arc<Shared>,
    region: &Region,
    options: BindOptions<P>,
) -> Result<Parts<P>, BindError> {
    let started = Instant::now();
    check(&options, region.pages())?;
    let claim = shared.claim(region.pages(), options.order, options.base, region.extent())?;
    let layout = Layout::try_new(claim.range(), options.order, options.tails)?;
    let len = descriptor_bytes::<P>(&layout)?;
    let template =
        |address| Template::<P>::new(layout, options.kind, options.seed.clone(), address);
    let on_touch = match options.init {
        Some(Init::Eager) => None,
        _ => on_touch(len, template)?,
    };
    let (memory, template, init, written) = match (on_touch, options.init) {
        (Some((memory, template)), _) => (memory, template, Init::OnTouch, Written::default()),
        (None, Some(Init::OnTouch)) => return Err(BindError::NotZero),
        (None, _) => {
            let mut memory = eager_memory(shared, len, &options)?;
            let template = template(address_of(&memory));
            match write::write(&template, &mut memory, len, &options) {
                Ok(written) => {
                    if memory.source == Source::Fresh {
                        memory.settle();
                    }
                    (memory, template, Init::Eager, written)
                }
                Err(error) => {
                    if memory.source == Source::Kept {
                        shared.keep.give(memory);
                    }
                    return Err(error);
                }
            }
        }
    };

    let (pages, source, held) = (memory.pages, memory.source, memory.held());
    let count = usize::try_from(layout.descriptors()).map_err(|_| AddrError::Overflow {
        value: layout.descriptors(),
        operation: "as usize, at most",
        operand: usize::MAX as u64,
    })?;
    let descriptors = Mapped::<Page<P>>::try_new(memory.memory, count)
        .map_err(|refused| BindError::Mapped(refused.reason))?;
    let memmap = match Memmap::try_new(layout, options.kind, descriptors) {
        Ok(memmap) => memmap,
        Err(_) => unreachable!("the row was made with as many descriptors as the layout has"),
    };
    let blocks =
        Blocks::new(&layout, options.kind).map_err(|(len, cause)| BindError::Map { len, cause })?;
    let memmap = match memmap.with_blocks(blocks) {
        Ok(memmap) => memmap,
        Err(_) => unreachable!("the blocks were made for the layout"),
    };
    let keeper = (init == Init::Eager).then(|| claim.shared().clone());
    let mut parts = Parts {
        memmap: Leased::new(memmap, keeper, pages),
        template,
        claim,
        owner: options.owner,
        ops: options.ops,
        report: BindReport {
            kind: options.kind,
            range: layout.range(),
            order: options.order,
            tails: options.tails,
            pages: layout.range().pages(),
            descriptors: layout.descriptors(),
            descriptor_bytes: Template::<P>::DESCRIPTOR_BYTES,
            init,
            stamp: written.stamp,
            memmap_pages: pages,
            source,
            threads: written.threads,
            drains: written.drains,
            metadata: len,
            memory: held,
            elapsed: started.elapsed(),
        },
    };
    if let Some(pageblock) = &options.pageblock {
        let range = layout.range();
        let block = pageblock_order(region.page_size());
        let first = range.start().align_up(block).unwrap_or(range.end());
        for pfn in (first.get()..range.end().get()).step_by(1 << block.get()) {
            if options.cancel.is_cancelled() {
                return Err(BindError::Cancelled { done: len, total: len });
            }
            if let Some(page) = parts.page(Pfn::new(pfn)) {
                pageblock(page);
            }
        }
        parts.report.elapsed = started.elapsed();
    }
    Ok(parts)
}

/// Returns an address as the number that a payload may hold.
fn address_of(memory: &MemmapMemory) -> u64 {
    memory.memory.addr().get() as u64 // an address is at most 64 bits
}

/// Returns memory for descriptors that nobody writes, and their template, if a descriptor that was
/// never written is a fresh one.
fn on_touch<P: Payload>(
    len: ByteLen,
    template: impl Fn(u64) -> Template<P>,
) -> Result<Option<(MemmapMemory, Template<P>)>, BindError> {
    // The highest address has all the bits that any address may have: most payloads that are not
    // zero somewhere are not zero there, and need no mapping to find out.
    if !template(!0xfff).is_zero() {
        return Ok(None);
    }
    let memory = keep::fresh_sparse(len).map_err(|cause| BindError::Map { len, cause })?;
    let template = template(address_of(&memory));
    Ok(template.is_zero().then_some((memory, template)))
}

/// Returns memory for descriptors that are all written: kept, or of the pool, or fresh.
fn eager_memory<P: Payload>(
    shared: &Shared,
    len: ByteLen,
    options: &BindOptions<P>,
) -> Result<MemmapMemory, BindError> {
    let map = |cause| BindError::Map { len, cause };
    if let Some(kept) = shared.keep.take(len, options.uses_hugetlb_pool) {
        return Ok(kept);
    }
    if len < keep::KEEP_FROM {
        // Less than a huge page: asking the host what it has would cost more than taking it.
        return keep::fresh_sparse(len).map_err(map);
    }
    if options.uses_hugetlb_pool
        && let Some(memory) = keep::fresh_from_pool(len)
    {
        return Ok(memory);
    }
    // Asked before minutes are spent, or the kernel's killer comes; and before the memory is
    // mapped, for that counts against the limits of the process.
    if let Ok(available) = memory::available(&SystemRoot::host())
        && available.bytes < len
    {
        return Err(BindError::TooLittleMemory {
            needed: len,
            available: available.bytes,
            limited_by: available.limited_by,
        });
    }
    keep::fresh_huge(len).map_err(map)
}

/// What Linux's `memremap_pages` refuses, and what a region adds to that.
fn check<P: Payload>(options: &BindOptions<P>, pages: PageCount) -> Result<(), BindError> {
    let kind = options.kind;
    if matches!(kind, MemoryKind::Private | MemoryKind::Coherent) {
        if kind == MemoryKind::Private && options.ops.migrate_to_ram.is_none() {
            return Err(BindError::NoMigrateToRam);
        }
        if options.ops.free.is_none() {
            return Err(BindError::NoFree { kind });
        }
        if options.owner.is_none() {
            return Err(BindError::NoOwner { kind });
        }
    }
    if let Some(Stamp::Template(path)) = options.stamp
        && !path.is_available()
    {
        return Err(BindError::NoStore { path });
    }
    if let Some(base) = options.base
        && PfnRange::try_new(base, pages).is_err()
    {
        return Err(BindError::NoNumbers { base, pages });
    }
    if options.cancel.is_cancelled() {
        return Err(BindError::Cancelled { done: ByteLen::ZERO, total: ByteLen::ZERO });
    }
    let folio = options.order.pages();
    if folio > pages {
        return Err(BindError::FolioLargerThanRegion { order: options.order, folio, pages });
    }
    Ok(())
}

fn descriptor_bytes<P: Payload>(layout: &Layout) -> Result<ByteLen, AddrError> {
    let size = Template::<P>::DESCRIPTOR_BYTES as u64;
    layout.descriptors().checked_mul(size).map(ByteLen::new).ok_or(AddrError::Overflow {
        value: layout.descriptors(),
        operation: "*",
        operand: size,
    })
}
