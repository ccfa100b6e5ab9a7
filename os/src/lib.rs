//! The Linux system calls that uzone needs and std does not wrap, one file per mechanism.
//!
//! Nothing here decides a policy. A call takes typed lengths and borrowed descriptors, and answers with a
//! value, an outcome to act on, or an error that keeps what the call was given. No caller needs `unsafe`,
//! except to vouch for memory that is shared: [`Mapping::adopt`], [`Exclusivity::assert`].
//!
//! ```
//! use uzone_os::{Anonymous, Exclusive, HugeAdvice, Mapped};
//! use uzone_pages::ByteLen;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let how = Anonymous { huge: HugeAdvice::Advise, ..Anonymous::default() };
//! let mut memory = Exclusive::anonymous(ByteLen::mib(4), how)?;
//! memory.populate(0..ByteLen::mib(4).get())?;
//! assert_eq!(memory.resident()?, ByteLen::mib(4));
//!
//! let mut counters = Mapped::<u64>::try_new(memory, 1000)?;
//! counters[999] += 1;
//! # Ok(())
//! # }
//! ```
//!
//! | file | mechanism |
//! |---|---|
//! | `mapping` | [`Mapping`]: an owned range of memory of this process |
//! | `mapping/cut` | one mapping as two, and two as one again |
//! | `create` | making one: anonymous, of a pool, of a memory file, of a file or device |
//! | `kernel` | the page size and the release, and which advices there are |
//! | `dax`, `map_dax` | DAX devices and files on DAX mounts: what they are, and mapping them |
//! | `options` | the words for it: access, sharing, advice, addresses |
//! | `bytes` | copying in and out of memory that may change under us |
//! | `bus` | SIGBUS as an event and an error instead of the end of the process |
//! | `exclusive` | [`Exclusive`]: a mapping with no other writer, so that it has slices |
//! | `mapped` | [`Mapped`]: an owned `[T]` in such memory |
//! | `live` | [`LiveOwner`]: a value that guards keep in place, counted once |
//! | `file_writes` | whether reads and writes of a file go where they belong |
//! | `file_system` | the room in a directory, and files without a name |
//! | `page_cache` | which pages of a file the page cache has |
//! | `pagemap_scan`, `write_scan` | scanning the page tables, and which pages were written |
//! | `populate` | making memory present, by several threads |
//! | `advise` | huge pages for what is mapped already, and giving pages back |
//! | `fixed_buffers` | having the kernel itself pin a mapping, by an io_uring |
//! | `resident` | how much of a mapping is present, and in huge pages |
//! | `shortage` | why a mapping was refused, and what would help |
//! | `memory` | how much memory this process may still take |
//! | `hugepages` | transparent huge pages and the hugetlb pools |
//! | `numa` | nodes and CPUs, and keeping a thread to some |
//! | `priority` | a thread that runs when no other wants to |
//! | `privilege` | capabilities given up, and system calls that a filter denies |
//! | `signals` | signals that end the process: held back, or wanted with its parent's end |
//! | `unix_socket` | messages between two processes, and descriptors with them; a socket to connect to |
//! | `passed` | descriptors that a service manager passes to a program |
//! | `peer` | the process at the other end of a socket, and the descriptors that it sends |
//! | `libpmem` | clearing and copying by libpmem, for benchmarks |
//! | `probe` | what this kernel offers |
//! | `uffd` | page faults as events, and the answers to them |
//! | `usage` | page faults that the kernel counts |
//! | `root` | reading `/proc` and `/sys`, or a made-up tree |
//! | `errno` | the meaning of an errno that several calls share |

#[cfg(not(target_os = "linux"))]
compile_error!("uzone-os is the Linux layer of uzone: it has no port to another kernel");
#[cfg(not(target_pointer_width = "64"))]
compile_error!("uzone-os maps regions larger than a 32-bit address space");

mod advise;
pub mod bus;
mod bytes;
mod create;
pub mod dax;
mod errno;
mod exclusive;
pub mod file_system;
mod file_writes;
pub mod fixed_buffers;
pub mod hugepages;
mod kernel;
mod libpmem;
mod live;
mod map_dax;
mod mapped;
mod mapping;
pub mod memory;
pub mod mempolicy;
mod msync;
pub mod numa;
mod options;
pub mod page_cache;
mod pagemap_scan;
mod passed;
pub mod peer;
mod populate;
pub mod priority;
pub mod privilege;
pub mod probe;
mod resident;
mod root;
mod shortage;
pub mod signals;
mod sync;
pub mod uffd;
pub mod unix_socket;
mod usage;
mod write_scan;

pub use advise::Collapsed;
pub use bytes::AccessError;
pub use dax::DaxDevice;
pub use exclusive::{Exclusive, Exclusivity};
pub use file_writes::{check_readable, check_writable};
pub use fixed_buffers::FixedBuffers;
pub use hugepages::HugeSize;
pub use libpmem::LibPmem;
pub use live::{LiveArc, LiveGuard, LiveOwner, PINS, REFERENCES};
pub use mapped::Mapped;
pub use mapping::{FileId, Mapping, MappingError, Rejected, leaked};
pub use options::{Access, Addr, Anonymous, HugeAdvice, Sharing, Vaddr};
pub use passed::{memory_file, passed_descriptors};
pub use populate::{PopulateHow, Populated, populate_slice};
pub use priority::thread_id;
pub use root::{SysError, SystemRoot};
pub use shortage::{MapError, Shortage};
pub use unix_socket::MessageSocket;
pub use usage::thread_faults;
pub use write_scan::WriteScan;
