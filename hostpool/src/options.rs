//! How a pool is made: [`HostPoolOptions`], and the words for it.

use std::fmt;
use std::num::NonZeroU8;
use std::sync::Arc;
use std::time::Duration;

use uzone_pages::{ByteLen, PageSize};

use crate::register::Registration;

/// Which pages the memory is in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pages {
    /// Transparent huge pages as far as the host has them, until the kernel has to move other memory away for them:
    /// the rest is in small pages then, and the report says so.
    #[default]
    Transparent,
    /// Small pages.
    Small,
    /// Huge pages of the host's hugetlb pool of this size, which are reserved when the pool is opened.
    Hugetlb(PageSize),
}

/// When memory is made present and registered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Budget {
    /// All of it before [`HostPool::open`](crate::HostPool::open) returns.
    Eager,
    /// All of it, by threads of the pool, from its first block to its last, while blocks are handed out already.
    #[default]
    Background,
    /// Each block by the thread that takes it first. There is no thread for it, and none that clears blocks ahead.
    OnDemand,
}

/// Which NUMA nodes the memory comes from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Place {
    /// The nodes of the threads that populate it, on all CPUs of the process.
    #[default]
    Anywhere,
    /// One node, and others only when that has no memory left; its CPUs populate it.
    Node(u32),
    /// All nodes with memory in turn, page by page.
    Interleaved,
}

/// When a block is cleared that has had an owner. Memory that is fresh from the kernel is zero, and is not cleared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Zeroing {
    /// By a thread of the pool, in time that no other thread wants, within this share of one CPU in percent; a taker
    /// that finds no zero block clears its own. The share limits the memory bandwidth that copies of a device lose.
    Ahead(NonZeroU8),
    /// By the thread that takes it.
    OnTake,
    /// By the thread that gives it back.
    OnRelease,
    /// Never: a block has the bytes of its last owner. For one owner, who writes each block before it reads it.
    Never,
}

impl Default for Zeroing {
    /// Ahead, with half of a CPU.
    fn default() -> Self {
        Self::Ahead(const { NonZeroU8::new(50).expect("not zero") })
    }
}

/// How long the registering thread lets other threads have the driver between two pieces.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pause {
    /// A tenth of the time of the last piece, 0.125 ms at least. Without a pause the driver's lock is not fair, and other
    /// threads wait for all pieces.
    #[default]
    Adaptive,
    /// This long.
    Fixed(Duration),
}

/// The callback that takes how many bytes are ready and how many will be.
#[derive(Clone)]
pub(crate) struct Progress(pub(crate) Arc<dyn Fn(ByteLen, ByteLen) + Send + Sync>);

impl fmt::Debug for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a callback")
    }
}

/// The options of a pool. By default: blocks of 2 MiB, not registered, in transparent huge pages, on any node, cleared
/// ahead, populated in the background by all CPUs but an eighth.
#[derive(Clone, Debug)]
pub struct HostPoolOptions {
    pub(crate) block: ByteLen,
    pub(crate) registration: Registration,
    pub(crate) pages: Pages,
    pub(crate) place: Place,
    pub(crate) zeroing: Zeroing,
    pub(crate) budget: Budget,
    pub(crate) piece: ByteLen,
    pub(crate) pause: Pause,
    pub(crate) spare_percent: u8,
    pub(crate) is_all_or_nothing: bool,
    pub(crate) is_shared: bool,
    pub(crate) progress: Option<Progress>,
}

impl Default for HostPoolOptions {
    fn default() -> Self {
        Self {
            block: ByteLen::mib(2),
            registration: Registration::default(),
            pages: Pages::default(),
            place: Place::default(),
            zeroing: Zeroing::default(),
            budget: Budget::default(),
            piece: ByteLen::mib(64),
            pause: Pause::default(),
            spare_percent: 12,
            is_all_or_nothing: false,
            is_shared: false,
            progress: None,
        }
    }
}

impl HostPoolOptions {
    uzone_zone::setters! {
        /// Sets the length of a block: any multiple of the host's page.
        block(block: ByteLen) block = block;

        /// Sets who registers the memory: a driver, mlock(2), or the caller.
        register(registration: Registration) registration = registration;

        /// Sets which pages the memory is in.
        pages(pages: Pages) pages = pages;

        /// Sets which NUMA nodes the memory comes from.
        place(place: Place) place = place;

        /// Sets when a block is cleared that has had an owner.
        zeroing(zeroing: Zeroing) zeroing = zeroing;

        /// Sets when memory is made present and registered.
        budget(budget: Budget) budget = budget;

        /// Sets how much is registered at a time at most. A piece is whole blocks, one at least, and no more than the
        /// kernel and the driver take at once.
        piece(most: ByteLen) piece = most;

        /// Sets the pause behind each piece.
        pause(pause: Pause) pause = pause;

        /// Sets which share of its CPUs populating leaves alone, in percent.
        spare_cpus(percent: u8) spare_percent = percent;

        /// Hands out no block before all are registered. If one piece cannot be, the others are unregistered, and the
        /// pool has no block. Without this, blocks that are registered stay usable.
        all_or_nothing() is_all_or_nothing = true;

        /// Puts the pool into a memory file, which another process can attach to
        /// ([`AttachedPool`](crate::AttachedPool)).
        shared() is_shared = true;

        /// Takes a function that a thread of the pool calls after each piece with the bytes that are ready and the bytes
        /// of all. It must not use the pool to take blocks.
        on_progress(progress: impl Fn(ByteLen, ByteLen) + Send + Sync + 'static) progress = Some(Progress(Arc::new(progress)));
    }
}
