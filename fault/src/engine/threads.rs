//! The threads of engines, which answer faults, or wait for devices. Engines that choose
//! none of them share the same ones, so that a process with many engines has few threads.

use std::io;
use std::sync::{Arc, Mutex, Weak};

use uzone_os::lock;

use crate::engine::event_loop::EventLoop;
use crate::engine::io_pool::IoPool;
use crate::error::{MapError, at_most};
use crate::options::{EngineOptions, default_producers, default_readers};

/// How many threads of one kind an engine has at most.
const MOST: usize = 1024;

/// The threads that engines share, and the process that has them: a forked child has none.
///
/// Locked while they are started.
static SHARED: Mutex<Option<(u32, Weak<Threads>)>> = Mutex::new(None);

/// The threads of an engine. They end when it and all its mappings are dropped.
pub(crate) struct Threads {
    pub(crate) pool: Arc<IoPool>,
    pub(crate) readers: Vec<Arc<EventLoop>>,
}

impl Threads {
    /// Returns the threads that an engine has with these options.
    pub(crate) fn of(options: &EngineOptions) -> Result<Arc<Self>, MapError> {
        let EngineOptions { producers, readers, .. } = options;
        if producers.is_some() || readers.is_some() {
            return Self::start(options).map(Arc::new);
        }
        let mut shared = lock(&SHARED);
        let running = shared.as_ref().filter(|(process, _)| *process == std::process::id());
        if let Some(threads) = running.and_then(|(_, threads)| threads.upgrade()) {
            return Ok(threads);
        }
        let threads = Arc::new(Self::start(options)?);
        *shared = Some((std::process::id(), Arc::downgrade(&threads)));
        Ok(threads)
    }

    fn start(options: &EngineOptions) -> Result<Self, MapError> {
        let producers = options.producers.unwrap_or_else(default_producers);
        let readers = options.readers.unwrap_or_else(default_readers);
        at_most("EngineOptions::producers", producers.get(), MOST)?;
        at_most("EngineOptions::readers", readers.get(), MOST)?;
        let pool = Arc::new(IoPool::start(producers).map_err(MapError::Thread)?);
        let start = |index| EventLoop::start(&format!("uzone-fault-{index}")).map(Arc::new);
        let readers: io::Result<Vec<_>> = (0..readers.get()).map(start).collect();
        Ok(Self { pool, readers: readers.map_err(MapError::Thread)? })
    }
}
