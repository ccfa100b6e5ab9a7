//! A page server: it restores virtual machines from images of their memory, page by page, as their faults ask for them.
//!
//! A virtual machine monitor connects to a Unix socket and hands over a userfaultfd of the VM's memory; from then on its
//! faults are answered from the image. A VM whose page cannot be produced is ended, unless [`OnFailure`] states
//! otherwise: it never sees a byte that the image lacks.
//!
//! Two processes do it. The [`Keeper`] owns the socket and stores the messages of monitors. A [`Worker`] gets them from there,
//! parses them and answers faults; when it dies, the keeper starts the next one, which takes over all VMs. A VM notices a
//! pause and nothing else.
//!
//! | file | mechanism |
//! |---|---|
//! | `keeper` | [`Keeper`]: the one way in, accepting clients and storing them |
//! | `keeper/{accept, worker, room}` | its clients, its worker, and its limits |
//! | `keeper/poison` | refused VMs that the keeper cannot end: their pages raise SIGBUS |
//! | `keeper/store/{folder, systemd}` | records of VMs that outlive both processes |
//! | `machine` | a client and its states: arriving, offered, served |
//! | `messages`, `message_socket` | the messages between the two processes |
//! | `process` | the process of a client: found again, its memory, its end |
//! | `worker` | [`Worker`]: the VMs of one image, from the offer to their end |
//! | `worker/session` | one VM: its memory, and its end if a page fails |
//! | `worker/{protocol, firecracker}` | the message of a client, from bytes to regions |
//! | `worker/open_image` | the image, and the rights that a worker gives up |
//! | `worker/working_set` | the pages that VMs touched, recorded and read |
//! | `worker/huge`, `keeper/huge` | huge pages for VMs whose pages are small: found, and made |
//! | `sandbox`, `privilege`, `descriptors` | the rights and the limits of a worker |
//! | `socket`, `control`, `status`, `metrics` | the socket of monitors, the one for questions, and the answers |
//! | `live_diff/{session, pages}` | the memory of a VM at one moment, for an image of it |
//! | `cloud_hypervisor` | [`Offload`]: restoring VMs of Cloud Hypervisor, which asks for pages itself |
//! | `event`, `options`, `error` | [`ServeEvent`], [`ServerOptions`] and [`OnFailure`], [`ServeError`] |
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::too_many_lines))]

mod cloud_hypervisor;
mod control;
pub mod descriptors;
mod error;
mod event;
mod keeper;
mod live_diff;
mod machine;
mod message_socket;
mod messages;
mod metrics;
mod options;
pub mod privilege;
mod process;
mod sandbox;
mod socket;
mod status;
mod worker;

pub use cloud_hypervisor::{Offload, Offloaded};
pub use control::{control_path, drain, status};
pub use error::ServeError;
pub use event::{FailedKind, ServeEvent};
pub use keeper::store::systemd::{ServiceManager, SystemdDescriptors};
pub use keeper::{Keeper, Served};
pub use live_diff::pages::CapturedPages;
pub use live_diff::session::SessionMemory;
pub use metrics::{FailedPages, Totals};
pub use options::{OnFailure, Prefetch, Recover, ServerOptions};
pub use sandbox::{Sandbox, credential_files};
pub use status::{SessionStats, SessionStatus, Status};
pub use worker::firecracker::regions;
pub use worker::{Worker, WorkerStart};
