//! A database's buffer pool whose frames are described by the pagemap. A storage engine has a table of frame headers (the
//! page of the frame, its LSN, its number of uses): here a header is the payload of the frame's descriptor, and the pin
//! count is the descriptor's own.
//!
//! `cargo run --release -p uzone --example buffer_pool`
//!
//! A file of 64 MiB goes through a pool of 16 MiB: two threads read and write pages of 8 KiB, a clock
//! sweep finds frames, dirty ones are written back. No lock is held between the sweep and a reader: a
//! page that is pinned does not become *absent*, and one that is absent gives no pin. Prints hits,
//! misses, evictions and the time of a hit; fails if a page is not as it was written last.

use std::collections::HashMap;
use std::error::Error;
use std::fs::{File, OpenOptions, remove_file};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::{env, process, thread, time::Instant};

use uzone::model::HoldError;
use uzone::{BindOptions, ByteLen, Content, MemoryKind, PinError};
use uzone::{Pagemap, Payload, PfnRange, Pinned, Refresh, Region, Zone};
use zerocopy::{FromBytes, IntoBytes, KnownLayout};

type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

const FRAME: usize = 8192; // bytes, also of a page of the file
const FRAMES: usize = 2048;
const PAGES: u64 = 8192;
const THREADS: u64 = 2;
const FETCHES: u64 = 60_000; // by each thread

/// The header of a frame, beside its pins. It starts at zero: no page yet.
#[derive(FromBytes, IntoBytes, KnownLayout)]
#[repr(C)]
struct Header {
    /// The number of the page in the frame, and one; 0 for none.
    holds: AtomicU64,
    /// When the page was changed last: a log is written up to there before the page is.
    lsn: AtomicU64,
    /// How often the sweep passes by before the frame is evicted.
    usage: AtomicU32,
    is_dirty: AtomicU32,
}

impl Payload for Header {
    type Seed = ();

    fn refresh(_seed: &()) -> Refresh {
        Refresh::Linear
    }
}

struct BufferPool {
    pagemap: Pagemap<Header>,
    frames: Vec<PfnRange>,
    file: File,
    /// The frames of the pages that have one, or are about to. One lock; a server has some.
    table: Mutex<HashMap<u64, PfnRange>>,
    hand: AtomicUsize,
    lsn: AtomicU64,
    /// Fetches, misses, evictions, and pages written back.
    counts: [AtomicU64; 4],
}

impl BufferPool {
    fn table(&self) -> MutexGuard<'_, HashMap<u64, PfnRange>> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a frame's header, and where its bytes are in the region.
    fn frame(&self, at: PfnRange) -> Outcome<(&Header, u64)> {
        let view = self.pagemap.page(at.start()).ok_or("no such frame")?;
        let bytes = self.pagemap.bytes_of(at).ok_or("no such frame")?;
        Ok((view.payload().ok_or("a frame without a header")?, bytes.start))
    }

    /// Returns the frame of a page, pinned: until that is dropped, the page stays in it.
    fn fetch(&self, page: u64) -> Outcome<Pinned> {
        loop {
            let known = self.table().get(&page).copied();
            let Some(at) = known else {
                self.load(page)?;
                continue;
            };
            match self.pagemap.try_pin(at) {
                Ok(pinned) => {
                    let (header, _) = self.frame(at)?;
                    if header.holds.load(Relaxed) == page + 1 {
                        // Relaxed: a use that gets lost makes the frame a little older.
                        header.usage.store((header.usage.load(Relaxed) + 1).min(5), Relaxed);
                        self.counts[0].fetch_add(1, Relaxed);
                        return Ok(pinned);
                    } // else it got another page before it was pinned
                }
                // It is being read, or written back.
                Err(PinError::Refused { cause: HoldError::Content(_), .. }) => {
                    thread::yield_now();
                }
                Err(failure) => return Err(failure.into()),
            }
        }
    }

    /// Reads a page into a frame, unless another thread is at it.
    fn load(&self, page: u64) -> Outcome<()> {
        let at = self.evict()?;
        let (header, offset) = self.frame(at)?;
        if *self.table().entry(page).or_insert(at) != at {
            return Ok(self.pagemap.advance(at.start(), Content::Filling, Content::Absent)?);
        }
        let mut bytes = vec![0; FRAME];
        if let Err(error) = self.file.read_exact_at(&mut bytes, page * FRAME as u64) {
            self.table().remove(&page);
            self.pagemap.advance(at.start(), Content::Filling, Content::Absent)?;
            return Err(error.into());
        }
        self.pagemap.fill_at(offset, &bytes)?;
        // Relaxed: the step of the word publishes it to the thread that pins the frame next.
        header.holds.store(page + 1, Relaxed);
        self.counts[1].fetch_add(1, Relaxed);
        Ok(self.pagemap.advance(at.start(), Content::Filling, Content::Present)?)
    }

    /// Sweeps to a frame that is neither pinned nor wanted, and makes it empty and the caller's.
    fn evict(&self) -> Outcome<PfnRange> {
        for _ in 0..FRAMES * 100 {
            let at = self.frames[self.hand.fetch_add(1, Relaxed) % FRAMES];
            let (header, _) = self.frame(at)?;
            if header.usage.fetch_update(Relaxed, Relaxed, |usage| usage.checked_sub(1)).is_ok() {
                continue;
            }
            // A pin forbids the first step, and after it there is no pin; one thread makes the second.
            let _ = self.pagemap.advance(at.start(), Content::Present, Content::Absent);
            if self.pagemap.advance(at.start(), Content::Absent, Content::Filling).is_err() {
                continue;
            }
            let Some(page) = header.holds.load(Relaxed).checked_sub(1) else { return Ok(at) };
            if let Err(error) = self.write_back(at) {
                self.pagemap.advance(at.start(), Content::Filling, Content::Present)?;
                return Err(error);
            }
            header.holds.store(0, Relaxed);
            self.table().remove(&page); // from here on, a reader that misses the page finds it in the file
            self.counts[2].fetch_add(1, Relaxed);
            return Ok(at);
        }
        Err("every frame is pinned: make the pool larger, or pin fewer pages at a time".into())
    }

    /// Writes a page to the file if it is dirty.
    fn write_back(&self, at: PfnRange) -> Outcome<()> {
        let (header, offset) = self.frame(at)?;
        if header.is_dirty.load(Relaxed) == 1 {
            let mut bytes = vec![0; FRAME];
            self.pagemap.region().read_at(offset, &mut bytes)?;
            self.file.write_all_at(&bytes, (header.holds.load(Relaxed) - 1) * FRAME as u64)?;
            header.is_dirty.store(0, Relaxed);
            self.counts[3].fetch_add(1, Relaxed);
        }
        Ok(())
    }

    /// Reads and writes the pages of one thread, some more often than others. Returns their LSNs.
    fn work(&self, thread: u64) -> Outcome<HashMap<u64, u64>> {
        let (mut lsns, mut random, mut bytes) = (HashMap::new(), thread, vec![0; FRAME]);
        for _ in 0..FETCHES {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let any = (random >> 33) % PAGES;
            // Half of all fetches are for an eighth of the pages. A pool with shared pages needs latches too.
            let page = any.pow(3) / PAGES.pow(2) / THREADS * THREADS + thread;
            let pinned = self.fetch(page)?;
            let (header, offset) = self.frame(pinned.range())?;
            self.pagemap.region().read_at(offset, &mut bytes)?;
            check(page, lsns.get(&page).copied().unwrap_or(0), &bytes)?;
            if random >> 62 == 0 {
                let lsn = self.lsn.fetch_add(1, Relaxed) + 1;
                pinned.write_at(0, &written(page, lsn))?;
                header.lsn.store(lsn, Relaxed);
                header.is_dirty.store(1, Relaxed);
                lsns.insert(page, lsn);
            }
        }
        Ok(lsns)
    }
}

/// Returns the bytes of a page whose last change was at `lsn`.
fn written(page: u64, lsn: u64) -> Vec<u8> {
    let words = (1..=FRAME as u64 / 8).map(|word| ((page << 40) ^ lsn).wrapping_mul(word));
    words.flat_map(u64::to_le_bytes).collect()
}

fn check(page: u64, lsn: u64, bytes: &[u8]) -> Outcome<()> {
    if bytes == written(page, lsn) {
        return Ok(());
    }
    Err(format!("page {page} differs from its last change at LSN {lsn}").into())
}

fn main() -> Outcome<()> {
    let path = env::temp_dir().join(format!("uzone-buffer-pool-{}", process::id()));
    let file = OpenOptions::new().read(true).write(true).create_new(true).open(&path)?;
    remove_file(&path)?; // its bytes stay as long as it is open
    for page in 0..PAGES {
        file.write_all_at(&written(page, 0), page * FRAME as u64)?;
    }
    let region = Region::anonymous(ByteLen::new((FRAMES * FRAME) as u64))?;
    let order = region.page_size().order_of(FRAME as u64)?;
    let options = BindOptions::with_payload(MemoryKind::Generic, ()).order(order).absent();
    let pagemap = Zone::new().bind(region, options)?;
    println!("{}", pagemap.report());
    let heads = pagemap.range().iter().filter(|pfn| pfn.is_aligned(order));
    let frames: Result<Vec<_>, _> =
        heads.map(|pfn| PfnRange::try_new(pfn, order.pages())).collect();
    let (frames, table, counts) = (frames?, Mutex::default(), Default::default());
    let (hand, lsn) = (AtomicUsize::new(0), AtomicU64::new(0));
    let pool = BufferPool { pagemap, frames, file, table, hand, lsn, counts };

    let (started, pool_ref) = (Instant::now(), &pool);
    let lsns: Outcome<Vec<_>> = thread::scope(|scope| {
        let start = |thread| scope.spawn(move || pool_ref.work(thread));
        let workers: Vec<_> = (0..THREADS).map(start).collect();
        workers.into_iter().map(|worker| worker.join().map_err(|_| "a thread panicked")?).collect()
    });
    let (lsns, elapsed) = (lsns?, started.elapsed());
    let [all, misses, evictions, back] = pool.counts.each_ref().map(|count| count.load(Relaxed));
    println!("{} hits, {misses} misses, {evictions} evictions in {elapsed:.1?}", all - misses);
    println!("{back} of the evicted pages were dirty and written back");
    if evictions + FRAMES as u64 != misses {
        return Err("a frame got lost: every miss takes an empty one or evicts".into());
    }
    let started = Instant::now();
    for round in 0..500_000 {
        drop(pool.fetch(round % 64)?);
    }
    println!("{} ns per hit: find, pin and unpin", started.elapsed().as_nanos() / 500_000);

    for frame in &pool.frames {
        pool.write_back(*frame)?;
    }
    let mut bytes = vec![0; FRAME];
    for page in 0..PAGES {
        let lsn = lsns.iter().find_map(|lsns| lsns.get(&page)).copied().unwrap_or(0);
        pool.file.read_exact_at(&mut bytes, page * FRAME as u64)?;
        check(page, lsn, &bytes)?;
    }
    pool.pagemap.unbind()?;
    println!("{PAGES} pages of the file are as they were written last");
    Ok(())
}
