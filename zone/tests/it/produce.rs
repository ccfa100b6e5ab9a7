//! Pins of pages that are not there: what is at hand is mapped, the rest produced, failures said.

use std::sync::{Arc, Barrier, Mutex, OnceLock, Weak};
use std::thread;

use crate::common::range;
use uzone_pages::{ByteLen, Content, HoldError, MemoryKind, Order, PageCount, Pfn, PfnRange};
use uzone_zone::{BindOptions, FaultError, Pagemap, PagemapOps, PinError, Region, Zone};

/// A source of pages: the even ones are at hand, the others have to be fetched.
#[derive(Default)]
struct Source {
    pagemap: OnceLock<Weak<Pagemap>>,
    calls: Mutex<Vec<Call>>,
    /// The page that cannot be had.
    broken: Option<Pfn>,
    /// Whether what is fetched goes away again at once.
    is_forgetful: bool,
    /// The pages of which all others go away when one is fetched, unless they are pinned.
    evicts: Option<PfnRange>,
}

#[derive(Clone, Debug, PartialEq)]
enum Call {
    MapPages(PfnRange),
    Fault(Pfn),
}

impl Source {
    fn pagemap(&self) -> Arc<Pagemap> {
        self.pagemap.get().unwrap().upgrade().unwrap()
    }

    fn make_present(&self, pfn: Pfn) {
        let pagemap = self.pagemap();
        if pagemap.advance(pfn, Content::Absent, Content::Filling).is_ok() {
            let to = if self.is_forgetful { Content::Absent } else { Content::Present };
            pagemap.advance(pfn, Content::Filling, to).unwrap();
        }
    }

    fn map_pages(&self, range: PfnRange) {
        self.calls.lock().unwrap().push(Call::MapPages(range));
        range.iter().filter(|pfn| pfn.get() % 2 == 0).for_each(|pfn| self.make_present(pfn));
    }

    fn fault(&self, pfn: Pfn) -> Result<(), FaultError> {
        self.calls.lock().unwrap().push(Call::Fault(pfn));
        if self.broken == Some(pfn) {
            return Err(FaultError::new("the disk is gone"));
        }
        for other in self.evicts.iter().flat_map(|range| range.iter()).filter(|other| *other != pfn)
        {
            let _ = self.pagemap().advance(other, Content::Present, Content::Absent);
        }
        self.make_present(pfn);
        Ok(())
    }
}

fn lazy(source: Source) -> (Arc<Pagemap>, Arc<Source>) {
    let source = Arc::new(source);
    let (ready, each) = (source.clone(), source.clone());
    let ops = PagemapOps::default()
        .populate(move |pages| ready.map_pages(pages), move |pfn| each.fault(pfn));
    let region = Region::anonymous(ByteLen::mib(8)).unwrap();
    let options =
        BindOptions::new(MemoryKind::Generic).base(Pfn::new(0x1000)).order(Order::BASE).ops(ops);
    let pagemap = Arc::new(Zone::new().bind(region, options).unwrap());
    source.pagemap.set(Arc::downgrade(&pagemap)).unwrap();
    for page in pagemap.pages() {
        pagemap.advance(page.pfn(), Content::Unknown, Content::Absent).unwrap();
    }
    (pagemap, source)
}

#[test]
fn a_pin_maps_what_is_ready_and_faults_the_rest() {
    let (pagemap, source) = lazy(Source::default());
    let pinned = pagemap.pin(range(0x1003, 5)).unwrap();
    assert_eq!(
        *source.calls.lock().unwrap(),
        [
            Call::MapPages(range(0x1003, 5)),
            Call::Fault(Pfn::new(0x1003)),
            Call::Fault(Pfn::new(0x1005)),
            Call::Fault(Pfn::new(0x1007)),
        ]
    );
    source.calls.lock().unwrap().clear();
    // No callback is called for present pages, also as part of a longer range.
    drop(pagemap.pin(range(0x1003, 5)).unwrap());
    assert!(source.calls.lock().unwrap().is_empty());
    assert!(pagemap.pin(pagemap.range()).is_ok(), "whole blocks as well");
    drop(pinned);
    assert!(pagemap.pages().all(|page| page.word().pins() == 0));
}

#[test]
fn a_pin_that_must_not_fault_is_refused_where_a_page_is_missing() {
    let (pagemap, source) = lazy(Source::default());
    drop(pagemap.pin(range(0x1000, 4)).unwrap());
    source.calls.lock().unwrap().clear();
    for asked in [range(0x1000, 6), pagemap.range()] {
        assert_eq!(
            pagemap.try_pin(asked).unwrap_err(),
            PinError::Refused {
                pfn: Pfn::new(0x1004),
                good: PageCount::new(4),
                cause: HoldError::Content(Content::Absent),
            }
        );
    }
    assert!(pagemap.try_pin(range(0x1000, 4)).is_ok());
    assert!(source.calls.lock().unwrap().is_empty());
}

#[test]
fn a_page_that_cannot_be_had_is_named_with_the_reason() {
    let broken = Some(Pfn::new(0x1005));
    let (pagemap, _source) = lazy(Source { broken, ..Source::default() });
    let failure = pagemap.pin(range(0x1000, 16)).unwrap_err();
    let PinError::Fault { pfn, cause } = &failure else { panic!("{failure}") };
    assert_eq!((*pfn, cause.to_string()), (Pfn::new(0x1005), "the disk is gone".to_owned()));
    assert!(pagemap.pages().all(|page| page.word().pins() == 0));
    assert!(pagemap.pin(range(0x1006, 10)).is_ok());
}

#[test]
fn a_source_that_takes_pages_away_at_once_is_given_up_on() {
    let (pagemap, source) = lazy(Source { is_forgetful: true, ..Source::default() });
    assert!(matches!(
        pagemap.pin(range(0x1000, 2)),
        Err(PinError::Refused { cause: HoldError::Content(Content::Absent), .. })
    ));
    let calls = source.calls.lock().unwrap().len();
    assert!((3..400).contains(&calls), "{calls} calls");
}

#[test]
fn pages_that_are_taken_away_while_others_are_produced_are_pinned_in_the_end() {
    for (first, pages) in [(0x1000, 7), (0x1003, 600), (0x1200, 512)] {
        let asked = range(first, pages);
        let (pagemap, _source) = lazy(Source { evicts: Some(asked), ..Source::default() });
        let pinned = pagemap.pin(asked).unwrap();
        let is_held = |pfn| pagemap.maybe_pinned(pfn);
        assert!(asked.iter().all(is_held));
        drop(pinned);
        assert!(pagemap.pages().all(|page| page.word().pins() == 0));
        assert!(!asked.iter().any(is_held));
    }
}

#[test]
fn without_a_source_a_missing_page_is_refused() {
    let region = Region::anonymous(ByteLen::mib(1)).unwrap();
    let pagemap = Zone::new().bind(region, BindOptions::new(MemoryKind::Generic)).unwrap();
    let first = pagemap.page_at(0).unwrap().pfn();
    pagemap.advance(first, Content::Unknown, Content::Absent).unwrap();
    assert!(matches!(
        pagemap.pin(pagemap.range()),
        Err(PinError::Refused { cause: HoldError::Content(Content::Absent), .. })
    ));
    assert!(pagemap.advance(first, Content::Unknown, Content::Absent).is_err());
}

/// Threads pin absent pages of the same range at once: each page is produced, and no pin is refused.
#[test]
fn threads_that_pin_the_same_absent_pages_all_get_them() {
    for _ in 0..20 {
        let (pagemap, _source) = lazy(Source::default());
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for start in (0x1000..0x1400).step_by(64) {
                        let pinned = loop {
                            match pagemap.pin(range(start, 64)) {
                                Ok(pinned) => break pinned,
                                // Another thread is between two states; the source does not wait.
                                Err(PinError::Refused {
                                    cause: HoldError::Content(Content::Filling | Content::Absent),
                                    ..
                                }) => thread::yield_now(),
                                Err(other) => panic!("{other}"),
                            }
                        };
                        assert!(pinned.pfns().all(|pfn| pinned.word(pfn).pins() > 0));
                    }
                });
            }
        });
        let last = Pfn::new(0x1400);
        assert!(
            pagemap
                .pages()
                .all(|page| { page.word().content() == Content::Present || page.pfn() >= last })
        );
    }
}

/// Produces a page as a fault engine does: who comes second waits for the first.
fn fill_or_wait(pages: &OnceLock<Weak<Pagemap>>, pfn: Pfn) {
    let pagemap = pages.get().unwrap().upgrade().unwrap();
    let page = pagemap.page(pfn).unwrap();
    if pagemap.advance(pfn, Content::Absent, Content::Filling).is_ok() {
        pagemap.advance(pfn, Content::Filling, Content::Present).unwrap();
    }
    while page.word().content() != Content::Present {
        thread::yield_now();
    }
}

#[test]
fn a_page_that_several_threads_pin_first_is_refused_to_none() {
    const THREADS: usize = 4;
    for _ in 0..20 {
        let pages = Arc::new(OnceLock::<Weak<Pagemap>>::new());
        let source = pages.clone();
        let fault = move |pfn| {
            fill_or_wait(&source, pfn);
            Ok(())
        };
        let ops = PagemapOps::default().populate(|_| {}, fault);
        let options = BindOptions::new(MemoryKind::Generic).absent().ops(ops);
        let region = Region::anonymous(ByteLen::mib(8)).unwrap();
        let pagemap = Arc::new(Zone::new().bind(region, options).unwrap());
        pages.set(Arc::downgrade(&pagemap)).unwrap();
        let start = Barrier::new(THREADS);
        thread::scope(|scope| {
            for _ in 0..THREADS {
                scope.spawn(|| {
                    start.wait();
                    for pfn in pagemap.range().iter() {
                        drop(pagemap.pin(PfnRange::try_single(pfn).unwrap()).unwrap());
                    }
                });
            }
        });
    }
}
