//! A memory manager for very large memory, in user space.
//!
//! A program that owns gigabytes to terabytes of memory (guest memory, a cache, a pool of buffers, a data
//! set) makes a [`Region`] of it and binds it to a [`Zone`]. The [`Pagemap`] that this returns keeps a descriptor for
//! each page or folio: its content, its number of pins, and a payload of the program's own. A [`Pool`] hands folios out, every byte zero. The module [`lazy`] maps memory whose pages are put
//! in place when they are first touched.
//!
//! | to | take |
//! |---|---|
//! | get memory, or adopt memory that exists | [`Region`] |
//! | describe its pages | [`Zone::bind`], [`BindOptions`], [`Pagemap`] |
//! | hold pages while a device or a thread uses them | [`Pagemap::pin`](PagemapView::pin), [`Zone::pin`], [`Pinned`] |
//! | hold pages where the kernel put them, for a device | [`PinOptions::kernel`], [`Pinned::physical`](Guard::physical) |
//! | hand out cleared memory | [`Pool`], [`Pooled`] |
//! | keep host memory for accelerators, registered with their driver | [`hostpool::HostPool`] |
//! | map a file, a memory file or a function lazily | [`lazy::Engine`] |
//! | have memory filled by a page server | [`attach::AttachedMemory`] |
//! | survive memory errors | [`sigbus`], [`Pagemap::poison`](PagemapView::poison) |
//!
//! The guide in `docs/GUIDE.md` explains one idea after the other. [`model`], [`stream`] and [`os`] have the public parts
//! of the packages below this one; each of these packages can be used alone, `uzone-pages` without `std`.
#![forbid(unsafe_code)]

#[doc(inline)]
pub use uzone_os::memory::Limit;
#[doc(inline)]
pub use uzone_os::{Access, AccessError, Addr, Rejected, Sharing, sigbus};
#[doc(inline)]
pub use uzone_pages::{
    AdvanceError, ByteLen, Content, ErrorKind, MemoryKind, Order, PageCount, PageSize, PageView,
    Payload, Pfn, PfnRange, Placement, Refresh,
};
#[doc(inline)]
pub use uzone_stream::StorePolicy;
#[doc(inline)]
pub use uzone_zone::{
    AltmapOptions, BindError, BindFailure, BindOptions, BindReport, Busy, Cleared, FaultError,
    Guard, Holder, Huge, Init, MemmapPages, Pagemap, PagemapOps, PagemapView, PinError, PinOptions,
    Pinned, PinnedRanges, Poisoned, Pool, PoolError, PoolOptions, PoolStats, Pooled,
    PopulateOptions, PopulateReport, RawGuard, Redeemed, Referenced, Region, RegionView, Segment,
    Unclearable, WriteError, ZeroOptions, Zone,
};

/// Memory whose pages are put in place when they are first touched.
pub mod lazy {
    #[doc(inline)]
    pub use uzone_fault::{
        AdoptedMemory, Answer, Backing, BackingError, Budget, Collapsed, Engine, EngineOptions,
        Failure, FaultOutcome, FaultRecord, FaultStats, FileBacking, Filled, FunctionBacking,
        Latency, LazyError, LazyMapping, LazyOptions, MapError, MemoryBacking, Refusal,
        RemoteRegion, SharedBacking, Uncollapsed, Window, WriteTracking, ZeroBacking,
    };
    #[doc(inline)]
    pub use uzone_os::Vaddr;
    #[doc(inline)]
    pub use uzone_os::uffd::{EventLog, FaultKind, KernelFaults, LoggedEvents, Remote};
    #[doc(inline)]
    pub use uzone_pages::{Advice, FaultAround};
}

/// Host memory for accelerators: a pool that fills and registers itself behind its first user.
pub mod hostpool {
    #[doc(inline)]
    pub use uzone_hostpool::{
        AttachedPool, Block, Budget, Context, DriverError, HostPool, HostPoolError,
        HostPoolOptions, HostPoolReport, HostPoolStats, Pages, Pause, Peer, Place, Register,
        RegisterError, Registration, Vendor, Zeroing, leaked,
    };
}

/// Images of memory: packed, verified, and mapped lazily.
pub mod snapshot {
    #[doc(inline)]
    pub use uzone_snapshot::{
        Codec, DiskCache, FileSource, FrameCache, FrameCounts, Image, ImageRegion, OpenOptions,
        Packed, Packer, RequestOptions, Root, SnapshotBacking, SnapshotError, Source, is_url,
        open_source,
    };

    #[doc(inline)]
    #[cfg(feature = "object-storage")]
    pub use uzone_snapshot::ObjectSource;
}

/// Memory that a page server fills: for programs that attach to `uzone serve`.
pub mod attach {
    #[doc(inline)]
    pub use uzone_attach::{AttachError, AttachOptions, AttachedMemory, ServedBy};
}

/// Descriptors and windows as plain values, without system calls: for programs that keep their own.
pub mod model {
    #[doc(inline)]
    pub use uzone_pages::{
        AddrError, Class, FaultArea, FaultCosts, FaultPlan, FaultPlanner, Folio, HoldError,
        HoldKind, Layout, LinuxPage, LinuxSeed, MAX_HOLDS, MAX_PAYLOAD_BYTES, Memmap, Page, Plain,
        Slot, Tails, Template, Touch, Word, chunks,
    };
}

/// Memory to make regions of, and facts about the kernel and the host.
pub mod os {
    #[doc(inline)]
    pub use uzone_os::{
        Anonymous, Exclusive, Exclusivity, HugeAdvice, KernelPin, KernelPinError, KernelPins,
        MapError, Mapped, Mapping, MappingError, SysError, SystemRoot, dax, hugepages, memory,
        memory_file, numa, page_cache, passed_descriptors, peer,
    };
}

/// Stores that bypass the cache, and which of them wins on this CPU.
pub mod stream {
    #[doc(inline)]
    pub use uzone_stream::{
        CacheState, CopyMethod, LINE_BYTES, NextUse, Path, Pattern, STORE_POLICY, StreamError,
        Streaming, Work, best, copy, copy_bytes, copy_flush, copy_words, fill, flush_words,
        has_write_back, zero, zero_bytes, zero_words,
    };
}

/// The example of the README, run as a test.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;

/// The examples of the guide, run as tests.
#[cfg(doctest)]
#[doc = include_str!("../../docs/GUIDE.md")]
struct Guide;

/// The example of the guide of operators, run as a test.
#[cfg(doctest)]
#[doc = include_str!("../../docs/SERVER.md")]
struct Server;
