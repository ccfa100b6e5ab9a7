//! Transparent huge pages, filled and installed whole: [`Transparent`], a kernel whose pages are that
//! large, although the page tables may have smaller ones. The kernel makes no huge page where missing pages
//! raise events: it would have to fill pages that no thread touched. So a page of 2 MiB is made elsewhere,
//! in a slot of unregistered memory, is filled there, and then moved to where it is missing: a thread
//! that touches any part of it sees all of it or waits. The thread that produces a page writes straight
//! into the slot.
//!
//! If it cannot be moved, its bytes are copied, in small pages: some of it is there already, the process
//! has forked and shares the slot, or the kernel is busy. Then, and where the host had no free huge page,
//! or the page tables have had small pages so that the kernel splits what is moved, the bytes are right and
//! the page is not huge. [`FaultStats::huge_pages`] counts the huge ones, and [`LazyMapping::collapse`]
//! makes the others huge.
//!
//! Cost: the kernel clears a huge page before it is filled, and a page that is there for the first time
//! costs a virtual machine more than its bytes do; moving one takes some microseconds. The slots are
//! one for each thread that ever filled a page at the same time, 2 MiB of addresses each, and memory only
//! while a page is made.
//! Source: ioctl_userfaultfd(2), `UFFDIO_MOVE`, Linux 6.8.
//!
//! [`FaultStats::huge_pages`]: crate::FaultStats::huge_pages
//! [`LazyMapping::collapse`]: crate::LazyMapping::collapse

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use uzone_os::hugepages;
use uzone_os::signals::lock_uninterrupted;
use uzone_os::uffd::{Answered, Install, Registered, UffdError};
use uzone_os::{Anonymous, Exclusive, HugeAdvice, SystemRoot};
use uzone_pages::{ByteLen, PageSize};

use crate::engine::kernel::{Fill, Kernel};
use crate::error::MapError;

/// A kernel that answers in small pages, and moves large ones.
pub(crate) trait MovingKernel: Kernel {
    /// Moves the whole of `source` to where it is missing.
    fn move_here(&self, offset: u64, source: &mut Exclusive) -> Result<Answered, UffdError>;

    /// Returns whether a range is huge pages.
    fn is_huge(&self, range: Range<u64>) -> bool;
}

impl MovingKernel for Registered {
    fn move_here(&self, offset: u64, source: &mut Exclusive) -> Result<Answered, UffdError> {
        let len = source.len();
        self.move_pages(offset, source, 0, len, Install::default())
    }

    fn is_huge(&self, range: Range<u64>) -> bool {
        let len = ByteLen::new(range.end - range.start);
        self.mapping().huge_backed_in(range).is_ok_and(|huge| huge == len)
    }
}

/// The answers for memory in transparent huge pages.
pub(crate) struct Transparent<K> {
    small: Arc<K>,
    page: PageSize,
    // Held for a push or a pop.
    slots: Mutex<Vec<Exclusive>>,
    huge_pages: AtomicU64,
}

/// Returns the size of the host's transparent huge pages.
///
/// # Errors
/// [`MapError::NotHuge`] if it has none, or they are switched off.
pub(crate) fn page_size() -> Result<PageSize, MapError> {
    let Some(thp) = hugepages::thp(&SystemRoot::host())? else {
        return Err(MapError::NotHuge { reason: "its kernel was built without them" });
    };
    if thp.enabled == "never" {
        let reason = "write madvise to /sys/kernel/mm/transparent_hugepage/enabled as root";
        return Err(MapError::NotHuge { reason });
    }
    if uzone_os::probe::thp_is_switched_off() {
        let reason = "a parent or this program has switched them off for this process (PR_SET_THP_DISABLE of prctl(2))";
        return Err(MapError::NotHuge { reason });
    }
    Ok(PageSize::try_from_bytes(thp.pmd_size.get())?)
}

impl<K: MovingKernel> Transparent<K> {
    /// Answers for the memory of `small` in pages of `page`.
    pub(crate) fn new(small: Arc<K>, page: PageSize) -> Self {
        Self { small, page, slots: Mutex::default(), huge_pages: AtomicU64::new(0) }
    }

    /// Asks for a range in the host's pages, those that are there already left out.
    fn in_small_pages(
        &self,
        range: Range<u64>,
        ask: impl Fn(Range<u64>) -> Result<Answered, UffdError>,
    ) -> Result<Answered, UffdError> {
        let small = uzone_os::probe::page_size().bytes();
        let (mut at, mut was_there) = (range.start, 0);
        // It ends: every round but the last goes at least a small page further.
        while at < range.end {
            at += match ask(at..range.end)? {
                Answered::All => range.end - at,
                Answered::Part { bytes } => bytes.max(1).next_multiple_of(small),
                Answered::Present => {
                    was_there += small;
                    small
                }
                // The small pages that were installed stay, and the next attempt skips them.
                stopped => return Ok(stopped),
            };
        }
        if was_there == range.end - range.start {
            return Ok(Answered::Present);
        }
        if was_there != 0 {
            self.small.wake(range);
        }
        Ok(Answered::All)
    }
}

impl<K: MovingKernel> Kernel for Transparent<K> {
    fn install(&self, range: Range<u64>, fill: Fill<'_>) -> Result<Answered, UffdError> {
        if matches!(fill, Fill::Cached) {
            // The memory is of no file, so the page cache has nothing of it.
            return self.small.install(range, fill);
        }
        let page = range.start..range.start + self.page.bytes();
        let fill = fill.part(0..self.page.bytes());
        let answer = if let Fill::Bytes(bytes) = fill
            && let Some(mut slot) = self.slot()
        {
            slot.as_bytes_mut().copy_from_slice(bytes);
            let answer = self.install_slot(page.start, &mut slot);
            self.give_back(slot);
            answer
        } else {
            // Bytes of another mapping are copied in small pages: the kernel reads them, which raises no
            // signal where they end. Zeroes take no memory until they are written.
            self.in_small_pages(page.clone(), |part| {
                let fill = fill.part(part.start - page.start..part.end - page.start);
                self.small.install(part, fill)
            })
        };
        match answer? {
            Answered::All if page.end < range.end => {
                Ok(Answered::Part { bytes: self.page.bytes() })
            }
            answer => Ok(answer),
        }
    }

    fn wake(&self, range: Range<u64>) {
        self.small.wake(range);
    }

    fn has_slots(&self) -> bool {
        true
    }

    fn slot(&self) -> Option<Exclusive> {
        let kept = lock_uninterrupted(&self.slots).pop();
        kept.or_else(|| {
            let len = ByteLen::new(self.page.bytes());
            let huge = HugeAdvice::Advise;
            let how = Anonymous { huge, align: Some(len), ..Anonymous::default() };
            Exclusive::anonymous(len, how).ok()
        })
    }

    fn give_back(&self, slot: Exclusive) {
        lock_uninterrupted(&self.slots).push(slot);
    }

    fn install_slot(&self, offset: u64, slot: &mut Exclusive) -> Result<Answered, UffdError> {
        let page = offset..offset + self.page.bytes();
        let moved = match self.small.move_here(offset, slot) {
            Ok(Answered::All) => {
                // The kernel cuts it where the page tables have had small pages.
                let is_huge = self.small.is_huge(page);
                // Relaxed: a statistic, by which nothing is published.
                self.huge_pages.fetch_add(is_huge.into(), Ordering::Relaxed);
                return Ok(Answered::All);
            }
            Ok(gone @ (Answered::NotRegistered | Answered::Gone)) => return Ok(gone),
            Ok(Answered::Part { bytes }) => bytes,
            Ok(_) | Err(_) => 0,
        };
        let bytes = &*slot.as_bytes_mut();
        let rest = page.start + moved..page.end;
        let copied = self.in_small_pages(rest, |part| {
            let fill = Fill::Bytes(bytes).part(part.start - page.start..part.end - page.start);
            self.small.install(part, fill)
        })?;
        if moved != 0 && copied == Answered::Present {
            // What was moved was missing; threads that wait for the rest have not been woken.
            self.small.wake(page);
            return Ok(Answered::All);
        }
        Ok(copied)
    }

    fn huge_pages(&self) -> u64 {
        // Relaxed: a statistic.
        self.huge_pages.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;
    use uzone_os::uffd::UffdCall;

    use super::*;
    use crate::tests::no_memory;

    /// A huge page of eight small ones.
    const SMALL: u64 = 4096;
    const HUGE: u64 = 8 * SMALL;

    /// Has small pages by their first byte, and answers as it likes.
    #[derive(Default)]
    struct Machine {
        pages: BTreeMap<u64, u8>,
        /// What it does next, used in turn.
        whims: Vec<u8>,
        next: usize,
        /// Whether it ever woke a page that was there before.
        woken: Vec<Range<u64>>,
    }

    struct Fake(Mutex<Machine>);

    impl Fake {
        fn fill(
            &self,
            range: Range<u64>,
            call: UffdCall,
            byte: impl Fn(u64) -> u8,
        ) -> Result<Answered, UffdError> {
            let mut machine = self.0.lock().unwrap();
            assert!(range.start < range.end && (range.start | range.end).is_multiple_of(SMALL));
            let whim = machine.whims[machine.next % machine.whims.len()];
            machine.next += 1;
            match whim % 11 {
                0 => return Ok(Answered::LayoutChanging),
                1 if call == UffdCall::Move => return Ok(Answered::Busy),
                1 => return Err(no_memory(call, &range)),
                2 => return Ok(Answered::Gone),
                _ => {}
            }
            let pages = range.start / SMALL..range.end / SMALL;
            let mut stop = pages.clone().find(|page| machine.pages.contains_key(page));
            if stop == Some(pages.start) {
                return Ok(Answered::Present);
            }
            if whim.is_multiple_of(3) && pages.end - pages.start > 1 && stop.is_none() {
                stop = Some(pages.start + 1 + u64::from(whim) % (pages.end - pages.start - 1));
            }
            let end = stop.unwrap_or(pages.end);
            for page in pages.start..end {
                machine.pages.insert(page, byte(page * SMALL));
            }
            Ok(match stop {
                Some(_) => Answered::Part { bytes: (end - pages.start) * SMALL },
                None => Answered::All,
            })
        }
    }

    impl Kernel for Fake {
        fn install(&self, range: Range<u64>, fill: Fill<'_>) -> Result<Answered, UffdError> {
            let offset = range.start;
            match fill {
                Fill::Bytes(bytes) => self
                    .fill(range, UffdCall::Copy, |at| bytes[usize::try_from(at - offset).unwrap()]),
                Fill::Zero => self.fill(range, UffdCall::ZeroPage, |_| 0),
                Fill::Cached | Fill::From { .. } => Ok(Answered::Hole),
                Fill::Poison => self.fill(range, UffdCall::Poison, |_| u8::MAX),
            }
        }

        fn wake(&self, range: Range<u64>) {
            self.0.lock().unwrap().woken.push(range);
        }
    }

    impl MovingKernel for Fake {
        fn move_here(&self, offset: u64, source: &mut Exclusive) -> Result<Answered, UffdError> {
            let bytes = source.as_bytes_mut();
            let range = offset..offset + bytes.len() as u64;
            let first = |at: u64| usize::try_from(at - offset).unwrap();
            let answer = self.fill(range, UffdCall::Move, |at| bytes[first(at)])?;
            let moved = match answer {
                Answered::All => bytes.len(),
                Answered::Part { bytes } => usize::try_from(bytes).unwrap(),
                _ => 0,
            };
            // What was moved reads as zero, and is no use for a copy.
            bytes[..moved].fill(0);
            Ok(answer)
        }

        fn is_huge(&self, _: Range<u64>) -> bool {
            true
        }
    }

    fn right(page: u64) -> u8 {
        u8::try_from(page % 200).unwrap() + 1
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        /// Whatever the kernel answers, what is said to be in place is, and each byte is right.
        #[test]
        #[cfg_attr(miri, ignore = "it maps memory")]
        fn a_page_is_whole_when_it_is_said_to_be(
            whims in prop::collection::vec(any::<u8>(), 1..40),
            there in prop::collection::vec(any::<bool>(), 16),
            by_slot: bool,
        ) {
            let fake = Fake(Mutex::default());
            let mut before = Vec::new();
            {
                let mut machine = fake.0.lock().unwrap();
                machine.whims = whims;
                for (page, _) in (0..).zip(&there).filter(|(_, is_there)| **is_there) {
                    machine.pages.insert(page, right(page));
                    before.push(page);
                }
            }
            let kernel = Transparent::new(Arc::new(fake), PageSize::try_from_bytes(HUGE).unwrap());
            let mut bytes = vec![0; usize::try_from(2 * HUGE).unwrap()];
            for (page, small) in (0..).zip(bytes.chunks_mut(4096)) {
                small.fill(right(page));
            }
            let mut at = 0;
            // As the engine asks: until all pages are present, or the kernel refuses for good.
            for _ in 0..200 {
                let from = usize::try_from(at).unwrap();
                let answer = if by_slot {
                    let mut slot = kernel.slot().unwrap();
                    let len = slot.as_bytes_mut().len();
                    slot.as_bytes_mut().copy_from_slice(&bytes[from..from + len]);
                    let answer = kernel.install_slot(at, &mut slot);
                    kernel.give_back(slot);
                    answer
                } else {
                    kernel.install(at..2 * HUGE, Fill::Bytes(&bytes[from..]))
                };
                let done = match answer {
                    Ok(Answered::All) if by_slot => HUGE,
                    Ok(Answered::All) => 2 * HUGE - at,
                    Ok(Answered::Part { bytes }) => bytes,
                    Ok(Answered::Present) => HUGE,
                    Ok(Answered::LayoutChanging | Answered::Gone) | Err(_) => 0,
                    other => panic!("{other:?}"),
                };
                prop_assert!(done.is_multiple_of(HUGE), "no huge page is cut");
                let machine = kernel.small.0.lock().unwrap();
                for page in at / SMALL..(at + done) / SMALL {
                    prop_assert_eq!(machine.pages.get(&page), Some(&right(page)));
                }
                // A thread that waited for a small page that was present already is woken, here or by the
                // caller.
                if answer.is_ok_and(|answer| answer != Answered::Present) && done != 0 {
                    for &page in before.iter().filter(|page| (at..at + done).contains(&(*page * SMALL))) {
                        let is_woken = |woken: &Range<u64>| woken.contains(&(page * SMALL));
                        prop_assert!(machine.woken.iter().any(is_woken), "page {} waits", page);
                    }
                }
                at += done;
                if at == 2 * HUGE {
                    break;
                }
            }
            let machine = kernel.small.0.lock().unwrap();
            for (&page, &byte) in &machine.pages {
                prop_assert_eq!(byte, right(page));
            }
        }
    }
}
