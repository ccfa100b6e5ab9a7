//! Threads that do everything at once, for as long as the environment sets.

mod reuse;
mod soak;
