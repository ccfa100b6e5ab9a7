//! Which pages are touched, by which threads, and on which CPUs these and the handler run.

use std::num::NonZeroUsize;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use uzone_fault::{Engine, EngineOptions};
use uzone_os::{numa, thread_faults};
use uzone_pages::ByteLen;

use super::source::PAGE;
use crate::harness::{BenchError, Found, Reads, Result, nanoseconds, place};

/// In which order pages are touched.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Pattern {
    /// All of them, from the first to the last.
    InOrder,
    /// All of them, in an order that looks random and is the same in every run.
    Random,
    /// One of each page table of 2 MiB, in order: neighbours are mapped for nothing.
    OnePerTable,
}

/// How many pages have one page table.
const TABLE: u64 = 512;
/// Which of them is touched where one is.
const TOUCHED: u64 = 77;

impl Pattern {
    pub(super) fn id(self) -> &'static str {
        match self {
            Self::InOrder => "seq",
            Self::Random => "random",
            Self::OnePerTable => "sparse",
        }
    }

    pub(super) fn title(self) -> &'static str {
        match self {
            Self::InOrder => "in order",
            Self::Random => "in random order",
            Self::OnePerTable => "one page per 2 MiB",
        }
    }

    /// Returns the offsets that each of `threads` touches.
    pub(super) fn parts(self, len: ByteLen, page_bytes: u64, threads: usize) -> Vec<Vec<u64>> {
        let all = 0..len.get() / page_bytes;
        let mut pages: Vec<u64> = match self {
            Self::OnePerTable => all.filter(|page| page % TABLE == TOUCHED).collect(),
            Self::InOrder | Self::Random => all.collect(),
        };
        if self == Self::Random {
            fastrand::Rng::with_seed(7).shuffle(&mut pages);
        }
        let scale = page_bytes / PAGE;
        let offsets: Vec<u64> = pages.into_iter().map(|page| place(page * scale)).collect();
        let share = offsets.len().div_ceil(threads).max(1);
        offsets.chunks(share).map(<[u64]>::to_vec).collect()
    }
}

/// Where threads run.
#[derive(Clone, Debug)]
pub(crate) struct Placement {
    /// What it adds to the id of a table.
    pub(crate) id: String,
    pub(crate) title: String,
    /// How many threads touch.
    pub(super) threads: usize,
    /// Whether no placement comes before it: its tables are those of the summary.
    pub(crate) is_first: bool,
    touchers: Vec<u32>,
    pub(crate) handler: Vec<u32>,
    /// For how long ours looks for faults before it sleeps; `None` for what it does by itself.
    pub(crate) spin: Option<Duration>,
}

impl Placement {
    /// Returns the placements of a host: another core, the same, and several threads anywhere.
    pub(crate) fn all(threads: &[usize]) -> Result<Vec<Self>> {
        let anywhere = Self::anywhere()?;
        let cpus = anywhere.handler.clone();
        let (Some(&first), Some(&last)) = (cpus.first(), cpus.last()) else {
            return Ok(Vec::new());
        };
        let mut all = Vec::new();
        let is_apart = first != last;
        if is_apart {
            all.push(Self {
                title: format!("one thread on CPU {first}, the handler on CPU {last}"),
                touchers: vec![first],
                handler: vec![last],
                ..anywhere.clone()
            });
        }
        all.push(Self {
            id: "-same".to_owned(),
            title: format!("one thread and the handler on CPU {first}"),
            threads: 1,
            is_first: !is_apart,
            touchers: vec![first],
            handler: vec![first],
            // A polling handler would keep the reader that it has woken from running.
            spin: Some(Duration::ZERO),
        });
        all.extend(threads.iter().filter(|&&threads| threads > 1).map(|&threads| Self {
            id: format!("-{threads}"),
            title: format!(
                "{threads} threads with a part each, these and the handler on any of {} CPUs",
                cpus.len()
            ),
            threads,
            is_first: false,
            ..anywhere.clone()
        }));
        Ok(all)
    }

    /// Returns the placement that restricts no thread.
    pub(super) fn anywhere() -> Result<Self> {
        let cpus = usable_cpus()?;
        Ok(Self {
            id: String::new(),
            title: format!("one thread, it and the handler on any of {} CPUs", cpus.len()),
            threads: 1,
            is_first: true,
            touchers: cpus.clone(),
            handler: cpus,
            spin: None,
        })
    }

    /// Returns the places that a caller can choose for the handler, and the id of each, while so many threads
    /// touch: on the first CPU, or where the scheduler puts them. The first restricts no handler.
    pub(super) fn of_handler(threads: usize, is_kept: bool) -> Result<Vec<(&'static str, Self)>> {
        let anywhere = Self::anywhere()?;
        let all = anywhere.handler.clone();
        let one = |cpu: Option<&u32>| cpu.map_or_else(Vec::new, |cpu| vec![*cpu]);
        let (first, last) = (one(all.first()), one(all.last()));
        let touchers = if is_kept { first.clone() } else { all.clone() };
        let sleeps = Some(Duration::ZERO);
        let places = [
            ("default", "where it is by default", all.clone(), None),
            ("first", "on the first CPU, sleeping", first, sleeps),
            ("last", "on the last CPU, looking for faults", last.clone(), None),
            ("last-sleeps", "on the last CPU, sleeping", last, sleeps),
            ("any-sleeps", "on any CPU, sleeping", all, sleeps),
        ];
        let place = |(id, title, handler, spin): (_, &str, _, _)| {
            let title = format!("the handler {title}");
            let touchers = touchers.clone();
            (id, Self { title, threads, touchers, handler, spin, ..anywhere.clone() })
        };
        Ok(places.map(place).into())
    }

    /// Starts an engine whose threads run where the handler does.
    pub(super) fn engine(&self) -> Result<Engine> {
        let one = NonZeroUsize::MIN;
        let cpus = self.handler.clone();
        let options = EngineOptions::default().producers(one).readers(one).cpus(cpus);
        self.by_handler(|| Ok(Engine::with(options)?))
    }

    /// Does something from which threads come that shall run where the handler does: a thread
    /// starts with the CPUs of the one that starts it.
    pub(crate) fn by_handler<T: Send>(&self, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        on(&self.handler, work)
    }

    /// Does something where memory is touched.
    pub(super) fn by_toucher<T: Send>(&self, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        on(&self.touchers, work)
    }
}

/// Returns the CPUs that this process may use.
pub(crate) fn usable_cpus() -> Result<Vec<u32>> {
    Ok(numa::usable(&(0..1024).collect::<Vec<_>>())?)
}

/// Does something in a thread of its own, on these CPUs.
pub(crate) fn on<T: Send>(cpus: &[u32], work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().spawn_scoped(scope, || {
            numa::keep_thread_to(cpus)?;
            work()
        });
        let thread = thread.map_err(|_| BenchError::threads(1))?;
        thread.join().unwrap_or_else(|_| Err(BenchError::threads(1)))
    })
}

/// One thread's share of touching: from when to when, and what it found.
pub(crate) struct Share {
    begun: Instant,
    ended: Instant,
    pub(crate) found: Found,
}

impl Share {
    /// Does some work. What the kernel counts as faults of the thread are its faults.
    pub(crate) fn of(work: impl FnOnce() -> Result) -> Result<Self> {
        let before = thread_faults();
        let begun = Instant::now();
        work()?;
        let ended = Instant::now();
        let (elapsed, faults) = (ended - begun, thread_faults().saturating_sub(before));
        Ok(Self { begun, ended, found: Found { elapsed, faults, ..Found::default() } })
    }
}

/// A touch that took less did not wait for a page.
const SHORTEST_WAIT: Duration = Duration::from_nanos(200);

/// How long each touch took, if that was asked for.
#[derive(Default)]
struct Times {
    all_ns: Vec<u64>,
    /// Of those that took a page fault.
    demand_ns: Vec<u64>,
    /// How many faults the kernel had counted after the last one that was asked about.
    faults: u64,
}

impl Times {
    /// Allocates room for the times and makes it present, so that storing a time takes no page fault.
    fn with_room(touches: usize) -> Self {
        let room = || {
            let mut room = vec![1; touches];
            room.clear();
            room
        };
        Self { all_ns: room(), demand_ns: room(), faults: thread_faults() }
    }

    fn push(&mut self, took: Duration) {
        let ns = nanoseconds(took);
        self.all_ns.push(ns);
        if took >= SHORTEST_WAIT {
            let before = std::mem::replace(&mut self.faults, thread_faults());
            if self.faults > before {
                self.demand_ns.push(ns);
            }
        }
    }
}

/// Touches memory and checks every word that is read. `expected` returns the right word of an offset. The faults
/// are those that the kernel counts.
pub(crate) fn touch<M: Reads>(
    row: &str,
    memory: &M,
    parts: &[Vec<u64>],
    placement: &Placement,
    is_timed: bool,
    expected: &(dyn Fn(u64) -> u64 + Sync),
) -> Result<Found> {
    together(parts.len(), |part, start| {
        let offsets = &parts[part];
        let kept = numa::keep_thread_to(&placement.touchers);
        let mut times = Times::with_room(if is_timed { offsets.len() } else { 0 });
        start.wait();
        kept?;
        let mut share = Share::of(|| {
            let mut bytes = [0; 8];
            for &offset in offsets {
                if is_timed {
                    let touched = Instant::now();
                    memory.read(offset, &mut bytes)?;
                    times.push(touched.elapsed());
                } else {
                    memory.read(offset, &mut bytes)?;
                }
                if u64::from_ne_bytes(bytes) != expected(offset) {
                    return Err(BenchError::wrong_byte(row, offset));
                }
            }
            Ok(())
        })?;
        (share.found.touches_ns, share.found.demand_ns) = (times.all_ns, times.demand_ns);
        Ok(share)
    })
}

/// Runs `work` on `threads` threads. It gets the number of its thread, and the barrier at which all start. The time
/// is that from the start of the first to the end of the last.
pub(crate) fn together(
    threads: usize,
    work: impl Fn(usize, &Barrier) -> Result<Share> + Sync,
) -> Result<Found> {
    let (start, work) = (&Barrier::new(threads), &work);
    let shares: Vec<Share> = std::thread::scope(|scope| {
        let threads: Vec<_> =
            (0..threads).map(|part| scope.spawn(move || work(part, start))).collect();
        let failed = BenchError::threads(threads.len());
        let joined = threads.into_iter().map(|thread| thread.join().ok());
        joined.collect::<Option<Result<_>>>().unwrap_or(Err(failed))
    })?;
    let begun = shares.iter().map(|share| share.begun).min();
    let ended = shares.iter().map(|share| share.ended).max();
    let elapsed = begun.zip(ended).map_or(Duration::ZERO, |(begun, ended)| ended - begun);
    let mut all = Found::default();
    shares.into_iter().for_each(|share| all.add(share.found));
    Ok(Found { elapsed, ..all })
}

#[cfg(test)]
mod tests {
    use uzone_os::{Anonymous, Mapping};

    use super::*;

    #[test]
    fn every_page_is_touched_once_by_any_number_of_threads() {
        for threads in [1, 2, 3, 8] {
            for pattern in [Pattern::InOrder, Pattern::Random] {
                let parts = pattern.parts(ByteLen::mib(4), PAGE, threads);
                assert_eq!(parts.len(), threads);
                let mut pages: Vec<u64> = parts.concat().iter().map(|at| at / PAGE).collect();
                assert_eq!(pages.is_sorted(), pattern == Pattern::InOrder);
                pages.sort_unstable();
                assert!(pages.into_iter().eq(0..1024));
            }
        }
        let parts = Pattern::OnePerTable.parts(ByteLen::mib(4), PAGE, 1);
        assert_eq!(parts, [[place(TOUCHED), place(TABLE + TOUCHED)]]);
        assert_eq!(Pattern::InOrder.parts(ByteLen::mib(4), 2 << 20, 8).len(), 2);
    }

    #[test]
    fn a_touch_that_takes_a_page_fault_is_one_of_demand_and_no_other_is() {
        let len = ByteLen::mib(1);
        let memory = Mapping::anonymous(len, Anonymous::default()).expect("memory");
        let parts: [Vec<u64>; 1] = [(0..128).map(place).collect()];
        memory.write_at(parts[0][5], &[0; 8]).expect("a page");
        let placement = Placement::anywhere().expect("CPUs");
        let touched = |is_timed| {
            let touched = touch("row", &memory, &parts, &placement, is_timed, &|_| 0).expect("0");
            (touched.touches_ns.len(), touched.demand_ns.len())
        };
        assert_eq!(touched(true), (128, 127));
        let (all, demand) = touched(true);
        assert!(all == 128 && demand < 4, "{demand} wait for pages that are there");
        assert_eq!(touched(false), (0, 0));
    }
}
