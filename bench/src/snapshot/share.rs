//! The second mapping of an image whose decoded pages are shared, beside the kernel's mapping of their file.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use uzone_fault::{
    Backing, Engine, EngineOptions, LazyOptions, Memory, Populate, SharedBacking, Sharing,
};
use uzone_os::{Access, Mapping};
use uzone_pages::ByteLen;
use uzone_snapshot::SnapshotBacking;

use super::material::{Material, PAGE, failed};
use super::touch::{CACHE, check};
use crate::report::Role;
use crate::suite::{BenchError, Session, Suite};

/// Touches every page in order, of an image whose pages another mapping has touched before.
pub(super) fn in_order(material: &Material, session: &mut Session<'_>) -> Result<(), BenchError> {
    let bytes = ByteLen::new(material.len as u64);
    let pages: Vec<usize> = (0..material.words.len()).collect();
    let (pages, table) = (&pages[..], "snapshot-share");
    let engine = &Engine::with(EngineOptions::default())?;
    let shared = || -> Result<Arc<SharedBacking>, BenchError> {
        let image = Arc::new(material.open_later(CACHE)?);
        Ok(Arc::new(SharedBacking::new(Arc::new(SnapshotBacking::new(image)), bytes)?))
    };
    let filled = shared()?;
    let first = engine.map(bytes, filled.clone(), &LazyOptions::default())?;
    first.populate(0..bytes.get(), Populate::All)?;
    let lazily = move |backing: Arc<dyn Backing>, row: &str| {
        let memory = engine.map(bytes, backing, &LazyOptions::default())?;
        let started = Instant::now();
        check(material, pages, row, |at, out| Ok(memory.read_at(at as u64, out)?))?;
        Ok::<_, BenchError>(started.elapsed())
    };
    let mut suite = Suite::new(bytes);
    let (row, name) = ("snapshot-share/again", "mapped again, not shared");
    suite.add(Role::Naive, row, name, bytes.get(), 1, move || {
        let image = Arc::new(material.open_later(CACHE)?);
        lazily(Arc::new(SnapshotBacking::new(image)), row)
    });
    let (row, name) = ("snapshot-share/kernel", "the kernel's private mapping of the memory file");
    let of = filled.clone();
    suite.add(Role::Limit, row, name, bytes.get(), 1, move || {
        let memory = private(file_of(&of)?, bytes)?;
        let started = Instant::now();
        check(material, pages, row, |at, out| Ok(memory.read_at(at as u64, out)?))?;
        Ok(started.elapsed())
    });
    let (row, name) = ("snapshot-share/first", "ours, the first mapping of a shared image");
    suite.add(Role::Variant, row, name, bytes.get(), 1, move || lazily(shared()?, row));
    let (row, name) = ("snapshot-share/ours", "ours, the second mapping of a shared image");
    let spec =
        suite.add(Role::Ours, row, name, bytes.get(), 1, move || lazily(filled.clone(), row));
    spec.headline(format!("map {bytes} of a shared image a second time, in order"));
    suite.each_spec(|spec| {
        spec.naive("snapshot-share/again");
        spec.limit("snapshot-share/kernel", bytes.get());
    });
    session.run(suite, table)?;
    session.table(
        table,
        format!("A packed image, mapped a second time: {bytes}"),
        format!(
            "one thread reads a word of each of {} pages of {PAGE} bytes in order; decoded pages are kept in a \
             memory file, which each mapping maps privately; naive decodes them again",
            pages.len()
        ),
    );
    Ok(())
}

fn file_of(shared: &SharedBacking) -> Result<OwnedFd, BenchError> {
    match shared.memory().map_err(failed)? {
        Memory::File { fd, .. } => Ok(fd),
        other => unreachable!("shared pages are in a memory file, and not in {other:?}"),
    }
}

fn private(fd: OwnedFd, len: ByteLen) -> Result<Mapping, BenchError> {
    let memory = Mapping::file(fd, 0, len, Access::ReadWrite, Sharing::Private);
    memory.map_err(|error| failed(std::io::Error::other(error)))
}
