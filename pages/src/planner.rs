//! The pages that a fault maps: [`FaultPlanner`], for the threads that answer the faults of others and for those that
//! answer their own.
//!
//! It remembers where the last faults were, how many each block of 2 MiB has had, and how long faults and pages take,
//! and decides for the next fault which window to offer and whether it continues an earlier window. It is pure: no clock,
//! no system call, no memory but its own. Nothing in it locks: all threads of a mapping share it, and so does a handler
//! of a signal that faults while its thread changes the advice.
//!
//! Cost: a plan looks at eight numbers (`streams.rs`), and at one of the block (`costs.rs`) where the advice is
//! [`Advice::Auto`] and the fault is not in order. Memory: 2 bytes for each block.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::fmt;
use core::ops::Range;
use core::time::Duration;

use crate::addr::{PageSize, Pfn, PfnRange};
use crate::byte_len::ByteLen;
use crate::costs::{Costs, FaultCosts};
use crate::streams::{Stream, Streams};
use crate::sync::{AtomicU16, AtomicU64, Ordering};
use crate::window::FaultAround;

/// How the owner of lazily mapped memory expects it to be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Advice {
    /// Nothing: every window has the size that was set.
    Normal,
    /// Here and there: every fault maps its page and no other.
    Random,
    /// In order: windows double from the size that was set, as long as faults follow each other.
    Sequential,
    /// Wherever it is: each fault, also one that writes, maps the rest of its block of 2 MiB, so that huge
    /// pages can be made of the blocks.
    Blocks,
    /// Find out. Windows double while faults follow each other. Other faults map their page alone, or the
    /// size that was set where that costs the faulting thread nothing, until the faults of their block of
    /// 2 MiB have cost a third to all of the cost of mapping the block, a share that is drawn for each block; then one
    /// maps the rest of it. Readers also map the pages that are ready once a page is.
    #[default]
    Auto,
}

/// How memory is touched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Touch {
    /// It is read: the neighbours of a page that is missing may be mapped along.
    Read,
    /// It is written: a fault gets its page, and no other.
    Write,
}

impl fmt::Display for Touch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Read => "read",
            Self::Write => "write",
        })
    }
}

/// Pages that faults are planned for by themselves, as the kernel does for each of its mappings: no
/// window reaches beyond them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FaultArea {
    /// The pages, by the numbers that faults have.
    pub pages: PfnRange,
    /// The address of the first page, in pages. Windows are aligned by addresses, so that each lies in
    /// one page table.
    pub address: u64,
}

impl FaultArea {
    /// Returns the number to add to the number of a page for its address in pages, wrapping around.
    fn skew(&self) -> u64 {
        self.address.wrapping_sub(self.pages.start().get())
    }

    /// Returns the window of `size` around `fault`, aligned by addresses.
    fn window(&self, size: FaultAround, fault: Pfn, page: PageSize) -> Option<PfnRange> {
        let moved = |pages: PfnRange, by: u64| {
            PfnRange::try_new(Pfn::new(pages.start().get().wrapping_add(by)), pages.pages()).ok()
        };
        let skew = self.skew();
        let fault = Pfn::new(fault.get().wrapping_add(skew));
        let window = size.window(fault, moved(self.pages, skew)?, page)?;
        moved(window, skew.wrapping_neg())
    }
}

/// The answer to one fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FaultPlan {
    /// The pages to offer.
    pub window: PfnRange,
    /// Whether the fault is where an earlier window ended. A thread that reads in order needs the
    /// neighbours next and is best served with the whole window at once; any other waits for
    /// the one page, which then goes first.
    pub follows: bool,
    /// The window behind this one, where faults have been in order for so long that windows do not
    /// grow any more: the pages to put in place while no fault is pending. The caller reports how far it got
    /// ([`FaultPlanner::went_ahead`]). Never a single page: a huge one would hold up the next fault.
    pub ahead: Option<PfnRange>,
    /// Whether the window is the rest of a block whose faults have become too dear ([`Advice::Auto`]): its
    /// neighbours are to be mapped soon, before their block has many more faults.
    pub buys: bool,
    /// The pages that windows of this area do not leave.
    pub area: PfnRange,
}

/// After so many faults in order a window grows.
const GROWS_AFTER: u32 = 2;

const _: () = assert!(GROWS_AFTER <= Stream::MOST_STREAK);

/// Where the last faults of some areas were, and the window that follows from it.
///
/// It distinguishes threads that each read in order: as many as the areas have blocks of 2 MiB, from 8 to
/// 4,096. An area that no thread has touched counts as read up to its start, so the first fault of a scan
/// is in order.
#[derive(Debug)]
pub struct FaultPlanner {
    /// Sorted by their pages. With each, the number of the first of its blocks.
    areas: Vec<(FaultArea, usize)>,
    page: PageSize,
    /// The [`Settings`], in one word.
    settings: AtomicU64,
    streams: Streams,
    /// The faults of each block that were not in order.
    faults: Box<[AtomicU16]>,
    costs: Costs,
}

/// The settings of a planner that can be changed.
#[derive(Clone, Copy, Debug)]
struct Settings {
    advice: Advice,
    size: FaultAround,
    most: FaultAround,
}

impl Settings {
    const ADVICE: [Advice; 5] =
        [Advice::Normal, Advice::Random, Advice::Sequential, Advice::Blocks, Advice::Auto];

    fn to_word(self) -> u64 {
        let shift = |size: FaultAround| u64::from(size.len().get().ilog2());
        self.advice as u64 | shift(self.size) << 8 | shift(self.most) << 16
    }

    fn of_word(word: u64) -> Self {
        let size = |at: u32| FaultAround::try_new(ByteLen::new(1 << (word >> at & 63)));
        let advice = Self::ADVICE.into_iter().find(|advice| *advice as u64 == word & 0xff);
        Self {
            advice: advice.unwrap_or_default(),
            size: size(8).unwrap_or_default(),
            most: size(16).unwrap_or_default(),
        }
    }

    /// Returns the size that a window of a fault starts with where faults are in order.
    fn first(self) -> FaultAround {
        match self.advice {
            Advice::Random => FaultAround::MIN,
            Advice::Blocks => FaultAround::MAX,
            Advice::Normal | Advice::Sequential | Advice::Auto => self.size,
        }
    }

    /// Returns log2 of the pages of the window for a fault that goes on where `stream` ended.
    fn grown(self, stream: Stream, page: PageSize) -> u32 {
        let grows = match self.advice {
            Advice::Normal | Advice::Random | Advice::Blocks => false,
            Advice::Sequential => true,
            Advice::Auto => stream.streak() >= GROWS_AFTER,
        };
        if grows { (stream.order() + 1).min(order(self.most, page)) } else { stream.order() }
    }

    /// Returns whether windows grow while faults follow each other.
    fn grows(self) -> bool {
        matches!(self.advice, Advice::Sequential | Advice::Auto)
    }
}

/// Returns log2 of the pages of a window.
fn order(size: FaultAround, page: PageSize) -> u32 {
    size.pages(page).get().ilog2()
}

impl FaultPlanner {
    /// Takes the facts about areas before their first fault. Windows grow up to `most`. Until costs were measured,
    /// `costs` count.
    #[must_use]
    pub fn new(
        areas: &[FaultArea],
        page: PageSize,
        advice: Advice,
        size: FaultAround,
        most: FaultAround,
        costs: FaultCosts,
    ) -> Self {
        let mut sorted = areas.to_vec();
        sorted.sort_by_key(|area| area.pages.start());
        let shift = FaultAround::MAX.pages(page).get().ilog2();
        let mut blocks = 0;
        let areas: Vec<_> = sorted
            .into_iter()
            .map(|area| {
                let first = blocks;
                let last = area.address.wrapping_add(area.pages.pages().get() - 1);
                let count = (last >> shift).wrapping_sub(area.address >> shift).saturating_add(1);
                // A page that is a block by itself has no neighbours.
                if shift > 0 {
                    blocks += usize::try_from(count).unwrap_or(0);
                }
                (area, first)
            })
            .collect();
        let streams = Streams::new(blocks);
        for (area, _) in &areas {
            streams.put(area.pages.start(), Stream::new(order(size, page)));
        }
        let faults = (0..blocks).map(|_| AtomicU16::new(0)).collect();
        let settings = Settings { advice, size, most: most.max(size) };
        let settings = AtomicU64::new(settings.to_word());
        Self { areas, page, settings, streams, faults, costs: Costs::new(costs) }
    }

    fn settings(&self) -> Settings {
        // Relaxed: one word, and a fault that comes meanwhile may be answered by either.
        Settings::of_word(self.settings.load(Ordering::Relaxed))
    }

    /// Returns the advice.
    #[must_use]
    pub fn advice(&self) -> Advice {
        self.settings().advice
    }

    /// Returns the size that a window of a fault starts with where faults are in order.
    #[must_use]
    pub fn size(&self) -> FaultAround {
        self.settings().first()
    }

    /// Changes the settings.
    pub fn set(&self, advice: Advice, size: FaultAround) {
        let settings = Settings { advice, size, most: self.settings().most.max(size) };
        // Relaxed: as in `settings`.
        self.settings.store(settings.to_word(), Ordering::Relaxed);
        self.streams.restart(order(size, self.page));
    }

    /// Returns the area of a page, and the number of the first of its blocks.
    fn area_of(&self, pfn: Pfn) -> Option<(FaultArea, usize)> {
        let after = self.areas.partition_point(|(area, _)| area.pages.start() <= pfn);
        let found = self.areas.get(after.checked_sub(1)?)?;
        found.0.pages.contains(pfn).then_some(*found)
    }

    /// Returns the number of the block of a page of `area`.
    fn block(&self, (area, first): (FaultArea, usize), pfn: Pfn) -> usize {
        let shift = FaultAround::MAX.pages(self.page).get().ilog2();
        let block = (pfn.get().wrapping_add(area.skew()) >> shift) - (area.address >> shift);
        first.saturating_add(usize::try_from(block).unwrap_or(usize::MAX))
    }

    /// Returns the pages of the area that a page is in, or `None` if it is in none.
    #[must_use]
    pub fn area(&self, pfn: Pfn) -> Option<PfnRange> {
        self.area_of(pfn).map(|(area, _)| area.pages)
    }

    /// Notes how long a fault took that was answered with one page, from one touch to the next.
    pub fn fault_took(&self, time: Duration) {
        self.costs.fault_took(time);
    }

    /// Notes how long it took to map so many pages at once.
    pub fn pages_took(&self, pages: u64, time: Duration) {
        self.costs.pages_took(pages, time);
    }

    /// Returns the answer to a fault on the page `fault`, or `None` if it is in no area. With `is_parallel`, neighbours
    /// are mapped on another CPU while the faulting thread is woken. Then a few of them cost it nothing, and a fault
    /// that is not in order gets a window of the size that was set.
    #[must_use]
    pub fn plan(&self, fault: Pfn, touch: Touch, is_parallel: bool) -> Option<FaultPlan> {
        let (area, first_block) = self.area_of(fault)?;
        let (page, settings) = (self.page, self.settings());
        let is_by_block = settings.advice == Advice::Blocks;
        if touch == Touch::Write && !is_by_block || settings.advice == Advice::Random {
            let window = area.window(FaultAround::MIN, fault, page)?;
            let (follows, ahead, buys) = (false, None, false);
            return Some(FaultPlan { window, follows, ahead, buys, area: area.pages });
        }
        let most = if settings.grows() { order(settings.most, page) } else { 0 };
        let known = self.streams.follow(fault, most, |before| settings.grown(before, page));
        let size = match known {
            Some(stream) if !is_by_block => FaultAround::of_pages(stream.order(), page),
            _ => settings.first(),
        };
        let mut window = area.window(size, fault, page)?;
        let mut buys = is_by_block && known.is_none();
        if known.is_none() && settings.advice == Advice::Auto {
            buys = self.buys(self.block((area, first_block), fault));
            if buys || !is_parallel {
                let size = if buys { FaultAround::MAX } else { FaultAround::MIN };
                window = area.window(size, fault, page)?;
            }
        }
        let stream = known.unwrap_or_else(|| Stream::new(order(size, page)));
        self.streams.put(window.end(), stream);
        let ahead = self.ahead(window, stream, settings, area);
        let follows = known.is_some();
        Some(FaultPlan { window, follows, ahead, buys, area: area.pages })
    }

    /// Counts a fault of a block that is not in order. Returns whether it maps the rest of the block.
    fn buys(&self, block: usize) -> bool {
        let Some(count) = self.faults.get(block) else { return false };
        // Relaxed: a hint, of which a fault of another thread may be lost.
        let faults = count.load(Ordering::Relaxed).saturating_add(1);
        count.store(faults, Ordering::Relaxed);
        let pages = FaultAround::MAX.pages(self.page).get();
        self.costs.get().buys(block as u64, u64::from(faults), pages)
    }

    /// Returns the window behind that of a stream, if it is worth to be put in place. Whether the reader goes on is
    /// not known, so it is for a thread that has read for long.
    fn ahead(
        &self,
        window: PfnRange,
        stream: Stream,
        settings: Settings,
        area: FaultArea,
    ) -> Option<PfnRange> {
        let is_largest = stream.order() > 0 && stream.order() == order(settings.most, self.page);
        if !is_largest || stream.streak() < GROWS_AFTER || settings.advice == Advice::Normal {
            return None;
        }
        // The window behind this one is aligned, and begins before this one ends where that is not.
        let size = FaultAround::of_pages(stream.order(), self.page);
        let behind = area.window(size, window.end(), self.page)?;
        PfnRange::try_new(window.end(), behind.end().checked_since(window.end())?).ok()
    }

    /// Notes that pages were put in place ahead ([`FaultPlan::ahead`]), some at a time from its first on:
    /// a thread that reads in order faults behind them.
    pub fn went_ahead(&self, placed: PfnRange) {
        self.streams.moved(placed.start(), placed.end());
    }

    /// Notes that of a window that was planned ([`FaultPlan::window`]) only the pages before `end` are offered:
    /// a thread that reads in order faults there.
    pub fn went_only_to(&self, end: Pfn, window: PfnRange) {
        self.streams.moved(window.end(), end);
    }

    /// Notes that pages were given back, so that their blocks count as untouched.
    pub fn gave_back(&self, pages: PfnRange) {
        let last = Pfn::new(pages.end().get() - 1); // a range has a page
        if let (Some(first), Some(end)) = (self.area_of(pages.start()), self.area_of(last)) {
            let blocks: Range<usize> = self.block(first, pages.start())..self.block(end, last) + 1;
            for count in self.faults.get(blocks).unwrap_or_default() {
                count.store(0, Ordering::Relaxed); // a hint
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::addr::PageCount;
    use crate::byte_len::ByteLen;

    const COSTS: FaultCosts = FaultCosts { fault_ns: 5_200, page_ns: 1_400 };

    /// A planner of an area whose addresses are the numbers of its pages.
    fn of_area(
        area: PfnRange,
        advice: Advice,
        size: FaultAround,
        most: FaultAround,
    ) -> FaultPlanner {
        let area = FaultArea { pages: area, address: area.start().get() };
        FaultPlanner::new(&[area], PageSize::KIB_4, advice, size, most, COSTS)
    }

    fn area(start: u64, end: u64) -> PfnRange {
        PfnRange::try_new(Pfn::new(start), PageCount::new(end - start)).unwrap()
    }

    fn pages(pages: u64) -> FaultAround {
        FaultAround::try_new(ByteLen::new(pages * 4096)).unwrap()
    }

    /// Faults on the first page that is not mapped, as a scan does, and counts the faults.
    fn scan(planner: &FaultPlanner, area: PfnRange) -> u64 {
        let mut faults = 0;
        let mut at = area.start();
        while area.contains(at) {
            let plan = planner.plan(at, Touch::Read, false).unwrap();
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
            let planner = of_area(area, Advice::Normal, size, FaultAround::MAX);
            assert_eq!(scan(&planner, area), 4101_u64.div_ceil(1 << order), "order {order}");
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "arithmetic, and long")]
    fn windows_of_a_scan_grow_if_that_is_advised_or_found_out() {
        let area = area(0, 1 << 16);
        let faults = |advice| scan(&of_area(area, advice, pages(16), FaultAround::MAX), area);
        assert_eq!(faults(Advice::Normal), 4096);
        assert_eq!(faults(Advice::Random), 65536);
        // 16, 32, 64, 128, 256 from 0, each up to an aligned end, and then 512 at a time.
        assert!(faults(Advice::Sequential) <= 128 + 8, "{}", faults(Advice::Sequential));
        assert!(faults(Advice::Auto) <= 128 + 16, "{}", faults(Advice::Auto));
    }

    #[test]
    fn a_scan_goes_on_where_a_window_was_cut() {
        let area = area(0, 4096);
        let planner = of_area(area, Advice::Sequential, pages(64), FaultAround::MAX);
        let mut at = Pfn::new(0);
        for _ in 0..20 {
            let plan = planner.plan(at, Touch::Read, false).unwrap();
            assert!(plan.follows, "{at:?}");
            at = at.checked_add(PageCount::new(16)).unwrap();
            planner.went_only_to(at, plan.window);
        }
        assert!(!planner.plan(Pfn::new(3000), Touch::Read, false).unwrap().follows);
    }

    #[test]
    fn what_comes_next_is_installed_for_a_reader_that_has_read_for_long() {
        let area = area(0, 512 * 5 + 100);
        let plan = |planner: &FaultPlanner, at: u64| {
            planner.plan(Pfn::new(at), Touch::Read, false).unwrap()
        };
        let window =
            |start: u64, end| PfnRange::try_new(Pfn::new(start), PageCount::new(end - start));
        for advice in [Advice::Normal, Advice::Random, Advice::Sequential, Advice::Auto] {
            let planner = of_area(area, advice, pages(16), FaultAround::MAX);
            let grows = matches!(advice, Advice::Sequential | Advice::Auto);
            let mut at = 0;
            while at < 1024 {
                let plan = plan(&planner, at);
                assert!(
                    plan.ahead.is_none() || at >= 256 && grows,
                    "{advice:?}: windows grow still"
                );
                at = plan.window.end().get();
            }
            let ahead = |start, end| window(start, end).ok().filter(|_| grows);
            assert_eq!(plan(&planner, 1024).ahead, ahead(1536, 2048));
            if grows {
                // It was put in place up to some page, and is read on from there.
                planner.went_ahead(window(1536, 1600).unwrap());
                planner.went_ahead(window(1600, 1700).unwrap());
                let on = plan(&planner, 1700);
                assert_eq!((on.follows, Some(on.window)), (true, window(1536, 2048).ok()));
                assert_eq!(on.ahead, window(2048, 2560).ok());
                // All of it was.
                planner.went_ahead(window(2048, 2560).unwrap());
                let on = plan(&planner, 2560);
                assert_eq!((on.follows, Some(on.window)), (true, window(2560, 2660).ok()));
                assert_eq!(on.ahead, None, "the area ends");
            }
        }
        // A touch where nothing was put in place is not in order.
        let planner = of_area(area, Advice::Auto, FaultAround::MAX, FaultAround::MAX);
        assert_eq!(plan(&planner, 0).ahead, None, "no thread has read for long");
        assert_eq!(plan(&planner, 512).ahead, window(1024, 1536).ok());
        assert!(!plan(&planner, 1200).follows);
        let huge_page = PageSize::try_from_bytes(2 << 20).unwrap();
        let areas = [FaultArea { pages: area, address: 0 }];
        let (size, most) = (pages(16), FaultAround::MAX);
        let huge = FaultPlanner::new(&areas, huge_page, Advice::Sequential, size, most, COSTS);
        for at in 0..100 {
            let plan = plan(&huge, at);
            assert_eq!((plan.follows, plan.ahead), (true, None));
        }
    }

    #[test]
    fn eight_scans_at_once_are_distinguished() {
        let area = area(0, 1 << 20);
        let planner = of_area(area, Advice::Auto, pages(16), FaultAround::MAX);
        let mut at: [u64; 8] = core::array::from_fn(|index| index as u64 * (1 << 17) + 512);
        for round in 0..20 {
            for next in &mut at {
                let plan = planner.plan(Pfn::new(*next), Touch::Read, false).unwrap();
                assert_eq!(plan.follows, round > 0);
                *next = plan.window.end().get();
            }
        }
        assert!(at.iter().enumerate().all(|(index, at)| at - index as u64 * (1 << 17) > 4096));
    }

    #[test]
    #[cfg_attr(miri, ignore = "arithmetic, and long")]
    fn as_many_scans_as_a_large_machine_has_cpus_fault_as_often_as_one() {
        // 8 GiB, whose parts start somewhere in a block, as a program divides its memory.
        let area = area(0, 1 << 21);
        for advice in [Advice::Normal, Advice::Sequential, Advice::Auto] {
            let one = scan(&of_area(area, advice, pages(16), FaultAround::MAX), area);
            for scans in [9_u64, 16, 120] {
                let planner = of_area(area, advice, pages(16), FaultAround::MAX);
                let start = |scan: u64| area.pages().get() / scans * scan;
                let mut at: Vec<_> =
                    (0..scans).map(|scan| (start(scan), start(scan + 1))).collect();
                let mut faults = 0;
                while at.iter().any(|(at, end)| at < end) {
                    for (at, _) in at.iter_mut().filter(|(at, end)| at < end) {
                        faults += 1;
                        let plan = planner.plan(Pfn::new(*at), Touch::Read, false).unwrap();
                        *at = plan.window.end().get();
                    }
                }
                assert!(faults * 10 <= one * 11, "{advice:?}, {scans}: {faults}, and {one} of one");
            }
        }
    }

    #[test]
    fn each_fault_maps_what_its_area_has_of_the_block_if_that_is_advised() {
        // Addresses are 200 pages behind a block of 512.
        let areas = [FaultArea { pages: area(1000, 2500), address: 512 * 7 + 200 }];
        let (small, most) = (pages(16), FaultAround::DEFAULT);
        let planner =
            FaultPlanner::new(&areas, PageSize::KIB_4, Advice::Blocks, small, most, COSTS);
        assert_eq!(planner.size(), FaultAround::MAX);
        for (fault, touch, window, follows) in [
            (1900, Touch::Write, (1824, 2336), false),
            (1400, Touch::Read, (1312, 1824), false),
            (1824, Touch::Read, (1824, 2336), true),
            (2400, Touch::Write, (2336, 2500), false),
            (1311, Touch::Write, (1000, 1312), false),
        ] {
            let plan = planner.plan(Pfn::new(fault), touch, false).unwrap();
            assert_eq!(plan.window, area(window.0, window.1), "fault {fault}");
            assert_eq!((plan.follows, plan.buys), (follows, !follows), "fault {fault}");
        }
        let huge = PageSize::try_from_bytes(2 << 20).unwrap();
        let areas = [FaultArea { pages: area(0, 9), address: 0 }];
        let planner = FaultPlanner::new(&areas, huge, Advice::Blocks, small, most, COSTS);
        assert_eq!(planner.plan(Pfn::new(5), Touch::Write, false).unwrap().window, area(5, 6));
    }

    #[test]
    fn a_write_gets_its_page_and_changes_no_plan() {
        let area = area(0, 4096);
        let planner = of_area(area, Advice::Auto, pages(16), FaultAround::MAX);
        let plan = planner.plan(Pfn::new(0), Touch::Write, false).unwrap();
        assert_eq!((plan.window.pages().get(), plan.follows), (1, false));
        let plan = planner.plan(Pfn::new(0), Touch::Read, false).unwrap();
        assert_eq!((plan.window.pages().get(), plan.follows), (16, true));
    }

    #[test]
    fn what_was_set_can_be_changed() {
        let area = area(0, 1 << 16);
        let planner = of_area(area, Advice::Random, pages(16), FaultAround::MAX);
        assert_eq!(planner.size(), FaultAround::MIN);
        planner.set(Advice::Normal, pages(32));
        assert_eq!((planner.advice(), planner.size()), (Advice::Normal, pages(32)));
        assert_eq!(scan(&planner, area), 2048);
    }

    #[test]
    fn a_window_is_placed_by_addresses_and_does_not_leave_its_area() {
        // Two regions that are neighbours in the backing, and lie elsewhere: windows of 256 pages.
        let size = pages(256);
        let areas = [
            FaultArea { pages: area(311, 1000), address: 5 * 512 + 55 },
            FaultArea { pages: area(1000, 2000), address: 512 },
        ];
        let planner = FaultPlanner::new(
            &areas,
            PageSize::KIB_4,
            Advice::Normal,
            size,
            FaultAround::MAX,
            COSTS,
        );
        for (fault, window) in [
            // Address 2615 is the first of the area; the next multiple of 256 is 2816, 201 pages on.
            (311, (311, 311 + 256)),
            (311 + 201, (512, 512 + 256)),
            (999, (768, 1000)),
            (1000, (1000, 1256)),
            (1255, (1000, 1256)),
            (1256, (1256, 1512)),
        ] {
            let plan = planner.plan(Pfn::new(fault), Touch::Read, false).unwrap();
            let (start, end) = window;
            assert_eq!(plan.window, area(start, end), "fault {fault}");
        }
        assert_eq!(planner.plan(Pfn::new(310), Touch::Read, false), None);
        assert_eq!(planner.plan(Pfn::new(2000), Touch::Write, false), None);
    }

    #[test]
    fn a_block_that_was_given_back_starts_again_with_one_page() {
        let area = area(100, 5000);
        let planner = of_area(area, Advice::Auto, pages(16), FaultAround::MAX);
        let window = |planner: &FaultPlanner, at: u64| {
            let plan = planner.plan(Pfn::new(at), Touch::Read, false).unwrap();
            assert!(!plan.follows && plan.buys == (plan.window.pages().get() > 1));
            plan.window.pages().get()
        };
        // Backwards, and so never in order.
        let grown = (600..1000).rev().step_by(2).map(|at| window(&planner, at)).max();
        assert_eq!(grown, Some(512));
        assert_eq!(window(&planner, 3000), 1, "another block");
        planner.gave_back(PfnRange::try_new(Pfn::new(512), PageCount::new(512)).unwrap());
        assert_eq!(window(&planner, 700), 1);
        planner.gave_back(area);
        // Where neighbours are mapped meanwhile, the window that was set is the smallest.
        let plan = planner.plan(Pfn::new(3000), Touch::Read, true).unwrap();
        assert_eq!((plan.window.pages().get(), plan.buys), (16, false));
        let grown = (2100..2500)
            .rev()
            .step_by(2)
            .map(|at| planner.plan(Pfn::new(at), Touch::Read, true).unwrap())
            .find(|plan| plan.buys);
        assert_eq!(
            grown.unwrap().window,
            PfnRange::try_new(Pfn::new(2048), PageCount::new(512)).unwrap()
        );
    }
}
