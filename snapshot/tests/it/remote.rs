//! Images in object storage: a server of S3 on this machine, and a network that fails.

use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use crate::common::{Directory, map, memory};
use crate::s3::{Act, Server};
use uzone_fault::Backing;
use uzone_pages::{ByteLen, ErrorKind};
use uzone_snapshot::{
    Codec, DiskCache, Image, ObjectSource, OpenOptions, Packed, Packer, RequestOptions, Root,
    SnapshotBacking, SnapshotError, Source,
};

const FRAME: usize = 8 << 10;

/// Packs bytes, and returns the file.
fn pack(server: &Server, key: &str, raw: &[u8], parent: Option<&Image>) -> Packed {
    let path = server.object(key);
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    let packer = Packer::default().frame(ByteLen::new(FRAME as u64));
    packer.pack(&mut &*raw, &path, parent, &|_| true).unwrap()
}

fn source(server: &Server, key: &str) -> std::io::Result<ObjectSource> {
    server.source(key, Duration::from_millis(600), 3)
}

fn open(server: &Server, key: &str, root: Root) -> Image {
    let source = Box::new(source(server, key).unwrap());
    Image::from_source(source, &OpenOptions::default().root(root)).unwrap()
}

/// Reads all of an image in order, and compares it with `raw`.
fn read_in_order(image: &Image, raw: &[u8]) {
    let mut read = vec![0xaa; raw.len()];
    image.read_at(0, &mut read).unwrap();
    assert!(read == raw);
}

#[test]
fn an_image_in_a_bucket_has_its_bytes_and_those_of_its_parent() {
    let server = Server::start("bytes");
    let mut raw = memory(400, 77, 1);
    pack(&server, "base/parent.img", &raw, None);
    let parent = Image::open(server.object("base/parent.img"), &OpenOptions::default()).unwrap();
    raw[700_000] ^= 1;
    let packed = pack(&server, "vm/child.img", &raw, Some(&parent));
    let image = open(&server, "vm/child.img", packed.root);
    assert_eq!(image.name(), "s3://images/vm/child.img");
    assert_eq!(image.parent().unwrap().name(), "s3://images/base/parent.img");
    read_in_order(&image, &raw);
    assert_eq!(image.verify(2, true, &|_| ()).unwrap(), packed.stored_frames);
}

/// A way to read all of an image, and the most requests that it takes.
type Way<'a> = (&'a str, u64, &'a dyn Fn(Image));

#[test]
fn whatever_reads_in_order_takes_few_requests_and_a_reader_at_random_one_each() {
    let server = Server::start("requests");
    let directory = Directory::new("requests");
    let raw = memory(2000, 77, 1);
    let packed = pack(&server, "image", &raw, None);
    server.put("raw", &raw);
    let unpack = |image: Image| image.unpack(&directory.file("raw"), 2, &|_| true).unwrap();
    let verify = |image: Image| {
        image.verify(2, true, &|_| ()).unwrap();
    };
    let touch = |image: Image| {
        let what = "a lazily mapped image in a bucket";
        let Some(mapping) = map(what, Arc::new(image), 2001) else { return };
        for page in 0..2001 {
            mapping.read_at(page * 4096, &mut [0; 4096]).unwrap();
        }
    };
    let ways: [Way<'_>; 4] = [
        ("read", 30, &|image| read_in_order(&image, &raw)),
        ("unpack", 30, &unpack),
        ("verify", 30, &verify),
        ("map", 100, &touch),
    ];
    for (way, most, read) in ways {
        let image = open(&server, "image", packed.root);
        server.decide(|_| Act::Pass);
        read(image);
        let requests = server.requests();
        assert!(requests < most, "{way}: {requests} for {} frames", packed.stored_frames);
        assert!(server.most_under_way() > 1 || requests == 0, "{way}: requests run at once");
    }
    assert!(std::fs::read(directory.file("raw")).unwrap() == raw);
    let source = source(&server, "raw").unwrap();
    server.decide(|_| Act::Pass);
    Packer::default().pack_source(&source, &directory.file("image"), None, &|_| true).unwrap();
    assert!(server.requests() < 30 && server.most_under_way() > 1, "{}", server.requests());
    let image = open(&server, "image", packed.root);
    server.decide(|_| Act::Pass);
    for page in [1498, 20, 798] {
        let mut read = vec![0; 4096];
        image.read_at(page * 4096, &mut read).unwrap();
        let start = usize::try_from(page * 4096).unwrap();
        assert!(read == raw[start..start + 4096]);
    }
    assert_eq!(server.requests(), 3);
}

#[test]
fn an_object_that_is_missing_or_refused_is_an_error_with_its_url_and_the_fix() {
    let server = Server::start("errors");
    let error = source(&server, "none").unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::NotFound);
    assert!(error.to_string().contains("check the URL"), "{error}");
    server.put("image", b"no image");
    let refused = |status, kind, fix| {
        server.decide(move |_| Act::Fail(status));
        let error = source(&server, "image").unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
        assert!(error.to_string().contains(fix), "{error}");
    };
    refused(403, std::io::ErrorKind::PermissionDenied, "grant it");
    refused(401, std::io::ErrorKind::PermissionDenied, "set valid ones");
    refused(503, std::io::ErrorKind::Other, "check the network");
    server.decide(|_| Act::Pass);
    let image =
        Image::from_source(Box::new(source(&server, "image").unwrap()), &OpenOptions::default());
    let error = image.unwrap_err();
    assert!(error.to_string().contains("s3://images/image is not a packed image"), "{error}");
}

#[test]
fn an_object_is_opened_by_its_end_or_by_its_length_alone() {
    let server = Server::start("opened");
    let raw = memory(400, 77, 1);
    let packed = pack(&server, "image", &raw, None);
    for (number, act) in
        [Act::Pass, Act::Fail(500), Act::Cut, Act::Short, Act::Hang, Act::Fail(416)]
            .into_iter()
            .enumerate()
    {
        let is_last = act == Act::Fail(416);
        // Once, but for a store that never answers such a request.
        server.decide(move |seen| {
            let is_tail = seen.method == "GET" && seen.range.is_none();
            if is_tail && (is_last || seen.number == 0) { act } else { Act::Pass }
        });
        let image = open(&server, "image", packed.root);
        // By the last bytes; or after the length: the footer, the trailer and the index.
        let most = [1, 2, 2, 2, 2, 5][number];
        assert!(server.requests() <= most, "{act:?}: {} requests", server.requests());
        read_in_order(&image, &raw);
    }
    server.put("empty", b"");
    let empty = source(&server, "empty").unwrap();
    assert_eq!(empty.byte_len(), 0);
    let error = Image::from_source(Box::new(empty), &OpenOptions::default()).unwrap_err();
    assert!(error.to_string().contains("it is too short"), "{error}");
}

#[test]
fn the_end_of_an_object_is_where_it_belongs_also_after_an_answer_that_was_too_short() {
    let server = Server::start("end");
    let bytes = memory(20, 77, 1);
    server.put("object", &bytes);
    // The first answer has half of the last bytes, and names all of them.
    server.decide(|seen| if seen.number == 0 { Act::Short } else { Act::Pass });
    let source = source(&server, "object").unwrap();
    assert_eq!((source.byte_len(), server.requests()), (bytes.len() as u64, 2));
    for len in [100, 16 << 10, 30 << 10] {
        let start = bytes.len() - len;
        let mut read = vec![0; len];
        assert!(source.read_ready(start as u64, &mut read).unwrap(), "it came when it was opened");
        assert!(read == bytes[start..], "the last {len} bytes");
    }
}

/// A directory with a cache.
struct Cache {
    directory: Directory,
    limit_bytes: u64,
}

impl Cache {
    fn new(test: &str) -> Self {
        Self { directory: Directory::new(&format!("cache-{test}")), limit_bytes: 64 << 20 }
    }

    /// Opens an image by way of the cache. Returns how many requests and bytes that took as well.
    fn open(&self, server: &Server, key: &str, root: Option<Root>) -> (Image, u64, u64) {
        self.try_open(server, key, root).unwrap()
    }

    fn try_open(
        &self,
        server: &Server,
        key: &str,
        root: Option<Root>,
    ) -> Result<(Image, u64, u64), SnapshotError> {
        let disk = DiskCache::open(self.path(), self.limit_bytes).unwrap();
        let options = root.into_iter().fold(OpenOptions::default(), OpenOptions::root);
        server.decide(|_| Act::Pass);
        let source = Box::new(source(server, key).unwrap());
        let image = Image::from_source(source, &options.disk_cache(disk))?;
        Ok((image, server.requests(), server.bytes()))
    }

    /// Where it is made when it is opened first.
    fn path(&self) -> PathBuf {
        self.directory.file("cache")
    }

    fn indexes(&self) -> Vec<PathBuf> {
        let paths = std::fs::read_dir(self.path()).unwrap().map(|entry| entry.unwrap().path());
        paths.filter(|path| path.extension().is_some_and(|end| end == "index")).collect()
    }
}

/// Packs an image whose index is longer than the first request. Returns its bytes as well.
fn pack_long(server: &Server, key: &str, change: usize) -> (Packed, Vec<u8>) {
    let mut raw = memory(4800, 77, 1);
    raw[change] ^= 1;
    let packer = Packer::default().frame(ByteLen::kib(4)).codec(Codec::Lz4);
    let packed = packer.pack(&mut &*raw, &server.object(key), None, &|_| true).unwrap();
    (packed, raw)
}

#[test]
fn an_image_that_was_opened_before_takes_one_request_for_each_image_of_its_chain() {
    let (server, cache) = (Server::start("again"), Cache::new("again"));
    let (packed, mut raw) = pack_long(&server, "image", 9);
    let (image, first, first_bytes) = cache.open(&server, "image", None);
    read_in_order(&image, &raw);
    let (image, second, second_bytes) = cache.open(&server, "image", None);
    assert!(first == 2 && first_bytes > 80_000, "{first} requests, {first_bytes} bytes");
    assert_eq!((second, second_bytes), (1, 32 << 10));
    read_in_order(&image, &raw);
    assert_eq!(server.requests(), 1, "frames are kept too");
    assert_eq!((image.root(), image.root_was_required()), (packed.root, false));
    image.verify(2, true, &|_| ()).unwrap();
    // A parent, which must have the root hash that the child names.
    let parent = Image::open(server.object("image"), &OpenOptions::default()).unwrap();
    raw[3_000_000] ^= 1;
    let child = pack(&server, "child", &raw, Some(&parent));
    for most in [4, 2] {
        let (image, requests, _) = cache.open(&server, "child", Some(child.root));
        assert!(requests <= most, "{requests} requests");
        assert!(image.root_was_required());
        read_in_order(&image, &raw);
    }
}

#[test]
fn an_index_on_disk_that_is_damaged_or_that_of_another_image_is_fetched_anew() {
    let (server, cache) = (Server::start("index"), Cache::new("index"));
    let (packed, raw) = pack_long(&server, "image", 9);
    drop(cache.open(&server, "image", None));
    let index = cache.indexes().remove(0);
    let whole = std::fs::read(&index).unwrap();
    let is_mended = |what: &str| {
        let (image, requests, _) = cache.open(&server, "image", None);
        assert_eq!((image.root(), requests), (packed.root, 2), "{what}");
        read_in_order(&image, &raw);
        assert!(std::fs::read(&index).unwrap() == whole, "{what}");
        assert_eq!(cache.open(&server, "image", None).1, 1, "{what}");
    };
    // The working set and the bytes behind the seal are covered too.
    for at in [0, 31, 32, 100, 160, whole.len() / 2, whole.len() - 1] {
        let mut damaged = whole.clone();
        damaged[at] ^= 16;
        std::fs::write(&index, damaged).unwrap();
        is_mended(&format!("byte {at}"));
    }
    // As a writer leaves it that was killed, or a device that was full.
    for len in [0, 31, 32, 33, 4096, whole.len() - 1] {
        std::fs::write(&index, &whole[..len]).unwrap();
        is_mended(&format!("{len} bytes"));
    }
    std::fs::write(&index, [&whole[..], &[0]].concat()).unwrap();
    is_mended("a byte more");
    std::fs::write(&index, [&whole[..4096], &vec![0; whole.len() - 4096]].concat()).unwrap();
    is_mended("blocks that were never written");
    // Whole, under the name of another one.
    pack_long(&server, "other", 10);
    drop(cache.open(&server, "other", None));
    let other = cache.indexes().into_iter().find(|path| *path != index).unwrap();
    std::fs::copy(&other, &index).unwrap();
    is_mended("the index of another image");
    std::fs::remove_file(&index).unwrap();
    is_mended("none");
}

#[test]
fn an_index_on_disk_that_is_forged_is_not_the_one_that_is_required() {
    let (server, cache) = (Server::start("forged"), Cache::new("forged"));
    let (packed, raw) = pack_long(&server, "image", 9);
    drop(cache.open(&server, "image", Some(packed.root)));
    let index = cache.indexes().remove(0);
    pack_long(&server, "other", 10);
    drop(cache.open(&server, "other", None));
    let other = cache.indexes().into_iter().find(|path| *path != index).unwrap();
    let other = std::fs::read(other).unwrap().split_off(32);
    let key = blake3::Hash::from_hex(index.file_stem().unwrap().to_str().unwrap()).unwrap();
    let seal = blake3::Hasher::new().update(key.as_bytes()).update(&other).finalize();
    std::fs::write(&index, [seal.as_bytes(), &*other].concat()).unwrap();
    let (image, requests, _) = cache.open(&server, "image", Some(packed.root));
    assert_eq!((image.root(), requests), (packed.root, 2));
    read_in_order(&image, &raw);
}

#[test]
fn indexes_on_disk_are_within_the_limit_and_the_oldest_gives_room() {
    let server = Server::start("room");
    let keys = [("first", 9), ("second", 10)];
    for (key, change) in keys {
        pack_long(&server, key, change);
    }
    // Room for one of them, and for none.
    for (limit_bytes, kept, again) in
        [(128 << 10, 1, [2, 2]), (64 << 10, 0, [2, 2]), (1 << 20, 2, [1, 1])]
    {
        let mut cache = Cache::new("room");
        cache.limit_bytes = limit_bytes;
        for (key, _) in keys {
            assert_eq!(cache.open(&server, key, None).1, 2);
        }
        let indexes = cache.indexes();
        let used = indexes.iter().map(|path| path.metadata().unwrap().blocks() * 512);
        assert!(indexes.len() == kept && used.sum::<u64>() <= limit_bytes, "{limit_bytes}");
        assert_eq!(keys.map(|(key, _)| cache.open(&server, key, None).1), again, "{limit_bytes}");
    }
}

#[test]
fn an_object_that_was_replaced_since_its_index_was_kept_is_noticed() {
    let (server, cache) = (Server::start("since"), Cache::new("since"));
    let (old, _) = pack_long(&server, "image", 9);
    let len = std::fs::metadata(server.object("image")).unwrap().len();
    for root in [None, Some(old.root)] {
        drop(cache.open(&server, "image", root));
    }
    // As long, with another page in the first frame alone.
    let (new, raw) = pack_long(&server, "image", 10);
    assert_eq!(std::fs::metadata(server.object("image")).unwrap().len(), len);
    let (image, requests, _) = cache.open(&server, "image", None);
    assert_eq!((image.root(), requests), (new.root, 2));
    read_in_order(&image, &raw);
    let error = cache.try_open(&server, "image", Some(old.root)).unwrap_err();
    assert!(matches!(error, SnapshotError::OtherRoot { .. }), "{error}");
}

#[test]
fn an_object_that_is_replaced_is_not_read_in_parts_of_both() {
    let server = Server::start("replaced");
    let raw = memory(600, 77, 1);
    let packed = pack(&server, "image", &raw, None);
    let image = open(&server, "image", packed.root);
    let mut other = raw.clone();
    other.reverse();
    pack(&server, "image", &other, None);
    let mut read = vec![0; 4096];
    let error = image.read_at(300 * 4096, &mut read).unwrap_err();
    assert!(error.to_string().contains("s3://images/image"), "{error}");
    let cause = std::error::Error::source(&error).unwrap().to_string();
    assert!(cause.contains("was replaced while it was open"), "{cause}");
}

#[test]
fn a_network_that_fails_now_and_then_is_not_noticed() {
    let server = Server::start("flaky");
    let raw = memory(1000, 77, 1);
    let packed = pack(&server, "image", &raw, None);
    for act in [Act::Fail(500), Act::Fail(503), Act::Cut, Act::Short, Act::Hang] {
        let image = open(&server, "image", packed.root);
        server.decide(move |seen| if seen.number % 4 == 1 { act } else { Act::Pass });
        let mut read = vec![0; 4096];
        for page in [900, 10, 500, 200] {
            image.read_at(page * 4096, &mut read).unwrap();
        }
        read_in_order(&image, &raw);
        assert!(server.requests() > 4, "{act:?}");
        server.decide(|_| Act::Pass);
    }
}

#[test]
fn a_network_that_always_fails_is_an_error_after_the_budget_and_never_a_hang() {
    let server = Server::start("fails");
    let raw = memory(100, 77, 1);
    let packed = pack(&server, "image", &raw, None);
    for (act, most) in [(Act::Fail(503), 8), (Act::Cut, 24), (Act::Short, 6), (Act::Hang, 8)] {
        let image = open(&server, "image", packed.root);
        server.decide(move |_| act);
        let mut read = vec![0; 4096];
        let error = image.read_at(50 * 4096, &mut read).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Io, "{act:?}: {error}");
        assert!(error.to_string().contains("of s3://images/image"), "{error}");
        assert!((2..=most).contains(&server.requests()), "{act:?}: {}", server.requests());
        server.decide(|_| Act::Pass);
        image.read_at(50 * 4096, &mut read).unwrap();
        assert!(read == raw[50 * 4096..51 * 4096], "the next try is a new one");
    }
}

#[test]
fn a_request_is_repeated_as_often_and_as_long_as_the_options_have_it() {
    let server = Server::start("options");
    server.put("object", &[7; 100_000]);
    let url = server.web_address("object");
    let options = RequestOptions::default().retry_pause(Duration::from_millis(1));
    // Reads a part; returns whether it was there, and how many requests that took.
    let read = |options: RequestOptions, act: Act, fails: u64| {
        server.decide(|_| Act::Pass);
        let source = ObjectSource::open(&url, &options).unwrap();
        server.decide(move |seen| if seen.number < fails { act } else { Act::Pass });
        let mut read = [0; 100];
        let done = source.read_at(500, &mut read);
        assert_eq!(done.is_ok(), read == [7; 100]);
        (done.is_ok(), server.requests())
    };
    let failing = Act::Fail(503);
    for (count, fails, expected) in
        [(0, 0, (true, 1)), (0, 1, (false, 1)), (3, 3, (true, 4)), (3, 4, (false, 4))]
    {
        assert_eq!(read(options.retry_count(count), failing, fails), expected);
    }
    assert_eq!(read(options, failing, 6), (true, 7), "the default");
    assert_eq!(read(options, failing, 7), (false, 7), "the default");
    // By time: 40 pauses of about a millisecond.
    let often = options.retry_count(1000);
    assert_eq!(read(often.retry(Duration::from_secs(600)), failing, 40), (true, 41));
    let (is_read, requests) = read(often.retry(Duration::from_millis(2)), failing, 40);
    assert!(!is_read && requests < 41, "{requests} requests");
    // A server that is silent.
    let (late, once) = (Act::Late(Duration::from_millis(1500)), options.retry_count(0));
    assert_eq!(read(once, late, 1), (true, 1));
    let hasty = options.timeout(Duration::from_millis(100));
    assert_eq!(read(hasty.retry_count(0), late, 1), (false, 1));
    assert_eq!(read(hasty.retry_count(1), Act::Hang, 1), (true, 2));
    assert_eq!(hasty.longest(), Duration::from_millis(15_200));
}

#[test]
fn a_time_of_zero_is_refused_before_anything_is_requested() {
    let server = Server::start("zero");
    let (url, options) = (server.web_address("object"), RequestOptions::default());
    let zero = Duration::ZERO;
    for options in [options.timeout(zero), options.retry(zero), options.retry_pause(zero)] {
        let error = ObjectSource::open(&url, &options).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::InvalidInput);
        let error = Image::open(&url, &OpenOptions::default().requests(options)).unwrap_err();
        let cause = std::error::Error::source(&error).unwrap().to_string();
        assert!(cause.contains("are more than zero"), "{cause}");
    }
    assert_eq!(server.requests(), 0);
}

#[test]
fn a_frame_that_is_corrupt_on_the_way_is_fetched_again_once() {
    let server = Server::start("corrupt");
    let raw = memory(600, 77, 1);
    let packed = pack(&server, "image", &raw, None);
    // Each range once: also those that were read ahead.
    let image = open(&server, "image", packed.root);
    let seen_before = std::sync::Mutex::new(std::collections::HashSet::new());
    server.decide(move |seen| {
        let is_first = seen_before.lock().unwrap().insert(seen.range);
        if is_first { Act::Flip } else { Act::Pass }
    });
    let mut read = vec![0; 4096];
    image.read_at(300 * 4096, &mut read).unwrap();
    assert!(read == raw[300 * 4096..301 * 4096]);
    assert_eq!(server.requests(), 2);
    // Always.
    let image = open_when(&server, packed.root);
    server.decide(|_| Act::Flip);
    let error = image.read_at(300 * 4096, &mut read).unwrap_err();
    assert_eq!((error.kind(), server.requests()), (ErrorKind::InvalidData, 2));
    assert!(error.to_string().contains("do not match their hash"), "{error}");
}

fn open_when(server: &Server, root: Root) -> Image {
    server.decide(|_| Act::Pass);
    open(server, "image", root)
}

#[test]
fn a_chunk_that_was_read_ahead_and_is_corrupt_costs_its_bad_frame_alone_a_request() {
    let server = Server::start("chunk");
    let raw = memory(1000, 77, 1);
    let packed = pack(&server, "image", &raw, None);
    let image = open_when(&server, packed.root);
    let flips = Arc::new(AtomicU64::new(0));
    let counted = flips.clone();
    server.decide(move |seen| match seen.range {
        Some((start, end)) if end - start > 500_000 => {
            counted.fetch_add(1, Ordering::SeqCst);
            Act::Flip
        }
        _ => Act::Pass,
    });
    read_in_order(&image, &raw);
    assert!(flips.load(Ordering::SeqCst) > 0, "there was one");
}

#[test]
fn a_slow_request_is_sent_a_second_time() {
    let server = Server::start("hedge");
    server.put("object", &[7; 100_000]);
    let source = source(&server, "object").unwrap();
    let mut read = [0; 100];
    for _ in 0..40 {
        source.read_at(500, &mut read).unwrap();
    }
    // Without a second request it would fail after its read timeout, and the third would be its repetition.
    let hung = AtomicBool::new(false);
    server.decide(move |_| if hung.swap(true, Ordering::SeqCst) { Act::Pass } else { Act::Hang });
    source.read_at(500, &mut read).unwrap();
    assert_eq!((read, server.requests()), ([7; 100], 2));
}

#[test]
fn a_source_refuses_what_is_behind_its_end() {
    let server = Server::start("end");
    server.put("object", &[7; 100_000]);
    let source = source(&server, "object").unwrap();
    assert_eq!(source.byte_len(), 100_000);
    let mut read = [0; 100];
    source.read_at(99_900, &mut read).unwrap();
    assert_eq!(read, [7; 100]);
    let error = source.read_at(99_901, &mut read).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::UnexpectedEof);
    assert!(!source.read_ready(0, &mut read).unwrap(), "it waits for the network");
    assert!(source.read_ready(99_900, &mut read).unwrap(), "the end came with its length");
}

#[test]
fn ranges_that_are_announced_come_in_few_requests_and_those_on_disk_in_none() {
    let server = Server::start("announced");
    let raw = memory(1000, 77, 1);
    let packed = pack(&server, "image", &raw, None);
    let directory = Directory::new("announced");
    let pages: Vec<u64> = (10..900).step_by(11).collect();
    let ranges: Vec<_> = pages.iter().map(|page| page * 4096..(page + 1) * 4096).collect();
    for are_on_disk in [false, true] {
        let disk = DiskCache::open(&directory.0, 64 << 20).unwrap();
        let options = OpenOptions::default().root(packed.root).disk_cache(disk);
        let source = Box::new(source(&server, "image").unwrap());
        let image = Arc::new(Image::from_source(source, &options).unwrap());
        server.decide(|_| Act::Pass);
        SnapshotBacking::new(image.clone()).will_need(&ranges);
        for page in &pages {
            let mut read = vec![0; 4096];
            image.read_at(page * 4096, &mut read).unwrap();
            let at = *page as usize * 4096;
            assert!(read == raw[at..at + 4096], "page {page}");
        }
        let most = if are_on_disk { 0 } else { 8 };
        assert!(server.requests() <= most, "{} requests", server.requests());
        assert!(are_on_disk || server.requests() > 0);
    }
}

#[test]
fn the_pages_of_an_order_are_requested_from_an_object_many_at_once() {
    let server = Server::start("order");
    let raw = memory(2000, 77, 1);
    server.put("raw", &raw);
    let order: Vec<u64> = (0..300).map(|number| number * 1237 % 2000).collect();
    let pack = |name: &str, source: &dyn Source| {
        let path = server.object(name);
        let packer = Packer::default().order(order.clone());
        packer.pack_source(source, &path, None, &|_| true).unwrap();
        std::fs::read(path).unwrap()
    };
    let expected = pack("from-file", &raw);
    // So many at once may wait for long on a machine that is busy, and each that is repeated counts.
    let source = server.source("raw", Duration::from_secs(20), 3).unwrap();
    server.decide(|_| Act::Late(Duration::from_millis(20)));
    assert!(pack("from-object", &source) == expected);
    // A request for each listed page, of which some are sent twice, and few for the others.
    assert!(server.requests() < 1000, "{} requests", server.requests());
    assert!(server.most_under_way() >= 8, "{} at once", server.most_under_way());
}

#[test]
fn a_mapping_of_an_image_in_a_bucket_has_its_bytes_in_order_and_at_random() {
    let server = Server::start("mapped");
    let raw = memory(1000, 77, 1);
    let packed = pack(&server, "image", &raw, None);
    server.decide(|seen| if seen.number % 9 == 4 { Act::Fail(500) } else { Act::Pass });
    for step in [1, 377] {
        let image = Arc::new(open(&server, "image", packed.root));
        let Some(mapping) = map("lazily mapped images in buckets", image, 1001) else { return };
        for number in 0..1001 {
            let page = number * step % 1001;
            let expected = &raw[page * 4096..raw.len().min((page + 1) * 4096)];
            let mut read = vec![0xaa; 4096];
            mapping.read_at(page as u64 * 4096, &mut read).unwrap();
            assert!(read[..expected.len()] == *expected, "page {page}");
        }
    }
}
