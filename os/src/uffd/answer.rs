//! What the answers of this process and to another have in common: how pages are installed, and why they fail.

use std::io;

use rustix::io::Errno;

use crate::map::bytes::AccessError;
use crate::map::mapping::Mapping;
use crate::map::options::Vaddr;
use crate::uffd::abi;
use crate::uffd::error::UffdError;
use crate::uffd::reply::{self, Answered, UffdCall};

/// How pages are installed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Install {
    /// Whether the threads that wait for the pages are woken; otherwise call [`Registered::wake`](crate::uffd::Registered::wake).
    pub wake: bool,
    /// Whether the first write to the pages is reported, where that was registered.
    pub write_protect: bool,
}

impl Default for Install {
    fn default() -> Self {
        Self { wake: true, write_protect: false }
    }
}

impl Install {
    pub(crate) const fn bits(self) -> u64 {
        let mut bits = 0;
        if !self.wake {
            bits |= abi::DONTWAKE;
        }
        if self.write_protect {
            bits |= abi::INSTALL_WP;
        }
        bits
    }
}

/// Decodes a reply, and keeps what the call was given if it failed.
pub(crate) fn answered(
    call: UffdCall,
    start: u64,
    len_bytes: u64,
    (result, count): (Result<(), Errno>, Option<i64>),
) -> Result<Answered, UffdError> {
    reply::decode(call, result, count, len_bytes).map_err(|refusal| UffdError::Refused {
        call,
        start: Vaddr::new(start),
        len_bytes,
        refusal,
        // A reply that contradicts itself may have no errno.
        cause: result.err().map_or_else(|| io::ErrorKind::InvalidData.into(), Into::into),
    })
}

/// Returns where `len` bytes of a mapping are, from its byte `offset` on.
pub(crate) fn source_address(source: &Mapping, offset: u64, len: u64) -> Result<u64, AccessError> {
    let len_bytes = source.mapped_len() as u64;
    let end = offset.saturating_add(len);
    if end > len_bytes {
        return Err(AccessError::Beyond { start: offset, end, len_bytes });
    }
    Ok(source.addr().get() as u64 + offset)
}

/// Makes a pair of a result and a field one with an optional field.
pub(crate) fn counted(
    (result, count): (Result<(), Errno>, i64),
) -> (Result<(), Errno>, Option<i64>) {
    (result, Some(count))
}
