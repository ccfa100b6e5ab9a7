//! The naive way to hold memory, page by page: find the page's head in its own 64-byte descriptor,
//! and add one to the head's count unless that is zero. So did the kernel before it grouped pages,
//! and so would a port of it. It shares no code with ours: a baseline may not profit from an optimisation of ours.

use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};

use uzone_os::Mapped;
use uzone_pages::Pfn;
use zerocopy::FromBytes;

use super::pin::present;
use crate::Result;

/// A descriptor as far as a hold looks at it.
#[derive(FromBytes)]
#[repr(C)]
struct NaivePage {
    flags: u64,
    /// The number of the head in the array, and one more; zero for a head.
    compound_head: u64,
    others: [u64; 4],
    count: AtomicU64,
    memcg: u64,
}

const _: () = assert!(size_of::<NaivePage>() == 64);

/// The descriptors of a region, all of them present.
pub struct Naive {
    pages: Mapped<NaivePage>,
}

impl Naive {
    /// Describes `pages` base pages in folios of `folio_pages`.
    pub fn new(pages: u64, folio_pages: usize) -> Result<Self> {
        let mut pages: Mapped<NaivePage> = present(pages)?;
        for (head, folio) in pages.chunks_mut(folio_pages).enumerate() {
            for page in folio.iter_mut().skip(1) {
                page.compound_head = (head * folio_pages) as u64 + 1;
            }
            if let Some(head) = folio.first_mut() {
                // The base reference, as memory of a device has it.
                *head.count.get_mut() = 1;
            }
        }
        Ok(Self { pages })
    }

    #[inline]
    fn count_of<'a>(&'a self, page: &'a NaivePage) -> &'a AtomicU64 {
        match usize::try_from(page.compound_head).ok().and_then(|head| head.checked_sub(1)) {
            Some(head) => &self.pages[head].count,
            None => &page.count,
        }
    }

    #[inline]
    fn take(&self, page: &NaivePage) -> bool {
        let count = self.count_of(page);
        let mut now = count.load(Ordering::Relaxed);
        while now != 0 {
            match count.compare_exchange_weak(now, now + 1, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => return true,
                Err(found) => now = found,
            }
        }
        false
    }

    /// Takes a hold for each page. Returns how many were had.
    pub fn hold(&self) -> usize {
        black_box(self.pages.iter().filter(|page| self.take(page)).count())
    }

    /// Takes a hold for each page and writes its number to a list. Returns how many were had.
    pub fn hold_listed(&self, start: Pfn, list: &mut [Pfn]) -> usize {
        let mut held = 0;
        for ((page, entry), number) in self.pages.iter().zip(list).zip(start.get()..) {
            if !self.take(page) {
                break;
            }
            *entry = Pfn::new(number);
            held += 1;
        }
        held
    }

    /// Gives a hold back for each page.
    pub fn give_back(&self) {
        for page in self.pages.iter() {
            self.count_of(page).fetch_sub(1, Ordering::Release);
        }
    }

    /// Returns whether every page's folio has `holds` besides its base reference.
    pub fn is_held(&self, holds: u64) -> bool {
        self.pages.iter().all(|page| self.count_of(page).load(Ordering::Relaxed) == 1 + holds)
    }
}
