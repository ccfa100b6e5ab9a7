//! What comes along with a page that is touched, and what is left alone, as Linux's `filemap_map_pages` has it
//! (mm/filemap.c) and as far as the engine answers for it. (The windows themselves are pure:
//! `pages/src/window.rs`.)

use std::num::NonZeroU64;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Barrier, OnceLock, Weak};
use std::thread;

use crate::common::{
    Stalling, bytes_of, check_all, check_page, engine, failing_at, file_of, fill_but, fill_wanted,
    function, map, mapped, options, or_skip, page, settles, skip, wait_for, write_words,
};
use uzone_fault::{Backing, BackingError, FileBacking, LazyMapping, Window};
use uzone_os::page_cache;
use uzone_pages::{Advice, ByteLen, Content};

fn present(memory: &LazyMapping) -> Vec<u64> {
    let pages = 0..memory.len().get() / page();
    pages.filter(|at| memory.content(at * page()) == Some(Content::Present)).collect()
}

#[test]
fn what_the_page_cache_does_not_have_is_left_alone() {
    let name = "what_the_page_cache_does_not_have_is_left_alone";
    let (pages, touched) = (1024, 700);
    let file = file_of(pages * page());
    let len = NonZeroU64::new(pages * page()).unwrap();
    page_cache::forget(&file, 0, len).unwrap();
    if page_cache::cached(&file, 0, len).unwrap() != Some(0) {
        return skip(name, "this file system keeps cached pages after POSIX_FADV_DONTNEED");
    }
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::Random).unwrap();
    // One page is there, in the middle of nowhere.
    let mut one = vec![0; usize::try_from(page()).unwrap()];
    std::os::unix::fs::FileExt::read_exact_at(&file, &mut one, touched * page()).unwrap();
    let cached: Vec<u64> = (0..pages)
        .filter(|at| {
            let one = NonZeroU64::new(page()).unwrap();
            page_cache::cached(&file, at * page(), one).unwrap() == Some(1)
        })
        .collect();
    let backing = FileBacking::new(file.try_clone().unwrap()).unwrap();
    let engine = engine();
    let options = options(Advice::Normal, 512);
    let Some(memory) = map(name, &engine, pages * page(), backing, &options) else { return };
    check_page(&memory, touched * page());
    settles(&memory, |stats| stats.demand == 1);
    thread::sleep(std::time::Duration::from_millis(20));
    settles(&memory, |_| present(&memory).contains(&touched));
    let present = present(&memory);
    assert!(present.iter().all(|at| cached.contains(at)), "{present:?} of {cached:?}");
    assert_eq!(memory.stats().queued, 0, "no thread waited for a device");
    let now = page_cache::cached(&file, 0, len).unwrap();
    assert_eq!(now, Some(cached.len() as u64), "and the device was asked for no neighbour");
}

/// Bytes that are ready, and how often some or one of them were asked for.
#[derive(Default)]
struct Counted {
    offered: AtomicU64,
    alone: AtomicU64,
}

impl Backing for Counted {
    fn map_pages(&self, window: &mut Window<'_>) {
        self.offered.fetch_add(1, Ordering::Relaxed);
        fill_but(window, |_| false);
    }

    fn fault(&self, window: &mut Window<'_>) -> Result<(), BackingError> {
        self.alone.fetch_add(1, Ordering::Relaxed);
        fill_wanted(window)
    }
}

#[test]
fn a_pin_asks_for_what_is_ready_of_its_range_at_once() {
    let name = "a_pin_asks_for_what_is_ready_of_its_range_at_once";
    let (engine, pages) = (engine(), 1024);
    let backing = Arc::new(Counted::default());
    let options = options(Advice::Random, 1);
    let answer = engine.map(ByteLen::new(pages * page()), backing.clone(), &options);
    let Some(memory) = mapped(name, answer) else { return };
    let pinned = memory.pin(3 * page()..pages * page()).unwrap();
    let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    // Two windows of 2 MiB, not a call for each of 1,021 pages.
    assert!((1..=3).contains(&count(&backing.offered)), "{}", count(&backing.offered));
    assert_eq!(count(&backing.alone), 0);
    assert_eq!(present(&memory), (3..pages).collect::<Vec<_>>());
    drop(pinned);
}

#[test]
fn a_page_that_another_thread_produces_is_left_to_it() {
    let name = "a_page_that_another_thread_produces_is_left_to_it";
    let (backing, gate, asked) = Stalling::new(20 * page());
    let engine = engine();
    let options = options(Advice::Normal, 16);
    let Some(memory) = map(name, &engine, 64 * page(), backing, &options) else { return };
    thread::scope(|scope| {
        scope.spawn(|| check_page(&memory, 20 * page()));
        wait_for("the fault", || memory.stats().queued == 1);
        // Its neighbours are there already or come with another fault of the window.
        check_page(&memory, 25 * page());
        settles(&memory, |stats| stats.demand + stats.around == 15);
        assert_eq!(memory.content(20 * page()), Some(Content::Filling));
        gate.open();
    });
    settles(&memory, |_| memory.content(20 * page()) == Some(Content::Present));
    assert_eq!(asked.load(Ordering::SeqCst), 1, "the ordinary fault is called once");
    settles(&memory, |_| present(&memory) == (16..32).collect::<Vec<_>>());
}

#[test]
fn what_is_there_or_bad_stays_as_it_is() {
    let name = "what_is_there_or_bad_stays_as_it_is";
    let engine = engine();
    let (failing, options) = (failing_at(18 * page()), options(Advice::Normal, 16));
    let Some(memory) = map(name, &engine, 64 * page(), failing, &options) else { return };
    memory.write_at(20 * page(), &[7; 8]).unwrap();
    memory.populate(18 * page()..19 * page()).unwrap_err();
    settles(&memory, |_| present(&memory) == [20]);
    check_page(&memory, 25 * page());
    // A run in which a page fails stays open as a whole; the other pages come when they are touched.
    for at in (16..32).filter(|at| ![18, 20].contains(at)) {
        check_page(&memory, at * page());
    }
    assert_eq!(bytes_of(&memory, 20 * page(), 8), [7; 8]);
    assert_eq!(memory.content(18 * page()), Some(Content::Poisoned));
    assert_eq!(memory.stats().poisoned, 1);
}

#[test]
fn one_touch_of_each_page_table_maps_a_window_of_it_and_no_more() {
    let name = "one_touch_of_each_page_table";
    let (tables, engine) = (8, engine());
    for (advice, size, expected) in [
        (Advice::Random, 16, 1),
        (Advice::Normal, 1, 1),
        (Advice::Normal, 16, 16),
        (Advice::Normal, 128, 128),
        (Advice::Normal, 512, 512),
    ] {
        let options = options(advice, size);
        let len = tables * 512 * page();
        let Some(memory) = map(name, &engine, len, function(), &options) else { return };
        for table in 0..tables {
            check_page(&memory, (table * 512 + 77) * page());
        }
        settles(&memory, |stats| stats.demand + stats.around == tables * expected);
        let stats = memory.stats();
        assert_eq!((stats.faults, stats.demand), (tables, tables), "{advice:?} {size}: {stats:?}");
        settles(&memory, |_| present(&memory).len() as u64 == tables * expected);
    }
}

#[test]
fn a_window_ends_where_the_file_or_the_mapping_does() {
    let name = "a_window_ends_where_the_file_or_the_mapping_does";
    let engine = engine();
    // The mapping is shorter than a window, and the file ends inside of its last page.
    for (file_bytes, pages) in [(5 * page() + 100, 6), (64 * page(), 6), (page(), 1), (100, 1)] {
        let backing = FileBacking::new(file_of(file_bytes)).unwrap();
        let options = options(Advice::Normal, 16);
        let Some(memory) = map(name, &engine, pages * page(), backing, &options) else { return };
        assert_eq!(crate::common::word_in(&memory, 0), crate::common::word(0));
        settles(&memory, |stats| stats.demand + stats.around == pages);
        let all = bytes_of(&memory, 0, pages * page());
        assert_eq!(memory.stats().faults, 1, "{file_bytes}");
        let inside = usize::try_from(file_bytes.min(pages * page())).unwrap();
        let mut expected = crate::common::words(file_bytes.min(pages * page()));
        expected.resize(all.len(), 0);
        assert!(all == expected, "{inside} bytes of the file, then zeroes");
    }
    // A file that became shorter ends a window too, and what is behind its end is not made up.
    let file = file_of(64 * page());
    let backing = FileBacking::new(file.try_clone().unwrap()).unwrap();
    let Some(memory) = map(name, &engine, 64 * page(), backing, &options(Advice::Normal, 16))
    else {
        return;
    };
    file.set_len(8 * page()).unwrap();
    check_page(&memory, 3 * page());
    thread::sleep(std::time::Duration::from_millis(20));
    assert!(present(&memory).iter().all(|at| *at < 8), "{:?}", present(&memory));
}

#[test]
fn faults_at_once_in_one_window_map_each_page_once() {
    let name = "faults_at_once_in_one_window";
    let (threads, windows) = (8, 64);
    let engine = engine();
    let options = options(Advice::Normal, 16);
    let Some(memory) = map(name, &engine, windows * 16 * page(), function(), &options) else {
        return;
    };
    let (memory, together) = (&memory, &Barrier::new(threads));
    thread::scope(|scope| {
        for thread in 0..threads as u64 {
            scope.spawn(move || {
                for window in 0..windows {
                    together.wait();
                    check_page(memory, (window * 16 + thread * 2) * page());
                }
            });
        }
    });
    check_all(memory);
    settles(memory, |stats| stats.demand + stats.around >= windows * 16);
    let stats = memory.stats();
    // A page that was installed twice would be counted twice.
    assert_eq!(stats.demand + stats.around, windows * 16, "{stats:?}");
    assert!(stats.faults >= windows, "{stats:?}");
}

/// Has another thread evict the window's pages, and all others, while they are being filled.
struct Evicting {
    memory: OnceLock<Weak<LazyMapping>>,
    is_evicting: AtomicBool,
}

impl Backing for Evicting {
    fn map_pages(&self, window: &mut Window<'_>) {
        while let Some(run) = window.next_run() {
            let start = run.start;
            let _ = window.copy_with(run, |out| {
                write_words(start, out);
                let memory = self.memory.get().and_then(Weak::upgrade);
                if let Some(memory) = memory
                    && self.is_evicting.load(Ordering::Relaxed)
                {
                    let end = memory.len().get();
                    // In a thread of its own, as a cache that is short of room would; it is waited
                    // for, so that it happens in the middle of this.
                    let evicting = thread::spawn(move || memory.evict(0..end).unwrap());
                    evicting.join().unwrap();
                }
                Ok::<_, BackingError>(out.len())
            });
        }
    }

    fn fault(&self, window: &mut Window<'_>) -> Result<(), BackingError> {
        fill_wanted(window)
    }
}

#[test]
fn pages_that_are_evicted_while_others_are_mapped_come_back() {
    let name = "pages_that_are_evicted_while_others_are_mapped_come_back";
    let engine = engine();
    let backing = Arc::new(Evicting { memory: OnceLock::new(), is_evicting: true.into() });
    let options = options(Advice::Normal, 16);
    let memory = engine.map(ByteLen::new(256 * page()), backing.clone(), &options);
    let Some(memory) = or_skip(name, memory).map(Arc::new) else { return };
    backing.memory.set(Arc::downgrade(&memory)).unwrap();
    thread::scope(|scope| {
        for seed in 0..3 {
            let memory = &memory;
            scope.spawn(move || {
                for at in crate::common::scattered(seed + 1, 256).take(200) {
                    check_page(memory, at * page());
                }
            });
        }
    });
    backing.is_evicting.store(false, Ordering::Relaxed);
    check_all(&memory);
    assert!(memory.stats().evicted > 0);
    assert_eq!(memory.stats().poisoned, 0);
}

#[test]
fn threads_that_read_in_step_have_each_page_filled_once() {
    let name = "threads_that_read_in_step_have_each_page_filled_once";
    let (pages, threads) = (200, 32);
    let backing = FileBacking::new(file_of(pages * page())).unwrap();
    let engine = engine();
    let options = options(Advice::Random, 1);
    let Some(memory) = map(name, &engine, pages * page(), backing, &options) else { return };
    let (memory, together) = (&memory, &Barrier::new(threads));
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(move || {
                for at in 0..pages {
                    together.wait();
                    check_page(memory, at * page());
                }
            });
        }
    });
    // A page is counted a moment after its waiter is woken.
    settles(memory, |stats| stats.demand == pages);
    assert_eq!(memory.stats().around, 0);
}
