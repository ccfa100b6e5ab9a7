//! Other processes: their sockets, their descriptors, and their identity.
//!
//! | file | mechanism |
//! |---|---|
//! | `unix_socket` | messages between two processes, and descriptors with them; a socket to connect to |
//! | `passed` | descriptors that a service manager passes to a program |
//! | `peer` | the process at the other end of a socket, and the descriptors that it sends |

pub(crate) mod passed;
pub mod peer;
pub mod unix_socket;
