//! The memory of a table: [`Backend`].

use std::sync::Arc;

use uzone_fault::{Backing, Engine, LazyMapping, LazyOptions, MemoryBacking};
use uzone_harness::ways::one_page::{Answer, OnePage};
use uzone_harness::{Result, anonymous};
use uzone_os::{Access, Mapping, Sharing};
use uzone_pages::ByteLen;

use super::bare_thread::BareThread;
use super::source::{PAGE, Source, map_memory_file};

/// The bytes that pages are filled with.
pub(super) enum Backend<'a> {
    /// A file, and a mapping of it whose pages are all present: the naive handler copies from that.
    File(&'a Source, Arc<Mapping>),
    /// A memory file.
    Memory(Arc<Mapping>),
}

impl Backend<'_> {
    pub(super) fn id(&self) -> &'static str {
        match self {
            Self::File(..) => "file",
            Self::Memory(_) => "memfd",
        }
    }

    pub(super) fn title(&self) -> &'static str {
        match self {
            Self::File(..) => "A file in the page cache",
            Self::Memory(_) => "A memory file",
        }
    }

    /// Returns memory whose faults a handler answers page by page.
    pub(super) fn one_page(&self, len: ByteLen) -> Result<OnePage> {
        match self {
            Self::File(_, mapped) => OnePage::new(anonymous(len)?, Answer::Copy(mapped.clone())),
            Self::Memory(memory) => {
                OnePage::new(map_memory_file(memory, len, Access::ReadWrite)?, Answer::Continue)
            }
        }
    }

    /// Returns memory that threads fill for themselves, a window of `order` at once.
    pub(super) fn bare_thread(&self, len: ByteLen, order: u8) -> Result<BareThread> {
        let (memory, source) = match self {
            Self::File(_, mapped) => (anonymous(len)?, Some(mapped.clone())),
            Self::Memory(memory) => (map_memory_file(memory, len, Access::ReadWrite)?, None),
        };
        BareThread::new(memory, source, ByteLen::new(PAGE << order))
    }

    pub(super) fn lazy(
        &self,
        engine: &Engine,
        len: ByteLen,
        options: &LazyOptions,
    ) -> Result<LazyMapping> {
        let backing: Arc<dyn Backing> = match self {
            Self::File(file, _) => file.backing()?,
            Self::Memory(memory) => Arc::new(MemoryBacking::new(memory.clone(), Sharing::Private)?),
        };
        Ok(engine.map(len, backing, options)?)
    }

    /// Returns the kernel's own mapping.
    pub(super) fn plain(&self, len: ByteLen) -> Result<Mapping> {
        match self {
            Self::File(file, _) => file.map(len),
            Self::Memory(memory) => map_memory_file(memory, len, Access::ReadOnly),
        }
    }
}
