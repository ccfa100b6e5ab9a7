//! The output of `uzone-bench --json`, as it is written and read: [`Bench`].
//!
//! A reader skips unknown fields, and most fields may be missing, so that files of other versions with the same schema
//! can be read. The schema in `bench/schema` is made of these types.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};

use crate::machine::Machine;

/// The schema of [`Bench`]: raised when a field changes its meaning.
pub const BENCH_SCHEMA: &str = "uzone.bench/1";

/// `uzone.bench/1`: the times of one run.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Bench {
    /// [`BENCH_SCHEMA`].
    #[serde(default)]
    pub schema: String,
    /// The benchmark: `all` if there were several.
    #[serde(default)]
    pub benchmark: String,
    /// The host and the build.
    #[serde(default)]
    pub machine: Machine,
    /// Whether it is a run with `--quick`, whose small sizes and few rounds mean little.
    #[serde(default)]
    pub quick: bool,
    /// Its settings, as a sentence.
    #[serde(default)]
    pub settings: String,
    /// The settings for a program, one benchmark after the other.
    #[serde(default)]
    pub parameters: Vec<serde_json::Value>,
    /// The most important results.
    #[serde(default)]
    pub summary: Vec<Headline>,
    /// The tables, in the order of the results.
    #[serde(default)]
    pub tables: Vec<Table>,
    /// All rows of all tables.
    pub results: Vec<Row>,
    /// The rows and tables that were left out, with the reasons.
    #[serde(default)]
    pub skipped: Vec<Skipped>,
}

/// Rows that are compared with each other.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Table {
    /// The first part of the rows' ids.
    pub id: String,
    /// A heading.
    #[serde(default)]
    pub title: String,
    /// A note for readers: the conditions, the naive row and the limit.
    #[serde(default)]
    pub note: String,
}

/// A row or a table that could not be measured or compared.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Skipped {
    /// The id of the row or the table.
    pub id: String,
    /// The reason.
    #[serde(default)]
    pub reason: String,
}

/// The role of a row in its table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// The straightforward way, which the others are compared with.
    Naive,
    /// uzone's way for a caller.
    Ours,
    /// The limit of this host.
    Limit,
    /// A way of uzone that is not the default.
    Variant,
    /// A way of the kernel, the C library or another library. A word of a later version is read as this.
    #[default]
    #[serde(other)]
    Peer,
}

impl Role {
    /// Returns whether a change of such a row is a change of uzone.
    #[must_use]
    pub fn is_of_uzone(self) -> bool {
        matches!(self, Self::Ours | Self::Variant)
    }

    /// Returns the class of its bars, and its name. Variants of ours are shown as one of the other ways.
    pub(crate) const fn look(self) -> (&'static str, &'static str) {
        match self {
            Self::Naive => ("naive", "naive"),
            Self::Ours => ("ours", "uzone"),
            Self::Limit => ("limit", "limit"),
            Self::Variant | Self::Peer => ("peer", "other ways"),
        }
    }
}

/// One case.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Row {
    /// `table/case/row`; it stays the same from run to run.
    pub id: String,
    /// The name of the row, for people.
    #[serde(default)]
    pub name: String,
    /// Its role.
    #[serde(default)]
    pub role: Role,
    /// The id of the naive row, if it is compared with one.
    pub naive_id: Option<String>,
    /// The id of its limit, if it has one.
    pub limit_id: Option<String>,
    /// The median of the rounds.
    pub median_ns: u64,
    /// The fastest round.
    #[serde(default)]
    pub min_ns: u64,
    /// The slowest round.
    #[serde(default)]
    pub worst_ns: u64,
    /// The number of rounds.
    #[serde(default)]
    pub rounds: usize,
    /// The spread of the rounds.
    #[serde(default)]
    pub noise: Noise,
    /// Whether the spread of the rounds' ratios to the naive row exceeds the distance of the ratio from 1.
    #[serde(default)]
    pub within_noise: bool,
    /// The number of bytes that were written.
    #[serde(default)]
    pub bytes: u64,
    /// The number of pages that were described or held, over all passes.
    #[serde(default)]
    pub items: u64,
    /// The rate of bytes by the median.
    #[serde(default)]
    pub gib_per_s: f64,
    /// Nanoseconds for each page described, by the median.
    #[serde(default)]
    pub ns_per_page: f64,
    /// The number of calls, where the row counts them.
    pub calls: Option<u64>,
    /// Nanoseconds for each call, by the median.
    pub ns_per_call: Option<f64>,
    /// The number of folios of the pages, where the row counts them.
    pub folios: Option<u64>,
    /// Nanoseconds for each folio, by the median.
    pub ns_per_folio: Option<f64>,
    /// The ratio of the naive row's time to this row's, by the medians.
    pub ratio_naive: Option<f64>,
    /// The ratio of this row's rate to the limit's, or where neither writes bytes, of their times; by the medians. It
    /// may pass 1 by the noise of the host.
    pub share_of_limit: Option<f64>,
    /// Whether the memory had never been touched.
    #[serde(default)]
    pub cold: bool,
    /// A published time.
    pub published: Option<Published>,
    /// The number of threads.
    #[serde(default = "one")]
    pub threads: usize,
    /// The resident descriptors of one TiB by the kernel's count, scaled from this row.
    pub metadata_resident_bytes_per_tib: Option<u64>,
    /// The ratio of this row's time to the fastest row that does the same work, by the medians.
    pub ratio_best: Option<f64>,
    /// The times of single calls, where the row measures them.
    pub latency: Option<Spread>,
    /// The page faults, where the row takes them.
    pub faults: Option<Faults>,
    /// The line of the summary for this row. A file does not have it.
    #[serde(skip)]
    pub headline: Option<String>,
}

const fn one() -> usize {
    1
}

/// The spread of a row's rounds: half of the interquartile range, as a part of the median (half of the range, if there
/// are fewer than four rounds).
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Noise {
    /// The spread of the times.
    pub median: f64,
    /// The spread of the ratios to the naive row.
    pub ratio_naive: Option<f64>,
    /// The spread of the ratios to the limit.
    pub share_of_limit: Option<f64>,
}

impl Noise {
    /// Returns whether the spread of the rounds' ratios to the naive row exceeds the distance of `ratio` from 1, both as
    /// factors: rounds of 200 and of 2,000 times the naive row do not hide that it is slower.
    #[must_use]
    pub fn hides(&self, ratio: Option<f64>) -> bool {
        let (Some(ratio), Some(noise)) = (ratio, self.ratio_naive) else { return false };
        ratio.ln().abs() < noise.ln_1p()
    }
}

/// Returns the mark of a ratio that is within the noise of the rounds.
#[must_use]
pub const fn noisy(is_within: bool) -> &'static str {
    if is_within { " (noise)" } else { "" }
}

/// The meaning of that mark.
pub const NOISE: &str =
    "(noise): the rounds differ by more than the row differs from the naive row";

/// A warning about the figures of a quick run.
pub const QUICK: &str =
    "a run with --quick, which checks that all benchmarks work: its figures mean little";

/// A published figure to compare with.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Published {
    /// The time that was published.
    pub ns: u64,
    /// The author and the experiment.
    #[serde(default)]
    pub source: Cow<'static, str>,
}

impl Published {
    /// Returns a time published for `of` pieces of work, scaled to `to` pieces.
    #[must_use]
    pub fn scaled(ns: u64, to: u64, of: u64, source: impl Into<Cow<'static, str>>) -> Self {
        let ns = u128::from(ns) * u128::from(to) / u128::from(of);
        Self { ns: u64::try_from(ns).unwrap_or(u64::MAX), source: source.into() }
    }
}

/// The times of single steps of a row, of all rounds together.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Spread {
    /// The median.
    pub p50_ns: u64,
    /// The 99th percentile.
    #[serde(default)]
    pub p99_ns: u64,
    /// The 99.9th percentile.
    #[serde(default)]
    pub p999_ns: u64,
    /// The longest.
    pub worst_ns: u64,
    /// The number of steps.
    #[serde(default)]
    pub count: usize,
}

/// The page faults of a row.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default)]
pub struct Faults {
    /// The number of faults in a round, by the median: events that the handler read, or for the kernel's own mapping the
    /// kernel's count.
    pub count: u64,
    /// Nanoseconds for each fault, by the median; `null` where several threads fault at once.
    pub ns_per_fault: Option<f64>,
    /// The number of pages that were mapped and never touched, by the median.
    pub wasted_pages: u64,
    /// The time until the first touch was done, by the median. It includes work before the touch, such as reading all.
    /// `null` where several threads touch, or touches are not timed.
    pub first_ns: Option<u64>,
    /// The time until half of the touches were done, without the time between touches.
    pub half_ns: Option<u64>,
    /// The CPU time of this process in a round, by the median, with making and unmapping the memory.
    pub cpu_ns: u64,
    /// The number of bytes that were read from devices and object storage in a round, by the median.
    pub read_bytes: u64,
    /// The times of touches.
    pub touch: Option<Spread>,
    /// The times of touches that took a page fault, and so waited.
    pub demand: Option<Spread>,
    /// The resident memory of a clone: the memory of all clones divided by their number, with shared pages counted once.
    pub clone_resident_bytes: Option<u64>,
}

/// A line of the summary, one claim: the published time, the naive way, ours, and the limit.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default)]
pub struct Headline {
    /// The work and its amount.
    pub name: String,
    /// The id of our row.
    pub ours: String,
    /// The id of the naive row.
    pub naive: Option<String>,
    /// The id of the limit.
    pub limit: Option<String>,
    /// The published time of the way that ours resembles.
    pub published_ns: Option<u64>,
    /// The published time of the way before that.
    pub published_naive_ns: Option<u64>,
    /// The median of the naive row.
    pub naive_ns: Option<u64>,
    /// The median of our row.
    pub ours_ns: u64,
    /// The median of the limit, scaled to the bytes of our row.
    pub limit_ns: Option<u64>,
    /// The ratio of the naive row's time to ours, by the medians.
    pub ratio_naive: Option<f64>,
    /// Whether the spread of the rounds' ratios exceeds the distance of that ratio from 1.
    pub within_noise: bool,
    /// The share of the limit, 1 where ours reaches it.
    pub share_of_limit: Option<f64>,
}

impl Row {
    /// Returns the row's name, and whether its memory was cold.
    #[must_use]
    pub fn label(&self) -> String {
        let name = if self.name.is_empty() { &self.id } else { &self.name };
        if self.cold { format!("{name} (cold)") } else { name.clone() }
    }

    /// Returns the rate of written bytes in GB/s, if the row writes bytes.
    #[must_use]
    pub fn gb_per_s(&self) -> Option<f64> {
        const GIB_TO_GB: f64 = 1.073_741_824;
        let is_rate = self.bytes != 0 && self.threads != 0;
        is_rate.then_some(self.gib_per_s * GIB_TO_GB).filter(|rate| rate.is_finite())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ratio_is_hidden_by_a_spread_of_factors_that_reaches_one() {
        let hides = |ratio, noise| {
            Noise { ratio_naive: Some(noise), ..Noise::default() }.hides(Some(ratio))
        };
        assert!(hides(1.04, 0.05) && hides(0.96, 0.05) && hides(1.5, 0.6));
        assert!(!hides(1.06, 0.05) && !hides(0.94, 0.05));
        // Rounds that differ by a factor of two are still hundreds of times faster.
        assert!(!hides(343.0, 1.2) && !hides(0.003, 1.2));
    }
}
