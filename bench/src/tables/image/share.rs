//! The second mapping of an image whose decoded pages are shared, beside the kernel's mapping of their file.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use uzone_fault::{Backing, Engine, EngineOptions, LazyOptions, SharedBacking};
use uzone_os::{Access, Mapping, Sharing};
use uzone_pages::ByteLen;
use uzone_snapshot::SnapshotBacking;

use super::material::{Material, PAGE};
use super::touch::{CACHE, check};
use uzone_harness::{Result, Role, Session, Suite, timed};

/// Touches every page in order, of an image whose pages another mapping has touched before.
pub(super) fn in_order(material: &Material, session: &mut Session<'_>) -> Result {
    let bytes = ByteLen::new(material.len as u64);
    let pages: Vec<usize> = (0..material.words.len()).collect();
    let pages = &pages[..];
    let engine = &Engine::with(EngineOptions::default())?;
    let shared = || -> Result<Arc<SharedBacking>> {
        let image = Arc::new(material.open_later(CACHE)?);
        Ok(Arc::new(SharedBacking::new(Arc::new(SnapshotBacking::new(image)), bytes)?))
    };
    let filled = shared()?;
    let first = engine.map(bytes, filled.clone(), &LazyOptions::default())?;
    first.populate(0..bytes.get())?;
    let touch = move |row: &str, memory: &Mapping| timed(|| check(material, pages, row, memory));
    let lazily = move |row: &str, backing: Arc<dyn Backing>| {
        let memory = engine.map(bytes, backing, &LazyOptions::default())?;
        timed(|| check(material, pages, row, &memory))
    };
    let mut suite = Suite::new("snapshot-share", bytes).writing(bytes.get());
    suite.add(Role::Naive, "again", "mapped again, not shared", move |row| {
        let image = Arc::new(material.open_later(CACHE)?);
        lazily(row, Arc::new(SnapshotBacking::new(image)))
    });
    let (of, name) = (filled.clone(), "the kernel's private mapping of the memory file");
    suite.add(Role::Limit, "kernel", name, move |row| touch(row, &private(file_of(&of)?, bytes)?));
    let name = "ours, the second mapping of a shared image";
    let spec = suite.add(Role::Ours, "ours", name, move |row| lazily(row, filled.clone()));
    spec.headline(format!("map {bytes} of a shared image a second time, in order"));
    suite.naive("again").limit("kernel");
    session.measure(
        suite,
        format!("A packed image, mapped a second time: {bytes}"),
        format!(
            "one thread reads a word of each of {} pages of {PAGE} bytes in order; decoded pages are kept in a \
             memory file, which each mapping maps privately; naive decodes them again",
            pages.len()
        ),
    )
}

fn file_of(shared: &SharedBacking) -> Result<OwnedFd> {
    match shared.memory_file()? {
        Some((fd, _)) => Ok(fd),
        None => unreachable!("shared pages are in a memory file"),
    }
}

fn private(fd: OwnedFd, len: ByteLen) -> Result<Mapping> {
    Ok(Mapping::file(fd, 0, len, Access::ReadWrite, Sharing::Private)?)
}
