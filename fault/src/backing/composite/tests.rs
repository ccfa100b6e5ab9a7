//! Parts against a plain array of what each page must hold.

use std::collections::BTreeMap;
use std::sync::Mutex;

use proptest::prelude::*;
use uzone_os::uffd::{Answered, UffdError};
use uzone_pages::{Advice, Content, PageCount, Touch};

use super::*;
use crate::backing::FunctionBacking;
use crate::engine::core::{Core, ReaderState};
use crate::engine::kernel::{Fill, Kernel};
use crate::engine::pages::Policy;
use crate::options::LazyOptions;
use crate::track::page_states::PageStates;
use crate::track::record::Recorder;

const PAGE: u64 = 4096;

fn function() -> Arc<dyn Backing> {
    Arc::new(FunctionBacking::quick(|_, _: &mut [u8]| Ok(())))
}

/// A part, as it is given to a backing of parts.
type Given = (Range<u64>, Arc<dyn Backing>, u64);

fn of_parts(parts: Vec<Given>) -> Result<CompositeBacking, MapError> {
    CompositeBacking::of_parts(PageSize::KIB_4, parts)
}

fn zero(range: Range<u64>) -> Given {
    (range, Arc::new(ZeroBacking), 0)
}

#[test]
fn parts_that_are_no_whole_are_refused_by_where_they_start() {
    let backwards = Range { start: 2 * PAGE, end: PAGE };
    let cut = |range: Range<u64>, offset| vec![(range, function(), offset)];
    // Also of a backing without a length, no byte is behind the last.
    let behind: Given = (0..2 * PAGE, Arc::new(ZeroBacking), u64::MAX - PAGE + 1);
    for (parts, reason) in [
        (vec![], "needs at least one part"),
        (vec![zero(backwards)], "from 0x2000 to 0x1000, which starts at 0x0 of its backing"),
        (cut(0..PAGE + 1, 0), "from 0x0 to 0x1001, which starts at 0x0 of its backing"),
        (cut(1..PAGE, 0), "all three have to be multiples of 4096"),
        (cut(0..PAGE, 512), "which starts at 0x200 of its backing, is not one page or more"),
        (
            vec![zero(0..2 * PAGE), zero(PAGE..3 * PAGE)],
            "the part at 0x1000 starts before the one at 0x0 ends, at 0x2000",
        ),
        (
            vec![zero(0..PAGE), zero(2 * PAGE..3 * PAGE)],
            "no part has the bytes from 0x1000 to 0x2000",
        ),
        (vec![zero(PAGE..2 * PAGE)], "no part has the bytes from 0x0 to 0x1000"),
        (vec![behind], "the part at 0x0 wants its backing up to 0xffffffffffffffff"),
    ] {
        let error = of_parts(parts).unwrap_err();
        assert!(matches!(&error, MapError::Part { reason: it } if it.contains(reason)), "{error}");
        assert_eq!(error.kind(), uzone_pages::ErrorKind::InvalidInput);
    }
    let end = u64::MAX - PAGE + 1;
    let last = vec![(end - PAGE..end, function(), end - PAGE)];
    let last = CompositeBacking::with_zero_gaps(PageSize::KIB_4, last).unwrap();
    assert_eq!(last.byte_len(), Some(ByteLen::new(end)));
    assert!(format!("{last:?}").contains("CompositeBacking"));
    assert!(last.takes_pages_of(PageSize::KIB_4));
    assert_eq!(last.parts(end..end + PAGE / 2).count(), 0);
}

/// A kernel that keeps the first 8 bytes of each page that it is given, and refuses none.
#[derive(Default)]
struct Keeper(Mutex<BTreeMap<u64, u64>>);

impl Keeper {
    fn put(&self, page: u64, word: u64) {
        assert!(self.0.lock().unwrap().insert(page, word).is_none(), "page {page} came twice");
    }
}

impl Kernel for Keeper {
    fn install(&self, range: Range<u64>, fill: Fill<'_>) -> Result<Answered, UffdError> {
        match fill {
            Fill::Bytes(bytes) => {
                for (page, bytes) in (range.start / PAGE..).zip(bytes.chunks(4096)) {
                    self.put(page, u64::from_ne_bytes(bytes[..8].try_into().unwrap()));
                }
                Ok(Answered::All)
            }
            Fill::Zero => {
                (range.start / PAGE..range.end / PAGE).for_each(|page| self.put(page, 0));
                Ok(Answered::All)
            }
            Fill::Cached | Fill::From { .. } => Ok(Answered::Hole),
            Fill::Poison => Ok(Answered::All),
        }
    }

    fn wake(&self, _: Range<u64>) {}
}

/// The pages of `whole`, in windows of `window`.
fn core(kernel: &Arc<Keeper>, whole: CompositeBacking, pages: u64, window: u64) -> Core {
    let contents = PageStates::reserve(PageCount::new(pages), PageSize::KIB_4).unwrap();
    let size = FaultAround::try_new(ByteLen::new(window * PAGE)).unwrap();
    let options = LazyOptions::default().advice(Advice::Normal).fault_around(size);
    let (kernel, areas) = (kernel.clone(), [contents.fault_area(0)]);
    let (policy, recorder) = (Policy::default(), Recorder::new(0));
    Core::new(kernel, Arc::new(whole), contents, &areas, policy, &options, recorder)
}

/// What a part is: whose bytes, and whether they are ready.
#[derive(Clone, Copy, Debug)]
enum Kind {
    Zero,
    Quick(u64),
    Slow(u64),
    Gap,
}

/// The oracle: the first 8 bytes of the page at `offset` of the source `seed`.
fn word(seed: u64, offset: u64) -> u64 {
    seed << 40 | offset | 1
}

fn source(kind: Kind) -> Arc<dyn Backing> {
    let filling = |seed: u64| {
        move |offset: u64, out: &mut [u8]| {
            for (offset, page) in (offset..).step_by(4096).zip(out.chunks_mut(4096)) {
                page[..8].copy_from_slice(&word(seed, offset).to_ne_bytes());
            }
            Ok(())
        }
    };
    match kind {
        Kind::Zero | Kind::Gap => Arc::new(ZeroBacking),
        Kind::Quick(seed) => Arc::new(FunctionBacking::quick(filling(seed))),
        Kind::Slow(seed) => Arc::new(FunctionBacking::slow(filling(seed))),
    }
}

fn kinds() -> impl Strategy<Value = Kind> {
    prop_oneof![
        Just(Kind::Zero),
        (1_u64..99).prop_map(Kind::Quick),
        (1_u64..99).prop_map(Kind::Slow),
        Just(Kind::Gap),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 2 } else { 200 }, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_page_is_its_parts_whatever_the_windows(
        parts in prop::collection::vec((1_u64..9, kinds(), 0_u64..50), 1..12),
        touches in prop::collection::vec((any::<u64>(), 1_u64..40, any::<bool>()), 1..30),
        window in prop::sample::select(vec![1_u64, 2, 16, 128]),
    ) {
        let (mut given, mut expected) = (Vec::new(), Vec::new());
        for &(pages, kind, from) in &parts {
            let start = expected.len() as u64;
            let range = start * PAGE..(start + pages) * PAGE;
            expected.extend((from..from + pages).map(|page| match kind {
                Kind::Zero | Kind::Gap => 0,
                Kind::Quick(seed) | Kind::Slow(seed) => word(seed, page * PAGE),
            }));
            if !matches!(kind, Kind::Gap) {
                given.push((range, source(kind), from * PAGE));
            }
        }
        // A gap is before a part.
        let start = expected.len() as u64;
        expected.push(0);
        given.push(zero(start * PAGE..(start + 1) * PAGE));
        let whole = CompositeBacking::with_zero_gaps(PageSize::KIB_4, given).unwrap();
        let pages = expected.len() as u64;
        prop_assert_eq!(whole.byte_len(), Some(ByteLen::new(pages * PAGE)));
        let kernel = Arc::new(Keeper::default());
        let core = core(&kernel, whole, pages, window);
        let mut state = ReaderState::new(4 * 4096);
        for (page, count, is_ready) in touches {
            let page = page % pages;
            if is_ready {
                core.map_ready(page..(page + count).min(pages), &mut state);
            } else if core.contents().get(page) == Content::Absent {
                let outcome = core.fault(page, Touch::Read, &mut state);
                if matches!(outcome, crate::engine::core::Outcome::Produce { .. }) {
                    core.produce(page, &mut state, None).unwrap();
                }
                prop_assert!(kernel.0.lock().unwrap().contains_key(&page));
                while core.map_around(&mut state) {}
            }
        }
        for page in 0..pages {
            if core.contents().claim(page) {
                core.produce(page, &mut state, None).unwrap();
            }
        }
        let found: Vec<u64> = kernel.0.lock().unwrap().values().copied().collect();
        prop_assert_eq!(found, expected);
    }
}

#[test]
fn a_part_reaches_no_page_of_its_neighbours_also_when_it_panics() {
    /// Fills what it was not offered, as far as it may.
    struct Greedy;

    impl Backing for Greedy {
        fn map_pages(&self, window: &mut Window<'_>) {
            let Range { start, end } = window.range();
            for range in [start.wrapping_sub(PAGE)..end, start..end + PAGE, 0..u64::MAX - 4095] {
                assert!(range == (start..end) || window.zero(range).is_err());
            }
            assert!(window.part(start..end + PAGE, 0, |_| ()).is_err());
            assert!(window.part(start..end, 1, |_| ()).is_err());
            assert!(window.part(start..end, u64::MAX - 4095, |_| ()).is_err());
            let _ = window.copy(start, &[7; 4096]);
            // Without the hook that prints where.
            std::panic::resume_unwind(Box::new("as the test wants"));
        }

        fn fault(&self, _: &mut Window<'_>) -> Result<(), BackingError> {
            Ok(())
        }
    }

    let parts = vec![
        zero(0..PAGE),
        (PAGE..3 * PAGE, Arc::new(Greedy), 50 * PAGE),
        zero(3 * PAGE..4 * PAGE),
    ];
    let whole = of_parts(parts).unwrap();
    let kernel = Arc::new(Keeper::default());
    let core = core(&kernel, whole, 4, 512);
    let mut state = ReaderState::new(4096);
    // What was installed before the panic counts.
    assert_eq!(core.map_ready(0..4, &mut state), 2);
    assert_eq!(core.fault(1, Touch::Read, &mut state), crate::engine::core::Outcome::Answered);
    assert_eq!(kernel.0.lock().unwrap().get(&1), Some(&0x0707_0707_0707_0707));
}

/// Records what it is asked to read ahead.
#[derive(Default)]
struct Asked(Mutex<Vec<Range<u64>>>);

impl Backing for Asked {
    fn fault(&self, _: &mut Window<'_>) -> Result<(), BackingError> {
        Ok(())
    }

    fn read_ahead(&self, range: Range<u64>) {
        self.0.lock().unwrap().push(range);
    }
}

#[test]
fn parts_get_what_to_read_ahead_in_their_own_offsets() {
    let (first, second) = (Arc::new(Asked::default()), Arc::new(Asked::default()));
    let parts: Vec<Given> = vec![
        (0..4 * PAGE, first.clone(), 100 * PAGE),
        zero(4 * PAGE..5 * PAGE),
        (5 * PAGE..9 * PAGE, second.clone(), 0),
    ];
    let whole = of_parts(parts).unwrap();
    whole.read_ahead(3 * PAGE..7 * PAGE);
    let asked = first.0.lock().unwrap().clone();
    assert!(matches!(&asked[..], [one] if *one == (103 * PAGE..104 * PAGE)), "{asked:?}");
    let asked = second.0.lock().unwrap().clone();
    assert!(matches!(&asked[..], [one] if *one == (0..2 * PAGE)), "{asked:?}");
    whole.read_ahead(9 * PAGE..20 * PAGE);
    assert_eq!(second.0.lock().unwrap().len(), 1);
}
