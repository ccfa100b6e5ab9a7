//! The second half: the image is mapped lazily, every page is touched, and every byte compared.

use std::hash::{DefaultHasher, Hasher};
use std::num::NonZeroUsize;
use std::ops::Range;
use std::time::{Duration, Instant};

use indicatif::HumanCount;
use serde::Serialize;
use uzone_fault::{AdoptedMemory, Engine, LazyOptions};
use uzone_harness::{Adopted, machine};
use uzone_os::signals::Held;
use uzone_os::{probe, sigbus};
use uzone_pages::ByteLen;
use uzone_report::{Trace, nanoseconds};

use super::image::{CHUNK, Image, ImageFacts, unread};
use super::plan::Plan;
use super::steps::{self, Steps};
use crate::exit::Failure;
use crate::output::Output;
use crate::progress::Progress;

/// The trace keeps this many of the last faults; one takes 56 bytes.
const TRACED: usize = 1 << 17;
/// A page that its device does not bring in this time is given up.
const DEADLINE: Duration = Duration::from_secs(60);
/// A fault is recorded after its answer, within this time.
const RECORDED_WITHIN: Duration = Duration::from_secs(1);
/// Progress is shown after so many pages.
const STEP: u64 = 4096;

/// What came of touching it.
#[derive(Debug, Serialize)]
pub(super) struct TouchFacts {
    pub(super) pages: u64,
    /// How often the reader had to wait.
    pub(super) faults: u64,
    /// Pages that came along with those that were waited for.
    pub(super) pages_around: u64,
    pub(super) in_order_bytes: u64,
    pub(super) in_order_ns: u64,
    pub(super) scattered_ns: u64,
    pub(super) hash: String,
    pub(super) hash_ns: u64,
    pub(super) first_difference_bytes: Option<u64>,
}

impl TouchFacts {
    pub(super) fn is_right(&self, image: &ImageFacts) -> bool {
        self.first_difference_bytes.is_none() && self.hash == image.hash
    }
}

/// What came of mapping the image lazily.
pub(super) struct Lazy {
    pub(super) touch: TouchFacts,
    pub(super) trace: Trace,
    pub(super) engine: Engine,
}

/// Maps the image lazily, touches all of it, and compares what was read with what was written.
pub(super) fn run(
    plan: &Plan,
    image: &Image,
    steps: &mut Steps,
    out: &Output,
) -> Result<Lazy, Failure> {
    let engine = engine(out)?;
    let page = probe::page_size();
    let pages = plan.size.get() >> page.shift();

    let started = Instant::now();
    let file = image.file.try_clone().map_err(unread)?;
    let options = LazyOptions::default().trace(TRACED).deadline(DEADLINE);
    let memory = Adopted::file(&engine, file, plan.size, &options)?;
    let what = format!("the image lazily; none of its {} pages is read", HumanCount(pages));
    steps.done("map", started, what);

    let touched = touch(&memory, plan, out)?;
    let answering = memory.answering();
    wait_for_records(answering);
    let (stats, latencies, (records, lost)) =
        (answering.stats(), answering.latencies(), answering.take_trace());
    let what = format!(
        "every page, in order, the last ones here and there; the reader waited {} times",
        HumanCount(stats.faults)
    );
    steps.took("touch", touched.in_order_ns.saturating_add(touched.scattered_ns), what);

    let checked = check(&memory, plan.size, image, out)?;
    let wrong_page = touched.wrong_page.map(|number| number << page.shift());
    let what = checked.what(&image.facts, plan.size, wrong_page);
    steps.took("check", checked.elapsed_ns, what);
    drop(memory);

    let trace = Trace::new(machine::here(), page, plan.size, &records, lost, &latencies);
    let touch = TouchFacts {
        pages,
        faults: stats.faults,
        pages_around: stats.around,
        in_order_bytes: plan.in_order().get(),
        in_order_ns: touched.in_order_ns,
        scattered_ns: touched.scattered_ns,
        hash: checked.hash,
        hash_ns: checked.elapsed_ns,
        first_difference_bytes: checked.first_difference.or(wrong_page),
    };
    Ok(Lazy { touch, trace, engine })
}

/// What came of touching each page once.
struct Touched {
    in_order_ns: u64,
    scattered_ns: u64,
    /// The first page that does not start with its number.
    wrong_page: Option<u64>,
}

/// Reads the number that each page starts with, in order and then here and there.
fn touch(memory: &Adopted, plan: &Plan, out: &Output) -> Result<Touched, Failure> {
    let shift = probe::page_size().shift();
    let pages = plan.size.get() >> shift;
    let in_order = 0..(plan.in_order().get() >> shift).min(pages);
    let scattered = scattered(in_order.end..pages);
    let progress = Progress::new(out, "touching every page of the image", pages);
    let (mut wrong_page, mut done) = (None, 0);
    let mut look = |number: u64| -> Result<(), Failure> {
        let mut word = [0; 8];
        read(memory, number << shift, &mut word)?;
        if u64::from_le_bytes(word) != number {
            wrong_page.get_or_insert(number);
        }
        done += 1;
        if done % STEP == 0 {
            progress.set(done);
        }
        Ok(())
    };
    let started = Instant::now();
    in_order.into_iter().try_for_each(&mut look)?;
    let in_order_ns = nanoseconds(started.elapsed());
    let started = Instant::now();
    scattered.into_iter().try_for_each(&mut look)?;
    Ok(Touched { in_order_ns, scattered_ns: nanoseconds(started.elapsed()), wrong_page })
}

/// Starts the engine. No error of memory is one of this process any more, where that can be had.
fn engine(out: &Output) -> Result<Engine, Failure> {
    if let Err(error) = sigbus::install() {
        // Only a page that cannot be had makes a difference: its SIGBUS ends the demo.
        out.log(format_args!("errors of memory are not caught: {error}"));
    }
    // Threads of the engine may outlive it for a moment. With these signals blocked in them, Ctrl-C
    // cannot end the process through one of them while a file is being written.
    let _held = Held::hold();
    Ok(Engine::new(NonZeroUsize::MIN.saturating_add(1))?)
}

/// What came of reading all bytes.
struct Checked {
    hash: String,
    elapsed_ns: u64,
    /// Where the first chunk starts whose hash is not that of the image.
    first_difference: Option<u64>,
}

impl Checked {
    /// Returns what the step states; the page at `wrong_page` was wrong when it was touched.
    fn what(&self, image: &ImageFacts, len: ByteLen, wrong_page: Option<u64>) -> String {
        match (self.first_difference, wrong_page) {
            (Some(offset), _) => {
                format!("bytes DIFFER, first in the {} from {offset:#x} on", ByteLen::new(CHUNK))
            }
            (None, _) if self.hash != image.hash => String::from("bytes DIFFER"),
            (None, Some(offset)) => {
                format!("bytes DIFFERED when they were touched, first in the page at {offset:#x}")
            }
            (None, None) => {
                let (len, hash) = (HumanCount(len.get()), &self.hash[..8]);
                format!("all {len} bytes are right: BLAKE3 {hash}...")
            }
        }
    }
}

/// Reads all bytes in order and compares their hashes with those of the image.
fn check(memory: &Adopted, len: ByteLen, image: &Image, out: &Output) -> Result<Checked, Failure> {
    let progress = Progress::new(out, "comparing every byte", image.chunks() as u64);
    let started = Instant::now();
    let mut whole = blake3::Hasher::new();
    let first_difference = image.first_difference(len, |offset, bytes| {
        read(memory, offset, bytes)?;
        whole.update(bytes);
        progress.set(offset / CHUNK + 1);
        Ok(())
    })?;
    let hash = whole.finalize().to_hex().to_string();
    Ok(Checked { hash, elapsed_ns: nanoseconds(started.elapsed()), first_difference })
}

/// Reads bytes, and names why a page could not be had.
fn read(memory: &Adopted, offset: u64, out: &mut [u8]) -> Result<(), Failure> {
    memory.read_at(offset, out).map_err(|cause| match memory.answering().last_failure() {
        Some(failure) => steps::no_page(&failure.reason, cause),
        None => cause.into(),
    })
}

/// Returns the pages of a range in an order that does not follow their numbers, the same each time.
fn scattered(pages: Range<u64>) -> Vec<u64> {
    let mut pages: Vec<u64> = pages.collect();
    pages.sort_by_cached_key(|page| {
        let mut hasher = DefaultHasher::new();
        hasher.write_u64(*page);
        hasher.finish()
    });
    pages
}

/// Waits until all faults that were answered are recorded.
fn wait_for_records(memory: &AdoptedMemory) {
    let until = Instant::now() + RECORDED_WITHIN;
    let recorded = || memory.latencies().iter().map(|latency| latency.count).sum::<u64>();
    while recorded() < memory.stats().faults && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn here_and_there_is_every_page_once_and_not_in_order() {
        let pages = scattered(100..1000);
        assert!(!pages.is_sorted());
        let mut sorted = pages.clone();
        sorted.sort_unstable();
        assert!(sorted.into_iter().eq(100..1000));
        assert_eq!(pages, scattered(100..1000));
        // Neighbours in the order are far from each other.
        let near = pages.windows(2).filter(|two| two[0].abs_diff(two[1]) < 10).count();
        assert!(near < 60, "{near}");
        assert!(scattered(5..5).is_empty());
    }

    fn image(hash: &str) -> ImageFacts {
        ImageFacts { source_files: 1, source_bytes: 1, hash: hash.to_owned() }
    }

    #[test]
    fn the_step_that_compares_states_what_differs_and_what_differed_before() {
        let what = |hash: &str, first_difference, wrong_page| {
            let checked = Checked { hash: hash.to_owned(), elapsed_ns: 1, first_difference };
            checked.what(&image("0123456789"), ByteLen::mib(8), wrong_page)
        };
        for (hash, first_difference, wrong_page, stated) in [
            ("0123456789", None, None, "all 8,388,608 bytes are right: BLAKE3 01234567..."),
            ("1123456789", Some(4 << 20), None, "first in the 4 MiB from 0x400000 on"),
            ("1123456789", Some(0), Some(4096), "first in the 4 MiB from 0x0 on"),
            ("1123456789", None, None, "bytes DIFFER"),
            (
                "0123456789",
                None,
                Some(4096),
                "DIFFERED when they were touched, first in the page at 0x1000",
            ),
        ] {
            let what = what(hash, first_difference, wrong_page);
            assert!(what.ends_with(stated), "{what}");
        }
    }

    #[test]
    fn a_single_difference_is_not_right() {
        let touch = |hash: &str, first_difference_bytes| TouchFacts {
            pages: 1,
            faults: 1,
            pages_around: 0,
            in_order_bytes: 0,
            in_order_ns: 1,
            scattered_ns: 1,
            hash: hash.to_owned(),
            hash_ns: 1,
            first_difference_bytes,
        };
        assert!(touch("a", None).is_right(&image("a")));
        assert!(!touch("a", None).is_right(&image("b")));
        assert!(!touch("a", Some(0)).is_right(&image("a")));
    }
}
