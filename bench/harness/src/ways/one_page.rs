//! The naive way to map memory lazily ([`OnePage`]): a handler that answers one page for each fault, as published
//! examples do. It waits with poll(2), reads one event, answers its page, and waits again, on a thread of its own. It
//! keeps no record of any page.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{Builder, JoinHandle};

use uzone_os::Mapping;
use uzone_os::uffd::{
    Answered, Doorbell, Event, EventBuffer, Features, Fill, Install, KernelFaults, Modes,
    Registered, Uffd, wait,
};
use uzone_pages::ByteLen;

use crate::{BenchError, Counted, Reads, Result, anonymous};

/// Reads the bytes of a page at an offset.
pub type Fetch = dyn Fn(u64, &mut [u8]) -> io::Result<()> + Send + Sync;

/// A handler's answer for a page.
#[derive(Clone)]
#[expect(missing_debug_implementations, reason = "a function has no text")]
pub enum Answer {
    /// A copy from a mapping of the file, all of which is present.
    Copy(Arc<Mapping>),
    /// A copy of a page that a function fills.
    Fetch(Arc<Fetch>),
    /// A mapping of the memory file's page.
    Continue,
}

struct Shared {
    memory: Registered,
    bell: Doorbell,
    stop: AtomicBool,
    faults: AtomicU64,
    failure: Mutex<Option<io::Error>>,
}

/// Memory whose faults are answered one page at a time.
pub struct OnePage {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl OnePage {
    /// Registers memory and starts its handler, on the CPUs of the calling thread.
    pub fn new(memory: Mapping, answer: Answer) -> Result<Self> {
        let (modes, features) = match answer {
            Answer::Continue => (Modes::MINOR, Features::MINOR_SHMEM),
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
        let thread = thread.spawn(move || handler.answer_all(&answer)).map_err(started)?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Starts a handler for anonymous memory, as ours maps it.
    pub fn anonymous(len: ByteLen, answer: Answer) -> Result<Self> {
        Self::new(anonymous(len)?, answer)
    }
}

impl Counted for OnePage {
    /// Fails with the handler's error, if it could not answer.
    fn counts(&self, row: &str) -> Result<(Option<u64>, u64)> {
        match self.shared.failure.lock().unwrap_or_else(PoisonError::into_inner).take() {
            Some(cause) => Err(BenchError::handler(row, cause)),
            None => Ok((Some(self.shared.faults.load(Ordering::Relaxed)), 0)), // a statistic
        }
    }
}

fn started(cause: io::Error) -> BenchError {
    BenchError::handler("naive", cause)
}

impl Reads for OnePage {
    fn read(&self, offset: u64, out: &mut [u8]) -> Result {
        Ok(self.shared.memory.mapping().read_at(offset, out)?)
    }
}

impl Drop for OnePage {
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
    fn answer_all(&self, answer: &Answer) {
        let mut buffer = EventBuffer::new(1);
        let bytes = self.memory.mapping().page_size().bytes();
        let mut page = vec![0; usize::try_from(bytes).unwrap_or(0)];
        loop {
            if let Err(cause) = wait(&**self.memory.uffd(), &self.bell, None) {
                return self.fail(cause);
            }
            if self.stop.load(Ordering::Acquire) {
                return;
            }
            self.read_and_answer(&mut buffer, answer, &mut page);
        }
    }

    fn fail(&self, cause: io::Error) {
        *self.failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(cause);
    }

    /// Reads one event, if there is one, and answers it.
    fn read_and_answer(&self, buffer: &mut EventBuffer, answer: &Answer, page: &mut [u8]) {
        if let Err(cause) = self.memory.uffd().read(buffer) {
            self.fail(cause);
        }
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
