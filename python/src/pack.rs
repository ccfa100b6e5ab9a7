//! Writing images and their bytes: [`pack`], [`unpack`].

use std::path::PathBuf;

use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;
use uzone::ByteLen;
use uzone::snapshot::{
    self, Codec, OpenOptions, Packer, RequestOptions, SnapshotError, Source, open_source,
};

use crate::buffer::Bytes;
use crate::error::Failure;
use crate::image::open_image;
use crate::range::Size;
use crate::watch::{threads, watched};

/// The outcome of `pack`.
///
/// Attributes
/// ----------
/// root : str
///     The root hash in hexadecimal digits.
/// image_bytes : int
///     The bytes of the image.
/// file_bytes : int
///     The bytes of the file.
/// zero_pages : int
///     The pages of zeroes, which are not stored.
#[pyclass(frozen, get_all, module = "uzone")]
pub(crate) struct Packed {
    root: String,
    image_bytes: u64,
    file_bytes: u64,
    zero_pages: u64,
}

#[pymethods]
impl Packed {
    fn __repr__(&self) -> String {
        let Self { root, image_bytes, file_bytes, zero_pages } = self;
        format!(
            "Packed(root={root:?}, image_bytes={image_bytes}, file_bytes={file_bytes}, zero_pages={zero_pages})"
        )
    }
}

/// The bytes that are packed.
enum Input {
    Bytes(Bytes),
    Source(Box<dyn Source>),
}

impl Input {
    fn of(py: Python<'_>, source: &Bound<'_, PyAny>) -> PyResult<Self> {
        if let Ok(path) = source.extract::<PathBuf>() {
            let opened = py.detach(|| open_source(&path, &RequestOptions::default()));
            let failed = |cause| Failure::from(SnapshotError::unopened(&path)(cause));
            return Ok(Self::Source(opened.map_err(failed)?));
        }
        // Bytes of any type are seen as such.
        let view = py.import("builtins")?.getattr("memoryview")?.call1((source,))?;
        let bytes = PyBuffer::get(&view.call_method1("cast", ("B",))?)?;
        let bytes = Bytes::new(bytes)
            .ok_or_else(|| Failure::input("the bytes do not follow each other"))?;
        Ok(Self::Bytes(bytes))
    }

    fn len(&self) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes.len() as u64,
            Self::Source(source) => source.byte_len(),
        }
    }
}

/// Write an image: compressed, with a hash of each frame, and seekable.
///
/// Parameters
/// ----------
/// source : path-like, str or bytes-like
///     A file or a URL with the bytes, or an object with the buffer protocol, such as an array.
/// path : path-like or str
///     The file or the URL to write. It is replaced as a whole when the image is complete.
/// codec : {"zstd", "lz4", "none"}, optional
///     How frames are stored.
/// level : int, optional
///     How hard to compress: up to 22 for zstd (3 by default), 0 to 12 for lz4 (0 by default).
/// frame : int or str, optional
///     The bytes that are compressed together: a power of two from 4K to 16M.
/// parent : path-like or str, optional
///     An image whose frames are not stored again. It has to stay where it is.
/// progress : callable, optional
///     Called as ``progress(done, total)`` with numbers of bytes.
///
/// Returns
/// -------
/// Packed
///     The root hash and the sizes.
///
/// Examples
/// --------
/// >>> packed = uzone.pack(numpy.zeros(1 << 20), "zeroes.uz")
/// >>> packed.image_bytes
/// 8388608
#[pyfunction]
#[pyo3(signature = (source, path, *, codec="zstd", level=None, frame=Size(ByteLen::kib(64)), parent=None, progress=None),
       text_signature = "(source, path, *, codec='zstd', level=None, frame='64K', parent=None, progress=None)")]
#[expect(clippy::too_many_arguments, reason = "they are keywords in Python")]
pub(crate) fn pack(
    py: Python<'_>,
    source: &Bound<'_, PyAny>,
    path: PathBuf,
    codec: &str,
    level: Option<i32>,
    frame: Size,
    parent: Option<PathBuf>,
    progress: Option<Py<PyAny>>,
) -> PyResult<Packed> {
    let (codec, usual) = match codec {
        "zstd" => (Codec::Zstd, 3),
        "lz4" => (Codec::Lz4, 0),
        "none" => (Codec::None, 0),
        _ => return Err(Failure::input("the codec is \"zstd\", \"lz4\" or \"none\"").into()),
    };
    let packer = Packer::default().codec(codec).level(level.unwrap_or(usual)).frame(frame.0);
    let mut input = Input::of(py, source)?;
    let packed = watched(py, progress, input.len(), |watch| {
        let parent = parent.map(|parent| snapshot::Image::open(parent, &OpenOptions::default()));
        let parent = parent.transpose()?;
        let progress = |done| watch.set(done);
        let packed = match &mut input {
            Input::Bytes(bytes) => packer.pack(bytes, &path, parent.as_ref(), &progress)?,
            Input::Source(source) => {
                packer.pack_source(&**source, &path, parent.as_ref(), &progress)?
            }
        };
        Ok::<_, Failure>(packed)
    });
    // The buffer is released by a thread that has the lock of the interpreter.
    drop(input);
    let packed = packed?;
    Ok(Packed {
        root: packed.root.to_string(),
        image_bytes: packed.image_bytes,
        file_bytes: packed.file_bytes,
        zero_pages: packed.zero_pages,
    })
}

/// Write the bytes of an image to a file.
///
/// Parameters
/// ----------
/// source : path-like or str
///     The image, a file or a URL.
/// path : path-like or str
///     The file or the URL to write. It is replaced as a whole when it is complete. Zeroes are holes.
/// root : str, optional
///     The root hash that the image must have.
/// progress : callable, optional
///     Called as ``progress(done, total)`` with numbers of bytes.
#[pyfunction]
#[pyo3(signature = (source, path, *, root=None, progress=None))]
pub(crate) fn unpack(
    py: Python<'_>,
    source: PathBuf,
    path: PathBuf,
    root: Option<String>,
    progress: Option<Py<PyAny>>,
) -> PyResult<()> {
    let image = py.detach(|| open_image(&source, root.as_deref(), None))?;
    watched(py, progress, image.byte_len(), |watch| {
        image.unpack(&path, threads(), &|done| watch.set(done)).map_err(Failure::from)
    })
}
