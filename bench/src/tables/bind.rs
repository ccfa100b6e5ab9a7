//! `uzone-bench bind`: the published experiment on this machine.
//!
//! The kernel series that initialises device memory by template and streaming stores was measured
//! by binding a 100 GB namespace 30 times. Here a region of that size is reserved (its bytes are
//! never touched) and bound as often, for base pages and for 2 MiB folios, in every way there is:
//!
//! | row | what it does |
//! |---|---|
//! | naive | a call for each page that sets field after field, as a port of the kernel's code would |
//! | slow path | ours of that kind: the oracle of the tests, and what runs while a tracer listens |
//! | template | a template for each run, by plain stores |
//! | template, *store* | the same by each streaming store that this CPU has |
//! | ours | what bind does on one thread with default options |
//! | limit | a bare fill of the same number of bytes with a constant line, by the widest store |
//!
//! All of them write memory that is present, except in rows with `cold` in their name.

mod dax;

use std::cell::RefCell;
use std::time::Duration;

use uzone_os::{Exclusive, HugeAdvice};
use uzone_pages::{ByteLen, LinuxPage, MemoryKind, Order, Tails};
use uzone_stream::Path as StorePath;
use uzone_zone::{AltmapOptions, BindOptions, InitMethod, Region, Zone};

use crate::settings::{BindSettings, Part};
use uzone_harness::{
    Bench, BenchError, Published, Result, Role, Session, Suite, Watch, check_memory, fill_lines,
    fill_zeroes, index, present, timed,
};

use uzone_harness::ways::bind::{keeping, linux, rebind, small};
use uzone_harness::ways::naive_bind as naive;

/// One shape of the published experiment.
struct Shape {
    table: &'static str,
    title: &'static str,
    order: Order,
    /// Nanoseconds of a row, and the version that published them. The last, without a name, is for the row
    /// of the widest store.
    published: [(&'static str, u64, &'static str); 6],
    /// What it stands for in the summary.
    headline: &'static str,
    /// The table of first binds, and its title.
    first: [&'static str; 2],
    /// Nanoseconds of the first bind: before, by the template alone, and by streaming stores as well.
    published_first: [u64; 3],
    /// What the first bind stands for in the summary, if it does.
    first_headline: Option<&'static str>,
}

const V1: &str = "v1, May 2026";
const V3: &str = "v3, May 2026";
const V5: &str = "v5, July 2026";
const V3_FIRST: &str = ", first bind: 1486 ms before, 1422 by the template, 1285 by streaming, in v1 1272 (devdax \
     with 2 MiB pages: 1515, 1422, 1331, in v1 1286)";

const SHAPES: [Shape; 2] = [
    Shape {
        table: "bind-4k",
        title: "Rebind, base pages, 64-byte Linux descriptors",
        order: Order::BASE,
        published: [
            ("naive", 273_520_000, V3),
            ("slow-path", 273_520_000, V3),
            ("template-portable", 246_650_000, V3),
            ("template-movnti", 104_590_000, V1),
            ("ours-1", 114_310_000, V3),
            ("", 96_790_000, V5),
        ],
        headline: "64-byte descriptors, again",
        first: ["bind-first", "First bind, base pages, 64-byte Linux descriptors"],
        published_first: [1_486_000_000, 1_422_000_000, 1_285_000_000],
        first_headline: Some("64-byte descriptors, first time"),
    },
    Shape {
        table: "bind-2m",
        title: "Rebind, 2 MiB folios with stored tails, 64-byte Linux descriptors",
        order: Order::PMD,
        published: [
            ("naive", 313_450_000, V3),
            ("slow-path", 313_450_000, V3),
            ("template-portable", 240_420_000, V3),
            ("template-movnti", 116_930_000, V1),
            ("ours-1", 99_370_000, V3),
            ("", 119_040_000, V5),
        ],
        headline: "64-byte descriptors, 2 MiB folios, again",
        first: [
            "bind-first-2m",
            "First bind, 2 MiB folios with stored tails, 64-byte Linux descriptors",
        ],
        published_first: [1_515_000_000, 1_422_000_000, 1_331_000_000],
        first_headline: None,
    },
];

/// The published times are for this much memory. Each page takes the same work, so that they are
/// scaled to other sizes.
const PUBLISHED_SIZE: ByteLen = ByteLen::gib(100);

/// What Linux saves of descriptors of folios was published for this much.
const COMPOUND_SIZE: ByteLen = ByteLen::gib(128);
const MARTINS_2M: &str = "Joao Martins, compound devmap, 2021: bootstrap of a namespace of 128 GB, from 268 to \
     358 ms to 78 to 100; initialisation of descriptors alone from 190 to 80; scaled to as many pages as here";
const MARTINS_1G: &str = "Joao Martins, compound devmap, 2021: bootstrap of a namespace of 128 GB with pages of \
     1 GiB, from 268 to 358 ms to less than 1; scaled to as many pages as here";

/// Returns a time published by a version of the series, scaled to `size`. `what` is added to the source; it is
/// empty for rebinds.
fn li_zhe(ns: u64, version: &str, what: &str, size: ByteLen) -> Published {
    let source = format!(
        "Li Zhe, memmap template and streaming copy, {version}, Ice Lake VM, 100 GB{what}; scaled to as many \
         pages as here"
    );
    Published::scaled(ns, size.get(), PUBLISHED_SIZE.get(), source)
}

/// Returns whether the table can be run: before minutes are spent.
fn check(settings: &BindSettings) -> Result {
    let size = settings.size;
    if size.is_zero() || !size.get().is_multiple_of(1 << 30) {
        return Err(BenchError::size(size));
    }
    // Descriptors of 64 bytes, twice: bound, and for the limit; and a fifth on top.
    let needed = ByteLen::new((size.get() >> 12) * 64 / 5 * 12);
    check_memory(needed)
}

/// Runs the whole table.
pub(crate) fn run(settings: &BindSettings, part: &Part, watch: Watch<'_>) -> Result<Bench> {
    check(settings)?;
    let (size, pages) = (settings.size, settings.size.get() >> 12);
    let sentence = format!(
        "{size} described ({pages} pages), {} rebinds, {} first binds, up to {} threads",
        settings.rebinds, settings.first_binds, settings.threads
    );
    let mut session = part.session(sentence, settings.rebinds, watch);
    if session.wants_any(&["bind-4k", "bind-2m", "bind-small", "bind-limit"]) {
        rebinds(settings, &mut session)?;
    }
    if session.wants("bind-altmap") {
        altmap(settings, &mut session)?;
    }
    if let Some(path) = settings.dax.as_deref().filter(|_| session.wants(dax::TABLE)) {
        dax::table(path, settings, &mut session)?;
    }
    for shape in &SHAPES {
        if settings.first_binds > 0 && session.wants(shape.first[0]) {
            session.rounds = settings.first_binds;
            first_binds(shape, settings, &mut session)?;
        }
    }
    session.finish()
}

fn rebinds(settings: &BindSettings, session: &mut Session<'_>) -> Result {
    let pages = settings.size.get() >> 12;
    let (linux_bytes, small_bytes) = (pages * 64, pages * 8);
    let threads = settings.threads.get();
    // One zone for all: every row writes the same memory.
    let zone = keeping(linux_bytes + small_bytes);
    let limit = RefCell::new(present(ByteLen::new(linux_bytes))?);
    let mut suite = Suite::new("bind-limit", settings.size);
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
        let limit = &limit;
        (suite.bytes, suite.threads) = (bytes, threads);
        suite.add(Role::Limit, id, name, move |_| {
            fill(&mut limit.borrow_mut().as_bytes_mut()[..index(bytes)], threads)
        });
    }

    (suite.bytes, suite.threads) = (linux_bytes, 1);
    for shape in &SHAPES {
        shape.add(settings, &zone, &limit, &mut suite, session)?;
        let note = "memory present; the limit is a bare fill of the same bytes";
        session.table(shape.table, shape.title, note);
    }
    small_rows(&mut suite, &zone, settings.size)?;
    session.table(
        "bind-small",
        "Rebind, fewer bytes for the same pages",
        "naive is the 64-byte row of base pages",
    );
    session.table("bind-limit", "The limit of this machine", "by the widest store that wins here");
    session.run(suite, "rebinds")
}

impl Shape {
    /// Adds the rows of the shape. `limit` is the memory that bare fills write.
    fn add<'a>(
        &self,
        settings: &BindSettings,
        zone: &'a Zone,
        limit: &'a RefCell<Exclusive>,
        suite: &mut Suite<'a>,
        session: &mut Session<'_>,
    ) -> Result {
        let id = |row: &str| format!("{}/{row}", self.table);
        let (size, naive) = (settings.size, &*id("naive"));
        let template = naive::template(size, self.order, Some(limit.borrow().addr()))?;
        naive::check(&template, &mut limit.borrow_mut(), naive)?;
        let rebind = move |_: &str| naive::rebind(&template, &mut limit.borrow_mut());
        let spec = suite.add(Role::Naive, naive, "naive, field by field", rebind);
        spec.naive(naive).limit(LINE_ONE).row.published = self.published("naive", size);
        for path in StorePath::ALL.into_iter().filter(|path| !path.is_available()) {
            session.skip(id(&format!("template-{path}")), "this CPU does not offer it");
        }
        for (role, row, name, options) in self.ways(settings.threads.get()) {
            let limit = if row == "ours-all" { LINE_MANY } else { LINE_ONE };
            let spec = suite.bind(role, &id(&row), name, zone, options)?;
            spec.naive(naive).limit(limit);
            spec.row.published = self.published(&row, size);
            if row == "ours-1" {
                spec.headline(format!("describe {size}: {}", self.headline));
            }
        }
        let (row, name) = (id("ours-first-kept"), "ours, first bind of another region");
        suite.bind_another(&row, name, zone, self.linux(1)).naive(naive).limit(LINE_ONE);
        Ok(())
    }

    /// Returns what was published of a row.
    fn published(&self, row: &str, size: ByteLen) -> Option<Published> {
        let of = |known: &str| self.published.iter().find(|(row, ..)| *row == known);
        let is_widest = row == format!("template-{}", uzone_stream::best());
        let (_, ns, version) = of(row).or_else(|| of("").filter(|_| is_widest))?;
        Some(li_zhe(*ns, version, "", size))
    }

    /// Returns the options for Linux's descriptors in the shape.
    fn linux(&self, threads: usize) -> BindOptions<LinuxPage> {
        linux(self.order, Tails::Stored, threads)
    }

    /// Returns our ways of writing them: what a row is, its id without the table, its name and its options.
    fn ways(&self, threads: usize) -> Vec<(Role, String, String, BindOptions<LinuxPage>)> {
        let way = |role, row: &str, name: String, options| (role, row.to_owned(), name, options);
        let slow = self.linux(1).stamp(InitMethod::FieldByField);
        let mut ways = vec![way(Role::Variant, "slow-path", "slow path, the oracle".into(), slow)];
        for path in StorePath::ALL.into_iter().filter(|path| path.is_available()) {
            let name = match path {
                StorePath::Portable => "template, plain stores".to_owned(),
                _ => format!("template, {path} stores"),
            };
            let options = self.linux(1).stamp(InitMethod::Template(path));
            ways.push(way(Role::Variant, &format!("template-{path}"), name, options));
        }
        ways.push(way(Role::Ours, "ours-1", "ours".to_owned(), self.linux(1)));
        if threads > 1 {
            let name = format!("ours, {threads} threads");
            ways.push(way(Role::Ours, "ours-all", name, self.linux(threads)));
        }
        ways
    }
}

/// Adds the rows that write fewer bytes for the same pages.
fn small_rows<'a>(suite: &mut Suite<'a>, zone: &'a Zone, size: ByteLen) -> Result {
    const NAIVE: &str = "bind-4k/naive";
    let (role, name) = (Role::Ours, "8-byte descriptors, base pages, eager");
    suite
        .bind(role, "bind-small/eager-8-bytes", name, zone, small(Order::BASE))?
        .naive(NAIVE)
        .limit("bind-limit/zero-1")
        .headline(format!("describe {size}: 8-byte descriptors, all written"));
    let name = "8-byte descriptors, base pages, on touch";
    suite
        .bind(role, "bind-small/on-touch", name, zone, BindOptions::new(MemoryKind::Generic))?
        .naive(NAIVE)
        .headline(format!("describe {size}: 8-byte descriptors, on touch"));
    let shapes = [
        (Order::PMD, "2m", "2 MiB", 78_000_000, MARTINS_2M),
        (Order::PUD, "1g", "1 GiB", 1_000_000, MARTINS_1G),
    ];
    for (order, id, folio, ns, source) in shapes {
        let id = |bytes: u64| format!("bind-small/derived-{id}-{bytes}-bytes");
        let name =
            |bytes: u64| format!("{bytes}-byte descriptors, {folio} folios, derived tails, eager");
        suite.bind(role, &id(8), name(8), zone, small(order))?.naive(NAIVE);
        let options = linux(order, Tails::Derived, 1);
        let spec = suite.bind(role, &id(64), name(64), zone, options)?;
        let published = Published::scaled(ns, size.get(), COMPOUND_SIZE.get(), source);
        spec.naive(NAIVE).row.published = Some(published);
    }
    Ok(())
}

/// The most memory that is described by descriptors in itself: they are a 64th of it, and its data is never
/// touched.
const ALTMAP: ByteLen = ByteLen::gib(16);

/// Binds and unbinds memory whose descriptors lie in itself, which are cleared then.
fn altmap(settings: &BindSettings, session: &mut Session<'_>) -> Result {
    let (table, size) = ("bind-altmap", settings.size.min(ALTMAP));
    let threads = settings.threads.get();
    let bytes = (size.get() >> 12) * 64;
    let zone = &keeping(bytes);
    let mut suite = Suite::new(table, size).writing(bytes).threads(threads);
    let own = || linux(Order::BASE, Tails::Stored, threads);
    let inside = || own().altmap(AltmapOptions::new());
    type Time = fn((Duration, Duration)) -> Duration;
    type Row<'r> = (Role, &'r str, &'r str, BindOptions<LinuxPage>, Time);
    let both: Time = |(_, both)| both;
    let rows: [Row<'_>; 4] = [
        (Role::Peer, "own", "memory of their own, bind and unbind", own(), both),
        (Role::Ours, "both", "in the region, bind and unbind", inside(), both),
        (Role::Variant, "bind", "in the region, bind", inside(), |(bound, _)| bound),
        (Role::Variant, "unbind", "in the region, unbind", inside(), |(bound, both)| both - bound),
    ];
    for (role, row, name, options, time) in rows {
        let mut region = Some(Region::anonymous(size)?);
        let spec = suite.add(role, row, name, move |_| {
            Ok(time(rebind(&mut region, zone, options.clone(), |_| Ok(()))?))
        });
        // The published namespace of base pages had its descriptors in itself.
        spec.row.published = SHAPES[0].published("ours-1", size).filter(|_| row == "bind");
    }
    session.measure(
        suite,
        format!("Descriptors in the region itself: {size}, base pages, 64 bytes each"),
        format!(
            "anonymous memory, again; unbind clears the descriptors in place; {threads} threads"
        ),
    )
}

const LINE_ONE: &str = "bind-limit/line-1";
const LINE_MANY: &str = "bind-limit/line-all";

fn first_binds(shape: &Shape, settings: &BindSettings, session: &mut Session<'_>) -> Result {
    let ([table, title], size) = (shape.first, settings.size);
    let [before, template, both] =
        shape.published_first.map(|ns| Some(li_zhe(ns, V3, V3_FIRST, size)));
    let bytes = (size.get() >> 12) * 64;
    let threads = settings.threads.get();
    let kept = keeping(bytes);
    let fresh = Zone::with_keep_limit(ByteLen::ZERO);
    let mut suite = Suite::new(table, size).writing(bytes);
    for (row, name, huge, published) in [
        ("naive", "naive, faulting 4 KiB pages as it goes", HugeAdvice::Never, before),
        ("naive-huge", "naive, faulting huge pages as it goes", HugeAdvice::Advise, None),
    ] {
        let template = naive::template(size, shape.order, None)?;
        let bind = move |_: &str| naive::first_bind(&template, huge);
        suite.add(Role::Naive, row, name, bind).limit("clearing").row.published = published;
    }
    suite.add(Role::Limit, "clearing", "the kernel's clearing alone, huge pages", move |_| {
        timed(|| present(ByteLen::new(bytes)))
    });
    let plain = shape.linux(1).stamp(InitMethod::Template(StorePath::Portable));
    let name = "template, plain stores, fresh memory".to_owned();
    let mut rows = vec![
        (Role::Variant, "template-portable", name, plain, template),
        (Role::Ours, "ours-1", "ours, fresh memory".to_owned(), shape.linux(1), both.clone()),
    ];
    if threads > 1 {
        let name = format!("ours, fresh memory, {threads} threads");
        rows.push((Role::Ours, "ours-all", name, shape.linux(threads), both));
    }
    for (role, row, name, options, published) in rows {
        let spec = suite.bind(role, row, name, &fresh, options)?;
        spec.row.published = published;
        // The clearing was measured on one thread.
        if row != "ours-all" {
            spec.limit("clearing");
        }
        if let Some(headline) = shape.first_headline.filter(|_| row == "ours-1") {
            spec.headline(format!("describe {size}: {headline}"));
        }
    }
    suite.each_spec(|spec| spec.row.cold = true);
    // Takes memory and gives it back, so that the host of a virtual machine has it ready: the case that takes as much
    // pays for this kernel's work and not for the host's.
    suite.before_each(move || present(ByteLen::new(bytes)).map(drop));
    drop(kept.bind(Region::anonymous(size)?, shape.linux(1))?);
    suite.bind_another("ours-kept", "ours, memory that the zone had kept", &kept, shape.linux(1));
    session.table(
        table,
        title,
        "cold: memory fresh from the kernel, which a host below it was made to have ready; \
             the limit is the kernel's clearing of it",
    );
    suite.naive("naive");
    session.run(suite, "first binds")
}
