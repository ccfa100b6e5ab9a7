//! A store of one object on this host, at a known distance: [`Store`].
//!
//! It answers the requests of S3 that a reader sends, HEAD and GET with a range, and compares no signatures. Each answer
//! starts after a latency, and the bytes of all connections share a link of a given rate. [`Client`] asks and does
//! nothing else: its rate is the limit.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use object_store::ClientOptions;
use object_store::aws::AmazonS3Builder;
use uzone_pages::ByteLen;
use uzone_snapshot::{FrameCache, Image, ObjectSource, OpenOptions};

use super::frames::share;
use uzone_harness::{Result, timed};

/// The time before each answer starts.
const LATENCY: Duration = Duration::from_millis(5);
/// The rate of the link in bytes a second: 2 Gbit/s.
const RATE: u64 = 250_000_000;
/// The length of one write.
const PIECE: usize = 64 << 10;

const BUCKET: &str = "bench";
const KEY: &str = "image";

/// Returns the distance of the store in words.
pub(crate) fn distance() -> String {
    let (latency, rate) = (LATENCY.as_millis(), RATE / 1_000_000);
    format!("a store on this host behind {latency} ms and a link of {rate} MB/s")
}

/// The store. Dropping it ends it.
pub(crate) struct Store {
    address: SocketAddr,
    is_over: Arc<AtomicBool>,
    object: Arc<Object>,
}

struct Object {
    file: File,
    len: u64,
    /// The time at which the link has sent all bytes so far.
    free_at: Mutex<Instant>,
    sent: AtomicU64,
}

impl Store {
    /// Starts a store of the bytes of a file.
    pub(crate) fn start(file: &File) -> io::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let (address, is_over) = (listener.local_addr()?, Arc::new(AtomicBool::new(false)));
        let file = file.try_clone()?;
        let len = file.metadata()?.len();
        let object = Arc::new(Object {
            file,
            len,
            free_at: Mutex::new(Instant::now()),
            sent: AtomicU64::new(0),
        });
        let (ends, served) = (is_over.clone(), object.clone());
        thread::Builder::new().name("bench-store".into()).spawn(move || {
            for connection in listener.incoming().map_while(Result::ok) {
                // Relaxed: the connection that ends this comes after the store.
                if ends.load(Ordering::Relaxed) {
                    return;
                }
                let object = served.clone();
                // A client whose connection is not served tries another one.
                let _ = thread::Builder::new().spawn(move || object.serve(&connection));
            }
        })?;
        Ok(Self { address, is_over, object })
    }

    /// Returns the number of bytes of the object that were sent so far.
    pub(crate) fn sent(&self) -> u64 {
        self.object.sent.load(Ordering::Relaxed) // a statistic
    }

    /// Opens the object as an image, with a frame cache of `room`.
    pub(crate) fn open_image(&self, room: ByteLen) -> Result<Image> {
        let options = OpenOptions::default().cache(FrameCache::new(room.get()));
        Ok(Image::from_source(Box::new(self.open()?), &options)?)
    }

    fn open(&self) -> io::Result<ObjectSource> {
        let store = || {
            let builder = AmazonS3Builder::new()
                .with_endpoint(format!("http://{}", self.address))
                .with_client_options(ClientOptions::new().with_allow_http(true))
                .with_bucket_name(BUCKET)
                .with_region("us-east-1")
                .with_access_key_id("bench")
                .with_secret_access_key("bench");
            Ok(Arc::new(builder.build()?) as _)
        };
        ObjectSource::from_store(store, KEY.into(), format!("s3://{BUCKET}/{KEY}"))
    }

    /// Times asking for some ranges by several connections.
    pub(crate) fn ask(&self, connections: usize, ranges: &[Range<u64>]) -> Result<Duration> {
        let own = || Ok::<_, io::Error>((self.client()?, Vec::new()));
        timed(|| {
            share(connections, ranges.len(), own, |(client, out), number| {
                Ok(client.get(&ranges[number], out)?)
            })
        })
    }

    /// Connects a client.
    pub(crate) fn client(&self) -> io::Result<Client> {
        let connection = TcpStream::connect(self.address)?;
        connection.set_nodelay(true)?;
        Ok(Client { answers: BufReader::with_capacity(PIECE, connection) })
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        let _ = TcpStream::connect(self.address);
    }
}

impl Object {
    /// Answers requests until the connection ends.
    fn serve(&self, connection: &TcpStream) -> io::Result<()> {
        connection.set_nodelay(true)?;
        let mut requests = BufReader::new(connection.try_clone()?);
        let mut piece = vec![0; PIECE];
        let mut to = connection;
        while let Some(request) = Request::read(&mut requests, self.len)? {
            thread::sleep(LATENCY);
            let range = request.range.unwrap_or(0..self.len);
            let (start, end) = (range.start, range.end.min(self.len));
            let len = end.saturating_sub(start);
            write!(
                to,
                "HTTP/1.1 206 Partial Content\r\nContent-Length: {len}\r\nContent-Range: bytes {start}-{}/{}\r\n\
                 ETag: \"1\"\r\nLast-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\n\r\n",
                end.saturating_sub(1),
                self.len
            )?;
            let mut at = start;
            while at < end && !request.is_head {
                let part = PIECE.min(usize::try_from(end - at).unwrap_or(PIECE));
                self.file.read_exact_at(&mut piece[..part], at)?;
                self.wait_for_link(part as u64);
                to.write_all(&piece[..part])?;
                self.sent.fetch_add(part as u64, Ordering::Relaxed); // a statistic
                at += part as u64;
            }
        }
        Ok(())
    }

    /// Waits until the link has sent all bytes so far, and `bytes` more.
    fn wait_for_link(&self, bytes: u64) {
        let now = Instant::now();
        let sent = {
            let mut free_at = self.free_at.lock().unwrap_or_else(PoisonError::into_inner);
            *free_at = (*free_at).max(now) + Duration::from_nanos(bytes * 1_000_000_000 / RATE);
            *free_at
        };
        thread::sleep(sent.saturating_duration_since(now));
    }
}

/// The answered part of a request.
struct Request {
    is_head: bool,
    range: Option<Range<u64>>,
}

impl Request {
    /// Reads the next request for an object of `len` bytes, or `None` at the end of the connection.
    fn read(from: &mut impl BufRead, len: u64) -> io::Result<Option<Self>> {
        let mut line = String::new();
        if from.read_line(&mut line)? == 0 {
            return Ok(None);
        }
        let (is_head, mut range) = (line.starts_with("HEAD "), None);
        while line.trim_end() != "" {
            line.clear();
            from.read_line(&mut line)?;
            let field = line.to_ascii_lowercase();
            if let Some(bounds) = field.trim_end().strip_prefix("range: bytes=") {
                let bounds = bounds.split_once('-').and_then(|(start, last)| {
                    let last: u64 = last.parse().ok()?;
                    // Without a start, it is how many of the last bytes are wanted.
                    Some(match start {
                        "" => len.saturating_sub(last)..len,
                        start => start.parse().ok()?..last + 1,
                    })
                });
                range = Some(bounds.ok_or(io::ErrorKind::InvalidData)?);
            }
        }
        Ok(Some(Self { is_head, range }))
    }
}

/// A client that asks for ranges and does nothing else.
pub(crate) struct Client {
    answers: BufReader<TcpStream>,
}

impl Client {
    /// Reads a range.
    pub(crate) fn get(&mut self, range: &Range<u64>, out: &mut Vec<u8>) -> io::Result<()> {
        let (start, last) = (range.start, range.end - 1);
        let mut request = self.answers.get_ref();
        let text = format!(
            "GET /{BUCKET}/{KEY} HTTP/1.1\r\nHost: bench\r\nRange: bytes={start}-{last}\r\n\r\n"
        );
        request.write_all(text.as_bytes())?;
        let mut line = String::new();
        loop {
            line.clear();
            if self.answers.read_line(&mut line)? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            if line == "\r\n" {
                break;
            }
        }
        out.resize(usize::try_from(range.end - range.start).unwrap_or(usize::MAX), 0);
        self.answers.read_exact(out)
    }
}
