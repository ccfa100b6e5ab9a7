//! What live tests share: skipping by name, mapping, bytes that say where they belong.

#![allow(dead_code, reason = "no test needs all of it")]
#![allow(clippy::unwrap_used, reason = "helpers of tests fail by panicking, as tests do")]

use std::fs::File;
use std::io::Write;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use uzone_fault::{Backing, Engine, FunctionBacking, LazyMapping, LazyOptions, MapError};
use uzone_os::probe;
use uzone_os::uffd::OpenError;
use uzone_pages::ByteLen;

pub(crate) fn skip(name: &str, reason: &str) {
    assert!(
        std::env::var_os("REQUIRE_ALL").is_none_or(|value| value != "1"),
        "{name} was to run, and cannot: {reason}"
    );
    eprintln!("skipped: {name}: {reason}");
}

pub(crate) fn engine() -> Engine {
    Engine::new(NonZeroUsize::new(2).unwrap()).unwrap()
}

/// Maps, or says that the case cannot run.
pub(crate) fn map(
    name: &str,
    len: u64,
    backing: impl Backing + 'static,
    options: &LazyOptions,
) -> Option<LazyMapping> {
    match engine().map(ByteLen::new(len), Arc::new(backing), options) {
        Ok(memory) => Some(memory),
        Err(MapError::Open(error @ (OpenError::Missing { .. } | OpenError::Probe(_)))) => {
            skip(name, &error.to_string());
            None
        }
        Err(error) => panic!("{name}: {error:?}"),
    }
}

pub(crate) fn page() -> u64 {
    probe::page_size().bytes()
}

pub(crate) fn usize_of(number: u64) -> usize {
    usize::try_from(number).unwrap()
}

/// The oracle: the 8 bytes at an offset.
pub(crate) fn word(offset: u64) -> u64 {
    (offset / 8 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

pub(crate) fn write_words(offset: u64, out: &mut [u8]) {
    for (index, chunk) in out.chunks_mut(8).enumerate() {
        let bytes = word(offset + index as u64 * 8).to_ne_bytes();
        chunk.copy_from_slice(&bytes[..chunk.len()]);
    }
}

pub(crate) fn words(len: u64) -> Vec<u8> {
    let mut bytes = vec![0; usize_of(len)];
    write_words(0, &mut bytes);
    bytes
}

pub(crate) fn function() -> impl Backing + 'static {
    FunctionBacking::quick(|offset, out: &mut [u8]| {
        write_words(offset, out);
        Ok(())
    })
}

pub(crate) fn bytes_of(memory: &LazyMapping, offset: u64, len: u64) -> Vec<u8> {
    let mut seen = vec![0; usize_of(len)];
    memory.read_at(offset, &mut seen).unwrap();
    seen
}

/// Numbers below `end` that look random, the same in every run.
pub(crate) fn scattered(seed: u64, end: u64) -> impl Iterator<Item = u64> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    std::iter::repeat_with(move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state % end
    })
}

/// A file with these bytes in it, beside this program: where temporary files go may be memory.
pub(crate) fn file_with(bytes: &[u8]) -> File {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let name = format!("lazy-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    let path = std::env::current_exe().unwrap().parent().unwrap().join(name);
    let mut file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    file.write_all(bytes).unwrap();
    file
}

/// Waits until something holds: what is noted after a waiter was woken may come a little later.
pub(crate) fn settles(what: &str, holds: impl Fn() -> bool) {
    let patience = std::time::Instant::now() + std::time::Duration::from_secs(20);
    while !holds() {
        assert!(std::time::Instant::now() < patience, "{what} does not settle");
        std::thread::yield_now();
    }
}

/// Huge pages that were added to the pool, and are taken back when dropped.
pub(crate) struct Pool(u64);

const POOL: &str = "/proc/sys/vm/nr_hugepages";

impl Pool {
    fn size() -> Option<u64> {
        std::fs::read_to_string(POOL).ok()?.trim().parse().ok()
    }

    pub(crate) fn try_grow(pages: u64) -> Result<Self, String> {
        let before = Self::size().ok_or_else(|| format!("{POOL} cannot be read"))?;
        std::fs::write(POOL, (before + pages).to_string())
            .map_err(|error| format!("{POOL}: {error}: run as root"))?;
        let pool = Self(Self::size().unwrap_or(before).saturating_sub(before));
        if pool.0 < pages { Err(format!("the host gave {} huge pages", pool.0)) } else { Ok(pool) }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        if let Some(now) = Self::size() {
            let _ = std::fs::write(POOL, now.saturating_sub(self.0).to_string());
        }
    }
}
