//! A machine that is restored from an image in object storage, a known distance away.
//!
//! | row | what is done |
//! |---|---|
//! | `naive` | one page for each fault: each is fetched from the raw image, which ours does not serve from there |
//! | `packed` | each frame is fetched when one of its pages is touched first |
//! | `replay` | the list of the pages is installed ahead |
//! | `read-first` | all of the image is read before the machine runs |
//! | `link` | the bytes of the frames are asked for by 64 connections, and nothing is done with them |

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use uzone_fault::LazyOptions;
use uzone_os::{Anonymous, Mapping};
use uzone_snapshot::{FrameCache, Image, OpenOptions, SnapshotBacking};

use super::{CACHE, Machine, PIECE, Restore};
use crate::fault::{Answer, Bare, Waiting};
use crate::report::{Found, Role};
use crate::snapshot::frames;
use crate::snapshot::material::{FRAME, PAGE, failed, place};
use crate::snapshot::store::{LATENCY, RATE, Store};
use crate::suite::{BenchError, Session, Suite};

/// How many connections fill the link.
const CONNECTIONS: usize = 64;
/// How many pages are touched at most: each may take a round trip.
const TOUCHES: usize = 512;
/// The same in order, where few do; and how much of a small image that is.
const IN_ORDER: usize = 1024;
const SHARE_IN_ORDER: usize = 8;

fn open(store: &Store) -> Result<Image, BenchError> {
    let options = OpenOptions::default().cache(FrameCache::new(CACHE.get()));
    Ok(Image::from_source(Box::new(store.open().map_err(failed)?), &options)?)
}

/// Runs the table of a working set.
pub(super) fn table(restore: Restore<'_>, session: &mut Session<'_>) -> Result<(), BenchError> {
    let restore = Restore { pages: &restore.pages[..restore.pages.len().min(TOUCHES)], ..restore };
    measure("restore-far", "pages of a working set in a random order", restore, session)
}

/// Runs the table of the first pages in order.
pub(super) fn table_in_order(
    restore: Restore<'_>,
    session: &mut Session<'_>,
) -> Result<(), BenchError> {
    let count = (restore.material.words.len() / SHARE_IN_ORDER).min(IN_ORDER);
    let pages: &Vec<usize> = &(0..count).collect();
    measure(
        "restore-seq-far",
        "pages in order, from the first on",
        Restore { pages, ..restore },
        session,
    )
}

fn measure(
    table: &str,
    what: &str,
    restore: Restore<'_>,
    session: &mut Session<'_>,
) -> Result<(), BenchError> {
    let (engine, store) =
        (&restore.engine()?, &Store::start(&restore.material.packed).map_err(failed)?);
    let offsets: &Vec<Vec<u64>> =
        &vec![restore.pages.iter().map(|page| place(*page) as u64).collect()];
    let raw = &Store::start(&restore.material.raw).map_err(failed)?;
    let mut suite = Suite::new(restore.len());
    add_naive(&mut suite, table, restore, raw, offsets);
    for (row, name, role) in [
        ("packed", "ours, a request for each frame", Role::Peer),
        ("replay", "ours, the set installed ahead", Role::Ours),
    ] {
        let spec = suite.faults(role, &format!("{table}/{row}"), name, 1, move |row| {
            let sent = store.sent();
            let backing = Arc::new(SnapshotBacking::new(Arc::new(open(store)?)));
            let memory = Machine::new(engine, restore.len(), backing, &LazyOptions::default())?;
            if role == Role::Ours {
                memory.answering.prefetch(&offsets[0]);
            }
            let done = restore.touch(row, &memory, offsets)?;
            let stats = memory.answering.stats();
            let placed = stats.demand + stats.around + stats.populated;
            let found = done.found(stats.faults, placed.saturating_sub(restore.pages.len() as u64));
            Ok(Found { read_bytes: store.sent() - sent, ..found })
        });
        if role == Role::Ours && table == "restore-far" {
            spec.headline("restore a working set from S3");
        }
    }
    add_read_first(&mut suite, table, restore, store, offsets);
    add_link(&mut suite, table, &restore, store);
    let touched = restore.pages.len() as u64;
    suite.each_spec(|spec| {
        spec.naive(format!("{table}/naive"));
        spec.pages = touched;
        spec.bytes = touched * PAGE as u64;
    });
    session.run(suite, table)?;
    session.table(
        table,
        format!("A machine of {} restored from S3: {touched} {what}", restore.len()),
        format!(
            "{}; packed; a store on this machine behind {} ms and a link of {} MB/s",
            restore.placement.title,
            LATENCY.as_millis(),
            RATE / 1_000_000
        ),
    );
    Ok(())
}

/// Adds the one-page handler, which asks a store of the raw image for each page.
fn add_naive<'a>(
    suite: &mut Suite<'a>,
    table: &str,
    restore: Restore<'a>,
    store: &'a Store,
    offsets: &'a [Vec<u64>],
) {
    let name = "one page a fault and request, raw";
    suite.faults(Role::Naive, &format!("{table}/naive"), name, 1, move |row| {
        let sent = store.sent();
        let client = Mutex::new((store.client().map_err(failed)?, Vec::new()));
        let fetch = move |start: u64, page: &mut [u8]| {
            let mut client = client.lock().unwrap_or_else(PoisonError::into_inner);
            let (client, out) = &mut *client;
            client.get(&(start..start + page.len() as u64), out)?;
            page.copy_from_slice(out);
            Ok(())
        };
        let answer = Answer::Fetch(Arc::new(fetch));
        let handler = || Bare::anonymous(restore.len(), answer, Waiting::Poll);
        let memory = restore.placement.by_handler(handler)?;
        let done = restore.touch(row, &memory, offsets)?;
        memory.check(row)?;
        Ok(Found { read_bytes: store.sent() - sent, ..done.found(memory.faults(), 0) })
    });
}

/// Adds a machine that runs when all is read.
fn add_read_first<'a>(
    suite: &mut Suite<'a>,
    table: &str,
    restore: Restore<'a>,
    store: &'a Store,
    offsets: &'a [Vec<u64>],
) {
    let name = "everything read first";
    suite.faults(Role::Peer, &format!("{table}/read-first"), name, 1, move |row| {
        let (begun, sent) = (Instant::now(), store.sent());
        let (image, len) = (open(store)?, restore.len());
        let memory = Mapping::anonymous(len, Anonymous::default())?;
        let mut piece = vec![0; PIECE];
        for at in (0..len.get()).step_by(PIECE) {
            let left = usize::try_from(len.get() - at).map_or(PIECE, |left| left.min(PIECE));
            image.read_at(at, &mut piece[..left])?;
            memory.write_at(at, &piece[..left])?;
        }
        let read = begun.elapsed();
        let read_bytes = store.sent() - sent;
        let found = restore.touch(row, &memory, offsets)?.found(0, 0).after(read);
        Ok(Found { read_bytes, ..found })
    });
}

/// Adds what the link allows.
fn add_link<'a>(suite: &mut Suite<'a>, table: &str, restore: &Restore<'a>, store: &'a Store) {
    let material = restore.material;
    let mut wanted: Vec<usize> = restore.pages.iter().map(|page| page / (FRAME / PAGE)).collect();
    wanted.sort_unstable();
    wanted.dedup();
    wanted.retain(|frame| !material.is_zero[*frame]);
    let mean = material.packed_len / material.is_zero.len().max(1) as u64;
    let name = "the link, by 64 connections";
    suite.faults(Role::Limit, &format!("{table}/link"), name, CONNECTIONS, move |_| {
        let (begun, sent) = (Instant::now(), store.sent());
        let own = || Ok::<_, std::io::Error>((store.client()?, Vec::new()));
        frames::share(CONNECTIONS, wanted.len(), own, |(client, out), number| {
            let start = wanted[number] as u64 * mean;
            client.get(&(start..start + mean), out)
        })
        .map_err(failed)?;
        let (elapsed, read_bytes) = (begun.elapsed(), store.sent() - sent);
        Ok(Found { elapsed, read_bytes, ..Found::default() })
    });
}
