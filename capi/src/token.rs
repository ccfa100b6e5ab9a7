//! Guards as 64 bits: a table of guards that wait for their token.
//!
//! A token is a place in the table and the number of that place's turn. A token that was redeemed before, or made up, is
//! refused, and never gives back the pins of another holder.
//!
//! ```text
//!  63                                32 31                                0
//! ┌────────────────────────────────────┬───────────────────────────────────┐
//! │            turn, odd               │              place                │
//! └────────────────────────────────────┴───────────────────────────────────┘
//! ```
//!
//! A place is a cell with a turn beside it. An odd turn says that it has a guard. Each thread keeps a few empty places,
//! so that parking a guard costs a store, and redeeming it one atomic step. The tables of the package `uzone-zone`
//! ([`RawGuard`](uzone_rust::RawGuard)) have a lock for each half, which would cost more than the pin itself.
//!
//! Locks: one for the list of empty places that all threads share, taken once for 32 guards.
//! Unsafe: the cell of a place is read and written by the thread that owns it at the moment.

use std::cell::{RefCell, UnsafeCell};
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use uzone_rust::{Pinned, PinnedRanges};

pub(crate) type Held = PinnedRanges<Pinned>;

/// How many places the first part of the table has; each further one has twice as many.
const FIRST: u32 = 64;
const PARTS: usize = 20;
/// How many places there are at most.
const MOST: u32 = FIRST * ((1 << PARTS) - 1);
/// How many places a thread takes from the shared list, and returns to it, at a time.
const BATCH: u32 = 32;
/// How many empty places a thread keeps.
const KEPT: usize = 2 * BATCH as usize;

/// A place of the table.
///
/// # Invariants
/// The cell has a guard if and only if `turn` is odd. A thread owns the cell of an even turn if it has the place from a
/// list of empty places, and the cell of an odd turn once it has made the turn even.
struct Place {
    turn: AtomicU32,
    guard: UnsafeCell<MaybeUninit<Held>>,
}

// SAFETY: `Sync` wants that threads with `&Place` do not race.
// 1. `turn` is atomic.
// 2. One thread at a time owns the cell, by the invariants. The Release store in `park` and the Acquire step in `redeem`
//    hand the guard from one to the next, and the lock of the shared list an empty cell.
// 3. A guard may move to another thread, which the constant below asserts.
unsafe impl Sync for Place {}

const _: fn() = || {
    fn is_send<T: Send>() {}
    is_send::<Held>();
};

static TABLE: [OnceLock<Box<[Place]>>; PARTS] = [const { OnceLock::new() }; PARTS];

/// The empty places that no thread keeps.
struct Empty {
    places: Vec<u32>,
    /// The first place that was never used.
    next: u32,
}

static EMPTY: Mutex<Empty> = Mutex::new(Empty { places: Vec::new(), next: 0 });

/// The empty places of a thread.
struct Own(RefCell<Vec<u32>>);

thread_local! {
    static OWN: Own = const { Own(RefCell::new(Vec::new())) };
}

impl Drop for Own {
    fn drop(&mut self) {
        empty().places.append(self.0.get_mut());
    }
}

fn empty() -> MutexGuard<'static, Empty> {
    EMPTY.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns in which part of the table a place is, and where in that.
#[inline]
#[expect(clippy::cast_possible_truncation, reason = "a place has 32 bits, and a `usize` has 64")]
fn position(place: u32) -> (usize, usize) {
    let from_zero = u64::from(place) + u64::from(FIRST);
    let part = from_zero.ilog2() - FIRST.ilog2();
    (part as usize, (from_zero - (u64::from(FIRST) << part)) as usize)
}

#[inline]
fn at(place: u32) -> Option<&'static Place> {
    let (part, offset) = position(place);
    TABLE.get(part)?.get()?.get(offset)
}

/// Returns an empty place, which the calling thread owns; `None` if there is none.
#[inline]
fn vacancy() -> Option<u32> {
    OWN.try_with(|own| own.0.borrow_mut().pop()).ok().flatten().or_else(refill)
}

/// Takes a batch of empty places, new ones if there are too few. Returns one of them.
#[cold]
fn refill() -> Option<u32> {
    let mut batch = Vec::with_capacity(KEPT);
    let mut empty = empty();
    let rest = empty.places.len().saturating_sub(KEPT / 2);
    batch.extend(empty.places.drain(rest..));
    if batch.is_empty() {
        let end = (empty.next + BATCH).min(MOST);
        batch.extend(empty.next..end);
        empty.next = end;
    }
    drop(empty);
    for place in &batch {
        let (part, _) = position(*place);
        TABLE[part].get_or_init(|| {
            let fresh =
                || Place { turn: AtomicU32::new(0), guard: UnsafeCell::new(MaybeUninit::uninit()) };
            std::iter::repeat_with(fresh).take((FIRST as usize) << part).collect()
        });
    }
    let one = batch.pop();
    give_back_all(batch);
    one
}

/// Puts empty places into the list of this thread, or into the shared one if the thread is ending.
#[cold]
fn give_back_all(mut batch: Vec<u32>) {
    let _ = OWN.try_with(|own| own.0.borrow_mut().append(&mut batch));
    if !batch.is_empty() {
        empty().places.append(&mut batch);
    }
}

/// Gives an empty place back.
#[inline]
fn give_back(place: u32) {
    let len = OWN.try_with(|own| {
        let mut own = own.0.borrow_mut();
        own.push(place);
        own.len()
    });
    match len {
        Ok(len) if len < KEPT => {}
        Ok(_) => share(),
        Err(_) => empty().places.push(place),
    }
}

/// Hands half of the empty places of this thread to the others.
#[cold]
fn share() {
    let half = OWN.try_with(|own| own.0.borrow_mut().split_off(KEPT / 2));
    empty().places.append(&mut half.unwrap_or_default());
}

/// Takes a guard in. Returns its token, which is never 0, or the guard if the table is full.
#[inline]
pub(crate) fn park(guard: Held) -> Result<u64, Held> {
    let Some((place, slot)) = vacancy().and_then(|place| Some((place, at(place)?))) else {
        return Err(guard);
    };
    // SAFETY: The place is from a list of empty places, so this thread owns its cell.
    unsafe { &mut *slot.guard.get() }.write(guard);
    // Relaxed: the last thread that changed it owned the place before this one. It is even and below the last turn.
    let turn = slot.turn.load(Ordering::Relaxed) + 1;
    // Release pairs with the Acquire in `redeem`: that thread reads the guard.
    slot.turn.store(turn, Ordering::Release);
    Ok(u64::from(turn) << 32 | u64::from(place))
}

/// Returns the turn and the place of a token.
#[expect(clippy::cast_possible_truncation, reason = "halves of 64 bits")]
#[inline]
fn halves(token: u64) -> (u32, u32) {
    ((token >> 32) as u32, token as u32)
}

/// Returns the guard of a token, if that was not redeemed before.
#[inline]
pub(crate) fn redeem(token: u64) -> Option<Held> {
    let (turn, place) = halves(token);
    let slot = at(place).filter(|_| turn % 2 == 1)?;
    // Acquire pairs with the Release in `park`. Relaxed on failure: nothing is read then.
    slot.turn
        .compare_exchange(turn, turn.wrapping_add(1), Ordering::Acquire, Ordering::Relaxed)
        .ok()?;
    // SAFETY: The cell is valid for reads as long as the table, which is for ever. This thread made the turn even, so it
    // owns the cell.
    let guard = unsafe { slot.guard.get().read() };
    // SAFETY: The turn was odd, so the cell had a guard, and no other thread reads it again.
    let guard = unsafe { guard.assume_init() };
    // After its last turn a place stays unused, so that no token is given out twice.
    if turn != u32::MAX {
        give_back(place);
    }
    Some(guard)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]
    use uzone_rust::{BindOptions, ByteLen, MemoryKind, Pagemap, Region, Zone};

    use super::*;

    fn bound(zone: &Zone) -> (Pagemap, usize) {
        let region = Region::anonymous(ByteLen::mib(2)).unwrap();
        let pagemap = zone.bind(region, BindOptions::new(MemoryKind::Generic)).unwrap();
        let address = pagemap.region().addr().get();
        (pagemap, address)
    }

    #[test]
    fn places_follow_each_other_through_the_parts_of_the_table() {
        let mut expected = (0, 0);
        for place in 0..1000 {
            assert_eq!(position(place), expected);
            expected.1 += 1;
            if expected.1 == (FIRST as usize) << expected.0 {
                expected = (expected.0 + 1, 0);
            }
        }
        assert_eq!(position(MOST - 1), (PARTS - 1, ((FIRST as usize) << (PARTS - 1)) - 1));
        assert!(at(u32::MAX).is_none() && position(MOST).0 == PARTS);
    }

    #[test]
    fn a_token_gives_its_guard_back_once() {
        let zone = Zone::new();
        let (pagemap, address) = bound(&zone);
        let tokens: Vec<u64> = (0..500)
            .map(|page| park(zone.pin(address + page * 4096, ByteLen::kib(4)).unwrap()).unwrap())
            .collect();
        for (page, token) in tokens.iter().enumerate() {
            let guard = redeem(*token).unwrap();
            let segment = guard.segments().next().unwrap();
            assert_eq!(segment.address, address + page * 4096);
            assert!(redeem(*token).is_none(), "twice");
        }
        for token in [0, 1 << 32, u64::MAX, 1 << 32 | u64::from(u32::MAX), 2 << 32] {
            assert!(redeem(token).is_none(), "{token:#x}");
        }
        assert!(pagemap.unbind().is_ok());
    }

    #[test]
    fn no_token_is_given_out_twice() {
        let zone = Zone::new();
        let (pagemap, address) = bound(&zone);
        let pin = || zone.pin(address, ByteLen::kib(4)).unwrap();
        let first = park(pin()).unwrap();
        drop(redeem(first));
        let (_, place) = halves(first);
        at(place).unwrap().turn.store(u32::MAX - 1, Ordering::Relaxed);
        let last = park(pin()).unwrap();
        assert_eq!(last, u64::MAX << 32 | u64::from(place));
        drop(redeem(last).unwrap());
        let other = park(pin()).unwrap();
        assert_ne!(halves(other).1, place);
        assert!(redeem(first).is_none() && redeem(last).is_none());
        drop(redeem(other).unwrap());
        assert!(pagemap.unbind().is_ok());
    }

    #[test]
    fn threads_that_race_for_a_token_get_its_guard_once() {
        let zone = Zone::new();
        let (pagemap, address) = bound(&zone);
        std::thread::scope(|scope| {
            let (send, receive) = std::sync::mpsc::sync_channel::<u64>(64);
            let zone = &zone;
            scope.spawn(move || {
                for round in 0..20_000 {
                    let at = address + round % 512 * 4096;
                    let token = park(zone.pin(at, ByteLen::kib(4)).unwrap()).unwrap();
                    send.send(token).unwrap();
                    if let Some(guard) = redeem(token) {
                        assert_eq!(guard.segments().next().unwrap().address, at);
                    }
                }
            });
            scope.spawn(move || receive.iter().for_each(|token| drop(redeem(token))));
        });
        assert!(pagemap.unbind().is_ok());
    }
}
