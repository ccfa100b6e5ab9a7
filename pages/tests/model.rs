//! Random operations on descriptors agree with a plain model that keeps each number by itself.
#![cfg(not(loom))]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use proptest::prelude::*;
use uzone_pages::{
    AddrError, AdvanceError, Content, Folio, HoldError, HoldKind, Layout, MAX_HOLDS, Memmap,
    MemoryKind, Order, Page, PageCount, Pfn, PfnRange, Tails, Word,
};
use zerocopy::FromBytes;

/// One page as it would be kept without a limit of room.
#[derive(Clone, Debug, PartialEq)]
struct Plain {
    references: u64,
    pins: u64,
    content: Content,
    free: bool,
    /// The references of an unheld page.
    base: u64,
}

impl Plain {
    fn fresh(kind: MemoryKind) -> Self {
        let base = u64::from(kind.initial_references());
        let free = base == 0;
        Self { references: base, pins: 0, content: Content::Unknown, free, base }
    }

    fn held(&mut self, sort: HoldKind) -> &mut u64 {
        match sort {
            HoldKind::Pin => &mut self.pins,
            HoldKind::Reference => &mut self.references,
        }
    }

    fn take(&mut self, sort: HoldKind) -> Result<(), HoldError> {
        if self.free {
            Err(HoldError::Free)
        } else if sort == HoldKind::Pin && !self.content.is_pinnable() {
            Err(HoldError::Content(self.content))
        } else if *self.held(sort) == u64::from(MAX_HOLDS) {
            Err(HoldError::Overflow)
        } else {
            *self.held(sort) += 1;
            Ok(())
        }
    }

    fn give_back(&mut self, sort: HoldKind) -> Result<bool, AdvanceError> {
        let held = self.held(sort);
        *held = held.checked_sub(1).ok_or(AdvanceError::NotHeld { what: sort })?;
        let is_last = self.references == 0 && self.pins == 0;
        if is_last {
            self.references = self.base;
            self.free = self.base == 0;
        }
        Ok(is_last)
    }
}

#[derive(Clone, Debug)]
enum Step {
    Take { sort: HoldKind },
    GiveBack { sort: HoldKind },
    TakeFirst,
    Advance { from: Content, to: Content },
}

fn sort() -> impl Strategy<Value = HoldKind> {
    prop_oneof![Just(HoldKind::Reference), Just(HoldKind::Pin)]
}

fn content() -> impl Strategy<Value = Content> {
    (0..8_u64).prop_map(Content::from_bits)
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => sort().prop_map(|sort| Step::Take { sort }),
        4 => sort().prop_map(|sort| Step::GiveBack { sort }),
        2 => Just(Step::TakeFirst),
        3 => (content(), content()).prop_map(|(from, to)| Step::Advance { from, to }),
    ]
}

fn check(folio: Folio<'_>, plain: &Plain) {
    let word = folio.word();
    assert_eq!(u64::from(word.references()), plain.references);
    assert_eq!(u64::from(word.pins()), plain.pins);
    assert_eq!(word.content(), plain.content);
    assert_eq!(word.is_free(), plain.free);
    assert!(word.to_bits() & 1 << 60 != 0, "reserved");
}

fn apply(folio: Folio<'_>, plain: &mut Plain, step: &Step) {
    match *step {
        Step::Take { sort } => {
            let before = folio.word();
            assert_eq!(folio.try_hold(sort), plain.take(sort).map(|()| before));
        }
        Step::GiveBack { sort } => assert_eq!(folio.release(sort), plain.give_back(sort)),
        Step::TakeFirst => {
            let first = plain.free && plain.content != Content::Poisoned;
            assert_eq!(folio.take_first(), first);
            if first {
                plain.free = false;
                plain.references = 1;
            }
        }
        Step::Advance { from, to } => {
            let expected = if !from.may_become(to) {
                Err(AdvanceError::Illegal { from, to })
            } else if plain.content != from {
                Err(AdvanceError::Found { expected: from, found: plain.content })
            } else if plain.pins > 0
                && from.is_pinnable()
                && !to.is_pinnable()
                && to != Content::Poisoned
            {
                Err(AdvanceError::Pinned { pins: u32::try_from(plain.pins).unwrap() })
            } else {
                plain.content = to;
                Ok(())
            };
            assert_eq!(folio.advance(from, to), expected);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: if cfg!(miri) { 8 } else { 512 },
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn random_operations_agree_with_a_plain_decoded_model(
        kind in (0..5_usize).prop_map(|index| MemoryKind::ALL[index]),
        order in prop_oneof![Just(0_u8), Just(2)],
        tails in prop_oneof![Just(Tails::Derived), Just(Tails::Stored)],
        held in prop_oneof![3 => Just(0), 1 => u64::from(MAX_HOLDS) - 4..u64::from(MAX_HOLDS)],
        steps in prop::collection::vec((0..16_u64, step()), 0..if cfg!(miri) { 8 } else { 100 }),
    ) {
        let base = 0x40;
        let range = PfnRange::try_new(Pfn::new(base), PageCount::new(16)).unwrap();
        let layout = Layout::try_new(range, Order::new(order), tails).unwrap();
        // Each folio has `held` holds of both sorts more than a fresh one.
        let stored = if kind.initial_references() == 0 { 0 } else { held | held << 28 };
        let fresh = || Page::<()>::read_from_bytes(&stored.to_ne_bytes()).unwrap();
        let descriptors: Vec<Page> = (0..layout.descriptors()).map(|_| fresh()).collect();
        let memmap = Memmap::try_new(layout, kind, descriptors).unwrap();
        let mut first = Plain::fresh(kind);
        (first.references, first.pins) = (first.references + (stored & held), first.pins + (stored & held));
        let mut plain = vec![first; 16 >> order];
        for (offset, step) in &steps {
            let folio = memmap.folio(Pfn::new(base + offset)).unwrap();
            apply(folio, &mut plain[usize::try_from(offset >> order).unwrap()], step);
        }
        for offset in 0..16_u64 {
            let page = memmap.page(Pfn::new(base + offset)).unwrap();
            let folio = memmap.folio(page.pfn()).unwrap();
            check(folio, &plain[usize::try_from(offset >> order).unwrap()]);
            prop_assert_eq!(page.word(), folio.word());
            if page.is_tail() && tails == Tails::Stored {
                // Whatever happened to the folio, a tail is as it was.
                let index = usize::try_from(layout.index(page.pfn()).unwrap()).unwrap();
                let tail = Folio::new(&memmap.descriptors()[index], Word::from_bits(0));
                prop_assert_eq!(tail.word(), Word::from_bits(stored));
            }
            prop_assert_eq!(page.head().get() + page.distance().get(), base + offset);
        }
    }

    #[test]
    fn giving_everything_back_leaves_the_word_as_it_was(
        kind in (0..5_usize).prop_map(|index| MemoryKind::ALL[index]),
        holds in prop::collection::vec(sort(), 0..400),
    ) {
        let page = Page::new(());
        let folio = Folio::new(&page, Word::initial(kind));
        let before = folio.word();
        let is_first = folio.take_first();
        for sort in &holds {
            prop_assert!(folio.try_hold(*sort).is_ok());
        }
        for sort in &holds {
            prop_assert_eq!(folio.release(*sort), Ok(false));
        }
        if is_first {
            prop_assert_eq!(folio.release(HoldKind::Reference), Ok(true));
        }
        prop_assert_eq!(folio.word(), before);
    }
}

#[test]
fn a_memmap_of_the_wrong_length_is_refused() {
    let range = PfnRange::try_new(Pfn::new(0), PageCount::new(4)).unwrap();
    let layout = Layout::try_new(range, Order::BASE, Tails::Derived).unwrap();
    let descriptors: Vec<Page> = (0..3).map(|_| Page::new(())).collect();
    let error = Memmap::try_new(layout, MemoryKind::Generic, descriptors).unwrap_err();
    assert_eq!(error, AddrError::Descriptors { needed: 4, given: 3 });
}

#[test]
fn a_page_outside_the_range_has_no_descriptor() {
    let range = PfnRange::try_new(Pfn::new(8), PageCount::new(8)).unwrap();
    let layout = Layout::try_new(range, Order::new(3), Tails::Derived).unwrap();
    let memmap = Memmap::try_new(layout, MemoryKind::Generic, vec![Page::new(())]).unwrap();
    for outside in [0, 7, 16, u64::MAX] {
        assert!(memmap.page(Pfn::new(outside)).is_none());
        assert!(memmap.folio(Pfn::new(outside)).is_none());
    }
    let tail = memmap.page(Pfn::new(15)).unwrap();
    assert!(tail.is_tail() && tail.payload().is_none());
    assert_eq!((tail.head(), tail.distance().get(), tail.order().get()), (Pfn::new(8), 7, 3));
}
