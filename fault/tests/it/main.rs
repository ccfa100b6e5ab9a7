//! Lazily mapped memory by the engine and the kernel, in one program. Tests that need a process of their own are beside
//! this folder: `allocator` replaces the allocator, `exit` ends the process, `limits` and `locked` change what the whole
//! process may have, `signals` interrupts threads by a timer of the process, `place` counts the threads of the process,
//! and `in_order` counts faults that other tests beside it would delay.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail by panicking, as tests do")]

mod adopted;
mod around;
mod capture;
mod clones;
mod collapse;
#[path = "../common/mod.rs"]
mod common;
mod dirty;
mod in_thread;
mod inject;
mod live;
mod pins;
mod priority;
mod races;
mod shared;
mod strangers;
mod stress;
mod unprivileged;
mod waiting;
