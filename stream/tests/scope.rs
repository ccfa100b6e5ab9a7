//! The scope: how often it fences, and that others see its stores.

mod common;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, mpsc};
use std::thread;

use common::paths;
use uzone_stream::{Path, Pattern, Streaming, zero_by};

/// The paths that stream.
fn streaming_paths() -> impl Iterator<Item = Path> {
    paths().into_iter().filter(|path| *path != Path::Portable)
}

#[test]
fn a_scope_that_wrote_fences_once() {
    for path in streaming_paths() {
        let (mut low, mut high) = ([1; 100], [1; 100]);
        let (before_end, drains) = Streaming::counted_scope(path, |stream| {
            stream.zero(&mut low);
            stream.copy(&mut high, &[2; 100]);
            stream.drains()
        });
        assert_eq!((before_end, drains), (0, 1), "{path}");
        assert_eq!((low, high), ([0; 100], [2; 100]));
    }
}

#[test]
fn a_scope_that_drained_and_then_wrote_nothing_fences_once() {
    for path in streaming_paths() {
        let mut bytes = [1; 100];
        let (before_end, drains) = Streaming::counted_scope(path, |stream| {
            stream.zero(&mut bytes);
            stream.drain();
            stream.drain();
            stream.drains()
        });
        assert_eq!((before_end, drains), (1, 1), "{path}");
    }
}

#[test]
fn a_scope_that_wrote_nothing_does_not_fence() {
    for path in streaming_paths() {
        let pattern = Pattern::constant(&[1]).unwrap();
        let ((), drains) = Streaming::counted_scope(path, |stream| {
            stream.drain();
            stream.zero(&mut []);
            stream.copy(&mut [], &[]);
            stream.fill(&mut [], &pattern);
        });
        assert_eq!(drains, 0, "{path}");
    }
}

#[test]
fn the_portable_path_has_nothing_to_fence() {
    let mut bytes = [1; 100];
    let ((), drains) = Streaming::counted_scope(Path::Portable, |stream| stream.zero(&mut bytes));
    assert_eq!((bytes, drains), ([0; 100], 0));
}

#[test]
fn a_scope_returns_what_its_closure_returns_and_knows_its_path() {
    for path in paths() {
        assert_eq!(Streaming::scope(path, |stream| stream.path()), path);
    }
}

#[test]
fn scopes_may_be_nested() {
    for path in streaming_paths() {
        let (mut outer, mut inner) = ([1; 64], [1; 64]);
        let (inner_drains, outer_drains) = Streaming::counted_scope(path, |stream| {
            stream.zero(&mut outer);
            Streaming::counted_scope(path, |stream| stream.zero(&mut inner)).1
        });
        assert_eq!((inner_drains, outer_drains), (1, 1), "{path}");
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

#[test]
fn one_shot_calls_are_visible_to_a_thread_started_after_them() {
    for path in paths() {
        for _ in 0..if cfg!(miri) { 2 } else { 100 } {
            let mut bytes = [7; 512];
            zero_by(path, &mut bytes);
            thread::scope(|scope| {
                scope.spawn(|| assert_eq!(bytes, [0; 512], "{path}"));
            });
        }
    }
}
