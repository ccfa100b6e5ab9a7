//! A diff of a VM that runs: its memory as it was at one moment ([`session`]), and the pages of that ([`pages`]).

pub(crate) mod pages;
pub(crate) mod session;
