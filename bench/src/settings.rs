//! The settings of a run as data, so that the same run can be repeated and compared, and as
//! arguments of the command: the documentation of a field is the help of its argument.

use std::env::temp_dir;
use std::num::NonZeroUsize;
use std::path::PathBuf;

use clap::builder::{RangedI64ValueParser, TypedValueParser};
use clap::{Args, Subcommand};
use serde::{Deserialize, Serialize};
use uzone_harness::{Session, Watch};
use uzone_os::numa;
use uzone_pages::ByteLen;

/// One benchmark, its settings, and the tables that are run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Part {
    /// The benchmark and its settings.
    #[serde(flatten)]
    pub(crate) benchmark: Benchmark,
    /// The beginnings of the ids of the tables that are run; all tables if it is empty.
    pub(crate) tables: Vec<String>,
}

/// A benchmark and its settings.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, Subcommand)]
#[serde(tag = "benchmark", rename_all = "lowercase")]
pub(crate) enum Benchmark {
    /// Describe every page of a region: rebinds and first binds
    ///
    /// The region is only reserved; its descriptors are written, 64 bytes a page. `naive`
    /// is a call for each page that sets field after field; the limit is a bare fill of as many
    /// bytes.
    #[command(after_help = uzone_cli::exit::help("uzone-bench bind --size 100G --rebinds 30", &crate::command::EXITS))]
    Bind(BindSettings),
    /// Pin a region and let it go: 2 MiB folios, lists, base pages
    ///
    /// The region is reserved and described; its bytes are never touched. `naive` is an atomic step
    /// for each base page, on 64-byte descriptors as Linux has them; they take 1/64 of the size.
    #[command(after_help = uzone_cli::exit::help("uzone-bench pin --size 128G", &crate::command::EXITS))]
    Pin(PinSettings),
    /// Clear memory: three lengths out of cache, pools, and first touch, beside the kernel and the C
    /// library
    ///
    /// Extents of 4 KiB, 2 MiB and the largest; the wait for a folio of a pool; and first touch.
    #[command(after_help = uzone_cli::exit::help("uzone-bench zero --size 32M --populate-size 0", &crate::command::EXITS))]
    Zero(ZeroSettings),
    /// Copy memory: three lengths out of cache, beside the C library
    #[command(after_help = uzone_cli::exit::help("uzone-bench copy --size 32M", &crate::command::EXITS))]
    Copy(CopySettings),
    /// Map files lazily, beside a one-page handler and the kernel's own mapping
    ///
    /// A file in the page cache and a memory file, touched in order and at random; a file that the
    /// page cache has forgotten; and 1 to 100 % of the pages of larger files at random.
    #[command(after_help = uzone_cli::exit::help("uzone-bench fault --size 256M", &crate::command::EXITS))]
    Fault(FaultSettings),
    /// Pack an image of memory, read and verify it, and map it lazily: beside zstd, BLAKE3 and the
    /// raw bytes
    ///
    /// The image is made of the programs and libraries in /usr/bin and /usr/lib, in runs, between
    /// which are runs of zero pages; about 30 % of the pages are zero. All files are in the page
    /// cache. The command zstd is measured if it is installed.
    #[command(after_help = uzone_cli::exit::help("uzone-bench snapshot --size 256M --dir /dev/shm", &crate::command::EXITS))]
    Snapshot(SnapshotSettings),
    /// Restore a VM from an image lazily, beside a handler of one page a fault and the kernel's mapping
    ///
    /// The image is the one of `uzone-bench snapshot`, raw and packed, in the page cache. A thread touches memory that is
    /// registered as Firecracker registers it: all pages in order, and a tenth of them, in runs, in random order.
    #[command(after_help = uzone_cli::exit::help("uzone-bench restore --size 256M --dir /dev/shm", &crate::command::EXITS))]
    Restore(SnapshotSettings),
    /// Open pools of host memory for accelerators: time until they are ready, and waits meanwhile
    ///
    /// A driver of our own takes the place of a real one: it registers 30 GB/s with its lock held.
    /// `scripts/gpu.sh` measures a real one.
    #[command(after_help = uzone_cli::exit::help("uzone-bench hostpool --size 1G", &crate::command::EXITS))]
    Hostpool(HostpoolSettings),
}

impl Benchmark {
    /// Returns the name of the benchmark.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Bind(_) => "bind",
            Self::Pin(_) => "pin",
            Self::Zero(_) => "zero",
            Self::Copy(_) => "copy",
            Self::Fault(_) => "fault",
            Self::Snapshot(_) => "snapshot",
            Self::Restore(_) => "restore",
            Self::Hostpool(_) => "hostpool",
        }
    }
}

impl From<Benchmark> for Part {
    fn from(benchmark: Benchmark) -> Self {
        Self { benchmark, tables: Vec::new() }
    }
}

impl Part {
    /// Returns the name of the benchmark.
    pub(crate) fn name(&self) -> &'static str {
        self.benchmark.name()
    }

    /// Returns the part as JSON, for a file of results.
    pub(crate) fn to_json(&self) -> serde_json::Value {
        // Numbers and text alone: nothing of them is refused.
        serde_json::to_value(self).unwrap_or_default()
    }

    /// Begins a run of the part; `settings` is a sentence.
    pub(crate) fn session<'a>(
        &self,
        settings: String,
        rounds: u32,
        watch: Watch<'a>,
    ) -> Session<'a> {
        Session::new(self.name(), settings, self.to_json(), &self.tables, rounds, watch)
    }

    /// Returns whether this benchmark has a table: ids begin with its name, but for two of `zero`.
    #[must_use]
    pub(crate) fn owns(&self, table: &str) -> bool {
        let is_in = |known: &str| known.starts_with(table);
        let of_zero = self.name() == "zero" && ["pool-take", "populate"].into_iter().any(is_in);
        of_zero || table.strip_prefix(self.name()).is_some_and(|rest| rest.starts_with('-'))
    }

    /// Returns the same benchmark with these tables alone.
    #[must_use]
    pub(crate) fn with_tables(self, tables: Vec<String>) -> Self {
        Self { tables, ..self }
    }
}

/// The settings of `uzone-bench bind`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, Args)]
pub(crate) struct BindSettings {
    /// Memory to describe, in whole GiB; its descriptors take 1/64 of that, twice
    #[arg(long, default_value = "100G", value_name = "SIZE")]
    #[serde(rename = "size_bytes", with = "byte_len")]
    pub(crate) size: ByteLen,
    /// Rounds of rebinds
    #[arg(long, default_value_t = 30, value_name = "N", value_parser = rounds_from(1))]
    pub(crate) rebinds: u32,
    /// Rounds of first binds, which take fresh memory from the kernel; 0 leaves them out
    #[arg(long, default_value_t = 10, value_name = "N", value_parser = rounds_from(0))]
    pub(crate) first_binds: u32,
    /// The largest number of threads; by default the number of CPUs
    #[arg(long, default_value_t = all_cpus(), hide_default_value = true, value_name = "N", value_parser = some_threads())]
    pub(crate) threads: NonZeroUsize,
    /// Describe this DAX device too, or this file on a DAX mount: table bind-dax. Its bytes are not
    /// touched
    #[arg(long, value_name = "PATH")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) dax: Option<PathBuf>,
}

/// The settings of `uzone-bench pin`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, Args)]
pub(crate) struct PinSettings {
    /// Memory to pin, in whole GiB
    #[arg(long, default_value = "16G", value_name = "SIZE")]
    #[serde(rename = "size_bytes", with = "byte_len")]
    pub(crate) size: ByteLen,
    /// Rounds
    #[arg(long, default_value_t = 30, value_name = "N", value_parser = rounds_from(1))]
    pub(crate) rounds: u32,
}

/// The settings of `uzone-bench copy`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, Args)]
pub(crate) struct CopySettings {
    /// The largest extent; the tables take four times that, at least 2 GiB
    #[arg(long, default_value = "1G", value_name = "SIZE")]
    #[serde(rename = "size_bytes", with = "byte_len")]
    pub(crate) size: ByteLen,
    /// Rounds
    #[arg(long, default_value_t = 11, value_name = "N", value_parser = rounds_from(1))]
    pub(crate) rounds: u32,
}

/// The settings of `uzone-bench hostpool`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, Args)]
pub(crate) struct HostpoolSettings {
    /// The length of the pool
    #[arg(long, default_value = "4G", value_name = "SIZE")]
    #[serde(rename = "size_bytes", with = "byte_len")]
    pub(crate) size: ByteLen,
    /// Rounds
    #[arg(long, default_value_t = 11, value_name = "N", value_parser = rounds_from(1))]
    pub(crate) rounds: u32,
}

/// The settings of `uzone-bench zero`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, Args)]
pub(crate) struct ZeroSettings {
    /// The largest extent
    #[arg(long, default_value = "1G", value_name = "SIZE")]
    #[serde(rename = "size_bytes", with = "byte_len")]
    pub(crate) size: ByteLen,
    /// Rounds
    #[arg(long, default_value_t = 11, value_name = "N", value_parser = rounds_from(1))]
    pub(crate) rounds: u32,
    /// Rounds of first touch
    #[arg(long, default_value_t = 3, value_name = "N", value_parser = rounds_from(1))]
    pub(crate) first_touches: u32,
    /// Memory to touch for the first time; 0 leaves that out
    #[arg(long = "populate-size", default_value = "8G", value_name = "SIZE")]
    #[serde(rename = "populate_bytes", with = "byte_len")]
    pub(crate) populate: ByteLen,
    /// The largest number of threads; by default the number of CPUs
    #[arg(long, default_value_t = all_cpus(), hide_default_value = true, value_name = "N", value_parser = some_threads())]
    pub(crate) threads: NonZeroUsize,
}

/// The settings of `uzone-bench fault`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, Args)]
pub(crate) struct FaultSettings {
    /// Length of the file that is touched in order, and at most 1 GiB of it at random
    #[arg(long, default_value = "8M", value_name = "SIZE")]
    #[serde(rename = "size_bytes", with = "byte_len")]
    pub(crate) size: ByteLen,
    /// Length of the files of which 1 to 100 % of the pages are touched at random; 0 leaves them out
    #[arg(long = "density-size", default_value = "256M", value_name = "SIZE")]
    #[serde(default, rename = "density_bytes", with = "byte_len")]
    pub(crate) density: ByteLen,
    /// The published experiment as it was run, if that is measured.
    #[arg(skip)]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) whole: Option<WholeSettings>,
    /// Rounds
    #[arg(long, default_value_t = 5, value_name = "N", value_parser = rounds_from(1))]
    pub(crate) rounds: u32,
    /// Folder for the file; the cold tables need a disk; by default the folder of temporary files
    #[arg(long = "dir", default_value_os_t = temporary(), hide_default_value = true, value_name = "DIR")]
    pub(crate) directory: PathBuf,
}

/// Every thread reads a whole file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct WholeSettings {
    /// The length of the file; at random at most 1 GiB of it is read.
    #[serde(rename = "size_bytes", with = "byte_len")]
    pub(crate) size: ByteLen,
    /// The numbers of threads, a table each.
    pub(crate) threads: Vec<usize>,
    /// The windows, by order.
    pub(crate) orders: Vec<u8>,
}

/// The settings of `uzone-bench snapshot` and `uzone-bench restore`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, Args)]
pub(crate) struct SnapshotSettings {
    /// Length of the image; its files take twice that, and it is read or mapped into as much memory
    #[arg(long, default_value = "1G", value_name = "SIZE")]
    #[serde(rename = "size_bytes", with = "byte_len")]
    pub(crate) size: ByteLen,
    /// Rounds
    #[arg(long, default_value_t = 5, value_name = "N", value_parser = rounds_from(1))]
    pub(crate) rounds: u32,
    /// The largest number of threads; by default the number of CPUs
    #[arg(long, default_value_t = all_cpus(), hide_default_value = true, value_name = "N", value_parser = some_threads())]
    pub(crate) threads: NonZeroUsize,
    /// Folder for the files; in memory, the figures are without the disk; by default the folder of temporary files
    #[arg(long = "dir", default_value_os_t = temporary(), hide_default_value = true, value_name = "DIR")]
    pub(crate) directory: PathBuf,
}

/// Returns the folder of temporary files; an argument has no empty default.
#[must_use]
pub(crate) fn temporary() -> PathBuf {
    Some(temp_dir()).filter(|path| !path.as_os_str().is_empty()).unwrap_or_else(|| "/tmp".into())
}

/// The largest number of threads that an argument may ask for.
const MOST_THREADS: u16 = 1024;

/// Returns the number of CPUs of this process, up to the largest number that an argument may ask for.
#[must_use]
pub(crate) fn all_cpus() -> NonZeroUsize {
    let cpus = numa::current_cpu_count().unwrap_or(1).min(usize::from(MOST_THREADS));
    NonZeroUsize::new(cpus).unwrap_or(NonZeroUsize::MIN)
}

fn rounds_from(least: i64) -> RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(least..=10_000)
}

fn some_threads() -> impl TypedValueParser<Value = NonZeroUsize> {
    let count = |count| NonZeroUsize::new(usize::from(count)).unwrap_or(NonZeroUsize::MIN);
    clap::value_parser!(u16).range(1..=i64::from(MOST_THREADS)).map(count)
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
