//! The states of a pool's folios, and the steps by which they are handed out: [`PoolState`].
//!
//! A folio that is handed out is zero. The folio's own word decides that, not the pool's sets: one
//! taker makes the step from *zero* to *present*, and any thread that touched the folio has made that
//! step before. The sets only show where to look, so a set that is wrong costs time and never leaks
//! bytes.
//!
//! The steps are written once, here, over a lock and memory of the caller's ([`PoolBackend`]): the package
//! `uzone-zone` with threads and gigabytes, and the model checker with two folios of a byte each
//! (`tests/loom.rs`).
//!
//! A folio is in one set, or it is *in work*: a thread clears it, and puts it in a set afterwards,
//! also when that unwinds. With that, for the whole pool:
//! `used + zero + dirty + pinned + bad + in_work = folios`.
//!
//! Locks: one, the backend's, held for a few steps and never while memory is cleared. Under it words of
//! folios are read and stepped, and nothing is called that might use the pool.
//!
//! Cost: a folio that is zero is a lock, a few words of a bit set and one step of its word.

use core::ops::DerefMut;

use crate::bits::Bits;

/// The state of a free folio, numbered as its set.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum FolioState {
    /// Every byte is zero, and its word has that state.
    Zero = 1,
    /// It has to be cleared first.
    Dirty = 2,
    /// It is pinned and may be written to, a thread is at work on it, or its bytes are elsewhere.
    Aside = 3,
    /// It has a bad page.
    Bad = 4,
}

/// The folios of a pool by their numbers, from 0 on.
#[derive(Debug)]
pub struct PoolState {
    sets: Bits<6>,
    in_work: usize,
    /// How many were cleared: ahead of need, on demand, and when they came back.
    cleared: [u64; 3],
}

// Why folios are cleared.
const AHEAD: usize = 0;
const ON_DEMAND: usize = 1;
const ON_RELEASE: usize = 2;

// The sets of a pool.
const USED: usize = 0;
const ZERO: usize = FolioState::Zero as usize;
const DIRTY: usize = FolioState::Dirty as usize;
const PINNED: usize = FolioState::Aside as usize;
const BAD: usize = FolioState::Bad as usize;
/// Handed out, and known to its owner by its number alone.
const LOOSE: usize = 5;

/// The state of a pool with a lock around it, and the memory that it is about.
pub trait PoolBackend {
    /// Why no folio was handed out, or memory could not be cleared.
    type Failure;
    /// The state, locked.
    type Locked<'a>: DerefMut<Target = PoolState>
    where
        Self: 'a;

    /// Locks the state.
    fn lock(&self) -> Self::Locked<'_>;

    /// Lets the lock go until another thread has called [`PoolBackend::sorted`], and takes it again. It may return
    /// sooner.
    ///
    /// # Errors
    /// The error that ends the wait of a taker that does not wait for ever.
    fn wait<'a>(&'a self, state: Self::Locked<'a>) -> Result<Self::Locked<'a>, Self::Failure>;

    /// Folios that were in work have been put in sets: tells those that wait for some, and lets the
    /// lock go.
    fn sorted(&self, state: Self::Locked<'_>);

    /// Returns the state of a free folio, by its word. Called under the lock.
    fn state_of(&self, number: usize) -> FolioState;

    /// Steps the folios from `first` on from zero to handed out; those that are bad or not
    /// zero are not stepped. Returns how many were. Called under the lock.
    fn own(&self, first: usize, folios: usize) -> usize;

    /// Clears folios as far as they are to be had, but for those that are zero. Returns how many were
    /// cleared. Called without the lock.
    ///
    /// # Errors
    /// The cause of the end. The folios are sorted by [`PoolBackend::state_of`] either way.
    fn clear(&self, first: usize, folios: usize) -> Result<usize, Self::Failure>;

    /// Returns the end of the run that `first` is in, where a run of so many folios has to lie between borders: the number
    /// behind the last folio that may follow it. Without borders there is no end. Called under the lock.
    fn run_end(&self, first: usize, folios: usize) -> usize {
        let _ = (first, folios);
        usize::MAX
    }

    /// Returns the error for a request of `folios` folios when no run that long is free: `free` are free at
    /// all, and `pinned` of these are set aside. Called under the lock.
    fn exhausted(&self, folios: usize, free: usize, pinned: usize) -> Self::Failure;
}

impl PoolState {
    /// Makes the state of so many folios, all of them in work: [`restock`] puts them in sets.
    #[must_use]
    pub fn new(folios: usize) -> Self {
        Self { sets: Bits::new(folios), in_work: folios, cleared: [0; 3] }
    }

    /// Returns how many are handed out.
    #[must_use]
    pub fn used(&self) -> usize {
        self.sets.len(USED) + self.sets.len(LOOSE)
    }

    /// Returns whether one is handed out.
    #[must_use]
    pub fn is_used(&self, number: usize) -> bool {
        self.sets.contains(USED, number) || self.is_loose(number)
    }

    /// Returns whether one is handed out, and its owner has only its number.
    #[must_use]
    pub fn is_loose(&self, number: usize) -> bool {
        self.sets.contains(LOOSE, number)
    }

    /// Notes that the owner of folios that are handed out has only their numbers from now on.
    pub fn loosen(&mut self, first: usize, folios: usize) {
        for number in first..first.saturating_add(folios).min(self.sets.bound()) {
            if self.sets.remove(USED, number) {
                self.sets.insert(LOOSE, number);
            }
        }
    }

    /// Returns how many are free and were this when they were last looked at.
    #[must_use]
    pub fn count(&self, state: FolioState) -> usize {
        self.sets.len(state as usize)
    }

    /// Returns how many a thread is at work on.
    #[must_use]
    pub fn in_work(&self) -> usize {
        self.in_work
    }

    /// Returns how many were cleared so far: ahead of need, on demand, and when they came back.
    /// Folios in a set are counted.
    #[must_use]
    pub fn cleared(&self) -> [u64; 3] {
        self.cleared
    }

    /// Takes the first dirty ones from `from` on out of their set, or the first of all if there are none;
    /// as many in a row as there are and `most` at most.
    fn pick_dirty(&mut self, from: usize, most: usize) -> Option<(usize, usize)> {
        let first = self.sets.first_from(DIRTY, from).or_else(|| self.sets.first(DIRTY))?;
        let mut folios = 0;
        while folios < most && self.sets.remove(DIRTY, first + folios) {
            folios += 1;
        }
        self.in_work += folios;
        Some((first, folios))
    }

    /// Takes free folios in a row out of their sets, of which not all may be zero.
    fn pick(&mut self, folios: usize, run_end: impl Fn(usize) -> usize) -> Option<usize> {
        let first = if folios == 1 {
            self.sets.first(ZERO).or_else(|| self.sets.first(DIRTY))?
        } else {
            run(&self.sets, folios, run_end)?
        };
        for number in first..first + folios {
            let was_free = self.sets.remove(ZERO, number) || self.sets.remove(DIRTY, number);
            debug_assert!(was_free, "it was just looked up");
        }
        self.in_work += folios;
        Some(first)
    }

    /// Puts one that is in work where it belongs.
    fn put(&mut self, number: usize, state: FolioState) {
        self.sets.insert(state as usize, number);
        self.in_work -= 1;
    }
}

/// Finds so many folios in a row that are zero or dirty, and end where the run of the first does at most.
fn run(sets: &Bits<6>, folios: usize, run_end: impl Fn(usize) -> usize) -> Option<usize> {
    let next = |from| match (sets.first_from(ZERO, from), sets.first_from(DIRTY, from)) {
        (Some(zero), Some(dirty)) => Some(zero.min(dirty)),
        (zero, dirty) => zero.or(dirty),
    };
    let mut first = next(0)?;
    loop {
        // A run that would end past the last number does not fit behind this one, nor behind a later.
        let end = first.checked_add(folios).filter(|end| *end <= sets.bound())?;
        let border = run_end(first);
        if end > border {
            first = next(border)?;
            continue;
        }
        let end = (first..end)
            .find(|number| !sets.contains(ZERO, *number) && !sets.contains(DIRTY, *number));
        match end {
            None => return Some(first),
            Some(end) => first = next(end + 1)?,
        }
    }
}

/// Folios that are in work: put in sets when this is dropped, also where the thread that clears them panics.
struct InWork<'a, D: PoolBackend> {
    backend: &'a D,
    first: usize,
    folios: usize,
    why: usize,
    /// How many of them were cleared, and are not counted yet.
    cleared: usize,
}

impl<D: PoolBackend> Drop for InWork<'_, D> {
    fn drop(&mut self) {
        let mut state = self.backend.lock();
        state.cleared[self.why] += self.cleared as u64;
        sort(self.backend, state, self.first, self.folios);
    }
}

/// Puts folios that are in work in sets, by their words.
pub fn restock<D: PoolBackend>(backend: &D, first: usize, folios: usize) {
    sort(backend, backend.lock(), first, folios);
}

/// [`restock`] under the lock, which is let go.
fn sort<'a, D: PoolBackend>(backend: &'a D, mut state: D::Locked<'a>, first: usize, folios: usize) {
    for number in first..first + folios {
        state.put(number, backend.state_of(number));
    }
    backend.sorted(state);
}

/// Looks again at free folios that were set aside or bad when they were last looked at, and puts them
/// where they belong by now. Others are left alone.
pub fn look_again<D: PoolBackend>(backend: &D, first: usize, folios: usize) {
    let mut state = backend.lock();
    for number in first..first.saturating_add(folios).min(state.sets.bound()) {
        if state.sets.remove(PINNED, number) || state.sets.remove(BAD, number) {
            state.in_work += 1;
            state.put(number, backend.state_of(number));
        }
    }
    backend.sorted(state);
}

/// Hands out so many folios in a row, every byte of which is zero, and returns the number of the
/// first. One that is zero already is handed out by the lock and a step; others are cleared first, by
/// the caller's thread.
///
/// # Errors
/// [`PoolBackend::exhausted`] if there are none, and the error of [`PoolBackend::clear`]. It waits
/// for a thread that may be clearing the last ones.
pub fn hand_out<D: PoolBackend>(backend: &D, folios: usize) -> Result<usize, D::Failure> {
    let mut has_looked_again = false;
    let mut state = backend.lock();
    loop {
        if folios == 1
            && let Some(number) = state.sets.first(ZERO)
        {
            state.sets.remove(ZERO, number);
            if backend.own(number, 1) == 1 {
                state.sets.insert(USED, number);
                return Ok(number);
            }
            // Another thread has changed it; in its set of now, this looks at it once.
            state.in_work += 1;
            state.put(number, backend.state_of(number));
        } else if let Some(first) = state.pick(folios, |first| backend.run_end(first, folios)) {
            drop(state);
            if clear_and_own(backend, first, folios)? {
                return Ok(first);
            }
            state = backend.lock();
        } else if state.in_work > 0 {
            state = backend.wait(state)?;
        } else if !has_looked_again && state.sets.len(PINNED) + state.sets.len(BAD) > 0 {
            // They may have been given back, or unpoisoned, meanwhile.
            has_looked_again = true;
            sort_again(backend, &mut state);
        } else {
            let pinned = state.sets.len(PINNED);
            let free = state.sets.len(ZERO) + state.sets.len(DIRTY) + pinned;
            return Err(backend.exhausted(folios, free, pinned));
        }
    }
}

/// Looks at all folios that were set aside or bad, and puts them in sets by their words. One that is
/// still pinned or bad stays counted as that, so that a taker who is refused leaves the counts right.
fn sort_again<D: PoolBackend>(backend: &D, state: &mut PoolState) {
    for set in [PINNED, BAD] {
        let mut from = 0;
        while let Some(number) = state.sets.first_from(set, from) {
            state.sets.remove(set, number);
            state.in_work += 1;
            state.put(number, backend.state_of(number));
            from = number + 1;
        }
    }
}

/// Clears folios that are in work and makes all of them the caller's. Returns whether it did; if not,
/// they are in sets again.
fn clear_and_own<D: PoolBackend>(
    backend: &D,
    first: usize,
    folios: usize,
) -> Result<bool, D::Failure> {
    let work = InWork { backend, first, folios, why: ON_DEMAND, cleared: 0 };
    let cleared = backend.clear(first, folios)?;
    let mut state = backend.lock();
    state.cleared[ON_DEMAND] += cleared as u64;
    if backend.own(first, folios) != folios {
        drop(state);
        return Ok(false);
    }
    for number in first..first + folios {
        state.sets.insert(USED, number);
    }
    state.in_work -= folios;
    // Wakes the threads that wait for these: there are fewer to wait for.
    backend.sorted(state);
    core::mem::forget(work);
    Ok(true)
}

/// Takes folios back that are handed out. They are cleared at once if `clears` is set; a folio that is not
/// cleared then is dirty. `state` is the backend's, and is let go.
pub fn give_back<'a, D: PoolBackend>(
    backend: &'a D,
    mut state: D::Locked<'a>,
    first: usize,
    folios: usize,
    clears: bool,
) {
    for number in first..first + folios {
        let was_used = state.sets.remove(USED, number) || state.sets.remove(LOOSE, number);
        debug_assert!(was_used, "the caller has looked");
    }
    state.in_work += folios;
    if clears {
        drop(state);
        let mut work = InWork { backend, first, folios, why: ON_RELEASE, cleared: 0 };
        // The folios that it could not clear are dirty, and the next taker gets the error.
        work.cleared = backend.clear(first, folios).unwrap_or(0);
    } else {
        sort(backend, state, first, folios);
    }
}

/// Clears some dirty folios ahead of need, `most` at most: those from the number `from` on, or if none
/// of these is dirty, the first of all. `None` if none is dirty; `state` is the backend's, and is let go.
///
/// # Errors
/// The answer of [`PoolBackend::clear`].
pub fn clear_ahead<'a, D: PoolBackend>(
    backend: &'a D,
    mut state: D::Locked<'a>,
    from: usize,
    most: usize,
) -> Option<Result<usize, D::Failure>> {
    let (first, folios) = state.pick_dirty(from, most)?;
    drop(state);
    let mut work = InWork { backend, first, folios, why: AHEAD, cleared: 0 };
    let cleared = backend.clear(first, folios);
    work.cleared = *cleared.as_ref().unwrap_or(&0);
    Some(cleared)
}
