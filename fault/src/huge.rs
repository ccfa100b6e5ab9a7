//! Huge pages.

pub(crate) mod blocks;
pub(crate) mod collapse;
pub(crate) mod transparent;
