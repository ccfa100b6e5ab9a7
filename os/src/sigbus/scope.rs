//! Clearing and copying by the stores of `uzone-stream` that survive memory which is not there, on
//! x86-64.
//!
//! Those stores are in many routines, which no handler knows by their addresses. So a thread that is about
//! to call one records which memory it is about to touch, and its stack pointer ([`Scope`]). If it gets
//! SIGBUS there, the handler of [`sigbus`](crate::sigbus) puts the stack back and sends it to the end of the
//! call, as a `siglongjmp` would: the work in the call is abandoned.
//!
//! Only a frame without anything to drop, to unlock or to finish may be abandoned, and
//! `zero_words`, `copy_words` and `flush_words` of `uzone-stream` are such: loops, and a fence,
//! which is done here in their place. Nothing else is called in a scope (see `copier`). The amount
//! that was written is not known: whole words, each old or new.
//!
//! An error at an address outside of the scope is not ours. A signal handler of the program that interrupts the stores
//! and touches the very memory that is being cleared or copied is abandoned with them if that raises SIGBUS; without the
//! scope, the process would die of it.
//!
//! Unsafe: machine code that puts a stack back.
//! Cost: two stores and a call beside the one that is made anyway; nothing where no handler is
//! installed.
//! Source: System V ABI for AMD64, section 3.2.1, on which registers a call preserves.

use core::arch::naked_asm;
use core::cell::Cell;
use core::ffi::c_void;
use core::mem::offset_of;
use core::ops::RangeInclusive;
use core::ptr;
use core::sync::atomic::{AtomicU64, Ordering, compiler_fence};

use crate::sigbus::copier::Fault;
use crate::sigbus::state::is_installed;

/// The memory that a thread is about to touch, and the place to which it returns if that is not there.
///
/// # Invariants
/// While a thread's `SCOPE` points to one, the thread is in [`call`] with it or about to be, and once
/// the stores run, `stack` and `landing` are those of that call.
#[repr(C)]
struct Scope {
    /// The stack pointer in the call, above which the caller's registers are.
    stack: u64,
    /// The address of the call's end.
    landing: u64,
    /// The first and the last byte of the destination, and of the source if there is one.
    guarded: [[u64; 2]; 2],
    /// The first address that is not there.
    bad: u64,
}

/// A guarded side that has no byte.
const NOTHING: [u64; 2] = [u64::MAX, 0];

thread_local! {
    // Without a destructor and made by a constant, so it is there without a call of anything: the
    // handler may look at it.
    static SCOPE: Cell<*mut Scope> = const { Cell::new(ptr::null_mut()) };
}

/// Calls `work` with `data`. Returns zero, or the packed error if the handler ended the call.
///
/// # Safety
/// `work` may be called with `data`, does not unwind, and its frames may be abandoned. `scope` is the
/// thread's for the time of the call.
#[unsafe(naked)]
unsafe extern "sysv64" fn call(
    work: extern "sysv64" fn(*const c_void),
    data: *const c_void,
    scope: *mut Scope,
) -> u64 {
    naked_asm!(
        // The registers that a call preserves are on the stack, where the landing finds them. Six registers, the return
        // address and eight bytes more: the stack is aligned to 16 for the call.
        "push rbp",
        "push rbx",
        "push r12",
        "push r13",
        "push r14",
        "push r15",
        "sub rsp, 8",
        "mov [rdx + {stack}], rsp",
        "lea rax, [rip + 3f]",
        "mov [rdx + {landing}], rax",
        "mov rax, rdi",
        "mov rdi, rsi",
        "call rax",
        "xor eax, eax",
        "2:",
        "add rsp, 8",
        "pop r15",
        "pop r14",
        "pop r13",
        "pop r12",
        "pop rbx",
        "pop rbp",
        "ret",
        // The handler comes here, with the stack put back and its answer in `rax`. Streaming stores
        // may be under way, which the abandoned call would have waited for.
        "3:",
        "sfence",
        "cld",
        "jmp 2b",
        stack = const offset_of!(Scope, stack),
        landing = const offset_of!(Scope, landing),
    )
}

/// Sends a thread out of its stores, if it is in a scope and the error is at an address that the scope
/// names, and returns whether it did.
///
/// For handlers: it touches `registers`, those of the interrupted thread, and the thread's scope.
pub(crate) fn land(
    registers: &mut [libc::greg_t; 23],
    broken: RangeInclusive<u64>,
    info: u64,
) -> bool {
    let Ok(scope) = SCOPE.try_with(Cell::get) else { return false };
    // SAFETY: `as_mut` wants null or a value that nothing else refers to. By the invariant of `Scope` it
    // lives in a frame of this thread, below which the thread was interrupted, and `guarded_call` holds no
    // reference to it meanwhile.
    let Some(scope) = (unsafe { scope.as_mut() }) else { return false };
    let hit = scope
        .guarded
        .iter()
        .find(|[first, last]| broken.start() <= last && broken.end() >= first && first <= last);
    let Some([first, _]) = hit else { return false };
    scope.bad = *first.max(broken.start()) & !7;
    registers[libc::REG_RAX as usize] = info.cast_signed();
    registers[libc::REG_RSP as usize] = scope.stack.cast_signed();
    registers[libc::REG_RIP as usize] = scope.landing.cast_signed();
    true
}

/// Calls `check`, and then `work` such that SIGBUS at one of the words ends the call. Where no
/// handler is installed, it calls `work` alone.
///
/// # Safety
/// Once `check` has returned, `work` does not unwind, and its frames may be abandoned.
pub(crate) unsafe fn guarded_call<W: Fn() + Copy>(
    check: impl FnOnce(),
    work: W,
    words: [&[AtomicU64]; 2],
) -> Result<(), Fault> {
    extern "sysv64" fn run<W: Fn()>(work: *const c_void) {
        // SAFETY: `&*` wants a `W` that lives as long as the reference: it is the one below, which
        // lives over the call.
        (unsafe { &*work.cast::<W>() })();
    }
    if !is_installed() {
        work();
        return Ok(());
    }
    check();
    let mut scope = Scope { stack: 0, landing: 0, guarded: words.map(side), bad: 0 };
    let scope = &raw mut scope;
    // A handler of this thread may be in here as well; its caller's scope is put back afterwards.
    let outer = SCOPE.replace(scope);
    // The handler runs on this thread: the compiler alone must not move the stores that it has to see.
    compiler_fence(Ordering::SeqCst);
    // SAFETY: `call` wants the promise of this function's caller, with `work` as the data of `run`, and the thread's
    // scope, which it is.
    let info = unsafe { call(run::<W>, (&raw const work).cast(), scope) };
    compiler_fence(Ordering::SeqCst);
    SCOPE.set(outer);
    // SAFETY: `scope` points to this frame's own value. It was handed out to machine code and to the
    // handler, both of which are done with it.
    let bad = unsafe { (*scope).bad };
    if info == 0 { Ok(()) } else { Err(Fault { info, bad }) }
}

/// Returns the first and the last address of words.
fn side(words: &[AtomicU64]) -> [u64; 2] {
    let first = words.as_ptr().addr() as u64;
    match size_of_val(words) as u64 {
        0 => NOTHING,
        len => [first, first + (len - 1)],
    }
}
