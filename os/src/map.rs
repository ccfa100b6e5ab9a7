//! Memory of this process: [`Mapping`](crate::Mapping), an owned range of it, and operations on it.
//!
//! | file | mechanism |
//! |---|---|
//! | `mapping` | the range itself, the calls that read and write its bytes, and one as two |
//! | `create` | making one: anonymous, of a pool, of a memory file, of a file or device |
//! | `options` | the words for it: access, sharing, advice, addresses |
//! | `shortage` | reasons for a refusal, and remedies |
//! | `bytes` | copying in and out of memory that may change under us |
//! | `exclusive` | a mapping with no other writer, so that it has slices of bytes or of values |
//! | `populate` | making memory present, by several threads |
//! | `advise` | huge pages for mapped memory, giving pages back, bringing writes to a file |
//! | `resident` | the part of a mapping that is present, and in huge pages |
//! | `page_cache` | which pages of a file the page cache has |
//! | `pagemap_scan` | scanning the page tables, and which pages were written |
//! | `kernel_pins` | having the kernel itself pin a mapping, by an io_uring |
//! | `physical` | where the pages of a mapping lie in the memory of the machine |

pub(crate) mod advise;
pub(crate) mod bytes;
pub(crate) mod create;
pub(crate) mod exclusive;
pub(crate) mod kernel_pins;
pub(crate) mod mapping;
pub(crate) mod options;
pub mod page_cache;
pub mod pagemap_scan;
pub(crate) mod physical;
pub(crate) mod populate;
pub(crate) mod resident;
pub(crate) mod shortage;
