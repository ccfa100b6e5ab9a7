//! What is filled becomes huge pages, and no byte of it changes.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::common::{
    HUGE, Pool, anonymous_huge, bytes_of, engine, function, has_huge_pages, map, memfd_of, page,
    scattered, scattered_until, skip, usize_of, wait_for, word_in, words,
};
use uzone_fault::{
    Backing, BackingError, LazyMapping, LazyOptions, MemoryBacking, Uncollapsed, Window,
    WriteTracking,
};
use uzone_os::Sharing;
use uzone_pages::PageSize;

fn check_all(memory: &LazyMapping, expected: &[u8]) {
    for at in (0..memory.len().get()).step_by(usize_of(page())) {
        let seen = bytes_of(memory, at, page());
        assert!(seen == expected[usize_of(at)..][..seen.len()], "wrong bytes at {at:#x}");
    }
}

#[test]
fn what_is_filled_wholly_becomes_huge_and_the_rest_says_why_not() {
    let name = "what_is_filled_wholly_becomes_huge";
    if !has_huge_pages(name) {
        return;
    }
    let len = 4 * HUGE;
    let Some(memory) = map(name, &engine(), len, function(), &LazyOptions::default()) else {
        return;
    };
    let done = memory.collapse(0..len).unwrap();
    assert_eq!((done.huge_pages, done.skipped), (0, 4), "nothing is there: {done:?}");
    memory.populate(0..len).unwrap();
    assert_eq!(memory.evict(HUGE + 7 * page()..HUGE + 8 * page()).unwrap(), 1);
    assert_eq!(anonymous_huge(&memory), 0);
    let start = Instant::now();
    let done = memory.collapse(0..len).unwrap();
    if done.reasons.contains_key(&Uncollapsed::NotNow) {
        return skip(name, &format!("the host has no free huge pages: {done:?}"));
    }
    eprintln!("{} huge pages were made in {:?}", done.made, start.elapsed());
    assert_eq!((done.huge_pages, done.made, done.skipped), (3, 3, 1), "{done:?}");
    assert_eq!(done.reasons.get(&Uncollapsed::NotFilled), Some(&1));
    assert_eq!(anonymous_huge(&memory), 3 * HUGE);
    // Parts at the ends are none.
    let done = memory.collapse(page()..2 * HUGE - page()).unwrap();
    assert_eq!((done.huge_pages, done.skipped), (0, 0));
    check_all(&memory, &words(len));
    // By now the page that was missing is there.
    wait_for("the page", || memory.collapse(0..len).unwrap().huge_pages == 4);
    assert_eq!((anonymous_huge(&memory), memory.stats().collapsed), (len, 4));
    // A page can be taken out of it again.
    assert_eq!(memory.evict(page()..2 * page()).unwrap(), 1);
    assert_eq!(anonymous_huge(&memory), 3 * HUGE);
    check_all(&memory, &words(len));
    assert!(memory.collapse(0..len + page()).is_err());
}

/// Zeroes, and words from the hundredth page on.
struct StartsWithZeroes;

impl Backing for StartsWithZeroes {
    fn fault(&self, window: &mut Window<'_>) -> Result<(), BackingError> {
        if window.range().start < 100 * page() {
            let _ = window.zero(window.range())?;
            return Ok(());
        }
        crate::common::fill_wanted(window)
    }
}

#[test]
fn zeroes_become_memory_and_the_bytes_around_them_stay() {
    let name = "zeroes_become_memory";
    if !has_huge_pages(name) {
        return;
    }
    let options = LazyOptions::default();
    let Some(memory) = map(name, &engine(), HUGE, StartsWithZeroes, &options) else { return };
    memory.populate(0..HUGE).unwrap();
    let done = memory.collapse(0..HUGE).unwrap();
    if done.reasons.contains_key(&Uncollapsed::NotNow) {
        return skip(name, &format!("the host has no free huge pages: {done:?}"));
    }
    assert_eq!((done.made, anonymous_huge(&memory)), (1, HUGE), "{done:?}");
    let mut expected = words(HUGE);
    expected[..usize_of(100 * page())].fill(0);
    check_all(&memory, &expected);
}

#[test]
fn readers_and_writers_go_on_while_pages_are_collapsed_and_evicted() {
    let name = "readers_and_writers_go_on";
    if !has_huge_pages(name) {
        return;
    }
    let len = 3 * HUGE;
    let Some(memory) = map(name, &engine(), len, function(), &LazyOptions::default()) else {
        return;
    };
    let stop = AtomicBool::new(false);
    let mut made = 0;
    thread::scope(|scope| {
        for seed in 0..2 {
            let (memory, stop) = (&memory, &stop);
            scope.spawn(move || {
                // The last 8 bytes of a page of the first 2 MiB are this thread's to write, and no thread
                // evicts them.
                let mut last = vec![None; 512];
                for (turn, at) in (1_u64..).zip(scattered_until(stop, seed + 3, len / page())) {
                    let offset = at * page() + seed * 8;
                    assert_eq!(word_in(memory, offset), crate::common::word(offset));
                    if at < 512 && at % 2 == seed {
                        let offset = (at + 1) * page() - 8;
                        let expected = last[usize_of(at)].unwrap_or(crate::common::word(offset));
                        assert_eq!(word_in(memory, offset), expected, "page {at}");
                        memory.write_at(offset, &turn.to_ne_bytes()).unwrap();
                        last[usize_of(at)] = Some(turn);
                    }
                }
            });
        }
        let until = Instant::now() + Duration::from_millis(600);
        for at in scattered(1, 1024).take_while(|_| Instant::now() <= until) {
            made += memory.collapse(0..len).unwrap().made;
            let at = HUGE + at * page();
            memory.evict(at..at + page()).unwrap();
            memory.populate(0..len).unwrap();
        }
        stop.store(true, Ordering::Relaxed);
    });
    eprintln!("{made} huge pages were made");
    assert_eq!((memory.stats().poisoned, memory.stats().collapsed), (0, made));
}

#[test]
fn memory_that_cannot_be_collapsed_says_why() {
    let name = "memory_that_cannot_be_collapsed";
    if !has_huge_pages(name) {
        return;
    }
    for track in [WriteTracking::Async, WriteTracking::Sync] {
        let options = LazyOptions::default().track_writes(track);
        let Some(memory) = map(name, &engine(), HUGE, function(), &options) else { return };
        memory.populate(0..HUGE).unwrap();
        let done = memory.collapse(0..HUGE).unwrap();
        assert_eq!(done.reasons.get(&Uncollapsed::WritesTracked), Some(&1), "{done:?}");
        assert_eq!(memory.dirty(0..HUGE).unwrap(), []);
    }
    for sharing in [Sharing::Shared, Sharing::Private] {
        let backing = MemoryBacking::new(memfd_of(2 * HUGE), sharing).unwrap();
        let Some(memory) = map(name, &engine(), 2 * HUGE, backing, &LazyOptions::default()) else {
            return;
        };
        memory.populate(0..2 * HUGE).unwrap();
        let done = memory.collapse(0..2 * HUGE).unwrap();
        assert_eq!(done.huge_pages, 0, "{done:?}");
        assert_eq!(done.reasons.get(&Uncollapsed::MemoryFile), Some(&done.skipped));
        check_all(&memory, &words(2 * HUGE));
    }
    let Some(_pool) = Pool::grow(name, PageSize::MIB_2, 2) else { return };
    let options = LazyOptions::default().huge(PageSize::MIB_2);
    let Some(memory) = map(name, &engine(), 2 * HUGE, function(), &options) else { return };
    memory.populate(0..HUGE).unwrap();
    let done = memory.collapse(0..2 * HUGE).unwrap();
    assert_eq!((done.huge_pages, done.made, done.skipped), (1, 0, 0));
}

#[test]
fn a_pinned_page_is_not_moved_into_a_huge_one() {
    let name = "a_pinned_page_is_not_moved_into_a_huge_one";
    if !has_huge_pages(name) {
        return;
    }
    let len = 2 * HUGE;
    let Some(memory) = map(name, &engine(), len, function(), &LazyOptions::default()) else {
        return;
    };
    memory.populate(0..len).unwrap();
    let pinned = memory.pin(HUGE + 5 * page()..HUGE + 6 * page()).unwrap();
    let done = memory.collapse(0..len).unwrap();
    let behind = memory.collapse(HUGE..len).unwrap();
    assert_eq!((behind.huge_pages, behind.made), (0, 0), "{behind:?}");
    assert_eq!(behind.reasons.get(&Uncollapsed::NotNow), Some(&1));
    assert!(done.huge_pages <= 1, "{done:?}");
    drop(pinned);
    // Every page can be pinned again, also those that were given up half way.
    drop(memory.pin(0..len).unwrap());
    if done.huge_pages == 0 {
        return skip(name, &format!("the host has no free huge pages: {done:?}"));
    }
    wait_for("the page", || memory.collapse(0..len).unwrap().huge_pages == 2);
    drop(memory.pin(0..len).unwrap());
    check_all(&memory, &words(len));
}
