//! The output of `uzone-bench --json`, as it is written and read: [`Bench`].
//!
//! A reader passes over fields that it does not know, and most may be missing, so that files of other
//! versions with the same schema can be read. The schema in `bench/schema` is made of these types.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};

use crate::machine::Machine;
use crate::object::{object, objects, some_object};

/// The schema of [`Bench`]: raised when a field changes its meaning.
pub const BENCH_SCHEMA: &str = "uzone.bench/1";

/// `uzone.bench/1`: the times of one run.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Bench {
    /// [`BENCH_SCHEMA`].
    #[serde(default)]
    pub schema: String,
    /// Which benchmark: `all` if there were several.
    #[serde(default)]
    pub benchmark: String,
    /// What it was measured on.
    #[serde(default, deserialize_with = "object")]
    pub machine: Machine,
    /// Whether its sizes and rounds are those of `--quick`, whose figures mean nothing.
    #[serde(default)]
    pub quick: bool,
    /// Its settings, as a sentence.
    #[serde(default)]
    pub settings: String,
    /// The same for a program: one benchmark after the other.
    #[serde(default)]
    pub parameters: Vec<serde_json::Value>,
    /// What matters most of the results.
    #[serde(default)]
    pub summary: Vec<Headline>,
    /// The tables, in the order of the results.
    #[serde(default, deserialize_with = "objects")]
    pub tables: Vec<Table>,
    /// All rows of all tables.
    #[serde(deserialize_with = "objects")]
    pub results: Vec<Row>,
    /// What was left out, and why.
    #[serde(default, deserialize_with = "objects")]
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
    /// What has to be known to read it: which row is the yardstick and which the limit.
    #[serde(default)]
    pub note: String,
}

/// Something that could not be measured here, or compared.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Skipped {
    /// The id that its row would have had.
    pub id: String,
    /// Why.
    #[serde(default)]
    pub reason: String,
}

/// What a row is beside the others of its table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// The way that one would write first, which the others are compared with.
    Naive,
    /// What a caller of uzone gets.
    Ours,
    /// What this machine can do at most.
    Limit,
    /// A way of uzone's that has to be asked for, beside the default.
    Variant,
    /// Another way: the kernel's, the C library's, another library's. A word of a later version is
    /// taken for it.
    #[serde(other)]
    Peer,
}

impl Role {
    /// Returns whether a change of such a row is a change of uzone.
    #[must_use]
    pub fn is_of_uzone(self) -> bool {
        matches!(self, Self::Ours | Self::Variant)
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
    /// What it is beside the others; without it, the words of the id decide how the row is drawn.
    pub role: Option<Role>,
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
    /// How many rounds.
    #[serde(default)]
    pub rounds: usize,
    /// How far they were from each other.
    #[serde(default, deserialize_with = "object")]
    pub noise: Noise,
    /// Whether the rounds' ratios to the naive row are farther from each other than the ratio is from 1.
    #[serde(default)]
    pub within_noise: bool,
    /// How many bytes were written.
    #[serde(default)]
    pub bytes: u64,
    /// How many pages were described, or held; over all passes.
    #[serde(default)]
    pub items: u64,
    /// Bytes by the median.
    #[serde(default)]
    pub gib_per_s: f64,
    /// Nanoseconds for each page described, by the median.
    #[serde(default)]
    pub ns_per_page: f64,
    /// How many calls did it, where the row counts them.
    pub calls: Option<u64>,
    /// Nanoseconds for each call, by the median.
    pub ns_per_call: Option<f64>,
    /// How many folios the pages are in, where the row counts them.
    pub folios: Option<u64>,
    /// Nanoseconds for each folio, by the median.
    pub ns_per_folio: Option<f64>,
    /// How many times the naive row took this one's time, by the medians.
    pub ratio_naive: Option<f64>,
    /// This one's rate by the limit's, or where neither writes bytes, the limit's time by this one's; by the medians. It
    /// may pass 1 by what the machine varies.
    pub share_of_limit: Option<f64>,
    /// Whether the memory had never been touched.
    #[serde(default)]
    pub cold: bool,
    /// What was published.
    #[serde(default, deserialize_with = "some_object")]
    pub published: Option<Published>,
    /// How many threads wrote.
    #[serde(default = "one")]
    pub threads: usize,
    /// What the descriptors of one TiB take by the kernel's count, scaled from those of this row.
    pub metadata_resident_bytes_per_tib: Option<u64>,
    /// This row's time divided by that of the fastest row that does the same work, by the medians; 1 for the fastest.
    pub ratio_best: Option<f64>,
    /// The times between two yield points, where the row lets others run now and then.
    #[serde(default, deserialize_with = "some_object")]
    pub pauses: Option<Spread>,
    /// How long its calls took one by one, where the row measures them.
    #[serde(default, deserialize_with = "some_object")]
    pub latency: Option<Spread>,
    /// The page faults, where the row takes them.
    #[serde(default, deserialize_with = "some_object")]
    pub faults: Option<Faults>,
    /// The line of the summary that the row stands for. It is no part of a file.
    #[serde(skip)]
    pub headline: Option<String>,
}

const fn one() -> usize {
    1
}

/// How far the rounds of a row were from each other: half of what the middle half of them spans, as a
/// part of the median (of all of them, if they are fewer than four).
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Noise {
    /// Of the times.
    pub median: f64,
    /// Of the ratios to the naive row.
    pub ratio_naive: Option<f64>,
    /// Of the ratios to the limit.
    pub share_of_limit: Option<f64>,
}

impl Noise {
    /// Returns whether the rounds' ratios to the naive row are farther from each other than `ratio` is from 1.
    #[must_use]
    pub fn hides(&self, ratio: Option<f64>) -> bool {
        let (Some(ratio), Some(noise)) = (ratio, self.ratio_naive) else { return false };
        (ratio - 1.0).abs() < ratio * noise
    }
}

/// Returns the word behind a ratio that is within the noise of the rounds.
#[must_use]
pub const fn noisy(is_within: bool) -> &'static str {
    if is_within { " (noise)" } else { "" }
}

/// The meaning of that word.
pub const NOISE: &str = "(noise): the rounds differ by more than the row does from the naive one";

/// A warning about the figures of a quick run.
pub const QUICK: &str = "a run with --quick, whose small sizes and few rounds show that all works: its figures mean little";

/// A published figure to compare with.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Published {
    /// The time that was published.
    pub ns: u64,
    /// Who measured what.
    #[serde(default)]
    pub source: Cow<'static, str>,
}

impl Published {
    /// Returns a time that was published for `of` pieces of work, scaled to `to` pieces.
    #[must_use]
    pub fn scaled(ns: u64, to: u64, of: u64, source: impl Into<Cow<'static, str>>) -> Self {
        let ns = u128::from(ns) * u128::from(to) / u128::from(of);
        Self { ns: u64::try_from(ns).unwrap_or(u64::MAX), source: source.into() }
    }
}

/// How long single steps of a row took, of all rounds together. Which of the two high quantiles there
/// is depends on the steps.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Spread {
    /// The median.
    pub p50_ns: u64,
    /// What one in a hundred exceeds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub p99_ns: Option<u64>,
    /// What one in a thousand exceeds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub p999_ns: Option<u64>,
    /// The longest.
    pub worst_ns: u64,
    /// How many there were.
    #[serde(default)]
    pub count: usize,
}

/// The page faults of a row.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default)]
pub struct Faults {
    /// How many there were in a round, by the median: events that the handler read, or for the
    /// kernel's own mapping the kernel's count.
    pub count: u64,
    /// Nanoseconds for each, by the median; not where several threads fault at once.
    pub ns_per_fault: Option<f64>,
    /// How many pages were mapped and never touched, by the median.
    pub wasted_pages: u64,
    /// When the first touch was done, by the median: after reading all, where that is first. Not where several
    /// threads touch, or touches are not timed.
    pub first_ns: Option<u64>,
    /// When half of the touches were done, leaving out what is between them.
    pub half_ns: Option<u64>,
    /// The time of a CPU that this process had in a round, by the median, with making the memory and taking
    /// it down.
    pub cpu_ns: u64,
    /// How many bytes were read from devices and object storage in a round, by the median.
    pub read_bytes: u64,
    /// How many times the one-page handler that waits as ours does took this one's time, by the medians.
    pub ratio_waiting_alike: Option<f64>,
    /// How long one touch took.
    #[serde(deserialize_with = "some_object")]
    pub touch: Option<Spread>,
    /// The same of the touches that took a page fault, and so waited.
    #[serde(deserialize_with = "some_object")]
    pub demand: Option<Spread>,
    /// How much resident memory a clone takes: that of all clones divided by how many there are, with shared pages
    /// counted once.
    pub clone_resident_bytes: Option<u64>,
    /// How many times the naive row's median touch took this one's.
    pub touch_ratio_naive: Option<f64>,
    /// By how many nanoseconds this row's median touch exceeds that of the row in its name, which may be below zero by
    /// what the machine varies.
    pub beyond_ns: Option<f64>,
}

/// What matters most of a run, one line for each claim: what was published, the naive way, ours, and
/// the limit.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default)]
pub struct Headline {
    /// What is done, with its amount.
    pub name: String,
    /// The id of our row.
    pub ours: String,
    /// The id of the naive row.
    pub naive: Option<String>,
    /// The id of the limit.
    pub limit: Option<String>,
    /// The time that was published for the way that ours is like.
    pub published_ns: Option<u64>,
    /// The time that was published for the way before that.
    pub published_naive_ns: Option<u64>,
    /// The median of the naive row.
    pub naive_ns: Option<u64>,
    /// The median of our row.
    pub ours_ns: u64,
    /// The median of the limit, for as many bytes as ours writes.
    pub limit_ns: Option<u64>,
    /// How many times the naive row took ours, by the medians.
    pub ratio_naive: Option<f64>,
    /// Whether the rounds' ratios are farther from each other than that one is from 1.
    pub within_noise: bool,
    /// The same of the limit, 1 where ours reaches it.
    pub share_of_limit: Option<f64>,
}

impl Row {
    /// Returns the row's name, and whether its memory was cold.
    #[must_use]
    pub fn label(&self) -> String {
        let name = if self.name.is_empty() { &self.id } else { &self.name };
        if self.cold { format!("{name} (cold)") } else { name.clone() }
    }

    /// Returns bytes written by one or more threads for each second, in powers of ten, if that is what
    /// the row is about.
    #[must_use]
    pub fn gb_per_s(&self) -> Option<f64> {
        const GIB_TO_GB: f64 = 1.073_741_824;
        let is_rate = self.bytes != 0 && self.threads != 0;
        is_rate.then_some(self.gib_per_s * GIB_TO_GB).filter(|rate| rate.is_finite())
    }
}
