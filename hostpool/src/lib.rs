//! Host memory for accelerators: [`HostPool`], a pool of blocks that are present, registered with a driver, and zero.
//!
//! A pool of any size is opened in milliseconds. Its threads make memory present ahead, on the node that was asked for,
//! and one registers it behind them, in pieces with pauses, so that other users of the driver get on. Blocks are handed
//! out from the first piece on.
//!
//! ```
//! use std::time::Duration;
//! use uzone_hostpool::{HostPool, HostPoolOptions};
//! use uzone_pages::ByteLen;
//!
//! let pool = HostPool::open(ByteLen::mib(64), HostPoolOptions::default())?; // .register(Registration::Cuda)
//! let block = pool.take(Duration::from_secs(1))?;
//! block.write_at(0, b"keys and values")?;
//! println!("block {} at {}", block.number(), block.addr()); // for cuMemcpyAsync
//! drop(block);
//! pool.wait_ready(pool.len(), Duration::from_secs(60))?;
//! println!("{}", pool.report());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! | to | take |
//! |---|---|
//! | have a driver register it, in the thread's context or another | [`Registration::Cuda`], [`Registration::In`] |
//! | register it by other means | [`Register`] |
//! | wait until some of it, or all, is ready | [`HostPool::wait_ready`], [`Budget::Eager`] |
//! | keep a table of blocks | [`HostPool::take_run`] of all, [`Block::into_numbers`] |
//! | use it in two processes | [`HostPoolOptions::shared`], [`AttachedPool`] |
//! | know how it went | [`HostPool::report`], [`HostPool::stats`] |
//!
//! A process that is forked off does not inherit the memory (`MADV_DONTFORK`): a page that a device writes to must not be
//! copied, and copying the page tables of a large pool would take seconds. Core dumps leave it out.
//!
//! Write-combined memory is not offered: reads of it by the CPU are a hundred times slower, and devices of today read
//! ordinary memory as fast.
//!
//! Units: lengths are [`ByteLen`](uzone_pages::ByteLen), blocks are numbers from 0 on. Every method of a pool takes
//! `&self`, from any thread.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::too_many_lines))]

mod attached;
mod error;
mod fill;
mod inner;
mod options;
mod pieces;
mod pool;
mod register;
mod report;

pub use attached::AttachedPool;
pub use error::HostPoolError;
pub use inner::leaked;
pub use options::{Budget, HostPoolOptions, Pages, Pause, Place, Zeroing};
pub use pool::{Block, HostPool};
pub use register::{Register, RegisterError, Registration};
pub use report::{HostPoolReport, HostPoolStats};
pub use uzone_os::peer::Peer;
pub use uzone_os::{Context, DriverError, Vendor};
