//! The counts of a mapping: [`FaultStats`].

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// Counts of the events of a mapping, from its start.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) faults: AtomicU64,
    pub(crate) minor: AtomicU64,
    pub(crate) coalesced: AtomicU64,
    pub(crate) retouched: AtomicU64,
    pub(crate) demand: AtomicU64,
    pub(crate) around: AtomicU64,
    pub(crate) populated: AtomicU64,
    pub(crate) queued: AtomicU64,
    pub(crate) deferred: AtomicU64,
    pub(crate) poisoned: AtomicU64,
    pub(crate) evicted: AtomicU64,
    pub(crate) left_out: AtomicU64,
    pub(crate) read_ahead: AtomicU64,
    pub(crate) zeroes: AtomicU64,
    pub(crate) write_protect: AtomicU64,
    pub(crate) collapsed: AtomicU64,
    pub(crate) held: AtomicU64,
    /// Whether the thread that answers is on the CPU of those whose faults it answers.
    pub(crate) shares_cpu: AtomicBool,
}

/// The name of a count, and its field.
type Row = (&'static str, fn(&Counters) -> &AtomicU64, fn(&mut FaultStats) -> &mut u64);

const ROWS: [Row; 17] = [
    ("faults", |it| &it.faults, |it| &mut it.faults),
    ("minor", |it| &it.minor, |it| &mut it.minor),
    ("coalesced", |it| &it.coalesced, |it| &mut it.coalesced),
    ("retouched", |it| &it.retouched, |it| &mut it.retouched),
    ("demand", |it| &it.demand, |it| &mut it.demand),
    ("around", |it| &it.around, |it| &mut it.around),
    ("populated", |it| &it.populated, |it| &mut it.populated),
    ("queued", |it| &it.queued, |it| &mut it.queued),
    ("deferred", |it| &it.deferred, |it| &mut it.deferred),
    ("poisoned", |it| &it.poisoned, |it| &mut it.poisoned),
    ("evicted", |it| &it.evicted, |it| &mut it.evicted),
    ("left out", |it| &it.left_out, |it| &mut it.left_out),
    ("read ahead", |it| &it.read_ahead, |it| &mut it.read_ahead),
    ("zeroes", |it| &it.zeroes, |it| &mut it.zeroes),
    ("write-protect", |it| &it.write_protect, |it| &mut it.write_protect),
    ("collapsed", |it| &it.collapsed, |it| &mut it.collapsed),
    ("held", |it| &it.held, |it| &mut it.held),
];

impl Counters {
    /// Adds the counts to those of a mapping.
    pub(crate) fn add_to(&self, stats: &mut FaultStats) {
        for (_, counter, count) in ROWS {
            // Relaxed: each is a statistic of its own.
            *count(stats) += counter(self).load(Ordering::Relaxed);
        }
        // Relaxed: as above.
        stats.shares_cpu |= self.shares_cpu.load(Ordering::Relaxed);
    }

    /// Returns how many pages were installed.
    pub(crate) fn installed(&self) -> u64 {
        let counters = [&self.demand, &self.around, &self.populated];
        // Relaxed: a statistic, by which nothing is published.
        counters.iter().map(|counter| counter.load(Ordering::Relaxed)).sum()
    }

    pub(crate) fn add(counter: &AtomicU64, count: u64) {
        if count != 0 {
            // Relaxed: a statistic, by which nothing is published.
            counter.fetch_add(count, Ordering::Relaxed);
        }
    }
}

/// Counts of the events of a mapping.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct FaultStats {
    /// Faults that were read.
    pub faults: u64,
    /// Those of them for pages that the page cache had.
    pub minor: u64,
    /// Those for a page that another thread was producing already.
    pub coalesced: u64,
    /// Those for a page that was present by the time they were read.
    pub retouched: u64,
    /// Pages that were installed because a thread waited for them.
    pub demand: u64,
    /// Pages that were installed around those, or ahead of a sequential reader.
    pub around: u64,
    /// Pages that were installed by [`LazyMapping::populate`](crate::LazyMapping::populate), or by
    /// [`AdoptedMemory::prefetch`](crate::AdoptedMemory::prefetch).
    pub populated: u64,
    /// Pages that were not ready and were queued for the I/O threads.
    pub queued: u64,
    /// How often the kernel or a full queue deferred a page.
    pub deferred: u64,
    /// Pages that are bad.
    pub poisoned: u64,
    /// Pages that were given back.
    pub evicted: u64,
    /// Neighbours that were not installed because too many faults came at once.
    pub left_out: u64,
    /// Pages that the kernel installed as zeroes, which take no memory until they are written, where the
    /// kernel has a zero page for the memory.
    pub zeroes: u64,
    /// Write faults on protected pages; they are not among the faults.
    pub write_protect: u64,
    /// Huge pages that were made of small ones.
    pub collapsed: u64,
    /// How often its [`Budget`](crate::Budget) was used up.
    pub held: u64,
    /// Pages that were read ahead.
    pub read_ahead: u64,
    /// Whether the reader is on the CPU of the threads whose faults it answers, because it follows a thread, or a
    /// process ([`LazyOptions::process`](crate::LazyOptions::process)), that is kept to one.
    pub shares_cpu: bool,
    /// Whether answering faults panicked, which is a bug of uzone: every page that was missing then is bad.
    pub has_failed: bool,
    /// Pages that are being produced now, for faults and for populating threads.
    pub pending: u64,
    /// For how long the oldest of them has been.
    pub oldest_pending: Option<Duration>,
}

/// The counts that are not zero, by name.
impl fmt::Display for FaultStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut counts = *self;
        let rows = ROWS.map(|(name, _, count)| (name, *count(&mut counts)));
        write!(f, "faults {}", self.faults)?;
        for (name, count) in rows[1..].iter().chain(&[("pending", self.pending)]) {
            if *count != 0 {
                write!(f, ", {name} {count}")?;
            }
        }
        if let Some(oldest) = self.oldest_pending {
            write!(f, " for {oldest:?}")?;
        }
        if self.shares_cpu {
            f.write_str(", on the CPU of the faulting threads")?;
        }
        if self.has_failed {
            f.write_str(", failed")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statistics_name_what_is_not_zero() {
        let mut stats = FaultStats::default();
        assert_eq!(stats.to_string(), "faults 0");
        Counters { read_ahead: AtomicU64::new(3), ..Counters::default() }.add_to(&mut stats);
        Counters { faults: AtomicU64::new(7), ..Counters::default() }.add_to(&mut stats);
        (stats.pending, stats.oldest_pending) = (2, Some(Duration::from_millis(5)));
        (stats.shares_cpu, stats.has_failed) = (true, true);
        assert_eq!(
            stats.to_string(),
            "faults 7, read ahead 3, pending 2 for 5ms, on the CPU of the faulting threads, failed"
        );
    }
}
