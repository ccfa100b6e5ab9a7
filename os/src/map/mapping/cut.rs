//! One mapping as two, and two as one again: [`Mapping::cut`], [`Mapping::join`]. The kernel is not
//! involved: it has one mapping as before, and each part unmaps its own bytes when it is dropped. So a part
//! may be lent as a slice ([`crate::Exclusive`]) or be given away while the other is copied in and out of.
//! The rest behind a part of a page cannot be unmapped alone, so a mapping of huge pages is cut between them.
//!
//! Parts know from which mapping they were cut, by a number that no other one ever has. Two mappings
//! that only happen to lie side by side are not joined: the pointer to the first may not be used for
//! the second.
//!
//! Cost: no system call.

use uzone_pages::ByteLen;

use super::{Behind, Mapping, MappingError, Rejected};
use crate::map::bytes::AccessError;

impl Mapping {
    /// Cuts the mapping in two: the first `front` bytes, and the rest. Each part is a mapping in its
    /// own right: it counts offsets from its own start, unmaps only its own bytes, and where it is
    /// of a file, starts at its own offset of that.
    ///
    /// # Errors
    /// [`Rejected`] with the mapping: [`AccessError::CutsPage`] unless `front` is a multiple of
    /// [`Mapping::page_size`], [`AccessError::Empty`] or [`AccessError::Beyond`] unless both parts
    /// would have a byte.
    pub fn cut(self, front: ByteLen) -> Result<(Self, Self), Rejected<Self>> {
        let at = match self.check_cut(front.get()) {
            Ok(at) => at,
            Err(cause) => return Err(Rejected::new(self, cause)),
        };
        let behind = Self {
            start: self.at(at),
            len: self.len - at,
            mapped_len: self.mapped_len - at,
            page: self.page,
            access: self.access,
            behind: self.behind.from(front.get()),
            origin: self.origin,
        };
        // Invariants 1 to 3 hold for both: `at` is a multiple of the page and inside of `len`. No
        // byte belongs to two mappings from here on.
        let mut front = self;
        front.len = at;
        front.mapped_len = at;
        Ok((front, behind))
    }

    fn check_cut(&self, at: u64) -> Result<usize, AccessError> {
        let len_bytes = self.len as u64;
        if at == len_bytes {
            return Err(AccessError::Empty { start: at, end: len_bytes });
        }
        AccessError::check_pages(&(0..at), len_bytes, self.page)?;
        usize::try_from(at).map_err(|_| AccessError::Beyond { start: 0, end: at, len_bytes })
    }

    /// Joins two parts that [`Mapping::cut`] made of one, of which `behind` starts where this one
    /// ends.
    ///
    /// # Errors
    /// [`Rejected`] with both.
    pub fn join(self, behind: Self) -> Result<Self, Rejected<(Self, Self)>> {
        let (start, next) = (self.addr(), behind.addr());
        if self.origin != behind.origin || start.get() + self.mapped_len != next.get() {
            let cause = MappingError::NotNeighbours { front: start, len: self.len(), behind: next };
            return Err(Rejected::new((self, behind), cause));
        }
        let (mut front, mut behind) = (self, behind);
        // From here on dropping `behind` unmaps nothing, and `front` has its bytes. They are of the
        // same mmap(2), or of the same adopted memory, so `start` is good for all of them. A part
        // that another one follows ends at a page, so its length is all that it has mapped.
        behind.behind = Behind::Adopted;
        front.len = front.mapped_len + behind.len;
        front.mapped_len += behind.mapped_len;
        Ok(front)
    }
}

impl Behind {
    /// Returns the memory behind the bytes from `offset` on.
    fn from(&self, skipped: u64) -> Self {
        match self {
            Self::Anonymous => Self::Anonymous,
            // No overflow: the range was mapped, so its end has a number.
            Self::File { fd, offset, sharing } => {
                Self::File { fd: fd.clone(), offset: offset + skipped, sharing: *sharing }
            }
            Self::Adopted => Self::Adopted,
            Self::Lent { owner } => Self::Lent { owner: owner.clone() },
        }
    }
}
