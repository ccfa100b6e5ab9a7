//! `uzone bench bind`: the published experiment on this machine.
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
use std::num::NonZeroUsize;
use std::time::{Duration, Instant};

use uzone_os::{Addr, Anonymous, Exclusive, HugeAdvice, SystemRoot, memory};
use uzone_pages::{
    ByteLen, Layout, LinuxPage, LinuxSeed, MemoryKind, Order, PageCount, Payload, Pfn, PfnRange,
    Tails, Template,
};
use uzone_stream::{Pattern, Streaming};
use uzone_zone::{AltmapOptions, BindOptions, Init, InitMethod, Region, StorePath, Zone};
use zerocopy::FromBytes;

use crate::harness::error::{BenchError, cause};
use crate::harness::group::Watch;
use crate::harness::report::{Bench, Published, Role};
pub(crate) use crate::harness::settings::BindSettings as Settings;
use crate::harness::settings::Part;
use crate::harness::suite::{self, Session, Suite, check_memory, index, timed};
use crate::tables::naive::{self, NaivePage, NaiveZone};

impl Settings {
    /// The published experiment: 100 GiB, 30 rebinds.
    #[must_use]
    pub fn published() -> Self {
        let threads = uzone_os::numa::current_cpu_count().unwrap_or(1);
        Self {
            size: ByteLen::gib(100),
            rebinds: 30,
            first_binds: 10,
            threads: NonZeroUsize::new(threads).unwrap_or(NonZeroUsize::MIN),
            growth: ByteLen::gib(512),
            dax: None,
        }
    }
}

const LI_ZHE_V3: &str = "Li Zhe, memmap template and streaming copy, v3, May 2026, Ice Lake VM, \
     100 GB; scaled to as many pages as here";
const LI_ZHE_V3_FIRST: &str = "Li Zhe, memmap template and streaming copy, v3, May 2026, Ice Lake VM, \
     100 GB, first bind: 1486 ms before, 1422 by the template, 1285 by streaming (devdax with 2 MiB pages: \
     1515, 1422, 1331); scaled to as many pages as here";
const LI_ZHE_V1: &str = "Li Zhe, memmap template and streaming copy, v1, May 2026, Ice Lake VM, \
     100 GB; scaled to as many pages as here";
const LI_ZHE_V5: &str = "Li Zhe, memmap template and streaming copy, v5, July 2026, Ice Lake VM, \
     100 GB; scaled to as many pages as here";

/// One shape of the published experiment.
struct Shape {
    table: &'static str,
    title: &'static str,
    order: Order,
    /// Nanoseconds, and who published them.
    published_naive: (u64, &'static str),
    published_template: (u64, &'static str),
    published_ours: (u64, &'static str),
    /// An earlier version, by stores of 8 bytes, and a later one.
    published_v1: (u64, &'static str),
    published_v5: (u64, &'static str),
    /// What it stands for in the summary.
    headline: &'static str,
    /// The table of first binds, and its title.
    first: [&'static str; 2],
    /// Nanoseconds of the first bind: before, by the template alone, and by streaming stores as well.
    published_first: [u64; 3],
    /// What the first bind stands for in the summary, if it does.
    first_headline: Option<&'static str>,
}

const SHAPES: [Shape; 2] = [
    Shape {
        table: "bind-4k",
        title: "Rebind, base pages, 64-byte Linux descriptors",
        order: Order::BASE,
        published_naive: (273_520_000, LI_ZHE_V3),
        published_template: (246_650_000, LI_ZHE_V3),
        published_ours: (114_310_000, LI_ZHE_V3),
        published_v1: (104_590_000, LI_ZHE_V1),
        published_v5: (96_790_000, LI_ZHE_V5),
        headline: "64-byte descriptors, again",
        first: ["bind-first", "First bind, base pages, 64-byte Linux descriptors"],
        published_first: [1_486_000_000, 1_422_000_000, 1_285_000_000],
        first_headline: Some("64-byte descriptors, first time"),
    },
    Shape {
        table: "bind-2m",
        title: "Rebind, 2 MiB folios with stored tails, 64-byte Linux descriptors",
        order: Order::PMD,
        published_naive: (313_450_000, LI_ZHE_V3),
        published_template: (240_420_000, LI_ZHE_V3),
        published_ours: (99_370_000, LI_ZHE_V3),
        published_v1: (116_930_000, LI_ZHE_V1),
        published_v5: (119_040_000, LI_ZHE_V5),
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

/// Returns a published time for as many pages as `size` has.
fn scaled(published: (u64, &'static str), size: ByteLen) -> Published {
    scaled_from(published, PUBLISHED_SIZE, size)
}

fn scaled_from((ns, source): (u64, &'static str), from: ByteLen, size: ByteLen) -> Published {
    let ns = u128::from(ns) * u128::from(size.get()) / u128::from(from.get());
    Published { ns: u64::try_from(ns).unwrap_or(u64::MAX), source: source.into() }
}

/// Returns whether the table can be run: before minutes are spent.
///
/// # Errors
/// [`BenchError`] if the size is none that is measured, or memory is short.
fn check(settings: &Settings) -> Result<(), BenchError> {
    let size = settings.size;
    if size.is_zero() || !size.get().is_multiple_of(1 << 30) {
        return Err(BenchError::size(size));
    }
    // Descriptors of 64 bytes, twice: bound, and for the limit; and a fifth on top.
    let needed = ByteLen::new((size.get() >> 12) * 64 / 5 * 12);
    check_memory(needed)
}

/// Runs the whole table.
///
/// # Errors
/// [`BenchError`] if memory is short, or a row wrote something wrong.
pub(crate) fn run(settings: &Settings, part: &Part, watch: Watch<'_>) -> Result<Bench, BenchError> {
    check(settings)?;
    let (size, pages) = (settings.size, settings.size.get() >> 12);
    let sentence = format!(
        "{size} described ({pages} pages), {} rebinds, {} first binds, up to {} threads",
        settings.rebinds, settings.first_binds, settings.threads
    );
    let mut session = Session::new(sentence, part, settings.rebinds, watch);
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
    if !settings.growth.is_zero() && session.wants("bind-growth") {
        session.rounds = settings.rebinds.clamp(3, 10);
        growth(settings, &mut session)?;
    }
    session.finish()
}

fn seed() -> LinuxSeed {
    LinuxSeed { pagemap_address: 0xffff_8881_0abc_d000, ..LinuxSeed::default() }
}

/// Options for Linux's 64-byte descriptors.
fn linux(order: Order, tails: Tails, threads: usize) -> BindOptions<LinuxPage> {
    eager(BindOptions::with_payload(MemoryKind::Generic, seed()), order, tails, threads)
}

fn small(order: Order, threads: usize) -> BindOptions {
    eager(BindOptions::new(MemoryKind::Generic), order, Tails::Derived, threads)
}

fn eager<P: Payload>(
    options: BindOptions<P>,
    order: Order,
    tails: Tails,
    threads: usize,
) -> BindOptions<P> {
    let threads = NonZeroUsize::new(threads).unwrap_or(NonZeroUsize::MIN);
    options.order(order).tails(tails).threads(threads).init(Init::Eager)
}

/// What a bare fill writes.
#[derive(Clone, Copy, PartialEq)]
enum Fill {
    /// A line of which no word is zero.
    Line,
    /// Zeroes, which some machines write faster than anything else.
    Zeroes,
}

/// Fills memory by the best store, split among threads.
fn bare_fill(bytes: &mut [u8], fill: Fill, threads: usize) -> Result<Duration, BenchError> {
    let line = match Pattern::constant(&[0x0027_ffff_c000_2000; 8]) {
        Ok(line) => line,
        Err(_) => unreachable!("a line has eight words"),
    };
    suite::fill(bytes, threads, |part| {
        Streaming::scope(uzone_stream::best(), |stream| match fill {
            Fill::Line => stream.fill(part, &line),
            Fill::Zeroes => stream.zero(part),
        });
    })
}

/// Takes memory and gives it back, so that the host of a virtual machine has it ready: the next who
/// takes as much pays for this kernel's work and not for the host's.
fn warm_host(bytes: u64) -> Result<(), BenchError> {
    present(bytes).map(drop)
}

/// Memory like that of descriptors, present.
fn present(bytes: u64) -> Result<Exclusive, BenchError> {
    let how = Anonymous { huge: HugeAdvice::Advise, ..Anonymous::default() };
    let mut memory = Exclusive::anonymous(ByteLen::new(bytes), how)?;
    memory.populate(0..bytes)?;
    Ok(memory)
}

fn rebinds(settings: &Settings, session: &mut Session<'_>) -> Result<(), BenchError> {
    let pages = settings.size.get() >> 12;
    let (linux_bytes, small_bytes) = (pages * 64, pages * 8);
    let threads = settings.threads.get();
    // One zone for all: every row writes the same memory.
    let zone = Zone::with_keep_limit(ByteLen::new(linux_bytes + small_bytes + (64 << 20)));
    let limit = RefCell::new(present(linux_bytes)?);
    let mut suite = Suite::new("bind-limit", settings.size);
    let fills = [
        (LINE_ONE, "bare fill, 1 thread", Fill::Line, linux_bytes, 1),
        ("bind-limit/zero-1", "bare fill with zeroes, 1 thread", Fill::Zeroes, small_bytes, 1),
        (LINE_MANY, "bare fill, all threads", Fill::Line, linux_bytes, threads),
    ];
    for (id, name, fill, bytes, threads) in fills {
        if id == LINE_MANY && threads == 1 {
            continue;
        }
        let limit = &limit;
        (suite.bytes, suite.threads) = (bytes, threads);
        suite.add(Role::Limit, id, name, move |_| {
            bare_fill(&mut limit.borrow_mut().as_bytes_mut()[..index(bytes)], fill, threads)
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
        settings: &Settings,
        zone: &'a Zone,
        limit: &'a RefCell<Exclusive>,
        suite: &mut Suite<'a>,
        session: &mut Session<'_>,
    ) -> Result<(), BenchError> {
        let id = |row: &str| format!("{}/{row}", self.table);
        let (size, naive) = (settings.size, &*id("naive"));
        let template = naive_template(size, self.order, Some(limit.borrow().addr()))?;
        check_naive(&template, &mut limit.borrow_mut(), naive)?;
        let rebind = move |_: &str| naive_rebind(&template, &mut limit.borrow_mut());
        suite
            .add(Role::Naive, naive, "naive, field by field", rebind)
            .naive(naive)
            .limit(LINE_ONE)
            .row
            .published = Some(scaled(self.published_naive, size));
        for path in StorePath::ALL.into_iter().filter(|path| !path.is_available()) {
            session.skip(id(&format!("template-{path}")), "this CPU does not offer it");
        }
        let widest = format!("template-{}", uzone_stream::best());
        for (role, row, name, options) in self.ways(settings.threads.get()) {
            let limit = if row == "ours-all" { LINE_MANY } else { LINE_ONE };
            let spec = suite.bind(role, &id(&row), name, zone, options)?;
            spec.naive(naive).limit(limit);
            spec.row.published = match row.as_str() {
                "slow-path" => Some(self.published_naive),
                "template-portable" => Some(self.published_template),
                "template-movnti" => Some(self.published_v1),
                "ours-1" => Some(self.published_ours),
                _ => (row == widest).then_some(self.published_v5),
            }
            .map(|published| scaled(published, size));
            if row == "ours-1" {
                spec.headline(format!("describe {size}: {}", self.headline));
            }
        }
        let (row, name) = (id("ours-first-kept"), "ours, first bind of another region");
        suite.bind_another(&row, name, zone, self.linux(1)).naive(naive).limit(LINE_ONE);
        Ok(())
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
fn small_rows<'a>(suite: &mut Suite<'a>, zone: &'a Zone, size: ByteLen) -> Result<(), BenchError> {
    const NAIVE: &str = "bind-4k/naive";
    let (role, name) = (Role::Ours, "8-byte descriptors, base pages, eager");
    suite
        .bind(role, "bind-small/eager-8-bytes", name, zone, small(Order::BASE, 1))?
        .naive(NAIVE)
        .limit("bind-limit/zero-1")
        .headline(format!("describe {size}: 8-byte descriptors, all written"));
    let name = "8-byte descriptors, base pages, on touch";
    suite
        .bind(role, "bind-small/on-touch", name, zone, BindOptions::new(MemoryKind::Generic))?
        .naive(NAIVE)
        .headline(format!("describe {size}: 8-byte descriptors, on touch"));
    let shapes = [
        (Order::PMD, "2m", "2 MiB", (78_000_000, MARTINS_2M)),
        (Order::PUD, "1g", "1 GiB", (1_000_000, MARTINS_1G)),
    ];
    for (order, id, folio, published) in shapes {
        let id = |bytes: u64| format!("bind-small/derived-{id}-{bytes}-bytes");
        let name =
            |bytes: u64| format!("{bytes}-byte descriptors, {folio} folios, derived tails, eager");
        suite.bind(role, &id(8), name(8), zone, small(order, 1))?.naive(NAIVE);
        let options = linux(order, Tails::Derived, 1);
        let spec = suite.bind(role, &id(64), name(64), zone, options)?;
        spec.naive(NAIVE).row.published = Some(scaled_from(published, COMPOUND_SIZE, size));
    }
    Ok(())
}

/// The most memory that is described by descriptors in itself: they are a 64th of it, and its data is never
/// touched.
const ALTMAP: ByteLen = ByteLen::gib(16);

/// What of a bind and the unbind after it is timed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Timed {
    Both,
    Bind,
    Unbind,
}

/// Binds and unbinds memory whose descriptors lie in itself, which are cleared then.
fn altmap(settings: &Settings, session: &mut Session<'_>) -> Result<(), BenchError> {
    let (table, size) = ("bind-altmap", settings.size.min(ALTMAP));
    let threads = settings.threads.get();
    let bytes = (size.get() >> 12) * 64;
    let zone = &Zone::with_keep_limit(ByteLen::new(bytes + (64 << 20)));
    let mut suite = Suite::new(table, size).writing(bytes).threads(threads);
    let own = || linux(Order::BASE, Tails::Stored, threads);
    let inside = || own().altmap(AltmapOptions::new());
    type Row<'r> = (Role, &'r str, &'r str, BindOptions<LinuxPage>, Timed);
    let rows: [Row<'_>; 4] = [
        (Role::Peer, "own", "memory of their own, bind and unbind", own(), Timed::Both),
        (Role::Ours, "both", "in the region, bind and unbind", inside(), Timed::Both),
        (Role::Variant, "bind", "in the region, bind", inside(), Timed::Bind),
        (Role::Variant, "unbind", "in the region, unbind", inside(), Timed::Unbind),
    ];
    for (role, row, name, options, timed) in rows {
        let mut region = Some(Region::anonymous(size)?);
        let spec = suite.add(role, row, name, move |_| {
            let Some(mine) = region.take() else { return Ok(Duration::ZERO) };
            let started = Instant::now();
            let pagemap = zone.bind(mine, options.clone())?;
            let bound = started.elapsed();
            region = Some(suite::unbind(pagemap)?);
            let both = started.elapsed();
            Ok(match timed {
                Timed::Both => both,
                Timed::Bind => bound,
                Timed::Unbind => both - bound,
            })
        });
        // The published namespace of base pages had its descriptors in itself.
        spec.row.published = (timed == Timed::Bind).then(|| scaled(SHAPES[0].published_ours, size));
    }
    session.measure(
        suite,
        "descriptors in the region",
        format!("Descriptors in the region itself: {size}, base pages, 64 bytes each"),
        format!(
            "anonymous memory, again; unbind clears the descriptors in place; {threads} threads"
        ),
    )
}

const LINE_ONE: &str = "bind-limit/line-1";
const LINE_MANY: &str = "bind-limit/line-all";

fn first_binds(
    shape: &Shape,
    settings: &Settings,
    session: &mut Session<'_>,
) -> Result<(), BenchError> {
    let ([table, title], size) = (shape.first, settings.size);
    let [before, template, both] =
        shape.published_first.map(|ns| Some(scaled((ns, LI_ZHE_V3_FIRST), size)));
    let bytes = (size.get() >> 12) * 64;
    let threads = settings.threads.get();
    let kept = Zone::with_keep_limit(ByteLen::new(bytes + (64 << 20)));
    let fresh = Zone::with_keep_limit(ByteLen::ZERO);
    let mut suite = Suite::new(table, size).writing(bytes);
    for (row, name, huge, published) in [
        ("naive", "naive, faulting 4 KiB pages as it goes", HugeAdvice::Never, before),
        ("naive-huge", "naive, faulting huge pages as it goes", HugeAdvice::Advise, None),
    ] {
        let template = naive_template(size, shape.order, None)?;
        let bind = move |_: &str| naive_first_bind(&template, huge);
        suite.add(Role::Naive, row, name, bind).limit("clearing").row.published = published;
    }
    suite.add(Role::Limit, "clearing", "the kernel's clearing alone, huge pages", move |_| {
        warm_host(bytes)?;
        timed(|| present(bytes))
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
        let warm = move || warm_host(bytes);
        let spec = suite.bind_after(role, row, name, &fresh, options, warm)?;
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

/// Returns what the naive way should write for descriptors that lie at `address`, if that is known.
fn naive_template(
    size: ByteLen,
    order: Order,
    address: Option<Addr>,
) -> Result<Template<LinuxPage>, BenchError> {
    let pages = PageCount::new(size.get() >> 12);
    let laid_out = PfnRange::try_new(Pfn::new(1 << 20), pages)
        .and_then(|range| Layout::try_new(range, order, Tails::Stored));
    let layout = laid_out.map_err(|_| BenchError::size(size))?;
    // An address is at most 64 bits.
    let address = address.map_or(0, |address| address.get() as u64);
    Ok(Template::new(layout, MemoryKind::Generic, seed(), address))
}

/// Writes descriptors the naive way into memory that is present.
fn naive_rebind(
    template: &Template<LinuxPage>,
    memory: &mut Exclusive,
) -> Result<Duration, BenchError> {
    let bytes = index(template.layout().descriptors() * 64);
    let started = Instant::now();
    naive_stamp(template, &mut memory.as_bytes_mut()[..bytes]);
    Ok(started.elapsed())
}

fn naive_stamp(template: &Template<LinuxPage>, bytes: &mut [u8]) {
    let address = bytes.as_ptr().addr() as u64;
    if let Ok(pages) = <[NaivePage]>::mut_from_bytes(bytes) {
        naive::stamp(pages, template.layout().order(), &NaiveZone::new(&seed()), address);
    }
}

fn check_naive(
    template: &Template<LinuxPage>,
    memory: &mut Exclusive,
    row: &str,
) -> Result<(), BenchError> {
    naive_rebind(template, memory)?;
    let bytes = index(template.layout().descriptors() * 64);
    let wrong = match <[NaivePage]>::ref_from_bytes(&memory.as_bytes()[..bytes]) {
        Ok(pages) => naive::first_wrong(pages, template),
        Err(_) => Some(template.layout().range().start()),
    };
    wrong.map_or(Ok(()), |pfn| Err(BenchError::wrong_page(row, pfn)))
}

/// Maps pages and writes descriptors into them the naive way, without asking for a page before.
fn naive_first_bind(
    template: &Template<LinuxPage>,
    huge: HugeAdvice,
) -> Result<Duration, BenchError> {
    let bytes = template.layout().descriptors() * 64;
    warm_host(bytes)?;
    timed(|| {
        let how = Anonymous { huge, ..Anonymous::default() };
        let mut memory = Exclusive::anonymous(ByteLen::new(bytes), how)?;
        naive_stamp(template, &mut memory.as_bytes_mut()[..index(bytes)]);
        Ok(memory)
    })
}

/// Cost against size: on touch up to 16 TiB, and eager as far as memory goes. All sizes are
/// measured together, so that the machine's moods do not look like growth.
fn growth(settings: &Settings, session: &mut Session<'_>) -> Result<(), BenchError> {
    let on_touch = Zone::with_keep_limit(ByteLen::ZERO);
    let available = memory::available(&SystemRoot::host()).map_or(0, |have| have.bytes.get());
    let mut taken = 0;
    let mut zones = Vec::new();
    let sizes = [1, 4, 16, 64, 100, 256, 512].map(ByteLen::gib);
    for size in sizes.into_iter().filter(|size| *size <= settings.growth) {
        let id = format!("bind-growth/eager-{}GiB", size.get() >> 30);
        let bytes = (size.get() >> 12) * 64;
        if taken + bytes > available / 4 * 3 {
            let reason = format!("{} of descriptors do not fit in memory", ByteLen::new(bytes));
            session.skip(id, reason);
            continue;
        }
        taken += bytes;
        zones.push((id, size, Zone::with_keep_limit(ByteLen::new(bytes + (64 << 20)))));
    }
    let mut suite = Suite::new("bind-growth", ByteLen::ZERO);
    for shift in 30..=44 {
        suite.size = ByteLen::new(1 << shift);
        let (size, options) = (suite.size, BindOptions::new(MemoryKind::Generic));
        let row = format!("on-touch-{}", size.to_string().replace(' ', ""));
        suite.bind(Role::Ours, &row, format!("on touch, {size}"), &on_touch, options)?;
    }
    suite.size = ByteLen::tib(1);
    for (order, name) in [(Order::PMD, "2 MiB"), (Order::PUD, "1 GiB")] {
        let row = format!("derived-{}-1TiB", name.replace(' ', ""));
        let name = format!("8-byte, {name} folios, derived tails, eager, 1 TiB");
        suite.bind(Role::Ours, &row, name, &on_touch, small(order, 1))?;
    }
    for (id, size, zone) in &zones {
        suite.size = *size;
        let options = linux(Order::BASE, Tails::Stored, 1);
        let name = format!("64-byte, eager, {size}");
        if let Err(error) = suite.bind(Role::Ours, id, name, zone, options) {
            // The rows before are worth more than one more.
            session.skip(id.clone(), format!("{error}: {}", cause(&error)));
        }
    }
    session.table(
        "bind-growth",
        "Rebind, cost against size",
        "on touch writes nothing; eager writes 64 bytes a page, by one thread",
    );
    session.run(suite, "growth")
}
