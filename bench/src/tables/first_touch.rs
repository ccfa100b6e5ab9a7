//! The first touch of memory, and clearing in place: `populate`, `zero-demand-2m`, `zero-demand-1g`.
//!
//! The published experiment touched pages of hugetlb pools for the first time, of 2 MiB and of 1 GiB: its tables are
//! measured where they are named and the pool of the host has the pages.

use std::hint::black_box;
use std::num::NonZeroUsize;
use std::sync::atomic::Ordering;
use std::time::Duration;

use uzone_harness::ways::clear::Arena;
use uzone_harness::{
    BenchError, Published, Result, Role, Session, Suite, bytes, check_memory, fill_zeroes, index,
    timed,
};
use uzone_pages::{ByteLen, PageSize};
use uzone_zone::{Huge, PopulateOptions, Region, WriteError, ZeroOptions};

const PAGE: u64 = 4096;

/// Refuses a length that exceeds the memory, before minutes are spent.
pub(crate) fn check(populate: ByteLen) -> Result {
    // A tenth is left to others.
    check_memory(ByteLen::new(populate.get() / 10 * 11))
}

/// Writes a byte to every page of a region, by one thread.
fn touch(region: &Region) -> Result {
    let words = region.mapping().as_words(0..region.len().get()).map_err(WriteError::from)?;
    for word in words.iter().step_by(index(PAGE / 8)) {
        word.store(1, Ordering::Relaxed); // no other thread reads it
    }
    Ok(())
}

/// Adds the limit: bare stores to the next `len` bytes of the arena.
fn add_limit<'a>(suite: &mut Suite<'a>, arena: &'a Arena, len: usize, name: &str) {
    let written = std::mem::replace(&mut suite.bytes, bytes(len).get());
    suite.add(Role::Limit, "limit", name, move |_| {
        arena.with_next(len, |dst, _| fill_zeroes(dst, 1))
    });
    suite.bytes = written;
}

/// Clears a region in place, `unit` by `unit`. All of its pages are present.
fn clear_in_place(region: &Region, unit: ByteLen) -> Result<Duration> {
    touch(region)?;
    let (len, unit) = (region.len().get(), index(unit.get()));
    timed(|| {
        for at in (0..len).step_by(unit) {
            let part = ByteLen::new((len - at).min(unit as u64));
            let _ = black_box(region.zero_range(at, part, &ZeroOptions::default())?);
        }
        Ok(())
    })
}

/// Measures the first touch of memory, and the published experiment where one of its tables is named.
pub(crate) fn tables(
    populate: ByteLen,
    threads: NonZeroUsize,
    arena: &Arena,
    session: &mut Session<'_>,
) -> Result {
    if populate.is_zero() {
        return Ok(());
    }
    for demand in DEMAND.iter().filter(|demand| session.names(demand.table)).collect::<Vec<_>>() {
        first_faults(demand, populate, threads, arena, session)?;
    }
    if session.wants("populate") { first_touch(arena, populate, threads, session) } else { Ok(()) }
}

/// Huge pages of one size, and published rates in hundredths of a GB/s: faults that clear a page at a time and whole,
/// and the same where the kernel clears units of 8 MB.
struct Demand {
    table: &'static str,
    size: PageSize,
    whole: [u64; 2],
    units: Option<[u64; 2]>,
}

const DEMAND: [Demand; 2] = [
    Demand { table: "zero-demand-2m", size: PageSize::MIB_2, whole: [1292, 1703], units: None },
    Demand {
        table: "zero-demand-1g",
        size: PageSize::GIB_1,
        whole: [1726, 4217],
        units: Some([1714, 1804]),
    },
];

/// The unit of the published experiment where the kernel is not preempted.
const UNIT: ByteLen = ByteLen::mib(8);
const ARORA: &str = "Ankur Arora, contiguous page clearing v9, November 2025, EPYC 7J13: demand faults of \
     64 GB, scaled to as many bytes as here; naive before, ours after; in place: in units of 8 MB";

/// Touches at most `most` bytes of huge pages for the first time, and clears them in place.
fn first_faults(
    demand: &Demand,
    most: ByteLen,
    threads: NonZeroUsize,
    arena: &Arena,
    session: &mut Session<'_>,
) -> Result {
    let &Demand { table, size, whole, units } = demand;
    let page = size.bytes();
    let len = ByteLen::new(most.get() / page * page);
    if len.is_zero() {
        session.skip(table, format!("{most} have no page of {size}: raise --populate-size"));
        return Ok(());
    }
    let region = &match Region::hugetlb(len, size) {
        Ok(region) => region,
        Err(error) => {
            session.skip(table, uzone_os::with_causes(&error));
            return Ok(());
        }
    };
    let published = |hundredths: u64| {
        // Hundredths of a GB/s, so bytes by these is a hundredth of the nanoseconds.
        Some(Published { ns: len.get() * 100 / hundredths, source: ARORA.into() })
    };
    let [[before, after], [before_units, after_units]] =
        [Some(whole), units].map(|pair| pair.map_or([None, None], |pair| pair.map(published)));
    let mut suite = Suite::new(table, len).writing(len.get());
    add_limit(&mut suite, arena, arena.len, &format!("limit, {} again", bytes(arena.len)));
    let fresh = || region.punch(0..len.get());
    let first = |_: &str| fresh().map_err(BenchError::from).and_then(|()| timed(|| touch(region)));
    let spec = suite.add(Role::Naive, "naive", "naive, a byte of each page touched", first);
    spec.row.published = before;
    let mut rows = vec![("ours-1", "ours, populated".to_owned(), NonZeroUsize::MIN)];
    if threads.get() > 1 {
        rows.push(("ours-all", format!("ours, populated, {threads} threads"), threads));
    }
    for (row, name, threads) in rows {
        let options = PopulateOptions::default().threads(threads);
        let spec = suite.add(Role::Ours, row, name, move |_| {
            fresh()?;
            timed(|| Ok(black_box(region.populate(0..len.get(), &options)?)))
        });
        (spec.row.threads, spec.row.published) = (threads.get(), after.clone());
    }
    suite.naive("naive");
    for (role, row, name, unit, published) in [
        (
            Role::Naive,
            "place-page",
            "naive in place, a page at a time",
            ByteLen::new(PAGE),
            before_units,
        ),
        (Role::Ours, "place-units", "ours in place, 8 MiB at a time", UNIT, after_units),
        (Role::Ours, "place", "ours in place, whole", len, None),
    ] {
        let spec = suite.add(role, row, name, move |_| clear_in_place(region, unit));
        spec.naive("place-page").row.published = published;
    }
    suite.limit("limit");
    session.measure(
        suite,
        format!("First touch of {len} in pages of {size}, and clearing them in place"),
        "pages of the hugetlb pool; the limit is a bare streaming fill by one thread of memory that is present; \
             rows in place are compared with a page at a time in place",
    )
}

/// Touches memory for the first time.
fn first_touch(
    arena: &Arena,
    size: ByteLen,
    threads: NonZeroUsize,
    session: &mut Session<'_>,
) -> Result {
    let mut suite = Suite::new("populate", size).writing(size.get());
    add_limit(&mut suite, arena, arena.len, &format!("limit, {} again", bytes(arena.len)));
    let one = NonZeroUsize::MIN;
    let mut rows = vec![
        (Role::Naive, "naive", "naive, base pages touched", Huge::Never, one, false),
        (Role::Peer, "touch-1", "transparent huge pages touched", Huge::Preferred, one, false),
        (Role::Ours, "ours-1", "ours", Huge::Preferred, one, true),
    ];
    if threads.get() > 1 {
        rows.push((Role::Ours, "ours-all", "ours, all threads", Huge::Preferred, threads, true));
    }
    for (role, row, name, huge, threads, populates) in rows {
        let options = PopulateOptions::default().threads(threads).huge(huge);
        suite.threads = threads.get();
        // Each time a region of its own, which is given back outside of the time.
        let spec = suite.add(role, row, name, move |_| {
            let region = Region::anonymous(size)?;
            if huge == Huge::Never {
                region.mapping().advise_no_huge()?;
            }
            timed(|| {
                if !populates {
                    touch(&region)?;
                } else if !region.populate(0..region.len().get(), &options)?.is_whole() {
                    return Err(BenchError::size(region.len()));
                }
                Ok(())
            })
        });
        spec.naive("naive").limit("limit").row.cold = true;
        spec.row.headline = (row == "ours-1").then(|| format!("touch {size} first"));
    }
    session.measure(
        suite,
        format!("First touch of {size}"),
        "naive is a byte a page by one thread; the limit is a bare streaming fill by one thread \
               of memory that is present; a virtual machine's host may have to find the memory",
    )
}
