//! Pages that somebody owns: produced however long that takes, put in place, or given up.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use uzone_os::uffd::Answered;
use uzone_pages::Content;

use super::{Core, Hands};
use crate::error::{BackingError, Failure, chain};
use crate::record::{FaultOutcome, FaultRecord};
use crate::staged::{NoteTaker, Staged};
use crate::stats::Counters;
use crate::window::Window;

/// How long a page is asked for that the kernel puts off, before it is given up.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long to wait before the kernel is asked again.
const PAUSE: Duration = Duration::from_millis(1);

const PANICKED: &str = "the backing panicked";
const LEFT_OUT: &str = "the backing left the page out";

/// What came of an attempt to produce a page.
#[derive(Debug)]
pub(crate) enum Produced {
    /// It is there, or nobody can want it any more.
    Done,
    /// The kernel put it off; the caller owns it still.
    PutOff,
    /// It cannot be had; the caller owns it still.
    Failed(BackingError),
}

impl Core {
    /// Produces a page that the caller owns, however long it takes, or makes it a bad one.
    ///
    /// # Errors
    /// Why it is bad.
    pub(crate) fn produce(&self, page: u64, hands: &mut Hands) -> Result<(), BackingError> {
        let give_up = Instant::now() + PATIENCE;
        let error = loop {
            match self.try_produce(page, hands) {
                Produced::Done => return Ok(()),
                Produced::Failed(error) => break error,
                Produced::PutOff if Instant::now() >= give_up => {
                    break BackingError::Other("the kernel put the page off for too long".into());
                }
                Produced::PutOff => {
                    Counters::add(&self.counters.put_off, 1);
                    std::thread::sleep(PAUSE);
                }
            }
        };
        self.note_failure(page, &error);
        self.spoil(page);
        Err(error)
    }

    /// Tries once to produce a page that the caller owns.
    pub(crate) fn try_produce(&self, page: u64, hands: &mut Hands) -> Produced {
        let mut window = Window::owned(self, page, &mut hands.staging);
        let answer = catch_unwind(AssertUnwindSafe(|| self.backing.fault(&mut window)));
        let progress = window.state;
        if progress.wanted_is_done {
            return Produced::Done;
        }
        if progress.gone {
            // The memory is gone, and nobody waits for a page of it any more.
            self.release(page);
            return Produced::Done;
        }
        match answer {
            Ok(Err(error)) => Produced::Failed(error),
            Err(_) => Produced::Failed(BackingError::Other(PANICKED.into())),
            Ok(Ok(())) if progress.deferred => Produced::PutOff,
            Ok(Ok(())) => Produced::Failed(BackingError::Other(LEFT_OUT.into())),
        }
    }

    /// Keeps why a page is bad, for whoever asks.
    pub(crate) fn note_failure(&self, page: u64, error: &BackingError) {
        let failure = Failure { offset: self.bytes(page..page + 1).start, reason: chain(error) };
        *self.last_failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(failure);
    }

    pub(crate) fn last_failure(&self) -> Option<Failure> {
        self.last_failure.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Makes a page that is being filled a bad one: whoever touches it gets a signal.
    pub(crate) fn spoil(&self, page: u64) {
        let range = self.bytes(page..page + 1);
        // The word first: an owner who puts the page in place after that learns that it was given up,
        // and mends it.
        if self.contents.spoil(page) && self.refuse(page) {
            Counters::add(&self.counters.poisoned, 1);
        }
        self.kernel.wake(range);
    }

    /// Has the kernel send signals to who touches a page. Returns whether it does: the page may be there
    /// after all.
    fn refuse(&self, page: u64) -> bool {
        let give_up = Instant::now() + PATIENCE;
        loop {
            match self.kernel.poison(self.bytes(page..page + 1)) {
                Ok(Answered::Present) => {
                    self.contents.mend(page);
                    return false;
                }
                Ok(Answered::All | Answered::NotRegistered | Answered::Gone) | Err(_) => {
                    return true;
                }
                // This thread is the one that reads what the kernel waits for. Who waits for the page
                // is told again, and refused then.
                Ok(_) if self.policy.removed_is_zero => return true,
                Ok(_) if Instant::now() >= give_up => return true,
                Ok(_) => std::thread::sleep(PAUSE),
            }
        }
    }

    /// Produces a page that the caller owns, however long it takes, for the thread that puts it in
    /// place.
    pub(crate) fn stage(&self, page: u64, hands: &mut Hands) -> Staged {
        let notes = NoteTaker::default();
        let mut window = Window::noted(self, page, &notes, &mut hands.staging);
        let answer = catch_unwind(AssertUnwindSafe(|| self.backing.fault(&mut window)));
        match (answer, notes.into_note()) {
            (Ok(Ok(())), Some(staged)) => staged,
            (Ok(Err(error)), _) => Staged::Failed(error),
            (Err(_), _) => Staged::Failed(BackingError::Other(PANICKED.into())),
            (Ok(Ok(())), None) => Staged::Failed(BackingError::Other(LEFT_OUT.into())),
        }
    }

    /// Puts a page in place that was produced for this thread, if it is still wanted. Returns what
    /// the kernel put off.
    pub(crate) fn put_in_place(&self, page: u64, staged: Staged) -> Option<Staged> {
        if self.contents.get(page) != Content::Filling {
            // It was removed or given up meanwhile, and whoever waited has been told.
            return None;
        }
        let range = self.bytes(page..page + 1);
        let mut window = Window::owned(self, page, &mut []);
        let answer = match &staged {
            Staged::Bytes(bytes) => window.copy(range.start, bytes),
            Staged::Zero => window.zero(range),
            Staged::Cached => window.continue_mapping(range),
            Staged::Failed(error) => {
                self.note_failure(page, error);
                self.give_up(page);
                return None;
            }
        };
        let progress = window.state;
        let mut outcome = FaultOutcome::Failed;
        if progress.wanted_is_done {
            Counters::add(&self.counters.demand, 1);
            outcome = FaultOutcome::Produced;
        } else if progress.deferred {
            Counters::add(&self.counters.put_off, 1);
            return Some(staged);
        } else if progress.gone {
            self.release(page);
        } else {
            let why = match answer {
                Err(error) => error.into(),
                Ok(_) => BackingError::Other(LEFT_OUT.into()),
            };
            self.note_failure(page, &why);
            self.spoil(page);
        }
        self.finish(page, outcome);
        None
    }

    /// Takes that a page which somebody waits for is not being produced any more, if it was.
    pub(crate) fn finish(&self, page: u64, outcome: FaultOutcome) {
        let Some(awaited) = self.pending.remove(page).filter(|awaited| awaited.is_fault) else {
            return;
        };
        self.recorder.note(&[FaultRecord {
            at: self.recorder.since_start(awaited.since),
            offset: self.bytes(page..page + 1).start,
            class: awaited.class,
            is_write: awaited.is_write,
            outcome,
            latency: awaited.since.elapsed(),
        }]);
    }

    /// Makes a page a bad one whose producer failed, or takes too long.
    pub(crate) fn give_up(&self, page: u64) {
        self.finish(page, FaultOutcome::Failed);
        if self.contents.get(page) == Content::Filling {
            self.spoil(page);
        }
    }

    /// Gives up a page that its backing did not produce within `after`.
    pub(crate) fn time_out(&self, page: u64, after: Duration) {
        if self.contents.get(page) == Content::Filling {
            let text = format!("the backing did not produce the page within {after:?}");
            self.note_failure(page, &BackingError::Other(text.into()));
        }
        self.give_up(page);
    }

    /// Gives up a page that the caller owns and could not even queue.
    pub(crate) fn release(&self, page: u64) {
        let _ = self.contents.advance(page, Content::Filling, Content::Absent);
    }
}
