//! The image is mapped lazily, every page is touched, and every byte compared.

use std::num::NonZeroUsize;
use std::time::{Duration, Instant};

use serde::Serialize;
use uzone_fault::{AdoptedMemory, Engine, LazyOptions};
use uzone_harness::{Adopted, machine};
use uzone_os::signals::Held;
use uzone_os::{probe, sigbus};
use uzone_report::{Trace, nanoseconds};

use super::image::Image;
use super::plan::{Plan, Point};
use crate::exit::{Exit, Failure};
use crate::output::Output;
use crate::progress::Progress;

/// The trace keeps this many of the last faults; one takes 56 bytes.
const TRACED: usize = 1 << 17;
/// A page that its device does not bring in this time is given up.
const DEADLINE: Duration = Duration::from_secs(60);
/// A fault is recorded after its answer, within this time.
const RECORDED_WITHIN: Duration = Duration::from_secs(1);
/// A step that visits each page of a range once, unless the number of pages is a multiple of it.
const STRIDE: u64 = 1_000_003;

/// The outcome of touching and comparing.
#[derive(Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub(super) struct Touch {
    pub(super) pages: u64,
    /// The number of times that the reader waited.
    pub(super) faults: u64,
    /// Pages that came along with others.
    pub(super) pages_around: u64,
    /// The time of touching: three quarters in order, and the rest scattered.
    pub(super) touch_ns: u64,
    /// BLAKE3 of all bytes.
    pub(super) hash: String,
    /// The time of comparing.
    pub(super) compare_ns: u64,
    /// The offset of the first page or chunk with a wrong byte.
    pub(super) first_difference_bytes: Option<u64>,
}

/// Maps the image lazily, touches all of it, and compares all bytes.
pub(super) fn run(
    plan: &Plan,
    image: &Image,
    out: &Output,
) -> Result<(Touch, Trace, Engine), Failure> {
    let engine = engine(out)?;
    let page = probe::page_size();
    let file = image.file.try_clone()?;
    let options = LazyOptions::default().trace(TRACED).deadline(DEADLINE);
    let memory = Adopted::file(&engine, file, plan.size, &options)?;
    plan.stop_at(Point::Mapped);

    let pages = plan.size.get() >> page.shift();
    let progress = Progress::new(out, "touching every page", pages);
    let in_order = pages / 4 * 3;
    let scattered = (0..pages - in_order).map(|at| in_order + at * STRIDE % (pages - in_order));
    let (mut wrong_page, started) = (None, Instant::now());
    for (done, number) in (0..).zip((0..in_order).chain(scattered)) {
        let mut word = [0; 8];
        read(&memory, number << page.shift(), &mut word)?;
        if u64::from_le_bytes(word) != number {
            wrong_page.get_or_insert(number << page.shift());
        }
        if done % 4096 == 0 {
            progress.set(done);
        }
    }
    drop(progress);
    let touch_ns = nanoseconds(started.elapsed());
    let answering = memory.answering();
    wait_for_records(answering);
    let (stats, (records, lost)) = (answering.stats(), answering.take_trace());
    let trace =
        Trace::new(machine::here(), page, plan.size, &records, lost, &answering.latencies());

    let progress = Progress::new(out, "comparing every byte", plan.size.get());
    let started = Instant::now();
    let (difference, hash) = image.compare(|offset, bytes| {
        progress.set(offset);
        read(&memory, offset, bytes)
    })?;
    let touch = Touch {
        pages,
        faults: stats.faults,
        pages_around: stats.around,
        touch_ns,
        hash: hash.to_hex().to_string(),
        compare_ns: nanoseconds(started.elapsed()),
        first_difference_bytes: difference.or(wrong_page),
    };
    Ok((touch, trace, engine))
}

/// Starts the engine. An error of memory ends this process only where SIGBUS cannot be caught.
fn engine(out: &Output) -> Result<Engine, Failure> {
    if let Err(error) = sigbus::install() {
        out.log(format_args!("errors of memory are not caught: {error}"));
    }
    // Threads of the engine may outlive it for a moment. With these signals blocked in them, Ctrl-C
    // cannot end the process through one of them while a file is being written.
    let _held = Held::hold();
    Ok(Engine::new(NonZeroUsize::MIN.saturating_add(1))?)
}

/// Reads bytes, or returns the reason that a page could not be read.
fn read(memory: &Adopted, offset: u64, out: &mut [u8]) -> Result<(), Failure> {
    memory.read_at(offset, out).map_err(|cause| match memory.answering().last_failure() {
        Some(failure) => {
            let text = format!("cannot read a page: {}", failure.reason);
            Failure::of(text, cause).with(Exit::Os)
        }
        None => cause.into(),
    })
}

/// Waits until all faults that were answered are recorded.
fn wait_for_records(memory: &AdoptedMemory) {
    let until = Instant::now() + RECORDED_WITHIN;
    let recorded = || memory.latencies().iter().map(|latency| latency.count).sum::<u64>();
    while recorded() < memory.stats().faults && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(1));
    }
}
