//! Pages made present before they are touched: by [`LazyMapping::populate`], and for pins ([`Producer`],
//! the hook of the pagemap).
//!
//! [`LazyMapping::populate`]: crate::LazyMapping::populate

use std::ops::Range;
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use uzone_os::signals::Held;
use uzone_os::thread::pause;
use uzone_pages::{Content, FaultAround, PfnRange};
use uzone_zone::{FaultError, PagemapOps};

use crate::engine::core::{Core, ReaderState};
use crate::engine::pending::Awaited;
use crate::error::LazyError;
use crate::stats::Counters;

/// How long to wait for a page that another thread is producing.
const PATIENCE: Duration = Duration::from_secs(30);

/// How long to wait for memory, or for a layout that changes.
const SHORTAGE: Duration = Duration::from_secs(2);

/// The pages that are made present.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum What {
    /// Pages that are ready. It never blocks.
    Cached,
    /// Every page.
    All,
}

/// Makes pages present, in the calling thread. Returns how many it installed itself. No signal interrupts the
/// thread while it owns pages: a handler that touches one of them would wait for it.
pub(crate) fn populate(
    core: &Core,
    pages: Range<u64>,
    what: What,
    state: &mut ReaderState,
) -> Result<u64, LazyError> {
    let step = FaultAround::MAX.pages(core.page_size()).get();
    let in_thread = core.in_thread();
    let mut filled = 0;
    let mut answer = Ok(());
    let mut at = pages.start;
    while at < pages.end && answer.is_ok() {
        let mut window = at..pages.end.min(at + step);
        at = window.end;
        filled += {
            let _held = Held::hold();
            core.map_ready(window.clone(), state)
        };
        if what == What::All {
            let whole = window.clone();
            answer = window.try_for_each(|page| {
                filled += produce(core, page, state)?;
                Ok(())
            });
            if let (Ok(()), Some(in_thread)) = (&answer, &in_thread) {
                in_thread.filled_elsewhere(whole);
            }
        }
    }
    Counters::add(&core.counters().populated, filled);
    answer.map(|()| filled)
}

/// Makes one page present, or waits until another thread has. Returns whether it did so itself.
fn produce(core: &Core, page: u64, state: &mut ReaderState) -> Result<u64, LazyError> {
    let offset = core.bytes(page..page + 1).start;
    let (give_up, mut round) = (Instant::now() + PATIENCE, 0);
    loop {
        match core.contents().get(page) {
            Content::Present | Content::Zero | Content::Unknown => return Ok(0),
            Content::Poisoned => return Err(LazyError::Poisoned { offset }),
            Content::Absent => {
                let _held = Held::hold();
                if core.contents().claim(page) {
                    // Threads that fault on it meanwhile wait for this one, up to the deadline.
                    let since = Instant::now();
                    let awaited = Awaited { page, since, fault: None, is_produced: false };
                    let is_listed = core.pending.push(awaited);
                    let answer = core.produce(page, state, Some(SHORTAGE));
                    if is_listed {
                        core.pending.remove(page);
                    }
                    return match answer {
                        Ok(()) => Ok(1),
                        Err(cause) => Err(LazyError::Backing { offset, cause }),
                    };
                }
            }
            Content::Filling | Content::Zeroing | Content::Removed => {}
        }
        if Instant::now() >= give_up {
            return Err(LazyError::TimedOut { offset });
        }
        pause(&mut round);
    }
}

/// Makes pages present that are pinned.
///
/// It knows the mapping weakly: the mapping owns the pagemap that owns this.
#[derive(Clone, Default)]
pub(crate) struct Producer(Arc<OnceLock<Weak<Core>>>);

impl Producer {
    /// Sets the mapping.
    pub(crate) fn serves(&self, core: &Arc<Core>) {
        let is_first = self.0.set(Arc::downgrade(core)).is_ok();
        debug_assert!(is_first, "a mapping has a producer of its own");
    }

    fn populate(&self, range: PfnRange, what: What) -> Result<(), FaultError> {
        let Some(core) = self.0.get().and_then(Weak::upgrade) else {
            return Err(FaultError::new("the mapping is being dropped"));
        };
        let pages = core.contents().pages_of(range);
        let answer = populate(&core, pages, what, &mut ReaderState::new(core.room()));
        answer.map(drop).map_err(FaultError::new)
    }

    /// Returns the callbacks of the mapping's pagemap.
    pub(crate) fn ops(&self) -> PagemapOps {
        let (ready, each) = (self.clone(), self.clone());
        PagemapOps::default().populate(
            // The pages that are missing afterwards are produced one by one.
            move |range| drop(ready.populate(range, What::Cached)),
            move |pfn| {
                let page = PfnRange::try_single(pfn).map_err(FaultError::new)?;
                each.populate(page, What::All)
            },
        )
    }
}
