//! Whether the kernel has to move other memory away to make huge pages: [`Compaction`].
//!
//! On a fragmented host each fault compacts memory, fails often, and takes a hundred times as long as the faults for
//! base pages. So the first stretch is populated in base pages, and the time of that is compared with the time of
//! huge pages. The time of a chunk is that of one thread; the kernel's own counters confirm that it was compaction, since a
//! busy host makes chunks late as well.

use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use uzone_os::{Mapping, MappingError, SystemRoot, lock};

/// How much is populated in base pages to measure them, and then compared with that at a time.
const FIRST: u64 = 2 << 20;
const WINDOW: u64 = 16 << 20;
/// How many times as long huge pages may take.
const FACTOR: u32 = 5;

/// The times of huge pages so far.
pub(super) struct Compaction<'a> {
    mapping: &'a Mapping,
    root: &'a SystemRoot,
    /// How long a window of base pages takes one thread.
    base: Duration,
    window: Mutex<Window>,
    is_compacting: AtomicBool,
}

/// Chunks since the last comparison.
struct Window {
    bytes: u64,
    took: Duration,
    /// The kernel's count of faults that compacted memory or got no huge page.
    stalls: u64,
}

impl<'a> Compaction<'a> {
    /// Populates the first bytes of a range in base pages, and asks for huge ones again. Returns these bytes too.
    ///
    /// # Errors
    /// [`MappingError`] names the exhausted resource.
    pub(super) fn measure(
        mapping: &'a Mapping,
        root: &'a SystemRoot,
        range: Range<u64>,
    ) -> Result<(Self, Range<u64>), MappingError> {
        let first = range.start..range.end.min(range.start.saturating_add(FIRST));
        mapping.advise_no_huge()?;
        let started = Instant::now();
        mapping.populate(first.clone())?;
        let base = window_of(first.end - first.start, started.elapsed());
        mapping.advise_huge()?;
        let window = Window { bytes: 0, took: Duration::ZERO, stalls: stalls(root) };
        let (window, is_compacting) = (Mutex::new(window), AtomicBool::new(false));
        Ok((Self { mapping, root, base, window, is_compacting }, first))
    }

    /// Takes note of a chunk that one thread has populated.
    pub(super) fn note(&self, part: &Range<u64>, took: Duration) {
        // Relaxed: nothing is published by the flag, and a chunk more of huge pages does no harm.
        if self.is_compacting.load(Ordering::Relaxed) {
            return;
        }
        let mut window = lock(&self.window);
        window.bytes += part.end - part.start;
        window.took += took;
        // A chunk that is as late as a whole window may be is enough.
        if window.bytes < WINDOW && window.took < self.base * FACTOR {
            return;
        }
        let taken = window_of(window.bytes.max(WINDOW), window.took);
        (window.bytes, window.took) = (0, Duration::ZERO);
        if taken < self.base * FACTOR {
            return;
        }
        let before = window.stalls;
        window.stalls = stalls(self.root);
        if window.stalls == before {
            return; // the host is busy
        }
        self.is_compacting.store(true, Ordering::Relaxed);
        drop(window);
        if let Err(error) = self.mapping.advise_no_huge() {
            tracing::warn!(%error, "memory is fragmented, and the rest is in huge pages all the same");
        }
    }

    /// Returns whether the rest is in base pages for that reason.
    pub(super) fn is_compacting(&self) -> bool {
        self.is_compacting.load(Ordering::Relaxed) // as in `note`
    }
}

/// Returns how long a window takes if `bytes` took so long.
fn window_of(bytes: u64, took: Duration) -> Duration {
    let nanos = took.as_nanos() * u128::from(WINDOW) / u128::from(bytes.max(1));
    Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
}

/// Returns how many faults of the host have compacted memory, or got no huge page. A host that does not say has as many
/// as time goes by: the time decides alone.
fn stalls(root: &SystemRoot) -> u64 {
    static UNKNOWN: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
    let Ok(text) = root.read("proc/vmstat") else {
        return UNKNOWN.fetch_add(1, Ordering::Relaxed); // only compared
    };
    let of = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim().parse::<u64>().ok()
    };
    of("compact_stall ").unwrap_or(0) + of("thp_fault_fallback ").unwrap_or(0)
}
