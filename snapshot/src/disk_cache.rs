//! Stored frames and indexes of images far away, kept in files: [`DiskCache`].
//!
//! Each image has a sparse file, named by its root hash, with frames where the image has them. There is no list
//! of what is in it: every read is compared with the hash of its frame, and bytes that do not match are fetched
//! anew. So a crash, a full device, a flipped bit or another writer can cost a request and never a wrong byte,
//! and nothing has to be on the device in any order.
//!
//! An index is needed before a root hash is known, so it has a file of its own, named by a key that the caller
//! makes of the identity of the object. The file starts with a hash of the key and the index.
//!
//! Sharing: any number of processes and hosts. A process that has an image open holds a shared lock of its
//! file (flock(2)). One that needs room removes the files of the images that were opened the longest time ago,
//! and locks a file exclusively for that; a file in use stays.
//!
//! Others may be able to write to the directory. A name that is no regular file, or is locked for longer than a
//! process of ours locks it, costs a warning, and frames are not kept.
//!
//! Limit: room is taken in steps of 16 MiB, and each process may be ahead of the others by one for each image.

use std::fs::{self, File};
use std::io::{self, Read};
use std::ops::Range;
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use crate::files::{Folder, lock_within, next_data, room};
use uzone_os::lock;
use uzone_os::page_cache::read_cached;
use uzone_pages::ByteLen;

use crate::error::SnapshotError;
use crate::file_source;
use crate::format::Root;

/// How much room is taken at once.
const STEP: u64 = 16 << 20;
/// The suffixes of a file of frames and of a file with an index.
const FRAMES: &str = ".frames";
const INDEX: &str = ".index";
/// The file that is locked while room is made.
const LOCK: &str = "lock";
/// How long the hash is that an index is kept behind.
const SEAL: usize = blake3::OUT_LEN;
/// How often a file is opened that another process removes meanwhile.
const OPENINGS: usize = 8;
/// How long another process may hold a lock: it looks at the directory, or removes a file.
const LONGEST_LOCK: Duration = Duration::from_secs(2);
/// The unit of `st_blocks`.
const BLOCK: u64 = 512;

/// Frames and indexes of images far away in a directory, within a limit.
#[derive(Debug)]
pub struct DiskCache {
    directory: PathBuf,
    folder: Folder,
    limit_bytes: u64,
    /// A file may not become longer (`ulimit -f`): a write behind that raises a signal.
    longest_file: u64,
    has_warned: AtomicBool,
}

impl DiskCache {
    /// Keeps at most `limit_bytes` in a directory, which is made if there is none. A later failure is no
    /// error: frames are no longer kept then, and a `tracing` event reports it once.
    ///
    /// # Errors
    /// [`SnapshotError::Write`] if there is no directory and none can be made.
    pub fn open(
        directory: impl Into<PathBuf>,
        limit_bytes: u64,
    ) -> Result<Arc<Self>, SnapshotError> {
        let directory = directory.into();
        let failed = |step| SnapshotError::write(&directory, step);
        let make = fs::DirBuilder::new().recursive(true).mode(0o700).create(&directory);
        make.map_err(failed("create"))?;
        let room = room(&directory).map_err(failed("look into"))?;
        let folder = Folder::open(&directory).map_err(failed("open"))?;
        Ok(Arc::new(Self {
            limit_bytes,
            longest_file: room.longest_file.map_or(u64::MAX, ByteLen::get),
            has_warned: AtomicBool::new(false),
            folder,
            directory,
        }))
    }

    /// Returns where the files are.
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Opens the file of an image. Without one, the image is not cached.
    pub(crate) fn image(self: &Arc<Self>, root: Root) -> Option<CachedImage> {
        let name = format!("{root}{FRAMES}");
        let path = self.directory.join(&name);
        match self.open_locked(&name) {
            Ok(file) => {
                // The order in which images give room; without it, an older one.
                let _ = file.set_modified(SystemTime::now());
                let room = Mutex::new(Room { left_bytes: 0, is_over: false });
                Some(CachedImage { cache: self.clone(), path, file, room })
            }
            Err(cause) => {
                self.warn(&SnapshotError::Write { path, step: "open", cause });
                None
            }
        }
    }

    /// Returns an index that was kept under a key, if it is whole and has at most `most` bytes.
    pub(crate) fn index(&self, key: blake3::Hash, most: u64) -> Option<Vec<u8>> {
        let file = self.folder.open_file(&index_name(key), false).ok()?;
        let _ = file.set_modified(SystemTime::now());
        let mut sealed = Vec::new();
        file.take(most.saturating_add(SEAL as u64)).read_to_end(&mut sealed).ok()?;
        let found: [u8; SEAL] = *sealed.first_chunk()?;
        let index = sealed.split_off(SEAL);
        (seal(key, &index) == found).then_some(index)
    }

    /// Keeps the index of an image under a key, if there is room.
    pub(crate) fn keep_index(&self, key: blake3::Hash, index: &[u8]) {
        let name = index_name(key);
        let sealed = [seal(key, index).as_bytes(), index].concat();
        if let Err(cause) = self.write_index(&name, &sealed) {
            let path = self.directory.join(name);
            self.warn(&SnapshotError::Write { path, step: "write", cause });
        }
    }

    fn write_index(&self, name: &str, sealed: &[u8]) -> io::Result<()> {
        let len = sealed.len() as u64;
        if len > self.longest_file {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        if !self.make_room(blocks(len))? {
            return Ok(());
        }
        // Another process may write it too, and writes the same bytes.
        let file = self.open_locked(name)?;
        file.set_len(len)?;
        file.write_all_at(sealed, 0)
    }

    fn warn(&self, error: &SnapshotError) {
        // Relaxed: it is about this call alone.
        if !self.has_warned.swap(true, Ordering::Relaxed) {
            let error = uzone_os::with_causes(error);
            tracing::warn!(%error, "frames are fetched without being kept from now on");
        }
    }

    /// Makes room for so many bytes, by removing images that are not in use. Returns whether there is.
    fn make_room(&self, bytes: u64) -> io::Result<bool> {
        // One process at a time looks and removes.
        let guard = self.folder.open_file(LOCK, true).map_err(|cause| of_lock(&cause))?;
        lock_within(&guard, false, self.longest_lock()).map_err(|cause| of_lock(&cause))?;
        let files = self.folder.files()?.into_iter();
        let mut images: Vec<_> = files
            .filter_map(|(name, changed, blocks)| {
                let name = name.into_string().ok()?;
                let is_ours = name.ends_with(FRAMES) || name.ends_with(INDEX);
                is_ours.then_some((changed, blocks * BLOCK, name))
            })
            .collect();
        let mut used: u64 = images.iter().map(|(_, bytes, _)| bytes).sum();
        images.sort_unstable();
        for (_, taken, name) in images {
            if used + bytes <= self.limit_bytes {
                break;
            }
            if self.remove_unused(&name)? {
                used -= taken;
            }
        }
        Ok(used + bytes <= self.limit_bytes)
    }

    /// Returns how long a lock is waited for: once only, because a holder that keeps it for long may keep it for ever.
    fn longest_lock(&self) -> Duration {
        // Relaxed: it is about this call alone.
        if self.has_warned.load(Ordering::Relaxed) { Duration::ZERO } else { LONGEST_LOCK }
    }

    /// Opens or makes a file, and locks it for sharing.
    fn open_locked(&self, name: &str) -> io::Result<File> {
        for _ in 0..OPENINGS {
            let file = self.folder.open_file(name, true)?;
            lock_within(&file, true, self.longest_lock())?;
            // It was removed between both, and bytes written to it would be lost.
            if file.metadata()?.nlink() > 0 {
                return Ok(file);
            }
        }
        Err(io::ErrorKind::ResourceBusy.into())
    }

    /// Removes a file unless a process has it open. Returns whether it did.
    fn remove_unused(&self, name: &str) -> io::Result<bool> {
        match self.folder.open_file(name, false) {
            Ok(file) if file.try_lock().is_err() => Ok(false),
            Ok(_locked) => self.folder.remove(name).map(|()| true),
            Err(cause) if cause.kind() == io::ErrorKind::NotFound => Ok(true),
            // It is none of ours.
            Err(cause) if cause.kind() == io::ErrorKind::InvalidInput => Ok(false),
            Err(cause) => Err(cause),
        }
    }
}

fn index_name(key: blake3::Hash) -> String {
    format!("{key}{INDEX}")
}

/// Names the file of the lock, which is another one than the file that room was made for.
fn of_lock(cause: &io::Error) -> io::Error {
    io::Error::new(cause.kind(), format!("the file {LOCK} beside it: {cause}"))
}

/// Returns how much room some bytes take at most: a part of a block takes a block.
fn blocks(len_bytes: u64) -> u64 {
    len_bytes.next_multiple_of(8 * BLOCK) + 8 * BLOCK
}

/// Returns the hash that an index is kept behind. It has the key in it: a file under the name of another one
/// is not believed.
fn seal(key: blake3::Hash, index: &[u8]) -> blake3::Hash {
    blake3::Hasher::new().update(key.as_bytes()).update(index).finalize()
}

/// The frames of one image.
pub(crate) struct CachedImage {
    cache: Arc<DiskCache>,
    path: PathBuf,
    file: File,
    room: Mutex<Room>,
}

struct Room {
    /// How much may be written before the next look at the directory.
    left_bytes: u64,
    /// There is no more.
    is_over: bool,
}

impl CachedImage {
    /// Reads bytes that may be a frame: the caller compares its hash. Returns whether there are as many bytes.
    pub(crate) fn read(&self, offset: u64, out: &mut [u8]) -> bool {
        self.file.read_exact_at(out, offset).is_ok()
    }

    /// Reads bytes that may be a frame if that takes no device.
    pub(crate) fn read_ready(&self, offset: u64, out: &mut [u8]) -> bool {
        read_cached(&self.file, offset, out).is_ok_and(|read| read == Some(out.len()))
    }

    /// Has the kernel read those of some frames that are kept. Returns the others.
    pub(crate) fn will_need(&self, frames: Vec<Range<u64>>) -> Vec<Range<u64>> {
        // A frame of which some blocks are there is read from where it is kept for good when it is wanted.
        let is_kept = |frame: &Range<u64>| {
            let data = next_data(&self.file, frame.start);
            matches!(data, Ok(Some(data)) if data.start < frame.end)
        };
        let (kept, others): (Vec<_>, Vec<_>) = frames.into_iter().partition(is_kept);
        file_source::fetch(&self.file, &kept);
        others
    }

    /// Keeps a frame whose hash was compared, if there is room.
    pub(crate) fn write(&self, offset: u64, bytes: &[u8]) {
        let written = self.has_room(offset, bytes.len() as u64).and_then(|has_room| {
            if has_room { self.file.write_all_at(bytes, offset) } else { Ok(()) }
        });
        if let Err(cause) = written {
            lock(&self.room).is_over = true;
            self.cache.warn(&SnapshotError::write(&self.path, "write")(cause));
        }
    }

    fn has_room(&self, offset: u64, len_bytes: u64) -> io::Result<bool> {
        let mut room = lock(&self.room);
        if room.is_over {
            return Ok(false);
        }
        if offset + len_bytes > self.cache.longest_file {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        let taken = blocks(len_bytes);
        if room.left_bytes < taken {
            if !self.cache.make_room(STEP)? {
                room.is_over = true;
                tracing::info!(path = %self.path.display(), "the disk cache is full of images in use");
                return Ok(false);
            }
            room.left_bytes = STEP;
        }
        room.left_bytes = room.left_bytes.saturating_sub(taken);
        Ok(true)
    }
}
