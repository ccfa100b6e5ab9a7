//! References to folios of a bound region: [`Reference`], given back when dropped.

use std::fmt;

use uzone_pages::{Folio, HoldError, Payload, Pfn, Released, Word};

use crate::pagemap::Pagemap;

/// Why a reference was not given.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReferenceError {
    /// The page does not belong to the region.
    #[error("page {pfn} does not belong to the region")]
    NotHere {
        /// The page that was asked for.
        pfn: Pfn,
    },
    /// The folio cannot be handed out: it has been, or is frozen, or its memory is generic.
    #[error(
        "the folio of page {pfn} cannot be handed out: it is not free (references: {references})"
    )]
    NotFree {
        /// The page that was asked for.
        pfn: Pfn,
        /// How many references there were.
        references: u32,
    },
    /// The folio gives no reference.
    #[error("cannot take a reference to the folio of page {pfn}")]
    Refused {
        /// The page that was asked for.
        pfn: Pfn,
        /// Why not.
        #[source]
        cause: HoldError,
    },
}

/// A reference to a folio. Its descriptor keeps its meaning until this is dropped; who drops the
/// last one calls the owner's `on_free`.
pub struct Reference<'a, P: Payload = ()> {
    pagemap: &'a Pagemap<P>,
    folio: Folio<'a, P>,
    head: Pfn,
}

impl<'a, P: Payload> Reference<'a, P> {
    pub(crate) fn hand_out(pagemap: &'a Pagemap<P>, pfn: Pfn) -> Result<Self, ReferenceError> {
        let (folio, head) = find(pagemap, pfn)?;
        if !folio.take_first() {
            return Err(ReferenceError::NotFree { pfn, references: folio.word().references() });
        }
        Ok(Self { pagemap, folio, head })
    }

    pub(crate) fn get(pagemap: &'a Pagemap<P>, pfn: Pfn) -> Result<Self, ReferenceError> {
        let (folio, head) = find(pagemap, pfn)?;
        match folio.try_get() {
            Ok(()) => Ok(Self { pagemap, folio, head }),
            Err(cause) => Err(ReferenceError::Refused { pfn, cause }),
        }
    }

    /// Returns the first page of the folio.
    #[must_use]
    pub fn head(&self) -> Pfn {
        self.head
    }

    /// Returns what the caller added to the head.
    #[must_use]
    pub fn payload(&self) -> &'a P {
        self.folio.payload()
    }

    /// Returns the folio's word as it is now.
    #[must_use]
    pub fn word(&self) -> Word {
        self.folio.word()
    }
}

fn find<P: Payload>(pagemap: &Pagemap<P>, pfn: Pfn) -> Result<(Folio<'_, P>, Pfn), ReferenceError> {
    let memmap = &pagemap.parts().memmap;
    let page = memmap.page(pfn).ok_or(ReferenceError::NotHere { pfn })?;
    Ok((page.folio(), page.head()))
}

impl<P: Payload> Drop for Reference<'_, P> {
    fn drop(&mut self) {
        let parts = self.pagemap.parts();
        let released = self.folio.put();
        debug_assert!(released.is_ok(), "a reference gives back what it took");
        if released == Ok(Released::Last)
            && let Some(free) = &parts.ops.free
        {
            free(self.head);
        }
    }
}

impl<P: Payload> fmt::Debug for Reference<'_, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reference").field("head", &self.head).field("word", &self.word()).finish()
    }
}
