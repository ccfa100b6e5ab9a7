//! `uzone bench restore`: a virtual machine that runs on from an image while its memory is brought in.
//!
//! The image is that of `uzone bench snapshot`, raw and packed, in the page cache. The machine is memory that
//! is registered with a userfaultfd as Firecracker registers it, and threads that touch it; the descriptor is
//! handed to what answers, as it is to a server.
//!
//! | row | what answers |
//! |---|---|
//! | `naive` | one page for each fault, copied from a mapping of the raw file: the published example |
//! | `raw`, `packed` | ours |
//! | `huge` | ours from the raw file, by blocks of 2 MiB, of which huge pages can be made |
//! | `record` | ours from the packed image, a page at a time, and each fault is recorded |
//! | `replay` | ours from the packed image, and the list of the pages is installed ahead |
//! | `ordered` | the same, from an image in which those pages are packed together |
//! | `own` | ours from the raw file, for memory that the engine maps itself |
//! | `read-first` | nothing: all of the raw file is read before the machine runs |
//! | `kernel` | the kernel's own private mapping of the raw file |
//! | `decode` | nothing: the frames are decoded on all threads |
//!
//! `neighbour` has the table of two machines side by side, `clones` that of many machines of one image, of which
//! some attach to the server of `attached`, and `far` that of an image in object storage.

mod attached;
mod clones;
mod far;
mod neighbour;

use std::collections::BTreeSet;
use std::fs::File;
use std::hint::black_box;
use std::io;
use std::num::NonZeroUsize;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use uzone_fault::{
    AdoptedMemory, Advice, Backing, Engine, EngineOptions, FaultStats, FileBacking, LazyOptions,
};
use uzone_os::uffd::Features;
use uzone_os::{Access, Anonymous, Mapping, Sharing};
use uzone_pages::ByteLen;
use uzone_snapshot::{FrameCache, SnapshotBacking};

use crate::harness::adopted::{Adopted, registered};
use crate::harness::group::Watch;
use crate::harness::reads::Reads;
use crate::harness::settings::Part;
pub(crate) use crate::harness::settings::SnapshotSettings as Settings;
use crate::harness::suite::{Bench, BenchError, Found, Role, Session, Suite, index};
use crate::tables::fault::{Answer, Bare, Placement, Touched, Waiting, placed, touch};
use crate::tables::snapshot::frames::{self, Reader};
use crate::tables::snapshot::material::{FRAME, Material, PAGE, decode, failed, open, place};
use crate::tables::snapshot::pack::forget;

/// Room for decoded frames, as an image has it by default.
const CACHE: ByteLen = ByteLen::mib(64);
/// One of so many pages is in the working set, in runs of 1 to `LONGEST_RUN` pages.
const SET_SHARE: usize = 10;
const LONGEST_RUN: usize = 64;
/// How much is read at once where all is read first.
const PIECE: usize = 1 << 20;
/// How many pages are touched at most where each may be read from a device.
const COLD_TOUCHES: usize = 2048;

/// Runs the tables.
///
/// # Errors
/// [`BenchError`] if the files cannot be made, or a row read a wrong byte.
pub(crate) fn run(settings: &Settings, part: &Part, watch: Watch<'_>) -> Result<Bench, BenchError> {
    let (size, rounds) = (settings.size, settings.rounds);
    let material = Material::new(settings, watch)?;
    let asked = format!(
        "an image of {size}: programs and libraries, {} % of its pages zero, in the page cache; {rounds} \
         rounds; the files are in {}",
        material.zero_percent(),
        settings.directory.display()
    );
    let mut session = Session::new(asked, part, rounds, watch);
    let set = working_set(material.words.len());
    let ordered = material.pack_ordered(set.iter().map(|page| *page as u64).collect())?;
    let (material, all) = (&material, (0..material.words.len()).collect::<Vec<_>>());
    let orders = [
        ("restore-seq", "all pages in order", &all, None),
        ("restore-set", "a working set in a random order", &set, Some(&ordered)),
    ];
    let placements = Placement::all(&[1])?;
    for (table, what, pages, ordered) in orders {
        for placement in &placements {
            let table = format!("{table}{}", placement.id);
            if session.wants(&table) {
                let restore = Restore { material, ordered, placement, pages, is_cold: false };
                let measured = restore.table(&table, what, &mut session);
                session.or_skip(&table, measured)?;
            }
        }
    }
    type Table = fn(Restore<'_>, &mut Session<'_>) -> Result<(), BenchError>;
    let others: [(&str, Table); 6] = [
        ("restore-seq-cold", cold_table_in_order),
        ("restore-set-cold", cold_table),
        ("restore-clones", clones::table),
        ("restore-seq-far", far::table_in_order),
        ("restore-far", far::table),
        ("restore-neighbour", neighbour::table),
    ];
    for (table, measure) in others {
        let Some(placement) = placements.first().filter(|_| session.wants(table)) else { continue };
        let ordered = Some(&ordered);
        let restore = Restore { material, ordered, placement, pages: &set, is_cold: false };
        let measured = measure(restore, &mut session);
        session.or_skip(table, measured)?;
    }
    session.finish()
}

/// Returns pages in runs, one of ten, in a random order that is the same in every run.
fn working_set(pages: usize) -> Vec<usize> {
    let mut random = fastrand::Rng::with_seed(17);
    let mut is_in = vec![false; pages];
    let wanted = (pages / SET_SHARE).max(1);
    let mut count = 0;
    while count < wanted {
        let first = random.usize(..pages);
        let len = random.usize(1..=LONGEST_RUN);
        for page in is_in.iter_mut().skip(first).take(len.min(wanted - count)) {
            count += usize::from(!std::mem::replace(page, true));
        }
    }
    let mut set: Vec<usize> = (0..pages).filter(|page| is_in[*page]).collect();
    random.shuffle(&mut set);
    set
}

/// Returns memory of a machine, registered as Firecracker registers it, and what answers its faults.
fn machine(
    engine: &Engine,
    len: ByteLen,
    backing: Arc<dyn Backing>,
    options: &LazyOptions,
) -> Result<Adopted, BenchError> {
    let memory = registered(len, Features::EVENT_REMOVE, Features::NONE)?;
    Adopted::new(engine, memory, backing, options)
}

const RECORD: &str = "record";
/// How long the record of the last touch may take.
const PATIENCE: Duration = Duration::from_secs(10);

/// A row of ours.
#[derive(Clone, Copy)]
struct Way<'a> {
    row: &'static str,
    name: &'static str,
    open: fn(&Restore<'a>) -> Result<Arc<dyn Backing>, BenchError>,
    /// What it asks of the engine.
    set: fn(&Restore<'a>, LazyOptions) -> LazyOptions,
    /// Whether the pages are installed ahead.
    is_replayed: bool,
}

/// What a table is measured with.
#[derive(Clone, Copy)]
struct Restore<'a> {
    material: &'a Material,
    /// The image with the pages that are touched packed together.
    ordered: Option<&'a File>,
    placement: &'a Placement,
    /// What is touched, in that order.
    pages: &'a [usize],
    /// Whether the page cache has none of the files.
    is_cold: bool,
}

impl<'a> Restore<'a> {
    fn len(&self) -> ByteLen {
        ByteLen::new(self.material.len as u64)
    }

    /// Has the page cache forget the files, where that is measured.
    fn chill(&self) -> Result<(), BenchError> {
        if self.is_cold {
            forget(&self.material.raw)?;
            forget(&self.material.packed)?;
            forget(&self.material.frames.0)?;
            self.ordered.map_or(Ok(()), forget)?;
        }
        Ok(())
    }

    fn table(&self, table: &str, what: &str, session: &mut Session<'_>) -> Result<(), BenchError> {
        let (engine, offsets) = (&self.engine()?, &self.offsets());
        let mut suite = Suite::new(table, self.len());
        self.add_handlers(&mut suite, engine, offsets)?;
        self.add_others(&mut suite, offsets);
        self.compare(&mut suite, "naive");
        let touched = self.pages.len();
        session.measure(
            suite,
            table,
            format!("A machine of {} restored lazily: {what}, {touched} pages", self.len()),
            self.placement.title.clone(),
        )
    }

    /// Compares all rows, each of which touches the pages once.
    fn compare(&self, suite: &mut Suite<'_>, naive: &str) {
        let pages = self.pages.len() as u64;
        suite.naive(naive).each_spec(|spec| {
            (spec.row.items, spec.row.bytes) = (pages, pages * PAGE as u64);
            spec.row.cold = self.is_cold;
        });
    }

    /// Returns where the one thread touches the pages.
    fn offsets(&self) -> Vec<Vec<u64>> {
        vec![self.pages.iter().map(|page| place(*page) as u64).collect()]
    }

    /// The same with some of the pages alone.
    fn of(self, pages: &'a [usize]) -> Self {
        Self { pages, ..self }
    }

    /// Returns the numbers of the frames that are touched and are not all zero, in ascending order.
    fn frames(&self) -> Vec<usize> {
        let mut wanted: Vec<usize> = self.pages.iter().map(|page| page / (FRAME / PAGE)).collect();
        wanted.sort_unstable();
        wanted.dedup();
        wanted.retain(|frame| !self.material.is_zero[*frame]);
        wanted
    }

    /// Returns what a row found of whose pages an engine has answered for.
    fn found(&self, done: Touched, stats: &FaultStats) -> Found {
        done.found(stats.faults, placed(stats).saturating_sub(self.pages.len() as u64))
    }

    /// Starts an engine whose reader runs where the handler does; its I/O threads run on any CPU where that
    /// is not the CPU of the machine.
    fn engine(&self) -> Result<Engine, BenchError> {
        let options = EngineOptions::default().readers(NonZeroUsize::MIN);
        if self.placement.spin.is_some() {
            return self.placement.by_handler(|| Ok(Engine::with(options)?));
        }
        Ok(Engine::with(options.cpus(self.placement.handler.clone()))?)
    }

    fn raw(&self) -> Result<File, BenchError> {
        self.material.raw.try_clone().map_err(failed)
    }

    fn map_raw(&self, sharing: Sharing) -> Result<Mapping, BenchError> {
        Ok(Mapping::file(self.raw()?, 0, self.len(), Access::ReadOnly, sharing)?)
    }

    fn packed(&self) -> Result<Arc<dyn Backing>, BenchError> {
        let image = self.material.open(CACHE)?;
        Ok(Arc::new(SnapshotBacking::new(Arc::new(image))))
    }

    fn packed_together(&self) -> Result<Arc<dyn Backing>, BenchError> {
        let file = self.ordered.unwrap_or(&self.material.packed);
        let image = open(file, FrameCache::new(CACHE.get()))?;
        Ok(Arc::new(SnapshotBacking::new(Arc::new(image))))
    }

    fn raw_backing(&self) -> Result<Arc<dyn Backing>, BenchError> {
        Ok(Arc::new(FileBacking::new(self.raw()?).map_err(failed)?))
    }

    fn touch(
        &self,
        row: &str,
        memory: &impl Reads,
        offsets: &[Vec<u64>],
    ) -> Result<Touched, BenchError> {
        let words = &self.material.words;
        let expected = |at: u64| words[index(at) / PAGE];
        touch(row, memory, offsets, self.placement, true, &expected)
    }

    /// Returns our rows.
    fn ways(&self) -> Vec<Way<'a>> {
        let way = |row, name, open| Way {
            row,
            name,
            open,
            set: |_, options| options,
            is_replayed: false,
        };
        let replayed = |row, name, open| Way { is_replayed: true, ..way(row, name, open) };
        let mut ways = vec![
            way("raw", "ours, raw", Self::raw_backing),
            Way {
                set: |_, options| options.advice(Advice::Blocks),
                ..way("huge", "ours, raw, by blocks of 2 MiB", Self::raw_backing)
            },
            way("packed", "ours, packed", Self::packed),
            Way {
                // As the server does it.
                set: |this, options| options.advice(Advice::Random).trace(this.pages.len()),
                ..way(RECORD, "ours, packed, each fault recorded", Self::packed)
            },
            replayed("replay", "ours, packed, the set installed ahead", Self::packed),
        ];
        if self.ordered.is_some() {
            let name = "ours, the set packed together and installed ahead";
            ways.push(replayed("ordered", name, Self::packed_together));
        }
        ways
    }

    /// Checks that all pages are recorded, the last a moment after its touch.
    fn check_record(&self, answering: &AdoptedMemory) -> Result<(), BenchError> {
        let (mut pages, begun) = (BTreeSet::new(), Instant::now());
        while pages.len() < self.pages.len() {
            let trace = answering.take_trace();
            pages.extend(trace.records.iter().map(|record| record.offset / PAGE as u64));
            if begun.elapsed() > PATIENCE {
                let (seen, all) = (pages.len(), self.pages.len());
                let text = format!("{seen} of {all} pages are recorded");
                return Err(failed(io::Error::other(text)));
            }
            std::thread::yield_now();
        }
        Ok(())
    }

    /// Adds what answers faults.
    fn add_handlers(
        &self,
        suite: &mut Suite<'a>,
        engine: &'a Engine,
        offsets: &'a [Vec<u64>],
    ) -> Result<(), BenchError> {
        let (this, len) = (*self, self.len());
        let mapped = move || {
            let source = this.map_raw(Sharing::Shared)?;
            if !this.is_cold {
                source.populate(0..len.get())?;
            }
            Ok::<_, BenchError>(Arc::new(source))
        };
        // A page that is mapped stays in the page cache.
        let source = if self.is_cold { None } else { Some(mapped()?) };
        suite.faults(Role::Naive, "naive", "one page a fault, raw", move |row| {
            this.chill()?;
            let answer = Answer::Copy(source.clone().map_or_else(mapped, Ok)?);
            let memory =
                this.placement.by_handler(|| Bare::anonymous(len, answer, Waiting::Poll))?;
            let done = this.touch(row, &memory, offsets)?;
            memory.check(row)?;
            Ok(done.found(memory.faults(), 0))
        });
        let mut options = LazyOptions::default();
        if let Some(spin) = self.placement.spin {
            options = options.spin(spin);
        }
        for Way { row, name, open, set, is_replayed } in self.ways() {
            let options = set(self, options.clone());
            let is_recorded = row == RECORD;
            let spec = suite.faults(Role::Ours, row, name, move |row| {
                this.chill()?;
                let machine = || machine(engine, len, open(&this)?, &options);
                let memory = this.placement.by_handler(machine)?;
                if is_replayed {
                    memory.answering().prefetch(&offsets[0]);
                }
                let done = this.touch(row, &memory, offsets)?;
                if is_recorded {
                    this.check_record(memory.answering())?;
                }
                Ok(this.found(done, &memory.answering().stats()))
            });
            if row == "raw" && self.placement.is_first && !self.is_cold {
                spec.headline(format!("restore a machine of {len} lazily"));
            }
        }
        suite.faults(Role::Peer, "own", "ours, raw, memory of its own", move |row| {
            this.chill()?;
            let map = || Ok(engine.map(len, this.raw_backing()?, &options)?);
            let memory = this.placement.by_handler(map)?;
            let done = this.touch(row, &memory, offsets)?;
            Ok(this.found(done, &memory.stats()))
        });
        Ok(())
    }

    /// Reads all into memory of its own, piece by piece, and touches it then.
    fn read_first(
        &self,
        row: &str,
        offsets: &[Vec<u64>],
        begun: Instant,
        read: impl Fn(u64, &mut [u8]) -> Result<(), BenchError>,
    ) -> Result<Found, BenchError> {
        let len = self.len().get();
        let memory = Mapping::anonymous(self.len(), Anonymous::default())?;
        let mut piece = vec![0; PIECE];
        for at in (0..len).step_by(PIECE) {
            let piece = &mut piece[..index(len - at).min(PIECE)];
            read(at, piece)?;
            memory.write_at(at, piece)?;
        }
        let read = begun.elapsed();
        Ok(self.touch(row, &memory, offsets)?.found(0, 0).after(read))
    }

    /// Adds the rivals without a handler, and the bare work.
    fn add_others(&self, suite: &mut Suite<'a>, offsets: &'a [Vec<u64>]) {
        let this = *self;
        suite.faults(Role::Peer, "read-first", "everything read first, raw", move |row| {
            this.chill()?;
            let raw = &this.material.raw;
            this.read_first(row, offsets, Instant::now(), |at, piece| {
                raw.read_exact_at(piece, at).map_err(failed)
            })
        });
        suite.faults(Role::Peer, "kernel", "the kernel's mapping, raw", move |row| {
            this.chill()?;
            let done = this.touch(row, &this.map_raw(Sharing::Private)?, offsets)?;
            let faults = done.kernel_faults;
            Ok(done.found(faults, 0))
        });
        let wanted = self.frames();
        // As many as ours can have at once: one where the handler has the CPU of the machine.
        suite.threads = if self.placement.spin.is_some() { 1 } else { self.material.threads };
        let threads = suite.threads;
        suite.faults(Role::Peer, "decode", "decoding the frames alone", move |_| {
            this.chill()?;
            let begun = Instant::now();
            frames::share(threads, wanted.len(), Reader::new, |reader, number| {
                black_box(decode(this.material, reader, wanted[number])?);
                Ok(())
            })
            .map_err(failed)?;
            Ok(Found { elapsed: begun.elapsed(), ..Found::default() })
        });
    }
}

/// Runs the table of all pages in order, where the page cache has none of the files.
fn cold_table_in_order(restore: Restore<'_>, session: &mut Session<'_>) -> Result<(), BenchError> {
    let pages: &Vec<usize> = &(0..restore.material.words.len()).collect();
    let cold = Restore { pages, ordered: None, is_cold: true, ..restore };
    cold.table("restore-seq-cold", "all pages in order, cold", session)
}

/// Runs the table of a working set whose files are not in the page cache.
fn cold_table(restore: Restore<'_>, session: &mut Session<'_>) -> Result<(), BenchError> {
    let pages = &restore.pages[..restore.pages.len().min(COLD_TOUCHES)];
    let cold = Restore { pages, is_cold: true, ..restore };
    cold.table("restore-set-cold", "a working set in a random order, cold", session)
}
