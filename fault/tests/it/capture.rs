//! Memory of another process is read as it was at one moment while its threads write, give it back and touch
//! what is missing: no byte of later is read, and none of what the threads do is lost.
//!
//! The other process is this one: its memory is adopted as that of another would be.

use std::fs::File;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::common::{
    HUGE, PATIENCE, Pool, function, page, region_at, registered, remote, scattered, userfaultfd,
    usize_of, word, words_at,
};
use uzone_fault::{AdoptedMemory, Engine, KeptPages, LazyError, LazyOptions, RemoteRegion};
use uzone_os::uffd::{Features, KernelFaults, Registered, open_pending_faults};
use uzone_os::{Anonymous, Mapping};
use uzone_pages::{Advice, ByteLen, PageSize};

const PAGES: u64 = 2048;

/// Memory that is adopted, and its descriptor.
struct Adopted {
    memory: Registered,
    engine: Engine,
    region: RemoteRegion,
    adopted: Option<AdoptedMemory>,
}

impl Adopted {
    fn new(name: &str, size: PageSize) -> Option<Self> {
        let uffd = userfaultfd(name, Features::EVENT_REMOVE, KernelFaults::Required)?;
        let len = ByteLen::new(PAGES * page());
        let mapping = match size == PageSize::KIB_4 {
            true => Mapping::anonymous(len, Anonymous::default()),
            false => Mapping::hugetlb(len, PageSize::MIB_2),
        };
        let memory = registered(&uffd, mapping.unwrap());
        let region = region_at(0, &memory);
        let engine = Engine::new(NonZeroUsize::MIN).unwrap();
        let mut this = Self { memory, engine, region, adopted: None };
        this.adopt();
        Some(this)
    }

    /// Answers by another reader from now on, as if the one before had been killed.
    fn adopt(&mut self) {
        let options = LazyOptions::default().advice(Advice::Random);
        let (remote, regions) = (remote(&self.memory), vec![self.region]);
        drop(self.adopted.take());
        let adopted = self.engine.adopt(remote, regions, Arc::new(function()), &options, None);
        self.adopted = Some(adopted.unwrap());
    }

    fn adopted(&self) -> &AdoptedMemory {
        self.adopted.as_ref().unwrap()
    }

    fn read(&self, page_number: u64) -> Vec<u8> {
        let mut bytes = vec![1; usize_of(page())];
        self.memory.mapping().read_at(page_number * page(), &mut bytes).unwrap();
        bytes
    }

    /// Captures the wanted pages. `hurried` is set when a thread waits for the end.
    fn capture(&self, wanted: Range<u64>, hurried: &Arc<AtomicBool>) -> Reader {
        let own = || File::open("/proc/self/mem").unwrap();
        let kept = KeptPages::new(&[self.region]).unwrap();
        kept.want(wanted.start * page()..wanted.end * page()).unwrap();
        let theirs = KeptPages::from_fd(kept.as_fd().try_clone_to_owned().unwrap(), &[self.region]);
        let pending = open_pending_faults(self.memory.uffd().as_fd()).unwrap();
        let hurried = hurried.clone();
        let hurry = move || hurried.store(true, Ordering::Release);
        self.adopted().capture(own(), theirs, pending, false, hurry).unwrap();
        Reader { memory: own(), start: self.region.start.get(), kept }
    }

    fn end(&self) -> Result<u64, LazyError> {
        self.adopted().end_capture().expect("there is a capture")
    }
}

/// The process that reads the memory.
struct Reader {
    memory: File,
    start: u64,
    kept: KeptPages,
}

impl Reader {
    fn read(&self, page_number: u64) -> Vec<u8> {
        let mut bytes = vec![1; usize_of(page())];
        let offset = page_number * page();
        self.memory.read_exact_at(&mut bytes, self.start + offset).unwrap();
        self.kept.read_over(offset, &mut bytes).unwrap();
        bytes
    }
}

fn image(page_number: u64) -> Vec<u8> {
    words_at(page_number * page(), page())
}

/// Has some threads write to all pages, and compares what is read with what was there when all began.
fn check_beside_writers(adopted: &Adopted) {
    let written = |page_number: u64| page_number.is_multiple_of(3);
    let is_there = |page_number: u64| page_number < PAGES / 2;
    let mut expected: Vec<Vec<u8>> = (0..PAGES / 2).map(image).collect();
    for at in 0..PAGES / 2 {
        assert!(adopted.read(at) == expected[usize_of(at)], "page {at}");
        if written(at) {
            adopted.memory.mapping().write_at(at * page() + 8, &[7; 64]).unwrap();
            expected[usize_of(at)][8..72].copy_from_slice(&[7; 64]);
        }
    }
    let hurried = Arc::new(AtomicBool::new(false));
    let reader = adopted.capture(0..PAGES / 2, &hurried);
    let second = open_pending_faults(adopted.memory.uffd().as_fd()).unwrap();
    let (memory, kept) =
        (File::open("/proc/self/mem").unwrap(), KeptPages::new(&[adopted.region]).unwrap());
    let refused = adopted.adopted().capture(memory, kept, second, false, || {});
    assert!(matches!(refused, Err(LazyError::Captured)), "{refused:?}");

    let writes = AtomicU64::new(0);
    let (stop, is_read) = (AtomicBool::new(false), AtomicBool::new(false));
    thread::scope(|scope| {
        for seed in 0..4_u64 {
            let (stop, is_read, writes) = (&stop, &is_read, &writes);
            let mapping = adopted.memory.mapping();
            scope.spawn(move || {
                // Each has words of its own in all pages.
                for (count, at) in scattered(seed, PAGES).enumerate() {
                    let place = at * page() + 1024 + seed * 8;
                    mapping.write_at(place, &(count as u64 | 1 << 63).to_ne_bytes()).unwrap();
                    let mut seen = [0; 8];
                    mapping.read_at(place, &mut seen).unwrap();
                    assert_eq!(u64::from_ne_bytes(seen), count as u64 | 1 << 63);
                    writes.fetch_add(1, Ordering::Relaxed);
                    // Some pages are left for what is read later.
                    if stop.load(Ordering::Acquire)
                        || count as u64 > PAGES / 8 && !is_read.load(Ordering::Acquire)
                    {
                        while !stop.load(Ordering::Acquire) && !is_read.load(Ordering::Acquire) {
                            thread::yield_now();
                        }
                        if stop.load(Ordering::Acquire) {
                            return;
                        }
                    }
                }
            });
        }
        let checks = scope.spawn(|| {
            while writes.load(Ordering::Relaxed) < 64 {
                thread::yield_now();
            }
            for at in (0..PAGES / 4).rev() {
                assert!(reader.read(at) == expected[usize_of(at)], "page {at}");
            }
            is_read.store(true, Ordering::Release);
            // What has been read is let go.
            adopted.adopted().captured_until(PAGES / 4 * page());
            for at in PAGES / 4..PAGES / 2 {
                assert!(reader.read(at) == expected[usize_of(at)], "page {at}");
            }
        });
        let checked = checks.join();
        stop.store(true, Ordering::Release);
        checked.unwrap();
    });
    let kept_pages = adopted.end().unwrap();
    assert!(kept_pages > 0 && kept_pages <= PAGES / 2, "{kept_pages}");
    assert!(!hurried.load(Ordering::Acquire));
    assert!(adopted.adopted().end_capture().is_none());
    // The threads wrote what they wrote, and nothing else changed.
    for at in 0..PAGES {
        let seen = adopted.read(at);
        let before = if is_there(at) { expected[usize_of(at)].clone() } else { image(at) };
        assert!(seen[..1024] == before[..1024] && seen[1056..] == before[1056..], "page {at}");
    }
    // No write is reported any more.
    let reported = adopted.adopted().stats().write_protect;
    adopted.memory.mapping().write_at(5 * page(), &[1]).unwrap();
    assert_eq!(adopted.adopted().stats().write_protect, reported);
}

#[test]
fn what_is_read_is_the_memory_of_one_moment_while_threads_write_to_it() {
    let name = "what_is_read_is_the_memory_of_one_moment_while_threads_write_to_it";
    let Some(adopted) = Adopted::new(name, PageSize::KIB_4) else { return };
    for _ in 0..3 {
        check_beside_writers(&adopted);
        // For the next round, which starts with absent pages again.
        adopted.memory.mapping().discard(0..PAGES * page()).unwrap();
        let zeroes = vec![0; usize_of(page())];
        (0..PAGES).for_each(|at| assert!(adopted.read(at) == zeroes));
        for at in 0..PAGES {
            adopted.memory.mapping().write_at(at * page(), &image(at)).unwrap();
        }
    }
}

#[test]
fn huge_pages_are_kept_whole() {
    let name = "huge_pages_are_kept_whole";
    let Some(_pool) = Pool::grow(name, PageSize::MIB_2, PAGES * page() / HUGE) else { return };
    let size = PageSize::try_from_bytes(HUGE).unwrap();
    let Some(adopted) = Adopted::new(name, size) else { return };
    check_beside_writers(&adopted);
}

#[test]
fn a_thread_that_gives_memory_back_waits_until_that_was_read() {
    let name = "a_thread_that_gives_memory_back_waits_until_that_was_read";
    let Some(adopted) = Adopted::new(name, PageSize::KIB_4) else { return };
    (0..PAGES).for_each(|at| assert!(adopted.read(at) == image(at)));
    let hurried = Arc::new(AtomicBool::new(false));
    let reader = adopted.capture(0..PAGES, &hurried);
    let (is_back, begin) = (AtomicBool::new(false), Instant::now());
    thread::scope(|scope| {
        scope.spawn(|| {
            adopted.memory.mapping().discard(10 * page()..20 * page()).unwrap();
            is_back.store(true, Ordering::Release);
        });
        let checks = scope.spawn(|| {
            while !hurried.load(Ordering::Acquire) {
                assert!(begin.elapsed() < PATIENCE, "the reader was not asked to hurry");
                thread::yield_now();
            }
            assert!(adopted.adopted().capture_waits().is_some_and(|since| since >= begin));
            // What is written meanwhile waits as well.
            let late = scope.spawn(|| adopted.memory.mapping().write_at(30 * page(), &[9; 8]));
            thread::sleep(Duration::from_millis(20));
            (0..PAGES).for_each(|at| assert!(reader.read(at) == image(at), "page {at}"));
            assert!(!is_back.load(Ordering::Acquire));
            let captured = adopted.end();
            late.join().unwrap().unwrap();
            captured
        });
        let captured = checks.join();
        drop(adopted.adopted().end_capture());
        captured.unwrap().unwrap();
    });
    let zeroes = vec![0; usize_of(page())];
    (10..20).for_each(|at| assert!(adopted.read(at) == zeroes, "page {at}"));
    assert_eq!(adopted.read(30)[..8], [9; 8]);
    assert_eq!(adopted.read(9)[..8], word(9 * page()).to_ne_bytes());
}

#[test]
fn what_a_reader_that_died_had_protected_is_let_go_by_the_next() {
    let name = "what_a_reader_that_died_had_protected_is_let_go_by_the_next";
    let Some(mut adopted) = Adopted::new(name, PageSize::KIB_4) else {
        return;
    };
    (0..PAGES).for_each(|at| assert!(adopted.read(at) == image(at)));
    drop(adopted.capture(0..PAGES, &Arc::default()));
    adopted.adopt();
    for at in 0..PAGES {
        adopted.memory.mapping().write_at(at * page(), &at.to_ne_bytes()).unwrap();
    }
    assert!((0..PAGES).all(|at| adopted.read(at)[..8] == at.to_ne_bytes()));
    assert_eq!(adopted.adopted().stats().write_protect, PAGES);
    assert!(adopted.adopted().end_capture().is_none());
}

#[test]
fn a_page_that_cannot_be_kept_ends_the_capture_and_harms_no_thread() {
    let name = "a_page_that_cannot_be_kept_ends_the_capture_and_harms_no_thread";
    let Some(adopted) = Adopted::new(name, PageSize::KIB_4) else { return };
    (0..PAGES).for_each(|at| assert!(adopted.read(at) == image(at)));
    let reader = adopted.capture(0..PAGES, &Arc::default());
    // The file of kept pages is cut: it is of a process that may be hostile.
    let file = File::from(reader.kept.as_fd().try_clone_to_owned().unwrap());
    file.set_len(0).unwrap();
    adopted.memory.mapping().write_at(3 * page(), &[5; 8]).unwrap();
    assert_eq!(adopted.read(3)[..8], [5; 8]);
    assert!(adopted.end().unwrap_err().to_string().contains("cannot be kept"));
}
