//! Touching a lazily mapped image, beside reading all of it first.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use uzone_fault::{Engine, EngineOptions, LazyOptions};
use uzone_os::uffd::{Answered, Features, Fill, Install};
use uzone_os::{Anonymous, Mapping};
use uzone_pages::ByteLen;
use uzone_snapshot::{Image, SnapshotBacking};

use super::frames::{self, Reader};
use super::material::{FRAME, Material, decode};
use uzone_harness::{
    BenchError, Reads, Result, Role, Session, Suite, check_word, fill, place, registered, timed,
};

/// The default size of an image's frame cache.
const CACHE: ByteLen = ByteLen::mib(16);

/// Touches every page in order.
pub(super) fn in_order(material: &Material, session: &mut Session<'_>) -> Result {
    let (len, threads) = (ByteLen::new(material.len as u64), material.threads);
    let mut suite = Suite::new("snapshot-touch-seq", len).writing(len.get()).threads(threads);
    suite.add(Role::Naive, "read-first", "everything read first", |row| {
        let image = material.open(ByteLen::ZERO)?;
        timed(|| {
            let mut memory = vec![0; material.len];
            read_all(&image, &mut memory, threads)?;
            check(material, row, &memory)?;
            Ok(memory)
        })
    });
    let name = "decoding, and UFFDIO_COPY while no thread waits";
    suite.add(Role::Limit, "copy", name, |row| decode_and_copy(material, row));
    suite.threads = 1;
    suite
        .add(Role::Ours, "ours", "ours", |row| lazily(material, row))
        .headline(format!("map an image of {len} lazily, in order"));
    suite.naive("read-first").limit("copy");
    // Each row takes as much memory as the image has, which others gave back long before.
    suite.before_each(move || back_by_host(len));
    session.measure(
        suite,
        format!("A packed image, mapped lazily and touched in order: {len}"),
        format!(
            "one thread reads a word of each page; naive reads all of it first, on {threads} threads; the limit \
             decodes each frame on {threads} threads and copies it by UFFDIO_COPY, and no thread waits for it"
        ),
    )
}

/// Takes memory and gives it back, so that a row gets pages which the host backs: some hosts take back pages that are
/// free in a VM for seconds, and the next touch of such a page costs several copies.
fn back_by_host(len: ByteLen) -> Result {
    Mapping::anonymous(len, Anonymous::default())?.populate(0..len.get())?;
    Ok(())
}

fn read_all(image: &Image, memory: &mut [u8], threads: usize) -> Result {
    fill(memory, threads, FRAME, |start, part| {
        let frames = (start as u64..).step_by(FRAME).zip(part.chunks_mut(FRAME));
        frames.into_iter().try_for_each(|(at, frame)| Ok(image.read_at(at, frame)?))
    })
    .map(drop)
}

/// Decodes each frame and puts it in place.
fn decode_and_copy(material: &Material, row: &str) -> Result<Duration> {
    let len = ByteLen::new(material.len as u64);
    let memory = registered(len, Features::NONE, Features::NONE)?;
    timed(|| {
        frames::share(material.threads, material.is_zero.len(), Reader::new, |reader, frame| {
            let start = (frame * FRAME) as u64;
            let fill = if material.is_zero[frame] {
                Fill::Zero
            } else {
                Fill::Bytes(decode(material, reader, frame)?)
            };
            let refused = |cause| BenchError::handler(row, cause);
            match memory.install(start..start + FRAME as u64, fill, Install::default()) {
                Ok(Answered::All) => Ok(()),
                Ok(other) => Err(refused(io::Error::other(format!("answered {other:?}")))),
                Err(error) => Err(refused(io::Error::other(error))),
            }
        })
    })
}

/// Maps the image and touches its pages.
fn lazily(material: &Material, row: &str) -> Result<Duration> {
    let engine = Engine::with(EngineOptions::default())?;
    let backing = Arc::new(SnapshotBacking::new(Arc::new(material.open_later(CACHE)?)));
    let len = ByteLen::new(material.len as u64);
    let memory = engine.map(len, backing, &LazyOptions::default())?;
    timed(|| check(material, row, &memory))
}

/// Reads a word of each page, and compares it.
fn check(material: &Material, row: &str, memory: &impl Reads) -> Result {
    let mut words = (0..).zip(&material.words);
    words.try_for_each(|(page, word)| check_word(row, memory, place(page), *word))
}
