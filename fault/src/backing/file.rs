//! Memory of an ordinary file: [`FileBacking`]. Its bytes are copied into the pages. A page is ready if the
//! page cache has it. The page that a thread waits for is read without waiting (`RWF_NOWAIT`): a miss
//! starts the device, which is the next step anyway. For its neighbours the cache is queried first, in a
//! fraction of a microsecond, and those that it does not have are skipped: on a cold file a window that is
//! read made others 3 to 10 times slower.
//!
//! Longer runs that are cached are copied from a mapping of the file, without a buffer in between. If
//! the cache loses such a page in that moment, the thread that answers waits for the device once.
//!
//! A file on a DAX mount has no page in that cache: its bytes are memory, so each page is ready.
//!
//! A file that is shorter than it was when it was taken makes pages bad, never zero; but one that is cut inside of a page
//! while that page is copied may be zero behind the cut, as for read(2). Pages that are filled after another process
//! writes to the file have its bytes.
//! Source: cachestat(2), preadv2(2).

use std::fs::File;
use std::io;
use std::num::NonZeroU64;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;

use uzone_os::uffd::in_thread::{FileSource, Source};
use uzone_os::{Access, Mapping, Sharing};
use uzone_os::{dax, page_cache};
use uzone_pages::ByteLen;

use crate::backing::hooks::Backing;
use crate::backing::window::{Filled, Window};
use crate::error::BackingError;

/// A run of pages that are not all cached is looked at in halves, down to this many bytes.
const SMALLEST_HALF: u64 = 16 << 10;

/// From so many bytes on that are cached, they are copied from a mapping of the file: it saves a copy, and
/// costs the kernel to map them there as well, which is too long for the next fault while a few neighbours
/// are installed.
const SMALLEST_COPY: u64 = 48 << 10;

/// Returns a conversion of the system's error of a call on bytes of the file.
fn failed(
    call: &'static str,
    offset: u64,
    len_bytes: u64,
) -> impl Fn(io::Error) -> BackingError + Copy {
    move |cause| BackingError::Io { call, offset, len_bytes, cause }
}

/// The bytes of a file, from its start on.
#[derive(Debug)]
pub struct FileBacking {
    file: Arc<File>,
    len: u64,
    name: Option<PathBuf>,
    is_writable: bool,
    /// Whether all of it is memory: then nothing of it is in the page cache, and nothing has to be.
    is_dax: bool,
    /// The same bytes mapped, where the file can be: cached bytes are copied from there.
    mapped: Option<Arc<Mapping>>,
}

impl FileBacking {
    /// Takes a file that is open for reading, as long as it is now.
    ///
    /// # Errors
    /// The error of the system that its length was queried with, [`io::ErrorKind::PermissionDenied`] if it is not
    /// open for reading, and [`io::ErrorKind::InvalidInput`] if it is with `O_DIRECT`: pages are copied from the page
    /// cache.
    pub fn new(file: File) -> io::Result<Self> {
        uzone_os::check_file(&file, false)?;
        let len = file.metadata()?.len();
        let map = |file: File| {
            let (access, sharing) = (Access::ReadOnly, Sharing::Shared);
            Mapping::file(file, 0, ByteLen::new(len), access, sharing).ok()
        };
        let mapped = file.try_clone().ok().and_then(map);
        let is_dax = dax::is_file(&file);
        let (file, mapped) = (Arc::new(file), mapped.map(Arc::new));
        Ok(Self { file, len, name: None, is_writable: false, is_dax, mapped })
    }

    /// Takes a file that is open for reading and writing, as long as it is now: writes to the
    /// mapping can be brought back, up to that length. The owner of the file decides when it goes to the
    /// device ([`File::sync_data`]).
    ///
    /// # Errors
    /// The error of the system, and [`io::ErrorKind::PermissionDenied`] if it is not open for writing, or
    /// for appending: a write would then go to the end of the file.
    pub fn writable(file: File) -> io::Result<Self> {
        uzone_os::check_file(&file, true)?;
        Ok(Self { is_writable: true, ..Self::new(file)? })
    }

    /// Has errors name the file.
    #[must_use]
    pub fn named(mut self, path: impl Into<PathBuf>) -> Self {
        self.name = Some(path.into());
        self
    }

    /// Reads the cached bytes from `at` on. Returns how many bytes of `out` are right: those
    /// behind the end of the file are zero.
    fn read_cached(&self, at: u64, out: &mut [u8]) -> Result<usize, BackingError> {
        let wanted = self.inside(at, out.len());
        let failed = failed("read", at, wanted as u64);
        match page_cache::read_cached(&self.file, at, &mut out[..wanted]).map_err(failed)? {
            Some(bytes) if bytes == wanted => {
                out[wanted..].fill(0);
                Ok(out.len())
            }
            read => Ok(read.unwrap_or(0)),
        }
    }

    /// Returns how many host pages of a range are read without a device, as [`page_cache::cached`] does: on a DAX mount,
    /// all of them.
    fn at_hand(&self, start: u64, len: NonZeroU64) -> Result<Option<u64>, BackingError> {
        if self.is_dax {
            return Ok(Some(len.get().div_ceil(uzone_os::probe::page_size().bytes())));
        }
        page_cache::cached(&self.file, start, len).map_err(failed("read", start, len.get()))
    }

    /// Reads the bytes of a window, and waits for the device.
    fn read(&self, window: &mut Window<'_>) -> Result<(), BackingError> {
        let range = window.range();
        let offset = range.start;
        let _ = window.copy_with(range, |out| {
            let wanted = self.inside(offset, out.len());
            let (bytes, rest) = out.split_at_mut(wanted);
            match uzone_os::read_exact_at(&self.file, bytes, offset) {
                Ok(()) => {
                    rest.fill(0);
                    Ok(out.len())
                }
                Err(cause) if cause.kind() == io::ErrorKind::UnexpectedEof => {
                    let end = self.file.metadata().map_or(0, |metadata| metadata.len());
                    Err(BackingError::Short { offset, len_bytes: wanted as u64, end })
                }
                Err(cause) => Err(failed("read", offset, wanted as u64)(cause)),
            }
        })?;
        Ok(())
    }

    /// Returns how many of `len` bytes from `at` on the file has.
    fn inside(&self, at: u64, len: usize) -> usize {
        usize::try_from(self.len.saturating_sub(at)).map_or(len, |left| left.min(len))
    }

    /// Returns up to where a run is whole pages of the file as long as it is now, if that is far enough
    /// for a copy: mapped memory behind the end of a file is zero, and not its bytes.
    fn whole_pages(&self, run: &Range<u64>) -> Result<Option<u64>, BackingError> {
        let &Range { start, end } = run;
        if end - start < SMALLEST_COPY {
            return Ok(None);
        }
        let failed = failed("read", start, end - start);
        let len = self.len.min(self.file.metadata().map_err(failed)?.len());
        let host = uzone_os::probe::page_size().bytes();
        let whole = end.min(len / host * host);
        Ok((whole >= start.saturating_add(SMALLEST_COPY)).then_some(whole))
    }

    /// Returns the mapping of the file, if the page cache has all of a window and each page is whole: then
    /// every run is one copy, however many runs there are.
    fn ready(&self, window: &Window<'_>) -> Result<Option<&Mapping>, BackingError> {
        let host = uzone_os::probe::page_size();
        let range = window.range();
        let is_worth_it = range.end - range.start >= SMALLEST_HALF && window.wanted().is_none();
        let Some(mapped) = self.mapped.as_ref().filter(|_| is_worth_it) else { return Ok(None) };
        if window.page_size() > host {
            return Ok(None);
        }
        let Range { start, end } = range;
        let Some(len) = NonZeroU64::new(end - start) else { return Ok(None) };
        let failed = failed("read", start, end - start);
        let cached = self.at_hand(start, len)?;
        if cached.is_none_or(|pages| pages < len.get() / host.bytes())
            || self.file.metadata().map_err(failed)?.len().min(self.len) < end
        {
            return Ok(None);
        }
        // The kernel copies from pages that are mapped; those that are not it maps one copy at a time.
        let _ = mapped.populate(start..end);
        Ok(Some(mapped))
    }

    /// Fills the neighbours of a page that a thread waits for, as far as the cache has them.
    fn map_cached(&self, window: &mut Window<'_>, run: Range<u64>) -> Result<(), BackingError> {
        let host = uzone_os::probe::page_size().bytes();
        let end = run.end.min(self.len.next_multiple_of(host));
        let Some(len) = end.checked_sub(run.start).and_then(NonZeroU64::new) else {
            return Ok(());
        };
        match self.at_hand(run.start, len)? {
            Some(0) => return Ok(()),
            // The kernel does not tell this user. A read that does not wait finds out, a little at a time; the
            // device is read for the rest.
            None => return self.map_while_cached(window, run.start..end),
            Some(pages) if pages >= len.get() / host => {}
            Some(_) => {
                let half = (run.end - run.start) / 2;
                let page = window.page_size().bytes();
                let middle = run.start + half / page * page;
                if half < SMALLEST_HALF || middle == run.start {
                    return Ok(());
                }
                self.map_cached(window, run.start..middle)?;
                return self.map_cached(window, middle..run.end);
            }
        }
        let mut at = run.start;
        if let Some(mapped) = &self.mapped
            && let Some(whole) = self.whole_pages(&run)?
            && (whole - at).is_multiple_of(window.page_size().bytes())
        {
            if window.page_size() > uzone_os::probe::page_size() {
                // The kernel fills a huge page from the start again where the first of these pages is not
                // mapped yet, and takes a fault for each few of them. They are cached, so nothing is read.
                let _ = mapped.populate(at..whole);
            }
            if window.copy_from(at..whole, mapped, at)? == Filled::All {
                at = whole;
            } else {
                return Ok(());
            }
        }
        while at < run.end {
            let part = at..run.end.min(at + window.room());
            at = part.end;
            let _ = window.copy_with(part.clone(), |out| self.read_cached(part.start, out))?;
        }
        Ok(())
    }

    /// Fills pages of a run up to the first that the cache does not have.
    fn map_while_cached(
        &self,
        window: &mut Window<'_>,
        run: Range<u64>,
    ) -> Result<(), BackingError> {
        let (mut at, mut step) = (run.start, SMALLEST_HALF.max(window.page_size().bytes()));
        while at < run.end {
            let part = at..run.end.min(at + step.min(window.room().max(1)));
            at = part.end;
            step *= 2;
            let filled = window.copy_with(part.clone(), |out| self.read_cached(part.start, out))?;
            if filled != Filled::All {
                break;
            }
        }
        Ok(())
    }
}

impl Backing for FileBacking {
    fn map_pages(&self, window: &mut Window<'_>) {
        let Ok(ready) = self.ready(window) else { return };
        while let Some(run) = window.next_run() {
            if let Some(mapped) = ready {
                let start = run.start;
                if window.copy_from(run, mapped, start).is_err() {
                    return;
                }
                continue;
            }
            let mut filled = Ok(());
            // For one small page that a thread waits for, querying the cache costs more than it saves.
            let is_large = window.page_size().bytes() >= SMALLEST_COPY;
            if is_large || window.wanted().as_ref() != Some(&run) {
                filled = self.map_cached(window, run);
            }
            if let Some(page) = window.wanted()
                && filled.is_ok()
            {
                let start = page.start;
                filled = window.copy_with(page, |out| self.read_cached(start, out)).map(drop);
            }
            // A page that fails and that a thread waits for fails again in `fault`, which reports it.
            if filled.is_err() {
                return;
            }
        }
    }

    fn fault(&self, window: &mut Window<'_>) -> Result<(), BackingError> {
        self.read(window).map_err(|cause| match &self.name {
            Some(path) => BackingError::File { path: path.clone(), cause: Box::new(cause) },
            None => cause,
        })
    }

    fn write_back(&self, offset: u64, bytes: &[u8]) -> Result<(), BackingError> {
        let len_bytes = bytes.len() as u64;
        if !self.is_writable {
            let reason = "the file was taken to be read: take it by FileBacking::writable";
            return Err(BackingError::ReadOnly { offset, len_bytes, reason });
        }
        let bytes = &bytes[..self.inside(offset, bytes.len())];
        let failed = failed("write", offset, len_bytes);
        let end = self.file.metadata().map_err(failed)?.len();
        if offset + bytes.len() as u64 > end {
            // Writing would make it longer again, with zeroes in between.
            return Err(BackingError::Short { offset, len_bytes, end });
        }
        self.file.write_all_at(bytes, offset).map_err(failed)
    }

    fn read_ahead(&self, range: Range<u64>) {
        let end = range.end.min(self.len);
        if let Some(len) = end.checked_sub(range.start).and_then(NonZeroU64::new) {
            // It is a hint; an error of the file shows when the pages are read.
            let _ = page_cache::read_ahead(&self.file, range.start, len);
        }
    }

    fn byte_len(&self) -> Option<ByteLen> {
        Some(ByteLen::new(self.len))
    }

    fn in_thread(&self) -> Option<Source> {
        let (mapped, file) = (self.mapped.clone()?, self.file.clone());
        Some(Source::File(FileSource::new(file, mapped, ByteLen::new(self.len))))
    }
}

#[cfg(test)]
mod tests {
    use tempfile::tempfile_in;
    use uzone_os::uffd::{Answered, UffdError};
    use uzone_pages::{Advice, Content, FaultAround, PageCount, PageSize, Touch};

    use super::*;
    use crate::engine::core::{Core, Outcome, ReaderState};
    use crate::memory::kernel::{Fill, Kernel};
    use crate::options::LazyOptions;
    use crate::pages::states::PageStates;
    use crate::tests::skip;

    const PAGES: u64 = 64;

    /// A kernel that installs everything at once.
    struct Agreeing;

    impl Kernel for Agreeing {
        fn install(&self, _: Range<u64>, _: Fill<'_>) -> Result<Answered, UffdError> {
            Ok(Answered::All)
        }

        fn wake(&self, _: Range<u64>) {}
    }

    fn core_of(backing: FileBacking) -> Core {
        let contents = PageStates::reserve(PageCount::new(PAGES), PageSize::KIB_4).unwrap();
        let options = LazyOptions::default().advice(Advice::Normal);
        let options = options.fault_around(FaultAround::try_new(ByteLen::kib(64)).unwrap());
        let areas = [contents.fault_area(0)];
        Core::new(Arc::new(Agreeing), Arc::new(backing), contents, &areas, &options)
    }

    #[test]
    fn pages_beside_a_touch_are_mapped_where_a_file_is_memory_and_not_where_none_is_cached() {
        let name = "pages_beside_a_touch_are_mapped_where_a_file_is_memory";
        for is_dax in [false, true] {
            let file = tempfile_in(std::env::current_exe().unwrap().parent().unwrap()).unwrap();
            let len = PAGES << 12;
            file.write_all_at(&vec![7; usize::try_from(len).unwrap()], 0).unwrap();
            file.sync_all().unwrap();
            rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::Random).unwrap();
            let len = NonZeroU64::new(len).unwrap();
            page_cache::forget(&file, 0, len).unwrap();
            if page_cache::cached(&file, 0, len).unwrap() != Some(0) {
                return skip(name, "this file system keeps pages after POSIX_FADV_DONTNEED");
            }
            // As if it lay on such a mount.
            let core = core_of(FileBacking { is_dax, ..FileBacking::new(file).unwrap() });
            let mut state = ReaderState::new(64 << 10);
            if matches!(core.fault(20, Touch::Read, &mut state), Outcome::Produce { .. }) {
                core.produce(20, &mut state, None).unwrap();
            }
            while core.map_later(&mut state) {}
            let present = (0..PAGES).filter(|page| core.contents().get(*page) == Content::Present);
            assert_eq!(present.count(), if is_dax { 16 } else { 1 });
        }
    }
}
