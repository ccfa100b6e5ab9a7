//! A packed image in object storage: read in order beside the link, and at random beside one round trip.

use std::hint::black_box;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use uzone_fault::{Engine, EngineOptions, LazyOptions};
use uzone_pages::ByteLen;
use uzone_snapshot::{FrameCache, Image, OpenOptions, SnapshotBacking};

use super::frames;
use super::material::{FRAME, Material, failed, random_frames};
use super::store::{LATENCY, RATE, Store};
use super::touch::{CACHE, check};
use crate::report::Role;
use crate::suite::{BenchError, Session, Suite};

/// How many random pages are read, one after the other.
const READS: usize = 96;
/// How many frames are read one by one.
const ONE_BY_ONE: usize = 64;
/// How many connections fill the link, and what each asks for at once.
const CONNECTIONS: usize = 8;
const CHUNK: u64 = 2 << 20;

/// Opens the image by its store.
fn open(store: &Store, room: ByteLen) -> Result<Image, BenchError> {
    let options = OpenOptions::default().cache(FrameCache::new(room.get()));
    Ok(Image::from_source(Box::new(store.open().map_err(failed)?), &options)?)
}

/// Returns what the rows were measured over.
fn distance() -> String {
    format!(
        "a store on this machine behind {} ms and a link of {} MB/s",
        LATENCY.as_millis(),
        RATE / 1_000_000
    )
}

/// Reads the whole image in order.
pub(super) fn in_order(material: &Material, session: &mut Session<'_>) -> Result<(), BenchError> {
    let store = &Store::start(&material.packed).map_err(failed)?;
    let (bytes, packed) = (material.len as u64, material.packed_len);
    let pages: Vec<usize> = (0..material.words.len()).collect();
    let pages = &pages[..];
    let mut suite = Suite::new(ByteLen::new(packed));
    let (row, name) = ("snapshot-s3-seq/one-by-one", "a request a frame, one after the other");
    let stored = one_by_one(material);
    let asked: u64 = stored.iter().map(|range| range.end - range.start).sum();
    suite.add(Role::Peer, row, name, asked, 1, move || {
        let (mut client, mut out) = (store.client().map_err(failed)?, Vec::new());
        let started = Instant::now();
        for range in &stored {
            client.get(range, &mut out).map_err(failed)?;
            black_box(&out);
        }
        Ok(started.elapsed())
    });
    let (row, name) = ("snapshot-s3-seq/link", "the link, by 8 connections");
    suite.add(Role::Limit, row, name, packed, CONNECTIONS, move || {
        let started = Instant::now();
        let count = usize::try_from(packed.div_ceil(CHUNK)).unwrap_or(usize::MAX);
        let own = || Ok::<_, io::Error>((store.client()?, Vec::new()));
        frames::share(CONNECTIONS, count, own, |(client, out), number| {
            let start = number as u64 * CHUNK;
            client.get(&(start..packed.min(start + CHUNK)), out)
        })
        .map_err(failed)?;
        Ok(started.elapsed())
    });
    let (row, name) = ("snapshot-s3-seq/ours", "ours, read in order");
    let spec = suite.add(Role::Ours, row, name, packed, 1, move || {
        let image = open(store, ByteLen::ZERO)?;
        let mut out = vec![0; FRAME];
        let started = Instant::now();
        for at in (0..bytes).step_by(FRAME) {
            image.read_at(at, &mut out)?;
            black_box(&out);
        }
        Ok(started.elapsed())
    });
    spec.headline(format!("read an image of {} from S3, in order", ByteLen::new(bytes)));
    let (row, name) = ("snapshot-s3-seq/lazily", "ours, mapped lazily and touched in order");
    suite.add(Role::Variant, row, name, packed, 1, move || {
        let engine = Engine::with(EngineOptions::default())?;
        let backing = Arc::new(SnapshotBacking::new(Arc::new(open(store, CACHE)?)));
        let memory = engine.map(ByteLen::new(bytes), backing, &LazyOptions::default())?;
        let started = Instant::now();
        check(material, pages, row, |at, out| Ok(memory.read_at(at as u64, out)?))?;
        Ok(started.elapsed())
    });
    suite.each_spec(|spec| {
        if spec.bytes == packed {
            spec.limit("snapshot-s3-seq/link", packed);
        }
    });
    session.run(suite, "reading from S3 in order")?;
    session.table(
        "snapshot-s3-seq",
        format!("A packed image of {} in S3, read in order", ByteLen::new(bytes)),
        format!(
            "{}; sizes and rates are those of the stored bytes; one by one are {ONE_BY_ONE} frames; the limit asks for \
             {} at a time and does nothing with them",
            distance(),
            ByteLen::new(CHUNK)
        ),
    );
    Ok(())
}

/// Returns where some stored frames are that follow each other.
fn one_by_one(material: &Material) -> Vec<Range<u64>> {
    let len = material.packed_len / material.is_zero.len().max(1) as u64;
    let frames = (0..ONE_BY_ONE as u64).map(|frame| frame * len..(frame + 1) * len);
    frames.filter(|range| !range.is_empty() && range.end <= material.packed_len).collect()
}

/// Reads pages at random, each in a frame of its own.
pub(super) fn at_random(material: &Material, session: &mut Session<'_>) -> Result<(), BenchError> {
    let store = &Store::start(&material.packed).map_err(failed)?;
    let frames = random_frames(material, READS);
    let (calls, table) = (frames.len() as u64, "snapshot-s3-random");
    let mean = material.packed_len / material.is_zero.len().max(1) as u64;
    let asked = calls * mean;
    let mut suite = Suite::new(ByteLen::new(asked));
    let wanted = frames.clone();
    suite.add(Role::Limit, "snapshot-s3-random/trip", "one round trip", asked, 1, move || {
        let (mut client, mut out) = (store.client().map_err(failed)?, Vec::new());
        median(wanted.iter().map(|frame| {
            let start = *frame as u64 * mean;
            let started = Instant::now();
            client.get(&(start..start + mean), &mut out).map_err(failed)?;
            Ok(started.elapsed())
        }))
    });
    let (row, name) = ("snapshot-s3-random/ours", "ours, a page read");
    let spec = suite.add(Role::Ours, row, name, asked, 1, move || {
        let image = open(store, ByteLen::ZERO)?;
        let mut word = [0; 8];
        median(frames.iter().map(|frame| {
            let started = Instant::now();
            image.read_at((frame * FRAME) as u64, &mut word)?;
            let took = started.elapsed();
            let page = frame * FRAME / super::material::PAGE;
            let is_right = super::material::place(page) != frame * FRAME
                || u64::from_ne_bytes(word) == material.words[page];
            if is_right {
                Ok(took)
            } else {
                Err(BenchError::wrong_byte(row, (frame * FRAME) as u64))
            }
        }))
    });
    spec.headline("read a page of an image in S3 at random");
    suite.each_spec(|spec| {
        spec.limit("snapshot-s3-random/trip", asked).counts(Some(calls), None);
    });
    session.run(suite, "reading from S3 at random")?;
    session.table(
        table,
        format!("A packed image in S3: {calls} random pages, each in another frame"),
        format!(
            "{}; the median of one read, times {calls}; the limit asks for as many bytes as a frame has on average",
            distance()
        ),
    );
    Ok(())
}

/// Returns the median of some times, as often as there are.
fn median(
    times: impl Iterator<Item = Result<Duration, BenchError>>,
) -> Result<Duration, BenchError> {
    let mut times = times.collect::<Result<Vec<_>, _>>()?;
    times.sort_unstable();
    let count = u32::try_from(times.len()).unwrap_or(u32::MAX);
    Ok(times.get(times.len() / 2).copied().unwrap_or_default() * count)
}
