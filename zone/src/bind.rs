//! Binding: from a region and options to a [`Pagemap`], or to an error and the region as it was.
//!
//! The steps, in order: check the options, claim frame numbers, find memory for the descriptors,
//! write them if they are to be written, call back for pageblocks. Each step's effect is undone by
//! dropping what it returned, so an early return leaves nothing behind.
//!
//! Descriptors that have to be written are split among threads at multiples of a section of 2 MiB.
//! A section of fresh memory is populated and then written with ordinary stores, while the lines
//! that the kernel has just cleared are in the cache; a section of kept memory is streamed past it.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use uzone_os::{MapError, Mapped, MappedError, PopulateError, SystemRoot, memory};
use uzone_pages::{
    AddrError, ByteLen, Layout, LayoutError, Memmap, MemoryKind, Order, Page, PageCount, Payload,
    Pfn, PfnRange, Template,
};
use uzone_stream::{Next, Store, Was};

use crate::keep::{self, MemmapMemory, Source};
use crate::options::{BindOptions, Init, Progress};
use crate::pagemap::{Leased, Pagemap, Parts};
use crate::region::Region;
use crate::report::BindReport;
use crate::stamp::{self, SECTION_BYTES, Stamp};
use crate::zone::Shared;

/// A thread is started for every so many bytes of descriptors: some 200 microseconds of writing.
const BYTES_PER_THREAD: u64 = 8 << 20;

/// The order of a pageblock: the pages that one entry of a page middle directory maps.
const PAGEBLOCK: Order = Order::PMD;

/// Why a region could not be bound.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BindError {
    /// The region starts or ends inside a folio.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// A frame number beyond 64 bits.
    #[error(transparent)]
    Addr(#[from] AddrError),
    /// A folio is larger than the region.
    #[error("a folio of order {order} has {folio} pages, and the region only {pages}")]
    FolioLargerThanRegion {
        /// The order that was asked for.
        order: Order,
        /// Pages in a folio.
        folio: PageCount,
        /// Pages in the region.
        pages: PageCount,
    },
    /// Memory of that kind needs an owner.
    #[error("{kind} memory needs an owner: pass one with BindOptions::owner")]
    NoOwner {
        /// The kind that was asked for.
        kind: MemoryKind,
    },
    /// Memory of that kind needs to know what to do with a page that nobody holds any more.
    #[error("{kind} memory needs a callback for freed pages: pass one with PagemapOps::on_free")]
    NoFree {
        /// The kind that was asked for.
        kind: MemoryKind,
    },
    /// Private memory needs to know what to do with a page that the CPU touched.
    #[error(
        "private memory needs a callback that migrates pages to RAM: pass one with \
         PagemapOps::on_migrate_to_ram"
    )]
    NoMigrateToRam,
    /// The frame numbers belong to another region.
    #[error("{range} overlap {bound}, which are bound already")]
    Overlaps {
        /// The frame numbers that were asked for.
        range: PfnRange,
        /// Those that are taken.
        bound: PfnRange,
    },
    /// The bytes of the region's file are described already.
    #[error("the bytes of the region are bound already, as {bound}")]
    SameBytes {
        /// The frame numbers that they have.
        bound: PfnRange,
    },
    /// Descriptors that nobody writes start at zero, and those of this payload do not.
    #[error("a payload with an initial value cannot be initialised on touch: ask for Init::Eager")]
    NotZero,
    /// There is not enough memory for descriptors that are all written.
    #[error(
        "the descriptors need {needed} of memory, and {available} can be had ({limited_by}): \
         describe larger folios, initialise on touch, or raise that limit"
    )]
    TooLittleMemory {
        /// Bytes of descriptors.
        needed: ByteLen,
        /// Bytes that this process may still take.
        available: ByteLen,
        /// What the limit is.
        limited_by: memory::Limit,
    },
    /// The memory for the descriptors could not be mapped.
    #[error("cannot map {len} for the descriptors")]
    Map {
        /// Bytes of descriptors.
        len: ByteLen,
        /// Which limit forbade it, and what would help.
        #[source]
        cause: MapError,
    },
    /// The memory for the descriptors could not be made present.
    #[error("cannot populate the memory for the descriptors")]
    Populate(#[source] PopulateError),
    /// The memory for the descriptors does not fit them. A bug of this crate's.
    #[error("the memory for the descriptors does not fit them")]
    Mapped(#[source] MappedError),
    /// The caller cancelled.
    #[error("the bind was cancelled after {done} of {total} of descriptors")]
    Cancelled {
        /// Bytes of descriptors that had been written.
        done: ByteLen,
        /// Bytes of descriptors that should have been.
        total: ByteLen,
    },
}

/// A region that was not bound, given back with the reason.
#[derive(Debug, thiserror::Error)]
#[error("cannot bind a region of {len} of {backing}", len = region.len(), backing = region.backing())]
pub struct BindFailure {
    /// The region, as it was.
    // Boxed: a failure travels through many returns.
    pub region: Box<Region>,
    /// Why not.
    #[source]
    pub cause: BindError,
}

pub(crate) fn bind<P: Payload>(
    shared: &Arc<Shared>,
    region: Region,
    options: BindOptions<P>,
) -> Result<Pagemap<P>, BindFailure> {
    match try_bind(shared, &region, options) {
        Ok(parts) => Ok(Pagemap::new(region, parts)),
        Err(cause) => Err(BindFailure { region: Box::new(region), cause }),
    }
}

fn try_bind<P: Payload>(
    shared: &Arc<Shared>,
    region: &Region,
    options: BindOptions<P>,
) -> Result<Parts<P>, BindError> {
    let started = Instant::now();
    check(&options, region.pages())?;
    let claim = shared.claim(region.pages(), options.order, options.base, region.extent())?;
    let layout = Layout::try_new(claim.range(), options.order, options.tails)?;
    let len = descriptor_bytes::<P>(&layout)?;
    // Whether the payload starts at zero does not depend on where the descriptors will lie, unless
    // it holds their address, and then it does not start at zero.
    let is_zero = Template::<P>::new(layout, options.seed.clone(), 1 << 20).is_zero();
    let init = match options.init {
        Some(Init::OnTouch) if !is_zero => return Err(BindError::NotZero),
        Some(init) => init,
        None if is_zero => Init::OnTouch,
        None => Init::Eager,
    };

    let mut memory = match init {
        Init::OnTouch => keep::fresh_sparse(len),
        Init::Eager => shared.keep.take(len),
    }
    .map_err(|cause| BindError::Map { len, cause })?;
    let address = memory.memory.addr().get() as u64; // an address is at most 64 bits
    let template = Template::<P>::new(layout, options.seed.clone(), address);
    let written = match init {
        Init::OnTouch => Written::default(),
        Init::Eager => match write(&template, &mut memory, len, &options) {
            Ok(written) => written,
            Err(error) => {
                if memory.source == Source::Kept {
                    shared.keep.give(memory);
                }
                return Err(error);
            }
        },
    };

    let (pages, source) = (memory.pages, memory.source);
    let count = usize::try_from(layout.descriptors()).map_err(|_| AddrError::Overflow {
        value: layout.descriptors(),
        operation: "as usize, at most",
        operand: usize::MAX as u64,
    })?;
    let descriptors = Mapped::<Page<P>>::try_new(memory.memory, count)
        .map_err(|refused| BindError::Mapped(refused.reason))?;
    let memmap = match Memmap::try_new(layout, options.kind, descriptors) {
        Ok(memmap) => memmap,
        Err(_) => unreachable!("the row was made with as many descriptors as the layout has"),
    };
    let keeper = (init == Init::Eager).then(|| claim.shared().clone());
    let mut parts = Parts {
        memmap: Leased::new(memmap, keeper, pages),
        template,
        claim,
        owner: options.owner,
        ops: options.ops,
        report: BindReport {
            kind: options.kind,
            range: layout.range(),
            order: options.order,
            tails: options.tails,
            pages: layout.range().pages(),
            descriptors: layout.descriptors(),
            descriptor_bytes: Template::<P>::DESCRIPTOR_BYTES,
            init,
            stamp: written.stamp,
            memmap_pages: pages,
            source,
            threads: written.threads,
            drains: written.drains,
            metadata: len,
            elapsed: started.elapsed(),
        },
    };
    if let Some(pageblock) = &options.pageblock {
        let range = layout.range();
        let first = range.start().align_up(PAGEBLOCK).unwrap_or(range.end());
        for pfn in (first.get()..range.end().get()).step_by(1 << PAGEBLOCK.get()) {
            if let Some(page) = parts.page(Pfn::new(pfn)) {
                pageblock(page);
            }
        }
        parts.report.elapsed = started.elapsed();
    }
    Ok(parts)
}

/// What Linux's `memremap_pages` refuses, and what a region adds to that.
fn check<P: Payload>(options: &BindOptions<P>, pages: PageCount) -> Result<(), BindError> {
    let kind = options.kind;
    if matches!(kind, MemoryKind::Private | MemoryKind::Coherent) {
        if kind == MemoryKind::Private && options.ops.migrate_to_ram.is_none() {
            return Err(BindError::NoMigrateToRam);
        }
        if options.ops.free.is_none() {
            return Err(BindError::NoFree { kind });
        }
        if options.owner.is_none() {
            return Err(BindError::NoOwner { kind });
        }
    }
    let folio = options.order.pages();
    if folio > pages {
        return Err(BindError::FolioLargerThanRegion { order: options.order, folio, pages });
    }
    Ok(())
}

fn descriptor_bytes<P: Payload>(layout: &Layout) -> Result<ByteLen, AddrError> {
    let size = Template::<P>::DESCRIPTOR_BYTES as u64;
    layout.descriptors().checked_mul(size).map(ByteLen::new).ok_or(AddrError::Overflow {
        value: layout.descriptors(),
        operation: "*",
        operand: size,
    })
}

/// What writing the descriptors came to.
#[derive(Default)]
struct Written {
    stamp: Option<Stamp>,
    threads: usize,
    drains: u64,
}

fn write<P: Payload>(
    template: &Template<P>,
    memory: &mut MemmapMemory,
    len: ByteLen,
    options: &BindOptions<P>,
) -> Result<Written, BindError> {
    let is_fresh = memory.source == Source::Fresh;
    if is_fresh {
        // Asked before minutes are spent, or the kernel's killer comes.
        if let Ok(available) = memory::available(&SystemRoot::host())
            && available.bytes < len
        {
            return Err(BindError::TooLittleMemory {
                needed: len,
                available: available.bytes,
                limited_by: available.limited_by,
            });
        }
    }
    let stamp = choose_stamp(template, options, len, is_fresh);
    let threads = options.threads.unwrap_or_else(|| threads_for(len)).get();
    let size = Template::<P>::DESCRIPTOR_BYTES;
    let section = section_bytes(size);
    let total = len.to_usize()?;
    // No thread gets less than a section.
    let threads = threads.min(total.div_ceil(section)).max(1);
    let job = Job { template, stamp, is_fresh, options, done_bytes: AtomicU64::new(0), total: len };
    let mut bytes = &mut memory.memory.as_bytes_mut()[..total];
    let sections = total.div_ceil(section);
    let mut drains = 0;
    let mut outcome = Ok(());
    let job = &job;
    std::thread::scope(|scope| {
        let mut first = 0;
        let mut others = Vec::with_capacity(threads - 1);
        for worker in 0..threads {
            // Sections are dealt out as evenly as they go.
            let share = (sections * (worker + 1) / threads - sections * worker / threads) * section;
            let share = share.min(bytes.len());
            let (mine, rest) = std::mem::take(&mut bytes).split_at_mut(share);
            bytes = rest;
            let start = first;
            first += (mine.len() / size) as u64;
            if worker + 1 < threads {
                others.push(scope.spawn(move || job.run(start, mine, section)));
            } else {
                outcome = job.run(start, mine, section).map(|count| drains += count);
            }
        }
        for other in others {
            match other.join() {
                Ok(Ok(count)) => drains += count,
                Ok(Err(error)) => outcome = Err(error),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
    });
    outcome?;
    Ok(Written { stamp: Some(stamp), threads, drains })
}

/// The bytes of a section: whole descriptors, and whole cache lines.
fn section_bytes(size: usize) -> usize {
    let both = size * 64 / (1 << size.trailing_zeros().min(6));
    SECTION_BYTES / both * both
}

fn choose_stamp<P: Payload>(
    template: &Template<P>,
    options: &BindOptions<P>,
    len: ByteLen,
    is_fresh: bool,
) -> Stamp {
    // A listener has to hear of every page, so every page is set by itself. The first page's own
    // event is how a listener is found.
    let has_listener = stamp::report(template, 0, options.kind);
    if is_portable_build() || has_listener {
        return Stamp::FieldByField;
    }
    if let Some(stamp) = options.stamp {
        return stamp;
    }
    // Fresh sections are written while the kernel's clearing has left them in the cache.
    let is_streaming = !is_fresh
        && len.to_usize().is_ok_and(|len| {
            uzone_stream::calibration().choose(len, Was::Cold, Next::Later) == Store::Streaming
        });
    Stamp::Template(if is_streaming { uzone_stream::best() } else { uzone_stream::Path::Portable })
}

/// Whether this build checks memory accesses, which streaming stores are invisible to.
const fn is_portable_build() -> bool {
    cfg!(miri) || cfg!(uzone_sanitizer)
}

fn threads_for(len: ByteLen) -> NonZeroUsize {
    let paid = usize::try_from(len.get() / BYTES_PER_THREAD).unwrap_or(usize::MAX);
    let cpus = uzone_os::numa::current_cpu_count().unwrap_or(1);
    NonZeroUsize::new(paid.min(cpus)).unwrap_or(NonZeroUsize::MIN)
}

struct Job<'a, P: Payload> {
    template: &'a Template<P>,
    stamp: Stamp,
    is_fresh: bool,
    options: &'a BindOptions<P>,
    done_bytes: AtomicU64,
    total: ByteLen,
}

impl<P: Payload> Job<'_, P> {
    /// Writes the descriptors from `first` on into `bytes`. Returns how often it drained.
    fn run(&self, mut first: u64, bytes: &mut [u8], section: usize) -> Result<u64, BindError> {
        let size = Template::<P>::DESCRIPTOR_BYTES;
        let mut drains = 0;
        for part in bytes.chunks_mut(section) {
            if self.options.cancel.is_cancelled() {
                // Relaxed: a number to report, nothing more.
                let done = ByteLen::new(self.done_bytes.load(Ordering::Relaxed));
                return Err(BindError::Cancelled { done, total: self.total });
            }
            if self.is_fresh {
                uzone_os::populate_slice(part).map_err(BindError::Populate)?;
            }
            drains += stamp::stamp(self.template, self.options.kind, self.stamp, first, part);
            first += (part.len() / size) as u64;
            // Relaxed: a number to report, nothing more.
            let before = self.done_bytes.fetch_add(part.len() as u64, Ordering::Relaxed);
            if let Some(progress) = &self.options.progress {
                let done = ByteLen::new(before + part.len() as u64);
                progress(Progress { done, total: self.total });
            }
        }
        Ok(drains)
    }
}
