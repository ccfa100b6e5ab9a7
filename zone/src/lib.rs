//! uzone: a memory manager for big memory, in user space.
//!
//! A [`Region`] is memory; a [`Zone`] describes it; a [`Pagemap`] is the description: a descriptor
//! for every page of the region, at once, and for as long as the region stays bound. [`Pinned`] and
//! [`Referenced`] hold pages of it, and unbinding refuses while there are any. A pin holds off uzone's own
//! unbind and changes; the kernel may still migrate or swap the page, unless it has pinned it too
//! ([`PinOptions::kernel`]).
//!
//! ```
//! use uzone_pages::{ByteLen, MemoryKind, Order};
//! use uzone_zone::{BindOptions, Region, Zone};
//!
//! let zone = Zone::new();
//! let region = Region::anonymous(ByteLen::gib(100))?; // reserved: it costs no memory yet
//! let options = BindOptions::new(MemoryKind::Generic).order(Order::PMD);
//! let pagemap = zone.bind(region, options)?;
//! println!("{}", pagemap.report()); // 400 KiB of descriptors initialised on touch in 12.3us
//!
//! let page = pagemap.page_at(5 << 20).expect("a page of the region");
//! assert!(page.is_tail() && page.word().references() == 1);
//!
//! let region = pagemap.unbind()?;
//! assert_eq!(region.len(), ByteLen::gib(100));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! | type | meaning |
//! |---|---|
//! | [`Region`] | memory: anonymous, a memory file, huge pages, a file, a DAX device, or adopted |
//! | [`Zone`] | the owner of frame numbers; binds regions, and pins by address |
//! | [`BindOptions`], [`Payload`] | how a region is described, and a caller's part of a descriptor |
//! | [`Pagemap`], [`PageView`], [`Word`] | a bound region, a page of it, and its holds and content |
//! | [`RegionView`], [`PagemapView`] | a bound region and a pool's pagemap, read-only |
//! | [`Pinned`], [`Referenced`], [`RawGuard`] | guards on pages, and one as 64 bits |
//! | [`Content`] | the state of a page's bytes, and which state may follow which |
//! | [`Pool`], [`Pooled`] | folios handed out as zeroes |
//! | [`sigbus`] | SIGBUS as an error |
//!
//! Units: offsets are bytes from the start of the region and carry that in their names, lengths are
//! [`ByteLen`], pages are base pages of the host ([`PageCount`], [`Pfn`], [`PfnRange`]). Errors name the
//! request and the remedy; errors that would lose a value give it back ([`BindFailure`],
//! [`Busy`], [`Rejected`]). Regions, zones, pagemaps and pools are used by several threads at once;
//! guards go from one to another.
//!
//! Programs use these types through the package `uzone`, whose guide explains one concept after the other.
//! The model is in the package `uzone-pages`.
//!
//! [`ByteLen`]: uzone_pages::ByteLen
//! [`Content`]: uzone_pages::Content
//! [`PageCount`]: uzone_pages::PageCount
//! [`PageView`]: uzone_pages::PageView
//! [`Payload`]: uzone_pages::Payload
//! [`Rejected`]: uzone_os::Rejected
//! [`sigbus`]: uzone_os::sigbus
//! [`Pfn`]: uzone_pages::Pfn
//! [`PfnRange`]: uzone_pages::PfnRange
//! [`Word`]: uzone_pages::Word
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::too_many_lines))]

mod bind;
mod clear;
mod error;
mod ops;
mod pagemap;
mod panics;
mod pin;
mod poison;
mod pool;
mod populate;
mod progress;
mod region;
mod setters;
mod source;
mod zone;

pub use bind::BindFailure;
pub use bind::memmap_cache::MemmapPages;
pub use bind::options::{AltmapOptions, BindOptions, Init};
pub use bind::report::BindReport;
pub use clear::options::{Cleared, ZeroOptions};
pub use error::{BindError, FaultError, PinError, Unclearable, WriteError};
pub use ops::{PagemapOps, Poisoned};
pub use pagemap::{Busy, Pagemap, PagemapView};
pub use pin::guards::Holder;
pub use pin::pin_target::Segment;
pub use pin::pinned_ranges::PinnedRanges;
pub use pin::token::{RawGuard, Redeemed};
pub use pin::{Guard, PinOptions, Pinned, Referenced};
pub use pool::options::{PoolError, PoolOptions, PoolStats};
pub use pool::{Pool, Pooled};
pub use populate::{Huge, PopulateOptions, PopulateReport};
pub use region::{Region, RegionView};
pub use source::RegionSource;
pub use zone::Zone;
