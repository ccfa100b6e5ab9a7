//! Helpers of the tests of images.

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use fastrand::Rng;
use uzone_fault::{Engine, LazyMapping, LazyOptions};
use uzone_os::sigbus;
use uzone_pages::ByteLen;
use uzone_snapshot::{Image, SnapshotBacking};
#[cfg(feature = "object-storage")]
use {
    crate::s3::{BUCKET, Server},
    object_store::aws::AmazonS3Builder,
    object_store::{BackoffConfig, ClientOptions, RetryConfig},
    std::time::Duration,
    uzone_snapshot::ObjectSource,
};

/// A directory of a test, removed with its files.
pub(crate) struct Directory(pub(crate) PathBuf);

impl Directory {
    pub(crate) fn new(name: &str) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let (process, number) = (std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(format!("uzone-{name}-{process}-{number}"));
        std::fs::create_dir(&path).unwrap();
        Self(path)
    }

    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// Returns the names of the files that are here.
    pub(crate) fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(&self.0).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Prints the attempt if the test fails in its scope.
pub(crate) struct Named(pub(crate) String);

impl Drop for Named {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", self.0);
        }
    }
}

/// Returns all bytes of an image.
pub(crate) fn all(image: &Image) -> Vec<u8> {
    let mut bytes = vec![0xaa; usize::try_from(image.byte_len()).unwrap()];
    image.read_at(0, &mut bytes).unwrap();
    bytes
}

/// Returns so many pages and some bytes more: some pages are zero, some compress, and some do not.
pub(crate) fn memory(pages: usize, extra: usize, seed: u64) -> Vec<u8> {
    let mut random = Rng::with_seed(seed);
    let mut bytes = vec![0; pages * 4096 + extra];
    for (number, page) in bytes.chunks_mut(4096).enumerate() {
        match number % 7 {
            // Two pages, so that some frames are zero as a whole.
            2 | 3 => {}
            0 | 4 => random.fill(page),
            _ => page.iter_mut().enumerate().for_each(|(at, byte)| *byte = (at % 97) as u8 + 1),
        }
    }
    bytes
}

/// Maps an image, or prints that `what` is skipped where the host has no userfaultfd.
pub(crate) fn map(what: &str, image: Arc<Image>, pages: u64) -> Option<LazyMapping> {
    sigbus::install().unwrap();
    let backing = Arc::new(SnapshotBacking::new(image));
    let mapped = Engine::new(NonZeroUsize::MIN).and_then(|engine| {
        engine.map(ByteLen::new(pages * 4096), backing, &LazyOptions::default())
    });
    match mapped {
        Ok(mapping) => Some(mapping),
        Err(error) => {
            eprintln!("skipped: {what}: {error}");
            None
        }
    }
}

#[cfg(feature = "object-storage")]
impl Server {
    /// Opens an object. A request is repeated so often, also if nothing comes of it for `timeout`.
    pub(crate) fn source(
        &self,
        key: &str,
        timeout: Duration,
        max_retries: usize,
    ) -> std::io::Result<ObjectSource> {
        let builder = self.environment().into_iter().fold(
            AmazonS3Builder::new().with_bucket_name(BUCKET),
            |builder, (name, value)| {
                builder.with_config(name.to_ascii_lowercase().parse().unwrap(), value)
            },
        );
        let options = ClientOptions::new().with_allow_http(true).with_read_timeout(timeout);
        let (init_backoff, max_backoff) = (Duration::from_millis(1), Duration::from_millis(10));
        let backoff = BackoffConfig { init_backoff, max_backoff, base: 2.0 };
        let retry = RetryConfig { backoff, max_retries, retry_timeout: Duration::from_secs(20) };
        let builder = builder.with_client_options(options).with_retry(retry);
        let url = format!("s3://{BUCKET}/{key}");
        ObjectSource::from_store(|| Ok(Arc::new(builder.build()?)), key.into(), url)
    }
}
