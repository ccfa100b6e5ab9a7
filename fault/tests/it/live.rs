//! Faulting threads on this kernel get the bytes of the backing, and what the engine counts did.
//!
//! A case that needs something the host lacks is skipped by name with the reason, and fails instead
//! where `REQUIRE_ALL=1` is set.

use std::num::NonZeroU64;
use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::sync::Arc;
use std::thread;

use crate::common::{
    CHILD, Pool, Stalling, bytes_of, check_all, check_page, engine, failing_at, file_of, function,
    map as map_with, options, page, scattered, settles, skip, usize_of, word, word_in, words_at,
};
use uzone_fault::{
    Answer, Backing, BackingError, FileBacking, LazyError, LazyMapping, LazyOptions, MapError,
    MemoryBacking, ZeroBacking,
};
use uzone_os::{Mapping, Sharing, page_cache, sigbus};
use uzone_pages::{Advice, ByteLen, Content, FaultAround, PageSize};

/// Maps by an engine of its own, or prints that the case cannot run.
fn map(
    name: &str,
    len: u64,
    backing: impl Backing + 'static,
    options: &LazyOptions,
) -> Option<LazyMapping> {
    map_with(name, &engine(), len, backing, options)
}

/// Reads as many bytes at once and compares them.
fn check_bytes(memory: &LazyMapping, offset: u64, len: u64) {
    assert!(bytes_of(memory, offset, len) == words_at(offset, len), "wrong bytes at {offset:#x}");
}

fn window(pages: u64) -> FaultAround {
    FaultAround::try_new(ByteLen::new(pages * page())).unwrap()
}

#[test]
fn threads_that_touch_at_random_see_the_bytes_of_the_function() {
    let len = 16 << 20;
    for advice in [Advice::Auto, Advice::Normal, Advice::Random, Advice::Sequential] {
        let Some(memory) = map("threads_at_random", len, function(), &options(advice, 16)) else {
            return;
        };
        thread::scope(|scope| {
            for seed in 0..4 {
                let memory = &memory;
                scope.spawn(move || {
                    for at in scattered(seed + 1, len / page()).take(3000) {
                        check_page(memory, at * page());
                    }
                });
            }
        });
        check_all(&memory);
        let stats = memory.stats();
        assert_eq!(stats.poisoned, 0);
        settles(&memory, |stats| stats.demand + stats.around >= len / page());
        if advice == Advice::Random {
            assert_eq!(stats.around, 0, "{stats:?}");
        }
    }
}

#[test]
fn a_warm_scan_faults_once_a_window_at_every_order() {
    let name = "a_warm_scan_faults_once_a_window";
    let len = (8 << 20) + 5 * page();
    let file = file_of(len);
    for order in 0..=9 {
        let size = 1 << order;
        let backing = FileBacking::new(file.try_clone().unwrap()).unwrap();
        let options = options(Advice::Normal, size);
        let Some(memory) = map(name, len, backing, &options) else { return };
        check_all(&memory);
        let stats = memory.stats();
        assert_eq!(stats.queued, 0, "the file is cached: {stats:?}");
        assert_eq!(stats.faults, (len / page()).div_ceil(size), "order {order}: {stats:?}");
    }
}

#[test]
fn a_cold_file_is_read_where_it_is_touched() {
    let name = "a_cold_file_is_read_where_it_is_touched";
    let len = 32 << 20;
    let file = file_of(len);
    page_cache::forget(&file, 0, NonZeroU64::new(len).unwrap()).unwrap();
    let cached = page_cache::cached(&file, 0, NonZeroU64::new(len).unwrap()).unwrap();
    if cached != Some(0) {
        return skip(name, "this file system keeps cached pages after POSIX_FADV_DONTNEED");
    }
    let backing = FileBacking::new(file.try_clone().unwrap()).unwrap();
    let Some(memory) = map(name, len, backing, &LazyOptions::default()) else { return };
    for at in scattered(3, len / page()).take(200) {
        check_page(&memory, at * page());
    }
    let stats = memory.stats();
    assert_eq!(stats.poisoned, 0, "{stats:?}");
    check_all(&memory);
}

#[test]
fn a_file_that_became_shorter_is_an_error_and_never_zero() {
    let name = "a_file_that_became_shorter";
    let file = file_of(64 * page());
    let backing = FileBacking::new(file.try_clone().unwrap()).unwrap();
    let Some(memory) = map(name, 64 * page(), backing, &options(Advice::Normal, 16)) else {
        return;
    };
    file.set_len(32 * page()).unwrap();
    check_page(&memory, 31 * page());
    let error = memory.populate(40 * page()..41 * page()).unwrap_err();
    let LazyError::Backing { cause: BackingError::Short { end, .. }, offset } = &error else {
        panic!("{error:?}");
    };
    assert_eq!((*end, *offset), (32 * page(), 40 * page()));
    assert_eq!(memory.content(40 * page()), Some(Content::Poisoned));
    let again = memory.populate(40 * page()..41 * page()).unwrap_err();
    assert!(matches!(again, LazyError::Poisoned { .. }), "{again}");
    assert_eq!(memory.stats().poisoned, 1);
}

#[test]
fn a_page_that_the_file_was_cut_in_is_an_error_and_never_zero_behind_the_cut() {
    let name = "a_page_that_the_file_was_cut_in";
    let file = file_of(64 * page());
    let backing = FileBacking::new(file.try_clone().unwrap()).unwrap();
    let Some(memory) = map(name, 64 * page(), backing, &options(Advice::Normal, 16)) else {
        return;
    };
    file.set_len(15 * page() + page() / 2).unwrap();
    // All sixteen pages are in the page cache, the last with zeroes behind the cut.
    assert_eq!(memory.populate_cached(0..16 * page()).unwrap(), 15);
    assert_eq!(memory.content(15 * page()), Some(Content::Absent));
    let error = memory.populate(0..16 * page()).unwrap_err();
    let LazyError::Backing { cause: BackingError::Short { .. }, offset } = &error else {
        panic!("{error:?}");
    };
    assert_eq!(*offset, 15 * page());
}

#[test]
fn a_process_that_is_forked_off_has_no_mapping_to_read_zeroes_from() {
    let name = "a_process_that_is_forked_off";
    let Some(memory) = map(name, 64 * page(), function(), &LazyOptions::default()) else { return };
    let start = format!("{:x}-", memory.addr().get());
    let text = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let ours = text.split_once(&start).expect("it is mapped").1;
    let flags = ours.lines().find(|line| line.starts_with("VmFlags:")).expect("it has flags");
    // "Do not copy area on fork", proc(5).
    assert!(flags.split_whitespace().any(|flag| flag == "dc"), "{flags}");
}

#[test]
fn a_hole_of_a_memory_file_is_zero_and_what_is_shared_is_seen() {
    let name = "a_hole_of_a_memory_file";
    let len = 64 * page();
    let file = Arc::new(Mapping::memfd("holes", ByteLen::new(len), None).unwrap());
    for at in (0..64).filter(|at| at % 3 != 0) {
        file.write_at(at * page(), &words_at(at * page(), page())).unwrap();
    }
    let backing = MemoryBacking::new(file.clone(), Sharing::Shared).unwrap();
    let Some(memory) = map(name, len, backing, &options(Advice::Normal, 16)) else { return };
    let zeroes = vec![0; usize_of(page())];
    for at in 0..64 {
        if at % 3 != 0 {
            check_page(&memory, at * page());
        } else {
            assert!(bytes_of(&memory, at * page(), page()) == zeroes, "page {at}");
        }
    }
    memory.write_at(page(), &[7; 8]).unwrap();
    let mut seen = [0; 8];
    file.read_at(page(), &mut seen).unwrap();
    assert_eq!(seen, [7; 8]);
}

#[test]
fn huge_pages_are_filled_whole() {
    let name = "huge_pages_are_filled_whole";
    let (size, huge) = (PageSize::MIB_2, 2 << 20);
    let options = LazyOptions::default().huge(size);
    let engine = engine();
    let Some(_pool) = Pool::grow(name, size, 4) else { return };
    let Some(function) = map_with(name, &engine, 2 * huge, function(), &options) else { return };
    assert_eq!(function.page_size().bytes(), huge);
    check_all(&function);
    settles(&function, |stats| (stats.faults, stats.demand) == (2, 2));
    assert_eq!(function.evict(0..huge).unwrap(), 1);
    check_all(&function);
    drop(function);
    let Some(zero) = map_with(name, &engine, huge, ZeroBacking, &options) else { return };
    assert!(bytes_of(&zero, 0, huge).iter().all(|&byte| byte == 0));
    assert!(matches!(
        engine.map(ByteLen::new(huge + page()), Arc::new(ZeroBacking), &options),
        Err(MapError::CutsPage { .. } | MapError::Map(_))
    ));
}

#[test]
fn a_write_fault_fills_its_page_alone() {
    let options = options(Advice::Normal, 16);
    let Some(memory) = map("a_write_fault", 64 * page(), function(), &options) else { return };
    memory.write_at(20 * page(), &[1; 8]).unwrap();
    settles(&memory, |stats| (stats.faults, stats.demand, stats.around) == (1, 1, 0));
    assert_eq!(bytes_of(&memory, 20 * page(), 8), [1; 8]);
    assert_eq!(word_in(&memory, 20 * page() + 8), word(20 * page() + 8));
    // Its neighbours come with the next read, and it stays as it was written.
    check_page(&memory, 21 * page());
    assert_eq!(bytes_of(&memory, 20 * page(), 8), [1; 8]);
    settles(&memory, |stats| stats.demand + stats.around == 16);
}

#[test]
fn a_page_that_fails_raises_a_signal_in_its_reader_and_nowhere_else() {
    let name = "a_page_that_fails_raises_a_signal_in_its_reader_and_nowhere_else";
    let is_child = std::env::var(CHILD).is_ok_and(|child| child == name);
    let failing = failing_at(20 * page());
    let Some(memory) = map(name, 64 * page(), failing, &options(Advice::Normal, 16)) else {
        return;
    };
    check_bytes(&memory, 0, 16 * page());
    if is_child {
        check_page(&memory, 20 * page());
        println!("no signal came");
        return;
    }
    check_page(&memory, 21 * page());
    check_page(&memory, 19 * page());
    let error = memory.populate(16 * page()..32 * page()).unwrap_err();
    assert!(matches!(error, LazyError::Backing { offset, .. } if offset == 20 * page()), "{error}");
    let output = Command::new(std::env::current_exe().unwrap())
        .args([name, "--nocapture", "--test-threads=1"])
        .env(CHILD, name)
        .output()
        .unwrap();
    let bus = 7;
    assert_eq!(output.status.signal(), Some(bus), "{output:?}");
}

#[test]
fn the_handler_of_sigbus_writes_which_page_of_which_memory_is_bad_and_why() {
    let name = "the_handler_of_sigbus_writes_which_page_of_which_memory_is_bad_and_why";
    let options = options(Advice::Normal, 16).answer(Answer::Reader);
    let Some(memory) = map(name, 64 * page(), failing_at(20 * page()), &options) else { return };
    if std::env::var(CHILD).is_ok_and(|child| child == name) {
        sigbus::install().unwrap();
        let address = memory.addr().get() + usize_of(20 * page()) + 5;
        let pointer = std::ptr::with_exposed_provenance::<u8>(address);
        // SAFETY: the byte is mapped, and reading it raises a signal, which ends the process.
        let seen = unsafe { pointer.read_volatile() };
        println!("no signal came, and {seen}");
        return;
    }
    let output = crate::common::again(name).output().unwrap();
    let (bus, said) = (7, String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.status.signal(), Some(bus), "{output:?}");
    let (at, len) = (20 * page() + 5, 64 * page());
    let line = said.lines().find(|line| line.starts_with("uzone: SIGBUS")).expect(&said);
    assert!(line.contains(&format!("at byte {at:#x} of the {len} bytes")), "{line}");
    assert!(line.ends_with("this page is lost"), "{line}");
}

#[test]
fn populating_what_is_cached_maps_that_and_no_more() {
    let (backing, gate, _) = Stalling::new(5 * page());
    let Some(memory) = map("populating", 1024 * page(), backing, &LazyOptions::default()) else {
        return;
    };
    assert_eq!(memory.populate_cached(0..1024 * page()).unwrap(), 1023);
    assert_eq!(memory.content(5 * page()), Some(Content::Absent));
    assert_eq!(memory.populate_cached(0..1024 * page()).unwrap(), 0);
    gate.open();
    assert_eq!(memory.populate(0..1024 * page()).unwrap(), 1);
    check_all(&memory);
    let stats = memory.stats();
    assert_eq!((stats.faults, stats.populated), (0, 1024));
    // Threads that populate at once, and readers, agree on which thread filled what.
    assert_eq!(memory.evict(0..1024 * page()).unwrap(), 1024);
    thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| memory.populate(0..1024 * page()).unwrap());
            scope.spawn(|| check_all(&memory));
        }
    });
}

#[test]
fn the_window_can_be_changed_while_it_is_used() {
    let options = options(Advice::Normal, 16);
    let Some(memory) = map("the_window", 4096 * page(), function(), &options) else { return };
    check_page(&memory, 0);
    settles(&memory, |stats| stats.around == 15);
    assert_eq!(memory.fault_around(), window(16));
    memory.advise(Advice::Random, window(16));
    check_page(&memory, 1000 * page());
    assert_eq!((memory.fault_around(), memory.stats().around), (FaultAround::MIN, 15));
    memory.advise(Advice::Normal, window(128));
    check_page(&memory, 2048 * page());
    // The neighbours follow the page, so they may come a little later.
    settles(&memory, |stats| stats.around == 15 + 127);
    assert_eq!(memory.content(2048 * page() + 127 * page()), Some(Content::Present));
    assert_eq!(memory.content(2048 * page() + 128 * page()), Some(Content::Absent));
    assert_eq!(memory.content(4096 * page()), None);
}

#[test]
fn a_wrong_request_is_refused_with_what_it_was_given() {
    let engine = engine();
    let options = LazyOptions::default();
    let backing = || Arc::new(FileBacking::new(file_of(2 * page())).unwrap());
    let error = engine.map(ByteLen::new(3 * page()), backing(), &options).unwrap_err();
    assert!(error.to_string().starts_with("cannot map 12 KiB"), "{error}");
    for len in [page() + 1, page() / 2] {
        assert!(matches!(
            engine.map(ByteLen::new(len), backing(), &options),
            Err(MapError::CutsPage { .. } | MapError::Open(_))
        ));
    }
    assert!(matches!(engine.map(ByteLen::ZERO, backing(), &options), Err(MapError::Map(_))));
    let file = Arc::new(Mapping::memfd("x", ByteLen::new(page()), None).unwrap());
    let memory = MemoryBacking::new(file, Sharing::Shared).unwrap();
    let huge = LazyOptions::default().huge(PageSize::MIB_2);
    assert!(matches!(
        engine.map(ByteLen::new(page()), Arc::new(memory), &huge),
        Err(MapError::Backing { .. })
    ));
    let anonymous = Mapping::anonymous(ByteLen::new(page()), uzone_os::Anonymous::default());
    assert!(matches!(
        MemoryBacking::new(Arc::new(anonymous.unwrap()), Sharing::Shared),
        Err(MapError::Backing { .. })
    ));
    let Some(memory) = map_with("a_wrong_request", &engine, 4 * page(), ZeroBacking, &options)
    else {
        return;
    };
    let backwards = std::ops::Range { start: page(), end: 0 };
    for range in [0..0, backwards, 0..5 * page(), 1..page(), 0..page() + 1] {
        assert!(matches!(memory.evict(range.clone()), Err(LazyError::Access(_))), "{range:?}");
        assert!(memory.populate(range.clone()).is_err(), "{range:?}");
    }
    assert!(memory.read_at(4 * page(), &mut [0]).is_err());
    assert!(memory.write_at(4 * page() - 1, &[0, 0]).is_err());
    assert!(format!("{memory:?} {engine:?}").contains("LazyMapping"));
}

#[test]
fn a_pin_produces_what_is_missing_and_keeps_it_until_it_goes() {
    let name = "a pin of absent pages";
    let Some(memory) = map(name, 64 * page(), function(), &LazyOptions::default()) else { return };
    let pinned = memory.pin(3 * page() + 5..7 * page()).unwrap();
    assert_eq!(pinned.pfns().count(), 4);
    for at in 3..7 {
        assert_eq!(memory.content(at * page()), Some(Content::Present), "page {at}");
    }
    let segment = pinned.segments().next().unwrap();
    assert_eq!(segment.address, memory.addr().get() + usize_of(3 * page()));
    // What is pinned is not given back, and what is beside it is.
    memory.populate(0..64 * page()).unwrap();
    assert_eq!(memory.evict(0..64 * page()).unwrap(), 60);
    assert_eq!(memory.stats().faults, 0);
    check_all(&memory);
    // By address, through the zone.
    let other = engine();
    let mapped = other.map(ByteLen::new(8 * page()), Arc::new(function()), &LazyOptions::default());
    let mapped = mapped.unwrap();
    let address = mapped.addr().get();
    let by_address = other.zone().pin(address, ByteLen::new(2 * page())).unwrap();
    assert_eq!(mapped.stats().populated, 2);
    // The memory outlives the mapping as long as it is pinned.
    drop(mapped);
    drop(by_address);
    assert!(matches!(memory.pin(64 * page()..65 * page()), Err(LazyError::Access(_))));
    assert!(matches!(memory.pin(5..5), Err(LazyError::Access(_))));
    drop((pinned, memory));
}

#[test]
fn a_pin_of_a_page_that_cannot_be_had_is_refused_with_the_reason() {
    let name = "a pin of a failing page";
    let failing = failing_at(5 * page());
    let Some(memory) = map(name, 16 * page(), failing, &LazyOptions::default()) else { return };
    let error = memory.pin(4 * page()..8 * page()).unwrap_err();
    let text =
        std::iter::successors(Some(&error as &dyn std::error::Error), |error| error.source())
            .map(ToString::to_string)
            .collect::<Vec<_>>()
            .join(": ");
    assert!(text.contains("this page is lost"), "{text}");
    assert_eq!(memory.content(5 * page()), Some(Content::Poisoned));
    // The good pieces are pinned as before.
    drop(memory.pin(4 * page()..5 * page()).unwrap());
    drop(memory.pin(6 * page()..16 * page()).unwrap());
    let error = memory.pin(5 * page()..6 * page()).unwrap_err();
    assert!(matches!(error, LazyError::Hold(_)), "{error}");
}

/// Returns whether core dumps leave out the memory at an address, by its flags.
fn is_left_out_of_dumps(address: usize) -> bool {
    let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let mut lines = smaps.lines().skip_while(|line| !line.starts_with(&format!("{address:x}-")));
    lines.find(|line| line.starts_with("VmFlags:")).unwrap().split(' ').any(|flag| flag == "dd")
}

#[test]
fn lazy_memory_is_left_out_of_core_dumps_unless_they_are_to_have_it() {
    let name = "lazy_memory_is_left_out_of_core_dumps_unless_they_are_to_have_it";
    let len = 16 * page();
    for dumps in [false, true] {
        let options = LazyOptions::default().dumps(dumps);
        let Some(memory) = map(name, len, function(), &options) else { return };
        assert_eq!(is_left_out_of_dumps(memory.addr().get()), !dumps);
        check_all(&memory);
        assert_eq!(is_left_out_of_dumps(memory.addr().get()), !dumps, "its pages change that");
    }
}
