//! Faults that are answered by the threads that take them. The handler of SIGBUS is for a whole process and
//! for good, so each case runs in a process of its own.

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use uzone_os::uffd::in_thread::{Answers, FileSource, InThread, Place, SLOTS, Source};
use uzone_os::uffd::write_states::WriteStates;
use uzone_os::uffd::{Answered, Features, KernelFaults, Modes, Registered, Uffd, UffdError};
use uzone_os::{Access, AccessError, Anonymous, Exclusive, Mapped, Mapping, Sharing, memory_file};
use uzone_pages::{
    Advice, ByteLen, FaultArea, FaultAround, FaultCosts, FaultPlanner, PageCount, Pfn, PfnRange,
};

use crate::needs::or_skip;
use crate::sigbus::{Action, raise, set_action};
use crate::{is_alone, page, read};

const PAGES: u64 = 1024;

fn byte(at: u64) -> u8 {
    (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8
}

/// Opens a userfaultfd that signals, or reports why the case is skipped. `None` as well in the
/// process that has the case run alone.
fn open(name: &str) -> Option<Arc<Uffd>> {
    if !is_alone(name) {
        return None;
    }
    let wished = Features::MINOR_SHMEM | Features::MISSING_SHMEM;
    or_skip(name, Uffd::open(Features::SIGBUS, wished, KernelFaults::Never)).map(Arc::new)
}

/// A file of whole pages and some bytes more, and all of it mapped.
fn file(len: u64) -> (File, Arc<Mapping>) {
    let file = memory_file("source", &(0..len).map(byte).collect::<Vec<_>>()).unwrap();
    let ours = OwnedFd::from(file.try_clone().unwrap());
    let (access, sharing) = (Access::ReadOnly, Sharing::Shared);
    let mapped = Mapping::file(ours, 0, ByteLen::new(len), access, sharing).unwrap();
    (file, Arc::new(mapped))
}

fn registered(uffd: Arc<Uffd>) -> Arc<Registered> {
    let len = ByteLen::new(PAGES * page());
    let how = Anonymous { align: Some(ByteLen::mib(2)), ..Anonymous::default() };
    let mapping = Mapping::anonymous(len, how).unwrap();
    Arc::new(Registered::new(uffd, mapping, Modes::MISSING).unwrap())
}

fn from_file(file: &File, mapped: &Arc<Mapping>, len: u64) -> Source {
    let (file, mapped) = (file.try_clone().unwrap(), mapped.clone());
    Source::File(FileSource::new(Arc::new(file), mapped, ByteLen::new(len)))
}

fn start(memory: &Arc<Registered>, answers: Answers) -> InThread {
    InThread::start(Place::take().unwrap(), memory.clone(), answers).unwrap()
}

fn check(memory: &Registered, at: u64, len: u64) {
    let mut seen = vec![1; usize::try_from(page()).unwrap()];
    memory.mapping().read_at(at * page(), &mut seen).unwrap();
    let right = (at * page()..).map(|at| if at < len { byte(at) } else { 0 });
    assert!(seen.into_iter().eq(right.take(usize::try_from(page()).unwrap())), "page {at}");
}

/// Answers with aligned windows of one size, or with windows that grow.
fn answers(source: Source, window: Option<FaultAround>) -> Answers {
    let page = uzone_os::probe::page_size();
    let pages = PfnRange::try_new(Pfn::new(0), PageCount::new(PAGES)).unwrap();
    let areas = [FaultArea { pages, address: 0 }];
    let (advice, size) = match window {
        Some(size) => (Advice::Normal, size),
        None => (Advice::Auto, FaultAround::DEFAULT),
    };
    let costs = FaultCosts { fault_ns: 4_000, page_ns: 400 };
    let planner = FaultPlanner::new(&areas, page, advice, size, FaultAround::MAX, costs);
    Answers::new(source, Arc::new(planner))
}

#[test]
fn threads_fill_what_they_touch_and_each_byte_is_right() {
    let name = "in_thread::threads_fill_what_they_touch_and_each_byte_is_right";
    let Some(uffd) = open(name) else { return };
    // The last page is filled in part.
    let len = PAGES * page() - 100;
    let (file, mapped) = file(len);
    for window in [Some(FaultAround::MIN), Some(FaultAround::DEFAULT), None] {
        let memory = registered(uffd.clone());
        let source = from_file(&file, &mapped, len);
        let answering = start(&memory, answers(source, window));
        assert!(!answering.may_have_filled(0));
        thread::scope(|scope| {
            for seed in 0..8 {
                let memory = &memory;
                scope.spawn(move || {
                    for step in 0..PAGES / 2 {
                        check(memory, (step * 37 + seed * 101) % PAGES, len);
                    }
                    (0..PAGES).for_each(|at| check(memory, at, len));
                });
            }
        });
        let [faults, pages, ..] = answering.counts();
        assert_eq!(pages, PAGES, "{window:?}");
        let fewest = if window == Some(FaultAround::MIN) { PAGES } else { 1 };
        assert!((fewest..=8 * PAGES).contains(&faults), "{window:?}: {faults}");
        assert!(answering.may_have_filled(PAGES - 1) && !answering.may_have_filled(PAGES));
        // Pages that are given back come again.
        answering.gives_back(3..9);
        memory.mapping().discard(3 * page()..9 * page()).unwrap();
        (0..PAGES).for_each(|at| check(&memory, at, len));
        assert_eq!(answering.counts()[1], PAGES + 6);
        drop(answering);
        // Without it the signal is an error again.
        memory.mapping().discard(0..page()).unwrap();
        let answer = memory.mapping().read_at(0, &mut [0]);
        assert!(matches!(answer, Err(AccessError::Bus { .. })), "{answer:?}");
    }
}

#[test]
fn a_writer_sleeps_while_another_thread_has_its_page() {
    // So that the other thread runs also where its priority is lower and its CPU the same.
    let name = "in_thread::a_writer_sleeps_while_another_thread_has_its_page";
    if !is_alone(name) {
        return;
    }
    let features = Features::SIGBUS | Features::WRITE_PROTECT;
    let uffd = Uffd::open(features, Features::NONE, KernelFaults::Never);
    let Some(uffd) = or_skip(name, uffd).map(Arc::new) else { return };
    let mapping = Mapping::anonymous(ByteLen::new(4 * page()), Anonymous::default()).unwrap();
    let modes = Modes::MISSING | Modes::WRITE_PROTECT;
    let memory = Arc::new(Registered::new(uffd, mapping, modes).unwrap());
    let states = Exclusive::anonymous(ByteLen::kib(4), Anonymous::default()).unwrap();
    let states = Arc::new(WriteStates::new(Mapped::try_new(states, 4).unwrap()));
    let tracked = Answers {
        tracks_writes: true,
        states: Some(states.clone()),
        ..answers(Source::Zero, Some(FaultAround::MIN))
    };
    let answering = start(&memory, tracked);
    memory.mapping().read_at(page(), &mut [1]).unwrap();
    let run = states.open(1, |_| false).unwrap();
    let (writes, since) = (|| answering.counts()[2], Instant::now());
    thread::scope(|scope| {
        let writer = scope.spawn(|| memory.mapping().write_at(page(), &[2]).unwrap());
        while writes() < 20 {
            thread::yield_now();
        }
        thread::sleep(Duration::from_millis(50));
        let (attempts, took) = (u32::try_from(writes()).unwrap(), since.elapsed());
        let opened = memory.write_protect(page()..2 * page(), false).unwrap();
        assert_eq!(opened, Answered::All);
        states.opened(run);
        writer.join().unwrap();
        // Each attempt takes the time of a sleep, and spinning takes some microseconds.
        assert!(attempts * Duration::from_micros(25) <= took, "{attempts} attempts in {took:?}");
    });
    assert_eq!(read(memory.mapping(), page()), [2]);
}

#[test]
fn a_thousand_mappings_at_once_are_answered_by_their_threads() {
    let name = "in_thread::a_thousand_mappings_at_once_are_answered_by_their_threads";
    let Some(uffd) = open(name) else { return };
    let len = 4 * page();
    let (file, mapped) = file(len);
    let start = |_| {
        let mapping = Mapping::anonymous(ByteLen::new(len), Anonymous::default()).unwrap();
        let memory = Arc::new(Registered::new(uffd.clone(), mapping, Modes::MISSING).unwrap());
        let source = from_file(&file, &mapped, len);
        let answering = start(&memory, answers(source, Some(FaultAround::MIN)));
        (memory, answering)
    };
    let mut all: Vec<_> = (0..1000).map(start).collect();
    for round in 0..3 {
        for (memory, answering) in all.iter().rev() {
            check(memory, round, len);
            assert_eq!(answering.counts()[..2], [round + 1; 2]);
        }
        // Some come and go meanwhile.
        let mut index = 0;
        all.retain(|_| {
            index += 1;
            index % 3 != 0
        });
    }
}

#[test]
fn a_page_of_a_file_that_was_cut_is_an_error_and_a_system_call_gets_one_too() {
    let name =
        "in_thread::a_page_of_a_file_that_was_cut_is_an_error_and_a_system_call_gets_one_too";
    let Some(uffd) = open(name) else { return };
    let len = PAGES * page();
    let (file, mapped) = file(len);
    let memory = registered(uffd);
    let source = from_file(&file, &mapped, len);
    let answering = start(&memory, answers(source, Some(FaultAround::DEFAULT)));
    check(&memory, 0, len);
    // In the middle of page 100.
    file.set_len(100 * page() + 7).unwrap();
    check(&memory, 99, len);
    for at in [100, 101, 500, PAGES - 1, 100] {
        let answer = memory.mapping().read_at(at * page(), &mut [0]);
        assert!(matches!(answer, Err(AccessError::Bus { .. })), "{at}: {answer:?}");
    }
    // The bytes that were there stay, also behind the cut.
    check(&memory, 15, len);
    // The kernel does not raise signals for its own accesses.
    let (mut reader, mut writer) = std::io::pipe().unwrap();
    writer.write_all(b"bytes").unwrap();
    let range = 40 * page()..41 * page();
    let answer = rustix_read(&mut reader, &memory, range.start);
    assert_eq!(answer.unwrap_err().raw_os_error(), Some(14), "EFAULT");
    check(&memory, 40, len);
    assert_eq!(rustix_read(&mut reader, &memory, range.start).unwrap(), 5);
    drop(answering);
}

/// Lets the kernel write into the memory.
fn rustix_read(
    reader: &mut std::io::PipeReader,
    memory: &Registered,
    offset: u64,
) -> std::io::Result<usize> {
    let address = memory.mapping().addr().get() + usize::try_from(offset).unwrap();
    let pointer = std::ptr::with_exposed_provenance_mut::<u8>(address);
    // SAFETY: the bytes are of a mapping that lives over the call, and no slice of it is lent elsewhere.
    reader.read(unsafe { std::slice::from_raw_parts_mut(pointer, 8) })
}

#[test]
fn a_memory_file_is_mapped_and_its_holes_are_zero() {
    let name = "in_thread::a_memory_file_is_mapped_and_its_holes_are_zero";
    let Some(uffd) = open(name) else { return };
    let len = ByteLen::new(PAGES * page());
    let file = Mapping::memfd("shared", len, None).unwrap();
    let bytes: Vec<u8> = (0..8 * page()).map(byte).collect();
    file.write_at(0, &bytes).unwrap();
    let fd = file.fd().unwrap().try_clone_to_owned().unwrap();
    let (access, sharing) = (Access::ReadWrite, Sharing::Private);
    let align = ByteLen::mib(2);
    let mapping = Mapping::file_aligned(fd, 0, len, access, sharing, align).unwrap();
    let modes = Modes::MISSING | Modes::MINOR;
    let memory = or_skip(name, Registered::new(uffd, mapping, modes));
    let Some(memory) = memory.map(Arc::new) else { return };
    let answering = start(&memory, answers(Source::Cached, None));
    (0..PAGES).for_each(|at| check(&memory, at, 8 * page()));
    memory.mapping().write_at(3, &[7]).unwrap();
    assert_eq!(answering.counts()[1], PAGES, "holes are filled as well");
    assert_eq!(read(&file, 3), [byte(3)], "it is private");
}

#[test]
fn threads_that_end_and_mappings_that_go_leave_no_slot_behind() {
    let name = "in_thread::threads_that_end_and_mappings_that_go_leave_no_slot_behind";
    let Some(uffd) = open(name) else { return };
    let window = FaultAround::DEFAULT;
    for _ in 0..3 {
        let all: Vec<_> = (0..SLOTS)
            .map(|_| {
                let memory = registered(uffd.clone());
                (start(&memory, answers(Source::Zero, Some(window))), memory)
            })
            .collect();
        assert!(Place::take().is_err_and(|reason| reason.starts_with("4096 mappings")));
        thread::scope(|scope| {
            for (_, memory) in &all {
                scope.spawn(move || assert_eq!(read(memory.mapping(), 5 * page()), [0; 64]));
            }
        });
    }
    let silent = Uffd::open(Features::NONE, Features::NONE, KernelFaults::Never).unwrap();
    let memory = registered(Arc::new(silent));
    let answer =
        InThread::start(Place::take().unwrap(), memory, answers(Source::Zero, Some(window)));
    assert!(matches!(answer, Err(UffdError::NoSigbus)));
    // Nothing but SIGBUS of a missing page is answered.
    let gone = File::open("/nonexistent").unwrap_err();
    assert_eq!(gone.kind(), ErrorKind::NotFound);
}

/// The address that the handler of SIGUSR1 reads, and the byte that it has read so far.
static READ_AT: AtomicUsize = AtomicUsize::new(0);
static SUM: AtomicU64 = AtomicU64::new(0);

extern "C" fn read_a_page(_: i32) {
    let address = READ_AT.load(Ordering::Relaxed);
    let pointer = std::ptr::with_exposed_provenance::<u8>(address);
    // SAFETY: the byte is of a mapping that lives until the last signal was handled.
    SUM.fetch_add(unsafe { pointer.read_volatile() }.into(), Ordering::Relaxed);
}

#[test]
fn a_fault_inside_of_another_handler_and_of_the_c_library_is_answered_and_errno_kept() {
    let name = "in_thread::a_fault_inside_of_another_handler_and_of_the_c_library_is_answered_and_errno_kept";
    let Some(uffd) = open(name) else { return };
    let len = PAGES * page();
    let (file, mapped) = file(len);
    let memory = registered(uffd);
    let source = from_file(&file, &mapped, len);
    let answering = start(&memory, answers(source, Some(FaultAround::MIN)));
    let start = memory.mapping().addr().get();
    set_action(libc::SIGUSR1, &Action::Plain(read_a_page), 0, &[]);
    let mut right = 0;
    for at in 0..64 {
        let offset = at * page() + at;
        READ_AT.store(start + usize::try_from(offset).unwrap(), Ordering::Relaxed);
        right += u64::from(byte(offset));
        raise(libc::SIGUSR1);
        assert_eq!(SUM.load(Ordering::Relaxed), right);
    }
    // A copy of the C library from pages that are missing, with errno set.
    let (from, count) = (64 * page(), 20 * page());
    let mut copied = vec![0_u8; usize::try_from(count).unwrap()];
    let pointer = std::ptr::with_exposed_provenance::<u8>(start + usize::try_from(from).unwrap());
    // SAFETY: `__errno_location` wants nothing.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: it is this thread's errno, which lives as long as the thread.
    unsafe { errno.write(77) };
    // SAFETY: both are valid for so many bytes, and do not overlap.
    unsafe { libc::memcpy(copied.as_mut_ptr().cast(), pointer.cast(), copied.len()) };
    // SAFETY: as above.
    assert_eq!(unsafe { errno.read() }, 77);
    assert!(copied.into_iter().eq((from..from + count).map(byte)));
    assert_eq!(answering.counts()[0], 64 + 20);
}
