//! The options of a bind: [`BindOptions`].

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use uzone_os::Exclusivity;
use uzone_pages::{ByteLen, Content, MemoryKind, Order, PageCount, PageSize, Payload, Pfn, Tails};
use uzone_stream::Path;

use crate::ops::PagemapOps;
use crate::progress::OnProgress;
use crate::region::Region;
use crate::setters::setters;
use crate::source::RegionSource;

/// When descriptors are written.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Init {
    /// Never: memory that was not touched is an initialised descriptor. The first use of 4 KiB of
    /// descriptors takes a page fault. Only for payloads that start at zero.
    OnTouch,
    /// All of them before bind returns: no page fault later.
    Eager,
}

/// How a region is bound.
pub struct BindOptions<P: Payload = ()> {
    pub(crate) kind: MemoryKind,
    pub(crate) seed: P::Seed,
    pub(crate) order: Order,
    pub(crate) tails: Tails,
    pub(crate) base: Option<Pfn>,
    pub(crate) init: Option<Init>,
    pub(crate) stamp: Option<Option<Path>>,
    pub(crate) threads: Option<NonZeroUsize>,
    pub(crate) uses_hugetlb_pool: bool,
    pub(crate) altmap: Option<AltmapOptions>,
    pub(crate) ops: PagemapOps,
    pub(crate) progress: OnProgress,
    pub(crate) cancel: Arc<AtomicBool>,
    pub(crate) keeps_poison: bool,
    /// The content of every page at first.
    pub(crate) content: Content,
}

impl BindOptions {
    /// Takes the kind of memory; base pages, derived tails, and descriptors of 8 bytes that are
    /// initialised on touch.
    #[must_use]
    pub fn new(kind: MemoryKind) -> Self {
        Self::with_payload(kind, ())
    }
}

impl<P: Payload> BindOptions<P> {
    /// Takes the kind of memory and the seed of fresh payloads; base pages, derived tails,
    /// and descriptors that are initialised on touch where the payload starts at zero.
    #[must_use]
    pub fn with_payload(kind: MemoryKind, seed: P::Seed) -> Self {
        Self {
            kind,
            seed,
            order: Order::BASE,
            tails: Tails::Derived,
            base: None,
            init: None,
            stamp: None,
            threads: None,
            uses_hugetlb_pool: true,
            altmap: None,
            ops: PagemapOps::default(),
            progress: OnProgress::default(),
            cancel: Arc::default(),
            keeps_poison: false,
            content: Content::Unknown,
        }
    }

    setters! {
        /// Makes the region one of folios of `order`, whose size the region's must be a multiple of.
        order(order: Order) order = order;

        /// Sets whether the tails of a folio have descriptors of their own.
        tails(tails: Tails) tails = tails;

        /// Gives the region's first page this number, instead of the first that is free.
        base(base: Pfn) base = Some(base);

        /// Sets when descriptors are written. [`Init::OnTouch`] is refused for a payload that does not
        /// start at zero.
        init(init: Init) init = Some(init);

        /// Sets how descriptors are written, in place of the choice of the store policy: from templates by a store,
        /// or without one field by field.
        stamp(stores: Option<Path>) stamp = Some(stores);

        /// Sets how many threads write descriptors, instead of as many as the size pays for. If the
        /// system gives fewer, those do the work; the report states how many there were.
        threads(threads: NonZeroUsize) threads = Some(threads);

        /// Sets whether descriptors may lie in pages of the host's 2 MiB hugetlb pool, where that has
        /// room. They may by default; a program that has sized the pool for its own
        /// regions passes `false`.
        uses_hugetlb_pool(uses: bool) uses_hugetlb_pool = uses;

        /// Puts the descriptors into the region's own first pages. Only the pages behind them are
        /// described; [`Pagemap::range`](crate::PagemapView::range) has those, and
        /// [`Pagemap::metadata_range`](crate::PagemapView::metadata_range) the others, which cannot be held.
        ///
        /// Memory that others may have as well needs [`AltmapOptions::exclusive`]. Whatever stands in the
        /// metadata pages behind the reserve is lost; at unbind and when the pagemap is dropped,
        /// descriptors are cleared there, so that the next user finds none. Where the options do not say
        /// when to write them, descriptors are initialised on touch if the payload starts at zero and the
        /// memory is private, of no file and reads as zero, and eagerly otherwise.
        ///
        /// A region is one mapping, so there is no altmap for several ranges, which Linux refuses.
        altmap(altmap: AltmapOptions) altmap = Some(altmap);

        /// Takes the owner's callbacks.
        ops(ops: PagemapOps) ops = ops;

        /// Takes a callback for every 2 MiB of descriptors. The thread that wrote them calls it with the
        /// bytes of descriptors that are written and the bytes in all; with several threads the calls may
        /// come out of order.
        on_progress(progress: impl Fn(ByteLen, ByteLen) + Send + Sync + 'static) progress = OnProgress::new(progress);

        /// Declares that every page starts out as known to be zero, and so need not be cleared before it is
        /// handed out. Only a region that cannot have been written to is bound so
        /// ([`Region::is_untouched`](crate::Region::is_untouched)); it costs nothing at any size.
        known_zero() content = Content::Zero;

        /// Declares that no page is present yet: each is absent until it is filled, and a pin asks
        /// [`PagemapOps::populate`] for it first. Costs nothing at any size.
        absent() content = Content::Absent;

        /// Keeps pages that were bad when the region was unbound bad from the start, so that they are
        /// not discovered again by an access. Without it every page is taken for good.
        keep_poison() keeps_poison = true;

        /// Takes a flag that stops the bind at its next section of 2 MiB, once another thread sets it.
        cancel(cancel: Arc<AtomicBool>) cancel = cancel;
    }
}

// Derived, it would ask for a payload that is `Clone`.
impl<P: Payload> Clone for BindOptions<P> {
    fn clone(&self) -> Self {
        Self {
            kind: self.kind,
            seed: self.seed.clone(),
            order: self.order,
            tails: self.tails,
            base: self.base,
            init: self.init,
            stamp: self.stamp,
            threads: self.threads,
            uses_hugetlb_pool: self.uses_hugetlb_pool,
            altmap: self.altmap,
            ops: self.ops.clone(),
            progress: self.progress.clone(),
            cancel: self.cancel.clone(),
            keeps_poison: self.keeps_poison,
            content: self.content,
        }
    }
}

impl<P: Payload> std::fmt::Debug for BindOptions<P> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BindOptions")
            .field("kind", &self.kind)
            .field("order", &self.order)
            .field("tails", &self.tails)
            .field("base", &self.base)
            .field("init", &self.init)
            .field("stamp", &self.stamp)
            .field("threads", &self.threads)
            .field("uses_hugetlb_pool", &self.uses_hugetlb_pool)
            .field("altmap", &self.altmap)
            .field("ops", &self.ops)
            .finish_non_exhaustive()
    }
}

/// How descriptors lie in the region itself; see [`BindOptions::altmap`].
#[derive(Clone, Copy, Debug, Default)]
pub struct AltmapOptions {
    pub(crate) reserve: PageCount,
    pub(crate) promise: Option<Exclusivity>,
    pub(crate) align: Option<Order>,
}

impl AltmapOptions {
    /// Takes nothing: no reserve, memory that is private, and the alignment that the region suggests.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    setters! {
        /// Keeps the first `pages` of the region for its owner, who reaches them by
        /// [`Pagemap::reserve`](crate::Pagemap::reserve): a label, a superblock. Where huge pages are
        /// behind the region it is a multiple of theirs.
        reserve(pages: PageCount) reserve = pages;

        /// Has the described pages start at a multiple of a folio of `order`, as Linux has the data of a
        /// namespace start: [`Order::PMD`] for mappings of 2 MiB, the order of 1 GiB for those, and
        /// [`Order::BASE`] for no alignment beyond that of the folios. Pages that it skips are lost.
        ///
        /// Where this is not called, it is 2 MiB for DAX devices and files on DAX mounts that have room for
        /// that, and none for other memory. The numbers of the pages count: they are multiples where the
        /// region's bytes are, unless [`BindOptions::base`] sets another base.
        align(order: Order) align = Some(order);
    }

    /// Returns the order at a multiple of which the data of a region starts.
    pub(crate) fn align_for(&self, region: &Region) -> Order {
        let is_dax =
            matches!(region.backing(), RegionSource::Devdax { .. } | RegionSource::Fsdax { .. });
        let default = if is_dax { pageblock_order(region.page_size()) } else { Order::BASE };
        self.align.unwrap_or(default)
    }

    setters! {
        /// Takes the caller's promise that no other process changes the metadata pages behind the reserve, for
        /// as long as the region is bound. It is asked for where others may have the memory: memory
        /// files, files, DAX, adopted memory.
        exclusive(promise: Exclusivity) promise = Some(promise);
    }
}

/// Returns the order of a pageblock: the pages that one entry of a page middle directory maps. A
/// table is one page of entries of 8 bytes.
pub(crate) fn pageblock_order(page: PageSize) -> Order {
    // At most 63 - 3 by the size of a page; no host has one that would not fit.
    u8::try_from(page.shift() - 3)
        .ok()
        .and_then(|order| Order::try_new(order).ok())
        .unwrap_or_default()
}
