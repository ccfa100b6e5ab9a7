//! The tables: cases and the memory that they work on.

pub(crate) mod bind;
pub(crate) mod copy;
mod extents;
pub(crate) mod fault;
mod first_touch;
mod hand_out;
pub(crate) mod pin;
pub(crate) mod restore;
pub(crate) mod snapshot;
pub(crate) mod zero;
