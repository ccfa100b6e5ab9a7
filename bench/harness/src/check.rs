//! The comparison of a run with an earlier one: [`compare`].
//!
//! Times vary with the load of the host; the ratio of a row to its limit, or to the naive way, varies less within one
//! run. So ratios are compared, and a bare time only for rows that have no ratio. Load slows down a limit that writes
//! less than a row that also reads, and a limit of microseconds less than a naive way of milliseconds. So a row is
//! worse only if both of its ratios are, and with one ratio, only if its time is worse too.
//!
//! ```text
//! slower   =  then / now of a share of the limit or a ratio to the naive way; now / then of a median
//! allowed  =  max(FLOOR, FACTOR * (noise then + noise now))
//! worse    if  slower > 1 + allowed          better  if  slower < 1 / (1 + allowed)
//! ```
//!
//! The noise of a run is the spread of its own rounds (`noise`). Only rows of uzone are judged: a naive row, a limit or
//! a peer that takes another time shows a change of the host. The tables of rows that were worse are measured again;
//! [`Comparison::again`] takes the result, and a row that is not worse twice is no regression.

use serde::Serialize;

use uzone_report::float;
use uzone_report::results::{Role, Row, Skipped};

/// The schema of a comparison: raised when a field changes its meaning.
pub const SCHEMA: &str = "uzone.bench-check/1";
/// The factor by which a row may be slower than the noise of both runs.
pub const FACTOR: f64 = 2.0;
/// The part by which a row may be slower however quiet both runs were: the same code varies as much from day to day,
/// and with the placement of its memory.
pub const FLOOR: f64 = 0.15;

/// The value of two rows that is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Measure {
    /// The share of the limit; more is better.
    ShareOfLimit,
    /// The ratio to the naive row; more is better.
    RatioNaive,
    /// The median, in nanoseconds; less is better.
    MedianNs,
}

/// The outcome of a comparison of two rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// Equal within the noise.
    Same,
    /// Faster.
    Better,
    /// Slower, and not measured again.
    Worse,
    /// Slower, and equal when it was measured again.
    WorseOnce,
    /// Slower, and slower again.
    WorseTwice,
    /// A naive row, a limit or a peer, which is not judged.
    Yardstick,
}

/// One row in both runs.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Compared {
    /// The id.
    pub id: String,
    /// The name, for people.
    pub name: String,
    /// Its role in its table.
    pub role: Role,
    /// The value that is compared.
    pub measure: Measure,
    /// The value in the earlier run.
    pub then: f64,
    /// The value in this run.
    pub now: f64,
    /// The value when the row was measured again.
    pub again: Option<f64>,
    /// The part by which it is slower; below zero where it is faster.
    pub change: f64,
    /// The part by which it may be slower.
    pub allowed: f64,
    /// The outcome.
    pub verdict: Verdict,
}

/// Two runs.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Comparison {
    /// The rows that both have, in the order of this run.
    pub rows: Vec<Compared>,
    /// The ids of rows that this run alone has.
    pub new: Vec<String>,
    /// The ids of rows that the earlier run alone had.
    pub gone: Vec<String>,
    /// Rows that both have and that did not do the same.
    pub not_comparable: Vec<Skipped>,
}

/// Compares two runs row by row.
#[must_use]
pub fn compare(then: &[Row], now: &[Row]) -> Comparison {
    let find = |rows: &'_ [Row], id: &str| rows.iter().position(|row| row.id == id);
    let mut comparison = Comparison::default();
    for row in now {
        match find(then, &row.id).map(|place| &then[place]) {
            None => comparison.new.push(row.id.clone()),
            Some(before) => match compared(before, row) {
                Ok(compared) => comparison.rows.push(compared),
                Err(reason) => comparison
                    .not_comparable
                    .push(Skipped { id: row.id.clone(), reason: reason.to_owned() }),
            },
        }
    }
    let gone = then.iter().filter(|row| find(now, &row.id).is_none());
    comparison.gone = gone.map(|row| row.id.clone()).collect();
    comparison
}

impl Comparison {
    /// Takes rows that were measured again: a row that was worse than `then` is worse once, or twice.
    pub fn again(&mut self, then: &[Row], rows: &[Row]) {
        for compared in self.rows.iter_mut().filter(|row| row.verdict == Verdict::Worse) {
            let find = |rows: &[Row]| rows.iter().position(|row| row.id == compared.id);
            // A row that could not be measured again keeps its verdict.
            let Some((before, row)) = find(then).zip(find(rows)) else { continue };
            let Some(judged) = judged(&then[before], &rows[row]) else { continue };
            compared.again = Some(judged.now);
            compared.verdict = match judged.verdict {
                Verdict::Worse => Verdict::WorseTwice,
                _ => Verdict::WorseOnce,
            };
        }
    }

    /// Returns the rows that are slower: twice, or once if they were not measured again.
    pub fn worse(&self) -> impl Iterator<Item = &Compared> {
        let is_worse = |verdict| matches!(verdict, Verdict::Worse | Verdict::WorseTwice);
        self.rows.iter().filter(move |row| is_worse(row.verdict))
    }

    /// Returns the ids of the tables with such rows, each once.
    #[must_use]
    pub fn worse_tables(&self) -> Vec<String> {
        let table = |row: &Compared| {
            let (table, _) = row.id.split_once('/').unwrap_or((&row.id, ""));
            table.to_owned()
        };
        let mut tables: Vec<String> = self.worse().map(table).collect();
        tables.dedup();
        tables.sort_unstable();
        tables.dedup();
        tables
    }
}

/// Returns a row's value and its noise, if it is one that can be divided by.
fn value(row: &Row, measure: Measure) -> Option<(f64, f64)> {
    let (value, noise) = match measure {
        Measure::ShareOfLimit => (row.share_of_limit?, row.noise.share_of_limit.unwrap_or(0.0)),
        Measure::RatioNaive => (row.ratio_naive?, row.noise.ratio_naive.unwrap_or(0.0)),
        Measure::MedianNs => (float(row.median_ns), row.noise.median),
    };
    (value.is_finite() && value > 0.0 && noise.is_finite() && noise >= 0.0)
        .then_some((value, noise))
}

fn allowed(noise_then: f64, noise_now: f64) -> f64 {
    (FACTOR * (noise_then + noise_now)).max(FLOOR)
}

/// Returns the factor by which a row is slower.
fn slower(measure: Measure, then: f64, now: f64) -> f64 {
    match measure {
        Measure::ShareOfLimit | Measure::RatioNaive => then / now,
        Measure::MedianNs => now / then,
    }
}

/// Compares each value that two rows both have; `None` if there is none. The measure is the first of them, and the
/// verdict takes all of them into account.
fn judged(then: &Row, now: &Row) -> Option<Compared> {
    let by = |measure| {
        let ((before, noise_then), (after, noise_now)) =
            value(then, measure).zip(value(now, measure))?;
        let (slower, allowed) = (slower(measure, before, after), allowed(noise_then, noise_now));
        Some(Compared {
            id: now.id.clone(),
            name: now.name.clone(),
            role: now.role,
            measure,
            then: before,
            now: after,
            again: None,
            change: slower - 1.0,
            allowed,
            verdict: match slower {
                slower if slower > 1.0 + allowed => Verdict::Worse,
                slower if slower < 1.0 / (1.0 + allowed) => Verdict::Better,
                _ => Verdict::Same,
            },
        })
    };
    let has_ratio =
        |row| value(row, Measure::ShareOfLimit).or(value(row, Measure::RatioNaive)).is_some();
    // Ratios refer to yardsticks, whose ratio to themselves means nothing.
    if !now.role.is_of_uzone() {
        return by(Measure::MedianNs)
            .map(|found| Compared { verdict: Verdict::Yardstick, ..found });
    }
    let (first, second) = match (by(Measure::ShareOfLimit), by(Measure::RatioNaive)) {
        (Some(limit), Some(naive)) => (limit, naive),
        (Some(one), None) | (None, Some(one)) => (one, by(Measure::MedianNs)?),
        (None, None) if has_ratio(then) || has_ratio(now) => return None,
        (None, None) => return by(Measure::MedianNs),
    };
    let verdict = if first.verdict == second.verdict { first.verdict } else { Verdict::Same };
    Some(Compared { verdict, ..first })
}

fn compared(then: &Row, now: &Row) -> Result<Compared, &'static str> {
    if (then.bytes, then.items) != (now.bytes, now.items) {
        return Err(
            "another amount of work: the host has another amount of memory, or the row has changed",
        );
    }
    judged(then, now).ok_or("only one of the two runs has a limit or a naive row")
}

#[cfg(test)]
mod tests {
    use super::*;
    use uzone_report::results::Noise;

    /// A row of ours with these: median, ratio to the naive way, share of the limit, and one noise for all.
    fn row(median_ns: u64, naive: Option<f64>, limit: Option<f64>, noise: f64) -> Row {
        Row {
            id: "t/row".to_owned(),
            name: "a row".to_owned(),
            role: Role::Ours,
            median_ns,
            bytes: 4096,
            items: 1,
            ratio_naive: naive,
            share_of_limit: limit,
            noise: Noise {
                median: noise,
                ratio_naive: naive.map(|_| noise),
                share_of_limit: limit.map(|_| noise),
            },
            ..Row::default()
        }
    }

    #[test]
    fn a_row_is_worse_if_its_best_ratio_fell_by_more_than_the_noise() {
        use Measure::{MedianNs, RatioNaive, ShareOfLimit};
        use Verdict::{Better, Same, Worse};
        let limit = |share: f64, noise| row(100, Some(share * 10.0), Some(share), noise);
        let both = |ns, ratio, share| row(ns, Some(ratio), Some(share), 0.0);
        let naive = |ns, ratio, noise| row(ns, Some(ratio), None, noise);
        let bare = |ns, noise| row(ns, None, None, noise);
        let table = [
            (limit(0.9, 0.0), limit(0.9, 0.0), ShareOfLimit, Same),
            // Below the floor, at any noise.
            (limit(0.9, 0.0), limit(0.8, 0.0), ShareOfLimit, Same),
            (limit(0.9, 0.0), limit(0.7, 0.0), ShareOfLimit, Worse),
            (limit(0.7, 0.0), limit(0.9, 0.0), ShareOfLimit, Better),
            // The same with noise in either run, or in both.
            (limit(0.9, 0.2), limit(0.7, 0.0), ShareOfLimit, Same),
            (limit(0.9, 0.0), limit(0.7, 0.2), ShareOfLimit, Same),
            (limit(0.9, 0.1), limit(0.6, 0.1), ShareOfLimit, Worse),
            (limit(0.7, 0.2), limit(0.9, 0.0), ShareOfLimit, Same),
            // One ratio alone: the limit, or the naive way, has changed. The time may be any.
            (both(100, 9.0, 0.9), both(900, 1.0, 0.9), ShareOfLimit, Same),
            (both(100, 9.0, 0.9), both(900, 9.0, 0.1), ShareOfLimit, Same),
            (both(900, 9.0, 0.9), both(100, 1.0, 0.1), ShareOfLimit, Worse),
            // A ratio of 0, or none, is no ratio.
            (both(100, 9.0, 0.0), both(100, 9.0, 0.9), RatioNaive, Same),
            (naive(100, 9.0, 0.0), both(300, 3.0, 0.9), RatioNaive, Worse),
            (naive(100, 9.0, 0.0), naive(300, 3.0, 0.0), RatioNaive, Worse),
            (naive(300, 3.0, 0.0), naive(100, 9.0, 0.0), RatioNaive, Better),
            (naive(100, f64::NAN, 0.0), naive(300, f64::INFINITY, 0.0), MedianNs, Worse),
            // The naive way was slower then, and ours is unchanged.
            (naive(100, 9.0, 0.0), naive(100, 3.0, 0.0), RatioNaive, Same),
            (bare(100, 0.0), bare(110, 0.0), MedianNs, Same),
            (bare(100, 0.0), bare(300, 0.0), MedianNs, Worse),
            (bare(300, 0.0), bare(100, 0.0), MedianNs, Better),
            (bare(100, 0.5), bare(300, 0.6), MedianNs, Same),
        ];
        for (then, now, measure, verdict) in table {
            let comparison = compare(std::slice::from_ref(&then), std::slice::from_ref(&now));
            let found = &comparison.rows[0];
            assert_eq!((found.measure, found.verdict), (measure, verdict), "{then:?} {now:?}");
            assert_eq!(comparison.worse().count(), usize::from(verdict == Worse));
        }
    }

    #[test]
    fn a_slower_row_has_the_same_change_by_every_measure() {
        let change = |then: &Row, now: &Row| {
            compare(std::slice::from_ref(then), std::slice::from_ref(now)).rows[0].change
        };
        let half = change(&row(1, None, Some(0.9), 0.0), &row(1, None, Some(0.45), 0.0));
        assert!((half - 1.0).abs() < 1e-9, "twice as slow is one more: {half}");
        assert!(
            (change(&row(100, None, None, 0.0), &row(200, None, None, 0.0)) - 1.0).abs() < 1e-9
        );
        assert!(
            (change(&row(200, None, None, 0.0), &row(100, None, None, 0.0)) + 0.5).abs() < 1e-9
        );
    }

    #[test]
    fn yardsticks_are_not_judged() {
        for role in [Role::Naive, Role::Limit, Role::Peer] {
            let then = Row { role, ..row(100, Some(1.0), Some(1.0), 0.0) };
            let now = Row { median_ns: 900, ..then.clone() };
            let comparison = compare(&[then], &[now]);
            let found = &comparison.rows[0];
            assert_eq!((found.measure, found.verdict), (Measure::MedianNs, Verdict::Yardstick));
            assert_eq!(comparison.worse().count(), 0);
        }
        let variant = Row { role: Role::Variant, ..row(100, Some(9.0), None, 0.0) };
        let slower = Row { median_ns: 300, ratio_naive: Some(3.0), ..variant.clone() };
        assert_eq!(compare(&[variant], &[slower]).worse().count(), 1);
    }

    #[test]
    fn rows_of_one_run_and_rows_that_did_other_work_are_named() {
        let named = |id: &str| Row { id: id.to_owned(), ..row(100, Some(2.0), None, 0.0) };
        let then = [named("t/gone"), named("t/both"), named("t/size"), named("t/ratio")];
        let now = [
            named("t/new"),
            named("t/both"),
            Row { bytes: 8192, ..named("t/size") },
            Row { ratio_naive: None, ..named("t/ratio") },
        ];
        let comparison = compare(&then, &now);
        assert_eq!(comparison.new, ["t/new"]);
        assert_eq!(comparison.gone, ["t/gone"]);
        let ids: Vec<&str> = comparison.rows.iter().map(|row| row.id.as_str()).collect();
        assert_eq!(ids, ["t/both"]);
        let reasons: Vec<&str> =
            comparison.not_comparable.iter().map(|row| row.reason.as_str()).collect();
        assert!(reasons[0].contains("amount of work") && reasons[1].contains("naive row"));
        assert_eq!(compare(&[], &[]), Comparison::default());
    }

    #[test]
    fn a_regression_is_one_that_is_seen_twice() {
        let named = |id: &str, share| Row {
            id: id.to_owned(),
            ..row(if share > 0.5 { 100 } else { 300 }, None, Some(share), 0.01)
        };
        let then = [
            named("a/once", 0.9),
            named("b/twice", 0.9),
            named("a/same", 0.9),
            named("c/lost", 0.9),
        ];
        let now = [
            named("a/once", 0.3),
            named("b/twice", 0.3),
            named("a/same", 0.9),
            named("c/lost", 0.3),
        ];
        let mut comparison = compare(&then, &now);
        assert_eq!(comparison.worse_tables(), ["a", "b", "c"]);
        comparison
            .again(&then, &[named("a/once", 0.88), named("b/twice", 0.31), named("a/same", 0.1)]);
        let verdict = |id: &str| {
            let found = comparison.rows.iter().find(|row| row.id == id).expect("a row");
            (found.verdict, found.again)
        };
        assert_eq!(verdict("a/once"), (Verdict::WorseOnce, Some(0.88)));
        assert_eq!(verdict("b/twice"), (Verdict::WorseTwice, Some(0.31)));
        // A row that was as before is not judged again.
        assert_eq!(verdict("a/same"), (Verdict::Same, None));
        assert_eq!(verdict("c/lost"), (Verdict::Worse, None));
        let worse: Vec<&str> = comparison.worse().map(|row| row.id.as_str()).collect();
        assert_eq!(worse, ["b/twice", "c/lost"]);
    }
}
