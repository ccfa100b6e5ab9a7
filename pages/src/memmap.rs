//! The descriptors of one region: [`Memmap`], an array with a [`Page`] for each page frame, or one
//! for each folio.
//!
//! Finding a descriptor is one subtraction, one shift and one index ([`Memmap::page`]); there is no
//! tree and no lock. A `Memmap` describes memory and does not own it: dropping it frees
//! descriptors, never pages.
//!
//! Units: counts are base pages of the region's [`PageSize`](crate::PageSize).
//! Sharing: every method takes `&self`, from any thread. All changes are inside [`Page`], in one
//! atomic word; the orderings are argued in `page.rs` and searched in `tests/loom.rs`.
//! Cost: 8 bytes and the payload for each page, or for each folio where tails are derived.
//! Source: "Physical Memory Model" in the Linux documentation describes the array we imitate.

use core::fmt;
use core::marker::PhantomData;
use core::ops::Deref;

use crate::addr::{AddrError, Order, PageCount, Pfn, PfnRange};
use crate::block::{BLOCK_ORDER, Block, BlockRef};
use crate::content::Content;
use crate::folio::Folio;
use crate::kind::MemoryKind;
use crate::layout::{Class, Layout};
use crate::page::Page;
use crate::word::Word;

/// The descriptors of one region, in memory that `S` holds, and for base pages perhaps a word for
/// each block of them, in memory that `B` holds.
pub struct Memmap<P, S, B = &'static [Block]> {
    layout: Layout,
    kind: MemoryKind,
    /// The meaning of a word that was never written.
    template: Word,
    descriptors: S,
    /// Empty, or one for each block that the range has a part of.
    blocks: B,
    payload: PhantomData<fn() -> P>,
}

impl<P, S: Deref<Target = [Page<P>]>> Memmap<P, S> {
    /// Takes descriptors that are fresh: never written where their payload starts at zero, else
    /// initialised through [`Template`](crate::Template).
    ///
    /// # Errors
    /// [`AddrError::Descriptors`] unless there are as many as the layout has.
    pub fn try_new(layout: Layout, kind: MemoryKind, descriptors: S) -> Result<Self, AddrError> {
        let given = descriptors.len() as u64;
        let needed = layout.descriptors();
        if given != needed {
            return Err(AddrError::Descriptors { needed, given });
        }
        let template = Word::initial(kind);
        Ok(Self { layout, kind, template, descriptors, blocks: &[], payload: PhantomData })
    }

    /// Sets the content that every page starts with, before any page was used. It costs nothing.
    #[must_use]
    pub fn starting_as(self, content: Content) -> Self {
        Self { template: self.template.with_content(content), ..self }
    }

    /// Returns whether base pages of memory of `kind`, laid out so, may be held by the block.
    #[must_use]
    pub fn takes_blocks(layout: &Layout, kind: MemoryKind) -> bool {
        layout.order() == Order::BASE && kind.initial_references() != 0
    }

    /// Takes blocks without holds, before any page was used; or none at all.
    ///
    /// # Errors
    /// [`AddrError::Blocks`] unless there are [`Block::count`] of them, and [`AddrError::NoBlocks`]
    /// unless [`Memmap::takes_blocks`] allows any.
    pub fn with_blocks<B: Deref<Target = [Block]>>(
        self,
        blocks: B,
    ) -> Result<Memmap<P, S, B>, AddrError> {
        let Self { layout, kind, template, descriptors, payload, .. } = self;
        if blocks.is_empty() {
            return Ok(Memmap { layout, kind, template, descriptors, blocks, payload });
        }
        if !Self::takes_blocks(&layout, kind) {
            return Err(AddrError::NoBlocks);
        }
        let (needed, given) = (Block::count(layout.range()).get(), blocks.len() as u64);
        if given != needed {
            return Err(AddrError::Blocks { needed, given });
        }
        Ok(Memmap { layout, kind, template, descriptors, blocks, payload })
    }
}

impl<P, S, B> Memmap<P, S, B>
where
    S: Deref<Target = [Page<P>]>,
    B: Deref<Target = [Block]>,
{
    /// Returns which descriptor belongs to which page.
    #[must_use]
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Returns the kind of the memory.
    #[must_use]
    pub fn kind(&self) -> MemoryKind {
        self.kind
    }

    /// Returns the content of every page before anything was done to one.
    #[must_use]
    pub fn started_as(&self) -> Content {
        self.template.content()
    }

    /// Returns the descriptors, in the order of their pages.
    #[must_use]
    pub fn descriptors(&self) -> &[Page<P>] {
        &self.descriptors
    }

    /// Returns the memory of the descriptors.
    #[must_use]
    pub fn memory(&self) -> &S {
        &self.descriptors
    }

    /// Gives the memory of the descriptors back.
    #[must_use]
    pub fn into_descriptors(self) -> S {
        self.descriptors
    }

    /// Gives the memory of the descriptors and of the blocks back.
    #[must_use]
    pub fn into_parts(self) -> (S, B) {
        (self.descriptors, self.blocks)
    }

    #[inline]
    fn descriptor(&self, index: u64) -> Option<&Page<P>> {
        self.descriptors.get(usize::try_from(index).ok()?)
    }

    /// Returns the folio that the page `pfn` belongs to, or `None` if the page is not described.
    #[must_use]
    pub fn folio(&self, pfn: Pfn) -> Option<Folio<'_, P>> {
        let head = self.descriptor(self.layout.head_index(pfn)?)?;
        Some(Folio::new(head, self.template).with_block(self.block(pfn)))
    }

    /// Returns whether base pages are held by the block.
    #[must_use]
    pub fn has_blocks(&self) -> bool {
        !self.blocks.is_empty()
    }

    /// Returns the block of the page `pfn`, which has to be described.
    #[inline]
    pub(crate) fn block(&self, pfn: Pfn) -> Option<BlockRef<'_>> {
        block_of(&self.blocks, self.layout.range(), pfn, self.starts_pinnable())
    }

    fn starts_pinnable(&self) -> bool {
        self.template.content().is_pinnable()
    }

    /// Returns the blocks from page `first` up to page `last`, both at the start of one, with the
    /// numbers of their first pages.
    #[inline]
    pub(crate) fn blocks(
        &self,
        first: Pfn,
        last: Pfn,
    ) -> impl Iterator<Item = (Pfn, BlockRef<'_>)> {
        let range = self.layout.range();
        // The first block of the range may begin before it.
        let index = |pfn: Pfn| usize::try_from(Block::index(range, pfn.max(range.start()))).ok();
        let blocks = match (index(first), index(last)) {
            (Some(first), Some(last)) => self.blocks.get(first..last).unwrap_or(&[]),
            _ => &[],
        };
        let starts_pinnable = self.starts_pinnable();
        blocks.iter().zip(0_u64..).map(move |(block, number)| {
            let start = Pfn::new(first.get() + (number << BLOCK_ORDER.get()));
            (start, BlockRef::new(block, starts_pinnable))
        })
    }

    /// Returns the folios that have pages from `start` up to `end`, each once, with their heads.
    /// Pages that are not described have none.
    pub fn folios(&self, start: Pfn, end: Pfn) -> impl Iterator<Item = (Pfn, Folio<'_, P>)> {
        let (range, blocks) = (self.layout.range(), &*self.blocks);
        let starts_pinnable = self.starts_pinnable();
        self.bare_folios(start, end).map(move |(head, folio)| {
            (head, folio.with_block(block_of(blocks, range, head, starts_pinnable)))
        })
    }

    /// Returns the content of the folios that have pages in `range`, each once, in
    /// ascending order: a load each.
    #[inline]
    pub fn contents(&self, range: PfnRange) -> impl Iterator<Item = Content> {
        self.bare_folios(range.start(), range.end()).map(|(_, folio)| folio.content())
    }

    /// As [`Memmap::folios`], for uses of a folio's own word alone: they do not know their
    /// blocks.
    #[inline]
    pub(crate) fn bare_folios(
        &self,
        start: Pfn,
        end: Pfn,
    ) -> impl Iterator<Item = (Pfn, Folio<'_, P>)> {
        let range = self.layout.range();
        let (start, end) = (start.max(range.start()), end.min(range.end()));
        let order = self.layout.order();
        // The values that each step needs are taken here: a load behind an atomic step would wait for that.
        let descriptors = self.heads(start, end);
        let stride = usize::try_from(self.layout.descriptors_per_folio()).unwrap_or(usize::MAX);
        let template = self.template;
        let head = start.align_down(order).get();
        descriptors.iter().step_by(stride).zip(0_u64..).map(move |(descriptor, folio)| {
            (Pfn::new(head + (folio << order.get())), Folio::new(descriptor, template))
        })
    }

    /// Returns the folio that has every page of `range`, if one has, with its head; it does not know its
    /// block.
    #[inline(always)]
    pub(crate) fn only_folio(&self, range: PfnRange) -> Option<(Pfn, Folio<'_, P>)> {
        let order = self.layout.order();
        let head = range.start().align_down(order);
        let last = Pfn::new(range.end().get() - 1); // a range has a page
        if last.align_down(order) != head {
            return None;
        }
        let descriptor = self.descriptor(self.layout.index(head)?)?;
        Some((head, Folio::new(descriptor, self.template)))
    }

    /// Returns the descriptors from that of the folio that `start` is in up to that of the last that
    /// has a page before `end`, both pages of the range; none if there is no page between.
    #[inline]
    fn heads(&self, start: Pfn, end: Pfn) -> &[Page<P>] {
        if start >= end {
            return &[];
        }
        let last = Pfn::new(end.get() - 1); // there is a page before it
        let index = |pfn| usize::try_from(self.layout.head_index(pfn)?).ok();
        match (index(start), index(last)) {
            (Some(first), Some(last)) => self.descriptors.get(first..=last).unwrap_or(&[]),
            _ => &[],
        }
    }

    /// Returns the page `pfn`, or `None` if it is not described.
    #[must_use]
    pub fn page(&self, pfn: Pfn) -> Option<PageView<'_, P>> {
        let descriptor = self.descriptor(self.layout.index(pfn)?)?;
        let class = self.layout.class(pfn);
        let is_tail = matches!(class, Class::FirstTail | Class::Tail);
        let is_derived = is_tail && self.layout.descriptors_per_folio() == 1;
        Some(PageView {
            pfn,
            class,
            order: self.layout.order(),
            descriptor: (!is_derived).then_some(descriptor),
            folio: self.folio(pfn)?,
        })
    }
}

/// Returns the block of a page of `range`, if there are any.
#[inline]
fn block_of(
    blocks: &[Block],
    range: PfnRange,
    pfn: Pfn,
    starts_pinnable: bool,
) -> Option<BlockRef<'_>> {
    if blocks.is_empty() {
        return None;
    }
    let block = blocks.get(usize::try_from(Block::index(range, pfn)).ok()?)?;
    Some(BlockRef::new(block, starts_pinnable))
}

impl<P, S, B> fmt::Debug for Memmap<P, S, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Memmap").field("layout", &self.layout).field("kind", &self.kind).finish()
    }
}

/// One page of a memmap, read-only: the facts that follow from its pfn, and its descriptor and its folio as they are
/// now.
pub struct PageView<'a, P = ()> {
    pfn: Pfn,
    class: Class,
    order: Order,
    descriptor: Option<&'a Page<P>>,
    folio: Folio<'a, P>,
}

impl<P> Clone for PageView<'_, P> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<P> Copy for PageView<'_, P> {}

impl<'a, P> PageView<'a, P> {
    /// Returns the page's frame number.
    #[must_use]
    pub fn pfn(self) -> Pfn {
        self.pfn
    }

    /// Returns whether the page is the head or a tail of its folio.
    #[must_use]
    pub fn class(self) -> Class {
        self.class
    }

    /// Returns whether the page is a tail.
    #[must_use]
    pub fn is_tail(self) -> bool {
        matches!(self.class, Class::FirstTail | Class::Tail)
    }

    /// Returns the first page of the folio; the page itself if it is that.
    #[must_use]
    pub fn head(self) -> Pfn {
        self.pfn.align_down(self.order)
    }

    /// Returns how many pages the head is away.
    #[must_use]
    pub fn distance(self) -> PageCount {
        PageCount::new(self.pfn.get() & self.order.offset_mask())
    }

    /// Returns the order of the folio.
    #[must_use]
    pub fn order(self) -> Order {
        self.order
    }

    /// Returns the caller's part of the page, or `None` for a derived tail, which has no
    /// descriptor.
    #[must_use]
    pub fn payload(self) -> Option<&'a P> {
        self.descriptor.map(Page::payload)
    }

    /// Returns the word of the folio as it is now: its holds and its content.
    #[must_use]
    pub fn word(self) -> Word {
        self.folio.word()
    }
}

impl<P> fmt::Debug for PageView<'_, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PageView")
            .field("pfn", &self.pfn)
            .field("class", &self.class)
            .field("order", &self.order)
            .field("word", &self.word())
            .finish()
    }
}
