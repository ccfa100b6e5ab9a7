//! From facts to checks with a verdict each ([`checks`]).
//!
//! All of it is a pure function of [`Facts`]. A check that is not ok names the fix: a command where there is one, or the
//! change that is needed.

use std::error::Error;
use std::io;

use serde::Serialize;
use uzone_os::dax::DaxDevice;
use uzone_os::hugepages::{self, Pool};
use uzone_os::memory::{Available, Limit};
use uzone_os::numa::Node;
use uzone_os::probe::uffd_is_absent;
use uzone_os::uffd::Features;
use uzone_pages::{ByteLen, PageSize};
use uzone_stream::{Basis, STORE_POLICY};

use super::facts::{Facts, TRIAL};
use crate::output::number_list;

/// The status of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub(super) enum Status {
    /// In order.
    Ok,
    /// A feature that only some programs need is missing.
    Note,
    /// A feature is slow, or fails when it is used.
    Warn,
    /// A requirement is missing.
    Fail,
}

/// One line of the report.
#[derive(Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub(super) struct Check {
    pub(super) name: String,
    pub(super) status: Status,
    /// Whether uzone requires it.
    pub(super) required: bool,
    pub(super) value: String,
    pub(super) fix: Option<String>,
    /// Lines for `--verbose`.
    pub(super) details: Vec<String>,
}

impl Check {
    /// Returns a check that has no name yet.
    fn ok(value: impl Into<String>) -> Self {
        let (name, status, required) = (String::new(), Status::Ok, false);
        Self { name, status, required, value: value.into(), fix: None, details: Vec::new() }
    }

    fn not_ok(status: Status, value: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { status, fix: Some(fix.into()), ..Self::ok(value) }
    }

    fn note(value: impl Into<String>, fix: impl Into<String>) -> Self {
        Self::not_ok(Status::Note, value, fix)
    }

    fn warn(value: impl Into<String>, fix: impl Into<String>) -> Self {
        Self::not_ok(Status::Warn, value, fix)
    }

    /// Returns the check of a fact that could not be read.
    fn unknown(error: &(dyn Error + 'static)) -> Self {
        let value = format!("not known: {}", uzone_os::with_causes(error));
        Self::note(value, "let this process read /proc and /sys (a container may hide them)")
    }

    /// Calls `check` with a fact, if it could be read.
    fn of<T, E: Error + 'static>(fact: &Result<T, E>, check: impl FnOnce(&T) -> Self) -> Self {
        fact.as_ref().map_or_else(|error| Self::unknown(error), check)
    }

    fn named(self, name: impl Into<String>) -> Self {
        Self { name: name.into(), ..self }
    }

    fn with_details(self, details: Vec<String>) -> Self {
        Self { details, ..self }
    }
}

/// A check: its name, whether uzone requires it, and its function.
type Named = (&'static str, bool, fn(&Facts) -> Check);

const CHECKS: [Named; 14] = [
    ("kernel", true, kernel),
    ("page size", true, page_size),
    ("memory", true, memory),
    ("NUMA nodes", false, numa),
    ("DAX devices", false, dax),
    ("CPU", false, cpu),
    ("store instructions", false, stores),
    ("transparent huge pages", false, thp),
    ("huge pages for memfd", false, thp_files),
    ("userfaultfd", false, uffd),
    ("userfaultfd features", false, uffd_features),
    ("locked memory", false, memlock),
    ("mappings per process", false, mappings),
    ("overcommit", false, overcommit),
];

/// Returns the checks of a host in the order of the output.
pub(super) fn checks(facts: &Facts) -> Vec<Check> {
    let check = |(name, required, check): &Named| Check {
        required: *required,
        ..check(facts).named(*name)
    };
    CHECKS.iter().map(check).chain(pools(facts)).collect()
}

/// The oldest release that uzone runs on.
const FLOOR: (u32, u32) = (6, 7);

/// Returns the first two numbers of a release.
fn numbers(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|end: char| !end.is_ascii_digit()).map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

fn kernel(facts: &Facts) -> Check {
    let value = format!("Linux {} on {}", facts.release, facts.machine);
    match numbers(&facts.release) {
        Some(release) if release < FLOOR => {
            Check::not_ok(Status::Fail, value, format!("Linux {}.{} or newer", FLOOR.0, FLOOR.1))
        }
        _ => Check::ok(value),
    }
}

fn page_size(facts: &Facts) -> Check {
    Check::ok(facts.page_size.to_string())
}

/// Returns the limit in words, and how to raise it.
fn limit(available: &Available) -> (String, String) {
    match &available.limited_by {
        Limit::System => (
            "the host".to_owned(),
            "stop the programs that use the memory (`ps aux --sort=-rss | head`), or add memory"
                .to_owned(),
        ),
        Limit::Cgroup { path } => (
            format!("the control group {}", path.display()),
            format!("raise memory.max (version 1: memory.limit_in_bytes) in {}", path.display()),
        ),
        Limit::AddressSpace => {
            ("the address space limit".to_owned(), "ulimit -v unlimited".to_owned())
        }
        Limit::Data => ("the data segment limit".to_owned(), "ulimit -d unlimited".to_owned()),
        _ => (
            "a limit this program has no name for".to_owned(),
            "see `ulimit -a` and the control group of this process".to_owned(),
        ),
    }
}

fn memory(facts: &Facts) -> Check {
    let (value, fix) = match (&facts.available, &facts.memory) {
        (Ok(available), host) => {
            let (limit, fix) = limit(available);
            let total = match host {
                Ok((total, _)) => format!(" of {total:.1}"),
                Err(_) => String::new(),
            };
            let bytes = available.bytes;
            (format!("{bytes:.1} available{total}, limited by {limit}"), fix)
        }
        (Err(error), _) => (
            format!("available memory not known: {}", uzone_os::with_causes(error)),
            "let this process read /proc (a container may hide it)".to_owned(),
        ),
    };
    match (&facts.trial, &facts.available) {
        (Err(error), _) => Check::not_ok(
            Status::Fail,
            format!("cannot map {TRIAL}: {}; {value}", uzone_os::with_causes(&**error)),
            fix,
        ),
        (Ok(()), Ok(_)) => Check::ok(value),
        (Ok(()), Err(_)) => Check::note(value, fix),
    }
}

fn numa(facts: &Facts) -> Check {
    Check::of(&facts.nodes, |nodes| {
        let described = |node: &Node| {
            let cpus = if node.cpus.is_empty() {
                "no CPUs".to_owned()
            } else {
                format!("CPUs {}", number_list(&node.cpus))
            };
            format!("node {}: {cpus}, {} free of {}", node.number, node.free, node.total)
        };
        match nodes.as_slice() {
            [] => Check::ok("this kernel knows none: all memory is equally near"),
            [node] => Check::ok(described(node)),
            nodes => Check::ok(format!(
                "{}; descriptors are asked of the node of their pages",
                nodes.len()
            ))
            .with_details(nodes.iter().map(described).collect()),
        }
    })
}

fn dax(facts: &Facts) -> Check {
    Check::of(&facts.dax, |devices| {
        let described = |(name, device): &(String, DaxDevice)| {
            let node = device.node.map_or_else(
                || "on no node".to_owned(),
                |node| format!("on node {node}, of which its descriptors are asked as well"),
            );
            format!("{name}: {} in pages of {}, {node}", device.size, device.align)
        };
        match devices.as_slice() {
            [] => Check::ok("none"),
            [device] => Check::ok(described(device)),
            devices => Check::ok(devices.len().to_string())
                .with_details(devices.iter().map(described).collect()),
        }
    })
}

fn cpu(facts: &Facts) -> Check {
    let model = match &facts.cpu_model {
        Ok(Some(model)) => model.clone(),
        // AArch64 has numbers in its place.
        Ok(None) => format!("{} (the kernel gives no model name)", facts.machine),
        Err(error) => return Check::unknown(error),
    };
    match &facts.usable_cpus {
        Ok(1) => Check::ok(format!("{model}, 1 CPU for this process")),
        Ok(count) => Check::ok(format!("{model}, {count} CPUs for this process")),
        Err(error) => Check::unknown(error),
    }
}

fn stores(facts: &Facts) -> Check {
    let Some(stores) = &facts.stores else {
        let fix = "see memory, above, and run again";
        return Check::note("not measured for want of memory", fix);
    };
    let others: Vec<_> =
        stores.available.iter().copied().filter(|path| *path != stores.chosen).collect();
    let others = if others.is_empty() {
        String::new()
    } else {
        format!("; also here: {}", others.join(", "))
    };
    let reason = match stores.basis {
        Basis::Table => "from the table for this CPU".to_owned(),
        Basis::Widest => "the widest here, for the table does not have this CPU".to_owned(),
        Basis::Environment => format!("set by {STORE_POLICY}"),
        Basis::NoStreaming => "the only one here".to_owned(),
        _ => "chosen".to_owned(),
    };
    let value = format!("{}, {reason}{others}", stores.policy);
    if let Some(problem) = &stores.problem {
        let value = format!("{value}; {STORE_POLICY} is not followed: {problem}");
        return Check::warn(value, format!("unset {STORE_POLICY}"));
    }
    match &stores.faster_policy {
        None => Check::ok(value),
        Some(faster) => Check::note(
            format!("{value}; {faster} is at least 10 % faster, measured three times"),
            format!("export {STORE_POLICY}={faster}"),
        ),
    }
}

const THP: &str = "/sys/kernel/mm/transparent_hugepage";
const NO_THP: &str =
    "a kernel built with CONFIG_TRANSPARENT_HUGEPAGE, or the huge page pools below";

const SWITCHED_OFF: &str = "switched off for this process (PR_SET_THP_DISABLE); the host has";
const SWITCH_ON: &str = "start it from a program that does not call prctl(PR_SET_THP_DISABLE)";

fn thp(facts: &Facts) -> Check {
    Check::of(&facts.thp, |thp| {
        let Some(thp) = thp else {
            return Check::warn("this kernel has none: big memory costs more page faults", NO_THP);
        };
        let (enabled, defrag) = (thp.enabled, thp.defrag);
        if facts.thp_is_switched_off {
            return Check::warn(format!("{SWITCHED_OFF} {enabled}"), SWITCH_ON);
        }
        let value = format!("{enabled} (defrag {defrag}, {} each)", thp.pmd_size);
        match (thp.enabled, thp.defrag) {
            ("never", _) => Check::warn(value, format!("as root: echo madvise > {THP}/enabled")),
            (_, "never" | "defer") => Check::note(
                format!("{value}: small pages when no huge one is free"),
                format!("as root: echo madvise > {THP}/defrag"),
            ),
            _ => Check::ok(value),
        }
    })
}

fn thp_files(facts: &Facts) -> Check {
    Check::of(&facts.thp, |thp| match thp {
        None => Check::note("this kernel has none", NO_THP),
        Some(thp) if facts.thp_is_switched_off => {
            Check::note(format!("{SWITCHED_OFF} {}", thp.shmem), SWITCH_ON)
        }
        Some(thp) if matches!(thp.shmem, "never" | "deny") => Check::note(
            format!("{}: memory files get small pages", thp.shmem),
            format!("as root: echo advise > {THP}/shmem_enabled"),
        ),
        Some(thp) => Check::ok(thp.shmem.to_string()),
    })
}

/// The largest pool that a fix proposes on a host without one.
const PROPOSED_POOL: [(PageSize, u64); 2] = [(PageSize::MIB_2, 512), (PageSize::GIB_1, 4)];

fn pools(facts: &Facts) -> Vec<Check> {
    let pools = match &facts.pools {
        Ok(pools) => pools,
        Err(error) => return vec![Check::unknown(error).named("huge page pools")],
    };
    // A pool belongs to the host: the limits of this process do not count.
    let available = facts.memory.as_ref().ok().map(|&(_, available)| available);
    let mut sizes: Vec<_> = PROPOSED_POOL.iter().map(|(size, _)| *size).collect();
    sizes.extend(pools.iter().map(|pool| pool.size));
    sizes.sort_unstable();
    sizes.dedup();
    let check = |size| match pools.iter().find(|pool| pool.size == size) {
        Some(pool) => pool_check(pool, available),
        None => Check::note(
            "this kernel has no pages of this size",
            if size == PageSize::GIB_1 {
                "a kernel with CONFIG_HUGETLBFS on a CPU with 1 GiB pages (flag pdpe1gb)"
            } else {
                "a kernel built with CONFIG_HUGETLBFS"
            },
        ),
    };
    sizes.into_iter().map(|size| check(size).named(format!("huge page pool {size}"))).collect()
}

fn pool_check(pool: &Pool, available: Option<ByteLen>) -> Check {
    let on_demand = pool.overcommit.saturating_sub(pool.surplus);
    let mut value = if pool.total == 0 {
        "empty".to_owned()
    } else {
        format!("{} of {} pages free", pool.free, pool.total)
    };
    if pool.reserved != 0 {
        value = format!("{value}, {} of them promised", pool.reserved);
    }
    if on_demand != 0 {
        value = format!("{value}, up to {on_demand} more on demand");
    }
    if pool.free.saturating_sub(pool.reserved) != 0 || on_demand != 0 {
        return Check::ok(value);
    }
    let more = proposed_pages(pool.size, available);
    if more == 0 {
        return Check::note(
            value,
            format!("make room first: not even one page of {} is available", pool.size),
        );
    }
    let bytes = ByteLen::new(more.saturating_mul(pool.size.bytes()));
    let wanted = pool.total.saturating_add(more);
    let file = hugepages::nr_path(pool.size);
    let fix = format!("as root: echo {wanted} > {file}   # takes {bytes}");
    if pool.size == PageSize::GIB_1 {
        let boot = format!(
            "or at boot, when memory is not in pieces yet: hugepagesz=1G hugepages={wanted}"
        );
        return Check::note(value, format!("{fix}\n{boot}"));
    }
    Check::note(value, fix)
}

/// Returns the number of pages to propose: at most a quarter of the available memory.
fn proposed_pages(size: PageSize, available: Option<ByteLen>) -> u64 {
    let most =
        PROPOSED_POOL.iter().find(|(proposed, _)| *proposed == size).map_or(1, |(_, pages)| *pages);
    let bytes = size.bytes();
    match available.map(ByteLen::get) {
        None => most,
        Some(available) if available < bytes => 0,
        Some(available) => (available / 4 / bytes).clamp(1, most),
    }
}

fn uffd(facts: &Facts) -> Check {
    const GRANT: &str = "as root: sysctl vm.unprivileged_userfaultfd=1\n\
        or for one user: setfacl -m u:NAME:rw /dev/userfaultfd";
    const FILTER: &str = "in a container: a seccomp profile that allows userfaultfd";
    match (&facts.uffd_syscall, &facts.uffd_device) {
        (Ok(true), _) if matches!(facts.uffd_unprivileged, Ok(false)) => {
            Check::ok("full access, as root (vm.unprivileged_userfaultfd=0)")
        }
        (Ok(true), _) => Check::ok("full access"),
        (_, Ok(true)) => Check::ok("full access by /dev/userfaultfd"),
        (Ok(false), _) => Check::warn(
            "user mode only: a system call that touches memory not yet there fails",
            GRANT,
        ),
        (Err(cause), _) => Check::warn(
            format!("none: {cause}; memory cannot be filled on first touch"),
            match cause.kind() {
                io::ErrorKind::PermissionDenied => format!("{GRANT}\n{FILTER}"),
                _ if uffd_is_absent(cause) => {
                    format!("a kernel built with CONFIG_USERFAULTFD\n{FILTER}")
                }
                _ => "look at `dmesg` and at the limit of open files (`ulimit -n`)".to_owned(),
            },
        ),
    }
}

fn uffd_features(facts: &Facts) -> Check {
    let features = match &facts.uffd_features {
        Ok((features, _)) => *features,
        Err(error) => {
            return Check::note(
                format!("not known: {}", uzone_os::with_causes(error)),
                "fix userfaultfd, above, and run again",
            );
        }
    };
    let missing = Features::NAMED.difference(features);
    let names: Vec<_> = missing.names().collect();
    let newer = match features.unnamed().bits().count_ones() {
        0 => String::new(),
        newer => format!(", and {newer} newer than this program"),
    };
    let known = Features::NAMED.names().count();
    let offered = known - names.len();
    match missing.since() {
        None => Check::ok(format!("all {known}{newer}")),
        Some((major, minor)) => Check::note(
            format!("{offered} of {known}{newer}; missing: {}", names.join(" ")),
            format!("Linux {major}.{minor} or newer, where the architecture supports it"),
        ),
    }
}

fn memlock(facts: &Facts) -> Check {
    let Some(limit) = facts.memlock else {
        return Check::ok("no limit");
    };
    if facts.is_memlock_exempt {
        return Check::ok(format!("no limit for this process (others: {limit})"));
    }
    if facts.available.as_ref().is_ok_and(|available| limit >= available.bytes) {
        return Check::ok(format!("up to {limit}: more than is available"));
    }
    Check::note(
        format!("up to {limit}: drivers and mlock can pin no more"),
        "ulimit -l unlimited, before the start\n\
         in a systemd unit: LimitMEMLOCK=infinity",
    )
}

/// The default of Linux. With less, mappings may be refused.
const USUAL_MAPPINGS: u64 = 65530;

fn mappings(facts: &Facts) -> Check {
    Check::of(&facts.max_map_count, |&count| match count {
        USUAL_MAPPINGS.. => Check::ok(count.to_string()),
        _ => Check::warn(
            format!("{count}: fewer than usual, so a mapping may be refused"),
            format!("as root: sysctl vm.max_map_count={USUAL_MAPPINGS}"),
        ),
    })
}

fn overcommit(facts: &Facts) -> Check {
    Check::of(&facts.overcommit, |mode| match mode {
        0 => Check::ok("heuristic (vm.overcommit_memory=0)"),
        1 => Check::ok("always (vm.overcommit_memory=1)"),
        _ => Check::warn(
            "never (vm.overcommit_memory=2): every reserved byte counts as used",
            "as root: sysctl vm.overcommit_memory=0\n\
             or raise the share that may be promised: sysctl vm.overcommit_ratio=95",
        ),
    })
}
