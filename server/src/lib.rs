//! A page server: it restores virtual machines from images of their memory, page by page, as their faults
//! ask for them.
//!
//! A virtual machine monitor connects to a Unix socket and hands over a userfaultfd of the machine's memory;
//! from then on its faults are answered from the image. A machine whose page cannot be produced is ended,
//! unless [`OnFailure`] states otherwise: it never sees other bytes than those of the image.
//!
//! | file | mechanism |
//! |---|---|
//! | `handshake` | what a monitor sends, from bytes to regions |
//! | `socket` | the socket that monitors connect to |
//! | `server` | [`Server`]: accepting monitors, and the end of machines |
//! | `session` | one machine: its memory, and what becomes of it if a page fails |
//! | `error` | [`ServeError`] |
#![forbid(unsafe_code)]

mod error;
mod handshake;
mod server;
mod session;
mod socket;

pub use error::ServeError;
pub use handshake::{HandshakeError, regions};
pub use server::{Served, Server, ServerOptions};
pub use session::{OnFailure, SessionEvent};
