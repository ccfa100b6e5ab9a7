//! Huge pages.

pub(crate) mod blocks;
pub(crate) mod collapse;
pub(crate) mod slot;
pub(crate) mod transparent;
