//! The tables: what is measured.

pub mod all;
pub(crate) mod bind;
pub mod brief;
pub(crate) mod copy;
mod extents;
pub(crate) mod fault;
mod first_touch;
mod hand_out;
pub mod metadata;
pub(crate) mod pin;
pub(crate) mod restore;
pub(crate) mod snapshot;
pub(crate) mod zero;
