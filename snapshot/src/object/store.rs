//! Where an object is, and the threads that speak to its store: [`Place`], [`wait`].

use std::io;
use std::iter::successors;
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::http::HttpBuilder;
use object_store::path::Path;
use object_store::{
    BackoffConfig, ClientConfigKey, ClientOptions, ObjectStore, ObjectStoreScheme, RetryConfig,
};
use percent_encoding::percent_decode_str;
use tokio::runtime::{Builder, Runtime};
use url::{Position, Url};

use crate::source::RequestOptions;

/// How many threads run requests.
const THREADS: usize = 2;
/// The pause before the first repetition, if it may be that long.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
/// How long a request with its answer may take unless the environment limits it: the default of the client.
const WHOLE: Duration = Duration::from_secs(30);

/// An object.
#[derive(Clone)]
pub(crate) struct Place {
    pub(super) store: Arc<dyn ObjectStore>,
    pub(super) path: Path,
    pub(super) url: String,
    /// How long a read may take in all.
    pub(super) longest: Duration,
}

/// A request that failed.
#[derive(Debug, thiserror::Error)]
#[error("{what}; {fix}")]
struct RequestError {
    what: &'static str,
    fix: &'static str,
    #[source]
    cause: object_store::Error,
}

fn invalid(why: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, why)
}

/// A URL of an object in its parts.
#[derive(Debug, PartialEq, Eq)]
struct Parts {
    parsed: Url,
    scheme: ObjectStoreScheme,
    /// The URL up to the key.
    base: String,
    key: Path,
}

impl Parts {
    /// Reads a URL. Its key is taken exactly, without escapes: the parts that a parser of URLs or of keys would
    /// change or leave out is an error.
    fn of(url: &str) -> io::Result<Self> {
        let is_odd = |char: char| char.is_ascii_control();
        if url.contains(is_odd) || url.trim() != url {
            return Err(invalid(
                "it has a control character, or a blank at its end: write it as % and two digits",
            ));
        }
        let parsed = Url::parse(url).map_err(|_| invalid("it is not a valid URL"))?;
        if !["s3", "gs", "az", "http", "https"].contains(&parsed.scheme()) {
            return Err(invalid("it is not a URL of s3, gs, az, http or https"));
        }
        let inexact = || {
            invalid(
                "it does not name one object: a key has no empty part, none of dots alone, and no / at its end",
            )
        };
        let (scheme, key) = ObjectStoreScheme::parse(&parsed).map_err(|_| inexact())?;
        if key.as_ref().is_empty() {
            return Err(invalid("it names no object: write the key behind the bucket"));
        }
        let behind = url.split_once("://").map_or("", |(_, behind)| behind);
        let path = behind.split(['?', '#']).next().unwrap_or_default();
        let slashes = |text: &str| text.matches('/').count();
        // Without its key the path is empty, or names a bucket.
        let before = percent_decode_str(parsed.path()).decode_utf8_lossy();
        let before = before.strip_suffix(key.as_ref()).and_then(|before| before.strip_suffix('/'));
        match before.filter(|before| !before.ends_with('/')) {
            Some(before) if slashes(path) == slashes(parsed.path()) => {
                let base = format!("{}{before}/", &parsed[..Position::BeforePath]);
                Ok(Self { scheme, base, key, parsed })
            }
            _ => Err(inexact()),
        }
    }
}

/// Returns a key as it stands in a URL: readable, and with escapes where it would mean something else.
fn escaped(key: &str) -> String {
    let mut text = String::new();
    for char in key.chars() {
        match char {
            '%' | '#' | '?' | '\\' | ' ' | '\0'..='\x1f' | '\x7f' => {
                text.push_str(&format!("%{:02X}", u32::from(char)));
            }
            _ => text.push(char),
        }
    }
    text
}

impl Place {
    pub(super) fn new(store: Arc<dyn ObjectStore>, path: Path, url: String) -> Self {
        Self { store, path, url, longest: RequestOptions::default().longest() }
    }

    /// Returns the object that a URL names, in a store that the environment configures.
    pub(crate) fn of(url: &str, requests: &RequestOptions) -> io::Result<Self> {
        let Parts { parsed, scheme, key: path, .. } = Parts::of(url)?;
        if parsed.password().is_some() || parsed.query().is_some() {
            return Err(invalid(
                "a URL with a password or a query is not supported: set credentials in the environment",
            ));
        }
        let RequestOptions { timeout, retry, retry_pause, .. } = requests;
        if [timeout, retry, retry_pause].into_iter().any(Duration::is_zero) {
            return Err(invalid(
                "the timeout of requests, the time of their repetitions and the pauses are more than zero",
            ));
        }
        // It installs the provider for TLS.
        runtime()?;
        let store = store(&scheme, &parsed, requests).map_err(failed)?;
        Ok(Self { store, path, url: url.to_owned(), longest: requests.longest() })
    }

    /// Returns the object that `name` means beside this one.
    pub(super) fn neighbour(&self, name: &str) -> io::Result<Self> {
        let mut parts: Vec<&str> = self.path.as_ref().split('/').collect();
        parts.pop();
        for part in name.split('/') {
            match part {
                ".." => drop(parts.pop().ok_or_else(|| invalid("it is outside of its store"))?),
                "" | "." => return Err(invalid("it is not a path beside another object")),
                part => parts.push(part),
            }
        }
        // As it is: made of parts, it would be escaped.
        let path = Path::parse(parts.join("/"))
            .map_err(|_| invalid("it is not a path beside another object"))?;
        let base = match Parts::of(&self.url) {
            Ok(own) => own.base,
            // A store that the caller made has any name.
            Err(_) => self.url.strip_suffix(self.path.as_ref()).unwrap_or_default().to_owned(),
        };
        let url = format!("{base}{}", escaped(path.as_ref()));
        Ok(Self { store: self.store.clone(), path, url, longest: self.longest })
    }
}

/// Returns how the image at one URL names the image at another one, if that is in the same store.
pub(crate) fn relative(own: &str, other: &str) -> Option<String> {
    let (own, other) = (Parts::of(own).ok()?, Parts::of(other).ok()?);
    if (&own.scheme, &own.base) != (&other.scheme, &other.base) {
        return None;
    }
    let [own, other] =
        [&own.key, &other.key].map(|key| key.as_ref().split('/').collect::<Vec<_>>());
    let directory = &own[..own.len().saturating_sub(1)];
    let common = directory.iter().zip(&other).take_while(|(a, b)| a == b).count();
    let up = directory[common..].iter().map(|_| "..");
    Some(up.chain(other[common..].iter().copied()).collect::<Vec<_>>().join("/"))
}

fn repetitions(requests: &RequestOptions) -> RetryConfig {
    RetryConfig {
        backoff: BackoffConfig {
            // A first pause that is longer than the longest one would be a panic.
            init_backoff: FIRST_PAUSE.min(requests.retry_pause),
            max_backoff: requests.retry_pause,
            base: 2.0,
        },
        max_retries: requests.retry_count as usize,
        retry_timeout: requests.retry,
    }
}

fn store(
    scheme: &ObjectStoreScheme,
    url: &Url,
    requests: &RequestOptions,
) -> object_store::Result<Arc<dyn ObjectStore>> {
    let repetitions = repetitions(requests);
    let of = |time: Duration| format!("{} ms", time.as_millis().max(1));
    // It connects and is silent within the limit of the whole.
    let whole = requests.timeout.saturating_mul(2);
    let whole = (whole > WHOLE).then(|| (ClientConfigKey::Timeout, of(whole)));
    let parts = [ClientConfigKey::ReadTimeout, ClientConfigKey::ConnectTimeout];
    let limits = parts.map(|key| (key, of(requests.timeout))).into_iter().chain(whole);
    macro_rules! with_limits {
        ($builder:expr, $key:ident) => {{
            let builder = limits.fold($builder, |builder, (key, value)| {
                builder.with_config($key::Client(key), value)
            });
            Arc::new(builder.with_url(url.as_str()).with_retry(repetitions).build()?)
        }};
    }
    Ok(match scheme {
        ObjectStoreScheme::AmazonS3 => {
            with_limits!(AmazonS3Builder::from_env(), AmazonS3ConfigKey)
        }
        ObjectStoreScheme::GoogleCloudStorage => {
            with_limits!(GoogleCloudStorageBuilder::from_env(), GoogleConfigKey)
        }
        ObjectStoreScheme::MicrosoftAzure => {
            with_limits!(MicrosoftAzureBuilder::from_env(), AzureConfigKey)
        }
        _ => {
            let options = ClientOptions::new().with_allow_http(url.scheme() == "http");
            let options =
                limits.fold(options, |options, (key, value)| options.with_config(key, value));
            let builder = HttpBuilder::new().with_url(&url[..Position::BeforePath]);
            Arc::new(builder.with_client_options(options).with_retry(repetitions).build()?)
        }
    })
}

/// Returns the threads that run requests. They answer no fault, and end with the process.
pub(super) fn runtime() -> io::Result<&'static Runtime> {
    static RUNTIME: OnceLock<Result<Runtime, io::ErrorKind>> = OnceLock::new();
    let runtime = RUNTIME.get_or_init(|| {
        // An error is that the program has installed another one, which is as good.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let mut builder = Builder::new_multi_thread();
        builder.worker_threads(THREADS).max_blocking_threads(THREADS).thread_name("uzone-net");
        builder.enable_all().build().map_err(|error| error.kind())
    });
    runtime.as_ref().map_err(|kind| (*kind).into())
}

/// Runs a future on the threads of the network, and waits for its result.
pub(super) fn wait<T: Send + 'static>(
    future: impl Future<Output = T> + Send + 'static,
) -> io::Result<T> {
    let (sender, receiver) = sync_channel(1);
    runtime()?.spawn(async move {
        // There is room for one, and the receiver waits.
        let _ = sender.send(future.await);
    });
    receiver.recv().map_err(|_| io::Error::other("a request has panicked"))
}

/// Returns the error of a request, with the fix.
pub(super) fn failed(cause: object_store::Error) -> io::Error {
    use object_store::Error;
    let (kind, what, fix) = match &cause {
        Error::NotFound { .. } => (
            io::ErrorKind::NotFound,
            "there is no such object",
            "check the URL, and the endpoint in the environment",
        ),
        Error::PermissionDenied { .. } => (
            io::ErrorKind::PermissionDenied,
            "the store refuses that to these credentials",
            "grant it, or set others in the environment",
        ),
        Error::Unauthenticated { .. } => (
            io::ErrorKind::PermissionDenied,
            "the store does not accept the credentials",
            "set valid ones in the environment",
        ),
        Error::Precondition { .. } => (
            io::ErrorKind::InvalidData,
            "the object was replaced while it was open",
            "open it again, and give each image a key of its own",
        ),
        Error::NotSupported { .. } | Error::NotImplemented { .. } => (
            io::ErrorKind::Unsupported,
            "the store does not support that",
            "images are written to s3, gs and az",
        ),
        _ => known_by_text(&cause).unwrap_or((
            io::ErrorKind::Other,
            "the request failed, and its repetitions as well",
            "check the network, and the endpoint and the credentials in the environment",
        )),
    };
    io::Error::new(kind, RequestError { what, fix, cause })
}

/// Returns the defect and the fix where the store has no error of its own for it: known by a part of the text of
/// one of its causes.
fn known_by_text(
    cause: &object_store::Error,
) -> Option<(io::ErrorKind, &'static str, &'static str)> {
    const KNOWN: [(&str, &str, &str); 5] = [
        (
            "URL scheme is not allowed",
            "the endpoint is one of http, without encryption",
            "set AWS_ALLOW_HTTP=true (GOOGLE_ALLOW_HTTP, AZURE_ALLOW_HTTP) to use it, or name one of https",
        ),
        ("latest/api/token", NO_CREDENTIALS, CREDENTIALS),
        ("latest/meta-data", NO_CREDENTIALS, CREDENTIALS),
        (
            "Content-Length Header missing",
            "the server answers in chunks, without a Content-Length, which is not supported",
            "have it, or what is between it and this host, state the length",
        ),
        (
            "CONTENT_RANGE",
            "the server answers with a Content-Range that does not state the length of the object, such as \
             bytes 0-9/*, which is not supported",
            "have it, or what is between it and this host, state the length",
        ),
    ];
    let first: &(dyn std::error::Error + 'static) = cause;
    let texts: Vec<String> =
        successors(Some(first), |error| error.source()).map(ToString::to_string).collect();
    let known = |part: &str| texts.iter().any(|text| text.contains(part));
    let (_, what, fix) = KNOWN.into_iter().find(|(part, ..)| known(part))?;
    Some((io::ErrorKind::Other, what, fix))
}

const NO_CREDENTIALS: &str =
    "there are no credentials in the environment, and none of this machine";
const CREDENTIALS: &str = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (and AWS_SESSION_TOKEN): files such as \
                           ~/.aws/credentials are not read";

#[cfg(test)]
mod tests {
    use super::*;

    fn place(path: &str) -> Place {
        let store = Arc::new(object_store::memory::InMemory::new());
        Place::new(store, Path::from(path), format!("s3://bucket/{path}"))
    }

    #[test]
    fn a_neighbour_is_beside_an_object_and_in_its_store() {
        let own = place("a/b/child.img");
        assert_eq!(own.neighbour("parent.img").unwrap().url, "s3://bucket/a/b/parent.img");
        assert_eq!(own.neighbour("../c/parent.img").unwrap().path.as_ref(), "a/c/parent.img");
        assert!(own.neighbour("../../../parent.img").is_err());
        assert!(own.neighbour("/etc/passwd").is_err());
        assert!(own.neighbour("http://host/parent.img").is_err());
    }

    #[test]
    fn an_image_names_another_one_of_its_store_by_the_way_there() {
        let from = |own, other| relative(own, other);
        assert_eq!(from("s3://b/x/c", "s3://b/x/p").as_deref(), Some("p"));
        assert_eq!(from("s3://b/x/y/c", "s3://b/z/p").as_deref(), Some("../../z/p"));
        assert_eq!(from("s3://b/c", "s3://other/p"), None);
        assert_eq!(from("s3://b/c", "gs://b/p"), None);
        assert_eq!(from("s3://b/c", "p"), None);
        // A key is the same with escapes and without.
        assert_eq!(from("s3://b/%C3%BC/c", "s3://b/ü/p").as_deref(), Some("p"));
        assert_eq!(from("s3://b/c", "s3://b/p%25q").as_deref(), Some("p%q"));
        assert_eq!(from("https://h/b/c", "https://h/b/a b").as_deref(), Some("a b"));
    }

    #[test]
    fn the_key_of_a_url_is_exact_or_an_error() {
        for (url, base, key) in [
            ("s3://b/ü/x", "s3://b/", "ü/x"),
            ("s3://b/%C3%BC/x", "s3://b/", "ü/x"),
            ("s3://b/p%q", "s3://b/", "p%q"),
            ("s3://b/p%25q", "s3://b/", "p%q"),
            ("s3://b/p%2541q", "s3://b/", "p%41q"),
            ("s3://b/a b", "s3://b/", "a b"),
            ("s3://b/a%2Fb", "s3://b/", "a/b"),
            ("https://s3.x.amazonaws.com/b/k", "https://s3.x.amazonaws.com/b/", "k"),
        ] {
            let parts = Parts::of(url).unwrap();
            assert_eq!((&*parts.base, parts.key.as_ref()), (base, key), "{url}");
            let again = Parts::of(&format!("{base}{}", escaped(key))).unwrap();
            assert_eq!(again.key, parts.key, "{url}");
        }
        for url in [
            "s3://b/out/",
            "s3://b/a//b",
            "s3://b//a",
            "s3://b/a/../c",
            "s3://b/a/./c",
            "s3://b/a/%2e%2e/c",
            "s3://b/a ",
            "s3://b/a\tb",
            "http://h/a\\b",
            "https://s3.x.amazonaws.com/b//k",
        ] {
            assert_eq!(
                Parts::of(url).err().map(|error| error.kind()),
                Some(io::ErrorKind::InvalidInput),
                "{url}"
            );
        }
    }

    #[test]
    fn a_url_that_names_no_object_is_refused_with_the_reason() {
        for (url, why) in [
            ("s3://bucket", "names no object"),
            ("ftp://host/key", "not a URL of"),
            ("http://user:secret@host/key", "password"),
            ("https://host/key?token=1", "query"),
        ] {
            let error = Place::of(url, &RequestOptions::default()).err().unwrap();
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
            assert!(error.to_string().contains(why), "{url}: {error}");
        }
    }
}
