//! The model of uzone: frame numbers, page descriptors, folios and content states.
//!
//! `no_std`, without a system call, I/O or a clock: everything here is arithmetic and one atomic
//! word a page, so it runs under Miri, under loom and in a kernel. The memory that descriptors lie
//! in comes from the caller; the package `uzone` brings real regions.
//!
//! | module | mechanism |
//! |---|---|
//! | `addr` | numbers of pages |
//! | `byte_len` | lengths in bytes, and how they are written |
//! | `error` | the kinds of errors |
//! | `kind` | kinds of memory and their first references |
//! | `content` | the state of a page's bytes, and the legal steps |
//! | `page` | the descriptor: a word and the caller's part |
//! | `word` | the bits of the word |
//! | `folio` | the atomic steps on a word: holds and content |
//! | `block` | holds on 512 base pages at once |
//! | `span` | holds on a range of pages |
//! | `steps` | steps of the content of a range of pages |
//! | `payload` | a caller's part of a descriptor, and the slow path that initialises it |
//! | `clearing` | the order in which memory is cleared or copied |
//! | `chunks` | a range cut at a limit and an alignment |
//! | `layout` | which descriptor belongs to which page |
//! | `placement` | where in a region its descriptors lie and the described pages begin |
//! | `memmap` | the descriptors of one region |
//! | `pool_state` | the states of a pool's folios, and the steps by which they are handed out |
//! | `bits` | sets of small numbers |
//! | `window` | which pages a fault maps |
//! | `planner` | the pages that a fault maps, from the faults before it |
//! | `streams` | threads that read in order, found by the page that each faults on next |
//! | `costs` | how long faults and pages take, and when a block is mapped whole |
//! | `linux` | a payload that makes a descriptor Linux's 64-byte `struct page` |
#![no_std]
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::too_many_lines))]

extern crate alloc;

mod addr;
mod bits;
mod block;
mod byte_len;
mod chunks;
mod clearing;
mod content;
mod costs;
mod error;
mod folio;
mod kind;
mod layout;
mod linux;
mod memmap;
mod page;
mod payload;
mod placement;
mod planner;
mod pool_state;
mod span;
mod steps;
mod streams;
mod sync;
mod window;
mod word;

pub use addr::{AddrError, Order, PageCount, PageSize, Pfn, PfnRange};
pub use block::{BLOCK_ORDER, Block};
pub use byte_len::ByteLen;
pub use chunks::chunks;
pub use clearing::clearing_order;
pub use content::Content;
pub use costs::FaultCosts;
pub use error::ErrorKind;
pub use folio::{AdvanceError, Folio, HoldError};
pub use kind::MemoryKind;
pub use layout::{Class, Layout, Slot, Tails};
pub use linux::{LinuxPage, LinuxSeed};
pub use memmap::{Memmap, PageView};
pub use page::Page;
pub use payload::{MAX_PAYLOAD_BYTES, Payload, Plain, Refresh, Template};
pub use placement::{Placement, PlacementSpec};
pub use planner::{Advice, FaultArea, FaultPlan, FaultPlanner, Touch};
pub use pool_state::{
    FolioState, PoolBackend, PoolState, clear_ahead, give_back, hand_out, look_again, restock,
};
pub use span::Span;
pub use window::FaultAround;
pub use word::{HoldKind, MAX_HOLDS, Word};
