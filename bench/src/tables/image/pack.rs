//! Packing, undoing it, reading at random, and verifying.

use std::fs::File;
use std::hint::black_box;
use std::io::{self, Seek};
use std::num::NonZeroU64;
use std::os::unix::fs::FileExt;
use std::process::Stdio;
use std::time::Duration;

use uzone_os::page_cache;
use uzone_pages::ByteLen;
use uzone_snapshot::Codec;

use super::frames::{self, Reader};
use super::material::{FRAME, LEVEL, Material, decode, random_frames};
use uzone_harness::{BenchError, Result, Role, Session, Suite, bytes, index, timed};

/// The number of random places that a row reads.
const READS: usize = 256;
/// The length of a piece of the bare hash.
const HASHED: usize = 1 << 20;

/// Measures packing and unpacking.
pub(super) fn tables(material: &Material, session: &mut Session<'_>) -> Result {
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
) -> Result {
    let (size, threads) = (bytes(material.len), material.threads);
    let mut suite = Suite::new("snapshot-pack", size).writing(size.get()).threads(threads);
    if let Some(file) = compressed {
        let name = format!("zstd {}, {}", arguments.join(" "), material.smaller(len_of(file)?));
        suite.add(Role::Naive, "zstd", name, move |_| {
            let to = material.new_file()?;
            Ok(run_zstd(material, arguments, &material.raw, &to)?.unwrap_or_default())
        });
    }
    let name = format!("frames alone, {}", material.smaller(material.frames_len));
    suite.add(Role::Limit, "frames", name, move |_| {
        let to = material.new_file()?;
        timed(|| {
            frames::pack(&material.raw, &to, material.len / FRAME, threads)?;
            Ok(to.sync_all()?)
        })
    });
    for (codec, row, role) in
        [(Codec::Zstd, "ours", Role::Ours), (Codec::Lz4, "ours-lz4", Role::Variant)]
    {
        let (_, packed) = material.pack(codec)?;
        let name = format!("ours, {}, {}", codec.name(), material.smaller(packed.file_bytes));
        let spec = suite.add(role, row, name, move |_| timed(|| material.pack(codec)));
        spec.limit("frames");
        if role == Role::Ours {
            spec.headline(format!("pack an image of {size}"));
        }
    }
    if compressed.is_some() {
        suite.naive("zstd");
    }
    session.measure(
        suite,
        format!("Packing {size}, zstd of level {LEVEL}"),
        "each file is on the device at the end; naive is the command, the limit writes frames of 64 KiB \
         without hashes or an index",
    )
}

fn len_of(file: &File) -> Result<u64> {
    Ok(file.metadata()?.len())
}

/// Runs the command. Returns its time, with its output on the device, or `None` if it is not installed.
fn run_zstd(
    material: &Material,
    arguments: &[String],
    from: &File,
    to: &File,
) -> Result<Option<Duration>> {
    let Some(mut command) = material.zstd(arguments) else { return Ok(None) };
    let mut input = from.try_clone()?;
    input.rewind()?;
    command.stdin(input).stdout(to.try_clone()?).stderr(Stdio::inherit());
    timed(|| {
        let status = command.status()?;
        if !status.success() {
            return Err(io::Error::other(format!("zstd ended with {status}")).into());
        }
        Ok(to.sync_all()?)
    })
    .map(Some)
}

fn unpack(material: &Material, compressed: Option<&File>, session: &mut Session<'_>) -> Result {
    let size = bytes(material.len);
    let mut suite = Suite::new("snapshot-unpack", size).writing(size.get());
    if let Some(file) = compressed {
        suite.add(Role::Naive, "zstd", "zstd -d", move |_| {
            let to = material.new_file()?;
            Ok(run_zstd(material, &["-d".to_owned()], file, &to)?.unwrap_or_default())
        });
    }
    suite.threads = material.threads;
    suite.add(Role::Limit, "frames", "frames alone", |_| {
        let to = material.new_file()?;
        timed(|| {
            frames::share(
                material.threads,
                material.is_zero.len(),
                Reader::new,
                |reader, frame| {
                    Ok(to.write_all_at(decode(material, reader, frame)?, (frame * FRAME) as u64)?)
                },
            )?;
            Ok(to.sync_all()?)
        })
    });
    let path = material.directory.join(format!("uzone-bench-{}.raw", std::process::id()));
    let image = material.open(ByteLen::ZERO)?;
    let spec = suite.add(Role::Ours, "ours", "ours", move |_| {
        let elapsed = timed(|| Ok(image.unpack(&path, material.threads, &|_| true)?))?;
        std::fs::remove_file(&path)?;
        Ok(elapsed)
    });
    spec.limit("frames").headline(format!("unpack an image of {size}"));
    if compressed.is_some() {
        suite.naive("zstd");
    }
    session.measure(
        suite,
        format!("Unpacking {size}"),
        "each file is on the device at the end; zeroes are holes in ours; the limit decodes frames of 64 KiB \
         without their hashes",
    )
}

/// Returns the offsets of frames.
fn offsets(frames: &[usize]) -> impl Iterator<Item = u64> {
    frames.iter().map(|frame| (frame * FRAME) as u64)
}

/// Decodes each frame and does nothing else.
fn decode_each(frames: &[usize], material: &Material) -> Result<Duration> {
    let mut reader = Reader::new()?;
    timed(|| {
        for frame in frames {
            black_box(decode(material, &mut reader, *frame)?);
        }
        Ok(())
    })
}

/// Reads each frame by another implementation.
fn seek_each(frames: &[usize], material: &Material) -> Result<Duration> {
    let file = material.packed.try_clone()?;
    let seek = |error: zeekstd::Error| io::Error::other(error);
    let mut decoder = zeekstd::Decoder::new(file).map_err(seek)?;
    read_each(offsets(frames), |offset, out| {
        decoder.set_offset(offset).map_err(seek)?;
        let mut filled = 0;
        while filled < FRAME {
            match decoder.decompress(&mut out[filled..]).map_err(seek)? {
                0 => return Err(BenchError::wrong_byte("snapshot-read/zeekstd", offset)),
                count => filled += count,
            }
        }
        Ok(())
    })
}

/// Times reading the length of a frame at each offset.
pub(super) fn read_each(
    offsets: impl Iterator<Item = u64>,
    mut read: impl FnMut(u64, &mut [u8]) -> Result,
) -> Result<Duration> {
    let mut out = vec![0; FRAME];
    timed(|| {
        for offset in offsets {
            read(offset, &mut out)?;
            black_box(&out);
        }
        Ok(())
    })
}

/// Measures reading 64 KiB at random places, of files in the page cache or forgotten by it.
pub(super) fn read(material: &Material, is_cold: bool, session: &mut Session<'_>) -> Result {
    let frames = &random_frames(material, READS);
    let calls = frames.len() as u64;
    let table = if is_cold { "snapshot-read-cold" } else { "snapshot-read" };
    let mut suite = Suite::new(table, bytes(frames.len() * FRAME));
    suite.bytes = suite.size.get();
    let chill = move |file: &File| if is_cold { forget(file) } else { Ok(()) };
    suite.add(Role::Naive, "zeekstd", "a seek in the crate zeekstd", move |_| {
        chill(&material.packed)?;
        seek_each(frames, material)
    });
    suite.add(Role::Limit, "decode", "decoding a frame alone", move |_| {
        chill(&material.frames.0)?;
        decode_each(frames, material)
    });
    let spec = suite.add(Role::Ours, "ours", "ours, decoded each time", move |_| {
        let image = material.open(ByteLen::ZERO)?;
        chill(&material.packed)?;
        read_each(offsets(frames), |at, out| Ok(image.read_at(at, out)?))
    });
    let end = if is_cold { ", from the device" } else { "" };
    spec.limit("decode").headline(format!("read 64 KiB of a packed image at random{end}"));
    suite.naive("zeekstd").each_spec(|spec| spec.counts(Some(calls), None).row.cold = is_cold);
    let cache = if is_cold { "that the page cache has forgotten" } else { "in the page cache" };
    session.measure(
        suite,
        format!("Reading 64 KiB at {calls} random places of a packed image {cache}"),
        "whole frames that are not zero; naive seeks by the seek table, the limit decodes without the hash",
    )
}

/// Drops a file from the page cache.
pub(crate) fn forget(file: &File) -> Result {
    let Some(len) = NonZeroU64::new(len_of(file)?) else { return Ok(()) };
    // Pages that are not on the device yet stay.
    file.sync_data()?;
    Ok(page_cache::forget(file, 0, len)?)
}

/// Measures comparing every hash.
pub(super) fn verify(material: &Material, session: &mut Session<'_>) -> Result {
    let (packed, threads) = (material.packed_len, material.threads);
    let len = index(packed);
    let size = bytes(material.len);
    let mut suite = Suite::new("snapshot-verify", size).writing(packed).threads(threads);
    suite.add(Role::Limit, "blake3", "BLAKE3 alone", move |_| {
        let own = || Ok(vec![0; HASHED]);
        timed(|| {
            frames::share(threads, len.div_ceil(HASHED), own, |piece, number| {
                let start = number * HASHED;
                let piece = &mut piece[..HASHED.min(len - start)];
                material.packed.read_exact_at(piece, start as u64)?;
                black_box(blake3::hash(piece));
                Ok(())
            })
        })
    });
    let image = material.open(ByteLen::ZERO)?;
    suite
        .add(Role::Ours, "ours", "ours", move |_| {
            timed(|| Ok(image.verify(threads, false, &|_| ())?))
        })
        .limit("blake3")
        .headline("verify a packed image");
    session.measure(
        suite,
        format!("Verifying {} of a packed image", ByteLen::new(packed)),
        "from the page cache; the limit hashes the file in pieces of 1 MiB",
    )
}
