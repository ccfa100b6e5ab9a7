//! The line that the handler of SIGBUS writes to standard error before it passes an error on: [`Known`] memory, and
//! the last page of it that could not be produced.
//!
//! The process mostly dies of such an error, often as a program that knows nothing of this library. The handler takes
//! no lock and allocates nothing, so its text is in a fixed table: the place of the memory, and the reason, cut to
//! [`REASON`] bytes. A reason that is replaced in the same moment may be read as a mixture of both.
//!
//! Unsafe: this is the file that calls write(2) in a handler.
//! Source: signal-safety(7).

use core::fmt::{self, Write};
use core::ops::Range;
use core::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};

use crate::sigbus::error::BusError;

/// The most memory, by its number, that is known at a time. Of other memory nothing is written.
const SLOTS: usize = 1024;
/// The most bytes of a reason.
const REASON: usize = 160;
/// The most bytes of a line.
const LINE: usize = 512;
/// The most lines of a process: an action that returns without a mending has the error at once again.
const LINES: u32 = 16;

struct Slot {
    is_taken: AtomicBool,
    start: AtomicU64,
    /// Zero while nothing is known.
    len: AtomicU64,
    /// The offsets of the page that could not be produced last.
    bad_start: AtomicU64,
    bad_end: AtomicU64,
    reason: [AtomicU8; REASON],
}

static TABLE: [Slot; SLOTS] = [const {
    let [start, len, bad_start, bad_end] = [const { AtomicU64::new(0) }; 4];
    let reason = [const { AtomicU8::new(0) }; REASON];
    Slot { is_taken: AtomicBool::new(false), start, len, bad_start, bad_end, reason }
}; SLOTS];

static WRITTEN: AtomicU32 = AtomicU32::new(0);

/// Memory that is named in a line, until this is dropped.
///
/// # Invariants
/// The slot is this value's alone.
#[derive(Debug)]
pub(crate) struct Known(usize);

impl Known {
    /// Takes a slot for `len` bytes from `start` on, if one is free.
    pub(crate) fn take(start: u64, len: u64) -> Option<Self> {
        let takes = |slot: &Slot| {
            // Acquire pairs with the Release of the drop.
            !slot.is_taken.load(Ordering::Relaxed) && !slot.is_taken.swap(true, Ordering::Acquire)
        };
        let index = TABLE.iter().position(takes)?;
        let slot = &TABLE[index];
        slot.start.store(start, Ordering::Relaxed);
        // Release pairs with the Acquire of the handler.
        slot.len.store(len, Ordering::Release);
        Some(Self(index))
    }

    /// Notes why a page, by its offsets, could not be produced.
    pub(crate) fn note(&self, page: Range<u64>, reason: &str) {
        let slot = &TABLE[self.0];
        slot.bad_end.store(0, Ordering::Relaxed);
        let bytes = reason.bytes().chain(core::iter::repeat(0));
        for (place, byte) in slot.reason.iter().zip(bytes) {
            place.store(byte, Ordering::Relaxed);
        }
        slot.bad_start.store(page.start, Ordering::Relaxed);
        // Release pairs with the Acquire of the handler.
        slot.bad_end.store(page.end, Ordering::Release);
    }
}

impl Drop for Known {
    fn drop(&mut self) {
        let slot = &TABLE[self.0];
        slot.len.store(0, Ordering::Relaxed);
        slot.bad_end.store(0, Ordering::Relaxed);
        // Release pairs with the Acquire of `take`.
        slot.is_taken.store(false, Ordering::Release);
    }
}

/// Bytes of a line; more are left out.
struct Line {
    bytes: [u8; LINE],
    len: usize,
}

impl Line {
    fn push(&mut self, byte: u8) {
        // The last place is that of the end of the line.
        if self.len < LINE - 1 {
            // A reason may have bytes that would move the cursor of a terminal.
            self.bytes[self.len] = if byte.is_ascii_control() { b'?' } else { byte };
            self.len += 1;
        }
    }
}

impl Write for Line {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        text.bytes().for_each(|byte| self.push(byte));
        Ok(())
    }
}

/// Writes a line about an error, if it is at an address of memory that is known. For handlers.
// A function of its own, so that a fault that is answered takes no stack for the line.
#[inline(never)]
pub(crate) fn write(error: BusError) {
    let address = error.address.get() as u64;
    let offset_in = |slot: &Slot| {
        // Acquire pairs with the Release of `take`.
        let len = slot.len.load(Ordering::Acquire);
        let offset = address.checked_sub(slot.start.load(Ordering::Relaxed));
        offset.filter(|offset| *offset < len).map(|offset| (offset, len))
    };
    let found = TABLE.iter().find_map(|slot| Some((slot, offset_in(slot)?)));
    let Some((slot, (offset, len))) = found else { return };
    if WRITTEN.fetch_add(1, Ordering::Relaxed) >= LINES {
        return;
    }
    let mut line = Line { bytes: [0; LINE], len: 0 };
    let start = address - offset;
    let _ = write!(
        line,
        "uzone: SIGBUS at byte {offset:#x} of the {len} bytes that are mapped lazily at {start:#x}: "
    );
    // Acquire pairs with the Release of `note`.
    let end = slot.bad_end.load(Ordering::Acquire);
    if (slot.bad_start.load(Ordering::Relaxed)..end).contains(&offset) {
        let bytes = slot.reason.iter().map(|byte| byte.load(Ordering::Relaxed));
        bytes.take_while(|byte| *byte != 0).for_each(|byte| line.push(byte));
    } else {
        let _ = write!(line, "{}", error.kind);
    }
    line.bytes[line.len] = b'\n';
    // SAFETY: write(2) reads so many bytes, which are initialised and live over the call.
    let _ = unsafe { libc::write(libc::STDERR_FILENO, line.bytes.as_ptr().cast(), line.len + 1) };
}
