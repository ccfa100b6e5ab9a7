//! Copies that survive memory which is not there, on x86-64.
//!
//! The instructions that touch a mapping are in two routines of known address and length. If one of them
//! gets SIGBUS, the handler of [`sigbus`](crate::sigbus) finds the thread there, looks in its registers which
//! addresses it was to touch, and sends it to the end of the routine, which returns the error. Linux copies
//! from and to user space in the same way. The registers of a routine state its progress, for as long as it may fault:
//!
//! | register | has |
//! |---|---|
//! | `r8`, `r9` | the first and the last byte of the guarded side: the mapping |
//! | `rcx` | the number of bytes that are done |
//! | `rsp` | its value when the routine was called |
//!
//! It returns in `rdx` zero, or [`BusError::info`](crate::sigbus::BusError) of the error, and
//! then in `rax` the first byte that was not copied. An error at another address is not ours:
//! it is in the caller's slice, and goes where it would have gone.
//!
//! Every access to the mapping is one aligned word of 8 bytes, which the architecture performs at
//! once, and a part of a word is changed by a locked exchange: the same as `plain`, in its order. A
//! `rep movsb` would be as short, and does not promise that. To the compiler a routine is a function
//! that it does not know, which performs relaxed atomic accesses.
//!
//! Unsafe: machine code, and the raw addresses that it takes.
//! Cost: a call; then a load and a store for 8 bytes, four of each to a turn of the loop.
//! Source: System V ABI for AMD64; Intel SDM volume 3, section 10.1.1, on which accesses are atomic.

use core::arch::naked_asm;
use core::ops::RangeInclusive;
use core::sync::atomic::AtomicU64;

use crate::sigbus::copier::{Copier, Fault, WORD};

/// The offset in a routine of the instruction to which a faulting thread is sent. The instructions before may fault, and
/// no others.
const LANDING: usize = 112;

/// The places of the registers that the handler looks at, or changes.
mod register {
    pub(super) const RIP: usize = libc::REG_RIP as usize;
    pub(super) const RAX: usize = libc::REG_RAX as usize;
    pub(super) const RCX: usize = libc::REG_RCX as usize;
    pub(super) const RDX: usize = libc::REG_RDX as usize;
    pub(super) const R8: usize = libc::REG_R8 as usize;
    pub(super) const R9: usize = libc::REG_R9 as usize;
}

/// The result of a routine, in `rax` and `rdx`.
#[repr(C)]
struct Outcome {
    /// The first byte that was not copied; if all were, the word that was loaded, if that was asked.
    value: u64,
    /// Zero, or the packed error from the handler.
    info: u64,
}

impl Outcome {
    #[inline]
    fn into_result(self) -> Result<u64, Fault> {
        let Self { value, info } = self;
        if info == 0 { Ok(value) } else { Err(Fault { info, bad: value }) }
    }
}

/// Returns `word`. `done` is zero, and `first` and `last` are the first and the last byte of it. The
/// second and third argument count for nothing: they put the others into their registers.
///
/// # Safety
/// `word` is aligned, and may be read, or raises SIGBUS.
#[unsafe(naked)]
unsafe extern "sysv64" fn load_word(
    word: *const u64,
    _: u64,
    _: u64,
    done: usize,
    first: usize,
    last: usize,
) -> Outcome {
    naked_asm!(
        "2:",
        "mov rax, [rdi]",
        "xor edx, edx",
        "ret",
        ".org 2b + {landing}, 0xcc",
        "ret",
        landing = const LANDING,
    )
}

/// Copies `len` bytes, a multiple of 8, from `src` to `dst`, of which one is guarded: the one whose
/// first and last byte are `first` and `last`. `done` is zero.
///
/// # Safety
/// `src` may be read and `dst` be written for `len` bytes, or raises SIGBUS if it is the guarded one.
/// The guarded one is aligned to 8.
#[unsafe(naked)]
unsafe extern "sysv64" fn copy_words(
    dst: *mut u8,
    src: *const u8,
    len: usize,
    done: usize,
    first: usize,
    last: usize,
) -> Outcome {
    // `.org` fills up to the landing, and does not assemble if the code is longer.
    naked_asm!(
        "2:",
        "lea r10, [rcx + 32]",
        "cmp r10, rdx",
        "ja 4f",
        ".p2align 4",
        "3:",
        "mov rax, [rsi + rcx]",
        "mov [rdi + rcx], rax",
        "mov rax, [rsi + rcx + 8]",
        "mov [rdi + rcx + 8], rax",
        "mov rax, [rsi + rcx + 16]",
        "mov [rdi + rcx + 16], rax",
        "mov rax, [rsi + rcx + 24]",
        "mov [rdi + rcx + 24], rax",
        "mov rcx, r10",
        "add r10, 32",
        "cmp r10, rdx",
        "jbe 3b",
        "4:",
        "cmp rcx, rdx",
        "jae 6f",
        "5:",
        "mov rax, [rsi + rcx]",
        "mov [rdi + rcx], rax",
        "add rcx, 8",
        "cmp rcx, rdx",
        "jb 5b",
        "6:",
        "xor edx, edx",
        "ret",
        ".org 2b + {landing}, 0xcc",
        "ret",
        landing = const LANDING,
    )
}

/// Replaces the bits of `word` that are not in `keep` by `bits`, in one step. `done` is zero, and
/// `first` and `last` are the first and the last byte of the word.
///
/// # Safety
/// `word` is aligned, and may be read and written, or raises SIGBUS.
#[unsafe(naked)]
unsafe extern "sysv64" fn merge_word(
    word: *mut u64,
    keep: u64,
    bits: u64,
    done: usize,
    first: usize,
    last: usize,
) -> Outcome {
    naked_asm!(
        "2:",
        "mov rax, [rdi]",
        "3:",
        "mov r10, rax",
        "and r10, rsi",
        "or r10, rdx",
        // It ends: an exchange fails only because another thread's write succeeded.
        "lock cmpxchg [rdi], r10",
        "jne 3b",
        "xor edx, edx",
        "ret",
        ".org 2b + {landing}, 0xcc",
        "ret",
        landing = const LANDING,
    )
}

/// Returns the addresses of the routines.
fn routines() -> [usize; 3] {
    [
        load_word as *const () as usize,
        copy_words as *const () as usize,
        merge_word as *const () as usize,
    ]
}

/// Sends a thread to the landing of the routine that it is in, if it is in one and the error is at an
/// address that the routine guards, and returns whether it did.
///
/// For handlers: it touches nothing but `registers`, those of the interrupted thread.
pub(crate) fn land(
    registers: &mut [libc::greg_t; 23],
    broken: RangeInclusive<u64>,
    info: u64,
) -> bool {
    let get = |register: usize| registers[register].cast_unsigned();
    let at = get(register::RIP);
    let routine = routines().into_iter().map(|start| start as u64).find(|start| {
        // Wraps around for an address before the start, and is then too far.
        at.wrapping_sub(*start) < LANDING as u64
    });
    let Some(routine) = routine else {
        return false;
    };
    let (first, last, done) = (get(register::R8), get(register::R9), get(register::RCX));
    if *broken.start() > last || *broken.end() < first {
        return false;
    }
    // Words are copied in order, and the kernel names the byte or its page: the bytes before it are copied, and so are
    // the bytes that the routine has counted.
    let bad = (*broken.start() & !(WORD as u64 - 1)).max(first.saturating_add(done)).min(last);
    registers[register::RAX] = bad.cast_signed();
    registers[register::RDX] = info.cast_signed();
    registers[register::RIP] = (routine + LANDING as u64).cast_signed();
    true
}

pub(crate) struct Guarded;

/// Returns the address of the first byte of a mapping's words, and of the last: an error is taken for one of theirs
/// between these, and goes on to the previous handler outside.
#[inline]
fn guard(words: &[AtomicU64]) -> (*mut u8, usize, usize) {
    let start = words.as_ptr().cast_mut().cast::<u8>();
    let len = size_of_val(words);
    (start, start.addr(), start.addr() + len.saturating_sub(1))
}

impl Copier for Guarded {
    #[inline]
    fn load(word: &AtomicU64) -> Result<u64, Fault> {
        let (start, (_, first, last)) = (word.as_ptr(), guard(std::slice::from_ref(word)));
        // SAFETY: `load_word` wants an aligned word to read: it is an atomic, and the routine performs
        // a relaxed load.
        unsafe { load_word(start, 0, 0, 0, first, last) }.into_result()
    }

    #[inline]
    fn copy_out(words: &[AtomicU64], out: &mut [[u8; WORD]]) -> Result<(), Fault> {
        assert_eq!(words.len(), out.len(), "as many words as there are chunks");
        let (start, first, last) = guard(words);
        let (dst, len) = (out.as_mut_ptr().cast(), size_of_val(out));
        // SAFETY: `copy_words` wants `len` bytes to read and to write.
        // 1. Read: `words` has as many, aligned, and is the guarded side. Others may write them
        //    meanwhile, as atomics do: the routine performs relaxed loads of whole words.
        // 2. Written: `out` has as many, borrowed mutably. After an error a part of it is written.
        unsafe { copy_words(dst, start, len, 0, first, last) }.into_result()?;
        Ok(())
    }

    #[inline]
    fn copy_in(words: &[AtomicU64], bytes: &[[u8; WORD]]) -> Result<(), Fault> {
        assert_eq!(words.len(), bytes.len(), "as many words as there are chunks");
        let (start, first, last) = guard(words);
        let (src, len) = (bytes.as_ptr().cast(), size_of_val(bytes));
        // SAFETY: `copy_words` wants `len` bytes to read and to write.
        // 1. Read: `bytes` has as many, borrowed, so that they do not change.
        // 2. Written: `words` has as many, aligned, and is the guarded side. They are atomics, which
        //    may be written through a shared reference; the routine performs relaxed stores of whole
        //    words.
        unsafe { copy_words(start, src, len, 0, first, last) }.into_result()?;
        Ok(())
    }

    #[inline]
    fn merge(word: &AtomicU64, keep: u64, bits: u64) -> Result<(), Fault> {
        let (start, (_, first, last)) = (word.as_ptr(), guard(std::slice::from_ref(word)));
        // SAFETY: `merge_word` wants an aligned word to read and write: it is an atomic, and the
        // routine performs a relaxed load and relaxed exchanges.
        unsafe { merge_word(start, keep, bits, 0, first, last) }.into_result()?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the registers of a thread that is in a routine which guards words, and has done some bytes.
    fn inside(routine: usize, words: &[AtomicU64], done: usize) -> [libc::greg_t; 23] {
        let (_, first, last) = guard(words);
        let mut registers = [0; 23];
        let values = [
            (register::RIP, routine + 3),
            (register::R8, first),
            (register::R9, last),
            (register::RCX, done),
        ];
        for (register, value) in values {
            registers[register] = (value as u64).cast_signed();
        }
        registers
    }

    #[test]
    fn each_routine_guards_its_words_and_no_byte_before_or_behind_them() {
        let memory = [const { AtomicU64::new(0) }; 5];
        for count in 1..=3 {
            let words = &memory[1..=count];
            let first = words.as_ptr().addr() as u64;
            let behind = first + 8 * count as u64;
            for routine in routines() {
                for (address, is_ours) in [
                    (first - 1, false),
                    (first, true),
                    (behind - 1, true),
                    (behind, false),
                    (behind + 1, false),
                ] {
                    let mut registers = inside(routine, words, 0);
                    let before = registers;
                    assert_eq!(land(&mut registers, address..=address, 1), is_ours, "{count}");
                    assert_eq!(registers != before, is_ours);
                }
                let mut registers = inside(routine, words, 0);
                assert!(
                    land(&mut registers, first - 4095..=first + 1, 1),
                    "a page that has a part"
                );
                let mut elsewhere = inside(routine + LANDING, words, 0);
                assert!(!land(&mut elsewhere, first..=first, 1), "the routine has ended");
            }
        }
    }
}
