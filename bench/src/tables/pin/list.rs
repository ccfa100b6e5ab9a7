//! 2 MiB folios with a list of page frames, an entry for each base page: what a driver asks for that
//! knows no ranges. The list is the cost then, and the limit is writing it.

use std::cell::RefCell;
use std::time::Duration;

use uzone_pages::{ByteLen, Order, Pfn, PfnRange};
use uzone_stream::{Pattern, Streaming};
use uzone_zone::{Pagemap, Pinned, PinnedRanges, Zone};
use zerocopy::IntoBytes;

use crate::settings::PinSettings;
use uzone_harness::ways::naive_pin::Naive;
use uzone_harness::ways::pin::{CALL_ENTRIES, CALL_PAGES, Run, bind, calls, present};
use uzone_harness::{BenchError, Result, Role, Session, Suite, timed};

/// Pins call by call, and writes each list behind the one before, or over it.
struct Calls<'a> {
    zone: &'a Zone,
    addresses: Vec<usize>,
    kept: RefCell<Vec<PinnedRanges<Pinned>>>,
}

impl Calls<'_> {
    fn pin(&self, list: &mut [Pfn], step: usize) -> Result<Duration> {
        let len = ByteLen::new(CALL_PAGES << 12);
        let mut kept = self.kept.borrow_mut();
        let elapsed = timed(|| {
            for (call, &address) in self.addresses.iter().enumerate() {
                let pinned = self.zone.pin(address, len)?;
                let list = &mut list[call * step..][..CALL_ENTRIES];
                for guard in pinned.guards() {
                    guard.write_pfns(list)?;
                }
                kept.push(pinned);
            }
            Ok(())
        });
        kept.clear();
        elapsed
    }
}

/// Checks that a list has every page, and clears it.
fn check(row: &str, range: PfnRange, list: &mut [Pfn]) -> Result {
    let wrong = list.iter().zip(range.iter()).find(|(entry, pfn)| *entry != pfn);
    let wrong = wrong.map(|(_, pfn)| BenchError::wrong_page(row, pfn));
    list.fill(Pfn::new(0));
    wrong.map_or(Ok(()), Err)
}

/// Streams a list and does nothing else.
fn fill(list: &mut [Pfn], progression: &Pattern) -> Result<Duration> {
    timed(|| {
        Streaming::scope(uzone_stream::best(), |stream| {
            stream.fill(list.as_mut_bytes(), progression);
        });
        Ok(())
    })
}

/// Checks that ours and the naive way list every page.
fn check_both(folios: &Pagemap, naive: &Naive, list: &mut [Pfn]) -> Result {
    let range = folios.range();
    folios.pin(range)?.write_pfns(list)?;
    check("pin-list/ours", range, list)?;
    naive.hold_listed(range.start(), list);
    naive.give_back();
    check("pin-list/naive", range, list)
}

pub(super) fn run(settings: &PinSettings, session: &mut Session<'_>) -> Result {
    let size = settings.size;
    let zone = Zone::with_keep_limit(ByteLen::ZERO);
    let folios = bind(&zone, size, Order::PMD)?;
    let (range, pages) = (folios.range(), folios.range().pages().get());
    let (_, addresses) = calls(&folios)?;
    let calls = addresses.len() as u64;
    let kept = RefCell::new(Vec::with_capacity(addresses.len()));
    let by_call = Calls { zone: &zone, addresses, kept };
    let naive = Naive::new(pages, CALL_ENTRIES)?;
    // One list for all, touched before: each row writes the same memory.
    let list = RefCell::new(present::<Pfn>(pages)?);
    let Ok(progression) = Pattern::linear(&[range.start().get()], &[1]) else {
        unreachable!("one word fits a line")
    };
    check_both(&folios, &naive, &mut list.borrow_mut())?;

    let window = RefCell::new(vec![Pfn::new(0); CALL_ENTRIES]);
    let hold_naive: Run<'_> = &|| {
        let mut list = list.borrow_mut();
        let elapsed = timed(|| Ok(naive.hold_listed(range.start(), &mut list)));
        naive.give_back();
        elapsed
    };
    let pin_whole: Run<'_> = &|| {
        let mut list = list.borrow_mut();
        timed(|| {
            let pinned = folios.pin(range)?;
            pinned.write_pfns(&mut list)?;
            Ok(pinned)
        })
    };
    let pin_calls: Run<'_> = &|| by_call.pin(&mut list.borrow_mut(), CALL_ENTRIES);
    let pin_window: Run<'_> = &|| by_call.pin(&mut window.borrow_mut(), 0);
    let rows = [
        ("naive", "naive, an atomic and an entry a page", pages, hold_naive),
        ("ours", "whole region, pin, list", 1, pin_whole),
        ("ours-call", "512 pages a call, pin, all in one list", calls, pin_calls),
        ("ours-window", "512 pages a call, pin, a list of 512 used again", calls, pin_window),
    ];
    let mut suite = Suite::new("pin-list", size).writing(pages * size_of::<Pfn>() as u64);
    for (row, name, calls, run) in rows {
        let role = if row == "naive" { Role::Naive } else { Role::Ours };
        let spec = suite.add(role, row, name, move |_| run()).naive("naive").limit("limit");
        spec.counts(Some(calls), Some(pages / CALL_PAGES));
        if calls == 1 {
            spec.headline(format!("pin {size}: whole, with the list of its frames"));
        }
    }
    suite.add(Role::Limit, "limit", "streaming the list alone", |_| {
        fill(&mut list.borrow_mut(), &progression)
    });
    session.measure(
        suite,
        "2 MiB folios, with a list of page frames",
        "pin alone, one thread; 8 bytes a base page into memory that was touched; the limit \
         streams that list and pins nothing",
    )
}
