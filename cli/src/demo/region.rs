//! The first half: a region that is larger than the machine is described, held, cleared and given
//! back.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::Instant;

use indicatif::HumanCount;
use uzone_pages::ByteLen;
use uzone_pages::{MemoryKind, Order, PfnRange};
use uzone_zone::{BindOptions, Pagemap, Region, ZeroOptions, Zone};

use super::image::unread;
use super::steps::{Steps, units};
use crate::exit::{Exit, Failure};
use crate::output::Output;
use crate::progress::Progress;

/// How much is copied, or looked at, at once.
const PIECE: ByteLen = ByteLen::mib(2);

/// Does it, and notes each step. Returns whether every byte was what it should be.
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
    let pages = HumanCount(pagemap.report().pages.get());
    let what = format!("{pages} pages have a descriptor each; unused descriptors take no memory");
    steps.done("describe", started, what);

    let started = Instant::now();
    steps.done("look", started, look(&pagemap, size)?);

    let started = Instant::now();
    let range = pagemap.range_at(0, part)?;
    let pinned = pagemap.pin(range)?;
    let what =
        format!("{part} of it, so that uzone does not take it away; the kernel may still move it");
    steps.done("pin", started, what);

    let started = Instant::now();
    each_piece(part, "filling the pinned memory", out, |offset, bytes| {
        image.read_exact_at(bytes, offset).map_err(unread)?;
        Ok(pinned.write_at(offset, bytes)?)
    })?;
    steps.done("use", started, format!("{part} of the image copied into the pinned memory"));

    let started = Instant::now();
    let defect = "this is a defect of uzone";
    let given_back = || format!("memory that is pinned was given back: {defect}");
    let busy = pagemap.unbind().err().ok_or_else(|| Failure::new(Exit::Os, given_back()))?;
    let what = format!("to give pinned memory back, as it must be ({} pin)", busy.pins);
    steps.done("refuse", started, what);
    let pagemap = *busy.pagemap;
    drop(pinned);

    let started = Instant::now();
    let zeroed = pagemap.zero(range, &ZeroOptions::default())?;
    steps.done("clear", started, format!("{part} to zero, for its next user"));

    let started = Instant::now();
    let region = pagemap.unbind().map_err(|busy| {
        let pins = busy.pins;
        let text = format!("memory is held by {pins} pins although all are dropped: {defect}");
        Failure::new(Exit::Os, text)
    })?;
    let what = "the region: it is ordinary memory again, without descriptors";
    steps.done("unbind", started, what);

    Ok(is_zero(&region, part, out)? && zeroed.is_whole())
}

/// Returns whether all bytes of the first part of a region are zero.
fn is_zero(region: &Region, part: ByteLen, out: &Output) -> Result<bool, Failure> {
    let mut is_zero = true;
    each_piece(part, "looking for bytes that are not zero", out, |offset, bytes| {
        bytes.fill(1);
        region.read_at(offset, bytes)?;
        is_zero &= bytes.as_chunks::<64>().0.iter().all(|line| *line == [0; 64]);
        Ok(())
    })?;
    Ok(is_zero)
}

/// Holds a page in the middle, and returns what its descriptor counts.
fn look(pagemap: &Pagemap, size: ByteLen) -> Result<String, Failure> {
    let page = pagemap.region().page_size().bytes();
    let Some(page) = pagemap.page_at(size.get() / 2 + 12345 * page) else {
        return Ok("there is no such page".to_owned());
    };
    let held = pagemap.get(PfnRange::try_single(page.pfn())?)?;
    let users = held.word(held.range().start()).references();
    drop(held);
    Ok(format!(
        "at the descriptor of page {}: {users} references while held, {} after",
        HumanCount(page.pfn().get()),
        page.word().references(),
    ))
}

/// Does something with each piece of some memory, under a progress bar.
fn each_piece(
    part: ByteLen,
    what: &'static str,
    out: &Output,
    mut work: impl FnMut(u64, &mut [u8]) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let mut bytes = vec![0; PIECE.to_usize()?];
    let progress = Progress::new(out, what, units(part.get()));
    for offset in (0..part.get()).step_by(bytes.len()) {
        work(offset, &mut bytes)?;
        progress.set(units(offset));
    }
    Ok(())
}
