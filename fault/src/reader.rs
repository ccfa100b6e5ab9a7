//! The thread that answers the faults of one mapping.
//!
//! It reads what is pending, answers it, and looks again; when nothing comes it keeps looking for a
//! moment (a sleep and a wake-up cost more than most answers) and then sleeps. It never blocks on a
//! backing and allocates nothing once it runs.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use uzone_os::uffd::{Doorbell, Event, EventBuffer, FaultKind, Registered, wait};
use uzone_pages::{Content, Touch};

use crate::core::{Core, Counters, Hands, Outcome};
use crate::pool::Pool;

/// How many events are read at once.
const EVENTS: usize = 64;
/// How many pages may wait for room in the queue; more are told again all at once.
const PARKED: usize = 256;
/// After how long what did not fit in the queue is tried again.
const RETRY: Duration = Duration::from_millis(1);

/// What the reader of a mapping and the mapping share.
pub(crate) struct Control {
    pub(crate) bell: Doorbell,
    pub(crate) stop: AtomicBool,
}

/// One mapping and what its reader needs.
pub(crate) struct Reader {
    pub(crate) memory: Arc<Registered>,
    pub(crate) core: Arc<Core>,
    pub(crate) pool: Arc<Pool>,
    pub(crate) control: Arc<Control>,
    pub(crate) spin: Duration,
    pub(crate) room: usize,
}

impl Reader {
    /// Answers until it is told to stop, and then makes the pages bad that somebody waits for.
    pub(crate) fn run(self) {
        let mut buffer = EventBuffer::new(EVENTS);
        let mut hands = Hands::new(self.room);
        let mut parked = Parked::new();
        let uffd = self.memory.uffd().clone();
        let mut idle_since = Instant::now();
        loop {
            match uffd.read(&mut buffer) {
                Ok(0) => {}
                Ok(_) => {
                    for event in &mut buffer {
                        self.take(&event, &mut hands, &mut parked);
                    }
                    idle_since = Instant::now();
                    continue;
                }
                // The descriptor is ours and open: there is nothing to be done about it but to
                // look again, not too often.
                Err(_) => std::thread::sleep(RETRY),
            }
            // Acquire pairs with the Release of who stops: what it did before is seen.
            if self.control.stop.load(Ordering::Acquire) {
                break;
            }
            parked.wake(&self.core);
            if idle_since.elapsed() < self.spin {
                std::hint::spin_loop();
                continue;
            }
            let timeout = parked.is_waiting().then_some(RETRY);
            if wait(&uffd, &self.control.bell, timeout).is_err() {
                std::thread::sleep(RETRY);
            }
            idle_since = Instant::now();
        }
        // Whoever waits now gets a signal, not a page of zeroes.
        while matches!(uffd.read(&mut buffer), Ok(1..)) {
            for event in &mut buffer {
                if let Event::PageFault(fault) = event
                    && let Some(page) = self.page(fault.address)
                    && self.core.contents().claim(page)
                {
                    self.core.spoil(page);
                }
            }
        }
    }

    fn page(&self, address: uzone_os::Vaddr) -> Option<u64> {
        let page = self.memory.offset_of(address)? >> self.core.page_size().shift();
        (page < self.core.contents().area().end().get()).then_some(page)
    }

    fn take(&self, event: &Event, hands: &mut Hands, parked: &mut Parked) {
        // The mapping is ours and asks for no other events.
        let Event::PageFault(fault) = event else { return };
        let Some(page) = self.page(fault.address) else { return };
        if fault.kind == FaultKind::Minor {
            Counters::add(&self.core.counters().minor, 1);
        }
        let touch = if fault.is_write { Touch::Write } else { Touch::Read };
        if self.core.fault(page, touch, hands) == Outcome::Answered {
            return;
        }
        Counters::add(&self.core.counters().queued, 1);
        if !self.pool.submit(&self.core, page, self.room) {
            self.core.release(page);
            Counters::add(&self.core.counters().put_off, 1);
            parked.push(page);
        }
    }
}

/// Pages for which there was no room in the queue.
struct Parked {
    pages: Vec<u64>,
    /// More than there is room for: whoever waits anywhere is woken.
    all: bool,
    since: Instant,
}

impl Parked {
    fn new() -> Self {
        Self { pages: Vec::with_capacity(PARKED), all: false, since: Instant::now() }
    }

    fn push(&mut self, page: u64) {
        if !self.is_waiting() {
            self.since = Instant::now();
        }
        if self.pages.len() == PARKED {
            self.all = true;
        } else {
            self.pages.push(page);
        }
    }

    fn is_waiting(&self) -> bool {
        self.all || !self.pages.is_empty()
    }

    /// Wakes who waits for the pages, if it is time: they fault again, and that is told again.
    fn wake(&mut self, core: &Core) {
        if !self.is_waiting() || self.since.elapsed() < RETRY {
            return;
        }
        if self.all {
            let area = core.contents().area();
            core.kernel().wake(core.bytes(area.start().get()..area.end().get()));
        }
        for page in self.pages.drain(..) {
            if core.contents().get(page) != Content::Filling {
                core.kernel().wake(core.bytes(page..page + 1));
            }
        }
        self.all = false;
    }
}
