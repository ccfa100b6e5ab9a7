//! Taking folios, giving them back, clearing them, pinning and poisoning them at once, by the steps
//! that the pool takes: `uzone_pages::hand_out` and its neighbours, with loom's lock and folios of one
//! byte.

use loom::sync::atomic::{AtomicUsize, Ordering};
use loom::sync::{Arc, Condvar, Mutex, MutexGuard};
use loom::thread;
use uzone_pages::{
    Content, Folio, FolioState, HoldKind, MemoryKind, Page, PoolBackend, PoolState, clear_ahead,
    give_back, hand_out, restock,
};

use super::folio;
use super::seen::{Seen, beside, search};

/// What is wrong with a backend, to see that the models notice.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Defect {
    None,
    /// Hands out what is in the set of zero folios, whatever their words say.
    TrustsTheSets,
    /// Does not report that folios were sorted.
    TellsNobody,
}

/// Folios of a byte each.
struct Folios {
    pages: Vec<Page>,
    bytes: Vec<AtomicUsize>,
    state: Mutex<PoolState>,
    sorted: Condvar,
    defect: Defect,
}

/// What is in memory that was not cleared.
const OLD: usize = 7;

impl Folios {
    /// Makes folios that are free and have this content.
    fn new(count: usize, content: Content, defect: Defect) -> Arc<Self> {
        let this = Arc::new(Self {
            pages: (0..count).map(|_| Page::new(())).collect(),
            bytes: (0..count).map(|_| AtomicUsize::new(OLD)).collect(),
            state: Mutex::new(PoolState::new(count)),
            sorted: Condvar::new(),
            defect,
        });
        if content == Content::Zero {
            assert_eq!(this.clear(0, count), Ok(count));
        }
        restock(&*this, 0, count);
        this
    }

    fn folio(&self, number: usize) -> Folio<'_> {
        folio(&self.pages[number], MemoryKind::Generic)
    }

    /// Reads what was handed out, and writes to it as its owner does.
    fn use_as_owner(&self, number: usize, secret: usize) {
        // Relaxed: that these see what others wrote is what is asked.
        assert_eq!(self.bytes[number].load(Ordering::Relaxed), 0, "bytes of an earlier owner");
        self.bytes[number].store(secret, Ordering::Relaxed);
    }

    fn give_back(&self, number: usize, clears: bool) {
        give_back(self, self.lock(), number, 1, clears);
    }

    /// Every folio is in one set, and no work is under way.
    fn assert_sorted(&self) {
        let state = self.lock();
        let free = [FolioState::Zero, FolioState::Dirty, FolioState::Aside, FolioState::Bad];
        let all = state.used() + free.map(|free| state.count(free)).iter().sum::<usize>();
        assert_eq!((all, state.in_work()), (self.pages.len(), 0));
    }
}

impl PoolBackend for Folios {
    /// How many folios are free, and how many of these are set aside.
    type Failure = (usize, usize);
    type Locked<'a> = MutexGuard<'a, PoolState>;

    fn lock(&self) -> MutexGuard<'_, PoolState> {
        self.state.lock().unwrap()
    }

    fn wait<'a>(
        &'a self,
        state: MutexGuard<'a, PoolState>,
    ) -> Result<MutexGuard<'a, PoolState>, Self::Failure> {
        Ok(self.sorted.wait(state).unwrap())
    }

    fn sorted(&self, state: MutexGuard<'_, PoolState>) {
        drop(state);
        if self.defect != Defect::TellsNobody {
            self.sorted.notify_all();
        }
    }

    fn state_of(&self, number: usize) -> FolioState {
        let word = self.folio(number).word();
        match word.content() {
            Content::Poisoned => FolioState::Bad,
            Content::Zero => FolioState::Zero,
            _ if word.pins() > 0 => FolioState::Aside,
            _ => FolioState::Dirty,
        }
    }

    fn own(&self, first: usize, folios: usize) -> usize {
        let is_owned = |number: &usize| {
            self.folio(*number).take_zero() || self.defect == Defect::TrustsTheSets
        };
        (first..first + folios).filter(is_owned).count()
    }

    fn clear(&self, first: usize, folios: usize) -> Result<usize, (usize, usize)> {
        let is_cleared = |number: &usize| {
            let folio = self.folio(*number);
            let claimed = [Content::Unknown, Content::Present]
                .into_iter()
                .any(|from| folio.advance(from, Content::Zeroing).is_ok());
            if claimed {
                self.bytes[*number].store(0, Ordering::Relaxed);
            }
            claimed && folio.advance(Content::Zeroing, Content::Zero).is_ok()
        };
        Ok((first..first + folios).filter(is_cleared).count())
    }

    fn exhausted(&self, _: usize, free: usize, pinned: usize) -> (usize, usize) {
        (free, pinned)
    }
}

/// A worker clears, a tenant takes, uses and gives back, another takes what the first had.
#[test]
fn what_is_handed_out_is_zero_whichever_thread_cleared_it() {
    let seen = Seen::new(2);
    for clears in [false, true] {
        let marks = seen.clone();
        loom::model(move || {
            let folios = Folios::new(1, Content::Unknown, Defect::None);
            let worker = beside(&folios, |folios| clear_ahead(folios, folios.lock(), 0, 4));
            for secret in [8, 9] {
                let number = hand_out(&*folios, 1).unwrap();
                folios.use_as_owner(number, secret);
                folios.give_back(number, clears);
            }
            let ahead = worker.join().unwrap();
            marks.mark(usize::from(ahead == Some(Ok(1))));
            folios.assert_sorted();
        });
    }
    seen.assert_all();
}

/// Two tenants and one folio: no tenant reads the other's bytes, and one that gets none has an error and
/// does not wait for ever.
#[test]
fn of_two_takers_of_one_folio_each_has_it_zero_or_is_refused() {
    let seen = Seen::new(4);
    for (content, returns) in
        [(Content::Unknown, true), (Content::Unknown, false), (Content::Zero, true)]
    {
        let marks = seen.clone();
        loom::model(move || {
            let folios = Folios::new(1, content, Defect::None);
            let tenant = move |folios: &Folios, secret| match hand_out(folios, 1) {
                Ok(number) => {
                    folios.use_as_owner(number, secret);
                    if returns {
                        folios.give_back(number, false);
                    }
                    true
                }
                Err(refusal) => {
                    assert_eq!(refusal, (0, 0));
                    false
                }
            };
            let other = beside(&folios, move |folios| tenant(folios, 8));
            let (mine, theirs) = (tenant(&folios, 9), other.join().unwrap());
            assert!(if returns { mine || theirs } else { mine != theirs });
            marks.mark(usize::from(mine) * 2 + usize::from(theirs));
            folios.assert_sorted();
        });
    }
    let [neither, rest @ ..] = &*seen.0 else { unreachable!() };
    assert!(!neither.load(Ordering::Relaxed), "the folio was there");
    assert!(rest.iter().all(|seen| seen.load(Ordering::Relaxed)), "not all outcomes were reached");
}

/// Runs are taken beside a worker that has one of their folios in hand.
#[test]
fn a_run_is_zero_beside_a_worker_and_a_taker_of_one() {
    search(2, |marks| {
        let folios = Folios::new(2, Content::Unknown, Defect::None);
        let worker = beside(&folios, |folios| {
            let _ = clear_ahead(folios, folios.lock(), 0, 1);
            if let Ok(number) = hand_out(folios, 1) {
                folios.use_as_owner(number, 8);
                folios.give_back(number, false);
            }
        });
        match hand_out(&*folios, 2) {
            Ok(first) => {
                folios.use_as_owner(first, 9);
                folios.use_as_owner(first + 1, 9);
                marks.mark(0);
            }
            Err(refusal) => {
                assert_eq!(refusal.0, 1, "{refusal:?}");
                marks.mark(1);
            }
        }
        worker.join().unwrap();
        folios.assert_sorted();
    });
}

/// A thread pins a free folio, writes to it and lets go: it is cleared again, or not handed out.
fn pin_behind_the_pools_back(defect: Defect) {
    search(2, move |marks| {
        let folios = Folios::new(1, Content::Zero, defect);
        let stranger = beside(&folios, |folios| {
            let folio = folios.folio(0);
            // Who pins takes what is zero over first.
            if folio.advance(Content::Zero, Content::Present).is_ok()
                && folio.try_hold(HoldKind::Pin).is_ok()
            {
                // A tenant's folio is the tenant's to lend; a free one has no owner.
                let state = folios.lock();
                if !state.is_used(0) {
                    folios.bytes[0].store(5, Ordering::Relaxed);
                }
                drop(state);
                let _ = folio.release(HoldKind::Pin).unwrap();
            }
        });
        match hand_out(&*folios, 1) {
            Ok(number) => {
                folios.use_as_owner(number, 9);
                stranger.join().unwrap();
                marks.mark(0);
            }
            Err(refusal) => {
                assert_eq!(refusal, (1, 1));
                stranger.join().unwrap();
                let number = hand_out(&*folios, 1).unwrap();
                folios.use_as_owner(number, 9);
                marks.mark(1);
            }
        }
        folios.assert_sorted();
    });
}

#[test]
fn a_free_folio_that_a_stranger_pinned_is_cleared_again() {
    pin_behind_the_pools_back(Defect::None);
}

#[test]
#[should_panic(expected = "bytes of an earlier owner")]
fn a_pool_that_trusts_its_sets_hands_out_what_a_stranger_wrote() {
    pin_behind_the_pools_back(Defect::TrustsTheSets);
}

/// A folio comes back while its holder lets go of it.
#[test]
fn a_folio_that_comes_back_pinned_is_handed_out_when_it_is_not() {
    let seen = Seen::new(2);
    for clears in [false, true] {
        let marks = seen.clone();
        loom::model(move || {
            let folios = Folios::new(1, Content::Zero, Defect::None);
            let number = hand_out(&*folios, 1).unwrap();
            folios.folio(number).try_hold(HoldKind::Pin).unwrap();
            // The pool only reads the word of a folio that is pinned, and loom tries the orders of
            // reads with what comes after them sparingly; of exchanges it tries all.
            let turn = Arc::new(AtomicUsize::new(0));
            let device = {
                let (folios, turn) = (folios.clone(), turn.clone());
                thread::spawn(move || {
                    folios.bytes[number].store(5, Ordering::Relaxed);
                    let _ = folios.folio(number).release(HoldKind::Pin).unwrap();
                    turn.fetch_add(1, Ordering::Relaxed);
                })
            };
            turn.fetch_add(1, Ordering::Relaxed);
            folios.give_back(number, clears);
            turn.fetch_add(1, Ordering::Relaxed);
            match hand_out(&*folios, 1) {
                Ok(number) => {
                    folios.use_as_owner(number, 9);
                    marks.mark(0);
                }
                Err(refusal) => {
                    assert_eq!(refusal, (1, 1));
                    marks.mark(1);
                }
            }
            device.join().unwrap();
            folios.assert_sorted();
        });
    }
    seen.assert_all();
}

/// A folio goes bad while it is cleared, taken and given back: it is refused, or it was handed out
/// before and is the last time.
#[test]
fn a_folio_that_goes_bad_is_not_handed_out_again() {
    search(2, |marks| {
        let folios = Folios::new(1, Content::Unknown, Defect::None);
        let hardware = beside(&folios, |folios| {
            assert!(folios.folio(0).poison().is_some());
        });
        let worker = beside(&folios, |folios| {
            let _ = clear_ahead(folios, folios.lock(), 0, 1);
        });
        match hand_out(&*folios, 1) {
            Ok(number) => {
                folios.use_as_owner(number, 9);
                folios.give_back(number, false);
                marks.mark(0);
            }
            Err(refusal) => {
                assert_eq!(refusal, (0, 0));
                marks.mark(1);
            }
        }
        hardware.join().unwrap();
        worker.join().unwrap();
        let again = hand_out(&*folios, 1);
        assert_eq!(again, Err((0, 0)));
        assert_eq!(folios.lock().count(FolioState::Bad), 1);
        folios.assert_sorted();
    });
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_pool_that_wakes_no_taker_leaves_one_asleep() {
    loom::model(|| {
        let folios = Folios::new(1, Content::Unknown, Defect::TellsNobody);
        let worker = beside(&folios, |folios| {
            let _ = clear_ahead(folios, folios.lock(), 0, 1);
        });
        let _ = hand_out(&*folios, 1);
        worker.join().unwrap();
    });
}
