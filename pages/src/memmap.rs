//! The descriptors of one region: [`Memmap`], an array with a [`Page`] for each page frame, or one
//! for each folio.
//!
//! Finding a descriptor is one subtraction, one shift and one index ([`Memmap::page`]); there is no
//! tree and no lock. A `Memmap` describes memory and does not own it: dropping it frees
//! descriptors, never pages.
//!
//! Units: counts are base pages of the region's [`PageSize`](crate::PageSize).
//! Sharing: every method takes `&self`, from any thread. What changes is inside [`Page`], in one
//! atomic word; the orderings are argued in `page.rs` and searched in `tests/loom.rs`.
//! Cost: 8 bytes and the payload for each page, or for each folio where tails are derived.
//! Source: "Physical Memory Model" in the Linux documentation describes the array we imitate.

use core::fmt;
use core::marker::PhantomData;
use core::ops::Deref;

use crate::addr::{Order, PageCount, Pfn};
use crate::kind::MemoryKind;
use crate::layout::{Class, Layout};
use crate::page::{Folio, Page, Word};

/// An array of descriptors whose length does not fit its layout.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{given} descriptors were given for a layout that has {needed}")]
pub struct MemmapError {
    /// How many the layout has.
    pub needed: u64,
    /// How many were given.
    pub given: u64,
}

/// The descriptors of one region, in memory that `S` holds.
pub struct Memmap<P, S> {
    layout: Layout,
    kind: MemoryKind,
    descriptors: S,
    payload: PhantomData<fn() -> P>,
}

impl<P, S: Deref<Target = [Page<P>]>> Memmap<P, S> {
    /// Takes descriptors that are fresh: never written where their payload starts at zero, else
    /// initialised through [`Template`](crate::Template).
    ///
    /// # Errors
    /// [`MemmapError`] unless there are as many as the layout has.
    pub fn try_new(layout: Layout, kind: MemoryKind, descriptors: S) -> Result<Self, MemmapError> {
        let given = descriptors.len() as u64;
        let needed = layout.descriptors();
        if given != needed {
            return Err(MemmapError { needed, given });
        }
        Ok(Self { layout, kind, descriptors, payload: PhantomData })
    }

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

    /// Returns the descriptors, in the order of their pages.
    #[must_use]
    pub fn descriptors(&self) -> &[Page<P>] {
        &self.descriptors
    }

    /// Returns what holds the descriptors.
    #[must_use]
    pub fn memory(&self) -> &S {
        &self.descriptors
    }

    /// Gives the descriptors' memory back.
    #[must_use]
    pub fn into_descriptors(self) -> S {
        self.descriptors
    }

    fn descriptor(&self, index: u64) -> Option<&Page<P>> {
        self.descriptors.get(usize::try_from(index).ok()?)
    }

    /// Returns the folio that the page `pfn` belongs to, or `None` if the page is not described.
    #[must_use]
    pub fn folio(&self, pfn: Pfn) -> Option<Folio<'_, P>> {
        let head = self.descriptor(self.layout.head_index(pfn)?)?;
        Some(Folio::new(head, Word::initial(self.kind)))
    }

    /// Returns the folios that have pages from `start` up to `end`, each once, with their heads.
    /// Pages that are not described have none.
    pub fn folios(&self, start: Pfn, end: Pfn) -> impl Iterator<Item = (Pfn, Folio<'_, P>)> {
        let range = self.layout.range();
        let (start, end) = (start.max(range.start()), end.min(range.end()));
        let first = self.layout.head_index(start).unwrap_or(0);
        let stride = self.layout.descriptors_per_folio();
        let order = self.layout.order();
        // Empty where nothing is left of the pages.
        let folios = end
            .checked_since(start.align_down(order))
            .filter(|_| start < end)
            .map_or(0, |pages| pages.get().div_ceil(order.pages().get()));
        let template = Word::initial(self.kind);
        let head = start.align_down(order).get();
        (0..folios).filter_map(move |folio| {
            let descriptor = self.descriptor(first + folio * stride)?;
            Some((Pfn::new(head + (folio << order.get())), Folio::new(descriptor, template)))
        })
    }

    /// Returns the page `pfn`, or `None` if it is not described.
    #[must_use]
    pub fn page(&self, pfn: Pfn) -> Option<PageRef<'_, P>> {
        let descriptor = self.descriptor(self.layout.index(pfn)?)?;
        let class = self.layout.class(pfn);
        let is_tail = matches!(class, Class::FirstTail | Class::Tail);
        let is_derived = is_tail && self.layout.descriptors_per_folio() == 1;
        Some(PageRef {
            pfn,
            class,
            order: self.layout.order(),
            descriptor: (!is_derived).then_some(descriptor),
            folio: self.folio(pfn)?,
        })
    }
}

impl<P, S> fmt::Debug for Memmap<P, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Memmap").field("layout", &self.layout).field("kind", &self.kind).finish()
    }
}

/// One page of a memmap: what its pfn says about it, its descriptor, and its folio.
pub struct PageRef<'a, P = ()> {
    pfn: Pfn,
    class: Class,
    order: Order,
    descriptor: Option<&'a Page<P>>,
    folio: Folio<'a, P>,
}

impl<P> Clone for PageRef<'_, P> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<P> Copy for PageRef<'_, P> {}

impl<'a, P> PageRef<'a, P> {
    /// Returns the page's frame number.
    #[must_use]
    pub fn pfn(self) -> Pfn {
        self.pfn
    }

    /// Returns what the page is to its folio.
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

    /// Returns the folio, which holds and content belong to.
    #[must_use]
    pub fn folio(self) -> Folio<'a, P> {
        self.folio
    }

    /// Returns the page's own descriptor, or `None` for a derived tail, which has none.
    #[must_use]
    pub fn descriptor(self) -> Option<&'a Page<P>> {
        self.descriptor
    }

    /// Returns what the caller added to the page, or `None` for a derived tail.
    #[must_use]
    pub fn payload(self) -> Option<&'a P> {
        self.descriptor.map(Page::payload)
    }

    /// Returns the page's own word as it is now. A tail has no holds and no content of its own.
    #[must_use]
    pub fn word(self) -> Word {
        match (self.descriptor, self.is_tail()) {
            (Some(_), false) => self.folio.word(),
            (Some(tail), true) => Folio::new(tail, Word::tail()).word(),
            (None, _) => Word::tail(),
        }
    }
}

impl<P> fmt::Debug for PageRef<'_, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PageRef")
            .field("pfn", &self.pfn)
            .field("class", &self.class)
            .field("order", &self.order)
            .field("word", &self.word())
            .finish()
    }
}
