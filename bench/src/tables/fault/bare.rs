//! The yardsticks: handlers that keep no record of any page.
//!
//! [`Bare`] answers one page for each fault, as published examples do: it waits with poll(2), reads one event,
//! answers its page, and waits again, on a thread of its own. Or it waits as ours does: it looks again for a
//! moment before it sleeps. [`BareThread`] fills a window in the thread that takes the fault.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use uzone_fault::LazyOptions;
use uzone_os::Mapping;
use uzone_os::uffd::{
    Answered, BareHandler, Doorbell, Event, EventBuffer, Features, Fill, Install, KernelFaults,
    Modes, Registered, Uffd, wait,
};
use uzone_pages::ByteLen;

use crate::harness::{BenchError, Counted, Reads, Result, anonymous};

/// Reads the bytes of a page at an offset.
pub(crate) type Fetch = dyn Fn(u64, &mut [u8]) -> io::Result<()> + Send + Sync;

/// How a handler answers for a page.
#[derive(Clone)]
pub(crate) enum Answer {
    /// By a copy from a mapping of the file, all of which is present.
    Copy(Arc<Mapping>),
    /// By a copy of a page that a function fills.
    Fetch(Arc<Fetch>),
    /// By mapping what the memory file has.
    Continue,
    /// By the zero page.
    Zero,
}

/// Returns how long a handler polls before it sleeps if it waits as ours does; `None` if ours does not poll.
pub(super) fn spin_as_ours(spin: Option<Duration>) -> Option<Duration> {
    Some(spin.unwrap_or(LazyOptions::DEFAULT_SPIN)).filter(|spin| !spin.is_zero())
}

struct Shared {
    memory: Registered,
    bell: Doorbell,
    stop: AtomicBool,
    faults: AtomicU64,
    failure: Mutex<Option<io::Error>>,
}

/// Memory whose faults are answered one page at a time.
pub(crate) struct Bare {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Bare {
    /// Registers memory and starts its handler, on the CPUs of the calling thread. It polls for `spin` before it
    /// sleeps; with `None` it calls poll(2) before each read.
    pub(super) fn new(memory: Mapping, answer: Answer, spin: Option<Duration>) -> Result<Self> {
        let is_huge = memory.page_size() != uzone_os::probe::page_size();
        let (modes, features) = match answer {
            Answer::Continue if is_huge => (Modes::MINOR, Features::MINOR_HUGETLB),
            Answer::Continue => (Modes::MINOR, Features::MINOR_SHMEM),
            _ if is_huge => (Modes::MISSING, Features::MISSING_HUGETLB),
            _ => (Modes::MISSING, Features::NONE),
        };
        let uffd = Uffd::open(features, Features::NONE, KernelFaults::IfAllowed)?;
        let shared = Arc::new(Shared {
            memory: Registered::new(Arc::new(uffd), memory, modes)?,
            bell: Doorbell::new().map_err(started)?,
            stop: AtomicBool::new(false),
            faults: AtomicU64::new(0),
            failure: Mutex::new(None),
        });
        let handler = shared.clone();
        let thread = Builder::new().name("bare".to_owned());
        let thread = thread.spawn(move || handler.answer_all(&answer, spin)).map_err(started)?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// The same for memory of its own, as ours maps it.
    pub(crate) fn anonymous(len: ByteLen, answer: Answer, spin: Option<Duration>) -> Result<Self> {
        Self::new(anonymous(len)?, answer, spin)
    }
}

impl Counted for Bare {
    /// Fails with what the handler met, if it could not answer.
    fn counts(&self, row: &str) -> Result<(Option<u64>, u64)> {
        match self.shared.failure.lock().unwrap_or_else(PoisonError::into_inner).take() {
            Some(cause) => Err(BenchError::handler(row, cause)),
            None => Ok((Some(self.shared.faults.load(Ordering::Relaxed)), 0)), // a statistic
        }
    }
}

/// Memory whose faults are answered by the threads that take them.
pub(crate) struct BareThread {
    memory: Arc<Registered>,
    handler: BareHandler,
}

impl BareThread {
    /// Registers memory that is filled with copies of `source`, or maps what its memory file has.
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
        let handler = BareHandler::install(memory.clone(), source, window).map_err(started)?;
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

fn started(cause: io::Error) -> BenchError {
    BenchError::handler("naive", cause)
}

impl Reads for Bare {
    fn read(&self, offset: u64, out: &mut [u8]) -> Result {
        Ok(self.shared.memory.mapping().read_at(offset, out)?)
    }
}

impl Drop for Bare {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release); // pairs with the handler's Acquire
        if self.shared.bell.ring().is_ok()
            && let Some(thread) = self.thread.take()
        {
            // A panic of it was printed when it happened.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn answer_all(&self, answer: &Answer, spin: Option<Duration>) {
        let mut buffer = EventBuffer::new(1);
        let bytes = self.memory.mapping().page_size().bytes();
        let mut page = vec![0; usize::try_from(bytes).unwrap_or(0)];
        // When it looked for faults first after the last one: it begins so.
        let mut idle_since = spin.map(|_| Instant::now());
        loop {
            let is_over = |spin| idle_since.is_some_and(|since: Instant| since.elapsed() >= spin);
            let waits = spin.is_none_or(is_over);
            if waits && let Err(cause) = wait(&**self.memory.uffd(), &self.bell, None) {
                return self.fail(cause);
            }
            if self.stop.load(Ordering::Acquire) {
                return;
            }
            if self.read_and_answer(&mut buffer, answer, &mut page) {
                idle_since = None;
            } else if spin.is_some() {
                // After a wait, too, it looks for as long.
                idle_since = idle_since.filter(|_| !waits).or_else(|| Some(Instant::now()));
                std::hint::spin_loop();
            }
        }
    }

    fn fail(&self, cause: io::Error) {
        *self.failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(cause);
    }

    /// Reads one event and answers it. Returns whether there was one.
    fn read_and_answer(&self, buffer: &mut EventBuffer, answer: &Answer, page: &mut [u8]) -> bool {
        let read = match self.memory.uffd().read(buffer) {
            Ok(read) => read,
            Err(cause) => {
                self.fail(cause);
                0
            }
        };
        for event in &mut *buffer {
            if let Event::PageFault(fault) = event
                && let Some(offset) = self.memory.offset_of(fault.address)
            {
                self.faults.fetch_add(1, Ordering::Relaxed); // a statistic
                let start = offset & !(page.len() as u64 - 1);
                if let Err(cause) = self.answer(start, answer, page) {
                    self.fail(cause);
                    // The reader then reads zeroes, and reports them as wrong.
                    let end = start + page.len() as u64;
                    let _ = self.memory.install(start..end, Fill::Zero, Install::default());
                }
            }
        }
        read > 0
    }

    fn answer(&self, start: u64, answer: &Answer, page: &mut [u8]) -> io::Result<()> {
        let len = page.len() as u64;
        let range = start..start + len;
        if let Answer::Fetch(fetch) = answer {
            fetch(start, page)?;
        }
        loop {
            let fill = match answer {
                Answer::Copy(source) => Fill::From { source, offset: start },
                Answer::Fetch(_) => Fill::Bytes(page),
                Answer::Continue => Fill::Cached,
                Answer::Zero => Fill::Zero,
            };
            return match self.memory.install(range.clone(), fill, Install::default()) {
                Ok(Answered::LayoutChanging) => continue,
                // Another fault of the same page was answered before.
                Ok(Answered::Present) => {
                    self.memory.wake(range).map(drop).map_err(io::Error::other)
                }
                Ok(Answered::All) => Ok(()),
                Ok(other) => Err(io::Error::other(format!("the kernel answered {other:?}"))),
                Err(error) => Err(io::Error::other(error)),
            };
        }
    }
}
