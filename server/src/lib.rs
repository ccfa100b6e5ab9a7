//! A page server: it restores virtual machines from images of their memory, page by page, as their faults
//! ask for them.
//!
//! A virtual machine monitor connects to a Unix socket and hands over a userfaultfd of the machine's memory;
//! from then on its faults are answered from the image. A machine whose page cannot be produced is ended,
//! unless [`OnFailure`] states otherwise: it never sees other bytes than those of the image.
//!
//! Two processes do it. The [`Keeper`] owns the socket and stores what monitors send. A [`Worker`] gets it
//! from there, parses it and answers faults; when it dies, the keeper starts the next one, which takes over
//! all machines. A machine notices a pause and nothing else.
//!
//! | file | mechanism |
//! |---|---|
//! | `keeper` | [`Keeper`]: accepting monitors, storing what they send, and starting workers |
//! | `worker` | [`Worker`]: the machines of one image, from the handover to their end |
//! | `connection` | what came by one connection |
//! | `takeover`, `estate` | how one keeper hands everything to the next, and what that is |
//! | `link` | the messages between the two |
//! | `socket` | the socket that monitors connect to |
//! | `dialect` | what came by a connection, from bytes to regions: a trait with a kind of client each |
//! | `session` | one machine: its memory, and what becomes of it if a page fails |
//! | `capture` | the memory of a machine as it is now, for an image of it |
//! | `offload` | [`Offload`]: restoring machines of Cloud Hypervisor, which asks for pages itself |
//! | `huge` | huge pages for machines whose pages are small |
//! | `sandbox` | what a worker may do |
//! | `manager` | [`ServiceManager`]: what a service manager keeps while no process of a server lives |
//! | `recovery`, `held_folder` | [`Recovery`]: what is kept in a folder, for a server without a service manager |
//! | `control`, `status` | asking a server what it does, and letting it end |
//! | `working_set` | the pages that machines touched, recorded and read |
//! | `event`, `options`, `error` | [`ServeEvent`], [`ServerOptions`] and [`OnFailure`], [`ServeError`] |
#![forbid(unsafe_code)]

mod capture;
mod connection;
mod control;
mod dialect;
mod error;
mod estate;
mod event;
mod held_folder;
mod huge;
mod keeper;
mod link;
mod manager;
mod offload;
mod options;
mod recovery;
mod sandbox;
mod session;
mod socket;
mod status;
mod takeover;
mod worker;
mod working_set;

pub use capture::{CapturedPages, NotProtected, SessionMemory};
pub use control::{control_path, drain, status};
pub use dialect::firecracker::regions;
pub use error::ServeError;
pub use estate::Estate;
pub use event::ServeEvent;
pub use keeper::{Keeper, Served};
pub use manager::{Passed, ServiceManager};
pub use offload::{Offload, Offloaded};
pub use options::{OnFailure, Prefetch, ServerOptions};
pub use recovery::Recovery;
pub use sandbox::{Sandbox, credential_files};
pub use status::{SessionStats, SessionStatus, Status};
pub use worker::{Worker, WorkerStart};
