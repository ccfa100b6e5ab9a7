//! A VM that is restored from an image, and the rows that most tables have: [`Restore`].

use std::fs::File;
use std::hint::black_box;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Instant;

use uzone_fault::{Backing, Engine, EngineOptions, FileBacking, LazyOptions};
use uzone_os::uffd::Features;
use uzone_os::{Access, Anonymous, Mapping, Sharing};
use uzone_pages::{Advice, ByteLen};
use uzone_snapshot::{FrameCache, SnapshotBacking};

use crate::tables::fault::{Placement, Touching, touch};
use crate::tables::image::frames::{self, Reader};
use crate::tables::image::material::{FRAME, Material, PAGE, decode, open};
use crate::tables::image::pack::forget;
use uzone_harness::ways::one_page::{Answer, OnePage};
use uzone_harness::{
    Adopted, Counted, Found, Reads, Result, Role, Session, Suite, counted, index, place, registered,
};

/// The size of an image's frame cache.
pub(super) const CACHE: ByteLen = ByteLen::mib(64);
/// The length of one read where all is read first.
const PIECE: usize = 1 << 20;
/// The largest number of touched pages where each may take a read of a device.
pub(super) const COLD_TOUCHES: usize = 2048;

/// Returns the memory of a VM, registered as Firecracker registers it, whose faults `engine` answers.
pub(super) fn machine(
    engine: &Engine,
    len: ByteLen,
    backing: Arc<dyn Backing>,
    options: &LazyOptions,
) -> Result<Adopted> {
    let memory = registered(len, Features::EVENT_REMOVE, Features::NONE)?;
    Adopted::new(engine, memory, backing, options)
}

/// A row of ours.
#[derive(Clone, Copy)]
struct Way<'a> {
    row: &'static str,
    name: &'static str,
    open: fn(&Restore<'a>) -> Result<Arc<dyn Backing>>,
    advice: Option<Advice>,
    /// Whether the pages are installed ahead.
    is_replayed: bool,
}

/// The image, the placement and the pages of a table.
#[derive(Clone, Copy)]
pub(super) struct Restore<'a> {
    pub(super) material: &'a Material,
    /// The image with the pages that are touched packed together.
    pub(super) ordered: Option<&'a File>,
    pub(super) placement: &'a Placement,
    /// The touched pages, in that order.
    pub(super) pages: &'a [usize],
    /// Whether the page cache has forgotten the files.
    pub(super) is_cold: bool,
}

impl<'a> Restore<'a> {
    pub(super) fn len(&self) -> ByteLen {
        ByteLen::new(self.material.len as u64)
    }

    /// Drops the files from the page cache, where the table is cold.
    fn chill(&self) -> Result {
        if self.is_cold {
            forget(&self.material.raw)?;
            forget(&self.material.packed)?;
            forget(&self.material.frames.0)?;
            self.ordered.map_or(Ok(()), forget)?;
        }
        Ok(())
    }

    /// Measures a table of these rows of ours, beside the rivals.
    pub(super) fn table(
        &self,
        table: &str,
        pages: &str,
        rows: &[&str],
        session: &mut Session<'_>,
    ) -> Result {
        let (engine, offsets) = (&self.engine()?, &self.offsets());
        let mut suite = Suite::new(table, self.len());
        self.add_handlers(&mut suite, engine, offsets, rows)?;
        self.add_others(&mut suite, offsets);
        self.compare(&mut suite, "naive");
        let touched = self.pages.len();
        session.measure(
            suite,
            format!("A VM of {} restored lazily: {pages}, {touched} pages", self.len()),
            self.placement.title.clone(),
        )
    }

    /// Compares all rows, each of which touches the pages once.
    pub(super) fn compare(&self, suite: &mut Suite<'_>, naive: &str) {
        let pages = self.pages.len() as u64;
        suite.naive(naive).each_spec(|spec| {
            (spec.row.items, spec.row.bytes) = (pages, pages * PAGE as u64);
            spec.row.cold = self.is_cold;
        });
    }

    /// Returns the offsets that the one thread touches.
    pub(super) fn offsets(&self) -> Vec<u64> {
        self.pages.iter().map(|page| place(*page as u64)).collect()
    }

    /// Returns the same with other pages.
    pub(super) fn of(self, pages: &'a [usize]) -> Self {
        Self { pages, ..self }
    }

    /// Returns the numbers of the frames that are touched and are not all zero, in ascending order.
    pub(super) fn frames(&self) -> Vec<usize> {
        let mut wanted: Vec<usize> = self.pages.iter().map(|page| page / (FRAME / PAGE)).collect();
        wanted.sort_unstable();
        wanted.dedup();
        wanted.retain(|frame| !self.material.is_zero[*frame]);
        wanted
    }

    /// Touches the pages of memory, and adds its counts.
    pub(super) fn found(&self, row: &str, memory: &impl Counted, offsets: &[u64]) -> Result<Found> {
        let found = self.touch(row, memory, offsets);
        counted(row, found, memory, self.pages.len() as u64, PAGE as u64)
    }

    /// Starts an engine whose threads run where the handler does.
    pub(super) fn engine(&self) -> Result<Engine> {
        let options = EngineOptions::default().readers(NonZeroUsize::MIN);
        self.placement.by_handler(|| Ok(Engine::with(options)?))
    }

    fn raw(&self) -> Result<File> {
        Ok(self.material.raw.try_clone()?)
    }

    pub(super) fn map_raw(&self, sharing: Sharing) -> Result<Mapping> {
        Ok(Mapping::file(self.raw()?, 0, self.len(), Access::ReadOnly, sharing)?)
    }

    pub(super) fn packed(&self) -> Result<Arc<dyn Backing>> {
        let image = self.material.open(CACHE)?;
        Ok(Arc::new(SnapshotBacking::new(Arc::new(image))))
    }

    fn packed_together(&self) -> Result<Arc<dyn Backing>> {
        let file = self.ordered.unwrap_or(&self.material.packed);
        let image = open(file, FrameCache::new(CACHE.get()))?;
        Ok(Arc::new(SnapshotBacking::new(Arc::new(image))))
    }

    pub(super) fn raw_backing(&self) -> Result<Arc<dyn Backing>> {
        Ok(Arc::new(FileBacking::new(self.raw()?)?))
    }

    pub(super) fn touch(&self, row: &str, memory: &impl Reads, offsets: &[u64]) -> Result<Found> {
        let words = &self.material.words;
        let expected = |at: u64| words[index(at) / PAGE];
        touch(row, memory, offsets, 1, self.placement, Touching::Timed, &expected)
    }

    /// Returns our rows.
    fn ways() -> [Way<'a>; 5] {
        let way = |row, name, open| Way { row, name, open, advice: None, is_replayed: false };
        let replayed = |row, name, open| Way { is_replayed: true, ..way(row, name, open) };
        let together = "ours, the set packed together and installed ahead";
        [
            way("raw", "ours, raw", Self::raw_backing),
            Way {
                advice: Some(Advice::Blocks),
                ..way("huge", "ours, raw, by blocks of 2 MiB", Self::raw_backing)
            },
            way("packed", "ours, packed", Self::packed),
            replayed("replay", "ours, packed, the set installed ahead", Self::packed),
            replayed("ordered", together, Self::packed_together),
        ]
    }

    /// Adds the rows with a handler.
    fn add_handlers(
        &self,
        suite: &mut Suite<'a>,
        engine: &'a Engine,
        offsets: &'a [u64],
        rows: &[&str],
    ) -> Result {
        let (this, len) = (*self, self.len());
        let mapped = move || -> Result<Arc<Mapping>> {
            let source = this.map_raw(Sharing::Shared)?;
            if !this.is_cold {
                source.populate(0..len.get())?;
            }
            Ok(Arc::new(source))
        };
        // A page that is mapped stays in the page cache.
        let source = if self.is_cold { None } else { Some(mapped()?) };
        suite.faults(Role::Naive, "naive", "one page a fault, raw", move |row| {
            this.chill()?;
            let answer = Answer::Copy(source.clone().map_or_else(mapped, Ok)?);
            let memory = this.placement.by_handler(|| OnePage::anonymous(len, answer))?;
            this.found(row, &memory, offsets)
        });
        let ways = Self::ways().into_iter().filter(|way| rows.contains(&way.row));
        for Way { row, name, open, advice, is_replayed } in ways {
            let options = LazyOptions::default();
            let options = advice.map_or(options.clone(), |advice| options.advice(advice));
            let spec = suite.faults(Role::Ours, row, name, move |row| {
                this.chill()?;
                let machine = || machine(engine, len, open(&this)?, &options);
                let memory = this.placement.by_handler(machine)?;
                if is_replayed {
                    memory.answering().prefetch(offsets);
                }
                this.found(row, &memory, offsets)
            });
            if row == "raw" && self.placement.is_first && !self.is_cold {
                spec.headline(format!("restore a VM of {len} lazily"));
            }
        }
        Ok(())
    }

    /// Reads the whole image into anonymous memory, and touches it then.
    pub(super) fn read_first(
        &self,
        row: &str,
        offsets: &[u64],
        begun: Instant,
        read: impl Fn(u64, &mut [u8]) -> Result,
    ) -> Result<Found> {
        let len = self.len().get();
        let memory = Mapping::anonymous(self.len(), Anonymous::default())?;
        let mut piece = vec![0; PIECE];
        for at in (0..len).step_by(PIECE) {
            let piece = &mut piece[..index(len - at).min(PIECE)];
            read(at, piece)?;
            memory.write_at(at, piece)?;
        }
        let read = begun.elapsed();
        let found = self.touch(row, &memory, offsets)?.after(read);
        Ok(Found { faults: 0, ..found })
    }

    /// Adds the rivals without a handler, and the bare work.
    fn add_others(&self, suite: &mut Suite<'a>, offsets: &'a [u64]) {
        let this = *self;
        suite.faults(Role::Peer, "kernel", "the kernel's mapping, raw", move |row| {
            this.chill()?;
            this.touch(row, &this.map_raw(Sharing::Private)?, offsets)
        });
        let wanted = self.frames();
        // Ours can have as many at once: one where the handler shares the CPU of the VM.
        suite.threads = if self.placement.is_same() { 1 } else { self.material.threads };
        let threads = suite.threads;
        suite.faults(Role::Peer, "decode", "decoding the frames alone", move |_| {
            this.chill()?;
            let begun = Instant::now();
            frames::share(threads, wanted.len(), Reader::new, |reader, number| {
                black_box(decode(this.material, reader, wanted[number])?);
                Ok(())
            })?;
            Ok(Found { elapsed: begun.elapsed(), ..Found::default() })
        });
    }
}
