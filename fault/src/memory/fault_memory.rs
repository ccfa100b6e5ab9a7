//! The memory whose faults are answered: [`FaultMemory`], of this process or of another.
//!
//! A page is known by its offset in the backing. Memory of this process has one range of addresses for it;
//! memory of another process may have several ([`RemoteRegion`]).

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::thread::Builder;
use std::time::{Duration, Instant};

use uzone_os::Vaddr;
use uzone_os::uffd::{
    Answered, Event, EventBuffer, EventSet, Install, Registered, Remote, UffdError,
};
use uzone_pages::ByteLen;

use crate::engine::kernel::{Fill, Kernel};
use crate::memory::remote_region::{RemoteRegion, offsets, places};
use crate::track::capture::CaptureSlot;

/// How long to retry while the kernel defers poisoning a page of a client's child.
const PATIENCE: Duration = Duration::from_secs(2);

/// Memory of another process whose faults are answered.
pub(crate) struct RemoteMemory {
    pub(crate) remote: Arc<Remote>,
    pub(crate) regions: Vec<RemoteRegion>,
    /// The reader of it as it was at one moment, of all parts of it.
    pub(crate) capture: Arc<CaptureSlot>,
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

    fn offset_of(&self, address: Vaddr) -> Option<u64> {
        self.regions.iter().find_map(|region| {
            let inside = address.get().checked_sub(region.start.get())?;
            (inside < region.len.get()).then(|| region.offset + inside)
        })
    }
}

impl Kernel for RemoteMemory {
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

/// The memory whose faults are read and answered.
#[derive(Clone)]
pub(crate) enum FaultMemory {
    /// Memory of this process.
    Own(Arc<Registered>),
    /// Memory of another one.
    Remote(Arc<RemoteMemory>),
}

impl FaultMemory {
    pub(crate) fn read(&self, buffer: &mut EventBuffer) -> io::Result<usize> {
        match self {
            Self::Own(memory) => memory.uffd().read(buffer),
            Self::Remote(memory) => match memory.capture.get() {
                Some(capture) => capture.read(&memory.remote, buffer),
                None => memory.remote.read(buffer),
            },
        }
    }

    /// Returns whether an event waits for the end of a capture. No fault can be answered before that.
    pub(crate) fn is_waiting(&self) -> bool {
        matches!(self, Self::Remote(memory) if memory.capture.waits().is_some())
    }

    /// Lets `set` wait for it, by the key `key`.
    pub(crate) fn join(&self, set: &EventSet, key: u64) -> io::Result<()> {
        match self {
            Self::Own(memory) => set.add(&**memory.uffd(), key),
            Self::Remote(memory) => set.add(&*memory.remote, key),
        }
    }

    pub(crate) fn leave(&self, set: &EventSet) -> io::Result<()> {
        match self {
            Self::Own(memory) => set.remove(&**memory.uffd()),
            Self::Remote(memory) => set.remove(&*memory.remote),
        }
    }

    /// Returns at which byte of the backing an address is.
    pub(crate) fn offset_of(&self, address: Vaddr) -> Option<u64> {
        match self {
            Self::Own(memory) => memory.offset_of(address),
            Self::Remote(memory) => memory.offset_of(address),
        }
    }

    /// Makes the missing pages of a process bad that the other one forked off, and closes its
    /// descriptor then, in a thread of its own. Returns it if there is no such thread.
    pub(crate) fn refuse_child(&self, child: Remote) -> Option<Remote> {
        let Self::Remote(memory) = self else { return Some(child) };
        let memory = memory.clone();
        let child = Arc::new(child);
        let poisons = {
            let child = child.clone();
            move || poison_all(&child, &memory.regions)
        };
        match Builder::new().name("uzone-child".into()).spawn(poisons) {
            Ok(_) => None,
            Err(_) => Arc::into_inner(child),
        }
    }

    /// Returns which pages of the backing the addresses of a removal are, region by region.
    pub(crate) fn offsets(&self, start: Vaddr, end: Vaddr) -> impl Iterator<Item = Range<u64>> {
        let regions: &[RemoteRegion] = match self {
            // Only the engine gives back pages of its own memory.
            Self::Own(_) => &[],
            Self::Remote(memory) => &memory.regions,
        };
        offsets(regions, start, end)
    }
}

/// Makes the pages of regions bad that are missing in a process, and in those that it forks off meanwhile.
fn poison_all(remote: &Remote, regions: &[RemoteRegion]) {
    let mut children = Vec::new();
    regions.iter().for_each(|region| poison_missing(remote, region, &mut children));
    while let Some(child) = children.pop() {
        regions.iter().for_each(|region| poison_missing(&child, region, &mut children));
    }
}

/// Makes the pages of a region bad that are missing in a process. `children` gets those that it forks off
/// meanwhile.
fn poison_missing(remote: &Remote, region: &RemoteRegion, children: &mut Vec<Remote>) {
    let page = uzone_os::probe::page_size().bytes();
    let mut buffer = EventBuffer::new(8);
    let mut give_up = Instant::now() + PATIENCE;
    let (mut at, end) = (region.start.get(), region.start.get().saturating_add(region.len.get()));
    while at < end {
        let (start, len) = (Vaddr::new(at), ByteLen::new(end - at));
        let step = match remote.install(start, len, Fill::Poison, Install::default()) {
            Ok(Answered::All | Answered::Gone) => return,
            Ok(Answered::Part { bytes }) => bytes.max(page),
            // The process waits for its event to be read.
            Ok(Answered::LayoutChanging | Answered::Busy) if Instant::now() < give_up => {
                let _ = remote.read(&mut buffer);
                for event in &mut buffer {
                    if let Event::Forked(child) = event {
                        children.push(child);
                    }
                }
                std::thread::yield_now();
                continue;
            }
            Ok(Answered::LayoutChanging | Answered::Busy) => {
                tracing::error!("the missing pages of a child of a client cannot be made bad");
                return;
            }
            // It is present, or cannot be missing; a huge page is skipped in small steps.
            Ok(Answered::Present | Answered::Hole | Answered::NotRegistered) | Err(_) => page,
        };
        at += step;
        give_up = Instant::now() + PATIENCE;
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use uzone_os::uffd::{Features, KernelFaults, Modes};
    use uzone_os::{Anonymous, Mapping};

    use super::*;
    use crate::tests::userfaultfd;

    #[test]
    #[cfg_attr(miri, ignore = "it takes faults")]
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
        let (remote, regions, capture) = (Arc::new(remote), regions.collect(), Arc::default());
        let memory = RemoteMemory { remote, regions, capture, is_tracked: false };
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

    #[test]
    #[cfg_attr(miri, ignore = "it takes events")]
    fn a_child_of_a_client_that_waits_for_its_own_events_is_refused_all_the_same() {
        let wanted = Features::EVENT_REMOVE | Features::POISON;
        let (name, faults) = ("a_child_of_a_client_that_waits", KernelFaults::IfAllowed);
        let Some(uffd) = userfaultfd(name, wanted, faults) else { return };
        let len = ByteLen::new(4 * uzone_os::probe::page_size().bytes());
        let mapping = Mapping::anonymous(len, Anonymous::default()).unwrap();
        let memory = Registered::new(uffd, mapping, Modes::MISSING).unwrap();
        let start = Vaddr::new(memory.mapping().addr().get() as u64);
        let page = uzone_os::probe::page_size();
        let regions = [RemoteRegion { start, len, offset: 0, page }];
        let remote = Remote::adopt(memory.uffd().as_fd().try_clone_to_owned().unwrap()).unwrap();
        let done = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            // As a child would: the call returns when its event was read.
            scope.spawn(|| {
                memory.mapping().discard(0..len.get()).unwrap();
                done.store(true, std::sync::atomic::Ordering::Release);
            });
            let is_busy = || {
                let answer = remote.install(start, len, Fill::Poison, Install::default());
                matches!(answer, Ok(Answered::LayoutChanging | Answered::Busy))
            };
            while !is_busy() {
                assert!(!done.load(std::sync::atomic::Ordering::Acquire), "it did not wait");
                std::thread::yield_now();
            }
            let begin = Instant::now();
            poison_all(&remote, &regions);
            assert!(begin.elapsed() < PATIENCE);
        });
        assert!(done.load(std::sync::atomic::Ordering::Acquire));
    }
}
