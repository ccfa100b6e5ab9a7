//! Compressing and decompressing one frame: [`Encoder`], [`Decoder`]. Each thread has its own.

use std::io;

use lz4::block::{self, CompressionMode};
use zstd::bulk;
use zstd::zstd_safe::CParameter;

use crate::error::SnapshotError;
use crate::format::Codec;

/// The compressor of one thread.
pub(crate) enum Encoder {
    None,
    Zstd(bulk::Compressor<'static>),
    Lz4(CompressionMode),
}

impl Encoder {
    /// Makes an encoder; `level` is that of the codec.
    pub(crate) fn new(codec: Codec, level: i32) -> Result<Self, SnapshotError> {
        match codec {
            Codec::None => Ok(Self::None),
            Codec::Zstd => zstd_encoder(level)
                .map(Self::Zstd)
                .map_err(|cause| SnapshotError::Codec { codec: "zstd", cause }),
            // Levels below 3 are its fast mode, as in the lz4 command.
            Codec::Lz4 if level < 3 => Ok(Self::Lz4(CompressionMode::DEFAULT)),
            Codec::Lz4 => Ok(Self::Lz4(CompressionMode::HIGHCOMPRESSION(level))),
        }
    }

    /// Compresses a frame into `out`, which is replaced.
    pub(crate) fn encode(&mut self, raw: &[u8], out: &mut Vec<u8>) -> Result<(), SnapshotError> {
        match self {
            Self::None => {
                out.clear();
                out.extend_from_slice(raw);
            }
            Self::Zstd(compressor) => {
                out.clear();
                out.reserve(zstd::zstd_safe::compress_bound(raw.len()));
                compressor
                    .compress_to_buffer(raw, out)
                    .map_err(|cause| SnapshotError::Codec { codec: "zstd", cause })?;
            }
            Self::Lz4(mode) => {
                let lz4 = |cause| SnapshotError::Codec { codec: "lz4", cause };
                out.resize(block::compress_bound(raw.len()).map_err(lz4)?, 0);
                let len = block::compress_to_buffer(raw, Some(*mode), false, out).map_err(lz4)?;
                out.truncate(len);
            }
        }
        Ok(())
    }
}

fn zstd_encoder(level: i32) -> io::Result<bulk::Compressor<'static>> {
    let mut compressor = bulk::Compressor::new(level)?;
    compressor.set_parameter(CParameter::ChecksumFlag(true))?;
    compressor.set_parameter(CParameter::ContentSizeFlag(true))?;
    Ok(compressor)
}

/// Returns how many bytes a codec stores at most for a frame of `len` bytes.
pub(crate) fn longest_stored(codec: Codec, len: usize) -> io::Result<usize> {
    match codec {
        Codec::None => Ok(len),
        Codec::Zstd => Ok(zstd::zstd_safe::compress_bound(len)),
        Codec::Lz4 => block::compress_bound(len),
    }
}

/// The decompressor of one thread.
pub(crate) enum Decoder {
    None,
    Zstd(bulk::Decompressor<'static>),
    Lz4,
}

impl Decoder {
    pub(crate) fn new(codec: Codec) -> io::Result<Self> {
        Ok(match codec {
            Codec::None => Self::None,
            Codec::Zstd => Self::Zstd(bulk::Decompressor::new()?),
            Codec::Lz4 => Self::Lz4,
        })
    }

    /// Decompresses a frame into `out`, all of it. Returns `false` if the stored bytes are not a frame of
    /// exactly that length.
    pub(crate) fn decode(&mut self, stored: &[u8], out: &mut [u8]) -> bool {
        let len = match self {
            Self::None if stored.len() == out.len() => {
                out.copy_from_slice(stored);
                return true;
            }
            Self::None => return false,
            Self::Zstd(decompressor) => decompressor.decompress_to_buffer(stored, out),
            Self::Lz4 => match i32::try_from(out.len()) {
                Ok(len) => block::decompress_to_buffer(stored, Some(len), out),
                Err(_) => return false,
            },
        };
        len.is_ok_and(|len| len == out.len())
    }
}
