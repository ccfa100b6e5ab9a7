//! Every interleaving of two or three threads on the table of watches, searched by loom. A handler is
//! a thread here: it may come between any two steps of the others, and it never waits for them.
//!
//! Run with `RUSTFLAGS="--cfg loom" cargo test -p uzone-os --test loom --release`.
#![cfg(loom)]
#![allow(clippy::unwrap_used, reason = "helpers of tests fail by panicking, as tests do")]

mod sync {
    pub(crate) use loom::sync::atomic::{AtomicU64, Ordering};
}
#[path = "../src/bus/table.rs"]
#[allow(dead_code, reason = "it is the whole file of the library")]
mod table;

use loom::sync::Arc;
use loom::thread;
use table::{Entry, Extent, Table};

/// The outcomes a model was seen to have, collected over all its interleavings. They are flags outside
/// of the model, and survive from one interleaving to the next.
#[derive(Clone)]
struct Seen(std::sync::Arc<[std::sync::atomic::AtomicBool]>);

impl Seen {
    fn new(count: usize) -> Self {
        Self((0..count).map(|_| Default::default()).collect())
    }

    fn mark(&self, outcome: usize) {
        self.0[outcome].store(true, std::sync::atomic::Ordering::Relaxed);
    }

    fn assert_all(&self) {
        for (outcome, seen) in self.0.iter().enumerate() {
            assert!(
                seen.load(std::sync::atomic::Ordering::Relaxed),
                "outcome {outcome} was never reached: the model does not test what it says"
            );
        }
    }
}

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
    seen: &Seen,
    take: fn(&Table<1, 2>, Extent) -> Option<usize>,
) -> impl Fn() + Sync + Send + 'static {
    let seen = seen.clone();
    move || {
        let table = Arc::new(Table::<1, 2>::new());
        let slot = table.take(LOW).unwrap();
        let handler = {
            let table = table.clone();
            thread::spawn(move || table.record(at(0x180), entry(0x180)))
        };
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
    let seen = Seen::new(4);
    loom::model(reuse(&seen, Table::take));
    seen.assert_all();
}

/// The table without the look at who is inside: the search must find the event that lands in the next
/// watch of the slot.
#[test]
#[should_panic(expected = "an event of another watch")]
fn a_slot_that_is_taken_without_looking_has_events_of_another_watch() {
    loom::model(reuse(&Seen::new(4), Table::take_without_looking));
}

#[test]
fn two_handlers_and_a_reader_agree_on_every_event() {
    let seen = Seen::new(3);
    let marks = seen.clone();
    loom::model(move || {
        let table = Arc::new(Table::<1, 2>::new());
        let slot = table.take(LOW).unwrap();
        let handler = {
            let table = table.clone();
            thread::spawn(move || assert_eq!(table.record(at(0x180), entry(0x180)), 1))
        };
        let reader = {
            let table = table.clone();
            thread::spawn(move || {
                // One that is not whole is not there yet.
                (0..2).filter_map(|_| table.pop(slot)).collect::<Vec<_>>()
            })
        };
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
    seen.assert_all();
}

#[test]
fn a_ring_that_goes_round_neither_tears_nor_repeats_an_event() {
    let seen = Seen::new(2);
    let marks = seen.clone();
    loom::model(move || {
        let table = Arc::new(Table::<1, 2>::new());
        let slot = table.take(LOW).unwrap();
        table.record(at(0x101), entry(0x101));
        table.record(at(0x102), entry(0x102));
        let handler = {
            let table = table.clone();
            thread::spawn(move || {
                // Only fits if the reader has made room.
                table.record(at(0x103), entry(0x103));
            })
        };
        let first = table.pop(slot).unwrap();
        assert_eq!(first, entry(0x101));
        handler.join().unwrap();
        let rest: Vec<_> = std::iter::from_fn(|| table.pop(slot)).collect();
        assert_eq!(rest[0], entry(0x102));
        assert_eq!(rest.len() as u64 + table.lost(slot), 2);
        assert!(rest.get(1).is_none_or(|&third| third == entry(0x103)), "{rest:?}");
        marks.mark(rest.len() - 1);
    });
    seen.assert_all();
}

#[test]
fn two_readers_have_each_event_once() {
    let seen = Seen::new(2);
    let marks = seen.clone();
    loom::model(move || {
        let table = Arc::new(Table::<1, 2>::new());
        let slot = table.take(LOW).unwrap();
        table.record(at(0x101), entry(0x101));
        table.record(at(0x102), entry(0x102));
        let other = {
            let table = table.clone();
            thread::spawn(move || table.pop(slot))
        };
        let ours = table.pop(slot);
        let theirs = other.join().unwrap();
        marks.mark(usize::from(ours == Some(entry(0x101))));
        let mut got: Vec<_> = ours.into_iter().chain(theirs).collect();
        got.extend(std::iter::from_fn(|| table.pop(slot)));
        got.sort_by_key(|entry| entry.address);
        assert_eq!(got, [entry(0x101), entry(0x102)]);
    });
    seen.assert_all();
}

#[test]
fn who_sees_a_slot_watched_sees_its_range() {
    let seen = Seen::new(2);
    let marks = seen.clone();
    loom::model(move || {
        let table = Arc::new(Table::<1, 2>::new());
        let old = table.take(LOW).unwrap();
        table.record(at(0x180), entry(0x180));
        table.let_go(old);
        let handler = {
            let table = table.clone();
            thread::spawn(move || {
                assert_eq!(table.record(at(0x180), entry(0x180)), 0, "a range of before");
                table.record(at(0x280), entry(0x280))
            })
        };
        // The handler may be inside for a moment, to see that the slot is not watched.
        let slot = table.take(HIGH);
        let watches = handler.join().unwrap();
        marks.mark(watches);
        if let Some(slot) = slot {
            assert_eq!(table.pending(slot), watches);
            assert_eq!(table.pop(slot), (watches == 1).then(|| entry(0x280)));
        }
    });
    seen.assert_all();
}
