//! Descriptors in the region's own first pages: [`AltmapOptions`], cutting them off and putting them
//! back.
//!
//! A bind with an altmap cuts the region into up to four parts: the reserve of the owner, the pages that alignment
//! skips, the descriptors, and the data. The pagemap has all of them, so dropping it unmaps every
//! byte; unbinding joins them again. Which page belongs to which part is decided by
//! [`Placement`].
//!
//! Descriptors are cleared, in whichever way the pagemap ends, before another process or
//! region can see it. Private memory of no file is unmapped; or, when the region is unbound, given back to the kernel
//! if its descriptors were initialised on touch. Other memory is overwritten, at the rate at which this machine
//! streams, and stays present. A process that is killed clears nothing.
//! No later bind takes the bytes for descriptors: memory is initialised on touch only where it was
//! just given back, or was never touched.

use std::ops::Range;
use std::sync::Mutex;

use uzone_os::{Exclusive, Mapping, lock, share_work};
use uzone_pages::{
    AddrError, ByteLen, Order, PageCount, Payload, PfnRange, Placement, PlacementSpec, Template,
};

use crate::bind::init::SECTION_BYTES;
use crate::bind::options::{AltmapOptions, BindOptions, pageblock_order};
use crate::error::BindError;
use crate::region::Region;

/// The parts of a region before its descriptors.
#[derive(Debug)]
pub(crate) struct Front {
    reserve: Option<Mapping>,
    /// The pages that were skipped before the descriptors.
    gap: Option<Mapping>,
    /// The pages of the front that were bad when the region was unbound last.
    bad: Vec<PageCount>,
}

/// A region, in parts if its descriptors are to lie in it.
pub(crate) struct Cut {
    pub(crate) front: Option<Front>,
    /// The pages of the descriptors, and the pages that are skipped behind them.
    pub(crate) memory: Option<Exclusive>,
    /// The first bytes of that memory that may have descriptors: none before the first is written.
    pub(crate) begun_bytes: usize,
    /// The pages that will be described.
    pub(crate) data: Region,
}

/// Lays out the pages of a region.
pub(crate) fn place<P: Payload>(
    region: &Region,
    range: PfnRange,
    altmap: &AltmapOptions,
    options: &BindOptions<P>,
) -> Result<Placement, BindError> {
    let page = region.page_size();
    let spec = PlacementSpec {
        align: altmap.align_for(region),
        range,
        reserve: altmap.reserve,
        // Parts of the region start and end at multiples of those.
        backing: region.folio_order(),
        block: pageblock_order(page),
        page,
        order: options.order,
        tails: options.tails,
        descriptor_bytes: Template::<P>::DESCRIPTOR_BYTES as u64,
    };
    match Placement::try_new(&spec) {
        // The default is for regions with room for it.
        Err(AddrError::NoFolioLeft { .. }) if altmap.align.is_none() => {
            Ok(Placement::try_new(&PlacementSpec { align: Order::BASE, ..spec })?)
        }
        placement => Ok(placement?),
    }
}

impl Cut {
    /// Takes a region whose descriptors lie elsewhere.
    pub(crate) fn none(data: Region) -> Self {
        Self { front: None, memory: None, begun_bytes: 0, data }
    }

    /// Returns the region as it was, without a byte of a descriptor.
    pub(crate) fn into_region(self) -> Region {
        match (self.front, self.memory) {
            (Some(front), Some(memory)) if self.begun_bytes == 0 => {
                front.join(Some(memory.into_mapping()), self.data)
            }
            (Some(front), Some(memory)) => {
                front.join_cleared(memory, self.begun_bytes, 0, self.data)
            }
            _ => self.data,
        }
    }

    /// Cuts a region of the pages `range` at the bounds of `placement`.
    ///
    /// # Errors
    /// The region as it was, with the reason.
    #[expect(
        clippy::result_large_err,
        reason = "the error is a region and travels through one return"
    )]
    pub(crate) fn new(
        region: Region,
        range: PfnRange,
        placement: &Placement,
        altmap: &AltmapOptions,
    ) -> Result<Self, (Region, BindError)> {
        let reserve = placement.reserve();
        let data_at = placement.data_at().get();
        // The descriptors start behind the reserve, which is behind the region's start.
        let descriptors_at = placement.descriptors().start().get() - range.start().get();
        let gap = descriptors_at - reserve.get();
        let bad: Vec<PageCount> =
            region.bad_pages().iter().copied().filter(|page| page.get() < data_at).collect();
        let descriptors_end = descriptors_at + placement.descriptors().pages().get();
        if let Some(page) =
            bad.iter().find(|page| (descriptors_at..descriptors_end).contains(&page.get()))
        {
            return Err((region, BindError::BadPage { page: *page }));
        }
        let parts = [reserve.get(), gap, data_at - descriptors_at];
        // A placement has descriptors and data, and cuts no page of the backing.
        let (parts, data) = match cut_off(region, parts) {
            Ok(parts) => parts,
            Err(region) => return Err((*region, BindError::NotCut)),
        };
        let [reserve, gap, memory] = parts;
        let front = Front { reserve, gap, bad };
        let Some(memory) = memory else {
            return Err((front.join(None, data), BindError::NotCut));
        };
        let taken = match altmap.promise {
            _ if memory.is_private() => {
                Exclusive::try_from_mapping(memory).map_err(|refused| (*refused.value, None))
            }
            Some(promise) => Exclusive::try_from_promised(memory, promise)
                .map_err(|refused| (*refused.value, Some(refused.cause))),
            None => Err((memory, None)),
        };
        match taken {
            Ok(memory) => {
                let (front, memory) = (Some(front), Some(memory));
                Ok(Self { front, memory, begun_bytes: 0, data })
            }
            Err((memory, cause)) => {
                let region = front.join(Some(memory), data);
                let cause = cause.map_or(BindError::NoPromise, BindError::Promise);
                Err((region, cause))
            }
        }
    }
}

/// Cuts parts of so many pages off a region, one behind the other; those of no page are none.
///
/// # Errors
/// The region as it was, if one of them cannot be cut.
fn cut_off<const COUNT: usize>(
    region: Region,
    pages: [u64; COUNT],
) -> Result<([Option<Mapping>; COUNT], Region), Box<Region>> {
    let mut parts = [const { None }; COUNT];
    let mut rest = region;
    for (index, pages) in pages.into_iter().enumerate() {
        if pages == 0 {
            continue;
        }
        match rest.cut_front(PageCount::new(pages)) {
            Ok((part, behind)) => {
                parts[index] = Some(part);
                rest = behind;
            }
            Err(rest) => return Err(Box::new(join(parts, *rest))),
        }
    }
    Ok((parts, rest))
}

/// Joins the parts that [`cut_off`] cut off.
fn join<const COUNT: usize>(parts: [Option<Mapping>; COUNT], rest: Region) -> Region {
    parts.into_iter().rev().flatten().fold(rest, Region::join_front)
}

impl Front {
    /// Returns the pages that the owner keeps.
    pub(crate) fn reserve(&self) -> Option<&Mapping> {
        self.reserve.as_ref()
    }

    /// Joins the parts of a region.
    pub(crate) fn join(self, memory: Option<Mapping>, data: Region) -> Region {
        let mut region = join([self.reserve, self.gap, memory], data);
        region.remember_bad_front(self.bad);
        region
    }

    /// Joins the parts of a region, none of whose descriptors may stay visible: [`clear`].
    pub(crate) fn join_cleared(
        self,
        mut memory: Exclusive,
        len: usize,
        writers: usize,
        data: Region,
    ) -> Region {
        clear(&mut memory, len, writers);
        self.join(Some(memory.into_mapping()), data)
    }
}

/// Finds out, before they are written, whether there is memory for descriptors in the region.
///
/// # Errors
/// [`BindError::TooLittleMemory`].
pub(crate) fn check_memory(memory: &Exclusive, len: ByteLen) -> Result<(), BindError> {
    // Pages of a file, a device or a pool are not taken from the memory that this process may have.
    if !memory.is_private() || memory.page_size() != uzone_os::probe::page_size() {
        return Ok(());
    }
    let resident = memory.resident_in(0..len.get()).unwrap_or_default();
    let needed = ByteLen::new(len.get().saturating_sub(resident.get()));
    super::check_available(needed)
}

/// Returns whether memory reads as zero, after an attempt to make it so that costs next to nothing.
pub(crate) fn is_known_zero(memory: &mut Exclusive) -> bool {
    let whole = 0..memory.len().get();
    if !memory.is_private() {
        false
    } else if memory.page_size() == uzone_os::probe::page_size() {
        memory.discard(whole).is_ok()
    } else {
        // Giving pages of a pool back gives up the promise to have them again (Linux before 6.9).
        memory.is_untouched(whole).unwrap_or(false)
    }
}

/// Clears the first `len` bytes of memory that had descriptors, as far as it is there. If `writers` threads
/// wrote all of it, as many clear it in place, so that the next bind finds it present; if `writers` is 0, some
/// of it may never have been touched.
pub(crate) fn clear(memory: &mut Exclusive, len: usize, writers: usize) {
    if memory.is_private() && writers > 0 {
        clear_present(&mut memory.as_bytes_mut()[..len], writers);
        return;
    }
    let is_huge = memory.page_size() != uzone_os::probe::page_size();
    if memory.is_private() && !is_huge && memory.discard(0..memory.len().get()).is_ok() {
        return;
    }
    // At most a page less than a page of the pool, so whole ones.
    let step =
        usize::try_from(memory.page_size().bytes()).map_or(len, |page| page.max(SECTION_BYTES));
    for start in (0..len).step_by(step.max(1)) {
        let part = start..len.min(start + step);
        if memory.is_private() && is_untouched(memory, &part) {
            continue;
        }
        clear_part(&mut memory.as_bytes_mut()[part]);
    }
}

/// Clears bytes by several threads.
fn clear_present(bytes: &mut [u8], threads: usize) {
    let queue = Mutex::new(bytes.chunks_mut(SECTION_BYTES));
    let take = || lock(&queue).next();
    share_work("uzone-unbind", threads, |_| {
        while let Some(section) = take() {
            uzone_stream::zero(section);
        }
    });
}

fn is_untouched(memory: &Exclusive, part: &Range<usize>) -> bool {
    memory.is_untouched(part.start as u64..part.end as u64).unwrap_or(false)
}

/// Clears bytes. Memory that cannot be made present (a file system that is full) was never written, and a
/// write to it would be a signal.
fn clear_part(bytes: &mut [u8]) {
    if uzone_os::populate_slice(bytes).is_ok() {
        uzone_stream::zero(bytes);
        return;
    }
    let page = usize::try_from(uzone_os::probe::page_size().bytes()).unwrap_or(4096);
    for page in bytes.chunks_mut(page) {
        if uzone_os::populate_slice(page).is_ok() {
            page.fill(0);
        }
    }
}
