//! Streaming (non-temporal) copy, fill and zero: stores that go past the cache.
//!
//! A plain store to a line that is not in the cache moves the line twice: it is read in before it
//! is changed and written back later. A streaming store that covers whole lines moves it once and
//! leaves the cache to its other tenants. It pays for memory that is cold and is not read soon,
//! and it costs a factor of several where the line was hot; so which of the two to use is the
//! caller's knowledge and a table by CPU ([`StorePolicy::choose`]).
//!
//! The package has:
//! - [`Path`]: which store instruction; [`best`] is the one to use on this machine.
//! - [`Streaming`]: a scope for any number of copies and fills with one fence at its end.
//! - [`copy`], [`fill`], [`zero`]: one call, fenced before it returns.
//! - [`Pattern`]: the pattern that a fill repeats, constant or counting up.
//! - [`copy_flush`], [`flush_words`]: for persistent memory, a copy, and the flush of words written before.
//! - [`zero_words`], [`copy_words`]: clearing and copying memory that others may touch meanwhile, by
//!   each [`CopyMethod`] there is; [`zero_bytes`], [`copy_bytes`] the same for slices.
//! - [`StorePolicy`]: which of them for which length, by a table of CPUs or the environment variable
//!   [`STORE_POLICY`].
//!
//! Not here: system calls, threads, the meaning of the bytes, and any way to read
//! or write memory that is not a Rust slice, of bytes or of atomic words.
//!
//! Units: every length is in bytes and every word is 8 bytes in the machine's byte order.
//! Sharing: all functions may be called from any thread; a [`Streaming`] stays on its own.
//! Unsafe: only `x86_64.rs` and its folder, which hold the instructions. Other architectures, Miri
//! and builds with `--cfg uzone_sanitizer` have the portable path alone.
#![cfg_attr(not(test), warn(clippy::too_many_lines))]

mod copy_method;
mod error;
mod flush;
#[cfg(not(uzone_asm))]
mod other;
mod path;
mod pattern;
mod policy;
mod portable;
mod streaming;
mod work;
#[cfg(uzone_asm)]
mod x86_64;

#[cfg(not(uzone_asm))]
use other as arch;
#[cfg(uzone_asm)]
use x86_64 as arch;

pub use copy_method::{CopyMethod, copy_bytes, copy_words, zero_bytes, zero_words};
pub use error::StreamError;
pub use flush::{copy_flush, evict, flush_words, has_write_back};
pub use path::Path;
pub use pattern::Pattern;
pub use policy::{Basis, StorePolicy, best};
pub use streaming::{Streaming, copy, copy_by, fill, fill_by, zero, zero_by};
pub use work::{CacheState, NextUse, STORE_POLICY, Work};

/// The length of a cache line, and of the widest store, in bytes.
pub const LINE_BYTES: usize = 64;
