//! 2 MiB folios with a list of page frames, an entry for each base page: what a driver asks for that
//! knows no ranges. The list is the cost then, and the limit is writing it.

use std::cell::RefCell;
use std::time::Duration;

use uzone_pages::{ByteLen, Order, Pfn};
use uzone_stream::{Pattern, Streaming};
use uzone_zone::Zone;
use zerocopy::IntoBytes;

use super::naive::Naive;
use super::shared::{CALL_ENTRIES, CALL_PAGES, bind, calls, present, timed};
use crate::report::Role;
use crate::settings::PinSettings as Settings;
use crate::suite::{BenchError, Session, Suite};

const NAIVE: &str = "pin-list/naive";
const LIMIT: &str = "pin-list/limit";

/// What a row does in a round.
type Run<'a> = Box<dyn Fn() -> Result<Duration, BenchError> + 'a>;

pub(super) fn run(settings: &Settings, session: &mut Session<'_>) -> Result<(), BenchError> {
    let size = settings.size;
    let zone = Zone::with_keep_limit(ByteLen::ZERO);
    let folios = bind(&zone, size, Order::PMD)?;
    let range = folios.range();
    let pages = range.pages().get();
    let (_, addresses) = calls(&folios)?;
    let naive = Naive::new(pages, CALL_ENTRIES)?;
    // One list for all, touched before: each row writes the same memory.
    let list = RefCell::new(present::<Pfn>(pages)?);
    let progression = Pattern::linear(&[range.start().get()], &[1]);
    let progression = match progression {
        Ok(pattern) => pattern,
        Err(_) => unreachable!("one word fits a line"),
    };

    let check = |row: &str| -> Result<(), BenchError> {
        let mut list = list.borrow_mut();
        let wrong = list.iter().zip(range.iter()).find(|(entry, pfn)| *entry != pfn);
        let wrong = wrong.map(|(_, pfn)| BenchError::Wrong { row: row.to_owned(), pfn });
        list.fill(Pfn::new(0));
        wrong.map_or(Ok(()), Err)
    };
    folios.pin(range)?.write_pfns(&mut list.borrow_mut())?;
    check("pin-list/ours")?;
    naive.hold_listed(range.start(), &mut list.borrow_mut());
    naive.give_back();
    check(NAIVE)?;

    let kept = RefCell::new(Vec::with_capacity(addresses.len()));
    let window = RefCell::new(vec![Pfn::new(0); CALL_ENTRIES]);
    let len = ByteLen::new(CALL_PAGES << 12);
    // Pins call by call, and writes each list behind the one before, or over it.
    let pin_calls = |list: &mut [Pfn], step: usize| {
        let mut kept = kept.borrow_mut();
        let elapsed = timed(|| {
            for (call, &address) in addresses.iter().enumerate() {
                let pinned = zone.pin(address, len)?;
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
    };
    let pin_whole = || {
        let mut list = list.borrow_mut();
        timed(|| {
            let pinned = folios.pin(range)?;
            pinned.write_pfns(&mut list)?;
            Ok(pinned)
        })
    };
    let hold_naive = || {
        let mut list = list.borrow_mut();
        let elapsed = timed(|| Ok(naive.hold_listed(range.start(), &mut list)));
        naive.give_back();
        elapsed
    };
    let bytes = pages * size_of::<Pfn>() as u64;
    let calls = addresses.len() as u64;
    let rows: [(Role, &str, &str, u64, Run<'_>); 4] = [
        (Role::Naive, NAIVE, "naive, an atomic and an entry a page", pages, Box::new(hold_naive)),
        (Role::Ours, "pin-list/ours", "whole region, pin, list", 1, Box::new(pin_whole)),
        (
            Role::Ours,
            "pin-list/ours-call",
            "512 pages a call, pin, all in one list",
            calls,
            Box::new(|| pin_calls(&mut list.borrow_mut(), CALL_ENTRIES)),
        ),
        (
            Role::Ours,
            "pin-list/ours-window",
            "512 pages a call, pin, a list of 512 used again",
            calls,
            Box::new(|| pin_calls(&mut window.borrow_mut(), 0)),
        ),
    ];
    let mut suite = Suite::new(size);
    for (role, id, name, calls, run) in rows {
        let spec = suite.add(role, id, name, bytes, 1, run).naive(NAIVE).limit(LIMIT, bytes);
        spec.counts(Some(calls), Some(pages / CALL_PAGES));
        if calls == 1 {
            spec.headline(format!("pin {size}: whole, with the list of its frames"));
        }
    }
    suite.add(Role::Limit, LIMIT, "streaming the list alone", bytes, 1, || {
        let mut list = list.borrow_mut();
        timed(|| {
            Streaming::scope(uzone_stream::best(), |stream| {
                stream.fill(list.as_mut_bytes(), &progression);
            });
            Ok(())
        })
    });
    session.table(
        "pin-list",
        "2 MiB folios, with a list of page frames",
        "pin alone, one thread; 8 bytes a base page into memory that was touched; the limit \
         streams that list and pins nothing",
    );
    session.run(suite, "lists")
}
