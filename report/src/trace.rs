//! `uzone.trace/1`: the faults of a mapping in a file ([`Trace`]).
//!
//! One JSON object. `records` is an array of arrays, in the order in which the faults were answered, since a trace may
//! hold a million: `[at_ns, offset_bytes, class, is_write, outcome, latency_ns]`.
//! `at_ns` counts from when the mapping was made, `offset_bytes` from the start of its backing.
//! `latencies` sums up all faults, with the faults that the trace has dropped (`lost`).
//!
//! A reader skips unknown fields, and unknown elements at the end of a record, and reads an unknown class or outcome as
//! [`Class::Other`] or [`Outcome::Other`]. Any other change is version 2. The schema in `cli/schema` is made of this
//! type.

use std::fmt;
use std::io::Write;

use serde::de::{self, Deserializer, SeqAccess, Visitor};
use serde::ser::Serializer;
use serde::{Deserialize, Serialize};
use uzone_fault::{FaultOutcome, FaultRecord, Latency};
use uzone_os::uffd::FaultKind;
use uzone_pages::{ByteLen, PageSize};

use crate::machine::Machine;
use crate::text::nanoseconds;

/// The schema of [`Trace`].
pub const TRACE_SCHEMA: &str = "uzone.trace/1";

/// The faults of one mapping.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Trace {
    /// [`TRACE_SCHEMA`].
    #[serde(deserialize_with = "this_schema")]
    schema: String,
    /// The host of the run.
    #[serde(default)]
    pub machine: Machine,
    /// The size of a page of the mapping.
    pub page_size_bytes: u64,
    /// The length of the mapping.
    pub len_bytes: u64,
    /// The number of faults that were dropped before the first record.
    #[serde(default)]
    pub lost: u64,
    /// The faults in the order of their answers: the time at which the fault was read, the offset of its page in the
    /// backing, its kind, whether it was a write, its outcome, and its latency.
    #[cfg_attr(feature = "schema", schemars(with = "Vec<(u64, u64, Class, bool, Outcome, u64)>"))]
    pub records: Vec<Record>,
    /// The latencies of all faults, by class and outcome.
    #[serde(default)]
    pub latencies: Vec<Summary>,
}

/// One fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// The time at which the fault was read, since the mapping was made.
    pub at_ns: u64,
    /// The offset of the page in the backing.
    pub offset_bytes: u64,
    /// The kind of fault.
    pub class: Class,
    /// Whether it was a write.
    pub is_write: bool,
    /// The outcome.
    pub outcome: Outcome,
    /// The time until the page was in place.
    pub latency_ns: u64,
}

/// The latencies of faults of one class and outcome.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Summary {
    /// The kind of fault.
    pub class: Class,
    /// The outcome.
    pub outcome: Outcome,
    /// The number of faults.
    pub count: u64,
    /// The median.
    pub p50_ns: u64,
    /// The 99th percentile.
    pub p99_ns: u64,
    /// The 99.9th percentile.
    pub p999_ns: u64,
    /// The longest.
    pub max_ns: u64,
    /// `[at_most_ns, count]`: the number of faults up to this time, and above the previous one.
    #[serde(default)]
    pub buckets: Vec<(u64, u64)>,
}

/// The kinds of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Class {
    /// There was no page.
    Missing,
    /// The page cache had the page, and it was not mapped.
    Minor,
    /// The page was protected against the write.
    WriteProtect,
    /// A word that this version does not know.
    #[serde(other)]
    Other,
}

/// The outcome of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// The page was ready.
    AtHand,
    /// Another thread was producing the page already.
    Coalesced,
    /// A thread that waits for devices produced it.
    Produced,
    /// The page could not be read.
    Failed,
    /// The answer was deferred: the kernel reports the fault again.
    PutOff,
    /// A word that this version does not know.
    #[serde(other)]
    Other,
}

impl Outcome {
    /// All outcomes in the order of charts.
    pub(crate) const ALL: [Self; 6] =
        [Self::AtHand, Self::Coalesced, Self::Produced, Self::Failed, Self::PutOff, Self::Other];

    /// Returns the outcome in words.
    pub(crate) const fn words(self) -> &'static str {
        match self {
            Self::AtHand => "at hand",
            Self::Coalesced => "waited for another",
            Self::Produced => "produced",
            Self::Failed => "failed",
            Self::PutOff => "put off",
            Self::Other => "other",
        }
    }
}

impl Class {
    /// Returns the class in words.
    pub(crate) const fn words(self) -> &'static str {
        match self {
            Self::Missing => "missing",
            Self::Minor => "minor",
            Self::WriteProtect => "write-protect",
            Self::Other => "other",
        }
    }
}

impl Serialize for Record {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let &Self { at_ns, offset_bytes, class, is_write, outcome, latency_ns } = self;
        (at_ns, offset_bytes, class, is_write, outcome, latency_ns).serialize(serializer)
    }
}

struct RecordVisitor;

impl<'de> Visitor<'de> for RecordVisitor {
    type Value = Record;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a record [at_ns, offset_bytes, class, is_write, outcome, latency_ns]")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Record, A::Error> {
        fn next<'de, T: Deserialize<'de>, A: SeqAccess<'de>>(
            seq: &mut A,
            index: usize,
        ) -> Result<T, A::Error> {
            seq.next_element()?.ok_or_else(|| de::Error::invalid_length(index, &RecordVisitor))
        }
        let record = Record {
            at_ns: next(&mut seq, 0)?,
            offset_bytes: next(&mut seq, 1)?,
            class: next(&mut seq, 2)?,
            is_write: next(&mut seq, 3)?,
            outcome: next(&mut seq, 4)?,
            latency_ns: next(&mut seq, 5)?,
        };
        while seq.next_element::<de::IgnoredAny>()?.is_some() {}
        Ok(record)
    }
}

impl<'de> Deserialize<'de> for Record {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(RecordVisitor)
    }
}

/// Reads the name of the schema, which is always the one.
fn this_schema<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    let name = String::deserialize(deserializer)?;
    if name == TRACE_SCHEMA {
        return Ok(name);
    }
    Err(de::Error::invalid_value(de::Unexpected::Str(&name), &TRACE_SCHEMA))
}

impl From<FaultKind> for Class {
    fn from(class: FaultKind) -> Self {
        match class {
            FaultKind::Missing => Self::Missing,
            FaultKind::Minor => Self::Minor,
            FaultKind::WriteProtect => Self::WriteProtect,
        }
    }
}

impl From<FaultOutcome> for Outcome {
    fn from(outcome: FaultOutcome) -> Self {
        match outcome {
            FaultOutcome::Ready => Self::AtHand,
            FaultOutcome::Coalesced => Self::Coalesced,
            FaultOutcome::Produced => Self::Produced,
            FaultOutcome::Failed => Self::Failed,
            FaultOutcome::Deferred => Self::PutOff,
            _ => Self::Other,
        }
    }
}

impl From<&FaultRecord> for Record {
    fn from(record: &FaultRecord) -> Self {
        Self {
            at_ns: nanoseconds(record.at),
            offset_bytes: record.offset,
            class: record.class.into(),
            is_write: record.is_write,
            outcome: record.outcome.into(),
            latency_ns: nanoseconds(record.latency),
        }
    }
}

impl From<&Latency> for Summary {
    fn from(latency: &Latency) -> Self {
        Self {
            class: latency.class.into(),
            outcome: latency.outcome.into(),
            count: latency.count,
            p50_ns: nanoseconds(latency.p50),
            p99_ns: nanoseconds(latency.p99),
            p999_ns: nanoseconds(latency.p999),
            max_ns: nanoseconds(latency.max),
            buckets: latency
                .buckets
                .iter()
                .map(|&(at_most, count)| (nanoseconds(at_most), count))
                .collect(),
        }
    }
}

impl Trace {
    /// Returns the trace of a mapping of `len` in pages of `page`: its
    /// [`take_trace`](uzone_fault::LazyMapping::take_trace) and
    /// [`latencies`](uzone_fault::LazyMapping::latencies).
    #[must_use]
    pub fn new(
        machine: Machine,
        page: PageSize,
        len: ByteLen,
        records: &[FaultRecord],
        lost: u64,
        latencies: &[Latency],
    ) -> Self {
        Self {
            schema: TRACE_SCHEMA.to_owned(),
            machine,
            page_size_bytes: page.bytes(),
            len_bytes: len.get(),
            lost,
            records: records.iter().map(Record::from).collect(),
            latencies: latencies.iter().map(Summary::from).collect(),
        }
    }

    /// Writes the trace as one line of JSON. [`replace`](crate::replace) makes a file of it that is
    /// there as a whole or not at all.
    ///
    /// # Errors
    /// If `out` cannot be written.
    pub fn write_to(&self, mut out: impl Write) -> std::io::Result<()> {
        serde_json::to_writer(&mut out, self)?;
        out.write_all(b"\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: &str = r#"{"schema":"uzone.trace/1","page_size_bytes":4096,"len_bytes":8192,"new":[1],
        "records":[[5,4096,"missing",true,"produced",77,"more"],[6,0,"unheard",false,"of",1]]}"#;

    #[test]
    fn what_a_reader_does_not_know_it_passes_over() {
        let trace: Trace = serde_json::from_str(SMALL).expect("a trace");
        let first = trace.records[0];
        assert_eq!((first.class, first.outcome), (Class::Missing, Outcome::Produced));
        assert_eq!((first.at_ns, first.offset_bytes, first.latency_ns), (5, 4096, 77));
        assert_eq!(
            (trace.records[1].class, trace.records[1].outcome),
            (Class::Other, Outcome::Other)
        );
        assert_eq!(trace.lost, 0);
    }

    #[test]
    fn a_trace_is_read_as_it_was_written() {
        let trace: Trace = serde_json::from_str(SMALL).expect("a trace");
        let mut written = Vec::new();
        trace.write_to(&mut written).expect("memory takes it");
        assert!(written.starts_with(br#"{"schema":"uzone.trace/1","#));
        assert_eq!(serde_json::from_slice::<Trace>(&written).expect("a trace"), trace);
    }

    #[test]
    fn records_that_are_cut_or_of_another_type_and_other_versions_are_refused() {
        for (from, to) in [
            ("uzone.trace/1", "uzone.trace/2"),
            (r#","produced",77,"more""#, ""),
            ("true", "1"),
            ("[5,4096", "[-5,4096"),
            ("[5,4096", "[5.5,4096"),
            (r#""len_bytes":8192,"#, ""),
        ] {
            let text = SMALL.replacen(from, to, 1);
            assert_ne!(text, SMALL);
            assert!(serde_json::from_str::<Trace>(&text).is_err(), "{text}");
        }
    }
}
