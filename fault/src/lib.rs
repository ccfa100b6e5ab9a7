//! Lazily mapped memory: a page comes from a [`Backing`] when it is touched, and its neighbours come along
//! if they are ready.
//!
//! ```
//! use std::sync::Arc;
//! use uzone_fault::{Engine, EngineOptions, FunctionBacking, LazyOptions};
//! use uzone_pages::ByteLen;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let engine = Engine::with(EngineOptions::default())?;
//! // Page n is full of n.
//! let backing = FunctionBacking::quick(|offset, pages: &mut [u8]| {
//!     for (index, byte) in pages.iter_mut().enumerate() {
//!         *byte = ((offset as usize + index) / 4096) as u8;
//!     }
//!     Ok(())
//! });
//! match engine.map(ByteLen::gib(1), Arc::new(backing), &LazyOptions::default()) {
//!     Ok(memory) => {
//!         let mut bytes = [0; 4];
//!         memory.read_at(200 * 4096, &mut bytes)?;
//!         assert_eq!(bytes, [200; 4]);
//!         assert_eq!(memory.stats().faults, 1);
//!     }
//!     Err(error) => println!("not on this host: {error:?}"),
//! }
//! # Ok(())
//! # }
//! ```
//!
//! It needs a userfaultfd, which any process may have for its own reads and writes; for those
//! of system calls see [`KernelFaults`]. Units: offsets are bytes from the start of a mapping, or of its
//! backing where that is said; lengths are [`ByteLen`]; a [`FaultAround`] is bytes. Errors are [`MapError`]
//! where there is no mapping yet, [`LazyError`] of requests, and [`BackingError`] of backings.
//! `docs/GUIDE.md` goes through it one idea after the other, from chapter 10 on. A fault goes down and
//! back: the reader thread of the mapping gets it from the kernel (`event_loop`, `mapping_reader`), looks
//! up the state of the page (`pages::states`) and its window ([`FaultPlanner`](uzone_pages::FaultPlanner)),
//! offers the window to the backing (`core`, `backing::window`), and queues the page for an I/O thread if it was not
//! ready (`io_pool`). A sequential reader gets the whole window before it goes on; any other thread gets
//! one page, and the neighbours follow.
//!
//! | folder | contents |
//! |---|---|
//! | `engine` | [`Engine`]: makes mappings, owns the threads, and answers faults |
//! | `pages` | the states of pages: bad, claimed, written, captured |
//! | `memory` | [`LazyMapping`], [`AdoptedMemory`]: the memory whose faults are answered, populated ahead, and huge pages made of it |
//! | `backing` | [`Backing`], the [`Window`] that it fills, and the back ends |
//!
//! `options` has [`EngineOptions`] and [`LazyOptions`], `error` the errors, `stats` the events in
//! numbers, and `trace` the record of each fault.
//!
//! [`ByteLen`]: uzone_pages::ByteLen
//! [`FaultAround`]: uzone_pages::FaultAround
//! [`KernelFaults`]: uzone_os::uffd::KernelFaults
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::too_many_lines))]
// The model of tests/loom.rs needs two files of this package, and no file that calls the kernel.
#![cfg(not(loom))]

mod backing;
mod engine;
mod error;
mod memory;
mod options;
mod pages;
mod stats;
mod sync;
mod trace;

#[cfg(test)]
mod tests;

pub use backing::window::{Filled, Window};
pub use backing::{
    Backing, FileBacking, FunctionBacking, MemoryBacking, SharedBacking, ZeroBacking,
};
pub use engine::Engine;
pub use engine::budget::Budget;
pub use error::{BackingError, Failure, LazyError, MapError};
pub use memory::adopted::AdoptedMemory;
pub use memory::collapse::{Collapsed, Uncollapsed};
pub use memory::mapping::LazyMapping;
pub use memory::remote_region::RemoteRegion;
pub use options::{Answer, EngineOptions, LazyOptions, Refusal, WriteTracking};
pub use pages::capture::KeptPages;
pub use stats::FaultStats;
pub use trace::{FaultOutcome, FaultRecord, Latency};
