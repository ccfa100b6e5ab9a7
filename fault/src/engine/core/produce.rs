//! Pages that have an owner: produced however long that takes, installed, or given up.

use std::io;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use uzone_pages::Content;

use super::{Core, ReaderState};
use crate::backing::window::{Filled, Window};
use crate::engine::pending::Awaited;
use crate::engine::staged::{LEFT_OUT, Staged, StagingFiller};
use crate::error::{BackingError, Failure, caught, discard};
use crate::options::{OnFailure, Refusal};
use crate::stats::Counters;
use crate::trace::{FaultOutcome, FaultRecord};

/// How long the kernel may defer the mark of a bad page.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long to wait before the kernel is asked again.
const PAUSE: Duration = Duration::from_millis(1);

const PANICKED: &str = "the backing panicked";
const PUT_OFF: &str = "the kernel put the page off, or has no memory for it";

/// The outcome of an attempt to produce a page.
#[derive(Debug)]
pub(crate) enum Produced {
    /// It is present, or its memory is gone.
    Done,
    /// The kernel deferred it, or had no memory for it; the caller still owns it.
    Deferred(BackingError),
    /// It cannot be produced; the caller still owns it.
    Failed(BackingError),
}

impl Core {
    /// Produces a page that the caller owns, or makes it a bad one. As long as the kernel defers it or has no
    /// memory for it, it is tried again: for `patience`, and then the page is absent again, or without end, until
    /// the page is given up at a deadline or with its mapping.
    ///
    /// # Errors
    /// Why it is not present.
    pub(crate) fn produce(
        &self,
        page: u64,
        state: &mut ReaderState,
        patience: Option<Duration>,
    ) -> Result<(), BackingError> {
        let begin = Instant::now();
        let error = loop {
            let why = match self.try_produce(page, state) {
                Produced::Done => return Ok(()),
                Produced::Failed(error) => break error,
                Produced::Deferred(why) => why,
            };
            if self.pages.contents.get(page) != Content::Filling {
                return Err(why);
            }
            if patience.is_some_and(|patience| begin.elapsed() >= patience) {
                self.release(page);
                self.pages.kernel.wake(self.bytes(page..page + 1));
                return Err(why);
            }
            self.pending.note_produced(page);
            Counters::add(&self.pages.counters.deferred, 1);
            std::thread::sleep(PAUSE);
        };
        self.note_failure(page, &error);
        self.poison(page);
        Err(error)
    }

    /// Tries once to produce a page that the caller owns.
    pub(crate) fn try_produce(&self, page: u64, state: &mut ReaderState) -> Produced {
        let mut window = Window::owned(&self.pages, page, &mut state.staging);
        let answer = caught(|| self.backing.fault(&mut window));
        let progress = window.state;
        let is_later = progress.deferred || progress.lacks_memory;
        let result = match answer {
            // The memory is gone, and no thread waits for a page of it any more.
            _ if progress.wanted_is_done || progress.gone => Produced::Done,
            Some(Err(error)) if is_later => return Produced::Deferred(error),
            Some(Err(error)) => return Produced::Failed(error),
            None => Produced::Failed(BackingError::Other(PANICKED.into())),
            Some(Ok(())) if is_later => Produced::Deferred(BackingError::Other(PUT_OFF.into())),
            Some(Ok(())) => Produced::Failed(BackingError::Other(LEFT_OUT.into())),
        };
        if progress.gone && !progress.wanted_is_done {
            self.release(page);
        }
        discard(answer);
        result
    }

    /// Records why a page is bad.
    pub(crate) fn note_failure(&self, page: u64, error: &BackingError) {
        // An error of a backing is printed by the caller's code.
        let reason = caught(|| uzone_os::with_causes(error));
        let reason =
            reason.unwrap_or_else(|| "the backing's error panicked when printed".to_owned());
        let (offset, kind) = (self.bytes(page..page + 1).start, error.kind());
        let failure = Failure { offset, kind, reason };
        if let Some(OnFailure(decide)) = &self.on_failure {
            // A panic of the caller's code leaves the default.
            if caught(|| decide(&failure)) == Some(Refusal::Hold) {
                // Relaxed: nothing is published by it.
                self.holds.store(true, Ordering::Relaxed);
            }
        }
        self.pages.kernel.note_failure(self.bytes(page..page + 1), &failure.reason);
        self.recorder.note_failure(failure);
    }

    /// Lets threads that answer their faults themselves know of a bad page.
    pub(super) fn note_bad(&self, page: u64) {
        if let Some(in_thread) = self.in_thread() {
            in_thread.made_bad(page);
        }
    }

    /// Makes a page bad that is being filled: a thread that touches it gets a signal. Where threads are
    /// held instead, the page stays owned, so that they wait on.
    pub(crate) fn poison(&self, page: u64) {
        // Relaxed: the caller has set it, or another page decides as if it had been a little later.
        if self.holds.load(Ordering::Relaxed) {
            return;
        }
        let range = self.bytes(page..page + 1);
        let give_up = Instant::now() + PATIENCE;
        let again = || {
            // The reader does not wait, because the kernel waits for it to read: a thread that touches the
            // page faults again, and the page is marked then.
            let asks = !self.pages.policy.is_remote && Instant::now() < give_up;
            if asks {
                std::thread::sleep(PAUSE);
            }
            asks
        };
        if self.pages.bad_pages.make(page, &self.pages, again) {
            self.note_bad(page);
            Counters::add(&self.pages.counters.poisoned, 1);
        }
        self.pages.kernel.wake(range);
    }

    /// Produces a page that the caller owns, however long it takes, for the thread that puts it in
    /// place.
    pub(crate) fn stage(&self, page: u64, state: &mut ReaderState) -> Staged {
        let notes = StagingFiller::default();
        let mut window = Window::noted(&self.pages, page, &notes, &mut state.staging);
        let failure = match caught(|| self.backing.fault(&mut window)) {
            Some(Ok(())) => None,
            Some(Err(error)) => Some(error),
            None => Some(BackingError::Other(PANICKED.into())),
        };
        notes.into_staged(failure)
    }

    /// Installs a page that an I/O thread produced for this one, if it is still wanted. Returns it if the
    /// kernel deferred it, or has no memory for it: the process whose page it is may get some back.
    pub(crate) fn install(&self, page: u64, staged: Staged) -> Option<Staged> {
        if self.pages.contents.get(page) != Content::Filling {
            // It was removed or given up meanwhile, and its waiters were woken.
            return None;
        }
        let range = self.bytes(page..page + 1);
        let mut window = Window::owned(&self.pages, page, &mut []);
        let mut now = &staged;
        let answer = loop {
            match now {
                Staged::Bytes(bytes) => break window.copy(range.start, bytes),
                Staged::Zero => break window.zero(range),
                Staged::Cached { otherwise } => match window.continue_mapping(range.clone()) {
                    Ok(Filled::Hole) => now = otherwise,
                    answer => break answer,
                },
                Staged::Failed(error) => {
                    self.note_failure(page, error);
                    self.give_up(page);
                    discard(staged);
                    return None;
                }
            }
        };
        let progress = window.state;
        let mut outcome = FaultOutcome::Failed;
        if progress.wanted_is_done {
            Counters::add(&self.pages.counters.demand, 1);
            outcome = FaultOutcome::Produced;
        } else if progress.deferred || progress.lacks_memory {
            self.pending.note_produced(page);
            Counters::add(&self.pages.counters.deferred, 1);
            return Some(staged);
        } else if progress.gone {
            self.release(page);
        } else {
            let why = match answer {
                Err(error) => error.into(),
                Ok(_) => BackingError::Other(LEFT_OUT.into()),
            };
            self.note_failure(page, &why);
            self.poison(page);
        }
        self.finish(page, outcome);
        discard(staged);
        None
    }

    /// Notes that a page which a thread waits for is no longer being produced, if it was.
    pub(crate) fn finish(&self, page: u64, outcome: FaultOutcome) {
        if let Some(awaited) = self.pending.remove(page) {
            self.record(&awaited, outcome);
        }
    }

    /// Records the outcome of a fault.
    pub(crate) fn record(&self, awaited: &Awaited, outcome: FaultOutcome) {
        let Some((class, is_write)) = awaited.fault else { return };
        self.recorder.note(&[FaultRecord {
            at: self.recorder.since_start(awaited.since),
            offset: self.bytes(awaited.page..awaited.page + 1).start,
            class,
            is_write,
            outcome,
            latency: awaited.since.elapsed(),
        }]);
    }

    /// Makes a page a bad one whose producer failed, or takes too long.
    pub(crate) fn give_up(&self, page: u64) {
        self.finish(page, FaultOutcome::Failed);
        if self.pages.contents.get(page) == Content::Filling {
            self.poison(page);
        }
    }

    /// Gives up a page that its backing did not produce within `after`, or that the kernel did not take.
    pub(crate) fn time_out(&self, awaited: &Awaited, after: Duration) {
        let page = awaited.page;
        if self.pages.contents.get(page) == Content::Filling {
            let text = if awaited.is_produced {
                format!(
                    "the kernel did not take the page within {after:?}: the process that it is for may be \
                     at the memory limit of its cgroup, or the host has no memory left"
                )
            } else {
                format!("the backing did not produce the page within {after:?}")
            };
            let late = io::Error::new(io::ErrorKind::TimedOut, text);
            self.note_failure(page, &BackingError::Other(late.into()));
        }
        self.give_up(page);
    }

    /// Gives up a page that the caller owns and could not queue.
    pub(crate) fn release(&self, page: u64) {
        let _ = self.pages.contents.advance(page, Content::Filling, Content::Absent);
    }
}
