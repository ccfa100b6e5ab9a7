//! The callbacks of a pagemap: [`PagemapOps`].

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

/// What is called, if anything is.
type Callback<T, R = ()> = Option<Arc<dyn Fn(T) -> R + Send + Sync>>;

/// What a pagemap's owner is asked to do, after Linux's `dev_pagemap_ops`.
#[derive(Clone, Default)]
pub struct PagemapOps {
    pub(crate) free: Callback<Pfn>,
    pub(crate) migrate_to_ram: Callback<Pfn>,
    pub(crate) poison: Callback<Poisoned>,
    pub(crate) map_pages: Callback<PfnRange>,
    pub(crate) fault: Callback<Pfn, Result<(), FaultError>>,
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

    /// Takes what makes pages present that a pin finds absent or removed, and advances their content.
    /// `map_pages` maps what of the range is ready, if anything, and never blocks. Then `fault` makes
    /// each page present that is still missing, or waits until another thread has, and may block. If
    /// it fails, the page is absent as before, or poisoned. Both may be called by several threads.
    #[must_use]
    pub fn populate(
        mut self,
        map_pages: impl Fn(PfnRange) + Send + Sync + 'static,
        fault: impl Fn(Pfn) -> Result<(), FaultError> + Send + Sync + 'static,
    ) -> Self {
        self.map_pages = Some(Arc::new(map_pages));
        self.fault = Some(Arc::new(fault));
        self
    }
}

impl std::fmt::Debug for PagemapOps {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PagemapOps")
            .field("free", &self.free.is_some())
            .field("migrate_to_ram", &self.migrate_to_ram.is_some())
            .field("poison", &self.poison.is_some())
            .field("populate", &self.fault.is_some())
            .finish()
    }
}
