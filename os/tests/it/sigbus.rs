//! SIGBUS: copies that survive it, watches that tell of it, and the action before ours.
//!
//! The handler is for a whole process and for good, so each case runs in a process of its own, and those
//! the cases that kill check the end of that process. The test itself plays broken hardware: any thread may queue itself
//! a signal.
//!
//! `UZONE_OS_TEST_HWPOISON=1` lets a case break a page of real memory (`MADV_HWPOISON`), which the
//! machine does not get back before it is started again.

use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

use tempfile::tempfile_in;
use uzone_os::sigbus::{self, BusError, BusKind, HandlerError, SLOTS, Watch};
use uzone_os::uffd::{Answered, Features, Fill, Install, Modes, Registered};
use uzone_os::{Access, AccessError, Addr, Mapping, Sharing, memory_file};
use uzone_pages::{ByteLen, Touch};
use uzone_stream::CopyMethod;

use crate::{is_alone, is_child, page, run_child, small_pages};

/// The number of a process among several that a case started.
const CASE: &str = "UZONE_OS_TEST_BUS_CASE";

/// A memory file that is mapped and can be truncated.
struct Cut {
    mapping: Mapping,
    file: File,
}

impl Cut {
    /// Maps a file of `pages` pages, each byte of which is [`byte`], and truncates it to `left` bytes.
    fn new(pages: u64, left: u64) -> Self {
        Self::of(memory_file("cut", &[]).unwrap(), pages, left)
    }

    fn of(file: File, pages: u64, left: u64) -> Self {
        let len = pages * page();
        file.set_len(len).unwrap();
        let ours = OwnedFd::from(file.try_clone().unwrap());
        let mapping =
            Mapping::file(ours, 0, ByteLen::new(len), Access::ReadWrite, Sharing::Shared).unwrap();
        mapping.write_at(0, &(0..len).map(byte).collect::<Vec<_>>()).unwrap();
        file.set_len(left).unwrap();
        Self { mapping, file }
    }

    fn address(&self, offset: u64) -> Addr {
        Addr::new(self.mapping.addr().get() + usize::try_from(offset).unwrap())
    }

    fn watch(&self) -> Watch {
        sigbus::watch(self.mapping.addr(), self.mapping.len()).unwrap()
    }

    /// Reads the byte at `offset` as any code would that knows nothing of us.
    fn touch(&self, offset: u64) -> u8 {
        let address = self.address(offset).get() as *const u8;
        // SAFETY: the byte is mapped, and these cases are about the outcome of reading it: there is one or a signal.
        unsafe { address.read_volatile() }
    }
}

fn byte(offset: u64) -> u8 {
    u8::try_from(offset % 251).unwrap()
}

fn install() {
    let is_guarded = cfg!(all(target_arch = "x86_64", not(uzone_sanitizer)));
    assert_eq!(sigbus::recovers_copies(), is_guarded);
    assert!(sigbus::install().unwrap());
}

/// Prints that copies are not guarded here, if they are not. `REQUIRE_ALL` does not ask for it: it takes
/// another machine.
fn is_unguarded(name: &str) -> bool {
    if !sigbus::recovers_copies() {
        eprintln!("skipped: {name}: copies are guarded on x86-64 alone");
    }
    !sigbus::recovers_copies()
}

fn drained(watch: &Watch) -> Vec<BusError> {
    let mut events = Vec::new();
    let count = watch.drain(|event| events.push(event));
    assert_eq!(count, events.len());
    events
}

/// Returns the end of a copy, the bytes that it copied, and the reason.
fn ended(result: Result<(), AccessError>) -> (Touch, u64, usize, BusKind) {
    match result.unwrap_err() {
        AccessError::Bus { direction, offset, copied_bytes, kind, .. } => {
            (direction, offset, copied_bytes, kind)
        }
        error => panic!("{error:?}"),
    }
}

/// Queues this thread a SIGBUS with the kernel's values.
fn queue(code: i32, address: usize, lsb: i16) {
    #[repr(C, align(8))]
    struct SigInfo([u8; 128]);
    let mut info = SigInfo([0; 128]);
    info.0[..4].copy_from_slice(&libc::SIGBUS.to_ne_bytes());
    info.0[8..12].copy_from_slice(&code.to_ne_bytes());
    info.0[16..24].copy_from_slice(&address.to_ne_bytes());
    info.0[24..26].copy_from_slice(&lsb.to_ne_bytes());
    // SAFETY: getpid(2) touches no memory.
    let process = unsafe { libc::getpid() };
    // SAFETY: gettid(2) touches no memory.
    let thread = unsafe { libc::gettid() };
    // SAFETY: rt_tgsigqueueinfo(2) reads 128 bytes.
    let answer = unsafe {
        libc::syscall(libc::SYS_rt_tgsigqueueinfo, process, thread, libc::SIGBUS, &raw const info)
    };
    assert_eq!(answer, 0);
}

/// A handler in sigaction(2).
pub(crate) enum Action {
    Default,
    Ignore,
    Plain(extern "C" fn(i32)),
    Info(extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void)),
}

/// Sets an action with `flags`, and a mask of `masked`.
pub(crate) fn set_action(signal: i32, action: &Action, flags: i32, masked: &[i32]) {
    // SAFETY: all bits zero are an action: the default one.
    let mut new: libc::sigaction = unsafe { std::mem::zeroed() };
    new.sa_flags = flags;
    match *action {
        Action::Default => new.sa_sigaction = libc::SIG_DFL,
        Action::Ignore => new.sa_sigaction = libc::SIG_IGN,
        Action::Plain(handler) => new.sa_sigaction = handler as libc::sighandler_t,
        Action::Info(handler) => {
            new.sa_sigaction = handler as libc::sighandler_t;
            new.sa_flags |= libc::SA_SIGINFO;
        }
    }
    for &signal in masked {
        // SAFETY: sigaddset(3) changes a set.
        unsafe { libc::sigaddset(&mut new.sa_mask, signal) };
    }
    // SAFETY: sigaction(2) reads an action; the handlers here obey signal-safety(7).
    let answer = unsafe { libc::sigaction(signal, &new, std::ptr::null_mut()) };
    assert_eq!(answer, 0);
}

/// Returns whether this thread blocks a signal.
fn is_blocked(signal: i32) -> bool {
    // SAFETY: a set is numbers, of which zero is one.
    let mut set: libc::sigset_t = unsafe { std::mem::zeroed() };
    // SAFETY: pthread_sigmask(3) writes a set and changes nothing where it is given none.
    unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, std::ptr::null(), &mut set) };
    // SAFETY: sigismember(3) reads a set.
    unsafe { libc::sigismember(&set, signal) == 1 }
}

pub(crate) fn raise(signal: i32) {
    // SAFETY: raise(3) touches no memory.
    assert_eq!(unsafe { libc::raise(signal) }, 0);
}

/// Ends the process from a handler.
fn exit_now(code: i32) -> ! {
    // SAFETY: _exit(2) does not return, and runs nothing that a handler may not.
    unsafe { libc::_exit(code) }
}

/// Keeps a process that is to die from leaving a core file.
fn leave_no_core() {
    let none = rustix::process::Rlimit { current: Some(0), maximum: Some(0) };
    rustix::process::setrlimit(rustix::process::Resource::Core, none).unwrap();
}

/// Starts this program for the case `name` and the process `case` of it, and returns the signal and
/// the code with which it ended.
fn end_of(name: &str, case: &str) -> (Option<i32>, Option<i32>) {
    let output = run_child(name, &[(CASE, OsStr::new(case))]);
    (output.status.signal(), output.status.code())
}

fn assert_dies(name: &str, case: &str) {
    assert_eq!(end_of(name, case), (Some(libc::SIGBUS), None), "{case}");
}

fn case() -> String {
    std::env::var(CASE).unwrap()
}

#[test]
fn a_copy_ends_where_a_truncated_file_ends_and_says_so() {
    let name = "sigbus::a_copy_ends_where_a_truncated_file_ends_and_says_so";
    if !is_alone(name) || is_unguarded(name) {
        return;
    }
    install();
    let disk = tempfile_in(std::env::temp_dir()).unwrap();
    for cut in [Cut::new(4, 2 * page()), Cut::of(disk, 4, 2 * page() - 10)] {
        let (end, eof) = (2 * page(), cut.file.metadata().unwrap().len());
        let expected = |offset| if offset < eof { byte(offset) } else { 0 };
        for before in (0..70).chain([4000, 2 * page()]) {
            for behind in [1, 2, 7, 8, 9, 31, 32, 33, 100, page()] {
                let start = end - before;
                let len = usize::try_from(before + behind).unwrap();
                let copied = usize::try_from(before).unwrap();
                let mut out = vec![0xee; len];
                let result = cut.mapping.read_at(start, &mut out);
                assert_eq!(
                    result,
                    Err(AccessError::Bus {
                        direction: Touch::Read,
                        address: cut.address(end),
                        offset: end,
                        copied_bytes: copied,
                        len_bytes: len,
                        kind: BusKind::BeyondEnd,
                        lsb: 0,
                    }),
                    "{before} {behind}"
                );
                let right = (start..end).map(expected).eq(out[..copied].iter().copied());
                assert!(right, "{before} {behind}");
                // The same bytes again, so that the next turn finds the expected ones.
                let bytes: Vec<u8> = (start..end + behind).map(expected).collect();
                assert_eq!(
                    ended(cut.mapping.write_at(start, &bytes)),
                    (Touch::Write, end, copied, BusKind::BeyondEnd)
                );
            }
        }
        // A copy that starts behind the end ends at its start, in the middle of a word too.
        for start in [end, end + 1, end + 13, 4 * page() - 1] {
            let mut out = [0; 1];
            let read = ended(cut.mapping.read_at(start, &mut out));
            assert_eq!(read, (Touch::Read, start, 0, BusKind::BeyondEnd));
            let write = ended(cut.mapping.write_at(start, &out));
            assert_eq!(write, (Touch::Write, start, 0, BusKind::BeyondEnd));
        }
        // The neighbours are as good as ever, and a write before the end was one.
        cut.mapping.write_at(end - 20, &[7; 8]).unwrap();
        let error = cut.mapping.write_at(end - 3, &[9; 6]).unwrap_err();
        assert!(error.to_string().contains("after 3 of 6 bytes: no memory is behind"), "{error}");
        let mut out = [0; 20];
        cut.mapping.read_at(end - 20, &mut out).unwrap();
        assert_eq!((&out[..8], &out[17..]), (&[7; 8][..], &[9; 3][..]));
        // And so is the missing part, once it is there.
        cut.file.set_len(4 * page()).unwrap();
        cut.mapping.read_at(3 * page(), &mut out).unwrap();
        assert_eq!(out, [0; 20]);
        cut.mapping.write_at(3 * page(), b"back").unwrap();
        assert_eq!(cut.touch(3 * page()), b'b');
    }
}

#[test]
fn every_watch_of_an_address_has_its_event_and_no_other_has() {
    let name = "sigbus::every_watch_of_an_address_has_its_event_and_no_other_has";
    if !is_alone(name) || is_unguarded(name) {
        return;
    }
    install();
    let (cut, other) = (Cut::new(4, page()), Cut::new(2, page()));
    let (whole, elsewhere) = (cut.watch(), other.watch());
    let page_len = ByteLen::new(page());
    let first = sigbus::watch(cut.address(0), page_len).unwrap();
    let third = sigbus::watch(cut.address(2 * page()), page_len).unwrap();
    assert_eq!(third.addr(), cut.address(2 * page()));
    assert_eq!(whole.pending() + elsewhere.pending() + first.pending() + third.pending(), 0);

    let mut out = [0; 8];
    cut.mapping.read_at(2 * page() + 16, &mut out).unwrap_err();
    for watch in [&whole, &third] {
        assert_eq!(watch.pending(), 1);
        let events = drained(watch);
        let [event] = events[..] else { panic!("{events:?}") };
        assert_eq!(event.address, cut.address(2 * page() + 16));
        assert_eq!((event.kind, event.lsb), (BusKind::BeyondEnd, 0));
        assert!(event.to_string().starts_with("bus error at 0x"), "{event}");
    }
    assert_eq!(first.pending() + elsewhere.pending(), 0);
    drop(third);
    cut.mapping.write_at(2 * page(), &out).unwrap_err();
    other.mapping.write_at(page(), &out).unwrap_err();
    assert_eq!(drained(&whole).len(), 1);
    assert_eq!(drained(&elsewhere)[0].address, other.address(page()));
    assert_eq!(first.pending() + whole.pending() + elsewhere.pending(), 0);
    // Without any watch there is still the error.
    drop((whole, elsewhere, first));
    cut.mapping.read_at(page(), &mut out).unwrap_err();
}

#[test]
fn events_that_do_not_fit_are_counted() {
    let name = "sigbus::events_that_do_not_fit_are_counted";
    if !is_alone(name) || is_unguarded(name) {
        return;
    }
    install();
    let cut = Cut::new(2, page());
    let watch = cut.watch();
    let many = sigbus::EVENTS as u64 + 10;
    for index in 0..many {
        cut.mapping.read_at(page() + 8 * index, &mut [0]).unwrap_err();
    }
    assert_eq!((watch.pending(), watch.lost()), (sigbus::EVENTS, 10));
    let shown = format!("{watch:?}");
    assert!(shown.contains("lost: 10"), "{shown}");
    let events = drained(&watch);
    assert_eq!(events.len(), sigbus::EVENTS);
    for (index, event) in (0..).zip(&events) {
        assert_eq!(event.address, cut.address(page() + 8 * index), "the oldest are kept");
    }
    cut.mapping.read_at(page(), &mut [0]).unwrap_err();
    assert_eq!((watch.pending(), watch.lost()), (1, 10));
}

#[test]
fn what_cannot_be_watched_is_an_error() {
    if !is_alone("sigbus::what_cannot_be_watched_is_an_error") {
        return;
    }
    let one = ByteLen::new(1);
    let error = sigbus::watch(Addr::new(1), one).unwrap_err();
    assert!(matches!(error, HandlerError::NotInstalled), "{error}");
    assert!(error.to_string().ends_with("call sigbus::install first"));
    install();
    assert!(sigbus::install().unwrap(), "again");
    let start = Addr::new(4096);
    let error = sigbus::watch(start, ByteLen::ZERO).unwrap_err();
    assert!(matches!(error, HandlerError::Empty { start: at } if at == start), "{error}");
    let last = Addr::new(usize::MAX);
    let two = ByteLen::new(2);
    let error = sigbus::watch(last, two).unwrap_err();
    assert!(
        matches!(error, HandlerError::Wraps { start, len } if (start, len) == (last, two)),
        "{error}"
    );
    drop(sigbus::watch(last, one).unwrap());
    let mut all: Vec<_> = (0..SLOTS).map(|_| sigbus::watch(start, one).unwrap()).collect();
    let error = sigbus::watch(start, one).unwrap_err();
    assert!(matches!(error, HandlerError::Full { slots: SLOTS }), "{error}");
    assert!(error.to_string().contains("drop one"), "{error}");
    all.pop();
    let _again = sigbus::watch(start, one).unwrap();
}

/// Forbids this thread to call rt_sigaction(2), or to set an action by it.
fn forbid_sigaction(only_setting: bool) {
    let statement = |code: u32, operand: u32, yes: u8, no: u8| libc::sock_filter {
        code: u16::try_from(code).unwrap(),
        jt: yes,
        jf: no,
        k: operand,
    };
    let load = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
    let equal = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
    let number = u32::try_from(libc::SYS_rt_sigaction).unwrap();
    let refuse = libc::SECCOMP_RET_ERRNO | u32::try_from(libc::EPERM).unwrap();
    // The second argument is the action: both halves are zero if there is none to set.
    let (half, other_half) = if only_setting { (24, 28) } else { (0, 0) };
    let absent = if only_setting { 0 } else { u32::MAX };
    let mut filter = [
        statement(load, 0, 0, 0),
        statement(equal, number, 0, 5),
        statement(load, half, 0, 0),
        statement(equal, absent, 0, 2),
        statement(load, other_half, 0, 0),
        statement(equal, absent, 1, 0),
        statement(libc::BPF_RET | libc::BPF_K, refuse, 0, 0),
        statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW, 0, 0),
    ];
    let program =
        libc::sock_fprog { len: u16::try_from(filter.len()).unwrap(), filter: filter.as_mut_ptr() };
    // SAFETY: this prctl(2) takes numbers.
    assert_eq!(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) }, 0);
    // SAFETY: this one reads the program, which lives over the call.
    let answer =
        unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) };
    assert_eq!(answer, 0, "{}", std::io::Error::last_os_error());
}

#[test]
fn a_kernel_that_refuses_the_handler_is_an_error_and_changes_nothing() {
    if !is_alone("sigbus::a_kernel_that_refuses_the_handler_is_an_error_and_changes_nothing") {
        return;
    }
    for only_setting in [true, false] {
        forbid_sigaction(only_setting);
        let error = sigbus::install().unwrap_err();
        let HandlerError::Install { set, cause } = &error else { panic!("{error:?}") };
        assert_eq!(*set, only_setting, "{error:?}");
        assert_eq!(cause.raw_os_error(), Some(libc::EPERM));
        assert!(error.to_string().ends_with("let a system call filter admit rt_sigaction"));
        let error = sigbus::watch(Addr::new(1), ByteLen::new(1)).unwrap_err();
        assert!(matches!(error, HandlerError::NotInstalled));
    }
}

#[test]
fn an_error_outside_of_a_copy_kills_as_it_would_have() {
    let name = "sigbus::an_error_outside_of_a_copy_kills_as_it_would_have";
    if !is_child(name) {
        // The action that a Rust program starts with, the kernel's default, and signals that cannot be ignored.
        for case in ["runtime", "default", "ignored", "sent", "sent early", "blocked"] {
            assert_dies(name, case);
        }
        return;
    }
    leave_no_core();
    match case().as_str() {
        "runtime" => {}
        "ignored" => set_action(libc::SIGBUS, &Action::Ignore, 0, &[]),
        _ => set_action(libc::SIGBUS, &Action::Default, 0, &[]),
    }
    install();
    let cut = Cut::new(2, page());
    let _watch = cut.watch();
    match case().as_str() {
        "sent" => raise(libc::SIGBUS),
        // This address is not watched.
        "sent early" => queue(libc::BUS_MCEERR_AO, 4096, 12),
        "blocked" => {
            // SAFETY: a set is numbers, of which zero is one.
            let mut set: libc::sigset_t = unsafe { std::mem::zeroed() };
            // SAFETY: sigaddset(3) changes a set.
            unsafe { libc::sigaddset(&mut set, libc::SIGBUS) };
            // SAFETY: pthread_sigmask(3) reads a set.
            unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &set, std::ptr::null_mut()) };
            let _ = cut.mapping.read_at(page(), &mut [0]);
        }
        _ => {
            cut.touch(page());
        }
    }
}

#[test]
fn without_the_handler_a_copy_dies_as_ever() {
    let name = "sigbus::without_the_handler_a_copy_dies_as_ever";
    if is_child(name) {
        leave_no_core();
        let cut = Cut::new(2, page());
        let _ = cut.mapping.read_at(page(), &mut [0]);
        return;
    }
    assert_dies(name, "");
}

#[test]
fn an_ignored_signal_of_a_process_stays_ignored() {
    if !is_alone("sigbus::an_ignored_signal_of_a_process_stays_ignored") {
        return;
    }
    set_action(libc::SIGBUS, &Action::Ignore, 0, &[]);
    install();
    raise(libc::SIGBUS);
    queue(libc::BUS_MCEERR_AO, 4096, 12);
    assert!(sigbus::install().unwrap(), "again");
}

static CALLS: AtomicUsize = AtomicUsize::new(0);
static CODE: AtomicI32 = AtomicI32::new(0);
static ADDRESS: AtomicUsize = AtomicUsize::new(0);
static BLOCKED: Mutex<Vec<i32>> = Mutex::new(Vec::new());

/// Returns the address that a signal names, whatever it means.
fn address_of(info: *mut libc::siginfo_t) -> usize {
    // SAFETY: the kernel, or a handler that passes the signal on, hands a handler a whole value.
    let info = unsafe { info.read() };
    // SAFETY: this reads a part of the value that every signal has.
    unsafe { info.si_addr() }.addr()
}

/// Records its arguments. No thread holds a lock here when the signal is raised.
extern "C" fn note_info(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    assert_eq!(signal, libc::SIGBUS);
    assert!(!context.is_null());
    CALLS.fetch_add(1, Ordering::Relaxed);
    // SAFETY: the kernel, or a handler that passes the signal on, hands on a whole value.
    CODE.store(unsafe { (*info).si_code }, Ordering::Relaxed);
    ADDRESS.store(address_of(info), Ordering::Relaxed);
    let signals = [libc::SIGBUS, libc::SIGUSR1, libc::SIGUSR2];
    *BLOCKED.lock().unwrap() = signals.into_iter().filter(|&one| is_blocked(one)).collect();
}

extern "C" fn note_plain(signal: i32) {
    assert_eq!(signal, libc::SIGBUS);
    CALLS.fetch_add(1, Ordering::Relaxed);
    let signals = [libc::SIGBUS, libc::SIGUSR1, libc::SIGUSR2];
    *BLOCKED.lock().unwrap() = signals.into_iter().filter(|&one| is_blocked(one)).collect();
}

fn blocked() -> Vec<i32> {
    BLOCKED.lock().unwrap().clone()
}

#[test]
fn a_handler_before_ours_has_what_is_not_ours_as_it_would_have() {
    if !is_alone("sigbus::a_handler_before_ours_has_what_is_not_ours_as_it_would_have") {
        return;
    }
    set_action(libc::SIGBUS, &Action::Info(note_info), 0, &[libc::SIGUSR1]);
    install();
    let cut = Cut::new(2, page());
    let watch = cut.watch();

    raise(libc::SIGBUS);
    assert_eq!((CALLS.load(Ordering::Relaxed), CODE.load(Ordering::Relaxed)), (1, libc::SI_TKILL));
    assert_eq!(blocked(), [libc::SIGBUS, libc::SIGUSR1]);
    assert!(!is_blocked(libc::SIGBUS) && !is_blocked(libc::SIGUSR1), "and no longer");
    // A process may name an address of ours, and is not believed.
    queue(libc::SI_QUEUE, cut.address(page()).get(), 0);
    assert_eq!((CALLS.load(Ordering::Relaxed), CODE.load(Ordering::Relaxed)), (2, libc::SI_QUEUE));
    assert_eq!(watch.pending(), 0);

    // An error of an access that is no copy is recorded and handed on.
    let broken = cut.address(page() + 8).get();
    queue(libc::BUS_MCEERR_AR, broken, 12);
    assert_eq!(CALLS.load(Ordering::Relaxed), 3);
    assert_eq!(CODE.load(Ordering::Relaxed), libc::BUS_MCEERR_AR);
    assert_eq!(ADDRESS.load(Ordering::Relaxed), broken);
    let events = drained(&watch);
    assert_eq!(events.len(), 1);
    assert_eq!((events[0].kind, events[0].lsb), (BusKind::ActionRequired, 12));
    assert_eq!(events[0].address, cut.address(page() + 8));
    queue(libc::BUS_ADRALN, 0x1001, 0);
    assert_eq!((CALLS.load(Ordering::Relaxed), watch.pending()), (4, 0));

    // No access failed, and the address is watched: that is all. Half of a huge page is as good.
    queue(libc::BUS_MCEERR_AO, cut.address(0).get(), 12);
    queue(libc::BUS_MCEERR_AO, cut.address(0).get() & !0x1f_ffff, 21);
    assert_eq!(CALLS.load(Ordering::Relaxed), 4);
    let kinds: Vec<_> = drained(&watch).iter().map(|event| (event.kind, event.lsb)).collect();
    assert_eq!(kinds, [(BusKind::ActionOptional, 12), (BusKind::ActionOptional, 21)]);
    drop(watch);
    queue(libc::BUS_MCEERR_AO, cut.address(0).get(), 12);
    assert_eq!(CALLS.load(Ordering::Relaxed), 5);

    if sigbus::recovers_copies() {
        cut.mapping.read_at(page(), &mut [0]).unwrap_err();
        assert_eq!(CALLS.load(Ordering::Relaxed), 5, "a copy is ours");
    }
    // Another handler is set after ours: it may call ours, so ours does not call it.
    set_action(libc::SIGBUS, &Action::Info(note_info), 0, &[]);
    assert!(!sigbus::install().unwrap());
    set_action(libc::SIGBUS, &Action::Default, 0, &[]);
    assert!(sigbus::install().unwrap(), "there is no handler to call");
}

#[test]
fn a_handler_of_one_argument_has_its_flags_honoured() {
    let name = "sigbus::a_handler_of_one_argument_has_its_flags_honoured";
    if !is_child(name) {
        for case in ["masked", "open"] {
            assert_eq!(end_of(name, case), (None, Some(0)), "{case}");
        }
        return assert_dies(name, "once");
    }
    leave_no_core();
    let (flags, masked) = match case().as_str() {
        "masked" => (0, vec![libc::SIGUSR2]),
        "open" => (libc::SA_NODEFER, vec![]),
        _ => (libc::SA_RESETHAND, vec![]),
    };
    set_action(libc::SIGBUS, &Action::Plain(note_plain), flags, &masked);
    install();
    raise(libc::SIGBUS);
    assert_eq!(CALLS.load(Ordering::Relaxed), 1);
    let expected = match case().as_str() {
        "masked" => vec![libc::SIGBUS, libc::SIGUSR2],
        "open" => vec![],
        _ => vec![libc::SIGBUS],
    };
    assert_eq!(blocked(), expected);
    // With `SA_RESETHAND`, this one kills.
    raise(libc::SIGBUS);
    assert_eq!(CALLS.load(Ordering::Relaxed), 2);
}

extern "C" fn exit_with_place(_: i32, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    exit_now(if address_of(info) == ADDRESS.load(Ordering::Relaxed) { 42 } else { 43 });
}

#[test]
fn an_error_in_the_slice_of_the_caller_is_the_callers() {
    let name = "sigbus::an_error_in_the_slice_of_the_caller_is_the_callers";
    if !is_child(name) {
        for case in ["read", "write", "elsewhere"] {
            assert_eq!(end_of(name, case), (None, Some(42)), "{case}");
        }
        return;
    }
    set_action(libc::SIGBUS, &Action::Info(exit_with_place), 0, &[]);
    install();
    let (cut, good) = (Cut::new(2, page()), Cut::new(2, 2 * page()));
    let bad = cut.address(page()).get();
    ADDRESS.store(bad, Ordering::Relaxed);
    let start = cut.address(page() - 40).get() as *mut u8;
    match case().as_str() {
        "read" => {
            // SAFETY: the bytes are mapped and have no other user. That the last of them raise a signal is
            // the case.
            let slice = unsafe { std::slice::from_raw_parts_mut(start, 80) };
            let _ = good.mapping.read_at(0, slice);
        }
        "write" => {
            // SAFETY: as above.
            let slice = unsafe { std::slice::from_raw_parts(start, 80) };
            let _ = good.mapping.write_at(0, slice);
        }
        _ => {
            cut.touch(page());
        }
    }
}

/// The kernel's name for poison: one without `CONFIG_MEMORY_FAILURE` has no name of its own for it.
fn poison_kind() -> (BusKind, u8) {
    if Path::new("/proc/sys/vm/memory_failure_early_kill").exists() {
        (BusKind::ActionRequired, u8::try_from(page().trailing_zeros()).unwrap())
    } else {
        (BusKind::BeyondEnd, 0)
    }
}

#[test]
fn a_poisoned_page_is_reported_and_its_neighbours_stay_good() {
    let name = "sigbus::a_poisoned_page_is_reported_and_its_neighbours_stay_good";
    if !is_alone(name) || is_unguarded(name) {
        return;
    }
    install();
    let Some(uffd) = crate::uffd::open(name, Features::POISON) else { return };
    let mapping = Mapping::anonymous(ByteLen::new(3 * page()), small_pages()).unwrap();
    let memory = Registered::new(uffd, mapping, Modes::MISSING).unwrap();
    let install = |at: u64, fill: Fill<'_>| {
        let answer = memory.install(at * page()..(at + 1) * page(), fill, Install::default());
        assert_eq!(answer.unwrap(), Answered::All);
    };
    let mapping = memory.mapping();
    let watch = sigbus::watch(mapping.addr(), mapping.len()).unwrap();
    let start = mapping.addr().get() as u64;
    install(0, Fill::Zero);
    install(2, Fill::Zero);
    install(1, Fill::Poison);
    let (kind, lsb) = poison_kind();
    let mut out = [0xee; 64];
    for (offset, bad) in [(page() - 24, page()), (page() + 808, page() + 808)] {
        let copied = usize::try_from(bad - offset).unwrap();
        let expected = |direction| AccessError::Bus {
            direction,
            address: Addr::new(mapping.addr().get() + usize::try_from(bad).unwrap()),
            offset: bad,
            copied_bytes: copied,
            len_bytes: 64,
            kind,
            lsb,
        };
        let result = mapping.read_at(offset, &mut out);
        assert_eq!(result, Err(expected(Touch::Read)));
        assert_eq!(out[..copied], [0; 64][..copied]);
        let result = mapping.write_at(offset, &[0; 64]);
        assert_eq!(result, Err(expected(Touch::Write)));
    }
    let events = drained(&watch);
    assert_eq!(events.len(), 4, "{events:?}");
    for event in events {
        assert_eq!((event.kind, event.lsb), (kind, lsb));
        let address = event.address.get() as u64;
        assert!((start + page()..start + 2 * page()).contains(&address), "{event:?}");
    }
    for offset in [0, 2 * page()] {
        mapping.write_at(offset, b"good").unwrap();
        mapping.read_at(offset, &mut out[..4]).unwrap();
        assert_eq!(&out[..4], b"good");
    }
    // A fresh page in its place is good again.
    mapping.discard(page()..2 * page()).unwrap();
    install(1, Fill::Zero);
    mapping.read_at(page(), &mut out).unwrap();
    assert_eq!(out, [0; 64]);
    assert_eq!(watch.pending(), 0);
}

#[test]
fn a_page_that_the_kernel_breaks_is_reported() {
    let name = "sigbus::a_page_that_the_kernel_breaks_is_reported";
    // It costs a page of real memory until the machine starts again, so `REQUIRE_ALL` does not ask
    // for it.
    let say = |reason: &str| eprintln!("skipped: {name}: {reason}");
    if std::env::var_os("UZONE_OS_TEST_HWPOISON").is_none_or(|value| value != "1") {
        return say("it breaks a page of real memory: set UZONE_OS_TEST_HWPOISON=1 to let it");
    }
    if !is_alone(name) || is_unguarded(name) {
        return;
    }
    install();
    let mapping = Mapping::anonymous(ByteLen::new(3 * page()), small_pages()).unwrap();
    mapping.write_at(0, &vec![7; usize::try_from(3 * page()).unwrap()]).unwrap();
    let watch = sigbus::watch(mapping.addr(), mapping.len()).unwrap();
    let len = usize::try_from(page()).unwrap();
    let bad = (mapping.addr().get() + len) as *mut libc::c_void;
    // SAFETY: madvise(2) takes one page of ours, whose bytes are not needed.
    if unsafe { libc::madvise(bad, len, libc::MADV_HWPOISON) } != 0 {
        return say(&format!(
            "MADV_HWPOISON: {}: it needs root and CONFIG_MEMORY_FAILURE",
            std::io::Error::last_os_error()
        ));
    }
    let mut out = [0; 64];
    let (_, offset, copied, kind) = ended(mapping.read_at(page() - 32, &mut out));
    assert_eq!((offset, copied, kind), (page(), 32, BusKind::ActionRequired));
    assert_eq!(out[..32], [7; 32]);
    let events = drained(&watch);
    assert!(events.iter().any(|event| event.kind == BusKind::ActionRequired
        && u32::from(event.lsb) == page().trailing_zeros()));
    for offset in [0, 2 * page()] {
        mapping.read_at(offset, &mut out).unwrap();
        assert_eq!(out, [7; 64]);
    }
}

static NESTED: OnceLock<Cut> = OnceLock::new();
static NESTED_ERRORS: AtomicUsize = AtomicUsize::new(0);

/// Copies memory that is not there, in a handler.
extern "C" fn copy_in_a_handler(_: i32) {
    let cut = NESTED.get().unwrap();
    let mut out = [0; 16];
    let offset = page() - 8;
    if let Err(AccessError::Bus { copied_bytes: 8, .. }) = cut.mapping.read_at(offset, &mut out) {
        NESTED_ERRORS.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn a_copy_in_a_handler_on_the_alternate_stack_is_recovered_too() {
    let name = "sigbus::a_copy_in_a_handler_on_the_alternate_stack_is_recovered_too";
    if !is_alone(name) || is_unguarded(name) {
        return;
    }
    // The handler before ours copies as well, and lets SIGBUS through: ours is then entered twice.
    set_action(libc::SIGBUS, &Action::Plain(copy_in_a_handler), libc::SA_NODEFER, &[]);
    install();
    let cut = NESTED.get_or_init(|| Cut::new(2, page()));
    let watch = cut.watch();
    let mut stack = vec![0_u8; 256 << 10];
    let alternate =
        libc::stack_t { ss_sp: stack.as_mut_ptr().cast(), ss_flags: 0, ss_size: stack.len() };
    // SAFETY: a stack is numbers and a pointer, of which zero is one.
    let mut before: libc::stack_t = unsafe { std::mem::zeroed() };
    // SAFETY: sigaltstack(2) reads one and writes one; the memory lives until it is set back.
    assert_eq!(unsafe { libc::sigaltstack(&alternate, &mut before) }, 0);
    set_action(libc::SIGUSR1, &Action::Plain(copy_in_a_handler), libc::SA_ONSTACK, &[]);
    for round in 1..=100 {
        raise(libc::SIGUSR1);
        raise(libc::SIGBUS);
        assert_eq!(NESTED_ERRORS.load(Ordering::Relaxed), 2 * round);
        assert_eq!(drained(&watch).len(), 2);
    }
    // SAFETY: as above.
    assert_eq!(unsafe { libc::sigaltstack(&before, std::ptr::null_mut()) }, 0);
}

fn errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap()
}

#[test]
fn errno_is_what_it_was_before_the_error() {
    let name = "sigbus::errno_is_what_it_was_before_the_error";
    if !is_alone(name) || is_unguarded(name) {
        return;
    }
    extern "C" fn fail(_: i32) {
        // SAFETY: close(2) of no descriptor touches no memory.
        assert_eq!(unsafe { libc::close(-1) }, -1);
    }
    set_action(libc::SIGBUS, &Action::Plain(fail), 0, &[]);
    install();
    let cut = Cut::new(2, page());
    // SAFETY: open(2) reads a string.
    assert_eq!(unsafe { libc::open(c"/no/such/file".as_ptr(), 0) }, -1);
    assert_eq!(errno(), libc::ENOENT);
    cut.mapping.read_at(page(), &mut [0]).unwrap_err();
    assert_eq!(errno(), libc::ENOENT);
    raise(libc::SIGBUS);
    assert_eq!(errno(), libc::ENOENT);
}

#[test]
fn watches_that_come_and_go_under_errors_have_their_own_events_alone() {
    let name = "sigbus::watches_that_come_and_go_under_errors_have_their_own_events_alone";
    if !is_alone(name) || is_unguarded(name) {
        return;
    }
    install();
    let cuts = [(); 3].map(|()| Cut::new(2, page()));
    let stop = AtomicBool::new(false);
    let (errors, events) = (AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for cut in &cuts {
            // Two threads touch memory that is not there.
            for offset in [0, 64] {
                let (stop, errors) = (&stop, &errors);
                scope.spawn(move || {
                    let mut out = [0; 24];
                    while !stop.load(Ordering::Relaxed) {
                        let result = cut.mapping.read_at(page() + offset - 16, &mut out);
                        let copied = usize::try_from(16 - offset.min(16)).unwrap();
                        let (_, at, done, _) = ended(result);
                        assert_eq!((at, done), (page() + offset - (16 - copied as u64), copied));
                        errors.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
            // And one watches, for a short time each, in slots that the others had before.
            let (stop, events) = (&stop, &events);
            scope.spawn(move || {
                let (start, end) = (cut.address(page()), cut.address(2 * page() - 1));
                while !stop.load(Ordering::Relaxed) {
                    let watch = cut.watch();
                    for _ in 0..3 {
                        let count = watch.drain(|event| {
                            assert!((start..=end).contains(&event.address), "{event:?}");
                            assert_eq!((event.kind, event.lsb), (BusKind::BeyondEnd, 0));
                        });
                        events.fetch_add(count as u64, Ordering::Relaxed);
                        std::thread::yield_now();
                    }
                }
            });
        }
        let start = Instant::now();
        let is_enough =
            || errors.load(Ordering::Relaxed) > 10_000 && events.load(Ordering::Relaxed) > 1000;
        while start.elapsed() < Duration::from_secs(3) || !is_enough() {
            assert!(start.elapsed() < Duration::from_secs(120), "{errors:?} {events:?}");
            std::thread::sleep(Duration::from_millis(50));
        }
        stop.store(true, Ordering::Relaxed);
    });
    // No slot is lost on the way.
    let start = cuts[0].address(0);
    let all: Vec<_> = (0..SLOTS).map(|_| sigbus::watch(start, ByteLen::new(1)).unwrap()).collect();
    assert_eq!(all.len(), SLOTS);
    println!("{errors:?} errors, {events:?} events");
}

/// Clearing and copying in every way there is, over the end of a truncated file on either side: an
/// error, and the thread goes on as if nothing had been.
#[test]
fn clearing_and_copying_end_where_there_is_no_memory_by_every_way() {
    let name = "sigbus::clearing_and_copying_end_where_there_is_no_memory_by_every_way";
    if !is_alone(name) || is_unguarded(name) {
        return;
    }
    install();
    let cut = Cut::new(64, 40 * page());
    let whole = Mapping::anonymous(ByteLen::new(64 * page()), small_pages()).unwrap();
    let (end, len) = (40 * page(), 64 * page());
    for way in CopyMethod::all() {
        for start in [0, 8, 64, 31 * page(), end - 8, end, end + 72] {
            for stop in [end + 8, 41 * page() + 128, len] {
                if stop <= start {
                    continue;
                }
                let bytes = usize::try_from(stop - start).unwrap();
                let first_bad = end.max(start);
                let error = |direction, mapping: &Mapping| {
                    let address =
                        Addr::new(mapping.addr().get() + usize::try_from(first_bad).unwrap());
                    let kind = BusKind::BeyondEnd;
                    let (offset, copied_bytes, len_bytes, lsb) = (first_bad, 0, bytes, 0);
                    AccessError::Bus {
                        direction,
                        address,
                        offset,
                        copied_bytes,
                        len_bytes,
                        kind,
                        lsb,
                    }
                };
                let at = |result: Result<(), AccessError>, direction| {
                    let Err(AccessError::Bus { offset, copied_bytes: 0, .. }) = result else {
                        panic!("{way} {start:#x} {stop:#x}: {result:?}");
                    };
                    // Stores are in any order, so the page that is reported need not be the first.
                    assert!(offset >= first_bad && offset < stop, "{way}: {offset:#x}");
                    if offset == first_bad {
                        assert_eq!(result, Err(error(direction, &cut.mapping)), "{way}");
                    }
                };
                at(cut.mapping.zero_by(start..stop, way), Touch::Write);
                at(cut.mapping.copy_by(start..stop, &whole, start, way), Touch::Write);
                at(whole.copy_by(start..stop, &cut.mapping, start, way), Touch::Read);
            }
        }
        // Memory that is there is cleared and copied as ever, after as many errors as before.
        cut.mapping.write_at(0, &[7; 4096]).unwrap();
        cut.mapping.zero_by(8..64, way).unwrap();
        whole.copy_by(0..4096, &cut.mapping, 0, way).unwrap();
        let mut seen = [1; 4096];
        whole.read_at(0, &mut seen).unwrap();
        let is_cleared = |at: usize| (8..64).contains(&at);
        let is_right = |(at, byte): (usize, &u8)| *byte == if is_cleared(at) { 0 } else { 7 };
        assert!(seen.iter().enumerate().all(is_right), "{way}");
    }
    // An error of a copy outside of any clearing is reported as before.
    let mut byte = [0];
    assert!(cut.mapping.read_at(end, &mut byte).is_err());
}

/// Threads that clear memory which is not there, beside threads whose memory is.
#[test]
fn an_error_of_one_thread_is_not_anothers() {
    let name = "sigbus::an_error_of_one_thread_is_not_anothers";
    if !is_alone(name) || is_unguarded(name) {
        return;
    }
    install();
    let cut = Cut::new(8, 4 * page());
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let cut = &cut;
            scope.spawn(move || {
                let ways: Vec<CopyMethod> = CopyMethod::all().collect();
                let own = Mapping::anonymous(ByteLen::mib(1), small_pages()).unwrap();
                for round in 0..300 {
                    let way = ways[(thread + round) % ways.len()];
                    if thread % 2 == 0 {
                        let end = 4 * page();
                        let error = cut.mapping.zero_by(end..end + 2 * page(), way).unwrap_err();
                        assert!(matches!(error, AccessError::Bus { .. }), "{error}");
                    } else {
                        own.zero_by(0..1 << 20, way).unwrap();
                    }
                }
            });
        }
    });
}

#[test]
fn clearing_an_unguarded_hole_kills_as_it_would_have() {
    let name = "sigbus::clearing_an_unguarded_hole_kills_as_it_would_have";
    if is_child(name) {
        leave_no_core();
        if case() == "handler" {
            install();
        }
        // Of a slice, which is no mapping's words: it is not guarded.
        let cut = Cut::new(4, 2 * page());
        let words = cut.mapping.as_words(0..4 * page()).unwrap();
        uzone_stream::zero_words(CopyMethod::String, words);
        exit_now(0);
    }
    for case in ["handler", "none"] {
        assert_dies(name, case);
    }
}
