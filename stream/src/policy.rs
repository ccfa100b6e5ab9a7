//! Which store for which length: [`StorePolicy`].
//!
//! Size alone does not decide. A destination that is in the cache is written fastest through the
//! cache; one that is not, and that nothing reads soon, is written fastest past it; one that is read
//! at once pays for having been sent to memory. So the caller states whether the destination is in the cache, and its
//! next use ([`CacheState`], [`NextUse`]), and the policy has one length for each case from which on
//! streaming is the faster way.
//!
//! The default is a table keyed on the vendor, the family and the features of the CPU, whose lengths
//! follow the sizes of its caches. Its rows were measured (`stream/examples/stream_ways.rs`). A CPU that is not in
//! the table takes its widest streaming store. The
//! environment variable [`STORE_POLICY`] names others.
//!
//! Not here: the loss of other threads when their lines are pushed out of the cache (streaming spares
//! them at any length), and the source of a copy, which is taken to be cold.
//!
//! Units: lengths in bytes. Cost: the first [`StorePolicy::current`] reads the environment and asks
//! the CPU, which takes microseconds; later calls are a load. No thread is started.

use std::env;
use std::ffi::OsStr;
use std::fmt;
use std::sync::OnceLock;

use crate::arch;
use crate::copy_method::CopyMethod;
use crate::error::StreamError;
use crate::path::Path;
use crate::work::{CacheState, NextUse, STORE_POLICY, Work};

/// From here on an extent has several pages of the smallest size, which a copy can take side by side.
const LONG_BYTES: usize = 16 << 10;

/// Where a [`StorePolicy`] comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Basis {
    /// The table has a row for this CPU.
    Table,
    /// The table has no row for this CPU: the widest streaming store, and lengths that fit most CPUs.
    Widest,
    /// The environment variable [`STORE_POLICY`].
    Environment,
    /// This build or architecture has no streaming stores.
    NoStreaming,
}

/// From which length on streaming is the faster way, for one kind of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Lengths {
    /// For [`CacheState::Cold`] and [`NextUse::Later`].
    cold_later: usize,
    /// For [`CacheState::Cold`] and [`NextUse::Soon`].
    cold_soon: usize,
    /// For [`CacheState::Hot`] and [`NextUse::Later`]; twice as long for [`NextUse::Soon`], because memory that is
    /// streamed has to come back from memory first.
    hot: usize,
}

/// Which store to take for which work and length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StorePolicy {
    /// How each work of [`Work::ALL`] is streamed.
    streaming: [CopyMethod; 3],
    lengths: [Lengths; 3],
    basis: Basis,
}

impl StorePolicy {
    /// Returns this process's policy: the value of [`STORE_POLICY`], or [`StorePolicy::for_cpu`].
    /// Decided at the first call; later changes of the environment have no effect.
    ///
    /// Where the variable cannot be followed, [`StorePolicy::problem`] has the reason.
    #[inline]
    #[must_use]
    pub fn current() -> &'static Self {
        &current().policy
    }

    /// Returns why the value of [`STORE_POLICY`] is not followed, if it is not.
    #[must_use]
    pub fn problem() -> Option<&'static StreamError> {
        current().problem.as_ref()
    }

    /// Makes this the policy of the process.
    ///
    /// # Errors
    ///
    /// Returns the policy that the process has, if it was decided before.
    pub fn make_current(self) -> Result<(), &'static Self> {
        CURRENT.set(Current { policy: self, problem: None }).map_err(|_| Self::current())
    }

    /// Returns the default for this CPU.
    #[must_use]
    pub fn for_cpu() -> Self {
        Self::of(arch::processor(), Path::is_available)
    }

    /// Returns the default for a CPU with these stores.
    fn of(cpu: Option<Processor>, has: impl Fn(Path) -> bool) -> Self {
        let Some(widest) = WIDEST_FIRST.into_iter().find(|path| has(*path)) else {
            return Self {
                streaming: [CopyMethod::String; 3],
                lengths: [OTHER_LENGTHS, OTHER_LENGTHS, OTHER_COPY_LENGTHS],
                basis: Basis::NoStreaming,
            };
        };
        let row = cpu.and_then(|cpu| {
            let row = TABLE.iter().find(|row| {
                row.vendor == cpu.vendor
                    && (row.families.0..=row.families.1).contains(&cpu.family)
                    && has(row.store)
            })?;
            // A hypervisor may hide the caches.
            (cpu.l2_bytes > 0 && cpu.l3_bytes > 0).then_some((row, cpu))
        });
        match row {
            Some((row, cpu)) => {
                let [write, copy] = (row.lengths)(cpu);
                let copied = if row.is_aside {
                    CopyMethod::Interleaved(row.store)
                } else {
                    CopyMethod::Streaming(row.store)
                };
                let filled = CopyMethod::Streaming(row.store);
                Self {
                    streaming: [filled, filled, copied],
                    lengths: [write, write, copy],
                    basis: Basis::Table,
                }
            }
            None => Self {
                streaming: [CopyMethod::Streaming(widest); 3],
                lengths: [OTHER_LENGTHS, OTHER_LENGTHS, OTHER_COPY_LENGTHS],
                basis: Basis::Widest,
            },
        }
    }

    /// Returns where this policy comes from.
    #[must_use]
    pub fn basis(&self) -> Basis {
        self.basis
    }

    /// Returns the fastest way for an extent of `len_bytes`. Of an extent that is taken in batches,
    /// ask with its whole length.
    ///
    /// A fill is written past the cache with [`StorePolicy::store`] unless the way is cached.
    #[inline]
    #[must_use]
    pub fn choose(
        &self,
        work: Work,
        len_bytes: usize,
        was: CacheState,
        next: NextUse,
    ) -> CopyMethod {
        match (self.streams_from(work, was, next), self.streaming[work as usize]) {
            (Some(from), way) if len_bytes >= from => match way {
                CopyMethod::Interleaved(path) if len_bytes < LONG_BYTES => {
                    CopyMethod::Streaming(path)
                }
                way => way,
            },
            _ => CopyMethod::String,
        }
    }

    /// Returns from which length on memory is written past the cache; `None` is never.
    #[inline]
    #[must_use]
    pub fn streams_from(&self, work: Work, was: CacheState, next: NextUse) -> Option<usize> {
        let lengths = self.lengths[work as usize];
        let from = match (was, next) {
            (CacheState::Cold, NextUse::Later) => lengths.cold_later,
            (CacheState::Cold, NextUse::Soon) => lengths.cold_soon,
            (CacheState::Hot, NextUse::Later) => lengths.hot,
            (CacheState::Hot, NextUse::Soon) => lengths.hot.saturating_mul(2),
        };
        (!self.streaming[work as usize].is_cached()).then_some(from)
    }

    /// Returns the store of a work past the cache; [`Path::Portable`] if there is none.
    #[inline]
    #[must_use]
    pub fn store(&self, work: Work) -> Path {
        self.streaming[work as usize].path()
    }

    /// Returns how a work is streamed.
    pub(crate) fn streaming(&self, work: Work) -> CopyMethod {
        self.streaming[work as usize]
    }

    /// Replaces how a work is streamed.
    pub(crate) fn with(mut self, work: Work, way: CopyMethod, basis: Basis) -> Self {
        self.streaming[work as usize] = way;
        self.basis = basis;
        self
    }

    /// Returns this policy with the works that `text` names replaced; see [`STORE_POLICY`].
    ///
    /// # Errors
    ///
    /// [`StreamError::Malformed`], [`StreamError::Twice`] or [`StreamError::Store`], for the first part that
    /// cannot be followed here.
    pub fn with_text(mut self, text: &str) -> Result<Self, StreamError> {
        let mut named = Vec::new();
        for part in text.split(',') {
            let shown = || part.to_owned();
            let (key, store) = part.split_once('=').ok_or_else(|| malformed(shown()))?;
            let work = Work::ALL
                .into_iter()
                .find(|work| work.name() == key.trim())
                .ok_or_else(|| malformed(shown()))?;
            if named.contains(&work) {
                return Err(StreamError::Twice { work });
            }
            named.push(work);
            let store = store.trim();
            let (name, is_aside) = match store.strip_suffix("-aside") {
                Some(name) if work == Work::Copy => (name, true),
                _ => (store, false),
            };
            let wrong = |cause| StreamError::Store { part: shown(), cause: Box::new(cause) };
            let path: Path = name.parse().map_err(wrong)?;
            if !path.is_available() {
                return Err(wrong(StreamError::Unavailable { path }));
            }
            let way = match path {
                Path::Portable => CopyMethod::String,
                path if is_aside => CopyMethod::Interleaved(path),
                path => CopyMethod::Streaming(path),
            };
            self = self.with(work, way, Basis::Environment);
        }
        Ok(self)
    }
}

fn malformed(part: String) -> StreamError {
    StreamError::Malformed { part, default: StorePolicy::for_cpu().to_string() }
}

impl fmt::Display for StorePolicy {
    /// A value for [`STORE_POLICY`].
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, work) in Work::ALL.into_iter().enumerate() {
            let comma = if index == 0 { "" } else { "," };
            let aside = if matches!(self.streaming(work), CopyMethod::Interleaved(_)) {
                "-aside"
            } else {
                ""
            };
            write!(f, "{comma}{}={}{aside}", work.name(), self.store(work))?;
        }
        Ok(())
    }
}

/// Returns the store for fills of this process: [`StorePolicy::store`] of [`StorePolicy::current`].
#[inline]
#[must_use]
pub fn best() -> Path {
    StorePolicy::current().store(Work::Fill)
}

/// The policy of a process, and why the environment's is not it.
struct Current {
    policy: StorePolicy,
    problem: Option<StreamError>,
}

static CURRENT: OnceLock<Current> = OnceLock::new();

#[inline]
fn current() -> &'static Current {
    CURRENT.get_or_init(|| decide(env::var_os(STORE_POLICY).as_deref(), StorePolicy::for_cpu()))
}

/// [`current`] without the process around it.
fn decide(wanted: Option<&OsStr>, default: StorePolicy) -> Current {
    let wanted = wanted.filter(|text| !text.is_empty());
    match wanted.map(|text| default.with_text(&text.to_string_lossy())) {
        None => Current { policy: default, problem: None },
        Some(Ok(policy)) => Current { policy, problem: None },
        Some(Err(problem)) => Current { policy: default, problem: Some(problem) },
    }
}

/// The inputs of a default beside the stores.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Processor {
    /// As CPUID has it, such as `GenuineIntel`.
    pub(crate) vendor: [u8; 12],
    pub(crate) family: u32,
    /// The caches of the second and third level, in bytes; 0 if the CPU does not report them.
    pub(crate) l2_bytes: usize,
    pub(crate) l3_bytes: usize,
}

/// The streaming stores, widest first.
const WIDEST_FIRST: [Path; 4] = [Path::Avx512, Path::Avx2, Path::Sse2, Path::Movnti];

/// A row of the table.
struct Row {
    vendor: [u8; 12],
    /// The first and the last.
    families: (u32, u32),
    /// The store that wins, and the feature that the row asks for.
    store: Path,
    /// Whether a copy takes eight pages side by side.
    is_aside: bool,
    /// The lengths of fills and clearing, and those of copies.
    lengths: fn(Processor) -> [Lengths; 2],
}

/// Measured thresholds, as shares of the caches that decide.
const TABLE: [Row; 2] = [
    // Xeon with AVX-512 and 2 MiB of L2, whose L3 is slow beside it. A prefetcher follows each page by
    // itself, so that copies side by side are 1.4 times as fast.
    Row {
        vendor: *b"GenuineIntel",
        families: (6, 6),
        store: Path::Avx512,
        is_aside: true,
        lengths: |cpu| {
            let l2 = cpu.l2_bytes;
            [
                Lengths { cold_later: 4 << 10, cold_soon: 2 * l2, hot: 8 * l2 },
                Lengths { cold_later: 4 << 10, cold_soon: l2, hot: 2 * l2 },
            ]
        },
    },
    // EPYC of the fourth generation (family 25) and the fifth (26), with 32 MiB of L3 that are nearly
    // as fast as L2. Copies side by side take twice the time of one stream here, and copies of a page
    // are faster through the cache.
    Row {
        vendor: *b"AuthenticAMD",
        families: (25, 26),
        store: Path::Avx512,
        is_aside: false,
        lengths: |cpu| {
            let l3 = cpu.l3_bytes;
            [
                Lengths { cold_later: 4 << 10, cold_soon: l3 / 4, hot: l3 },
                Lengths { cold_later: 16 << 10, cold_soon: l3 / 4, hot: l3 / 2 },
            ]
        },
    },
];

/// The lengths for fills and clearing where the table has no row.
const OTHER_LENGTHS: Lengths = Lengths { cold_later: 4 << 10, cold_soon: 8 << 20, hot: 16 << 20 };
/// The lengths for copies there: the source takes as much of the cache.
const OTHER_COPY_LENGTHS: Lengths =
    Lengths { cold_later: 16 << 10, cold_soon: 8 << 20, hot: 8 << 20 };

#[cfg(test)]
mod tests {
    use super::*;

    fn cpu(vendor: &[u8; 12], family: u32) -> Option<Processor> {
        Some(Processor { vendor: *vendor, family, l2_bytes: 2 << 20, l3_bytes: 32 << 20 })
    }

    #[test]
    fn a_known_cpu_has_a_row_and_any_other_its_widest_store() {
        let all = |_| true;
        let no_512 = |path| path != Path::Avx512;
        for (cpu, has, basis, text) in [
            (
                cpu(b"GenuineIntel", 6),
                all as fn(Path) -> bool,
                Basis::Table,
                "fill=avx512,zero=avx512,copy=avx512-aside",
            ),
            (cpu(b"AuthenticAMD", 25), all, Basis::Table, "fill=avx512,zero=avx512,copy=avx512"),
            (cpu(b"AuthenticAMD", 26), all, Basis::Table, "fill=avx512,zero=avx512,copy=avx512"),
            (cpu(b"AuthenticAMD", 25), no_512, Basis::Widest, "fill=avx2,zero=avx2,copy=avx2"),
            (cpu(b"GenuineIntel", 6), no_512, Basis::Widest, "fill=avx2,zero=avx2,copy=avx2"),
            (cpu(b"HygonGenuine", 24), all, Basis::Widest, "fill=avx512,zero=avx512,copy=avx512"),
            (
                None,
                |path| path == Path::Movnti,
                Basis::Widest,
                "fill=movnti,zero=movnti,copy=movnti",
            ),
            (None, |_| false, Basis::NoStreaming, "fill=portable,zero=portable,copy=portable"),
        ] {
            let found = StorePolicy::of(cpu, has);
            assert_eq!((found.basis, found.to_string().as_str()), (basis, text), "{cpu:?}");
        }
        // A hypervisor that hides the caches leaves no lengths to take from them.
        let hidden = Processor { l2_bytes: 0, ..cpu(b"GenuineIntel", 6).unwrap() };
        assert_eq!(StorePolicy::of(Some(hidden), all).basis, Basis::Widest);
    }

    #[test]
    fn the_choice_follows_size_past_and_future() {
        let policy = StorePolicy::of(cpu(b"GenuineIntel", 6), |_| true);
        let (s, one) = (CopyMethod::String, CopyMethod::Streaming(Path::Avx512));
        let several = CopyMethod::Interleaved(Path::Avx512);
        for (bytes, zero, copy) in [
            (0, [s, s, s, s], [s, s, s, s]),
            (4095, [s, s, s, s], [s, s, s, s]),
            (4096, [one, s, s, s], [one, s, s, s]),
            (LONG_BYTES, [one, s, s, s], [several, s, s, s]),
            (2 << 20, [one, s, s, s], [several, several, s, s]),
            (4 << 20, [one, one, s, s], [several, several, several, s]),
            (8 << 20, [one, one, s, s], [several; 4]),
            (16 << 20, [one, one, one, s], [several; 4]),
            (usize::MAX, [one; 4], [several; 4]),
        ] {
            let found = |work| {
                [
                    (CacheState::Cold, NextUse::Later),
                    (CacheState::Cold, NextUse::Soon),
                    (CacheState::Hot, NextUse::Later),
                ]
                .into_iter()
                .chain([(CacheState::Hot, NextUse::Soon)])
                .map(|(was, next)| policy.choose(work, bytes, was, next))
                .collect::<Vec<_>>()
            };
            assert_eq!(found(Work::Zero), zero, "{bytes}");
            assert_eq!(found(Work::Fill), zero, "{bytes}");
            assert_eq!(found(Work::Copy), copy, "{bytes}");
        }
    }

    #[test]
    fn without_streaming_stores_everything_is_cached() {
        let policy = StorePolicy::of(None, |_| false);
        for work in Work::ALL {
            assert_eq!(policy.streams_from(work, CacheState::Cold, NextUse::Later), None);
            assert_eq!(
                policy.choose(work, usize::MAX, CacheState::Cold, NextUse::Later),
                CopyMethod::String
            );
        }
    }

    #[test]
    fn a_text_replaces_what_it_names_and_is_read_back() {
        let default = StorePolicy::for_cpu();
        for text in ["copy=portable", "zero=portable,fill=PORTABLE", " fill = portable "] {
            let found = default.with_text(text).unwrap();
            assert_eq!(found.basis(), Basis::Environment, "{text}");
            assert_eq!(default.with_text(&found.to_string()), Ok(found), "{text}");
        }
        let found = default.with_text("zero=portable").unwrap();
        assert_eq!(found.store(Work::Zero), Path::Portable);
        assert_eq!(found.streaming(Work::Fill), default.streaming(Work::Fill));
        assert_eq!(
            found.choose(Work::Zero, 1 << 30, CacheState::Cold, NextUse::Later),
            CopyMethod::String
        );
        for way in CopyMethod::all().filter(|way| !way.is_cached()) {
            let named = default.with(Work::Copy, way, Basis::Environment);
            assert_eq!(default.with_text(&named.to_string()), Ok(named));
        }
    }

    #[test]
    fn a_text_that_cannot_be_followed_says_which_part_and_how_to_write_it() {
        let default = StorePolicy::for_cpu();
        for (text, part) in [
            ("avx2", "\"avx2\" is not fill=STORE"),
            ("fill=portable,", "\"\" is not fill=STORE"),
            ("clear=portable", "\"clear=portable\" is not fill=STORE"),
            ("fill=mmx", "in \"fill=mmx\" of UZONE_STORE_POLICY: no stream path is called"),
            ("zero=sse2-aside", "no stream path is called \"sse2-aside\""),
            ("fill=portable,fill=portable", "fill has two stores"),
        ] {
            let error = default.with_text(text).unwrap_err().to_string();
            assert!(error.contains(part), "{text}: {error}");
            let current = decide(Some(OsStr::new(text)), default);
            assert_eq!(current.policy, default);
            assert_eq!(current.problem.unwrap().to_string(), error);
        }
        let Some(absent) = Path::ALL.into_iter().find(|path| !path.is_available()) else {
            eprintln!("skipped: unavailable store: this CPU offers every store");
            return;
        };
        let error = default.with_text(&format!("fill={absent}")).unwrap_err().to_string();
        assert!(error.contains("is not available here; there are portable"), "{error}");
    }

    #[test]
    fn an_empty_text_is_none() {
        let default = StorePolicy::for_cpu();
        let current = decide(Some(OsStr::new("")), default);
        assert_eq!((current.policy, current.problem), (default, None));
    }
}
