//! The Linux system calls that uzone needs and std does not wrap, one file per mechanism.
//!
//! Nothing here decides a policy. A call takes typed lengths and borrowed descriptors, and answers with a
//! value, an outcome to act on, or an error that keeps the arguments of the call. No caller needs `unsafe`,
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
//! | folder | mechanism |
//! |---|---|
//! | `map` | [`Mapping`]: an owned range of memory of this process, how it is made, filled, read and measured |
//! | `sigbus` | SIGBUS as an event and an error instead of the end of the process |
//! | `uffd` | page faults as events, and the answers to them |
//! | `host` | facts about this kernel and this host: pages, nodes, limits, files |
//!
//! | file | mechanism |
//! |---|---|
//! | `driver` | [`Driver`]: the driver of an accelerator, loaded at run time, to register memory with |
//! | `peer` | the process at the other end of a socket, and the descriptors that go there and come from it |
//! | `live`, `live_ref` | [`LiveOwner`]: a value that guards keep in place, and the count of them |
#![cfg_attr(not(test), warn(clippy::too_many_lines))]

#[cfg(not(target_os = "linux"))]
compile_error!("uzone-os is the Linux layer of uzone: it has no port to another kernel");
#[cfg(not(target_pointer_width = "64"))]
compile_error!("uzone-os maps regions larger than a 32-bit address space");

mod driver;
mod host;
mod live;
mod live_ref;
mod map;
pub mod peer;
mod share_work;
pub mod sigbus;
mod sync;
pub mod uffd;

pub use driver::{Context, Driver, DriverError, Vendor, lock_memory};
pub use host::denied_calls::report_denied_calls;
pub use host::exit::at_exit;
pub use host::files::{check_file, read_exact_at};
pub use host::inherited::{close_inherited, passed_descriptors};
pub use host::root::{SysError, SystemRoot};
pub use host::thread::{thread_faults, thread_id};
pub use host::{dax, hugepages, memory, mempolicy, numa, probe, signals, thread};
pub use live::{Guards, LiveArc, LiveGuard, LiveOwner, PINS, REFERENCES};
pub use map::bytes::AccessError;
pub use map::create::memory_file;
pub use map::exclusive::{Exclusive, Exclusivity, Mapped};
pub use map::kernel_pins::{KernelPin, KernelPinError, KernelPins};
pub use map::mapping::{Mapping, MappingError, Rejected, leaked};
pub use map::options::{Access, Addr, Anonymous, HugeAdvice, Sharing, Vaddr};
pub use map::populate::populate_slice;
pub use map::shortage::MapError;
pub use map::{page_cache, pagemap_scan};
pub use share_work::{share_range, share_work};

/// Returns the message of an error with the messages of its causes, each of them once.
#[doc(hidden)]
#[must_use]
pub fn with_causes(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| cause.source());
    causes.fold(error.to_string(), |text, cause| {
        let cause = cause.to_string();
        if text.contains(&cause) { text } else { format!("{text}: {cause}") }
    })
}

/// Locks a mutex, also where a thread panicked that held it: its value is changed by single steps, and whole after each.
#[doc(hidden)]
pub fn lock<T>(mutex: &std::sync::Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
