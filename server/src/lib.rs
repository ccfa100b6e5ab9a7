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
//! | `keeper/{arrivals, workers, kept}` | its connections, its worker, and what it has others keep |
//! | `keeper/manager` | [`ServiceManager`]: what a service manager keeps while no process of a server lives |
//! | `keeper/{recovery, held_folder}` | [`Recovery`]: what is kept in a folder, for a server without a service manager |
//! | `keeper/{estate, takeover}` | what one keeper has for the next, and how it hands that over |
//! | `worker` | [`Worker`]: the machines of one image, from the handover to their end |
//! | `worker/session` | one machine: its memory, and what becomes of it if a page fails |
//! | `worker/dialect` | what came by a connection, from bytes to regions |
//! | `worker/working_set` | the pages that machines touched, recorded and read |
//! | `worker/huge`, `keeper/huge` | huge pages for machines whose pages are small: found, and made |
//! | `link`, `connection` | the messages between the two, and what came by one connection |
//! | `sandbox` | what a worker may do |
//! | `totals` | [`Totals`]: what was done by all processes of a server |
//! | `socket`, `control`, `status` | the socket that monitors connect to, and the one for questions |
//! | `capture`, `capture/pages` | the memory of a machine as it is now, for an image of it, and its pages |
//! | `offload` | [`Offload`]: restoring machines of Cloud Hypervisor, which asks for pages itself |
//! | `event`, `options`, `error` | [`ServeEvent`], [`ServerOptions`] and [`OnFailure`], [`ServeError`] |
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::too_many_lines))]

mod capture;
mod connection;
mod control;
mod error;
mod event;
mod keeper;
mod link;
mod offload;
mod options;
mod sandbox;
mod socket;
mod status;
mod totals;
mod worker;

pub use capture::{CapturedPages, SessionMemory};
pub use control::{control_path, drain, status};
pub use error::ServeError;
pub use event::ServeEvent;
pub use keeper::estate::Estate;
pub use keeper::manager::{Passed, ServiceManager};
pub use keeper::recovery::Recovery;
pub use keeper::{Keeper, Served};
pub use offload::{Offload, Offloaded};
pub use options::{OnFailure, Prefetch, ServerOptions};
pub use sandbox::{Sandbox, credential_files};
pub use status::{SessionStats, SessionStatus, Status};
pub use totals::Totals;
pub use worker::dialect::firecracker::regions;
pub use worker::{Worker, WorkerStart};
