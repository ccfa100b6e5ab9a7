//! Pages that are not there yet: [`Populate`], which a pin calls for them.
//!
//! Memory that is mapped lazily has pages whose content is absent or was removed. A pin of such a
//! page makes it present first: what is at hand is mapped for the whole range, and what is then
//! still missing is produced page by page. The fault engine is one implementation.

use uzone_pages::{Payload, PfnRange};

use crate::error::PinError;
use crate::inner::Inner;
use crate::ops::Populate;
use crate::pin::pin_target::is_missing;

impl<P: Payload> Inner<P> {
    /// Makes the pages of `range` present. Returns whether any was missing.
    pub(crate) fn produce_missing(
        &self,
        populate: &dyn Populate,
        range: PfnRange,
    ) -> Result<bool, PinError> {
        let missing = || {
            self.memmap
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
}
