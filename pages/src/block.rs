//! Holds on 512 base pages at once: [`Block`], one word for as many pages as a huge page has.
//!
//! A memmap of base pages has a word for each, and holding a terabyte of them page by page would
//! cost 268 million atomic steps. So a hold that covers a block wholly is counted once, here, and
//! only the pages that a range cuts off at its ends are counted in the words of pages:
//!
//! ```text
//!  63            54 53            44 43                  22 21                   0
//! ┌────────────────┬────────────────┬──────────────────────┬──────────────────────┐
//! │     unused     │   inhibitors   │         pins         │      references      │
//! └────────────────┴────────────────┴──────────────────────┴──────────────────────┘
//! ```
//!
//! Steps that a pinned page must not take (to be cleared, removed) then depend on two words.
//! It is made to depend on one at a time by *inhibitors*: a thread that makes a page unavailable inhibits its
//! block first, which fails while the block is pinned, and only then changes the page; an inhibited block
//! gives no pin until the page is available again. So of a thread that pins the block and one that
//! clears a page of it, one comes first in the order of the block's word, and the other is refused;
//! `tests/loom.rs` searches that. A poisoned page inhibits its block as well, without waiting for the
//! holders: poisoning reports them instead.
//!
//! Only for memory whose pages always have a reference. Where pages come and go, the last put of a
//! page would have to wait for the holds on its block.
//!
//! Cost: 8 bytes for 512 pages; a hold is one compare-and-swap, and so is an inhibitor. No count is ever too
//! high, not even for a moment.

use crate::addr::{Order, PageCount, Pfn, PfnRange};
use crate::folio::HoldError;
use crate::sync::{AtomicU64, Ordering};
use crate::word::HoldKind;

/// The order of a block: as many base pages as a table of page table entries maps, and two under
/// the model checker.
pub const BLOCK_ORDER: Order = if cfg!(loom) { Order::new(1) } else { Order::PMD };

const COUNT_BITS: u32 = 22;
const INHIBITOR_BITS: u32 = 10;
const INHIBITORS_SHIFT: u32 = 2 * COUNT_BITS;
const ONE_INHIBITOR: u64 = 1 << INHIBITORS_SHIFT;
const MAX_COUNT: u64 = (1 << COUNT_BITS) - 1;
const MAX_INHIBITORS: u64 = (1 << INHIBITOR_BITS) - 1;

const _: () = assert!(INHIBITORS_SHIFT + INHIBITOR_BITS <= 64);
// Every page may have an inhibitor, and half a thousand threads may be about to add one.
const _: () = assert!(MAX_INHIBITORS > 1 << BLOCK_ORDER.get());

#[derive(Clone, Copy, Debug)]
struct Counts(u64);

impl Counts {
    const fn holds(self, sort: HoldKind) -> u32 {
        match sort {
            HoldKind::Reference => (self.0 & MAX_COUNT) as u32,
            HoldKind::Pin => ((self.0 >> COUNT_BITS) & MAX_COUNT) as u32,
        }
    }

    const fn inhibitors(self) -> u64 {
        (self.0 >> INHIBITORS_SHIFT) & MAX_INHIBITORS
    }

    const fn is_inhibited(self, sort: HoldKind) -> bool {
        matches!(sort, HoldKind::Pin) && self.inhibitors() != 0
    }
}

/// The holds that cover a block of base pages wholly. All zero is a block without holds.
#[cfg_attr(not(loom), derive(zerocopy::FromBytes))]
#[derive(Debug, Default)]
#[repr(transparent)]
pub struct Block(AtomicU64);

impl Block {
    /// Returns how many blocks the pages of `range` have a part of.
    #[must_use]
    pub const fn count(range: PfnRange) -> PageCount {
        let last = range.end().get() - 1; // a range has a page
        PageCount::new((last >> BLOCK_ORDER.get()) - (range.start().get() >> BLOCK_ORDER.get()) + 1)
    }

    /// Returns which of the blocks of `range` the page `pfn` of it belongs to.
    pub(crate) const fn index(range: PfnRange, pfn: Pfn) -> u64 {
        (pfn.get() >> BLOCK_ORDER.get()) - (range.start().get() >> BLOCK_ORDER.get())
    }
}

/// A block and the meaning of its word where it was never written: as of a page's word, the stored word is
/// the difference to a template.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockRef<'a> {
    block: &'a Block,
    template: Counts,
}

impl<'a> BlockRef<'a> {
    /// Takes a block whose pages all start with bytes that may be pinned, or none of them. A block
    /// that the memmap has a part of only counts as whole: it is never held as such.
    pub(crate) fn new(block: &'a Block, starts_pinnable: bool) -> Self {
        let inhibitors = if starts_pinnable { 0 } else { BLOCK_ORDER.pages().get() };
        Self { block, template: Counts(inhibitors * ONE_INHIBITOR) }
    }

    fn counts(self) -> Counts {
        // Relaxed: a report, as `Folio::word` is; or a guess that an exchange confirms.
        Counts(self.block.0.load(Ordering::Relaxed).wrapping_add(self.template.0))
    }

    /// Returns the references and pins that there are on the whole block.
    pub(crate) fn holds(self) -> (u32, u32) {
        let counts = self.counts();
        (counts.holds(HoldKind::Reference), counts.holds(HoldKind::Pin))
    }

    /// Holds every page of the block.
    ///
    /// # Errors
    /// [`HoldError::Busy`] if it is inhibited: the word of one of its pages has the reason. Or
    /// [`HoldError::Overflow`].
    #[inline]
    pub(crate) fn hold(self, sort: HoldKind) -> Result<(), HoldError> {
        // Acquire pairs with the Release in `uninhibit`: the holder of the block sees all that was done to its
        // pages while it was inhibited.
        self.update(Ordering::Acquire, |counts| {
            if counts.is_inhibited(sort) {
                return Err(HoldError::Busy);
            }
            add_hold(counts, sort)
        })
    }

    /// Adds a hold to a block that the calling thread holds already, also while the block is inhibited.
    pub(crate) fn hold_again(self, sort: HoldKind) -> Result<(), HoldError> {
        // Relaxed: the caller's own hold has acquired all that there is to see.
        self.update(Ordering::Relaxed, |counts| add_hold(counts, sort))
    }

    /// Gives a hold back. Returns whether there was one.
    #[inline]
    #[must_use]
    pub(crate) fn give_back(self, sort: HoldKind) -> bool {
        // Release pairs with the Acquire in `inhibit`: the thread that inhibits the block sees all that its holders wrote.
        self.update(Ordering::Release, |counts| {
            if counts.holds(sort) == 0 {
                return Err(());
            }
            Ok(Counts(counts.0 - sort.one(COUNT_BITS)))
        })
        .is_ok()
    }

    /// Keeps new pins off, unless there are some that this inhibitor would have to wait for: then it returns how
    /// many.
    pub(crate) fn inhibit(self) -> Result<(), u32> {
        self.add_inhibitors(1, true)
    }

    /// Adds inhibitors for `pages` pages without looking at pins. The caller has set an inhibitor already,
    /// which keeps new pins off, or a page of the block went bad.
    pub(crate) fn inhibit_more(self, pages: u64) {
        let inhibited = self.add_inhibitors(pages, false);
        debug_assert!(inhibited.is_ok(), "adding inhibitors that do not wait for pins cannot fail");
    }

    fn add_inhibitors(self, pages: u64, waits_for_pins: bool) -> Result<(), u32> {
        loop {
            let inhibited = self.update(Ordering::Acquire, |counts| {
                let pins = counts.holds(HoldKind::Pin);
                if waits_for_pins && pins != 0 {
                    Err(Some(pins))
                } else if counts.inhibitors() + pages > MAX_INHIBITORS {
                    Err(None)
                } else {
                    Ok(Counts(counts.0 + ONE_INHIBITOR * pages))
                }
            });
            match inhibited {
                Ok(()) => return Ok(()),
                Err(Some(pins)) => return Err(pins),
                // Five hundred threads are between their inhibitor and their page. At most one inhibitor a page stays,
                // so there is room again when others go on.
                Err(None) => core::hint::spin_loop(),
            }
        }
    }

    /// Takes the inhibitors of `pages` pages back.
    pub(crate) fn uninhibit(self, pages: u64) {
        // Release pairs with the Acquire in `hold`. Subtracting needs no decoding.
        let before = self.block.0.fetch_sub(ONE_INHIBITOR * pages, Ordering::Release);
        let before = Counts(before.wrapping_add(self.template.0));
        debug_assert!(before.inhibitors() >= pages, "only an inhibitor that was set is removed");
    }

    #[inline]
    fn update<E>(
        self,
        success: Ordering,
        mut next: impl FnMut(Counts) -> Result<Counts, E>,
    ) -> Result<(), E> {
        let mut counts = self.counts();
        loop {
            let after = next(counts)?;
            let stored = |counts: Counts| counts.0.wrapping_sub(self.template.0);
            match self.block.0.compare_exchange_weak(
                stored(counts),
                stored(after),
                success,
                Ordering::Relaxed,
            ) {
                Ok(_) => return Ok(()),
                // It ends: each round fails only because another thread's step succeeded.
                Err(found) => counts = Counts(found.wrapping_add(self.template.0)),
            }
        }
    }
}

#[inline]
fn add_hold(counts: Counts, sort: HoldKind) -> Result<Counts, HoldError> {
    if u64::from(counts.holds(sort)) == MAX_COUNT {
        return Err(HoldError::Overflow);
    }
    Ok(Counts(counts.0 + sort.one(COUNT_BITS)))
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn an_inhibitor_keeps_off_what_it_is_for_and_nothing_else() {
        let block = Block::default();
        let block = BlockRef::new(&block, true);
        assert_eq!(block.inhibit(), Ok(()));
        assert_eq!(block.hold(HoldKind::Pin), Err(HoldError::Busy));
        assert_eq!(block.hold(HoldKind::Reference), Ok(()));
        assert!(block.give_back(HoldKind::Reference));
        assert!(!block.give_back(HoldKind::Reference));
        block.uninhibit(1);
        assert_eq!(block.hold(HoldKind::Pin), Ok(()));
        assert_eq!(block.inhibit(), Err(1));
        block.inhibit_more(1);
        assert_eq!(block.hold_again(HoldKind::Pin), Ok(()));
        assert_eq!(block.holds(), (0, 2));
    }

    #[test]
    fn a_block_none_of_whose_pages_may_be_pinned_is_inhibited_until_all_may() {
        let block = Block::default();
        let block = BlockRef::new(&block, false);
        assert_eq!(block.hold(HoldKind::Pin), Err(HoldError::Busy));
        assert_eq!(block.hold(HoldKind::Reference), Ok(()));
        block.uninhibit(BLOCK_ORDER.pages().get() - 1);
        assert_eq!(block.hold(HoldKind::Pin), Err(HoldError::Busy));
        block.uninhibit(1);
        assert_eq!(block.hold(HoldKind::Pin), Ok(()));
        assert_eq!(block.holds(), (1, 1));
    }

    #[test]
    fn a_block_that_is_full_refuses_and_keeps_its_counts() {
        for sort in [HoldKind::Reference, HoldKind::Pin] {
            let block = Block(AtomicU64::new(sort.one(COUNT_BITS) * MAX_COUNT));
            let block = BlockRef::new(&block, true);
            let before = block.holds();
            assert_eq!(block.hold(sort), Err(HoldError::Overflow));
            assert_eq!(block.hold_again(sort), Err(HoldError::Overflow));
            assert_eq!(block.holds(), before);
            assert!(block.give_back(sort));
            assert_eq!(block.hold(sort), Ok(()));
        }
    }

    #[test]
    fn blocks_are_counted_by_the_pages_that_they_have_a_part_of() {
        let range =
            |start, pages| PfnRange::try_new(Pfn::new(start), PageCount::new(pages)).unwrap();
        for (start, pages, blocks) in
            [(0, 1, 1), (0, 512, 1), (0, 513, 2), (511, 2, 2), (511, 1, 1), (512, 1024, 2)]
        {
            assert_eq!(Block::count(range(start, pages)).get(), blocks, "{start} {pages}");
        }
        let odd = range(500, 600);
        assert_eq!(Block::index(odd, Pfn::new(500)), 0);
        assert_eq!(Block::index(odd, Pfn::new(512)), 1);
        assert_eq!(Block::index(odd, Pfn::new(1099)), 2);
    }
}
