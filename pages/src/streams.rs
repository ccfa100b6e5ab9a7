//! Threads that read in order, looked up by the page that each faults on next: [`Streams`].
//!
//! A stream is one word, in one of eight places that its next page decides: a fault looks at one line of a cache,
//! however many streams there are. Nothing locks and no loop waits for another thread, so a handler of a signal may
//! call all of it. An answer is a hint: a stream that another thread changes in the same moment may be forgotten.
//!
//! ```text
//!   63     62     61   60 59   56 55                                      0
//! ┌──────┬──────┬────────┬───────┬─────────────────────────────────────────┐
//! │ used │ leap │ streak │ order │                next page                │
//! └──────┴──────┴────────┴───────┴─────────────────────────────────────────┘
//! ```
//!
//! There is room for a stream in each block of 512 pages, from 8 to [`Streams::MOST`] of them. More would take faults
//! at random for a stream: the page behind some earlier fault. Where the eight places are full, the stream with the
//! fewest faults in order makes room.
//!
//! # Leaps
//!
//! A stream that is new grows step by step, which costs some faults: many threads that each read a part would have
//! many of them. Where other streams of the same memory went on, a stream is trusted, and gets the largest window at
//! once. A stream that has grown to that window, or went on behind a leap, earns trust for two leaps. Its third fault
//! in order earns trust for one, as long as few leaps were in vain so far. Nothing leaps on the last of the trust, so
//! a stream that is alone grows step by step.
//!
//! Cost: 8 bytes a stream.

use alloc::boxed::Box;

use crate::addr::Pfn;
use crate::sync::{AtomicU64, Ordering};

/// The places that the next page decides.
const WAYS: usize = 8;
/// Leaps that are possible at most before one of them has proved right.
const MOST_TRUST: u64 = 128;
/// Leaps behind which no fault came yet, up to which a stream's third fault earns trust.
const MOST_DOUBT: u64 = 64;
/// The least trust of which a stream leaps.
const LEAST_TRUST: u64 = 2;

const USED: u64 = 1 << 63;
const LEAP: u64 = 1 << 62;
const STREAK: u32 = 60;
const ORDER: u32 = 56;
const NEXT: u64 = (1 << ORDER) - 1;

/// A thread that may be reading in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stream {
    /// log2 of the pages of its last window.
    order: u32,
    /// Faults in order behind its first one, up to [`Stream::MOST_STREAK`].
    streak: u32,
    /// Whether its last window was the largest one before it had grown to that.
    has_leapt: bool,
}

impl Stream {
    /// Larger numbers of faults in order count as this.
    pub(crate) const MOST_STREAK: u32 = 3;

    /// Starts a stream, whose windows have `1 << order` pages.
    pub(crate) fn new(order: u32) -> Self {
        Self { order, streak: 0, has_leapt: false }
    }

    /// Returns log2 of the pages of its last window.
    pub(crate) fn order(self) -> u32 {
        self.order
    }

    /// Returns the faults in order behind its first one, up to [`Stream::MOST_STREAK`].
    pub(crate) fn streak(self) -> u32 {
        self.streak
    }

    fn of_word(word: u64) -> Self {
        let bits = |at: u32, mask: u64| u32::try_from(word >> at & mask).unwrap_or(0);
        Self { order: bits(ORDER, 15), streak: bits(STREAK, 3), has_leapt: word & LEAP != 0 }
    }

    fn to_word(self, next: u64) -> u64 {
        let streak = u64::from(self.streak.min(Self::MOST_STREAK)) << STREAK;
        let leap = if self.has_leapt { LEAP } else { 0 };
        USED | leap | streak | u64::from(self.order.min(15)) << ORDER | next
    }
}

/// The streams of some memory.
#[derive(Debug)]
pub(crate) struct Streams {
    words: Box<[AtomicU64]>,
    /// Where the next full set is searched first for a stream to forget.
    turn: AtomicU64,
    /// Leaps that are possible, but for the last.
    trust: AtomicU64,
    /// Leaps behind which no fault came yet.
    doubt: AtomicU64,
}

impl Streams {
    /// The most streams that are distinguished.
    pub(crate) const MOST: usize = 4096;

    /// Makes room for the streams of memory of so many blocks of 512 pages.
    pub(crate) fn new(blocks: usize) -> Self {
        let room = 1_usize << blocks.clamp(WAYS, Self::MOST).ilog2();
        let words = (0..room).map(|_| AtomicU64::new(0)).collect();
        let [turn, trust, doubt] = core::array::from_fn(|_| AtomicU64::new(0));
        Self { words, turn, trust, doubt }
    }

    /// Returns the places of streams with that next page.
    fn places(&self, next: u64) -> &[AtomicU64] {
        // Neighbouring pages have places that are far apart. The upper bits of the product are the mixed ones.
        let mixed = next.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        let sets = (self.words.len() / WAYS) as u64;
        let set = usize::try_from(mixed & (sets - 1)).unwrap_or(0);
        &self.words[set * WAYS..(set + 1) * WAYS]
    }

    /// Takes the stream out that continues at a page.
    fn take(&self, page: Pfn) -> Option<Stream> {
        let page = Some(page.get()).filter(|page| *page <= NEXT)?;
        let taken = self.places(page).iter().find_map(|place| {
            // Relaxed, here and below: a word publishes nothing but itself.
            let word = place.load(Ordering::Relaxed);
            let is_it = word & (USED | NEXT) == USED | page;
            let takes = || place.compare_exchange(word, 0, Ordering::Relaxed, Ordering::Relaxed);
            (is_it && takes().is_ok()).then_some(word)
        });
        taken.map(Stream::of_word)
    }

    /// Takes the stream out that continues at a page, as it is after its fault there; [`Streams::put`] puts it back.
    /// `grown` returns log2 of the pages of its window, and `most` is the largest one that it may leap to.
    pub(crate) fn follow(
        &self,
        page: Pfn,
        most: u32,
        grown: impl FnOnce(Stream) -> u32,
    ) -> Option<Stream> {
        let before = self.take(page)?;
        let mut order = grown(before);
        if before.has_leapt {
            lower(&self.doubt, 1);
        }
        // It went on behind a leap, or has grown without one.
        if before.has_leapt || before.order < most && order >= most {
            self.earn(2);
        }
        let has_leapt = order < most && lower(&self.trust, LEAST_TRUST);
        if has_leapt {
            order = most;
            self.doubt.fetch_add(1, Ordering::Relaxed);
        }
        if before.streak == 1 && self.doubt.load(Ordering::Relaxed) < MOST_DOUBT {
            self.earn(1);
        }
        let streak = (before.streak + 1).min(Stream::MOST_STREAK);
        Some(Stream { order, streak, has_leapt })
    }

    fn earn(&self, more: u64) {
        if self.trust.load(Ordering::Relaxed) < MOST_TRUST {
            self.trust.fetch_add(more, Ordering::Relaxed);
        }
    }

    /// Puts a stream in that continues at `next`.
    pub(crate) fn put(&self, next: Pfn, stream: Stream) {
        let Some(next) = Some(next.get()).filter(|next| *next <= NEXT) else { return };
        let (places, new) = (self.places(next), stream.to_word(next));
        let rank = |word: u64| if word == 0 { 0 } else { 1 + Stream::of_word(word).streak };
        let words = |place: &AtomicU64| place.load(Ordering::Relaxed);
        // Another one of the same page is the same stream, or makes no difference to the next fault.
        let same = places.iter().find(|place| words(place) & (USED | NEXT) == USED | next);
        if let Some(place) = same {
            if rank(words(place)) <= rank(new) {
                place.store(new, Ordering::Relaxed);
            }
            return;
        }
        if let Some(place) = places.iter().find(|place| words(place) == 0) {
            return place.store(new, Ordering::Relaxed);
        }
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        let first = usize::try_from(turn % WAYS as u64).unwrap_or(0);
        let in_turn = (first..first + WAYS).map(|way| &places[way % WAYS]);
        if let Some(least) = in_turn.min_by_key(|place| rank(words(place))) {
            least.store(new, Ordering::Relaxed);
        }
        // The others grow old: streams that have ended make room in the end.
        let aged = &places[(first + WAYS - 1) % WAYS];
        let word = words(aged);
        let mut other = Stream::of_word(word);
        if other.streak > 0 && word != new {
            other.streak -= 1;
            let older = other.to_word(word & NEXT);
            let _ = aged.compare_exchange(word, older, Ordering::Relaxed, Ordering::Relaxed);
        }
    }

    /// Notes that the stream that continued at `from` continues at `to`.
    pub(crate) fn moved(&self, from: Pfn, to: Pfn) {
        if let Some(stream) = self.take(from) {
            self.put(to, stream);
        }
    }

    /// Lets all streams start anew where they are, with windows of `1 << order` pages.
    pub(crate) fn restart(&self, order: u32) {
        self.trust.store(0, Ordering::Relaxed);
        self.doubt.store(0, Ordering::Relaxed);
        for place in &self.words {
            let word = place.load(Ordering::Relaxed);
            if word != 0 {
                let new = Stream::new(order).to_word(word & NEXT);
                let _ = place.compare_exchange(word, new, Ordering::Relaxed, Ordering::Relaxed);
            }
        }
    }
}

/// Makes a number one less that is at least `least`, unless another thread changes it in the same moment. Returns
/// whether it did.
fn lower(number: &AtomicU64, least: u64) -> bool {
    let seen = number.load(Ordering::Relaxed);
    let less = |new| number.compare_exchange(seen, new, Ordering::Relaxed, Ordering::Relaxed);
    seen >= least && less(seen - 1).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn doubled(before: Stream) -> u32 {
        (before.order() + 1).min(9)
    }

    #[test]
    fn a_stream_is_found_at_its_next_page_once_and_nowhere_else() {
        let streams = Streams::new(1);
        streams.put(Pfn::new(0), Stream::new(4));
        assert_eq!(streams.follow(Pfn::new(1), 9, doubled), None);
        let found = streams.follow(Pfn::new(0), 9, doubled).unwrap();
        assert_eq!((found.order(), found.streak()), (5, 1));
        assert_eq!(streams.follow(Pfn::new(0), 9, doubled), None);
        streams.put(Pfn::new(NEXT), found);
        streams.moved(Pfn::new(NEXT), Pfn::new(77));
        assert_eq!(streams.take(Pfn::new(77)), Some(found));
        // Numbers that a word has no room for.
        streams.put(Pfn::new(u64::MAX), found);
        assert_eq!(streams.take(Pfn::new(u64::MAX)), None);
        assert_eq!(streams.take(Pfn::new(NEXT)), None);
    }

    #[test]
    fn faults_at_random_push_each_other_out_and_no_stream_that_goes_on() {
        let streams = Streams::new(1);
        let mut next = 0;
        streams.put(Pfn::new(next), Stream::new(4));
        for random in 1..1000 {
            if random % 5 == 0 {
                let found = streams.follow(Pfn::new(next), 4, Stream::order).unwrap();
                next += 16;
                streams.put(Pfn::new(next), found);
            }
            streams.put(Pfn::new(random * 1_000_003), Stream::new(4));
        }
        // Streams that have ended are forgotten.
        for ended in 0..8 {
            streams.put(Pfn::new(ended), Stream { order: 9, streak: 3, has_leapt: false });
        }
        for random in 1..1000 {
            streams.put(Pfn::new(random * 1_000_003), Stream::new(4));
        }
        assert!((0..8).all(|ended| streams.take(Pfn::new(ended)).is_none()));
    }

    #[test]
    fn a_stream_leaps_once_others_went_on_and_trust_that_fails_is_used_up() {
        let streams = Streams::new(100);
        let second = |at: u64| {
            streams.put(Pfn::new(at), Stream::new(4));
            streams.follow(Pfn::new(at), 9, doubled).unwrap()
        };
        // Alone it grows step by step.
        let (mut alone, mut at) = (second(0), 0);
        for order in 5..=9 {
            assert_eq!((alone.order(), alone.has_leapt), (order, false));
            at += 1 << 20;
            streams.put(Pfn::new(at), alone);
            alone = streams.follow(Pfn::new(at), 9, doubled).unwrap();
        }
        // It has earned trust for three, of which the last is not used.
        let leapt = [second(2000), second(3000)];
        assert!(leapt.iter().all(|stream| stream.order() == 9 && stream.has_leapt));
        assert_eq!(second(4000).order(), 5, "none of the two went on yet");
        streams.put(Pfn::new(5000), leapt[0]);
        assert!(!streams.follow(Pfn::new(5000), 9, doubled).unwrap().has_leapt);
        assert_eq!([6000, 7000, 8000, 9000].map(|at| second(at).order()), [9, 9, 9, 5]);
    }

    #[test]
    #[cfg_attr(miri, ignore = "arithmetic, and long")]
    fn reads_of_a_few_pages_in_order_cost_a_bounded_number_of_windows_that_are_too_large() {
        let streams = Streams::new(4096);
        let mut leaps = 0;
        for run in 0..10_000_u64 {
            streams.put(Pfn::new(run << 20), Stream::new(4));
            for fault in 0..3 {
                let at = Pfn::new((run << 20) + fault);
                let Some(found) = streams.follow(at, 9, Stream::order) else { break };
                leaps += u64::from(found.has_leapt);
                // Each window was too large, so that the next fault is elsewhere.
                let next = if found.has_leapt { 1 << 19 } else { fault + 1 };
                streams.put(Pfn::new((run << 20) + next), found);
            }
        }
        assert!(leaps <= MOST_DOUBT + 2, "{leaps} leaps in vain");
    }
}
