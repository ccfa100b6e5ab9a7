//! The engine against a kernel that answers whatever a kernel may answer, in random order, with a
//! plain map as the oracle of the bytes of each page.

#[path = "../tests/common/skip.rs"]
mod skip;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use proptest::prelude::*;
use uzone_os::Vaddr;
use uzone_os::uffd::{Answered, UffdCall, UffdError};
use uzone_pages::{Advice, ByteLen, Content, FaultAround, PageCount, PageSize, Touch};

use crate::backing::Backing;
use crate::backing::continue_or_zero;
use crate::backing::window::{Filled, Window};
use crate::engine::core::produce::Produced;
use crate::engine::core::{Core, Outcome, ReaderState};
use crate::engine::pending::Awaited;
use crate::error::{BackingError, caught};
use crate::memory::kernel::{Fill, Kernel};
use crate::options::LazyOptions;
use crate::pages::Policy;
use crate::pages::states::PageStates;

pub(crate) use self::skip::{skip, userfaultfd};

const PAGES: u64 = 192;
const PAGE: usize = 4096;
const POLICY: Policy = Policy { zeroes_by_copy: false, is_remote: false, is_tracked: false };

/// The pages of the made-up kernel, and those that threads wait for.
#[derive(Default)]
struct Machine {
    /// The first byte of each page that is there; `None` for one that raises a signal.
    pages: BTreeMap<u64, Option<u8>>,
    waiting: BTreeSet<u64>,
    /// Numbers that decide the next answers, used in turn.
    whims: Vec<u8>,
    next: usize,
    /// How often in a row the layout was changing, or there was no memory.
    deferred: u32,
    /// Pages that were taken away behind the engine's back, and have not come back.
    lost: BTreeSet<u64>,
    /// Pages that the page cache does not have.
    holes: BTreeSet<u64>,
}

impl Machine {
    fn whim(&mut self) -> u8 {
        let whim = self.whims[self.next % self.whims.len()];
        self.next += 1;
        whim
    }
}

/// The answer of a kernel that has no memory.
pub(crate) fn no_memory(call: UffdCall, range: &Range<u64>) -> UffdError {
    UffdError::Refused {
        call,
        start: Vaddr::new(range.start),
        len_bytes: range.end - range.start,
        cause: std::io::ErrorKind::OutOfMemory.into(),
    }
}

#[derive(Default)]
struct FakeKernel {
    policy: Policy,
    machine: Mutex<Machine>,
    /// The step of another thread when a page is about to be marked as bad, once.
    before_a_mark: Mutex<Option<Box<dyn FnOnce() + Send>>>,
    /// The step of another thread when pages are about to be copied, once.
    before_a_copy: Mutex<Option<Box<dyn FnOnce() + Send>>>,
}

impl FakeKernel {
    fn lock(&self) -> MutexGuard<'_, Machine> {
        self.machine.lock().unwrap()
    }

    /// Puts pages in place as the kernel does: up to the first that is there, and as far as it
    /// likes.
    fn fill(
        &self,
        range: Range<u64>,
        call: UffdCall,
        byte: impl Fn(u64) -> Option<u8>,
    ) -> Result<Answered, UffdError> {
        let mut machine = self.lock();
        let (start, end) = (range.start >> 12, range.end >> 12);
        assert!(start < end && end <= PAGES && (range.start | range.end).is_multiple_of(4096));
        let whim = machine.whim();
        let (is_changing, is_short) = (whim.is_multiple_of(8), whim % 31 == 1);
        if (is_changing || is_short) && machine.deferred < 3 {
            machine.deferred += 1;
            return if is_changing || call == UffdCall::Poison {
                Ok(Answered::LayoutChanging)
            } else {
                Err(no_memory(call, &range))
            };
        }
        machine.deferred = 0;
        // A copy replaces a signal; a signal and a page of zeroes replace nothing.
        let is_there = |machine: &Machine, page: u64| match machine.pages.get(&page) {
            None => false,
            Some(None) => matches!(call, UffdCall::Poison | UffdCall::ZeroPage),
            Some(Some(_)) => true,
        };
        if is_there(&machine, start) {
            return Ok(Answered::Present);
        }
        if whim % 13 == 4 {
            // Another thread was first, and did not wake the waiting thread.
            machine.pages.insert(start, Some(right(start)));
            machine.lost.remove(&start);
            return Ok(Answered::Present);
        }
        let mut stop = (start..end).find(|&page| is_there(&machine, page)).unwrap_or(end);
        if whim % 5 == 2 && stop - start > 1 {
            stop = start + 1 + u64::from(whim) % (stop - start - 1);
        }
        for page in start..stop {
            machine.pages.insert(page, byte(page));
            machine.lost.remove(&page);
            machine.waiting.remove(&page);
        }
        Ok(if stop == end { Answered::All } else { Answered::Part { bytes: (stop - start) << 12 } })
    }
}

impl Kernel for FakeKernel {
    fn policy(&self) -> Policy {
        self.policy
    }

    fn install(&self, range: Range<u64>, fill: Fill<'_>) -> Result<Answered, UffdError> {
        let run_once = |other: &Mutex<Option<Box<dyn FnOnce() + Send>>>| {
            let other = other.lock().unwrap().take();
            if let Some(other) = other {
                other();
            }
        };
        match fill {
            Fill::Bytes(bytes) => {
                run_once(&self.before_a_copy);
                let offset = range.start;
                self.fill(range, UffdCall::Copy, |page| {
                    let at = usize::try_from((page << 12) - offset).unwrap();
                    let whole = &bytes[at..at + PAGE];
                    assert!(whole.iter().all(|&byte| byte == whole[0]), "a page torn from two");
                    Some(whole[0])
                })
            }
            Fill::Zero => self.fill(range, UffdCall::ZeroPage, |_| Some(0)),
            Fill::Cached if self.lock().holes.contains(&(range.start >> 12)) => Ok(Answered::Hole),
            Fill::Cached => self.fill(range, UffdCall::Continue, |page| Some(right(page))),
            Fill::Poison => {
                run_once(&self.before_a_mark);
                self.fill(range, UffdCall::Poison, |_| None)
            }
            Fill::From { .. } => Ok(Answered::Hole),
        }
    }

    fn wake(&self, range: Range<u64>) {
        let mut machine = self.lock();
        for page in range.start >> 12..range.end >> 12 {
            machine.waiting.remove(&page);
        }
    }
}

/// The oracle: the bytes of a page.
fn right(page: u64) -> u8 {
    if page % 11 == 5 { 0 } else { u8::try_from(page % 250 + 1).unwrap() }
}

/// The kind of a page for its backing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Ready,
    Slow,
    Failing,
    Panicking,
    LeftOut,
}

struct FakeBacking(Vec<Kind>);

impl FakeBacking {
    fn kind(&self, offset: u64) -> Kind {
        self.0[usize::try_from(offset >> 12).unwrap()]
    }

    fn fill(&self, window: &mut Window<'_>, page: u64) -> Result<(), BackingError> {
        let range = page << 12..(page + 1) << 12;
        let filled = match page % 3 {
            0 if right(page) == 0 => window.zero(range)?,
            1 => window.continue_mapping(range)?,
            _ => window.copy_with(range, |out| {
                out.fill(right(page));
                Ok::<_, UffdError>(out.len())
            })?,
        };
        let _ = filled;
        Ok(())
    }
}

impl Backing for FakeBacking {
    fn map_pages(&self, window: &mut Window<'_>) {
        while let Some(run) = window.next_run() {
            let mut at = run.start;
            while at < run.end {
                // Whole runs of ready pages at once, as a real one does.
                let end = (at..run.end)
                    .step_by(PAGE)
                    .find(|&at| self.kind(at) != Kind::Ready)
                    .unwrap_or(run.end);
                if end == at {
                    assert!(
                        self.kind(at) != Kind::Panicking || at % 8192 == 0,
                        "as the test wants"
                    );
                    at += 4096;
                    continue;
                }
                let room = window.room();
                let end = end.min(at + room);
                let filled = window.copy_with(at..end, |out| {
                    for (index, page) in out.chunks_mut(PAGE).enumerate() {
                        page.fill(right((at >> 12) + index as u64));
                    }
                    Ok::<_, UffdError>(out.len())
                });
                if filled.is_err() {
                    return;
                }
                at = end;
            }
        }
    }

    fn fault(&self, window: &mut Window<'_>) -> Result<(), BackingError> {
        let page = window.range().start >> 12;
        match self.kind(window.range().start) {
            Kind::Ready | Kind::Slow => self.fill(window, page),
            Kind::Failing => Err(BackingError::Other("it fails".into())),
            // Without the hook that prints where.
            Kind::Panicking => std::panic::resume_unwind(Box::new("as the test wants")),
            Kind::LeftOut => Ok(()),
        }
    }

    fn largest_window(&self) -> FaultAround {
        // So small an area has room for windows that grow no more.
        FaultAround::try_new(ByteLen::kib(64)).unwrap()
    }
}

fn core_by(
    policy: Policy,
    whims: Vec<u8>,
    kinds: Vec<Kind>,
    advice: Advice,
    window: u64,
) -> (Arc<FakeKernel>, Core) {
    core_of(policy, whims, Arc::new(FakeBacking(kinds)), advice, window)
}

fn core_of(
    policy: Policy,
    whims: Vec<u8>,
    backing: Arc<dyn Backing>,
    advice: Advice,
    window: u64,
) -> (Arc<FakeKernel>, Core) {
    let kernel = Arc::new(FakeKernel { policy, ..FakeKernel::default() });
    kernel.lock().whims = whims;
    let contents = PageStates::reserve(PageCount::new(PAGES), PageSize::KIB_4).unwrap();
    let size = FaultAround::try_new(ByteLen::new(window * 4096)).unwrap();
    let options = LazyOptions::default().advice(advice).fault_around(size);
    let areas = [contents.fault_area(0)];
    let core = Core::new(kernel.clone(), backing, contents, &areas, &options);
    (kernel, core)
}

#[derive(Clone, Debug)]
enum Step {
    /// A thread touches a page.
    Touch { page: u64, is_write: bool },
    /// A worker takes the oldest page of the queue.
    Work,
    /// There is no fault, so some neighbours are installed.
    Around,
    /// A page is given back through the engine.
    Evict { page: u64 },
    /// A page is taken away behind the engine's back.
    Lose { page: u64 },
    /// Pages are mapped that no thread waits for.
    Ready { page: u64, pages: u64 },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let page = 0..PAGES;
    let step = prop_oneof![
        6 => (page.clone(), any::<bool>()).prop_map(|(page, is_write)| Step::Touch { page, is_write }),
        3 => Just(Step::Work),
        4 => Just(Step::Around),
        1 => page.clone().prop_map(|page| Step::Evict { page }),
        1 => page.clone().prop_map(|page| Step::Lose { page }),
        1 => (page, 1_u64..40).prop_map(|(page, pages)| Step::Ready { page, pages }),
    ];
    prop::collection::vec(step, 1..120)
}

fn kinds() -> impl Strategy<Value = Vec<Kind>> {
    let kind = prop_oneof![
        6 => Just(Kind::Ready),
        3 => Just(Kind::Slow),
        1 => Just(Kind::Failing),
        1 => Just(Kind::Panicking),
        1 => Just(Kind::LeftOut),
    ];
    prop::collection::vec(kind, usize::try_from(PAGES).unwrap())
}

/// A thread touches a page, and goes on touching it until it is there: as the kernel does.
fn touch(
    kernel: &FakeKernel,
    core: &Core,
    page: u64,
    is_write: bool,
    state: &mut ReaderState,
    queue: &mut Vec<u64>,
) {
    let touch = if is_write { Touch::Write } else { Touch::Read };
    for _ in 0..50 {
        if kernel.lock().pages.contains_key(&page) {
            kernel.lock().waiting.remove(&page);
            return;
        }
        kernel.lock().waiting.insert(page);
        let outcome = core.fault(page, touch, state);
        assert_ne!(outcome, Outcome::Later, "only what others remove is deferred");
        if matches!(outcome, Outcome::Produce { .. }) {
            assert_eq!(
                core.contents().get(page),
                Content::Filling,
                "the thread that queues a page owns it"
            );
            assert!(!queue.contains(&page), "a page has one owner");
            queue.push(page);
        }
        if kernel.lock().waiting.contains(&page) {
            let content = core.contents().get(page);
            assert_eq!(content, Content::Filling, "page {page} waits and is not being produced");
            return;
        }
    }
    panic!("page {page} is woken again and again and never comes");
}

/// Compares the bytes of a page, which may be bad, and the engine's notes of it with the oracle.
fn check(kernel: &FakeKernel, core: &Core, kinds: &[Kind]) {
    let machine = kernel.lock();
    for page in 0..PAGES {
        let content = core.contents().get(page);
        match machine.pages.get(&page) {
            Some(Some(byte)) => assert_eq!(*byte, right(page), "page {page}"),
            Some(None) => {
                assert_eq!(content, Content::Poisoned, "page {page}");
                let may_fail = !matches!(kinds[usize_of(page)], Kind::Ready | Kind::Slow);
                assert!(may_fail, "page {page} was given up");
            }
            None => assert!(
                content != Content::Present || machine.lost.contains(&page),
                "page {page} is said to be there"
            ),
        }
    }
}

fn usize_of(number: u64) -> usize {
    usize::try_from(number).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn whatever_the_kernel_answers_a_reader_gets_the_right_page_or_a_signal(
        whims in prop::collection::vec(any::<u8>(), 1..200),
        kinds in kinds(),
        steps in steps(),
        advice in prop::sample::select(vec![Advice::Normal, Advice::Random, Advice::Sequential, Advice::Auto]),
        window in prop::sample::select(vec![1_u64, 4, 16, 64]),
    ) {
        let (kernel, core) = core_by(POLICY, whims, kinds.clone(), advice, window);
        let mut state = ReaderState::new(16 * PAGE);
        let mut worker = ReaderState::new(PAGE);
        let mut queue: Vec<u64> = Vec::new();
        let mut touched = BTreeSet::new();
        for step in steps {
            match step {
                Step::Touch { page, is_write } => {
                    touched.insert((page, is_write));
                    touch(&kernel, &core, page, is_write, &mut state, &mut queue);
                }
                Step::Work if queue.is_empty() => {}
                Step::Work => {
                    let page = queue.remove(0);
                    let answer = core.produce(page, &mut worker, None);
                    prop_assert!(kernel.lock().pages.contains_key(&page));
                    prop_assert!(!kernel.lock().waiting.contains(&page), "the waiter of page {page} was not woken");
                    if kinds[usize_of(page)] == Kind::Failing {
                        prop_assert!(answer.is_err());
                    }
                }
                Step::Around => {
                    core.map_later(&mut state);
                }
                Step::Evict { page } => {
                    if core.contents().advance(page, Content::Present, Content::Removed) {
                        kernel.lock().pages.remove(&page);
                        prop_assert!(core.contents().advance(page, Content::Removed, Content::Absent));
                        kernel.wake(page << 12..(page + 1) << 12);
                    }
                }
                Step::Lose { page } => {
                    // A signal stays until it is mended, and an owned page was never there.
                    let mut machine = kernel.lock();
                    if matches!(machine.pages.get(&page), Some(Some(_))) {
                        machine.pages.remove(&page);
                        machine.lost.insert(page);
                    }
                }
                Step::Ready { page, pages } => {
                    core.map_ready(page..(page + pages).min(PAGES), &mut worker);
                }
            }
            check(&kernel, &core, &kinds);
        }
        // In the end every thread that touched a page has it, or a signal.
        for page in queue.drain(..) {
            let _ = core.produce(page, &mut worker, None);
        }
        for (page, is_write) in touched {
            touch(&kernel, &core, page, is_write, &mut state, &mut queue);
            for page in queue.drain(..) {
                let _ = core.produce(page, &mut worker, None);
            }
            touch(&kernel, &core, page, is_write, &mut state, &mut queue);
            prop_assert!(kernel.lock().pages.contains_key(&page));
        }
        check(&kernel, &core, &kinds);
        prop_assert!(kernel.lock().waiting.is_empty());
    }
}

/// A kernel that has no whims.
fn plain(kinds: Vec<Kind>, advice: Advice, window: u64) -> (Arc<FakeKernel>, Core, ReaderState) {
    let (kernel, core) = core_by(POLICY, vec![3], kinds, advice, window);
    (kernel, core, ReaderState::new(16 * PAGE))
}

/// Memory of another process, whose removals are read here; all pages are ready.
fn of_another(whims: Vec<u8>) -> (Arc<FakeKernel>, Core, ReaderState) {
    let policy = Policy { is_remote: true, ..POLICY };
    let (kernel, core) = core_by(policy, whims, all(Kind::Ready), Advice::Normal, 16);
    (kernel, core, ReaderState::new(16 * PAGE))
}

fn all(kind: Kind) -> Vec<Kind> {
    vec![kind; usize::try_from(PAGES).unwrap()]
}

fn present(kernel: &FakeKernel) -> Vec<u64> {
    kernel.lock().pages.keys().copied().collect()
}

#[test]
fn the_faulting_page_goes_first_unless_it_is_read_in_order() {
    // The kernel's replies are counted: one for the page alone, and one for each side of it.
    for (page, replies) in [(40, 3), (0, 1)] {
        let (kernel, core, mut state) = plain(all(Kind::Ready), Advice::Normal, 16);
        assert_eq!(core.fault(page, Touch::Read, &mut state), Outcome::Answered);
        assert!(kernel.lock().pages.contains_key(&page));
        while core.map_later(&mut state) {}
        assert_eq!(present(&kernel).len(), 16);
        assert_eq!(kernel.lock().next, replies, "page {page}");
    }
}

#[test]
fn what_is_not_a_page_of_the_window_is_refused() {
    let (_, core, _) = plain(all(Kind::Ready), Advice::Normal, 16);
    let mut staging = vec![0; 4 * PAGE];
    let mut window = Window::new(&core.pages, 4..8, None, &mut staging);
    assert_eq!((window.range(), window.wanted()), (4 << 12..8 << 12, None));
    assert!(window.zero(3 << 12..5 << 12).is_err());
    assert!(window.zero(7 << 12..9 << 12).is_err());
    assert!(window.copy(4 << 12, &[0; 100]).is_err());
    assert!(window.zero((4 << 12) + 1..5 << 12).is_err());
    let backwards = Range { start: 6 << 12, end: 5 << 12 };
    assert!(window.zero(backwards).is_err());
    assert!(format!("{window:?}").contains("Window"));
    assert_eq!(window.state.filled, 0);
}

/// Continues pages as a memory file's backing does, and takes a hole for zeroes.
struct Continuing;

impl Backing for Continuing {
    fn fault(&self, window: &mut Window<'_>) -> Result<(), BackingError> {
        continue_or_zero(window)
    }
}

#[test]
fn a_page_of_a_memory_file_that_the_kernel_puts_off_is_not_taken_for_a_hole() {
    // The kernel answers three times that the layout changes, and then installs the page.
    let (kernel, core) = core_of(POLICY, vec![8], Arc::new(Continuing), Advice::Normal, 1);
    assert!(core.contents().claim(7));
    core.produce(7, &mut ReaderState::new(PAGE), None).unwrap();
    assert_eq!(kernel.lock().pages[&7], Some(right(7)));
    kernel.lock().holes.insert(8);
    assert!(core.contents().claim(8));
    core.produce(8, &mut ReaderState::new(PAGE), None).unwrap();
    assert_eq!(kernel.lock().pages[&8], Some(0));
}

#[test]
fn a_hole_of_a_memory_file_of_another_process_is_zero() {
    let policy = Policy { is_remote: true, ..POLICY };
    let (kernel, core) = core_of(policy, vec![3], Arc::new(Continuing), Advice::Normal, 1);
    let mut state = ReaderState::new(PAGE);
    kernel.lock().holes.insert(8);
    for (page, byte) in [(7, right(7)), (8, 0)] {
        assert!(core.contents().claim(page));
        let staged = core.stage(page, &mut state);
        assert!(core.install(page, staged).is_none());
        assert_eq!(kernel.lock().pages[&page], Some(byte));
        assert_eq!(core.contents().get(page), Content::Present);
    }
}

#[test]
fn a_page_of_another_process_that_has_no_memory_for_it_waits_until_the_deadline() {
    let policy = Policy { is_remote: true, ..POLICY };
    // No memory, twice, and then as it should be.
    let (kernel, core) =
        core_of(policy, vec![1, 32, 3, 3], Arc::new(Continuing), Advice::Normal, 1);
    let mut state = ReaderState::new(PAGE);
    assert!(core.contents().claim(7) && core.contents().claim(8));
    let mut staged = core.stage(7, &mut state);
    for _ in 0..2 {
        staged = core.install(7, staged).expect("it is tried again");
        assert_eq!(core.contents().get(7), Content::Filling);
    }
    assert!(core.install(7, staged).is_none());
    assert_eq!(kernel.lock().pages[&7], Some(right(7)));
    assert!(core.recorder.last_failure().is_none());
    let since = std::time::Instant::now();
    core.time_out(
        &Awaited { page: 8, since, fault: None, is_produced: true },
        Duration::from_secs(1),
    );
    let reason = core.recorder.last_failure().expect("it was given up").reason;
    assert!(reason.contains("memory limit"), "{reason}");
}

#[test]
fn a_page_for_which_there_is_no_memory_is_tried_again_and_not_bad() {
    // No memory, twice, and then as it should be.
    let (kernel, core) = core_by(POLICY, vec![1, 32, 3], all(Kind::Slow), Advice::Normal, 1);
    let mut state = ReaderState::new(PAGE);
    assert!(core.contents().claim(7));
    core.produce(7, &mut state, None).unwrap();
    assert_eq!(kernel.lock().pages[&7], Some(right(7)));
    // A thread that does not wait for memory leaves the page absent, and its waiters fault again.
    kernel.lock().next = 0;
    kernel.lock().waiting.insert(8);
    assert!(core.contents().claim(8));
    core.produce(8, &mut state, Some(Duration::ZERO)).unwrap_err();
    assert_eq!(core.contents().get(8), Content::Absent);
    assert!(kernel.lock().waiting.is_empty());
    assert!(core.recorder.last_failure().is_none());
}

#[test]
fn a_page_that_a_second_waiter_has_marked_as_bad_is_not_taken_for_a_present_one() {
    let (kernel, core, _) = plain(all(Kind::Failing), Advice::Random, 1);
    let core = Arc::new(core);
    let second = core.clone();
    *kernel.before_a_mark.lock().unwrap() = Some(Box::new(move || {
        let _ = second.fault(7, Touch::Read, &mut ReaderState::new(PAGE));
    }));
    assert!(core.contents().claim(7));
    core.produce(7, &mut ReaderState::new(PAGE), None).unwrap_err();
    assert_eq!(kernel.lock().pages[&7], None);
    assert_eq!(core.contents().get(7), Content::Poisoned);
    // A producer that comes too late makes it good: a copy replaces a mark.
    let mut staging = vec![right(7); PAGE];
    let bytes = staging.clone();
    let mut late = Window::owned(&core.pages, 7, &mut staging);
    assert_eq!(late.copy(7 << 12, &bytes).unwrap(), Filled::All);
    assert_eq!(core.contents().get(7), Content::Present);
    assert_eq!(kernel.lock().pages[&7], Some(right(7)));
    // One whose copy was there before the page was given up.
    assert!(core.contents().claim(9));
    let third = kernel.clone();
    *kernel.before_a_mark.lock().unwrap() = Some(Box::new(move || {
        third.lock().pages.insert(9, Some(right(9)));
    }));
    core.poison(9);
    assert_eq!(core.contents().get(9), Content::Present);
}

#[test]
fn a_page_that_goes_bad_while_its_neighbours_are_copied_over_it_is_good() {
    let (kernel, core, _) = plain(all(Kind::Ready), Advice::Normal, 16);
    let core = Arc::new(core);
    let second = core.clone();
    *kernel.before_a_copy.lock().unwrap() = Some(Box::new(move || {
        second.poison(5);
    }));
    assert_eq!(core.map_ready(0..16, &mut ReaderState::new(16 * PAGE)), 16);
    for page in 0..16 {
        assert_eq!(kernel.lock().pages[&page], Some(right(page)));
        assert_eq!(core.contents().get(page), Content::Present, "page {page}");
    }
}

#[test]
fn zeroes_outside_of_a_window_change_nothing_and_a_bad_page_stays_bad() {
    let policy = Policy { zeroes_by_copy: true, ..POLICY };
    let (kernel, core) = core_by(policy, vec![3], all(Kind::Ready), Advice::Normal, 16);
    let mut staging = vec![0; 4 * PAGE];
    let mut window = Window::new(&core.pages, 4..8, None, &mut staging);
    for range in [6 << 12..9 << 12, 3 << 12..5 << 12, (4 << 12) + 1..5 << 12] {
        window.zero(range).unwrap_err();
        assert!(present(&kernel).is_empty());
    }
    assert!(core.contents().claim(5));
    core.poison(5);
    assert_eq!(window.zero(4 << 12..8 << 12).unwrap(), Filled::Some);
    assert_eq!((present(&kernel), kernel.lock().pages[&5]), (vec![4, 5, 6, 7], None));
    assert_eq!(core.contents().get(5), Content::Poisoned);
}

#[test]
fn a_window_has_its_room_again_after_a_backing_panicked_in_it() {
    let policy = Policy { zeroes_by_copy: true, ..POLICY };
    let (kernel, core) = core_by(policy, vec![3], all(Kind::Ready), Advice::Normal, 16);
    let mut staging = vec![0; 4 * PAGE];
    let mut window = Window::new(&core.pages, 4..8, None, &mut staging);
    let panicked = caught(|| {
        window.copy_with(4 << 12..8 << 12, |_| -> Result<usize, UffdError> {
            std::panic::resume_unwind(Box::new("as the test wants"))
        })
    });
    assert!(panicked.is_none());
    assert_eq!(window.room(), 4 * PAGE as u64);
    assert_eq!(window.zero(4 << 12..8 << 12).unwrap(), Filled::All);
    assert_eq!(present(&kernel), [4, 5, 6, 7]);
}

#[test]
fn what_others_is_remote_and_never_what_it_was() {
    let (kernel, core, mut state) = of_another(vec![3]);
    assert_eq!(core.fault(0, Touch::Read, &mut state), Outcome::Answered);
    // Pages that are there, and pages that never were.
    core.removed(10..20);
    for page in 10..16 {
        kernel.lock().pages.remove(&page);
    }
    for page in [12, 18, 12] {
        assert_eq!(core.fault(page, Touch::Read, &mut state), Outcome::Answered);
        assert_eq!(kernel.lock().pages.remove(&page), Some(Some(0)), "page {page}");
    }
    // A neighbour's window leaves them alone.
    assert_eq!(core.fault(22, Touch::Read, &mut state), Outcome::Answered);
    while core.map_later(&mut state) {}
    assert!((10..20).all(|page| !kernel.lock().pages.contains_key(&page)));
    assert_eq!(kernel.lock().pages[&20], Some(right(20)));
    // While the removal is under way, the answer is deferred and the page is as it was.
    kernel.lock().whims = vec![8];
    assert_eq!(core.fault(13, Touch::Read, &mut state), Outcome::Later);
    assert!(matches!(core.fault(40, Touch::Read, &mut state), Outcome::Produce { .. }));
    assert!(matches!(core.try_produce(40, &mut state), Produced::Deferred(_)));
    core.release(40);
    assert_eq!(core.contents().get(40), Content::Absent);
}

#[test]
fn a_page_is_lost_when_one_thread_tells_it_twice_and_not_when_two_do_once() {
    let (kernel, core, mut state) = plain(all(Kind::Ready), Advice::Random, 1);
    let mut tell = |page, waiter| {
        state.waiter = waiter;
        assert_eq!(core.fault(page, Touch::Read, &mut state), Outcome::Answered);
        core.counters().demand.load(std::sync::atomic::Ordering::Relaxed)
    };
    // It was installed for the first of four threads, and the faults of the others are read after that.
    assert_eq!([1, 2, 3, 4].map(|waiter| tell(7, waiter)), [1; 4]);
    kernel.lock().pages.remove(&7);
    assert_eq!(tell(7, 3), 2, "the second time by the same thread");
    assert!(kernel.lock().pages.contains_key(&7));
    // More threads than there are places to remember, always in the same order.
    kernel.lock().pages.remove(&7);
    assert!((100..300).any(|waiter| tell(7, waiter) == 3));
    assert!(kernel.lock().pages.contains_key(&7));
}

#[test]
fn the_reader_of_removals_does_not_wait_for_them_to_make_a_page_bad() {
    // Each answer is deferred, as while a removal is not read.
    let (kernel, core, _) = of_another(vec![8]);
    assert!(core.contents().claim(7));
    core.give_up(7);
    assert_eq!((core.contents().get(7), kernel.lock().deferred), (Content::Poisoned, 1));
    // A waiting thread faults again, and is refused then.
    let mut state = ReaderState::new(16 * PAGE);
    kernel.lock().whims = vec![3];
    assert_eq!(core.fault(7, Touch::Read, &mut state), Outcome::Answered);
    assert_eq!(kernel.lock().pages[&7], None);
}

#[test]
fn neighbours_wait_until_there_is_no_fault_and_then_the_latest_come_first() {
    let (kernel, core, mut state) = plain(all(Kind::Ready), Advice::Normal, 4);
    // Each fault is in the middle of a window: two runs of neighbours.
    let faults: Vec<u64> = (0..96).filter(|page| page % 4 == 2).collect();
    for &page in &faults[..4] {
        assert_eq!(core.fault(page, Touch::Read, &mut state), Outcome::Answered);
    }
    assert_eq!(present(&kernel), faults[..4]);
    assert!(core.map_later(&mut state));
    assert!(kernel.lock().pages.contains_key(&(faults[3] + 1)), "the latest come first");
    // Where faults never cease, a bounded number of runs wait.
    for (count, &page) in faults.iter().enumerate().skip(4) {
        assert_eq!(core.fault(page, Touch::Read, &mut state), Outcome::Answered);
        assert!(present(&kernel).len() >= 4 * (count + 1) - 16, "{:?}", present(&kernel));
    }
    while core.map_later(&mut state) {}
    assert_eq!(present(&kernel).len(), 96);
    // On one CPU none wait: the faulting thread has to wait in any case.
    let (kernel, core, _) = plain(all(Kind::Ready), Advice::Normal, 4);
    state.shares_cpu = true;
    assert_eq!(core.fault(2, Touch::Read, &mut state), Outcome::Answered);
    assert_eq!(present(&kernel).len(), 4);
}

#[test]
fn the_queue_of_pages_that_no_thread_waits_for_never_grows() {
    let (kernel, core, mut state) = plain(all(Kind::Ready), Advice::Blocks, 16);
    // With other mappings a bounded number of pages is installed between two faults, and each fault brings a block.
    state.has_company = true;
    for round in 0..200 {
        let page = round % PAGES;
        let _ = core.contents().advance(page, Content::Present, Content::Absent);
        kernel.lock().pages.remove(&page);
        assert_eq!(core.fault(page, Touch::Read, &mut state), Outcome::Answered);
    }
    let left_out = core.counters().left_out.load(std::sync::atomic::Ordering::Relaxed);
    assert!(left_out > 0, "as many runs wait as there is room for");
    while core.map_later(&mut state) {}
    assert_eq!(present(&kernel).len(), usize_of(PAGES));
}

#[test]
fn guesses_are_left_out_where_too_many_pages_wait() {
    let (kernel, core, mut state) = plain(all(Kind::Ready), Advice::Auto, 4);
    let faults: Vec<u64> = (0..96).filter(|page| page % 4 == 2).collect();
    for &page in &faults {
        assert_eq!(core.fault(page, Touch::Read, &mut state), Outcome::Answered);
    }
    assert_eq!(present(&kernel), faults);
    while core.map_later(&mut state) {}
    // Four windows of two runs each waited; the others had three pages more.
    assert_eq!(present(&kernel).len(), 24 + 4 * 3);
    let left_out = core.counters().left_out.load(std::sync::atomic::Ordering::Relaxed);
    assert_eq!(left_out, 20 * 3);
}

#[test]
fn pages_ahead_of_a_reader_in_order_wait_until_there_is_nothing_else() {
    let mut kinds = all(Kind::Ready);
    kinds[usize_of(63)] = Kind::Slow;
    let (kernel, core, mut state) = plain(kinds, Advice::Sequential, 16);
    let read = |pages: &[u64], state: &mut ReaderState| {
        for &page in pages {
            assert_eq!(core.fault(page, Touch::Read, state), Outcome::Answered);
        }
    };
    read(&[0], &mut state);
    assert!(!core.map_later(&mut state), "no thread has read for long");
    read(&[16], &mut state);
    assert!(core.map_later(&mut state));
    assert!(present(&kernel).into_iter().eq(0..48), "the window behind it");
    assert!(!core.map_later(&mut state), "and no more before the reader goes on");
    // A sequential reader goes on behind the pages that were installed. The next window is not all ready.
    read(&[48], &mut state);
    assert!(present(&kernel).into_iter().eq(0..63));
    // Another fault drops the pages that were to be installed ahead.
    read(&[90], &mut state);
    while core.map_later(&mut state) {}
    assert!(present(&kernel).into_iter().eq((0..63).chain(80..96)));
}

#[test]
fn a_fault_brings_a_bounded_number_of_pages_where_other_mappings_wait() {
    let (kernel, core, mut state) = plain(all(Kind::Ready), Advice::Sequential, 128);
    state.has_company = true;
    for (page, count) in [(0, 64), (64, 128), (128, 192)] {
        assert_eq!(core.fault(page, Touch::Read, &mut state), Outcome::Answered);
        assert_eq!(present(&kernel).len(), count, "page {page}");
    }
    // A mapping alone waits for its own pages only.
    let (kernel, core, _) = plain(all(Kind::Ready), Advice::Sequential, 128);
    state.has_company = false;
    assert_eq!(core.fault(0, Touch::Read, &mut state), Outcome::Answered);
    assert_eq!(present(&kernel).len(), 128);
}

#[test]
fn a_page_with_an_owner_is_left_to_it_and_one_that_fails_is_answered_as_bad() {
    let mut kinds = all(Kind::Ready);
    (kinds[20], kinds[22], kinds[24]) = (Kind::Slow, Kind::Slow, Kind::LeftOut);
    let (_, core, mut state) = plain(kinds, Advice::Normal, 16);
    assert!(matches!(core.fault(20, Touch::Read, &mut state), Outcome::Produce { .. }));
    while core.map_later(&mut state) {}
    assert_eq!(core.fault(20, Touch::Read, &mut state), Outcome::Coalesced);
    core.produce(20, &mut state, None).unwrap();
    assert_eq!(core.contents().get(22), Content::Absent);
    assert!(matches!(core.fault(24, Touch::Read, &mut state), Outcome::Produce { .. }));
    assert!(!core.produce(24, &mut state, None).unwrap_err().to_string().is_empty());
    assert_eq!(core.fault(24, Touch::Read, &mut state), Outcome::Answered);
}

#[test]
fn pages_ahead_are_installed_step_by_step_as_far_as_they_are_ready() {
    let mut state = ReaderState::new(16 * PAGE);
    // Windows of 64 pages, of which 32 are a step.
    let mut reads = |kinds, goes_ahead: bool| {
        let (kernel, core, _) = plain(kinds, Advice::Sequential, 64);
        state.shares_cpu = !goes_ahead;
        for page in [0, 64] {
            assert_eq!(core.fault(page, Touch::Read, &mut state), Outcome::Answered);
        }
        let mut steps = Vec::new();
        while core.map_later(&mut state) {
            steps.push(present(&kernel).len());
        }
        steps
    };
    assert_eq!(reads(all(Kind::Ready), true), [160, 192]);
    let mut kinds = all(Kind::Ready);
    kinds[usize_of(159)] = Kind::Slow;
    assert_eq!(reads(kinds, true), [159], "a thread that needs that page waits for it");
    assert_eq!(reads(all(Kind::Ready), false), [0; 0]);
}

#[test]
fn a_page_that_was_given_up_is_good_once_its_late_owner_has_installed_it() {
    for page in [PageSize::KIB_4, PageSize::MIB_2] {
        let states = PageStates::reserve(PageCount::new(4), page).unwrap();
        assert!(states.claim(1) && states.poison(1));
        assert_eq!(states.get(1), Content::Poisoned);
        states.unpoison(1);
        assert_eq!(states.get(1), Content::Present, "{page}");
        // One that was not made bad after all.
        states.unpoison(2);
        assert_eq!(
            [0, 2, 3].map(|at| states.get(at)),
            [Content::Absent, Content::Present, Content::Absent]
        );
    }
}

#[test]
fn the_addresses_that_stand_for_pages_of_another_process_are_left_out_of_core_dumps() {
    // So many that no other mapping is as long.
    let pages = (37 << 18) + 5;
    let _states = PageStates::reserve(PageCount::new(pages), PageSize::KIB_4).unwrap();
    let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let ours = smaps.split("VmFlags:").collect::<Vec<_>>();
    let size = format!("{} kB", pages * 4);
    let at = ours.iter().position(|text| text.contains(&size)).unwrap();
    let flags = ours[at + 1].lines().next().unwrap();
    assert!(flags.split(' ').any(|flag| flag == "dd"), "{flags}");
}
