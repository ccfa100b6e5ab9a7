//! What `uzone bench --json` printed, as it is read: [`Bench`] and [`Metadata`].
//!
//! Fields that are not known are passed over and most may be missing, so that files of other versions
//! with the same schema can be read. What a row's id means is in the schemas in `cli/schema`.

use serde::Deserialize;

use crate::machine::Machine;
use crate::object::{object, objects, some_object};

/// `uzone.bench/1`: times.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct Bench {
    #[serde(default)]
    pub(crate) benchmark: String,
    #[serde(default, deserialize_with = "object")]
    pub(crate) machine: Machine,
    #[serde(default)]
    pub(crate) settings: String,
    #[serde(default, deserialize_with = "objects")]
    pub(crate) tables: Vec<Table>,
    #[serde(deserialize_with = "objects")]
    pub(crate) results: Vec<Row>,
    #[serde(default, deserialize_with = "objects")]
    pub(crate) skipped: Vec<Skipped>,
    /// In a run of all benchmarks.
    #[serde(default, deserialize_with = "some_object")]
    pub(crate) metadata: Option<Box<Metadata>>,
}

/// `uzone.bench-metadata/1`: bytes of descriptors.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct Metadata {
    #[serde(default, deserialize_with = "object")]
    pub(crate) machine: Machine,
    #[serde(default)]
    pub(crate) settings: String,
    #[serde(default, deserialize_with = "objects")]
    pub(crate) tables: Vec<Table>,
    #[serde(deserialize_with = "objects")]
    pub(crate) results: Vec<MetadataRow>,
    #[serde(default, deserialize_with = "objects")]
    pub(crate) skipped: Vec<Skipped>,
}

#[derive(Clone, Debug, Default, Deserialize)]
pub(crate) struct Table {
    pub(crate) id: String,
    #[serde(default)]
    pub(crate) title: String,
    #[serde(default)]
    pub(crate) note: String,
}

#[derive(Clone, Debug, Default, Deserialize)]
pub(crate) struct Skipped {
    pub(crate) id: String,
    #[serde(default)]
    pub(crate) reason: String,
}

#[derive(Clone, Debug, Default, Deserialize)]
pub(crate) struct Row {
    pub(crate) id: String,
    pub(crate) median_ns: u64,
    // A row may lack what follows. A struct of its own, flattened into this one, would hide the names of
    // these fields from errors.
    #[serde(default)]
    pub(crate) name: String,
    /// What the row is; absent in files of earlier versions.
    pub(crate) role: Option<Role>,
    pub(crate) min_ns: Option<u64>,
    pub(crate) worst_ns: Option<u64>,
    pub(crate) rounds: Option<u64>,
    #[serde(default)]
    pub(crate) bytes: u64,
    pub(crate) items: Option<u64>,
    #[serde(default)]
    pub(crate) gib_per_s: f64,
    pub(crate) ns_per_page: Option<f64>,
    pub(crate) calls: Option<u64>,
    pub(crate) ns_per_call: Option<f64>,
    pub(crate) folios: Option<u64>,
    pub(crate) ns_per_folio: Option<f64>,
    pub(crate) ratio_naive: Option<f64>,
    pub(crate) share_of_limit: Option<f64>,
    #[serde(default)]
    pub(crate) cold: bool,
    #[serde(default, deserialize_with = "some_object")]
    pub(crate) published: Option<Published>,
    pub(crate) threads: Option<u64>,
    pub(crate) metadata_resident_bytes_per_tib: Option<u64>,
    pub(crate) ratio_best: Option<f64>,
    #[serde(default, deserialize_with = "some_object")]
    pub(crate) pauses: Option<Spread>,
    #[serde(default, deserialize_with = "some_object")]
    pub(crate) latency: Option<Spread>,
    #[serde(default, deserialize_with = "some_object")]
    pub(crate) faults: Option<Faults>,
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Published {
    pub(crate) ns: u64,
    #[serde(default)]
    pub(crate) source: String,
}

/// How single steps of a row were spread. Which of the two quantiles there is depends on what it is of.
#[derive(Clone, Copy, Debug, Deserialize)]
pub(crate) struct Spread {
    pub(crate) p50_ns: u64,
    pub(crate) p99_ns: Option<u64>,
    pub(crate) p999_ns: Option<u64>,
    pub(crate) worst_ns: u64,
    #[serde(default)]
    pub(crate) count: u64,
}

/// The page faults of a row.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Faults {
    pub(crate) count: u64,
    pub(crate) ns_per_fault: Option<f64>,
    pub(crate) wasted_pages: u64,
    pub(crate) ratio_waiting_alike: Option<f64>,
    #[serde(default, deserialize_with = "some_object")]
    pub(crate) touch: Option<Spread>,
    pub(crate) touch_ratio_naive: Option<f64>,
    pub(crate) beyond_ns: Option<f64>,
}

#[derive(Clone, Debug, Default, Deserialize)]
pub(crate) struct MetadataRow {
    pub(crate) id: String,
    #[serde(default)]
    pub(crate) name: String,
    pub(crate) resident_bytes_per_tib: u64,
    #[serde(default)]
    pub(crate) descriptor_bytes: Option<u64>,
    #[serde(default)]
    pub(crate) folio_bytes: Option<u64>,
    #[serde(default)]
    pub(crate) virtual_bytes_per_tib: Option<u64>,
    #[serde(default)]
    pub(crate) page_table_bytes_per_tib: Option<u64>,
    #[serde(default)]
    pub(crate) region_bytes_per_tib: Option<u64>,
    #[serde(default)]
    pub(crate) bind_ns: Option<u64>,
    #[serde(default)]
    pub(crate) origin: String,
    #[serde(default)]
    pub(crate) source: Option<String>,
}

/// What a row is beside the others, and so how it is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(from = "String")]
pub(crate) enum Role {
    Naive,
    Peer,
    Ours,
    Limit,
    Published,
}

impl From<String> for Role {
    /// Takes the word of a file. Variants of ours are drawn as one of the other ways, and so are words of
    /// later versions.
    fn from(word: String) -> Self {
        match word.as_str() {
            "naive" => Self::Naive,
            "ours" => Self::Ours,
            "limit" => Self::Limit,
            _ => Self::Peer,
        }
    }
}

impl Role {
    /// Returns the role in words.
    pub(crate) const fn words(self) -> &'static str {
        match self {
            Self::Naive => "naive",
            Self::Peer => "other ways",
            Self::Ours => "uzone",
            Self::Limit => "limit",
            Self::Published => "published (another machine)",
        }
    }
}

impl Row {
    /// Returns the row's id without its table.
    pub(crate) fn case(&self) -> &str {
        self.id.split_once('/').map_or("", |(_, case)| case)
    }

    /// Returns the row's name, and whether its memory was cold.
    pub(crate) fn label(&self) -> String {
        let name = if self.name.is_empty() { &self.id } else { &self.name };
        if self.cold { format!("{name} (cold)") } else { name.clone() }
    }

    /// Returns bytes written by one or more threads for each second, in powers of ten, if that is what
    /// the row is about.
    pub(crate) fn gb_per_s(&self) -> Option<f64> {
        const GIB_TO_GB: f64 = 1.073_741_824;
        let is_rate = self.bytes != 0 && self.threads != Some(0);
        is_rate.then_some(self.gib_per_s * GIB_TO_GB).filter(|rate| rate.is_finite())
    }

    /// Returns the role of the row: its own, or that of its id in files of earlier versions.
    pub(crate) fn role(&self, benchmark: &str) -> Role {
        self.role.unwrap_or_else(|| self.role_by_id(benchmark))
    }

    fn role_by_id(&self, benchmark: &str) -> Role {
        let (table, case) = self.id.split_once('/').unwrap_or(("", &self.id));
        let has = |word: &str| case.split('-').any(|part| part == word);
        let ends = |words: &str| case.ends_with(words);
        if has("naive") || ends("page-at-a-time") {
            Role::Naive
        } else if has("limit")
            || table.ends_with("-limit")
            || ["populate", "clearing", "undisturbed"].contains(&case)
        {
            Role::Limit
        } else if has("ours")
            || self.name.starts_with("ours")
            || (benchmark == "fault" && (case.starts_with("order-") || case == "auto"))
            || (benchmark == "pin" && self.ratio_naive.is_some())
            || ["bind-small", "bind-growth", "zero-pause"].contains(&table)
        {
            Role::Ours
        } else {
            Role::Peer
        }
    }
}

/// Returns the length that a part of an id names, such as `4K` or `1GiB`.
pub(crate) fn size(part: &str) -> Option<u64> {
    part.parse::<uzone_pages::ByteLen>()
        .ok()
        .filter(|_| part.ends_with(|last: char| last.is_ascii_alphabetic()))
        .map(uzone_pages::ByteLen::get)
}
