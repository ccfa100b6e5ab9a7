//! Two threads that hold at once: halves of the region, which share no word but the pagemap's, and
//! all of it, where they meet on every word.
//!
//! The threads meet at a barrier before a sample, which lasts until both are done; a sample is as many passes as
//! make their start small beside it.

use std::sync::atomic::AtomicU64;

use uzone_pages::{ByteLen, Order, PageCount, PfnRange};
use uzone_zone::Zone;

use crate::settings::PinSettings;
use uzone_harness::ways::pin::{CALL_PAGES, bare_add, bare_sub, bind, role, words};
use uzone_harness::ways::threads::{Share, together};
use uzone_harness::{Result, Session, Suite};

/// How many pages' worth of passes a sample is: milliseconds.
const SAMPLE_PAGES: u64 = 1 << 28;

/// What a thread does in one pass; it gets its number.
type Work<'a> = Box<dyn Fn(usize) -> Result + Sync + 'a>;

/// Adds to each of a thread's words, and takes away again.
fn bare<'a>(words: [&'a [AtomicU64]; 2]) -> Work<'a> {
    Box::new(move |thread| {
        bare_add(words[thread]);
        bare_sub(words[thread]);
        Ok(())
    })
}

/// Returns both halves of a range.
fn halves_of(range: PfnRange) -> Option<[PfnRange; 2]> {
    let half = PageCount::new(range.pages().get() / 2);
    let middle = range.start().checked_add(half).ok()?;
    Some([PfnRange::try_new(range.start(), half).ok()?, PfnRange::try_new(middle, half).ok()?])
}

pub(super) fn run(settings: &PinSettings, session: &mut Session<'_>) -> Result {
    if session.bench.machine.cpus < 2 {
        session.skip("pin-threads", "this process may use one CPU only");
        return Ok(());
    }
    let size = settings.size;
    let zone = Zone::with_keep_limit(ByteLen::ZERO);
    let folios = bind(&zone, size, Order::PMD)?;
    let range = folios.range();
    let pages = range.pages().get();
    // The size is whole GiB, so that the middle is at a folio.
    let halves = halves_of(range).unwrap_or([range; 2]);
    let words = words(size)?;
    let (front, back) = words.split_at(words.len() / 2);
    let passes = (SAMPLE_PAGES / pages).max(1);

    let whole = [range; 2];
    let folios = &folios;
    let pin = |ranges: [PfnRange; 2]| -> Work<'_> {
        Box::new(move |thread| Ok(folios.pin(ranges[thread]).map(drop)?))
    };
    let get = |ranges: [PfnRange; 2]| -> Work<'_> {
        Box::new(move |thread| Ok(folios.get(ranges[thread]).map(drop)?))
    };
    let same = [&words[..]; 2];
    let samples = [
        ("pin-one", "pin and unpin, one thread", pin(whole), 1, 1),
        ("pin-halves", "pin and unpin, two threads, a half each", pin(halves), 2, 1),
        ("pin-same", "pin and unpin, two threads, the same range", pin(whole), 2, 2),
        ("get-one", "get and put, one thread", get(whole), 1, 1),
        ("get-halves", "get and put, two threads, a half each", get(halves), 2, 1),
        ("get-same", "get and put, two threads, the same range", get(whole), 2, 2),
        ("limit-one", "bare atomics, one thread", bare(same), 1, 1),
        ("limit-halves", "bare atomics, halves", bare([front, back]), 2, 1),
        ("limit-same", "bare atomics, same words", bare(same), 2, 2),
    ];
    let mut suite = Suite::new("pin-threads", size);
    // How many threads there are, and how many times the region is held in a pass of all of them together.
    for (row, name, work, threads, times) in samples {
        suite.threads = threads;
        let spec = suite.add(role(row), row, name, move |_| {
            let done = together(threads, |thread, start| {
                start.wait();
                Share::of(|| (0..passes).try_for_each(|_| work(thread)))
            });
            Ok(done?.elapsed)
        });
        let (sort, _) = row.split_once('-').unwrap_or((row, ""));
        spec.row.items *= passes * times;
        spec.row.folios = Some(spec.row.items / CALL_PAGES);
        spec.naive(&format!("{sort}-one"));
    }
    session.measure(
        suite,
        "2 MiB folios, two threads",
        format!(
            "taking and giving back, {passes} times a sample; naive is one thread, for the same work; \
             on the same range each thread holds all of it, so that the work is twice as much"
        ),
    )
}
