//! Extents of every size, cleared or copied in every way there is: what `bench zero` and `bench copy`
//! have in common.
//!
//! A table for each case of what the destination was and what comes next; in it, for each size:
//!
//! | row | what it does |
//! |---|---|
//! | page at a time | a call for every 4 KiB, by the CPU's own loop: what a straightforward port does |
//! | libc | `memset` or `memcpy`, whatever the C library makes of the length |
//! | string | the whole extent through the cache |
//! | *store* | the whole extent past the cache, by each store that this CPU has |
//! | ours | the way that the store policy has for the length and the case |
//! | ours, by a region | the same by `Region::zero_range` or `copy_range`, out of cache and from 64 KiB on |
//! | limit | a bare streaming fill of as many bytes |
//!
//! Cold extents are taken in turn from memory that is longer than the caches; hot ones were written a
//! moment before. Where the case reads the bytes at once, the time includes that.

use std::cell::{Cell, RefCell};
use std::hint::black_box;
use std::time::{Duration, Instant};

use uzone_os::Exclusive;
use uzone_pages::ByteLen;
use uzone_stream::{
    CacheState, CopyMethod, NextUse, Path as StorePath, StorePolicy, Streaming, Work, copy_bytes,
    zero_bytes,
};
use uzone_zone::{PopulateOptions, Region, ZeroOptions};

use uzone_harness::{
    BenchError, Result, Role, Session, Suite, bytes, check_memory, index, present, timed,
};

/// What a page at a time takes at a time.
const PAGE: usize = 4096;
/// Memory that cold extents are taken from in turn is at least this, and the largest extent.
const LEAST_ARENA: u64 = 512 << 20;
/// A largest extent below this takes a smaller arena.
const SHORT: ByteLen = ByteLen::mib(1);
/// That arena: more than the caches of common CPUs have for each core.
const LEAST_SHORT_ARENA: u64 = 64 << 20;
/// A row handles at least this much in a round, for the clock's sake.
const COLD_BATCH: usize = 1 << 20;
/// The same where it has to stay in the cache.
const HOT_BATCH: usize = 256 << 10;
/// What was published as the size of a huge page.
const FOLIO: u64 = 2 << 20;
/// From here on a region is measured as well: below, its checks and its report are a part of the time
/// that no store can be blamed for.
const REGION_BYTES: usize = 64 << 10;

/// The sizes, up to the largest that was asked for.
const SIZES: [u64; 10] = [
    4 << 10,
    16 << 10,
    64 << 10,
    256 << 10,
    1 << 20,
    2 << 20,
    8 << 20,
    32 << 20,
    128 << 20,
    1 << 30,
];

/// What is done to an extent, and from where.
type Op<'a> = Box<dyn Fn(&mut [u8], &[u8]) + 'a>;

/// Memory of which extents are taken in turn, so that each is cold when its turn comes.
pub(crate) struct Arena {
    dst: RefCell<Exclusive>,
    src: Option<Exclusive>,
    pub(crate) region: Region,
    from: Option<Region>,
    pub(crate) len: usize,
    at: Cell<usize>,
}

impl Arena {
    /// Takes memory for extents of up to `largest`, present, and in huge pages if there are any.
    pub(crate) fn new(work: Work, largest: ByteLen) -> Result<Self> {
        let least = if largest < SHORT { LEAST_SHORT_ARENA } else { LEAST_ARENA };
        Self::of(work, largest.get().max(least))
    }

    /// Takes `len` bytes for extents.
    fn of(work: Work, len: u64) -> Result<Self> {
        let parts = if work == Work::Copy { 4 } else { 2 };
        let needed = ByteLen::new(len.saturating_mul(parts) / 10 * 11);
        check_memory(needed)?;
        let memory = |byte| -> Result<Exclusive> {
            let mut memory = present(ByteLen::new(len))?;
            memory.as_bytes_mut().fill(byte);
            Ok(memory)
        };
        let region = || -> Result<Region> {
            let region = Region::anonymous(ByteLen::new(len))?;
            let populated = region.populate(0..len, &PopulateOptions::default())?;
            debug_assert!(populated.is_whole());
            Ok(region)
        };
        let is_copy = work == Work::Copy;
        Ok(Self {
            dst: RefCell::new(memory(1)?),
            src: if is_copy { Some(memory(2)?) } else { None },
            region: region()?,
            from: if is_copy { Some(region()?) } else { None },
            len: index(len),
            at: Cell::new(0),
        })
    }

    /// Returns where the next `bytes` lie: somewhere else than the last ones did.
    pub(crate) fn next(&self, bytes: usize) -> usize {
        let at = if self.at.get() + bytes > self.len { 0 } else { self.at.get() };
        // Not the next byte, so that the prefetchers do not know it already.
        self.at.set(at + bytes + PAGE);
        at
    }

    /// Calls `f` with bytes of the destination that the next turn is at.
    pub(crate) fn with_next<R>(&self, bytes: usize, f: impl FnOnce(&mut [u8]) -> R) -> R {
        let at = self.next(bytes);
        f(&mut self.dst.borrow_mut().as_bytes_mut()[at..][..bytes])
    }

    /// Returns how long `op` takes for extents of `size`, `calls` of them.
    fn time(
        &self,
        op: &Op<'_>,
        size: usize,
        calls: usize,
        was: CacheState,
        next: NextUse,
    ) -> Duration {
        let at = self.next(size * calls);
        let mut dst = self.dst.borrow_mut();
        let dst = &mut dst.as_bytes_mut()[at..][..size * calls];
        let src = self.src.as_ref().map_or(&[][..], |src| &src.as_bytes()[at..][..size * calls]);
        if was == CacheState::Hot {
            dst.fill(3);
        }
        let started = Instant::now();
        for (index, extent) in dst.chunks_mut(size).enumerate() {
            let src = src.get(index * size..).map_or(&[][..], |rest| &rest[..size.min(rest.len())]);
            op(extent, src);
            if next == NextUse::Soon {
                black_box(read(black_box(extent)));
            }
        }
        black_box(dst);
        started.elapsed()
    }
}

/// Reads every line of `bytes`.
pub(crate) fn read(bytes: &[u8]) -> u64 {
    let (words, _) = bytes.as_chunks::<8>();
    words.iter().step_by(8).map(|word| u64::from_ne_bytes(*word)).fold(0, u64::wrapping_add)
}

/// Returns a size as it is in the id of a row.
pub(crate) fn label(bytes: u64) -> String {
    match bytes {
        bytes if bytes >= 1 << 30 => format!("{}G", bytes >> 30),
        bytes if bytes >= 1 << 20 => format!("{}M", bytes >> 20),
        bytes => format!("{}K", bytes >> 10),
    }
}

/// A table of extents.
struct Case {
    was: CacheState,
    next: NextUse,
    name: &'static str,
    title: &'static str,
}

impl Case {
    const fn new(was: CacheState, next: NextUse, name: &'static str, title: &'static str) -> Self {
        Self { was, next, name, title }
    }

    /// Returns the id of its table.
    fn table(&self, work: Work) -> String {
        format!("{}-{}", work.name(), self.name)
    }
}

const CASES: [Case; 4] = [
    Case::new(CacheState::Cold, NextUse::Later, "cold-later", "out of cache, not used afterwards"),
    Case::new(CacheState::Cold, NextUse::Soon, "cold-soon", "out of cache, read at once"),
    Case::new(CacheState::Hot, NextUse::Later, "hot-later", "in the cache, not used afterwards"),
    Case::new(CacheState::Hot, NextUse::Soon, "hot-soon", "in the cache, read at once"),
];

/// Refuses a largest extent that is no size of the tables.
pub(crate) fn check_size(largest: ByteLen) -> Result {
    if SIZES.contains(&largest.get()) {
        return Ok(());
    }
    Err(BenchError::not_valid(format!(
        "extents up to {largest} cannot be measured: the largest is one of 4K, 16K, 64K, 256K, 1M, 2M, 8M, \
         32M, 128M and 1G"
    )))
}

/// Measures every size and case.
pub(crate) fn run(
    work: Work,
    largest: ByteLen,
    arena: &Arena,
    session: &mut Session<'_>,
) -> Result {
    let wanted: Vec<&Case> = CASES.iter().filter(|case| session.wants(&case.table(work))).collect();
    if wanted.is_empty() {
        return Ok(());
    }
    let row = |name: &str| format!("{}-cold-later/{name}", work.name());
    for path in StorePath::ALL.into_iter().filter(|path| !path.is_available()) {
        session.skip(row(&path.to_string()), "this CPU does not offer it");
    }
    for case in wanted {
        let table = case.table(work);
        for size in SIZES.into_iter().filter(|size| *size <= largest.get()) {
            let mut suite = Suite::new(&table, ByteLen::new(size));
            let is_largest = size == largest.get();
            Extents { work, case, size, is_largest, arena }.add(&mut suite)?;
            session.run(suite, &format!("{}, {}", label(size), case.title))?;
        }
        let verb = if work == Work::Zero { "Clearing" } else { "Copying" };
        session.table(
            table,
            format!("{verb} memory that is {}", case.title),
            "one thread; naive is a page at a time; the limit is a bare streaming fill of the \
             same bytes, out of cache and not read afterwards",
        );
    }
    Ok(())
}

/// The rows of one size in one case.
struct Extents<'a> {
    work: Work,
    case: &'a Case,
    size: u64,
    /// Whether no larger extents are measured.
    is_largest: bool,
    arena: &'a Arena,
}

impl<'a> Extents<'a> {
    /// Adds all rows, after each of them was checked.
    fn add(&self, suite: &mut Suite<'a>) -> Result {
        let Self { case, arena, .. } = *self;
        let Case { was, next, .. } = *case;
        let size = index(self.size);
        let batch = if was == CacheState::Hot { HOT_BATCH } else { COLD_BATCH };
        let calls = (batch / size).max(1);
        suite.bytes = self.size * calls as u64;
        let row = |row: &str| format!("{}-{row}", label(self.size));
        for (role, way, name, op) in self.ops() {
            self.check(&suite.id(&row(&way)), size, &op)?;
            let spec = suite.add(role, &row(&way), self.name(&name), move |_| {
                Ok(arena.time(&op, size, calls, was, next))
            });
            spec.is_rival = true;
            if role == Role::Ours {
                spec.row.headline = self.headline();
            }
        }
        if size >= REGION_BYTES && (was, next) == (CacheState::Cold, NextUse::Later) {
            let options = ZeroOptions::default().was(was).next(next);
            self.check_region(&suite.id(&row("region")), &options)?;
            suite.add(Role::Ours, &row("region"), self.name("ours, by a region"), move |_| {
                region_time(arena, &options, size, calls)
            });
        }
        suite.add(Role::Limit, &row("limit"), self.name("limit"), move |_| {
            arena.with_next(size * calls, |dst| {
                timed(|| {
                    Streaming::scope(uzone_stream::best(), |stream| stream.zero(dst));
                    Ok(())
                })
            })
        });
        suite.naive(&row("page-at-a-time"));
        // Memory in the cache is written faster than any that is not.
        if was == CacheState::Cold {
            suite.limit(&row("limit"));
        }
        Ok(())
    }

    fn name(&self, row: &str) -> String {
        format!("{}, {row}", ByteLen::new(self.size))
    }

    /// Returns what the size is called in the summary, if it is there: out of cache, a folio, which is
    /// what was published, and the largest.
    fn headline(&self) -> Option<String> {
        let is_cold = (self.case.was, self.case.next) == (CacheState::Cold, NextUse::Later);
        let verb = if self.work == Work::Zero { "clear" } else { "copy" };
        (is_cold && (self.is_largest || self.size == FOLIO))
            .then(|| format!("{verb} {} at a time, out of cache", ByteLen::new(self.size)))
    }

    /// Every way there is, with what its row is, its id and its name.
    fn ops(&self) -> Vec<(Role, String, String, Op<'a>)> {
        let Case { was, next, .. } = *self.case;
        let mut ops: Vec<(Role, String, String, Op<'a>)> = Vec::new();
        let mut add = |role: Role, row: &str, name: &str, op: Op<'a>| {
            ops.push((role, row.to_owned(), name.to_owned(), op));
        };
        let is_copy = self.work == Work::Copy;
        let by = move |way: CopyMethod, dst: &mut [u8], src: &[u8]| match is_copy {
            true => copy_bytes(way, dst, src),
            false => zero_bytes(way, dst),
        };
        let pages = move |dst: &mut [u8], src: &[u8]| {
            for (index, page) in dst.chunks_mut(PAGE).enumerate() {
                let src = src.get(index * PAGE..).map_or(src, |rest| &rest[..rest.len().min(PAGE)]);
                by(CopyMethod::String, page, src);
            }
        };
        add(Role::Naive, "page-at-a-time", "a page at a time", Box::new(pages));
        let name = if is_copy { "memcpy of the C library" } else { "memset of the C library" };
        let libc = move |dst: &mut [u8], src: &[u8]| match is_copy {
            true => dst.copy_from_slice(src),
            false => dst.fill(0),
        };
        add(Role::Peer, "libc", name, Box::new(libc));
        let interleaved = |way: &CopyMethod| matches!(way, CopyMethod::Interleaved(_));
        for way in CopyMethod::all().filter(|way| is_copy || !interleaved(way)) {
            let row = way.to_string().replace(", side by side", "-aside");
            let op: Op<'a> = Box::new(move |dst, src| by(way, dst, src));
            add(Role::Variant, &row, &way.to_string(), op);
        }
        let work = self.work;
        let ours = move |dst: &mut [u8], src: &[u8]| {
            by(StorePolicy::current().choose(work, dst.len(), was, next), dst, src);
        };
        add(Role::Ours, "ours", "ours", Box::new(ours));
        ops
    }

    /// Checks that a row writes what it should before it is timed.
    fn check(&self, row: &str, size: usize, op: &Op<'_>) -> Result {
        let at = self.arena.next(size);
        let mut dst = self.arena.dst.borrow_mut();
        let dst = &mut dst.as_bytes_mut()[at..][..size];
        dst.fill(9);
        let src = self.arena.src.as_ref().map_or(&[][..], |src| &src.as_bytes()[at..][..size]);
        op(dst, src);
        // Compared as words, and by the compiler's best: this is most of a run's time otherwise.
        let is_right = if src.is_empty() {
            dst.as_chunks::<64>().0.iter().all(|line| *line == [0; 64])
        } else {
            dst == src
        };
        if is_right {
            return Ok(());
        }
        let expected = |offset| src.get(offset).copied().unwrap_or(0);
        let wrong = dst.iter().enumerate().position(|(at, byte)| *byte != expected(at));
        Err(BenchError::wrong_byte(row, wrong.unwrap_or(size) as u64))
    }

    /// Checks the same of a region, at both ends of the extent and in its middle.
    fn check_region(&self, row: &str, options: &ZeroOptions) -> Result {
        let (region, len) = (&self.arena.region, ByteLen::new(self.size));
        let places = [0, self.size / 2, self.size - 64];
        for at in places {
            region.write_at(at, &[9; 64]).map_err(uzone_zone::WriteError::from)?;
        }
        let done = match &self.arena.from {
            None => region.zero_range(0, len, options)?,
            Some(from) => region.copy_range(0, from, 0, len, options)?,
        };
        for at in places {
            let mut bytes = [9; 64];
            region.read_at(at, &mut bytes).map_err(uzone_zone::WriteError::from)?;
            // Regions that are copied from were never written, so they are zero as well.
            if bytes != [0; 64] || !done.is_whole() {
                return Err(BenchError::wrong_byte(row, at));
            }
        }
        Ok(())
    }
}

/// Returns how long a region takes for `calls` extents.
fn region_time(
    arena: &Arena,
    options: &ZeroOptions,
    size: usize,
    calls: usize,
) -> Result<Duration> {
    let at = arena.next(size * calls);
    timed(|| {
        for call in 0..calls {
            let (offset, len) = (bytes(at + call * size).get(), bytes(size));
            let done = match &arena.from {
                None => arena.region.zero_range(offset, len, options)?,
                Some(from) => arena.region.copy_range(offset, from, offset, len, options)?,
            };
            let _ = black_box(done);
        }
        Ok(())
    })
}
