//! The threads that fill a pool: one has memory populated ahead, by threads of its own, and one registers behind it, piece
//! by piece.
//!
//! A driver holds its lock while it registers, and that lock is not fair: a thread that registers piece after piece
//! keeps it. So the registering thread pauses behind each piece, as long as other threads of the process, and other
//! processes of the host, need to get on ([`pause_after`]). Waiting for memory counts as a pause.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use uzone_os::{SystemRoot, numa};
use uzone_pages::ByteLen;
use uzone_zone::{Huge, PopulateOptions};

use crate::error::HostPoolError;
use crate::inner::{Call, Inner};
use crate::options::{Pages, Place, Progress};
use crate::pieces::{Pieces, pause_after};

/// How much each thread populates at a time: a huge page. The driver maps memory of its own at each registration, for which
/// the kernel waits until no thread is in a call that populates. A fault of a huge page is no such call, so each chunk is
/// touched first: on 16 CPUs, 64 GiB were ready in 2.2 s, and in 3.2 s by calls alone.
const CHUNK: ByteLen = ByteLen::mib(2);

/// Populates all of the pool.
pub(crate) fn populate(inner: &Arc<Inner>) {
    let started = Instant::now();
    let present = Arc::downgrade(inner);
    let mut options = PopulateOptions::default()
        .huge(match inner.options.pages {
            Pages::Transparent => Huge::Watched,
            // The process that owns a memory file chooses its pages.
            Pages::Small if inner.is_attached() => Huge::Preferred,
            Pages::Small => Huge::Never,
            Pages::Hugetlb(_) => Huge::Preferred,
        })
        .chunk(CHUNK)
        .background()
        .spare(inner.options.spare_percent)
        .cancel(inner.cancel.clone())
        .on_present(move |part| {
            if let Some(inner) = present.upgrade() {
                inner.note_present(part);
            }
        });
    if let Place::Node(node) = inner.options.place
        && has_cpus(node)
    {
        options = options.node(node);
    }
    let answer = inner.region().populate(0..inner.region().len().get(), &options);
    match answer {
        Ok(report) => {
            let mut sets = inner.sets();
            sets.progress.populating = started.elapsed().min(report.elapsed);
            sets.progress.populated = Some(report);
            drop(sets);
            inner.filled.notify_all(); // for `counted`
        }
        Err(error) => inner.fail(HostPoolError::Populate(Arc::new(error))),
    }
}

/// Returns whether this process has CPUs of a node. One of memory alone, such as CXL's, is populated by any CPU.
fn has_cpus(node: u32) -> bool {
    let nodes = numa::nodes(&SystemRoot::host()).unwrap_or_default();
    let cpus = nodes.into_iter().find(|it| it.number == node).map(|node| numa::usable(node.cpus));
    cpus.is_none_or(|cpus| cpus.map_or(true, |mut cpus| cpus.next().is_some()))
}

/// Registers the pool behind the threads that populate it, and hands its blocks out.
pub(crate) fn register(inner: &Inner, pieces: Pieces) {
    let Err(failure) = register_all(inner, pieces) else { return };
    if !matches!(failure, HostPoolError::Closed) {
        inner.fail(failure);
    }
    if inner.options.is_all_or_nothing {
        let (left, cause) = inner.unregister_all();
        if let Some(cause) = cause {
            inner.note_stuck(left, &*cause);
        }
    }
}

fn register_all(inner: &Inner, pieces: Pieces) -> Result<(), HostPoolError> {
    let mut earliest = Instant::now();
    for blocks in pieces {
        if !inner.wait_present(&blocks) {
            return Err(HostPoolError::Closed); // or failed, which is noted
        }
        if inner.register.is_some() {
            inner.sleep_until(earliest);
        }
        let took = inner.register_blocks(blocks.clone())?;
        earliest = Instant::now() + pause_after(took, inner.options.pause);
        if !inner.options.is_all_or_nothing {
            hand_out(inner, &blocks);
        }
        if let Some(Progress(progress)) = &inner.options.progress {
            progress(inner.len_of(blocks.end), inner.len_of(inner.blocks));
        }
    }
    if inner.options.is_all_or_nothing {
        hand_out(inner, &(0..inner.blocks));
    }
    Ok(())
}

fn hand_out(inner: &Inner, blocks: &Range<usize>) {
    inner.note_ready(blocks);
    uzone_pages::restock(&Call { inner, until: None }, blocks.start, blocks.len());
}

/// Returns the deadline of a caller who waits this long; none is for ever.
pub(crate) fn deadline(within: Duration) -> Option<Instant> {
    Instant::now().checked_add(within)
}
