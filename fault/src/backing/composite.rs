//! Memory that is made of parts: [`CompositeBacking`], ranges of other backings side by side.
//!
//! A window that lies in several parts is offered to each of them as far as it goes, with the offsets of
//! that part's own backing, so a part needs not know that there are others. What no part has is an error,
//! unless gaps are zero. Zero ranges are the kernel's own zero page where the memory has one, and take none
//! until they are written.
//!
//! Parts are copied into memory of the mapping's own. Pages that a memory file has are mapped from
//! that file, and one mapping is of one file: such parts are refused, and need a mapping each.
//!
//! Cost: a window finds its first part by a binary search.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use uzone_os::uffd::in_thread::Source;
use uzone_pages::{ByteLen, FaultAround, PageSize};

use crate::backing::hooks::Backing;
use crate::backing::zero::ZeroBacking;
use crate::engine::window::Window;
use crate::error::{BackingError, MapError};

struct Part {
    range: Range<u64>,
    /// Where the part starts in its own backing.
    offset: u64,
    backing: Arc<dyn Backing>,
}

fn refused(reason: String) -> MapError {
    MapError::Part { reason }
}

/// Checks a part by itself.
fn check(part: &Part, page: PageSize) -> Result<(), MapError> {
    let Part { range: Range { start, end }, offset, ref backing } = *part;
    let page = page.bytes();
    if start >= end || (start | end | offset) & (page - 1) != 0 {
        return Err(refused(format!(
            "the part from {start:#x} to {end:#x}, which starts at {offset:#x} of its backing, is not one page or more: all three have to be multiples of {page}"
        )));
    }
    let unknown = |cause| MapError::Unknown { part: Some(start), cause };
    if backing.memory_file().map_err(unknown)?.is_some() {
        return Err(refused(format!(
            "the part at {start:#x} is a memory file, whose pages are mapped and not copied: give it a mapping of its own"
        )));
    }
    // Also of a backing without a length, no byte is behind the last.
    let (wanted, has) = (offset.checked_add(end - start), backing.byte_len());
    let has = has.unwrap_or(ByteLen::new(u64::MAX));
    if wanted.is_none_or(|wanted| wanted > has.get().div_ceil(page).saturating_mul(page)) {
        let wanted = wanted.unwrap_or(u64::MAX);
        return Err(refused(format!(
            "the part at {start:#x} wants its backing up to {wanted:#x}, and that has {has}: make the part shorter"
        )));
    }
    Ok(())
}

/// Ranges of other backings, side by side.
///
/// The parts cover everything from 0 to the end of the last, are disjoint, and are sorted.
pub struct CompositeBacking {
    page: PageSize,
    parts: Vec<Part>,
}

impl CompositeBacking {
    /// Makes one of parts, in any order: the bytes of each, the backing that has them, and the byte of that
    /// backing where they start. Parts are whole pages of `page`, or it cannot be mapped in pages of that
    /// size. A file may end inside of the last page, of which the rest is zero; a part of zeroes is a
    /// [`ZeroBacking`].
    ///
    /// # Errors
    /// [`MapError`] names the first part that does not fit, by where it starts.
    pub fn of_parts(
        page: PageSize,
        parts: Vec<(Range<u64>, Arc<dyn Backing>, u64)>,
    ) -> Result<Self, MapError> {
        Self::checked(page, parts, false)
    }

    /// As [`of_parts`](Self::of_parts), and the gaps between the parts, and before the first, are zero.
    ///
    /// # Errors
    /// As there.
    pub fn with_zero_gaps(
        page: PageSize,
        parts: Vec<(Range<u64>, Arc<dyn Backing>, u64)>,
    ) -> Result<Self, MapError> {
        Self::checked(page, parts, true)
    }

    fn checked(
        page: PageSize,
        mut parts: Vec<(Range<u64>, Arc<dyn Backing>, u64)>,
        gaps_are_zero: bool,
    ) -> Result<Self, MapError> {
        parts.sort_by_key(|(range, ..)| range.start);
        let mut whole: Vec<Part> = Vec::with_capacity(parts.len());
        for (range, backing, offset) in parts {
            let part = Part { range, offset, backing };
            check(&part, page)?;
            let start = part.range.start;
            let before = whole.last().map_or(0..0, |last| last.range.clone());
            if start < before.end {
                let Range { start: first, end } = before;
                return Err(refused(format!(
                    "the part at {start:#x} starts before the one at {first:#x} ends, at {end:#x}"
                )));
            }
            if start > before.end {
                let range = before.end..start;
                if !gaps_are_zero {
                    return Err(refused(format!(
                        "no part has the bytes from {:#x} to {start:#x}: add one, or take `with_zero_gaps`",
                        range.start
                    )));
                }
                whole.push(Part { range, offset: 0, backing: Arc::new(ZeroBacking) });
            }
            whole.push(part);
        }
        if whole.is_empty() {
            return Err(refused("a backing of parts needs at least one part".to_owned()));
        }
        Ok(Self { page, parts: whole })
    }

    /// Returns the parts that have bytes of `range`, each with those bytes and where they are in the
    /// part's own backing.
    fn parts(&self, range: Range<u64>) -> impl Iterator<Item = (&Part, Range<u64>, u64)> {
        let first = self.parts.partition_point(|part| part.range.end <= range.start);
        let Range { start, end } = range;
        self.parts[first..].iter().take_while(move |part| part.range.start < end).map(move |part| {
            let inside = part.range.start.max(start)..part.range.end.min(end);
            let offset = part.offset + (inside.start - part.range.start);
            (part, inside, offset)
        })
    }
}

impl Backing for CompositeBacking {
    fn map_pages(&self, window: &mut Window<'_>) {
        for (part, inside, offset) in self.parts(window.range()) {
            // A page that cuts a part was refused when the memory was mapped.
            let _ = window.part(inside, offset, |window| part.backing.map_pages(window));
        }
    }

    fn fault(&self, window: &mut Window<'_>) -> Result<(), BackingError> {
        for (part, inside, offset) in self.parts(window.range()) {
            let answer = window.part(inside, offset, |window| part.backing.fault(window));
            answer.map_err(|cut| BackingError::Other(cut.into()))??;
        }
        Ok(())
    }

    fn read_ahead(&self, range: Range<u64>) {
        for (part, inside, offset) in self.parts(range) {
            part.backing.read_ahead(offset..offset + (inside.end - inside.start));
        }
    }

    fn will_need(&self, ranges: &[Range<u64>]) {
        for range in ranges {
            for (part, inside, offset) in self.parts(range.clone()) {
                let range = offset..offset + (inside.end - inside.start);
                part.backing.will_need(std::slice::from_ref(&range));
            }
        }
    }

    fn in_thread(&self) -> Option<Source> {
        let mut parts = Vec::new();
        for Part { range, offset, backing } in &self.parts {
            let Source::Parts(inner) = backing.in_thread()? else { return None };
            let end = offset + (range.end - range.start);
            for (inside, file) in inner {
                let (from, to) = (inside.start.max(*offset), inside.end.min(end));
                if from < to {
                    let file = file.map(|(file, at)| (file, at + (from - inside.start)));
                    let range = range.start + (from - offset)..range.start + (to - offset);
                    parts.push((range, file));
                }
            }
        }
        Some(Source::Parts(parts))
    }

    fn byte_len(&self) -> Option<ByteLen> {
        self.parts.last().map(|last| ByteLen::new(last.range.end))
    }

    fn write_back(&self, offset: u64, bytes: &[u8]) -> Result<(), BackingError> {
        for (part, inside, at) in self.parts(offset..offset.saturating_add(bytes.len() as u64)) {
            let index = |of: u64| usize::try_from(of - offset).unwrap_or(bytes.len());
            part.backing.write_back(at, &bytes[index(inside.start)..index(inside.end)])?;
        }
        Ok(())
    }

    fn takes_pages_of(&self, page: PageSize) -> bool {
        page <= self.page && self.parts.iter().all(|part| part.backing.takes_pages_of(page))
    }

    fn largest_window(&self) -> FaultAround {
        let windows = self.parts.iter().map(|part| part.backing.largest_window());
        windows.min().unwrap_or(FaultAround::MAX)
    }
}

impl fmt::Debug for CompositeBacking {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts: Vec<_> = self.parts.iter().map(|part| (&part.range, part.offset)).collect();
        f.debug_struct("CompositeBacking").field("page", &self.page).field("parts", &parts).finish()
    }
}

#[cfg(test)]
mod tests;
