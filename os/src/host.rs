//! Facts about this kernel and this host, and the limits of this process.
//!
//! | file | mechanism |
//! |---|---|
//! | `root` | reading `/proc` and `/sys`, or a made-up tree |
//! | `kernel`, `probe` | the page size, the release, and which calls and features this kernel has |
//! | `memory` | the memory that this process may still take |
//! | `hugepages` | transparent huge pages and the hugetlb pools |
//! | `numa`, `mempolicy` | nodes and CPUs, keeping a thread to some, and the node of memory |
//! | `dax` | DAX devices and files on DAX mounts |
//! | `exit` | work at the end of a process |
//! | `files` | whether reads and writes of a file go where they belong, and reads of a failing device |
//! | `denied_calls` | a last line of a thread whose system call a filter denies |
//! | `inherited` | descriptors that this process was started with |
//! | `signals` | masks and actions of signals; those that end the process, held back or wanted with its parent's end |
//! | `thread` | its number and its page faults, and a thread that runs when no other wants to |

pub mod dax;
pub(crate) mod denied_calls;
pub(crate) mod exit;
pub(crate) mod files;
pub mod hugepages;
pub(crate) mod inherited;
pub(crate) mod kernel;
pub mod memory;
pub mod mempolicy;
pub mod numa;
pub mod probe;
pub(crate) mod root;
pub mod signals;
pub mod thread;
