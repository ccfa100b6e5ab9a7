//! Mappings of a shared backing: each page is produced once, is one page of memory until a mapping writes
//! to it, and is right in every mapping, also in one of another file.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::common::{
    bytes_of, check_all, check_page, engine, file_of, options, or_skip, page, region_at, remote,
    scattered, skip, try_page, usize_of, word, words,
};
use uzone_fault::{
    Backing, BackingError, Engine, FileBacking, LazyMapping, LazyOptions, MapError, MemoryBacking,
    RemoteRegion, SharedBacking, Window, ZeroBacking,
};
use uzone_os::uffd::{Features, KernelFaults, Modes, Registered, Uffd};
use uzone_os::{Access, Mapping, Sharing};
use uzone_pages::{Advice, ByteLen};

const LEN: u64 = 4 << 20;

/// The words, but for pages that are zero; it counts the pages that it produces.
struct Counting {
    zeroes: Range<u64>,
    produced: AtomicU64,
    /// Whether pages are produced only for threads that wait.
    is_slow: bool,
    fails: AtomicBool,
}

impl Counting {
    fn new(zeroes: Range<u64>, is_slow: bool) -> Arc<Self> {
        let (produced, fails) = (AtomicU64::new(0), AtomicBool::new(false));
        Arc::new(Self { zeroes, produced, is_slow, fails })
    }

    fn fill(&self, window: &mut Window<'_>, bytes: Range<u64>) -> Result<(), BackingError> {
        for at in bytes.step_by(usize_of(page())) {
            let one = at..at + page();
            if self.zeroes.contains(&at) {
                let _ = window.zero(one)?;
                continue;
            }
            self.produced.fetch_add(1, Ordering::Relaxed);
            let _ = window.copy_with(one, |out| {
                crate::common::write_words(at, out);
                Ok::<_, BackingError>(out.len())
            })?;
        }
        Ok(())
    }
}

/// A backing that several own.
struct Held(Arc<Counting>);

impl Backing for Held {
    fn map_pages(&self, window: &mut Window<'_>) {
        while let Some(run) = window.next_run().filter(|_| !self.0.is_slow) {
            self.0.fill(window, run).unwrap();
        }
    }

    fn fault(&self, window: &mut Window<'_>) -> Result<(), BackingError> {
        if self.0.fails.load(Ordering::Relaxed) {
            return Err(BackingError::Other("the source is away".into()));
        }
        let range = window.range();
        self.0.fill(window, range)
    }

    fn byte_len(&self) -> Option<ByteLen> {
        Some(ByteLen::new(LEN))
    }
}

/// A backing that makes 16 pages at once.
struct Framed {
    held: Held,
    forgotten: Mutex<Vec<Range<u64>>>,
}

impl Backing for Framed {
    fn map_pages(&self, window: &mut Window<'_>) {
        self.held.map_pages(window);
    }

    fn fault(&self, window: &mut Window<'_>) -> Result<(), BackingError> {
        self.held.fault(window)
    }

    fn made_with(&self, offset: u64) -> Option<Range<u64>> {
        let start = offset / (16 * page()) * 16 * page();
        Some(start..start + 16 * page())
    }

    fn forget(&self, range: Range<u64>) {
        self.forgotten.lock().unwrap().push(range);
    }

    fn byte_len(&self) -> Option<ByteLen> {
        self.held.byte_len()
    }
}

#[test]
fn what_is_made_with_a_page_comes_with_it_and_is_forgotten_once_it_is_shared() {
    let name = "what_is_made_with_a_page_comes_with_it";
    for is_slow in [false, true] {
        let inner = Counting::new(0..0, is_slow);
        let framed =
            Arc::new(Framed { held: Held(inner.clone()), forgotten: Mutex::new(Vec::new()) });
        let backing = match SharedBacking::new(framed.clone(), ByteLen::new(LEN)) {
            Ok(backing) => Arc::new(backing),
            Err(MapError::Open(error)) => return skip(name, &error.to_string()),
            Err(error) => panic!("{name}: {error:?}"),
        };
        let memory = map(&backing, &engine(), &LazyOptions::default());
        // Two frames, neither in order.
        for frame in [3, 1] {
            check_page(&memory, (16 * frame + 5) * page());
        }
        if is_slow {
            // Its pages come one by one, each when it is touched.
            assert_eq!(inner.produced.load(Ordering::Relaxed), 2);
            assert!(framed.forgotten.lock().unwrap().is_empty());
            continue;
        }
        let begin = Instant::now();
        while memory.stats().around < 30 {
            assert!(begin.elapsed() < Duration::from_secs(20), "{:?}", memory.stats());
            std::thread::yield_now();
        }
        for frame in [1, 3] {
            let bytes = 16 * frame * page()..16 * (frame + 1) * page();
            assert!(framed.forgotten.lock().unwrap().contains(&bytes));
            bytes.step_by(usize_of(page())).for_each(|at| check_page(&memory, at));
        }
        assert_eq!(inner.produced.load(Ordering::Relaxed), 32);
        assert_eq!(memory.stats().faults, 2, "the others were there");
        // Windows have several.
        memory.populate(0..LEN).unwrap();
        let forgotten = framed.forgotten.lock().unwrap();
        let frame = 16 * page();
        let is_forgotten = |start: u64| forgotten.contains(&(start..start + frame));
        assert!((0..LEN).step_by(usize_of(frame)).all(is_forgotten), "{forgotten:?}");
    }
}

fn shared(name: &str, inner: &Arc<Counting>, keep: u64) -> Option<Arc<SharedBacking>> {
    let inner: Arc<dyn Backing> = Arc::new(Held(inner.clone()));
    match SharedBacking::new(inner, ByteLen::new(keep)) {
        Ok(backing) => Some(Arc::new(backing)),
        Err(MapError::Open(error)) => {
            skip(name, &error.to_string());
            None
        }
        Err(error) => panic!("{name}: {error:?}"),
    }
}

fn map(backing: &Arc<SharedBacking>, engine: &Engine, options: &LazyOptions) -> LazyMapping {
    engine.map(ByteLen::new(LEN), backing.clone(), options).unwrap()
}

/// Whether the whole page is as the backing has it.
fn check(memory: &LazyMapping, at: u64, zeroes: &Range<u64>) {
    if zeroes.contains(&at) {
        assert!(bytes_of(memory, at, page()).iter().all(|byte| *byte == 0), "at {at:#x}");
    } else {
        check_page(memory, at);
    }
}

#[test]
fn each_page_is_produced_once_for_all_mappings() {
    let name = "each_page_is_produced_once_for_all_mappings";
    let zeroes = LEN / 4..LEN / 2;
    for is_slow in [false, true] {
        let inner = Counting::new(zeroes.clone(), is_slow);
        let Some(backing) = shared(name, &inner, LEN) else { return };
        let engine = engine();
        let maps: Vec<_> =
            (0..4).map(|_| map(&backing, &engine, &LazyOptions::default())).collect();
        std::thread::scope(|scope| {
            for (seed, memory) in (1..).zip(&maps) {
                let zeroes = &zeroes;
                scope.spawn(move || {
                    if seed == 4 {
                        memory.populate(0..LEN).unwrap();
                    }
                    for at in scattered(seed, LEN / page()).take(500) {
                        check(memory, at * page(), zeroes);
                    }
                    for at in (0..LEN).step_by(usize_of(page())) {
                        check(memory, at, zeroes);
                    }
                });
            }
        });
        let kept = (LEN - LEN / 4) / page();
        // Threads that fill a page at once agree by the kernel's reply; nothing is produced later.
        let produced = inner.produced.load(Ordering::Relaxed);
        assert!(produced >= kept, "{produced} of {kept}");
        assert_eq!(backing.kept().get(), kept * page());
        let last = map(&backing, &engine, &LazyOptions::default());
        (0..LEN).step_by(usize_of(page())).for_each(|at| check(&last, at, &zeroes));
        assert_eq!(inner.produced.load(Ordering::Relaxed), produced);
        // A write is the writer's own.
        maps[0].write_at(0, &[7; 16]).unwrap();
        assert_eq!(bytes_of(&maps[0], 0, 16), [7; 16]);
        check_page(&maps[1], 0);
        check_page(&last, 0);
    }
}

#[test]
fn beyond_what_is_kept_each_mapping_has_copies() {
    let name = "beyond_what_is_kept_each_mapping_has_copies";
    for is_slow in [false, true] {
        let inner = Counting::new(0..0, is_slow);
        let Some(backing) = shared(name, &inner, LEN / 4) else { return };
        let engine = engine();
        for _ in 0..2 {
            let one = options(Advice::Normal, 16);
            check_all(&map(&backing, &engine, &one));
        }
        let kept = backing.kept().get();
        assert!((LEN / 4..LEN / 2).contains(&kept), "{kept}");
        let produced = inner.produced.load(Ordering::Relaxed) * page();
        assert!(produced >= 2 * LEN - kept, "{produced} bytes were produced, {kept} are kept");
    }
}

#[test]
fn a_page_that_another_process_touched_in_the_file_is_filled_and_not_zero() {
    for is_slow in [false, true] {
        let inner = Counting::new(10 * page()..20 * page(), is_slow);
        let Some(backing) = shared("a_page_that_another_process_touched", &inner, LEN) else {
            return;
        };
        let Ok(Some((fd, _))) = backing.memory_file() else { panic!("it is a file") };
        let (len, access) = (ByteLen::new(LEN), Access::ReadOnly);
        let other = Mapping::file(fd, 0, len, access, Sharing::Shared).unwrap();
        let engine = engine();
        let memory = map(&backing, &engine, &LazyOptions::default());
        // Before and after its neighbours are filled.
        for at in (0..LEN).step_by(usize_of(page())) {
            if at % (3 * page()) == 0 {
                other.read_at(at, &mut [0; 8]).unwrap();
            }
            check(&memory, at, &inner.zeroes);
        }
        let second = map(&backing, &engine, &LazyOptions::default());
        for at in (0..LEN).step_by(usize_of(page())) {
            check(&second, at, &inner.zeroes);
        }
        assert_eq!(backing.kept().get(), LEN - (inner.zeroes.end - inner.zeroes.start));
    }
    // Bytes that are copied from a mapping.
    let source = FileBacking::new(file_of(LEN)).unwrap();
    let backing = Arc::new(SharedBacking::new(Arc::new(source), ByteLen::new(LEN)).unwrap());
    let Ok(Some((fd, _))) = backing.memory_file() else { panic!("it is a file") };
    let other = Mapping::file(fd, 0, ByteLen::new(LEN), Access::ReadOnly, Sharing::Shared).unwrap();
    other.read_at(0, &mut vec![0; usize_of(LEN / 2)]).unwrap();
    let engine = engine();
    let memory = map(&backing, &engine, &LazyOptions::default());
    check_all(&memory);
}

#[test]
fn a_page_that_failed_is_produced_for_the_next_mapping() {
    let name = "a_page_that_failed_is_produced_for_the_next_mapping";
    let inner = Counting::new(0..0, true);
    let Some(backing) = shared(name, &inner, LEN) else { return };
    let _ = uzone_os::sigbus::install();
    let engine = engine();
    inner.fails.store(true, Ordering::Relaxed);
    let first = map(&backing, &engine, &LazyOptions::default());
    try_page(&first, 0).unwrap_err();
    assert!(first.last_failure().unwrap().reason.contains("the source is away"));
    inner.fails.store(false, Ordering::Relaxed);
    check_all(&map(&backing, &engine, &LazyOptions::default()));
}

#[test]
fn memory_of_another_file_gets_copies() {
    let name = "memory_of_another_file_gets_copies";
    let zeroes = 0..LEN / 2;
    for is_slow in [false, true] {
        let inner = Counting::new(zeroes.clone(), is_slow);
        let Some(backing) = shared(name, &inner, LEN) else { return };
        let features = Features::MISSING_SHMEM | Features::MINOR_SHMEM;
        let uffd = Arc::new(Uffd::open(features, Features::NONE, KernelFaults::IfAllowed).unwrap());
        let file = Mapping::memfd("another", ByteLen::new(LEN), None).unwrap();
        // Pages of it that are there already are not what is mapped.
        file.write_at(LEN - page(), &[1; 64]).unwrap();
        let fd = file.fd().unwrap().try_clone_to_owned().unwrap();
        let private =
            Mapping::file(fd, 0, ByteLen::new(LEN), Access::ReadWrite, Sharing::Private).unwrap();
        let modes = Modes::MISSING | Modes::MINOR;
        let memory = Registered::new(uffd.clone(), private, modes).unwrap();
        let len = ByteLen::new(LEN - page());
        let regions = vec![RemoteRegion { len, ..region_at(0, &memory) }];
        let options = LazyOptions::default();
        let (engine, remote) = (engine(), remote(&memory));
        let adopted = engine.adopt(remote, regions, backing.clone(), &options, None).unwrap();
        for at in scattered(3, LEN - page()).take(2000) {
            let at = at & !7;
            let mut seen = [1; 8];
            memory.mapping().read_at(at, &mut seen).unwrap();
            let right = if zeroes.contains(&at) { 0 } else { word(at) };
            assert_eq!(u64::from_ne_bytes(seen), right, "at {at:#x}");
        }
        drop(adopted);
    }
}

#[test]
fn what_cannot_be_shared_is_refused_by_name() {
    let refused = |inner: Arc<dyn Backing>| match SharedBacking::new(inner, ByteLen::new(LEN)) {
        Err(MapError::Backing { reason }) => reason,
        other => panic!("{other:?}"),
    };
    assert!(refused(Arc::new(ZeroBacking)).contains("no length"));
    let file = Arc::new(Mapping::memfd("file", ByteLen::new(LEN), None).unwrap());
    let memory = MemoryBacking::new(file, Sharing::Private).unwrap();
    assert!(refused(Arc::new(memory)).contains("memory file"));
}

#[test]
fn a_file_is_shared_and_its_descriptor_is_for_readers() {
    let name = "a_file_is_shared_and_its_descriptor_is_for_readers";
    let file: Arc<dyn Backing> = Arc::new(FileBacking::new(file_of(LEN)).unwrap());
    let backing = or_skip(name, SharedBacking::new(file, ByteLen::new(LEN)));
    let Some(backing) = backing.map(Arc::new) else { return };
    check_all(&map(&backing, &engine(), &LazyOptions::default()));
    let (fd, _) = backing.memory_file().unwrap().unwrap();
    let of = |access, sharing| {
        Mapping::file(fd.try_clone().unwrap(), 0, ByteLen::new(LEN), access, sharing)
    };
    of(Access::ReadWrite, Sharing::Shared).unwrap_err();
    let read = of(Access::ReadOnly, Sharing::Shared).unwrap();
    let mut seen = vec![0; usize_of(LEN)];
    read.read_at(0, &mut seen).unwrap();
    assert!(seen == words(LEN));
}
