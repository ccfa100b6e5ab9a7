//! Shared ownership whose count is a [`LiveRef`]: [`LiveOwner`], [`LiveArc`] and [`LiveGuard`].
//!
//! A guard on pages has to be counted so that a pagemap is not unbound under it, and has to keep the
//! pagemap's memory alive. With an `Arc` and a live reference these are two counts, and two locked instructions
//! each way; here the live reference is both. A value has one [`LiveOwner`], which gives it back
//! ([`LiveOwner::try_into_inner`]) or lets it go; any number of [`LiveGuard`], which keep it where it is;
//! and any number of `Arc<LiveArc>`, which keep only the place and try to enter.
//!
//! The place of a value (its live reference, and room for it) lives longer than the value: as long as an
//! `Arc<LiveArc>`. The owner has one. If it goes before the last guard, it leaves its own behind, and the
//! last guard drops the value and that. Locks: `closing` is held while the owner waits for the last guard,
//! and by the guard that wakes it.
//! Cost: entering and leaving are one compare-and-swap each; there is no other.
//! Unsafe, because the compiler cannot know that a value with guards is neither moved nor dropped.
//! `tests/loom.rs` searches that with this very file; Miri runs the tests below.

use core::cell::UnsafeCell;
use core::fmt;
use core::marker::PhantomData;
use core::mem::ManuallyDrop;
use core::ops::Deref;
use core::ptr::NonNull;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use uzone_pages::{HoldError, HoldKind};

pub use crate::live_ref::Guards;
use crate::live_ref::{Left, LiveRef};
use crate::sync::{Arc, Condvar, Mutex};

/// The place of a value, with the count of its guards.
///
/// # Invariants
/// The value is there from [`LiveOwner::new`] on until one of these, of which one happens, and once:
/// - the owner takes it out, after the live reference was killed and found empty;
/// - the owner drops it, after `LiveRef::orphan` found no guard;
/// - a guard drops it, after leaving returned `Left::LastOfOrphan`. After each the live reference is an orphan
///   without guards, which cannot be entered.
pub struct LiveArc<T: ?Sized> {
    live: LiveRef,
    closing: Mutex<()>,
    left: Condvar,
    value: UnsafeCell<ManuallyDrop<T>>,
}

// SAFETY: the value is shared by reference between the threads of its guards (`Sync`), and moved or
// dropped by the owner or the last guard, on whatever thread that is (`Send`). The rest is locks and
// atomics.
unsafe impl<T: ?Sized + Send + Sync> Send for LiveArc<T> {}
// SAFETY: as above; through a reference to the place others can enter, and so use and drop the value.
unsafe impl<T: ?Sized + Send + Sync> Sync for LiveArc<T> {}

impl<T: ?Sized> LiveArc<T> {
    /// Returns the value.
    ///
    /// # Safety
    /// For as long as the reference is used the value is there: the caller is the owner, or has
    /// entered.
    #[inline]
    unsafe fn value(&self) -> &T {
        // SAFETY: `UnsafeCell::get` gives a pointer that is aligned and initialised. While the value is
        // there, no `&mut` to it exists.
        unsafe { &*self.value.get() }
    }

    /// Drops the value.
    ///
    /// # Safety
    /// The caller is the one that ends it: see the invariants.
    unsafe fn end(&self) {
        let value = self.value.get();
        // SAFETY: by the live reference no guard uses the value, so this reference is the only one.
        let value = unsafe { &mut *value };
        // SAFETY: it is dropped once, and can no longer be entered.
        unsafe { ManuallyDrop::drop(value) };
    }

    /// Enters: the value stays in its place until the returned guard is dropped.
    ///
    /// # Errors
    /// [`HoldError::Closing`] if the owner is taking the value out, [`HoldError::Gone`] if it has, and
    /// [`HoldError::Full`] if there are too many guards.
    #[inline(always)]
    pub fn enter<const IS_PIN: bool>(place: &Arc<Self>) -> Result<LiveGuard<T, IS_PIN>, HoldError> {
        place.live.enter(LiveGuard::<T, IS_PIN>::KIND)?;
        // Of an `Arc`, for `LiveGuard::leave` makes one of it.
        let place = Arc::as_ptr(place).cast_mut();
        // SAFETY: a pointer of an `Arc` is not null.
        let place = unsafe { NonNull::new_unchecked(place) };
        Ok(LiveGuard { place, owns: PhantomData })
    }

    /// Returns the guards that there are now.
    #[must_use]
    pub fn guards(&self) -> Guards {
        self.live.guards()
    }

    #[cold]
    fn wake(&self) {
        // Under the lock, or the wake-up could fall between the last look and the wait.
        let _closing = self.closing.lock().unwrap_or_else(PoisonError::into_inner);
        self.left.notify_all();
    }
}

impl<T: ?Sized> fmt::Debug for LiveArc<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LiveArc").field("live", &self.live).finish_non_exhaustive()
    }
}

/// A [`LiveGuard`] that counts as a reference.
pub const REFERENCES: bool = false;
/// A [`LiveGuard`] that counts as a pin.
pub const PINS: bool = true;

/// The owner of a value that guards may enter.
///
/// Dropping it drops the value, or has the last guard do so.
pub struct LiveOwner<T> {
    /// Not dropped where the last guard is to do it.
    place: ManuallyDrop<Arc<LiveArc<T>>>,
}

impl<T> LiveOwner<T> {
    /// Takes a value, without guards.
    #[must_use]
    pub fn new(value: T) -> Self {
        let place = LiveArc {
            live: LiveRef::default(),
            closing: Mutex::new(()),
            left: Condvar::new(),
            value: UnsafeCell::new(ManuallyDrop::new(value)),
        };
        Self { place: ManuallyDrop::new(Arc::new(place)) }
    }

    /// Returns the way in for others.
    #[must_use]
    pub fn place(&self) -> &Arc<LiveArc<T>> {
        &self.place
    }

    /// Takes the value out. It cannot be entered, and if there are guards, this waits at most
    /// `patience` for them.
    ///
    /// # Errors
    /// The owner as it was with the guards that there are after that time; then others can enter
    /// again.
    pub fn try_into_inner(self, patience: Duration) -> Result<T, (Self, Guards)> {
        if let Err(guards) = self.close_within(patience) {
            return Err((self, guards));
        }
        // The drop of this would end the value as well.
        let mut this = ManuallyDrop::new(self);
        // SAFETY: `this` is not used afterwards, so the place is taken out of it once.
        let place = unsafe { ManuallyDrop::take(&mut this.place) };
        // For good: a thread that still knows the place finds it empty.
        let guards = place.live.orphan();
        debug_assert!(guards.is_empty(), "a killed live reference cannot be entered");
        // SAFETY: the live reference was killed and empty, so no guard uses the value, now or later.
        let value = unsafe { &mut *place.value.get() };
        // SAFETY: as above, and it is taken once: by the owner, whose drop does not run.
        let value = unsafe { ManuallyDrop::take(value) };
        Ok(value)
    }

    /// Admits no guard, and waits at most `patience` until there is none.
    fn close_within(&self, patience: Duration) -> Result<(), Guards> {
        let place = &*self.place;
        let mut guards = place.live.kill();
        if guards.is_empty() {
            return Ok(());
        }
        let started = Instant::now();
        let mut closing = place.closing.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            guards = place.live.guards();
            if guards.is_empty() {
                return Ok(());
            }
            let rest = patience.saturating_sub(started.elapsed());
            if rest.is_zero() {
                place.live.resurrect();
                return Err(guards);
            }
            closing = place
                .left
                .wait_timeout(closing, rest)
                .map_or_else(|error| error.into_inner().0, |(closing, _)| closing);
        }
    }
}

impl<T> Deref for LiveOwner<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: the owner is there, and only it or its drop ends the value.
        unsafe { self.place.value() }
    }
}

impl<T> Drop for LiveOwner<T> {
    fn drop(&mut self) {
        if !self.place.live.orphan().is_empty() {
            // Our share of the place is left for the last guard, which may have taken it by now.
            return;
        }
        // SAFETY: the live reference found no guard when it was orphaned, so the owner ends the value.
        unsafe { self.place.end() };
        // SAFETY: this is the end of its owner, so it is dropped once.
        unsafe { ManuallyDrop::drop(&mut self.place) };
    }
}

impl<T: fmt::Debug> fmt::Debug for LiveOwner<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

/// A guard: the value stays in place until this is dropped. Whether it counts as one of [`PINS`] or of
/// [`REFERENCES`] is part of the type, so that it takes no room.
pub struct LiveGuard<T: ?Sized, const IS_PIN: bool> {
    /// Of an `Arc`, which lives with the owner, or with the last guard that the owner left behind.
    place: NonNull<LiveArc<T>>,
    /// The last one drops the value.
    owns: PhantomData<Arc<LiveArc<T>>>,
}

// SAFETY: it is a share of the value, as an `Arc` is: used by reference, and dropped on the thread of
// the last.
unsafe impl<T: ?Sized + Send + Sync, const IS_PIN: bool> Send for LiveGuard<T, IS_PIN> {}
// SAFETY: by a reference to it others have one to the value, and can enter for a guard of their own.
unsafe impl<T: ?Sized + Send + Sync, const IS_PIN: bool> Sync for LiveGuard<T, IS_PIN> {}

impl<T: ?Sized, const IS_PIN: bool> LiveGuard<T, IS_PIN> {
    /// The kind of hold.
    pub const KIND: HoldKind = if IS_PIN { HoldKind::Pin } else { HoldKind::Reference };

    /// Enters once more.
    ///
    /// # Errors
    /// [`HoldError::Closing`] if the owner is taking the value out, and [`HoldError::Full`] if there are too
    /// many guards.
    pub fn enter_again(&self) -> Result<Self, HoldError> {
        // SAFETY: the place lives as long as a guard does.
        let place = unsafe { self.place.as_ref() };
        place.live.enter(Self::KIND)?;
        Ok(Self { place: self.place, owns: PhantomData })
    }

    /// Leaves a live reference that is closing or orphaned.
    #[cold]
    fn leave(&mut self) {
        let place = self.place.as_ptr().cast_const();
        // The owner may take the value and let the place go as soon as this guard has left, and the
        // place has to outlive the waking.
        // SAFETY: the pointer is of an `Arc`, and this guard still counts, so that there is one.
        unsafe { Arc::increment_strong_count(place) };
        // SAFETY: as above; this is the share that was just added.
        let kept = unsafe { Arc::from_raw(place) };
        match kept.live.leave(Self::KIND) {
            Left::Others => {}
            Left::LastOfClosing => kept.wake(),
            Left::LastOfOrphan => {
                // SAFETY: the owner has gone and left its share behind, for the one guard that gets this
                // answer.
                let _left_behind = unsafe { Arc::from_raw(place) };
                // SAFETY: the same guard ends the value.
                unsafe { kept.end() };
            }
        }
    }
}

impl<T: ?Sized, const IS_PIN: bool> Deref for LiveGuard<T, IS_PIN> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: the place lives as long as a guard does.
        let place = unsafe { self.place.as_ref() };
        // SAFETY: this is a guard, and lives as long as the reference.
        unsafe { place.value() }
    }
}

impl<T: ?Sized, const IS_PIN: bool> Drop for LiveGuard<T, IS_PIN> {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: the place lives as long as a guard does, and this one counts until it has left.
        let place = unsafe { self.place.as_ref() };
        if !place.live.try_leave(Self::KIND) {
            self.leave();
        }
    }
}

impl<T: ?Sized + fmt::Debug, const IS_PIN: bool> fmt::Debug for LiveGuard<T, IS_PIN> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::thread;

    use super::*;

    /// Counts its drops.
    struct FaultMemory<'a>(&'a AtomicUsize);

    impl Drop for FaultMemory<'_> {
        fn drop(&mut self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn a_value_is_given_back_when_no_guard_has_entered() {
        let drops = AtomicUsize::new(0);
        let owned = LiveOwner::new(FaultMemory(&drops));
        let place = owned.place().clone();
        let entered = LiveArc::enter::<PINS>(&place).unwrap();
        let (owned, guards) = owned.try_into_inner(Duration::ZERO).map(|_| ()).unwrap_err();
        assert_eq!((guards.pins, guards.references), (1, 0));
        let again = entered.enter_again().unwrap();
        drop((entered, again));
        let inner = owned.try_into_inner(Duration::ZERO).map_err(|_| ()).unwrap();
        assert_eq!(drops.load(Ordering::Relaxed), 0);
        drop(inner);
        assert_eq!(drops.load(Ordering::Relaxed), 1);
        assert_eq!(LiveArc::enter::<PINS>(&place).map(|_| ()).unwrap_err(), HoldError::Gone);
    }

    #[test]
    fn the_last_guard_drops_what_its_owner_left() {
        let drops = AtomicUsize::new(0);
        let owned = LiveOwner::new(FaultMemory(&drops));
        let place = owned.place().clone();
        let first = LiveArc::enter::<PINS>(&place).unwrap();
        drop(owned);
        let second = LiveArc::enter::<REFERENCES>(&place).unwrap();
        drop(first);
        assert_eq!(drops.load(Ordering::Relaxed), 0);
        assert_eq!(second.0.load(Ordering::Relaxed), 0);
        drop(second);
        assert_eq!(drops.load(Ordering::Relaxed), 1);
        assert_eq!(LiveArc::enter::<PINS>(&place).map(|_| ()).unwrap_err(), HoldError::Gone);
    }

    #[test]
    fn a_value_without_guards_goes_with_its_owner() {
        let drops = AtomicUsize::new(0);
        let owned = LiveOwner::new(FaultMemory(&drops));
        let place = owned.place().clone();
        drop(owned);
        assert_eq!(drops.load(Ordering::Relaxed), 1);
        drop(place);
        assert_eq!(drops.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn a_guard_of_what_is_not_sized_keeps_it_as_well() {
        trait Answer {
            fn answer(&self) -> u64;
        }
        impl Answer for u64 {
            fn answer(&self) -> u64 {
                *self
            }
        }
        let owned = LiveOwner::new(42_u64);
        let place: Arc<LiveArc<dyn Answer + Send + Sync>> = owned.place().clone();
        let entered = LiveArc::enter::<REFERENCES>(&place).unwrap();
        drop((owned, place));
        assert_eq!(entered.answer(), 42);
    }

    #[test]
    fn an_owner_waits_for_guards_of_other_threads_and_gets_every_word() {
        for _ in 0..if cfg!(miri) { 5 } else { 200 } {
            let owned = LiveOwner::new([const { AtomicUsize::new(0) }; 4]);
            let words = thread::scope(|scope| {
                for number in 0..4 {
                    let entered = LiveArc::enter::<PINS>(owned.place()).unwrap();
                    scope.spawn(move || {
                        let again = entered.enter_again();
                        entered[number].store(1, Ordering::Relaxed);
                        drop(entered);
                        drop(again);
                    });
                }
                owned.try_into_inner(Duration::from_secs(60)).map_err(|_| ()).unwrap()
            });
            let sum: usize = words.into_iter().map(AtomicUsize::into_inner).sum();
            assert_eq!(sum, 4);
        }
    }
}
