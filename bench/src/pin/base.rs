//! Base pages, which are held by blocks of 512.

use std::hint::black_box;
use std::time::Duration;

use uzone_pages::{ByteLen, Order, PageCount, PfnRange};
use uzone_zone::Zone;

use super::naive::Naive;
use super::shared::{
    CALL_PAGES, bare_add, bare_sub, bind, calls, check_pins, timed, timed_alone, words,
};
use crate::group::Watch;
use crate::report::{Bench, Role, Table};
use crate::settings::PinSettings as Settings;
use crate::suite::{BenchError, Suite};

pub(super) fn run(
    settings: &Settings,
    watch: Watch<'_>,
    bench: &mut Bench,
) -> Result<(), BenchError> {
    let size = settings.size;
    let zone = Zone::with_keep_limit(ByteLen::ZERO);
    let base = bind(&zone, size, Order::BASE)?;
    check_pins(&base, "pin-4k/whole-pin")?;
    let range = base.range();
    let pages = range.pages().get();
    // All but a page at each end: the first and the last block are cut.
    let inner = range
        .start()
        .checked_add(PageCount::new(1))
        .and_then(|start| PfnRange::try_new(start, PageCount::new(pages - 2)))
        .unwrap_or(range);
    let (pieces, _) = calls(&base)?;
    let naive = Naive::new(pages, 1)?;
    let words = words(size)?;

    let mut suite = Suite::new(size);
    let mut rows = Rows { suite: &mut suite, pages };
    rows.add("naive-pin", "naive, pin", Some(pages), || {
        timed_alone(
            || {
                black_box(naive.hold());
            },
            || naive.give_back(),
        )
    });
    rows.add("naive-both", "naive, pin and unpin", Some(pages), || {
        timed(|| {
            black_box(naive.hold());
            naive.give_back();
            Ok(())
        })
    });
    rows.add("whole-pin", "whole region, pin", Some(1), || timed(|| Ok(base.pin(range)?)));
    rows.add("whole-both", "whole region, pin and unpin", Some(1), || {
        timed(|| {
            drop(base.pin(range)?);
            Ok(())
        })
    });
    rows.add("cut-both", "all but a page at each end, pin and unpin", Some(1), || {
        timed(|| {
            drop(base.pin(inner)?);
            Ok(())
        })
    });
    rows.add(
        "call-both",
        "512 pages a call by pfn, pin and unpin",
        Some(pieces.len() as u64),
        || {
            timed(|| {
                for &piece in &pieces {
                    drop(base.pin(piece)?);
                }
                Ok(())
            })
        },
    );
    rows.add("limit-one", "bare atomics, one a block of 512", None, || {
        timed_alone(|| bare_add(&words), || bare_sub(&words))
    });
    rows.add("limit-both", "bare atomics, two a block of 512", None, || {
        timed(|| {
            bare_add(&words);
            bare_sub(&words);
            Ok(())
        })
    });
    if let Some(spec) = suite.spec("pin-4k/whole-pin") {
        spec.headline = Some(format!("pin {size}: base pages, whole"));
    }
    bench.tables.push(Table {
        id: "pin-4k".to_owned(),
        title: "Base pages, 8-byte descriptors".to_owned(),
        note: format!(
            "one thread; a block of {CALL_PAGES} that is held wholly is held by one word, and naive is \
             an atomic a page"
        ),
    });
    suite.run("base pages", settings.rounds, watch, &mut bench.results)
}

struct Rows<'s, 'a> {
    suite: &'s mut Suite<'a>,
    pages: u64,
}

impl<'a> Rows<'_, 'a> {
    /// Adds a row of so many calls; a limit makes none.
    fn add(
        &mut self,
        row: &str,
        name: &str,
        calls: Option<u64>,
        run: impl FnMut() -> Result<Duration, BenchError> + 'a,
    ) {
        let is_both = row.ends_with("-both");
        let (naive, limit) =
            if is_both { ("naive-both", "limit-both") } else { ("naive-pin", "limit-one") };
        let is_naive = calls == Some(self.pages);
        let role = match calls {
            None => Role::Limit,
            Some(_) if is_naive => Role::Naive,
            Some(_) => Role::Ours,
        };
        let spec = self.suite.add(role, &format!("pin-4k/{row}"), name, 0, 1, run);
        spec.calls = calls;
        if calls.is_some() {
            spec.naive = Some(format!("pin-4k/{naive}"));
        }
        if role == Role::Ours {
            spec.limit = Some((format!("pin-4k/{limit}"), 0));
        }
    }
}
