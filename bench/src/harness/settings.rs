//! The settings of a run as data, so that the same run can be repeated and compared.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use uzone_pages::ByteLen;

/// One benchmark, its settings, and which of its tables are run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    /// The benchmark and its settings.
    #[serde(flatten)]
    pub benchmark: Benchmark,
    /// What the ids of the tables begin with that are run; none, and all are.
    pub tables: Vec<String>,
}

/// A benchmark and its settings.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "benchmark", rename_all = "lowercase")]
pub enum Benchmark {
    /// `uzone bench bind`.
    Bind(BindSettings),
    /// `uzone bench pin`.
    Pin(PinSettings),
    /// `uzone bench zero`.
    Zero(ZeroSettings),
    /// `uzone bench copy`.
    Copy(CopySettings),
    /// `uzone bench fault`.
    Fault(FaultSettings),
    /// `uzone bench snapshot`.
    Snapshot(SnapshotSettings),
    /// `uzone bench restore`.
    Restore(SnapshotSettings),
}

impl From<Benchmark> for Part {
    fn from(benchmark: Benchmark) -> Self {
        Self { benchmark, tables: Vec::new() }
    }
}

impl Part {
    /// Returns the name of the benchmark.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match &self.benchmark {
            Benchmark::Bind(_) => "bind",
            Benchmark::Pin(_) => "pin",
            Benchmark::Zero(_) => "zero",
            Benchmark::Copy(_) => "copy",
            Benchmark::Fault(_) => "fault",
            Benchmark::Snapshot(_) => "snapshot",
            Benchmark::Restore(_) => "restore",
        }
    }

    /// Returns it as a file of results has it.
    pub(crate) fn to_json(&self) -> serde_json::Value {
        // Numbers and text alone: nothing of them is refused.
        serde_json::to_value(self).unwrap_or_default()
    }

    /// Returns whether a table is one of this benchmark's: the ids of all begin as its name does, but
    /// for two of `zero`.
    #[must_use]
    pub fn owns(&self, table: &str) -> bool {
        let of_zero = self.name() == "zero" && ["pool-take", "populate"].contains(&table);
        of_zero || table.strip_prefix(self.name()).is_some_and(|rest| rest.starts_with('-'))
    }

    /// Returns the same benchmark with these tables alone.
    #[must_use]
    pub fn with_tables(self, tables: Vec<String>) -> Self {
        Self { tables, ..self }
    }
}

/// The settings of `uzone bench bind`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BindSettings {
    /// How much memory is described.
    #[serde(rename = "size_bytes", with = "byte_len")]
    pub size: ByteLen,
    /// How many rounds of rebinds.
    pub rebinds: u32,
    /// How many rounds of first binds, into memory fresh from the kernel.
    pub first_binds: u32,
    /// The most threads that rows with several have.
    pub threads: NonZeroUsize,
    /// The largest region whose descriptors are written for cost against size; none leaves that table
    /// out. Sizes whose descriptors do not fit in memory are skipped.
    #[serde(rename = "growth_bytes", with = "byte_len")]
    pub growth: ByteLen,
    /// A DAX device, or a file on a DAX mount, that is described as well.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dax: Option<PathBuf>,
}

/// The settings of `uzone bench pin`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PinSettings {
    /// How much memory is held.
    #[serde(rename = "size_bytes", with = "byte_len")]
    pub size: ByteLen,
    /// How much more is held in tables of 2 MiB folios of their own; 0 leaves these out.
    #[serde(default, rename = "larger_bytes", with = "byte_len")]
    pub larger: ByteLen,
    /// How many rounds.
    pub rounds: u32,
}

/// The settings of `uzone bench copy`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CopySettings {
    /// The largest extent.
    #[serde(rename = "size_bytes", with = "byte_len")]
    pub size: ByteLen,
    /// How many rounds.
    pub rounds: u32,
}

/// The settings of `uzone bench zero`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ZeroSettings {
    /// The largest extent.
    #[serde(rename = "size_bytes", with = "byte_len")]
    pub size: ByteLen,
    /// How many rounds.
    pub rounds: u32,
    /// How many rounds of first touch.
    pub first_touches: u32,
    /// How much memory is touched for the first time; none leaves that out.
    #[serde(rename = "populate_bytes", with = "byte_len")]
    pub populate: ByteLen,
    /// How many threads the rows with several have.
    pub threads: NonZeroUsize,
}

/// The settings of `uzone bench fault`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FaultSettings {
    /// How much is touched in order; at random at most 1 GiB of it.
    #[serde(rename = "size_bytes", with = "byte_len")]
    pub size: ByteLen,
    /// How large the file is of which a part is touched at random; 0 leaves these tables out.
    #[serde(default, rename = "density_bytes", with = "byte_len")]
    pub density: ByteLen,
    /// The published experiment as it was run, if that is measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub whole: Option<WholeSettings>,
    /// The programs that read lazily mapped files, if they are measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub programs: Option<ProgramSettings>,
    /// How many rounds.
    pub rounds: u32,
    /// How many threads touch, in tables of their own; one always does.
    pub threads: Vec<usize>,
    /// Where the file is made.
    #[serde(with = "path")]
    pub directory: PathBuf,
}

/// Every thread reads a whole file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WholeSettings {
    /// How large the file is; at random at most 1 GiB of it is read.
    #[serde(rename = "size_bytes", with = "byte_len")]
    pub size: ByteLen,
    /// How many threads read, a table each.
    pub threads: Vec<usize>,
    /// The windows, by order.
    pub orders: Vec<u8>,
}

/// Programs that read lazily mapped files.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProgramSettings {
    /// About how large the database of SQLite is.
    #[serde(rename = "database_bytes", with = "byte_len")]
    pub database: ByteLen,
    /// How large the image of sources is.
    #[serde(rename = "sources_bytes", with = "byte_len")]
    pub sources: ByteLen,
    /// The windows, by order.
    pub orders: Vec<u8>,
}

/// The settings of `uzone bench snapshot` and `uzone bench restore`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotSettings {
    /// How large the image is.
    #[serde(rename = "size_bytes", with = "byte_len")]
    pub size: ByteLen,
    /// How many rounds.
    pub rounds: u32,
    /// How many threads the rows with several have.
    pub threads: NonZeroUsize,
    /// Where the files are made.
    #[serde(with = "path")]
    pub directory: PathBuf,
}

/// A length as a number of bytes.
pub(crate) mod byte_len {
    use serde::{Deserialize, Deserializer, Serializer};
    use uzone_pages::ByteLen;

    #[expect(clippy::trivially_copy_pass_by_ref, reason = "the signature that serde calls")]
    pub(crate) fn serialize<S: Serializer>(len: &ByteLen, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_u64(len.get())
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<ByteLen, D::Error> {
        u64::deserialize(from).map(ByteLen::new)
    }
}

/// A path as text: what is no UTF-8 in it is replaced, so that a run is not lost for its name.
pub(crate) mod path {
    use super::PathBuf;
    use serde::{Deserialize, Deserializer, Serializer};

    pub(crate) fn serialize<S: Serializer>(
        path: &std::path::Path,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        to.serialize_str(&path.to_string_lossy())
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<PathBuf, D::Error> {
        String::deserialize(from).map(PathBuf::from)
    }
}
