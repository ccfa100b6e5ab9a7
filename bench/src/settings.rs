//! The settings of a run as data, so that the same run can be repeated and compared.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::group::Watch;
use crate::report::Bench;
use crate::suite::BenchError;
use crate::{bind, copy, fault, pin, zero};

/// One benchmark and its settings.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "benchmark", rename_all = "lowercase")]
pub enum Part {
    /// `uzone bench bind`.
    Bind(bind::Settings),
    /// `uzone bench pin`.
    Pin(pin::Settings),
    /// `uzone bench zero`.
    Zero(zero::Settings),
    /// `uzone bench copy`.
    Copy(copy::Settings),
    /// `uzone bench fault`.
    Fault(fault::Settings),
}

impl Part {
    /// Returns the name of the benchmark.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Bind(_) => "bind",
            Self::Pin(_) => "pin",
            Self::Zero(_) => "zero",
            Self::Copy(_) => "copy",
            Self::Fault(_) => "fault",
        }
    }

    /// Runs it.
    ///
    /// # Errors
    /// [`BenchError`] if it cannot be run here, or a row found something wrong.
    pub fn run(&self, watch: Watch<'_>) -> Result<Bench, BenchError> {
        match self {
            Self::Bind(settings) => bind::run(settings, watch),
            Self::Pin(settings) => pin::run(settings, watch),
            Self::Zero(settings) => zero::run(settings, watch),
            Self::Copy(settings) => copy::run(settings, watch),
            Self::Fault(settings) => fault::run(settings, watch),
        }
    }

    /// Returns whether a table is one of this benchmark's: the ids of all begin as its name does, but
    /// for two of `zero`.
    #[must_use]
    pub fn owns(&self, table: &str) -> bool {
        let of_zero = matches!(self, Self::Zero(_)) && ["pool-take", "populate"].contains(&table);
        of_zero || table.strip_prefix(self.name()).is_some_and(|rest| rest.starts_with('-'))
    }

    /// Returns the same benchmark with these tables alone.
    #[must_use]
    pub fn with_tables(mut self, tables: Vec<String>) -> Self {
        *match &mut self {
            Self::Bind(settings) => &mut settings.tables,
            Self::Pin(settings) => &mut settings.tables,
            Self::Zero(settings) => &mut settings.tables,
            Self::Copy(settings) => &mut settings.tables,
            Self::Fault(settings) => &mut settings.tables,
        } = tables;
        self
    }
}

/// Returns whether a table is among those that were asked for: an id begins as one of `tables` does,
/// or none was named.
pub(crate) fn wants(tables: &[String], table: &str) -> bool {
    tables.is_empty() || tables.iter().any(|start| table.starts_with(start.as_str()))
}

/// As [`wants`], for tables that are measured together.
pub(crate) fn wants_any(tables: &[String], together: &[&str]) -> bool {
    together.iter().any(|table| wants(tables, table))
}

/// Refuses names of tables that do not exist: `found` is whether any table was run or skipped.
pub(crate) fn check_found(tables: &[String], found: bool) -> Result<(), BenchError> {
    if found { Ok(()) } else { Err(BenchError::NoTable { asked: tables.join(",") }) }
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
