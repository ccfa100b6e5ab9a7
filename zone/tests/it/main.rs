//! The tests of regions, zones, pins, pools and clearing, in one program. Tests that need a process of their own are
//! beside it: `bus` and `bus_zero` install a handler of SIGBUS, `trace` has a listener that slows every bind down,
//! `logged` has a subscriber that the first event of another thread would hide events from, and
//! `huge` and `pool` raise the host's pool of huge pages, of which another bind would take pages.
#![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]

#[path = "../common/mod.rs"]
mod common;

mod address;
mod bind;
mod clear;
mod dumps;
mod errors;
mod fast_and_slow;
mod folio_pool;
mod hold;
mod machine;
mod persist;
mod poison;
mod produce;
mod regions;
mod shapes;
mod stress;
mod zero;
