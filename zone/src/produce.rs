//! Pages that are not there yet: [`Populate`], which a pin calls for them.
//!
//! Memory that is mapped lazily has pages whose content is absent or was removed. A pin of such a
//! page makes it present first: what is at hand is mapped for the whole range, and what is then
//! still missing is produced page by page. The fault engine is one implementation.

use std::fmt;

use uzone_pages::{Content, Payload, Pfn, PfnRange};

use crate::hold::PinError;
use crate::inner::Inner;

/// Why a page could not be produced.
#[derive(Clone)]
pub struct FaultError(std::sync::Arc<dyn std::error::Error + Send + Sync>);

impl FaultError {
    /// Takes what went wrong.
    #[must_use]
    pub fn new(cause: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self(cause.into().into())
    }
}

impl fmt::Debug for FaultError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for FaultError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl std::error::Error for FaultError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.source()
    }
}

/// The same failure, not an equal one.
impl PartialEq for FaultError {
    fn eq(&self, other: &Self) -> bool {
        std::sync::Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for FaultError {}

/// What makes absent pages present.
pub trait Populate: Send + Sync {
    /// Maps what of `range` is at hand, and advances the content of those pages. Never blocks, and
    /// need not do anything.
    fn map_pages(&self, range: PfnRange);

    /// Makes the page `pfn` present, or waits until somebody has. May block.
    ///
    /// # Errors
    /// [`FaultError`] if the page cannot be had; then it is absent as before, or poisoned.
    fn fault(&self, pfn: Pfn) -> Result<(), FaultError>;
}

/// Whether a page has to be produced before it can be pinned, or somebody is at it.
pub(crate) fn is_missing(content: Content) -> bool {
    matches!(content, Content::Absent | Content::Filling | Content::Removed)
}

/// Makes the pages of `range` present. Returns whether any was missing.
pub(crate) fn produce<P: Payload>(
    inner: &Inner<P>,
    populate: &dyn Populate,
    range: PfnRange,
) -> Result<bool, PinError> {
    let missing = || {
        inner
            .folios(range.start(), range.end())
            .filter(|(_, folio)| is_missing(folio.word().content()))
            .map(|(head, _)| head.max(range.start()))
    };
    if missing().next().is_none() {
        return Ok(false);
    }
    populate.map_pages(range);
    for pfn in missing() {
        populate.fault(pfn).map_err(|cause| PinError::Fault { pfn, cause })?;
    }
    Ok(true)
}
