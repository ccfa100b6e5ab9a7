//! Memory for the blocks of a memmap: [`Blocks`], which is reserved with the bind and touched when
//! the first long range is held.

use std::ops::Deref;

use uzone_os::{MapError, Mapped};
use uzone_pages::{Block, ByteLen, Layout, Memmap, MemoryKind};

use crate::keep;

/// A word for each block of base pages, all zero when they are made, or none at all.
pub(crate) enum Blocks {
    None,
    Mapped(Mapped<Block>),
}

impl Blocks {
    /// Reserves blocks for a memmap that takes any: 4 MiB of addresses a TiB, and no memory yet.
    pub(crate) fn new(layout: &Layout, kind: MemoryKind) -> Result<Self, (ByteLen, MapError)> {
        if !Memmap::<(), &[uzone_pages::Page]>::takes_blocks(layout, kind) {
            return Ok(Self::None);
        }
        let count = Block::count(layout.range()).get();
        let len = ByteLen::new(count.saturating_mul(size_of::<Block>() as u64));
        let memory = keep::fresh_sparse(len).map_err(|cause| (len, cause))?.memory;
        // As many words as were just mapped, at the start of a page.
        let count = usize::try_from(count).unwrap_or(usize::MAX);
        match Mapped::try_new(memory, count) {
            Ok(blocks) => Ok(Self::Mapped(blocks)),
            Err(_) => unreachable!("the memory was made for so many blocks"),
        }
    }
}

impl Deref for Blocks {
    type Target = [Block];

    fn deref(&self) -> &[Block] {
        match self {
            Self::None => &[],
            Self::Mapped(blocks) => blocks,
        }
    }
}
