//! What every table is measured with: interleaved rounds, the rows that come of them, and what a run is of.

pub(crate) mod adopted;
pub mod check;
pub(crate) mod error;
pub(crate) mod group;
pub mod machine;
pub(crate) mod put_back;
pub(crate) mod reads;
pub mod report;
pub mod settings;
pub(crate) mod suite;
mod summary;
