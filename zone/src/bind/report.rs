//! The outcome of a bind: [`BindReport`], which prints like the kernel's line about a device memmap.

use std::fmt;
use std::time::Duration;

use uzone_pages::{ByteLen, Placement};
use uzone_stream::Path;

use crate::bind::memmap_cache::MemmapPages;
use crate::bind::options::Init;

/// The outcome and the cost of a bind, beside the options that the caller gave.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct BindReport {
    /// The time at which descriptors are written.
    pub init: Init,
    /// The stores that copied templates of them; `None` if they were set field by field, or not written.
    pub stores: Option<Path>,
    /// The pages that they lie in.
    pub memmap_pages: MemmapPages,
    /// Whether their memory was kept from an earlier bind of the same zone. Other memory is the
    /// region's own or fresh from the kernel.
    pub is_kept: bool,
    /// The NUMA node of the region ([`Region::node`]), if their memory lies in it or was asked of that node;
    /// `None` where the region has none, or the kernel refused.
    ///
    /// [`Region::node`]: crate::Region::node
    pub node: Option<u32>,
    /// The number of threads that wrote them; none for [`Init::OnTouch`].
    pub threads: usize,
    /// The memory that the descriptors span. The kernel knows how much of it is resident:
    /// [`Pagemap::metadata_resident`](crate::Pagemap::metadata_resident).
    pub bytes: ByteLen,
    /// The pages that were taken from the region itself; `None` where the descriptors lie elsewhere.
    pub altmap: Option<Placement>,
    /// The time that the bind took.
    pub elapsed: Duration,
}

impl BindReport {
    /// Returns the report of descriptors that are not written yet.
    pub(crate) fn new(
        init: Init,
        memmap_pages: MemmapPages,
        node: Option<u32>,
        bytes: ByteLen,
    ) -> Self {
        Self {
            init,
            stores: None,
            memmap_pages,
            is_kept: false,
            node,
            threads: 0,
            bytes,
            altmap: None,
            elapsed: Duration::ZERO,
        }
    }
}

impl fmt::Display for BindReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let how = match self.init {
            Init::OnTouch => "initialised on touch",
            Init::Eager => "initialised",
        };
        write!(f, "{} of descriptors {how} in {:.1?}", self.bytes, self.elapsed)?;
        if self.init == Init::Eager {
            let source = match self.memmap_pages {
                MemmapPages::Region => "the first",
                _ if self.is_kept => "kept",
                _ => "fresh",
            };
            write!(f, ", in {source} {}, ", self.memmap_pages)?;
            match self.stores {
                None => f.write_str("field by field")?,
                Some(path) => write!(f, "template by {path} stores")?,
            }
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
