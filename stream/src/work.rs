//! The work on memory that a store is chosen for: [`Work`], [`CacheState`], [`NextUse`].

/// The environment variable that sets stores for a process:
/// `UZONE_STORE_POLICY=fill=avx512,zero=avx2,copy=avx512-aside`.
///
/// The value is a list of `work=store`, separated by commas. A work is `fill`, `zero` or `copy`, at
/// most once; a work that is not named keeps its default. A store is a name of [`Path`](crate::Path) in any case;
/// `portable` writes through the cache at every length. `-aside` behind the store of `copy` copies
/// eight pages at a time ([`CopyMethod::Interleaved`](crate::CopyMethod::Interleaved)). Unset or empty, the table decides.
///
/// A value that cannot be followed is reported by [`StorePolicy::problem`](crate::StorePolicy::problem), and the whole of it is
/// left out.
pub const STORE_POLICY: &str = "UZONE_STORE_POLICY";

/// The work to do with memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Work {
    /// Writing a [`Pattern`](crate::Pattern).
    Fill,
    /// Writing zeroes.
    Zero,
    /// Copying.
    Copy,
}

impl Work {
    /// Every kind of work.
    pub const ALL: [Self; 3] = [Self::Fill, Self::Zero, Self::Copy];

    /// Returns the name that [`STORE_POLICY`] has for it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Fill => "fill",
            Self::Zero => "zero",
            Self::Copy => "copy",
        }
    }
}

/// Where the destination was before the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CacheState {
    /// In the cache: written or read a moment ago.
    Hot,
    /// In memory only.
    Cold,
}

/// The next use of the destination after the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NextUse {
    /// It is read at once.
    Soon,
    /// It is not read while it would still be in the cache.
    Later,
}
