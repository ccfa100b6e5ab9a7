//! Writing images and their bytes.

use std::ffi::{c_char, c_int, c_void};
use std::path::Path;

use uzone_rust::ByteLen;
use uzone_rust::snapshot::{
    Codec, Image, OpenOptions, Packed, Packer, RequestOptions, SnapshotError, open_source,
};

use crate::argument::{Structure, answer, given, options, path, text};
use crate::error::{Failure, call};
use crate::progress::{Progress, Watch, threads, uzone_progress_function};

/// Frames are compressed with zstd.
pub const UZONE_CODEC_ZSTD: u32 = 0;
/// Frames are compressed with LZ4.
pub const UZONE_CODEC_LZ4: u32 = 1;
/// Frames are stored as they are.
pub const UZONE_CODEC_NONE: u32 = 2;

/// How an image is written.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct uzone_pack_options {
    /// The size of this structure.
    pub size: usize,
    /// UZONE_CODEC_ZSTD, UZONE_CODEC_LZ4 or UZONE_CODEC_NONE.
    pub codec: u32,
    /// How hard to compress: 1 to 22 for zstd, 1 to 12 for LZ4; 0 is 3 for zstd, and the fastest for LZ4.
    pub level: i32,
    /// The bytes that are compressed together: a power of two from 4 KiB to 16 MiB; 0 is 64 KiB.
    pub frame_bytes: u64,
    /// An image whose frames are not stored again, and which has to stay where it is; NULL for none.
    pub parent: *const c_char,
    /// A function that is called meanwhile, or NULL.
    pub progress: uzone_progress_function,
    /// The first argument of `progress`.
    pub user: *mut c_void,
}

// SAFETY: A `usize`, two numbers of 4 bytes, one of 8, and three pointers, of which NULL is a value.
unsafe impl Structure for uzone_pack_options {}

/// An image that was written.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct uzone_packed {
    /// The size of this structure, which the caller sets.
    pub size: usize,
    /// The bytes of the image.
    pub image_bytes: u64,
    /// The bytes of the file.
    pub file_bytes: u64,
    /// The pages of zeroes, which are not stored.
    pub zero_pages: u64,
    /// The root hash: 64 hexadecimal digits, and a zero behind them.
    pub root: [c_char; 72],
}

// SAFETY: Numbers of 8 bytes, the first of them the size, and 72 bytes.
unsafe impl Structure for uzone_packed {}

/// Options of the caller's, as values.
struct How<'a> {
    packer: Packer,
    parent: Option<&'a Path>,
    progress: Progress,
}

/// # Safety
/// As `options`, and their pointers are valid.
unsafe fn read_options<'a>(from: *const uzone_pack_options) -> Result<How<'a>, Failure> {
    // SAFETY: The caller of this vouches for it.
    let from = unsafe { options(from) }?;
    let (codec, usual) = match from.codec {
        UZONE_CODEC_ZSTD => (Codec::Zstd, 3),
        UZONE_CODEC_LZ4 => (Codec::Lz4, 0),
        UZONE_CODEC_NONE => (Codec::None, 0),
        codec => return Err(Failure::input(format!("there is no codec {codec}"))),
    };
    let mut packer = Packer::default().codec(codec);
    packer = packer.level(if from.level == 0 { usual } else { from.level });
    if from.frame_bytes != 0 {
        packer = packer.frame(ByteLen::new(from.frame_bytes));
    }
    // SAFETY: As above.
    let parent = (!from.parent.is_null()).then(|| unsafe { path("parent", from.parent) });
    let progress = Progress { function: from.progress, user: from.user };
    Ok(How { packer, parent: parent.transpose()?, progress })
}

impl How<'_> {
    /// Writes an image by `pack`.
    fn write(
        self,
        total: u64,
        to: *mut uzone_packed,
        pack: impl FnOnce(
            &Packer,
            Option<&Image>,
            &(dyn Fn(u64) -> bool + Sync),
        ) -> Result<Packed, SnapshotError>
        + Send,
    ) -> Result<(), Failure> {
        let Self { packer, parent, progress } = self;
        let packed = progress.watched(total, |watch| {
            let parent = parent.map(|parent| Image::open(parent, &OpenOptions::default()));
            Ok(pack(&packer, parent.transpose()?.as_ref(), &|done| Watch::set(watch, done))?)
        })?;
        if to.is_null() {
            return Ok(());
        }
        let mut root = [0; 72];
        for (to, from) in root.iter_mut().zip(packed.root.to_string().bytes()) {
            *to = c_char::from_ne_bytes([from]);
        }
        let Packed { image_bytes, file_bytes, zero_pages, .. } = packed;
        let packed = uzone_packed { size: 0, image_bytes, file_bytes, zero_pages, root };
        // SAFETY: The head of the header demands it.
        unsafe { answer(to, &packed) }
    }
}

/// Writes a file as an image: compressed, with a hash of each frame, and seekable. The image has its name when all of it is
/// on the device; one that is there is replaced as a whole, and stays if the call fails.
///
/// `options` may be NULL, and so may `packed`; otherwise the caller sets `packed->size`.
///
/// Errors: the errors of open(2), read(2) and write(2), -EINVAL for options that do not go together, the error that `progress`
/// returned.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn uzone_pack(
    source: *const c_char,
    image: *const c_char,
    options: *const uzone_pack_options,
    packed: *mut uzone_packed,
) -> c_int {
    call("uzone_pack", || {
        // SAFETY: The head of the header demands it.
        let source = unsafe { path("source", source) }?;
        // SAFETY: As above.
        let image = unsafe { path("image", image) }?;
        // SAFETY: As above.
        let how = unsafe { read_options(options) }?;
        let opened = open_source(source, &RequestOptions::default());
        let source = opened.map_err(SnapshotError::unopened(source))?;
        how.write(source.byte_len(), packed, |packer, parent, progress| {
            packer.pack_source(&*source, image, parent, progress)
        })
    })
}

/// Writes `len_bytes` of memory as an image, as uzone_pack() does. No thread writes to the memory meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn uzone_pack_memory(
    bytes: *const c_void,
    len_bytes: usize,
    image: *const c_char,
    options: *const uzone_pack_options,
    packed: *mut uzone_packed,
) -> c_int {
    call("uzone_pack_memory", || {
        let bytes = given("bytes", (!bytes.is_null()).then_some(bytes.cast::<u8>()))?;
        // SAFETY: The head of the header demands it.
        let image = unsafe { path("image", image) }?;
        // SAFETY: As above.
        let how = unsafe { read_options(options) }?;
        // SAFETY: The caller vouches that so many bytes are readable and do not change.
        let mut bytes = unsafe { std::slice::from_raw_parts(bytes, len_bytes) };
        how.write(len_bytes as u64, packed, move |packer, parent, progress| {
            packer.pack(&mut bytes, image, parent, progress)
        })
    })
}

/// Writes the bytes of an image to a file. Zeroes are holes. A file that is there is replaced as a whole, and stays if the
/// call fails.
///
/// `root` is the root hash that the image must have, or NULL for any. `progress` may be NULL; see uzone_progress_function.
///
/// Errors: the errors of open(2), read(2) and write(2), -EBADMSG if the image is damaged or has another root hash, the error
/// that `progress` returned.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn uzone_unpack(
    image: *const c_char,
    file: *const c_char,
    root: *const c_char,
    progress: uzone_progress_function,
    user: *mut c_void,
) -> c_int {
    call("uzone_unpack", || {
        // SAFETY: The head of the header demands it.
        let image = unsafe { path("image", image) }?;
        // SAFETY: As above.
        let file = unsafe { path("file", file) }?;
        // SAFETY: As above.
        let root = unsafe { text("root", root) }?;
        let mut open = OpenOptions::default();
        if let Some(root) = root {
            open = open.root(root.strip_prefix("blake3:").unwrap_or(root).parse()?);
        }
        let image = Image::open(image, &open)?;
        Progress { function: progress, user }.watched(image.byte_len(), |watch| {
            Ok(image.unpack(file, threads(), &|done| watch.set(done))?)
        })
    })
}
