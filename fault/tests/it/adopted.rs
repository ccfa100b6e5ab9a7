//! Memory of another process: its threads get the bytes of the backing, what they give back is
//! zero, and a server that goes is followed by the next.
//!
//! The other process is this program, started again for the one test.

use std::num::NonZeroUsize;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::common::{
    Client, HUGE, Pool, anonymous, function, is_child, page, region_at, registered, remote, skip,
    turns, userfaultfd, usize_of, wait_for, words_at,
};
use uzone_fault::{
    AdoptedMemory, Engine, EngineOptions, LazyOptions, MapError, RemoteRegion, ZeroBacking,
};
use uzone_os::peer::Peer;
use uzone_os::uffd::{
    EventBuffer, EventLog, Features, KernelFaults, LoggedEvents, Registered, Remote, Uffd,
};
use uzone_os::{Anonymous, Mapping, Vaddr, probe};
use uzone_pages::{Advice, ByteLen, Content, PageSize};

const PAGES: u64 = 1024;

/// The bytes of a page at an offset of the backing.
fn bytes_at(offset: u64, is_zero: bool) -> Vec<u8> {
    if is_zero { vec![0; usize_of(page())] } else { words_at(offset, page()) }
}

fn check(memory: &Registered, at: u64, offset: u64, is_zero: bool) {
    let mut seen = vec![1; usize_of(page())];
    memory.mapping().read_at(at * page(), &mut seen).unwrap();
    assert!(seen == bytes_at(offset + at * page(), is_zero), "wrong bytes in page {at}");
}

/// What the other process does: two regions with backing offsets in the other order, and a line to
/// and fro before each step.
fn be_the_other_process() {
    let features = Features::EVENT_REMOVE;
    let uffd = Arc::new(Uffd::open(features, Features::NONE, KernelFaults::IfAllowed).unwrap());
    let [first, second] = [0, 1].map(|_| registered(&uffd, anonymous(PAGES / 2)));
    let (low, high) = (0, PAGES / 2 * page());
    let mut turn = turns();
    turn(&format!(
        "ready {} {} {}",
        uffd.as_fd().as_raw_fd(),
        first.mapping().addr().get(),
        second.mapping().addr().get()
    ));
    // Threads that touch both regions at once.
    thread::scope(|scope| {
        for seed in 0..4 {
            let (first, second) = (&first, &second);
            scope.spawn(move || {
                for step in 0..PAGES / 4 {
                    let at = (step * 37 + seed * 101) % (PAGES / 2);
                    check(first, at, high, false);
                    check(second, at, low, false);
                }
            });
        }
    });
    // What is given back is zero, whether it was there or not, also while others go on.
    let half = PAGES / 4 * page();
    thread::scope(|scope| {
        scope.spawn(|| first.mapping().discard(0..half).unwrap());
        scope.spawn(|| (0..PAGES / 2).for_each(|at| check(&second, at, low, false)));
    });
    (0..PAGES / 4).for_each(|at| check(&first, at, high, true));
    (PAGES / 4..PAGES / 2).for_each(|at| check(&first, at, high, false));
    second.mapping().discard(0..page()).unwrap();
    check(&second, 0, low, true);
    turn("checked");
    // The server has gone; a touch waits for the next one.
    first.mapping().discard(half..2 * half).unwrap_or(());
    turn("waited");
    check(&first, PAGES / 2 - 1, high, true);
    turn("done");
}

fn backing() -> Arc<dyn uzone_fault::Backing> {
    Arc::new(function())
}

/// Returns a userfaultfd that reports what is given back, or prints that the case cannot run.
fn events(name: &str) -> Option<Arc<Uffd>> {
    userfaultfd(name, Features::EVENT_REMOVE, KernelFaults::IfAllowed)
}

#[test]
fn another_process_gets_its_bytes_and_its_zeroes_and_a_second_server() {
    let name = "another_process_gets_its_bytes_and_its_zeroes_and_a_second_server";
    if is_child(name) {
        return be_the_other_process();
    }
    if let Err(error) = Uffd::open(Features::EVENT_REMOVE, Features::NONE, KernelFaults::IfAllowed)
    {
        return skip(name, &error.to_string());
    }
    let mut other = Client::start(name);
    let numbers = other.ready();
    let [fd, first, second] = numbers[..] else { panic!("{numbers:?}") };
    let Some(fd) = other.take(name, fd) else { return };
    let remote = Remote::adopt(fd).unwrap();
    let len = ByteLen::new(PAGES / 2 * page());
    let regions = vec![
        RemoteRegion { start: Vaddr::new(first), len, offset: len.get(), page: probe::page_size() },
        RemoteRegion { start: Vaddr::new(second), len, offset: 0, page: probe::page_size() },
    ];
    let engine = Engine::new(NonZeroUsize::MIN).unwrap();
    let options = LazyOptions::default().advice(Advice::Auto);
    let adopt = |remote: Remote| -> AdoptedMemory {
        engine.adopt(remote, regions.clone(), backing(), &options, None).unwrap()
    };
    let memory = adopt(remote);
    other.go_on();
    assert_eq!(other.line("checked"), "checked");
    let stats = memory.stats();
    assert!(stats.faults > 0 && stats.around > 0 && stats.poisoned == 0, "{stats:?}");
    assert_eq!(memory.content(0), Some(Content::Removed));
    assert_eq!(memory.content(len.get() * 2), None);
    assert!(format!("{memory:?}").contains("AdoptedMemory"));

    // This server ends, and what it knew is lost; the next one reads what was removed since.
    let remote = memory.stop().unwrap();
    other.go_on();
    let memory = adopt(remote);
    assert_eq!(other.line("waited"), "waited");
    other.go_on();
    assert_eq!(other.line("done"), "done");
    other.go_on();
    assert!(other.child.wait().unwrap().success());
    drop(memory);
}

/// Touches pages of a part of the memory and gives them back, until `stop` is set.
fn be_noisy(memory: &Registered, part: u64, parts: u64, stop: &AtomicBool) {
    let len = PAGES / parts;
    let mut word = [0; 8];
    while !stop.load(Ordering::Acquire) {
        for at in part * len..(part + 1) * len {
            memory.mapping().read_at(at * page(), &mut word).unwrap();
            let right = crate::common::word(at * page()).to_ne_bytes();
            assert!(word == right || word == [0; 8], "page {at}");
            if at % 4 == 0 {
                memory.mapping().discard(at * page()..(at + 1) * page()).unwrap();
            }
        }
        memory.mapping().discard(part * len * page()..(part + 1) * len * page()).unwrap();
    }
}

#[test]
fn a_client_that_faults_at_full_speed_beside_one_that_must_stay_fast() {
    const NOISY: u64 = 32;
    let name = "a_client_that_faults_at_full_speed_beside_one_that_must_stay_fast";
    if events(name).is_none() {
        return;
    }
    let one = EngineOptions::default().readers(NonZeroUsize::MIN).producers(NonZeroUsize::MIN);
    let engine = Engine::with(one).unwrap();
    let adopt = |advice| {
        let memory = registered(&events(name).unwrap(), anonymous(PAGES));
        let options = LazyOptions::default().advice(advice);
        let regions = vec![region_at(0, &memory)];
        (engine.adopt(remote(&memory), regions, backing(), &options, None).unwrap(), memory)
    };
    let ((quiet, quiet_memory), (noisy, noisy_memory)) =
        (adopt(Advice::Random), adopt(Advice::Auto));
    let stop = AtomicBool::new(false);
    let mut before = 0;
    thread::scope(|scope| {
        for part in 0..NOISY {
            let (memory, stop) = (&noisy_memory, &stop);
            scope.spawn(move || be_noisy(memory, part, NOISY, stop));
        }
        let quiet = scope.spawn(|| {
            for at in (0..PAGES).step_by(32) {
                // The other one goes on between two faults of this one.
                while noisy.stats().faults < before + 64 {
                    thread::yield_now();
                }
                let begin = Instant::now();
                check(&quiet_memory, at, 0, false);
                assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
                before = noisy.stats().faults;
            }
        });
        let quiet = quiet.join();
        stop.store(true, Ordering::Release);
        quiet.unwrap();
    });
    assert!(quiet.stats().faults >= PAGES / 32 && noisy.stats().poisoned == 0, "{quiet:?}");
}

#[test]
fn regions_that_do_not_fit_are_refused() {
    let engine = Engine::new(NonZeroUsize::MIN).unwrap();
    let Ok(uffd) = Uffd::open(Features::NONE, Features::NONE, KernelFaults::IfAllowed) else {
        return skip("regions_that_do_not_fit", "no userfaultfd");
    };
    let remote = || Remote::adopt(uffd.as_fd().try_clone_to_owned().unwrap()).unwrap();
    let adopt = |regions| {
        let options = LazyOptions::default();
        engine.adopt(remote(), regions, Arc::new(ZeroBacking), &options, None)
    };
    let (start, page) = (Vaddr::new(1 << 30), PageSize::KIB_4);
    let whole = RemoteRegion { start, len: ByteLen::mib(1), offset: 0, page };
    for region in [
        RemoteRegion { start: Vaddr::new((1 << 30) + 1), ..whole },
        RemoteRegion { len: ByteLen::new(100), ..whole },
        RemoteRegion { len: ByteLen::ZERO, ..whole },
        RemoteRegion { offset: 8, ..whole },
    ] {
        let answer = adopt(vec![whole, region]);
        assert!(matches!(answer, Err(MapError::CutsPage { .. })), "{region:?}");
    }
    let (start, len, page) = (Vaddr::new(2 << 30), ByteLen::mib(2), PageSize::MIB_2);
    let huge = RemoteRegion { start, len, offset: 2 << 20, page };
    assert_eq!(
        adopt(vec![whole, huge]).unwrap_err().to_string(),
        "the region at 0x80000000 has pages of 2 MiB, and the first region has pages of 4 KiB: \
         hand over a descriptor for each size, or use one size"
    );
    // Two addresses of one page: only one of them would be woken.
    let second = RemoteRegion { start: Vaddr::new(2 << 30), offset: 1 << 19, ..whole };
    let answer = adopt(vec![second, whole]);
    assert!(matches!(answer, Err(MapError::Backing { .. })), "{answer:?}");
    for region in [
        RemoteRegion { offset: !0xfff, ..whole },
        RemoteRegion { start: Vaddr::new(!0xfff), ..whole },
    ] {
        let answer = adopt(vec![region]);
        assert!(matches!(answer, Err(MapError::Addr(_))), "{region:?}");
    }
    let none = adopt(Vec::new());
    assert!(none.is_err());
    // `/dev/null` has no byte.
    let empty = uzone_fault::FileBacking::new(std::fs::File::open("/dev/null").unwrap()).unwrap();
    let answer =
        engine.adopt(remote(), vec![whole], Arc::new(empty), &LazyOptions::default(), None);
    assert!(matches!(answer, Err(MapError::TooShort { .. })));
}

/// A server is killed right after it read that pages were given back, and before it noted that.
#[test]
fn what_was_read_by_a_server_that_died_of_it_is_known_to_the_next() {
    let name = "what_was_read_by_a_server_that_died_of_it_is_known_to_the_next";
    let Some(uffd) = events(name) else { return };
    let memory = registered(&uffd, anonymous(16));
    // The region is in the middle of the backing.
    let regions = vec![region_at(4 * page(), &memory)];
    let log = AdoptedMemory::log(&regions, None, None).unwrap();
    assert_eq!(log.marks(), 20);
    let kept = |log: &EventLog| log.fd().unwrap().try_clone_to_owned().unwrap();
    let read = |fd| LoggedEvents::read(fd, AdoptedMemory::marks(&regions).unwrap()).unwrap();
    let first = kept(&log);
    let mut buffer = EventBuffer::logged(log);
    let dead = remote(&memory);
    thread::scope(|scope| {
        let reader = scope.spawn(|| {
            while dead.read(&mut buffer).unwrap() == 0 {
                thread::yield_now();
            }
        });
        memory.mapping().discard(2 * page()..5 * page()).unwrap();
        reader.join().unwrap();
    });
    // Of this one only the marks are left.
    let log = AdoptedMemory::log(&regions, Some(&read(first)), None).unwrap();
    assert_eq!(log.marked().collect::<Vec<_>>(), [6, 7, 8]);
    let second = kept(&log);
    drop(log);
    let log = AdoptedMemory::log(&regions, Some(&read(second)), None).unwrap();
    let third = kept(&log);

    let engine = Engine::new(NonZeroUsize::MIN).unwrap();
    let options = LazyOptions::default();
    // A thread waits that the dead server had read the fault of.
    thread::scope(|scope| {
        let waiter = scope.spawn(|| check(&memory, 0, 4 * page(), false));
        while dead.read(&mut buffer).unwrap() == 0 {
            thread::yield_now();
        }
        let server =
            engine.adopt(remote(&memory), regions.clone(), backing(), &options, Some(log)).unwrap();
        waiter.join().unwrap();
        (0..16).for_each(|at| check(&memory, at, 4 * page(), (2..5).contains(&at)));
        thread::scope(|scope| {
            scope.spawn(|| memory.mapping().discard(9 * page()..10 * page()).unwrap());
        });
        check(&memory, 9, 4 * page(), true);
        drop(server);
    });
    let log = AdoptedMemory::log(&regions, Some(&read(third)), None).unwrap();
    assert_eq!(log.marked().collect::<Vec<_>>(), [6, 7, 8, 13]);
    // A log of other memory is refused.
    let other = RemoteRegion { len: ByteLen::new(page()), ..regions[0] };
    let answer =
        engine.adopt(remote(&memory), vec![other], Arc::new(ZeroBacking), &options, Some(log));
    assert!(matches!(answer, Err(MapError::Backing { .. })), "{answer:?}");
}

/// Memory that is touched at random, and its server.
fn adopted_at_random(name: &str) -> Option<(Registered, AdoptedMemory)> {
    let uffd = events(name)?;
    let memory = registered(&uffd, anonymous(PAGES));
    let engine = Engine::new(NonZeroUsize::MIN).unwrap();
    let options = LazyOptions::default().advice(Advice::Random);
    let regions = vec![region_at(0, &memory)];
    let server = engine.adopt(remote(&memory), regions, backing(), &options, None).unwrap();
    Some((memory, server))
}

#[test]
fn what_is_prefetched_is_there_when_it_is_touched_and_what_was_given_back_stays_zero() {
    let name = "what_is_prefetched_is_there_when_it_is_touched";
    let Some((memory, server)) = adopted_at_random(name) else { return };
    memory.mapping().discard(8 * page()..16 * page()).unwrap();
    // Every second page in a wild order, some twice, and some that there are not.
    let wanted = (0..PAGES).map(|at| at * 37 % PAGES).filter(|at| at % 2 == 0);
    let mut offsets: Vec<u64> = wanted.map(|at| at * page() + at).collect();
    offsets.extend([0, PAGES * page(), u64::MAX, 0]);
    server.prefetch(&offsets);
    wait_for("the pages", || server.stats().populated >= PAGES / 2 - 4);
    (0..PAGES).step_by(2).filter(|at| !(8..16).contains(at)).for_each(|at| {
        check(&memory, at, 0, false);
    });
    assert_eq!(server.stats().faults, 0);
    (0..PAGES).for_each(|at| check(&memory, at, 0, (8..16).contains(&at)));
    assert_eq!(server.stats().populated, PAGES / 2 - 4);
}

#[test]
fn what_waits_for_the_first_fault_is_not_installed_before_it_and_is_all_there_after_it() {
    let name = "what_waits_for_the_first_fault_is_not_installed_before_it";
    let Some((memory, server)) = adopted_at_random(name) else { return };
    let offsets: Vec<u64> = (0..PAGES).step_by(2).map(|at| at * page()).collect();
    server.prefetch_from_first_fault(&offsets);
    // Another list waits for nothing, and is there when the reader has taken both.
    server.prefetch(&[page()]);
    wait_for("the page of the other list", || server.stats().populated == 1);
    assert_eq!(server.content(0), Some(Content::Absent));
    check(&memory, PAGES - 1, 0, false);
    wait_for("the pages", || server.stats().populated == PAGES / 2 + 1);
    assert_eq!(server.stats().faults, 1);
    // A list that comes later starts at once.
    server.prefetch_from_first_fault(&[3 * page()]);
    wait_for("the last page", || server.stats().populated == PAGES / 2 + 2);
    (0..PAGES).for_each(|at| check(&memory, at, 0, false));
}

#[test]
fn huge_pages_get_their_bytes_their_zeroes_and_the_next_server() {
    let name = "huge_pages_get_their_bytes_their_zeroes_and_the_next_server";
    let features = Features::EVENT_REMOVE | Features::MISSING_HUGETLB | Features::POISON;
    let Some(uffd) = userfaultfd(name, features, KernelFaults::IfAllowed) else { return };
    let Some(_pool) = Pool::grow(name, PageSize::MIB_2, 4) else { return };
    // An area, and a second one behind pages that no area has.
    let areas = [(HUGE, HUGE), (4 * HUGE, 3 * HUGE)].map(|(offset, len)| {
        let mapping = Mapping::hugetlb(ByteLen::new(len), PageSize::MIB_2).unwrap();
        let memory = registered(&uffd, mapping);
        let region = region_at(offset, &memory);
        (memory, region)
    });
    let regions: Vec<_> = areas.iter().map(|(_, region)| *region).collect();
    let engine = Engine::new(NonZeroUsize::MIN).unwrap();
    let options = LazyOptions::default().advice(Advice::Auto);
    let adopt = |before: Option<&LoggedEvents>| {
        let log = AdoptedMemory::log(&regions, before, None).unwrap();
        assert_eq!(log.marks(), 7);
        let kept = log.fd().unwrap().try_clone_to_owned().unwrap();
        let remote = remote(&areas[0].0);
        let server = engine.adopt(remote, regions.clone(), backing(), &options, Some(log));
        (server.unwrap(), kept)
    };
    let (server, log) = adopt(None);
    let right = |area: usize, is_zero: &dyn Fn(u64) -> bool| {
        let (memory, region) = &areas[area];
        for at in 0..region.len.get() / 4096 {
            check(memory, at, region.offset, is_zero(at / 512));
        }
    };
    // The second page of the last area comes before it is touched.
    server.prefetch(&[5 * HUGE + 7, 2 * HUGE]);
    wait_for("the page", || server.stats().populated == 1);
    assert_eq!(server.content(5 * HUGE), Some(Content::Present));
    assert_eq!((server.content(2 * HUGE), server.content(7 * HUGE)), (None, None));
    right(0, &|_| false);
    right(1, &|_| false);
    // What is given back is zero, a huge page as a whole.
    areas[1].0.mapping().discard(HUGE..2 * HUGE).unwrap();
    right(1, &|page| page == 1);
    drop(server);

    // The next server knows that from the log. What was installed before does not fault.
    let before = LoggedEvents::read(log, AdoptedMemory::marks(&regions).unwrap()).unwrap();
    let given_back = AdoptedMemory::given_back(&regions, &before).unwrap();
    assert_eq!(given_back, vec![5 * HUGE..6 * HUGE]);
    let (server, _) = adopt(Some(&before));
    assert_eq!(server.content(HUGE), Some(Content::Absent));
    areas[1].0.mapping().discard(0..HUGE).unwrap();
    right(0, &|_| false);
    right(1, &|page| page < 2);
    // The page is counted after its thread was woken.
    wait_for("the last", || server.stats().demand >= 1);
    assert_eq!(server.stats().demand, 1, "{:?}", server.stats());
}

/// Memory of this process that is answered for as another's: a page, and then some blocks of 2 MiB.
struct OwnBlocks {
    // Dropped first: no fault is answered afterwards.
    adopted: AdoptedMemory,
    memory: Registered,
    peer: Peer,
}

impl OwnBlocks {
    const BLOCK: u64 = 2 << 20;

    fn new(
        engine: &Engine,
        blocks: u64,
        backing: Arc<dyn uzone_fault::Backing>,
        advice: Advice,
        name: &str,
    ) -> Option<Self> {
        let uffd = events(name)?;
        // The first page is at the end of a block, of which there is no more.
        let len = ByteLen::new((blocks + 1) * Self::BLOCK);
        let align = Some(ByteLen::new(Self::BLOCK));
        let mapping = Mapping::anonymous(len, Anonymous { align, ..Anonymous::default() }).unwrap();
        let memory = registered(&uffd, mapping);
        let (whole, first) = (region_at(0, &memory), Self::BLOCK - page());
        let (start, len) = (whole.start.get() + first, ByteLen::new(len.get() - first));
        let regions = vec![RemoteRegion { start: Vaddr::new(start), len, ..whole }];
        let options = LazyOptions::default().advice(advice);
        let adopted = engine.adopt(remote(&memory), regions, backing, &options, None).unwrap();
        let own = rustix::process::getpid();
        let pidfd = rustix::process::pidfd_open(own, rustix::process::PidfdFlags::empty()).unwrap();
        let peer = Peer::from_parts(std::process::id(), 0, pidfd).unwrap();
        Some(Self { adopted, memory, peer })
    }

    /// Returns where a block starts in the mapping.
    fn start(block: u64) -> u64 {
        (block + 1) * Self::BLOCK
    }

    fn address(&self, block: u64) -> Vaddr {
        Vaddr::new(self.memory.mapping().addr().get() as u64 + Self::start(block))
    }

    fn collapse(&self, block: u64) -> std::io::Result<Option<std::io::Error>> {
        self.peer.collapse(self.address(block), ByteLen::new(Self::BLOCK))
    }

    fn is_huge(&self, block: u64) -> bool {
        let range = Self::start(block)..Self::start(block) + Self::BLOCK;
        self.memory.mapping().huge_backed_in(range).unwrap().get() == Self::BLOCK
    }

    /// Waits until the pages of a block are present, but for one.
    fn wait_for(&self, block: u64, except: Option<u64>) {
        let first = page() + block * Self::BLOCK;
        let is_there = |at: u64| {
            Some(at) == except
                || self.adopted.content(first + at * page()) == Some(Content::Present)
        };
        wait_for("the block", || (0..Self::BLOCK / page()).all(is_there));
    }

    fn check(&self, block: u64, is_zero: impl Fn(u64) -> bool) {
        for at in 0..Self::BLOCK / page() {
            let mut seen = vec![1; usize_of(page())];
            self.memory.mapping().read_at(Self::start(block) + at * page(), &mut seen).unwrap();
            let offset = page() + block * Self::BLOCK + at * page();
            assert!(seen == bytes_at(offset, is_zero(at)), "page {at} of block {block}");
        }
    }

    fn discard(&self, block: u64, at: u64) {
        let start = Self::start(block) + at * page();
        self.memory.mapping().discard(start..start + page()).unwrap();
    }
}

#[test]
fn blocks_that_are_filled_become_huge_pages_and_no_byte_changes() {
    let name = "blocks_that_are_filled_become_huge_pages_and_no_byte_changes";
    let engine = Engine::new(NonZeroUsize::MIN).unwrap();
    let Some(own) = OwnBlocks::new(&engine, 3, backing(), Advice::Blocks, name) else { return };
    assert_eq!(own.adopted.blocks_left(), 3, "what is before the first block is none");
    // A write in the middle brings all of its block.
    own.memory.mapping().write_at(OwnBlocks::start(1) + 100 * page(), &[0]).unwrap();
    own.wait_for(1, None);
    assert_eq!(own.adopted.take_filled_blocks(8), [own.address(1)]);
    assert!(own.adopted.take_filled_blocks(8).is_empty(), "each is returned once");
    match own.collapse(1) {
        Ok(None) => {}
        answer => return skip(name, &format!("{answer:?}")),
    }
    assert!(own.is_huge(1));
    let first = words_at(page() + OwnBlocks::BLOCK + 100 * page(), 8);
    own.memory.mapping().write_at(OwnBlocks::start(1) + 100 * page(), &first).unwrap();
    own.check(1, |_| false);
    own.discard(1, 7);
    own.check(1, |at| at == 7);

    // A page that was given back before its block was filled keeps it from being returned, and the kernel
    // makes no huge page over the gap.
    own.discard(0, 511);
    own.memory.mapping().read_at(OwnBlocks::start(0), &mut [0]).unwrap();
    own.wait_for(0, Some(511));
    assert!(own.adopted.take_filled_blocks(8).is_empty());
    assert!(matches!(own.collapse(0), Ok(Some(_))));
    own.check(0, |at| at == 511);

    // One that is given back after the block was returned, and before it is collapsed.
    own.memory.mapping().read_at(OwnBlocks::start(2), &mut [0]).unwrap();
    own.wait_for(2, None);
    assert_eq!(own.adopted.take_filled_blocks(8), [own.address(2)]);
    own.discard(2, 3);
    assert!(matches!(own.collapse(2), Ok(Some(_))));
    assert!(!own.is_huge(2));
    own.check(2, |at| at == 3);
    assert_eq!(own.adopted.blocks_left(), 1);
}

#[test]
fn zero_pages_take_memory_where_huge_pages_are_to_be_made_and_elsewhere_no_huge_page_is_made_of_them()
 {
    let name = "zero_pages_take_memory_where_huge_pages_are_to_be_made";
    let engine = Engine::new(NonZeroUsize::MIN).unwrap();
    for (advice, is_made) in [(Advice::Blocks, true), (Advice::Normal, false)] {
        let zeroes = Arc::new(ZeroBacking);
        let Some(own) = OwnBlocks::new(&engine, 1, zeroes, advice, name) else { return };
        own.check(0, |_| true);
        // A page is noted as present a moment after its thread was woken.
        own.wait_for(0, None);
        let filled = own.adopted.take_filled_blocks(1);
        assert_eq!(filled.len(), usize::from(is_made));
        match own.collapse(0) {
            Ok(None) => assert!(is_made),
            Ok(Some(_)) if !is_made => {}
            answer => return skip(name, &format!("{answer:?}")),
        }
        own.check(0, |_| true);
    }
}
