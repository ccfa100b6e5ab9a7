//! Making memory present before it is touched: [`Mapping::populate`], [`Mapping::populate_with`],
//! [`populate_slice`].
//!
//! A first touch of a small page costs an exception and 1.5 us; asking for a range costs half of
//! that, and several threads share it. The work is cut into chunks of 64 MiB at multiples of that
//! address, so that no huge page is asked for twice and a cancellation is answered within one.
//!
//! Starting a thread maps its stack, and mapping waits for every populate that is under way. So all
//! threads are started, and have run, before the first of them asks for memory.
//!
//! Units: ranges are bytes from the start of the mapping, widened to whole pages.
//! Unsafe: one call of madvise(2), for the advice that changes no byte.
//! Source: madvise(2), MADV_POPULATE_READ and MADV_POPULATE_WRITE.

use core::ops::Range;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::num::NonZeroUsize;
use std::sync::{PoisonError, RwLock, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::mm::Advice;
use uzone_pages::ByteLen;

use crate::host::kernel;
use crate::host::numa;
use crate::map::bytes::AccessError;
use crate::map::mapping::Mapping;
use crate::map::mapping::MappingError;
use crate::map::options::Access;

/// How much one call of the kernel is asked for.
const CHUNK: usize = 64 << 20;

/// The same for a request with a deadline.
const TIMED_CHUNK: usize = 8 << 20;

/// How often a chunk that the kernel interrupted is asked for again.
const TRIES: u32 = 1000;

/// The outcome of a request that did not fail: the first `done` bytes are present. If those are not
/// all, the caller cancelled it, or its time was up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "a cancelled request leaves memory that is not present"]
pub struct Populated {
    /// How many bytes are present, in whole pages.
    pub done: ByteLen,
    /// How many there are in all, in whole pages.
    pub of: ByteLen,
    /// Whether the time was up before all were.
    pub is_expired: bool,
}

/// How a range is to be made present.
#[derive(Clone, Copy)]
pub struct PopulateHow<'a> {
    /// How many threads there are at least; of nodes, each gets as many as the others.
    pub threads: NonZeroUsize,
    /// For each node the CPUs that its threads keep to; without nodes, threads run anywhere. Idle threads
    /// take chunks in ascending order, so the range is spread over the nodes.
    pub nodes: &'a [Vec<u32>],
    /// When no chunk is begun any more.
    pub deadline: Option<Instant>,
    /// How much the kernel is asked for at a time at most; of a page that is larger, one page.
    pub chunk: Option<ByteLen>,
    /// Called by each thread before it begins a chunk, with the length of that. After it returns `false`,
    /// no chunk is begun, and the request counts as cancelled.
    pub may_begin: Option<&'a (dyn Fn(ByteLen) -> bool + Sync)>,
    /// Called by each thread when a chunk is present: its bytes, and how long the kernel took.
    pub on_chunk: Option<&'a (dyn Fn(Range<u64>, Duration) + Sync)>,
}

/// Returns the error for a range that was not made present.
fn failed(range: Range<usize>, cause: Errno) -> MappingError {
    let range = range.start as u64..range.end as u64;
    MappingError::Populate { range, done: ByteLen::ZERO, cause: cause.into() }
}

/// Returns the error with how much is present after all.
fn after(mut error: MappingError, all: ByteLen) -> MappingError {
    if let MappingError::Populate { done, .. } = &mut error {
        *done = all;
    }
    error
}

/// Returns the part of `range` between the `index`-th and the next multiple of `size`, counted from
/// the one at or before its start, or `None` behind the end. `base` is the address of byte 0.
///
/// `size` is a power of two.
fn chunk(base: usize, range: &Range<usize>, size: usize, index: usize) -> Option<Range<usize>> {
    let first = (base + range.start) & !(size - 1);
    let start = first.checked_add(index.checked_mul(size)?)?;
    let end = start.checked_add(size)?;
    let part = start.saturating_sub(base).max(range.start)..(end - base).min(range.end);
    (!part.is_empty()).then_some(part)
}

impl Mapping {
    /// Makes a range present, on this thread, and returns how many bytes that were, in whole pages.
    /// No byte changes. A writable mapping gets pages that can be written without another fault.
    ///
    /// # Errors
    /// [`MappingError`] names the exhausted resource, and how much is present.
    pub fn populate(&self, range: Range<u64>) -> Result<ByteLen, MappingError> {
        let range = self.widen(&range)?;
        let mut done = 0;
        for index in 0.. {
            let size = self.chunk_size(CHUNK);
            let Some(part) = chunk(self.addr().get(), &range, size, index) else {
                break;
            };
            let bytes = part.len() as u64;
            self.populate_chunk(part).map_err(|error| after(error, ByteLen::new(done)))?;
            done += bytes;
        }
        Ok(ByteLen::new(done))
    }

    /// Makes a range present by several threads, and returns when they are gone.
    ///
    /// `progress` is called on this thread with the bytes that are present and the bytes in all,
    /// after each chunk, in ascending order. Storing `true` to `cancel` stops the work: chunks
    /// that were begun are finished, at most one a thread, of 8 MiB where there is a deadline.
    ///
    /// # Errors
    /// [`MappingError`] names the exhausted resource, and how much is present;
    /// [`MappingError::Sys`] that a thread may not run where it should, before anything is present.
    pub fn populate_with(
        &self,
        range: Range<u64>,
        how: PopulateHow<'_>,
        progress: impl FnMut(ByteLen, ByteLen),
        cancel: &AtomicBool,
    ) -> Result<Populated, MappingError> {
        let range = self.widen(&range)?;
        let of = ByteLen::new(range.len() as u64);
        let most = if how.deadline.is_some() { TIMED_CHUNK } else { CHUNK };
        let wanted = how.chunk.and_then(|chunk| usize::try_from(chunk.get()).ok());
        // A power of two, which chunks meet at; and no less than a page of the host.
        let floor = |bytes: usize| 1_usize << bytes.max(1 << 16).ilog2();
        let size = self.chunk_size(wanted.map_or(most, |wanted| floor(wanted).min(most)));
        let chunks = range.len() / size + 2;
        let nodes = how.nodes.len().max(1);
        // No more threads than chunks, and as many for each node as for the others.
        let most = chunks.max(nodes);
        let asked = how.threads.get().min(most).next_multiple_of(nodes).min(most);
        // Each thread sends `Ok(0)` first, then how many bytes each chunk has.
        let (send, receive) = mpsc::channel();
        let work = &Work {
            mapping: self,
            range,
            size,
            how,
            cancel,
            gate: RwLock::new(false),
            next: AtomicUsize::new(0),
            failed: AtomicBool::new(false),
        };
        thread::scope(|scope| {
            // Moved in, so that a panic of `progress` drops it and the threads stop.
            let receive = receive;
            let mut closed = work.gate.write().unwrap_or_else(PoisonError::into_inner);
            for started in 0..asked {
                let send = send.clone();
                let spawned = thread::Builder::new()
                    .name(format!("populate-{started}"))
                    .spawn_scoped(scope, move || work.run(started, &send));
                if let Err(cause) = spawned {
                    return Err(MappingError::Threads { asked, started, cause });
                }
            }
            drop(send);
            for _ in 0..asked {
                match receive.recv() {
                    // The gate stays `false`, which ends the other threads.
                    Ok(Err(error)) => return Err(error),
                    Ok(Ok(_)) => {}
                    // One is gone already.
                    Err(_) => break,
                }
            }
            *closed = true;
            drop(closed);
            work.collect(of, receive, progress)
        })
    }

    /// Returns how much is populated at once: the chunk, or one page where pages are larger.
    fn chunk_size(&self, chunk: usize) -> usize {
        usize::try_from(self.page_size().bytes()).map_or(chunk, |page| page.max(chunk))
    }

    /// Makes whole pages present. `part` is inside the mapping and starts and ends at pages.
    fn populate_chunk(&self, part: Range<usize>) -> Result<(), MappingError> {
        let is_writable = self.access() == Access::ReadWrite;
        let advice =
            if is_writable { Advice::LinuxPopulateWrite } else { Advice::LinuxPopulateRead };
        let start = self.at(part.start);
        ask(start, part.len(), advice).map_err(|cause| failed(part, cause))
    }
}

/// A range that several threads make present.
struct Work<'a> {
    mapping: &'a Mapping,
    range: Range<usize>,
    size: usize,
    how: PopulateHow<'a>,
    cancel: &'a AtomicBool,
    /// Whether the threads are to begin. Written once, before it is opened.
    gate: RwLock<bool>,
    next: AtomicUsize,
    failed: AtomicBool,
}

impl Work<'_> {
    fn is_late(&self) -> bool {
        self.how.deadline.is_some_and(|deadline| Instant::now() >= deadline)
    }

    /// Populates chunks until there are none, as the thread of this number.
    fn run(&self, number: usize, send: &mpsc::Sender<Result<u64, MappingError>>) {
        let kept = match self.how.nodes.get(number % self.how.nodes.len().max(1)) {
            Some(cpus) => numa::keep_thread_to(cpus),
            None => Ok(()),
        };
        let arrived = kept.map(|()| 0).map_err(MappingError::Sys);
        // A thread that cannot report, or runs on the wrong CPUs, does not work.
        if send.send(arrived).is_err() {
            return;
        }
        // A gate is poisoned if its owner panicked: it is `false` then.
        if !*self.gate.read().unwrap_or_else(PoisonError::into_inner) {
            return;
        }
        // Relaxed: the flags only end the loop, and are seen one chunk later at the latest; the
        // number of the next chunk has to be unique and publishes nothing. The populated part
        // is published by the channel and by the end of the thread.
        while !self.cancel.load(Ordering::Relaxed) && !self.failed.load(Ordering::Relaxed) {
            if self.is_late() {
                return;
            }
            // Called before a number is drawn, so that every number drawn is populated.
            let next_len = ByteLen::new(self.size as u64);
            if self.how.may_begin.is_some_and(|may_begin| !may_begin(next_len)) {
                self.failed.store(true, Ordering::Relaxed);
                return;
            }
            let index = self.next.fetch_add(1, Ordering::Relaxed);
            let base = self.mapping.addr().get();
            let Some(part) = chunk(base, &self.range, self.size, index) else { return };
            let bytes = part.start as u64..part.end as u64;
            let started = Instant::now();
            let populated = self.mapping.populate_chunk(part);
            match (&populated, self.how.on_chunk) {
                (Ok(()), Some(on_chunk)) => on_chunk(bytes.clone(), started.elapsed()),
                (Ok(()), None) => {}
                (Err(_), _) => self.failed.store(true, Ordering::Relaxed),
            }
            let populated = populated.map(|()| bytes.end - bytes.start);
            if send.send(populated).is_err() {
                return;
            }
        }
    }

    /// Reports the progress of the threads until they end, and returns the outcome of the request.
    fn collect(
        &self,
        of: ByteLen,
        receive: mpsc::Receiver<Result<u64, MappingError>>,
        mut progress: impl FnMut(ByteLen, ByteLen),
    ) -> Result<Populated, MappingError> {
        let mut done = 0;
        let mut failure = None;
        for populated in receive {
            match populated {
                Ok(bytes) => {
                    done += bytes;
                    progress(ByteLen::new(done), of);
                }
                Err(error) => failure = failure.or(Some(error)),
            }
        }
        let done = ByteLen::new(done);
        if let Some(error) = failure {
            return Err(after(error, done));
        }
        // Chunks are taken in ascending order and each one taken was finished, so the present part
        // is the first part of the range. Relaxed, as above. A late cancel still counts as one.
        let is_expired = done != of && self.is_late() && !self.cancel.load(Ordering::Relaxed);
        Ok(Populated { done, of, is_expired })
    }
}

/// Asks for the pages of `len` bytes from `start`, which starts a page.
fn ask(start: NonNull<u8>, len: usize, advice: Advice) -> Result<(), Errno> {
    let mut last = Errno::AGAIN;
    for _ in 0..TRIES {
        // SAFETY: madvise(2) acts on `len` bytes from `start`. Both advices given here, populating
        // for reading and for writing, make pages present and change no byte that could have been
        // read; where nothing is mapped they answer ENOMEM. So any address is sound.
        let answer = unsafe { rustix::mm::madvise(start.as_ptr().cast(), len, advice) };
        match answer {
            Err(cause @ (Errno::AGAIN | Errno::INTR)) => last = cause,
            answer => return answer,
        }
        thread::yield_now();
    }
    Err(last)
}

/// Makes the pages present that `bytes` lie in, to be written without a fault. No byte changes.
///
/// It is for a part of memory that several threads were given to initialise, each its own: asking
/// for a part and writing it while it is in the cache is faster than asking for all first.
///
/// # Errors
/// [`MappingError`] names the exhausted resource; its offsets count from the start of `bytes`.
pub fn populate_slice(bytes: &mut [u8]) -> Result<(), MappingError> {
    let len = bytes.len();
    let page = usize::try_from(kernel::page_size().bytes()).unwrap_or(4096);
    let Some(first) = bytes.first_mut() else {
        return Err(AccessError::Empty { start: 0, end: 0 }.into());
    };
    let first = NonNull::from(first);
    let skipped = first.addr().get() % page;
    // Wrapping down to the start of a page: the kernel gets the address, and nothing is read by it.
    let start = first.as_ptr().wrapping_sub(skipped);
    let Some(start) = NonNull::new(start) else {
        return Err(AccessError::Empty { start: 0, end: 0 }.into());
    };
    ask(start, skipped + len, Advice::LinuxPopulateWrite).map_err(|cause| failed(0..len, cause))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_cover_the_range_once_and_meet_at_multiples_of_their_size() {
        const MIB: usize = 1 << 20;
        for (base, start, end) in [
            (0x7f00_0000_0000, 0, 64 * MIB),
            (0x7f00_0000_0000, 0, 1),
            (0x7f00_0000_1000, 0, 200 * MIB),
            (0x7f00_0000_1000, 4096, 8192),
            (0x7f00_03ff_f000, 0, 4096),
            (0x7f00_03ff_f000, 0, 8192),
            (0x7f00_03ff_f000, 4096, 8192),
            (0x7f00_0020_0000, 63 * MIB, 129 * MIB),
        ] {
            let mut at = start;
            let mut index = 0;
            while let Some(part) = chunk(base, &(start..end), CHUNK, index) {
                assert_eq!(part.start, at, "no gap and no overlap");
                assert!(part.len() <= CHUNK);
                assert!(part.start == start || (base + part.start) % CHUNK == 0);
                at = part.end;
                index += 1;
            }
            assert_eq!(at, end, "{base:#x} {start:#x}..{end:#x}");
            assert_eq!(chunk(base, &(start..end), CHUNK, index + 1), None);
            assert_eq!(chunk(base, &(start..end), CHUNK, usize::MAX), None);
        }
    }
}
