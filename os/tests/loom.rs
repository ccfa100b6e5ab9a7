//! Every interleaving of two or three threads on the table of watches, on a gate of the handler that answers
//! faults, its ring of records and its requests to other threads, on a value with guards, and on addresses that the
//! kernel hands out again,
//! searched by loom. A handler is a thread here: it may come between any two steps of the others, and it never
//! waits for them.
//!
//! Run with `RUSTFLAGS="--cfg loom" cargo test -p uzone-os --test loom --release`.
#![cfg(loom)]
#![allow(clippy::unwrap_used, reason = "helpers of tests fail by panicking, as tests do")]

mod sync {
    pub(crate) use loom::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};
    pub(crate) use loom::sync::{Arc, Condvar, Mutex};
}
#[path = "../src/sigbus/gate.rs"]
#[allow(dead_code, reason = "it is the whole file of the library")]
mod gate;
#[path = "../src/sigbus/index.rs"]
#[allow(dead_code, reason = "it is the whole file of the library")]
mod index;
#[path = "../src/live.rs"]
#[allow(dead_code, unreachable_pub, reason = "it is the whole file of the library")]
mod live;
#[path = "../src/live_ref.rs"]
#[allow(dead_code, unreachable_pub, reason = "it is the whole file of the library")]
mod live_ref;
#[path = "../src/uffd/requests.rs"]
#[allow(dead_code, reason = "it is the whole file of the library")]
mod requests;
#[path = "../src/uffd/ring.rs"]
#[allow(dead_code, reason = "it is the whole file of the library")]
mod ring;
#[path = "../../pages/tests/loom/seen.rs"]
mod seen;
#[path = "../src/sigbus/table.rs"]
#[allow(dead_code, reason = "it is the whole file of the library")]
mod table;

use std::time::Duration;

use gate::Gate;
use index::Index;
use live::{LiveArc, LiveOwner, PINS, REFERENCES};
use live_ref::{Left, LiveRef};
use loom::cell::UnsafeCell;
use loom::sync::{Arc, Mutex};
use loom::thread;
use requests::{Request, Requests};
use ring::Ring;
use seen::{Seen, beside, search};
use table::{Entry, Extent, Table};
use uzone_pages::HoldKind;

const LOW: Extent = Extent { first: 0x100, last: 0x1ff };
const HIGH: Extent = Extent { first: 0x200, last: 0x2ff };

/// An event whose two words belong together.
fn entry(number: u64) -> Entry {
    Entry { address: number, info: !number }
}

fn is_whole(entry: Entry) -> bool {
    entry.info == !entry.address
}

fn at(address: u64) -> Extent {
    Extent { first: address, last: address }
}

/// Lets a watch go while a handler may be inside, and takes its slot again by `take`.
fn reuse(
    take: fn(&Table<1, 2>, Extent) -> Option<usize>,
) -> impl Fn(&Seen) + Sync + Send + 'static {
    move |seen: &Seen| {
        let table = Arc::new(Table::<1, 2>::new());
        let slot = table.take(LOW).unwrap();
        let handler = beside(&table, |table| table.record(at(0x180), entry(0x180)));
        table.let_go(slot);
        let again = take(&table, HIGH);
        let watches = handler.join().unwrap();
        seen.mark(if again.is_some() { 0 } else { 1 });
        seen.mark(2 + watches);
        if let Some(again) = again {
            assert_eq!(table.pop(again), None, "an event of another watch");
            assert_eq!((table.pending(again), table.lost(again)), (0, 0));
            assert_eq!(table.record(at(0x280), entry(0x280)), 1);
            assert_eq!(table.pop(again), Some(entry(0x280)));
        } else {
            // The handler has left: nothing keeps the slot.
            assert_eq!(table.take(HIGH), Some(slot));
            assert_eq!(table.pop(slot), None, "an event of another watch");
        }
    }
}

#[test]
fn an_event_never_lands_in_the_next_watch_of_a_slot() {
    search(4, reuse(Table::take));
}

/// The table without the check for handlers inside: the search must find the event that lands in the next
/// watch of the slot.
#[test]
#[should_panic(expected = "an event of another watch")]
fn a_slot_that_is_taken_without_looking_has_events_of_another_watch() {
    search(4, reuse(Table::take_without_looking));
}

#[test]
fn two_handlers_and_a_reader_agree_on_every_event() {
    search(3, |marks| {
        let table = Arc::new(Table::<1, 2>::new());
        let slot = table.take(LOW).unwrap();
        let handler = beside(&table, |table| assert_eq!(table.record(at(0x180), entry(0x180)), 1));
        let reader = beside(&table, move |table| {
            // One that is not whole is not there yet.
            (0..2).filter_map(|_| table.pop(slot)).collect::<Vec<_>>()
        });
        assert_eq!(table.record(at(0x190), entry(0x190)), 1);
        handler.join().unwrap();
        let mut got = reader.join().unwrap();
        marks.mark(got.len());
        assert_eq!(table.pending(slot), 2 - got.len());
        got.extend(std::iter::from_fn(|| table.pop(slot)));
        assert!(got.iter().copied().all(is_whole), "{got:?}");
        got.sort_by_key(|entry| entry.address);
        assert_eq!(got, [entry(0x180), entry(0x190)]);
        assert_eq!((table.pending(slot), table.lost(slot)), (0, 0));
    });
}

#[test]
fn a_ring_that_goes_round_neither_tears_nor_repeats_an_event() {
    search(2, |marks| {
        let table = Arc::new(Table::<1, 2>::new());
        let slot = table.take(LOW).unwrap();
        table.record(at(0x101), entry(0x101));
        table.record(at(0x102), entry(0x102));
        let handler = beside(&table, |table| {
            // Only fits if the reader has made room.
            table.record(at(0x103), entry(0x103));
        });
        let first = table.pop(slot).unwrap();
        assert_eq!(first, entry(0x101));
        handler.join().unwrap();
        let rest: Vec<_> = std::iter::from_fn(|| table.pop(slot)).collect();
        assert_eq!(rest[0], entry(0x102));
        assert_eq!(rest.len() as u64 + table.lost(slot), 2);
        assert!(rest.get(1).is_none_or(|&third| third == entry(0x103)), "{rest:?}");
        marks.mark(rest.len() - 1);
    });
}

#[test]
fn two_readers_have_each_event_once() {
    search(2, |marks| {
        let table = Arc::new(Table::<1, 2>::new());
        let slot = table.take(LOW).unwrap();
        table.record(at(0x101), entry(0x101));
        table.record(at(0x102), entry(0x102));
        let other = beside(&table, move |table| table.pop(slot));
        let ours = table.pop(slot);
        let theirs = other.join().unwrap();
        marks.mark(usize::from(ours == Some(entry(0x101))));
        let mut got: Vec<_> = ours.into_iter().chain(theirs).collect();
        got.extend(std::iter::from_fn(|| table.pop(slot)));
        got.sort_by_key(|entry| entry.address);
        assert_eq!(got, [entry(0x101), entry(0x102)]);
    });
}

#[test]
fn a_thread_that_sees_a_slot_watched_sees_its_range() {
    search(2, |marks| {
        let table = Arc::new(Table::<1, 2>::new());
        let old = table.take(LOW).unwrap();
        table.record(at(0x180), entry(0x180));
        table.let_go(old);
        let handler = beside(&table, |table| {
            assert_eq!(table.record(at(0x180), entry(0x180)), 0, "a range of before");
            table.record(at(0x280), entry(0x280))
        });
        // The handler may be inside for a moment, to see that the slot is not watched.
        let slot = table.take(HIGH);
        let watches = handler.join().unwrap();
        marks.mark(watches);
        if let Some(slot) = slot {
            assert_eq!(table.pending(slot), watches);
            assert_eq!(table.pop(slot), (watches == 1).then(|| entry(0x280)));
        }
    });
}

/// A value that tells loom when it is used and when it ends: a use beside or after the end is found.
struct Value {
    cell: UnsafeCell<u64>,
    ends: std::sync::Arc<std::sync::atomic::AtomicUsize>,
}

impl Value {
    fn new() -> (Self, std::sync::Arc<std::sync::atomic::AtomicUsize>) {
        let ends = std::sync::Arc::default();
        (Self { cell: UnsafeCell::new(7), ends: std::sync::Arc::clone(&ends) }, ends)
    }

    fn read(&self) -> u64 {
        // SAFETY: loom checks the condition: no thread writes meanwhile.
        self.cell.with(|value| unsafe { *value })
    }

    fn end(&self) {
        // SAFETY: as above.
        self.cell.with_mut(|value| unsafe { *value = 0 });
    }
}

// SAFETY: the cell is read by a guard and written by the owner that ends it, and loom checks that.
unsafe impl Sync for Value {}

impl Drop for Value {
    fn drop(&mut self) {
        self.end();
        self.ends.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    }
}

#[test]
fn what_an_owner_drops_ends_when_the_last_guard_has_left() {
    search(2, |marks| {
        let (value, ends) = Value::new();
        let owned = LiveOwner::new(value);
        let place = owned.place().clone();
        let first = LiveArc::enter::<PINS>(&place).unwrap();
        let threads = [
            thread::spawn(move || {
                assert_eq!(first.read(), 7);
                true
            }),
            thread::spawn(move || match LiveArc::enter::<REFERENCES>(&place) {
                Ok(entered) => {
                    assert_eq!(entered.read(), 7);
                    true
                }
                Err(_) => false,
            }),
        ];
        drop(owned);
        let [_, entered] = threads.map(|thread| thread.join().unwrap());
        marks.mark(usize::from(entered));
        assert_eq!(ends.load(std::sync::atomic::Ordering::Relaxed), 1);
    });
}

#[test]
fn a_value_is_taken_out_or_used_never_both() {
    search(3, |marks| {
        let (value, ends) = Value::new();
        let owned = LiveOwner::new(value);
        let place = owned.place().clone();
        let guard = thread::spawn(move || {
            let entered = LiveArc::enter::<PINS>(&place).ok();
            entered.map(|entered| entered.read())
        });
        match owned.try_into_inner(Duration::ZERO) {
            Ok(value) => {
                value.end();
                marks.mark(0);
            }
            Err((owned, _)) => {
                assert_eq!(owned.read(), 7);
                assert!(LiveArc::enter::<PINS>(owned.place()).is_ok(), "it is open again");
                marks.mark(1);
            }
        }
        if guard.join().unwrap().is_none() {
            marks.mark(2);
        }
        assert_eq!(ends.load(std::sync::atomic::Ordering::Relaxed), 1);
    });
}

#[test]
fn an_owner_that_waits_is_woken_by_the_last_guard() {
    loom::model(|| {
        let (value, _) = Value::new();
        let owned = LiveOwner::new(value);
        let guards = [
            LiveArc::enter::<PINS>(owned.place()).unwrap(),
            LiveArc::enter::<PINS>(owned.place()).unwrap(),
        ];
        let threads = guards.map(|guard| thread::spawn(move || assert_eq!(guard.read(), 7)));
        // Loom's clock stands still: a thread that is not woken waits for ever, and the search fails.
        let value = owned.try_into_inner(Duration::from_secs(3600)).map_err(|_| ()).unwrap();
        value.end();
        drop(value);
        for thread in threads {
            thread.join().unwrap();
        }
    });
}

/// A guard that leaves without taking a share of the place first: the owner, which does not wait once the
/// count is zero, lets the place go while the guard still wakes it.
#[test]
#[should_panic(expected = "Causality violation")]
fn a_guard_that_takes_no_share_wakes_a_place_that_is_gone() {
    /// A live reference, and the rest of the place, which its end writes to.
    struct Place(LiveRef, UnsafeCell<()>);
    // SAFETY: loom checks how the cell is used.
    unsafe impl Sync for Place {}
    loom::model(|| {
        let place = Arc::new(Place(LiveRef::default(), UnsafeCell::new(())));
        place.0.enter(HoldKind::Pin).unwrap();
        let guard = beside(&place, |place| {
            if !place.0.try_leave(HoldKind::Pin)
                && place.0.leave(HoldKind::Pin) == Left::LastOfClosing
            {
                place.1.with(|_wake| ());
            }
        });
        let is_unused = place.0.kill().is_empty();
        if is_unused || place.0.guards().is_empty() {
            // The owner's share was the only one.
            place.1.with_mut(|_end| ());
        }
        guard.join().unwrap();
    });
}

/// One address, which the kernel hands to the thread that maps while it is free, and a zone's knowledge of it.
#[derive(Default)]
struct AddressSpace {
    is_mapped: Mutex<bool>,
    claims: Mutex<Vec<u32>>,
    /// The regions that a pin by address finds, by their claims.
    table: Mutex<Vec<Found>>,
}

/// An entry of the table: the claim of a region, and where its guards enter.
type Found = (u32, Arc<LiveArc<Bound>>);

/// A bound region. Fields are dropped in the order of their declaration.
enum Bound {
    /// As the zone's `Inner` does it.
    ClaimFirst(Claim, #[allow(dead_code, reason = "it is dropped")] Memory),
    /// The order with the defect.
    MemoryFirst(#[allow(dead_code, reason = "it is dropped")] Memory, Claim),
}

impl Bound {
    fn id(&self) -> u32 {
        let (Self::ClaimFirst(claim, _) | Self::MemoryFirst(_, claim)) = self;
        claim.1
    }
}

/// The region's memory: the address is free when this is dropped.
struct Memory(Arc<AddressSpace>);

impl Drop for Memory {
    fn drop(&mut self) {
        *self.0.is_mapped.lock().unwrap() = false;
    }
}

/// A zone's knowledge of the region, until this is dropped.
struct Claim(Arc<AddressSpace>, u32);

impl Drop for Claim {
    fn drop(&mut self) {
        // Entries are dropped without the lock.
        let _gone: Vec<Found> = {
            let mut table = self.0.table.lock().unwrap();
            let (gone, rest) = table.drain(..).partition(|(id, _)| *id == self.1);
            *table = rest;
            gone
        };
        self.0.claims.lock().unwrap().retain(|id| *id != self.1);
    }
}

/// Maps the address, binds the memory there, pins it by its address, and drops it. Returns whether the
/// address was free.
fn map_bind_pin_drop(
    space: &Arc<AddressSpace>,
    id: u32,
    bound: fn(Claim, Memory) -> Bound,
) -> bool {
    {
        let mut is_mapped = space.is_mapped.lock().unwrap();
        if *is_mapped {
            return false;
        }
        *is_mapped = true;
    }
    let memory = Memory(space.clone());
    {
        let mut claims = space.claims.lock().unwrap();
        assert!(claims.is_empty(), "bound already");
        claims.push(id);
    }
    let owned = LiveOwner::new(bound(Claim(space.clone(), id), memory));
    space.table.lock().unwrap().push((id, owned.place().clone()));

    let found = space.table.lock().unwrap().first().map(|(_, place)| place.clone());
    let entered = found.and_then(|place| LiveArc::enter::<PINS>(&place).ok());
    assert_eq!(entered.expect("no region").id(), id, "another region");
    drop(owned);
    true
}

fn reuse_an_address(bound: fn(Claim, Memory) -> Bound) {
    search(2, move |marks| {
        let space = Arc::new(AddressSpace::default());
        let other = {
            let space = space.clone();
            thread::spawn(move || map_bind_pin_drop(&space, 1, bound))
        };
        let ours = map_bind_pin_drop(&space, 2, bound);
        let theirs = other.join().unwrap();
        assert!(ours || theirs, "the address was free");
        marks.mark(usize::from(ours && theirs));
    });
}

/// A thread that maps what another has just unmapped binds it, and a pin by its address finds it.
#[test]
fn an_address_that_is_handed_out_again_has_no_claim_and_no_entry() {
    reuse_an_address(Bound::ClaimFirst);
}

/// Memory that is unmapped before its claim ends: the search must find the bind that is refused.
#[test]
#[should_panic(expected = "bound already")]
fn an_address_that_is_free_before_its_claim_is_refused_to_the_next() {
    reuse_an_address(|claim, memory| Bound::MemoryFirst(memory, claim));
}

/// The value that answers for a mapping: a word that is written before and after, and read by handlers.
type Answerer = UnsafeCell<u64>;

/// Lets a gate be opened, closed and opened for other addresses while a handler comes. `is_empty` looks for
/// handlers inside, before the answerer is freed.
fn answer_and_close(
    is_empty: fn(&Gate<Answerer>) -> bool,
) -> impl Fn(&Seen) + Sync + Send + 'static {
    move |seen: &Seen| {
        let gate = Arc::new(Gate::<Answerer>::new());
        let answerers = Arc::new([UnsafeCell::new(0), UnsafeCell::new(0)]);
        // SAFETY: `with_mut` lends a pointer to the word, which loom watches for the accesses of others.
        let write = |answerer: &Answerer, word| answerer.with_mut(|at| unsafe { *at = word });
        write(&answerers[0], 1);
        assert!(gate.take());
        gate.open(LOW.first, LOW.last, (&raw const answerers[0]).cast_mut());
        let handler = {
            // The answerers live as long as the handler does; only their contents are freed.
            let (gate, answerers) = (gate.clone(), answerers.clone());
            thread::spawn(move || {
                let mut word = 0;
                let is_answered = gate.answer(0x180, 0x180, |answerer| {
                    assert_eq!(
                        answerer.cast_const(),
                        &raw const answerers[0],
                        "of another mapping"
                    );
                    // SAFETY: it is one of the answerers; loom watches the access.
                    word = unsafe { &*answerer }.with(|at| unsafe { *at });
                    true
                });
                assert_eq!(word, u64::from(is_answered));
                is_answered
            })
        };
        gate.close();
        assert!(!gate.take(), "a gate that is being closed is taken");
        while !is_empty(&gate) {
            seen.mark(0);
            thread::yield_now();
        }
        write(&answerers[0], 2);
        gate.give_back();
        // A handler may be looking at a gate that it does not enter.
        if gate.take() {
            write(&answerers[1], 3);
            gate.open(HIGH.first, HIGH.last, (&raw const answerers[1]).cast_mut());
            seen.mark(1);
        } else {
            seen.mark(2);
        }
        seen.mark(3 + usize::from(handler.join().unwrap()));
    }
}

#[test]
fn what_answers_faults_is_freed_after_the_last_handler_has_left() {
    search(5, answer_and_close(Gate::is_empty));
}

/// Without the look for handlers inside, one reads freed contents: the search must find that.
#[test]
#[should_panic(expected = "Causality violation")]
fn what_answers_faults_and_is_freed_at_once_is_read_afterwards() {
    search(5, answer_and_close(|_| true));
}

/// A page is filled by a handler from a word, while its owner changes that word, waits for the handlers inside
/// and gives the page back, twice.
fn fill_and_give_back(
    drain: fn(&Gate<Answerer>) -> bool,
) -> impl Fn(&Seen) + Sync + Send + 'static {
    use loom::sync::atomic::{AtomicU64, Ordering};
    const ABSENT: u64 = 0;
    const LAST: u64 = 3;
    move |seen: &Seen| {
        let gate = Arc::new(Gate::<Answerer>::new());
        let words = Arc::new((AtomicU64::new(1), AtomicU64::new(ABSENT)));
        assert!(gate.take());
        gate.open(LOW.first, LOW.last, core::ptr::null_mut());
        let handler = {
            let (gate, words) = (gate.clone(), words.clone());
            thread::spawn(move || {
                gate.answer(0x180, 0x180, |_| {
                    let (source, page) = &*words;
                    // Relaxed: it is the gate that orders them.
                    let word = source.load(Ordering::Relaxed);
                    // As the kernel does it: a page that is there stays.
                    page.compare_exchange(ABSENT, word, Ordering::Relaxed, Ordering::Relaxed)
                        .is_ok()
                })
            })
        };
        let (source, page) = &*words;
        for word in 2..=LAST {
            source.store(word, Ordering::Relaxed);
            assert!(drain(&gate));
            page.store(ABSENT, Ordering::Relaxed);
        }
        assert!(handler.join().unwrap(), "the gate was open");
        let found = page.load(Ordering::Relaxed);
        assert!([ABSENT, LAST].contains(&found), "a page with old bytes");
        seen.mark(usize::from(found == LAST));
    }
}

#[test]
fn a_page_that_was_given_back_is_not_filled_with_bytes_of_before() {
    let drain = |gate: &Gate<Answerer>| {
        gate.drain(|| {
            thread::yield_now();
            true
        })
    };
    search(2, fill_and_give_back(drain));
}

/// Without the wait a handler fills it from bytes that it read before: the search must find that.
#[test]
#[should_panic(expected = "a page with old bytes")]
fn a_page_that_is_given_back_at_once_is_filled_with_bytes_of_before() {
    search(2, fill_and_give_back(|_| true));
}

/// Two handlers write records to a ring of one entry while they are taken out.
#[test]
fn a_record_of_a_ring_is_whole_or_lost_and_each_is_counted() {
    search(3, |marks| {
        let ring = Arc::new(Ring::new(1));
        let handlers = [1, 2].map(|word| beside(&ring, move |ring| ring.push([word; Ring::WORDS])));
        let mut found = 0;
        let mut take = || {
            ring.take(|words| {
                assert!(words == [1; 3] || words == [2; 3], "a torn record: {words:?}");
                found += 1;
            })
        };
        let mut lost = take();
        for handler in handlers {
            handler.join().unwrap();
        }
        lost += take();
        assert_eq!(found + lost, 2);
        marks.mark(usize::try_from(lost).unwrap());
    });
}

/// The requests of handlers, and threads that answer them.
type Asked = Requests<2, 1>;
const RELAXED: loom::sync::atomic::Ordering = loom::sync::atomic::Ordering::Relaxed;

/// The work of a handler. Returns the word that it sleeps at: while that is unchanged, futex(2) lets it sleep, and a
/// thread that changes the word wakes it.
fn ask(asked: &Asked, thread: u32) -> u32 {
    let (_, seen) = asked.waits(5);
    assert!(asked.ask(Request { page: 5, is_write: true, thread }), "no room");
    seen
}

/// The mistake of a handler: it may miss its wake-up.
fn ask_first(asked: &Asked, thread: u32) -> u32 {
    assert!(asked.ask(Request { page: 5, is_write: true, thread }), "no room");
    asked.waits(5).1
}

/// Takes requests until there were `count`, and answers each.
fn answer(asked: &Asked, count: u32) {
    let mut threads = Vec::new();
    while threads.len() < count as usize {
        let before = threads.len();
        asked.take(|request| {
            assert!(request.page == 5 && request.is_write, "{request:?}");
            threads.push(request.thread);
        });
        if threads.len() == before {
            thread::yield_now();
        } else {
            let _ = asked.wakes(5);
        }
    }
    threads.sort_unstable();
    assert!(threads.into_iter().eq(1..=count), "a request is lost, or was taken twice");
}

/// Handlers that ask for a page, the thread that answers them, and perhaps one that fills the page without having
/// been asked.
fn asked(handlers: u32, is_filled_elsewhere: bool, ask: fn(&Asked, u32) -> u32) {
    let asked = Arc::new(Asked::new());
    let threads: Vec<_> =
        (1..=handlers).map(|number| beside(&asked, move |asked| ask(asked, number))).collect();
    let other = is_filled_elsewhere.then(|| {
        beside(&asked, |asked| {
            let _ = asked.wakes(5);
        })
    });
    answer(&asked, handlers);
    other.into_iter().for_each(|other| other.join().unwrap());
    for thread in threads {
        let seen = thread.join().unwrap();
        let now = asked.waits(5).0.load(RELAXED);
        // The bit that is set by this look counts for nothing.
        assert_ne!(now | 1, seen, "a handler sleeps on");
    }
}

#[test]
fn a_handler_that_asks_for_a_page_is_woken_when_it_is_filled() {
    loom::model(|| asked(2, false, ask));
}

#[test]
fn a_page_that_is_filled_elsewhere_takes_no_wake_up_away() {
    loom::model(|| asked(1, true, ask));
}

/// The search must find the handler that sleeps on.
#[test]
#[should_panic(expected = "a handler sleeps on")]
fn a_handler_that_looks_at_its_word_after_it_asked_misses_its_wake_up() {
    loom::model(|| asked(1, false, ask_first));
}

#[test]
fn a_handler_finds_its_gate_whatever_gates_come_and_go_meanwhile() {
    search(1, |seen| {
        let index = Arc::new(Index::<3>::new());
        index.add(0x200, 1);
        let handler = beside(&index, |index| index.ask(0x280, |slot| slot == 1));
        // Both tables are written to.
        index.add(0x100, 0);
        index.add(0x300, 2);
        index.remove(0);
        assert!(handler.join().unwrap(), "a gate that was there all the time");
        seen.mark(0);
    });
}
