//! Memory that a page server fills when it is touched: the client of `uzone serve` for programs that are no
//! virtual machine monitor.
//!
//! [`AttachedMemory::attach`] asks a server for its image, maps as much memory, and hands the page faults of
//! it over. Each page has its bytes when the first access returns. The server can be killed, restarted and
//! replaced: a thread of this crate attaches to the next one, and an access that needs a page meanwhile
//! waits. Memory is private: bytes written to it stay in this process.
//!
//! With [`AttachOptions::share`], all programs that attach to one server map one memory file of it, and a
//! page is one page of memory for all of them until one writes to it.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::too_many_lines))]

mod error;
mod memory;
pub mod protocol;
mod wire;

pub use error::AttachError;
pub use memory::{AttachOptions, AttachedMemory, ServedBy};
pub use uzone_os::Mapping;
