//! A VM that is restored from an image in object storage, at a known distance.
//!
//! | row | work |
//! |---|---|
//! | `naive` | one page for each fault: each is fetched from the raw image, which ours does not serve from there |
//! | `packed` | each frame is fetched when one of its pages is touched first |
//! | `replay` | the list of the pages is installed ahead |
//! | `read-first` | all of the image is read before the VM runs |
//! | `link` | the bytes of the frames are asked for by 64 connections, and nothing is done with them |

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use uzone_fault::LazyOptions;
use uzone_snapshot::SnapshotBacking;

use super::machine::{CACHE, Restore, machine};
use crate::tables::image::store::{Store, distance};
use uzone_harness::ways::one_page::{Answer, OnePage};
use uzone_harness::{Found, Result, Role, Session, Suite};

/// The number of connections that fill the link.
const CONNECTIONS: usize = 64;
/// The largest number of touched pages: each may take a round trip.
const TOUCHES: usize = 512;

/// Runs the table of a working set.
pub(super) fn table(restore: Restore<'_>, session: &mut Session<'_>) -> Result {
    let restore = restore.of(&restore.pages[..restore.pages.len().min(TOUCHES)]);
    let (engine, offsets) = (&restore.engine()?, &restore.offsets());
    let store = &Store::start(&restore.material.packed)?;
    let raw = &Store::start(&restore.material.raw)?;
    let mut suite = Suite::new("restore-far", restore.len());
    add(&mut suite, Role::Naive, "naive", "one page a fault and request, raw", raw, move |row| {
        let client = Mutex::new((raw.client()?, Vec::new()));
        let fetch = move |start: u64, page: &mut [u8]| {
            let mut client = client.lock().unwrap_or_else(PoisonError::into_inner);
            let (client, out) = &mut *client;
            client.get(&(start..start + page.len() as u64), out)?;
            page.copy_from_slice(out);
            Ok(())
        };
        let answer = Answer::Fetch(Arc::new(fetch));
        let handler = || OnePage::anonymous(restore.len(), answer);
        restore.found(row, &restore.placement.by_handler(handler)?, offsets)
    });
    for (row, name, role) in [
        ("packed", "ours, a request for each frame", Role::Peer),
        ("replay", "ours, the set installed ahead", Role::Ours),
    ] {
        add(&mut suite, role, row, name, store, move |row| {
            let image = Arc::new(store.open_image(CACHE)?);
            let backing = Arc::new(SnapshotBacking::new(image));
            let memory = machine(engine, restore.len(), backing, &LazyOptions::default())?;
            if role == Role::Ours {
                memory.answering().prefetch(offsets);
            }
            restore.found(row, &memory, offsets)
        });
    }
    add(&mut suite, Role::Peer, "read-first", "everything read first", store, move |row| {
        let begun = Instant::now();
        let image = store.open_image(CACHE)?;
        restore.read_first(row, offsets, begun, |at, piece| Ok(image.read_at(at, piece)?))
    });
    add_link(&mut suite, &restore, store);
    restore.compare(&mut suite, "naive");
    if let Some(spec) = suite.spec("replay") {
        spec.headline("restore a working set from S3");
    }
    session.measure(
        suite,
        format!(
            "A VM of {} restored from S3: {} pages of a working set in a random order",
            restore.len(),
            restore.pages.len()
        ),
        format!("{}; packed; {}", restore.placement.title, distance()),
    )
}

/// Adds a row that asks a store, and counts the bytes that it sends.
fn add<'a>(
    suite: &mut Suite<'a>,
    role: Role,
    row: &str,
    name: &str,
    store: &'a Store,
    mut run: impl FnMut(&str) -> Result<Found> + 'a,
) {
    suite.faults(role, row, name, move |row| {
        let sent = store.sent();
        let found = run(row)?;
        Ok(Found { read_bytes: store.sent() - sent, ..found })
    });
}

/// Adds the limit of the link.
fn add_link<'a>(suite: &mut Suite<'a>, restore: &Restore<'a>, store: &'a Store) {
    let mean = restore.material.mean_frame();
    let start = |frame: usize| frame as u64 * mean;
    let ranges: Vec<_> =
        restore.frames().into_iter().map(|frame| start(frame)..start(frame) + mean).collect();
    suite.threads = CONNECTIONS;
    add(suite, Role::Limit, "link", "the link, by 64 connections", store, move |_| {
        Ok(Found { elapsed: store.ask(CONNECTIONS, &ranges)?, ..Found::default() })
    });
}
