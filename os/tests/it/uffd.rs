//! Page faults as events: every kind of fault, every answer, and the messages of a reader.

use std::fs::File;
use std::io::Write;
use std::num::NonZeroU32;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::Command;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use tempfile::tempfile_in;
use uzone_os::uffd::{
    Answered, Doorbell, Event, EventBuffer, FaultKind, Features, Fill, Install, KernelFaults,
    Modes, PageFault, Registered, Remote, Uffd, UffdCall, UffdError, wait,
};
use uzone_os::{Access, AccessError, Mapping, Sharing, Vaddr};
use uzone_pages::{ByteLen, ErrorKind, PageSize};

use crate::needs::{Pool, or_skip};
use crate::{CHILD, is_child, page, read, run_child, skip, small_pages};

/// Opens a userfaultfd with `features`, or prints that the case `name` cannot run.
pub(crate) fn open(name: &str, features: Features) -> Option<Arc<Uffd>> {
    match Uffd::open(features, Features::NONE, KernelFaults::IfAllowed) {
        Ok(uffd) => {
            assert!(uffd.features().contains(features));
            Some(Arc::new(uffd))
        }
        Err(
            error @ (UffdError::Missing { .. }
            | UffdError::NoUserfaultfd { .. }
            | UffdError::Probe { .. }),
        ) => {
            skip(name, &error.to_string());
            None
        }
        Err(error) => panic!("{name}: {error}"),
    }
}

fn anonymous(pages: u64) -> Mapping {
    Mapping::anonymous(ByteLen::new(pages * page()), small_pages()).unwrap()
}

fn bytes(byte: u8, pages: u64) -> Vec<u8> {
    vec![byte; usize::try_from(pages * page()).unwrap()]
}

/// Fills missing pages of memory from `offset` on with bytes.
fn copy(
    memory: &Registered,
    offset: u64,
    bytes: &[u8],
    how: Install,
) -> Result<Answered, UffdError> {
    let range = offset..offset.saturating_add(bytes.len() as u64);
    memory.install(range, Fill::Bytes(bytes), how)
}

fn pages(range: std::ops::Range<u64>) -> std::ops::Range<u64> {
    range.start * page()..range.end * page()
}

/// Waits for the next fault. Other events are none here.
fn next_fault(uffd: &Uffd) -> PageFault {
    match next_event(uffd) {
        Event::PageFault(fault) => fault,
        other => panic!("{other:?}"),
    }
}

fn next_event(uffd: &Uffd) -> Event {
    next_event_with(uffd, &Doorbell::new().unwrap(), &mut EventBuffer::new(1))
}

/// Waits for the next event without allocating.
fn next_event_with(uffd: &Uffd, bell: &Doorbell, buffer: &mut EventBuffer) -> Event {
    loop {
        if uffd.read(buffer).unwrap() > 0 {
            return buffer.next().unwrap();
        }
        assert!(wait(uffd, bell, Some(Duration::from_secs(20))).unwrap().0, "no event came");
    }
}

fn byte_at(memory: &Registered, page_index: u64) -> u8 {
    let [byte] = read(memory.mapping(), page_index * page() + 77);
    byte
}

#[test]
fn a_thread_that_touches_a_missing_page_waits_and_gets_the_bytes() {
    let name = "a_thread_that_touches_a_missing_page";
    let Some(uffd) = open(name, Features::THREAD_ID) else { return };
    let memory = Registered::new(uffd, anonymous(4), Modes::MISSING).unwrap();
    assert!(memory.takes(UffdCall::Copy) && memory.takes(UffdCall::Wake));
    let base = memory.mapping().addr().get() as u64;
    thread::scope(|scope| {
        let reader =
            scope.spawn(|| (rustix::thread::gettid().as_raw_nonzero().get(), byte_at(&memory, 2)));
        let fault = next_fault(memory.uffd());
        assert_eq!(fault.address, Vaddr::new(base + 2 * page()));
        assert_eq!((fault.kind, fault.is_write), (FaultKind::Missing, false));
        assert_eq!(memory.offset_of(fault.address), Some(2 * page()));
        let answer = copy(&memory, 2 * page(), &bytes(42, 1), Install::default());
        assert_eq!(answer.unwrap(), Answered::All);
        let (thread, byte) = reader.join().unwrap();
        assert_eq!(byte, 42);
        assert_eq!(fault.thread, NonZeroU32::new(thread.cast_unsigned()));

        // A write fault is marked as one, and a page of zeroes is an answer too. (Part of a word would be
        // read first.)
        let writer = scope.spawn(|| memory.mapping().write_at(3 * page(), &[9; 8]).unwrap());
        let is_write = next_fault(memory.uffd()).is_write;
        assert_eq!(
            memory.install(pages(3..4), Fill::Zero, Install::default()).unwrap(),
            Answered::All
        );
        writer.join().unwrap();
        assert!(is_write);
    });
    assert_eq!(byte_at(&memory, 3), 0);
    assert_eq!(memory.offset_of(Vaddr::new(base + 4 * page())), None);
    assert_eq!(memory.offset_of(Vaddr::new(base - 1)), None);
}

#[test]
fn a_copy_that_meets_a_page_says_how_far_it_got() {
    let Some(uffd) = open("a_copy_that_meets_a_page", Features::NONE) else { return };
    let memory = Registered::new(uffd, anonymous(8), Modes::MISSING).unwrap();
    let how = Install::default();
    assert_eq!(copy(&memory, 3 * page(), &bytes(3, 1), how).unwrap(), Answered::All);
    let eight = bytes(8, 8);
    let answer = copy(&memory, 0, &eight, how).unwrap();
    assert_eq!(answer, Answered::Part { bytes: 3 * page() });
    let rest = &eight[..usize::try_from(5 * page()).unwrap()];
    assert_eq!(copy(&memory, 3 * page(), rest, how).unwrap(), Answered::Present);
    let rest = &eight[..usize::try_from(4 * page()).unwrap()];
    assert_eq!(copy(&memory, 4 * page(), rest, how).unwrap(), Answered::All);
    assert_eq!((0..8).map(|at| byte_at(&memory, at)).collect::<Vec<_>>(), [8, 8, 8, 3, 8, 8, 8, 8]);
    // Zeroes do not replace a page.
    assert_eq!(memory.install(pages(0..8), Fill::Zero, how).unwrap(), Answered::Present);
    assert_eq!(byte_at(&memory, 0), 8);
}

#[test]
fn an_answer_that_wakes_no_thread_leaves_the_waiter_to_a_wake() {
    let Some(uffd) = open("an_answer_that_wakes_nobody", Features::NONE) else { return };
    let memory = Registered::new(uffd, anonymous(2), Modes::MISSING).unwrap();
    thread::scope(|scope| {
        let reader = scope.spawn(|| byte_at(&memory, 0));
        next_fault(memory.uffd());
        let later = Install { wake: false, ..Install::default() };
        assert_eq!(copy(&memory, 0, &bytes(5, 1), later).unwrap(), Answered::All);
        thread::sleep(Duration::from_millis(20));
        assert!(!reader.is_finished(), "no thread has woken it");
        assert_eq!(memory.wake(pages(0..1)).unwrap(), Answered::All);
        assert_eq!(reader.join().unwrap(), 5);

        // A thread that is woken without a page faults again.
        let reader = scope.spawn(|| byte_at(&memory, 1));
        let first = next_fault(memory.uffd());
        assert_eq!(memory.wake(pages(0..2)).unwrap(), Answered::All);
        assert_eq!(next_fault(memory.uffd()).address, first.address);
        assert_eq!(copy(&memory, page(), &bytes(6, 1), Install::default()).unwrap(), Answered::All);
        assert_eq!(reader.join().unwrap(), 6);
    });
}

#[test]
fn a_page_of_a_memory_file_is_mapped_without_a_copy_by_continue() {
    let features = Features::MINOR_SHMEM | Features::MISSING_SHMEM;
    for sharing in [Sharing::Shared, Sharing::Private] {
        let Some(uffd) = open("a_page_of_a_memory_file", features) else { return };
        let file = Mapping::memfd("minor", ByteLen::new(8 * page()), None).unwrap();
        for at in [0, 1, 2, 5] {
            file.write_at(at * page() + 77, &[u8::try_from(at).unwrap() + 10]).unwrap();
        }
        let fd = file.fd().unwrap().try_clone_to_owned().unwrap();
        let other = Mapping::file(fd, 0, file.len(), Access::ReadWrite, sharing).unwrap();
        let modes = Modes::MISSING | Modes::MINOR;
        let memory = Registered::new(uffd, other, modes).unwrap();
        assert!(memory.takes(UffdCall::Continue), "{sharing}");
        thread::scope(|scope| {
            let reader = scope.spawn(|| byte_at(&memory, 1));
            let fault = next_fault(memory.uffd());
            assert_eq!(fault.kind, FaultKind::Minor);
            let answer = memory.install(pages(1..2), Fill::Cached, Install::default());
            assert_eq!(answer.unwrap(), Answered::All);
            assert_eq!(reader.join().unwrap(), 11);
            // Page 3 is a hole: the pages before it are mapped, and it is not.
            let answer = memory.install(pages(2..6), Fill::Cached, Install::default()).unwrap();
            assert_eq!(answer, Answered::Part { bytes: page() });
            let answer = memory.install(pages(3..6), Fill::Cached, Install::default()).unwrap();
            assert_eq!(answer, Answered::Hole);
            let reader = scope.spawn(|| byte_at(&memory, 3));
            assert_eq!(next_fault(memory.uffd()).kind, FaultKind::Missing);
            assert_eq!(
                memory.install(pages(3..4), Fill::Zero, Install::default()).unwrap(),
                Answered::All
            );
            assert_eq!(reader.join().unwrap(), 0);
        });
        // Bytes that are written to a private mapping stay there.
        memory.mapping().write_at(page() + 77, &[99]).unwrap();
        let expected = if sharing == Sharing::Shared { 99 } else { 11 };
        assert_eq!(read(&file, page() + 77), [expected]);
    }
}

#[test]
fn a_huge_page_of_a_pool_is_filled_as_a_whole() {
    let name = "a_huge_page_of_a_pool";
    let size = PageSize::MIB_2;
    let Some(_pool) = Pool::grow(name, size, 2) else { return };
    let Some(uffd) = open(name, Features::MISSING_HUGETLB) else { return };
    let huge = size.bytes();
    let memory = Mapping::hugetlb(ByteLen::new(2 * huge), size).unwrap();
    let memory = Registered::new(uffd, memory, Modes::MISSING).unwrap();
    assert!(!memory.takes(UffdCall::ZeroPage), "huge pages take copies alone");
    let filled = vec![3; usize::try_from(huge).unwrap()];
    thread::scope(|scope| {
        let reader = scope.spawn(|| read(memory.mapping(), huge + 12345));
        let fault = next_fault(memory.uffd());
        assert_eq!(memory.offset_of(fault.address), Some(huge));
        let part = &filled[..usize::try_from(page()).unwrap()];
        assert!(matches!(
            copy(&memory, huge, part, Install::default()),
            Err(UffdError::Access(AccessError::CutsPage { .. }))
        ));
        assert_eq!(copy(&memory, huge, &filled, Install::default()).unwrap(), Answered::All);
        assert_eq!(reader.join().unwrap(), [3]);
    });
}

#[test]
fn a_write_to_a_protected_page_is_reported() {
    let Some(uffd) = open("a_write_to_a_protected_page", Features::WRITE_PROTECT) else { return };
    let modes = Modes::MISSING | Modes::WRITE_PROTECT;
    let memory = Registered::new(uffd, anonymous(2), modes).unwrap();
    let protect = Install { wake: true, write_protect: true };
    assert_eq!(copy(&memory, 0, &bytes(1, 1), protect).unwrap(), Answered::All);
    assert_eq!(byte_at(&memory, 0), 1);
    thread::scope(|scope| {
        for _ in 0..2 {
            let writer = scope.spawn(|| memory.mapping().write_at(77, &[2]).unwrap());
            let fault = next_fault(memory.uffd());
            assert_eq!((fault.kind, fault.is_write), (FaultKind::WriteProtect, true));
            assert_eq!(memory.write_protect(pages(0..1), false).unwrap(), Answered::All);
            writer.join().unwrap();
            assert_eq!(byte_at(&memory, 0), 2);
            assert_eq!(memory.write_protect(pages(0..1), true).unwrap(), Answered::All);
        }
    });
}

#[test]
fn nothing_is_filled_while_a_removal_is_unread() {
    let Some(uffd) = open("nothing_is_filled", Features::EVENT_REMOVE) else { return };
    let memory = Registered::new(uffd, anonymous(4), Modes::MISSING).unwrap();
    let how = Install::default();
    assert_eq!(copy(&memory, 0, &bytes(4, 4), how).unwrap(), Answered::All);
    thread::scope(|scope| {
        let remover = scope.spawn(|| memory.mapping().discard(pages(1..3)).unwrap());
        // The event is pending when the answers are refused, and not read by asking.
        let mut refused = Answered::Present;
        for _ in 0..2000 {
            refused = copy(&memory, page(), &bytes(9, 1), how).unwrap();
            if refused == Answered::LayoutChanging {
                break;
            }
            thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(refused, Answered::LayoutChanging);
        assert_eq!(memory.install(pages(1..2), Fill::Zero, how).unwrap(), Answered::LayoutChanging);
        assert!(!remover.is_finished());
        let Event::Removed { start, end } = next_event(memory.uffd()) else { panic!("no removal") };
        assert_eq!(memory.offset_of(start), Some(page()));
        assert_eq!(end.get() - start.get(), 2 * page());
        remover.join().unwrap();
        assert_eq!(memory.install(pages(1..3), Fill::Zero, how).unwrap(), Answered::All);
        assert_eq!((0..4).map(|at| byte_at(&memory, at)).collect::<Vec<_>>(), [4, 0, 0, 4]);
    });
}

#[test]
fn unmapping_is_reported_and_goes_on_when_it_was_read() {
    let Some(uffd) = open("unmapping_is_told", Features::EVENT_UNMAP) else { return };
    let memory = Registered::new(uffd.clone(), anonymous(4), Modes::MISSING).unwrap();
    let base = memory.mapping().addr();
    let dropper = thread::spawn(move || drop(memory));
    let Event::Removed { start, end } = next_event(&uffd) else { panic!("not unmapped") };
    assert_eq!((start, end.get()), (base.into(), base.get() as u64 + 4 * page()));
    dropper.join().unwrap();
}

#[test]
fn a_poisoned_page_raises_a_signal_until_it_is_filled() {
    let name = "uffd::a_poisoned_page_raises_a_signal_until_it_is_filled";
    let child = is_child(name);
    let Some(uffd) = open("a_poisoned_page", Features::POISON) else { return };
    let memory = Registered::new(uffd, anonymous(2), Modes::MISSING).unwrap();
    assert_eq!(
        memory.install(pages(0..2), Fill::Poison, Install::default()).unwrap(),
        Answered::All
    );
    assert_eq!(
        memory.install(pages(0..1), Fill::Poison, Install::default()).unwrap(),
        Answered::Present
    );
    if child {
        println!("read {}", byte_at(&memory, 1));
        return;
    }
    assert_eq!(copy(&memory, page(), &bytes(8, 1), Install::default()).unwrap(), Answered::All);
    assert_eq!(byte_at(&memory, 1), 8);
    let output = run_child(name, &[]);
    assert_eq!(output.status.signal(), Some(rustix::process::Signal::BUS.as_raw()), "{output:?}");
}

#[test]
fn a_userfaultfd_of_user_mode_is_had_without_privilege() {
    let name = "uffd::a_userfaultfd_of_user_mode_is_had_without_privilege";
    if !is_child(name) {
        let unprivileged = 65534;
        let command = |exe: &std::path::Path| {
            let mut command = Command::new(exe);
            command
                .args([name, "--exact", "--nocapture", "--test-threads=1"])
                .env(CHILD, name)
                .current_dir("/");
            if rustix::process::geteuid().is_root() {
                command.uid(unprivileged).gid(unprivileged);
            }
            command
        };
        // A copy where every user may run it: the build may be in a directory that is closed to them.
        let copy = std::env::temp_dir().join(format!("uzone-uffd-{}", std::process::id()));
        std::fs::copy(std::env::current_exe().unwrap(), &copy).unwrap();
        let output = command(&copy).output();
        std::fs::remove_file(&copy).unwrap();
        let output = match output {
            Ok(output) => output,
            Err(error) => return skip(name, &format!("cannot start as another user: {error}")),
        };
        let (out, err) =
            (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success() && out.contains("1 passed"), "{out}{err}");
        for line in err.lines().filter(|line| line.starts_with("skipped")) {
            eprintln!("{line}");
        }
        return;
    }
    let uffd = Uffd::open(Features::NONE, Features::POISON, KernelFaults::Never);
    let Some(uffd) = or_skip(name, uffd).map(Arc::new) else { return };
    assert!(!uffd.sees_kernel_faults());
    match Uffd::open(Features::NONE, Features::NONE, KernelFaults::Required) {
        Ok(uffd) => assert!(uffd.sees_kernel_faults(), "this host allows it"),
        Err(UffdError::NotForKernel { .. }) => {
            let either = Uffd::open(Features::NONE, Features::NONE, KernelFaults::IfAllowed);
            assert!(!either.unwrap().sees_kernel_faults());
        }
        Err(error) => panic!("{error}"),
    }
    let forking = Uffd::open(Features::NONE, Features::EVENT_FORK, KernelFaults::Never);
    assert!(matches!(forking, Err(UffdError::Forks)));
    let memory = Registered::new(uffd, anonymous(1), Modes::MISSING).unwrap();
    thread::scope(|scope| {
        let reader = scope.spawn(|| byte_at(&memory, 0));
        next_fault(memory.uffd());
        assert_eq!(copy(&memory, 0, &bytes(6, 1), Install::default()).unwrap(), Answered::All);
        assert_eq!(reader.join().unwrap(), 6);
    });
}

#[test]
fn a_wrong_use_is_refused_with_what_it_was_given() {
    let name = "a_wrong_use_is_refused";
    let newer = Features::from_bits_retain(1 << 50);
    let error = Uffd::open(newer, Features::NONE, KernelFaults::IfAllowed);
    assert!(matches!(error, Err(UffdError::Missing { missing }) if missing == newer));
    let Some(uffd) = open(name, Features::NONE) else { return };

    // A file of a file system has no such faults.
    let mut file = tempfile_in(std::env::temp_dir()).unwrap();
    file.write_all(&bytes(1, 2)).unwrap();
    let len = ByteLen::new(2 * page());
    let mapping = Mapping::file(file, 0, len, Access::ReadWrite, Sharing::Shared).unwrap();
    match Registered::new(uffd.clone(), mapping, Modes::MISSING) {
        Err(error) => {
            assert!(
                error.to_string().contains("cannot be registered for missing faults"),
                "{error}"
            );
            assert_eq!(error.value.len(), len);
        }
        // The directory for temporary files may be of memory, and then it works.
        Ok(memory) => drop(memory),
    }
    // No mode at all.
    let error = Registered::new(uffd.clone(), anonymous(1), Modes::default()).unwrap_err();
    assert!(error.to_string().contains("cannot be registered for no faults"), "{error}");

    let memory = Registered::new(uffd.clone(), anonymous(4), Modes::MISSING).unwrap();
    let how = Install::default();
    let (short, two) = (vec![0; 100], bytes(0, 2));
    assert!(matches!(
        copy(&memory, 0, &short, how),
        Err(UffdError::Access(AccessError::CutsPage { .. }))
    ));
    assert!(matches!(
        copy(&memory, 0, &[], how),
        Err(UffdError::Access(AccessError::Empty { .. }))
    ));
    for offset in [3 * page(), 4 * page(), !(page() - 1)] {
        let answer = copy(&memory, offset, &two, how);
        assert!(
            matches!(answer, Err(UffdError::Access(AccessError::Beyond { .. }))),
            "{offset:#x}"
        );
    }
    assert!(
        memory.install(pages(0..5), Fill::Zero, how).is_err() && memory.wake(pages(4..5)).is_err()
    );
    assert!(
        memory.install(1..2, Fill::Poison, how).is_err()
            && memory.write_protect(0..1, true).is_err()
    );
    // Anonymous memory has no page cache, so there is nothing to continue with.
    let error = memory.install(pages(0..1), Fill::Cached, how).unwrap_err();
    let UffdError::Refused { call, .. } = &error else { panic!("{error}") };
    assert_eq!((*call, error.kind()), (UffdCall::Continue, ErrorKind::InvalidInput));
    assert!(error.to_string().starts_with("UFFDIO_CONTINUE of"), "{error}");
    let source = anonymous(1);
    let from = |offset| Fill::From { source: &source, offset };
    assert_eq!(memory.install(pages(0..1), from(0), how).unwrap(), Answered::All);
    for fill in [from(page()), from(u64::MAX), Fill::Bytes(&short)] {
        let answer = memory.install(pages(1..2), fill, how);
        assert!(matches!(answer, Err(UffdError::Access(AccessError::Beyond { .. }))), "{fill:?}");
    }

    // Another userfaultfd does not take it, and gets it when the first has let go.
    let Some(second) = open(name, Features::NONE) else { return };
    let owner = anonymous(1);
    let adopted = || {
        let addr = std::ptr::with_exposed_provenance_mut(owner.addr().get());
        // SAFETY: `adopt` wants memory that stays mapped while the new value lives, to which no
        // reference exists, and which is reached through mappings of this crate alone: `owner` owns
        // it and outlives the mappings that are made here.
        unsafe {
            Mapping::adopt(std::ptr::NonNull::new(addr).unwrap(), owner.len(), owner.page_size())
        }
        .unwrap()
    };
    let memory = Registered::new(uffd, adopted(), Modes::MISSING).unwrap();
    let error = Registered::new(second.clone(), adopted(), Modes::MISSING).unwrap_err();
    assert!(error.to_string().contains("another userfaultfd"), "{error}");
    drop(memory);
    drop(Registered::new(second, *error.value, Modes::MISSING).unwrap());
}

/// Returns a userfaultfd with EVENT_FORK, which takes a privilege.
fn forking() -> Option<OwnedFd> {
    // SAFETY: `userfaultfd` wants that no code relies on missing pages: none of this descriptor are registered.
    let fd = unsafe { rustix::mm::userfaultfd(rustix::mm::UserfaultfdFlags::CLOEXEC) }.ok()?;
    let mut api = [0xaa, Features::EVENT_FORK.bits(), 0];
    // SAFETY: UFFDIO_API reads and writes these three numbers.
    let answer = unsafe { libc::ioctl(fd.as_raw_fd(), 0xc018_aa3f, api.as_mut_ptr()) };
    (answer == 0).then_some(fd)
}

#[test]
fn a_descriptor_from_elsewhere_answers_for_registered_memory_alone() {
    let Some(uffd) = open("a_descriptor_from_elsewhere", Features::NONE) else { return };
    let file = File::open("/dev/null").unwrap();
    let error = Remote::adopt(file.into()).unwrap_err();
    assert!(error.to_string().contains("/dev/null"), "{error}");
    // SAFETY: `userfaultfd` wants that no code relies on missing pages: none of this descriptor are registered.
    let unused = unsafe { rustix::mm::userfaultfd(rustix::mm::UserfaultfdFlags::CLOEXEC) };
    let error = Remote::adopt(unused.unwrap()).unwrap_err();
    assert!(error.to_string().contains("UFFDIO_API"), "{error}");
    if let Some(forking) = forking() {
        assert!(matches!(Remote::adopt(forking), Err(UffdError::Forks)));
    } else {
        skip("a_descriptor_from_elsewhere", "EVENT_FORK takes a privilege");
    }

    let memory = Registered::new(uffd.clone(), anonymous(4), Modes::MISSING).unwrap();
    let remote = Remote::adopt(uffd.as_fd().try_clone_to_owned().unwrap()).unwrap();
    let (base, how) = (memory.mapping().addr().get() as u64, Install::default());
    let (at, one) = (|index: u64| Vaddr::new(base + index * page()), ByteLen::new(page()));
    thread::scope(|scope| {
        let reader = scope.spawn(|| byte_at(&memory, 1));
        let mut buffer = EventBuffer::new(8);
        while remote.read(&mut buffer).unwrap() == 0 {
            thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(buffer.capacity(), 8);
        assert!(matches!(buffer.next(), Some(Event::PageFault(fault)) if fault.address == at(1)));
        assert!(buffer.next().is_none());
        // A fault that was read and not answered comes again after a wake.
        assert_eq!(remote.wake(at(0), ByteLen::new(4 * page())).unwrap(), Answered::All);
        while remote.read(&mut buffer).unwrap() == 0 {
            thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(
            remote.install(at(1), one, Fill::Bytes(&bytes(3, 1)), how).unwrap(),
            Answered::All
        );
        assert_eq!(reader.join().unwrap(), 3);
    });
    assert_eq!(remote.install(at(0), one, Fill::Zero, how).unwrap(), Answered::All);
    assert_eq!(
        remote.install(at(0), one, Fill::Bytes(&bytes(3, 1)), how).unwrap(),
        Answered::Present
    );
    // Memory that was not registered is out of reach.
    let private = anonymous(1);
    let elsewhere = Vaddr::from(private.addr());
    assert_eq!(
        remote.install(elsewhere, one, Fill::Bytes(&bytes(3, 1)), how).unwrap(),
        Answered::NotRegistered
    );
    assert_eq!(remote.install(elsewhere, one, Fill::Zero, how).unwrap(), Answered::NotRegistered);
    assert!(remote.install(at(2), ByteLen::new(3), Fill::Bytes(&[1, 2, 3]), how).is_err());
    assert!(remote.install(at(2), one, Fill::Cached, how).is_err());
    assert!(remote.write_protect(elsewhere, one, true).is_ok_and(|answer| answer != Answered::All));
    if let Ok(poisoned) = remote.install(at(3), one, Fill::Poison, how) {
        assert_eq!(poisoned, Answered::All);
    }
}

#[test]
fn a_bell_ends_a_wait_until_it_is_silenced() {
    let Some(uffd) = open("a_bell_ends_a_wait", Features::NONE) else { return };
    let bell = Doorbell::new().unwrap();
    let none = Some(Duration::ZERO);
    assert!(!wait(&uffd, &bell, none).unwrap().1);
    thread::scope(|scope| {
        scope.spawn(|| bell.ring().unwrap());
        assert_eq!(wait(&uffd, &bell, None).unwrap(), (false, true));
    });
    assert!(wait(&uffd, &bell, none).unwrap().1);
    bell.silence().unwrap();
    bell.silence().unwrap();
    assert!(!wait(&uffd, &bell, Some(Duration::from_millis(1))).unwrap().1);
}
