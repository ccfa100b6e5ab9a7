//! The scope: how often it fences, and that others see its stores.

mod common;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, mpsc};
use std::thread;

use common::paths;
use uzone_stream::{Path, Pattern, Streaming};

/// The work in a scope, with the fences that it has issued by then and those at its end.
type Fenced = (&'static str, for<'a> fn(&mut Streaming<'a>, &'a mut [u8]), u64, u64);

#[test]
fn a_scope_fences_once_after_its_last_store_and_never_without_one() {
    let cases: [Fenced; 4] = [
        ("a store", |stream, bytes| stream.zero(bytes), 0, 1),
        (
            "a store, and fences",
            |stream, bytes| {
                stream.copy(bytes, &[2; 100]);
                stream.drain();
                stream.drain();
            },
            1,
            1,
        ),
        (
            "no byte",
            |stream, _| {
                stream.drain();
                stream.zero(&mut []);
                stream.copy(&mut [], &[]);
                stream.fill(&mut [], &Pattern::constant(&[1]).unwrap());
            },
            0,
            0,
        ),
        (
            "another scope",
            |stream, bytes| {
                let (outer, nested) = bytes.split_at_mut(64);
                stream.zero(outer);
                let inner = Streaming::counted_scope(stream.path(), |inner| inner.zero(nested));
                assert_eq!(inner.1, u64::from(stream.path() != Path::Portable));
            },
            0,
            1,
        ),
    ];
    for path in paths() {
        for (case, work, within, at_end) in cases {
            let mut bytes = [1; 100];
            let (counted, drains) = Streaming::counted_scope(path, |stream| {
                work(stream, &mut bytes);
                assert_eq!(stream.path(), path);
                stream.drains()
            });
            // Plain stores need no fence.
            let expected = if path == Path::Portable { (0, 0) } else { (within, at_end) };
            assert_eq!((counted, drains), expected, "{path}: {case}");
        }
    }
}

#[test]
fn another_thread_that_is_sent_the_memory_sees_all_of_it() {
    let rounds = if cfg!(miri) { 5 } else { 2000 };
    for path in paths() {
        let (to_reader, from_writer) = mpsc::channel::<(u64, Vec<u8>)>();
        let (to_writer, from_reader) = mpsc::channel::<Vec<u8>>();
        let reader = thread::spawn(move || {
            for (round, bytes) in from_writer {
                let (words, _) = bytes.as_chunks::<8>();
                let is_seen = words.iter().all(|word| u64::from_ne_bytes(*word) == round);
                assert!(is_seen, "{path}: round {round} was not seen whole");
                to_writer.send(bytes).unwrap();
            }
        });
        let mut bytes = vec![0; 1024];
        for round in 1..=rounds {
            let pattern = Pattern::constant(&[round]).unwrap();
            Streaming::scope(path, |stream| stream.fill(&mut bytes, &pattern));
            to_reader.send((round, bytes)).unwrap();
            bytes = from_reader.recv().expect("the reader saw every round");
        }
        drop(to_reader);
        reader.join().unwrap();
    }
}

#[test]
fn a_release_store_after_the_scope_publishes_what_it_wrote() {
    let rounds = if cfg!(miri) { 3 } else { 5000 };
    for path in paths() {
        // Memory of a round belongs to the writer until `published` exceeds the round's number.
        // The locks only satisfy the compiler: the writer takes them all at first and no thread
        // waits for one.
        let memory: Vec<Mutex<[u8; 256]>> = (0..rounds).map(|_| Mutex::new([0; 256])).collect();
        let published = AtomicUsize::new(0);
        thread::scope(|scope| {
            let mut writing: Vec<_> = memory.iter().map(|one| one.try_lock().unwrap()).collect();
            scope.spawn(|| {
                for (round, one) in memory.iter().enumerate() {
                    // Acquire pairs with the Release below: it makes the round's bytes visible.
                    while published.load(Ordering::Acquire) <= round {
                        thread::yield_now();
                    }
                    let one = one.try_lock().expect("the writer has let go of it");
                    assert!(*one == [expected(round); 256], "{path}: round {round}");
                }
            });
            for (round, mut one) in writing.drain(..).enumerate() {
                let src = [expected(round); 256];
                Streaming::scope(path, |stream| stream.copy(&mut one[..], &src));
                drop(one);
                // Release pairs with the Acquire above.
                published.store(round + 1, Ordering::Release);
            }
        });
    }
}

/// The byte that the writer of a round writes: never the zero that was there before.
fn expected(round: usize) -> u8 {
    (round % 251 + 1).to_le_bytes()[0]
}
