//! What a bind did: [`BindReport`], which prints like the kernel's line about a device memmap.

use std::fmt;
use std::time::Duration;

use uzone_pages::{ByteLen, MemoryKind, Order, PageCount, PfnRange, Placement, Tails};

use crate::bind::init_method::InitMethod;
use crate::bind::memmap_cache::MemmapPages;
use crate::bind::options::Init;

/// What a bind did and what it cost.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct BindReport {
    /// The kind of memory.
    pub kind: MemoryKind,
    /// The frame numbers that are described: of the whole region, or with an altmap of what is behind
    /// the descriptors.
    pub range: PfnRange,
    /// The order of its folios.
    pub order: Order,
    /// Whether tails have descriptors.
    pub tails: Tails,
    /// How many base pages are described.
    pub pages: PageCount,
    /// How many descriptors there are.
    pub descriptors: u64,
    /// How long each is.
    pub descriptor_bytes: usize,
    /// When they are written.
    pub init: Init,
    /// How they were written; `None` if they were not.
    pub stamp: Option<InitMethod>,
    /// What their memory is made of.
    pub memmap_pages: MemmapPages,
    /// Whether their memory was kept from an earlier bind of the same zone. Other memory is the
    /// region's own or fresh from the kernel.
    pub is_kept: bool,
    /// The NUMA node of the region ([`Region::node`]), if their memory lies in it or was asked of that node;
    /// `None` where the region has none, or the kernel refused.
    ///
    /// [`Region::node`]: crate::Region::node
    pub node: Option<u32>,
    /// How many threads wrote them; none for [`Init::OnTouch`].
    pub threads: usize,
    /// How often streaming stores were drained.
    pub drains: u64,
    /// The memory that the descriptors span. What of it is resident, the kernel knows:
    /// [`Pagemap::metadata_resident`](crate::Pagemap::metadata_resident).
    pub metadata: ByteLen,
    /// The memory that is held for them; more than they span where kept memory was longer.
    pub memory: ByteLen,
    /// What was taken from the region itself; `None` where the descriptors lie elsewhere.
    pub altmap: Option<Placement>,
    /// How long the bind took.
    pub elapsed: Duration,
}

impl fmt::Display for BindReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let how = match self.init {
            Init::OnTouch => "initialised on touch",
            Init::Eager => "initialised",
        };
        write!(
            f,
            "{how} {} pages in {:.1?}: {} descriptors of {} bytes, {}",
            self.pages, self.elapsed, self.descriptors, self.descriptor_bytes, self.metadata
        )?;
        if let Some(stamp) = self.stamp {
            let source = match self.memmap_pages {
                MemmapPages::Region => "the first",
                _ if self.is_kept => "kept",
                _ => "fresh",
            };
            write!(f, " of {source} {}, {stamp}", self.memmap_pages)?;
            if let Some(node) = self.node {
                write!(f, " on node {node}")?;
            }
            if self.threads > 1 {
                write!(f, " by {} threads", self.threads)?;
            }
        }
        if let Some(altmap) = &self.altmap {
            write!(f, "; {altmap}")?;
        }
        Ok(())
    }
}

impl fmt::Display for InitMethod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::FieldByField => f.write_str("field by field"),
            Self::Template(path) => write!(f, "template by {path} stores"),
        }
    }
}
