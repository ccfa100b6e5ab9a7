//! What the pages of a table are made of: [`Backend`].

use std::sync::Arc;

use uzone_fault::{Backing, Engine, LazyMapping, LazyOptions, MemoryBacking};
use uzone_os::{Access, Mapping, Sharing};
use uzone_pages::{ByteLen, PageSize};

use uzone_harness::ways::one_page::{Answer, OnePage};

use super::bare_thread::BareThread;
use super::source::{Source, map_memory_file};
use uzone_harness::{Result, anonymous};

/// What pages are made of.
pub(super) enum Backend<'a> {
    /// A file, and a mapping of it whose pages are all present: the naive handler copies from that.
    File(&'a Source, Arc<Mapping>),
    /// A memory file.
    Memory(Arc<Mapping>),
    /// The file again, into huge pages of the pool.
    HugeCopy(&'a Source, Arc<Mapping>),
}

impl Backend<'_> {
    pub(super) fn page(&self) -> PageSize {
        match self {
            Self::File(..) => PageSize::KIB_4,
            Self::Memory(memory) => memory.page_size(),
            Self::HugeCopy(..) => PageSize::MIB_2,
        }
    }

    pub(super) fn is_huge(&self) -> bool {
        self.page() != PageSize::KIB_4
    }

    pub(super) fn id(&self) -> &'static str {
        match self {
            Self::File(..) => "file",
            Self::Memory(_) if self.is_huge() => "hugetlb",
            Self::Memory(_) => "memfd",
            Self::HugeCopy(..) => "hugetlb-copy",
        }
    }

    pub(super) fn title(&self) -> &'static str {
        match self {
            Self::File(..) => "A file in the page cache",
            Self::Memory(_) if self.is_huge() => "A memory file of 2 MiB pages",
            Self::Memory(_) => "A memory file",
            Self::HugeCopy(..) => "A file in the page cache, copied into 2 MiB pages",
        }
    }

    /// Returns memory whose faults a handler answers page by page.
    pub(super) fn one_page(&self, len: ByteLen) -> Result<OnePage> {
        let (memory, answer) = match self {
            Self::File(_, mapped) => (anonymous(len)?, Answer::Copy(mapped.clone())),
            Self::HugeCopy(_, mapped) => {
                (Mapping::hugetlb(len, PageSize::MIB_2)?, Answer::Copy(mapped.clone()))
            }
            Self::Memory(memory) => {
                (map_memory_file(memory, len, Access::ReadWrite)?, Answer::Continue)
            }
        };
        OnePage::new(memory, answer)
    }

    /// Returns memory that threads fill for themselves, as many pages at once as a window of `order` has. Not
    /// of huge pages.
    pub(super) fn bare_thread(&self, len: ByteLen, order: u8) -> Result<BareThread> {
        let (memory, source) = match self {
            Self::File(_, mapped) | Self::HugeCopy(_, mapped) => {
                (anonymous(len)?, Some(mapped.clone()))
            }
            Self::Memory(memory) => (map_memory_file(memory, len, Access::ReadWrite)?, None),
        };
        BareThread::new(memory, source, ByteLen::new(self.page().bytes() << order))
    }

    pub(super) fn lazy(
        &self,
        engine: &Engine,
        len: ByteLen,
        options: &LazyOptions,
    ) -> Result<LazyMapping> {
        let backing: Arc<dyn Backing> = match self {
            Self::File(file, _) | Self::HugeCopy(file, _) => file.backing()?,
            Self::Memory(memory) => Arc::new(MemoryBacking::new(memory.clone(), Sharing::Private)?),
        };
        let mut options = options.clone();
        if matches!(self, Self::HugeCopy(..)) {
            options = options.huge(PageSize::MIB_2);
        }
        Ok(engine.map(len, backing, &options)?)
    }

    pub(super) fn plain(&self, len: ByteLen) -> Result<Mapping> {
        match self {
            Self::File(file, _) | Self::HugeCopy(file, _) => file.map(len),
            Self::Memory(memory) => map_memory_file(memory, len, Access::ReadOnly),
        }
    }
}
