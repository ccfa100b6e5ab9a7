//! Binding: from a region and options to a [`Pagemap`], or to an error and the region as it was.
//!
//! The steps, in order: check the options, claim frame numbers, find memory for the descriptors,
//! write them if they are to be written, call back for pageblocks. Each step's effect is undone by
//! dropping what it returned, so an early return leaves nothing behind.

pub(crate) mod altmap;
pub(crate) mod blocks;
pub(crate) mod init_method;
pub(crate) mod memmap_cache;
pub(crate) mod options;
pub(crate) mod registry;
pub(crate) mod report;
pub(crate) mod runs;
pub(crate) mod trace;
pub(crate) mod write;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use uzone_os::{Exclusive, Mapped, SystemRoot, memory};
use uzone_pages::{
    AddrError, ByteLen, Content, Layout, Memmap, MemoryKind, Order, Page, PageCount, Payload, Pfn,
    PfnRange, Placement, Template,
};

use crate::bind::altmap::Cut;
use crate::bind::blocks::Blocks;
use crate::bind::init_method::InitMethod;
use crate::bind::memmap_cache::{MemmapMemory, MemmapPages};
use crate::bind::options::{AltmapOptions, BindOptions, Init, pageblock_order};
use crate::bind::registry::{Claim, Shared};
use crate::bind::report::BindReport;
use crate::bind::write::Written;
use crate::error::BindError;
use crate::inner::{CachedMemmap, Parts};
use crate::pagemap::Pagemap;
use crate::region::Region;

/// A region that was not bound, given back with the reason.
#[derive(Debug, thiserror::Error)]
#[error("cannot bind a region of {len} of {backing}: {cause}", len = region.len(), backing = region.backing())]
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
    options: &BindOptions<P>,
) -> Result<Pagemap<P>, BindFailure> {
    let started = Instant::now();
    let keeps_poison = options.keeps_poison;
    let failed = |region, cause| BindFailure { region: Box::new(region), cause };
    let (claim, placed) = match claim(shared, &region, options) {
        Ok(claimed) => claimed,
        Err(cause) => return Err(failed(region, cause)),
    };
    let range = claim.range();
    let (layout, placement) = match &placed {
        Placed::Elsewhere(layout) => (*layout, None),
        Placed::InRegion(_, placement) => (*placement.layout(), Some(*placement)),
    };
    let (front, mut own, data) = match placed {
        Placed::Elsewhere(_) => (None, None, region),
        Placed::InRegion(altmap, placement) => match Cut::new(region, range, &placement, &altmap) {
            Ok(Cut { front, memory, data }) => (Some(front), Some(memory), data),
            Err((region, cause)) => return Err(failed(region, cause)),
        },
    };
    match describe(shared, claim, layout, &mut own, &data, options) {
        Ok((memmap, mut parts)) => {
            if let Some(placement) = &placement {
                // Not what is skipped behind the descriptors.
                let held = placement.descriptors().pages().to_bytes(data.page_size());
                parts.report.memory = held.unwrap_or(parts.report.memory);
            }
            parts.front = front;
            parts.report.altmap = placement;
            let len = parts.report.metadata;
            if call_pageblocks(&memmap, options, pageblock_order(data.page_size())).is_err() {
                let cause = BindError::Cancelled { done: len, total: len };
                return Err(failed(parts.into_region(memmap, data), cause));
            }
            parts.report.elapsed = started.elapsed();
            Ok(Pagemap::new(data, (memmap, parts), keeps_poison))
        }
        Err(cause) => {
            let region = match (front, own) {
                (Some(front), Some(memory)) => {
                    // As many bytes as the layout's descriptors have were perhaps written.
                    let len = descriptor_bytes::<P>(&layout)
                        .and_then(ByteLen::to_usize)
                        .unwrap_or(usize::MAX);
                    let most = memory.as_bytes().len();
                    front.join_cleared(memory, len.min(most), 0, data)
                }
                _ => data,
            };
            Err(failed(region, cause))
        }
    }
}

/// Where the descriptors will lie, and with that which pages they describe.
enum Placed {
    /// In memory of their own.
    Elsewhere(Layout),
    /// In the region's first pages.
    InRegion(AltmapOptions, Placement),
}

/// Checks the options, takes frame numbers, and lays the region out.
fn claim<P: Payload>(
    shared: &Arc<Shared>,
    region: &Region,
    options: &BindOptions<P>,
) -> Result<(Claim, Placed), BindError> {
    check(options, region.pages())?;
    if options.content == Content::Zero && !region.is_untouched() {
        return Err(BindError::NotZeroMemory);
    }
    let align = match &options.altmap {
        Some(altmap) => options.order.max(region.folio_order()).max(altmap.align_for(region)),
        None => options.order,
    };
    let claim = shared.claim(region.pages(), align, options.base, region.extent())?;
    let placed = match options.altmap {
        Some(altmap) => {
            let placement = altmap::place(region, claim.range(), &altmap, options)?;
            Placed::InRegion(altmap, placement)
        }
        None => Placed::Elsewhere(Layout::try_new(claim.range(), options.order, options.tails)?),
    };
    Ok((claim, placed))
}

/// Makes the descriptors of the pages of `layout`, in the memory `own` if there is some. Where it
/// fails, that memory is in `own` again.
fn describe<P: Payload>(
    shared: &Arc<Shared>,
    claim: Claim,
    layout: Layout,
    own: &mut Option<Exclusive>,
    region: &Region,
    options: &BindOptions<P>,
) -> Result<(CachedMemmap<P>, Parts<P>), BindError> {
    let len = descriptor_bytes::<P>(&layout)?;
    let wanted = region.node();
    let (mut lent, template, init) = find_memory(shared, &layout, len, own, wanted, options)?;
    let memory = lent.memory();
    let is_of_region = memory.pages == MemmapPages::Region;
    if let Some(node) = wanted.filter(|_| !memory.is_kept && !is_of_region) {
        memory.prefer_node(node);
    }
    let (blocks, written) = fill(memory, &template, init, len, &layout, options)?;
    let pages = memory.pages;
    let node = if is_of_region { wanted } else { memory.node };
    let report = report(&layout, len, memory, wanted.and(node), init, &written, options);
    let memmap = memmap_in(lent.keep(), blocks, layout, options);
    let keeper = (init == Init::Eager && !is_of_region).then(|| shared.clone());
    let memmap = CachedMemmap::new(memmap, claim, keeper, pages, node);
    let (owner, ops) = (options.owner, options.ops.clone());
    Ok((memmap, Parts { template, owner, ops, report, front: None }))
}

/// Returns what is reported of descriptors in `memory`; the time is not known yet.
fn report<P: Payload>(
    layout: &Layout,
    len: ByteLen,
    memory: &MemmapMemory,
    node: Option<u32>,
    init: Init,
    written: &Written,
    options: &BindOptions<P>,
) -> BindReport {
    BindReport {
        kind: options.kind,
        range: layout.range(),
        order: options.order,
        tails: options.tails,
        pages: layout.range().pages(),
        descriptors: layout.descriptors(),
        descriptor_bytes: Template::<P>::DESCRIPTOR_BYTES,
        init,
        stamp: written.stamp,
        memmap_pages: memory.pages,
        is_kept: memory.is_kept,
        node,
        threads: written.threads,
        drains: written.drains,
        metadata: len,
        memory: memory.held(),
        altmap: None,
        elapsed: Duration::ZERO,
    }
}

/// Memory for descriptors. Unless it is kept, dropping it returns it to where it came from.
struct Lent<'a> {
    memory: Option<MemmapMemory>,
    shared: &'a Shared,
    /// The place of the region's own memory.
    own: &'a mut Option<Exclusive>,
}

impl<'a> Lent<'a> {
    fn new(memory: MemmapMemory, shared: &'a Shared, own: &'a mut Option<Exclusive>) -> Self {
        Self { memory: Some(memory), shared, own }
    }

    fn memory(&mut self) -> &mut MemmapMemory {
        let Some(memory) = &mut self.memory else {
            unreachable!("only `keep`, which ends the value, takes the memory out")
        };
        memory
    }

    /// Returns the memory, for good.
    fn keep(mut self) -> MemmapMemory {
        let Some(memory) = self.memory.take() else {
            unreachable!("only this takes the memory out")
        };
        memory
    }
}

impl Drop for Lent<'_> {
    fn drop(&mut self) {
        let Some(memory) = self.memory.take() else { return };
        if memory.is_kept {
            self.shared.memmap_cache.give(memory);
        } else if memory.pages == MemmapPages::Region {
            *self.own = Some(memory.memory);
        }
    }
}

/// Finds memory for `len` bytes of descriptors, and whether it has to be written.
fn find_memory<'a, P: Payload>(
    shared: &'a Shared,
    layout: &Layout,
    len: ByteLen,
    own: &'a mut Option<Exclusive>,
    node: Option<u32>,
    options: &BindOptions<P>,
) -> Result<(Lent<'a>, Template<P>, Init), BindError> {
    let blocks_len = Blocks::len_bytes(layout, options.kind);
    let template =
        |address| Template::<P>::new(*layout, options.kind, options.seed.clone(), address);
    if options.init != Some(Init::Eager)
        && let Some((memory, template)) = on_touch(len, blocks_len, own, template, options.init)?
    {
        return Ok((Lent::new(memory, shared, own), template, Init::OnTouch));
    }
    if options.init == Some(Init::OnTouch) {
        return Err(BindError::NotZero);
    }
    let memory = eager_memory(shared, len, blocks_len, own, node, options)?;
    let template = template(address_of(&memory.memory));
    Ok((Lent::new(memory, shared, own), template, Init::Eager))
}

/// Makes the blocks, and writes the descriptors unless they are initialised on touch.
fn fill<P: Payload>(
    memory: &mut MemmapMemory,
    template: &Template<P>,
    init: Init,
    len: ByteLen,
    layout: &Layout,
    options: &BindOptions<P>,
) -> Result<(Blocks, Written), BindError> {
    let blocks = Blocks::new(layout, options.kind, memory.behind.take())
        .map_err(|(len, cause)| BindError::Map { len, cause })?;
    if init == Init::OnTouch {
        return Ok((blocks, Written::default()));
    }
    let written = write::write(template, memory, len, options)?;
    if !memory.is_kept {
        memory.settle();
    }
    Ok((blocks, written))
}

/// Returns the memmap whose descriptors are in `memory`.
fn memmap_in<P: Payload>(
    memory: MemmapMemory,
    blocks: Blocks,
    layout: Layout,
    options: &BindOptions<P>,
) -> Memmap<P, Mapped<Page<P>>, Blocks> {
    let count = usize::try_from(layout.descriptors()).unwrap_or(usize::MAX);
    let Ok(descriptors) = Mapped::<Page<P>>::try_new(memory.memory, count) else {
        unreachable!("the memory was found for as many descriptors, and starts at a page")
    };
    let Ok(memmap) = Memmap::try_new(layout, options.kind, descriptors) else {
        unreachable!("the row was made with as many descriptors as the layout has")
    };
    let Ok(memmap) = memmap.starting_as(options.content).with_blocks(blocks) else {
        unreachable!("the blocks were made for the layout")
    };
    memmap
}

/// Calls back for the first page of each pageblock.
///
/// # Errors
/// If the caller cancelled.
fn call_pageblocks<P: Payload>(
    memmap: &CachedMemmap<P>,
    options: &BindOptions<P>,
    block: Order,
) -> Result<(), Cancelled> {
    let Some(pageblock) = &options.pageblock else { return Ok(()) };
    let range = memmap.layout().range();
    let first = range.start().align_up(block).unwrap_or(range.end());
    for pfn in (first.get()..range.end().get()).step_by(1 << block.get()) {
        if options.cancel.load(Ordering::Relaxed) {
            return Err(Cancelled);
        }
        if let Some(page) = memmap.page(Pfn::new(pfn)) {
            pageblock(page);
        }
    }
    Ok(())
}

/// The caller cancelled the bind.
struct Cancelled;

/// Returns an address as the number that a payload may hold.
fn address_of(memory: &Exclusive) -> u64 {
    memory.addr().get() as u64 // an address is at most 64 bits
}

/// Returns memory for descriptors that are initialised on touch, and their template, if a descriptor that was
/// never written is a fresh one. It takes `own` if there is some and it reads as zero.
///
/// # Errors
/// If memory cannot be mapped, or `own` has old bytes and the caller insists.
fn on_touch<P: Payload>(
    len: ByteLen,
    blocks_len: ByteLen,
    own: &mut Option<Exclusive>,
    template: impl Fn(u64) -> Template<P>,
    asked: Option<Init>,
) -> Result<Option<(MemmapMemory, Template<P>)>, BindError> {
    // The highest address has all the bits that any address may have: most payloads that are not
    // zero somewhere are not zero there, and need no mapping to find out.
    if !template(!0xfff).is_zero() {
        return Ok(None);
    }
    if let Some(memory) = own {
        let template = template(address_of(memory));
        if !template.is_zero() {
            return Ok(None);
        }
        return match altmap::is_known_zero(memory) {
            true => Ok(own.take().map(|memory| (altmap::own(memory), template))),
            false if asked == Some(Init::OnTouch) => Err(BindError::OldBytes),
            false => Ok(None),
        };
    }
    let memory = memmap_cache::fresh_sparse_with(len, blocks_len)
        .map_err(|cause| BindError::Map { len, cause })?;
    let template = template(address_of(&memory.memory));
    Ok(template.is_zero().then_some((memory, template)))
}

/// Returns memory for descriptors that are all written: the region's own, or kept, or of the pool, or
/// fresh.
fn eager_memory<P: Payload>(
    shared: &Shared,
    len: ByteLen,
    blocks_len: ByteLen,
    own: &mut Option<Exclusive>,
    node: Option<u32>,
    options: &BindOptions<P>,
) -> Result<MemmapMemory, BindError> {
    if let Some(memory) = own {
        altmap::check_memory(memory, len)?;
    }
    if let Some(memory) = own.take() {
        return Ok(altmap::own(memory));
    }
    let map = |cause| BindError::Map { len, cause };
    if let Some(kept) = shared.memmap_cache.take(len, node, options.uses_hugetlb_pool) {
        return Ok(kept);
    }
    if len < memmap_cache::CACHED_FROM {
        // Less than a huge page: asking the host what it has would cost more than taking it.
        return memmap_cache::fresh_sparse_with(len, blocks_len).map_err(map);
    }
    if options.uses_hugetlb_pool
        && let Some(memory) = memmap_cache::fresh_from_pool(len)
    {
        return Ok(memory);
    }
    // Asked before minutes are spent, or the kernel's killer comes; and before the memory is
    // mapped, for that counts against the limits of the process.
    check_available(len)?;
    memmap_cache::fresh_huge(len).map_err(map)
}

/// Refuses to take more memory than there is, where the host states how much that is.
fn check_available(needed: ByteLen) -> Result<(), BindError> {
    match memory::available(&SystemRoot::host()) {
        Ok(memory::Available { bytes: available, limited_by }) if available < needed => {
            Err(BindError::TooLittleMemory { needed, available, limited_by })
        }
        _ => Ok(()),
    }
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
    if let Some(InitMethod::Template(path)) = options.stamp
        && !path.is_available()
    {
        return Err(BindError::NoStore { path });
    }
    if let Some(base) = options.base
        && PfnRange::try_new(base, pages).is_err()
    {
        return Err(BindError::NoNumbers { base, pages });
    }
    if options.cancel.load(Ordering::Relaxed) {
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
