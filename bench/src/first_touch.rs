//! Clearing in place beside the kernel's own clearing, and first touch: `zero-kernel`, `zero-demand-2m`,
//! `zero-demand-1g`, `populate`.
//!
//! The kernel clears pages that were given back and are touched again. That is measured for base
//! pages, transparent huge pages and a hugetlb pool; for the last, pages are put into the pool for the
//! time of the run and taken out again, which takes root. The published experiment touched pages of such
//! pools for the first time, of 2 MiB and of 1 GiB.

use std::hint::black_box;
use std::num::NonZeroUsize;
use std::sync::atomic::Ordering;
use std::time::Instant;

use uzone_pages::ByteLen;
use uzone_zone::{
    Backing, Batching, CopyMethod, Huge, HugeSize, PopulateOptions, Region, WriteError, ZeroOptions,
};

use crate::extents::Arena;
use crate::put_back;
use crate::report::{Published, Role};
use crate::suite::{BenchError, Session, Suite, bytes, cause, check_memory, fill_zeroes};

/// How much is given back and touched again, at most.
const TOUCHED: ByteLen = ByteLen::mib(256);
const PAGE: u64 = 4096;

/// Refuses what there is not the memory for, before minutes are spent.
pub(crate) fn check(populate: ByteLen) -> Result<(), BenchError> {
    // Of what is there, a tenth is left to others.
    let needed = ByteLen::new(populate.get() / 10 * 11);
    check_memory(needed)
}

/// Makes a pool of huge pages larger for a run. It is put back when that ends, or a signal ends it.
fn raise_pool(size: HugeSize, pages: u64) -> Result<put_back::Changed, String> {
    let path = size.nr_path();
    let said = |error: std::io::Error| format!("{path}: {error}: run as root");
    let before = std::fs::read_to_string(&path).map_err(said)?;
    let total = before.trim().parse::<u64>().map_err(|error| error.to_string())? + pages;
    let (written, file) = (total.to_string(), path.clone());
    let changed = put_back::change(
        || std::fs::write(&path, written),
        move || {
            // An error cannot be reported here; `uzone doctor` shows the pool as it is.
            let _ = std::fs::write(&file, &before);
        },
    )
    .map_err(said)?;
    let got = std::fs::read_to_string(&path).map_err(said)?;
    if got.trim().parse::<u64>().is_ok_and(|got| got >= total) {
        Ok(changed)
    } else {
        Err(format!("asked for {total} huge pages and got {}: free memory", got.trim()))
    }
}

/// Writes a byte to every page of a region, by one thread.
fn touch(region: &Region) -> Result<(), BenchError> {
    let words = region.mapping().as_words(0..region.len().get()).map_err(WriteError::from)?;
    for word in words.iter().step_by(usize::try_from(PAGE / 8).unwrap_or(512)) {
        word.store(1, Ordering::Relaxed); // no other thread reads it
    }
    Ok(())
}

/// Clears in place, and by giving pages back.
pub(crate) fn kernel(arena: &Arena, session: &mut Session<'_>) -> Result<(), BenchError> {
    let len = TOUCHED.min(ByteLen::new(arena.len as u64));
    let whole = || 0..len.get();
    // Given back in the reverse order, the pages of the pool after the region that has them.
    let pool = raise_pool(HugeSize::MIB_2, len.get() >> 21);
    let mut regions = Vec::new();
    for (row, huge) in [("thp", Huge::Preferred), ("4k", Huge::Never)] {
        let region = Region::anonymous(len)?;
        let report = region.populate(whole(), &PopulateOptions::default().huge(huge))?;
        let is_as_named = (huge == Huge::Never) == report.huge.is_zero();
        if is_as_named {
            regions.push((row, region));
        } else {
            let reason = format!("{report}");
            session.skip(format!("zero-kernel/{row}-touch"), reason);
        }
    }
    let hugetlb = match &pool {
        Ok(_) => Region::hugetlb(len, HugeSize::MIB_2).map_err(|error| cause(&error)),
        Err(reason) => Err(reason.clone()),
    };
    match hugetlb {
        Ok(region) => regions.push(("hugetlb", region)),
        Err(reason) => session.skip("zero-kernel/hugetlb-touch", reason),
    }
    let mut suite = Suite::new(len);
    let limit = "zero-kernel/limit".to_owned();
    let part = usize::try_from(len.get()).unwrap_or(arena.len).min(arena.len);
    suite.add(Role::Limit, &limit, "limit", bytes(part).get(), 1, || {
        arena.with_next(part, |dst| fill_zeroes(dst, 1))
    });
    for (row, region) in &regions {
        let name = match region.backing() {
            Backing::Hugetlb(_) => "hugetlb 2 MiB pages",
            _ if *row == "thp" => "transparent huge pages",
            _ => "base pages",
        };
        let id = |what: &str| format!("zero-kernel/{row}-{what}");
        let what = format!("{name}: ours, in place");
        suite.add(Role::Ours, &id("ours"), what, len.get(), 1, || {
            touch(region)?; // whatever the row before left
            let started = Instant::now();
            let done = region.zero_range(0, len, &ZeroOptions::default())?;
            let _ = black_box(done);
            Ok(started.elapsed())
        });
        let what = format!("{name}: given back and touched");
        suite.add(Role::Naive, &id("touch"), what, len.get(), 1, || {
            touch(region)?;
            let started = Instant::now();
            region.punch(whole())?;
            touch(region)?;
            Ok(started.elapsed())
        });
        let populate = PopulateOptions::default().threads_per_node(NonZeroUsize::MIN);
        let what = format!("{name}: given back, populated");
        suite.add(Role::Variant, &id("populate"), what, len.get(), 1, {
            let populate = populate.huge(if *row == "4k" { Huge::Never } else { Huge::Preferred });
            move || {
                touch(region)?;
                let started = Instant::now();
                region.punch(whole())?;
                let _ = black_box(region.populate(whole(), &populate)?);
                Ok(started.elapsed())
            }
        });
    }
    suite.each_spec(|spec| {
        spec.limit(limit.clone(), bytes(part).get());
        // Each against its own pages given back and touched.
        spec.naive = spec
            .id
            .rsplit_once('-')
            .filter(|_| spec.id != limit)
            .map(|(row, _)| format!("{row}-touch"));
    });
    session.run(suite, "the kernel's own clearing")?;
    session.table(
        "zero-kernel",
        format!("Clearing {len} in place, and by giving the pages back to the kernel"),
        "one thread; naive is to give the same pages back and touch them",
    );
    Ok(())
}

/// Huge pages of one size, and what was published of them in hundredths of a GB/s: faults that clear a page at
/// a time and whole, and the same where the kernel clears units of 8 MB.
pub(crate) struct Demand {
    pub(crate) table: &'static str,
    size: HugeSize,
    whole: [u64; 2],
    units: Option<[u64; 2]>,
}

pub(crate) const DEMAND: [Demand; 2] = [
    Demand { table: "zero-demand-2m", size: HugeSize::MIB_2, whole: [1292, 1703], units: None },
    Demand {
        table: "zero-demand-1g",
        size: HugeSize::GIB_1,
        whole: [1726, 4217],
        units: Some([1714, 1804]),
    },
];

/// What the published experiment cleared at a time where the kernel is not preempted.
const UNIT: ByteLen = ByteLen::mib(8);
const ARORA: &str = "Ankur Arora, contiguous page clearing v9, November 2025, EPYC 7J13: demand faults of \
     64 GB, scaled to as many bytes as here; naive before, ours after; in place: in units of 8 MB";

/// Touches huge pages for the first time, at most so many bytes of them, and clears them in place.
pub(crate) fn demand(
    demand: &Demand,
    most: ByteLen,
    threads: NonZeroUsize,
    arena: &Arena,
    session: &mut Session<'_>,
) -> Result<(), BenchError> {
    let &Demand { table, size, whole, units } = demand;
    let page = size.page_size().bytes();
    let len = ByteLen::new(most.get() / page * page);
    if len.is_zero() {
        session.skip(table, format!("{most} have no page of {size}: raise --populate-size"));
        return Ok(());
    }
    let held = match raise_pool(size, len.get() / page) {
        Ok(changed) => (changed, Region::hugetlb(len, size)?),
        Err(reason) => {
            session.skip(table, reason);
            return Ok(());
        }
    };
    let region = &held.1;
    let id = |row: &str| format!("{table}/{row}");
    let published = |hundredths: u64| {
        // Hundredths of a GB/s, so bytes by these is a hundredth of the nanoseconds.
        Some(Published { ns: len.get() * 100 / hundredths, source: ARORA.into() })
    };
    let [[before, after], [before_units, after_units]] =
        [Some(whole), units].map(|pair| pair.map_or([None, None], |pair| pair.map(published)));
    let mut suite = Suite::new(len);
    let again = bytes(arena.len).get();
    let name = format!("limit, {} again", bytes(arena.len));
    suite.add(Role::Limit, &id("limit"), name, again, 1, || {
        arena.with_next(arena.len, |dst| fill_zeroes(dst, 1))
    });
    let fresh = || region.punch(0..len.get());
    let name = "naive, a byte of each page touched";
    let spec = suite.add(Role::Naive, &id("naive"), name, len.get(), 1, || {
        fresh()?;
        let started = Instant::now();
        touch(region)?;
        Ok(started.elapsed())
    });
    spec.published = before;
    let mut rows = vec![("ours-1", "ours, populated".to_owned(), NonZeroUsize::MIN)];
    if threads.get() > 1 {
        rows.push(("ours-all", format!("ours, populated, {threads} threads"), threads));
    }
    for (row, name, threads) in rows {
        let options = PopulateOptions::default().threads_per_node(threads);
        let populate = move || {
            fresh()?;
            let started = Instant::now();
            let _ = black_box(region.populate(0..len.get(), &options)?);
            Ok(started.elapsed())
        };
        suite.add(Role::Ours, &id(row), name, len.get(), threads.get(), populate).published =
            after.clone();
    }
    let by_page = ZeroOptions::default().way(CopyMethod::String);
    for (role, row, name, options, published) in [
        (
            Role::Naive,
            "place-page",
            "naive in place, a page at a time",
            by_page.batching(Batching::Bytes(ByteLen::new(PAGE))),
            before_units,
        ),
        (
            Role::Ours,
            "place-units",
            "ours in place, 8 MiB at a time",
            ZeroOptions::default().batching(Batching::Bytes(UNIT)),
            after_units,
        ),
        (Role::Ours, "place", "ours in place, whole", ZeroOptions::default(), None),
    ] {
        let spec = suite.add(role, &id(row), name, len.get(), 1, move || {
            touch(region)?; // whatever the row before left
            let started = Instant::now();
            let _ = black_box(region.zero_range(0, len, &options)?);
            Ok(started.elapsed())
        });
        spec.published = published;
    }
    suite.each_spec(|spec| {
        let naive = if spec.id.contains("/place") { "place-page" } else { "naive" };
        spec.naive(id(naive)).limit(id("limit"), again);
    });
    session.run(suite, &format!("demand faults of {size}"))?;
    session.table(
        table,
        format!("First touch of {len} in pages of {size}, and clearing them in place"),
        "pages of the hugetlb pool; the limit is a bare streaming fill by one thread of memory that is present; \
             rows in place are compared with a page at a time in place",
    );
    Ok(())
}

/// Touches memory for the first time.
pub(crate) fn populate(
    arena: &Arena,
    size: ByteLen,
    threads: NonZeroUsize,
    session: &mut Session<'_>,
) -> Result<(), BenchError> {
    let mut suite = Suite::new(size);
    let limit = "populate/limit".to_owned();
    let written = bytes(arena.len).get();
    let name = format!("limit, {} again", bytes(arena.len));
    suite.add(Role::Limit, &limit, name, written, 1, || {
        arena.with_next(arena.len, |dst| fill_zeroes(dst, 1))
    });
    let (one, all) = (NonZeroUsize::MIN, threads);
    let (base, huge) = (Huge::Never, Huge::Preferred);
    let mut rows = vec![
        (Role::Naive, "naive", "naive, base pages touched", base, one, false),
        (Role::Variant, "base-1", "base pages populated", base, one, true),
        (Role::Peer, "touch-1", "transparent huge pages touched", huge, one, false),
        (Role::Ours, "ours-1", "ours", huge, one, true),
    ];
    if threads.get() > 1 {
        rows.push((Role::Ours, "ours-all", "ours, all threads", huge, all, true));
    }
    for (role, row, name, huge, threads, populates) in rows {
        let options = PopulateOptions::default().threads_per_node(threads).huge(huge);
        // Each time a region of its own, which is given back outside of the time.
        let first_touch = move || {
            let region = Region::anonymous(size)?;
            if huge == Huge::Never {
                region.mapping().advise_no_huge()?;
            }
            let started = Instant::now();
            if !populates {
                touch(&region)?;
            } else if !region.populate(0..region.len().get(), &options)?.is_whole() {
                return Err(BenchError::Size { size: region.len() });
            }
            Ok(started.elapsed())
        };
        let (id, threads) = (format!("populate/{row}"), threads.get());
        let spec = suite.add(role, &id, name, size.get(), threads, first_touch);
        spec.naive("populate/naive").limit(limit.clone(), written).cold = true;
        spec.headline = (row == "ours-1").then(|| format!("touch {size} first"));
    }
    session.run(suite, "first touch")?;
    session.table(
        "populate",
        format!("First touch of {size}"),
        "naive is a byte a page by one thread; the limit is a bare streaming fill by one thread \
               of memory that is present; a virtual machine's host may have to find the memory",
    );
    Ok(())
}
