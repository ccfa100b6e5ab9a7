//! A caller's part of a descriptor: [`Payload`], and the slow path that initialises it.
//!
//! The slow path sets a payload field after field in place; it is the definition of a
//! fresh descriptor. The fast path never states that a second time: it runs the slow path
//! for two neighbours, takes their difference, and writes an arithmetic progression. So a payload
//! declares only over how many pages its fields are linear in the pfn ([`Refresh`]).

use core::marker::PhantomData;

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::addr::{Order, Pfn};
use crate::kind::MemoryKind;
use crate::layout::{Class, Layout, Slot};
use crate::page::Page;

/// How the fields of a fresh payload depend on the pfn.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Refresh {
    /// Every 64-bit word changes by the same step from a page to the next page of its
    /// [`Class`] in the same folio, and from a folio to the next; a step of zero included.
    Linear,
    /// The same, but only inside blocks of the pages of a folio of that order, aligned as such a
    /// folio is: the number of the block is a field itself.
    LinearWithin(Order),
    /// There is no such rule: the template is refreshed for each page.
    EachPage,
}

/// A caller's part of each descriptor: plain data whose size is a multiple of eight bytes.
///
/// Fields that change while threads share them are atomics; zerocopy's derives accept those.
///
/// ```
/// use core::sync::atomic::AtomicU64;
/// use uzone_pages::{Payload, Refresh};
/// use zerocopy::{FromBytes, IntoBytes, KnownLayout};
///
/// /// A database's record of each of its frames.
/// #[derive(FromBytes, IntoBytes, KnownLayout)]
/// #[repr(C)]
/// struct Frame {
///     page_id: AtomicU64,
///     last_write: AtomicU64,
/// }
///
/// impl Payload for Frame {
///     type Seed = (); // a fresh frame is all zero, so there is nothing to say about it
///
///     fn refresh(_seed: &()) -> Refresh {
///         Refresh::Linear // and zero is the same for every page
///     }
/// }
/// ```
pub trait Payload: FromBytes + IntoBytes + KnownLayout + Send + Sync + 'static {
    /// The values that fresh payloads of one memmap share.
    type Seed: Clone + Send + Sync;

    /// Sets the fields of a fresh payload, which is all zero when this is called.
    ///
    /// It must depend on nothing but its arguments.
    fn init(&mut self, seed: &Self::Seed, slot: &Slot) {
        let _ = (seed, slot);
    }

    /// Returns how the fields that `init` sets depend on the pfn.
    ///
    /// It is relied on: a payload that returns [`Refresh::Linear`] and is not linear gets wrong fields.
    /// A payload whose `init` sets nothing is linear; in doubt return
    /// [`Refresh::EachPage`], which is always right and only slower.
    fn refresh(seed: &Self::Seed) -> Refresh;
}

impl Payload for () {
    type Seed = ();

    fn refresh(_seed: &()) -> Refresh {
        Refresh::Linear
    }
}

/// A payload whose fresh value is the same for every page: the seed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(transparent)]
pub struct Plain<T>(pub T);

impl<T> Payload for Plain<T>
where
    T: FromBytes + IntoBytes + KnownLayout + Copy + Send + Sync + 'static,
{
    type Seed = T;

    fn init(&mut self, seed: &T, _slot: &Slot) {
        self.0 = *seed;
    }

    fn refresh(_seed: &T) -> Refresh {
        Refresh::Linear
    }
}

/// The largest payload, in bytes.
pub const MAX_PAYLOAD_BYTES: usize = 4096;

/// The initial descriptors of one memmap: the slow path, and the facts that the fast path needs.
///
/// It is arithmetic over a [`Layout`] and the address that the descriptors will have; it writes
/// only to the slices it is given.
#[derive(Clone, Debug)]
pub struct Template<P: Payload> {
    layout: Layout,
    kind: MemoryKind,
    seed: P::Seed,
    memmap_address: u64,
    payload: PhantomData<fn() -> P>,
}

impl<P: Payload> Template<P> {
    /// Bytes in one descriptor.
    pub const DESCRIPTOR_BYTES: usize = {
        assert!(size_of::<P>().is_multiple_of(8), "a payload's size is a multiple of 8 bytes");
        assert!(align_of::<P>() <= 8, "a payload is aligned to at most 8 bytes");
        assert!(size_of::<P>() <= MAX_PAYLOAD_BYTES, "a payload has at most 4096 bytes");
        // Under a model checker the word is larger than the 8 bytes that it stands for.
        assert!(cfg!(loom) || size_of::<Page<P>>() == size_of::<P>() + 8);
        size_of::<P>() + 8
    };

    /// Takes all that the descriptors of one memmap depend on. `memmap_address` is the address of the first of
    /// them.
    #[must_use]
    pub const fn new(layout: Layout, kind: MemoryKind, seed: P::Seed, memmap_address: u64) -> Self {
        Self { layout, kind, seed, memmap_address, payload: PhantomData }
    }

    /// Returns the layout.
    #[must_use]
    pub const fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Returns how the payload's fields depend on the pfn.
    #[must_use]
    pub fn refresh(&self) -> Refresh {
        P::refresh(&self.seed)
    }

    /// Returns the place of the page `pfn`, which need not have a descriptor of its own.
    #[must_use]
    pub fn slot(&self, pfn: Pfn) -> Option<Slot> {
        let head = self.layout.head_index(pfn)?;
        Some(Slot {
            pfn,
            class: self.layout.class(pfn),
            order: self.layout.order(),
            kind: self.kind,
            // Wrapping: an address is only ever compared and stored here.
            head_address: self
                .memmap_address
                .wrapping_add(head.wrapping_mul(Self::DESCRIPTOR_BYTES as u64)),
        })
    }

    /// Sets the payload of the page `pfn` as it starts, field after field, in place. Returns
    /// whether the page belongs to the memmap; if not, nothing is written.
    ///
    /// This is the slow path. For a derived tail it gives the payload that would stand in its descriptor.
    pub fn init(&self, pfn: Pfn, payload: &mut P) -> bool {
        let Some(slot) = self.slot(pfn) else {
            return false;
        };
        payload.zero();
        payload.init(&self.seed, &slot);
        true
    }

    /// Returns the payload of the page `pfn` as it starts.
    #[must_use]
    pub fn fresh(&self, pfn: Pfn) -> Option<P> {
        let mut payload = P::new_zeroed();
        self.init(pfn, &mut payload).then_some(payload)
    }

    /// Returns whether a descriptor that was never written is already a fresh one.
    ///
    /// It may depend on the address of the memmap, where the payload does.
    #[must_use]
    pub fn is_zero(&self) -> bool {
        // A payload that is linear and zero in two descriptors of each class, one folio apart as well, is
        // zero everywhere between the first and the last.
        let folio = self.layout.descriptors_per_folio();
        let last = self.layout.descriptors() - 1;
        self.refresh() == Refresh::Linear
            && [0, 1, 2, 3, folio, folio + 1, folio + 2, last]
                .into_iter()
                .filter(|index| *index <= last)
                .filter_map(|index| self.fresh(self.layout.pfn(index)))
                .all(|mut fresh| fresh.as_mut_bytes().iter().all(|byte| *byte == 0))
    }

    /// Returns the index after the last descriptor up to which fields are linear, starting at the
    /// descriptor `index`.
    ///
    /// # Panics
    /// If `index` is not below the number of descriptors.
    #[must_use]
    pub fn linear_until(&self, index: u64) -> u64 {
        let all = self.layout.descriptors();
        let pfn = self.layout.pfn(index).get();
        match self.refresh() {
            Refresh::Linear => all,
            Refresh::EachPage => index + 1,
            Refresh::LinearWithin(block) => {
                // The first page of the next block; none if that is past the last 64-bit number.
                let Some(next) = (pfn | block.offset_mask()).checked_add(1) else {
                    return all;
                };
                let stride = self.layout.pages_per_descriptor().get();
                // Not empty: `next` is past `pfn`.
                (index + (next - pfn).div_ceil(stride)).min(all)
            }
        }
    }

    /// Returns the class of the descriptor `index`, and the index after the last
    /// consecutive descriptor of the same class in the same folio. Where each folio has only one
    /// descriptor, all of them are one run.
    ///
    /// # Panics
    /// If `index` is not below the number of descriptors.
    #[must_use]
    pub fn class_until(&self, index: u64) -> (Class, u64) {
        let class = self.layout.class(self.layout.pfn(index));
        let per_folio = self.layout.descriptors_per_folio();
        if per_folio == 1 {
            return (class, self.layout.descriptors());
        }
        let until = match class {
            Class::Base | Class::Head | Class::FirstTail => index + 1,
            Class::Tail => index - index % per_folio + per_folio,
        };
        (class, until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::addr::{PageCount, PfnRange};
    use crate::layout::Tails;

    fn template<P: Payload>(pages: u64, order: u8, tails: Tails, seed: P::Seed) -> Template<P> {
        let range = PfnRange::try_new(Pfn::new(1 << 20), PageCount::new(pages)).unwrap();
        let layout = Layout::try_new(range, Order::new(order), tails).unwrap();
        Template::new(layout, MemoryKind::Generic, seed, 0x7000_0000_0000)
    }

    /// The payloads of the tests, which differ in their contents.
    #[derive(FromBytes, IntoBytes, KnownLayout)]
    #[repr(C)]
    struct Odd<const SORT: u8>(u64);

    /// Linear only inside blocks of eight pages.
    type Blocks = Odd<0>;
    /// Sets fields of derived tails alone, which have no descriptor.
    type OnlyTails = Odd<1>;
    /// Holds the high half of an address.
    type HighHalf = Odd<2>;

    impl<const SORT: u8> Payload for Odd<SORT> {
        type Seed = ();

        fn init(&mut self, _seed: &(), slot: &Slot) {
            self.0 = match SORT {
                0 => slot.pfn.get() >> 3,
                1 => u64::from(matches!(slot.class, Class::FirstTail | Class::Tail)),
                _ => slot.head_address >> 32,
            };
        }

        fn refresh(_seed: &()) -> Refresh {
            if SORT == 0 { Refresh::LinearWithin(Order::new(3)) } else { Refresh::Linear }
        }
    }

    #[test]
    fn whether_a_payload_starts_at_zero_is_asked_of_what_has_a_descriptor() {
        assert!(template::<OnlyTails>(512, 9, Tails::Derived, ()).is_zero());
        assert!(!template::<OnlyTails>(512, 9, Tails::Stored, ()).is_zero());
        assert!(!template::<HighHalf>(512, 9, Tails::Derived, ()).is_zero());
    }

    #[test]
    fn only_a_payload_without_initial_value_needs_no_write() {
        assert!(template::<()>(512, 9, Tails::Derived, ()).is_zero());
        assert!(template::<Plain<u64>>(512, 0, Tails::Derived, 0).is_zero());
        assert!(!template::<Plain<u64>>(512, 0, Tails::Derived, 1).is_zero());
        assert!(!template::<Blocks>(512, 0, Tails::Derived, ()).is_zero());
    }

    #[test]
    fn a_linear_run_ends_with_its_block() {
        let base = template::<Blocks>(64, 0, Tails::Derived, ());
        assert_eq!(base.linear_until(0), 8);
        assert_eq!(base.linear_until(7), 8);
        assert_eq!(base.linear_until(8), 16);
        assert_eq!(base.linear_until(63), 64);
        // A descriptor for every four pages: two to a block.
        assert_eq!(template::<Blocks>(64, 2, Tails::Derived, ()).linear_until(0), 2);
        // A folio is larger than a block: one descriptor a run.
        assert_eq!(template::<Blocks>(64, 4, Tails::Derived, ()).linear_until(1), 2);
        assert_eq!(template::<()>(64, 4, Tails::Derived, ()).linear_until(1), 4);
    }

    #[test]
    fn a_run_of_one_class_ends_with_its_folio() {
        let stored = template::<()>(16, 2, Tails::Stored, ());
        let runs = [
            (0, (Class::Head, 1)),
            (1, (Class::FirstTail, 2)),
            (2, (Class::Tail, 4)),
            (3, (Class::Tail, 4)),
            (4, (Class::Head, 5)),
            (15, (Class::Tail, 16)),
        ];
        for (index, run) in runs {
            assert_eq!(stored.class_until(index), run);
        }
        assert_eq!(template::<()>(16, 2, Tails::Derived, ()).class_until(1), (Class::Head, 4));
        assert_eq!(template::<()>(16, 0, Tails::Stored, ()).class_until(1), (Class::Base, 16));
    }

    #[test]
    fn a_page_outside_the_memmap_has_no_place() {
        let template = template::<Blocks>(16, 0, Tails::Derived, ());
        let mut payload = Odd::<0>(7);
        assert!(!template.init(Pfn::new((1 << 20) - 1), &mut payload));
        assert!(!template.init(Pfn::new((1 << 20) + 16), &mut payload));
        assert_eq!(payload.0, 7);
    }
}
