//! The tables: cases and the memory that they work on.

pub(crate) mod bind;
pub(crate) mod clear;
pub(crate) mod fault;
mod first_touch;
pub(crate) mod hostpool;
pub(crate) mod image;
pub(crate) mod pin;
mod pool;
pub(crate) mod restore;
