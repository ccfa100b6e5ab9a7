//! The first half: a region that is larger than the machine is described, held, cleared and given
//! back.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::Instant;

use uzone_pages::ByteLen;
use uzone_pages::{MemoryKind, Order, PfnRange};
use uzone_zone::{BindOptions, Region, ZeroOptions, Zone};

use super::{DemoError, Steps, grouped, units};
use crate::exit::Failure;
use crate::output::Output;
use crate::progress::Progress;

/// How much is copied, or looked at, at once.
const PIECE: ByteLen = ByteLen::mib(2);

/// Does it, and notes each step. Returns whether every byte was what it should be.
///
/// # Errors
/// If memory is refused, or the image cannot be read.
pub(super) fn run(
    size: ByteLen,
    part: ByteLen,
    image: &File,
    steps: &mut Steps,
    out: &Output,
) -> Result<bool, Failure> {
    let started = Instant::now();
    let region = Region::anonymous(size)?;
    steps.done("reserve", started, format!("{size} of addresses, which take no memory yet"));

    let zone = Zone::new();
    let started = Instant::now();
    let options = BindOptions::new(MemoryKind::Generic).order(Order::PMD);
    let pagemap = zone.bind(region, options)?;
    let report = pagemap.report();
    let what = format!(
        "{} pages have a descriptor each; unused descriptors take no memory",
        grouped(report.pages.get()),
    );
    steps.done("describe", started, what);

    let started = Instant::now();
    let what = match pagemap.page_at(size.get() / 2 + 12345 * pagemap.region().page_size().bytes())
    {
        Some(page) => {
            let held = pagemap.get(PfnRange::try_single(page.pfn())?)?;
            let users = held.word(held.range().start()).references();
            drop(held);
            format!(
                "at the descriptor of page {}: {users} references while held, {} after",
                grouped(page.pfn().get()),
                page.word().references(),
            )
        }
        None => String::from("there is no such page"),
    };
    steps.done("look", started, what);

    let started = Instant::now();
    let range = pagemap.range_at(0, part)?;
    let pinned = pagemap.pin(range)?;
    steps.done(
        "pin",
        started,
        format!("{part} of it, so that uzone does not take it away; the kernel may still move it"),
    );

    let mut bytes = vec![0; PIECE.to_usize()?];
    let progress = Progress::new(out, "filling the pinned memory", units(part.get()));
    let started = Instant::now();
    for offset in (0..part.get()).step_by(bytes.len()) {
        let failed = |cause| DemoError::Reread { cause };
        image.read_exact_at(&mut bytes, offset).map_err(failed)?;
        pinned.write_at(offset, &bytes)?;
        progress.set(units(offset));
    }
    drop(progress);
    steps.done("use", started, format!("{part} of the image copied into the pinned memory"));

    let started = Instant::now();
    let pagemap = match pagemap.unbind() {
        Err(busy) => {
            let what = format!("to give pinned memory back, as it must be ({} pin)", busy.pins);
            steps.done("refuse", started, what);
            *busy.pagemap
        }
        Ok(_) => return Err(DemoError::NotRefused.into()),
    };
    drop(pinned);

    let started = Instant::now();
    let zeroed = pagemap.zero(range, &ZeroOptions::default())?;
    steps.done("clear", started, format!("{part} to zero, for its next user"));

    let started = Instant::now();
    let region = pagemap.unbind().map_err(|busy| DemoError::Kept { pins: busy.pins })?;
    steps.done(
        "unbind",
        started,
        String::from("the region: it is ordinary memory again, without descriptors"),
    );

    let progress = Progress::new(out, "looking for bytes that are not zero", units(part.get()));
    let mut is_zero = zeroed.is_whole();
    for offset in (0..part.get()).step_by(bytes.len()) {
        bytes.fill(1);
        region.read_at(offset, &mut bytes)?;
        is_zero &= bytes.as_chunks::<64>().0.iter().all(|line| *line == [0; 64]);
        progress.set(units(offset));
    }
    Ok(is_zero)
}
