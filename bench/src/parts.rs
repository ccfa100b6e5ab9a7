//! The run of `uzone-bench` without a subcommand: every benchmark, one after the other, at sizes that fit the host.
//!
//! [`parts`] chooses the sizes by the available memory; 2 CPUs take three to four minutes for them. A part that this
//! host cannot run is left out by name, with the reason; a part that finds something wrong ends the run.

use std::num::NonZeroUsize;
use std::path::Path;

use uzone_harness::{Bench, BenchError, Phase, Result, Skipped, Watch};
use uzone_os::{SystemRoot, memory};
use uzone_pages::ByteLen;

use crate::settings::{
    Benchmark, BindSettings, CopySettings, FaultSettings, HostpoolSettings, Part, PinSettings,
    SnapshotSettings, WholeSettings, ZeroSettings,
};
use crate::tables::{bind, clear, fault, hostpool, image, pin, restore};

impl Part {
    /// Runs it.
    ///
    /// # Errors
    /// [`BenchError`] if it cannot be run here, or a row found something wrong.
    pub(crate) fn run(&self, watch: Watch<'_>) -> Result<Bench> {
        match &self.benchmark {
            Benchmark::Bind(settings) => bind::run(settings, self, watch),
            Benchmark::Pin(settings) => pin::run(settings, self, watch),
            Benchmark::Zero(settings) => clear::zero(settings, self, watch),
            Benchmark::Copy(settings) => clear::copy(settings, self, watch),
            Benchmark::Fault(settings) => fault::run(settings, self, watch),
            Benchmark::Snapshot(settings) => image::run(settings, self, watch),
            Benchmark::Restore(settings) => restore::run(settings, self, watch),
            Benchmark::Hostpool(settings) => hostpool::run(settings, self, watch),
        }
    }
}

/// Returns the available memory, or 1 GiB if the kernel does not report it.
#[must_use]
pub(crate) fn available() -> ByteLen {
    memory::available(&SystemRoot::host()).map_or(ByteLen::gib(1), |have| have.bytes)
}

/// Returns the benchmarks and their settings for a host with `available` memory. The figures of these sizes and rounds
/// can be trusted. With `is_quick` they take half a minute in all, and show that all benchmarks work. Files are made in
/// `directory`, an absolute path.
#[must_use]
pub(crate) fn parts(
    available: ByteLen,
    threads: NonZeroUsize,
    is_quick: bool,
    directory: &Path,
) -> Vec<Part> {
    // Half of the available memory is left to others.
    let room = available.get() / 2;
    // The first size that fits, where each byte takes `cost` 4096ths of a byte of memory.
    let pick = |sizes: &[ByteLen], cost: u64, quick: ByteLen| {
        let fits = |size: &&ByteLen| size.get() / 4096 * cost <= room;
        let fitting = sizes.iter().find(fits).or(sizes.last()).copied();
        if is_quick { quick } else { fitting.unwrap_or(ByteLen::gib(1)) }
    };
    let (gib, mib) = (ByteLen::gib, ByteLen::mib);
    let size = pick(&[gib(16), gib(8), gib(2), gib(1)], 2 * 64, gib(1));
    // The smallest arena is larger than caches, so that cold extents are cold.
    let extents = if is_quick { ByteLen::kib(64) } else { mib(32) };
    let image = |sizes: &[ByteLen], rounds| SnapshotSettings {
        size: pick(sizes, 3 * 4096, mib(8)),
        rounds: if is_quick { 1 } else { rounds },
        threads,
        directory: directory.to_owned(),
    };
    let parts = [
        Benchmark::Bind(BindSettings {
            size,
            rebinds: if is_quick { 2 } else { 11 },
            first_binds: if is_quick { 1 } else { 5 },
            threads,
            dax: None,
        }),
        Benchmark::Pin(PinSettings {
            size: pick(&[gib(16), gib(4), gib(1)], 80, gib(1)),
            rounds: if is_quick { 2 } else { 11 },
        }),
        Benchmark::Zero(ZeroSettings {
            size: extents,
            rounds: if is_quick { 1 } else { 11 },
            first_touches: if is_quick { 1 } else { 5 },
            populate: pick(&[mib(512), mib(128)], 4096, mib(64)),
            threads,
        }),
        Benchmark::Copy(CopySettings { size: extents, rounds: if is_quick { 1 } else { 11 } }),
        Benchmark::Fault(FaultSettings {
            density: if is_quick { mib(8) } else { mib(256) },
            ..scans(if is_quick { mib(4) } else { mib(8) }, if is_quick { 1 } else { 7 }, directory)
        }),
        Benchmark::Snapshot(image(&[mib(256), mib(64)], 5)),
        Benchmark::Restore(image(&[mib(128), mib(64)], 3)),
        Benchmark::Hostpool(HostpoolSettings {
            size: pick(&[gib(4), gib(1)], 4096, mib(64)),
            rounds: if is_quick { 1 } else { 5 },
        }),
    ];
    parts.map(Part::from).into()
}

/// Returns the settings of the scans alone.
fn scans(size: ByteLen, rounds: u32, directory: &Path) -> FaultSettings {
    let directory = directory.to_owned();
    FaultSettings { size, density: ByteLen::ZERO, whole: None, rounds, directory }
}

/// The tables of the published experiments.
const OF_SEEDS: [&[&str]; 4] = [
    &["bind-4k", "bind-2m", "bind-small", "bind-limit", "bind-altmap", "bind-first"],
    &["pin-2m"],
    &["zero-cold-later", "zero-demand", "populate", "pool-take"],
    &["fault-whole"],
];

/// Returns the published experiments: describing memory, pinning it, clearing it and mapping it.
/// With `is_full` they have the published sizes, as far as memory allows; without, they take less than five
/// minutes on 2 CPUs.
#[must_use]
pub(crate) fn seeds(
    available: ByteLen,
    threads: NonZeroUsize,
    is_full: bool,
    directory: &Path,
) -> Vec<Part> {
    let gib = ByteLen::gib;
    let room = available.get() / 2;
    // The descriptors are a 64th, twice; a file takes as much again for a copy.
    let fitting = |most: ByteLen, cost: u64| {
        let sizes =
            std::iter::successors(Some(most.get()), |size| Some(size / 2 / (1 << 30) * (1 << 30)));
        let fits = |size: &u64| size / 4096 * cost <= room || *size <= 1 << 30;
        ByteLen::new(sizes.into_iter().find(fits).unwrap_or(1 << 30).max(1 << 30))
    };
    let (described, rounds) = if is_full { (gib(100), 30) } else { (gib(16), 5) };
    let (size, counts, orders): (_, &[usize], &[u8]) = match is_full {
        true => (fitting(gib(16), 2 * 4096), &[1, 8, 32, 60, 120], &[0, 1, 3, 4, 5, 7, 9]),
        false => (ByteLen::mib(16), &[1, 8, 120], &[0, 4, 9]),
    };
    let parts = [
        Benchmark::Bind(BindSettings {
            size: fitting(described, 2 * 64),
            rebinds: rounds,
            first_binds: if is_full { 10 } else { 3 },
            threads,
            dax: None,
        }),
        Benchmark::Pin(PinSettings { size: fitting(gib(16), 80), rounds }),
        Benchmark::Zero(ZeroSettings {
            size: gib(1),
            rounds: rounds.min(5),
            first_touches: if is_full { 5 } else { 2 },
            populate: fitting(if is_full { gib(64) } else { gib(2) }, 4096),
            threads,
        }),
        Benchmark::Fault(FaultSettings {
            whole: Some(whole(size, counts, orders)),
            ..scans(ByteLen::mib(8), 3, directory)
        }),
    ];
    let tables = OF_SEEDS.iter().map(|ids| strings(ids));
    parts.into_iter().zip(tables).map(|(part, ids)| Part::from(part).with_tables(ids)).collect()
}

fn whole(size: ByteLen, threads: &[usize], orders: &[u8]) -> WholeSettings {
    WholeSettings { size, threads: threads.to_vec(), orders: orders.to_vec() }
}

fn strings(ids: &[&str]) -> Vec<String> {
    ids.iter().map(|id| (*id).to_owned()).collect()
}

/// The name of the run of the published experiments.
pub(crate) const SEEDS: &str = "seeds";
/// The name of a run of every benchmark.
pub(crate) const ALL: &str = "all";

/// Returns the published experiments at the sizes of a quick run.
#[must_use]
pub(crate) fn quick_seeds(parts: Vec<Part>) -> Vec<Part> {
    let of = |Part { mut benchmark, mut tables }| {
        match &mut benchmark {
            Benchmark::Bind(_) | Benchmark::Pin(_) => {}
            Benchmark::Zero(_) => tables = strings(OF_SEEDS[2]),
            Benchmark::Fault(settings) => {
                settings.whole = Some(whole(ByteLen::mib(4), &[1, 8], &[4]));
                tables = strings(OF_SEEDS[3]);
            }
            Benchmark::Copy(_)
            | Benchmark::Snapshot(_)
            | Benchmark::Restore(_)
            | Benchmark::Hostpool(_) => return None,
        }
        Some(Part { benchmark, tables })
    };
    parts.into_iter().filter_map(of).collect()
}

/// Returns the parts that have tables whose ids start with one of `ids`, reduced to these tables; all parts if
/// `ids` is empty.
#[must_use]
pub(crate) fn with_tables(parts: Vec<Part>, ids: &[String]) -> Vec<Part> {
    if ids.is_empty() {
        return parts;
    }
    let of = |part: Part| {
        let all = format!("{}-", part.name());
        if ids.iter().any(|id| all.starts_with(id.as_str())) {
            return Some(part);
        }
        let own: Vec<String> = ids.iter().filter(|id| part.owns(id)).cloned().collect();
        (!own.is_empty()).then(|| part.with_tables(own))
    };
    parts.into_iter().filter_map(of).collect()
}

/// Runs some benchmarks as one document with this name.
///
/// # Errors
/// [`BenchError`] if a row found something wrong, or no part could be run.
pub(crate) fn run(name: &str, parts: &[Part], watch: Watch<'_>) -> Result<Bench> {
    let (mut done, mut skipped, mut refused) = (Vec::new(), Vec::new(), None);
    for (part, number) in parts.iter().zip(1..) {
        let place = (parts.len() > 1).then_some((part.name(), number, parts.len()));
        match part.run(&|phase| watch(Phase { part: place, ..phase })) {
            Ok(bench) => done.push(bench),
            // A need that the host lacks ends no run.
            Err(error) if error.is_of_this_host() => {
                skipped.push(Skipped {
                    id: part.name().to_owned(),
                    reason: uzone_os::with_causes(&error),
                });
                refused.get_or_insert(error);
            }
            Err(error) => return Err(error),
        }
    }
    let mut done = done.into_iter();
    let Some(first) = done.next() else {
        return Err(refused.unwrap_or_else(|| BenchError::no_table(&[])));
    };
    let mut all = done.fold(first, append);
    all.benchmark = name.to_owned();
    // Skipped parts stay in: a repetition of the run tries them again.
    all.parameters = parts.iter().map(Part::to_json).collect();
    all.skipped.append(&mut skipped);
    Ok(all)
}

/// Appends the results of `other` to `all`.
fn append(mut all: Bench, other: Bench) -> Bench {
    all.settings = format!("{}; {}: {}", all.settings, other.benchmark, other.settings);
    all.summary.extend(other.summary);
    all.tables.extend(other.tables);
    all.results.extend(other.results);
    all.skipped.extend(other.skipped);
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes(available: ByteLen, is_quick: bool) -> [u64; 7] {
        let parts = parts(available, NonZeroUsize::MIN, is_quick, Path::new("/tmp"));
        let size = |part: &Part| part.to_json()["size_bytes"].as_u64().expect("a size");
        let mut sizes: Vec<u64> = parts.iter().map(|part| size(part) >> 10).collect();
        assert!(sizes.pop() > Some(0), "the pool of host memory comes last");
        sizes.try_into().expect("seven parts before it")
    }

    #[test]
    fn sizes_follow_the_memory_and_are_never_none() {
        const M: u64 = 1 << 10;
        const G: u64 = 1 << 20;
        for (available, expected) in [
            (ByteLen::tib(1), [16 * G, 16 * G, 32 * M, 32 * M, 8 * M, 256 * M, 128 * M]),
            (ByteLen::gib(1), [16 * G, 16 * G, 32 * M, 32 * M, 8 * M, 64 * M, 128 * M]),
            (ByteLen::mib(600), [8 * G, 4 * G, 32 * M, 32 * M, 8 * M, 64 * M, 64 * M]),
            (ByteLen::mib(128), [2 * G, G, 32 * M, 32 * M, 8 * M, 64 * M, 64 * M]),
            (ByteLen::ZERO, [G, G, 32 * M, 32 * M, 8 * M, 64 * M, 64 * M]),
        ] {
            assert_eq!(sizes(available, false), expected, "{available}");
            assert_eq!(sizes(available, true), [G, G, 64, 64, 4 * M, 8 * M, 8 * M], "{available}");
        }
    }

    #[test]
    fn what_a_run_was_given_is_read_again_as_it_was_written() {
        let (available, directory) = (ByteLen::gib(8), Path::new("/var/tmp"));
        let parts = parts(available, NonZeroUsize::MIN, false, directory);
        let seeds = seeds(available, NonZeroUsize::MIN, false, directory);
        for part in parts.into_iter().chain(seeds) {
            let part = part.with_tables(vec!["zero-hint".to_owned()]);
            let text = serde_json::to_string(&part).expect("it can be written");
            assert!(text.contains(r#""size_bytes":"#) && text.contains(part.name()), "{text}");
            assert_eq!(serde_json::from_str::<Part>(&text).expect("it can be read"), part);
        }
    }

    #[test]
    fn a_host_without_what_a_part_needs_is_no_defect_and_a_wrong_byte_is_one() {
        let (refused, wrong) =
            (BenchError::threads(2), BenchError::wrong_byte("zero-hint/ours", 7));
        assert!(refused.is_of_this_host() && !wrong.is_of_this_host());
        assert!(!BenchError::no_table(&["x".to_owned()]).is_of_this_host());
    }
}
