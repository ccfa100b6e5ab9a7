//! The answers to the faults of a mapping, the work that the kernel, the queue or the backing deferred, and pages that
//! are installed before they are touched.

use std::num::NonZero;
use std::time::{Duration, Instant};

use uzone_os::uffd::{FaultKind, PageFault};
use uzone_pages::Touch;

use super::{MappingReader, RETRY};
use crate::engine::core::Outcome;
use crate::engine::io_pool::{PrefetchJob, Submit};
use crate::engine::pending::Awaited;
use crate::engine::staged::Staged;
use crate::memory::prefetch::Group;
use crate::stats::Counters;
use crate::trace::{FaultOutcome, FaultRecord};

impl MappingReader {
    /// Takes pages that are ready, to be installed between faults.
    pub(crate) fn prefetch(&mut self, group: Group) {
        if group.is_first && !self.has_fault && group.prefetch.waits_for_fault() {
            self.held.push(group);
            return;
        }
        if group.is_first {
            self.prefetching += 1;
            self.state.prefetch = Some(group.prefetch.clone());
        }
        if group.is_last {
            self.prefetching = self.prefetching.saturating_sub(1);
        } else {
            self.groups.push_back(group);
        }
        if self.prefetching == 0 {
            self.state.prefetch = None;
        }
    }

    /// Installs some pages that will be touched, and has others made ready. Returns whether there were any.
    pub(super) fn map_prefetched(&mut self, submit: &Submit<'_>) -> bool {
        let Some(group) = self.groups.pop_front() else { return false };
        for pages in group.runs {
            let filled = self.core.map_ready(pages, &mut self.state);
            Counters::add(&self.core.counters().populated, filled);
        }
        self.pool.prefetch(PrefetchJob {
            core: self.core.clone(),
            prefetch: group.prefetch,
            filler: submit.filler.clone(),
            key: submit.key,
        });
        true
    }

    /// Returns when deferred work is due, if there is any.
    #[inline]
    pub(crate) fn due(&self) -> Option<Instant> {
        let parked = self.parked.is_waiting().then_some(self.parked.since + RETRY);
        let late = (!self.late.is_empty()).then_some(self.late_since + RETRY);
        let deadline =
            self.deadline.and_then(|after| self.core.pending.oldest()?.checked_add(after));
        let poll_failed = self.poll_failed.then(|| self.looked + RETRY);
        [parked, late, deadline, poll_failed, self.held_until].into_iter().flatten().min()
    }

    /// Does the deferred work that is due.
    pub(super) fn run_deferred(&mut self) {
        self.parked.wake(&self.core);
        if !self.late.is_empty() && self.late_since.elapsed() >= RETRY {
            for _ in 0..self.late.len() {
                if let Some((page, staged)) = self.late.pop_front() {
                    self.install(page, staged);
                }
            }
        }
        if let Some(after) = self.deadline {
            while let Some(awaited) = self.core.pending.take_older_than(after) {
                self.core.record(&awaited, FaultOutcome::Failed);
                self.core.time_out(&awaited, after);
            }
        }
    }

    /// Ends the answering of faults after a panic: pages that are waited for become bad, and so does
    /// every page that is touched later.
    pub(crate) fn fail(&mut self) {
        if std::mem::replace(&mut self.has_failed, true) {
            return;
        }
        self.unanswered.clear();
        self.core.fail();
        self.late.clear();
        self.give_up();
        // The kernel reports unanswered faults again.
        self.parked.push_all();
        self.parked.wake_now(&self.core);
    }

    /// Makes the awaited pages bad. A backing may never return; a page that it brings later is dropped.
    pub(super) fn give_up(&self) {
        while let Some(page) = self.core.pending.first() {
            self.core.give_up(page);
        }
    }

    /// Releases the pages that are waited for, and wakes their threads and those of unanswered faults: they
    /// fault again.
    pub(super) fn release(&mut self) {
        for page in self.core.pending.drain() {
            self.core.release(page);
            self.parked.push(page);
        }
        for (page, _) in std::mem::take(&mut self.late) {
            self.core.release(page);
            self.parked.push(page);
        }
        for fault in std::mem::take(&mut self.unanswered) {
            if let Some(page) = self.page(fault.address) {
                self.parked.push(page);
            }
        }
        self.parked.wake_now(&self.core);
    }

    /// Installs a page that the pool produced for this thread.
    pub(crate) fn install(&mut self, page: u64, staged: Staged) {
        if let Some(staged) = self.core.install(page, staged) {
            self.late_since = Instant::now();
            self.late.push_back((page, staged));
        } else {
            self.core.came(page, &mut self.state);
        }
    }

    /// Answers a fault on a page that was read at `read_at`, which is `at` since the mapping was made. Returns
    /// its outcome, unless that is known only later.
    #[inline]
    pub(super) fn answer(
        &mut self,
        page: u64,
        fault: &PageFault,
        submit: &Submit<'_>,
        read_at: Instant,
        at: Duration,
    ) -> Option<FaultRecord> {
        if !self.has_fault {
            self.has_fault = true;
            let held = std::mem::take(&mut self.held);
            held.into_iter().for_each(|group| self.prefetch(group));
        }
        let class = fault.kind;
        self.state.waiter = fault.thread.map_or(0, NonZero::get);
        if class == FaultKind::Minor {
            Counters::add(&self.core.counters().minor, 1);
        }
        let outcome = self.answer_page(page, class, fault.is_write, submit, read_at)?;
        Some(FaultRecord {
            at,
            offset: self.core.bytes(page..page + 1).start,
            class,
            is_write: fault.is_write,
            outcome,
            latency: read_at.elapsed(),
        })
    }

    fn answer_page(
        &mut self,
        page: u64,
        class: FaultKind,
        is_write: bool,
        submit: &Submit<'_>,
        read_at: Instant,
    ) -> Option<FaultOutcome> {
        if class == FaultKind::WriteProtect {
            if self.core.write_fault(page) {
                return Some(FaultOutcome::Ready);
            }
            return Some(self.deferred(page));
        }
        let touch = if is_write { Touch::Write } else { Touch::Read };
        // Many threads that read in step wait for the same page.
        if self.answered == Some(page) {
            Counters::add(&self.core.counters().faults, 1);
            Counters::add(&self.core.counters().retouched, 1);
            return Some(FaultOutcome::Ready);
        }
        match self.core.fault(page, touch, &mut self.state) {
            Outcome::Answered => {
                self.answered = Some(page);
                return Some(FaultOutcome::Ready);
            }
            Outcome::Coalesced if self.is_nested() => self.core.refuse_nested(page),
            Outcome::Coalesced => return Some(FaultOutcome::Coalesced),
            Outcome::Later => {}
            Outcome::Produce { ahead } => {
                Counters::add(&self.core.counters().queued, 1);
                let is_listed = self.core.pending.push(Awaited {
                    page,
                    since: read_at,
                    fault: Some((class, is_write)),
                    is_produced: false,
                });
                if self.is_nested() {
                    self.core.refuse_nested(page);
                    return None;
                }
                if is_listed {
                    if submit.demand(&self.pool, &self.core, page) {
                        if let Some(ahead) = ahead {
                            self.pool.read_ahead(&self.core, ahead);
                        }
                        return None;
                    }
                    self.core.pending.remove(page);
                }
                self.core.release(page);
            }
        }
        Some(self.deferred(page))
    }

    /// Returns whether the thread that waits is one that produces pages: a backing reads other memory of the
    /// same engine.
    fn is_nested(&self) -> bool {
        !self.core.is_remote() && self.pool.is_producer(self.state.waiter)
    }

    fn deferred(&mut self, page: u64) -> FaultOutcome {
        Counters::add(&self.core.counters().deferred, 1);
        self.parked.push(page);
        FaultOutcome::Deferred
    }
}
