//! The yardsticks: handlers that keep no record of any page.
//!
//! [`Bare`] answers one page for each fault, as published examples do: it waits with poll(2), reads one event,
//! answers its page, and waits again, on a thread of its own. Or it waits as ours does: it looks again for a
//! moment before it sleeps. [`BareThread`] fills a window in the thread that takes the fault.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
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

use super::source::mark;
use crate::harness::adopted::anonymous;
use crate::harness::error::BenchError;
use crate::harness::reads::Reads;

/// How a handler answers for a page.
#[derive(Clone)]
pub(crate) enum Answer {
    /// By a copy from a mapping of the file, all of which is present.
    Copy(Arc<Mapping>),
    /// By reading it from the file, and a copy.
    Read(Arc<File>),
    /// By what a function fetches of an offset, and a copy.
    Fetch(Arc<Fetch>),
    /// By mapping what the memory file has.
    Continue,
    /// By the zero page.
    Zero,
    /// By a copy of a page in which the one word is written that is looked at.
    Mark,
}

/// Fills a page with what is at an offset.
pub(crate) type Fetch = dyn Fn(u64, &mut [u8]) -> io::Result<()> + Send + Sync;

/// How a handler waits for the next fault.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Waiting {
    /// poll(2), then one event.
    Poll,
    /// Looking again for so long, then poll(2).
    Spin(Duration),
}

impl Waiting {
    /// Waits as ours does that looks again for so long.
    pub(super) fn like_ours(spin: Option<Duration>) -> Self {
        match spin.unwrap_or(LazyOptions::DEFAULT_SPIN) {
            Duration::ZERO => Self::Poll,
            spin => Self::Spin(spin),
        }
    }
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
    /// Registers memory and starts its handler, on the CPUs of the calling thread.
    pub(super) fn new(
        memory: Mapping,
        answer: Answer,
        waiting: Waiting,
    ) -> Result<Self, BenchError> {
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
        let thread = Builder::new()
            .name("bare".to_owned())
            .spawn(move || match waiting {
                Waiting::Poll => handler.poll_and_answer(&answer),
                Waiting::Spin(spin) => handler.spin_and_answer(&answer, spin),
            })
            .map_err(started)?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// The same for memory of its own, as ours maps it.
    pub(crate) fn anonymous(
        len: ByteLen,
        answer: Answer,
        waiting: Waiting,
    ) -> Result<Self, BenchError> {
        Self::new(anonymous(len)?, answer, waiting)
    }

    pub(crate) fn faults(&self) -> u64 {
        self.shared.faults.load(Ordering::Relaxed) // a statistic
    }

    /// Returns what the handler met, if it could not answer.
    pub(crate) fn check(&self, row: &str) -> Result<(), BenchError> {
        let failure = self.shared.failure.lock().unwrap_or_else(PoisonError::into_inner).take();
        failure.map_or(Ok(()), |cause| Err(BenchError::handler(row, cause)))
    }
}

/// Memory whose faults are answered by the threads that take them.
pub(crate) struct BareThread {
    memory: Arc<Registered>,
    handler: BareHandler,
}

impl BareThread {
    /// Maps as much memory, and fills it with copies of `source`.
    pub(super) fn copied(
        len: ByteLen,
        source: Arc<Mapping>,
        window: ByteLen,
    ) -> Result<Self, BenchError> {
        Self::new(anonymous(len)?, Some(source), window)
    }

    /// Registers a mapping of a memory file.
    pub(super) fn shared(memory: Mapping, window: ByteLen) -> Result<Self, BenchError> {
        Self::new(memory, None, window)
    }

    fn new(
        memory: Mapping,
        source: Option<Arc<Mapping>>,
        window: ByteLen,
    ) -> Result<Self, BenchError> {
        let (modes, features) = match source {
            Some(_) => (Modes::MISSING, Features::NONE),
            None => (Modes::MINOR, Features::MINOR_SHMEM),
        };
        let uffd = Uffd::open(features | Features::SIGBUS, Features::NONE, KernelFaults::Never)?;
        let memory = Arc::new(Registered::new(Arc::new(uffd), memory, modes)?);
        let handler = BareHandler::install(memory.clone(), source, window).map_err(started)?;
        Ok(Self { memory, handler })
    }

    pub(crate) fn faults(&self) -> u64 {
        self.handler.faults()
    }
}

impl Reads for BareThread {
    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), BenchError> {
        Ok(self.memory.mapping().read_at(offset, out)?)
    }
}

fn started(cause: io::Error) -> BenchError {
    BenchError::handler("naive", cause)
}

impl Reads for Bare {
    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), BenchError> {
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
    fn poll_and_answer(&self, answer: &Answer) {
        let mut buffer = EventBuffer::new(1);
        let mut page = self.room();
        loop {
            if let Err(cause) = wait(&**self.memory.uffd(), &self.bell, None) {
                return self.fail(cause);
            }
            if self.stop.load(Ordering::Acquire) {
                return;
            }
            let _ = self.read_and_answer(&mut buffer, answer, &mut page);
        }
    }

    fn spin_and_answer(&self, answer: &Answer, spin: Duration) {
        let mut buffer = EventBuffer::new(1);
        let mut page = self.room();
        let mut idle_since = Instant::now();
        loop {
            if self.read_and_answer(&mut buffer, answer, &mut page) {
                idle_since = Instant::now();
                continue;
            }
            if self.stop.load(Ordering::Acquire) {
                return;
            }
            if idle_since.elapsed() < spin {
                std::hint::spin_loop();
                continue;
            }
            if let Err(cause) = wait(&**self.memory.uffd(), &self.bell, None) {
                return self.fail(cause);
            }
            idle_since = Instant::now();
        }
    }

    fn room(&self) -> Vec<u8> {
        let bytes = self.memory.mapping().page_size().bytes();
        vec![0; usize::try_from(bytes).unwrap_or(0)]
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
        match answer {
            Answer::Read(file) => file.read_exact_at(page, start)?,
            Answer::Fetch(fetch) => fetch(start, page)?,
            Answer::Mark => mark(start, page),
            Answer::Copy(_) | Answer::Continue | Answer::Zero => {}
        }
        loop {
            let fill = match answer {
                Answer::Copy(source) => Fill::From { source, offset: start },
                Answer::Read(_) | Answer::Fetch(_) | Answer::Mark => Fill::Bytes(page),
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
