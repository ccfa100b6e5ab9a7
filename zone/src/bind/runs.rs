//! The runs of a memmap: which stretch of descriptors is one arithmetic progression, and its
//! [`Pattern`].
//!
//! A run is of one class, inside one folio where tails are stored, and inside one stretch over
//! which the payload is linear. Its pattern is two descriptors by the slow path: the first, and the
//! difference of the second to it. From a folio to the next, the patterns of the three classes
//! differ by constants, which the slow path gives as well; so within a linear stretch a folio costs
//! three vector additions, and the slow path runs only where a new stretch begins.

use uzone_pages::{Class, Payload, Template};
use uzone_stream::Pattern;

/// The longest descriptor that has a pattern, in bytes.
pub(crate) const MAX_BYTES: usize = 96;
const MAX_WORDS: usize = MAX_BYTES / 8;

type Words = [u64; MAX_WORDS];

/// The runs of one memmap, found in ascending order.
pub(crate) struct Runs<'a, P: Payload> {
    template: &'a Template<P>,
    /// For base pages and heads, first tails, other tails.
    patterns: [Option<RunPattern>; 3],
    /// The descriptor after the last of the current linear stretch.
    linear_until: u64,
}

struct RunPattern {
    pattern: Pattern,
    /// The descriptor that element 0 of the pattern is.
    index: u64,
    /// The growth of each word from a folio to the next; `None` where there is no next one in the
    /// linear stretch.
    folio_step: Option<Words>,
}

impl<'a, P: Payload> Runs<'a, P> {
    const WORDS: usize = Template::<P>::DESCRIPTOR_BYTES / 8;

    pub(crate) fn new(template: &'a Template<P>) -> Self {
        Self { template, patterns: [const { None }; 3], linear_until: 0 }
    }

    /// Returns the pattern that starts with the descriptor `index`, and the index after the last
    /// that it holds for. Indices are asked for in ascending order.
    pub(crate) fn at(&mut self, index: u64) -> (&Pattern, u64) {
        if index >= self.linear_until {
            self.linear_until = self.template.linear_until(index);
            self.patterns = [const { None }; 3];
        }
        let (class, class_until) = self.template.class_until(index);
        let until = class_until.min(self.linear_until);
        let slot = match class {
            Class::Base | Class::Head => 0,
            Class::FirstTail => 1,
            Class::Tail => 2,
        };
        if !self.patterns[slot].as_mut().is_some_and(|known| known.move_to(index, self.template)) {
            self.patterns[slot] = Some(self.build(index, until));
        }
        match &self.patterns[slot] {
            Some(known) => (&known.pattern, until),
            None => unreachable!("it was built in the line above"),
        }
    }

    fn build(&self, index: u64, until: u64) -> RunPattern {
        let words = self.words(index);
        let difference = |other: u64| {
            let mut step = self.words(other);
            for (step, word) in step.iter_mut().zip(words) {
                *step = step.wrapping_sub(word);
            }
            step
        };
        let step = if index + 1 < until { difference(index + 1) } else { [0; MAX_WORDS] };
        let per_folio = self.template.layout().descriptors_per_folio();
        let folio_step = (per_folio > 1)
            .then(|| index.checked_add(per_folio))
            .flatten()
            .filter(|next| *next < self.linear_until)
            .map(difference);
        debug_assert!(
            [index + (until - index) / 2, until - 1].into_iter().all(|other| {
                self.words(other).iter().zip(words).zip(step).all(|((found, word), step)| {
                    *found == word.wrapping_add(step.wrapping_mul(other - index))
                })
            }),
            "a payload is linear over the run that it names"
        );
        let pattern = Pattern::linear(&words[..Self::WORDS], &step[..Self::WORDS]);
        match pattern {
            Ok(pattern) => RunPattern { pattern, index, folio_step },
            Err(_) => unreachable!("a descriptor of at most {MAX_BYTES} bytes has a pattern"),
        }
    }

    /// Returns the descriptor `index` as it starts, by the slow path; the last word is the
    /// difference of the state to its template, which is none.
    fn words(&self, index: u64) -> Words {
        let mut words = Words::default();
        if let Some(mut payload) = self.template.fresh(self.template.layout().pfn(index)) {
            let bytes = payload.as_mut_bytes().as_chunks::<8>().0;
            for (word, bytes) in words.iter_mut().zip(bytes) {
                *word = u64::from_ne_bytes(*bytes);
            }
        }
        words
    }
}

impl RunPattern {
    /// Moves the pattern to the descriptor `index`, if that is at the same place in the next folio. Returns whether it did.
    fn move_to<P: Payload>(&mut self, index: u64, template: &Template<P>) -> bool {
        if index == self.index {
            return true;
        }
        let Some(folio_step) = &self.folio_step else {
            return false;
        };
        if index - self.index != template.layout().descriptors_per_folio() {
            return false;
        }
        let words = self.pattern.element_bytes() / 8;
        self.pattern.add(&folio_step[..words]);
        self.index = index;
        true
    }
}
