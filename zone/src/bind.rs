//! Binding: from a region and options to a [`Pagemap`], or to an error and the region as it was.
//!
//! The steps, in order: check the options, claim frame numbers, cut the region if its descriptors are to lie
//! in it, find memory for them, and write them unless they are initialised on touch. A failed step drops its
//! claim and its memory. The region is never given away before the last step that can fail: the descriptors
//! are written into memory that is borrowed from it, and [`Cut::into_region`] is the one way back.

pub(crate) mod altmap;
pub(crate) mod blocks;
pub(crate) mod init;
pub(crate) mod memmap_cache;
pub(crate) mod options;
pub(crate) mod registry;
pub(crate) mod report;
pub(crate) mod runs;
pub(crate) mod trace;
pub(crate) mod write;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use uzone_os::{Exclusive, Mapped, SystemRoot, memory};
use uzone_pages::{
    AddrError, ByteLen, Content, Layout, Memmap, Page, PageCount, Payload, PfnRange, Placement,
    Template,
};

use crate::bind::altmap::Cut;
use crate::bind::blocks::Blocks;
use crate::bind::memmap_cache::{MemmapMemory, MemmapPages};
use crate::bind::options::{BindOptions, Init};
use crate::bind::registry::{Claim, Shared};
use crate::bind::report::BindReport;
use crate::bind::write::Unwritten;
use crate::error::BindError;
use crate::pagemap::Pagemap;
use crate::pagemap::shared::{Descriptors, Parts};
use crate::region::Region;

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
    options: &BindOptions<P>,
) -> Result<Pagemap<P>, BindFailure> {
    let started = Instant::now();
    let failed = |region, cause| BindFailure { region: Box::new(region), cause };
    let (claim, layout, placement) = match claim(shared, &region, options) {
        Ok(claimed) => claimed,
        Err(cause) => return Err(failed(region, cause)),
    };
    let mut cut = match (&placement, &options.altmap) {
        (Some(placement), Some(altmap)) => match Cut::new(region, claim.range(), placement, altmap)
        {
            Ok(cut) => cut,
            Err((region, cause)) => return Err(failed(region, cause)),
        },
        _ => Cut::none(region),
    };
    // Dropped before the region if a callback panics: the claim has to end before an address is free.
    let claim = claim;
    let written = match describe(shared, &layout, &mut cut, options) {
        Ok(written) => written,
        Err(cause) => return Err(failed(cut.into_region(), cause)),
    };
    // Nothing fails from here on.
    let Cut { front, memory: own, data, .. } = cut;
    let Written { template, blocks, memory, mut report } = written;
    let is_kept_later = report.init == Init::Eager && own.is_none();
    let keeper = is_kept_later.then(|| shared.clone());
    let (memory, node) = match (own, memory) {
        (Some(own), _) => (own, None),
        (None, Some(MemmapMemory { memory, node, .. })) => (memory, node),
        (None, None) => unreachable!("descriptors that are not in the region have memory"),
    };
    let memmap = memmap_in(memory, blocks, layout, options);
    let descriptors = Descriptors::new(memmap, claim, keeper, report.memmap_pages, node);
    report.altmap = placement;
    report.elapsed = started.elapsed();
    let parts = Parts { template, ops: options.ops.clone(), report, front };
    Ok(Pagemap::new(data, (descriptors, parts), options.keeps_poison))
}

/// Checks the options, takes frame numbers, and lays the region out: the pages that are described, and with an
/// altmap the pages that are not.
fn claim<P: Payload>(
    shared: &Arc<Shared>,
    region: &Region,
    options: &BindOptions<P>,
) -> Result<(Claim, Layout, Option<Placement>), BindError> {
    check(options, region.pages())?;
    if options.content == Content::Zero && !region.is_untouched() {
        return Err(BindError::NotZeroMemory);
    }
    let align = match &options.altmap {
        Some(altmap) => options.order.max(region.folio_order()).max(altmap.align_for(region)),
        None => options.order,
    };
    let claim = shared.claim(region.pages(), align, options.base, region.extent())?;
    let (layout, placement) = match options.altmap {
        Some(altmap) => {
            let placement = altmap::place(region, claim.range(), &altmap, options)?;
            (*placement.layout(), Some(placement))
        }
        None => (Layout::try_new(claim.range(), options.order, options.tails)?, None),
    };
    Ok((claim, layout, placement))
}

/// Descriptors that are as they start.
struct Written<P: Payload> {
    template: Template<P>,
    blocks: Blocks,
    /// Their memory, unless it is the region's.
    memory: Option<MemmapMemory>,
    /// The report, but for the altmap and the time.
    report: BindReport,
}

/// Makes the descriptors of the pages of `layout`: in the memory that was cut off the region, or in
/// memory that this takes.
fn describe<P: Payload>(
    shared: &Shared,
    layout: &Layout,
    cut: &mut Cut,
    options: &BindOptions<P>,
) -> Result<Written<P>, BindError> {
    let len = descriptor_bytes::<P>(layout)?;
    let node = cut.data.node();
    match &mut cut.memory {
        Some(own) => in_region(own, &mut cut.begun_bytes, len, node, layout, options),
        None => elsewhere(shared, len, node, layout, options),
    }
}

/// Makes descriptors in memory of the region.
fn in_region<P: Payload>(
    own: &mut Exclusive,
    begun_bytes: &mut usize,
    len: ByteLen,
    node: Option<u32>,
    layout: &Layout,
    options: &BindOptions<P>,
) -> Result<Written<P>, BindError> {
    let template = template_at(address_of(own), layout, options);
    let init = match options.init {
        Some(Init::Eager) => Init::Eager,
        Some(Init::OnTouch) if !template.is_zero() => return Err(BindError::NotZero),
        _ if template.is_zero() && altmap::is_known_zero(own) => Init::OnTouch,
        Some(Init::OnTouch) => return Err(BindError::OldBytes),
        None => Init::Eager,
    };
    let blocks = Blocks::new(layout, options.kind, None)
        .map_err(|(len, cause)| BindError::Map { len, cause })?;
    let mut report = BindReport::new(init, MemmapPages::Region, node, len);
    if init == Init::Eager {
        altmap::check_memory(own, len)?;
        // How it is written is only a matter of speed here: a kernel that cannot report it is no error.
        let is_fresh = own.resident().is_ok_and(ByteLen::is_zero);
        *begun_bytes = len.to_usize()?;
        let memory = Unwritten { bytes: own.as_bytes_mut(), is_fresh, is_present: false };
        (report.stores, report.threads) = write::write(&template, memory, len, options)?;
    }
    Ok(Written { template, blocks, memory: None, report })
}

/// Makes descriptors in memory that is fresh, or kept from an earlier bind.
fn elsewhere<P: Payload>(
    shared: &Shared,
    len: ByteLen,
    node: Option<u32>,
    layout: &Layout,
    options: &BindOptions<P>,
) -> Result<Written<P>, BindError> {
    let blocks_len = Blocks::len_bytes(layout, options.kind);
    let (mut memory, init) = match on_touch(len, blocks_len, layout, options)? {
        Some(memory) => (memory, Init::OnTouch),
        None if options.init == Some(Init::OnTouch) => return Err(BindError::NotZero),
        None => (eager_memory(shared, len, blocks_len, node, options)?, Init::Eager),
    };
    if let Some(node) = node.filter(|_| !memory.is_kept) {
        memory.prefer_node(node);
    }
    let template = template_at(address_of(&memory.memory), layout, options);
    let blocks = Blocks::new(layout, options.kind, memory.behind.take())
        .map_err(|(len, cause)| BindError::Map { len, cause })?;
    let mut report = BindReport::new(init, memory.pages, node.and(memory.node), len);
    report.is_kept = memory.is_kept;
    if init == Init::Eager {
        let is_present = memory.is_kept;
        let bytes = memory.memory.as_bytes_mut();
        let unwritten = Unwritten { bytes, is_fresh: !is_present, is_present };
        (report.stores, report.threads) = write::write(&template, unwritten, len, options)?;
        if !is_present {
            memory.settle();
            report.memmap_pages = memory.pages;
        }
    }
    Ok(Written { template, blocks, memory: Some(memory), report })
}

/// Returns the template of descriptors that lie at an address.
fn template_at<P: Payload>(address: u64, layout: &Layout, options: &BindOptions<P>) -> Template<P> {
    Template::new(*layout, options.kind, options.seed.clone(), address)
}

/// Returns the memmap whose descriptors are in `memory`.
fn memmap_in<P: Payload>(
    memory: Exclusive,
    blocks: Blocks,
    layout: Layout,
    options: &BindOptions<P>,
) -> Memmap<P, Mapped<Page<P>>, Blocks> {
    let count = usize::try_from(layout.descriptors()).unwrap_or(usize::MAX);
    let Ok(descriptors) = Mapped::<Page<P>>::try_new(memory, count) else {
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

/// Returns an address as the number that a payload may hold.
fn address_of(memory: &Exclusive) -> u64 {
    memory.addr().get() as u64 // an address is at most 64 bits
}

/// Returns memory for descriptors that are initialised on touch, if a descriptor that was never written is a
/// fresh one, and the options do not ask for more.
fn on_touch<P: Payload>(
    len: ByteLen,
    blocks_len: ByteLen,
    layout: &Layout,
    options: &BindOptions<P>,
) -> Result<Option<MemmapMemory>, BindError> {
    // The highest address has all the bits that any address may have: most payloads that are not
    // zero somewhere are not zero there, and need no mapping to find out.
    if options.init == Some(Init::Eager) || !template_at(!0xfff, layout, options).is_zero() {
        return Ok(None);
    }
    let memory = memmap_cache::fresh_sparse_with(len, blocks_len)
        .map_err(|cause| BindError::Map { len, cause })?;
    let template = template_at(address_of(&memory.memory), layout, options);
    Ok(template.is_zero().then_some(memory))
}

/// Returns memory for descriptors that are all written: kept, or of the pool, or fresh.
fn eager_memory<P: Payload>(
    shared: &Shared,
    len: ByteLen,
    blocks_len: ByteLen,
    node: Option<u32>,
    options: &BindOptions<P>,
) -> Result<MemmapMemory, BindError> {
    let map = |cause| BindError::Map { len, cause };
    if let Some(kept) = shared.memmap_cache.take(len, node, options.uses_hugetlb_pool) {
        return Ok(kept);
    }
    if len < memmap_cache::CACHED_FROM {
        // Less than a huge page: asking the host for its pages would cost more than taking them.
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

/// Refuses options that do not fit the region.
fn check<P: Payload>(options: &BindOptions<P>, pages: PageCount) -> Result<(), BindError> {
    if let Some(Some(path)) = options.stamp
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
