//! Memory of this process that is registered with a userfaultfd: [`Registered`].
//!
//! A `Registered` owns its [`Mapping`], so the answers here reach nothing else: an offset that is
//! not inside is refused before the kernel is asked.
//!
//! A mapping that is dropped while threads of foreign code wait in it is unmapped first and its waiters are
//! woken then: they get `SIGSEGV`, never a page of zeroes.
//!
//! Units: offsets and lengths are bytes from the start of the mapping, multiples of its page size.
//! Unsafe: the answers, by which the kernel writes pages of the mapping.
//! Source: ioctl_userfaultfd(2).

use core::fmt;
use core::ops::Range;
use std::os::fd::AsFd;
use std::sync::Arc;

use rustix::io::Errno;

use crate::map::bytes::AccessError;
use crate::map::mapping::{Mapping, Rejected};
use crate::map::options::Vaddr;
use crate::sigbus::last_words::Known;
use crate::uffd::abi;
use crate::uffd::descriptor::Uffd;
use crate::uffd::error::UffdError;
use crate::uffd::install::{Fill, Install, answered};
use crate::uffd::modes::Modes;
use crate::uffd::reply::{Answered, UffdCall};

/// Memory of this process whose faults a [`Uffd`] reports.
///
/// # Invariants
/// `mapping` is `Some` until this value is dropped, and all its mapped bytes are registered with
/// `uffd`.
pub struct Registered {
    uffd: Arc<Uffd>,
    mapping: Option<Mapping>,
    /// The bits of the ioctls that the range takes.
    calls: u64,
    /// The process whose memory it is.
    process: u32,
    /// The explanation of a signal at one of its pages.
    known: Option<Known>,
}

impl Mapping {
    /// Takes the memory of `owner`, which stays mapped and registered until this value and all others that
    /// have a part of it are dropped. Costs no system call.
    #[must_use]
    pub fn lent(owner: Arc<Registered>) -> Self {
        Self::lent_by(owner, Registered::mapping)
    }
}

impl Registered {
    /// Registers all of `mapping` with `uffd`. From now on a thread that touches a page of it that
    /// is missing (or not mapped, or protected) waits for an answer.
    ///
    /// # Errors
    /// [`Rejected`] gives the mapping back, with [`UffdError::Register`].
    pub fn new(
        uffd: Arc<Uffd>,
        mapping: Mapping,
        modes: Modes,
    ) -> Result<Self, Rejected<Mapping, UffdError>> {
        let (start, len) = (mapping.addr().get() as u64, mapping.mapped_len() as u64);
        // SAFETY: `register` wants no code to rely on pages of the range being zero, or present. It is a
        // mapping that was given to us as a whole, so that no slice of it is lent, and its bytes are read
        // by atomics or by the kernel, for which waiting is nothing special.
        let answer = unsafe { abi::register(uffd.as_fd(), start, len, modes.bits().into()) };
        match answer {
            Ok(calls) => {
                let process = std::process::id();
                let known = Known::take(start, len);
                Ok(Self { uffd, mapping: Some(mapping), calls, process, known })
            }
            Err(cause) => {
                let fix = match cause {
                    Errno::INVAL => {
                        "only anonymous memory, memory files and hugetlb pages have them, each kind as the kernel's features say"
                    }
                    Errno::BUSY => "another userfaultfd has it already",
                    Errno::PERM => "it is of a file that is not open for writing",
                    _ => "the kernel gave an unexpected reason",
                };
                let (addr, len) = (mapping.addr(), mapping.len());
                let cause = UffdError::Register { addr, len, modes, fix, cause: cause.into() };
                Err(Rejected::new(mapping, cause))
            }
        }
    }

    /// Returns the memory.
    #[must_use]
    pub fn mapping(&self) -> &Mapping {
        match &self.mapping {
            Some(mapping) => mapping,
            None => unreachable!("only the drop takes the mapping out"),
        }
    }

    /// Returns the userfaultfd that reports the faults.
    #[must_use]
    pub fn uffd(&self) -> &Arc<Uffd> {
        &self.uffd
    }

    /// Notes why a page could not be produced, for the line that the handler of SIGBUS writes if a thread touches it.
    pub fn note_failure(&self, page: Range<u64>, reason: &str) {
        if let Some(known) = &self.known {
            known.note(page, reason);
        }
    }

    /// Returns whether the range takes an answer, by the kernel's reply to its registration.
    #[must_use]
    pub fn takes(&self, call: UffdCall) -> bool {
        takes(self.calls, call)
    }

    /// Returns at which byte of the memory an address is, or `None` if at none.
    #[must_use]
    pub fn offset_of(&self, address: Vaddr) -> Option<u64> {
        let mapping = self.mapping();
        let offset = address.get().checked_sub(mapping.addr().get() as u64)?;
        (offset < mapping.mapped_len() as u64).then_some(offset)
    }

    /// Returns the address of `range`, if it is whole pages of the memory.
    fn address(&self, range: &Range<u64>) -> Result<u64, AccessError> {
        let mapping = self.mapping();
        AccessError::check_pages(range, mapping.mapped_len() as u64, mapping.page_size())?;
        Ok(mapping.addr().get() as u64 + range.start)
    }

    /// Fills the missing pages of a range.
    ///
    /// # Errors
    /// [`UffdError`] if the range is not whole pages inside, there are not as many bytes to fill them with, or the
    /// kernel refuses.
    pub fn install(
        &self,
        range: Range<u64>,
        fill: Fill<'_>,
        how: Install,
    ) -> Result<Answered, UffdError> {
        let (start, len) = (self.address(&range)?, range.end - range.start);
        // SAFETY: `install` wants memory that may be written as atomics write it: it is pages of a `Mapping` that
        // we own (`address` checked), of which no slice is lent.
        unsafe { fill.install(self.uffd.as_fd(), start, len, how) }
    }

    /// Starts (`protected`) or stops reporting writes to a range. Stopping wakes the threads that wait to
    /// write.
    ///
    /// # Errors
    /// [`UffdError`] if the range is not inside, or the kernel refuses.
    pub fn write_protect(&self, range: Range<u64>, protected: bool) -> Result<Answered, UffdError> {
        let (start, len) = (self.address(&range)?, range.end - range.start);
        let mode = if protected { abi::PROTECT } else { 0 };
        let result = abi::write_protect(self.uffd.as_fd(), start, len, mode);
        answered(UffdCall::WriteProtect, start, len, result, None)
    }

    /// Wakes the threads that wait for pages of a range. They retry, and if there is still no page, they
    /// fault again.
    ///
    /// # Errors
    /// [`UffdError`] if the range is not inside, or the kernel refuses.
    pub fn wake(&self, range: Range<u64>) -> Result<Answered, UffdError> {
        let (start, len) = (self.address(&range)?, range.end - range.start);
        let result = abi::wake(self.uffd.as_fd(), start, len);
        answered(UffdCall::Wake, start, len, result, None)
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        let Some(mapping) = self.mapping.take() else {
            return;
        };
        if self.process != std::process::id() {
            // A child that was forked off: the userfaultfd is about its parent's memory, and at these addresses may be
            // other memory of its own.
            core::mem::forget(mapping);
            return;
        }
        let (start, len) = (mapping.addr().get() as u64, mapping.mapped_len() as u64);
        if mapping.is_adopted() {
            // The memory stays, and its owner needs no more answers. A refusal means that there is nothing
            // left to unregister.
            let _ = abi::unregister(self.uffd.as_fd(), start, len);
            return;
        }
        drop(mapping);
        // Unmapping memory does not wake its waiters. Waiters at addresses that were mapped anew
        // meanwhile only retry.
        let _ = abi::wake(self.uffd.as_fd(), start, len);
    }
}

impl fmt::Debug for Registered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registered")
            .field("mapping", &self.mapping)
            .field("calls", &self.calls)
            .finish_non_exhaustive()
    }
}

/// Returns whether the bits of the ioctls of a range have an answer.
const fn takes(calls: u64, call: UffdCall) -> bool {
    matches!(call, UffdCall::Register | UffdCall::Unregister) || calls & 1 << call as u8 != 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_and_answers_have_the_kernels_bits() {
        use linux_raw_sys::general as kernel;
        let all = Modes::all();
        assert_eq!(u32::from(Modes::MISSING.bits()), kernel::UFFDIO_REGISTER_MODE_MISSING);
        assert_eq!(u32::from(Modes::MINOR.bits()), kernel::UFFDIO_REGISTER_MODE_MINOR);
        assert_eq!(all.bits(), 7);
        assert_eq!(all.to_string(), "missing and minor and write-protect");
        assert_eq!(Modes::default().to_string(), "no");
        assert_eq!(Install::default().bits(), 0);
        let both = Install { wake: false, write_protect: true };
        let bits = kernel::UFFDIO_COPY_MODE_DONTWAKE | kernel::UFFDIO_COPY_MODE_WP;
        assert_eq!(both.bits(), u64::from(bits));
        let calls = 1 << 3 | 1 << 7;
        assert!(takes(calls, UffdCall::Copy) && takes(calls, UffdCall::Continue));
        assert!(takes(calls, UffdCall::Unregister) && !takes(calls, UffdCall::Poison));
    }
}
