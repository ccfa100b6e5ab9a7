//! Where the reader thread should run: [`ReaderPlacement`], measured on this machine. Most of the time of a
//! fault is waking threads. On the CPU of the faulting thread, the reader runs as soon as that thread
//! sleeps, without an interrupt to another CPU; on another CPU it may poll for faults instead of sleeping,
//! which saves a wake-up and costs that CPU. Which is best depends on the machine: interrupts between CPUs
//! cost more in a virtual one.

use std::num::NonZeroUsize;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use uzone_os::{numa, privilege};
use uzone_pages::{Advice, ByteLen};

use crate::backing::ZeroBacking;
use crate::engine::Engine;
use crate::error::MapError;
use crate::options::{Answer, EngineOptions, LazyOptions};

/// How many faults are timed for each place at most, besides a few that are not.
const FAULTS: u64 = 256;
const WARM_UP: u64 = 8;
/// For how long: fewer are timed where they take longer.
const WITHIN: Duration = Duration::from_micros(700);
/// The time limit of a measurement that no caller requested: places whose turn comes later are left out.
const IN_ALL: Duration = Duration::from_millis(5);
/// CPUs with larger numbers are ignored.
const CPUS: u32 = 4096;

/// How long a fault takes, by the place of the reader.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ReaderPlacement {
    /// The CPU that faulted.
    pub cpu: u32,
    /// The other CPU, if this process may use one.
    pub other: Option<u32>,
    /// Each place and the median time of a fault there, from the touch to the next instruction, the fastest
    /// first.
    pub times: Vec<(&'static str, Duration)>,
}

impl ReaderPlacement {
    /// The place of a reader on the CPU of the faulting thread.
    pub const SAME_CPU: &'static str = "on the same CPU";
    /// That of a reader on another one, where it sleeps between faults.
    pub const OTHER_CPU: &'static str = "on another CPU, sleeping between faults";
    /// That of a reader on another one, where it polls for faults and does not sleep.
    pub const OTHER_CPU_LOOKING: &'static str = "on another CPU, looking for faults";

    /// Times faults in each place, from the first CPU that this process may use. It takes less than five
    /// milliseconds on an idle machine, and starts threads that end with it.
    ///
    /// # Errors
    /// [`MapError`]: there is no userfaultfd, or threads cannot be kept to CPUs.
    pub fn measure() -> Result<Self, MapError> {
        Self::measure_within(Duration::MAX)
    }

    fn measure_within(most: Duration) -> Result<Self, MapError> {
        let begin = Instant::now();
        let all: Vec<u32> = (0..CPUS).collect();
        let cpus = numa::usable(&all)?;
        let cpu = cpus.first().copied().unwrap_or(0);
        let other = cpus.get(1).copied();
        let look = LazyOptions::DEFAULT_SPIN;
        let mut places = vec![(Self::SAME_CPU, cpu, Duration::ZERO)];
        if let Some(other) = other {
            places.push((Self::OTHER_CPU_LOOKING, other, look));
            places.push((Self::OTHER_CPU, other, Duration::ZERO));
        }
        let one = NonZeroUsize::MIN;
        let engine = Engine::with(EngineOptions::default().producers(one).readers(one))?;
        let mut times = Vec::with_capacity(places.len());
        for (place, reader, spin) in places {
            if begin.elapsed().saturating_add(WITHIN) > most {
                break;
            }
            times.push((place, time(&engine, cpu, reader, spin)?));
        }
        times.sort_by_key(|&(_, time)| time);
        Ok(Self { cpu, other, times })
    }

    /// Returns what the first call in this process measured. It takes no more than five milliseconds, unless the
    /// CPUs are busy; then places may be left out. `None` if nothing can be compared, and where the system calls
    /// of the thread are filtered: a filter may end a process that makes a userfaultfd.
    #[must_use]
    pub fn of_this_process() -> Option<&'static Self> {
        static MEASURED: OnceLock<Option<ReaderPlacement>> = OnceLock::new();
        let measure = || {
            let measured =
                (!privilege::has_filtered_calls()).then(|| Self::measure_within(IN_ALL))?;
            let measured = measured
                .inspect_err(|error| {
                    tracing::debug!("the place of the reader was not measured: {error}");
                })
                .ok()?;
            (measured.times.len() > 1 || measured.other.is_none()).then_some(measured)
        };
        MEASURED.get_or_init(measure).as_ref()
    }

    /// Returns whether a fault took no more than twice the time on the same CPU that it took in the best place.
    pub(crate) fn may_share_cpu(&self) -> bool {
        let same = self.times.iter().find(|(place, _)| *place == Self::SAME_CPU);
        let best = self.times.first();
        same.zip(best).is_none_or(|((_, same), (_, best))| *same <= *best * 2)
    }

    /// Returns the place where a fault took the shortest time.
    #[must_use]
    pub fn best(&self) -> &'static str {
        self.times.first().map_or(Self::SAME_CPU, |&(place, _)| place)
    }
}

/// Returns the median time of a fault on `cpu` that a thread on the CPU `reader` answers.
fn time(engine: &Engine, cpu: u32, reader: u32, spin: Duration) -> Result<Duration, MapError> {
    let page = uzone_os::probe::page_size().bytes();
    let options = LazyOptions::default()
        .advice(Advice::Random)
        .spin(spin)
        .answer(Answer::Reader)
        .own_reader(vec![reader]);
    let len = ByteLen::new((WARM_UP + FAULTS) * page);
    let memory = engine.map(len, Arc::new(ZeroBacking), &options)?;
    let read = |page_at: u64| memory.read_at(page_at * page, &mut [0]).map_err(Box::new);
    // In a thread of its own, so that the caller's stays where it was.
    let touched = std::thread::scope(|scope| {
        let touch = || -> Result<Vec<Duration>, MapError> {
            numa::keep_thread_to(&[cpu])?;
            let mut times = Vec::new();
            for at in 0..WARM_UP {
                read(at)?;
            }
            let start = Instant::now();
            for at in WARM_UP..WARM_UP + FAULTS {
                let begin = Instant::now();
                read(at)?;
                times.push(begin.elapsed());
                if start.elapsed() > WITHIN {
                    break;
                }
            }
            Ok(times)
        };
        scope.spawn(touch).join()
    });
    let mut times = touched.unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
    times.sort_unstable();
    Ok(times[times.len() / 2])
}
