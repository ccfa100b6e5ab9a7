//! The touched pages ([`Pattern`]), the CPUs of threads and handler ([`Placement`]), and the touches ([`touch`]).

use std::num::NonZeroUsize;
use std::time::{Duration, Instant};

use uzone_fault::{Engine, EngineOptions};
use uzone_os::{numa, thread_faults};
use uzone_pages::ByteLen;

use super::source::PAGE;
use uzone_harness::ways::threads::{Share, on, together, usable_cpus};
use uzone_harness::{BenchError, Found, Reads, Result, nanoseconds, place};

/// The order in which pages are touched.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Pattern {
    /// Every page from the first to the last.
    InOrder,
    /// Every page in a random order that is the same in every run.
    Random,
    /// One of each page table of 2 MiB, in order: neighbours are mapped for nothing.
    OnePerTable,
}

/// The number of pages of one page table.
const TABLE: u64 = 512;
/// The page of them that is touched where one is.
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

    /// Returns the offsets that are touched.
    pub(super) fn offsets(self, len: ByteLen) -> Vec<u64> {
        let all = 0..len.get() / PAGE;
        let mut pages: Vec<u64> = match self {
            Self::OnePerTable => all.filter(|page| page % TABLE == TOUCHED).collect(),
            Self::InOrder | Self::Random => all.collect(),
        };
        if self == Self::Random {
            fastrand::Rng::with_seed(7).shuffle(&mut pages);
        }
        pages.into_iter().map(place).collect()
    }
}

/// The CPUs of threads.
#[derive(Clone, Debug)]
pub(crate) struct Placement {
    /// The end of the ids of its tables.
    pub(crate) id: String,
    pub(crate) title: String,
    /// Whether it is the first: the summary has its tables.
    pub(crate) is_first: bool,
    touchers: Vec<u32>,
    pub(crate) handler: Vec<u32>,
}

impl Placement {
    /// Returns the placements of a host: another core, and the same.
    pub(crate) fn all() -> Result<Vec<Self>> {
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
            is_first: !is_apart,
            touchers: vec![first],
            handler: vec![first],
        });
        Ok(all)
    }

    /// Returns the placement that restricts no thread.
    pub(super) fn anywhere() -> Result<Self> {
        let cpus = usable_cpus()?;
        Ok(Self {
            id: String::new(),
            title: format!("one thread, it and the handler on any of {} CPUs", cpus.len()),
            is_first: true,
            touchers: cpus.clone(),
            handler: cpus,
        })
    }

    /// Returns whether the handler has the CPU of the toucher.
    pub(crate) fn is_same(&self) -> bool {
        self.handler.len() == 1 && self.handler == self.touchers
    }

    /// Starts an engine whose threads run where the handler does.
    pub(super) fn engine(&self) -> Result<Engine> {
        let one = NonZeroUsize::MIN;
        let options = EngineOptions::default().producers(one).readers(one);
        self.by_handler(|| Ok(Engine::with(options)?))
    }

    /// Calls `work`, which starts threads, on the CPUs of the handler: a thread inherits the CPUs of its parent.
    pub(crate) fn by_handler<T: Send>(&self, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        on(&self.handler, work)
    }
}

/// A touch that took less did not wait for a page.
const SHORTEST_WAIT: Duration = Duration::from_nanos(200);

/// The time of each touch, where touches are timed.
#[derive(Default)]
struct Times {
    all_ns: Vec<u64>,
    /// The times of touches that took a page fault.
    demand_ns: Vec<u64>,
    /// The kernel's count of faults after the last of them.
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

/// The reads of a touch.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Touching {
    /// One word.
    Word,
    /// One word, with the time of each touch.
    Timed,
    /// Every word of the page.
    Page,
}

/// Touches memory by `threads` threads, each all of `offsets`, and checks every word that is read. `expected` returns the
/// right word of an offset. The kernel counts the faults.
pub(crate) fn touch<M: Reads>(
    row: &str,
    memory: &M,
    offsets: &[u64],
    threads: usize,
    placement: &Placement,
    touching: Touching,
    expected: &(dyn Fn(u64) -> u64 + Sync),
) -> Result<Found> {
    together(threads, |start| {
        let is_timed = touching == Touching::Timed;
        let kept = numa::keep_thread_to(&placement.touchers);
        let mut times = Times::with_room(if is_timed { offsets.len() } else { 0 });
        start.wait();
        kept?;
        let mut share = Share::of(|| {
            let (mut bytes, mut page) = ([0; 8], [0; 4096]);
            for &offset in offsets {
                if touching == Touching::Page {
                    let start = offset - offset % PAGE;
                    memory.read(start, &mut page)?;
                    check_page(row, start, &page, expected)?;
                    continue;
                }
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

/// Compares every word of a page.
fn check_page(row: &str, start: u64, page: &[u8], expected: &dyn Fn(u64) -> u64) -> Result {
    let (words, _) = page.as_chunks::<8>();
    let mut words = (start..).step_by(8).zip(words);
    match words.find(|(at, word)| u64::from_ne_bytes(**word) != expected(*at)) {
        Some((at, _)) => Err(BenchError::wrong_byte(row, at)),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use uzone_os::{Anonymous, Mapping};

    use super::*;

    #[test]
    fn every_page_is_touched_once() {
        for pattern in [Pattern::InOrder, Pattern::Random] {
            let offsets = pattern.offsets(ByteLen::mib(4));
            let mut pages: Vec<u64> = offsets.iter().map(|at| at / PAGE).collect();
            assert_eq!(pages.is_sorted(), pattern == Pattern::InOrder);
            pages.sort_unstable();
            assert!(pages.into_iter().eq(0..1024));
        }
        let offsets = Pattern::OnePerTable.offsets(ByteLen::mib(4));
        assert_eq!(offsets, [place(TOUCHED), place(TABLE + TOUCHED)]);
    }

    #[test]
    fn a_touch_that_takes_a_page_fault_is_one_of_demand_and_no_other_is() {
        let len = ByteLen::mib(1);
        let memory = Mapping::anonymous(len, Anonymous::default()).expect("memory");
        let offsets: Vec<u64> = (0..128).map(place).collect();
        memory.write_at(offsets[5], &[0; 8]).expect("a page");
        let placement = Placement::anywhere().expect("CPUs");
        let of = |touching, expected: &(dyn Fn(u64) -> u64 + Sync)| {
            touch("row", &memory, &offsets, 1, &placement, touching, expected)
        };
        let touched = |touching| {
            let touched = of(touching, &|_| 0).expect("0");
            (touched.touches_ns.len(), touched.demand_ns.len())
        };
        assert_eq!(touched(Touching::Timed), (128, 127));
        let (all, demand) = touched(Touching::Timed);
        assert!(all == 128 && demand < 4, "{demand} wait for pages that are there");
        assert_eq!(touched(Touching::Word), (0, 0));
        assert!(of(Touching::Page, &|_| 0).is_ok() && of(Touching::Page, &|at| at).is_err());
    }
}
