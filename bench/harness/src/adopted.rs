//! Memory of this process whose faults an engine answers as if another process had handed them over:
//! [`Adopted`].

use std::fs::File;
use std::os::fd::AsFd;
use std::sync::Arc;

use uzone_fault::{AdoptedMemory, Backing, Engine, FileBacking, LazyOptions, RemoteRegion};
use uzone_os::uffd::{Features, KernelFaults, Modes, Registered, Remote, Uffd};
use uzone_os::{AccessError, Anonymous, HugeAdvice, Mapping, Vaddr, probe};
use uzone_pages::ByteLen;

use super::error::Result;
use super::memory::{Counted, Reads, placed};

/// Memory as an engine maps its own: a window is one range of one page table.
pub fn anonymous(len: ByteLen) -> Result<Mapping> {
    let align = Some(ByteLen::mib(2));
    let how = Anonymous { huge: HugeAdvice::Default, align, ..Anonymous::default() };
    Ok(Mapping::anonymous(len, how)?)
}

/// Returns such memory, registered with a userfaultfd: `features` are required, `optional` ones are taken where the
/// kernel has them.
pub fn registered(len: ByteLen, features: Features, optional: Features) -> Result<Registered> {
    let uffd = Uffd::open(features, optional, KernelFaults::IfAllowed)?;
    Ok(Registered::new(Arc::new(uffd), anonymous(len)?, Modes::MISSING)?)
}

/// Memory, and the engine's part that answers its faults.
///
/// [`Engine::map`] keeps its memory from child processes by madvise(2), a call that some hosts deny. These benchmarks
/// start no child process, and need no such call.
pub struct Adopted {
    // Dropped first: no fault is answered afterwards.
    answering: AdoptedMemory,
    /// The registered memory.
    pub memory: Registered,
}

impl Adopted {
    /// Hands registered memory to an engine, which fills it from the start of a backing.
    pub fn new(
        engine: &Engine,
        memory: Registered,
        backing: Arc<dyn Backing>,
        options: &LazyOptions,
    ) -> Result<Self> {
        let fd = memory.uffd().as_fd().try_clone_to_owned()?;
        let mapping = memory.mapping();
        let (start, len) = (Vaddr::new(mapping.addr().get() as u64), mapping.len());
        let region = RemoteRegion { start, len, offset: 0, page: probe::page_size() };
        let answering = engine.adopt(Remote::adopt(fd)?, vec![region], backing, options, None)?;
        Ok(Self { answering, memory })
    }

    /// Maps the first `len` bytes of a file lazily.
    ///
    /// # Errors
    /// [`BenchError`](crate::BenchError) if memory, a userfaultfd or a thread is refused.
    pub fn file(engine: &Engine, file: File, len: ByteLen, options: &LazyOptions) -> Result<Self> {
        let memory = registered(len, Features::NONE, Features::POISON | Features::THREAD_ID)?;
        Self::new(engine, memory, Arc::new(FileBacking::new(file)?), options)
    }

    /// Returns the engine's part that answers the faults.
    #[must_use]
    pub fn answering(&self) -> &AdoptedMemory {
        &self.answering
    }

    /// Copies bytes out. The call waits for missing pages.
    ///
    /// # Errors
    /// [`AccessError`] unless all bytes are inside, or if a page could not be read.
    pub fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<(), AccessError> {
        self.memory.mapping().read_at(offset, out)
    }
}

impl Reads for Adopted {
    fn read(&self, offset: u64, out: &mut [u8]) -> Result {
        Ok(self.read_at(offset, out)?)
    }
}

impl Counted for Adopted {
    fn counts(&self, _: &str) -> Result<(Option<u64>, u64)> {
        let stats = self.answering.stats();
        Ok((Some(stats.faults), placed(&stats) * probe::page_size().bytes()))
    }
}
