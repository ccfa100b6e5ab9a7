//! The callbacks of a pagemap: [`PagemapOps`].

use std::sync::Arc;

use uzone_pages::{Pfn, PfnRange};

use crate::error::FaultError;

/// A page that went bad.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub struct Poisoned {
    /// The page.
    pub pfn: Pfn,
    /// The pins that its folio had: these holders were not refused, and the bytes that they read or write
    /// there are lost. Takers that are about to be refused may be among them.
    pub pins: u32,
    /// The references that its folio had.
    pub references: u32,
}

/// A callback, if the program gave one.
type Callback<T, R = ()> = Option<Arc<dyn Fn(T) -> R + Send + Sync>>;

/// The callbacks of a pagemap's owner, after Linux's `dev_pagemap_ops`.
#[derive(Clone, Default)]
pub struct PagemapOps {
    pub(crate) poison: Callback<Poisoned>,
    pub(crate) map_pages: Callback<PfnRange>,
    pub(crate) fault: Callback<Pfn, Result<(), FaultError>>,
}

impl PagemapOps {
    /// Takes a callback for each page that goes bad. The thread that found out calls it, after
    /// the page can no longer be pinned. Earlier pins are counted in its argument.
    #[must_use]
    pub fn on_poison(mut self, poison: impl Fn(Poisoned) + Send + Sync + 'static) -> Self {
        self.poison = Some(Arc::new(poison));
        self
    }

    /// Takes the callbacks that make pages present that a pin finds absent or removed, and advance their content.
    /// `map_pages` maps the pages of the range that are ready, and never blocks. Then `fault` makes
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
            .field("poison", &self.poison.is_some())
            .field("populate", &self.fault.is_some())
            .finish()
    }
}
