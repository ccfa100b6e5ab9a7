//! Memory of this process, as the engine answers its faults: [`OwnMemory`].
//!
//! Where threads answer their faults themselves, some are handed over to the reader of the mapping ([`Handover`]),
//! and answered as it answers all others. The kernel wakes the threads that wait for pages in it with each page that
//! is installed; threads that wait in a handler of `SIGBUS` are woken here.

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use uzone_os::Vaddr;
use uzone_os::uffd::in_thread::InThread;
use uzone_os::uffd::{Answered, EventBuffer, Handover, Registered, UffdCall, UffdError};

use crate::memory::kernel::{Faults, Fill, Kernel};
use crate::pages::Policy;
use crate::pages::dirty::Tracker;

/// Memory of this process whose faults are answered.
pub(crate) struct OwnMemory {
    pub(crate) registered: Arc<Registered>,
    /// The pages that were written, if that is tracked.
    pub(crate) tracker: Option<Tracker>,
    /// The threads that wait in a handler, where threads answer their faults themselves.
    pub(crate) handover: Option<Arc<Handover>>,
}

/// The parameter of [`LazyMapping`](crate::LazyMapping) for memory of this process.
pub struct Own {
    /// Dropped before the memory.
    pub(crate) in_thread: Result<Arc<InThread>, &'static str>,
    pub(crate) kernel: Arc<OwnMemory>,
}

impl Faults for OwnMemory {
    fn fd(&self) -> BorrowedFd<'_> {
        self.registered.uffd().as_fd()
    }

    fn read(&self, buffer: &mut EventBuffer) -> io::Result<usize> {
        self.registered.uffd().read(buffer)
    }

    fn offset_of(&self, address: Vaddr) -> Option<u64> {
        self.registered.offset_of(address)
    }
}

impl Kernel for OwnMemory {
    fn policy(&self) -> Policy {
        let tracker = self.tracker.as_ref();
        let zeroes_by_copy = !self.registered.takes(UffdCall::ZeroPage)
            || tracker.is_some_and(Tracker::copies_zeroes);
        Policy { zeroes_by_copy, is_remote: false, is_tracked: tracker.is_some() }
    }

    fn install(&self, range: Range<u64>, fill: Fill<'_>) -> Result<Answered, UffdError> {
        let answer = match &self.tracker {
            Some(tracker) => tracker.install(range.clone(), fill),
            None => self.registered.install(range.clone(), fill, fill.how()),
        };
        if let Some(handover) = &self.handover
            && fill.how().wake
        {
            handover.wake(range);
        }
        answer
    }

    fn wake(&self, range: Range<u64>) {
        // A refusal means that the range was unmapped, and no thread waits in it.
        let _ = self.registered.wake(range.clone());
        if let Some(handover) = &self.handover {
            handover.wake(range);
        }
    }

    fn note_failure(&self, range: Range<u64>, reason: &str) {
        self.registered.note_failure(range, reason);
    }

    fn ended(&self) {
        if let Some(tracker) = &self.tracker {
            tracker.ended();
        }
    }

    fn written(&self, page: u64, is_there: &dyn Fn(u64) -> bool) -> bool {
        self.tracker.as_ref().is_none_or(|tracker| tracker.written(page, is_there))
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::num::NonZeroUsize;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Arc, Condvar, Mutex};
    use std::time::{Duration, Instant};

    use uzone_os::uffd::in_thread::{FileSource, Source};
    use uzone_os::uffd::{Features, KernelFaults};
    use uzone_os::{Anonymous, Mapping, sigbus};
    use uzone_pages::{ByteLen, Content};

    use crate::backing::Backing;
    use crate::backing::window::Window;
    use crate::engine::Engine;
    use crate::error::BackingError;
    use crate::memory::mapping::LazyMapping;
    use crate::options::{Answer, LazyOptions, Refusal};
    use crate::tests::{skip, userfaultfd};

    const PAGES: u64 = 64;
    const SLOW: u64 = 5;
    const BROKEN: u64 = 9;

    /// Pages of a byte each that a handler never finds ready. One of them comes when the gate is opened, and one
    /// does not come.
    #[derive(Default)]
    struct Device {
        is_open: Mutex<bool>,
        opened: Condvar,
        asked: AtomicUsize,
    }

    impl Device {
        fn open(&self) {
            *self.is_open.lock().unwrap() = true;
            self.opened.notify_all();
        }
    }

    fn byte(page: u64) -> u8 {
        u8::try_from(page + 1).unwrap()
    }

    fn page() -> u64 {
        uzone_os::probe::page_size().bytes()
    }

    impl Backing for Device {
        fn fault(&self, window: &mut Window<'_>) -> Result<(), BackingError> {
            let range = window.range();
            let number = range.start / page();
            self.asked.fetch_add(1, Ordering::SeqCst);
            if number == SLOW {
                let is_open = self.is_open.lock().unwrap();
                // Not for ever, or a test that failed would hang.
                let most = Duration::from_secs(60);
                drop(self.opened.wait_timeout_while(is_open, most, |is_open| !*is_open).unwrap());
            }
            if number == BROKEN {
                return Err(BackingError::Other("the device is broken".into()));
            }
            let filled = window.copy_with(range, |out| {
                out.fill(byte(number));
                Ok::<_, BackingError>(out.len())
            });
            filled.map(drop)
        }

        fn in_thread(&self) -> Option<Source> {
            let file = File::open("/dev/null").ok()?;
            let nothing = Mapping::anonymous(ByteLen::new(page()), Anonymous::default()).ok()?;
            let (file, mapped) = (Arc::new(file), Arc::new(nothing));
            Some(Source::File(FileSource::new(file, mapped, ByteLen::ZERO)))
        }
    }

    fn mapped(name: &str, options: &LazyOptions) -> Option<(LazyMapping, Arc<Device>)> {
        userfaultfd(name, Features::SIGBUS | Features::POISON, KernelFaults::Never)?;
        if !sigbus::recovers_copies() {
            skip(name, "no recovery from SIGBUS");
            return None;
        }
        let engine = Engine::new(NonZeroUsize::MIN.saturating_add(1)).unwrap();
        let device = Arc::<Device>::default();
        let options = options.clone().answer(Answer::InThread);
        let len = ByteLen::new(PAGES * page());
        let memory = engine.map(len, device.clone(), &options).unwrap();
        assert_eq!(memory.answered_in_thread(), Ok(()));
        Some((memory, device))
    }

    fn check(memory: &LazyMapping, number: u64) {
        let mut seen = vec![0; usize::try_from(page()).unwrap()];
        memory.read_at(number * page(), &mut seen).unwrap();
        assert!(seen.iter().all(|&seen| seen == byte(number)), "page {number}");
    }

    #[test]
    fn a_page_that_misses_its_deadline_raises_a_signal_in_the_thread_and_is_never_zero() {
        let deadline = Duration::from_millis(50);
        let options = LazyOptions::default().deadline(deadline).trace(64);
        let Some((memory, device)) = mapped("a_page_that_misses_its_deadline", &options) else {
            return;
        };
        let begin = Instant::now();
        std::thread::scope(|scope| {
            // All of them wait for the same page, and each gets the signal.
            for _ in 0..3 {
                scope.spawn(|| memory.read_at(SLOW * page(), &mut [0; 8]).unwrap_err());
            }
            // Others are produced meanwhile.
            (10..PAGES).for_each(|number| check(&memory, number));
        });
        assert!(begin.elapsed() >= deadline, "it was given up too early");
        assert_eq!(memory.content(SLOW * page()), Some(Content::Poisoned));
        let failure = memory.last_failure().unwrap();
        assert_eq!(failure.offset, SLOW * page());
        assert!(failure.reason.contains("50ms"), "{}", failure.reason);
        // A thread goes on before the thread that produced its page has taken it off the list.
        while memory.stats().pending != 0 {
            assert!(begin.elapsed() < Duration::from_secs(20), "{:?}", memory.stats());
            std::thread::yield_now();
        }
        let stats = memory.stats();
        assert_eq!(stats.poisoned, 1, "{stats:?}");
        memory.pin(SLOW * page()..(SLOW + 1) * page()).unwrap_err();
        assert!(memory.take_trace().0.iter().any(|it| it.offset == SLOW * page()));
        assert_eq!(stats.queued, PAGES - 9, "{stats:?}");
        device.open();
    }

    #[test]
    fn a_page_that_comes_in_time_wakes_each_thread_that_waits_for_it() {
        let options = LazyOptions::default().deadline(Duration::from_secs(50));
        let Some((memory, device)) = mapped("a_page_that_comes_in_time", &options) else {
            return;
        };
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| check(&memory, SLOW));
            }
            while device.asked.load(Ordering::SeqCst) == 0 {
                std::thread::yield_now();
            }
            std::thread::sleep(Duration::from_millis(30));
            device.open();
        });
        // A thread may go on a moment before that is noted.
        while memory.content(SLOW * page()) != Some(Content::Present) {
            std::thread::yield_now();
        }
        // A page that is given back is produced anew.
        assert_eq!(memory.evict(0..PAGES * page()).unwrap(), 1);
        check(&memory, SLOW);
        assert_eq!(memory.stats().poisoned, 0);
        // Each waits for the device, and none for a wake-up that it missed.
        let begin = Instant::now();
        (10..PAGES).for_each(|number| check(&memory, number));
        assert!(begin.elapsed() < Duration::from_secs(20), "{:?}", begin.elapsed());
    }

    #[test]
    fn a_failure_is_decided_about_before_the_thread_learns_of_it() {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let noted = seen.clone();
        let options = LazyOptions::default().on_failure(move |failure| {
            noted.lock().unwrap().push(failure.offset);
            Refusal::Poison
        });
        let Some((memory, _)) = mapped("a_failure_is_decided_about", &options) else { return };
        memory.read_at(BROKEN * page(), &mut [0; 8]).unwrap_err();
        assert_eq!(*seen.lock().unwrap(), [BROKEN * page()]);
        memory.read_at(BROKEN * page(), &mut [0; 8]).unwrap_err();
        assert_eq!(seen.lock().unwrap().len(), 1, "a bad page stays one");
        assert!(memory.populate(BROKEN * page()..(BROKEN + 1) * page()).is_err());
        check(&memory, BROKEN + 1);
    }

    #[test]
    fn threads_are_held_for_a_page_that_cannot_be_produced_until_the_mapping_ends() {
        let options = LazyOptions::default().on_failure(|_| Refusal::Hold);
        let Some((memory, _)) = mapped("threads_are_held", &options) else { return };
        let waits = std::thread::spawn({
            let memory = memory.memory.kernel.clone();
            move || memory.registered.mapping().read_at(BROKEN * page(), &mut [0; 8])
        });
        while memory.last_failure().is_none() {
            std::thread::yield_now();
        }
        std::thread::sleep(Duration::from_millis(60));
        assert!(!waits.is_finished());
        assert_eq!(memory.content(BROKEN * page()), Some(Content::Filling));
        check(&memory, BROKEN + 1);
        drop(memory);
        waits.join().unwrap().unwrap_err();
    }
}
