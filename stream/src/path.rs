//! Which store instruction a copy, fill or zero takes.
//!
//! One axis only: the kind and width of the store. How the bytes are cut into lines is the same on
//! every path. Which path is best is in `policy.rs`.
//!
//! Cost: [`Path::is_available`] is a load and a compare after its first call, which asks the CPU.

use std::fmt;
use std::str::FromStr;

use crate::arch;
use crate::error::StreamError;

/// A kind of store instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Path {
    /// Plain stores, through the cache. Available everywhere.
    Portable,
    /// 8-byte streaming stores from general registers (`MOVNTI`): every x86-64 CPU.
    Movnti,
    /// 16-byte streaming stores (`MOVNTDQ`): every x86-64 CPU.
    Sse2,
    /// 32-byte streaming stores (`VMOVNTDQ` on a YMM register).
    Avx2,
    /// 64-byte streaming stores (`VMOVNTDQ` on a ZMM register): a whole line at once.
    Avx512,
}

impl Path {
    /// Every path there is, available or not, from the narrowest store to the widest.
    pub const ALL: [Self; 5] = [Self::Portable, Self::Movnti, Self::Sse2, Self::Avx2, Self::Avx512];

    /// Returns whether this build, CPU and operating system offer the path. The answer never
    /// changes while the process runs.
    ///
    /// Only [`Path::Portable`] is on other architectures than x86-64, under Miri, and in builds with
    /// `--cfg uzone_sanitizer`.
    #[inline]
    #[must_use]
    pub fn is_available(self) -> bool {
        arch::is_available(self)
    }

    /// Returns the name that [`STORE_POLICY`](crate::STORE_POLICY) and [`Path::from_str`] know it by.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::Movnti => "movnti",
            Self::Sse2 => "sse2",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
        }
    }
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Path {
    type Err = StreamError;

    /// Takes a name as [`Path::name`] gives it, in any case.
    ///
    /// # Errors
    ///
    /// [`StreamError::UnknownPath`]. Whether the path is available is not asked here.
    fn from_str(name: &str) -> Result<Self, StreamError> {
        Self::ALL
            .into_iter()
            .find(|path| path.name().eq_ignore_ascii_case(name))
            .ok_or_else(|| StreamError::UnknownPath { name: name.to_owned() })
    }
}

/// A path that is available. The architecture files take it instead of checking again.
///
/// # Invariants
///
/// `self.0.is_available()`. Only [`Ready::new`] makes one, and availability never changes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ready(Path);

impl Ready {
    /// Takes an available path.
    ///
    /// # Panics
    ///
    /// If it is not available.
    #[inline]
    pub(crate) fn new(path: Path) -> Self {
        assert!(path.is_available(), "stream path {path} is not available here");
        Self(path)
    }

    /// Returns the path.
    #[inline]
    pub(crate) fn path(self) -> Path {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// check.sh sets the variable where it builds with a sanitizer, which sees no store of assembly.
    #[test]
    fn a_sanitizer_selects_the_portable_stores_by_itself() {
        assert_eq!(cfg!(uzone_sanitizer), std::env::var_os("UZONE_SANITIZED").is_some());
        let has_others =
            Path::ALL.into_iter().any(|path| path.is_available() && path != Path::Portable);
        assert!(!(has_others && cfg!(uzone_sanitizer)));
    }

    #[test]
    fn every_name_is_read_back_as_its_path_in_any_case() {
        for path in Path::ALL {
            assert_eq!(path.name().parse(), Ok(path));
            assert_eq!(path.to_string().to_uppercase().parse(), Ok(path));
        }
    }

    #[test]
    fn an_unknown_name_is_an_error_that_lists_every_name() {
        let error = "mmx".parse::<Path>().unwrap_err();
        assert_eq!(
            error.to_string(),
            "no stream path is called \"mmx\"; there are portable, movnti, sse2, avx2, avx512"
        );
    }

    #[test]
    fn the_portable_path_is_always_available() {
        assert!(Path::Portable.is_available());
    }
}
