//! Lazily mapped memory: a page comes from a [`Backing`] when it is touched, and its neighbours come along
//! if they are ready.
//!
//! ```
//! use std::sync::Arc;
//! use uzone_fault::{ByteLen, Engine, EngineOptions, FunctionBacking, LazyOptions};
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
//!     Err(error) => println!("not on this host: {error}"),
//! }
//! # Ok(())
//! # }
//! ```
//!
//! It needs Linux 6.6 and a userfaultfd, which any process may have for its own reads and writes; for those
//! of system calls see [`KernelFaults`]. Units: offsets are bytes from the start of a mapping, or of its
//! backing where that is said; lengths are [`ByteLen`]; a [`FaultAround`] is bytes. Errors are [`MapError`]
//! where there is no mapping yet, [`LazyError`] of requests, and [`BackingError`] of what produces pages.
//! `docs/GUIDE.md` goes through it one idea after the other, from chapter 10 on. A fault goes down and
//! back: the reader thread of the mapping gets it from the kernel (`event_loop`, `mapping_reader`), looks
//! up the state of the page (`page_states`) and its window ([`FaultPattern`](uzone_pages::FaultPattern)),
//! offers the window to the backing (`core`, `window`), and queues the page for an I/O thread if it was not
//! ready (`io_pool`). A sequential reader gets the whole window before it goes on; any other thread gets
//! one page, and the neighbours follow.
//!
//! | file | mechanism |
//! |---|---|
//! | `engine` | [`Engine`]: makes mappings, and owns the threads |
//! | `options` | [`EngineOptions`], [`LazyOptions`] |
//! | `lazy` | [`LazyMapping`]: memory of this process |
//! | `adopted` | [`AdoptedMemory`]: memory of another process |
//! | `blocks` | the blocks of that of which huge pages can be made |
//! | `backing` | [`Backing`] and the back ends |
//! | `window` | [`Window`]: what a backing is offered, and what the kernel's replies do to it |
//! | `core` | the decisions about a fault |
//! | `costs` | what faults cost, measured |
//! | `bad_pages` | making a page a bad one |
//! | `page_states` | the state of each page |
//! | `pages` | the pages of one size of a mapping, with the kernel that installs them |
//! | `event_loop`, `inbox` | the reader threads, and the messages to them |
//! | `mapping_reader` | one mapping, as its reader sees it |
//! | `pager` | its pages of one size, and the answers to their faults |
//! | `io_pool` | the I/O threads |
//! | `placement` | where the reader should run, measured |
//! | `pending` | the pages that threads wait for |
//! | `staged` | pages that one thread produces and another installs |
//! | `populate` | pages made present before they are touched, and for pins |
//! | `budget` | the most that is done for one mapping |
//! | `stats`, `observe` | what happened, in numbers, and how it is looked at |
//! | `record` | latencies, a trace, and a USDT probe |
//! | `fault_memory`, `remote_region` | the memory whose faults are answered, and where that of another process is |
//! | `handed_over` | waking threads that wait in a handler for the reader |
//! | `dirty` | which pages were written; `dirty/states` where each first write is an event |
//! | `capture` | keeping pages of another process before they are written to |
//! | `collapse` | making huge pages of filled ones |
//! | `transparent`, `slot` | transparent huge pages, filled whole |
//! | `rehearsal` | the part of a fault outside the kernel, for the benchmark |
//! | `kernel` | installing pages, behind a trait for the tests |
#![forbid(unsafe_code)]
// The model of tests/loom.rs needs two files of this package and none of those that call the kernel.
#![cfg(not(loom))]

mod adopted;
mod backing;
mod bad_pages;
mod blocks;
mod budget;
mod capture;
mod collapse;
mod core;
mod costs;
mod dirty;
mod engine;
mod error;
mod event_loop;
mod fault_memory;
mod follow;
mod handed_over;
mod inbox;
mod io_pool;
mod kernel;
mod lazy;
mod mapping_reader;
mod observe;
mod options;
#[cfg_attr(miri, path = "page_states/plain.rs")]
mod page_states;
mod pager;
mod pages;
mod pending;
mod placement;
mod populate;
mod prefetch;
mod process;
mod record;
#[doc(hidden)]
pub mod rehearsal;
mod remote_region;
mod slot;
mod staged;
mod stats;
mod sync;
mod threads;
mod transparent;
mod window;

#[cfg(test)]
mod tests;

pub use adopted::{AdoptedMemory, NotStopped};
pub use backing::{
    Backing, CompositeBacking, CompositeBuilder, FileBacking, FunctionBacking, Memory,
    MemoryBacking, SharedBacking, ZeroBacking,
};
pub use budget::Budget;
pub use capture::{Captured, KeptPages, WriteCapture};
pub use collapse::{Collapsed, Uncollapsed};
pub use engine::Engine;
pub use error::{BackingError, Failure, LazyError, MapError};
pub use lazy::LazyMapping;
pub use options::{
    Answer, AnsweredBy, EngineOptions, HugePages, LazyOptions, Reader, Refusal, WriteTracking,
};
pub use placement::{ReaderPlace, ReaderPlacement};
pub use populate::Populate;
pub use record::{FaultOutcome, FaultRecord, FaultTrace, Latency};
pub use remote_region::RemoteRegion;
pub use stats::FaultStats;
pub use window::{Filled, Window};

// What calls here take and return of the packages below, and what their documentation recommends.
pub use uzone_os::uffd::{
    EventLog, FaultKind, KernelFaults, LoggedEvents, PendingFaults, Remote, UffdError,
};
pub use uzone_os::{AccessError, Addr, HugeSize, Mapping, MappingError, Sharing, SysError, Vaddr};
pub use uzone_pages::{AddrError, Advice, ByteLen, Content, FaultAround, PageSize};
pub use uzone_zone::{BindError, FaultError, PinError, Pinned, Zone, bus};
