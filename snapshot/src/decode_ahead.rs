//! Threads that decode frames before they are wanted: [`DecodeAhead`].
//!
//! The range that a reader in order will read next is one hint, and the latest hint replaces the one before;
//! no thread waits for it. The threads start when there is a first one, and end with the [`DecodeAhead`].
//!
//! Lock: one mutex, held for a look at the range; never while a frame is read or decoded.

use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::thread::{Builder, JoinHandle};

use uzone_os::lock;

use crate::frame_cache::Ready;
use crate::image::Image;

/// The most threads of one backing: so many decode faster than one thread installs.
const THREADS: usize = 3;

/// Threads that decode frames of an image.
#[derive(Debug)]
pub(crate) struct DecodeAhead {
    shared: Arc<Shared>,
    most: usize,
    threads: OnceLock<Vec<JoinHandle<()>>>,
}

#[derive(Debug)]
struct Shared {
    image: Arc<Image>,
    wanted: Mutex<Wanted>,
    changed: Condvar,
}

#[derive(Debug)]
struct Wanted {
    /// Bytes of the image that no thread has taken.
    range: Range<u64>,
    is_over: bool,
}

impl DecodeAhead {
    /// Prepares as many threads as the calling thread has CPUs beside its own; on one CPU they would only be
    /// in the way.
    pub(crate) fn new(image: Arc<Image>) -> Self {
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        let wanted = Mutex::new(Wanted { range: 0..0, is_over: false });
        let shared = Arc::new(Shared { image, wanted, changed: Condvar::new() });
        Self { shared, most: (cpus - 1).min(THREADS), threads: OnceLock::new() }
    }

    /// Has the frames of a range of the image decoded, if there is room for twice as much.
    pub(crate) fn decode(&self, range: Range<u64>) {
        let len_bytes = range.end.saturating_sub(range.start);
        if self.most == 0 || len_bytes == 0 || !self.shared.image.keeps(2 * len_bytes) {
            return;
        }
        self.threads.get_or_init(|| {
            let start = |number| {
                let shared = self.shared.clone();
                let builder = Builder::new().name(format!("uzone-decode-{number}"));
                builder.spawn(move || shared.work())
            };
            // Where a thread is refused, those that answer faults decode alone.
            (0..self.most).map_while(|number| start(number).ok()).collect()
        });
        let mut wanted = lock(&self.shared.wanted);
        let from = wanted.range.start;
        let start = if range.contains(&from) { from } else { range.start };
        wanted.range = start..range.end;
        drop(wanted);
        self.shared.changed.notify_all();
    }
}

impl Drop for DecodeAhead {
    fn drop(&mut self) {
        lock(&self.shared.wanted).is_over = true;
        self.shared.changed.notify_all();
        for thread in self.threads.take().into_iter().flatten() {
            // A panic of it was printed when it happened.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn work(&self) {
        let mut wanted = lock(&self.wanted);
        while !wanted.is_over {
            let Range { start, end } = wanted.range;
            if start >= end {
                wanted = self.changed.wait(wanted).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            let extent = self.image.extent(start, end);
            wanted.range.start = extent.end;
            drop(wanted);
            if let Some(stored) = extent.stored
                && matches!(stored.ready(), Ready::No)
            {
                // An error shows when a page of it is touched.
                let _ = stored.get();
            }
            wanted = lock(&self.wanted);
        }
    }
}
