//! `uzone-bench pin`: what it costs to hold memory for a device.
//!
//! The published experiment pinned 16 GiB and 128 GiB of 2 MiB pages, 512 base pages a call, before
//! and after the kernel learnt to take one reference for each group of pages. Here a region of that
//! size is reserved and described, and held in every way there is; its bytes are never touched.
//!
//! | file | table |
//! |---|---|
//! | `folios` | 2 MiB folios: the whole region as one guard, and 512 pages a call |
//! | `list` | the same with a list of page frames, as a driver wants it that knows no ranges |
//! | `base` | base pages |
//! | `threads` | two threads, on halves of the region and on all of it |
//!
//! A row either holds alone (its guards are dropped when the clock has stopped), or holds and gives
//! back; its name states which. The limit of a row is bare atomics, or bare stores, on as many words.

mod base;
mod folios;
mod list;
mod threads;

use uzone_pages::ByteLen;

use crate::settings::{Part, PinSettings};
use uzone_harness::{Bench, BenchError, Result, Session, Watch, check_memory, sentence};

/// What the ids of the tables of a larger region end with.
const LARGER: &str = "-larger";

/// Runs the tables.
pub(crate) fn run(settings: &PinSettings, part: &Part, watch: Watch<'_>) -> Result<Bench> {
    let mut session = session(settings, part, watch)?;
    if session.wants_any(&["pin-2m", "pin-2m-altmap"]) {
        folios::run(settings.size, "", &mut session)?;
    }
    type Table = fn(&PinSettings, &mut Session<'_>) -> Result;
    let tables: [(&str, Table); 3] =
        [("pin-list", list::run), ("pin-4k", base::run), ("pin-threads", threads::run)];
    for (table, measure) in tables {
        if session.wants(table) {
            measure(settings, &mut session)?;
        }
    }
    let larger = [format!("pin-2m{LARGER}"), format!("pin-2m-altmap{LARGER}")];
    if !settings.larger.is_zero() && session.wants_any(&larger.each_ref().map(String::as_str)) {
        match check(settings.larger) {
            Ok(()) => folios::run(settings.larger, LARGER, &mut session)?,
            Err(error) => session.skip(&larger[0], sentence(&error)),
        }
    }
    session.finish()
}

/// Begins, if the tables can be run: before minutes are spent.
fn session<'a>(settings: &PinSettings, part: &Part, watch: Watch<'a>) -> Result<Session<'a>> {
    let &PinSettings { size, rounds, .. } = settings;
    check(size)?;
    let sentence = format!("{size} held ({} pages), {rounds} rounds", size.get() >> 12);
    Ok(part.session(sentence, rounds, watch))
}

/// Checks that so much memory is measured, and can be described here.
fn check(size: ByteLen) -> Result {
    if size.is_zero() || !size.get().is_multiple_of(1 << 30) {
        return Err(BenchError::size(size));
    }
    // The naive way's 64 bytes a page, a list of 8, and our descriptors of 8; and a fifth on top.
    check_memory(ByteLen::new((size.get() >> 12) * 80 / 5 * 6))
}
