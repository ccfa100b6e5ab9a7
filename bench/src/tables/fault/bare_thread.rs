//! The limit of answering in the thread ([`BareThread`]): a handler that fills the window of a fault and keeps no
//! record of any page.

use std::sync::Arc;

use uzone_harness::{BenchError, Counted, Reads, Result};
use uzone_os::Mapping;
use uzone_os::uffd::{BareHandler, Features, KernelFaults, Modes, Registered, Uffd};
use uzone_pages::ByteLen;

/// Memory whose faults are answered by the threads that take them.
pub(super) struct BareThread {
    memory: Arc<Registered>,
    handler: BareHandler,
}

impl BareThread {
    /// Registers memory that is filled with copies of `source`, or maps the pages of its memory file.
    pub(super) fn new(
        memory: Mapping,
        source: Option<Arc<Mapping>>,
        window: ByteLen,
    ) -> Result<Self> {
        let (modes, features) = match source {
            Some(_) => (Modes::MISSING, Features::NONE),
            None => (Modes::MINOR, Features::MINOR_SHMEM),
        };
        let uffd = Uffd::open(features | Features::SIGBUS, Features::NONE, KernelFaults::Never)?;
        let memory = Arc::new(Registered::new(Arc::new(uffd), memory, modes)?);
        let handler = BareHandler::install(memory.clone(), source, window);
        let handler = handler.map_err(|cause| BenchError::handler("thread-bare", cause))?;
        Ok(Self { memory, handler })
    }
}

impl Counted for BareThread {
    fn counts(&self, _: &str) -> Result<(Option<u64>, u64)> {
        Ok((Some(self.handler.faults()), 0))
    }
}

impl Reads for BareThread {
    fn read(&self, offset: u64, out: &mut [u8]) -> Result {
        Ok(self.memory.mapping().read_at(offset, out)?)
    }
}
