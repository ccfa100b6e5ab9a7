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
pub(super) const CACHE: ByteLen = ByteLen::mib(16);

/// Touches every page in order.
pub(super) fn in_order(material: &Material, session: &mut Session<'_>) -> Result {
    let (bytes, threads) = (ByteLen::new(material.len as u64), material.threads);
    let pages: Vec<usize> = (0..material.words.len()).collect();
    let frames: Vec<usize> = (0..material.is_zero.len()).collect();
    let mut suite = Suite::new("snapshot-touch-seq", bytes).writing(bytes.get());
    let line = format!("map an image of {bytes} lazily, in order");
    add(&mut suite, material, &pages, &frames, threads, line);
    // Each row takes as much memory as the image has, which others gave back long before.
    suite.before_each(move || back_by_host(bytes));
    session.measure(
        suite,
        format!("A packed image, mapped lazily and touched in order: {bytes}"),
        format!(
            "one thread reads a word of each page; naive reads all of it first, on {threads} threads; the limit \
             decodes each frame on {threads} threads and copies it by UFFDIO_COPY, and no thread waits for it"
        ),
    )
}

/// Adds all rows of a table, whose limit runs on `threads`.
fn add<'a>(
    suite: &mut Suite<'a>,
    material: &'a Material,
    pages: &'a [usize],
    frames: &'a [usize],
    threads: usize,
    headline: String,
) {
    add_read_first(suite, material, pages);
    suite.threads = threads;
    add_limits(suite, material, frames, threads);
    suite.threads = 1;
    let ours = suite.add(Role::Ours, "ours", "ours", |row| lazily(material, pages, row));
    ours.headline(headline);
    suite.naive("read-first").limit("copy");
}

/// Takes memory and gives it back, so that a row gets pages which the host backs: some hosts take back pages that are
/// free in a VM for seconds, and the next touch of such a page costs several copies.
fn back_by_host(len: ByteLen) -> Result {
    Mapping::anonymous(len, Anonymous::default())?.populate(0..len.get())?;
    Ok(())
}

/// Adds reading the whole image into memory, and touching it then.
fn add_read_first<'a>(suite: &mut Suite<'a>, material: &'a Material, pages: &'a [usize]) {
    suite.threads = material.threads;
    suite.add(Role::Naive, "read-first", "everything read first", |row| {
        let image = material.open(ByteLen::ZERO)?;
        timed(|| {
            let mut memory = vec![0; material.len];
            read_all(&image, &mut memory, material.threads)?;
            check(material, pages, row, &memory)?;
            Ok(memory)
        })
    });
}

fn read_all(image: &Image, memory: &mut [u8], threads: usize) -> Result {
    fill(memory, threads, FRAME, |start, part| {
        let frames = (start as u64..).step_by(FRAME).zip(part.chunks_mut(FRAME));
        frames.into_iter().try_for_each(|(at, frame)| Ok(image.read_at(at, frame)?))
    })
    .map(drop)
}

/// Adds decoding the frames and putting each in place.
fn add_limits<'a>(
    suite: &mut Suite<'a>,
    material: &'a Material,
    frames: &'a [usize],
    threads: usize,
) {
    let name = "decoding, and UFFDIO_COPY while no thread waits";
    suite.add(Role::Limit, "copy", name, move |row| {
        let len = ByteLen::new(material.len as u64);
        let memory = registered(len, Features::NONE, Features::NONE)?;
        timed(|| {
            frames::share(threads, frames.len(), Reader::new, |reader, number| {
                let frame = frames[number];
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
    });
}

/// Maps the image and touches pages of it.
fn lazily(material: &Material, pages: &[usize], row: &str) -> Result<Duration> {
    let engine = Engine::with(EngineOptions::default())?;
    let backing = Arc::new(SnapshotBacking::new(Arc::new(material.open_later(CACHE)?)));
    let len = ByteLen::new(material.len as u64);
    let memory = engine.map(len, backing, &LazyOptions::default())?;
    timed(|| check(material, pages, row, &memory))
}

/// Reads a word of each page, and compares it.
pub(super) fn check(
    material: &Material,
    pages: &[usize],
    row: &str,
    memory: &impl Reads,
) -> Result {
    let check = |&page: &usize| check_word(row, memory, place(page as u64), material.words[page]);
    pages.iter().try_for_each(check)
}
