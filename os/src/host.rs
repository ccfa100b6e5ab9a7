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
//! | `file_system` | the room in a directory, and files without a name |
//! | `exit` | work at the end of a process |
//! | `file_writes` | whether reads and writes of a file go where they belong |
//! | `privilege` | capabilities given up, and system calls that a filter denies |
//! | `signals` | masks and actions of signals; those that end the process, held back or wanted with its parent's end |
//! | `thread` | its number and its page faults, and a thread that runs when no other wants to |

pub mod dax;
pub mod descriptors;
pub(crate) mod exit;
pub mod file_system;
pub(crate) mod file_writes;
pub mod hugepages;
pub(crate) mod kernel;
pub mod memory;
pub mod mempolicy;
pub mod numa;
pub mod privilege;
pub mod probe;
pub(crate) mod root;
pub mod signals;
pub mod thread;
