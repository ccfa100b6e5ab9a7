//! A server of S3 on this machine, with a network between that fails as it is asked to.
//!
//! The server is that of `s3s-fs`: it checks signatures, and keeps objects in a directory of its own. What is
//! between sees each request before it, and each answer after it.
#![allow(dead_code, reason = "each test file is a program of its own and takes what it needs")]

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use http_body_util::BodyExt;
use hyper::body::{Body, Bytes, Frame, Incoming, SizeHint};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use s3s::access::{S3Access, S3AccessContext};
use s3s::dto::{GetObjectInput, Range};
use s3s::service::{S3Service, S3ServiceBuilder};
use s3s::{S3Request, S3Result};
use tokio::net::TcpListener;
use tokio::runtime::Runtime;

pub(crate) const BUCKET: &str = "images";
const KEY_ID: &str = "TESTKEY";
const SECRET: &str = "a secret of the test";

/// The fate of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Act {
    #[default]
    Pass,
    /// It has this answer.
    Fail(u16),
    /// Its answer breaks off in the middle of the body.
    Cut,
    /// Its answer has half of the body, and is otherwise right.
    Short,
    /// Its answer has a wrong bit.
    Flip,
    /// Its answer comes that much later.
    Late(Duration),
    /// Its answer comes in chunks, and does not state how long it is.
    Chunked,
    /// Its answer is a part, and does not state of how much.
    NoTotal,
    /// It has no answer.
    Hang,
}

/// A request, as the network sees it.
pub(crate) struct Seen<'a> {
    pub(crate) method: &'a Method,
    pub(crate) path: &'a str,
    pub(crate) query: &'a str,
    pub(crate) range: Option<(u64, u64)>,
    /// How many came before.
    pub(crate) number: u64,
}

type Decide = Box<dyn Fn(&Seen<'_>) -> Act + Send + Sync>;

struct Network {
    service: S3Service,
    decide: Mutex<Decide>,
    requests: AtomicU64,
    bytes: AtomicU64,
    under_way: AtomicU64,
    most_under_way: AtomicU64,
}

pub(crate) struct Server {
    // Dropped first: it ends the connections.
    _runtime: Runtime,
    network: Arc<Network>,
    address: SocketAddr,
    directory: PathBuf,
}

impl Server {
    pub(crate) fn start(test: &str) -> Self {
        let directory =
            std::env::temp_dir().join(format!("uzone-s3-{test}-{}", std::process::id()));
        std::fs::create_dir_all(directory.join(BUCKET)).expect("a directory of our own");
        let files = s3s_fs::FileSystem::new(&directory).expect("a directory of objects");
        let mut builder = S3ServiceBuilder::new(files);
        builder.set_auth(s3s::auth::SimpleAuth::from_single(KEY_ID, SECRET));
        builder.set_access(LastBytes { directory: directory.clone() });
        let network = Arc::new(Network {
            service: builder.build(),
            decide: Mutex::new(Box::new(|_| Act::Pass)),
            requests: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            under_way: AtomicU64::new(0),
            most_under_way: AtomicU64::new(0),
        });
        let runtime = Runtime::new().expect("a runtime");
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).expect("a port");
        let address = listener.local_addr().expect("its number");
        runtime.spawn(accept(listener, network.clone()));
        Self { _runtime: runtime, network, address, directory }
    }

    /// Has each request decided upon by `decide` from now on, and counts requests and bytes anew.
    pub(crate) fn decide(&self, decide: impl Fn(&Seen<'_>) -> Act + Send + Sync + 'static) {
        *self.network.decide.lock().expect("no panic") = Box::new(decide);
        self.network.requests.store(0, Ordering::SeqCst);
        self.network.bytes.store(0, Ordering::SeqCst);
        self.network.most_under_way.store(0, Ordering::SeqCst);
    }

    pub(crate) fn requests(&self) -> u64 {
        self.network.requests.load(Ordering::SeqCst)
    }

    /// Returns how many bytes the answers had.
    pub(crate) fn bytes(&self) -> u64 {
        self.network.bytes.load(Ordering::SeqCst)
    }

    pub(crate) fn most_under_way(&self) -> u64 {
        self.network.most_under_way.load(Ordering::SeqCst)
    }

    /// Returns where a client that knows nothing of S3 finds an object.
    pub(crate) fn web_address(&self, key: &str) -> String {
        format!("http://{}/{BUCKET}/{key}", self.address)
    }

    /// Returns the environment in which a program finds this server.
    pub(crate) fn environment(&self) -> [(&'static str, String); 5] {
        [
            ("AWS_ACCESS_KEY_ID", KEY_ID.to_owned()),
            ("AWS_SECRET_ACCESS_KEY", SECRET.to_owned()),
            ("AWS_ENDPOINT", format!("http://{}", self.address)),
            ("AWS_REGION", "us-east-1".to_owned()),
            ("AWS_ALLOW_HTTP", "true".to_owned()),
        ]
    }

    /// Puts an object there.
    pub(crate) fn put(&self, key: &str, bytes: &[u8]) {
        let path = self.object(key);
        std::fs::create_dir_all(path.parent().expect("a directory")).expect("a directory");
        std::fs::write(path, bytes).expect("an object");
    }

    /// Returns the file that an object is in.
    pub(crate) fn object(&self, key: &str) -> PathBuf {
        self.directory.join(BUCKET).join(key)
    }

    /// Returns the objects of the bucket, and the unfinished uploads beside it.
    pub(crate) fn files(&self) -> Vec<String> {
        let mut names = Vec::new();
        let mut directories = vec![self.directory.clone()];
        while let Some(directory) = directories.pop() {
            for entry in std::fs::read_dir(directory).expect("a directory") {
                let entry = entry.expect("an entry");
                if entry.file_type().expect("its type").is_dir() {
                    directories.push(entry.path());
                } else {
                    let path = entry.path();
                    let name = path.strip_prefix(&self.directory).expect("inside");
                    let name = name.display().to_string();
                    // The server itself leaves this of a part whose connection was closed.
                    if !name.ends_with(".internal.part") {
                        names.push(name);
                    }
                }
            }
        }
        names.sort();
        names
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

/// Lets all read and write, as a web server does. Has more last bytes than an object has be all of it, as S3
/// does: `s3s-fs` fails.
struct LastBytes {
    directory: PathBuf,
}

impl S3Access for LastBytes {
    fn check<'a, 'b, 'c, 'd>(
        &'a self,
        _: &'b mut S3AccessContext<'c>,
    ) -> Pin<Box<dyn Future<Output = S3Result<()>> + Send + 'd>>
    where
        'a: 'd,
        'b: 'd,
        'c: 'd,
        Self: 'd,
    {
        Box::pin(std::future::ready(Ok(())))
    }

    fn get_object<'a, 'b, 'c>(
        &'a self,
        request: &'b mut S3Request<GetObjectInput>,
    ) -> Pin<Box<dyn Future<Output = S3Result<()>> + Send + 'c>>
    where
        'a: 'c,
        'b: 'c,
        Self: 'c,
    {
        let GetObjectInput { bucket, key, range, .. } = &mut request.input;
        let object = std::fs::metadata(self.directory.join(bucket).join(key));
        if let (Some(Range::Suffix { length }), Ok(object)) = (range, object) {
            *length = object.len().min(*length);
        }
        Box::pin(std::future::ready(Ok(())))
    }
}

/// The body of an answer.
#[derive(Default)]
struct Answer {
    bytes: Option<Bytes>,
    breaks_off: bool,
    is_chunked: bool,
}

impl Body for Answer {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        Poll::Ready(match self.bytes.take() {
            Some(bytes) => Some(Ok(Frame::data(bytes))),
            None if self.breaks_off => Some(Err(io::ErrorKind::ConnectionReset.into())),
            None => None,
        })
    }

    fn size_hint(&self) -> SizeHint {
        match &self.bytes {
            _ if self.breaks_off || self.is_chunked => SizeHint::default(),
            bytes => SizeHint::with_exact(bytes.as_ref().map_or(0, |bytes| bytes.len() as u64)),
        }
    }
}

async fn accept(listener: TcpListener, network: Arc<Network>) {
    while let Ok((connection, _)) = listener.accept().await {
        let _ = connection.set_nodelay(true);
        let network = network.clone();
        tokio::spawn(async move {
            let answer = service_fn(move |request| {
                let network = network.clone();
                async move { Ok::<_, Infallible>(network.answer(request).await) }
            });
            let server = hyper::server::conn::http1::Builder::new();
            // A connection that broke is one that was meant to.
            let _ = server.serve_connection(TokioIo::new(connection), answer).await;
        });
    }
}

impl Network {
    async fn answer(&self, request: Request<Incoming>) -> Response<Answer> {
        let under_way = self.under_way.fetch_add(1, Ordering::SeqCst) + 1;
        self.most_under_way.fetch_max(under_way, Ordering::SeqCst);
        let act = self.act(&request);
        match act {
            Act::Late(time) => tokio::time::sleep(time).await,
            Act::Hang => std::future::pending().await,
            _ => {}
        }
        let response = match act {
            Act::Fail(status) => {
                // A connection that is closed while the client writes is an error of the network.
                let _ = request.into_body().collect().await;
                let mut response = Response::new(Answer::default());
                *response.status_mut() = StatusCode::from_u16(status).expect("a status");
                response
            }
            _ => self.pass(request, act).await,
        };
        self.under_way.fetch_sub(1, Ordering::SeqCst);
        response
    }

    fn act(&self, request: &Request<Incoming>) -> Act {
        let number = self.requests.fetch_add(1, Ordering::SeqCst);
        let range = request.headers().get("range").and_then(|range| {
            let (start, end) = range.to_str().ok()?.strip_prefix("bytes=")?.split_once('-')?;
            Some((start.parse().ok()?, end.parse::<u64>().ok()? + 1))
        });
        let seen = Seen {
            method: request.method(),
            path: request.uri().path(),
            query: request.uri().query().unwrap_or_default(),
            range,
            number,
        };
        self.decide.lock().expect("no panic")(&seen)
    }

    async fn pass(&self, request: Request<Incoming>, act: Act) -> Response<Answer> {
        let response = self.service.call(request.map(s3s::Body::from)).await.expect("an answer");
        let (mut parts, body) = response.into_parts();
        let mut bytes = body.collect().await.expect("a whole body").to_bytes().to_vec();
        let (len, mut breaks_off) = (bytes.len(), false);
        self.bytes.fetch_add(len as u64, Ordering::SeqCst);
        match act {
            Act::Cut if len > 1 => {
                parts.headers.insert("content-length", len.into());
                bytes.truncate(len / 2);
                breaks_off = true;
            }
            Act::Short if len > 1 => {
                bytes.truncate(len / 2);
                parts.headers.insert("content-length", bytes.len().into());
            }
            Act::Flip if len > 0 => bytes[len / 2] ^= 4,
            Act::Chunked => drop(parts.headers.remove("content-length")),
            Act::NoTotal => {
                let range = format!("bytes 0-{}/*", len.saturating_sub(1));
                parts.headers.insert("content-range", range.parse().expect("a header"));
            }
            _ => {}
        }
        let is_chunked = act == Act::Chunked;
        Response::from_parts(parts, Answer { bytes: Some(bytes.into()), breaks_off, is_chunked })
    }
}
