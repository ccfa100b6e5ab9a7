//! What `uzone bench bind --metadata` found, in the shape that `--json` prints.

use serde::Serialize;

use super::{Skipped, Table};
use crate::machine::Machine;

/// The schema of [`Metadata`]: raised when a field changes its meaning.
pub const SCHEMA: &str = "uzone.bench-metadata/1";

/// One run.
#[derive(Clone, Debug, Serialize)]
pub struct Metadata {
    /// [`SCHEMA`].
    pub schema: &'static str,
    /// Which benchmark.
    pub benchmark: &'static str,
    /// What it was measured on.
    pub machine: Machine,
    /// What was described, as a sentence.
    pub settings: String,
    /// The tables, in the order of the results.
    pub tables: Vec<Table>,
    /// All rows of all tables.
    pub results: Vec<MetadataRow>,
    /// What was left out, and why.
    pub skipped: Vec<Skipped>,
}

/// Where the figures of a row come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Origin {
    /// This machine's kernel counted.
    Measured,
    /// Somebody else's figure, as it was published.
    Published,
    /// Arithmetic, over sizes that are documented.
    Derived,
}

/// One way of describing a TiB.
#[derive(Clone, Debug, Serialize)]
pub struct MetadataRow {
    /// `table/row`; it stays the same from run to run.
    pub id: String,
    /// The name of the row, for people.
    pub name: String,
    /// How large a folio is.
    pub folio_bytes: u64,
    /// How long a descriptor is.
    pub descriptor_bytes: u64,
    /// Where the figures come from.
    pub origin: Origin,
    /// Who published them, or what they are derived from.
    pub source: Option<&'static str>,
    /// Addresses that were mapped for descriptors beside the region.
    pub virtual_bytes_per_tib: Option<u64>,
    /// Memory that descriptors have, wherever they lie.
    pub resident_bytes_per_tib: u64,
    /// Page tables for them, which are the kernel's memory.
    pub page_table_bytes_per_tib: Option<u64>,
    /// Bytes of the described memory that are not described: descriptors and their alignment.
    pub region_bytes_per_tib: u64,
    /// How long the bind took.
    pub bind_ns: Option<u64>,
}
