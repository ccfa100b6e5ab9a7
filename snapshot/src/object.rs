//! An object in object storage as a source: [`ObjectSource`].
//!
//! A read that waits for the network takes one request for exactly its bytes; if that takes longer than 95
//! of 100 took before, a second one is sent, and the first answer counts. For ranges that are announced, larger
//! requests run ahead ([`requests`]); their bytes are read without waiting. The first request brings the last bytes, which an image is opened by, and with them how long
//! the object is.
//!
//! Threads: requests run on two threads of their own, once a process; a read blocks its caller until then,
//! so it belongs on a thread that may wait. Limits: 64 requests at once for reads that wait, 16 ahead, and
//! 64 MiB of bytes that were read ahead, for each source.

mod requests;
mod store;
mod upload;

use std::fmt;
use std::io;
use std::iter::successors;
use std::ops::Range;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use object_store::client::HttpError;
use object_store::path::Path;
use object_store::{GetOptions, GetRange, GetResult, ObjectMeta, ObjectStore, ObjectStoreExt};
use tokio::sync::Semaphore;
use tokio::time::{sleep, timeout};
use uzone_os::lock;

use crate::source::{RequestOptions, Source};
use requests::{Kept, Requests};
use store::{failed, runtime, wait};

pub(crate) use store::{Place, relative};
pub(crate) use upload::Upload;

/// How many requests run at once: for reads that wait, the second ones among these, and ahead.
const WAITING: usize = 64;
const HEDGES: usize = 4;
const AHEAD: usize = 16;
/// How long a read waits for a larger request that runs ahead before it sends its own.
const PATIENCE: Duration = Duration::from_millis(200);
/// How often a request is sent whose answer breaks off or is too short, beside the repetitions of the store.
const ATTEMPTS: u32 = 3;
/// The longest read that is sent twice if it is slow: a larger one is slow for its length.
const LONGEST_HEDGED: u64 = 1 << 20;

/// How many of the last bytes are requested at first: fewer than another request costs.
const TAIL: u64 = 32 << 10;

/// An object of S3, Google Cloud Storage, Azure Blob Storage or a web server as a source.
pub struct ObjectSource {
    shared: Arc<Shared>,
}

struct Shared {
    place: Place,
    len: u64,
    /// The entity tag that each answer must have: an object that is replaced is not read in parts of both.
    version: Option<String>,
    waiting: Semaphore,
    hedges: Semaphore,
    running_ahead: Semaphore,
    /// Of reads that wait, and of the larger requests that run ahead.
    latencies: Mutex<Latencies>,
    latencies_ahead: Mutex<Latencies>,
    ahead: Mutex<Requests>,
    arrived: Condvar,
    is_over: AtomicBool,
}

impl ObjectSource {
    /// Opens the object that a URL names: `s3://BUCKET/KEY`, `gs://BUCKET/KEY`, `az://CONTAINER/KEY`,
    /// `http://HOST/PATH` or `https://HOST/PATH`. Credentials, regions and endpoints come from the
    /// environment, as the `from_env` of the builders of [`object_store`] reads them.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] if it is not such a URL or a time is zero, [`io::ErrorKind::NotFound`] or
    /// [`io::ErrorKind::PermissionDenied`] by the answer of the store, or another one.
    pub fn open(url: &str, requests: &RequestOptions) -> io::Result<Self> {
        Self::at(Place::of(url, requests)?)
    }

    /// Opens the object at `path` of a store that the caller configures: `store` makes it, after this process
    /// has a provider for TLS. Errors call the object by `name`. How requests are repeated is what the store
    /// was made with; a read ends after the longest time of the default [`RequestOptions`].
    ///
    /// # Errors
    /// As for [`ObjectSource::open`], and those of `store`.
    pub fn from_store(
        store: impl FnOnce() -> object_store::Result<Arc<dyn ObjectStore>>,
        path: Path,
        name: impl Into<String>,
    ) -> io::Result<Self> {
        runtime()?;
        Self::at(Place::new(store().map_err(failed)?, path, name.into()))
    }

    fn at(place: Place) -> io::Result<Self> {
        let asked = place.clone();
        let (meta, tail) = wait(async move { repeated(|| describe(&asked)).await })??;
        // A weak tag never matches.
        let version = meta.e_tag.filter(|tag| !tag.starts_with("W/"));
        let mut ahead = Requests::new(meta.size);
        ahead.keep_tail(tail);
        Ok(Self {
            shared: Arc::new(Shared {
                place,
                len: meta.size,
                version,
                waiting: Semaphore::new(WAITING),
                hedges: Semaphore::new(HEDGES),
                running_ahead: Semaphore::new(AHEAD),
                latencies: Mutex::default(),
                latencies_ahead: Mutex::default(),
                ahead: Mutex::new(ahead),
                arrived: Condvar::new(),
                is_over: AtomicBool::new(false),
            }),
        })
    }

    fn range(&self, offset: u64, out: &[u8]) -> io::Result<Range<u64>> {
        let end = offset.checked_add(out.len() as u64).filter(|end| *end <= self.shared.len);
        Ok(offset..end.ok_or(io::ErrorKind::UnexpectedEof)?)
    }
}

impl Source for ObjectSource {
    fn name(&self) -> String {
        self.shared.place.url.clone()
    }

    fn byte_len(&self) -> u64 {
        self.shared.len
    }

    fn identity(&self) -> Option<String> {
        let Shared { place, len, version, .. } = &*self.shared;
        version.as_ref().map(|version| format!("{} of {len} bytes, version {version}", place.url))
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let range = self.range(offset, out)?;
        if range.is_empty() || self.shared.take(&range, out) {
            return Ok(());
        }
        let shared = self.shared.clone();
        out.copy_from_slice(&wait(shared.demand(range))??);
        Ok(())
    }

    fn read_ready(&self, offset: u64, out: &mut [u8]) -> io::Result<bool> {
        let range = self.range(offset, out)?;
        Ok(self.shared.ahead().copy(&range, out) == Kept::All)
    }

    fn read_again(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let range = self.range(offset, out)?;
        self.shared.ahead().forget(&range);
        let shared = self.shared.clone();
        out.copy_from_slice(&wait(shared.demand(range))??);
        Ok(())
    }

    fn will_need(&self, ranges: &[Range<u64>]) {
        let wanted = self.shared.ahead().announce(ranges);
        // Without its threads a read fails too, and names the cause.
        let Ok(runtime) = runtime() else { return };
        for chunk in wanted {
            runtime.spawn(self.shared.clone().fetch_ahead(chunk));
        }
    }

    fn neighbour(&self, name: &str) -> io::Result<Box<dyn Source>> {
        Ok(Box::new(Self::at(self.shared.place.neighbour(name)?)?))
    }
}

impl Drop for ObjectSource {
    fn drop(&mut self) {
        // Relaxed: requests that do not see it yet end by themselves.
        self.shared.is_over.store(true, Ordering::Relaxed);
    }
}

impl fmt::Debug for ObjectSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ObjectSource").field("url", &self.shared.place.url).finish_non_exhaustive()
    }
}

impl Shared {
    fn ahead(&self) -> MutexGuard<'_, Requests> {
        // A thread that panicked left whole entries.
        lock(&self.ahead)
    }

    /// Copies bytes that were requested ahead, after waiting for them. Returns whether it did.
    fn take(&self, range: &Range<u64>, out: &mut [u8]) -> bool {
        let started = Instant::now();
        let mut ahead = self.ahead();
        loop {
            match ahead.copy(range, out) {
                Kept::All => return true,
                Kept::No => {
                    ahead.note_read(range);
                    return false;
                }
                Kept::Coming => {}
            }
            let Some(left) = PATIENCE.checked_sub(started.elapsed()) else {
                ahead.give_up(range);
                return false;
            };
            let woken = self.arrived.wait_timeout(ahead, left);
            ahead = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Requests a range that was announced.
    async fn fetch_ahead(self: Arc<Self>, range: Range<u64>) {
        let bytes = match self.running_ahead.acquire().await {
            Ok(_permit) if !self.is_over.load(Ordering::Relaxed) => {
                self.hedged(&range, &self.latencies_ahead).await.ok()
            }
            _ => None,
        };
        // Without the bytes, a reader that wants them requests them itself, and gets the error.
        self.ahead().arrive(range.start, bytes);
        self.arrived.notify_all();
    }

    /// Requests a range that a thread waits for.
    async fn demand(self: Arc<Self>, range: Range<u64>) -> io::Result<Vec<u8>> {
        let longest = self.place.longest;
        let late = |_| {
            let text = format!("no answer within {longest:?}; check the network");
            io::Error::new(io::ErrorKind::TimedOut, text)
        };
        let now = async {
            let _permit = self.waiting.acquire().await.map_err(io::Error::other)?;
            match range.end - range.start > LONGEST_HEDGED {
                true => self.get(&range).await,
                false => self.hedged(&range, &self.latencies).await,
            }
        };
        timeout(longest, now).await.map_err(late)?
    }

    /// Requests a range, and once more if that takes longer than such requests do.
    async fn hedged(&self, range: &Range<u64>, like: &Mutex<Latencies>) -> io::Result<Vec<u8>> {
        let latencies = || lock(like);
        let started = Instant::now();
        let patience = latencies().most();
        let mut first = pin!(self.get(range));
        let early = match patience {
            Some(patience) => timeout(patience, &mut first).await.ok(),
            None => Some(first.as_mut().await),
        };
        let bytes = match (early, self.hedges.try_acquire()) {
            (Some(answer), _) => answer?,
            (None, Err(_)) => first.await?,
            (None, Ok(_permit)) => {
                let mut second = pin!(self.get(range));
                tokio::select! {
                    answer = &mut first => match answer {
                        Ok(bytes) => bytes,
                        Err(error) => second.await.map_err(|_| error)?,
                    },
                    answer = &mut second => match answer {
                        Ok(bytes) => bytes,
                        Err(error) => first.await.map_err(|_| error)?,
                    },
                }
            }
        };
        latencies().add(started.elapsed());
        Ok(bytes)
    }

    /// Requests a range, again if the answer breaks off or is too short. The store repeats a request that fails earlier.
    async fn get(&self, range: &Range<u64>) -> io::Result<Vec<u8>> {
        repeated(|| self.get_once(range)).await
    }

    async fn get_once(&self, range: &Range<u64>) -> io::Result<Answer<Vec<u8>>> {
        let options = GetOptions::new()
            .with_range(Some(GetRange::Bounded(range.clone())))
            .with_if_match(self.version.clone());
        let answer = self.place.store.get_opts(&self.place.path, options).await.map_err(failed)?;
        // A store may ignore the condition.
        if self.version.is_some() && answer.meta.e_tag != self.version {
            return Err(failed(object_store::Error::Precondition {
                path: self.place.path.to_string(),
                source: "the answer has another ETag".into(),
            }));
        }
        Ok(bytes_of(answer, range.end - range.start).await)
    }
}

/// An answer, or the reason why it is not whole.
type Answer<T> = Result<T, io::Error>;

/// Sends a request again if its answer is not whole. The error of a request without an answer is final.
async fn repeated<T, F: Future<Output = io::Result<Answer<T>>>>(
    request: impl Fn() -> F,
) -> io::Result<T> {
    let mut attempt = 1;
    loop {
        match request().await? {
            Err(_) if attempt < ATTEMPTS => sleep(Duration::from_millis(50 << attempt)).await,
            answer => return answer,
        }
        attempt += 1;
    }
}

/// Returns the bytes of an answer, which should be so many.
async fn bytes_of(answer: GetResult, len: u64) -> Answer<Vec<u8>> {
    match answer.bytes().await {
        Ok(bytes) if bytes.len() as u64 == len => Ok(bytes.into()),
        Ok(_) => Err(io::Error::new(
            io::ErrorKind::UnexpectedEof,
            "the store sends fewer bytes than it names; check what is between it and this host",
        )),
        Err(error) => Err(failed(error)),
    }
}

/// Requests the last bytes of an object, and its metadata. There are no bytes from a store that answers no
/// such request (Azure), and of an empty object.
async fn describe(place: &Place) -> io::Result<Answer<(ObjectMeta, Vec<u8>)>> {
    let options = GetOptions::new().with_range(Some(GetRange::Suffix(TAIL)));
    let answer = match place.store.get_opts(&place.path, options).await {
        Ok(answer) => answer,
        Err(error) if may_refuse_tail(&error) => {
            let meta = place.store.head(&place.path).await.map_err(failed)?;
            return Ok(Ok((meta, Vec::new())));
        }
        Err(error) => return Err(failed(error)),
    };
    let (meta, len) = (answer.meta.clone(), answer.range.end - answer.range.start);
    Ok(bytes_of(answer, len).await.map(|bytes| (meta, bytes)))
}

/// Returns whether the store may have refused that the last bytes were requested, and nothing else. Without an
/// answer it did not.
fn may_refuse_tail(error: &object_store::Error) -> bool {
    use object_store::Error;
    match error {
        Error::NotSupported { .. } | Error::NotImplemented { .. } => true,
        Error::Generic { source, .. } => {
            let first: &(dyn std::error::Error + 'static) = &**source;
            successors(Some(first), |error| error.source())
                .all(|error| error.downcast_ref::<HttpError>().is_none())
        }
        _ => false,
    }
}

/// How long the latest requests took.
#[derive(Debug, Default)]
struct Latencies {
    latest: Vec<Duration>,
    next: usize,
}

impl Latencies {
    /// How many are kept, and without how many nothing is known.
    const KEPT: usize = 64;
    const ENOUGH: usize = 16;
    /// A second request costs as much as this.
    const LEAST: Duration = Duration::from_millis(1);

    fn add(&mut self, latency: Duration) {
        if self.latest.len() < Self::KEPT {
            self.latest.push(latency);
        } else {
            self.latest[self.next] = latency;
            self.next = (self.next + 1) % Self::KEPT;
        }
    }

    /// Returns the longest time of the fastest 95 of 100 requests.
    fn most(&self) -> Option<Duration> {
        if self.latest.len() < Self::ENOUGH {
            return None;
        }
        let mut sorted = self.latest.clone();
        sorted.sort_unstable();
        Some(sorted[(sorted.len() * 95).div_ceil(100) - 1].max(Self::LEAST))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn most_requests_are_those_below_the_95th_of_100_and_none_are_known_before_16() {
        let mut latencies = Latencies::default();
        for ms in 1..=15 {
            latencies.add(Duration::from_millis(ms));
        }
        assert_eq!(latencies.most(), None);
        latencies.add(Duration::from_millis(500));
        assert_eq!(latencies.most(), Some(Duration::from_millis(500)));
        for ms in 1..=64 {
            latencies.add(Duration::from_millis(ms));
        }
        assert_eq!(latencies.most(), Some(Duration::from_millis(61)));
        for _ in 0..64 {
            latencies.add(Duration::from_micros(50));
        }
        assert_eq!(latencies.most(), Some(Latencies::LEAST));
    }
}
