//! All operations of a pagemap in random order agree with a plain oracle that keeps a list of
//! holders, a set of bad pages and a content for each page.
#![allow(clippy::cast_possible_truncation, reason = "the ranges of the tests are small")]

use std::collections::{BTreeMap, BTreeSet};

use crate::common::range;
use proptest::prelude::*;
use uzone_pages::{
    AdvanceError, ByteLen, Content, HoldError, MemoryKind, Order, PageCount, Pfn, PfnRange, Tails,
};
use uzone_zone::{
    BindOptions, Pagemap, PinError, PinOptions, Pinned, PinnedRanges, RawGuard, Redeemed,
    Referenced, Region, Zone,
};

const BASE: u64 = 0x1000;
const PAGES: u64 = 2048;

enum Guard {
    Pinned(Pinned),
    Referenced(Referenced),
    Raw(RawGuard, PfnRange, bool),
}

impl Guard {
    fn range(&self) -> PfnRange {
        match self {
            Self::Pinned(pinned) => pinned.range(),
            Self::Referenced(referenced) => referenced.range(),
            Self::Raw(_, range, _) => *range,
        }
    }

    fn is_pin(&self) -> bool {
        match self {
            Self::Pinned(_) => true,
            Self::Referenced(_) => false,
            Self::Raw(_, _, is_pin) => *is_pin,
        }
    }
}

#[derive(Clone, Debug)]
enum Step {
    Hold { start: u64, pages: u64, is_pin: bool, by: u8 },
    Drop { which: usize },
    Split { which: usize, at: u64 },
    Clone { which: usize },
    Raw { which: usize },
    Poison { page: u64 },
    Unpoison { page: u64 },
    Advance { page: u64, to: Content },
    Unbind { keeps_poison: bool },
}

fn step() -> impl Strategy<Value = Step> {
    let place = prop_oneof![
        (0..4_u64, 0..5_u64).prop_map(|(block, offset)| (block * 512 + offset).saturating_sub(2)),
        0..PAGES
    ];
    prop_oneof![
        8 => (place.clone(), place.clone(), any::<bool>(), 0..3_u8)
            .prop_map(|(start, pages, is_pin, by)| Step::Hold { start, pages, is_pin, by }),
        5 => any::<usize>().prop_map(|which| Step::Drop { which }),
        3 => (any::<usize>(), place.clone()).prop_map(|(which, at)| Step::Split { which, at }),
        2 => any::<usize>().prop_map(|which| Step::Clone { which }),
        2 => any::<usize>().prop_map(|which| Step::Raw { which }),
        2 => place.clone().prop_map(|page| Step::Poison { page }),
        2 => place.clone().prop_map(|page| Step::Unpoison { page }),
        3 => (place, (0..7_u64).prop_map(Content::from_bits))
            .prop_map(|(page, to)| Step::Advance { page, to }),
        1 => any::<bool>().prop_map(|keeps_poison| Step::Unbind { keeps_poison }),
    ]
}

struct Machine {
    zone: Zone,
    pagemap: Option<Pagemap>,
    order: Order,
    tails: Tails,
    guards: Vec<Guard>,
    bad: BTreeSet<u64>,
    /// Contents that are not unknown, by the first page of the folio.
    contents: BTreeMap<u64, Content>,
}

impl Machine {
    fn new(order: u8, tails: Tails) -> Self {
        let mut machine = Self {
            zone: Zone::new(),
            pagemap: None,
            order: Order::new(order),
            tails,
            guards: Vec::new(),
            bad: BTreeSet::new(),
            contents: BTreeMap::new(),
        };
        let region = Region::anonymous(ByteLen::new(PAGES * 4096)).unwrap();
        machine.bind(region, false);
        machine
    }

    fn bind(&mut self, region: Region, keeps_poison: bool) {
        let options = BindOptions::new(MemoryKind::Generic)
            .order(self.order)
            .tails(self.tails)
            .base(Pfn::new(BASE));
        let options = if keeps_poison { options.keep_poison() } else { options };
        self.pagemap = Some(self.zone.bind(region, options).unwrap());
        self.contents.clear();
        if !keeps_poison {
            self.bad.clear();
        }
    }

    fn pagemap(&self) -> &Pagemap {
        self.pagemap.as_ref().unwrap()
    }

    fn head(&self, page: u64) -> u64 {
        Pfn::new(page).align_down(self.order).get()
    }

    fn content(&self, page: u64) -> Content {
        let content = self.contents.get(&self.head(page)).copied().unwrap_or(Content::Unknown);
        // Who clears or fills a page goes on until the next step.
        let is_lost = self.order == Order::BASE && self.bad.contains(&page) && !content.is_owned();
        if is_lost { Content::Poisoned } else { content }
    }

    /// Why a pin of `asked` is refused, if it is: the first page in the way, and whether it is bad.
    fn obstacle(&self, asked: PfnRange) -> Option<(u64, Option<Content>)> {
        asked.iter().map(Pfn::get).find_map(|page| {
            let content = self.content(page);
            if content == Content::Zero {
                return self.bad.contains(&page).then_some((page, None));
            }
            if content != Content::Poisoned && !content.is_pinnable() {
                // A folio is refused from the first page of it that is asked for.
                return Some((page, Some(content)));
            }
            self.bad.contains(&page).then_some((page, None))
        })
    }

    /// What a pin does to pages that are known to be zero: if it is given, they are its holder's. If it
    /// is refused for another page, they may be or not.
    fn take_zero(&mut self, asked: PfnRange, is_given: bool) {
        let pagemap = self.pagemap.as_ref().unwrap();
        for (page, content) in &mut self.contents {
            let pages = PfnRange::try_new(Pfn::new(*page), self.order.pages()).unwrap();
            if *content == Content::Zero && pages.overlaps(asked) {
                *content = pagemap.page(Pfn::new(*page)).unwrap().word().content();
                assert!(*content == Content::Present || *content == Content::Zero && !is_given);
            }
        }
    }

    fn hold(&mut self, asked: PfnRange, is_pin: bool, by: u8) {
        let pagemap = self.pagemap.take().unwrap();
        let address = pagemap.region().addr().get() + (asked.start().get() - BASE) as usize * 4096;
        let len = ByteLen::new(asked.pages().get() * 4096);
        let pinned = |ranges: PinnedRanges<_>| Guard::Pinned(ranges.into_single().unwrap());
        let referenced = |ranges: PinnedRanges<_>| Guard::Referenced(ranges.into_single().unwrap());
        let options = PinOptions::default().without_faults();
        let guard = match (is_pin, by) {
            (true, 0) => pagemap.pin(asked).map(Guard::Pinned),
            (true, 1) => self.zone.pin(address, len).map(pinned),
            (true, _) => self.zone.pin_with(address, len, options).map(pinned),
            (false, 0) => pagemap.get(asked).map(Guard::Referenced),
            (false, _) => self.zone.get(address, len).map(referenced),
        };
        self.pagemap = Some(pagemap);
        self.check_held(asked, is_pin, guard);
    }

    fn check_held(&mut self, asked: PfnRange, is_pin: bool, guard: Result<Guard, PinError>) {
        let obstacle = if is_pin { self.obstacle(asked) } else { None };
        if is_pin {
            self.take_zero(asked, guard.is_ok());
        }
        match (guard, obstacle) {
            (Ok(guard), None) => {
                assert_eq!(guard.range(), asked);
                self.guards.push(guard);
            }
            (Err(PinError::Poisoned { pfn, good }), Some((page, None))) => {
                assert_eq!(pfn.get(), page);
                let good: u64 = good.iter().map(|piece| piece.pages().get()).sum();
                let bad = asked.iter().filter(|pfn| self.bad.contains(&pfn.get())).count();
                assert_eq!(good + bad as u64, asked.pages().get());
            }
            (
                Err(PinError::Refused { pfn, good, cause: HoldError::Content(found) }),
                Some((page, Some(content))),
            ) => {
                assert_eq!((pfn.get(), found), (page, content));
                assert_eq!(good.get(), page - asked.start().get());
            }
            (Err(failure), obstacle) => panic!("{failure}, but {obstacle:?}"),
            (Ok(_), Some(obstacle)) => panic!("held in spite of {obstacle:?}"),
        }
    }

    fn apply(&mut self, step: &Step) {
        match *step {
            Step::Hold { start, pages, is_pin, by } => {
                let asked = range(BASE + start, 1 + pages % (PAGES - start));
                self.hold(asked, is_pin, by);
            }
            Step::Drop { which } if !self.guards.is_empty() => {
                let guard = self.guards.swap_remove(which % self.guards.len());
                if let Guard::Raw(raw, range, is_pin) = guard {
                    match self.zone.redeem(raw).unwrap() {
                        Redeemed::Pinned(pinned) => {
                            assert_eq!((pinned.range(), true), (range, is_pin));
                        }
                        Redeemed::Referenced(held) => {
                            assert_eq!((held.range(), false), (range, is_pin));
                        }
                    }
                    assert!(self.zone.redeem(raw).is_err());
                }
            }
            Step::Split { which, at } if !self.guards.is_empty() => {
                let guard = self.guards.swap_remove(which % self.guards.len());
                let at = PageCount::new(at % (guard.range().pages().get() + 1));
                let is_inside = at.get() != 0 && at != guard.range().pages();
                let halves = match guard {
                    Guard::Pinned(pinned) => pinned
                        .split(at)
                        .map(|(first, second)| [first, second].map(Guard::Pinned))
                        .map_err(|(whole, _)| Guard::Pinned(whole)),
                    Guard::Referenced(referenced) => referenced
                        .split(at)
                        .map(|(first, second)| [first, second].map(Guard::Referenced))
                        .map_err(|(whole, _)| Guard::Referenced(whole)),
                    raw @ Guard::Raw(..) => Err(raw),
                };
                match halves {
                    Ok(halves) => {
                        assert!(is_inside && halves[0].range().pages() == at);
                        self.guards.extend(halves);
                    }
                    Err(whole) => {
                        assert!(!is_inside || matches!(whole, Guard::Raw(..)));
                        self.guards.push(whole);
                    }
                }
            }
            Step::Clone { which } if !self.guards.is_empty() => {
                let which = which % self.guards.len();
                let asked = self.guards[which].range();
                let again = match &self.guards[which] {
                    Guard::Pinned(pinned) => pinned.try_clone().map(Guard::Pinned),
                    Guard::Referenced(referenced) => referenced.try_clone().map(Guard::Referenced),
                    Guard::Raw(..) => return,
                };
                let is_pin = self.guards[which].is_pin();
                self.check_held(asked, is_pin, again);
            }
            Step::Raw { which } if !self.guards.is_empty() => {
                let guard = self.guards.swap_remove(which % self.guards.len());
                let (range, is_pin) = (guard.range(), guard.is_pin());
                let raw = match guard {
                    Guard::Pinned(pinned) => pinned.into_raw().unwrap(),
                    Guard::Referenced(referenced) => referenced.into_raw().unwrap(),
                    Guard::Raw(raw, ..) => raw,
                };
                self.guards.push(Guard::Raw(raw, range, is_pin));
            }
            Step::Poison { page } => {
                let page = BASE + page;
                let poisoned = self.pagemap().poison(Pfn::new(page));
                if self.bad.insert(page) {
                    let poisoned = poisoned.unwrap();
                    let pins = self.counts(page).0;
                    assert!(poisoned.pins >= pins, "{} reported, {pins} there", poisoned.pins);
                    if self.order == Order::BASE && !self.content(page).is_owned() {
                        self.contents.remove(&page);
                    }
                } else {
                    assert_eq!(poisoned, Err(PinError::AlreadyPoisoned { pfn: Pfn::new(page) }));
                }
            }
            Step::Unpoison { page } => {
                let page = BASE + page;
                let unpoisoned = self.pagemap().unpoison(Pfn::new(page));
                let is_owned =
                    self.contents.get(&self.head(page)).is_some_and(|content| content.is_owned());
                if self.bad.contains(&page) && is_owned {
                    assert_eq!(unpoisoned, Err(PinError::Owned { pfn: Pfn::new(page) }));
                } else {
                    assert_eq!(unpoisoned.is_ok(), self.bad.remove(&page));
                    if unpoisoned.is_ok() && self.content(page) == Content::Zero {
                        self.contents.remove(&self.head(page));
                    }
                }
            }
            Step::Advance { page, to } => {
                let page = BASE + page;
                let from = self.content(page);
                match self.pagemap().advance(Pfn::new(page), from, to) {
                    // Only unpoisoning makes a bad page good: the list would still have it.
                    Ok(()) if from == Content::Poisoned => {
                        self.pagemap().advance(Pfn::new(page), to, Content::Poisoned).unwrap();
                    }
                    Ok(()) => {
                        assert!(from.may_become(to));
                        self.contents.insert(self.head(page), to);
                    }
                    Err(AdvanceError::Found { found: Content::Poisoned, .. }) => {
                        assert!(self.bad.contains(&page) && from.is_owned());
                        self.contents.remove(&page);
                    }
                    Err(AdvanceError::Illegal { .. }) => assert!(!from.may_become(to)),
                    Err(AdvanceError::Pinned { pins }) => {
                        assert!(pins > 0 && from.is_pinnable() && !to.is_pinnable());
                        assert!(self.guards.iter().any(Guard::is_pin));
                    }
                    Err(other) => panic!("{other}"),
                }
            }
            Step::Unbind { keeps_poison } => match self.pagemap.take().unwrap().unbind() {
                Ok(region) => {
                    assert!(self.guards.is_empty());
                    let bad: Vec<u64> = region.bad_pages().iter().map(|page| page.get()).collect();
                    assert!(self.bad.iter().map(|page| page - BASE).eq(bad));
                    self.bind(region, keeps_poison);
                }
                Err(busy) => {
                    let pins = self.guards.iter().filter(|guard| guard.is_pin()).count();
                    assert_eq!(busy.pins as usize, pins);
                    assert_eq!(busy.references as usize, self.guards.len() - pins);
                    self.pagemap = Some(*busy.pagemap);
                }
            },
            _ => {}
        }
    }

    /// How many guards hold the page itself: pins, and references.
    fn counts(&self, page: u64) -> (u32, u32) {
        let holders = self.guards.iter().filter(|guard| guard.range().contains(Pfn::new(page)));
        holders.fold((0, 0), |(pins, references), guard| {
            if guard.is_pin() { (pins + 1, references) } else { (pins, references + 1) }
        })
    }

    fn check(&self) {
        // The edges of guards and of blocks, and a few in between.
        let edges = self
            .guards
            .iter()
            .flat_map(|guard| [guard.range().start().get(), guard.range().end().get() - 1]);
        for page in edges.chain((0..PAGES).step_by(127).map(|page| BASE + page)) {
            let word = self.pagemap().page(Pfn::new(page)).unwrap().word();
            let (pins, references) = self.counts(page);
            assert!(word.pins() >= pins, "page {page:#x}");
            assert!(word.references() > references, "page {page:#x}");
            assert_eq!(word.content(), self.content(page), "page {page:#x}");
            assert_eq!(self.pagemap().is_poisoned(Pfn::new(page)), self.bad.contains(&page));
        }
    }

    fn finish(mut self) {
        for guard in self.guards.drain(..) {
            if let Guard::Raw(raw, ..) = guard {
                drop(self.zone.redeem(raw).unwrap());
            }
        }
        let pagemap = self.pagemap.take().unwrap();
        for page in pagemap.pages() {
            assert_eq!((page.word().pins(), page.word().references()), (0, 1), "{:?}", page.pfn());
        }
        assert!(pagemap.unbind().is_ok());
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 512,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn random_operations_agree_with_a_list_of_holders(
        order in prop_oneof![Just(0_u8), Just(3), Just(9)],
        tails in prop_oneof![Just(Tails::Derived), Just(Tails::Stored)],
        steps in prop::collection::vec(step(), 1..80),
    ) {
        let mut machine = Machine::new(order, tails);
        for step in &steps {
            machine.apply(step);
            machine.check();
        }
        machine.finish();
    }
}
