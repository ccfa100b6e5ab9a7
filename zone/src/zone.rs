//! The regions that belong together: [`Zone`].
//!
//! A zone gives every bound region its own range of page frame numbers, refuses to describe the
//! same bytes twice, and keeps descriptor memory from an unbind to the next bind. It is cheap to
//! clone and shared by the pagemaps that were bound in it.
//!
//! Locks: the list of claims, the list of kept memory, the directory's newest table and each list of
//! raw guards have one; none is held while another is taken, nor over a system call.

use std::sync::Arc;

use uzone_os::{SystemRoot, memory};
use uzone_pages::{ByteLen, Payload, PfnRange};

use crate::bind::options::BindOptions;
use crate::bind::registry::Shared;
use crate::bind::{self, BindFailure};
use crate::error::PinError;
use crate::pagemap::Pagemap;
use crate::pin::token::{RawGuard, Redeemed};
use crate::region::Region;

/// Of the memory that this process may have, the part that a zone keeps at most unless set
/// otherwise.
const KEEP_SHARE: u64 = 8;

/// A set of bound regions.
///
/// # Examples
///
/// ```
/// use uzone_pages::{ByteLen, MemoryKind};
/// use uzone_zone::{BindOptions, Region, Zone};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let zone = Zone::new();
/// let region = Region::anonymous(ByteLen::gib(1))?;
/// let pagemap = zone.bind(region, BindOptions::new(MemoryKind::Generic))?;
/// println!("{}", pagemap.report()); // the bytes of the descriptors, and the time
///
/// // Any address of any region of the zone can be pinned.
/// let address = pagemap.region().addr().get() + (5 << 20);
/// let pinned = zone.pin(address, ByteLen::kib(64))?;
/// let busy = pagemap.unbind().expect_err("pages are pinned");
/// drop(pinned);
/// let region = busy.pagemap.unbind()?; // the region is the caller's again
/// # drop(region);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Zone {
    pub(crate) shared: Arc<Shared>,
}

impl Default for Zone {
    fn default() -> Self {
        Self::new()
    }
}

impl Zone {
    /// Makes an empty zone that keeps descriptor memory up to an eighth of the memory that this process
    /// may have now.
    #[must_use]
    pub fn new() -> Self {
        // Where the kernel does not say, nothing is kept: slower, and never too much.
        let available = memory::available(&SystemRoot::host())
            .map_or(ByteLen::ZERO, |available| available.bytes);
        Self::with_keep_limit(ByteLen::new(available.get() / KEEP_SHARE))
    }

    /// Makes an empty zone that keeps descriptor memory up to `limit`.
    #[must_use]
    pub fn with_keep_limit(limit: ByteLen) -> Self {
        Self { shared: Arc::new(Shared::new(limit)) }
    }

    /// Describes every page of `region`, at once.
    ///
    /// On touch it costs a few microseconds whatever the size; eager, it writes every descriptor
    /// at the rate at which this machine streams. A region whose bytes, or whose frame numbers,
    /// are described already is refused.
    ///
    /// # Errors
    /// [`BindFailure`] gives the region back with the reason; nothing else is left of the attempt.
    ///
    /// # Panics
    /// If a callback or the payload's `init` does. Then the region is unmapped and the frame numbers
    /// are free again.
    #[expect(clippy::needless_pass_by_value, reason = "the options end with the bind")]
    pub fn bind<P: Payload>(
        &self,
        region: Region,
        options: BindOptions<P>,
    ) -> Result<Pagemap<P>, BindFailure> {
        let pagemap = bind::bind(&self.shared, region, &options)?;
        let report = pagemap.report();
        tracing::debug!(
            pages = pagemap.range().pages().get(),
            stores = ?report.stores,
            elapsed = ?report.elapsed,
            "bind: {report}"
        );
        Ok(pagemap)
    }

    /// Returns how much descriptor memory is kept for the next bind.
    #[must_use]
    pub fn kept(&self) -> ByteLen {
        self.shared.memmap_cache.kept()
    }

    /// Gives kept descriptor memory back to the kernel. Returns how much.
    #[expect(clippy::must_use_candidate, reason = "it is called for its effect")]
    pub fn trim(&self) -> ByteLen {
        self.shared.memmap_cache.trim(ByteLen::ZERO)
    }

    /// Returns the frame numbers of the regions that are bound now, in ascending order.
    #[must_use]
    pub fn bound(&self) -> Vec<PfnRange> {
        self.shared.claimed()
    }

    /// Returns the guard that [`Pinned::into_raw`](crate::Pinned::into_raw) or [`Referenced::into_raw`](crate::Referenced::into_raw) made these bits of.
    ///
    /// # Errors
    /// [`PinError::NotAGuard`] if it was redeemed before, or never was a guard of this zone.
    pub fn redeem(&self, raw: RawGuard) -> Result<Redeemed, PinError> {
        self.shared.tokens.redeem(raw).ok_or(PinError::NotAGuard { bits: raw.to_bits() })
    }
}
