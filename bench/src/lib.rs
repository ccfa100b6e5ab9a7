//! Every benchmark of uzone, as a library that the command and the checks call.
//!
//! A benchmark is a *group* of cases that do the same work in different ways. Each round runs
//! every case once, in a fresh random order, so that whatever the machine does meanwhile hits all
//! of them; ratios are formed within a round, and the median of those is what is reported. The
//! naive way and the limit of the machine are cases like the others. What a case wrote is checked
//! before it is timed.
#![forbid(unsafe_code)]

mod adopted;
pub mod all;
pub mod bind;
pub mod brief;
pub mod check;
pub mod copy;
mod error;
mod extents;
pub mod fault;
mod first_touch;
mod group;
mod hand_out;
pub mod machine;
pub mod metadata;
mod naive;
pub mod pin;
mod put_back;
mod reads;
pub mod report;
pub mod restore;
pub mod settings;
pub mod snapshot;
mod suite;
mod summary;
pub mod zero;

pub use adopted::Adopted;
pub use error::{BenchError, sentence};
pub use group::{PartOf, Phase, Watch};
