//! The yardstick of [`in_thread`](crate::uffd::in_thread): a handler of `SIGBUS` that fills the window of a
//! fault and keeps no record of any page ([`BareHandler`]).
//!
//! It is for benchmarks: it passes no signal on, and there is one in a process.
//!
//! Unsafe: a signal action, and a pointer that the handler follows.
//! Source: sigaction(2), signal-safety(7), ioctl_userfaultfd(2), `UFFD_FEATURE_SIGBUS`.

use core::ffi::c_void;
use core::ptr;
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};
use std::io;
use std::sync::Arc;

use uzone_pages::ByteLen;

use crate::host::signals::{default_action, exchange};
use crate::host::thread::pause;
use crate::map::mapping::Mapping;
use crate::map::options::Vaddr;
use crate::sigbus::handler::keep_errno;
use crate::uffd::install::{Fill, Install};
use crate::uffd::registered::Registered;
use crate::uffd::reply::Answered;

/// The handler's value, while there is one.
static CURRENT: AtomicPtr<Bare> = AtomicPtr::new(ptr::null_mut());
/// Held while there is one.
static IS_TAKEN: AtomicBool = AtomicBool::new(false);

/// The number of handlers inside, and of faults: a line for some of the threads each, so that
/// threads do not wait for each other's counts.
#[repr(align(128))]
struct Share {
    inside: AtomicU64,
    faults: AtomicU64,
}

static SHARES: [Share; 16] =
    [const { Share { inside: AtomicU64::new(0), faults: AtomicU64::new(0) } }; 16];

struct Bare {
    memory: Arc<Registered>,
    /// The bytes of pages; without it the pages of the page cache are mapped.
    source: Option<Arc<Mapping>>,
    window: u64,
}

/// Fills the pages that threads touch, until it is dropped.
///
/// # Invariants
/// It has `IS_TAKEN`. `CURRENT` is `bare`, which was a box.
pub struct BareHandler {
    bare: *mut Bare,
    before: libc::sigaction,
}

// SAFETY: `Send` wants that another thread may drop it: its target is shared with the handlers of all
// threads, and the action of a signal is the process'.
unsafe impl Send for BareHandler {}
// SAFETY: `Sync` wants that threads may share it: nothing is changed through a reference.
unsafe impl Sync for BareHandler {}

impl BareHandler {
    /// Fills `memory`, whose userfaultfd has [`Features::SIGBUS`](crate::uffd::Features::SIGBUS), with the bytes
    /// of `source`, as many at once as `window`, a power of two; without a source with the bytes of its memory file.
    ///
    /// # Errors
    /// If there is one already, or the kernel refuses.
    pub fn install(
        memory: Arc<Registered>,
        source: Option<Arc<Mapping>>,
        window: ByteLen,
    ) -> io::Result<Self> {
        // Acquire pairs with the Release of the one that was dropped before.
        if IS_TAKEN.swap(true, Ordering::Acquire) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        let bare = Box::into_raw(Box::new(Bare { memory, source, window: window.get() }));
        SHARES.iter().for_each(|share| share.faults.store(0, Ordering::Relaxed));
        CURRENT.store(bare, Ordering::SeqCst);
        let handler: extern "C" fn(_, _, _) = on_sigbus;
        let action = libc::sigaction {
            sa_sigaction: handler as libc::sighandler_t,
            sa_flags: libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART,
            ..default_action()
        };
        let before = exchange(libc::SIGBUS, Some(&action));
        // If the kernel refused, the end of this value sets the default action.
        let this = Self { bare, before: *before.as_ref().unwrap_or(&default_action()) };
        before.map(|_| this)
    }

    /// Returns the number of faults so far.
    #[must_use]
    pub fn faults(&self) -> u64 {
        SHARES.iter().map(|share| share.faults.load(Ordering::Relaxed)).sum() // a statistic
    }
}

impl Drop for BareHandler {
    fn drop(&mut self) {
        // It was the action before, so the kernel takes it.
        let _ = exchange(libc::SIGBUS, Some(&self.before));
        CURRENT.store(ptr::null_mut(), Ordering::SeqCst);
        let mut round = 0;
        for share in &SHARES {
            while share.inside.load(Ordering::SeqCst) != 0 {
                pause(&mut round);
            }
        }
        // SAFETY: `from_raw` wants a pointer of `into_raw`, once: the invariant. Each handler counts itself and then
        // looks for the pointer, all in one order (SeqCst): the handlers that found it have left, and none finds
        // it afterwards.
        drop(unsafe { Box::from_raw(self.bare) });
        IS_TAKEN.store(false, Ordering::Release);
    }
}

impl core::fmt::Debug for BareHandler {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("BareHandler").field("faults", &self.faults()).finish_non_exhaustive()
    }
}

extern "C" fn on_sigbus(_: i32, info: *mut libc::siginfo_t, _: *mut c_void) {
    // SAFETY: the kernel hands a handler with `SA_SIGINFO` a whole `siginfo_t`, alive for the call.
    let info = unsafe { &*info };
    // SAFETY: a SIGBUS of the kernel has an address. One that a process sent has other bytes there, which are
    // no address of the memory, or fill a page of it that nothing asked for.
    let address = unsafe { info.si_addr() }.addr() as u64;
    keep_errno(|| {
        // Stacks are far apart, so that threads have different shares.
        let share = &SHARES[(ptr::from_ref(&address).addr() >> 20) % SHARES.len()];
        share.inside.fetch_add(1, Ordering::SeqCst);
        let bare = CURRENT.load(Ordering::SeqCst);
        // SAFETY: `as_ref` wants null or a value that lives as long as the reference: it is freed when no handler
        // is counted that may have found it.
        let is_answered = unsafe { bare.as_ref() }.is_some_and(|bare| {
            share.faults.fetch_add(1, Ordering::Relaxed); // a statistic
            bare.fill(address)
        });
        share.inside.fetch_sub(1, Ordering::SeqCst);
        if !is_answered {
            // The access is repeated, and ends the process.
            let _ = exchange(libc::SIGBUS, Some(&default_action()));
        }
    });
}

impl Bare {
    /// Fills the window around an address. Returns whether its page is there.
    fn fill(&self, address: u64) -> bool {
        let Some(offset) = self.memory.offset_of(Vaddr::new(address)) else { return false };
        let page = self.memory.mapping().page_size().bytes();
        let start = offset & !(self.window - 1);
        let end = (start + self.window).min(self.memory.mapping().mapped_len() as u64);
        let mut at = start;
        while at < end {
            let how = Install::default();
            let fill = match &self.source {
                Some(source) => Fill::From { source, offset: at },
                None => Fill::Cached,
            };
            at = match self.memory.install(at..end, fill, how) {
                Ok(Answered::All) => end,
                Ok(Answered::Part { bytes }) => at + bytes.max(page),
                Ok(Answered::Present) => at + page,
                Ok(Answered::LayoutChanging) => continue,
                _ => return false,
            };
        }
        true
    }
}
