//! Populating and punching regions on this kernel: how much, of which pages, and what is refused before
//! it costs time.
//! Needs, for some: root, transparent huge pages, 32 MiB that can be had in huge pages.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::common::needs::{Pool, skip};
use crate::common::{Temporary, anonymous, is_zero, read};
use uzone_os::{Access, Anonymous, HugeAdvice, Sharing, SystemRoot, probe};
use uzone_os::{Mapping, MappingError, hugepages};
use uzone_pages::{ByteLen, PageSize};
use uzone_zone::{Huge, PopulateOptions, Region, RegionSource, WriteError, ZeroOptions};

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
            reported.fetch_max(done.get(), Ordering::Relaxed);
        });
        let report = region.populate(8 * MIB..40 * MIB, &options).unwrap();
        assert!(report.is_whole(), "{report}");
        assert_eq!(report.done, ByteLen::mib(32));
        assert_eq!(seen.load(Ordering::Relaxed), 32 * MIB);
        assert_eq!(report.huge.get() + report.base.get(), 32 * MIB, "{report}");
        assert_eq!(report.huge, region.mapping().huge_backed().unwrap());
        assert!(report.threads >= 1);
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
    assert_eq!((report.done.get(), report.base.get()), (page(), page()));
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
        assert!(matches!(error, WriteError::NoHugePages { backing: RegionSource::Anonymous, .. }));
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
fn a_cancelled_request_says_how_much_is_present_and_a_panic_stops_its_threads() {
    for node in [false, true] {
        let region = anonymous(1 << 30);
        let cancel = Arc::<AtomicBool>::default();
        let stop = cancel.clone();
        let mut options = PopulateOptions::default()
            .cancel(cancel)
            .on_progress(move |_, _| stop.store(true, Ordering::Relaxed));
        if node {
            options = options.node(0); // by threads beside the caller's
        }
        let report = match region.populate(0..1 << 30, &options) {
            Err(WriteError::Node { .. }) => return skip("a_cancelled_request", "no NUMA nodes"),
            report => report.unwrap(),
        };
        assert_eq!(report.of, ByteLen::gib(1));
        assert!(!report.done.is_zero() && report.done < report.of);
        assert_eq!(region.mapping().resident_in(0..report.done.get()).unwrap(), report.done);
        assert!(!report.is_whole() && report.to_string().contains("cancelled"), "{report}");
        assert_eq!(region.populate(0..1 << 30, &options).unwrap().done, ByteLen::ZERO);

        let region = anonymous(1 << 30);
        // Without the hook that prints the place.
        let fail = |_, _| std::panic::resume_unwind(Box::new("as the test wants"));
        let options = PopulateOptions::default().on_progress(fail);
        let options = if node { options.node(0) } else { options };
        let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            region.populate(0..1 << 30, &options).map(|report| report.done)
        }));
        assert!(caught.is_err());
        assert!(region.mapping().resident().unwrap() < ByteLen::gib(1));
    }
}

#[test]
fn several_threads_populate_parts_of_one_region() {
    let region = anonymous(64 * MIB);
    let options = PopulateOptions::default().threads(NonZeroUsize::MIN);
    std::thread::scope(|scope| {
        for part in 0..4 {
            let (region, options) = (&region, &options);
            scope.spawn(move || {
                let report = region.populate(part * 16 * MIB..(part + 1) * 16 * MIB, options);
                assert_eq!(report.unwrap().threads, 1);
            });
        }
    });
    assert_eq!(region.resident().unwrap(), ByteLen::mib(64));
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
    let options = PopulateOptions::default().node(node.number).threads(three);
    let before = uzone_os::numa::current_cpu_count().unwrap();
    let report = region.populate(0..16 * MIB, &options).unwrap();
    assert!(report.is_whole());
    // No more threads than chunks, and the caller's is none of them.
    assert!((1..=3).contains(&report.threads));
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
        command
            .args([&format!("populate::{NAME}"), "--exact", "--nocapture", "--test-threads=1"])
            .env(CHILD, "1");
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
