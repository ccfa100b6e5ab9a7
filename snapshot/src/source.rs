//! Where the bytes of an image come from: [`Source`], and how those of an object are requested:
//! [`RequestOptions`].

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::time::Duration;

use crate::options::options;

/// Reading and writing by the owner of a file alone.
pub(crate) const OWNER_ALONE: u32 = 0o600;

/// Bytes that do not change, read from any offset by several threads at once.
pub trait Source: Send + Sync {
    /// Returns the name of the source in errors: a path or an address.
    fn name(&self) -> String;

    /// Returns how many bytes there are.
    fn byte_len(&self) -> u64;

    /// Returns the identity of these bytes. Other bytes that take their place under the same name have another one;
    /// `None` if the source does not know.
    fn identity(&self) -> Option<String> {
        None
    }

    /// Returns the file that has these bytes, if there is one.
    fn file(&self) -> Option<&File> {
        None
    }

    /// Returns the permissions that a file of the group `group` with these bytes has at most: those of the file
    /// that they are in, and without one those of its owner alone.
    fn mode_for(&self, group: u32) -> u32 {
        let metadata = self.file().and_then(|file| file.metadata().ok());
        metadata.map_or(OWNER_ALONE, |metadata| crate::files::mode_for(&metadata, group))
    }

    /// Returns the next bytes behind `offset` that need to be read: all before them are zeroes. It starts at the end of
    /// the source if there are none. By default, these are all bytes from `offset` on.
    ///
    /// # Errors
    /// The error of the system, [`io::ErrorKind::UnexpectedEof`] if there are not as many bytes any more.
    fn data_at(&self, offset: u64) -> io::Result<Range<u64>> {
        Ok(offset..self.byte_len())
    }

    /// Reads bytes from `offset` on until `out` is full. It may block.
    ///
    /// # Errors
    /// The error of the system, [`io::ErrorKind::UnexpectedEof`] if there are not as many.
    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()>;

    /// Reads bytes as [`Source::read_at`] does if that takes no device and no network. Returns whether it
    /// did; by default it never does.
    ///
    /// # Errors
    /// As for [`Source::read_at`].
    fn read_ready(&self, offset: u64, out: &mut [u8]) -> io::Result<bool> {
        let _ = (offset, out);
        Ok(false)
    }

    /// Reads bytes as [`Source::read_at`] does, from where they are kept for good, past copies of
    /// them on the way: the bytes that were read did not match their hash.
    ///
    /// # Errors
    /// As for [`Source::read_at`].
    fn read_again(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.read_at(offset, out)
    }

    /// Starts to fetch several ranges, which are in ascending order and will be read soon, and does not wait
    /// for them. It is a hint; by default it does nothing.
    fn will_need(&self, ranges: &[Range<u64>]) {
        let _ = ranges;
    }

    /// Returns the source that `name` means beside this one: how an image names its parent.
    ///
    /// # Errors
    /// The error of the system, [`io::ErrorKind::Unsupported`] if this source has no neighbours.
    fn neighbour(&self, name: &str) -> io::Result<Box<dyn Source>> {
        let _ = name;
        Err(io::ErrorKind::Unsupported.into())
    }
}

/// Returns the ranges, which are in ascending order, where those that are no more than `gap` apart are one.
pub(crate) fn joined(ranges: &[Range<u64>], gap: u64) -> Vec<Range<u64>> {
    let mut joined: Vec<Range<u64>> = Vec::new();
    for range in ranges {
        match joined.last_mut() {
            Some(last) if range.start <= last.end.saturating_add(gap) => {
                last.end = last.end.max(range.end);
            }
            _ => joined.push(range.clone()),
        }
    }
    joined
}

/// How far a reader in order announces its bytes, and in what steps.
pub(crate) const AHEAD: u64 = 32 << 20;
const STEP: u64 = 2 << 20;

/// Returns the bytes that a reader in order announces while it reads `part` of `whole`. It announces each byte once.
pub(crate) fn ahead_of(part: &Range<u64>, whole: &Range<u64>) -> Option<Range<u64>> {
    let first = (part.start - whole.start).next_multiple_of(STEP);
    let behind = (part.end - whole.start).next_multiple_of(STEP);
    let start = if first == 0 { 0 } else { first + AHEAD - STEP };
    let end = (whole.start + behind + AHEAD - STEP).min(whole.end);
    Some(whole.start + start..end).filter(|ahead| first < behind && !ahead.is_empty())
}

/// The kind of a path: of a file, or the URL of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Address<'a> {
    File,
    /// `fragment` follows `#`.
    Url {
        url: &'a str,
        fragment: Option<&'a str>,
    },
}

/// Returns the kind of a path. `./s3://bucket` is a file.
pub(crate) fn address(path: &Path) -> Address<'_> {
    const SCHEMES: [&str; 5] = ["s3://", "gs://", "az://", "http://", "https://"];
    match path.to_str() {
        Some(text) if SCHEMES.iter().any(|scheme| text.starts_with(scheme)) => {
            let (url, fragment) = match text.split_once('#') {
                Some((url, fragment)) => (url, Some(fragment)),
                None => (text, None),
            };
            Address::Url { url, fragment }
        }
        _ => Address::File,
    }
}

/// Returns whether a path is the URL of an object rather than the name of a file.
#[must_use]
pub fn is_url(path: &Path) -> bool {
    address(path) != Address::File
}

options! {
    /// How requests to object storage are made: how long one waits for an answer, and how one that fails is
    /// repeated. It fails if there is no answer in time, if the connection breaks off, and if the store answers
    /// that it has failed or is overloaded.
    ///
    /// No time may be zero: opening with such options fails.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct RequestOptions {
        /// Sets how long a request may take to connect, and how long a server may be silent then: 5 seconds by
        /// default.
        timeout: Duration = Duration::from_secs(5),
        /// Sets until when a request that fails is repeated, from its beginning: 15 seconds by default.
        retry: Duration = Duration::from_secs(15),
        /// Sets how often a request that fails is repeated at most: 6 times by default, and never by 0.
        retry_count: u32 = 6,
        /// Sets how long the pauses before repetitions are at most: 3 seconds by default. They are random, and
        /// grow from 50 ms on.
        retry_pause: Duration = Duration::from_secs(3),
    }
}

impl RequestOptions {
    /// Returns how long a read may take in all: its repetitions, and the last of them, which connects and waits
    /// for an answer. A machine should wait longer for its page.
    #[must_use]
    pub fn longest(&self) -> Duration {
        self.retry.saturating_add(self.timeout.saturating_mul(2))
    }
}

/// Bytes in memory as a source.
impl Source for Vec<u8> {
    fn name(&self) -> String {
        format!("{} bytes in memory", self.len())
    }

    fn byte_len(&self) -> u64 {
        self.len() as u64
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let start = usize::try_from(offset).ok();
        let bytes = start.and_then(|start| self.get(start..)?.get(..out.len()));
        out.copy_from_slice(bytes.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }

    fn read_ready(&self, offset: u64, out: &mut [u8]) -> io::Result<bool> {
        self.read_at(offset, out).map(|()| true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_with_small_gaps_are_one() {
        let ranges = [0..10, 10..20, 25..30, 31..40, 100..110];
        assert_eq!(joined(&ranges, 5), [0..40, 100..110]);
        assert_eq!(joined(&ranges, 0), [0..20, 25..30, 31..40, 100..110]);
        assert_eq!(joined(&[0..100, 10..20, 100..101, 200..201], 0), [0..101, 200..201]);
        assert_eq!(joined(&[], 5), []);
    }

    #[test]
    fn a_reader_in_order_announces_each_byte_once_and_far_ahead() {
        for (whole, len) in
            [(0..100 << 20, 1 << 16), (5000..(9 << 20) + 7, 70_000), (3..200 << 20, 17 << 20)]
        {
            let (mut at, mut announced) = (whole.start, whole.start);
            while at < whole.end {
                let part = at..whole.end.min(at + len);
                if let Some(ahead) = ahead_of(&part, &whole) {
                    assert_eq!(ahead.start, announced, "{part:?} of {whole:?}");
                    announced = ahead.end;
                }
                assert!(announced >= whole.end.min(part.end + AHEAD - 2 * STEP), "{part:?}");
                at = part.end;
            }
            assert_eq!(announced, whole.end);
        }
    }
}
