//! Every benchmark, one after the other, at sizes that fit the machine: what `uzone bench` runs without
//! a subcommand.
//!
//! [`parts`] chooses the sizes, by the memory that can be had; a machine with 2 CPUs takes three to
//! four minutes for them. A part that this host cannot run is left out by name, with the reason; one
//! that finds something wrong ends the run.

use std::num::NonZeroUsize;
use std::path::Path;

use uzone_os::{SystemRoot, memory};
use uzone_pages::ByteLen;

use crate::group::{PartOf, Phase, Watch};
use crate::report::{Bench, Skipped};
use crate::settings::Part;
use crate::suite::{BenchError, sentence};
use crate::{bind, copy, fault, metadata, pin, restore, snapshot, zero};

/// How thorough a run is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pace {
    /// Sizes and rounds of which the figures can be trusted.
    Full,
    /// Every row once or twice, at sizes that take about half a minute in all: whether it all works.
    Quick,
}

impl Part {
    /// Runs it.
    ///
    /// # Errors
    /// [`BenchError`] if it cannot be run here, or a row found something wrong.
    pub fn run(&self, watch: Watch<'_>) -> Result<Bench, BenchError> {
        match self {
            Self::Bind(settings) => bind::run(settings, watch),
            Self::Pin(settings) => pin::run(settings, watch),
            Self::Zero(settings) => zero::run(settings, watch),
            Self::Copy(settings) => copy::run(settings, watch),
            Self::Fault(settings) => fault::run(settings, watch),
            Self::Snapshot(settings) => snapshot::run(settings, watch),
            Self::Restore(settings) => restore::run(settings, watch),
        }
    }
}

/// Returns how much memory a run may plan with: what can be had, if the kernel reports it.
#[must_use]
pub fn available() -> ByteLen {
    memory::available(&SystemRoot::host()).map_or(ByteLen::gib(1), |have| have.bytes)
}

/// Returns the benchmarks and the settings of each, for so much memory. The file of `fault` is made
/// in `directory`, by a path that holds from anywhere.
#[must_use]
pub fn parts(available: ByteLen, threads: NonZeroUsize, pace: Pace, directory: &Path) -> Vec<Part> {
    let is_quick = pace == Pace::Quick;
    // Of what can be had, half is left to others.
    let room = available.get() / 2;
    // The first of some sizes of which each byte takes so many 4096ths of a byte of memory.
    let fitting = |sizes: &[ByteLen], cost: u64| {
        let fits = |size: &&ByteLen| size.get() / 4096 * cost <= room;
        sizes.iter().find(fits).or(sizes.last()).copied().unwrap_or(ByteLen::gib(1))
    };
    let pick = |full: &[ByteLen], cost: u64, quick: ByteLen| {
        if is_quick { quick } else { fitting(full, cost) }
    };
    let gib = ByteLen::gib;
    let described = pick(&[gib(16), gib(8), gib(2), gib(1)], 2 * 64, gib(1));
    // Their memory is that of the smallest arena, so that cold extents are cold.
    let extents = if is_quick { ByteLen::kib(64) } else { ByteLen::mib(32) };
    vec![
        Part::Bind(bind::Settings {
            size: described,
            rebinds: if is_quick { 2 } else { 11 },
            first_binds: if is_quick { 1 } else { 5 },
            threads,
            growth: if is_quick { ByteLen::ZERO } else { described },
            dax: None,
            tables: Vec::new(),
        }),
        Part::Pin(pin::Settings {
            size: pick(&[gib(16), gib(4), gib(1)], 80, gib(1)),
            larger: ByteLen::ZERO,
            rounds: if is_quick { 2 } else { 11 },
            tables: Vec::new(),
        }),
        Part::Zero(zero::Settings {
            size: extents,
            rounds: if is_quick { 1 } else { 11 },
            first_touches: if is_quick { 1 } else { 5 },
            populate: pick(&[ByteLen::mib(512), ByteLen::mib(128)], 4096, ByteLen::mib(64)),
            threads,
            tables: Vec::new(),
        }),
        Part::Copy(copy::Settings {
            size: extents,
            rounds: if is_quick { 1 } else { 11 },
            tables: Vec::new(),
        }),
        Part::Fault(fault::Settings {
            size: if is_quick { ByteLen::mib(4) } else { ByteLen::mib(8) },
            density: if is_quick { ByteLen::mib(8) } else { ByteLen::mib(256) },
            whole: None,
            programs: None,
            rounds: if is_quick { 1 } else { 7 },
            threads: vec![1],
            directory: directory.to_owned(),
            tables: Vec::new(),
        }),
        Part::Snapshot(snapshot::Settings {
            size: pick(&[ByteLen::mib(256), ByteLen::mib(64)], 3 * 4096, ByteLen::mib(8)),
            rounds: if is_quick { 1 } else { 5 },
            threads,
            directory: directory.to_owned(),
            tables: Vec::new(),
        }),
        Part::Restore(restore::Settings {
            size: pick(&[ByteLen::mib(128), ByteLen::mib(64)], 3 * 4096, ByteLen::mib(8)),
            rounds: if is_quick { 1 } else { 3 },
            threads,
            directory: directory.to_owned(),
            tables: Vec::new(),
        }),
    ]
}

/// Returns the published experiments: those of describing memory, pinning it, clearing it and mapping it,
/// programs over mapped files included.
/// With `is_full` they have the published sizes, as far as memory allows; without, they take less than five
/// minutes on 2 CPUs.
#[must_use]
pub fn seeds(
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
    let tables = |ids: &[&str]| ids.iter().map(|id| (*id).to_owned()).collect();
    let (described, rounds) = if is_full { (gib(100), 30) } else { (gib(16), 5) };
    let whole = fault::WholeSettings {
        size: if is_full { fitting(gib(16), 2 * 4096) } else { ByteLen::mib(16) },
        threads: if is_full { vec![1, 8, 32, 60, 120] } else { vec![1, 8, 120] },
        orders: if is_full { vec![0, 1, 3, 4, 5, 7, 9] } else { vec![0, 4, 9] },
    };
    let programs = ByteLen::mib(if is_full { 256 } else { 64 });
    let programs = fault::ProgramSettings {
        database: programs,
        sources: programs,
        orders: whole.orders.clone(),
    };
    vec![
        Part::Bind(bind::Settings {
            size: fitting(described, 2 * 64),
            rebinds: rounds,
            first_binds: if is_full { 10 } else { 3 },
            threads,
            growth: ByteLen::ZERO,
            dax: None,
            tables: tables(&[
                "bind-4k",
                "bind-2m",
                "bind-small",
                "bind-limit",
                "bind-altmap",
                "bind-first",
            ]),
        }),
        Part::Pin(pin::Settings {
            size: fitting(gib(16), 80),
            larger: gib(128),
            rounds,
            tables: tables(&["pin-2m", "pin-2m-altmap"]),
        }),
        Part::Zero(zero::Settings {
            size: gib(1),
            rounds: rounds.min(5),
            first_touches: if is_full { 5 } else { 2 },
            populate: fitting(if is_full { gib(64) } else { gib(2) }, 4096),
            threads,
            tables: tables(&[
                "zero-cold-later",
                "zero-kernel",
                "zero-demand",
                "populate",
                "pool-take",
            ]),
        }),
        Part::Fault(fault::Settings {
            size: ByteLen::mib(8),
            density: ByteLen::ZERO,
            whole: Some(whole),
            programs: Some(programs),
            rounds: if is_full { 5 } else { 3 },
            threads: vec![1],
            directory: directory.to_owned(),
            tables: tables(&["fault-whole", "fault-program"]),
        }),
    ]
}

/// What the run of the published experiments is called.
pub const SEEDS: &str = "seeds";

/// Returns the published experiments as a quick run of `parts` has them: whether they work.
#[must_use]
pub fn quick_seeds(parts: Vec<Part>) -> Vec<Part> {
    let whole =
        fault::WholeSettings { size: ByteLen::mib(4), threads: vec![1, 8], orders: vec![4] };
    let programs = fault::ProgramSettings {
        database: ByteLen::mib(4),
        sources: ByteLen::mib(4),
        orders: vec![4],
    };
    let of = |part| match part {
        Part::Bind(_) | Part::Zero(_) => Some(part),
        Part::Pin(settings) => {
            Some(Part::Pin(pin::Settings { larger: ByteLen::gib(2), ..settings }))
        }
        Part::Fault(settings) => {
            let (whole, programs) = (Some(whole.clone()), Some(programs.clone()));
            let tables = ["fault-whole", "fault-program"].map(str::to_owned).into();
            Some(Part::Fault(fault::Settings { whole, programs, tables, ..settings }))
        }
        Part::Copy(_) | Part::Snapshot(_) | Part::Restore(_) => None,
    };
    parts.into_iter().filter_map(of).collect()
}

/// Returns those of `parts` that have some of the tables whose ids begin so, with these alone; all of them if
/// there are no ids.
#[must_use]
pub fn with_tables(parts: Vec<Part>, ids: &[String]) -> Vec<Part> {
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

/// Runs the published experiments, and counts the bytes of descriptors.
///
/// # Errors
/// As [`run`].
pub fn run_seeds(parts: &[Part], watch: Watch<'_>) -> Result<Bench, BenchError> {
    Ok(Bench { benchmark: SEEDS.to_owned(), ..run(parts, Some(metadata()), watch)? })
}

/// Returns how much memory the descriptors may take that are counted and not timed: little, for rows
/// that need more are slow and show nothing new.
#[must_use]
pub fn metadata() -> metadata::Settings {
    metadata::Settings { most: Some(ByteLen::mib(64)) }
}

/// Runs some benchmarks as one document, and counts the bytes of descriptors at the end if that is asked
/// for.
///
/// # Errors
/// [`BenchError`] if a row found something wrong, or no part could be run.
pub fn run(
    parts: &[Part],
    metadata: Option<metadata::Settings>,
    watch: Watch<'_>,
) -> Result<Bench, BenchError> {
    let mut all: Option<Bench> = None;
    let mut skipped = Vec::new();
    let mut refused = None;
    let of = parts.len() + usize::from(metadata.is_some());
    for (part, number) in parts.iter().zip(1..) {
        let part_of = PartOf { name: part.name(), number, of };
        match part.run(&|phase| watch(Phase { part: Some(part_of), ..phase })) {
            Ok(bench) => match &mut all {
                None => all = Some(Bench { benchmark: "all".to_owned(), ..bench }),
                Some(all) => append(all, bench),
            },
            Err(error) if error.is_of_this_host() => {
                skipped.push(Skipped { id: part.name().to_owned(), reason: sentence(&error) });
                refused.get_or_insert(error);
            }
            Err(error) => return Err(error),
        }
    }
    let mut counted = None;
    if let Some(settings) = metadata {
        let part_of = PartOf { name: "metadata", number: of, of };
        match metadata::run(settings, &|phase| watch(Phase { part: Some(part_of), ..phase })) {
            Ok(metadata) => counted = Some(metadata),
            Err(error) if error.is_of_this_host() => {
                skipped.push(Skipped { id: part_of.name.to_owned(), reason: sentence(&error) });
            }
            Err(error) => return Err(error),
        }
    }
    match (all, refused) {
        (Some(mut all), _) => {
            all.metadata = counted.map(Box::new);
            // With the parts that were skipped: the same run, repeated, tries them again.
            all.parameters = parts.iter().map(Part::to_json).collect();
            all.skipped.append(&mut skipped);
            Ok(all)
        }
        (None, Some(error)) => Err(error),
        (None, None) => Err(BenchError::NoTable { asked: String::new() }),
    }
}

/// Puts the results of `other` behind those of `all`.
fn append(all: &mut Bench, mut other: Bench) {
    all.settings = format!("{}; {}: {}", all.settings, other.benchmark, other.settings);
    all.parameters.append(&mut other.parameters);
    all.summary.append(&mut other.summary);
    all.tables.append(&mut other.tables);
    all.results.append(&mut other.results);
    all.skipped.append(&mut other.skipped);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes(available: ByteLen, pace: Pace) -> [u64; 7] {
        let parts = parts(available, NonZeroUsize::MIN, pace, Path::new("/tmp"));
        let size = |part: &Part| match part {
            Part::Bind(settings) => settings.size,
            Part::Pin(settings) => settings.size,
            Part::Zero(settings) => settings.size,
            Part::Copy(settings) => settings.size,
            Part::Fault(settings) => settings.size,
            Part::Snapshot(settings) | Part::Restore(settings) => settings.size,
        };
        let sizes: Vec<u64> = parts.iter().map(|part| size(part).get() >> 10).collect();
        sizes.try_into().expect("seven parts")
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
            assert_eq!(sizes(available, Pace::Full), expected, "{available}");
            assert_eq!(
                sizes(available, Pace::Quick),
                [G, G, 64, 64, 4 * M, 8 * M, 8 * M],
                "{available}"
            );
        }
    }

    #[test]
    fn what_a_run_was_told_is_read_again_as_it_was_written() {
        let (available, directory) = (ByteLen::gib(8), Path::new("/var/tmp"));
        let parts = parts(available, NonZeroUsize::MIN, Pace::Full, directory);
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
        let refused = BenchError::Threads { threads: 2 };
        let wrong = BenchError::WrongByte { row: "zero-hint/ours".to_owned(), offset: 7 };
        assert!(refused.is_of_this_host() && !wrong.is_of_this_host());
        assert!(!BenchError::NoTable { asked: "x".to_owned() }.is_of_this_host());
    }
}
