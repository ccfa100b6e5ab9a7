//! Memory of another process, as the engine answers its faults: [`RemoteMemory`].
//!
//! A page is known by its offset in the backing, and has its address in one of the regions ([`RemoteRegion`]).

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};

use uzone_os::Vaddr;
use uzone_os::uffd::{Answered, EventBuffer, Install, Remote, UffdError};
use uzone_pages::ByteLen;

use crate::memory::kernel::{Faults, Fill, Kernel};
use crate::memory::remote_region::{RemoteRegion, places};
use crate::pages::Policy;
use crate::pages::capture::CaptureSlot;

/// Memory of another process whose faults are answered.
pub(crate) struct RemoteMemory {
    pub(crate) remote: Remote,
    pub(crate) regions: Vec<RemoteRegion>,
    /// The reader of it as it was at one moment.
    pub(crate) capture: CaptureSlot,
    /// Whether zero pages are copied, so that they take memory of their own.
    pub(crate) zeroes_by_copy: bool,
    /// Whether pages are installed so that the kernel notes the first write to them.
    pub(crate) is_tracked: bool,
}

impl RemoteMemory {
    /// Returns the addresses that a range of the backing has, up to the end of its region, and how
    /// many bytes those are.
    fn place(&self, range: &Range<u64>) -> Option<(Vaddr, ByteLen)> {
        let region = self.regions.iter().find(|region| region.offsets().contains(&range.start))?;
        places(std::slice::from_ref(region), range).next()
    }

    /// Has writes to these bytes of the backing reported, or lets them go on. Returns the first answer that is
    /// not that all was done.
    pub(crate) fn write_protect(
        &self,
        bytes: &Range<u64>,
        protected: bool,
    ) -> Result<Answered, UffdError> {
        for (address, len) in places(&self.regions, bytes) {
            match self.remote.write_protect(address, len, protected)? {
                Answered::All => {}
                answer => return Ok(answer),
            }
        }
        Ok(Answered::All)
    }

    /// Fills the first page of a range with zeroes where the kernel puts no page of zeroes, because it takes a
    /// marker for a page: one is left where a page of a memory file was protected against writing and given
    /// back, and where such a page was missing when it was protected. Returns the answer, and for how many
    /// bytes it is.
    fn zero_over_marker(
        &self,
        address: Vaddr,
        bytes: u64,
        how: Install,
    ) -> Result<(Answered, u64), UffdError> {
        static ZEROES: [u8; 64 << 10] = [0; 64 << 10];
        let page = uzone_os::probe::page_size().bytes().min(bytes);
        let Some(zeroes) = usize::try_from(page).ok().and_then(|page| ZEROES.get(..page)) else {
            return Ok((Answered::Present, bytes));
        };
        let fill = Fill::Bytes(zeroes);
        Ok((self.remote.install(address, ByteLen::new(page), fill, how)?, page))
    }
}

impl Faults for RemoteMemory {
    fn fd(&self) -> BorrowedFd<'_> {
        self.remote.as_fd()
    }

    fn read(&self, buffer: &mut EventBuffer) -> io::Result<usize> {
        match self.capture.get() {
            Some(capture) => capture.read(&self.remote, buffer),
            None => self.remote.read(buffer),
        }
    }

    fn is_waiting(&self) -> bool {
        self.capture.waits().is_some()
    }

    fn offset_of(&self, address: Vaddr) -> Option<u64> {
        self.regions.iter().find_map(|region| {
            let inside = address.get().checked_sub(region.start.get())?;
            (inside < region.len.get()).then(|| region.offset + inside)
        })
    }

    fn regions(&self) -> &[RemoteRegion] {
        &self.regions
    }
}

impl Kernel for RemoteMemory {
    fn policy(&self) -> Policy {
        let zeroes_by_copy = self.zeroes_by_copy;
        Policy { zeroes_by_copy, is_remote: true, is_tracked: false }
    }

    /// Fills as much of a range as is in one region.
    fn install(&self, range: Range<u64>, fill: Fill<'_>) -> Result<Answered, UffdError> {
        // Bytes that no region has are not filled.
        let Some((address, len)) = self.place(&range) else { return Ok(Answered::Hole) };
        // Zeroes that take no memory count as not written to.
        let write_protect = self.is_tracked && !matches!(fill, Fill::Zero | Fill::Poison);
        let how = Install { write_protect, ..fill.how() };
        let bytes = len.get();
        let answer = self.remote.install(address, len, fill, how)?;
        let (answer, bytes) = match (answer, fill) {
            (Answered::Present, Fill::Zero) => self.zero_over_marker(address, bytes, how)?,
            (answer, _) => (answer, bytes),
        };
        let is_all = bytes == range.end - range.start;
        Ok(if answer == Answered::All && !is_all { Answered::Part { bytes } } else { answer })
    }

    fn wake(&self, range: Range<u64>) {
        for (address, len) in places(&self.regions, &range) {
            // A refusal means that the process is gone, and no thread waits.
            let _ = self.remote.wake(address, len);
        }
    }

    /// Memory is protected for a capture, and stays so if the process that captured it was killed.
    fn written(&self, page: u64, _: &dyn Fn(u64) -> bool) -> bool {
        // All regions have pages of one size.
        let Some(shift) = self.regions.first().map(|region| region.page.shift()) else {
            return true;
        };
        let bytes = page << shift..(page + 1) << shift;
        if let Some(capture) = self.capture.get()
            && let Some((address, _)) = self.place(&bytes)
        {
            capture.before_write(&bytes, address.get());
        }
        let answer = self.write_protect(&bytes, false);
        !matches!(answer, Ok(Answered::LayoutChanging | Answered::Busy))
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use uzone_os::uffd::{Event, Features, KernelFaults, Modes, Registered};
    use uzone_os::{Anonymous, Mapping};

    use super::*;
    use crate::tests::userfaultfd;

    #[test]
    fn a_waiter_behind_a_gap_is_woken_too() {
        let (name, faults) = ("a_waiter_behind_a_gap", KernelFaults::IfAllowed);
        let Some(uffd) = userfaultfd(name, Features::NONE, faults) else { return };
        let page = ByteLen::new(uzone_os::probe::page_size().bytes());
        let two = [0, 1].map(|_| {
            let mapping = Mapping::anonymous(page, Anonymous::default()).unwrap();
            Registered::new(uffd.clone(), mapping, Modes::MISSING).unwrap()
        });
        let remote = Remote::adopt(uffd.as_fd().try_clone_to_owned().unwrap()).unwrap();
        // One is at the start of the backing, the other behind a gap.
        let regions = two.iter().zip([0, 8]).map(|(memory, at)| RemoteRegion {
            start: Vaddr::new(memory.mapping().addr().get() as u64),
            len: page,
            offset: at * page.get(),
            page: uzone_os::probe::page_size(),
        });
        let (regions, capture) = (regions.collect(), CaptureSlot::default());
        let (zeroes_by_copy, is_tracked) = (false, false);
        let memory = RemoteMemory { remote, regions, capture, zeroes_by_copy, is_tracked };
        let mut buffer = EventBuffer::new(8);
        let mut read_faults = |count: usize| {
            let give_up = Instant::now() + Duration::from_secs(30);
            let mut seen = 0;
            while seen < count && Instant::now() < give_up {
                let _ = memory.remote.read(&mut buffer);
                seen += (&mut buffer).filter(|event| matches!(event, Event::PageFault(_))).count();
                std::thread::yield_now();
            }
            seen
        };
        let seen = std::thread::scope(|scope| {
            for one in &two {
                scope.spawn(move || one.mapping().read_at(0, &mut [0; 8]).unwrap());
            }
            let first = read_faults(2);
            // No page was filled, so all fault again.
            memory.wake(0..16 * page.get());
            let seen = (first, read_faults(2));
            for at in [0, 8] {
                let _ = memory.install(at * page.get()..(at + 1) * page.get(), Fill::Zero);
            }
            seen
        });
        assert_eq!(seen, (2, 2));
    }
}
