//! On which CPU a reader thread runs: [`Follower`].
//!
//! The CPU of a thread that faults sleeps until its reader has answered, if the reader is on another CPU, and
//! to wake it is most of the time of the fault, above all in a virtual machine. On the same CPU the reader
//! runs as soon as the thread sleeps. So the reader goes to the CPU of a thread that is kept to one and has
//! all the faults, and stays there if faults are answered faster then. A thread that may use several CPUs is
//! not followed: the scheduler would wake it on an idle one while the reader runs.
//!
//! Which thread of another process faults is not known: the reader follows the process, which is
//! one thread here, unless it was measured that faults take more than twice the time on the same
//! CPU.

use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use uzone_os::numa;

/// After how many faults of one thread in a row the place of the reader is reconsidered.
const RUN: u32 = 32;
/// For how long a place is kept at least.
const PAUSE: Duration = Duration::from_millis(4);
/// For how long a place is kept that was better than another.
const BETTER: Duration = Duration::from_secs(1);
/// After how many changes between faulting threads a reader follows none of them.
const CHANGES: u32 = 8;
/// CPUs with larger numbers are ignored.
const CPUS: u32 = 1024;

/// Which threads the last faults were of.
pub(crate) struct Waiters {
    thread: u32,
    in_a_row: u32,
    /// How often the thread was another than the one before, since the place was looked at.
    changes: u32,
    since: Instant,
    last: Instant,
}

impl Waiters {
    pub(crate) fn new() -> Self {
        let now = Instant::now();
        Self { thread: 0, in_a_row: 0, changes: 0, since: now, last: now }
    }

    /// Notes a fault of a thread, which is 0 where it is not known.
    pub(crate) fn note(&mut self, thread: u32, read_at: Instant) {
        if thread != self.thread || self.in_a_row == 0 {
            self.changes += u32::from(thread != self.thread);
            (self.thread, self.in_a_row, self.since) = (thread, 0, read_at);
        }
        self.in_a_row = self.in_a_row.saturating_add(1);
        self.last = read_at;
    }

    /// Returns the thread that has had the last faults and the time of each, and starts anew.
    fn take_run(&mut self) -> Option<(u32, Duration)> {
        if self.in_a_row <= RUN {
            return None;
        }
        let each = self.last.saturating_duration_since(self.since) / (self.in_a_row - 1);
        self.in_a_row = 0;
        Some((self.thread, each)).filter(|(thread, _)| *thread != 0)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// Where the scheduler puts it.
    Anywhere,
    /// On the CPU of a thread, to see whether its faults take less than they took before.
    Trial { thread: u32, cpu: u32, before: Duration },
    /// On the CPU of a thread.
    With { thread: u32, cpu: u32 },
}

/// A step that the reader thread has to take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Move {
    To(u32),
    Back,
}

/// Decides where a reader thread runs, and moves it.
pub(crate) struct Follower {
    place: Place,
    not_before: Instant,
    /// The CPUs that the thread could use before it followed another.
    cpus: Vec<u32>,
}

impl Follower {
    pub(crate) fn new() -> Self {
        Self {
            place: Place::Anywhere,
            not_before: Instant::now(),
            cpus: Vec::with_capacity(CPUS as usize),
        }
    }

    /// Moves this thread, if that is due. Returns whether it shares the CPU of the faulting thread from now
    /// on, if that has changed.
    pub(crate) fn follow(&mut self, waiters: &mut Waiters) -> Option<bool> {
        match self.next(waiters, only_cpu)? {
            Move::To(cpu) => {
                self.cpus.clear();
                self.cpus.extend(numa::usable(0..CPUS).into_iter().flatten());
                let can = self.cpus.len() > 1 && self.cpus.contains(&cpu);
                if can && numa::keep_thread_to(&[cpu]).is_ok() {
                    return Some(true);
                }
                self.stay(waiters.last, BETTER);
                None
            }
            Move::Back => {
                if numa::keep_thread_to(&self.cpus).is_err() {
                    tracing::warn!(
                        "a thread that answers faults is kept to one CPU: it cannot use others"
                    );
                }
                Some(false)
            }
        }
    }

    /// Decides where the thread runs from now on, if that changes. `only_cpu` returns the CPU of a thread
    /// that may use no other.
    fn next(
        &mut self,
        waiters: &mut Waiters,
        only_cpu: impl Fn(u32) -> Option<u32>,
    ) -> Option<Move> {
        let now = waiters.last;
        let is_mixed = waiters.changes > CHANGES;
        match self.place {
            Place::Anywhere => {
                if now < self.not_before {
                    return None;
                }
                let (thread, before) = waiters.take_run()?;
                let Some(cpu) = only_cpu(thread) else {
                    self.stay(now, PAUSE);
                    return None;
                };
                self.place = Place::Trial { thread, cpu, before };
                waiters.changes = 0;
                Some(Move::To(cpu))
            }
            Place::Trial { thread, cpu, before } => {
                let (waiter, each) = match waiters.take_run() {
                    Some(run) => run,
                    None if is_mixed => (0, before),
                    None => return None,
                };
                if waiter == thread && each < before {
                    (self.place, self.not_before) = (Place::With { thread, cpu }, now + PAUSE);
                    waiters.changes = 0;
                    return None;
                }
                self.stay(now, BETTER);
                Some(Move::Back)
            }
            Place::With { thread, cpu } => {
                if now < self.not_before {
                    return None;
                }
                let is_other = waiters.thread != thread && waiters.in_a_row > RUN;
                if is_mixed || is_other || only_cpu(thread) != Some(cpu) {
                    self.stay(now, PAUSE);
                    return Some(Move::Back);
                }
                waiters.changes = 0;
                self.not_before = now + PAUSE;
                None
            }
        }
    }

    /// Keeps the thread where the scheduler puts it.
    fn stay(&mut self, now: Instant, time: Duration) {
        (self.place, self.not_before) = (Place::Anywhere, now + time);
    }
}

/// Returns the CPU of a thread that may use no other.
fn only_cpu(thread: u32) -> Option<u32> {
    numa::only_cpu_of(NonZeroU32::new(thread)?).ok().flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Faults of a thread, each of which takes so long.
    fn faults(waiters: &mut Waiters, now: &mut Instant, thread: u32, count: u32, micros: u64) {
        for _ in 0..count {
            *now += Duration::from_micros(micros);
            waiters.note(thread, *now);
        }
    }

    /// The CPU of each thread: even ones are kept to one.
    fn cpu_of(thread: u32) -> Option<u32> {
        thread.is_multiple_of(2).then_some(thread / 2)
    }

    #[test]
    fn a_reader_follows_a_thread_that_is_kept_to_a_cpu_while_that_makes_its_faults_faster() {
        let (mut follower, mut waiters) = (Follower::new(), Waiters::new());
        let mut now = Instant::now();
        faults(&mut waiters, &mut now, 6, RUN, 60);
        assert_eq!(follower.next(&mut waiters, cpu_of), None, "too few faults");
        faults(&mut waiters, &mut now, 6, 1, 60);
        assert_eq!(follower.next(&mut waiters, cpu_of), Some(Move::To(3)));
        faults(&mut waiters, &mut now, 6, RUN + 1, 5);
        assert_eq!(follower.next(&mut waiters, cpu_of), None);
        assert_eq!(follower.place, Place::With { thread: 6, cpu: 3 });
        faults(&mut waiters, &mut now, 6, 2000, 5);
        assert_eq!(follower.next(&mut waiters, cpu_of), None);
        // It is moved, or another thread has the faults, or several have.
        assert_eq!(follower.next(&mut waiters, |_| None), None, "the place was just looked at");
        faults(&mut waiters, &mut now, 6, 2000, 5);
        assert_eq!(follower.next(&mut waiters, |_| None), Some(Move::Back));
        faults(&mut waiters, &mut now, 6, 2000, 5);
        assert_eq!(follower.next(&mut waiters, cpu_of), Some(Move::To(3)));
        faults(&mut waiters, &mut now, 6, RUN + 1, 1);
        assert_eq!(follower.next(&mut waiters, cpu_of), None);
        faults(&mut waiters, &mut now, 8, 2000, 5);
        assert_eq!(follower.next(&mut waiters, cpu_of), Some(Move::Back));
    }

    #[test]
    fn a_reader_goes_back_if_faults_take_no_less_time_and_follows_no_thread_that_moves() {
        let (mut follower, mut waiters) = (Follower::new(), Waiters::new());
        let mut now = Instant::now();
        faults(&mut waiters, &mut now, 7, 1000, 60);
        assert_eq!(follower.next(&mut waiters, cpu_of), None, "the thread may use several CPUs");
        faults(&mut waiters, &mut now, 2, 1000, 10);
        assert_eq!(follower.next(&mut waiters, cpu_of), Some(Move::To(1)));
        faults(&mut waiters, &mut now, 2, 1000, 12);
        assert_eq!(follower.next(&mut waiters, cpu_of), Some(Move::Back));
        faults(&mut waiters, &mut now, 2, 1000, 10);
        assert_eq!(follower.next(&mut waiters, cpu_of), None, "it was slower a moment ago");
        now += BETTER;
        faults(&mut waiters, &mut now, 2, 1000, 10);
        assert_eq!(follower.next(&mut waiters, cpu_of), Some(Move::To(1)));
        // Two threads that take turns have no run.
        for _ in 0..CHANGES {
            faults(&mut waiters, &mut now, 4, 1, 5);
            faults(&mut waiters, &mut now, 2, 1, 5);
        }
        assert_eq!(follower.next(&mut waiters, cpu_of), Some(Move::Back));
        // A thread that is not known is not followed.
        now += BETTER;
        faults(&mut waiters, &mut now, 0, 1000, 5);
        assert_eq!(follower.next(&mut waiters, cpu_of), None);
    }
}
