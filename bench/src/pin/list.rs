//! 2 MiB folios with a list of page frames, an entry for each base page: what a driver asks for that
//! knows no ranges. The list is the cost then, and the limit is writing it.

use std::cell::RefCell;

use uzone_pages::{ByteLen, Order, PageCount, Pfn};
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
        let wrong = wrong.map(|(_, pfn)| pfn);
        list.fill(Pfn::new(0));
        match wrong {
            None => Ok(()),
            Some(pfn) => Err(BenchError::Wrong { row: row.to_owned(), pfn }),
        }
    };
    folios.pin(range)?.write_pfns(&mut list.borrow_mut())?;
    check("pin-list/ours")?;
    naive.hold_listed(range.start(), &mut list.borrow_mut());
    naive.give_back();
    check(NAIVE)?;

    let kept = RefCell::new(Vec::with_capacity(addresses.len()));
    let window = RefCell::new(vec![Pfn::new(0); CALL_ENTRIES]);
    let mut suite = Suite::new(size);
    let bytes = pages * size_of::<Pfn>() as u64;
    let spec =
        suite.add(Role::Naive, NAIVE, "naive, an atomic and an entry a page", bytes, 1, || {
            let mut list = list.borrow_mut();
            let elapsed = timed(|| Ok(naive.hold_listed(range.start(), &mut list)));
            naive.give_back();
            elapsed
        });
    spec.calls = Some(pages);
    let spec = suite.add(Role::Ours, "pin-list/ours", "whole region, pin, list", bytes, 1, || {
        let mut list = list.borrow_mut();
        timed(|| {
            let pinned = folios.pin(range)?;
            pinned.write_pfns(&mut list)?;
            Ok(pinned)
        })
    });
    spec.calls = Some(1);
    spec.headline(format!("pin {size}: whole, with the list of its frames"));
    let len = ByteLen::new(CALL_PAGES << 12);
    let spec = suite.add(
        Role::Ours,
        "pin-list/ours-call",
        "512 pages a call, pin, all in one list",
        bytes,
        1,
        || {
            let (mut list, mut kept) = (list.borrow_mut(), kept.borrow_mut());
            let elapsed = timed(|| {
                for (&address, list) in addresses.iter().zip(list.chunks_mut(CALL_ENTRIES)) {
                    let pinned = zone.pin(address, len)?;
                    for guard in pinned.guards() {
                        guard.write_pfns(list)?;
                    }
                    kept.push(pinned);
                }
                Ok(())
            });
            kept.clear();
            elapsed
        },
    );
    spec.calls = Some(addresses.len() as u64);
    let spec = suite.add(
        Role::Ours,
        "pin-list/ours-window",
        "512 pages a call, pin, a list of 512 used again",
        bytes,
        1,
        || {
            let (mut window, mut kept) = (window.borrow_mut(), kept.borrow_mut());
            let elapsed = timed(|| {
                for &address in &addresses {
                    let pinned = zone.pin(address, len)?;
                    for guard in pinned.guards() {
                        guard.write_pfns(&mut window)?;
                    }
                    kept.push(pinned);
                }
                Ok(())
            });
            kept.clear();
            elapsed
        },
    );
    spec.calls = Some(addresses.len() as u64);
    suite.add(Role::Limit, LIMIT, "streaming the list alone", bytes, 1, || {
        let mut list = list.borrow_mut();
        timed(|| {
            Streaming::scope(uzone_stream::best(), |stream| {
                stream.fill(list.as_mut_bytes(), &progression);
            });
            Ok(())
        })
    });
    for id in [NAIVE, "pin-list/ours", "pin-list/ours-call", "pin-list/ours-window"] {
        if let Some(spec) = suite.spec(id) {
            spec.naive(NAIVE).limit(LIMIT, bytes);
            spec.folios = Some(PageCount::new(pages).get() / CALL_PAGES);
        }
    }
    session.table(
        "pin-list",
        "2 MiB folios, with a list of page frames",
        "pin alone, one thread; 8 bytes a base page into memory that was touched; the limit \
             streams that list and pins nothing",
    );
    session.run(suite, "lists")
}
