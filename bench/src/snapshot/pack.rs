//! Packing, undoing it, reading at random, and verifying.

use std::fs::File;
use std::hint::black_box;
use std::io::{self, Seek};
use std::num::NonZeroU64;
use std::os::unix::fs::FileExt;
use std::process::Stdio;
use std::time::{Duration, Instant};

use uzone_os::page_cache;
use uzone_pages::ByteLen;
use uzone_snapshot::Codec;

use super::frames::{self, Reader};
use super::material::{FRAME, LEVEL, Material, decode, failed, random_frames};
use crate::report::Role;
use crate::suite::{BenchError, Session, Suite};

/// How many random places a row reads.
const READS: usize = 256;
/// How much is hashed at once where nothing else is done.
const HASHED: usize = 1 << 20;

/// Measures packing and unpacking.
pub(super) fn tables(material: &Material, session: &mut Session<'_>) -> Result<(), BenchError> {
    let arguments = [format!("-T{}", material.threads), format!("-{LEVEL}")];
    let file = material.new_file()?;
    let compressed = run_zstd(material, &arguments, &material.raw, &file)?.map(|_| file);
    if compressed.is_none() {
        for table in ["snapshot-pack", "snapshot-unpack"] {
            session.skip(format!("{table}/zstd"), "the command zstd is not installed");
        }
    }
    if session.wants("snapshot-pack") {
        pack(material, &arguments, compressed.as_ref(), session)?;
    }
    if session.wants("snapshot-unpack") {
        unpack(material, compressed.as_ref(), session)?;
    }
    Ok(())
}

fn pack(
    material: &Material,
    arguments: &[String],
    compressed: Option<&File>,
    session: &mut Session<'_>,
) -> Result<(), BenchError> {
    let (bytes, threads) = (material.len as u64, material.threads);
    let mut suite = Suite::new(ByteLen::new(bytes));
    if let Some(file) = compressed {
        let name = format!("zstd {}, {}", arguments.join(" "), material.smaller(len_of(file)?));
        suite.add(Role::Naive, "snapshot-pack/zstd", name, bytes, threads, move || {
            let to = material.new_file()?;
            Ok(run_zstd(material, arguments, &material.raw, &to)?.unwrap_or_default())
        });
    }
    let name = format!("frames alone, {}", material.smaller(material.frames_len));
    suite.add(Role::Limit, "snapshot-pack/frames", name, bytes, threads, move || {
        let to = material.new_file()?;
        let started = Instant::now();
        let written = frames::pack(&material.raw, &to, material.len / FRAME, threads);
        written.and_then(|_| to.sync_all()).map_err(failed)?;
        Ok(started.elapsed())
    });
    for (codec, row, role) in
        [(Codec::Zstd, "ours", Role::Ours), (Codec::Lz4, "ours-lz4", Role::Variant)]
    {
        let (_, packed) = material.pack(codec)?;
        let name = format!("ours, {}, {}", codec.name(), material.smaller(packed.file_bytes));
        let id = format!("snapshot-pack/{row}");
        let spec = suite.add(role, &id, name, bytes, threads, move || {
            let started = Instant::now();
            let (file, _) = material.pack(codec)?;
            let elapsed = started.elapsed();
            drop(file);
            Ok(elapsed)
        });
        spec.limit("snapshot-pack/frames", bytes);
        if role == Role::Ours {
            spec.headline(format!("pack an image of {}", ByteLen::new(bytes)));
        }
    }
    if compressed.is_some() {
        suite.each_spec(|spec| {
            spec.naive("snapshot-pack/zstd");
        });
    }
    session.run(suite, "packing")?;
    session.table(
        "snapshot-pack",
        format!("Packing {}, zstd of level {LEVEL}", ByteLen::new(bytes)),
        "each file is on the device at the end; naive is the command, the limit writes frames of 64 KiB \
         without hashes or an index",
    );
    Ok(())
}

fn len_of(file: &File) -> Result<u64, BenchError> {
    Ok(file.metadata().map_err(failed)?.len())
}

/// Runs the command. Returns how long it took with its output on the device, or `None` if there is none.
fn run_zstd(
    material: &Material,
    arguments: &[String],
    from: &File,
    to: &File,
) -> Result<Option<Duration>, BenchError> {
    let Some(mut command) = material.zstd(arguments) else { return Ok(None) };
    let mut run = || -> io::Result<Duration> {
        let mut input = from.try_clone()?;
        input.rewind()?;
        command.stdin(input).stdout(to.try_clone()?).stderr(Stdio::inherit());
        let started = Instant::now();
        let status = command.status()?;
        if !status.success() {
            return Err(io::Error::other(format!("zstd ended with {status}")));
        }
        to.sync_all()?;
        Ok(started.elapsed())
    };
    run().map(Some).map_err(failed)
}

fn unpack(
    material: &Material,
    compressed: Option<&File>,
    session: &mut Session<'_>,
) -> Result<(), BenchError> {
    let bytes = material.len as u64;
    let mut suite = Suite::new(ByteLen::new(bytes));
    if let Some(file) = compressed {
        let name = "zstd -d";
        suite.add(Role::Naive, "snapshot-unpack/zstd", name, bytes, 1, move || {
            let to = material.new_file()?;
            Ok(run_zstd(material, &["-d".to_owned()], file, &to)?.unwrap_or_default())
        });
    }
    let name = "frames alone";
    suite.add(Role::Limit, "snapshot-unpack/frames", name, bytes, material.threads, || {
        let to = material.new_file()?;
        let started = Instant::now();
        frames::share(material.threads, material.is_zero.len(), Reader::new, |reader, frame| {
            to.write_all_at(decode(material, reader, frame)?, (frame * FRAME) as u64)
        })
        .and_then(|()| to.sync_all())
        .map_err(failed)?;
        Ok(started.elapsed())
    });
    let path = material.directory.join(format!("uzone-bench-{}.raw", std::process::id()));
    let image = material.open(ByteLen::ZERO)?;
    let spec =
        suite.add(Role::Ours, "snapshot-unpack/ours", "ours", bytes, material.threads, move || {
            let started = Instant::now();
            image.unpack(&path, material.threads, &|_| true)?;
            let elapsed = started.elapsed();
            std::fs::remove_file(&path).map_err(failed)?;
            Ok(elapsed)
        });
    spec.limit("snapshot-unpack/frames", bytes);
    spec.headline(format!("unpack an image of {}", ByteLen::new(bytes)));
    if compressed.is_some() {
        suite.each_spec(|spec| {
            spec.naive("snapshot-unpack/zstd");
        });
    }
    session.run(suite, "unpacking")?;
    session.table(
        "snapshot-unpack",
        format!("Unpacking {}", ByteLen::new(bytes)),
        "each file is on the device at the end; zeroes are holes in ours; the limit decodes frames of 64 KiB \
         without their hashes",
    );
    Ok(())
}

/// Measures reading 64 KiB at random places.
pub(super) fn read(material: &Material, session: &mut Session<'_>) -> Result<(), BenchError> {
    let frames = random_frames(material, READS);
    let (calls, bytes) = (frames.len() as u64, (frames.len() * FRAME) as u64);
    let offsets: Vec<u64> = frames.iter().map(|frame| (frame * FRAME) as u64).collect();
    let mut suite = Suite::new(ByteLen::new(bytes));
    suite.add(
        Role::Naive,
        "snapshot-read/zeekstd",
        "a seek in the crate zeekstd",
        bytes,
        1,
        || seek(material, &offsets),
    );
    suite.add(Role::Limit, "snapshot-read/decode", "decoding a frame alone", bytes, 1, || {
        let mut reader = Reader::new().map_err(failed)?;
        let started = Instant::now();
        for frame in &frames {
            black_box(decode(material, &mut reader, *frame).map_err(failed)?);
        }
        Ok(started.elapsed())
    });
    suite.add(Role::Peer, "snapshot-read/raw", "preadv of the raw bytes", bytes, 1, || {
        read_at_each(&material.raw, &offsets)
    });
    if let Some(erofs) = &material.erofs {
        suite.add(Role::Peer, "snapshot-read/erofs", erofs.name("preadv of"), bytes, 1, || {
            read_at_each(erofs.open()?, &offsets)
        });
    }
    let rows = [
        ("ours", "ours, decoded each time", ByteLen::ZERO, Role::Ours),
        ("ours-kept", "ours, decoded before", ByteLen::new(2 * bytes), Role::Variant),
    ];
    for (row, name, cache, role) in rows {
        let (image, offsets) = (material.open(cache)?, &offsets);
        let id = format!("snapshot-read/{row}");
        let spec = suite.add(role, &id, name, bytes, 1, move || {
            let mut out = vec![0; FRAME];
            let started = Instant::now();
            for offset in offsets {
                image.read_at(*offset, &mut out)?;
                black_box(&out);
            }
            Ok(started.elapsed())
        });
        spec.limit("snapshot-read/decode", bytes);
        if role == Role::Ours {
            spec.headline("read 64 KiB of a packed image at random");
        }
    }
    suite.each_spec(|spec| {
        spec.naive("snapshot-read/zeekstd").counts(Some(calls), None);
    });
    session.run(suite, "reading at random")?;
    session.table(
        "snapshot-read",
        format!("Reading 64 KiB at {calls} random places of a packed image"),
        "whole frames that are not zero, from the page cache; naive seeks by the seek table, the limit \
         decodes without the hash",
    );
    Ok(())
}

/// Measures random reads of files that the page cache has forgotten.
pub(super) fn read_cold(material: &Material, session: &mut Session<'_>) -> Result<(), BenchError> {
    let frames = random_frames(material, READS);
    let (calls, bytes) = (frames.len() as u64, (frames.len() * FRAME) as u64);
    let offsets: Vec<u64> = frames.iter().map(|frame| (frame * FRAME) as u64).collect();
    let mut suite = Suite::new(ByteLen::new(bytes));
    let (row, name) = ("snapshot-read-cold/zeekstd", "a seek in the crate zeekstd");
    suite.add(Role::Naive, row, name, bytes, 1, || {
        forget(&material.packed)?;
        seek(material, &offsets)
    });
    let (row, name) = ("snapshot-read-cold/decode", "reading and decoding a frame alone");
    suite.add(Role::Limit, row, name, bytes, 1, || {
        forget(&material.frames.0)?;
        let mut reader = Reader::new().map_err(failed)?;
        let started = Instant::now();
        for frame in &frames {
            black_box(decode(material, &mut reader, *frame).map_err(failed)?);
        }
        Ok(started.elapsed())
    });
    let (row, name) = ("snapshot-read-cold/raw", "preadv of the raw bytes");
    suite.add(Role::Peer, row, name, bytes, 1, || {
        forget(&material.raw)?;
        read_at_each(&material.raw, &offsets)
    });
    let (row, name) = ("snapshot-read-cold/ours", "ours");
    let spec = suite.add(Role::Ours, row, name, bytes, 1, || {
        let image = material.open(ByteLen::ZERO)?;
        forget(&material.packed)?;
        let mut out = vec![0; FRAME];
        let started = Instant::now();
        for offset in &offsets {
            image.read_at(*offset, &mut out)?;
            black_box(&out);
        }
        Ok(started.elapsed())
    });
    spec.limit("snapshot-read-cold/decode", bytes);
    spec.headline("read 64 KiB of a packed image at random, from the device");
    suite.each_spec(|spec| {
        spec.naive("snapshot-read-cold/zeekstd").counts(Some(calls), None).cold = true;
    });
    session.run(suite, "reading at random from the device")?;
    session.table(
        "snapshot-read-cold",
        format!("Reading 64 KiB at {calls} random places of a packed image that the page cache has forgotten"),
        "the file of each row is forgotten first (POSIX_FADV_DONTNEED); a host below this one may have it still",
    );
    Ok(())
}

/// Has the page cache forget a file.
pub(crate) fn forget(file: &File) -> Result<(), BenchError> {
    let Some(len) = NonZeroU64::new(len_of(file)?) else { return Ok(()) };
    // Pages that are not on the device yet stay.
    file.sync_data().and_then(|()| page_cache::forget(file, 0, len)).map_err(failed)
}

/// Reads as many bytes as a frame has at each offset.
fn read_at_each(file: &File, offsets: &[u64]) -> Result<Duration, BenchError> {
    let mut out = vec![0; FRAME];
    let started = Instant::now();
    for offset in offsets {
        file.read_exact_at(&mut out, *offset).map_err(failed)?;
        black_box(&out);
    }
    Ok(started.elapsed())
}

/// Reads a frame at each offset by another implementation.
fn seek(material: &Material, offsets: &[u64]) -> Result<Duration, BenchError> {
    let file = material.packed.try_clone().map_err(failed)?;
    let seek = |error: zeekstd::Error| failed(io::Error::other(error));
    let mut decoder = zeekstd::Decoder::new(file).map_err(seek)?;
    let mut out = vec![0; FRAME];
    let started = Instant::now();
    for &offset in offsets {
        decoder.set_offset(offset).map_err(seek)?;
        let mut filled = 0;
        while filled < FRAME {
            match decoder.decompress(&mut out[filled..]).map_err(seek)? {
                0 => return Err(BenchError::wrong_byte("snapshot-read/zeekstd", offset)),
                count => filled += count,
            }
        }
        black_box(&out);
    }
    Ok(started.elapsed())
}

/// Measures comparing every hash.
pub(super) fn verify(material: &Material, session: &mut Session<'_>) -> Result<(), BenchError> {
    let (bytes, threads) = (material.packed_len, material.threads);
    let len = usize::try_from(bytes).unwrap_or(usize::MAX);
    let mut suite = Suite::new(ByteLen::new(material.len as u64));
    suite.add(Role::Limit, "snapshot-verify/blake3", "BLAKE3 alone", bytes, threads, move || {
        let started = Instant::now();
        frames::share(
            threads,
            len.div_ceil(HASHED),
            || Ok(vec![0; HASHED]),
            |piece, number| {
                let start = number * HASHED;
                let piece = &mut piece[..HASHED.min(len - start)];
                material.packed.read_exact_at(piece, start as u64)?;
                black_box(blake3::hash(piece));
                Ok(())
            },
        )
        .map_err(failed)?;
        Ok(started.elapsed())
    });
    for (row, name, decode, role) in [
        ("ours", "ours", false, Role::Ours),
        ("ours-decode", "ours, decoding as well", true, Role::Variant),
    ] {
        let image = material.open(ByteLen::ZERO)?;
        let id = format!("snapshot-verify/{row}");
        let spec = suite.add(role, &id, name, bytes, threads, move || {
            let started = Instant::now();
            image.verify(threads, decode, &|_| ())?;
            Ok(started.elapsed())
        });
        spec.limit("snapshot-verify/blake3", bytes);
        if role == Role::Ours {
            spec.headline("verify a packed image");
        }
    }
    session.run(suite, "verifying")?;
    session.table(
        "snapshot-verify",
        format!("Verifying {} of a packed image", ByteLen::new(bytes)),
        "from the page cache; the limit hashes the file in pieces of 1 MiB",
    );
    Ok(())
}
