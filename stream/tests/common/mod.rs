//! Destinations and bytes of the tests of paths and ways.

#![allow(dead_code, reason = "each test program uses its part")]

use uzone_stream::Path;

/// The bytes around every destination, which have to be there afterwards.
const GUARD: u8 = 0xc3;

/// The paths to test. A skipped path is printed by name, so a test asks once. It is never a failure:
/// no setting gives a CPU an instruction that it does not have.
pub(crate) fn paths() -> Vec<Path> {
    let (available, absent): (Vec<_>, Vec<_>) =
        Path::ALL.into_iter().partition(|path| path.is_available());
    for path in absent {
        eprintln!("skipped: {path}: this CPU does not offer it");
    }
    available
}

/// Memory with room for a destination at any place in a line, a line of guard before it and two
/// after it.
pub(crate) struct Arena {
    bytes: Vec<u8>,
    longest: usize,
}

impl Arena {
    pub(crate) fn new(longest: usize) -> Self {
        Self { bytes: vec![0; longest + 5 * 64], longest }
    }

    /// Calls `write` with as many bytes as `expected` has, `offset` after the start of a line, and
    /// asserts that they are as expected then and that nothing beside them has changed.
    #[track_caller]
    pub(crate) fn check(
        &mut self,
        case: &str,
        offset: usize,
        expected: &[u8],
        write: impl FnOnce(&mut [u8]),
    ) {
        let len_bytes = expected.len();
        assert!(offset < 64 && len_bytes <= self.longest);
        let first_line = self.bytes.as_ptr().addr().wrapping_neg() % 64;
        // No more than that, or short writes to a long arena would be slow to check.
        let window = &mut self.bytes[first_line..][..offset + len_bytes + 3 * 64];
        window.fill(GUARD);
        let (before, rest) = window.split_at_mut(64 + offset);
        let (dst, after) = rest.split_at_mut(len_bytes);
        write(dst);
        assert!(dst == expected, "{case}: {len_bytes} bytes at {offset} are wrong");
        for (name, beside) in [("before", before), ("after", after)] {
            let is_whole = beside.iter().all(|byte| *byte == GUARD);
            assert!(is_whole, "{case}: a byte {name} {len_bytes} at {offset} changed");
        }
    }
}

/// Bytes of which no two neighbouring words are alike.
pub(crate) fn noise(len_bytes: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut bytes = Vec::with_capacity(len_bytes + 8);
    while bytes.len() < len_bytes {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_ne_bytes());
    }
    bytes.truncate(len_bytes);
    bytes
}
