//! Interleaved rounds of cases, and their statistics.

use std::collections::BTreeMap;
use std::time::Duration;

use uzone_report::float;
use uzone_report::nanoseconds;

use super::error::Result;

/// The progress of a benchmark.
#[derive(Clone, Copy, Debug)]
pub struct Phase<'a> {
    /// The name of the step under way.
    pub step: &'a str,
    /// The number of rounds that are done.
    pub done: u64,
    /// The number of rounds.
    pub total: u64,
    /// The name of this benchmark of several, its number from 1 on, and the number of all.
    pub part: Option<(&'a str, usize, usize)>,
}

/// Receives the progress of a benchmark.
pub type Watch<'a> = &'a dyn Fn(Phase<'_>);

/// One way of doing the work of a suite.
pub(crate) struct Case<'a> {
    pub(crate) name: String,
    /// Does the work once and returns its time.
    pub(crate) run: Box<dyn FnMut() -> Result<Duration> + 'a>,
}

/// The times of each case in nanoseconds, round by round.
#[derive(Debug, Default)]
pub(crate) struct Samples(BTreeMap<String, Vec<u64>>);

/// Runs every case once a round, after one round that is not counted.
pub(crate) fn run(
    step: &str,
    rounds: u32,
    cases: &mut [Case<'_>],
    watch: Watch<'_>,
) -> Result<Samples> {
    let mut random = fastrand::Rng::with_seed(0x75_7a_6f_6e_65);
    let mut order: Vec<usize> = (0..cases.len()).collect();
    let mut samples = Samples::default();
    for round in 0..=rounds {
        watch(Phase { step, done: u64::from(round), total: u64::from(rounds) + 1, part: None });
        random.shuffle(&mut order);
        for &index in &order {
            let Case { name, run } = &mut cases[index];
            let time = nanoseconds(run()?);
            if round > 0 {
                samples.0.entry(name.clone()).or_default().push(time);
            }
        }
    }
    let total = u64::from(rounds) + 1;
    watch(Phase { step, done: total, total, part: None });
    Ok(samples)
}

impl Samples {
    /// Returns the times of the case `name` in ascending order.
    pub(crate) fn sorted(&self, name: &str) -> Vec<u64> {
        let mut times = self.0.get(name).cloned().unwrap_or_default();
        times.sort_unstable();
        times
    }

    /// Returns how many times longer `name` took than `other`, by their medians.
    pub(crate) fn ratio(&self, name: &str, other: &str) -> Option<f64> {
        let (times, others) = (self.sorted(name), self.sorted(other));
        let is_known = !times.is_empty() && !others.is_empty();
        is_known.then(|| float(median(&times)) / float(median(&others).max(1)))
    }

    /// Returns the [`spread`] of the rounds' own ratios of `name` to `other`.
    pub(crate) fn ratio_spread(&self, name: &str, other: &str) -> Option<f64> {
        self.ratios(name, other).map(|ratios| spread(&ratios))
    }

    /// Returns how many times longer `name` took than `other` in each round, in ascending order.
    fn ratios(&self, name: &str, other: &str) -> Option<Vec<f64>> {
        let rounds = self.0.get(name)?.iter().zip(self.0.get(other)?);
        let mut ratios: Vec<f64> =
            rounds.map(|(time, other)| float(*time) / float((*other).max(1))).collect();
        ratios.sort_by(f64::total_cmp);
        Some(ratios)
    }
}

/// Returns the spread of values in ascending order: half of the interquartile range, as a part of the median. Fewer than
/// four values have no quartiles: half of their range is taken.
/// The spread of one value is 0.
pub(crate) fn spread(sorted: &[f64]) -> f64 {
    let (Some(&last), Some(&median)) = (sorted.last(), sorted.get(sorted.len() / 2)) else {
        return 0.0;
    };
    let (low, high) = match sorted.len() {
        0..4 => (sorted[0], last),
        // Whole places of the list, so that no value is made up.
        len => (sorted[len / 4], sorted[len - 1 - len / 4]),
    };
    if median > 0.0 { (high - low) / 2.0 / median } else { 0.0 }
}

/// Returns the middle one of times in ascending order.
pub(crate) fn median(sorted: &[u64]) -> u64 {
    sorted.get(sorted.len() / 2).copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn three_rounds() -> Samples {
        let times = [("slow", vec![100, 900, 200]), ("fast", vec![50, 300, 50])];
        Samples(times.map(|(name, times)| (name.into(), times)).into())
    }

    #[test]
    fn a_ratio_is_that_of_the_medians_which_stand_beside_it() {
        let samples = three_rounds();
        assert_eq!(samples.ratio("slow", "fast"), Some(4.0));
        // Two rounds, whose own ratios are 7.5 and 0.5.
        let times = [("naive", vec![150, 100]), ("ours", vec![20, 200])];
        let two = Samples(times.map(|(name, times)| (name.into(), times)).into());
        assert_eq!(two.ratio("naive", "ours"), Some(0.75));
        assert_eq!(samples.ratio("slow", "none"), None);
        assert_eq!(samples.sorted("slow"), [100, 200, 900]);
        assert_eq!(median(&samples.sorted("slow")), 200);
        assert_eq!(median(&[]), 0);
    }

    #[test]
    fn the_spread_is_half_of_the_middle_half_and_outliers_do_not_widen_it() {
        let table: [(&[f64], f64); 7] = [
            (&[], 0.0),
            (&[5.0], 0.0),
            (&[0.0, 0.0], 0.0),
            (&[8.0, 10.0, 12.0], 0.2),
            (&[10.0, 10.0, 10.0, 10.0], 0.0),
            (&[1.0, 9.0, 9.5, 10.0, 10.5, 11.0, 900.0], 0.1),
            (&[9.0, 9.0, 10.0, 10.0, 11.0, 11.0, 11.0, 11.0], 0.5 / 11.0),
        ];
        for (values, expected) in table {
            assert!((spread(values) - expected).abs() < 1e-12, "{values:?}: {}", spread(values));
        }
        let samples = three_rounds();
        // The ratios are 2, 3 and 4 in spite of the times.
        assert_eq!(samples.ratio_spread("slow", "fast"), Some(1.0 / 3.0));
        assert_eq!(samples.ratio_spread("slow", "none"), None);
    }

    #[test]
    fn every_case_runs_once_a_round_and_once_before() {
        let mut counts = [0; 3];
        let seen = std::cell::RefCell::new(Vec::new());
        {
            let mut cases: Vec<Case<'_>> = counts
                .iter_mut()
                .enumerate()
                .map(|(index, count)| Case {
                    name: index.to_string(),
                    run: Box::new(move || {
                        *count += 1;
                        Ok(Duration::from_nanos(index as u64))
                    }),
                })
                .collect();
            let watch = |phase: Phase<'_>| seen.borrow_mut().push((phase.done, phase.total));
            let samples = run("test", 4, &mut cases, &watch).unwrap();
            assert_eq!(samples.sorted("2"), [2; 4]);
        }
        assert_eq!(counts, [5; 3]);
        assert_eq!(seen.borrow().last(), Some(&(5, 5)));
    }
}
