//! A packed image in object storage: read in order beside the link, and at random beside one round trip.

use std::io;
use std::time::Duration;

use uzone_pages::ByteLen;

use super::frames;
use super::material::{FRAME, Material, PAGE, random_frames};
use super::pack::read_each;
use super::store::{Store, distance};
use uzone_harness::{Result, Role, Session, Suite, check_word, index, place, timed};

/// The number of random pages that are read, one after the other.
const READS: usize = 96;
/// The number of connections that fill the link, and the length of their requests.
const CONNECTIONS: usize = 8;
const CHUNK: u64 = 2 << 20;

/// Reads the whole image in order.
pub(super) fn in_order(material: &Material, session: &mut Session<'_>) -> Result {
    let store = &Store::start(&material.packed)?;
    let (bytes, packed) = (ByteLen::new(material.len as u64), material.packed_len);
    let mut suite = Suite::new("snapshot-s3-seq", ByteLen::new(packed)).writing(packed);
    suite
        .add(Role::Limit, "link", "the link, by 8 connections", move |_| fill_link(store, packed))
        .row
        .threads = CONNECTIONS;
    let spec = suite.add(Role::Ours, "ours", "ours, read in order", move |_| {
        let image = store.open_image(ByteLen::ZERO)?;
        read_each((0..bytes.get()).step_by(FRAME), |at, out| Ok(image.read_at(at, out)?))
    });
    spec.headline(format!("read an image of {bytes} from S3, in order"));
    suite.limit("link");
    session.measure(
        suite,
        format!("A packed image of {bytes} in S3, read in order"),
        format!(
            "{}; sizes and rates count stored bytes; the limit asks for {} at a time",
            distance(),
            ByteLen::new(CHUNK)
        ),
    )
}

/// Asks for all of the object by several connections.
fn fill_link(store: &Store, packed: u64) -> Result<Duration> {
    timed(|| {
        let count = index(packed.div_ceil(CHUNK));
        let own = || Ok::<_, io::Error>((store.client()?, Vec::new()));
        frames::share(CONNECTIONS, count, own, |(client, out), number| {
            let start = number as u64 * CHUNK;
            Ok(client.get(&(start..packed.min(start + CHUNK)), out)?)
        })
    })
}

/// Reads pages at random, each in a frame of its own.
pub(super) fn at_random(material: &Material, session: &mut Session<'_>) -> Result {
    let store = &Store::start(&material.packed)?;
    let frames = &random_frames(material, READS);
    let (calls, mean) = (frames.len() as u64, material.mean_frame());
    let asked = calls * mean;
    let mut suite = Suite::new("snapshot-s3-random", ByteLen::new(asked)).writing(asked);
    suite.add(Role::Limit, "trip", "one round trip", move |_| {
        let (mut client, mut out) = (store.client()?, Vec::new());
        median(frames.iter().map(|frame| {
            let start = *frame as u64 * mean;
            timed(|| Ok(client.get(&(start..start + mean), &mut out)?))
        }))
    });
    let spec = suite.add(Role::Ours, "ours", "ours, a page read", move |row| {
        let image = store.open_image(ByteLen::ZERO)?;
        median(frames.iter().map(|frame| {
            let page = frame * (FRAME / PAGE);
            timed(|| check_word(row, &image, place(page as u64), material.words[page]))
        }))
    });
    spec.headline("read a page of an image in S3 at random");
    suite.limit("trip").each_spec(|spec| _ = spec.counts(Some(calls), None));
    session.measure(
        suite,
        format!("A packed image in S3: {calls} random pages, each in another frame"),
        format!(
            "{}; the median of one read, times {calls}; the limit asks for as many bytes as a frame has on average",
            distance()
        ),
    )
}

/// Returns the median of some times, multiplied by their number.
fn median(times: impl Iterator<Item = Result<Duration>>) -> Result<Duration> {
    let mut times = times.collect::<Result<Vec<_>, _>>()?;
    times.sort_unstable();
    let count = u32::try_from(times.len()).unwrap_or(u32::MAX);
    Ok(times.get(times.len() / 2).copied().unwrap_or_default() * count)
}
