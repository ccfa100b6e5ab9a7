//! What the faults of an area have in common: who reads in order, and how much is worth mapping.
//!
//! [`FaultPattern`] remembers where the last faults were and says for the next one which window to
//! offer and whether somebody is reading in order. It is pure: no clock, no system call, no memory
//! but its own.
//!
//! Cost: a plan looks at eight numbers, and at as many samples where the advice is [`Advice::Auto`].

use crate::addr::{PageCount, PageSize, Pfn, PfnRange};
use crate::window::FaultAround;

/// What the owner of lazily mapped memory says about how it will be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Advice {
    /// Nothing: every window has the size that was set.
    Normal,
    /// Here and there: every fault maps its page and no other.
    Random,
    /// In order: windows double from the size that was set, as long as faults follow each other.
    Sequential,
    /// Find out: windows grow while faults follow each other, and the size that others start with
    /// is halved when too few of the pages mapped around a fault turn out to be used.
    #[default]
    Auto,
}

/// How a fault touched its page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Touch {
    /// It reads: its neighbours may be mapped along.
    Read,
    /// It writes: it gets its page, and no other.
    Write,
}

/// What to do about one fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FaultPlan {
    /// The pages to offer.
    pub window: PfnRange,
    /// Whether the fault is where an earlier window ended. Whoever reads in order wants the
    /// neighbours next and is best served with the whole window at once; anyone else waits for
    /// the one page, which then goes first.
    pub follows: bool,
    /// The window behind this one, where somebody has read in order for so long that windows do not
    /// grow any more: what to put in place while nobody waits. Whoever does so says how far it got
    /// ([`FaultPattern::went_ahead`]). Never a single page: a huge one would hold up whoever faults next.
    pub ahead: Option<PfnRange>,
}

/// How many readers in order are told apart.
const STREAMS: usize = 8;

/// After so many faults in order a window grows.
const GROWS_AFTER: u8 = 2;

/// Somebody who may be reading in order: the page after the last window and after what was put in
/// place ahead, and how it went so far.
#[derive(Clone, Copy, Debug)]
struct Stream {
    next: Pfn,
    size: FaultAround,
    streak: u8,
}

/// Every so many windows that nobody follows, one is left out, as a sample.
const SAMPLE_EVERY: u32 = 16;
/// How many samples there are at once.
const SAMPLES: usize = 8;
/// After so long a page of a sample that was not touched counts as one that nobody wanted.
const SAMPLE_AGE_MS: u64 = 1000;
/// So many samples are judged together.
const SAMPLE_BATCH: u32 = 4;

/// A window of which only the faulting page was mapped, to see which others are touched: a page that
/// is mapped does not tell.
#[derive(Clone, Copy, Debug)]
struct Sample {
    window: PfnRange,
    /// A bit for each page that was touched, or was mapped for who reads in order.
    used: [u64; 8],
    opened_ms: u64,
}

impl Sample {
    fn open(window: PfnRange, fault: Pfn, opened_ms: u64) -> Self {
        let mut sample = Self { window, used: [0; 8], opened_ms };
        sample.note(fault);
        sample
    }

    fn note(&mut self, pfn: Pfn) {
        if self.window.contains(pfn)
            && let Some(at) = pfn.checked_since(self.window.start())
            && let Some(bits) =
                usize::try_from(at.get() / 64).ok().and_then(|word| self.used.get_mut(word))
        {
            *bits |= 1 << (at.get() % 64);
        }
    }

    /// Returns how many pages it has besides the one that it was opened for, and how many of those
    /// were touched.
    fn judge(&self) -> (u64, u64) {
        let used: u32 = self.used.iter().map(|bits| bits.count_ones()).sum();
        (self.window.pages().get() - 1, u64::from(used).saturating_sub(1))
    }
}

/// What the samples of an area showed so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sampled {
    /// How many pages would have been mapped around faults.
    pub around: PageCount,
    /// How many of them were touched.
    pub used: PageCount,
}

/// Where the last faults of an area were, and the window that follows from it.
///
/// Faults of several threads that each read in order are told apart. An area that nobody has
/// touched counts as read up to its start, so the first fault of a scan is in order.
#[derive(Clone, Debug)]
pub struct FaultPattern {
    advice: Advice,
    /// What was set.
    size: FaultAround,
    /// What a window starts with: `size`, or less after waste was measured.
    start: FaultAround,
    most: FaultAround,
    streams: [Stream; STREAMS],
    /// Which of the streams is forgotten next.
    oldest: usize,
    samples: [Option<Sample>; SAMPLES],
    /// How many windows nobody followed since the last sample.
    since_sample: u32,
    now_ms: u64,
    sampled: Sampled,
    /// What samples showed that were not judged yet, and how many those are.
    unjudged: (u64, u64, u32),
}

impl FaultPattern {
    /// Takes what is known about an area before its first fault. Windows that grow do so up to
    /// `most`.
    #[must_use]
    pub fn new(area: PfnRange, advice: Advice, size: FaultAround, most: FaultAround) -> Self {
        let stream = Stream { next: area.start(), size, streak: 0 };
        Self {
            advice,
            size,
            start: size,
            most: most.max(size),
            streams: [stream; STREAMS],
            oldest: 0,
            samples: [None; SAMPLES],
            since_sample: 0,
            now_ms: 0,
            sampled: Sampled::default(),
            unjudged: (0, 0, 0),
        }
    }

    /// Returns the advice.
    #[must_use]
    pub fn advice(&self) -> Advice {
        self.advice
    }

    /// Returns the size that a window starts with now.
    #[must_use]
    pub fn size(&self) -> FaultAround {
        match self.advice {
            Advice::Random => FaultAround::MIN,
            Advice::Normal | Advice::Sequential | Advice::Auto => self.start,
        }
    }

    /// Changes what was said at first. What was measured is forgotten.
    pub fn set(&mut self, advice: Advice, size: FaultAround) {
        (self.advice, self.size, self.start) = (advice, size, size);
        self.most = self.most.max(size);
        for stream in &mut self.streams {
            (stream.size, stream.streak) = (size, 0);
        }
        self.samples = [None; SAMPLES];
        self.unjudged = (0, 0, 0);
    }

    /// Returns what to do about a fault on the page `fault` of `area`, or `None` if it is none of
    /// its pages.
    pub fn plan(
        &mut self,
        fault: Pfn,
        touch: Touch,
        area: PfnRange,
        page: PageSize,
    ) -> Option<FaultPlan> {
        if touch == Touch::Write || self.advice == Advice::Random {
            let window = FaultAround::MIN.window(fault, area, page)?;
            return Some(FaultPlan { window, follows: false, ahead: None });
        }
        let known = self.streams.iter().position(|stream| stream.next == fault);
        let size = match known {
            Some(index) => self.grown(self.streams[index]),
            None => self.start,
        };
        let mut window = size.window(fault, area, page)?;
        if self.advice == Advice::Auto && self.leaves_out(fault, window, known.is_some()) {
            window = FaultAround::MIN.window(fault, area, page)?;
        }
        let index = known.unwrap_or_else(|| {
            let oldest = self.oldest;
            self.oldest = (oldest + 1) % STREAMS;
            oldest
        });
        let streak = known.map_or(0, |index| self.streams[index].streak.saturating_add(1));
        self.streams[index] = Stream { next: window.end(), size, streak };
        // Whether anybody reads on is not known, so it is for who has read for long.
        let is_long = streak >= GROWS_AFTER && size == self.most && self.advice != Advice::Normal;
        let goes_ahead = is_long && size.pages(page).get() > 1;
        let ahead = if goes_ahead { size.behind(window, area, page) } else { None };
        Some(FaultPlan { window, follows: known.is_some(), ahead })
    }

    /// Takes that pages were put in place ahead ([`FaultPlan::ahead`]), some at a time from its first on:
    /// who reads in order faults behind them.
    pub fn went_ahead(&mut self, placed: PfnRange) {
        if let Some(stream) = self.streams.iter_mut().find(|stream| stream.next == placed.start()) {
            stream.next = placed.end();
        }
        for sample in self.samples.iter_mut().flatten() {
            if sample.window.overlaps(placed) {
                // As in `leaves_out`.
                placed.iter().for_each(|pfn| sample.note(pfn));
            }
        }
    }

    /// Returns the size of the window for a fault that goes on where `stream` ended.
    fn grown(&self, stream: Stream) -> FaultAround {
        let grows = match self.advice {
            Advice::Normal | Advice::Random => false,
            Advice::Sequential => true,
            Advice::Auto => stream.streak >= GROWS_AFTER,
        };
        if grows { stream.size.doubled(self.most) } else { stream.size }
    }

    /// Returns whether the neighbours of a fault are left out, because its window is a sample or
    /// becomes one.
    fn leaves_out(&mut self, fault: Pfn, window: PfnRange, is_known: bool) -> bool {
        let mut is_sampled = false;
        for sample in self.samples.iter_mut().flatten() {
            if !sample.window.overlaps(window) {
                continue;
            }
            if is_known {
                // Who reads in order wants what is mapped for him.
                window.iter().for_each(|pfn| sample.note(pfn));
            } else if sample.window.contains(fault) {
                sample.note(fault);
                is_sampled = true;
            }
        }
        if is_known || is_sampled || window.pages().get() == 1 {
            return is_sampled;
        }
        self.since_sample += 1;
        if self.since_sample < SAMPLE_EVERY {
            return false;
        }
        let now = self.now_ms;
        match self.samples.iter_mut().find(|sample| sample.is_none()) {
            Some(free) => {
                *free = Some(Sample::open(window, fault, now));
                self.since_sample = 0;
                true
            }
            None => false,
        }
    }

    /// Says what time it is, in milliseconds since any moment, and takes what old samples showed for
    /// a measurement. Called every now and then; only [`Advice::Auto`] has samples.
    pub fn tick(&mut self, now_ms: u64) {
        self.now_ms = now_ms;
        for slot in &mut self.samples {
            if let Some(sample) = slot
                && now_ms.saturating_sub(sample.opened_ms) >= SAMPLE_AGE_MS
            {
                let (around, used) = sample.judge();
                *slot = None;
                let total = &mut self.sampled;
                total.around = PageCount::new(total.around.get() + around);
                total.used = PageCount::new(total.used.get() + used);
                let (all_around, all_used, samples) = self.unjudged;
                self.unjudged = (all_around + around, all_used + used, samples + 1);
            }
        }
        let (around, used, samples) = self.unjudged;
        if samples >= SAMPLE_BATCH {
            self.unjudged = (0, 0, 0);
            self.measured(PageCount::new(around), PageCount::new(used));
        }
    }

    /// Returns what samples showed so far.
    #[must_use]
    pub fn sampled(&self) -> Sampled {
        self.sampled
    }

    /// Takes a measurement: of `around` pages that were mapped along with a faulting one, `used`
    /// were touched since. Only [`Advice::Auto`] learns from it.
    ///
    /// A window of 16 pages pays for itself when about four of them are used, by the times that
    /// were published with fault-around; below that it is halved, and at half of them it grows
    /// again up to what was set.
    pub fn measured(&mut self, around: PageCount, used: PageCount) {
        if self.advice != Advice::Auto || around.is_zero() {
            return;
        }
        let (around, used) = (around.get(), used.get());
        let start = if used < around / 4 {
            self.start.halved()
        } else if used >= around.div_ceil(2) {
            self.start.doubled(self.size)
        } else {
            return;
        };
        self.start = start;
        for stream in &mut self.streams {
            if stream.streak == 0 {
                stream.size = start;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::byte_len::ByteLen;

    fn area(start: u64, end: u64) -> PfnRange {
        PfnRange::try_new(Pfn::new(start), PageCount::new(end - start)).unwrap()
    }

    fn pages(pages: u64) -> FaultAround {
        FaultAround::try_new(ByteLen::new(pages * 4096)).unwrap()
    }

    /// Faults on the first page that is not mapped, as a scan does, and counts the faults.
    fn scan(pattern: &mut FaultPattern, area: PfnRange) -> u64 {
        let mut faults = 0;
        let mut at = area.start();
        while area.contains(at) {
            let plan = pattern.plan(at, Touch::Read, area, PageSize::KIB_4).unwrap();
            assert!(plan.window.contains(at));
            faults += 1;
            at = plan.window.end();
        }
        faults
    }

    #[test]
    #[cfg_attr(miri, ignore = "arithmetic, and long")]
    fn a_scan_of_an_aligned_area_faults_once_a_window() {
        let area = area(0, 4096 + 5);
        for order in 0..=9 {
            let size = pages(1 << order);
            let mut pattern = FaultPattern::new(area, Advice::Normal, size, FaultAround::MAX);
            assert_eq!(scan(&mut pattern, area), 4101_u64.div_ceil(1 << order), "order {order}");
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "arithmetic, and long")]
    fn windows_of_a_scan_grow_if_that_is_advised_or_found_out() {
        let area = area(0, 1 << 16);
        let faults =
            |advice| scan(&mut FaultPattern::new(area, advice, pages(16), FaultAround::MAX), area);
        assert_eq!(faults(Advice::Normal), 4096);
        assert_eq!(faults(Advice::Random), 65536);
        // 16, 32, 64, 128, 256 from 0, each up to an aligned end, and then 512 at a time.
        assert!(faults(Advice::Sequential) <= 128 + 8, "{}", faults(Advice::Sequential));
        assert!(faults(Advice::Auto) <= 128 + 16, "{}", faults(Advice::Auto));
    }

    #[test]
    fn what_comes_next_is_put_in_place_for_who_has_read_for_long() {
        let area = area(0, 512 * 5 + 100);
        let plan = |pattern: &mut FaultPattern, at: u64, page| {
            pattern.plan(Pfn::new(at), Touch::Read, area, page).unwrap()
        };
        let window =
            |start: u64, end| PfnRange::try_new(Pfn::new(start), PageCount::new(end - start));
        for advice in [Advice::Normal, Advice::Random, Advice::Sequential, Advice::Auto] {
            let mut pattern = FaultPattern::new(area, advice, pages(16), FaultAround::MAX);
            let grows = matches!(advice, Advice::Sequential | Advice::Auto);
            let mut at = 0;
            while at < 1024 {
                let plan = plan(&mut pattern, at, PageSize::KIB_4);
                assert!(
                    plan.ahead.is_none() || at >= 256 && grows,
                    "{advice:?}: windows grow still"
                );
                at = plan.window.end().get();
            }
            let ahead = |start, end| window(start, end).ok().filter(|_| grows);
            assert_eq!(plan(&mut pattern, 1024, PageSize::KIB_4).ahead, ahead(1536, 2048));
            if grows {
                // It was put in place up to some page, and is read on from there.
                pattern.went_ahead(window(1536, 1600).unwrap());
                pattern.went_ahead(window(1600, 1700).unwrap());
                let on = plan(&mut pattern, 1700, PageSize::KIB_4);
                assert_eq!((on.follows, Some(on.window)), (true, window(1536, 2048).ok()));
                assert_eq!(on.ahead, window(2048, 2560).ok());
                // All of it was.
                pattern.went_ahead(window(2048, 2560).unwrap());
                let on = plan(&mut pattern, 2560, PageSize::KIB_4);
                assert_eq!((on.follows, Some(on.window)), (true, window(2560, 2660).ok()));
                assert_eq!(on.ahead, None, "the area ends");
            }
        }
        // A touch where nothing was put in place is not in order.
        let mut pattern = FaultPattern::new(area, Advice::Auto, FaultAround::MAX, FaultAround::MAX);
        assert_eq!(plan(&mut pattern, 0, PageSize::KIB_4).ahead, None, "nobody has read for long");
        assert_eq!(plan(&mut pattern, 512, PageSize::KIB_4).ahead, window(1024, 1536).ok());
        assert!(!plan(&mut pattern, 1200, PageSize::KIB_4).follows);
        let huge_page = PageSize::try_from_bytes(2 << 20).unwrap();
        let mut huge = FaultPattern::new(area, Advice::Sequential, pages(16), FaultAround::MAX);
        for at in 0..100 {
            let plan = plan(&mut huge, at, huge_page);
            assert_eq!((plan.follows, plan.ahead), (true, None));
        }
    }

    #[test]
    fn what_was_put_in_place_ahead_counts_as_used() {
        let area = area(0, 1 << 16);
        let mut pattern = FaultPattern::new(area, Advice::Auto, pages(16), pages(16));
        let plan = |pattern: &mut FaultPattern, at: u64| {
            pattern.plan(Pfn::new(at), Touch::Read, area, PageSize::KIB_4).unwrap()
        };
        // Windows that nobody follows, until one is a sample: it has its page alone.
        let sample = (100..200_u64)
            .map(|index| index * 48 + 5)
            .find(|&at| plan(&mut pattern, at).window.pages().get() == 1)
            .unwrap();
        // Somebody reads in order up to the window before it, and it is put in place ahead.
        let start = sample - 5;
        assert!(!plan(&mut pattern, start - 48).follows);
        for at in [start - 32, start - 16] {
            assert!(plan(&mut pattern, at).follows);
        }
        let ahead = PfnRange::try_new(Pfn::new(start), PageCount::new(16)).unwrap();
        pattern.went_ahead(ahead);
        assert!(plan(&mut pattern, start + 16).follows);
        pattern.tick(SAMPLE_AGE_MS);
        assert_eq!(pattern.sampled().used, PageCount::new(15));
    }

    #[test]
    fn eight_scans_at_once_are_told_apart() {
        let area = area(0, 1 << 20);
        let mut pattern = FaultPattern::new(area, Advice::Auto, pages(16), FaultAround::MAX);
        let mut at: [u64; STREAMS] = core::array::from_fn(|index| index as u64 * (1 << 17) + 512);
        for round in 0..20 {
            for next in &mut at {
                let plan =
                    pattern.plan(Pfn::new(*next), Touch::Read, area, PageSize::KIB_4).unwrap();
                assert_eq!(plan.follows, round > 0);
                *next = plan.window.end().get();
            }
        }
        assert!(at.iter().enumerate().all(|(index, at)| at - index as u64 * (1 << 17) > 4096));
    }

    #[test]
    fn a_page_that_is_not_in_the_area_is_not_planned_for() {
        let area = area(100, 200);
        let mut pattern = FaultPattern::new(area, Advice::Auto, pages(16), FaultAround::MAX);
        assert_eq!(pattern.plan(Pfn::new(99), Touch::Read, area, PageSize::KIB_4), None);
        assert_eq!(pattern.plan(Pfn::new(200), Touch::Write, area, PageSize::KIB_4), None);
    }

    #[test]
    fn a_write_gets_its_page_and_changes_no_pattern() {
        let area = area(0, 4096);
        let mut pattern = FaultPattern::new(area, Advice::Auto, pages(16), FaultAround::MAX);
        let plan = pattern.plan(Pfn::new(0), Touch::Write, area, PageSize::KIB_4).unwrap();
        assert_eq!((plan.window.pages().get(), plan.follows), (1, false));
        let plan = pattern.plan(Pfn::new(0), Touch::Read, area, PageSize::KIB_4).unwrap();
        assert_eq!((plan.window.pages().get(), plan.follows), (16, true));
    }

    #[test]
    fn the_size_shrinks_with_waste_and_comes_back_with_use() {
        let area = area(0, 1 << 16);
        let (around, none, half) = (PageCount::new(150), PageCount::ZERO, PageCount::new(75));
        let mut pattern = FaultPattern::new(area, Advice::Auto, pages(16), FaultAround::MAX);
        for left in [8, 4, 2, 1, 1] {
            pattern.measured(around, none);
            assert_eq!(pattern.size(), pages(left));
        }
        let plan = pattern.plan(Pfn::new(5000), Touch::Read, area, PageSize::KIB_4).unwrap();
        assert_eq!(plan.window.pages().get(), 1);
        // Between a quarter and a half nothing changes.
        pattern.measured(around, PageCount::new(50));
        assert_eq!(pattern.size(), pages(1));
        for left in [2, 4, 8, 16, 16] {
            pattern.measured(around, half);
            assert_eq!(pattern.size(), pages(left));
        }
        pattern.measured(PageCount::ZERO, none);
        assert_eq!(pattern.size(), pages(16));
        // Who said what to do is not overruled.
        for advice in [Advice::Normal, Advice::Sequential, Advice::Random] {
            let mut told = FaultPattern::new(area, advice, pages(16), FaultAround::MAX);
            let before = told.size();
            told.measured(around, none);
            assert_eq!(told.size(), before);
        }
    }

    #[test]
    fn what_was_set_can_be_changed() {
        let area = area(0, 1 << 16);
        let mut pattern = FaultPattern::new(area, Advice::Random, pages(16), FaultAround::MAX);
        assert_eq!(pattern.size(), FaultAround::MIN);
        pattern.set(Advice::Normal, pages(32));
        assert_eq!((pattern.advice(), pattern.size()), (Advice::Normal, pages(32)));
        assert_eq!(scan(&mut pattern, area), 2048);
    }
}
