//! Pages that are packed together, wherever they are in the image: [`Order`].
//!
//! The pages of a list come first, in its order; the others follow in theirs. The *packed image* is the image
//! in that order, and frames are cut from it. A place in the image becomes a place in the packed image by a
//! search of the list: 16 bytes of memory for each of its pages.

/// The pages that come first.
///
/// # Invariants
/// No page is twice in the list, and each is below the number of whole pages of the image: a last page that
/// is shorter stays the last.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Order {
    listed: Vec<u64>,
    /// The pages of the list in ascending order, and the place of each in the list.
    sorted: Vec<(u64, u64)>,
}

impl Order {
    /// Takes a list, without those pages that it has twice or that are no whole pages of the image.
    pub(crate) fn new(pages: &[u64], whole_pages: u64) -> Self {
        let mut seen: Vec<(u64, u64)> =
            pages.iter().copied().zip(0..).filter(|(page, _)| *page < whole_pages).collect();
        seen.sort_unstable();
        seen.dedup_by_key(|(page, _)| *page);
        seen.sort_unstable_by_key(|(_, place)| *place);
        let listed: Vec<u64> = seen.into_iter().map(|(page, _)| page).collect();
        let mut sorted: Vec<(u64, u64)> = listed.iter().copied().zip(0..).collect();
        sorted.sort_unstable();
        Self { listed, sorted }
    }

    pub(crate) fn listed(&self) -> &[u64] {
        &self.listed
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.listed.is_empty()
    }

    /// Returns where a page is packed.
    pub(crate) fn place_of(&self, page: u64) -> u64 {
        match self.sorted.binary_search_by_key(&page, |(page, _)| *page) {
            Ok(found) => self.sorted[found].1,
            // As many of the list come first, and those of them that were before it no longer are.
            Err(before) => page + (self.listed.len() - before) as u64,
        }
    }

    /// Returns the page that is packed at each place, from the first to the last.
    pub(crate) fn pages(&self, pages: u64) -> impl Iterator<Item = u64> + '_ {
        let others =
            move |page: &u64| self.sorted.binary_search_by_key(page, |(page, _)| *page).is_err();
        self.listed.iter().copied().chain((0..pages).filter(others))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_that_is_listed_twice_or_is_not_there_is_left_out() {
        let order = Order::new(&[7, 3, 7, 10, 3, u64::MAX, 0], 10);
        assert_eq!(order.listed(), [7, 3, 0]);
        assert_eq!(order.pages(10).collect::<Vec<_>>(), [7, 3, 0, 1, 2, 4, 5, 6, 8, 9]);
        assert!(order.pages(10).map(|page| order.place_of(page)).eq(0..10));
        assert!(Order::new(&[10], 10).is_empty());
    }
}
