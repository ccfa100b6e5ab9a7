//! Images of memory: packed, verified, seekable, and mapped lazily.
//!
//! An image is the bytes of memory (of a virtual machine, a heap, a data set), stored so that any page can
//! be had fast and is verified before it becomes memory. With zstd it is a standard stream: `zstd -d` gives
//! the raw bytes back, and its seek table is the published one. `docs/FORMAT.md` describes every byte.
//!
//! | to | take |
//! |---|---|
//! | write an image | [`Packer`] |
//! | open, read and verify one | [`Image`] |
//! | map one lazily | [`SnapshotBacking`], with [`uzone_fault::Engine`] |
//! | share decoded frames | [`FrameCache`] |
//! | keep frames and indexes of images far away on disk | [`DiskCache`] |
//! | pack a Firecracker snapshot and the diffs of it | [`Layers`] |
//! | read from elsewhere than a file | [`Source`], [`RequestOptions`] |
//!
//! With the feature `object-storage`, a path may be a URL such as `s3://BUCKET/KEY`.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::too_many_lines))]

mod backing;
mod codec;
mod decode_ahead;
mod disk_cache;
mod each_frame;
mod error;
mod file_source;
pub mod files;
mod firecracker_layers;
mod format;
mod frame_cache;
mod frame_memory;
mod image;
#[cfg(feature = "object-storage")]
mod object;
mod options;
mod order;
mod output;
mod source;
mod unpack;
mod writer;

pub use backing::SnapshotBacking;
pub use disk_cache::DiskCache;
pub use error::SnapshotError;
pub use file_source::{FileSource, open_source};
pub use firecracker_layers::Layers;
pub use format::{Codec, ImageRegion, Root};
pub use frame_cache::{CacheCounts, FrameCache};
pub use image::{FrameCounts, HASHES, Image, OpenOptions, PageCounts};
#[cfg(feature = "object-storage")]
pub use object::ObjectSource;
pub use source::{RequestOptions, Source, is_url};
pub use writer::{Packed, Packer};
