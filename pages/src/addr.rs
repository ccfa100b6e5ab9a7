//! Numbers of pages: [`Pfn`], [`PageCount`], [`PfnRange`], [`Order`], [`PageSize`].
//!
//! An index, a count and a length are three things, and here they are three types. None of them
//! has `+`: a step is checked, and its error has the operands. None of them is an
//! address; [`Pfn::to_bytes`] is the way to one.
//!
//! Units: a count is of base pages of the region's [`PageSize`]; a [`ByteLen`] is bytes.
//! Cost: every function here is a few instructions and none allocates.

use core::fmt;

use crate::byte_len::ByteLen;

/// The largest window of a fault: the reach of a page table of 4 KiB pages.
pub(crate) const MOST_AROUND: ByteLen = ByteLen::mib(2);

/// A number, range or size that makes no sense, a text that is none, or pages that cannot be laid out or
/// described, or cannot hold their descriptors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AddrError {
    /// The result would not fit in 64 bits.
    #[error("{value:#x} {operation} {operand:#x} does not fit in 64 bits")]
    Overflow {
        /// The number that was stepped from.
        value: u64,
        /// The operation.
        operation: &'static str,
        /// The size of the step.
        operand: u64,
    },
    /// A range or length of nothing, where something is needed.
    #[error("an empty range at pfn {start:#x} describes no page")]
    Empty {
        /// Where the range would have started.
        start: u64,
    },
    /// A number that should be a multiple of another and is not.
    #[error("{value:#x} is not a multiple of {align:#x} {unit}")]
    Unaligned {
        /// The number that was given.
        value: u64,
        /// The number that it should be a multiple of.
        align: u64,
        /// The unit of both: bytes or pages.
        unit: &'static str,
    },
    /// An order beyond [`Order::MAX`].
    #[error("order {order} is beyond {max}, the largest that a folio may have", max = Order::MAX.get())]
    OrderTooLarge {
        /// The order that was given.
        order: u8,
    },
    /// A page size that is no power of two, or smaller than 4096 bytes.
    #[error("{bytes} bytes is no page size: a page size is a power of two of at least 4096 bytes")]
    BadPageSize {
        /// The size that was given.
        bytes: u64,
    },
    /// An alignment that is no power of two.
    #[error("{align_bytes} bytes is no alignment: an alignment is a power of two")]
    BadAlign {
        /// The alignment that was asked for.
        align_bytes: u64,
    },
    /// No chunk could end at a multiple of the alignment.
    #[error(
        "chunks of at most {most} cannot be cut at multiples of {align}: raise the limit to that, or align to less"
    )]
    ChunkTooShort {
        /// The limit.
        most: ByteLen,
        /// The alignment.
        align: ByteLen,
    },
    /// A range of bytes that ends before it starts.
    #[error("bytes {start:#x} to {end:#x} end before they start")]
    Backwards {
        /// Where it starts.
        start: u64,
        /// Where it ends.
        end: u64,
    },
    /// A range to clear or copy that has no byte, or ends before it starts.
    #[error("the range {start:#x} to {end:#x} is empty: there is nothing to clear or copy")]
    NoBytes {
        /// Where it starts.
        start: u64,
        /// Where it ends.
        end: u64,
    },
    /// A hint at a byte outside the range.
    #[error(
        "the hint {hint:#x} is not among bytes {start:#x} to {end:#x}: hint at a byte of the range, or not at all"
    )]
    HintOutside {
        /// The byte that was hinted at.
        hint: u64,
        /// Where the range starts.
        start: u64,
        /// Where it ends.
        end: u64,
    },
    /// A fault-around size that is more than a page table maps.
    #[error("{asked} cannot be mapped around a fault: at most {max}, the reach of a page table", max = MOST_AROUND)]
    FaultAround {
        /// The length that was asked for.
        asked: ByteLen,
    },
    /// A text without a number in front of the unit.
    #[error("a size is a number of bytes with an optional unit, such as 4096, 4K, 2M or 1.5G")]
    NoNumber,
    /// A size that is not a whole number of bytes.
    #[error(
        "the size is not a whole number of bytes: write a number of bytes, or halves as in 1.5G"
    )]
    Fraction,
    /// The number of bytes in parentheses is not the size in front of it.
    #[error("the size and the number of bytes in parentheses differ: write one of them")]
    SizesDiffer,
    /// A unit that is none of K, M, G, T, P, E, each also written as KiB and so on.
    #[error("the unit of a size is one of K, M, G, T, P, E (powers of two)")]
    BadUnit,
    /// A size that does not fit in 64 bits.
    #[error("the size does not fit in 64 bits")]
    SizeTooLarge,
    /// A text that names no memory kind.
    #[error("a memory kind is one of private, coherent, fsdax, p2pdma, generic")]
    UnknownKind,
    /// The first page is inside a folio.
    #[error(
        "{range} start inside a folio of {align} pages: the start has to be a multiple of that"
    )]
    StartInsideFolio {
        /// The range that was given.
        range: PfnRange,
        /// Pages in a folio.
        align: PageCount,
    },
    /// The last page is inside a folio.
    #[error("{range} end inside a folio of {align} pages: the length has to be a multiple of that")]
    EndInsideFolio {
        /// The range that was given.
        range: PfnRange,
        /// Pages in a folio.
        align: PageCount,
    },
    /// A region that is to hold its descriptors starts inside a page of its backing.
    #[error(
        "{range} start inside a huge page of {align} base pages that is behind the region: its \
         descriptors can lie in it only if the first number is a multiple of that"
    )]
    StartInsidePage {
        /// The pages of the region.
        range: PfnRange,
        /// Base pages in a page of the backing.
        align: PageCount,
    },
    /// The reserve ends inside a page of the backing.
    #[error(
        "a reserve of {reserve} pages ends inside a huge page of {align} base pages that is behind \
         the region: reserve a multiple of that"
    )]
    ReserveInsidePage {
        /// The reserve that was asked for.
        reserve: PageCount,
        /// Base pages in a page of the backing.
        align: PageCount,
    },
    /// No folio is left behind the reserve and the descriptors.
    #[error(
        "a region of {pages} pages has no folio of {folio} pages left behind a reserve of {reserve} \
         and {metadata} pages with the descriptor of that folio, at a multiple of {align} pages: bind \
         a larger region, smaller folios, data that is aligned to less, or without an altmap"
    )]
    NoFolioLeft {
        /// Pages in the region.
        pages: PageCount,
        /// How many the owner keeps.
        reserve: PageCount,
        /// How many the descriptors of one folio take.
        metadata: PageCount,
        /// Pages in a folio, or in a huge page of the backing where that is more.
        folio: PageCount,
        /// Pages at a multiple of which the folio would have to start.
        align: PageCount,
    },
    /// There are more or fewer descriptors than the layout has.
    #[error("{given} descriptors were given for a layout that has {needed}")]
    Descriptors {
        /// How many the layout has.
        needed: u64,
        /// How many were given.
        given: u64,
    },
    /// There are more or fewer blocks than the range has.
    #[error("{given} blocks were given for a range that has {needed}")]
    Blocks {
        /// How many the range has.
        needed: u64,
        /// How many were given.
        given: u64,
    },
    /// The memmap is one of folios, or its pages come and go: these are counted one by one.
    #[error("only base pages of memory that always has a reference are held by the block")]
    NoBlocks,
}

/// A page frame number: the index of a base page, counted from the start of its address space.
///
/// A `Pfn` is not a byte address. [`Pfn::to_bytes`] is the way to one, and it asks for the page
/// size, because the same number names different bytes on hosts with 4 KiB and 64 KiB pages.
#[derive(
    Clone,
    Copy,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    zerocopy::FromBytes,
    zerocopy::IntoBytes,
    zerocopy::Immutable,
)]
#[repr(transparent)]
pub struct Pfn(u64);

impl Pfn {
    /// Takes the number of a page frame.
    #[must_use]
    pub const fn new(number: u64) -> Self {
        Self(number)
    }

    /// Returns the number of this page frame.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }

    /// Returns the frame `count` pages further on.
    ///
    /// # Errors
    /// [`AddrError::Overflow`] past the last 64-bit frame number.
    pub const fn checked_add(self, count: PageCount) -> Result<Self, AddrError> {
        match self.0.checked_add(count.0) {
            Some(sum) => Ok(Self(sum)),
            None => Err(AddrError::Overflow { value: self.0, operation: "+", operand: count.0 }),
        }
    }

    /// Returns how many pages lie from `earlier` to this frame, or `None` if it comes before.
    #[must_use]
    pub const fn checked_since(self, earlier: Self) -> Option<PageCount> {
        match self.0.checked_sub(earlier.0) {
            Some(distance) => Some(PageCount(distance)),
            None => None,
        }
    }

    /// Returns whether a folio of `order` may start at this frame.
    #[must_use]
    pub const fn is_aligned(self, order: Order) -> bool {
        self.0 & order.offset_mask() == 0
    }

    /// Returns the first frame of the naturally aligned folio of `order` that holds this frame.
    #[must_use]
    pub const fn align_down(self, order: Order) -> Self {
        Self(self.0 & !order.offset_mask())
    }

    /// Returns the first frame at or after this one at which a folio of `order` may start.
    ///
    /// # Errors
    /// [`AddrError::Overflow`] past the last 64-bit frame number.
    pub const fn align_up(self, order: Order) -> Result<Self, AddrError> {
        match self.checked_add(PageCount(order.offset_mask())) {
            Ok(sum) => Ok(sum.align_down(order)),
            Err(error) => Err(error),
        }
    }

    /// Returns the byte at which this frame starts, for pages of `size`.
    ///
    /// # Errors
    /// [`AddrError::Overflow`] if that byte has no 64-bit number.
    pub const fn to_bytes(self, size: PageSize) -> Result<u64, AddrError> {
        if self.0 > u64::MAX >> size.shift() {
            return Err(AddrError::Overflow {
                value: self.0,
                operation: "*",
                operand: size.bytes(),
            });
        }
        Ok(self.0 << size.shift())
    }
}

impl fmt::Debug for Pfn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pfn({:#x})", self.0)
    }
}

impl fmt::Display for Pfn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// How many base pages.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
#[repr(transparent)]
pub struct PageCount(u64);

impl PageCount {
    /// No page.
    pub const ZERO: Self = Self(0);

    /// Takes a number of base pages.
    #[must_use]
    pub const fn new(pages: u64) -> Self {
        Self(pages)
    }

    /// Returns the number of base pages.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }

    /// Returns whether this is no page at all.
    #[must_use]
    pub const fn is_zero(self) -> bool {
        self.0 == 0
    }

    /// Returns the bytes in that many pages of `size`.
    ///
    /// # Errors
    /// [`AddrError::Overflow`] if that is not a 64-bit number.
    pub const fn to_bytes(self, size: PageSize) -> Result<ByteLen, AddrError> {
        match self.0.checked_mul(size.bytes()) {
            Some(bytes) => Ok(ByteLen::new(bytes)),
            None => {
                Err(AddrError::Overflow { value: self.0, operation: "*", operand: size.bytes() })
            }
        }
    }
}

impl fmt::Display for PageCount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

/// Consecutive page frames, at least one: `start` up to, not including, `end`.
///
/// # Invariants
/// `start < end`, so a range is never empty and `end - start` never wraps.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct PfnRange {
    start: Pfn,
    end: Pfn,
}

impl PfnRange {
    /// Takes the first frame and how many there are.
    ///
    /// # Errors
    /// [`AddrError::Empty`] for no page, [`AddrError::Overflow`] if the end has no 64-bit number.
    pub const fn try_new(start: Pfn, pages: PageCount) -> Result<Self, AddrError> {
        if pages.is_zero() {
            return Err(AddrError::Empty { start: start.0 });
        }
        match start.checked_add(pages) {
            Ok(end) => Ok(Self { start, end }),
            Err(error) => Err(error),
        }
    }

    /// Takes one frame.
    ///
    /// # Errors
    /// [`AddrError::Overflow`] for the last 64-bit number, behind which no range can end.
    pub const fn try_single(pfn: Pfn) -> Result<Self, AddrError> {
        Self::try_new(pfn, PageCount(1))
    }

    /// Returns the first frame.
    #[must_use]
    pub const fn start(self) -> Pfn {
        self.start
    }

    /// Returns the frame after the last.
    #[must_use]
    pub const fn end(self) -> Pfn {
        self.end
    }

    /// Returns how many frames there are; never zero.
    #[must_use]
    pub const fn pages(self) -> PageCount {
        PageCount(self.end.0 - self.start.0)
    }

    /// Returns whether `pfn` is one of these frames.
    #[must_use]
    pub const fn contains(self, pfn: Pfn) -> bool {
        self.start.0 <= pfn.0 && pfn.0 < self.end.0
    }

    /// Returns whether every frame of `other` is one of these.
    #[must_use]
    pub const fn contains_range(self, other: Self) -> bool {
        self.start.0 <= other.start.0 && other.end.0 <= self.end.0
    }

    /// Returns whether a frame belongs to both.
    #[must_use]
    pub const fn overlaps(self, other: Self) -> bool {
        self.start.0 < other.end.0 && other.start.0 < self.end.0
    }

    /// Returns the frames, in ascending order.
    pub fn iter(self) -> impl DoubleEndedIterator<Item = Pfn> {
        (self.start.0..self.end.0).map(Pfn)
    }
}

impl fmt::Display for PfnRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "pfns {:#x}..{:#x}", self.start.0, self.end.0)
    }
}

/// The size of a folio as a power of two: a folio of order `n` is `1 << n` base pages.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
#[repr(transparent)]
pub struct Order(u8);

impl Order {
    /// One base page.
    pub const BASE: Self = Self(0);
    /// The reach of one entry of a page middle directory: 2 MiB of 4 KiB pages.
    pub const PMD: Self = Self(9);
    /// The reach of one entry of a page upper directory: 1 GiB of 4 KiB pages.
    pub const PUD: Self = Self(18);
    /// The largest order: 4 TiB of 4 KiB pages.
    pub const MAX: Self = Self(30);

    /// Takes a base-2 logarithm of a number of pages.
    ///
    /// # Errors
    /// [`AddrError::OrderTooLarge`] beyond [`Order::MAX`].
    pub const fn try_new(order: u8) -> Result<Self, AddrError> {
        if order > Self::MAX.0 {
            return Err(AddrError::OrderTooLarge { order });
        }
        Ok(Self(order))
    }

    /// Takes a base-2 logarithm of a number of pages.
    ///
    /// # Panics
    /// Beyond [`Order::MAX`].
    #[must_use]
    pub const fn new(order: u8) -> Self {
        assert!(order <= Self::MAX.0, "an order beyond Order::MAX");
        Self(order)
    }

    /// Returns the base-2 logarithm of the number of pages.
    #[must_use]
    pub const fn get(self) -> u8 {
        self.0
    }

    /// Returns how many base pages a folio of this order has.
    #[must_use]
    pub const fn pages(self) -> PageCount {
        PageCount(1 << self.0)
    }

    /// Returns the bits of a frame number that say where inside its folio the frame lies.
    #[must_use]
    pub const fn offset_mask(self) -> u64 {
        (1 << self.0) - 1
    }
}

impl fmt::Display for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

/// The size of a page, a power of two of at least 4096 bytes.
///
/// It is a value: read from the system once and passed on. Linux runs with 4, 16 and 64 KiB pages.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(transparent)]
pub struct PageSize(u8);

impl PageSize {
    /// 4096 bytes.
    pub const KIB_4: Self = Self(12);
    /// 2 MiB.
    pub const MIB_2: Self = Self(21);
    /// 1 GiB.
    pub const GIB_1: Self = Self(30);

    /// Takes a size in bytes.
    ///
    /// # Errors
    /// [`AddrError::BadPageSize`] unless it is a power of two of at least 4096.
    pub const fn try_from_bytes(bytes: u64) -> Result<Self, AddrError> {
        if bytes < 4096 || !bytes.is_power_of_two() {
            return Err(AddrError::BadPageSize { bytes });
        }
        // A 64-bit number has at most 63 trailing zeroes, so nothing is lost.
        #[expect(clippy::cast_possible_truncation, reason = "at most 63")]
        Ok(Self(bytes.trailing_zeros() as u8))
    }

    /// Returns the base-2 logarithm of the size in bytes.
    #[must_use]
    pub const fn shift(self) -> u32 {
        self.0 as u32
    }

    /// Returns the size in bytes.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        1 << self.0
    }

    /// Returns how many whole pages `len` has.
    ///
    /// # Errors
    /// [`AddrError::Unaligned`] if it ends inside a page.
    pub const fn pages_in(self, len: ByteLen) -> Result<PageCount, AddrError> {
        if len.get() & (self.bytes() - 1) != 0 {
            return Err(AddrError::Unaligned {
                value: len.get(),
                align: self.bytes(),
                unit: "bytes",
            });
        }
        Ok(PageCount(len.get() >> self.0))
    }

    /// Returns the order of a folio of `bytes`, such as 9 for 2 MiB of 4 KiB pages.
    ///
    /// # Errors
    /// [`AddrError::BadPageSize`] unless `bytes` is a power of two and at least a page,
    /// [`AddrError::OrderTooLarge`] beyond [`Order::MAX`].
    pub const fn order_of(self, bytes: u64) -> Result<Order, AddrError> {
        if !bytes.is_power_of_two() || bytes < self.bytes() {
            return Err(AddrError::BadPageSize { bytes });
        }
        #[expect(clippy::cast_possible_truncation, reason = "at most 63")]
        Order::try_new(bytes.trailing_zeros() as u8 - self.0)
    }
}

impl fmt::Display for PageSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        ByteLen::new(self.bytes()).fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_past_the_last_frame_is_an_error_that_holds_both_numbers() {
        assert_eq!(
            Pfn::new(u64::MAX).checked_add(PageCount::new(1)),
            Err(AddrError::Overflow { value: u64::MAX, operation: "+", operand: 1 })
        );
        assert_eq!(Pfn::new(3).checked_since(Pfn::new(4)), None);
        assert_eq!(Pfn::new(4).checked_since(Pfn::new(4)), Some(PageCount::ZERO));
        assert!(Pfn::new(1 << 52).to_bytes(PageSize::KIB_4).is_err());
        assert_eq!(Pfn::new((1 << 52) - 1).to_bytes(PageSize::KIB_4), Ok(u64::MAX - 4095));
        assert!(Pfn::new(u64::MAX).align_up(Order::new(1)).is_err());
        assert_eq!(Pfn::new(u64::MAX).align_down(Order::MAX), Pfn::new(u64::MAX << 30));
    }

    #[test]
    fn a_range_is_never_empty_and_never_wraps() {
        assert_eq!(
            PfnRange::try_new(Pfn::new(7), PageCount::ZERO),
            Err(AddrError::Empty { start: 7 })
        );
        assert!(PfnRange::try_new(Pfn::new(u64::MAX), PageCount::new(1)).is_err());
        let last = PfnRange::try_new(Pfn::new(u64::MAX - 1), PageCount::new(1)).unwrap();
        assert!(last.contains(Pfn::new(u64::MAX - 1)));
        assert!(!last.contains(Pfn::new(u64::MAX)));
        assert_eq!(last.iter().count(), 1);
    }

    #[test]
    fn ranges_that_only_touch_do_not_overlap() {
        let at = |start, pages| PfnRange::try_new(Pfn::new(start), PageCount::new(pages)).unwrap();
        assert!(!at(0, 4).overlaps(at(4, 4)));
        assert!(!at(4, 4).overlaps(at(0, 4)));
        assert!(at(0, 5).overlaps(at(4, 4)));
        assert!(at(0, 5).contains_range(at(4, 1)));
        assert!(!at(0, 5).contains_range(at(4, 2)));
    }

    #[test]
    fn an_order_beyond_the_largest_is_refused() {
        assert_eq!(Order::try_new(31), Err(AddrError::OrderTooLarge { order: 31 }));
        assert_eq!(Order::try_new(30).unwrap().pages(), PageCount::new(1 << 30));
        assert_eq!(Order::PMD.offset_mask(), 511);
        assert!(Pfn::new(1024).is_aligned(Order::PMD));
        assert!(!Pfn::new(1025).is_aligned(Order::PMD));
    }

    #[test]
    fn a_page_size_is_a_power_of_two_of_at_least_4096() {
        for bad in [0, 1, 2048, 4095, 4097, 12288] {
            assert_eq!(PageSize::try_from_bytes(bad), Err(AddrError::BadPageSize { bytes: bad }));
        }
        let size = PageSize::try_from_bytes(65536).unwrap();
        assert_eq!(size.pages_in(ByteLen::mib(1)), Ok(PageCount::new(16)));
        assert_eq!(
            size.pages_in(ByteLen::new(65537)),
            Err(AddrError::Unaligned { value: 65537, align: 65536, unit: "bytes" })
        );
        assert_eq!(PageSize::KIB_4.order_of(2 << 20), Ok(Order::PMD));
        assert!(PageSize::KIB_4.order_of(3 << 20).is_err());
        assert!(PageSize::KIB_4.order_of(1 << 44).is_err());
    }
}
