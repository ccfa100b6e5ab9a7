//! Populating and punching regions on this kernel: how much, of which pages, and what is refused before
//! it costs time.
//! Needs, for some: root, transparent huge pages, 32 MiB that can be had in huge pages.
#![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]

mod common;

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use common::needs::{Group, Pool, or_skip, skip};
use common::{Temporary, anonymous, is_zero, read};
use uzone_os::{Access, Anonymous, HugeAdvice, Sharing, SystemRoot, probe};
use uzone_os::{Mapping, MappingError, Populated, hugepages};
use uzone_pages::{ByteLen, PageSize};
use uzone_zone::{Backing, Huge, PopulateOptions, Region, WriteError, ZeroOptions};

const MIB: u64 = 1 << 20;

fn page() -> u64 {
    probe::page_size().bytes()
}

fn has_thp() -> bool {
    let thp = hugepages::thp(&SystemRoot::host()).unwrap();
    thp.is_some_and(|thp| thp.enabled != "never")
}

#[test]
fn exactly_the_range_is_present_and_the_report_says_in_which_pages() {
    for huge in [Huge::Preferred, Huge::Never] {
        let region = anonymous(64 * MIB);
        let seen = Arc::new(AtomicU64::new(0));
        let reported = Arc::clone(&seen);
        let options = PopulateOptions::default().huge(huge).on_progress(move |done, total| {
            assert!(done <= total);
            reported.store(done.get(), Ordering::Relaxed);
        });
        let report = region.populate(8 * MIB..40 * MIB, &options).unwrap();
        assert!(report.is_whole(), "{report}");
        assert_eq!(report.done(), ByteLen::mib(32));
        assert_eq!(seen.load(Ordering::Relaxed), 32 * MIB);
        assert_eq!(report.huge.get() + report.base.get(), 32 * MIB, "{report}");
        assert_eq!(report.huge, region.mapping().huge_backed().unwrap());
        assert!(report.threads >= 1 && report.threads.is_multiple_of(report.nodes.max(1)));
        if huge == Huge::Never {
            assert_eq!(report.huge, ByteLen::ZERO);
            assert_eq!(region.mapping().resident().unwrap(), ByteLen::mib(32));
        }
        assert_eq!(region.mapping().resident_in(8 * MIB..40 * MIB).unwrap(), ByteLen::mib(32));
        assert!(is_zero(&region, 0..64 * MIB));
        // Bytes that are there stay, and are not asked for again.
        region.write_at(9 * MIB, b"kept").unwrap();
        assert!(region.populate(0..64 * MIB, &options).unwrap().is_whole());
        assert_eq!(&read(|out| region.read_at(9 * MIB, out)), b"kept");
    }
    // A byte is a page, as far as it goes.
    let region = anonymous(MIB);
    let options = PopulateOptions::default().huge(Huge::Never);
    let report = region.populate(page() + 1..page() + 2, &options).unwrap();
    assert_eq!((report.done().get(), report.base.get()), (page(), page()));
}

#[test]
fn huge_pages_that_are_required_are_there_or_it_is_refused() {
    let required = PopulateOptions::default().huge(Huge::Required);
    if has_thp() {
        let region = anonymous(32 * MIB);
        match region.populate(0..32 * MIB, &required) {
            Ok(report) => assert_eq!(report.huge, ByteLen::mib(32), "{report}"),
            Err(WriteError::TooFewHugePages { wanted, huge }) => {
                assert!(huge < wanted, "{huge} of {wanted}");
                skip("huge_pages_that_are_required", "free memory is in pieces");
            }
            Err(error) => panic!("{error}"),
        }
        // Base pages that were there before become huge ones.
        let region = anonymous(8 * MIB);
        let small = PopulateOptions::default().huge(Huge::Never);
        assert!(region.populate(0..8 * MIB, &small).unwrap().is_whole());
        match region.populate(0..8 * MIB, &required) {
            Ok(report) => assert_eq!(report.huge, ByteLen::mib(8), "{report}"),
            Err(WriteError::TooFewHugePages { .. }) => {
                skip("huge_pages_of_base_pages", "free memory is in pieces");
            }
            Err(error) => panic!("{error}"),
        }
    } else {
        let error = anonymous(MIB).populate(0..MIB, &required).unwrap_err();
        assert!(matches!(error, WriteError::NoHugePages { backing: Backing::Anonymous, .. }));
    }
    let file = Temporary::new("pop-huge", &[7; 1 << 20]);
    let region = Region::file(&file.0, 0, ByteLen::mib(1)).unwrap();
    let error = region.populate(0..MIB, &required).unwrap_err();
    assert!(matches!(error, WriteError::NoHugePages { .. }), "{error}");
    assert!(error.to_string().contains("use memory without a file"), "{error}");
    // What huge pages do not fit into needs none.
    let report = anonymous(MIB).populate(0..MIB, &required);
    if has_thp() {
        assert_eq!(report.unwrap().base, ByteLen::mib(1));
    }
}

#[test]
fn what_was_cancelled_or_is_out_of_time_says_how_much_is_present() {
    let region = anonymous(1 << 30);
    let cancel = Arc::<AtomicBool>::default();
    let stop = cancel.clone();
    let options = PopulateOptions::default()
        .cancel(cancel)
        .on_progress(move |_, _| stop.store(true, Ordering::Relaxed));
    let report = region.populate(0..1 << 30, &options).unwrap();
    let Populated { done, of, is_expired: false } = report.populated else { panic!("{report}") };
    assert_eq!(of, ByteLen::gib(1));
    assert!(!done.is_zero() && done < of);
    assert_eq!(region.mapping().resident_in(0..done.get()).unwrap(), done);
    assert!(!report.is_whole() && report.to_string().contains("cancelled"), "{report}");

    let region = anonymous(1 << 30);
    let options = PopulateOptions::default().within(Duration::ZERO);
    let report = region.populate(0..1 << 30, &options).unwrap();
    let expired = Populated { done: ByteLen::ZERO, of: ByteLen::gib(1), is_expired: true };
    assert_eq!(report.populated, expired);
    assert_eq!(region.mapping().resident().unwrap(), ByteLen::ZERO);
    assert!(report.to_string().contains("out of time"), "{report}");
    let options = PopulateOptions::default().within(Duration::from_secs(3600));
    assert!(region.populate(0..8 * MIB, &options).unwrap().is_whole());
}

#[test]
fn a_shortage_of_memory_is_found_before_any_is_taken() {
    let region = Region::anonymous(ByteLen::tib(16)).unwrap();
    let started = Instant::now();
    let error = region.populate(0..16 << 40, &PopulateOptions::default()).unwrap_err();
    assert!(started.elapsed() < Duration::from_secs(5));
    let WriteError::TooLittleMemory { needed, available, .. } = &error else {
        panic!("{error}");
    };
    assert_eq!(*needed, ByteLen::tib(16));
    assert!(available < needed);
    assert!(error.to_string().contains("raise that limit"), "{error}");
    assert_eq!(region.mapping().resident().unwrap(), ByteLen::ZERO);
}

#[test]
fn a_range_that_is_not_inside_and_a_node_that_is_not_there_are_refused() {
    let region = anonymous(MIB);
    let options = PopulateOptions::default();
    let backwards = std::ops::Range { start: 5, end: 4 };
    for range in [0..MIB + 1, 0..0, backwards, u64::MAX - 1..u64::MAX] {
        let error = region.populate(range, &options).unwrap_err();
        assert!(matches!(error, WriteError::Populate(MappingError::Access(_))), "{error}");
    }
    let error = region.populate(0..MIB, &options.clone().node(1000)).unwrap_err();
    assert!(matches!(error, WriteError::Node { node: 1000 }), "{error}");
    assert_eq!(region.mapping().resident().unwrap(), ByteLen::ZERO);
}

#[test]
fn threads_keep_to_the_node_that_was_asked_for() {
    let nodes = uzone_os::numa::nodes(&SystemRoot::host()).unwrap();
    let Some(node) = nodes.iter().find(|node| !node.cpus.is_empty()) else {
        return skip("threads_keep_to_the_node", "this kernel has no nodes");
    };
    let region = anonymous(16 * MIB);
    let three = NonZeroUsize::new(3).unwrap();
    let options = PopulateOptions::default().node(node.number).threads_per_node(three);
    let before = uzone_os::numa::current_cpu_count().unwrap();
    let report = region.populate(0..16 * MIB, &options).unwrap();
    assert!(report.is_whole());
    assert_eq!((report.nodes, report.threads), (1, 3));
    // Of its own thread the caller hears nothing.
    assert_eq!(uzone_os::numa::current_cpu_count().unwrap(), before);
}

#[test]
fn punched_bytes_are_zero_their_neighbours_stay_and_their_memory_is_given_back() {
    let memfd = Region::memfd("punch", ByteLen::mib(4)).unwrap();
    for region in [anonymous(4 * MIB), memfd] {
        let all = vec![7; usize::try_from(4 * MIB).unwrap()];
        region.write_at(0, &all).unwrap();
        region.punch(MIB..3 * MIB).unwrap();
        assert!(is_zero(&region, MIB..3 * MIB), "{}", region.backing());
        assert_eq!(read(|out| region.read_at(MIB - 1, out)), [7, 0]);
        assert_eq!(read(|out| region.read_at(3 * MIB - 1, out)), [0, 7]);
        region.punch(0..MIB).unwrap();
        let resident = region.mapping().resident_in(0..MIB).unwrap();
        assert_eq!(resident, ByteLen::ZERO);
        let cut = region.punch(3 * MIB + 1..4 * MIB).unwrap_err();
        assert!(matches!(cut, MappingError::Access(_)), "{cut}");
        assert_eq!(
            read(|out| region.read_at(3 * MIB, out)),
            [7, 7],
            "nothing of a refused range is given back"
        );
    }
}

#[test]
fn a_hole_in_a_file_is_seen_by_its_readers_and_what_is_not_shared_is_refused() {
    let file = Temporary::new("pop-hole", &[7; 1 << 20]);
    let region = Region::file(&file.0, 0, ByteLen::mib(1)).unwrap();
    match region.punch(4096 * 16..MIB / 2) {
        Ok(()) => {
            let bytes = std::fs::read(&file.0).unwrap();
            let half = bytes.len() / 2;
            assert!(bytes[65_536..half].iter().all(|byte| *byte == 0));
            assert!(bytes[..65_536].iter().chain(&bytes[half..]).all(|byte| *byte == 7));
        }
        Err(MappingError::Punch { .. }) => {
            skip("a_hole_in_a_file", "the temporary directory's file system has no holes");
        }
        Err(error) => panic!("{error}"),
    }
    let map = |access, sharing| {
        let file = std::fs::OpenOptions::new().read(true).write(true).open(&file.0).unwrap();
        Region::adopt(Mapping::file(file, 0, ByteLen::mib(1), access, sharing).unwrap()).unwrap()
    };
    for (region, why) in [
        (map(Access::ReadWrite, Sharing::Private), "private mapping"),
        (map(Access::ReadOnly, Sharing::Shared), "read-only"),
    ] {
        let error = region.punch(0..MIB).unwrap_err();
        assert!(matches!(error, MappingError::NotPunchable { .. }), "{error}");
        assert!(error.to_string().contains(why), "{error}");
    }
    let own = Anonymous { huge: HugeAdvice::Never, ..Anonymous::default() };
    let adopted = Region::adopt(Mapping::anonymous(ByteLen::mib(1), own).unwrap()).unwrap();
    adopted.write_at(0, &[7; 8]).unwrap();
    adopted.punch(0..MIB).unwrap();
    assert!(is_zero(&adopted, 0..MIB), "private memory that became a region");
}

#[test]
fn a_region_of_a_pool_is_huge_may_be_punched_and_finds_an_empty_pool_at_once() {
    let Some(pool) = Pool::grow("a_region_of_a_pool", PageSize::MIB_2, 8) else { return };
    let region = Region::hugetlb(ByteLen::mib(16), PageSize::MIB_2).unwrap();
    for huge in [Huge::Preferred, Huge::Required, Huge::Never] {
        let report = region.populate(0..16 * MIB, &PopulateOptions::default().huge(huge)).unwrap();
        assert_eq!(report.huge, ByteLen::mib(16), "{report}");
    }
    region.write_at(3 * MIB, &[7; 100]).unwrap();
    assert!(matches!(region.punch(MIB..4 * MIB), Err(MappingError::Access(_))), "cuts a huge page");
    region.punch(2 * MIB..4 * MIB).unwrap();
    assert_eq!(region.mapping().resident().unwrap(), ByteLen::mib(14));
    drop(pool); // the pool shrinks under the region
    let free = hugepages::pool(&SystemRoot::host(), PageSize::MIB_2).unwrap().unwrap().free;
    match region.populate(0..16 * MIB, &PopulateOptions::default()) {
        // The kernel has kept the page that was given back promised to us.
        Ok(report) => assert!(free > 0 && report.huge == ByteLen::mib(16), "{free}: {report}"),
        Err(WriteError::HugePool { needed, free, .. }) => {
            assert_eq!((needed, free), (ByteLen::mib(2), ByteLen::ZERO));
        }
        Err(error) => panic!("{error}"),
    }
}

/// Whether huge pages that a parent has switched off are named as the reason, in a process of its own.
#[test]
fn huge_pages_that_a_parent_switched_off_are_refused_by_that_name() {
    const NAME: &str = "huge_pages_that_a_parent_switched_off_are_refused_by_that_name";
    const CHILD: &str = "UZONE_TEST_SWITCHED_OFF";
    if std::env::var_os(CHILD).is_none() {
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        command.args([NAME, "--exact", "--nocapture", "--test-threads=1"]).env(CHILD, "1");
        let output = command.output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{text}");
        text.lines()
            .filter(|line| line.starts_with("skipped"))
            .for_each(|line| eprintln!("{line}"));
        return;
    }
    // SAFETY: prctl(2) touches no memory with this option.
    let refused = unsafe { libc::prctl(libc::PR_SET_THP_DISABLE, 1_u64, 0_u64, 0_u64, 0_u64) };
    if !has_thp() || refused != 0 {
        return skip(NAME, "no huge pages to switch off");
    }
    let region = anonymous(8 * MIB);
    let required = PopulateOptions::default().huge(Huge::Required);
    let error = region.populate(0..8 * MIB, &required).unwrap_err();
    assert!(matches!(error, WriteError::NoHugePages { .. }), "{error}");
    assert!(error.to_string().contains("PR_SET_THP_DISABLE"), "{error}");
    assert_eq!(region.mapping().resident().unwrap(), ByteLen::ZERO);
    let preferred = PopulateOptions::default().huge(Huge::Preferred);
    assert_eq!(region.populate(0..8 * MIB, &preferred).unwrap().huge, ByteLen::ZERO);
}

#[test]
fn a_page_of_1_gib_is_taken_and_cleared_whole_and_in_units() {
    const PAGE: ByteLen = ByteLen::gib(1);
    let Some(_pool) = Pool::grow("a_page_of_1_gib", PageSize::GIB_1, 1) else { return };
    let region = Region::hugetlb(PAGE, PageSize::GIB_1).unwrap();
    let report = region.populate(0..PAGE.get(), &PopulateOptions::default()).unwrap();
    assert_eq!((report.huge, region.mapping().page_size().bytes()), (PAGE, PAGE.get()));
    for batch in [PAGE, ByteLen::mib(8)] {
        for at in [0, 511 * MIB, PAGE.get() - 8] {
            region.write_at(at, &[7; 8]).unwrap();
        }
        let options = ZeroOptions::default().batch(batch);
        assert_eq!(region.zero_range(0, PAGE, &options).unwrap().done_bytes(), PAGE);
        for start in (0..1024).step_by(64) {
            assert!(is_zero(&region, start * MIB..(start + 64) * MIB), "at {start} MiB");
        }
    }
}

/// Two processes under one limit, each of which would fit alone: none is killed, and the one that is short
/// reports it with numbers, before the time that the rest would have taken is spent.
#[test]
fn two_processes_that_share_a_limit_find_the_shortage_and_no_process_is_killed() {
    const NAME: &str =
        "two_processes_that_share_a_limit_find_the_shortage_and_no_process_is_killed";
    const CHILD: &str = "UZONE_TEST_GROUP";
    const LIMIT: u64 = 512 * MIB;
    if let Some(group) = std::env::var_os(CHILD) {
        let percent: u64 = std::env::var("UZONE_TEST_PERCENT").unwrap().parse().unwrap();
        let group = PathBuf::from(group);
        std::fs::write(group.join("cgroup.procs"), std::process::id().to_string()).unwrap();
        println!("joined");
        // Begun when both have joined, and ended together, so that both want memory at once.
        std::io::stdin().read_line(&mut String::new()).unwrap();
        let region = anonymous((LIMIT / 100 * percent).next_multiple_of(2 * MIB));
        let result = region.populate(0..region.len().get(), &PopulateOptions::default());
        match result {
            Ok(report) => println!("whole {}", report.done().get()),
            Err(error @ WriteError::TakenMeanwhile { done, of, needed, available, .. }) => {
                assert_eq!(of, region.len());
                assert_eq!(done.get() + needed.get(), of.get());
                assert!(available.get() < LIMIT, "{error}");
                assert!(error.to_string().contains("raise that limit"), "{error}");
                assert!(region.mapping().resident().unwrap() >= done);
                println!("short {error}");
            }
            Err(error @ WriteError::TooLittleMemory { .. }) => println!("short {error}"),
            Err(error) => panic!("{error}"),
        }
        std::io::stdin().read_line(&mut String::new()).unwrap();
        return;
    }
    let Some(group) = or_skip(NAME, Group::try_new(ByteLen::new(LIMIT))) else { return };
    for percent in [60, 52, 90] {
        let mut children: Vec<_> = (0..2)
            .map(|_| {
                std::process::Command::new(std::env::current_exe().unwrap())
                    .args([NAME, "--exact", "--nocapture", "--test-threads=1"])
                    .env(CHILD, &group.path)
                    .env("UZONE_TEST_PERCENT", percent.to_string())
                    .stdin(std::process::Stdio::piped())
                    .stdout(std::process::Stdio::piped())
                    .spawn()
                    .unwrap()
            })
            .collect();
        let mut said: Vec<_> = children
            .iter_mut()
            .map(|child| std::io::BufReader::new(child.stdout.take().unwrap()))
            .collect();
        let mut hear = |child: usize, words: &[&str]| loop {
            let mut line = String::new();
            let len = std::io::BufRead::read_line(&mut said[child], &mut line).unwrap();
            assert_ne!(len, 0, "a child ended before it said one of {words:?}");
            // A test's first line begins with its name.
            if let Some(at) = words.iter().find_map(|word| line.find(word)) {
                return line[at..].to_owned();
            }
        };
        let tell = |children: &mut [std::process::Child]| {
            for child in children {
                std::io::Write::write_all(child.stdin.as_mut().unwrap(), b"go\n").unwrap();
            }
        };
        (0..2).for_each(|child| drop(hear(child, &["joined"])));
        let started = Instant::now();
        tell(&mut children);
        let results: Vec<String> = (0..2).map(|child| hear(child, &["short ", "whole "])).collect();
        let elapsed = started.elapsed();
        tell(&mut children);
        for mut child in children {
            assert!(child.wait().unwrap().success(), "{percent} %: {results:?}");
        }
        assert!(
            results.iter().any(|result| result.starts_with("short")),
            "{percent} %: {results:?}"
        );
        assert!(elapsed < Duration::from_secs(60), "{percent} %: {elapsed:?}");
        assert_eq!(group.kills().unwrap_or(0), 0, "{percent} %: {results:?}");
    }
}
