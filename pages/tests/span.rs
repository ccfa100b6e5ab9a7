//! Random operations on ranges of pages agree with a plain oracle that counts page by page, with
//! blocks and without, and whatever is refused leaves no trace.
#![cfg(not(loom))]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(clippy::cast_possible_truncation, reason = "the ranges of the tests are small")]

use std::collections::BTreeSet;

use proptest::prelude::*;
use uzone_pages::{
    AddrError, AdvanceError, BLOCK_ORDER, Block, Content, Folio, HoldError, HoldKind, Layout,
    Memmap, MemoryKind, Order, Page, PageCount, Pfn, PfnRange, Span, Tails, Word,
};

type Blocked = Memmap<(), Vec<Page>, Vec<Block>>;

fn range(start: u64, pages: u64) -> PfnRange {
    PfnRange::try_new(Pfn::new(start), PageCount::new(pages)).unwrap()
}

fn memmap(range: PfnRange) -> Blocked {
    let layout = Layout::try_new(range, Order::BASE, Tails::Derived).unwrap();
    let descriptors: Vec<Page> = range.iter().map(|_| Page::new(())).collect();
    let blocks = (0..Block::count(range).get()).map(|_| Block::default()).collect();
    Memmap::try_new(layout, MemoryKind::Generic, descriptors).unwrap().with_blocks(blocks).unwrap()
}

fn hold(memmap: &Blocked, range: PfnRange, sort: HoldKind) -> Result<Span, (Pfn, HoldError)> {
    memmap.hold(range, sort, |_| None)
}

/// One page as it is counted alone.
#[derive(Clone, Debug)]
struct Plain {
    references: u32,
    pins: u32,
    content: Content,
    is_poison_pending: bool,
}

impl Plain {
    const FRESH: Self =
        Self { references: 1, pins: 0, content: Content::Unknown, is_poison_pending: false };

    fn obstacle(&self, sort: HoldKind) -> Option<HoldError> {
        if sort == HoldKind::Pin && !self.content.is_pinnable() {
            Some(HoldError::Content(self.content))
        } else {
            None
        }
    }

    fn count(&mut self, sort: HoldKind) -> &mut u32 {
        match sort {
            HoldKind::Reference => &mut self.references,
            HoldKind::Pin => &mut self.pins,
        }
    }
}

/// What the machine does to a page or a range; numbers are taken modulo what there is.
#[derive(Clone, Debug)]
enum Step {
    Hold { start: u64, pages: u64, sort: HoldKind },
    Release { which: usize },
    Split { which: usize, at: u64 },
    Advance { page: u64, to: Content },
    Poison { page: u64 },
    Run { start: u64, pages: u64, to_zeroing: bool },
}

fn step() -> impl Strategy<Value = Step> {
    let sort = prop_oneof![Just(HoldKind::Reference), Just(HoldKind::Pin)];
    // Near the ends of blocks, or anywhere.
    let place = prop_oneof![
        (0..4_u64, 0..5_u64).prop_map(|(b, o)| (b * 512 + o).saturating_sub(2)),
        any::<u64>()
    ];
    prop_oneof![
        6 => (place.clone(), place.clone(), sort)
            .prop_map(|(start, pages, sort)| Step::Hold { start, pages, sort }),
        4 => any::<usize>().prop_map(|which| Step::Release { which }),
        3 => (any::<usize>(), place.clone()).prop_map(|(which, at)| Step::Split { which, at }),
        3 => (place.clone(), (0..8_u64).prop_map(Content::from_bits))
            .prop_map(|(page, to)| Step::Advance { page, to }),
        1 => place.clone().prop_map(|page| Step::Poison { page }),
        2 => (place.clone(), place, any::<bool>())
            .prop_map(|(start, pages, to_zeroing)| Step::Run { start, pages, to_zeroing }),
    ]
}

const START: u64 = 1000;
/// Three whole blocks, and parts of one at either end; under Miri one whole block.
const PAGES: u64 = if cfg!(miri) { 540 } else { 1700 };

proptest! {
    #![proptest_config(ProptestConfig {
        cases: if cfg!(miri) { 1 } else { 256 },
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    /// A range is held exactly if every page of it could be held alone; the first page in the way is
    /// named; and the counts of a page are those that it would have without blocks, or, where a
    /// split has cut a block, more, for as long as both parts live.
    #[test]
    fn ranges_of_base_pages_behave_as_if_each_page_were_held_alone(
        steps in prop::collection::vec(step(), 1..if cfg!(miri) { 4 } else { 60 }),
    ) {
        let memmap = memmap(range(START, PAGES));
        let mut plain = vec![Plain::FRESH; PAGES as usize];
        let mut spans: Vec<(Span, HoldKind)> = Vec::new();
        let at = |page: u64| (page % PAGES) as usize;
        let folio = |page: usize| memmap.folio(Pfn::new(START + page as u64)).unwrap();
        for step in &steps {
            match *step {
                Step::Hold { start, pages, sort } => {
                    let start = start % PAGES;
                    let pages = 1 + pages % (PAGES - start);
                    let held = hold(&memmap, range(START + start, pages), sort);
                    let pages = start as usize..(start + pages) as usize;
                    let obstacle = pages.clone()
                        .find_map(|page| plain[page].obstacle(sort).map(|cause| (page, cause)));
                    match (held, obstacle) {
                        (Ok(span), None) => {
                            for page in pages {
                                *plain[page].count(sort) += 1;
                            }
                            spans.push((span, sort));
                        }
                        (Err((pfn, cause)), Some((page, expected))) => {
                            prop_assert_eq!(pfn, Pfn::new(START + page as u64));
                            prop_assert_eq!(cause, expected);
                        }
                        (held, obstacle) => {
                            return Err(TestCaseError::fail(format!("{held:?} but {obstacle:?}")));
                        }
                    }
                }
                Step::Release { which } if !spans.is_empty() => {
                    let (span, sort) = spans.swap_remove(which % spans.len());
                    memmap.release(span, sort);
                    for pfn in span.range().iter() {
                        *plain[(pfn.get() - START) as usize].count(sort) -= 1;
                    }
                }
                Step::Split { which, at } if !spans.is_empty() => {
                    let which = which % spans.len();
                    let (span, sort) = spans[which];
                    let at = at % (span.range().pages().get() + 1);
                    match memmap.split(span, sort, PageCount::new(at)) {
                        Ok((first, second)) => {
                            prop_assert_eq!(first.range().pages().get(), at);
                            prop_assert_eq!(second.range().start(), first.range().end());
                            prop_assert_eq!(second.range().end(), span.range().end());
                            spans[which] = (first, sort);
                            spans.push((second, sort));
                        }
                        Err(refused) => {
                            prop_assert!(refused.is_none());
                            prop_assert!(at == 0 || at == span.range().pages().get());
                        }
                    }
                }
                Step::Advance { page, to } => {
                    let page = at(page);
                    let from = plain[page].content;
                    match folio(page).advance(from, to) {
                        Err(AdvanceError::Found { found: Content::Poisoned, .. })
                            if plain[page].is_poison_pending =>
                        {
                            plain[page].content = Content::Poisoned;
                            plain[page].is_poison_pending = false;
                        }
                        Ok(()) => {
                            prop_assert!(!plain[page].is_poison_pending);
                            prop_assert!(plain[page].pins == 0 || to.is_pinnable()
                                || to == Content::Poisoned || !from.is_pinnable());
                            plain[page].content = to;
                        }
                        Err(AdvanceError::Illegal { .. }) => prop_assert!(!from.may_become(to)),
                        Err(AdvanceError::Pinned { pins }) => {
                            prop_assert!(pins > 0 && !to.is_pinnable() && !spans.is_empty());
                        }
                        Err(other) => return Err(TestCaseError::fail(other.to_string())),
                    }
                }
                Step::Poison { page } => {
                    let page = at(page);
                    let word = folio(page).poison();
                    let is_known = plain[page].content == Content::Poisoned || plain[page].is_poison_pending;
                    prop_assert_eq!(word.is_none(), is_known);
                    if let Some(word) = word {
                        prop_assert!(word.pins() >= plain[page].pins);
                    }
                    if plain[page].content.is_owned() {
                        plain[page].is_poison_pending = true;
                    } else {
                        plain[page].content = Content::Poisoned;
                    }
                }
                Step::Run { start, pages, to_zeroing } => {
                    let start = start % PAGES;
                    let pages = 1 + pages % (PAGES - start);
                    let (from, to): (&[Content], _) = if to_zeroing {
                        (&[Content::Unknown, Content::Present], Content::Zeroing)
                    } else {
                        (&[Content::Zeroing], Content::Zero)
                    };
                    let mut next = start;
                    memmap.advance_run(range(START + start, pages), from, to, |pfn, advanced| {
                        assert_eq!(pfn.get(), START + next, "each page, in order");
                        let plain = &mut plain[next as usize];
                        next += 1;
                        match advanced {
                            Ok(was) => {
                                assert_eq!(was, plain.content);
                                assert!(from.contains(&was) && !plain.is_poison_pending);
                                assert!(plain.pins == 0 || !to_zeroing);
                                plain.content = to;
                            }
                            Err(AdvanceError::Pinned { pins }) => {
                                assert!(pins > 0 && to_zeroing && from.contains(&plain.content));
                            }
                            Err(AdvanceError::Found { found, .. }) if plain.is_poison_pending => {
                                if from.contains(&plain.content) {
                                    assert_eq!(found, Content::Poisoned);
                                    plain.content = found;
                                    plain.is_poison_pending = false;
                                }
                            }
                            Err(AdvanceError::Found { found, .. }) => {
                                assert_eq!(found, plain.content);
                                assert!(!from.contains(&found));
                            }
                            Err(other) => panic!("{other}"),
                        }
                    });
                    prop_assert_eq!(next, start + pages);
                }
                _ => {}
            }
            for (page, plain) in plain.iter().enumerate() {
                let word = folio(page).word();
                prop_assert!(word.references() >= plain.references);
                prop_assert!(word.pins() >= plain.pins);
                prop_assert_eq!(word.content(), plain.content);
            }
        }
        for (span, sort) in spans {
            memmap.release(span, sort);
        }
        for page in 0..PAGES as usize {
            let word = folio(page).word();
            prop_assert_eq!((word.references(), word.pins()), (1, 0));
            let _ = folio(page).advance(Content::Poisoned, Content::Unknown);
        }
        // No inhibitor is left behind either, where no page is unpinnable.
        if plain.iter().all(|page| page.content.is_pinnable() || page.content == Content::Poisoned) {
            for sort in [HoldKind::Reference, HoldKind::Pin] {
                let span = hold(&memmap, range(START, PAGES), sort).unwrap();
                memmap.release(span, sort);
            }
        }
    }

    /// Of folios some of whose pages are bad, a pin for good pages is given and one for a bad page
    /// refused with its number.
    #[test]
    fn a_bad_page_of_a_folio_spares_its_neighbours(
        order in 1..5_u8,
        bad in prop::collection::btree_set(0..64_u64, 0..6),
        asks in prop::collection::vec((0..64_u64, 1..64_u64), 1..40),
    ) {
        let order = Order::new(order);
        let layout = Layout::try_new(range(64, 64), order, Tails::Derived).unwrap();
        let descriptors: Vec<Page> = (0..layout.descriptors()).map(|_| Page::new(())).collect();
        let memmap = Memmap::try_new(layout, MemoryKind::Generic, descriptors).unwrap();
        let bad: BTreeSet<Pfn> = bad.into_iter().map(|page| Pfn::new(64 + page)).collect();
        for pfn in &bad {
            let before = memmap.folio(*pfn).unwrap().set_partly_poisoned(true);
            prop_assert_eq!(before.pins(), 0);
        }
        let first_bad = |range: PfnRange| bad.range(range.start()..range.end()).next().copied();
        for (start, pages) in asks {
            let asked = range(64 + start, pages.min(64 - start));
            let held = memmap.hold(asked, HoldKind::Pin, first_bad);
            match first_bad(asked) {
                None => memmap.release(held.unwrap(), HoldKind::Pin),
                Some(pfn) => {
                    let refused = held.unwrap_err();
                    prop_assert_eq!(refused, (pfn, HoldError::Content(Content::Poisoned)));
                }
            }
            // References do not care about bytes.
            let span = memmap.hold(asked, HoldKind::Reference, first_bad).unwrap();
            memmap.release(span, HoldKind::Reference);
            for (head, folio) in memmap.folios(Pfn::new(64), Pfn::new(128)) {
                prop_assert_eq!(folio.word().pins(), 0, "{}", head);
                prop_assert_eq!(folio.word().references(), 1, "{}", head);
            }
        }
    }
}

#[test]
fn a_long_range_takes_one_step_a_block_and_one_for_each_page_at_its_ends() {
    let memmap = memmap(range(START, PAGES));
    let block = BLOCK_ORDER.pages().get();
    let span = hold(&memmap, range(START, PAGES), HoldKind::Pin).unwrap();
    let range = memmap.layout().range();
    assert!(range.iter().all(|pfn| memmap.folio(pfn).unwrap().word().pins() == 1));
    // The whole blocks begin at page 1024: what is cut off at the ends is counted page by page.
    let whole = (START + PAGES - 1024) / block;
    let cut = PAGES - whole * block;
    assert!(whole > 0 && cut > 0);
    let initial = Word::initial(MemoryKind::Generic);
    let counted =
        memmap.descriptors().iter().filter(|page| Folio::new(*page, initial).word().pins() == 1);
    assert_eq!(counted.count() as u64, cut);
    memmap.release(span, HoldKind::Pin);
    assert!(
        memmap.folios(Pfn::new(START), Pfn::new(START + PAGES)).all(|(_, f)| f.word().pins() == 0)
    );
}

#[test]
fn blocks_are_refused_where_pages_come_and_go_and_where_there_are_folios() {
    let make = |kind, order: u8, blocks: usize| {
        let layout = Layout::try_new(range(1024, 1024), Order::new(order), Tails::Derived).unwrap();
        let descriptors: Vec<Page> = (0..layout.descriptors()).map(|_| Page::new(())).collect();
        let blocks: Vec<Block> = (0..blocks).map(|_| Block::default()).collect();
        Memmap::try_new(layout, kind, descriptors).unwrap().with_blocks(blocks).map(|_| ())
    };
    assert_eq!(make(MemoryKind::Generic, 0, 2), Ok(()));
    assert_eq!(make(MemoryKind::Generic, 0, 3), Err(AddrError::Blocks { needed: 2, given: 3 }));
    assert_eq!(make(MemoryKind::Generic, 9, 2), Err(AddrError::NoBlocks));
    assert_eq!(make(MemoryKind::Private, 0, 2), Err(AddrError::NoBlocks));
}

/// Takes the content of a page from one state to another.
fn advance(memmap: &Blocked, pfn: u64, from: Content, to: Content) {
    memmap.folio(Pfn::new(pfn)).unwrap().advance(from, to).unwrap();
}

#[test]
#[cfg_attr(miri, ignore = "long: a refused hold looks at every page many times")]
fn a_page_that_comes_back_during_a_run_does_not_open_the_block_for_pins() {
    let whole = range(512, 512);
    let memmap = memmap(whole);
    let mut refused = 0;
    memmap.advance_run(whole, &[Content::Unknown], Content::Absent, |pfn, advanced| {
        assert_eq!(advanced, Ok(Content::Unknown), "{pfn}");
        // As a fault on another thread does.
        advance(&memmap, pfn.get(), Content::Absent, Content::Present);
        refused += u64::from(hold(&memmap, whole, HoldKind::Pin).is_err());
    });
    assert_eq!(refused, 512, "its pages are being taken away");
    assert!(hold(&memmap, whole, HoldKind::Pin).is_ok(), "all are back");
}

#[test]
fn a_run_that_panics_leaves_every_page_as_it_is_counted() {
    let whole = range(512, 512);
    let memmap = memmap(whole);
    let run = |from: Content, to: Content, until: u64| {
        let run = std::panic::AssertUnwindSafe(|| {
            memmap.advance_run(whole, &[from], to, |pfn, _| assert_ne!(pfn.get(), until));
        });
        std::panic::catch_unwind(run).unwrap_err();
    };
    run(Content::Unknown, Content::Zeroing, 514);
    advance(&memmap, 512, Content::Zeroing, Content::Unknown);
    let refused = |pfn| Err((Pfn::new(pfn), HoldError::Content(Content::Zeroing)));
    assert_eq!(hold(&memmap, whole, HoldKind::Pin), refused(513));
    run(Content::Zeroing, Content::Unknown, 513);
    assert_eq!(hold(&memmap, whole, HoldKind::Pin), refused(514));
    advance(&memmap, 514, Content::Zeroing, Content::Unknown);
    assert!(hold(&memmap, whole, HoldKind::Pin).is_ok());
}

#[test]
fn a_run_beyond_the_memmap_tells_of_its_own_pages_alone_and_at_once() {
    let own = range(1000, 2000);
    let memmap = memmap(own);
    for asked in [range(0, u64::MAX), range(1000, 1 << 60), range(0, 3000)] {
        let mut advanced = Vec::new();
        memmap
            .advance_run(asked, &[Content::Unknown], Content::Zeroing, |pfn, _| advanced.push(pfn));
        assert!(own.iter().eq(advanced));
    }
    for asked in [range(0, 1000), range(3000, 1 << 60)] {
        let never = |pfn, _| panic!("page {pfn} is another's");
        memmap.advance_run(asked, &[Content::Zeroing], Content::Unknown, never);
    }
}

#[test]
fn pages_that_a_run_gives_free_can_be_taken_by_the_callback() {
    let whole = range(512, 512);
    let memmap = memmap(whole);
    memmap.advance_run(whole, &[Content::Unknown], Content::Zeroing, |_, _| ());
    for _ in 0..3 {
        memmap.advance_run(whole, &[Content::Zeroing], Content::Unknown, |pfn, _| {
            advance(&memmap, pfn.get(), Content::Unknown, Content::Zeroing);
        });
    }
    memmap.advance_run(whole, &[Content::Zeroing], Content::Unknown, |_, _| ());
    assert!(hold(&memmap, whole, HoldKind::Pin).is_ok());
}
