//! The second half: the image is mapped lazily into the other process, which touches every page, and
//! every byte is compared.

use std::cell::OnceCell;
use std::time::Instant;

use uzone_bench::machine::Machine;
use uzone_fault::Engine;
use uzone_os::probe;
use uzone_os::signals::Held;
use uzone_pages::ByteLen;
use uzone_report::Trace;

use super::image::Image;
use super::other::{self, Other};
use super::{DemoError, Plan, Steps, TouchFacts, grouped, protocol};
use crate::exit::Failure;
use crate::output::Output;
use crate::progress::Progress;

/// As many of the last faults are kept for the pictures; one takes 56 bytes.
const TRACED: usize = 1 << 17;
/// What came of mapping the image lazily.
pub(super) struct Lazy {
    pub(super) touch: TouchFacts,
    pub(super) trace: Trace,
    pub(super) other: Other,
    pub(super) engine: Engine,
}

/// Has the other process touch the whole image, and compares what it read with what was written.
///
/// # Errors
/// If the other process cannot be started, or ends before it has read everything.
pub(super) fn run(
    plan: &Plan,
    image: &Image,
    steps: &mut Steps,
    out: &Output,
) -> Result<Lazy, Failure> {
    let engine = {
        // Some of its threads live on a moment longer than it: one of them must not be what Ctrl-C ends
        // the process by while a file is being written.
        let _held = Held::hold()?;
        other::engine()?
    };
    let mut other = Other::start()?;
    let page = probe::page_size();
    let pages = plan.size.get() >> page.shift();

    let started = Instant::now();
    let memory = other.map_lazily(plan.size)?.by_uzone(&engine, &image.file, TRACED)?;
    let what =
        format!("the image into another process; none of its {} pages is read", grouped(pages));
    steps.done("map", started, what);

    let touching = Progress::new(out, "another process touches the image", pages);
    let checking = OnceCell::new();
    let mut seen = 0;
    let mut first_difference = None;
    let (touched, whole) = other.touch_and_hash(
        plan.in_order(),
        &memory,
        |done| touching.set(done),
        |offset, hash| {
            let bar = checking
                .get_or_init(|| Progress::new(out, "comparing every byte", image.chunks() as u64));
            seen += 1;
            bar.set(seen);
            if !image.has(offset, hash) {
                first_difference.get_or_insert(offset);
            }
        },
    )?;
    drop((touching, checking));
    other::settle(&memory);
    let (stats, latencies, records) = (memory.stats(), memory.latencies(), memory.take_trace());
    let faults = stats.faults;
    let what = format!(
        "every page, in order, the last ones here and there; it had to wait {} times",
        grouped(faults)
    );
    steps.took("touch", touched.in_order_ns.saturating_add(touched.scattered_ns), what);
    let is_equal = whole.hash == image.hash && first_difference.is_none();
    let what = match (is_equal, first_difference) {
        (true, _) => format!(
            "all {} bytes are right: BLAKE3 {}...",
            grouped(plan.size.get()),
            &whole.hash[..8]
        ),
        (false, Some(offset)) => format!(
            "bytes DIFFER, first in the {} from {offset:#x} on",
            ByteLen::new(protocol::CHUNK)
        ),
        (false, None) => String::from("bytes DIFFER"),
    };
    steps.took("check", whole.elapsed_ns, what);
    drop(memory);

    let machine =
        serde_json::from_value(serde_json::to_value(Machine::here()).map_err(DemoError::from)?)
            .map_err(DemoError::from)?;
    let trace = Trace::new(machine, page, plan.size, &records, &latencies);
    let touch = TouchFacts {
        pages,
        faults,
        pages_around: stats.around,
        in_order_bytes: plan.in_order().get(),
        in_order_ns: touched.in_order_ns,
        scattered_ns: touched.scattered_ns,
        hash: whole.hash,
        hash_ns: whole.elapsed_ns,
        first_difference_bytes: first_difference
            .or_else(|| touched.wrong_page.map(|page_number| page_number << page.shift())),
    };
    Ok(Lazy { touch, trace, other, engine })
}
