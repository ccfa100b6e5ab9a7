//! What was written is known, comes back to the backing, and is never lost on the way.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail by panicking, as tests do")]
#![allow(clippy::single_range_in_vec_init, reason = "a list of one run of bytes")]

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use crate::common::{
    Gate, Pool, bytes_of, engine, file_with, function, map, page, skip, usize_of, words,
};
use proptest::prelude::*;
use uzone_fault::{
    Answer, Backing, BackingError, FileBacking, FunctionBacking, LazyError, LazyMapping,
    LazyOptions, MapError, MemoryBacking, Window, WriteTracking, ZeroBacking,
};
use uzone_os::uffd::in_thread::Source;
use uzone_os::{Mapping, Sharing};
use uzone_pages::{ByteLen, Content, PageSize};

const BOTH: [WriteTracking; 2] = [WriteTracking::Async, WriteTracking::Sync];

fn options(track: WriteTracking) -> LazyOptions {
    LazyOptions::default().track_writes(track)
}

fn memfd(len: u64) -> Arc<Mapping> {
    let file = Arc::new(Mapping::memfd("dirty", ByteLen::new(len), None).unwrap());
    // With holes, which are zero.
    for at in (0..len / page()).filter(|at| at % 4 != 0) {
        file.write_at(at * page(), &crate::common::words_at(at * page(), page())).unwrap();
    }
    file
}

/// Every kind of memory of base pages that can be tracked so, by readers and by the threads that fault.
fn memories(name: &str, track: WriteTracking, pages: u64) -> Vec<LazyMapping> {
    let len = pages * page();
    let mut memories = vec![map(name, &engine(), len, function(), &options(track))];
    for answer in [Answer::Reader, Answer::InThread] {
        let options = options(track).answer(answer);
        let of_file = |sharing| MemoryBacking::new(memfd(len), sharing).unwrap();
        memories.push(map(name, &engine(), len, ZeroBacking, &options));
        memories.push(map(name, &engine(), len, of_file(Sharing::Private), &options));
        if track == WriteTracking::Sync {
            memories.push(map(name, &engine(), len, of_file(Sharing::Shared), &options));
        }
    }
    memories.into_iter().flatten().collect()
}

fn range(pages: Range<u64>) -> Range<u64> {
    pages.start * page()..pages.end * page()
}

#[test]
fn what_was_written_is_dirty_and_what_was_only_filled_or_read_is_not() {
    for track in BOTH {
        for memory in memories("what_was_written_is_dirty", track, 256) {
            let whole = 0..256 * page();
            // By faults, with neighbours, and by populating.
            (0..64).for_each(|at| drop(bytes_of(&memory, at * page(), 8)));
            memory.populate(range(64..128)).unwrap();
            assert_eq!(memory.dirty(whole.clone()).unwrap(), [], "{track:?} {memory:?}");
            // Pages that are there, and pages that are not.
            let written = [3, 4, 70, 127, 128, 200, 255];
            for at in written {
                memory.write_at(at * page() + 9, &[1]).unwrap();
            }
            let expected =
                [range(3..5), range(70..71), range(127..129), range(200..201), range(255..256)];
            assert_eq!(memory.dirty(whole.clone()).unwrap(), expected, "{track:?} {memory:?}");
            let events = memory.stats().write_protect;
            assert_eq!(events > 0, track == WriteTracking::Sync, "{memory:?}");
            assert_eq!(memory.dirty(range(5..69)).unwrap(), []);
            assert_eq!(memory.take_dirty(range(200..256)).unwrap(), expected[3..]);
            assert_eq!(memory.dirty(range(200..256)).unwrap(), []);
            // It is dirty when it is written again, and not because it is read.
            drop(bytes_of(&memory, 255 * page(), page()));
            memory.write_at(200 * page(), &[2]).unwrap();
            assert_eq!(memory.take_dirty(range(200..256)).unwrap(), [range(200..201)]);
            // A writer is woken a moment before its page is noted.
            crate::common::wait_for("the pages", || {
                let is_there = |&at: &u64| memory.content(at * page()) == Some(Content::Present);
                written.iter().all(is_there)
            });
            // Dirty pages stay, clean ones may go and come back clean.
            match memory.evict(whole.clone()) {
                Ok(evicted) => assert!(evicted >= 100, "{evicted} {memory:?}"),
                Err(LazyError::CannotEvict { .. }) => assert_eq!(track, WriteTracking::Async),
                Err(error) => panic!("{error}"),
            }
            assert_eq!(bytes_of(&memory, 70 * page() + 9, 1), [1]);
            assert_eq!(memory.take_dirty(range(70..71)).unwrap(), [range(70..71)]);
            assert!(memory.evict_all(whole.clone()).unwrap() > 0);
            memory.populate(whole.clone()).unwrap();
            assert_eq!(memory.dirty(whole).unwrap(), [], "{track:?} {memory:?}");
        }
    }
}

#[test]
fn huge_pages_are_tracked_whole() {
    let name = "huge_pages_are_tracked_whole";
    let huge = 2 << 20;
    let Some(_pool) = Pool::grow(name, PageSize::MIB_2, 4) else { return };
    for track in BOTH {
        let options = options(track).huge(PageSize::MIB_2);
        let Some(memory) = map(name, &engine(), 4 * huge, function(), &options) else { return };
        memory.populate(0..2 * huge).unwrap();
        assert_eq!(memory.dirty(0..4 * huge).unwrap(), []);
        memory.write_at(huge + 5, &[1]).unwrap();
        memory.write_at(3 * huge, &[1]).unwrap();
        assert_eq!(
            memory.take_dirty(0..4 * huge).unwrap(),
            [huge..2 * huge, 3 * huge..4 * huge],
            "{track:?}"
        );
        memory.write_at(3 * huge, &[2]).unwrap();
        assert_eq!(memory.dirty(0..4 * huge).unwrap(), [3 * huge..4 * huge]);
        if track == WriteTracking::Sync {
            assert_eq!(memory.evict(0..4 * huge).unwrap(), 2);
        }
        assert_eq!(bytes_of(&memory, 3 * huge, 1), [2]);
    }
    // A page that was given back can be made a bad one.
    uzone_os::sigbus::install().unwrap();
    let fails = Arc::new(AtomicBool::new(false));
    let is_failing = fails.clone();
    let backing = FunctionBacking::slow(move |offset, out: &mut [u8]| {
        crate::common::write_words(offset, out);
        if is_failing.load(Ordering::Relaxed) { Err("it broke".into()) } else { Ok(()) }
            .map_err(|error: Box<dyn std::error::Error + Send + Sync>| BackingError::Other(error))
    });
    let huge_pages = PageSize::MIB_2;
    let options = options(WriteTracking::Sync).huge(huge_pages);
    let Some(memory) = map(name, &engine(), 2 * huge, backing, &options) else { return };
    memory.populate(0..huge).unwrap();
    assert_eq!(memory.evict(0..huge).unwrap(), 1);
    fails.store(true, Ordering::Relaxed);
    assert!(memory.read_at(5, &mut [0; 8]).is_err());
    assert_eq!(memory.content(0), Some(Content::Poisoned));
}

#[test]
fn what_cannot_be_tracked_is_refused_with_the_reason() {
    let shared = MemoryBacking::new(memfd(page()), Sharing::Shared).unwrap();
    let shared = Arc::new(shared);
    let error = engine().map(ByteLen::new(page()), shared, &options(WriteTracking::Async));
    let error = error.unwrap_err().to_string();
    assert!(error.contains("track writes synchronously"), "{error}");
    let name = "what_cannot_be_tracked";
    let Some(memory) = map(name, &engine(), 4 * page(), function(), &LazyOptions::default()) else {
        return;
    };
    let whole = 0..4 * page();
    memory.write_at(0, &[1]).unwrap();
    for error in [
        memory.dirty(whole.clone()).unwrap_err(),
        memory.take_dirty(whole.clone()).unwrap_err(),
        memory.write_back(whole.clone()).unwrap_err(),
    ] {
        assert!(matches!(error, LazyError::NotTracked), "{error}");
        assert!(error.to_string().contains("track_writes"), "{error}");
    }
    // Writes are not tracked, so what is written is lost.
    crate::common::wait_for("the page", || memory.content(0) == Some(Content::Present));
    assert!(memory.evict_all(whole).unwrap() > 0);
    assert_ne!(bytes_of(&memory, 0, 1), [1]);
    for track in BOTH {
        let Some(memory) = map(name, &engine(), 4 * page(), function(), &options(track)) else {
            return;
        };
        memory.write_at(page(), &[1]).unwrap();
        let error = memory.write_back(0..4 * page()).unwrap_err();
        assert!(
            matches!(error, LazyError::WriteBack { offset, cause: BackingError::ReadOnly { .. } } if offset == page()),
            "{error}"
        );
        assert_eq!(memory.dirty(0..4 * page()).unwrap(), [range(1..2)], "nothing is lost");
        for range in [0..0, 0..5 * page(), 1..page()] {
            assert!(matches!(memory.dirty(range.clone()), Err(LazyError::Access(_))));
            assert!(matches!(memory.write_back(range.clone()), Err(LazyError::Access(_))));
            assert!(matches!(memory.evict_all(range.clone()), Err(LazyError::Access(_))));
        }
    }
}

#[test]
fn a_file_takes_what_it_has_room_for_and_nothing_else() {
    let name = "a_file_takes_what_it_has_room_for";
    let len = 3 * page() + 100;
    let path = std::env::current_exe().unwrap().with_extension(format!("{}", std::process::id()));
    let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
    let appending = File::options().read(true).append(true).open(&path).unwrap();
    let reading = File::open(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    file.write_all_at(&words(len), 0).unwrap();
    for wrong in [&appending, &reading] {
        let error = FileBacking::writable(wrong.try_clone().unwrap()).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::PermissionDenied, "{error}");
    }
    for track in BOTH {
        let read_only = FileBacking::new(file.try_clone().unwrap()).unwrap();
        let Some(memory) = map(name, &engine(), 4 * page(), read_only, &options(track)) else {
            return;
        };
        memory.write_at(0, &[1]).unwrap();
        let error = memory.write_back(0..page()).unwrap_err();
        assert!(matches!(error, LazyError::WriteBack { offset: 0, .. }), "{error}");
        drop(memory);

        let backing = FileBacking::writable(file.try_clone().unwrap()).unwrap();
        let Some(memory) = map(name, &engine(), 4 * page(), backing, &options(track)) else {
            return;
        };
        // The whole of the last page, of which the file has a hundred bytes.
        memory.write_at(3 * page(), &vec![7; usize_of(page())]).unwrap();
        memory.write_at(page() + 1, &[8]).unwrap();
        assert_eq!(memory.write_back(0..4 * page()).unwrap(), 2);
        assert_eq!(memory.write_back(0..4 * page()).unwrap(), 0);
        assert_eq!(file.metadata().unwrap().len(), len);
        let mut expected = words(len);
        expected[usize_of(3 * page())..].fill(7);
        expected[usize_of(page()) + 1] = 8;
        let mut seen = vec![0; expected.len()];
        file.read_exact_at(&mut seen, 0).unwrap();
        assert!(seen == expected);
        // It is not made longer again after it was truncated.
        file.set_len(2 * page()).unwrap();
        memory.write_at(3 * page(), &[9]).unwrap();
        let error = memory.write_back(0..4 * page()).unwrap_err();
        assert!(
            matches!(error, LazyError::WriteBack { cause: BackingError::Short { .. }, .. }),
            "{error}"
        );
        assert_eq!(memory.dirty(0..4 * page()).unwrap(), [range(3..4)]);
        assert_eq!(file.metadata().unwrap().len(), 2 * page());
        file.write_all_at(&words(len), 0).unwrap();
    }
}

#[test]
fn a_file_that_is_not_read_through_the_page_cache_is_refused() {
    let name = format!("uzone-direct-{}", std::process::id());
    let path = std::env::temp_dir().join(name);
    std::fs::write(&path, words(page())).unwrap();
    let written = File::options().write(true).open(&path).unwrap();
    // A file system may have no such reads at all.
    let direct = File::options().read(true).custom_flags(libc::O_DIRECT).open(&path);
    std::fs::remove_file(&path).unwrap();
    let error = FileBacking::new(written).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::PermissionDenied, "{error}");
    if let Ok(file) = direct {
        let error = FileBacking::new(file).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::InvalidInput, "{error}");
    }
}

/// Bytes in memory, behind a lock, that may fail to be written.
struct Store {
    bytes: Mutex<Vec<u8>>,
    writes: AtomicU64,
    fails_every: u64,
    panics: bool,
}

impl Store {
    fn new(len: u64) -> Arc<Self> {
        Self::failing(len, u64::MAX, false)
    }

    fn failing(len: u64, fails_every: u64, panics: bool) -> Arc<Self> {
        let bytes = Mutex::new(vec![0; usize_of(len)]);
        Arc::new(Self { bytes, writes: AtomicU64::new(0), fails_every, panics })
    }

    fn fill(&self, window: &mut Window<'_>, run: Range<u64>) -> Result<(), BackingError> {
        let mut at = run.start;
        while at < run.end {
            let end = run.end.min(at + window.room());
            let _ = window.copy_with(at..end, |out| {
                out.copy_from_slice(&self.bytes.lock().unwrap()[usize_of(at)..][..out.len()]);
                Ok::<_, BackingError>(out.len())
            })?;
            at = end;
        }
        Ok(())
    }
}

struct Stored(Arc<Store>);

impl Backing for Stored {
    fn map_pages(&self, window: &mut Window<'_>) {
        while let Some(run) = window.next_run() {
            let _ = self.0.fill(window, run);
        }
    }

    fn fault(&self, window: &mut Window<'_>) -> Result<(), BackingError> {
        let range = window.range();
        self.0.fill(window, range)
    }

    fn write_back(&self, offset: u64, bytes: &[u8]) -> Result<(), BackingError> {
        let write = self.0.writes.fetch_add(1, Ordering::Relaxed) + 1;
        if write.is_multiple_of(self.0.fails_every) {
            if self.0.panics {
                // Without the hook that prints where.
                std::panic::resume_unwind(Box::new("as the test wants"));
            }
            return Err(BackingError::Other("the store is full".into()));
        }
        self.0.bytes.lock().unwrap()[usize_of(offset)..][..bytes.len()].copy_from_slice(bytes);
        Ok(())
    }
}

type Read = dyn Fn(u64, &mut [u8]) + Send + Sync;

/// A backing whose bytes one thread reads, and puts in place when it is let go.
struct Late {
    inner: Box<dyn Backing>,
    /// Reads bytes of it.
    read: Box<Read>,
    is_late: Box<dyn Fn() -> bool + Send + Sync>,
    has_read: Arc<Gate>,
    goes_on: Arc<Gate>,
}

impl Late {
    fn of_store(store: &Arc<Store>, is_late: impl Fn() -> bool + Send + Sync + 'static) -> Self {
        let bytes = store.clone();
        let read = move |at, out: &mut [u8]| {
            out.copy_from_slice(&bytes.bytes.lock().unwrap()[usize_of(at)..][..out.len()]);
        };
        Self::new(Stored(store.clone()), read, is_late)
    }

    fn new(
        inner: impl Backing + 'static,
        read: impl Fn(u64, &mut [u8]) + Send + Sync + 'static,
        is_late: impl Fn() -> bool + Send + Sync + 'static,
    ) -> Self {
        let (has_read, goes_on) = (Arc::default(), Arc::default());
        let (inner, read, is_late) = (Box::new(inner), Box::new(read), Box::new(is_late));
        Self { inner, read, is_late, has_read, goes_on }
    }
}

impl Backing for Late {
    fn map_pages(&self, window: &mut Window<'_>) {
        if !(self.is_late)() {
            return self.inner.map_pages(window);
        }
        while let Some(run) = window.next_run() {
            let _ = window.copy_with(run.clone(), |out| {
                (self.read)(run.start, out);
                self.has_read.open();
                self.goes_on.pass();
                Ok::<_, BackingError>(out.len())
            });
        }
    }

    fn fault(&self, window: &mut Window<'_>) -> Result<(), BackingError> {
        if (self.is_late)() {
            self.has_read.open();
            self.goes_on.pass();
        }
        self.inner.fault(window)
    }

    fn write_back(&self, offset: u64, bytes: &[u8]) -> Result<(), BackingError> {
        self.inner.write_back(offset, bytes)
    }

    fn in_thread(&self) -> Option<Source> {
        self.inner.in_thread()
    }
}

#[test]
fn bytes_that_were_read_before_a_page_was_written_and_evicted_do_not_come_back() {
    let is_late = || thread::current().name() == Some("late");
    let by_reader = BOTH.map(|track| (track, Answer::Reader));
    for (track, answer) in by_reader.into_iter().chain([(WriteTracking::Sync, Answer::InThread)]) {
        let backing = match answer {
            // A thread that faults fills the page itself, from the file.
            Answer::InThread => {
                let file = uzone_os::memory_file("late", &words(4 * page())).unwrap();
                let same = file.try_clone().unwrap();
                let read = move |at, out: &mut [u8]| same.read_exact_at(out, at).unwrap();
                Late::new(FileBacking::writable(file).unwrap(), read, is_late)
            }
            _ => Late::of_store(&Store::new(4 * page()), is_late),
        };
        let (has_read, goes_on) = (backing.has_read.clone(), backing.goes_on.clone());
        let options = options(track).answer(answer);
        let name = "bytes_that_were_read_before";
        let Some(memory) = map(name, &engine(), 4 * page(), backing, &options) else { return };
        let is_in_thread = memory.answered_in_thread() == Ok(());
        assert_eq!(is_in_thread, answer == Answer::InThread);
        let memory = &memory;
        thread::scope(|scope| {
            let late = thread::Builder::new().name("late".to_owned());
            let populate = || memory.populate_cached(0..page()).unwrap();
            let late = late.spawn_scoped(scope, populate).unwrap();
            has_read.pass();
            memory.write_at(8, &[5; 8]).unwrap();
            let evicted = if is_in_thread {
                // No other thread learns that the page is there.
                assert_eq!(memory.write_back(0..page()).unwrap(), 1);
                memory.evict(0..page()).unwrap()
            } else {
                crate::common::wait_for("the page", || memory.content(0) == Some(Content::Present));
                assert_eq!(memory.write_back(0..page()).unwrap(), 1);
                let evicts = scope.spawn(|| memory.evict_all(0..page()).unwrap());
                // No thread waits for the late producer: its bytes are too old.
                evicts.join().unwrap()
            };
            assert_eq!(evicted, 1, "{track:?}, {answer:?}");
            goes_on.open();
            let installed = late.join().unwrap();
            assert!(!is_in_thread || installed == 0, "{installed}");
        });
        let seen = bytes_of(memory, 8, 8);
        assert_eq!(seen, [5; 8], "{track:?}, {answer:?}: what was written is lost");
    }
}

#[test]
fn a_page_that_comes_back_while_it_is_evicted_is_protected() {
    let name = "a_page_that_comes_back_while_it_is_evicted";
    let pages = 4;
    for memory in memories(name, WriteTracking::Sync, pages) {
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    memory.evict(range(0..pages)).unwrap();
                }
            });
            let until = Instant::now() + Duration::from_millis(300);
            let mut lost = None;
            for turn in (1_u64..).take_while(|_| Instant::now() < until) {
                let at = turn % pages;
                // It comes back, and is written a moment later.
                drop(bytes_of(&memory, at * page() + 8, 1));
                memory.write_at(at * page(), &turn.to_ne_bytes()).unwrap();
                if memory.dirty(range(at..at + 1)).unwrap().is_empty()
                    || bytes_of(&memory, at * page(), 8) != turn.to_ne_bytes()
                {
                    lost = Some(turn);
                    break;
                }
                memory.evict_all(range(at..at + 1)).unwrap();
            }
            stop.store(true, Ordering::Relaxed);
            assert_eq!(lost, None, "{memory:?}");
        });
    }
}

/// Pages of a memory file that fail when they are asked to.
struct Failing {
    file: MemoryBacking,
    fails: Arc<AtomicBool>,
}

impl Backing for Failing {
    fn fault(&self, window: &mut Window<'_>) -> Result<(), BackingError> {
        if self.fails.load(Ordering::Relaxed) {
            return Err(BackingError::Other("it broke".into()));
        }
        self.file.fault(window)
    }

    fn byte_len(&self) -> Option<ByteLen> {
        self.file.byte_len()
    }

    fn memory_file(&self) -> std::io::Result<Option<(std::os::fd::OwnedFd, Sharing)>> {
        self.file.memory_file()
    }
}

#[test]
fn a_page_of_a_memory_file_that_was_given_back_can_be_made_a_bad_one() {
    uzone_os::sigbus::install().unwrap();
    let name = "a_page_of_a_memory_file_that_was_given_back";
    for (track, sharing) in
        BOTH.map(|track| (track, Sharing::Private)).into_iter().chain([(BOTH[1], Sharing::Shared)])
    {
        let fails = Arc::new(AtomicBool::new(false));
        let file = MemoryBacking::new(memfd(4 * page()), sharing).unwrap();
        let backing = Failing { file, fails: fails.clone() };
        let Some(memory) = map(name, &engine(), 4 * page(), backing, &options(track)) else {
            return;
        };
        memory.populate(range(0..4)).unwrap();
        memory.write_at(page(), &[1]).unwrap();
        assert_eq!(memory.evict_all(range(0..4)).unwrap(), 4);
        fails.store(true, Ordering::Relaxed);
        for at in 0..2 {
            assert!(memory.read_at(at * page(), &mut [0; 8]).is_err(), "{track:?} {sharing:?}");
            assert!(memory.write_at(at * page(), &[1]).is_err());
            assert_eq!(memory.content(at * page()), Some(Content::Poisoned));
        }
        assert_eq!(memory.dirty(range(0..4)).unwrap(), [], "{track:?} {sharing:?}");
    }
}

#[test]
fn a_page_that_is_pinned_stays_dirty_when_dirty_pages_are_taken() {
    for track in BOTH {
        let store = Store::new(4 * page());
        let name = "a_page_that_is_pinned_stays_dirty";
        let Some(memory) = map(name, &engine(), 4 * page(), Stored(store.clone()), &options(track))
        else {
            return;
        };
        memory.write_at(page(), &[1]).unwrap();
        memory.write_at(2 * page(), &[2]).unwrap();
        crate::common::wait_for("the pages", || {
            [1, 2].iter().all(|at| memory.content(at * page()) == Some(Content::Present))
        });
        let pinned = memory.pin(page()..page() + 1).unwrap();
        // A device may write to it at any time, without an event.
        assert_eq!(memory.write_back(0..4 * page()).unwrap(), 2, "{track:?}");
        assert_eq!(store.bytes.lock().unwrap()[usize_of(page())], 1);
        assert_eq!(memory.dirty(0..4 * page()).unwrap(), [range(1..2)], "{track:?}");
        assert_eq!(memory.take_dirty(0..4 * page()).unwrap(), [range(1..2)], "{track:?}");
        assert_eq!(memory.dirty(0..4 * page()).unwrap(), [range(1..2)], "{track:?}");
        drop(pinned);
        assert_eq!(memory.write_back(0..4 * page()).unwrap(), 1, "{track:?}");
        assert_eq!(memory.dirty(0..4 * page()).unwrap(), [], "{track:?}");
        assert!(memory.evict_all(0..4 * page()).unwrap() >= 2);
        assert_eq!(
            (bytes_of(&memory, page(), 1), bytes_of(&memory, 2 * page(), 1)),
            (vec![1], vec![2])
        );
    }
}

#[test]
fn what_is_written_to_a_page_that_came_too_late_is_brought_back() {
    uzone_os::sigbus::install().unwrap();
    for track in BOTH {
        let store = Store::new(4 * page());
        let is_first = AtomicBool::new(true);
        let backing = Late::of_store(&store, move || {
            let is_producer =
                thread::current().name().is_some_and(|name| name.starts_with("uzone-io"));
            is_producer && is_first.swap(false, Ordering::Relaxed)
        });
        let goes_on = backing.goes_on.clone();
        // No page is ready, so that an I/O thread produces it.
        let backing = NotAtHand(backing);
        let deadline = Some(Duration::from_millis(20));
        let options = options(track).deadline(deadline);
        let name = "what_is_written_to_a_page_that_came_too_late";
        let Some(memory) = map(name, &engine(), 4 * page(), backing, &options) else { return };
        assert!(memory.read_at(page(), &mut [0; 8]).is_err(), "it misses its deadline");
        crate::common::wait_for("the bad page", || {
            memory.content(page()) == Some(Content::Poisoned)
        });
        goes_on.open();
        crate::common::wait_for("the late page", || {
            memory.content(page()) == Some(Content::Present)
        });
        memory.write_at(page(), &[3; 8]).unwrap();
        assert_eq!(memory.write_back(0..4 * page()).unwrap(), 1, "{track:?}");
        assert_eq!(store.bytes.lock().unwrap()[usize_of(page())], 3, "{track:?}");
    }
}

/// Another backing of which no page is ready.
struct NotAtHand<B>(B);

impl<B: Backing> Backing for NotAtHand<B> {
    fn fault(&self, window: &mut Window<'_>) -> Result<(), BackingError> {
        self.0.fault(window)
    }

    fn write_back(&self, offset: u64, bytes: &[u8]) -> Result<(), BackingError> {
        self.0.write_back(offset, bytes)
    }
}

#[test]
fn a_holder_of_a_pinned_page_writes_to_it_after_the_mapping_has_gone() {
    let name = "a_holder_of_a_pinned_page";
    for track in BOTH {
        let Some(memory) = map(name, &engine(), 4 * page(), function(), &options(track)) else {
            return;
        };
        if !memory.sees_kernel_faults() {
            return skip(name, "faults of the kernel are not reported here: run as root");
        }
        memory.populate(0..4 * page()).unwrap();
        let pinned = memory.pin(page()..2 * page()).unwrap();
        let at = memory.addr().get() as u64 + page();
        drop(memory);
        // As a device or another owner of the address would, and not by a reference of ours.
        let (done, is_done) = std::sync::mpsc::channel();
        thread::spawn(move || {
            let own = File::options().write(true).open("/proc/self/mem").unwrap();
            done.send(own.write_at(&[7; 8], at).map_err(|error| error.to_string())).unwrap();
        });
        let written =
            is_done.recv_timeout(crate::common::PATIENCE).expect("the writer sleeps for ever");
        assert_eq!(written, Ok(8), "{track:?}");
        drop(pinned);
    }
}

#[test]
fn a_write_back_that_fails_loses_nothing() {
    let name = "a_write_back_that_fails";
    let len = 64 * page();
    for (track, panics) in BOTH.into_iter().flat_map(|track| [(track, false), (track, true)]) {
        let store = Store::failing(len, 3, panics);
        let Some(memory) = map(name, &engine(), len, Stored(store.clone()), &options(track)) else {
            return;
        };
        for at in (0..64).step_by(2) {
            memory.write_at(at * page(), &[1]).unwrap();
        }
        // A writer is woken a moment before its page is noted.
        crate::common::wait_for("the pages", || {
            memory.stats().demand + memory.stats().around == 64
        });
        let expected: Vec<_> = (0..64).step_by(2).map(|at| range(at..at + 1)).collect();
        assert_eq!(memory.dirty(0..len).unwrap(), expected);
        // Two runs are taken, then one is not.
        let answer = catch_unwind(AssertUnwindSafe(|| memory.write_back(0..len)));
        match answer {
            Ok(answer) => {
                let error = answer.unwrap_err();
                let offset = 4 * page();
                assert!(
                    matches!(error, LazyError::WriteBack { offset: at, .. } if at == offset),
                    "{error}"
                );
            }
            Err(_) => assert!(panics),
        }
        assert_eq!(memory.dirty(0..len).unwrap(), expected[2..], "{track:?}");
        if memory.evict(0..len).is_ok() {
            assert_eq!(memory.dirty(0..len).unwrap(), expected[2..], "{track:?}");
        }
        // It gets on by two runs a time.
        for _ in 0..40 {
            let _ = catch_unwind(AssertUnwindSafe(|| memory.write_back(0..len)));
        }
        assert_eq!(memory.dirty(0..len).unwrap(), []);
        // No thread writes, and what was written is in the store.
        assert!(memory.evict_all(0..len).unwrap() >= 30, "{memory:?}");
        for at in 0..64 {
            assert_eq!(bytes_of(&memory, at * page(), 1), [u8::from(at % 2 == 0)], "page {at}");
        }
    }
}

#[derive(Clone, Debug)]
enum Step {
    Write { at: u64, len: u64, byte: u8 },
    Read { page: u64 },
    WriteBack { page: u64, pages: u64 },
    Evict { page: u64, pages: u64 },
    Populate { page: u64, pages: u64 },
}

const PAGES: u64 = 24;

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let pages = || (0..PAGES, 1..PAGES);
    let step = prop_oneof![
        4 => (any::<u64>(), 1_u64..9000, any::<u8>())
            .prop_map(|(at, len, byte)| Step::Write { at, len, byte }),
        2 => (0..PAGES).prop_map(|page| Step::Read { page }),
        1 => pages().prop_map(|(page, pages)| Step::WriteBack { page, pages }),
        2 => pages().prop_map(|(page, pages)| Step::Evict { page, pages }),
        1 => pages().prop_map(|(page, pages)| Step::Populate { page, pages }),
    ];
    prop::collection::vec(step, 1..60)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_file_is_what_was_written_whatever_was_evicted_on_the_way(
        steps in steps(),
        track in prop::sample::select(BOTH.to_vec()),
        cut in 0_u64..4096,
        answer in prop::sample::select(vec![Answer::Reader, Answer::InThread]),
    ) {
        let len = PAGES * page() - cut;
        let mut expected = words(len);
        let file = file_with(&expected);
        let backing = FileBacking::writable(file.try_clone().unwrap()).unwrap();
        let name = "the_file_is_what_was_written";
        let options = options(track).answer(answer);
        let Some(memory) = map(name, &engine(), PAGES * page(), backing, &options) else {
            return Ok(());
        };
        let part = |page: u64, pages: u64| range(page..(page + pages).min(PAGES));
        for step in steps {
            match step {
                Step::Write { at, len: count, byte } => {
                    let at = at % len;
                    let end = (at + count).min(len);
                    let bytes = &mut expected[usize_of(at)..usize_of(end)];
                    bytes.fill(byte);
                    memory.write_at(at, bytes).unwrap();
                }
                Step::Read { page: at } => {
                    let bytes = bytes_of(&memory, at * page(), page());
                    let end = usize_of((at + 1) * page()).min(expected.len());
                    let right = &expected[usize_of(at * page())..end];
                    prop_assert!(&bytes[..right.len()] == right, "page {}", at);
                }
                Step::WriteBack { page, pages } => {
                    memory.write_back(part(page, pages)).unwrap();
                    prop_assert_eq!(memory.dirty(part(page, pages)).unwrap(), []);
                }
                Step::Evict { page, pages } if track == WriteTracking::Sync => {
                    memory.evict(part(page, pages)).unwrap();
                }
                Step::Evict { page, pages } => {
                    // No other thread writes, so what is written back may go.
                    memory.write_back(part(page, pages)).unwrap();
                    memory.evict_all(part(page, pages)).unwrap();
                }
                Step::Populate { page, pages } => {
                    memory.populate(part(page, pages)).unwrap();
                }
            }
        }
        memory.write_back(0..PAGES * page()).unwrap();
        let mut found = vec![0; usize_of(len)];
        file.read_exact_at(&mut found, 0).unwrap();
        prop_assert_eq!(file.metadata().unwrap().len(), len);
        prop_assert!(found == expected);
        // Nothing is left that only the mapping has.
        memory.evict_all(0..PAGES * page()).unwrap();
        prop_assert!(bytes_of(&memory, 0, len) == expected);
    }
}

#[test]
fn a_bad_page_is_neither_dirty_nor_brought_back() {
    let name = "a_bad_page_is_neither_dirty";
    for track in BOTH {
        let failing = crate::common::failing_at(page());
        let Some(memory) = map(name, &engine(), 4 * page(), failing, &options(track)) else {
            return;
        };
        assert!(memory.populate(0..4 * page()).is_err());
        assert_eq!(memory.dirty(0..4 * page()).unwrap(), [], "{track:?}");
        assert_eq!(memory.write_back(0..4 * page()).unwrap(), 0);
        assert!(memory.evict_all(0..4 * page()).is_ok());
        assert_eq!(memory.stats().poisoned, 1);
    }
    assert!(matches!(
        engine().map(ByteLen::ZERO, Arc::new(ZeroBacking), &options(WriteTracking::Sync)),
        Err(MapError::Map(_))
    ));
}
