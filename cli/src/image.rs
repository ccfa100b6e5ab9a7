//! `uzone pack`, `unpack`, `inspect` and `verify`: images of memory, and the arguments of all commands with an image.

pub(crate) mod inspect;
pub(crate) mod pack;
pub(crate) mod unpack;
pub(crate) mod verify;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::Serialize;
use uzone_pages::ByteLen;
use uzone_report::nanoseconds;
use uzone_snapshot::{
    DiskCache, HASHES, Image, OpenOptions, RequestOptions, Root, SnapshotError, is_url,
};

use crate::exit::Failure;
use crate::output::is_same_file;

const EXITS: [u8; 8] = [0, 2, 65, 66, 69, 71, 74, 77];

#[derive(Debug, clap::Args)]
pub(crate) struct Required {
    /// Require this root hash, as `uzone pack` printed it
    #[arg(long, value_name = "HASH")]
    root: Option<Root>,
    #[command(flatten)]
    requests: Requests,
}

impl Required {
    pub(crate) fn options(&self) -> OpenOptions {
        self.root.into_iter().fold(self.requests.open(), OpenOptions::root)
    }
}

/// The requests to object storage.
#[derive(Debug, clap::Args)]
pub(crate) struct Requests {
    /// Time limit for a connection to object storage, and for silence on it; a number alone is seconds
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = time, env = "UZONE_SOURCE_TIMEOUT")]
    pub(crate) source_timeout: Duration,
    /// Time during which a request that fails is repeated
    #[arg(long, value_name = "TIME", default_value = "15s", value_parser = time, env = "UZONE_SOURCE_RETRY")]
    pub(crate) source_retry: Duration,
    /// The largest number of repetitions of a request that fails
    #[arg(long, value_name = "COUNT", default_value_t = 6, env = "UZONE_SOURCE_RETRY_COUNT")]
    source_retry_count: u32,
    /// The longest pause before a repetition; pauses are random, and grow from 50ms on
    #[arg(long, value_name = "TIME", default_value = "3s", value_parser = time, env = "UZONE_SOURCE_RETRY_PAUSE")]
    source_retry_pause: Duration,
}

impl Requests {
    pub(crate) fn options(&self) -> RequestOptions {
        RequestOptions::default()
            .timeout(self.source_timeout)
            .retry(self.source_retry)
            .retry_count(self.source_retry_count)
            .retry_pause(self.source_retry_pause)
    }

    /// Returns options that open an image with these requests.
    pub(crate) fn open(&self) -> OpenOptions {
        OpenOptions::default().requests(self.options())
    }
}

/// Reads a time, such as `5s`, `500ms` or `20`, which is in seconds.
fn time(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().map(Duration::from_secs);
    let time = seconds.or_else(|_| humantime::parse_duration(text));
    let time = time.map_err(|_| "a time is such as 5s, 500ms, or 20 for as many seconds")?;
    let (least, most) = (Duration::from_millis(1), Duration::from_hours(24));
    if (least..=most).contains(&time) { Ok(time) } else { Err("a time is 1ms to 24h".into()) }
}

/// The cache on disk for images in object storage.
#[derive(Debug, clap::Args)]
pub(crate) struct OnDisk {
    /// Keep the index and fetched frames of an image in object storage in DIR, for this and other processes
    #[arg(long, value_name = "DIR", env = "UZONE_CACHE_DIR")]
    cache_dir: Option<PathBuf>,
    /// The largest size of DIR; the images that were not opened for the longest time are removed first
    #[arg(long, value_name = "SIZE", default_value = "16G", env = "UZONE_CACHE_DISK_BYTES")]
    cache_disk_bytes: ByteLen,
}

impl OnDisk {
    pub(crate) fn open(&self) -> Result<Option<Arc<DiskCache>>, SnapshotError> {
        let open = |dir| DiskCache::open(dir, self.cache_disk_bytes.get());
        self.cache_dir.as_ref().map(open).transpose()
    }
}

/// An image that is read as a whole.
#[derive(Debug, clap::Args)]
struct Whole {
    /// The image: a file, or a URL such as s3://BUCKET/KEY#root=HASH
    image: PathBuf,
    #[command(flatten)]
    required: Required,
    #[command(flatten)]
    on_disk: OnDisk,
    #[command(flatten)]
    threads: Threads,
}

impl Whole {
    fn open(&self) -> Result<Image, SnapshotError> {
        let disk = self.on_disk.open()?.into_iter();
        Image::open(&self.image, &disk.fold(self.required.options(), OpenOptions::disk_cache))
    }
}

#[derive(Debug, clap::Args)]
pub(crate) struct Threads {
    /// Number of threads, at most 64 or the number of CPUs [default: one for each CPU]
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
}

impl Threads {
    pub(crate) fn get(&self) -> usize {
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        // More than the CPUs wait for a store; more than 64 have nothing to do.
        self.threads.map_or(cpus, |threads| threads.min(cpus.max(64)))
    }
}

/// The time and the rate of a command.
#[derive(Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub(crate) struct Work {
    wall_ns: u64,
    bytes_per_s: u64,
}

impl Work {
    pub(crate) fn of(bytes: u64, started: Instant) -> Self {
        let wall_ns = nanoseconds(started.elapsed()).max(1);
        let rate = u128::from(bytes) * 1_000_000_000 / u128::from(wall_ns);
        Self { wall_ns, bytes_per_s: u64::try_from(rate).unwrap_or(u64::MAX) }
    }

    pub(crate) fn text(&self) -> String {
        let seconds = self.wall_ns / 1_000_000;
        format!(
            "{}.{:03} s, {:.1}/s",
            seconds / 1000,
            seconds % 1000,
            ByteLen::new(self.bytes_per_s)
        )
    }
}

/// Returns the ratio of the image to its file with two decimals.
fn ratio(image_bytes: u64, file_bytes: u64) -> String {
    let file_bytes = u128::from(file_bytes.max(1));
    let hundredths = (u128::from(image_bytes) * 100 + file_bytes / 2) / file_bytes;
    format!("{}.{:02}", hundredths / 100, hundredths % 100)
}

/// Returns the note behind the length of a packed file.
fn smaller(image_bytes: u64, file_bytes: u64, holds_hashes: bool) -> String {
    if holds_hashes {
        return String::from(" of hashes");
    }
    format!(" ({} times smaller)", ratio(image_bytes, file_bytes))
}

/// Returns the path of the hashes of raw memory.
fn beside(raw: &Path) -> PathBuf {
    let mut name = raw.as_os_str().to_owned();
    name.push(HASHES);
    name.into()
}

/// Returns whether two paths are one file, or one URL.
pub(crate) fn is_same(a: &Path, b: &Path) -> bool {
    (is_url(a) && a == b) || is_same_file(a, b)
}

/// Refuses an output that would replace a file of the image, or the path of hashes of raw memory.
pub(crate) fn check_output(image: &Image, output: &Path) -> Result<(), Failure> {
    let sources = image.sources();
    let is_source = sources.iter().any(|source| is_same(Path::new(source), output));
    let beside = image.is_raw().then(|| beside(Path::new(&image.name())));
    if is_source || beside.is_some_and(|beside| is_at(&beside, output)) {
        return Err(Failure::usage(format!(
            "{} belongs to {}: name another output",
            output.display(),
            image.name()
        )));
    }
    Ok(())
}

/// Returns whether two paths name one file, which may not exist.
fn is_at(a: &Path, b: &Path) -> bool {
    let folder = |path: &Path| match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder.canonicalize(),
        _ => Path::new(".").canonicalize(),
    };
    a.file_name() == b.file_name() && matches!((folder(a), folder(b)), (Ok(a), Ok(b)) if a == b)
}

/// Returns an image and its parents.
fn chain(image: &Image) -> impl Iterator<Item = &Image> {
    std::iter::successors(Some(image), |image| image.parent())
}
