//! Writing the descriptors of a memmap by several threads.
//!
//! They are cut at multiples of a section of 2 MiB and shared out through a queue; a thread that fails or
//! panics stops the others. A section of
//! fresh memory is populated and then written with ordinary stores, while the lines that the kernel
//! has just cleared are in the cache; a section of kept memory is streamed past it. Of the region's
//! own memory it is not known whether it is present, so it is populated and then streamed.

use std::iter::Enumerate;
use std::num::NonZeroUsize;
use std::slice::ChunksMut;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use uzone_os::{lock, share_work};
use uzone_pages::{ByteLen, Payload, Template};
use uzone_stream::{CacheState, NextUse, Path, Work};

use crate::bind::init::{self, SECTION_BYTES};
use crate::bind::options::BindOptions;
use crate::clear::stores;
use crate::error::BindError;

/// A thread is started for every so many bytes of descriptors: some 200 microseconds of writing.
const BYTES_PER_THREAD: u64 = 8 << 20;

/// How many shares of the work there are for each thread.
const SHARES_PER_THREAD: usize = 8;

/// Memory that descriptors are to be written into.
pub(crate) struct Unwritten<'a> {
    pub(crate) bytes: &'a mut [u8],
    /// Whether the kernel clears it as it is written.
    pub(crate) is_fresh: bool,
    /// Whether all of it is known to be present.
    pub(crate) is_present: bool,
}

/// Writes all descriptors of a memmap into `memory`. Returns the stores of templates, if those were copied, and the
/// number of threads.
pub(crate) fn write<P: Payload>(
    template: &Template<P>,
    memory: Unwritten<'_>,
    len: ByteLen,
    options: &BindOptions<P>,
) -> Result<(Option<Path>, usize), BindError> {
    let Unwritten { bytes, is_fresh, is_present } = memory;
    let stamp = choose_stamp(template, options, len, is_fresh);
    let total = len.to_usize()?;
    let section = section_bytes(Template::<P>::DESCRIPTOR_BYTES);
    let sections = total.div_ceil(section);
    let threads = options.threads.unwrap_or_else(|| threads_for(len)).get().min(sections);
    // Small enough that no thread waits long for the last, large enough that the queue costs nothing.
    let share = sections.div_ceil(threads * SHARES_PER_THREAD) * section;
    let job = Job {
        template,
        stamp,
        is_present,
        options,
        section,
        share,
        queue: Mutex::new(bytes[..total].chunks_mut(share).enumerate()),
        done_bytes: AtomicU64::new(0),
        total: len,
    };
    let all = share_work("uzone-bind", threads, |is_stopped| job.work(is_stopped));
    let used = all.len();
    // A failure is more specific than that the caller cancelled.
    let mut errors: Vec<BindError> = all.into_iter().filter_map(Result::err).collect();
    let is_failure = |error: &BindError| !matches!(error, BindError::Cancelled { .. });
    match errors.iter().position(is_failure) {
        Some(first) => Err(errors.swap_remove(first)),
        None => errors.pop().map_or(Ok((stamp, used)), Err),
    }
}

/// The bytes of a section: whole descriptors, and whole cache lines.
fn section_bytes(size: usize) -> usize {
    let both = size * 64 / (1 << size.trailing_zeros().min(6));
    SECTION_BYTES / both * both
}

fn choose_stamp<P: Payload>(
    template: &Template<P>,
    options: &BindOptions<P>,
    len: ByteLen,
    is_fresh: bool,
) -> Option<Path> {
    // A listener has to hear of every page, so every page is set by itself. The first page's own
    // event is how a listener is found.
    let has_listener = init::report(template, 0, options.kind);
    if is_portable_build() || has_listener {
        return None;
    }
    if let Some(stamp) = options.stamp {
        return stamp;
    }
    // Fresh sections are written while the kernel's clearing has left them in the cache.
    let is_streaming = !is_fresh
        && len.to_usize().is_ok_and(|len| {
            !stores::policy().choose(Work::Fill, len, CacheState::Cold, NextUse::Later).is_cached()
        });
    Some(if is_streaming { uzone_stream::best() } else { Path::Portable })
}

/// Whether this build checks memory accesses, which streaming stores are invisible to.
const fn is_portable_build() -> bool {
    cfg!(miri) || cfg!(uzone_sanitizer)
}

fn threads_for(len: ByteLen) -> NonZeroUsize {
    let paid = usize::try_from(len.get() / BYTES_PER_THREAD).unwrap_or(usize::MAX);
    let cpus = uzone_os::numa::current_cpu_count().unwrap_or(1);
    NonZeroUsize::new(paid.min(cpus)).unwrap_or(NonZeroUsize::MIN)
}

/// Descriptors to be written by several threads, and how far they are.
struct Job<'a, 'mem, P: Payload> {
    template: &'a Template<P>,
    stamp: Option<Path>,
    is_present: bool,
    options: &'a BindOptions<P>,
    section: usize,
    share: usize,
    queue: Mutex<Enumerate<ChunksMut<'mem, u8>>>,
    done_bytes: AtomicU64,
    total: ByteLen,
}

impl<P: Payload> Job<'_, '_, P> {
    /// Writes shares until there is none left, or a thread fails.
    fn work(&self, is_stopped: &AtomicBool) -> Result<(), BindError> {
        loop {
            // The lock is held for the step to the next share alone.
            let next = lock(&self.queue).next();
            let Some((number, bytes)) = next else { return Ok(()) };
            let first = (number * (self.share / Template::<P>::DESCRIPTOR_BYTES)) as u64;
            self.write_share(first, bytes, is_stopped)
                // Relaxed: nothing is published by it, and a section later is early enough.
                .inspect_err(|_| is_stopped.store(true, Ordering::Relaxed))?;
        }
    }

    /// Writes the descriptors from `first` on into `bytes`.
    fn write_share(
        &self,
        mut first: u64,
        bytes: &mut [u8],
        is_stopped: &AtomicBool,
    ) -> Result<(), BindError> {
        for part in bytes.chunks_mut(self.section) {
            if is_stopped.load(Ordering::Relaxed) {
                return Ok(()); // the thread that stopped this one returns the reason
            }
            if self.options.cancel.load(Ordering::Relaxed) {
                // Relaxed, here and below: a number to report, nothing more.
                let done = ByteLen::new(self.done_bytes.load(Ordering::Relaxed));
                return Err(BindError::Cancelled { done, total: self.total });
            }
            if !self.is_present {
                uzone_os::populate_slice(part).map_err(BindError::Populate)?;
            }
            init::init(self.template, self.options.kind, self.stamp, first, part);
            first += (part.len() / Template::<P>::DESCRIPTOR_BYTES) as u64;
            let before = self.done_bytes.fetch_add(part.len() as u64, Ordering::Relaxed);
            let done = ByteLen::new(before + part.len() as u64);
            self.options.progress.call(done, self.total);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    /// check.sh sets the variable where it builds with a sanitizer.
    #[test]
    fn a_sanitizer_selects_the_slow_path_by_itself() {
        assert_eq!(cfg!(uzone_sanitizer), std::env::var_os("UZONE_SANITIZED").is_some());
        assert_eq!(super::is_portable_build(), cfg!(any(miri, uzone_sanitizer)));
    }
}
