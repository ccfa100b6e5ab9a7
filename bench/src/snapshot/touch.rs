//! Touching a lazily mapped image, beside reading all of it first.

use std::hint::black_box;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use uzone_fault::{Engine, EngineOptions, LazyMapping, LazyOptions};
use uzone_os::uffd::{Answered, Features, Install, KernelFaults, Modes, Registered, Uffd};
use uzone_os::{Access, Anonymous, HugeAdvice, Mapping, Sharing, numa};
use uzone_pages::ByteLen;
use uzone_snapshot::{Image, SnapshotBacking};

use super::frames::{self, Reader};
use super::material::{FRAME, Material, PAGE, decode, failed, place, random_frames};
use crate::report::Role;
use crate::suite::{BenchError, Session, Suite};

/// How many random pages are touched, each in a frame of its own.
const TOUCHES: usize = 256;
/// Room for decoded frames, as an image has it by default.
pub(super) const CACHE: ByteLen = ByteLen::mib(16);

/// Touches every page in order.
pub(super) fn in_order(material: &Material, session: &mut Session<'_>) -> Result<(), BenchError> {
    let bytes = material.len as u64;
    let (threads, frames) = (material.threads, material.is_zero.len());
    let pages: Vec<usize> = (0..material.words.len()).collect();
    let mut suite = Suite::new(ByteLen::new(bytes));
    let (table, all) = ("snapshot-touch-seq", 0..frames);
    add_read_first(&mut suite, table, material, &pages);
    let decode_all = all.clone().collect::<Vec<_>>();
    add_limits(&mut suite, table, material, decode_all, threads);
    let name = "ours, the reader anywhere";
    let spec = suite.add(Role::Ours, "snapshot-touch-seq/ours", name, bytes, 1, {
        let pages = pages.clone();
        move || lazily(material, &pages, "snapshot-touch-seq/ours", None)
    });
    spec.headline(format!("map an image of {} lazily, in order", ByteLen::new(bytes)));
    add_same(&mut suite, table, material, &pages);
    add_erofs(&mut suite, table, material, &pages);
    // Each row takes as much memory as the image has, which others gave back long before.
    suite.before_each(move || back_by_host(ByteLen::new(bytes)));
    finish(suite, table, bytes, threads, session)?;
    session.table(
        table,
        format!("A packed image, mapped lazily and touched in order: {}", ByteLen::new(bytes)),
        format!(
            "one thread reads a word of each page; naive reads all of it first, on {threads} threads; the limit \
             decodes each frame on {threads} threads and copies it by UFFDIO_COPY, and no thread waits for it"
        ),
    );
    Ok(())
}

/// Touches pages at random, each in a frame that is not zero.
pub(super) fn at_random(material: &Material, session: &mut Session<'_>) -> Result<(), BenchError> {
    let frames = random_frames(material, TOUCHES);
    let per_frame = FRAME / PAGE;
    let pages: Vec<usize> =
        frames.iter().map(|frame| frame * per_frame + frame % per_frame).collect();
    let (bytes, calls) = ((frames.len() * FRAME) as u64, frames.len() as u64);
    let table = "snapshot-touch-random";
    let mut suite = Suite::new(ByteLen::new(bytes));
    add_read_first(&mut suite, table, material, &pages);
    add_limits(&mut suite, table, material, frames, 1);
    let name = "ours, the reader anywhere";
    let spec = suite.add(Role::Ours, "snapshot-touch-random/ours", name, bytes, 1, {
        let pages = pages.clone();
        move || lazily(material, &pages, "snapshot-touch-random/ours", None)
    });
    spec.headline("touch a page of a packed image at random");
    add_same(&mut suite, table, material, &pages);
    add_erofs(&mut suite, table, material, &pages);
    suite.each_spec(|spec| {
        spec.counts(Some(calls), None);
    });
    finish(suite, table, bytes, 1, session)?;
    session.table(
        table,
        format!("A packed image, mapped lazily: {calls} random pages, each in another frame"),
        "one thread reads a word of each; naive reads the whole image first; the limit decodes each frame and \
         copies it by UFFDIO_COPY, and no thread waits for it; the room for decoded frames was used before",
    );
    Ok(())
}

/// Takes memory and gives it back, so that a row gets pages which the host backs: those that are free for
/// seconds in a virtual machine are taken back by some hosts, and touching them then costs several copies.
fn back_by_host(len: ByteLen) -> Result<(), BenchError> {
    Mapping::anonymous(len, Anonymous::default())?.populate(0..len.get())?;
    Ok(())
}

/// Measures a table, whose rows are all compared with the same two.
fn finish(
    mut suite: Suite<'_>,
    table: &str,
    bytes: u64,
    limit_threads: usize,
    session: &mut Session<'_>,
) -> Result<(), BenchError> {
    suite.each_spec(|spec| {
        spec.naive(format!("{table}/read-first")).bytes = bytes;
        // On one CPU there is no limit of several threads.
        if !(limit_threads > 1 && spec.id.ends_with("-same")) {
            spec.limit(format!("{table}/copy"), bytes);
        }
    });
    session.run(suite, table)
}

/// Adds reading the whole image into memory, and touching it then.
fn add_read_first<'a>(suite: &mut Suite<'a>, table: &str, material: &'a Material, pages: &[usize]) {
    let (id, pages) = (format!("{table}/read-first"), pages.to_vec());
    let row = id.clone();
    let name = "everything read first";
    suite.add(Role::Naive, &id, name, 0, material.threads, move || {
        let image = material.open(ByteLen::ZERO)?;
        let started = Instant::now();
        let mut memory = vec![0; material.len];
        read_all(&image, &mut memory, material.threads)?;
        check(material, &pages, &row, |at, out| {
            out.copy_from_slice(&memory[at..at + 8]);
            Ok(())
        })?;
        Ok(started.elapsed())
    });
}

fn read_all(image: &Image, memory: &mut [u8], threads: usize) -> Result<(), BenchError> {
    let share = memory.len().div_ceil(threads).next_multiple_of(FRAME);
    let read = |(number, part): (usize, &mut [u8])| {
        let start = (number * share) as u64;
        let frames = (start..).step_by(FRAME).zip(part.chunks_mut(FRAME));
        frames.into_iter().try_for_each(|(at, frame)| image.read_at(at, frame))
    };
    std::thread::scope(|scope| {
        let parts = memory.chunks_mut(share).enumerate();
        let threads: Vec<_> = parts.map(|part| scope.spawn(move || read(part))).collect();
        let count = threads.len();
        threads.into_iter().try_for_each(|thread| match thread.join() {
            Ok(read) => Ok(read?),
            Err(_) => Err(BenchError::Threads { threads: count }),
        })
    })
}

/// Adds decoding the frames, and doing so and putting each in place.
fn add_limits<'a>(
    suite: &mut Suite<'a>,
    table: &str,
    material: &'a Material,
    frames: Vec<usize>,
    threads: usize,
) {
    let name = "decoding the frames alone";
    let wanted = frames.clone();
    suite.add(Role::Peer, &format!("{table}/decode"), name, 0, threads, move || {
        let started = Instant::now();
        frames::share(threads, wanted.len(), Reader::new, |reader, number| {
            if !material.is_zero[wanted[number]] {
                black_box(decode(material, reader, wanted[number])?);
            }
            Ok(())
        })
        .map_err(failed)?;
        Ok(started.elapsed())
    });
    let name = "decoding, and UFFDIO_COPY while no thread waits";
    let id = format!("{table}/copy");
    let row = id.clone();
    suite.add(Role::Limit, &id, name, 0, threads, move || {
        let memory = registered(material.len)?;
        let started = Instant::now();
        frames::share(threads, frames.len(), Reader::new, |reader, number| {
            let frame = frames[number];
            let (start, how) = ((frame * FRAME) as u64, Install::default());
            let answered = if material.is_zero[frame] {
                memory.zero(start..start + FRAME as u64, how)
            } else {
                memory.copy(start, decode(material, reader, frame)?, how)
            };
            match answered {
                Ok(Answered::All) => Ok(()),
                Ok(other) => Err(io::Error::other(format!("the kernel answered {other:?}"))),
                Err(error) => Err(io::Error::other(error)),
            }
        })
        .map_err(|cause| BenchError::Handler { row: row.clone(), cause })?;
        Ok(started.elapsed())
    });
}

fn registered(len: usize) -> Result<Registered, BenchError> {
    let uffd = Uffd::open(Features::NONE, Features::NONE, KernelFaults::IfAllowed)?;
    let align = Some(ByteLen::mib(2));
    let how = Anonymous { huge: HugeAdvice::Default, align, ..Anonymous::default() };
    let mapping = Mapping::anonymous(ByteLen::new(len as u64), how)?;
    Ok(Registered::new(Arc::new(uffd), mapping, Modes::MISSING)?)
}

/// Adds the row of which every thread runs on one CPU.
fn add_same<'a>(suite: &mut Suite<'a>, table: &str, material: &'a Material, pages: &[usize]) {
    let (id, pages) = (format!("{table}/ours-same"), pages.to_vec());
    let row = id.clone();
    suite.add(Role::Variant, &id, "ours, all threads on one CPU", 0, 1, move || {
        let cpus = numa::usable(&(0..1024).collect::<Vec<_>>())?;
        lazily(material, &pages, &row, cpus.first().copied())
    });
}

/// Adds touching the kernel's mapping of the same bytes in EROFS.
fn add_erofs<'a>(suite: &mut Suite<'a>, table: &str, material: &'a Material, pages: &[usize]) {
    let Some(erofs) = &material.erofs else { return };
    let (id, pages) = (format!("{table}/erofs"), pages.to_vec());
    let row = id.clone();
    suite.add(Role::Peer, &id, erofs.name("the kernel's mapping of"), 0, 1, move || {
        let file = OwnedFd::from(erofs.open()?.try_clone().map_err(failed)?);
        let len = ByteLen::new(material.len as u64);
        let memory = Mapping::file(file, 0, len, Access::ReadWrite, Sharing::Private)?;
        let started = Instant::now();
        check(material, &pages, &row, |at, out| Ok(memory.read_at(at as u64, out)?))?;
        Ok(started.elapsed())
    });
}

/// Maps the image and touches pages of it, with every thread on `cpu` if there is one.
fn lazily(
    material: &Material,
    pages: &[usize],
    row: &str,
    cpu: Option<u32>,
) -> Result<Duration, BenchError> {
    let touch = || {
        let mut options = LazyOptions::default();
        if let Some(cpu) = cpu {
            numa::keep_thread_to(&[cpu])?;
            // A polling reader would keep the thread that it has woken from running.
            options = options.spin(Duration::ZERO);
        }
        let engine = Engine::with(EngineOptions::default())?;
        let image = Arc::new(material.open_later(CACHE)?);
        let backing = Arc::new(SnapshotBacking::new(image));
        let memory = engine.map(ByteLen::new(material.len as u64), backing, &options)?;
        timed(material, pages, row, &memory)
    };
    // A thread starts with the CPUs of the one that starts it, so the engine's threads have the same.
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().spawn_scoped(scope, touch);
        let thread = thread.map_err(|_| BenchError::Threads { threads: 1 })?;
        thread.join().unwrap_or(Err(BenchError::Threads { threads: 1 }))
    })
}

fn timed(
    material: &Material,
    pages: &[usize],
    row: &str,
    memory: &LazyMapping,
) -> Result<Duration, BenchError> {
    let started = Instant::now();
    check(material, pages, row, |at, out| Ok(memory.read_at(at as u64, out)?))?;
    Ok(started.elapsed())
}

/// Reads a word of each page, and compares it.
pub(super) fn check(
    material: &Material,
    pages: &[usize],
    row: &str,
    read: impl Fn(usize, &mut [u8; 8]) -> Result<(), BenchError>,
) -> Result<(), BenchError> {
    let mut word = [0; 8];
    for &page in pages {
        let at = place(page);
        read(at, &mut word)?;
        if u64::from_ne_bytes(word) != material.words[page] {
            return Err(BenchError::wrong_byte(row, at as u64));
        }
    }
    Ok(())
}
