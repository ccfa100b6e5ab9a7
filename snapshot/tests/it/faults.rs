//! Injected faults of images in object storage with a cache on disk: the bytes are right, or there is an error of a
//! known kind that names the URL. The bytes of the object, its index, the cache, and the network fail.
//!
//! The seeds are fixed, so a fault has the same number in every run with the same `fastrand`, and a failure prints it. There are 200;
//! `UZONE_FAULTS` is another number.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::common::{Directory, Named, memory};
use crate::s3::{Act, Server};
use fastrand::Rng;
use uzone_pages::{ByteLen, ErrorKind};
use uzone_snapshot::{Codec, DiskCache, Image, OpenOptions, Packer, Root, SnapshotError};

const FRAME: usize = 8 << 10;
const URL: &str = "s3://images/image";
const THREADS: u64 = 8;

/// A kind of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    /// Bits of the stored frames, or of the bytes behind them.
    Object { is_index: bool, bits: usize },
    /// The object ends there.
    Truncated { len: usize },
    /// Bits of the cache.
    Cache { bits: usize },
    /// The cache ends there, or has zeroes from there on.
    CacheCut { at: usize, is_hole: bool },
    /// Each of so many requests from one on.
    Network { act: Act, from: u64, count: u64 },
}

impl Fault {
    fn choose(number: u64, len: usize, random: &mut Rng) -> Self {
        let network = |act, random: &mut Rng| Self::Network {
            act,
            from: random.u64(..12),
            count: [1, 2, 1000][random.usize(..3)],
        };
        match number % 10 {
            0 => Self::Object { is_index: false, bits: 1 + random.usize(..6) },
            1 => Self::Object { is_index: true, bits: 1 + random.usize(..6) },
            2 => Self::Truncated { len: random.usize(..len) },
            3 | 4 => Self::Cache { bits: 1 + random.usize(..40) },
            5 => Self::CacheCut { at: random.usize(..len), is_hole: random.bool() },
            6 => network(Act::Fail([500, 503, 403, 404][random.usize(..4)]), random),
            7 => network(Act::Cut, random),
            8 => network(Act::Short, random),
            _ => network(Act::Flip, random),
        }
    }

    fn label(self) -> &'static str {
        match self {
            Self::Object { is_index: false, .. } => "bits of frames",
            Self::Object { is_index: true, .. } => "bits of the index",
            Self::Truncated { .. } => "truncated",
            Self::Cache { .. } => "bits of the cache",
            Self::CacheCut { .. } => "cut cache",
            Self::Network { act: Act::Fail(_), .. } => "failing requests",
            Self::Network { act: Act::Cut, .. } => "answers that break off",
            Self::Network { act: Act::Short, .. } => "short answers",
            Self::Network { .. } => "wrong answers",
        }
    }
}

/// The attempts of one thread.
struct Case {
    server: Server,
    directory: Directory,
    raw: Vec<u8>,
    file: Vec<u8>,
    root: Root,
}

impl Case {
    fn new(thread: u64) -> Self {
        let server = Server::start(&format!("faults-{thread}"));
        let directory = Directory::new(&format!("faults-{thread}"));
        let (raw, path) = (memory(90, 777, 1), directory.file("image"));
        let codec = [Codec::Zstd, Codec::Lz4, Codec::None][thread as usize % 3];
        let packer = Packer::default().codec(codec).frame(ByteLen::new(FRAME as u64)).threads(1);
        let packed = packer.level(0).pack(&mut &*raw, &path, None, &|_| true).unwrap();
        let file = fs::read(&path).unwrap();
        Self { server, directory, raw, file, root: packed.root }
    }

    fn open(&self) -> Result<Image, SnapshotError> {
        let failed =
            |cause| SnapshotError::Read { name: URL.into(), offset: 0, len_bytes: 0, cause };
        let source = self.server.source("image", Duration::from_secs(30), 2).map_err(failed)?;
        let disk = DiskCache::open(self.directory.file("cache"), 1 << 30)?;
        let options = OpenOptions::default().root(self.root).disk_cache(disk);
        Image::from_source(Box::new(source), &options)
    }

    /// Reads all, or frames at random, each of which is right or an error; returns the kinds of the errors. After some errors,
    /// the others are not read: a store that is gone takes its time.
    fn read(&self, random: &mut Rng) -> Vec<ErrorKind> {
        let image = match self.open() {
            Ok(image) => image,
            Err(error) => return vec![kind(&error)],
        };
        let mut errors = Vec::new();
        let (len, is_in_order) = (self.raw.len(), random.bool());
        for _ in 0..len.div_ceil(FRAME) {
            let start = if is_in_order { 0 } else { random.usize(..len.div_ceil(FRAME)) * FRAME };
            let expected = &self.raw[start..if is_in_order { len } else { len.min(start + FRAME) }];
            let mut read = vec![0xaa; expected.len()];
            match image.read_at(start as u64, &mut read) {
                Ok(()) => assert!(read == expected, "wrong bytes at {start}"),
                Err(error) => errors.push(kind(&error)),
            }
            if is_in_order || errors.len() > 2 {
                break;
            }
        }
        errors
    }

    /// Has the cache filled by a reader that nothing disturbs.
    fn fill(&self, random: &mut Rng) -> PathBuf {
        self.server.decide(|_| Act::Pass);
        self.server.put("image", &self.file);
        assert_eq!(self.read(random), []);
        let image = self.open().unwrap();
        let mut read = vec![0; self.raw.len()];
        image.read_at(0, &mut read).unwrap();
        assert!(read == self.raw);
        self.directory.file("cache").join(format!("{}.frames", self.root))
    }

    /// Injects one fault. Returns the kinds of errors.
    fn inject(&self, fault: Fault, random: &mut Rng) -> Vec<ErrorKind> {
        let _ = fs::remove_dir_all(self.directory.file("cache"));
        match fault {
            Fault::Object { is_index, bits } => {
                let mut file = self.file.clone();
                let data = file.windows(8).rposition(|at| at == b"UZONEIMG").unwrap();
                let range = if is_index { data..file.len() } else { 0..data };
                flip(&mut file[range], bits, random);
                self.server.put("image", &file);
            }
            Fault::Truncated { len } => self.server.put("image", &self.file[..len]),
            Fault::Cache { bits } => {
                let path = self.fill(random);
                change(&path, |bytes| flip(bytes, bits, random));
            }
            Fault::CacheCut { at, is_hole } => {
                let path = self.fill(random);
                change(&path, |bytes| {
                    let at = at.min(bytes.len());
                    if is_hole { bytes[at..].fill(0) } else { bytes.truncate(at) }
                });
            }
            Fault::Network { act, from, count } => {
                self.server.put("image", &self.file);
                let fails = from..from + count;
                self.server
                    .decide(move |seen| if fails.contains(&seen.number) { act } else { Act::Pass });
            }
        }
        let errors = self.read(random);
        self.server.decide(|_| Act::Pass);
        if matches!(fault, Fault::Network { .. } | Fault::Cache { .. } | Fault::CacheCut { .. }) {
            // Nothing of it stays in the cache.
            assert_eq!(self.read(random), [], "what has failed is over");
        }
        errors
    }
}

/// Returns the kind of an error, which must be one of four and name its source.
fn kind(error: &SnapshotError) -> ErrorKind {
    assert!(error.to_string().contains(URL), "{error}");
    match error.kind() {
        kind @ (ErrorKind::InvalidData
        | ErrorKind::Io
        | ErrorKind::NotSupported
        | ErrorKind::NotFound
        | ErrorKind::PermissionDenied) => kind,
        other => panic!("{other:?}: {error}"),
    }
}

fn flip(bytes: &mut [u8], bits: usize, random: &mut Rng) {
    for _ in 0..bits {
        let at = random.usize(..bytes.len());
        bytes[at] ^= 1 << random.usize(..8);
    }
}

fn change(path: &Path, with: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = fs::read(path).unwrap();
    with(&mut bytes);
    fs::write(path, bytes).unwrap();
}

#[test]
fn no_fault_of_a_store_its_network_or_the_cache_gives_a_wrong_byte() {
    let count = std::env::var("UZONE_FAULTS").ok();
    let count: u64 = count.map_or(200, |count| count.parse().expect("UZONE_FAULTS is a number"));
    let next = AtomicU64::new(0);
    let counts: Mutex<BTreeMap<&str, (u64, u64)>> = Mutex::default();
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (next, counts) = (&next, &counts);
            scope.spawn(move || {
                let case = Case::new(thread);
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= count {
                        return;
                    }
                    let mut random = Rng::with_seed(number);
                    let fault = Fault::choose(number, case.file.len(), &mut random);
                    let named = Named(format!("fault {number}: {fault:?}"));
                    let errors = case.inject(fault, &mut random);
                    match fault {
                        // The root hash and the seek table cover it, or its bytes have no meaning.
                        Fault::Truncated { .. } => assert_ne!(errors, []),
                        Fault::Cache { .. } | Fault::CacheCut { .. } => assert_eq!(errors, []),
                        Fault::Network {
                            act: Act::Fail(500 | 503) | Act::Cut,
                            count: 1 | 2,
                            ..
                        } => {
                            assert_eq!(errors, [], "two failures are within the budget");
                        }
                        _ => {}
                    }
                    drop(named);
                    let mut counts = counts.lock().unwrap();
                    let entry = counts.entry(fault.label()).or_default();
                    *entry = (entry.0 + 1, entry.1 + u64::from(!errors.is_empty()));
                }
            });
        }
    });
    let counts = counts.into_inner().unwrap();
    let sum: u64 = counts.values().map(|(faults, _)| faults).sum();
    assert_eq!(sum, count);
    for (label, (faults, failed)) in counts {
        println!("{label}: {faults} faults, {failed} with errors, none with a wrong byte");
    }
}
