//! The files that a worker opens before it serves, and the rights that it gives up on the way: [`Opened`].

use std::fs::File;
use std::io;
use std::iter;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use uzone_fault::{Backing, Engine, EngineOptions, FileBacking, MapError};
use uzone_pages::ErrorKind;
use uzone_snapshot::{FrameCache, Image, OpenOptions, SnapshotBacking, SnapshotError, is_url};
use uzone_zone::Zone;

use super::working_set::{self, Recording};
use crate::error::ServeError;
use crate::options::{Prefetch, ServerOptions};
use crate::sandbox::{Files, Sandbox, ThreadKind};

/// The use of the list of pages that VMs touched.
const USE: &str = "use the working set";

/// An image, and the engine that answers faults from it.
pub(super) struct Opened {
    pub(super) backing: Arc<dyn Backing>,
    pub(super) cache: Arc<FrameCache>,
    /// The identity of the image: its root hash, or file id and mtime.
    pub(super) image: String,
    /// The path or URL, absolute, for processes that run elsewhere.
    pub(super) path: String,
    /// Its files, with their names.
    pub(super) files: Vec<(String, File)>,
    pub(super) engine: Engine,
    pub(super) sandbox: Sandbox,
    /// The bytes of the image to install before they are touched.
    pub(super) prefetch: Vec<u64>,
    pub(super) recording: Option<Recording>,
}

impl Opened {
    /// Opens an image, by `files` if there are any, and starts the threads that answer faults. This process is confined
    /// then, if the options state that. Where VMs wait, the list of pages to install and the recording
    /// are left out if they cannot be opened.
    pub(super) fn new(
        path: &Path,
        options: &ServerOptions,
        files: Vec<(String, File)>,
        has_machines: bool,
    ) -> Result<Self, ServeError> {
        let sandbox =
            if options.sandbox { Sandbox::without_capabilities() } else { Sandbox::off() };
        let mut sandbox = sandbox.map_err(ServeError::Capabilities)?;
        // Both read files of the kernel: the number of CPUs, and the size of memory.
        let threads = EngineOptions::default().zone(Zone::default()).own_threads();
        let is_remote = is_url(path);
        if is_remote && options.sandbox {
            // Opening it starts the threads that fetch.
            sandbox.confine_files(&needed(Files::remote(), options));
            sandbox.confine_calls(true);
        }
        let cache = FrameCache::new(options.cache.get());
        let image = open(path, options, files, &cache).map_err(|cause| match cause.kind() {
            ErrorKind::PermissionDenied if !is_remote => {
                ServeError::Unreadable { path: path.to_owned(), user: sandbox.user, cause }
            }
            _ => cause.into(),
        })?;
        let page_bytes = image.page_bytes();
        let pages = pages_ahead(&options.prefetch, &image);
        let recording = options.record.clone().map(|path| {
            let file = working_set::file_of(&path, image.root());
            Recording::open(file, page_bytes).map_err(ServeError::at(USE, &path))
        });
        // Both cost time alone.
        let pages = unless_machines_wait(has_machines, pages.map(Some))?.unwrap_or_default();
        let recording = unless_machines_wait(has_machines, recording.transpose())?;
        let absolute = std::path::absolute(path).ok().filter(|_| !is_remote);
        let shared = |(name, file): (String, &File)| Some((name, file.try_clone().ok()?));
        let others = image.sources().into_iter().skip(1).map(PathBuf::from);
        let read = iter::once(path.to_owned()).chain(others).collect();
        let read = Files { read, is_remote, ..Files::default() };
        Ok(Self {
            image: image.identity(),
            path: absolute.as_deref().unwrap_or(path).display().to_string(),
            // An image cannot be opened again by a part of its files: then it is opened by its name.
            files: image.files().into_iter().map(shared).collect::<Option<_>>().unwrap_or_default(),
            backing: backing(image)?,
            cache,
            engine: engine(threads, &mut sandbox, options, read)?,
            sandbox,
            prefetch: pages.into_iter().map(|page| page.saturating_mul(page_bytes)).collect(),
            recording,
        })
    }
}

/// Opens a packed image, or the raw bytes of memory.
fn open(
    path: &Path,
    options: &ServerOptions,
    files: Vec<(String, File)>,
    cache: &Arc<FrameCache>,
) -> Result<Image, SnapshotError> {
    let mut how =
        OpenOptions::default().cache(cache.clone()).requests(options.requests).files(files);
    how = options.disk_cache.iter().cloned().fold(how, OpenOptions::disk_cache);
    how = options.root.into_iter().fold(how, OpenOptions::root);
    Image::open_or_raw(path, &how)
}

fn backing(image: Image) -> Result<Arc<dyn Backing>, SnapshotError> {
    let Some(file) = image.raw_file() else {
        return Ok(Arc::new(SnapshotBacking::new(Arc::new(image))));
    };
    let (name, backing) = (image.name(), file.try_clone().and_then(FileBacking::new));
    let backing = backing.map_err(SnapshotError::unopened(Path::new(&name)))?;
    Ok(Arc::new(backing.named(name)))
}

/// Returns an opened file. Where VMs wait, a failure is a warning.
fn unless_machines_wait<T>(
    has_machines: bool,
    opened: Result<Option<T>, ServeError>,
) -> Result<Option<T>, ServeError> {
    match opened {
        Err(error) if has_machines => {
            tracing::warn!(error = uzone_os::with_causes(&error), "VMs are served without it");
            Ok(None)
        }
        opened => opened,
    }
}

/// Returns the numbers of the pages that are installed before a VM touches them.
fn pages_ahead(prefetch: &Prefetch, image: &Image) -> Result<Vec<u64>, ServeError> {
    let path = match prefetch {
        Prefetch::OfImage => return Ok(image.working_set().to_vec()),
        Prefetch::No => return Ok(Vec::new()),
        Prefetch::File(path) => path,
    };
    match working_set::read(&working_set::file_of(path, image.root())) {
        // The list saves time alone, and is missing before the first run has ended.
        Err(cause) if cause.kind() == io::ErrorKind::NotFound => {
            tracing::warn!(path = %path.display(), "there is no list of pages to install ahead");
            Ok(Vec::new())
        }
        pages => pages.map_err(ServeError::at(USE, path)),
    }
}

/// Starts the threads that answer faults, and confines this process from then on.
fn engine(
    threads: EngineOptions,
    sandbox: &mut Sandbox,
    options: &ServerOptions,
    files: Files,
) -> Result<Engine, ServeError> {
    if !options.sandbox {
        return Ok(Engine::with(threads)?);
    }
    let is_confined = files.is_remote;
    if !is_confined {
        sandbox.confine_files(&needed(files, options));
    }
    let kind = options.disk_cache.as_ref().map_or(ThreadKind::Plain, |_| ThreadKind::Cache);
    let engine = sandbox.confine_threads(kind, || Engine::with(threads));
    let engine = engine.map_err(|cause| ServeError::Engine(MapError::Thread(cause)))?;
    if !is_confined {
        sandbox.confine_calls(false);
    }
    Ok(engine?)
}

/// Returns the files of an image, and the files of the options.
fn needed(mut files: Files, options: &ServerOptions) -> Files {
    if let Prefetch::File(path) = &options.prefetch {
        files.read.push(path.clone());
    }
    if let Some(path) = &options.record {
        let parent = path.parent().filter(|folder| !folder.as_os_str().is_empty());
        let folder = if path.is_dir() { Some(&**path) } else { parent };
        files.written.push(folder.unwrap_or(Path::new(".")).to_owned());
    }
    files.written.extend(options.disk_cache.iter().map(|disk| disk.directory().to_owned()));
    files
}
