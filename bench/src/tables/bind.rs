//! `uzone-bench bind`: the published experiment on this machine.
//!
//! The kernel series that initialises device memory by template and streaming stores was measured
//! by binding a 100 GB namespace 30 times. Here a region of that size is reserved (its bytes are
//! never touched) and bound as often, for base pages and for 2 MiB folios:
//!
//! | row | work |
//! |---|---|
//! | naive | a call for each page that sets field after field, as a port of the kernel's code would |
//! | template | a template for each run, by plain stores and by the published streaming store |
//! | ours | a bind on one thread with default options |
//! | limit | a bare fill of the same number of bytes with a constant line, by the widest store |
//!
//! All of them write memory that is present, except in rows with `cold` in their name.

mod dax;

use std::cell::RefCell;
use std::time::Duration;

use uzone_harness::ways::bind::{keeping, linux, rebind, small};
use uzone_harness::ways::naive_bind as naive;
use uzone_harness::{
    Bench, BenchError, Published, Result, Role, Session, Suite, Watch, check_memory, fill_lines,
    fill_zeroes, index, present, timed,
};
use uzone_pages::{ByteLen, LinuxPage, MemoryKind, Order, Tails};
use uzone_stream::Path as StorePath;
use uzone_zone::{AltmapOptions, BindOptions, Region, Zone};

use crate::settings::{BindSettings, Part};

/// One shape of the published experiment.
struct Shape {
    table: &'static str,
    pages: &'static str,
    order: Order,
    /// Nanoseconds of rebinds: naive, by the template, by the template and MOVNTI (of v1), and by the whole series.
    published: [u64; 4],
    /// The end of the lines of the summary.
    headline: &'static str,
}

const V1: &str = "v1, May 2026";
const V3: &str = "v3, May 2026";
const V3_FIRST: &str = ", first bind: 1486 ms before, 1422 by the template, 1285 by streaming, in v1 1272 (devdax \
     with 2 MiB pages: 1515, 1422, 1331, in v1 1286)";

/// The rows of first binds of base pages, and their published nanoseconds: before, by the template alone, and by
/// streaming stores as well.
const FIRST: [(&str, u64); 3] =
    [("naive", 1_486_000_000), ("template-portable", 1_422_000_000), ("ours-1", 1_285_000_000)];

const SHAPES: [Shape; 2] = [
    Shape {
        table: "bind-4k",
        pages: "base pages",
        order: Order::BASE,
        published: [273_520_000, 246_650_000, 104_590_000, 114_310_000],
        headline: "64-byte descriptors",
    },
    Shape {
        table: "bind-2m",
        pages: "2 MiB folios with stored tails",
        order: Order::PMD,
        published: [313_450_000, 240_420_000, 116_930_000, 99_370_000],
        headline: "64-byte descriptors, 2 MiB folios",
    },
];

/// The memory of the published times. Each page takes the same work, so that they are scaled to other sizes.
const PUBLISHED_SIZE: ByteLen = ByteLen::gib(100);

/// The memory for which the savings of Linux for descriptors of folios were published.
const COMPOUND_SIZE: ByteLen = ByteLen::gib(128);
const MARTINS_2M: &str = "Joao Martins, compound devmap, 2021: bootstrap of a namespace of 128 GB, from 268 to \
     358 ms to 78 to 100; initialisation of descriptors alone from 190 to 80; scaled to as many pages as here";
const MARTINS_1G: &str = "Joao Martins, compound devmap, 2021: bootstrap of a namespace of 128 GB with pages of \
     1 GiB, from 268 to 358 ms to less than 1; scaled to as many pages as here";

/// Returns a time published by a version of the series, scaled to `size`. `note` is added to the source; it is empty
/// for rebinds.
fn li_zhe(ns: u64, version: &str, note: &str, size: ByteLen) -> Option<Published> {
    let source = format!(
        "Li Zhe, memmap template and streaming copy, {version}, Ice Lake VM, 100 GB{note}; scaled to as many \
         pages as here"
    );
    Some(Published::scaled(ns, size.get(), PUBLISHED_SIZE.get(), source))
}

const NAIVE: &str = "bind-4k/naive";
const LINE_ONE: &str = "bind-limit/line-1";
const LINE_MANY: &str = "bind-limit/line-all";

/// Runs the tables.
pub(crate) fn run(settings: &BindSettings, part: &Part, watch: Watch<'_>) -> Result<Bench> {
    let &BindSettings { size, rebinds, first_binds, threads, ref dax } = settings;
    // Before minutes are spent.
    if size.is_zero() || !size.get().is_multiple_of(1 << 30) {
        return Err(BenchError::size(size));
    }
    // Descriptors of 64 bytes, twice: bound, and for the limit; and a fifth on top.
    let (pages, threads) = (size.get() >> 12, threads.get());
    check_memory(ByteLen::new(pages * 64 / 5 * 12))?;
    let sentence = format!(
        "{size} described ({pages} pages), {rebinds} rebinds, {first_binds} first binds, up to {threads} threads"
    );
    let mut session = part.session(sentence, rebinds, watch);
    if session.wants_any(&["bind-4k", "bind-2m", "bind-small", "bind-limit"]) {
        all_rebinds(size, threads, &mut session)?;
    }
    if session.wants("bind-altmap") {
        altmap(size, threads, &mut session)?;
    }
    if let Some(path) = dax.as_deref().filter(|_| session.wants(dax::TABLE)) {
        dax::table(path, threads, &mut session)?;
    }
    if first_binds > 0 && session.wants("bind-first") {
        session.rounds = first_binds;
        all_first_binds(size, &mut session)?;
    }
    session.finish()
}

/// Measures rebinds of both shapes, of fewer bytes for the same pages, and bare fills.
fn all_rebinds(size: ByteLen, threads: usize, session: &mut Session<'_>) -> Result {
    let pages = size.get() >> 12;
    let (linux_bytes, small_bytes) = (pages * 64, pages * 8);
    // One zone for all: every row writes the same memory.
    let zone = &keeping(linux_bytes + small_bytes);
    let limit = &RefCell::new(present(ByteLen::new(linux_bytes))?);
    let mut suite = Suite::new("bind-limit", size);
    type Fill = fn(&mut [u8], usize) -> Result<Duration>;
    let fills: [(&str, &str, Fill, u64, usize); 3] = [
        (LINE_ONE, "bare fill, 1 thread", fill_lines, linux_bytes, 1),
        ("bind-limit/zero-1", "bare fill with zeroes, 1 thread", fill_zeroes, small_bytes, 1),
        (LINE_MANY, "bare fill, all threads", fill_lines, linux_bytes, threads),
    ];
    for (id, name, fill, bytes, threads) in fills {
        if id == LINE_MANY && threads == 1 {
            continue;
        }
        (suite.bytes, suite.threads) = (bytes, threads);
        suite.add(Role::Limit, id, name, move |_| {
            fill(&mut limit.borrow_mut().as_bytes_mut()[..index(bytes)], threads)
        });
    }
    for shape in &SHAPES {
        (suite.bytes, suite.threads) = (linux_bytes, 1);
        let id = |row: &str| format!("{}/{row}", shape.table);
        let template = naive::template(size, shape.order, Some(limit.borrow().addr()))?;
        naive::check(&template, &mut limit.borrow_mut(), &id("naive"))?;
        suite.add(Role::Naive, &id("naive"), "naive, field by field", move |_| {
            naive::rebind(&template, &mut limit.borrow_mut())
        });
        for (role, row, name, options) in shape.ways(threads) {
            suite.bind(role, &id(row), name, zone, options)?;
        }
        let versions = [V3, V3, V1, V3];
        let rows = ["naive", "template-portable", "template-movnti", "ours-1"];
        for row in rows.into_iter().chain(["ours-all"]) {
            let Some(spec) = suite.spec(&id(row)) else { continue };
            spec.naive(&id("naive"));
            spec.limit(if row == "ours-all" { LINE_MANY } else { LINE_ONE });
            if let Some(place) = rows.iter().position(|known| *known == row) {
                spec.row.published = li_zhe(shape.published[place], versions[place], "", size);
            }
            if row == "ours-1" {
                spec.headline(format!("describe {size}: {}, again", shape.headline));
            }
        }
        session.table(
            shape.table,
            format!("Rebind, {}, 64-byte Linux descriptors", shape.pages),
            "memory present; the limit is a bare fill of the same bytes",
        );
    }
    small_rows(&mut suite, zone, size)?;
    session.table(
        "bind-small",
        "Rebind, fewer bytes for the same pages",
        "naive is the 64-byte row of base pages",
    );
    session.table("bind-limit", "The limit of this machine", "by the widest store that wins here");
    session.run(suite, "rebinds")
}

impl Shape {
    /// Returns the options for Linux's descriptors in the shape.
    fn linux(&self, threads: usize) -> BindOptions<LinuxPage> {
        linux(self.order, Tails::Stored, threads)
    }

    /// Returns our ways of writing them: role, id without the table, name and options.
    fn ways(&self, threads: usize) -> Vec<(Role, &'static str, String, BindOptions<LinuxPage>)> {
        let template = |path| self.linux(1).stamp(Some(path));
        let plain = "template, plain stores".to_owned();
        let mut ways =
            vec![(Role::Variant, "template-portable", plain, template(StorePath::Portable))];
        if StorePath::Movnti.is_available() {
            let name = "template, movnti stores".to_owned();
            ways.push((Role::Variant, "template-movnti", name, template(StorePath::Movnti)));
        }
        ways.push((Role::Ours, "ours-1", "ours".to_owned(), self.linux(1)));
        if threads > 1 {
            let name = format!("ours, {threads} threads");
            ways.push((Role::Ours, "ours-all", name, self.linux(threads)));
        }
        ways
    }
}

/// Adds the rows that write fewer bytes for the same pages.
fn small_rows<'a>(suite: &mut Suite<'a>, zone: &'a Zone, size: ByteLen) -> Result {
    let name = "8-byte descriptors, base pages, eager";
    suite
        .bind(Role::Ours, "bind-small/eager-8-bytes", name, zone, small(Order::BASE))?
        .naive(NAIVE)
        .limit("bind-limit/zero-1")
        .headline(format!("describe {size}: 8-byte descriptors, all written"));
    let name = "8-byte descriptors, base pages, on touch";
    let options = BindOptions::new(MemoryKind::Generic);
    suite
        .bind(Role::Ours, "bind-small/on-touch", name, zone, options)?
        .naive(NAIVE)
        .headline(format!("describe {size}: 8-byte descriptors, on touch"));
    for (order, id, folio, ns, source) in [
        (Order::PMD, "2m", "2 MiB", 78_000_000, MARTINS_2M),
        (Order::PUD, "1g", "1 GiB", 1_000_000, MARTINS_1G),
    ] {
        let name = format!("64-byte descriptors, {folio} folios, derived tails, eager");
        let options = linux(order, Tails::Derived, 1);
        let id = format!("bind-small/derived-{id}-64-bytes");
        let spec = suite.bind(Role::Ours, &id, name, zone, options)?;
        let published = Published::scaled(ns, size.get(), COMPOUND_SIZE.get(), source);
        spec.naive(NAIVE).row.published = Some(published);
    }
    Ok(())
}

/// The largest region that holds its own descriptors: they take a 64th of it, and its data is never touched.
const ALTMAP: ByteLen = ByteLen::gib(16);

/// Binds and unbinds memory that holds its own descriptors, which an unbind clears.
fn altmap(size: ByteLen, threads: usize, session: &mut Session<'_>) -> Result {
    let size = size.min(ALTMAP);
    let bytes = (size.get() >> 12) * 64;
    let zone = &keeping(bytes);
    let mut suite = Suite::new("bind-altmap", size).writing(bytes).threads(threads);
    let own = || linux(Order::BASE, Tails::Stored, threads);
    let inside = || own().altmap(AltmapOptions::new());
    type Time = fn((Duration, Duration)) -> Duration;
    type Row<'r> = (Role, &'r str, &'r str, BindOptions<LinuxPage>, Time);
    let rows: [Row<'_>; 3] = [
        (Role::Peer, "own", "memory of their own, bind and unbind", own(), |(_, both)| both),
        (Role::Ours, "both", "in the region, bind and unbind", inside(), |(_, both)| both),
        (Role::Variant, "bind", "in the region, bind", inside(), |(bound, _)| bound),
    ];
    for (role, row, name, options, time) in rows {
        let mut region = Some(Region::anonymous(size)?);
        let spec = suite.add(role, row, name, move |_| {
            Ok(time(rebind(&mut region, zone, options.clone(), |_| Ok(()))?))
        });
        // The published namespace of base pages had its descriptors in itself.
        let published = li_zhe(SHAPES[0].published[3], V3, "", size);
        spec.row.published = published.filter(|_| row == "bind");
    }
    session.measure(
        suite,
        format!("Descriptors in the region itself: {size}, base pages, 64 bytes each"),
        format!(
            "anonymous memory, again; unbind clears the descriptors in place; {threads} threads"
        ),
    )
}

/// Measures first binds of base pages.
fn all_first_binds(size: ByteLen, session: &mut Session<'_>) -> Result {
    let (shape, fresh) = (&SHAPES[0], Zone::with_keep_limit(ByteLen::ZERO));
    let bytes = (size.get() >> 12) * 64;
    let mut suite = Suite::new("bind-first", size).writing(bytes);
    let template = naive::template(size, shape.order, None)?;
    suite.add(Role::Naive, "naive", "naive, faulting 4 KiB pages as it goes", move |_| {
        naive::first_bind(&template)
    });
    suite.add(Role::Limit, "clearing", "the kernel's clearing alone, huge pages", move |_| {
        timed(|| present(ByteLen::new(bytes)))
    });
    let plain = shape.linux(1).stamp(Some(StorePath::Portable));
    let name = "template, plain stores, fresh memory";
    suite.bind(Role::Variant, "template-portable", name, &fresh, plain)?;
    suite.bind(Role::Ours, "ours-1", "ours, fresh memory", &fresh, shape.linux(1))?;
    for (row, ns) in FIRST {
        if let Some(spec) = suite.spec(row) {
            spec.limit("clearing").row.published = li_zhe(ns, V3, V3_FIRST, size);
        }
    }
    if let Some(spec) = suite.spec("ours-1") {
        spec.headline(format!("describe {size}: {}, first time", shape.headline));
    }
    suite.naive("naive").each_spec(|spec| spec.row.cold = true);
    // Takes memory and gives it back, so that the host of a VM has it ready: the case that takes as much pays for this
    // kernel's work and not for the host's.
    suite.before_each(move || present(ByteLen::new(bytes)).map(drop));
    session.measure(
        suite,
        format!("First bind, {}, 64-byte Linux descriptors", shape.pages),
        "cold: memory fresh from the kernel, which a host below it was made to have ready; \
             the limit is the kernel's clearing of it",
    )
}
