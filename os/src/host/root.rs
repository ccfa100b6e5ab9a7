//! Reading `/proc` and `/sys`, of this host or of a made-up tree: [`SystemRoot`].
//!
//! The text of the files is parsed by pure functions beside each mechanism. This file only finds and
//! reads them, and gives every failure the path it belongs to.
//!
//! Cost: one open, read and close a call. None of it belongs in a fault path.

use std::io;
use std::path::{Path, PathBuf};

use uzone_pages::ErrorKind;

/// The place of the kernel's files: `/` on a host, a directory of files in a test.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SystemRoot(PathBuf);

/// A fact of the host that could not be read, or a thread that could not be placed on its CPUs.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SysError {
    /// The file could not be read.
    #[error("cannot read {path}", path = path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        cause: io::Error,
    },
    /// The file was read and does not hold the value that its name promises.
    #[error("{path} should hold {wanted}, and holds {found:?}", path = path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// The expected value.
        wanted: &'static str,
        /// The text of the file, shortened.
        found: String,
    },
    /// The kernel does not report which CPUs this thread may use.
    #[error("cannot ask which CPUs this thread may use")]
    Cpus(#[source] io::Error),
    /// This thread may use none of the CPUs that it was to keep to.
    #[error(
        "this thread may use none of the {asked} CPUs it was to keep to: widen its affinity, or the cpuset of its control group"
    )]
    NoCpu {
        /// The number that there were to choose from.
        asked: usize,
    },
    /// The kernel did not let this thread keep to CPUs that it may use.
    #[error("cannot keep this thread to {asked} CPUs")]
    Placement {
        /// Their number.
        asked: usize,
        /// The kernel's error.
        #[source]
        cause: io::Error,
    },
}

impl SysError {
    /// Returns the kind of failure.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Read { .. } if self.is_absent() => ErrorKind::NotSupported,
            Self::Read { cause, .. } if cause.kind() == io::ErrorKind::PermissionDenied => {
                ErrorKind::PermissionDenied
            }
            Self::Format { .. } => ErrorKind::InvalidData,
            Self::NoCpu { .. } => ErrorKind::InvalidInput,
            _ => ErrorKind::Io,
        }
    }

    /// Returns whether the file is not there, which means that the kernel lacks the feature.
    #[must_use]
    pub fn is_absent(&self) -> bool {
        matches!(self, Self::Read { cause, .. } if cause.kind() == io::ErrorKind::NotFound)
    }
}

/// Returns the value, or `None` where the file is missing.
pub(crate) fn if_there<T>(answer: Result<T, SysError>) -> Result<Option<T>, SysError> {
    match answer {
        Err(error) if error.is_absent() => Ok(None),
        answer => answer.map(Some),
    }
}

impl SystemRoot {
    /// Returns the root of this host.
    #[must_use]
    pub fn host() -> Self {
        Self(PathBuf::from("/"))
    }

    /// Takes a directory that has a `proc` and a `sys` of its own.
    #[must_use]
    pub fn at(directory: impl Into<PathBuf>) -> Self {
        Self(directory.into())
    }

    /// Returns the place of `path` under this root; a leading slash is ignored.
    #[must_use]
    pub fn path(&self, path: impl AsRef<Path>) -> PathBuf {
        let path = path.as_ref();
        self.0.join(path.strip_prefix("/").unwrap_or(path))
    }

    /// Returns the text of a file.
    ///
    /// # Errors
    /// [`SysError::Read`] with the path.
    pub fn read(&self, path: impl AsRef<Path>) -> Result<String, SysError> {
        let path = self.path(path);
        std::fs::read_to_string(&path).map_err(|cause| SysError::Read { path, cause })
    }

    /// Returns the result of `parse` for the text of a file.
    ///
    /// # Errors
    /// [`SysError::Read`], or [`SysError::Format`] where `parse` returns `None`.
    pub fn parse<T>(
        &self,
        path: impl AsRef<Path>,
        wanted: &'static str,
        parse: impl FnOnce(&str) -> Option<T>,
    ) -> Result<T, SysError> {
        let path = path.as_ref();
        let text = self.read(path)?;
        parse(&text).ok_or_else(|| SysError::Format {
            path: self.path(path),
            wanted,
            found: text.trim().chars().take(80).collect(),
        })
    }

    /// Returns the number that is all a file holds.
    ///
    /// # Errors
    /// Like [`SystemRoot::parse`].
    pub fn number(&self, path: impl AsRef<Path>) -> Result<u64, SysError> {
        self.parse(path, "a whole number", |text| text.trim().parse().ok())
    }

    /// Returns the names in a directory, sorted.
    ///
    /// # Errors
    /// [`SysError::Read`] with the path.
    pub(crate) fn names(&self, path: impl AsRef<Path>) -> Result<Vec<String>, SysError> {
        let path = self.path(path);
        let read = || -> io::Result<Vec<String>> {
            let mut names = Vec::new();
            for entry in std::fs::read_dir(&path)? {
                // The kernel's own names are ASCII; another is not one that we look for.
                if let Ok(name) = entry?.file_name().into_string() {
                    names.push(name);
                }
            }
            names.sort();
            Ok(names)
        };
        read().map_err(|cause| SysError::Read { path, cause })
    }
}

/// Returns the bytes of a field such as `MemTotal:  24684092 kB` in a text of such lines.
///
/// A line may have words in front, as in `Node 0 MemTotal: ...`.
pub(crate) fn kib_field(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        let (left, right) = line.split_once(':')?;
        if left.split_whitespace().next_back() != Some(name) {
            return None;
        }
        let kib: u64 = right.trim().strip_suffix("kB")?.trim().parse().ok()?;
        kib.checked_mul(1024)
    })
}

/// A directory of made-up files that is removed when dropped.
#[cfg(test)]
pub(crate) struct MadeUp(PathBuf);

#[cfg(test)]
impl MadeUp {
    pub(crate) fn new(files: &[(&str, &str)]) -> Self {
        use std::sync::atomic::{AtomicU32, Ordering};
        static NEXT: AtomicU32 = AtomicU32::new(0);
        // Relaxed: only the number has to differ, nothing else is published by it.
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let directory =
            std::env::temp_dir().join(format!("uzone-os-{}-{number}", std::process::id()));
        let made_up = Self(directory);
        for (path, text) in files {
            let path = made_up.root().path(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        made_up
    }

    pub(crate) fn root(&self) -> SystemRoot {
        SystemRoot::at(&self.0)
    }
}

#[cfg(test)]
impl Drop for MadeUp {
    fn drop(&mut self) {
        // A directory that stays behind is no reason to fail a test that passed.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_field_is_found_by_its_whole_name_and_read_as_bytes() {
        let text = "MemTotalX: 1 kB\nMemTotal:       24684092 kB\nHugePages_Total: 3\n";
        assert_eq!(kib_field(text, "MemTotal"), Some(24_684_092 * 1024));
        assert_eq!(kib_field("Node 0 MemFree:   7 kB\n", "MemFree"), Some(7168));
        for (text, name) in [
            ("", "MemTotal"),
            ("MemTotal: kB", "MemTotal"),
            ("MemTotal: 18446744073709551615 kB", "MemTotal"),
            ("MemTotal: -1 kB", "MemTotal"),
            ("HugePages_Total: 3", "HugePages_Total"),
        ] {
            assert_eq!(kib_field(text, name), None, "{text:?}");
        }
    }

    #[test]
    fn a_file_that_fails_is_named_with_what_it_should_hold() {
        let tree = MadeUp::new(&[("proc/number", "12x\n")]);
        let error = tree.root().number("/proc/number").unwrap_err();
        assert!(
            error
                .to_string()
                .ends_with("proc/number should hold a whole number, and holds \"12x\"")
        );
        assert!(!error.is_absent());
        let error = tree.root().number("proc/other").unwrap_err();
        assert!(error.is_absent(), "{error}");
    }
}
