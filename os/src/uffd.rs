//! Page faults as events: userfaultfd, with an interface that needs no `unsafe`.
//!
//! A [`Uffd`] is made for memory of this process, which is handed to it as a whole ([`Registered`]); a
//! [`Remote`] answers for memory of another process, which registered it. Both are read in batches
//! ([`EventBuffer`]), into a file that outlives the process if need be ([`EventLog`]), and both answer with [`Answered`], an outcome to act on.
//!
//! ```
//! use std::sync::Arc;
//! use uzone_os::uffd::{Answered, Features, Fill, Install, KernelFaults, Modes, Registered, Uffd};
//! use uzone_os::{Anonymous, Mapping, probe};
//! use uzone_pages::ByteLen;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let Ok(uffd) = Uffd::open(Features::NONE, Features::POISON, KernelFaults::IfAllowed) else {
//!     return Ok(()); // not on this host
//! };
//! let page = ByteLen::new(probe::page_size().bytes());
//! let memory = Mapping::anonymous(page, Anonymous::default())?;
//! let memory = Registered::new(Arc::new(uffd), memory, Modes::MISSING)?;
//! let bytes = vec![7; page.to_usize()?];
//! // No thread waits yet: a page can be installed before its first fault.
//! let answered = memory.install(0..page.get(), Fill::Bytes(&bytes), Install::default())?;
//! assert_eq!(answered, Answered::All);
//! let mut first = [0];
//! memory.mapping().read_at(0, &mut first)?;
//! assert_eq!(first, [7]);
//! # Ok(())
//! # }
//! ```
//!
//! [`Uffd::open`] negotiates the features, and its error names the missing ones.
//! Source: userfaultfd(2), ioctl_userfaultfd(2), "Userfaultfd" in the Linux administrator's guide.

pub(crate) mod abi;
mod bare;
mod descriptor;
mod error;
mod event;
mod event_set;
mod features;
mod handover;
pub mod in_thread;
mod install;
mod log;
mod message;
mod modes;
pub(crate) mod open;
mod pace;
mod pending_faults;
pub(crate) mod registered;
mod remote;
mod reply;
mod requests;
mod ring;
mod rooms;
mod wait;
pub mod write_states;

pub use bare::BareHandler;
pub use descriptor::{KernelFaults, Uffd};
pub use error::UffdError;
pub use event::EventBuffer;
pub use event_set::EventSet;
pub use features::Features;
pub use handover::Handover;
pub use install::{Fill, Install};
pub use log::{EventLog, LoggedEvents};
pub use message::{Event, FaultKind, PageFault};
pub use modes::Modes;
pub use pending_faults::{open_pending_faults, pending_faults};
pub use registered::Registered;
pub use remote::Remote;
pub use reply::{Answered, UffdCall};
pub use wait::{Doorbell, wait};
