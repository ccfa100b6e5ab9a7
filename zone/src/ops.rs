//! The callbacks of a pagemap: [`PagemapOps`], and [`Populate`] for pages that come later.

use std::sync::Arc;

use uzone_pages::{Pfn, PfnRange};

use crate::error::FaultError;

/// A page that went bad, as its pagemap's owner is notified.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub struct Poisoned {
    /// The page.
    pub pfn: Pfn,
    /// How many pins its folio had: these holders were not refused, and whatever they read or write
    /// there is lost. Takers that are about to be refused may be among them.
    pub pins: u32,
    /// How many references its folio had.
    pub references: u32,
}

/// What makes pages present that a pin finds absent or removed: the fault engine is one
/// implementation.
pub trait Populate: Send + Sync {
    /// Maps what of `range` is at hand, and advances the content of those pages. Never blocks, and
    /// need not do anything.
    fn map_pages(&self, range: PfnRange);

    /// Makes the page `pfn` present, or waits until another thread has. May block.
    ///
    /// # Errors
    /// [`FaultError`] if the page cannot be had; then it is absent as before, or poisoned.
    fn fault(&self, pfn: Pfn) -> Result<(), FaultError>;
}

/// What a pagemap's owner is asked to do, after Linux's `dev_pagemap_ops`.
#[derive(Clone, Default)]
pub struct PagemapOps {
    pub(crate) free: Option<Arc<dyn Fn(Pfn) + Send + Sync>>,
    pub(crate) migrate_to_ram: Option<Arc<dyn Fn(Pfn) + Send + Sync>>,
    pub(crate) poison: Option<Arc<dyn Fn(Poisoned) + Send + Sync>>,
    pub(crate) populate: Option<Arc<dyn Populate>>,
}

impl PagemapOps {
    /// Takes what is called with the head of a folio when its last hold has gone, by the thread
    /// that gave it back. The folio is free by then: another thread may be handing it out already.
    /// It must not panic: a guard that is being dropped would keep what it had not given back yet,
    /// and the region could not be unbound any more.
    #[must_use]
    pub fn on_free(mut self, free: impl Fn(Pfn) + Send + Sync + 'static) -> Self {
        self.free = Some(Arc::new(free));
        self
    }

    /// Takes what is called with a page of private memory that the CPU has touched: it has to
    /// bring the page's bytes to memory that the CPU reaches.
    #[must_use]
    pub fn on_migrate_to_ram(mut self, migrate: impl Fn(Pfn) + Send + Sync + 'static) -> Self {
        self.migrate_to_ram = Some(Arc::new(migrate));
        self
    }

    /// Takes what is called with every page that goes bad, by the thread that found out, after
    /// the page can no longer be pinned. Earlier pins are counted in its argument.
    #[must_use]
    pub fn on_poison(mut self, poison: impl Fn(Poisoned) + Send + Sync + 'static) -> Self {
        self.poison = Some(Arc::new(poison));
        self
    }

    /// Takes what produces pages that are not there when they are pinned.
    #[must_use]
    pub fn populate(mut self, populate: impl Populate + 'static) -> Self {
        self.populate = Some(Arc::new(populate));
        self
    }
}

impl std::fmt::Debug for PagemapOps {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PagemapOps")
            .field("free", &self.free.is_some())
            .field("migrate_to_ram", &self.migrate_to_ram.is_some())
            .field("poison", &self.poison.is_some())
            .field("populate", &self.populate.is_some())
            .finish()
    }
}
