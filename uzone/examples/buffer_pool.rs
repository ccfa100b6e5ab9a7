//! A database's buffer pool: what a storage engine keeps in a table of frame headers is the payload of the frame's
//! descriptor, and its pin count is the descriptor's own. No `unsafe`.
//!
//! `cargo run --release -p uzone --example buffer_pool`
//!
//! A file of 64 MiB goes through a pool of 16 MiB: two threads read and write pages of 8 KiB, a sweep finds frames and
//! writes them back. No lock is held between the sweep and a reader: a page that is pinned does not become
//! *absent*, and one that is absent gives no pin. Fails if a page is not as it was written last.

use std::collections::HashMap;
use std::error::Error;
use std::fs::{File, OpenOptions, remove_file};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::{env, process, thread};

use uzone::model::HoldError;
use uzone::{BindOptions, ByteLen, Content, MemoryKind, Pagemap, Payload, PfnRange};
use uzone::{PinError, Pinned, Refresh, Region, Zone};
use zerocopy::{FromBytes, IntoBytes, KnownLayout};

type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

const FRAME: usize = 8192; // bytes, also of a page of the file
const FRAMES: usize = 2048;
const PAGES: u64 = 8192;
const FETCHES: u64 = 60_000; // by each of two threads

/// What the pool keeps for each frame beside the pins. It starts at zero: no page yet.
#[derive(FromBytes, IntoBytes, KnownLayout)]
#[repr(C)]
struct Header {
    /// The number of the page in the frame, and one; 0 for none.
    holds: AtomicU64,
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
    /// The frames of the pages that have one, or are about to.
    table: Mutex<HashMap<u64, PfnRange>>,
    hand: AtomicUsize,
}

impl BufferPool {
    fn table(&self) -> MutexGuard<'_, HashMap<u64, PfnRange>> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns which page a frame holds, and where its bytes are in the region.
    fn frame(&self, at: PfnRange) -> Outcome<(&AtomicU64, u64)> {
        let bytes = self.pagemap.bytes_of(at).ok_or("no such frame")?;
        let view = self.pagemap.page(at.start()).ok_or("no such frame")?;
        Ok((&view.payload().ok_or("a frame without a header")?.holds, bytes.start))
    }

    /// Returns the frame of a page, pinned: until that is dropped, the page stays in it.
    fn fetch(&self, page: u64) -> Outcome<Pinned> {
        loop {
            let Some(at) = self.table().get(&page).copied() else {
                self.load(page)?;
                continue;
            };
            match self.pagemap.try_pin(at) {
                // Else it got another page before it was pinned.
                Ok(pinned) if self.frame(at)?.0.load(Relaxed) == page + 1 => {
                    return Ok(pinned);
                }
                // It is being read, or written back.
                Ok(_) | Err(PinError::Refused { cause: HoldError::Content(_), .. }) => {
                    thread::yield_now();
                }
                Err(failure) => return Err(failure.into()),
            }
        }
    }

    /// Reads a page into a frame, unless another thread does.
    fn load(&self, page: u64) -> Outcome<()> {
        let at = self.evict()?;
        let (holds, offset) = self.frame(at)?;
        if *self.table().entry(page).or_insert(at) != at {
            return Ok(self.pagemap.advance(at.start(), Content::Filling, Content::Absent)?);
        }
        let mut bytes = [0; FRAME];
        self.file.read_exact_at(&mut bytes, page * FRAME as u64)?;
        self.pagemap.fill_at(offset, &bytes)?;
        // Relaxed: the step of the word publishes it to the thread that pins the frame next.
        holds.store(page + 1, Relaxed);
        Ok(self.pagemap.advance(at.start(), Content::Filling, Content::Present)?)
    }

    /// Sweeps to a frame that is not pinned, writes its page back, and makes it empty and the caller's.
    fn evict(&self) -> Outcome<PfnRange> {
        loop {
            let at = self.frames[self.hand.fetch_add(1, Relaxed) % FRAMES];
            // A pin forbids the first step, and after it there is no pin; one thread makes the second.
            let _ = self.pagemap.advance(at.start(), Content::Present, Content::Absent);
            if self.pagemap.advance(at.start(), Content::Absent, Content::Filling).is_ok() {
                let (holds, offset) = self.frame(at)?;
                if let Some(page) = holds.swap(0, Relaxed).checked_sub(1) {
                    let mut bytes = [0; FRAME];
                    self.pagemap.region().read_at(offset, &mut bytes)?;
                    self.file.write_all_at(&bytes, page * FRAME as u64)?;
                    self.table().remove(&page); // a reader that misses the page finds it in the file
                }
                return Ok(at);
            }
        }
    }

    /// Reads and changes the pages of one thread: shared ones need latches, too. Returns their versions.
    fn work(&self, thread: u64) -> Outcome<HashMap<u64, u64>> {
        let (mut versions, mut random) = (HashMap::new(), thread);
        for _ in 0..FETCHES {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            // Half of all fetches are for an eighth of the pages.
            let page = ((random >> 33) % PAGES).pow(3) / PAGES.pow(2) / 2 * 2 + thread;
            let (pinned, version) = (self.fetch(page)?, versions.entry(page).or_insert(0));
            check(&pinned, page, *version)?;
            if random >> 62 == 0 {
                *version += 1;
                pinned.as_words(8..16)?[0].store(*version, Relaxed); // in place
            }
        }
        Ok(versions)
    }
}

/// Checks the two words at the start of a page: its number and its version.
fn check(pinned: &Pinned, page: u64, version: u64) -> Outcome<()> {
    let words = pinned.as_words(0..16)?;
    let is_right = (words[0].load(Relaxed), words[1].load(Relaxed)) == (page, version);
    is_right.then_some(()).ok_or_else(|| format!("page {page} is not version {version}").into())
}

fn main() -> Outcome<()> {
    let path = env::temp_dir().join(format!("uzone-buffer-pool-{}", process::id()));
    let file = OpenOptions::new().read(true).write(true).create_new(true).open(&path)?;
    remove_file(&path)?; // its bytes stay as long as it is open
    file.set_len(PAGES * FRAME as u64)?;
    for page in 0..PAGES {
        file.write_all_at(&page.to_ne_bytes(), page * FRAME as u64)?; // and version 0
    }
    let region = Region::anonymous(ByteLen::new((FRAMES * FRAME) as u64))?;
    let order = region.page_size().order_of(FRAME as u64)?;
    let options = BindOptions::with_payload(MemoryKind::Generic, ()).order(order).absent();
    let pagemap = Zone::new().bind(region, options)?;
    let heads = pagemap.range().iter().filter(|pfn| pfn.is_aligned(order));
    let frames: Result<_, _> = heads.map(|pfn| PfnRange::try_new(pfn, order.pages())).collect();
    let (table, hand) = Default::default();
    let pool = &BufferPool { pagemap, frames: frames?, file, table, hand };
    let versions: Outcome<Vec<_>> = thread::scope(|scope| {
        let workers = [0, 1].map(|thread| scope.spawn(move || pool.work(thread)));
        workers.into_iter().map(|worker| worker.join().map_err(|_| "a thread panicked")?).collect()
    });
    let versions: HashMap<u64, u64> = versions?.into_iter().flatten().collect();
    for (page, version) in &versions {
        check(&pool.fetch(*page)?, *page, *version)?;
    }
    println!("{} pages are as they were written last", versions.len());
    Ok(())
}
