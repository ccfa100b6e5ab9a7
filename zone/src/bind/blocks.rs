//! Memory for the blocks of a memmap: [`Blocks`], which is reserved with the bind and touched when
//! the first long range is held.
//!
//! Where the descriptors lie in fresh base pages, the blocks lie behind them in the same mapping: a
//! bind on touch is little more than its system calls, and a mapping of their own would double those.
//! Elsewhere they cannot: memory that is kept or of a pool has old descriptors, or is dear.

use std::ops::Deref;

use uzone_os::{Exclusive, MapError, Mapped};
use uzone_pages::{Block, ByteLen, Layout, Memmap, MemoryKind};

use crate::bind::memmap_cache;

/// A word for each block of base pages, all zero when they are made, or none at all.
pub(crate) enum Blocks {
    None,
    /// In a mapping of their own.
    Apart(Mapped<Block>),
    /// In the mapping of the descriptors, behind them.
    Behind(Mapped<Block>),
}

impl Blocks {
    /// Returns how many bytes the blocks of a memmap have that takes any, 4 MiB of addresses a TiB;
    /// zero for one that takes none.
    pub(crate) fn len_bytes(layout: &Layout, kind: MemoryKind) -> ByteLen {
        if !Memmap::<(), &[uzone_pages::Page]>::takes_blocks(layout, kind) {
            return ByteLen::ZERO;
        }
        let count = Block::count(layout.range()).get();
        ByteLen::new(count.saturating_mul(size_of::<Block>() as u64))
    }

    /// Takes the zero memory behind the descriptors, or reserves some if a memmap of `layout` and
    /// `kind` takes blocks.
    pub(crate) fn new(
        layout: &Layout,
        kind: MemoryKind,
        behind: Option<Exclusive>,
    ) -> Result<Self, (ByteLen, MapError)> {
        let len = Self::len_bytes(layout, kind);
        if len.is_zero() {
            return Ok(Self::None);
        }
        // One word at least, and as many as were mapped, at the start of a page.
        let row = |memory| {
            let count = len.to_usize().unwrap_or(usize::MAX) / size_of::<Block>();
            match Mapped::try_new(memory, count) {
                Ok(blocks) => blocks,
                Err(_) => unreachable!("the memory was made for so many blocks"),
            }
        };
        match behind {
            Some(memory) => Ok(Self::Behind(row(memory))),
            None => {
                let memory = memmap_cache::fresh_sparse(len).map_err(|cause| (len, cause))?;
                Ok(Self::Apart(row(memory.memory)))
            }
        }
    }
}

impl Deref for Blocks {
    type Target = [Block];

    fn deref(&self) -> &[Block] {
        match self {
            Self::None => &[],
            Self::Apart(blocks) | Self::Behind(blocks) => blocks,
        }
    }
}
