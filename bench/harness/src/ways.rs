//! Naive ways, limits and ours, as far as the demo and the benchmark measure the same.
//!
//! A naive way shares no code with uzone: a baseline may not profit from an optimisation that it is measured against.

pub mod bind;
pub mod clear;
pub mod naive_bind;
pub mod naive_pin;
pub mod one_page;
pub mod pin;
pub mod threads;
