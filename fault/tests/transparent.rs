//! Memory in transparent huge pages: filled whole, installed whole, and never a wrong byte.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail by panicking, as tests do")]

mod common;

use std::fs::File;
use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use common::{
    HUGE, Stalling, anonymous_huge, bytes_of, check_all, check_page, engine, file_of, file_with,
    fill_wanted, function, has_huge_pages, map, page, scattered, scattered_until, settles, skip,
    try_page, usize_of, wait_for, word, word_in, words,
};
use uzone_fault::{
    Backing, BackingError, CompositeBacking, FileBacking, HugePages, LazyError, LazyMapping,
    LazyOptions, MapError, MemoryBacking, Window, WriteTracking, ZeroBacking,
};
use uzone_os::{Mapping, Sharing, page_cache};
use uzone_pages::{Advice, ByteLen, Content, PageSize};

fn options() -> LazyOptions {
    LazyOptions::default().huge(HugePages::Transparent)
}

/// Maps in huge pages, or prints why the case cannot run.
fn map_huge(name: &str, len: u64, backing: impl Backing + 'static) -> Option<LazyMapping> {
    if !has_huge_pages(name) {
        return None;
    }
    map(name, &engine(), len, backing, &options())
}

fn forget(file: &File) {
    let len = NonZeroU64::new(file.metadata().unwrap().len()).unwrap();
    page_cache::forget(file, 0, len).unwrap();
}

/// Returns whether the host had a free huge page each time, and prints it if not.
fn all_are_huge(name: &str, memory: &LazyMapping, pages: u64) -> bool {
    // One is counted a moment after it is seen.
    let give_up = Instant::now() + Duration::from_secs(10);
    while Instant::now() < give_up {
        if memory.stats().huge_pages == pages {
            return true;
        }
        thread::sleep(Duration::from_millis(1));
    }
    skip(name, &format!("the host has no free huge pages: {:?}", memory.stats()));
    false
}

#[test]
fn a_touch_fills_a_huge_page_from_every_backing() {
    let name = "a_touch_fills_a_huge_page";
    let len = 4 * HUGE;
    let parts: Vec<(_, Arc<dyn Backing>, _)> = vec![
        (0..HUGE, Arc::new(function()), 0),
        (HUGE..len, Arc::new(FileBacking::new(file_of(len)).unwrap()), HUGE),
    ];
    let parts = CompositeBacking::of_parts(PageSize::try_from_bytes(HUGE).unwrap(), parts).unwrap();
    let slow = common::slow();
    let backings: [(&str, Arc<dyn Backing>); 4] = [
        ("function", Arc::new(function())),
        ("slow function", Arc::new(slow)),
        ("file", Arc::new(FileBacking::new(file_of(len)).unwrap())),
        ("composite", Arc::new(parts)),
    ];
    if !has_huge_pages(name) {
        return;
    }
    let engine = engine();
    for (which, backing) in backings {
        for advice in [Advice::Auto, Advice::Random, Advice::Sequential] {
            let options = options().advice(advice);
            let memory = match engine.map(ByteLen::new(len), backing.clone(), &options) {
                Ok(memory) => memory,
                Err(MapError::Open(error)) => return skip(name, &error.to_string()),
                Err(error) => panic!("{which}: {error:?}"),
            };
            assert_eq!((memory.page_size().bytes(), anonymous_huge(&memory)), (HUGE, 0));
            // One in the middle, and one at an end, by a write.
            check_page(&memory, HUGE + 77 * page());
            settles(&memory, |stats| stats.huge_pages <= 1 && stats.faults == 1);
            memory.write_at(len - 8, &[9; 8]).unwrap();
            settles(&memory, |stats| stats.faults == 2);
            assert_eq!(bytes_of(&memory, len - 8, 8), [9; 8], "{which}");
            assert_eq!(memory.content(0), Some(Content::Absent), "{which}");
            wait_for(which, || memory.content(2 * HUGE - 1) == Some(Content::Present));
            for at in (0..len - page()).step_by(usize_of(page())) {
                check_page(&memory, at);
            }
            // However it is read, as many faults as huge pages, and none beside them.
            assert_eq!(memory.stats().faults, 4, "{which}");
            if !all_are_huge(name, &memory, 4) {
                return;
            }
            assert_eq!(anonymous_huge(&memory), len, "{which}");
        }
    }
}

#[test]
fn the_last_page_is_filled_in_part_and_zero_behind_that() {
    let name = "the_last_page_is_filled_in_part";
    let len = HUGE + 5 * page() + 100;
    for is_cold in [false, true] {
        let file = file_with(&words(len));
        if is_cold {
            forget(&file);
        }
        let Some(memory) = map_huge(name, 2 * HUGE, FileBacking::new(file).unwrap()) else {
            return;
        };
        let mut expected = words(2 * HUGE);
        expected[usize_of(len)..].fill(0);
        assert!(bytes_of(&memory, 0, 2 * HUGE) == expected);
    }
    let backing = FileBacking::new(file_with(&words(len))).unwrap();
    let refused = engine().map(ByteLen::new(3 * HUGE), Arc::new(backing), &options());
    assert!(matches!(refused, Err(MapError::TooShort { .. })), "{refused:?}");
}

#[test]
fn a_cold_file_is_read_a_huge_page_at_a_time() {
    let name = "a_cold_file_is_read";
    let file = file_of(4 * HUGE);
    forget(&file);
    let Some(memory) = map_huge(name, 4 * HUGE, FileBacking::new(file).unwrap()) else { return };
    for at in [HUGE, 3 * HUGE, 0, 2 * HUGE] {
        check_page(&memory, at + 99 * page());
    }
    check_all(&memory);
    assert_eq!((memory.stats().faults, memory.stats().poisoned), (4, 0));
    if all_are_huge(name, &memory, 4) {
        assert_eq!(anonymous_huge(&memory), 4 * HUGE);
    }
}

#[test]
fn zeroes_take_no_memory_until_they_are_written_or_made_huge() {
    let name = "zeroes_take_no_memory";
    let Some(memory) = map_huge(name, 2 * HUGE, ZeroBacking) else { return };
    assert!(bytes_of(&memory, 0, 2 * HUGE).iter().all(|&byte| byte == 0));
    // It is counted a moment after the reader goes on.
    settles(&memory, |stats| stats.zeroes == 2);
    assert_eq!(anonymous_huge(&memory), 0);
    memory.write_at(HUGE + 8, &[1; 8]).unwrap();
    let done = memory.collapse(0..2 * HUGE).unwrap();
    if done.skipped != 0 {
        return skip(name, &format!("the host has no free huge pages: {done:?}"));
    }
    assert_eq!((done.huge_pages, done.made, anonymous_huge(&memory)), (2, 2, 2 * HUGE));
    assert_eq!(bytes_of(&memory, HUGE + 8, 9), [1, 1, 1, 1, 1, 1, 1, 1, 0]);
}

#[test]
fn huge_pages_are_evicted_populated_and_pinned_whole() {
    let name = "huge_pages_are_evicted";
    let len = 4 * HUGE;
    let Some(memory) = map_huge(name, len, function()) else { return };
    assert!(matches!(memory.evict(0..page()), Err(LazyError::Access(_))), "it cuts a page");
    assert_eq!(memory.populate_cached(0..len).unwrap(), 4);
    assert_eq!(memory.populate(0..len).unwrap(), 0);
    let pinned = memory.pin(2 * HUGE + 100..2 * HUGE + 200).unwrap();
    assert_eq!(memory.evict(0..len).unwrap(), 3);
    drop(pinned);
    assert_eq!(memory.content(2 * HUGE), Some(Content::Present));
    assert_eq!(memory.evict(0..len).unwrap(), 1);
    assert_eq!(anonymous_huge(&memory), 0);
    // What is absent is made present for a pin.
    let pinned = memory.pin(HUGE - 8..HUGE + 8).unwrap();
    assert_eq!(memory.stats().faults, 0);
    drop(pinned);
    check_all(&memory);
    assert_eq!(memory.stats().faults, 2);
    // Pages that were huge and given back are huge again.
    if all_are_huge(name, &memory, 8) {
        assert_eq!(anonymous_huge(&memory), len);
    }
}

/// Fails once, for one page.
struct FailsAt(u64, AtomicBool);

impl Backing for FailsAt {
    fn fault(&self, window: &mut Window<'_>) -> Result<(), BackingError> {
        if window.range().contains(&self.0) && !self.1.swap(true, Ordering::Relaxed) {
            // Half of it was present, and has no owner.
            let _ = window.copy_with(window.range(), |out| {
                out.fill(7);
                Ok::<_, BackingError>(out.len() / 2)
            })?;
            return Err(BackingError::Other("it broke".into()));
        }
        fill_wanted(window)
    }
}

#[test]
fn a_page_that_fails_is_bad_as_a_whole_and_none_of_its_bytes_is_shown() {
    let name = "a_page_that_fails_is_bad";
    uzone_os::sigbus::install().unwrap();
    let backing = FailsAt(HUGE + 5 * page(), AtomicBool::new(false));
    let Some(memory) = map_huge(name, 3 * HUGE, backing) else { return };
    for at in [HUGE, HUGE + 5 * page(), 2 * HUGE - page()] {
        try_page(&memory, at).unwrap_err();
    }
    assert_eq!(memory.stats().poisoned, 1);
    let refused = memory.populate(HUGE..2 * HUGE);
    assert!(matches!(refused, Err(LazyError::Poisoned { offset: HUGE })), "{refused:?}");
    // The next one is made in the same slot.
    for at in (0..HUGE).chain(2 * HUGE..3 * HUGE).step_by(usize_of(page())) {
        check_page(&memory, at);
    }
}

#[test]
fn a_stalled_page_holds_up_no_other() {
    let name = "a_stalled_huge_page";
    let (backing, gate, asked) = Stalling::new(HUGE);
    let Some(memory) = map_huge(name, 4 * HUGE, backing) else { return };
    thread::scope(|scope| {
        let waits = scope.spawn(|| check_page(&memory, HUGE + 3 * page()));
        wait_for("the stalled page", || asked.load(Ordering::SeqCst) == 1);
        for at in [0, 2 * HUGE, 3 * HUGE] {
            check_page(&memory, at + page());
        }
        assert!(!waits.is_finished());
        gate.open();
    });
    check_all(&memory);
}

#[test]
fn readers_see_right_bytes_while_pages_are_evicted_populated_and_collapsed() {
    let name = "readers_see_right_bytes_in_huge_pages";
    let pages = 6;
    let len = pages * HUGE;
    let Some(memory) = map_huge(name, len, function()) else { return };
    let (stop, seen) = (AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|scope| {
        for seed in 0..3 {
            let (memory, stop, seen) = (&memory, &stop, &seen);
            scope.spawn(move || {
                for at in scattered_until(stop, seed + 11, len / 8) {
                    assert_eq!(word_in(memory, at * 8), word(at * 8), "at {:#x}", at * 8);
                    seen.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        scope.spawn(|| {
            for at in scattered_until(&stop, 5, pages) {
                memory.populate(at * HUGE..(at + 1) * HUGE).unwrap();
            }
        });
        let until = Instant::now() + Duration::from_secs(1);
        for at in scattered(1, pages).take_while(|_| Instant::now() <= until) {
            memory.evict(at * HUGE..(at + 1) * HUGE).unwrap();
            if at == 0 {
                memory.collapse(0..len).unwrap();
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
    let stats = memory.stats();
    eprintln!("{} reads, {stats:?}", seen.load(Ordering::Relaxed));
    assert_eq!(stats.poisoned, 0);
    check_all(&memory);
}

#[test]
fn what_cannot_have_them_is_refused() {
    let name = "what_cannot_have_transparent_huge_pages";
    if !has_huge_pages(name) {
        return;
    }
    let engine = engine();
    for track in [WriteTracking::Async, WriteTracking::Sync] {
        let options = options().track_writes(track);
        let refused = engine.map(ByteLen::new(HUGE), Arc::new(function()), &options);
        assert!(matches!(refused, Err(MapError::Backing { .. })), "{refused:?}");
    }
    let file = Arc::new(Mapping::memfd("transparent", ByteLen::new(HUGE), None).unwrap());
    let backing = Arc::new(MemoryBacking::new(file, Sharing::Shared).unwrap());
    let refused = engine.map(ByteLen::new(HUGE), backing, &options());
    assert!(matches!(refused, Err(MapError::Backing { .. })), "{refused:?}");
    let refused = engine.map(ByteLen::new(HUGE + page()), Arc::new(function()), &options());
    assert!(matches!(refused, Err(MapError::CutsPage { .. })), "{refused:?}");
}
