//! Threads pin, split, mark bad, unpoison, clear and unbind at once, for `UZONE_TEST_SECONDS` seconds (3
//! by default, a minute in the checks), and the invariants hold all the time:
//!
//! - a pinned page has its bytes, and no thread clears it or gives it away;
//! - no guard enters a region that is unbound, and none is unbound under a guard;
//! - nothing is left behind: every count, every inhibitor and every bad page is accounted for at the end.

use std::sync::RwLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use uzone_pages::{ByteLen, Content, HoldError, MemoryKind, Order, PageCount, Pfn, PfnRange};
use uzone_zone::{BindOptions, Pagemap, PinError, Pinned, Redeemed, Region, Zone};

const BASE: u64 = 0x1000;
const PAGES: u64 = 2048;

/// A small generator of its own, so that a run is the same for the same seed.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % end
    }
}

#[derive(Default)]
struct Counters {
    pins: AtomicU64,
    refusals: AtomicU64,
    clearings: AtomicU64,
    poisonings: AtomicU64,
    unbinds: AtomicU64,
}

fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

fn bind(zone: &Zone, region: Region, order: u8) -> Pagemap {
    let options =
        BindOptions::new(MemoryKind::Generic).order(Order::new(order)).base(Pfn::new(BASE));
    zone.bind(region, options).unwrap()
}

fn random_range(random: &mut Random) -> PfnRange {
    let start = random.below(PAGES);
    // Half of them cover blocks.
    let most = if random.below(2) == 0 { 16 } else { PAGES };
    let pages = 1 + random.below((PAGES - start).min(most));
    PfnRange::try_new(Pfn::new(BASE + start), PageCount::new(pages)).unwrap()
}

/// What a holder may rely on, whatever the others do: no thread clears a page under its pin. A page may
/// have gone bad, though.
fn check_held(pinned: &Pinned, random: &mut Random) {
    let pages = pinned.range().pages().get();
    for _ in 0..4 {
        let pfn = Pfn::new(pinned.range().start().get() + random.below(pages));
        let word = pinned.word(pfn);
        assert!(word.pins() > 0, "{pfn}");
        let content = word.content();
        assert!(content.is_pinnable() || content == Content::Poisoned, "{pfn} is {content}");
    }
}

fn pin(
    (zone, start): (&Zone, usize),
    shared: &RwLock<Option<Pagemap>>,
    counters: &Counters,
    random: &mut Random,
) {
    let asked = random_range(random);
    let pinned = if random.below(2) == 0 {
        let first = usize::try_from(asked.start().get() - BASE).unwrap();
        let len = ByteLen::new(asked.pages().get() * 4096);
        zone.pin(start + first * 4096, len).map(|all| all.into_single().unwrap())
    } else {
        let lock = shared.read().unwrap();
        let Some(pagemap) = &*lock else { return };
        pagemap.pin(asked)
    };
    let pinned = match pinned {
        Ok(pinned) => pinned,
        Err(
            PinError::Poisoned { .. }
            | PinError::NoAddress { .. }
            | PinError::Refused { cause: HoldError::Content(_) | HoldError::Busy, .. }
            | PinError::NotAdmitted(HoldError::Closing),
        ) => return count(&counters.refusals),
        Err(other) => panic!("{other}"),
    };
    count(&counters.pins);
    check_held(&pinned, random);
    match random.below(4) {
        0 => {
            let at = PageCount::new(random.below(pinned.range().pages().get() + 1));
            if let Ok((first, second)) = pinned.split(at) {
                drop(first);
                check_held(&second, random);
            }
        }
        1 => {
            let again = pinned.try_clone();
            drop(pinned);
            if let Ok(again) = again {
                check_held(&again, random);
            }
        }
        2 => {
            let Ok(Redeemed::Pinned(pinned)) = zone.redeem(pinned.into_raw().unwrap()) else {
                panic!("it was a pin");
            };
            check_held(&pinned, random);
        }
        _ => {}
    }
}

/// Clears a page, or marks it bad and unpoisons it.
fn disturb(shared: &RwLock<Option<Pagemap>>, counters: &Counters, random: &mut Random) {
    let lock = shared.read().unwrap();
    let Some(pagemap) = &*lock else { return };
    let pfn = Pfn::new(BASE + random.below(PAGES));
    if random.below(3) == 0 {
        if pagemap.poison(pfn).is_ok() {
            count(&counters.poisonings);
        }
        // Not always by the thread that marked it.
        let _ = pagemap.unpoison(Pfn::new(BASE + random.below(PAGES)));
        let _ = pagemap.unpoison(pfn);
        return;
    }
    let page = pagemap.page(pfn).unwrap();
    let from = page.word().content();
    if matches!(from, Content::Unknown | Content::Present)
        && pagemap.advance(pfn, from, Content::Zeroing).is_ok()
    {
        // Ours alone until it is done, also if it goes bad meanwhile.
        for _ in 0..random.below(50) {
            assert_eq!(page.word().content(), Content::Zeroing);
        }
        if pagemap.advance(pfn, Content::Zeroing, Content::Zero).is_ok() {
            count(&counters.clearings);
            let _ = pagemap.advance(pfn, Content::Zero, Content::Present);
        }
    }
}

#[test]
fn everything_at_once_for_a_while() {
    let seconds = std::env::var("UZONE_TEST_SECONDS")
        .map_or(3, |secs| secs.parse().expect("UZONE_TEST_SECONDS"));
    let until = Instant::now() + Duration::from_secs(seconds);
    for order in [0_u8, 3, 9].into_iter().cycle() {
        let zone = Zone::new();
        let region = Region::anonymous(ByteLen::new(PAGES * 4096)).unwrap();
        let start = region.addr().get();
        let shared = RwLock::new(Some(bind(&zone, region, order)));
        let (counters, stop) = (Counters::default(), AtomicBool::new(false));
        std::thread::scope(|scope| {
            for seed in 1..=4_u64 {
                let (zone, shared, counters, stop) = (&zone, &shared, &counters, &stop);
                scope.spawn(move || {
                    let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
                    while !stop.load(Ordering::Relaxed) {
                        if seed % 2 == 0 {
                            pin((zone, start), shared, counters, &mut random);
                        } else {
                            disturb(shared, counters, &mut random);
                        }
                    }
                });
            }
            let round = Instant::now() + Duration::from_millis(900);
            while Instant::now() < round.min(until) {
                std::thread::sleep(Duration::from_millis(2));
                let mut lock = shared.write().unwrap();
                let deadline = Instant::now() + Duration::from_millis(20);
                match lock.take().unwrap().unbind_by(deadline) {
                    Ok(region) => {
                        count(&counters.unbinds);
                        *lock = Some(bind(&zone, region, order));
                    }
                    Err(busy) => *lock = Some(*busy.pagemap),
                }
            }
            stop.store(true, Ordering::Relaxed);
        });
        let pagemap = shared.into_inner().unwrap().unwrap();
        for pfn in pagemap.bad_pages(pagemap.range()) {
            pagemap.unpoison(pfn).unwrap();
        }
        for page in pagemap.pages() {
            let word = page.word();
            assert_eq!((word.pins(), word.references()), (0, 1), "{}", page.pfn());
            assert!(word.content().is_pinnable() && !word.is_partly_poisoned(), "{word:?}");
        }
        drop(pagemap.pin(pagemap.range()).expect("no inhibitor is left"));
        assert!(pagemap.unbind().is_ok());
        for counter in
            [&counters.pins, &counters.clearings, &counters.poisonings, &counters.unbinds]
        {
            assert!(counter.load(Ordering::Relaxed) > 0, "nothing of some sort happened");
        }
        if Instant::now() >= until {
            break;
        }
    }
}
