//! The handler of SIGBUS: its treatment of each error, and the actions that it hands the others.
//!
//! A handler runs on any thread between any two instructions. So a function that it calls is on the list of
//! signal-safety(7) or is ours and takes no lock, allocates nothing and cannot panic, and it puts
//! errno back.
//!
//! | SIGBUS | treatment |
//! |---|---|
//! | of a page that is missing, and that the thread fills ([`in_thread`](crate::uffd::in_thread)) | filled; the access is repeated |
//! | of a guarded copy or clearing, at an address of a guarded side | recorded; it returns an error |
//! | action optional, at a watched address | recorded; the thread goes on |
//! | another one of the kernel's | recorded where watched; of memory that is mapped lazily, a line is written to standard error; then the previous action |
//! | of kill(2), sigqueue(3) and the like | the previous action |
//!
//! Signals wait while the handler runs: the handler of another signal may touch a missing page as well, and
//! a thread that blocks SIGBUS dies of that. Those that an instruction raises do not wait.
//!
//! Before the previous action is called nothing of the table is held, so it may leave by a `siglongjmp`. It
//! finds the mask that it would have found: that of the interrupted thread and its own, and `SA_NODEFER` and
//! `SA_RESETHAND` are honoured. Two of its flags cannot be: it runs on the alternate stack if there is one,
//! and system calls that the signal interrupts are restarted. "Default" is the process dying of this very
//! signal: the action is set back and the signal, with its `siginfo`, is queued again for this thread,
//! which has it as soon as the handler returns. "Ignored" is the same for an error of the thread's own
//! access, which the kernel lets no process ignore, and nothing for the rest.
//!
//! Unsafe: the pointers that the kernel hands a handler, and calling other handlers.
//! Source: sigaction(2), signal-safety(7), rt_tgsigqueueinfo(2), and `siginfo` of the kernel's
//! user interface.

use core::ffi::c_void;
use core::mem::offset_of;
use core::ptr;
use core::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::sync::{Mutex, PoisonError};

use super::error::{BusError, BusKind, HandlerError};
use super::last_words;
use super::state::{IS_INSTALLED, TABLE, is_installed};
use crate::host::signals::{default_action, exchange, set_mask, set_of};
use crate::uffd::in_thread::answerer;

/// An action that SIGBUS had before ours.
struct Previous {
    action: libc::sigaction,
    /// Whether a handler with `SA_RESETHAND` was called.
    is_spent: AtomicBool,
}

/// The action before ours, or null before there was one. It is never freed, since a handler may look at it at any time;
/// there is one for each time that ours was set.
static PREVIOUS: AtomicPtr<Previous> = AtomicPtr::new(ptr::null_mut());

/// Held over an installation, and never by the handler.
static INSTALLING: Mutex<()> = Mutex::new(());

/// Installs the handler for the whole process, for good, unless it is installed. Returns whether SIGBUS comes to it
/// first.
///
/// It does not where another handler was set after ours. That one decides whether errors reach ours, so nothing is
/// changed: two handlers that each took the other for the previous one would call each other forever.
///
/// A program calls it once, early, and after all others that set an action for SIGBUS (a runtime, a crash
/// reporter). A library leaves it to the program.
///
/// # Errors
/// [`HandlerError::Install`] if the kernel refuses, for instance because of a filter of system calls.
pub fn install() -> Result<bool, HandlerError> {
    // A panic under the lock leaves nothing half done that this would not do again.
    let _alone = INSTALLING.lock().unwrap_or_else(PoisonError::into_inner);
    let current = exchange(libc::SIGBUS, None)
        .map_err(|cause| HandlerError::Install { set: false, cause })?;
    if current.sa_sigaction == ours() {
        return Ok(true);
    }
    let has_handler = ![libc::SIG_DFL, libc::SIG_IGN].contains(&current.sa_sigaction);
    if is_installed() && has_handler {
        return Ok(false);
    }
    // The handler may run as soon as it is set, so the action before is stored first.
    let before = PREVIOUS.load(Ordering::Relaxed);
    remember(current);
    match exchange(libc::SIGBUS, Some(&action())) {
        Ok(replaced) => {
            if replaced.sa_sigaction != current.sa_sigaction {
                // Another thread set another action between the two calls.
                remember(replaced);
            }
            IS_INSTALLED.store(true, Ordering::Relaxed);
            Ok(true)
        }
        Err(cause) => {
            PREVIOUS.store(before, Ordering::Relaxed);
            Err(HandlerError::Install { set: true, cause })
        }
    }
}

/// Returns whether SIGBUS comes to the handler of [`install`] first: another library may have set its own since then,
/// which may pass errors on or not. It is one system call.
#[must_use]
pub fn is_in_place() -> bool {
    exchange(libc::SIGBUS, None).is_ok_and(|current| current.sa_sigaction == ours())
}

fn remember(action: libc::sigaction) {
    let previous = Box::leak(Box::new(Previous { action, is_spent: AtomicBool::new(false) }));
    // Release pairs with the Acquire of `pass_on`: a thread that has the pointer sees the action behind it.
    PREVIOUS.store(previous, Ordering::Release);
}

/// Returns the number of our handler as sigaction(2) has it.
fn ours() -> libc::sighandler_t {
    let handler: extern "C" fn(_, _, _) = on_sigbus;
    handler as libc::sighandler_t
}

/// Returns the action of our handler. On the alternate stack, since the thread's stack may be too small for
/// it (that of a coroutine), with SIGBUS blocked: an error inside the handler is a bug, and kills.
fn action() -> libc::sigaction {
    libc::sigaction {
        sa_sigaction: ours(),
        sa_mask: deferred(),
        sa_flags: libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART,
        ..default_action()
    }
}

/// Returns the signals that wait for our handler: all but those that an instruction raises, or a thread
/// itself by abort(3).
fn deferred() -> libc::sigset_t {
    const RAISED: [i32; 6] =
        [libc::SIGSEGV, libc::SIGILL, libc::SIGFPE, libc::SIGTRAP, libc::SIGSYS, libc::SIGABRT];
    // The kernel has signals 1 to 64.
    let deferred: Vec<i32> = (1..=64).filter(|signal| !RAISED.contains(signal)).collect();
    set_of(&deferred)
}

/// Calls a part of a handler, and puts errno back.
pub(crate) fn keep_errno<R>(work: impl FnOnce() -> R) -> R {
    // SAFETY: `__errno_location` wants nothing, and is safe in a handler.
    let errno_ptr = unsafe { libc::__errno_location() };
    // SAFETY: it is this thread's errno, which lives as long as the thread.
    let errno = unsafe { errno_ptr.read() };
    let result = work();
    // SAFETY: as above.
    unsafe { errno_ptr.write(errno) };
    result
}

/// The head of the kernel's `siginfo` for SIGBUS.
#[repr(C)]
struct SigInfo {
    signo: i32,
    errno: i32,
    code: i32,
    addr: *mut c_void,
    addr_lsb: i16,
}

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
const _: () = {
    assert!(offset_of!(SigInfo, code) == 8);
    assert!(offset_of!(SigInfo, addr) == 16);
    assert!(offset_of!(SigInfo, addr_lsb) == 24);
};
const _: () = assert!(offset_of!(SigInfo, code) == offset_of!(libc::siginfo_t, si_code));
const _: () = assert!(size_of::<SigInfo>() <= size_of::<libc::siginfo_t>());

extern "C" fn on_sigbus(signal: i32, info: *mut libc::siginfo_t, context: *mut c_void) {
    keep_errno(|| {
        if !absorb(info, context) {
            if let Some(error) = error_of(info) {
                last_words::write(error);
            }
            pass_on(signal, info, context);
        }
    });
}

/// Records the error, and returns whether that is all that has to be done.
fn absorb(info: *mut libc::siginfo_t, context: *mut c_void) -> bool {
    let Some(error) = error_of(info) else {
        return false;
    };
    if error.kind == BusKind::BeyondEnd
        && answerer::answer(error.address.get() as u64, access_of(context))
    {
        return true;
    }
    let watches = TABLE.record(error.extent(), error.entry());
    if error.kind == BusKind::ActionOptional {
        // No access of this thread failed, even if it happens to be in a copy.
        return watches != 0;
    }
    recover(context, error)
}

/// Returns the error, or `None` if a process sent the signal.
fn error_of(info: *mut libc::siginfo_t) -> Option<BusError> {
    // SAFETY: the kernel hands a handler with `SA_SIGINFO` a whole `siginfo_t`, alive for the call, and
    // another handler that passes a signal on to ours hands on the same. `SigInfo` is the head of it, as
    // asserted above, and any bytes are a value of its fields.
    let info = unsafe { info.cast::<SigInfo>().read() };
    // Signals of processes have zero or less.
    (info.code > 0).then(|| BusError::of_signal(info.code, info.addr.addr(), info.addr_lsb))
}

/// Makes a guarded copy return an error, if it is one that the thread is in.
#[cfg(uzone_asm)]
fn recover(context: *mut c_void, error: BusError) -> bool {
    let super::table::Extent { first, last } = error.extent();
    let registers = registers_of(context);
    // SAFETY: `&mut *` wants 23 aligned and initialised registers that nothing else refers to.
    // 1. There: the kernel hands a handler with `SA_SIGINFO` the context of the interrupted thread,
    //    alive for the call, and a handler that passes a signal on hands on the same. `registers_of`
    //    points to the registers in it, all of which the kernel has written.
    // 2. Aligned: the context starts at a multiple of 16, and the registers 40 bytes behind that.
    // 3. Alone: the context belongs to this call of the handler. Nothing of it but the registers is
    //    referred to, because the kernel writes fewer bytes than `libc::ucontext_t` has.
    let registers = unsafe { &mut *registers };
    super::guarded::land(registers, first..=last, error.info())
        || super::scope::land(registers, first..=last, error.info())
}

/// Returns the access of the thread at the address.
#[cfg(uzone_asm)]
fn access_of(context: *mut c_void) -> Option<answerer::Access> {
    const PRESENT: libc::greg_t = 1 << 0;
    const WRITE: libc::greg_t = 1 << 1;
    let error = usize::try_from(libc::REG_ERR).ok()?;
    // SAFETY: `&*` wants aligned and initialised registers that are not changed meanwhile: as in `recover`,
    // which comes after this.
    let error = unsafe { &*registers_of(context) }[error];
    Some(answerer::Access { is_present: error & PRESENT != 0, is_write: error & WRITE != 0 })
}

/// Returns that the access of the thread is unknown.
#[cfg(not(uzone_asm))]
fn access_of(_: *mut c_void) -> Option<answerer::Access> {
    None
}

/// Returns the place of the registers of the interrupted thread in a context that the kernel wrote.
#[cfg(uzone_asm)]
fn registers_of(context: *mut c_void) -> *mut [libc::greg_t; 23] {
    const AT: usize = offset_of!(libc::ucontext_t, uc_mcontext.gregs);
    // The kernel's context: flags, link and stack are 40 bytes, and 256 bytes of its `sigcontext_64`
    // follow, which starts with the registers. Behind that it has a mask of 8 bytes, and the C
    // library's type has one of 128 and room for more.
    const _: () = assert!(AT == 40 && size_of::<[libc::greg_t; 23]>() <= 256);
    const _: () = assert!(size_of::<libc::ucontext_t>() > 40 + 256 + 8);
    context.wrapping_byte_add(AT).cast()
}

/// Returns that the copy cannot be recovered: those of this build are not guarded.
#[cfg(not(uzone_asm))]
fn recover(_: *mut c_void, _: BusError) -> bool {
    false
}

/// Does the same as the action before ours.
// A function of its own, so that a fault that is answered takes no stack for the masks and actions
// in here.
#[inline(never)]
fn pass_on(signal: i32, info: *mut libc::siginfo_t, context: *mut c_void) {
    // Acquire pairs with the Release of `remember`.
    let previous = PREVIOUS.load(Ordering::Acquire);
    // SAFETY: `as_ref` wants null or a value that lives on: `remember` leaked it.
    let Some(previous) = (unsafe { previous.as_ref() }) else {
        return die(info);
    };
    let flags = previous.action.sa_flags;
    let handler = previous.action.sa_sigaction;
    let has_handler = ![libc::SIG_DFL, libc::SIG_IGN].contains(&handler);
    // Relaxed: only which of several threads is first.
    let is_spent = has_handler
        && flags & libc::SA_RESETHAND != 0
        && previous.is_spent.swap(true, Ordering::Relaxed);
    if handler == libc::SIG_DFL || is_spent {
        return die(info);
    }
    if handler == libc::SIG_IGN {
        let is_own = error_of(info).is_some_and(|error| error.kind != BusKind::ActionOptional);
        if is_own {
            die(info);
        }
        return;
    }
    let mask = set_mask(libc::SIG_SETMASK, &mask_of(&previous.action, signal, context));
    if flags & libc::SA_SIGINFO != 0 {
        // SAFETY: the number is that of a handler which takes three arguments, as its flags state.
        let handler = unsafe {
            core::mem::transmute::<
                libc::sighandler_t,
                extern "C" fn(i32, *mut libc::siginfo_t, *mut c_void),
            >(handler)
        };
        handler(signal, info, context);
    } else {
        // SAFETY: as above, of one that takes one argument.
        let handler =
            unsafe { core::mem::transmute::<libc::sighandler_t, extern "C" fn(i32)>(handler) };
        handler(signal);
    }
    if let Ok(mask) = mask {
        let _ = set_mask(libc::SIG_SETMASK, &mask);
    }
}

/// Returns the signals that are blocked while the handler of `action` runs.
fn mask_of(action: &libc::sigaction, signal: i32, context: *mut c_void) -> libc::sigset_t {
    let mut mask = interrupted_mask(context);
    // The kernel has signals 1 to 64.
    for other in 1..=64 {
        // SAFETY: sigismember(3) reads a set, and refuses a number that is no signal.
        let is_masked = unsafe { libc::sigismember(&action.sa_mask, other) } == 1;
        if is_masked || (other == signal && action.sa_flags & libc::SA_NODEFER == 0) {
            // SAFETY: sigaddset(3) changes a set that is initialised.
            unsafe { libc::sigaddset(&mut mask, other) };
        }
    }
    mask
}

/// Returns the signals that the interrupted thread blocks.
fn interrupted_mask(context: *mut c_void) -> libc::sigset_t {
    const AT: usize = offset_of!(libc::ucontext_t, uc_sigmask);
    #[cfg(target_arch = "x86_64")]
    const _: () = assert!(AT == 40 + 256);
    // SAFETY: a set is an array of numbers, of which zero is one.
    let mut mask: libc::sigset_t = unsafe { core::mem::zeroed() };
    // SAFETY: the kernel's context of the interrupted thread lives over the call, and has a mask of 64 bits
    // there, which is less than the C library's type has. A set starts with those.
    unsafe {
        ptr::copy_nonoverlapping(
            context.wrapping_byte_add(AT).cast(),
            (&raw mut mask).cast::<u8>(),
            8,
        );
    }
    mask
}

/// Sets the action back to the default one and queues the signal again for this thread, which dies
/// of it when the handler returns.
fn die(info: *mut libc::siginfo_t) {
    let _ = exchange(libc::SIGBUS, Some(&default_action()));
    // SAFETY: getpid(2) touches no memory.
    let process = unsafe { libc::getpid() };
    // SAFETY: gettid(2) touches no memory.
    let thread = unsafe { libc::gettid() };
    // A thread may send itself a signal with a code that only the kernel may send others.
    // SAFETY: rt_tgsigqueueinfo(2) reads a `siginfo_t`, which is the one that the handler was given.
    let answer =
        unsafe { libc::syscall(libc::SYS_rt_tgsigqueueinfo, process, thread, libc::SIGBUS, info) };
    if answer != 0 {
        // SAFETY: raise(3) touches no memory.
        unsafe { libc::raise(libc::SIGBUS) };
    }
}
