//! A database's buffer pool: a frame's header is the payload of its descriptor, and its pin count is the
//! descriptor's own. No `unsafe`. `cargo run --release -p uzone --example buffer_pool`
//!
//! A file of 64 MiB goes through a pool of 16 MiB. No lock is held between readers and the sweep that finds frames: a page that
//! is pinned does not become *absent*, and one that is absent gives no pin. Fails if a page is not as it was written last.

use std::collections::HashMap;
use std::error::Error;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread;

use uzone::os::memory_file;
use uzone::{BindOptions, ByteLen, Content, MemoryKind, Pagemap, Payload, PfnRange};
use uzone::{PinError, Pinned, Refresh, Region, Zone};
use zerocopy::{FromBytes, IntoBytes, KnownLayout};

type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

const FRAME: usize = 8192; // bytes, also of a page of the file
const FRAMES: u64 = 2048;
const PAGES: u64 = 8192;
const FETCHES: u64 = 60_000; // by each of two threads
const PANIC: &str = "a thread panicked";

/// The pool's own field of a frame, beside the pins. It starts at zero: no page yet.
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
    file: File,
    /// The frames of the pages that have one, or are about to.
    table: Mutex<HashMap<u64, PfnRange>>,
    hand: AtomicU64,
}

impl BufferPool {
    /// Returns which page a frame holds.
    fn holds(&self, at: PfnRange) -> Outcome<&AtomicU64> {
        let view = self.pagemap.page(at.start()).ok_or("no such frame")?;
        Ok(&view.payload().ok_or("a frame without a header")?.holds)
    }

    /// Returns the frame of a page, pinned: until that is dropped, the page stays in it.
    fn fetch(&self, page: u64) -> Outcome<Pinned> {
        loop {
            let Some(at) = self.table.lock().map_err(|_| PANIC)?.get(&page).copied() else {
                self.load(page)?;
                continue;
            };
            match self.pagemap.try_pin(at) {
                Ok(pinned) if self.holds(at)?.load(Relaxed) == page + 1 => return Ok(pinned),
                // It has got another page meanwhile, or is being read or written back.
                Ok(_) | Err(PinError::Refused { .. }) => thread::yield_now(),
                Err(failure) => return Err(failure.into()),
            }
        }
    }

    /// Reads a page into a frame, unless another thread does.
    fn load(&self, page: u64) -> Outcome<()> {
        let (at, offset) = self.evict()?;
        if *self.table.lock().map_err(|_| PANIC)?.entry(page).or_insert(at) != at {
            return Ok(self.pagemap.advance(at.start(), Content::Filling, Content::Absent)?);
        }
        let mut bytes = [0; FRAME];
        self.file.read_exact_at(&mut bytes, page * FRAME as u64)?;
        self.pagemap.fill_at(offset, &bytes)?;
        // Relaxed: the step of the word publishes it to the thread that pins the frame next.
        self.holds(at)?.store(page + 1, Relaxed);
        Ok(self.pagemap.advance(at.start(), Content::Filling, Content::Present)?)
    }

    /// Sweeps to a frame that is not pinned, writes its page back, and makes it empty and the caller's.
    fn evict(&self) -> Outcome<(PfnRange, u64)> {
        loop {
            let offset = self.hand.fetch_add(1, Relaxed) % FRAMES * FRAME as u64;
            let at = self.pagemap.range_at(offset, ByteLen::new(FRAME as u64))?;
            // A pin forbids the first step, and after it there is no pin; one thread makes the second.
            let _ = self.pagemap.advance(at.start(), Content::Present, Content::Absent);
            if self.pagemap.advance(at.start(), Content::Absent, Content::Filling).is_ok() {
                if let Some(page) = self.holds(at)?.swap(0, Relaxed).checked_sub(1) {
                    let mut bytes = [0; FRAME];
                    self.pagemap.region().read_at(offset, &mut bytes)?;
                    self.file.write_all_at(&bytes, page * FRAME as u64)?;
                    self.table.lock().map_err(|_| PANIC)?.remove(&page); // a miss finds it in the file
                }
                return Ok((at, offset));
            }
        }
    }

    /// Reads and changes the pages of one thread, half of the time an eighth of them. Returns their versions.
    fn work(&self, thread: u64) -> Outcome<HashMap<u64, u64>> {
        let (mut versions, mut random) = (HashMap::new(), thread);
        for _ in 0..FETCHES {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
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
    let pages = (0..PAGES).flat_map(|page| [page, 0].into_iter().chain([0; FRAME / 8 - 2]));
    let file = memory_file("pages", &pages.flat_map(u64::to_ne_bytes).collect::<Vec<u8>>())?;
    let region = Region::anonymous(ByteLen::new(FRAMES * FRAME as u64))?;
    let order = region.page_size().order_of(FRAME as u64)?;
    let options = BindOptions::with_payload(MemoryKind::Generic, ()).order(order).absent();
    let pagemap = Zone::new().bind(region, options)?;
    let pool = &BufferPool { pagemap, file, table: Mutex::default(), hand: AtomicU64::new(0) };
    let versions: Outcome<Vec<_>> = thread::scope(|scope| {
        let workers = [0, 1].map(|thread| scope.spawn(move || pool.work(thread)));
        workers.into_iter().map(|worker| worker.join().map_err(|_| PANIC)?).collect()
    });
    let versions: HashMap<u64, u64> = versions?.into_iter().flatten().collect();
    for (page, version) in &versions {
        check(&pool.fetch(*page)?, *page, *version)?;
    }
    println!("{} pages are as they were written last", versions.len());
    Ok(())
}
