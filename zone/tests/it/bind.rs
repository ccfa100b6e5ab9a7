//! Binding real memory: what is refused, what a bind leaves behind, and what rebinding costs.

use std::num::NonZeroUsize;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::common::{anonymous, cause, descriptor_count, linux, read};
use uzone_os::Exclusivity;
use uzone_pages::{
    AddrError, ByteLen, Class, LinuxPage, LinuxSeed, MemoryKind, Order, Pfn, PfnRange, Plain,
};
use uzone_zone::{AltmapOptions, BindError, BindOptions, Init, PinError, Region, Zone};

fn one(pfn: Pfn) -> PfnRange {
    PfnRange::try_single(pfn).expect("a page")
}

fn generic() -> BindOptions {
    BindOptions::new(MemoryKind::Generic)
}

#[test]
fn options_that_do_not_fit_are_refused_each_with_a_reason_of_its_own() {
    let zone = Zone::new();
    let bind = |options: BindOptions| cause(zone.bind(anonymous(1 << 20), options));
    assert!(matches!(bind(generic().order(Order::PMD)), BindError::FolioLargerThanRegion { .. }));
    assert!(matches!(
        cause(zone.bind(anonymous(3 << 20), generic().order(Order::PMD))),
        BindError::Addr(AddrError::EndInsideFolio { .. })
    ));
    assert!(matches!(
        cause(zone.bind(anonymous(2 << 20), generic().order(Order::PMD).base(Pfn::new(7)))),
        BindError::Addr(AddrError::StartInsideFolio { .. })
    ));
    let last = Pfn::new(u64::MAX - 10);
    assert!(matches!(
        bind(generic().base(last)),
        BindError::NoNumbers { base, pages } if (base, pages.get()) == (last, 256)
    ));
    let on_touch = BindOptions::<Plain<u64>>::with_payload(MemoryKind::Generic, 1);
    assert!(matches!(
        cause(zone.bind(anonymous(1 << 20), on_touch.init(Init::OnTouch))),
        BindError::NotZero
    ));
    assert!(zone.bound().is_empty(), "a bind that fails claims nothing");
}

#[test]
fn a_region_of_no_page_or_half_a_page_is_refused() {
    assert!(matches!(Region::anonymous(ByteLen::ZERO), Err(BindError::Region { .. })));
    assert!(matches!(
        Region::anonymous(ByteLen::new(4097)),
        Err(BindError::EndsInsidePage { len_bytes: 4097, .. })
    ));
    assert!(matches!(
        Region::hugetlb(ByteLen::new(4096), uzone_pages::PageSize::MIB_2),
        Err(BindError::EndsInsidePage { .. })
    ));
}

#[test]
fn frame_numbers_that_are_taken_are_refused_and_free_again_after_unbind() {
    let zone = Zone::new();
    let base = Pfn::new(1 << 30);
    let first = zone.bind(anonymous(1 << 20), generic().base(base)).unwrap();
    for (offset, pages) in [(0, 256), (255, 1), (0, 1), (100, 500)] {
        let at = Pfn::new(base.get() + offset);
        let failure = zone.bind(anonymous(pages * 4096), generic().base(at)).unwrap_err();
        assert!(
            matches!(failure.cause, BindError::Overlaps { bound, .. } if bound == first.range())
        );
        assert_eq!(failure.region.len(), ByteLen::new(pages * 4096), "the region comes back");
    }
    let after = zone.bind(anonymous(4096), generic().base(Pfn::new(base.get() + 256))).unwrap();
    assert_eq!(zone.bound().len(), 2);
    let _region = first.unbind().expect("no page is held");
    assert!(zone.bind(anonymous(1 << 20), generic().base(base)).is_ok());
    drop(after);
    assert!(zone.bound().is_empty());
}

#[test]
fn the_same_bytes_of_a_file_are_not_described_twice() {
    let directory = std::env::temp_dir().join(format!("uzone-bind-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    let (path, other_name) = (directory.join("file"), directory.join("other-name"));
    std::fs::write(&path, vec![0; 1 << 20]).unwrap();
    std::fs::hard_link(&path, &other_name).unwrap();
    let zone = Zone::new();
    let region = |path, offset, len| Region::file(path, offset, ByteLen::new(len)).unwrap();
    let whole = zone.bind(region(&path, 0, 1 << 19), generic()).unwrap();
    assert!(matches!(
        cause(zone.bind(region(&other_name, (1 << 19) - 4096, 8192), generic())),
        BindError::SameBytes { bound } if bound == whole.range()
    ));
    assert!(zone.bind(region(&other_name, 1 << 19, 1 << 19), generic()).is_ok());
    drop(whole);
    assert!(zone.bind(region(&other_name, 0, 1 << 20), generic()).is_ok());
    std::fs::remove_dir_all(&directory).unwrap();
}

#[test]
fn bytes_of_a_region_outlive_bind_and_unbind() {
    let zone = Zone::new();
    let mut region = Region::memfd("uzone-test", ByteLen::mib(4)).unwrap();
    region.write_at(4095, b"page").unwrap();
    for _ in 0..3 {
        let pagemap = zone.bind(region, generic()).unwrap();
        assert_eq!(&read(|out| pagemap.region().read_at(4095, out)), b"page");
        region = pagemap.unbind().expect("no page is held");
    }
    assert!(region.write_at((4 << 20) - 3, b"page").is_err(), "one byte past the end");
}

#[test]
fn a_tail_answers_from_its_number_alone() {
    let zone = Zone::new();
    let options = linux().order(Order::PMD);
    let pagemap = zone.bind(anonymous(8 << 20), options).unwrap();
    assert_eq!(descriptor_count(&pagemap), 4);
    let start = pagemap.range().start().get();
    for offset in [0, 1, 2, 511, 512, 2047] {
        let page = pagemap.page(Pfn::new(start + offset)).unwrap();
        assert_eq!(page.is_tail(), offset % 512 != 0);
        assert_eq!(page.head().get(), start + offset / 512 * 512);
        assert_eq!(page.distance().get(), offset % 512);
        assert_eq!(page.order(), Order::PMD);
        assert_eq!(page.payload().is_none(), page.is_tail());
        assert_eq!(page.word().references(), 1, "a tail's holds are its head's");
        let class = match offset % 512 {
            0 => Class::Head,
            1 => Class::FirstTail,
            _ => Class::Tail,
        };
        assert_eq!(page.class(), class);
        // What Linux would have stored in the tail, from arithmetic.
        let refcount = pagemap.fresh_payload(page.pfn()).unwrap().words()[6] >> 32;
        assert_eq!(refcount, u64::from(!page.is_tail()));
    }
    assert!(pagemap.page(Pfn::new(start - 1)).is_none());
    assert!(pagemap.page(Pfn::new(start + 2048)).is_none());
    assert_eq!(pagemap.page_at((8 << 20) - 1).unwrap().pfn().get(), start + 2047);
    assert!(pagemap.page_at(8 << 20).is_none());
}

#[test]
fn the_first_reference_of_a_free_page_is_handed_out_once_and_generic_memory_is_never_free() {
    let zone = Zone::new();
    let kinds = [MemoryKind::Private, MemoryKind::Coherent, MemoryKind::FsDax];
    for kind in kinds.into_iter().chain([MemoryKind::PciP2pdma]) {
        let options = BindOptions::new(kind).order(Order::new(2));
        let pagemap = zone.bind(anonymous(1 << 20), options).unwrap();
        let head = pagemap.range().start();
        let tail = Pfn::new(head.get() + 3);
        assert!(matches!(pagemap.get(one(tail)), Err(PinError::Refused { .. })));
        let first = pagemap.hand_out(tail).unwrap();
        assert_eq!(first.range(), one(tail));
        assert!(matches!(pagemap.hand_out(head), Err(PinError::NotFree { references: 1, .. })));
        let second = pagemap.get(one(head)).unwrap();
        drop(first);
        assert!(!pagemap.page(head).unwrap().word().is_free());
        drop(second);
        assert!(pagemap.page(head).unwrap().word().is_free());
        assert!(matches!(pagemap.get(one(Pfn::new(0))), Err(PinError::NotHere { .. })));
    }
    let pagemap = zone.bind(anonymous(4096), generic()).unwrap();
    let pfn = pagemap.range().start();
    drop(pagemap.get(one(pfn)).unwrap());
    assert_eq!(pagemap.page(pfn).unwrap().word().references(), 1);
}

#[test]
fn other_threads_see_every_descriptor_after_bind_returns() {
    let zone = Zone::new();
    let mut region = anonymous(256 << 20);
    for _ in 0..20 {
        let pagemap = zone.bind(region, linux().threads(NonZeroUsize::new(2).unwrap())).unwrap();
        std::thread::scope(|scope| {
            for part in 0..4 {
                let pagemap = &pagemap;
                scope.spawn(move || {
                    let fresh = pagemap.fresh_payload(pagemap.range().start()).unwrap();
                    for page in pagemap.pages().skip(part).step_by(4) {
                        assert_eq!(page.payload().unwrap(), &fresh);
                    }
                });
            }
        });
        region = pagemap.unbind().expect("no page is held");
    }
}

#[test]
fn descriptor_memory_is_kept_up_to_the_limit_and_trimmed() {
    let zone = Zone::with_keep_limit(ByteLen::mib(20));
    let bind = |gib: u64| zone.bind(anonymous(gib << 30), linux()).unwrap();
    let first = bind(1);
    assert!(!first.report().is_kept);
    assert_eq!(first.metadata_resident().unwrap(), ByteLen::mib(16));
    drop(first);
    assert_eq!(zone.kept(), ByteLen::mib(16));
    let second = bind(1);
    assert!(second.report().is_kept);
    assert_eq!(zone.kept(), ByteLen::ZERO);
    let third = bind(1);
    assert!(!third.report().is_kept);
    drop(second);
    drop(third);
    assert_eq!(zone.kept(), ByteLen::mib(16), "two would be more than the limit");
    drop(bind(2));
    assert_eq!(zone.kept(), ByteLen::mib(16), "one alone is more than the limit");
    assert_eq!(zone.trim(), ByteLen::mib(16));
    assert_eq!(zone.kept(), ByteLen::ZERO);
    assert!(!bind(1).report().is_kept);
}

#[test]
fn on_touch_takes_memory_only_for_descriptors_that_are_touched() {
    let zone = Zone::new();
    let pagemap = zone.bind(anonymous(1 << 44), generic()).unwrap();
    assert_eq!(pagemap.report().init, Init::OnTouch);
    assert_eq!(pagemap.report().bytes, ByteLen::gib(32));
    assert_eq!(pagemap.metadata_resident().unwrap(), ByteLen::ZERO);
    let start = pagemap.range().start().get();
    for page in [0, 1, 511, 1 << 20, (1 << 32) - 1] {
        drop(pagemap.get(one(Pfn::new(start + page))).unwrap());
    }
    assert_eq!(pagemap.metadata_resident().unwrap(), ByteLen::kib(12));
}

#[test]
fn a_cancelled_bind_gives_the_region_back_and_its_memory_to_the_kernel() {
    let zone = Zone::with_keep_limit(ByteLen::gib(1));
    drop(zone.bind(anonymous(1 << 30), linux()).unwrap());
    assert_eq!(zone.kept(), ByteLen::mib(16));
    let cancel = Arc::<AtomicBool>::default();
    let options = {
        let (stop, flag) = (cancel.clone(), cancel);
        linux().threads(NonZeroUsize::MIN).cancel(flag).on_progress(move |done, _| {
            if done >= ByteLen::mib(6) {
                stop.store(true, Ordering::Relaxed);
            }
        })
    };
    let failure = zone.bind(anonymous(1 << 30), options.clone()).unwrap_err();
    assert!(matches!(
        failure.cause,
        BindError::Cancelled { done, total } if done == ByteLen::mib(6) && total == ByteLen::mib(16)
    ));
    assert_eq!(zone.kept(), ByteLen::ZERO);
    assert!(zone.bound().is_empty());
    let again = zone.bind(*failure.region, linux()).unwrap();
    assert!(!again.report().is_kept);
}

#[test]
fn progress_rises_to_the_total() {
    let zone = Zone::new();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let options = {
        let seen = seen.clone();
        linux().on_progress(move |done, total| seen.lock().unwrap().push((done, total)))
    };
    drop(zone.bind(anonymous(1 << 30), options).unwrap());
    let seen = seen.lock().unwrap();
    assert_eq!(seen.len(), 8);
    assert!(seen.iter().all(|(_, total)| *total == ByteLen::mib(16)));
    assert_eq!(seen.iter().map(|(done, _)| *done).max(), Some(ByteLen::mib(16)));
}

#[test]
fn a_thousand_rounds_leave_memory_and_mappings_as_they_were() {
    let status = |field: &str| -> u64 {
        let text = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = text.lines().find(|line| line.starts_with(field)).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    };
    let maps = || std::fs::read_to_string("/proc/self/maps").unwrap().lines().count();
    let round = |zone: &Zone, index: u64| {
        let size = (64 + index % 3 * 64) << 20;
        drop(zone.bind(anonymous(size), linux()).unwrap());
        drop(zone.bind(anonymous(size), generic().order(Order::PMD)).unwrap());
        let on_touch = zone.bind(anonymous(size), generic()).unwrap();
        drop(on_touch.get(one(on_touch.range().start())).unwrap());
        let _region = on_touch.unbind().expect("no page is held");
    };
    // In a child: other tests of this binary map and touch memory meanwhile.
    if std::env::var_os("UZONE_TEST_ROUNDS").is_none() {
        let output = child("a_thousand_rounds_leave_memory_and_mappings_as_they_were")
            .env("UZONE_TEST_ROUNDS", "1")
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        return;
    }
    let zone = Zone::with_keep_limit(ByteLen::mib(8));
    for index in 0..20 {
        round(&zone, index);
    }
    let (rss_before, maps_before) = (status("VmRSS:"), maps());
    for index in 0..1000 {
        round(&zone, index);
    }
    let (rss_after, maps_after) = (status("VmRSS:"), maps());
    assert!(rss_after <= rss_before + 512, "{rss_before} KiB grew to {rss_after} KiB");
    assert!(maps_after <= maps_before + 2, "{maps_before} mappings grew to {maps_after}");
}

/// Returns a command that runs one test of this binary alone.
fn child(test: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([&format!("bind::{test}"), "--exact", "--nocapture", "--test-threads=1"]);
    command
}

#[test]
fn a_bind_under_a_limit_that_is_too_small_fails_and_leaves_nothing() {
    let test = "a_bind_under_a_limit_that_is_too_small_fails_and_leaves_nothing";
    if !is_child_under_limit(test, 3 << 20) {
        return;
    }
    let zone = Zone::new();
    // The region takes most of the address space, so its descriptors find no room.
    let region = anonymous(2 << 30);
    let big = zone.bind(region, linux().order(Order::BASE)).expect("32 MiB of descriptors fit");
    let region = big.unbind().expect("no page is held");
    zone.trim();
    let mut filler = Vec::new();
    while let Ok(region) = Region::anonymous(ByteLen::mib(16)) {
        filler.push(region);
    }
    let failure = zone
        .bind(
            region,
            BindOptions::<LinuxPage<11>>::with_payload(MemoryKind::Generic, LinuxSeed::default()),
        )
        .unwrap_err();
    assert!(
        matches!(failure.cause, BindError::Map { .. } | BindError::TooLittleMemory { .. }),
        "{:?}",
        failure.cause
    );
    let text = format!("{}: {}", failure, failure.cause);
    assert!(text.contains("MiB"), "{text}");
    assert!(zone.bound().is_empty());
    drop(filler);
    let again = zone.bind(*failure.region, linux()).expect("there is room again");
    assert_eq!(again.range().pages().get(), 1 << 19);
}

/// Runs `test` alone in a child whose address space has at most `kib`. Returns whether this process
/// is that child, which then runs the test.
fn is_child_under_limit(test: &str, kib: u64) -> bool {
    let variable = "UZONE_TEST_CHILD";
    if std::env::var_os(variable).is_some_and(|name| name == test) {
        return true;
    }
    let exe = std::env::current_exe().unwrap();
    let output = Command::new("sh")
        .arg("-c")
        .arg(format!("ulimit -v {kib}; exec '{}' bind::{test} --exact --nocapture", exe.display()))
        .env(variable, test)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert!(stdout.contains("1 passed"), "the child ran no test of that name: {stdout}");
    false
}

/// Takes address space until at most about `mib` is left.
fn fill_address_space(limit_kib: u64, mib: u64) -> Vec<Region> {
    let text = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = text.lines().find(|line| line.starts_with("VmSize:")).unwrap();
    let used_kib: u64 = line.split_whitespace().nth(1).unwrap().parse().unwrap();
    let take_kib = limit_kib.saturating_sub(used_kib + mib * 1024) / 4 * 4;
    vec![anonymous(take_kib * 1024)]
}

#[test]
fn descriptors_that_just_fit_under_a_limit_are_not_refused() {
    const LIMIT_KIB: u64 = 12 << 20;
    let test = "descriptors_that_just_fit_under_a_limit_are_not_refused";
    if !is_child_under_limit(test, LIMIT_KIB) {
        return;
    }
    let zone = Zone::new();
    drop(zone.bind(anonymous(1 << 20), linux()).unwrap()); // what is made once is made
    let region = anonymous(8 << 30); // 128 MiB of descriptors
    let _filler = fill_address_space(LIMIT_KIB, 200);
    let pagemap = zone.bind(region, linux().threads(NonZeroUsize::MIN)).unwrap();
    assert_eq!(pagemap.range().pages().get(), 2 << 20);
}

#[test]
fn a_bind_does_with_the_threads_that_it_gets() {
    const LIMIT_KIB: u64 = 12 << 20;
    let test = "a_bind_does_with_the_threads_that_it_gets";
    if !is_child_under_limit(test, LIMIT_KIB) {
        return;
    }
    let zone = Zone::with_keep_limit(ByteLen::gib(1));
    drop(zone.bind(anonymous(8 << 30), linux()).unwrap());
    let region = anonymous(8 << 30);
    let _filler = fill_address_space(LIMIT_KIB, 3); // less than 16 stacks
    let threads = NonZeroUsize::new(16).unwrap();
    let pagemap = zone.bind(region, linux().threads(threads)).unwrap();
    let fresh = pagemap.fresh_payload(pagemap.range().start()).unwrap();
    assert!(pagemap.pages().all(|page| page.payload() == Some(&fresh)));
    assert!(pagemap.report().threads < 16, "{}", pagemap.report());
}

/// A payload that holds the high half of an address: zero at most addresses one would make up.
#[derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::KnownLayout)]
#[repr(C)]
struct HighHalf(u64);

impl uzone_pages::Payload for HighHalf {
    type Seed = ();

    fn init(&mut self, _seed: &(), slot: &uzone_pages::Slot) {
        self.0 = slot.head_address >> 32;
    }

    fn refresh(_seed: &()) -> uzone_pages::Refresh {
        uzone_pages::Refresh::Linear
    }
}

#[test]
fn a_payload_that_depends_on_its_address_is_written() {
    let zone = Zone::new();
    let options = BindOptions::<HighHalf>::with_payload(MemoryKind::Generic, ());
    let pagemap = zone.bind(anonymous(1 << 20), options.clone()).unwrap();
    assert_eq!(pagemap.report().init, Init::Eager);
    for page in pagemap.pages() {
        assert_eq!(page.payload().unwrap().0, pagemap.fresh_payload(page.pfn()).unwrap().0);
    }
    assert!(matches!(
        cause(zone.bind(anonymous(1 << 20), options.init(Init::OnTouch))),
        BindError::NotZero
    ));
}

#[test]
fn a_store_that_this_cpu_lacks_is_refused_before_anything_is_done() {
    let zone = Zone::with_keep_limit(ByteLen::gib(1));
    drop(zone.bind(anonymous(1 << 30), linux()).unwrap());
    let missing = uzone_stream::Path::ALL.into_iter().find(|path| !path.is_available());
    let Some(path) = missing else {
        eprintln!("skipped: a_store_that_this_cpu_lacks_is_refused: this CPU has them all");
        return;
    };
    let failure = zone.bind(anonymous(1 << 30), linux().stamp(Some(path))).unwrap_err();
    assert!(matches!(failure.cause, BindError::NoStore { path: refused } if refused == path));
    assert_eq!(zone.kept(), ByteLen::mib(16));
}

#[test]
fn a_memory_file_is_known_by_any_name() {
    use std::os::fd::AsRawFd;
    let zone = Zone::new();
    let memfd = Region::memfd("uzone-test", ByteLen::mib(2)).unwrap();
    let path = format!("/proc/self/fd/{}", memfd.mapping().fd().unwrap().as_raw_fd());
    let other = Region::file(path.as_ref(), 0, ByteLen::mib(2)).unwrap();
    let bound = zone.bind(memfd, generic()).unwrap();
    assert!(matches!(
        cause(zone.bind(other, generic())),
        BindError::SameBytes { bound: range } if range == bound.range()
    ));
}

#[test]
fn a_small_bind_leaves_large_kept_memory_to_a_large_one() {
    let zone = Zone::with_keep_limit(ByteLen::gib(1));
    drop(zone.bind(anonymous(4 << 30), linux()).unwrap());
    assert_eq!(zone.kept(), ByteLen::mib(64));
    let small = zone.bind(anonymous(4096), linux()).unwrap();
    assert!(!small.report().is_kept);
    let large = zone.bind(anonymous(4 << 30), linux()).unwrap();
    assert!(large.report().is_kept);
}

#[test]
fn small_pieces_are_not_kept() {
    let zone = Zone::with_keep_limit(ByteLen::mib(64));
    let eager = || generic().init(Init::Eager);
    let all: Vec<_> = (0..2000).map(|_| zone.bind(anonymous(4096), eager()).unwrap()).collect();
    drop(all);
    assert_eq!(zone.kept(), ByteLen::ZERO);
    drop(zone.bind(anonymous((2 << 30) - 4096), eager()).unwrap());
    assert_eq!(zone.kept(), ByteLen::mib(4), "whole pages are counted");
}

#[test]
fn a_worker_that_panics_stops_the_others_and_leaves_no_claim() {
    let zone = Zone::with_keep_limit(ByteLen::gib(1));
    let calls = Arc::new(AtomicU64::new(0));
    let options = {
        let calls = calls.clone();
        linux().threads(NonZeroUsize::new(2).unwrap()).on_progress(move |_, _| {
            assert!(calls.fetch_add(1, Ordering::SeqCst) != 0, "the first call panics");
        })
    };
    let bound = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        zone.bind(anonymous(8 << 30), options).map(drop).map_err(drop)
    }));
    assert!(bound.is_err());
    assert!(calls.load(Ordering::SeqCst) < 64, "there are 64 sections");
    assert!(zone.bound().is_empty());
    assert!(zone.bind(anonymous(1 << 30), linux()).is_ok());
}

/// Callbacks run without a lock, so they may use the zone.
#[test]
fn a_callback_may_bind_and_unbind_in_the_same_zone() {
    let zone = Zone::new();
    let inner = zone.clone();
    let options = linux().on_progress(move |_, _| {
        drop(inner.bind(anonymous(1 << 20), generic()).unwrap());
        assert!(!inner.bound().is_empty());
        inner.trim();
    });
    drop(zone.bind(anonymous(1 << 30), options).unwrap());
    assert!(zone.bound().is_empty());
}

/// Binding on touch does not depend on the size. The bound is the promised 100 microseconds, for
/// the best of many tries, since the machine may be busy.
#[test]
fn on_touch_costs_the_same_from_a_gibibyte_to_sixteen_tebibytes() {
    let zone = Zone::new();
    for shift in 30..=44 {
        let mut region = anonymous(1 << shift);
        let mut best = Duration::MAX;
        for _ in 0..50 {
            let started = Instant::now();
            let pagemap = zone.bind(region, generic()).unwrap();
            best = best.min(started.elapsed());
            region = pagemap.unbind().expect("no page is held");
        }
        assert!(best < Duration::from_micros(100), "{best:?} for 2^{shift} bytes");
    }
}

/// The options of a bind that fails, and whether descriptors may have been written by then.
type Failing = (&'static str, fn() -> BindOptions<LinuxPage>, bool);

/// Bytes of each page of a region, so that a page that moved or changed is noticed.
fn mark(region: &Region) -> Vec<u64> {
    let pages = region.len().get() / 4096;
    for page in 0..pages {
        region.write_at(page * 4096 + 8, &(page + 1).to_ne_bytes()).unwrap();
    }
    marks(region)
}

fn marks(region: &Region) -> Vec<u64> {
    let at = |page| u64::from_ne_bytes(read(|out| region.read_at(page * 4096 + 8, out)));
    (0..region.len().get() / 4096).map(at).collect()
}

#[test]
fn a_region_is_as_it_was_after_each_step_of_a_bind_that_fails() {
    let stops_at = |mib: u64| {
        let cancel = Arc::<AtomicBool>::default();
        let stop = cancel.clone();
        linux().cancel(cancel).on_progress(move |done, _| {
            stop.store(done >= ByteLen::mib(mib), Ordering::Relaxed);
        })
    };
    let stopped = || linux().cancel(Arc::new(AtomicBool::new(true)));
    let failing: [Failing; 5] = [
        ("the options", || linux().order(Order::PUD), false),
        ("frame numbers that are taken", || linux().base(Pfn::new(1 << 30)), false),
        ("a payload that is not zero", || linux().init(Init::OnTouch), false),
        ("a store that fails", || linux().threads(NonZeroUsize::MIN), true),
        ("a store of several threads", || linux().threads(NonZeroUsize::new(3).unwrap()), true),
    ];
    for has_altmap in [false, true] {
        for is_private in [false, true] {
            for (step, options, is_begun) in failing {
                let zone = Zone::with_keep_limit(ByteLen::mib(64));
                let taken = zone.bind(anonymous(4096), generic().base(Pfn::new(1 << 30))).unwrap();
                let len = ByteLen::mib(512);
                let region = if is_private {
                    anonymous(len.get())
                } else {
                    Region::memfd("as-it-was", len).unwrap()
                };
                let before = mark(&region);
                let mapping = region.mapping();
                let (addr, fd) = (mapping.addr(), mapping.fd().map(|fd| format!("{fd:?}")));
                let mut options = options();
                if is_begun {
                    options = stops_at(2).threads(NonZeroUsize::new(1 + step.len() % 2).unwrap());
                }
                if has_altmap {
                    // SAFETY: no other process has the file.
                    let promise = unsafe { Exclusivity::assert(region.mapping()) };
                    options = options.altmap(AltmapOptions::new().exclusive(promise));
                }
                let failure = zone.bind(region, options).unwrap_err();
                let case = format!("{step}, {has_altmap}, {is_private}: {}", failure.cause);
                let region = *failure.region;
                let mapping = region.mapping();
                assert_eq!((mapping.addr(), mapping.len()), (addr, len), "{case}");
                assert_eq!(mapping.fd().map(|fd| format!("{fd:?}")), fd, "{case}");
                // Pages in which descriptors were begun are zero, and all others are as they were.
                let lost = if has_altmap && is_begun { 2048 } else { 0 };
                let after = marks(&region);
                assert!(after[lost..] == before[lost..], "{case}");
                let is_clear = |(mark, was): (&u64, &u64)| *mark == 0 || mark == was;
                assert!(after.iter().zip(&before).all(is_clear), "{case}");
                assert_eq!((zone.bound(), zone.kept()), (vec![taken.range()], ByteLen::ZERO));
                assert!(zone.bind(region, linux()).is_ok(), "{case}");
            }
        }
    }
    let zone = Zone::new();
    let refused = zone.bind(anonymous(1 << 20), stopped()).unwrap_err();
    assert!(matches!(refused.cause, BindError::Cancelled { .. }));
    assert!(zone.bound().is_empty());
}
