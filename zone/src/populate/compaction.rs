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

/// Returns how long a window of huge pages may take, by the time of one of base pages. Compaction that succeeds makes huge
/// pages at half of the rate of base pages, so that much is too late. Threads that share the way to memory are slower
/// than the one that measured, and huge pages are made twice as fast as base pages: on 16 CPUs they keep below.
fn latest(base: Duration) -> Duration {
    base * 5 / 4
}

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
        if window.bytes < WINDOW && window.took < latest(self.base) {
            return;
        }
        let taken = window_of(window.bytes.max(WINDOW), window.took);
        (window.bytes, window.took) = (0, Duration::ZERO);
        if taken < latest(self.base) {
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
            let error = uzone_os::with_causes(&error);
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]
    use std::fs;

    use uzone_os::{Anonymous, HugeAdvice};
    use uzone_pages::ByteLen;

    use super::*;

    /// Returns whether the process has asked the kernel for no huge page at an address.
    fn is_never_huge(address: usize) -> bool {
        let smaps = fs::read_to_string("/proc/self/smaps").unwrap();
        let mut lines =
            smaps.lines().skip_while(|line| !line.starts_with(&format!("{address:x}-")));
        lines.find(|line| line.starts_with("VmFlags:")).unwrap().contains(" nh")
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri has no madvise(2)")]
    fn huge_pages_are_left_when_they_are_late_and_the_kernel_compacts() {
        let folder = std::env::temp_dir().join(format!("uzone-compaction-{}", std::process::id()));
        fs::create_dir_all(folder.join("proc")).unwrap();
        let count = |stalls: u32| {
            let text = format!("compact_stall {stalls}\nthp_fault_fallback 0\n");
            fs::write(folder.join("proc/vmstat"), text).unwrap();
        };
        count(7);
        let how = Anonymous { huge: HugeAdvice::Advise, ..Anonymous::default() };
        let memory = Mapping::anonymous(ByteLen::mib(64), how).unwrap();
        let (address, root) = (memory.addr().get(), SystemRoot::at(&folder));
        let whole = 0..ByteLen::mib(64).get();
        let (compaction, first) = Compaction::measure(&memory, &root, whole).unwrap();
        assert_eq!((first, memory.resident().unwrap()), (0..FIRST, ByteLen::new(FIRST)));
        assert!(!is_never_huge(address));

        // In time, then late on a host that is busy, then late on one that compacts.
        let late = latest(compaction.base);
        for (len, took, stalls, is_left) in [
            (WINDOW, compaction.base, 8, false),
            (FIRST, late / 2, 7, false),
            (FIRST, late, 7, false),
            (WINDOW, late / 2, 8, false),
            (FIRST, late / 2, 8, false),
            (FIRST, late, 8, true),
        ] {
            count(stalls);
            compaction.note(&(0..len), took);
            assert_eq!(compaction.is_compacting(), is_left, "{len} {took:?} {stalls}");
            assert_eq!(is_never_huge(address), is_left);
        }
        fs::remove_dir_all(&folder).unwrap();
    }
}
