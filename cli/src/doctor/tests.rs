use std::io;
use std::path::PathBuf;

use rustix::io::Errno;
use uzone_os::dax::DaxDevice;
use uzone_os::hugepages::{Pool, Thp};
use uzone_os::memory::{Available, Limit};
use uzone_os::numa::Node;
use uzone_os::uffd::{Features, UffdError};
use uzone_os::{MapError, SysError};
use uzone_pages::{ByteLen, PageSize};
use uzone_stream::{Basis, StreamError};

use super::facts::{Stores, TRIAL};
use super::*;

fn absent(path: &str) -> SysError {
    SysError::Read { path: PathBuf::from(path), cause: io::ErrorKind::NotFound.into() }
}

fn denied() -> io::Error {
    io::ErrorKind::PermissionDenied.into()
}

fn pool(size: PageSize, total: u64) -> Pool {
    Pool { size, total, free: total, reserved: 0, surplus: 0, overcommit: 0 }
}

/// A host with all there is.
fn everything() -> Facts {
    let all = Available { bytes: ByteLen::gib(60), limited_by: Limit::System };
    Facts {
        machine: "x86_64",
        release: "6.18.1".into(),
        page_size: PageSize::KIB_4,
        cpu_model: Ok(Some("A CPU".into())),
        usable_cpus: Ok(8),
        stores: Some(Stores {
            available: vec!["portable", "avx2"],
            chosen: "avx2",
            policy: "fill=avx2,zero=avx2,copy=avx2".into(),
            basis: Basis::Table,
            problem: None,
            faster_policy: None,
        }),
        thp: Ok(Some(Thp {
            enabled: "madvise",
            defrag: "madvise",
            shmem: "advise",
            pmd_size: ByteLen::mib(2),
        })),
        thp_is_switched_off: false,
        pools: Ok(vec![pool(PageSize::MIB_2, 512), pool(PageSize::GIB_1, 4)]),
        uffd_syscall: Ok(true),
        uffd_device: Ok(true),
        uffd_unprivileged: Ok(true),
        uffd_features: Ok((
            Features::from_bits_retain((1 << 17) - 1),
            vec!["REGISTER", "UNREGISTER", "API"],
        )),
        memlock: None,
        is_memlock_exempt: false,
        max_map_count: Ok(1_048_576),
        overcommit: Ok(0),
        nodes: Ok(vec![Node {
            number: 0,
            cpus: (0..8).collect(),
            total: ByteLen::gib(63),
            free: ByteLen::gib(50),
        }]),
        dax: Ok(Vec::new()),
        memory: Ok((ByteLen::gib(64), ByteLen::gib(60))),
        available: Ok(all),
        trial: Ok(()),
    }
}

/// A host with nothing but memory: an old kernel, an old CPU, in a container that hides /proc and /sys.
fn nothing() -> Facts {
    Facts {
        release: "6.7.0-rc1".into(),
        machine: "riscv64",
        cpu_model: Ok(None),
        stores: Some(Stores {
            available: vec!["portable"],
            chosen: "portable",
            policy: "fill=portable,zero=portable,copy=portable".into(),
            basis: Basis::NoStreaming,
            problem: None,
            faster_policy: None,
        }),
        thp: Ok(None),
        pools: Ok(vec![pool(PageSize::MIB_2, 0)]),
        uffd_syscall: Err(denied()),
        uffd_device: Err(Errno::NOENT.into()),
        uffd_unprivileged: Err(absent("/proc/sys/vm/unprivileged_userfaultfd")),
        uffd_features: Err(UffdError::NoUserfaultfd(denied())),
        memlock: Some(ByteLen::kib(64)),
        max_map_count: Ok(1024),
        overcommit: Ok(2),
        nodes: Ok(Vec::new()),
        ..everything()
    }
}

/// A host whose files cannot be read.
fn hidden() -> Facts {
    let unread = || absent("/proc/hidden");
    Facts {
        cpu_model: Err(unread()),
        thp: Err(unread()),
        pools: Err(unread()),
        uffd_unprivileged: Err(unread()),
        max_map_count: Err(unread()),
        overcommit: Err(unread()),
        nodes: Err(unread()),
        dax: Err(MapError::NotDaxDevice),
        memory: Err(unread()),
        available: Err(unread()),
        ..everything()
    }
}

fn find(facts: &Facts, name: &str) -> Check {
    let found = checks::checks(facts).into_iter().find(|check| check.name == name);
    found.unwrap_or_else(|| panic!("no check is called {name}"))
}

/// Text without colour.
fn text(facts: &Facts, verbosity: Verbosity) -> String {
    Doctor::of(facts).text(Style::plain(verbosity))
}

#[test]
fn a_host_with_everything_has_nothing_to_fix() {
    let facts = everything();
    let doctor = Doctor::of(&facts);
    for check in &doctor.checks {
        assert_eq!((check.status, &check.fix), (Status::Ok, &None), "{check:?}");
    }
    assert!(doctor.is_ready);
    assert!(
        text(&facts, Verbosity::Normal).ends_with(&format!("ready: {} ok\n", doctor.counts.ok))
    );
}

#[test]
fn a_host_with_nothing_but_memory_is_ready_and_has_a_fix_for_each_thing() {
    let facts = nothing();
    let doctor = Doctor::of(&facts);
    assert!(doctor.is_ready, "{:#?}", doctor.checks);
    assert_eq!(doctor.counts.fail, 0);
    let not_ok: Vec<_> = doctor
        .checks
        .iter()
        .filter(|check| check.status != Status::Ok)
        .map(|check| (check.status, check.name.as_str()))
        .collect();
    assert_eq!(
        not_ok,
        [
            (Status::Warn, "transparent huge pages"),
            (Status::Note, "huge pages for memfd"),
            (Status::Warn, "userfaultfd"),
            (Status::Note, "userfaultfd features"),
            (Status::Note, "locked memory"),
            (Status::Warn, "mappings per process"),
            (Status::Warn, "overcommit"),
            (Status::Note, "huge page pool 2 MiB"),
            (Status::Note, "huge page pool 1 GiB"),
        ]
    );
}

#[test]
fn a_kernel_below_the_floor_makes_a_host_not_ready() {
    for (release, is_ready) in [
        ("6.7.0", true),
        ("6.10.3-arch1", true),
        ("7.0", true),
        ("6.6.87", false),
        ("5.15", false),
        ("odd", true),
    ] {
        let facts = Facts { release: release.into(), ..everything() };
        assert_eq!(Doctor::of(&facts).is_ready, is_ready, "{release}");
        let fix = find(&facts, "kernel").fix;
        assert_eq!(fix, (!is_ready).then(|| "Linux 6.7 or newer".to_owned()), "{release}");
    }
}

#[test]
fn a_check_that_is_not_ok_states_a_fix_and_one_that_is_ok_does_not() {
    for facts in [everything(), nothing(), hidden()] {
        for check in checks::checks(&facts) {
            assert_eq!(check.fix.is_some(), check.status != Status::Ok, "{check:?}");
            assert!(!check.value.contains('\n'), "a value is one line: {check:?}");
            assert!(check.name.len() <= 24, "a long name widens every line: {check:?}");
        }
    }
}

#[test]
fn what_cannot_be_read_is_named_and_is_no_failure() {
    let facts = hidden();
    let doctor = Doctor::of(&facts);
    assert!(doctor.is_ready);
    let overcommit = find(&facts, "overcommit");
    assert_eq!(overcommit.status, Status::Note);
    assert!(
        overcommit.value.starts_with("not known: cannot read /proc/hidden: "),
        "{overcommit:?}"
    );
}

#[test]
fn only_what_nothing_works_without_makes_a_host_not_ready() {
    let no_memory = || {
        let cause = io::ErrorKind::OutOfMemory.into();
        Err(MapError::Refused { len: TRIAL, cause }.into())
    };
    for facts in [
        Facts { trial: no_memory(), ..everything() },
        Facts { trial: no_memory(), stores: None, ..hidden() },
    ] {
        let doctor = Doctor::of(&facts);
        assert!(!doctor.is_ready);
        assert_eq!(doctor.counts.fail, 1);
        let mut failed = doctor.checks.iter().filter(|check| check.status == Status::Fail);
        assert!(failed.all(|check| check.required));
        let text = text(&facts, Verbosity::Quiet);
        assert!(text.starts_with("FAIL  "), "{text}");
        assert!(text.contains("not ready: "), "{text}");
    }
}

/// The difference from a host with everything.
type Change = fn(&mut Facts);
/// That; the check; its status; part of its value, and of its fix.
type Judged = (Change, &'static str, Status, &'static str, &'static str);

fn judge(table: &[Judged]) {
    for (change, name, status, value, fix) in table {
        let mut facts = everything();
        change(&mut facts);
        let check = find(&facts, name);
        assert_eq!(check.status, *status, "{check:?}");
        assert!(check.value.contains(value), "{check:?} should say {value}");
        let found = check.fix.as_deref().unwrap_or_default();
        assert!(found.contains(fix), "{check:?} should be fixed by {fix}");
        assert_eq!(found.is_empty(), fix.is_empty(), "{check:?}");
    }
}

#[test]
fn each_policy_of_stores_is_judged_by_itself() {
    const NAME: &str = "store instructions";
    let bogus: Change = |facts| {
        set_stores(facts, |stores| {
            let cause = Box::new(StreamError::UnknownPath { name: "bogus".into() });
            stores.problem =
                Some(StreamError::Store { part: "fill=bogus".into(), cause }.to_string());
        });
    };
    let not_followed = "UZONE_STORE_POLICY is not followed: in \"fill=bogus\" of UZONE_STORE_POLICY: no stream path";
    let set: Change = |facts| set_stores(facts, |stores| stores.basis = Basis::Environment);
    let by_environment = "copy=avx2, set by UZONE_STORE_POLICY; also here: portable";
    let faster: Change =
        |facts| set_stores(facts, |stores| stores.faster_policy = Some("fill=sse2".into()));
    let measured = "fill=sse2 is at least 10 % faster, measured three times";
    judge(&[
        (bogus, NAME, Status::Warn, not_followed, "unset UZONE_STORE_POLICY"),
        (set, NAME, Status::Ok, by_environment, ""),
        (faster, NAME, Status::Note, measured, "export UZONE_STORE_POLICY=fill=sse2"),
    ]);
}

#[test]
fn each_setting_of_transparent_huge_pages_is_judged_by_itself() {
    const NAME: &str = "transparent huge pages";
    let enabled: Change = |facts| set_thp(facts, |thp| thp.enabled = "never");
    let defrag: Change = |facts| set_thp(facts, |thp| thp.defrag = "never");
    let shmem: Change = |facts| set_thp(facts, |thp| thp.shmem = "deny");
    let never = "never (defrag madvise, 2 MiB each)";
    let enable = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled";
    let small = "madvise (defrag never, 2 MiB each)";
    let defragment = "echo madvise > /sys/kernel/mm/transparent_hugepage/defrag";
    let advise = "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled";
    let switched_off: Change = |facts| facts.thp_is_switched_off = true;
    let off = "switched off for this process (PR_SET_THP_DISABLE); the host has madvise";
    let off_for_files = "switched off for this process (PR_SET_THP_DISABLE); the host has advise";
    let start = "start it from a program that does not call prctl(PR_SET_THP_DISABLE)";
    judge(&[
        (enabled, NAME, Status::Warn, never, enable),
        (defrag, NAME, Status::Note, small, defragment),
        (shmem, "huge pages for memfd", Status::Note, "deny", advise),
        (switched_off, NAME, Status::Warn, off, start),
        (switched_off, "huge pages for memfd", Status::Note, off_for_files, start),
    ]);
}

#[test]
fn each_pool_of_huge_pages_is_judged_by_itself() {
    const MIB_2: &str = "huge page pool 2 MiB";
    const GIB_1: &str = "huge page pool 1 GiB";
    let empty: Change = |facts| facts.pools = Ok(vec![pool(PageSize::MIB_2, 0)]);
    let empty_1g: Change = |facts| facts.pools = Ok(vec![pool(PageSize::GIB_1, 0)]);
    let raise = "echo 512 > /sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages   # takes 1 GiB";
    let promised: Change = |facts| {
        facts.pools = Ok(vec![Pool { free: 7, reserved: 7, ..pool(PageSize::MIB_2, 512) }]);
    };
    let seven = "7 of 512 pages free, 7 of them promised";
    let on_demand: Change =
        |facts| facts.pools = Ok(vec![Pool { overcommit: 64, ..pool(PageSize::MIB_2, 0) }]);
    let no_room: Change = |facts| {
        facts.pools = Ok(vec![pool(PageSize::GIB_1, 0)]);
        facts.memory = Ok((ByteLen::gib(64), ByteLen::mib(512)));
    };
    judge(&[
        (empty, MIB_2, Status::Note, "empty", raise),
        (empty, GIB_1, Status::Note, "no pages of this size", "pdpe1gb"),
        (empty_1g, GIB_1, Status::Note, "empty", "hugepagesz=1G hugepages=4"),
        (promised, MIB_2, Status::Note, seven, "echo 1024 > "),
        (on_demand, MIB_2, Status::Ok, "empty, up to 64 more on demand", ""),
        (no_room, GIB_1, Status::Note, "empty", "not even one page of 1 GiB is available"),
    ]);
}

#[test]
fn each_access_to_userfaultfd_is_judged_by_itself() {
    const NAME: &str = "userfaultfd";
    let device: Change = |facts| facts.uffd_syscall = Ok(false);
    let user_mode: Change = |facts| {
        facts.uffd_syscall = Ok(false);
        facts.uffd_device = Err(denied());
    };
    let absent: Change = |facts| {
        facts.uffd_syscall = Err(Errno::NOSYS.into());
        facts.uffd_device = Err(Errno::NOENT.into());
    };
    let root: Change = |facts| facts.uffd_unprivileged = Ok(false);
    let as_root = "full access, as root (vm.unprivileged_userfaultfd=0)";
    let newer: Change = |facts| {
        let raw = ((1 << 14) - 1) | (1 << 40);
        facts.uffd_features = Ok((Features::from_bits_retain(raw), Vec::new()));
    };
    let some = "14 of 17, and 1 newer than this program; missing: POISON WP_ASYNC MOVE";
    judge(&[
        (device, NAME, Status::Ok, "full access by /dev/userfaultfd", ""),
        (user_mode, NAME, Status::Warn, "user mode only: ", "sysctl vm.unprivileged_userfaultfd=1"),
        (absent, NAME, Status::Warn, "none: ", "CONFIG_USERFAULTFD"),
        (root, NAME, Status::Ok, as_root, ""),
        (newer, "userfaultfd features", Status::Note, some, "Linux 6.8 or newer"),
    ]);
}

#[test]
fn each_limit_is_judged_by_itself() {
    const NAME: &str = "locked memory";
    let exempt: Change =
        |facts| (facts.memlock, facts.is_memlock_exempt) = (Some(ByteLen::kib(64)), true);
    let exempted = "no limit for this process (others: 64 KiB)";
    let little: Change = |facts| facts.memlock = Some(ByteLen::kib(64));
    let much: Change = |facts| facts.memlock = Some(ByteLen::gib(60));
    let mappings: Change = |facts| facts.max_map_count = Ok(65529);
    let mapped = "mappings per process";
    let (never, no_overcommit): (Change, _) =
        (|facts| facts.overcommit = Ok(2), "never (vm.overcommit_memory=2)");
    judge(&[
        (exempt, NAME, Status::Ok, exempted, ""),
        (little, NAME, Status::Note, "up to 64 KiB", "LimitMEMLOCK=infinity"),
        (much, NAME, Status::Ok, "more than is available", ""),
        (mappings, mapped, Status::Warn, "65529", "sysctl vm.max_map_count=65530"),
        (never, "overcommit", Status::Warn, no_overcommit, "sysctl vm.overcommit_memory=0"),
    ]);
}

#[test]
fn memory_and_where_it_is_are_judged_by_themselves() {
    let group: Change = |facts| {
        let limited_by = Limit::Cgroup { path: PathBuf::from("/sys/fs/cgroup/box") };
        facts.available = Ok(Available { bytes: ByteLen::gib(2), limited_by });
    };
    let limited = "2 GiB available of 64 GiB, limited by the control group /sys/fs/cgroup/box";
    let nodes: Change = |_| ();
    let of_node = "node 0: CPUs 0-7, 50 GiB free of 63 GiB";
    let device: Change = |facts| {
        let (size, align) = (ByteLen::gib(16), PageSize::MIB_2);
        let device = DaxDevice { size, align, node: Some(1) };
        facts.dax = Ok(vec![("dax0.0".to_owned(), device)]);
    };
    let dax =
        "dax0.0: 16 GiB in pages of 2 MiB, on node 1, of which its descriptors are asked as well";
    judge(&[
        (group, "memory", Status::Ok, limited, ""),
        (nodes, "NUMA nodes", Status::Ok, of_node, ""),
        (device, "DAX devices", Status::Ok, dax, ""),
    ]);
}

fn set_stores(facts: &mut Facts, change: fn(&mut Stores)) {
    if let Some(stores) = &mut facts.stores {
        change(stores);
    }
}

fn set_thp(facts: &mut Facts, change: fn(&mut Thp)) {
    if let Ok(Some(thp)) = &mut facts.thp {
        change(thp);
    }
}

#[test]
fn a_refused_trial_names_the_limit_that_stands_in_the_way() {
    let table = [
        (Limit::System, "add memory"),
        (Limit::Cgroup { path: "/sys/fs/cgroup/box".into() }, "memory.max"),
        (Limit::AddressSpace, "ulimit -v unlimited"),
        (Limit::Data, "ulimit -d unlimited"),
    ];
    for (limited_by, fix) in table {
        let cause = io::ErrorKind::OutOfMemory.into();
        let facts = Facts {
            available: Ok(Available { bytes: ByteLen::mib(1), limited_by }),
            trial: Err(MapError::Refused { len: TRIAL, cause }.into()),
            ..everything()
        };
        let check = find(&facts, "memory");
        assert_eq!(check.status, Status::Fail);
        assert!(check.value.starts_with("cannot map 16 MiB: "), "{check:?}");
        assert!(check.fix.as_deref().unwrap().contains(fix), "{check:?}");
    }
}

#[test]
fn each_check_is_one_aligned_line_with_its_fix_below() {
    let mut facts = everything();
    facts.overcommit = Ok(2);
    let text = text(&facts, Verbosity::Normal);
    let lines: Vec<_> = text.lines().collect();
    let mut values = Vec::new();
    for check in checks::checks(&facts) {
        let line = lines.iter().find(|line| line.ends_with(&check.value)).unwrap();
        values.push(line.len() - check.value.len());
        assert!(line[STATUS_WIDTH..].starts_with(&check.name), "{line}");
    }
    values.dedup();
    assert_eq!(values.len(), 1, "{text}");
    let warned = lines.iter().position(|line| line.starts_with("warn  overcommit")).unwrap();
    assert_eq!(lines[warned + 1], "      fix: as root: sysctl vm.overcommit_memory=0");
    assert!(lines[warned + 2].starts_with("           or raise"), "{text}");
    assert_eq!(lines.last(), Some(&"ready, with warnings: 15 ok, 1 warning"));
}

#[test]
fn quiet_shows_what_needs_attention_and_verbose_shows_the_details() {
    let facts = nothing();
    let quiet = text(&facts, Verbosity::Quiet);
    assert!(!quiet.contains("note  ") && !quiet.contains("ok    "), "{quiet}");
    assert!(quiet.contains("warn  userfaultfd"), "{quiet}");
    let mut facts = everything();
    let node = |number, cpus: &[u32]| Node {
        number,
        cpus: cpus.to_vec(),
        total: ByteLen::gib(32),
        free: ByteLen::gib(8),
    };
    facts.nodes = Ok(vec![node(0, &[0, 1, 2, 3]), node(1, &[])]);
    let normal = text(&facts, Verbosity::Normal);
    assert!(normal.contains("2; descriptors are asked of") && !normal.contains("node 1"));
    let verbose = text(&facts, Verbosity::Verbose);
    assert!(verbose.contains("node 0: CPUs 0-3, 8 GiB free of 32 GiB"), "{verbose}");
    assert!(verbose.contains("node 1: no CPUs, 8 GiB free of 32 GiB"), "{verbose}");
}
