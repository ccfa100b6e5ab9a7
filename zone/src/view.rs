//! One page of a bound region: [`PageView`].

use std::fmt;

use uzone_pages::{Class, Order, PageCount, PageRef, Payload, Pfn, Template, Word};

/// One page of a bound region, read-only. [`Pagemap::advance`](crate::Pagemap::advance) changes what is
/// known about its bytes.
pub struct PageView<'a, P: Payload = ()> {
    pub(crate) page: PageRef<'a, P>,
    pub(crate) template: &'a Template<P>,
}

impl<P: Payload> Clone for PageView<'_, P> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<P: Payload> Copy for PageView<'_, P> {}

impl<'a, P: Payload> PageView<'a, P> {
    /// Returns the page's frame number.
    #[must_use]
    pub fn pfn(self) -> Pfn {
        self.page.pfn()
    }

    /// Returns what the page is to its folio.
    #[must_use]
    pub fn class(self) -> Class {
        self.page.class()
    }

    /// Returns whether the page is a tail.
    #[must_use]
    pub fn is_tail(self) -> bool {
        self.page.is_tail()
    }

    /// Returns the first page of the folio; the page itself if it is that.
    #[must_use]
    pub fn head(self) -> Pfn {
        self.page.head()
    }

    /// Returns how many pages the head is away.
    #[must_use]
    pub fn distance(self) -> PageCount {
        self.page.distance()
    }

    /// Returns the order of the folio.
    #[must_use]
    pub fn order(self) -> Order {
        self.page.order()
    }

    /// Returns the word of the folio as it is now: its holds and its content.
    #[must_use]
    pub fn word(self) -> Word {
        self.page.folio().word()
    }

    /// Returns what the caller added to the page, or `None` for a derived tail, which has no
    /// descriptor.
    #[must_use]
    pub fn payload(self) -> Option<&'a P> {
        self.page.payload()
    }

    /// Returns the payload that the page started with, or that its descriptor would have started
    /// with if it had one: for a derived tail, all that is known about it.
    #[must_use]
    pub fn fresh_payload(self) -> Option<P> {
        self.template.fresh(self.pfn())
    }
}

impl<P: Payload> fmt::Debug for PageView<'_, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.page.fmt(f)
    }
}
