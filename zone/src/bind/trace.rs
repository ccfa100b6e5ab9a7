//! The reference-set probe: a USDT probe that fires for every descriptor that gets its first
//! reference count, if a tracer listens.
//!
//! `perf probe`, `bpftrace` and `gdb` see it as `uzone:page_ref_set`, with the pfn and the count,
//! as Linux has the tracepoint of that name. A copied template never sets a count, so a listener
//! would miss every page: while one is attached, descriptors are initialised by the slow path.
//! Descriptors that are initialised on touch are never set, so no listener gets them. Whether
//! a listener is attached, is the value of the probe's semaphore, which the kernel raises for a listener; asking
//! costs one load.

use uzone_pages::Pfn;

/// Fires `uzone:page_ref_set`. Returns whether a tracer listens.
// Never inlined: each expansion of the probe would be a probe with a semaphore of its own.
#[inline(never)]
pub(crate) fn page_ref_set(pfn: Pfn, references: u32) -> bool {
    probe::probe_lazy!(uzone, page_ref_set, pfn.get(), references)
}
