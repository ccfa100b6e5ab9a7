//! The thread that answers the faults of one mapping.
//!
//! It reads what is pending, answers it, and looks again; when nothing comes it keeps looking for a
//! moment (a sleep and a wake-up cost more than most answers) and then sleeps. It never blocks on a
//! backing and allocates nothing once it runs.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use uzone_os::uffd::{Doorbell, Event, EventBuffer, FaultKind, PageFault, Remote};
use uzone_pages::{Content, Touch};

use crate::core::{Core, Counters, Hands, Outcome, Produced};
use crate::pool::Pool;
use crate::told::Told;

/// How many events are read at once.
const EVENTS: usize = 64;
/// How many faults are answered before more are read.
const FAULTS: usize = 1024;
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
    pub(crate) told: Told,
    pub(crate) core: Arc<Core>,
    /// Who produces what is not at hand. Without one the reader does, and waits: for memory of
    /// which others give pages back, since only who reads the removals knows what may be filled.
    pub(crate) pool: Option<Arc<Pool>>,
    pub(crate) control: Arc<Control>,
    pub(crate) spin: Duration,
    pub(crate) room: usize,
}

impl Reader {
    /// Answers until it is told to stop.
    pub(crate) fn run(self) {
        let mut buffer = EventBuffer::new(EVENTS);
        let mut hands = Hands::new(self.room);
        let mut parked = Parked::new();
        let mut faults = Vec::with_capacity(FAULTS);
        let mut children = Vec::new();
        let mut idle_since = Instant::now();
        loop {
            // All that is pending, before anything is answered: a fault is given out before a
            // removal that is older than it.
            let is_read = self.drain(&mut buffer, &mut faults, &mut parked, &mut children);
            if !faults.is_empty() {
                for fault in faults.drain(..) {
                    self.answer(&fault, &mut hands, &mut parked);
                }
                idle_since = Instant::now();
                continue;
            }
            if !is_read {
                // The descriptor is ours and open: there is nothing to be done about it but to look
                // again, not too often.
                std::thread::sleep(RETRY);
            }
            // Acquire pairs with the Release of who stops: what it did before is seen.
            if self.control.stop.load(Ordering::Acquire) {
                break;
            }
            parked.wake(&self.core);
            // Nobody waits: time for neighbours, a few at a time.
            if self.core.map_around(&mut hands) {
                idle_since = Instant::now();
                continue;
            }
            if idle_since.elapsed() < self.spin {
                std::hint::spin_loop();
                continue;
            }
            let timeout = parked.is_waiting().then_some(RETRY);
            if self.told.wait(&self.control.bell, timeout).is_err() {
                std::thread::sleep(RETRY);
            }
            idle_since = Instant::now();
        }
        match &self.told {
            Told::Own(_) => self.refuse(&mut buffer),
            // What was read and not answered is told again to who comes next.
            Told::Remote(_) => parked.wake_now(&self.core),
        }
    }

    /// Reads what is pending: faults into `faults`, removals at once into the pages' words. Returns
    /// whether that worked.
    fn drain(
        &self,
        buffer: &mut EventBuffer,
        faults: &mut Vec<PageFault>,
        parked: &mut Parked,
        children: &mut Vec<Remote>,
    ) -> bool {
        loop {
            let read = match self.told.read(buffer) {
                Ok(0) => return true,
                Ok(read) => read,
                Err(_) => return false,
            };
            for event in &mut *buffer {
                match event {
                    Event::PageFault(fault) if faults.len() < FAULTS => faults.push(fault),
                    // It is told again after the next wake.
                    Event::PageFault(_) => {
                        Counters::add(&self.core.counters().put_off, 1);
                        parked.push_all();
                    }
                    Event::Removed { start, end } | Event::Unmapped { start, end } => {
                        for bytes in self.told.offsets(start, end) {
                            let shift = self.core.page_size().shift();
                            let end = self.core.contents().area().end().get();
                            let pages = bytes.start >> shift..bytes.end >> shift;
                            self.core.removed(pages.start..pages.end.min(end));
                        }
                    }
                    // Nobody answers for the child; closing this would give it zeroes.
                    Event::Forked(child) => children.push(child),
                    _ => {}
                }
            }
            // Fewer than there is room for were all there were, unless a removal came meanwhile.
            if read < buffer.capacity() && matches!(self.told, Told::Own(_)) {
                return true;
            }
        }
    }

    /// Makes the pages bad that somebody waits for: who waits now gets a signal, not zeroes.
    fn refuse(&self, buffer: &mut EventBuffer) {
        while matches!(self.told.read(buffer), Ok(1..)) {
            for event in &mut *buffer {
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
        let page = self.told.offset_of(address)? >> self.core.page_size().shift();
        (page < self.core.contents().area().end().get()).then_some(page)
    }

    fn answer(&self, fault: &PageFault, hands: &mut Hands, parked: &mut Parked) {
        let Some(page) = self.page(fault.address) else { return };
        if fault.kind == FaultKind::Minor {
            Counters::add(&self.core.counters().minor, 1);
        }
        if fault.kind == FaultKind::WriteProtect {
            if !self.core.write_fault(page) {
                Counters::add(&self.core.counters().put_off, 1);
                parked.push(page);
            }
            return;
        }
        let touch = if fault.is_write { Touch::Write } else { Touch::Read };
        match self.core.fault(page, touch, hands) {
            Outcome::Answered => return,
            Outcome::Later => {}
            Outcome::Produce => {
                Counters::add(&self.core.counters().queued, 1);
                match &self.pool {
                    Some(pool) if pool.submit(&self.core, page, self.room) => return,
                    Some(_) => self.core.release(page),
                    None => match self.core.try_produce(page, hands) {
                        Produced::Done => return,
                        Produced::Failed(_) => return self.core.spoil(page),
                        // There is a removal to be read first.
                        Produced::PutOff => self.core.release(page),
                    },
                }
            }
        }
        Counters::add(&self.core.counters().put_off, 1);
        parked.push(page);
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

    fn push_all(&mut self) {
        if !self.is_waiting() {
            self.since = Instant::now();
        }
        self.all = true;
    }

    fn is_waiting(&self) -> bool {
        self.all || !self.pages.is_empty()
    }

    /// Wakes who waits for the pages, if it is time: they fault again, and that is told again.
    fn wake(&mut self, core: &Core) {
        if self.is_waiting() && self.since.elapsed() >= RETRY {
            self.wake_now(core);
        }
    }

    fn wake_now(&mut self, core: &Core) {
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
