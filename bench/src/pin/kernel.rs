//! What the kernel itself takes to pin memory that is present: the buffers of an io_uring, which are
//! pinned when they are registered and let go when they are not any more.
//!
//! It has more to do than we have, since it finds the pages by the tables of the process; it is the
//! way to the same end on this host, and not a baseline.

use std::cell::RefCell;
use std::time::Instant;

use uzone_os::{Anonymous, FixedBuffers, HugeAdvice, MapError};
use uzone_pages::ByteLen;
use uzone_zone::{HugeSize, Mapping};

use crate::report::Role;
use crate::settings::PinSettings as Settings;
use crate::suite::{BenchError, Session, Suite, sentence};

/// Memory of one kind, present, or why this host does not have it.
type Made = Result<Result<Mapping, String>, BenchError>;
type Make = fn(ByteLen) -> Made;

/// One kind of memory.
struct Memory {
    row: &'static str,
    name: &'static str,
    mapping: Mapping,
    folio_bytes: u64,
}

pub(super) fn run(settings: &Settings, session: &mut Session<'_>) -> Result<(), BenchError> {
    // A sixteenth, which is what the machine can have present of a region that is only reserved.
    let len = ByteLen::new((settings.size.get() / 16).min(1 << 30));
    let ring = match FixedBuffers::new() {
        Ok(ring) => RefCell::new(ring),
        Err(error) => {
            let reason = error.to_string();
            session.skip("pin-kernel", reason);
            return Ok(());
        }
    };
    let kinds: [(_, _, Make, _); 3] = [
        ("4k", "base pages", base_pages, 4096),
        ("thp", "transparent huge pages", transparent, 2 << 20),
        ("hugetlb", "huge pages of the pool", of_the_pool, 2 << 20),
    ];
    let mut memories = Vec::new();
    for (row, name, make, folio_bytes) in kinds {
        let made = make(len)?.and_then(|mapping| {
            // Once before: what is refused is refused for a reason, and the rows after it go on.
            let refused = ring.borrow_mut().register(&mapping).err();
            refused.map_or(Ok(mapping), |error| Err(sentence(&error)))
        });
        match made {
            Ok(mapping) => memories.push(Memory { row, name, mapping, folio_bytes }),
            Err(reason) => session.skip(format!("pin-kernel/{row}-pin"), reason),
        }
    }
    if memories.is_empty() {
        return Ok(());
    }
    let mut suite = Suite::new(len);
    for memory in &memories {
        let (ring, mapping) = (&ring, &memory.mapping);
        for is_both in [false, true] {
            let (kind, what) = if is_both { ("both", "pin and unpin") } else { ("pin", "pin") };
            let id = format!("pin-kernel/{}-{kind}", memory.row);
            let spec =
                suite.add(Role::Peer, &id, format!("{}, {what}", memory.name), 0, 1, move || {
                    let mut ring = ring.borrow_mut();
                    let started = Instant::now();
                    let registered = ring.register(mapping)?;
                    let pinned = started.elapsed();
                    drop(registered);
                    Ok(if is_both { started.elapsed() } else { pinned })
                });
            spec.folios = Some(len.get() / memory.folio_bytes);
            spec.calls = Some(1);
        }
    }
    session.table(
        "pin-kernel",
        format!("The kernel's own pins: {len} registered as a buffer of an io_uring"),
        "memory present, one thread; the kernel finds the pages in the page tables",
    );
    session.run(suite, "the kernel's pins")
}

fn base_pages(len: ByteLen) -> Made {
    let how = Anonymous { huge: HugeAdvice::Never, ..Anonymous::default() };
    let mapping = Mapping::anonymous(len, how)?;
    mapping.populate(0..len.get())?;
    Ok(Ok(mapping))
}

fn transparent(len: ByteLen) -> Made {
    let how = Anonymous { huge: HugeAdvice::Advise, ..Anonymous::default() };
    let mapping = Mapping::anonymous(len, how)?;
    mapping.populate(0..len.get())?;
    let huge = mapping.huge_backed()?;
    let refused = || {
        format!(
            "{huge} of {len} came in transparent huge pages: `echo madvise > \
             /sys/kernel/mm/transparent_hugepage/enabled`, and free memory that is not in pieces"
        )
    };
    Ok(if huge == len { Ok(mapping) } else { Err(refused()) })
}

fn of_the_pool(len: ByteLen) -> Made {
    match Mapping::hugetlb(len, HugeSize::MIB_2) {
        Ok(mapping) => {
            mapping.populate(0..len.get())?;
            Ok(Ok(mapping))
        }
        // Its text has the state of the pool, and the command that fills it.
        Err(error @ (MapError::HugePool { .. } | MapError::HugeSize { .. })) => {
            Ok(Err(error.to_string()))
        }
        Err(error) => Err(error.into()),
    }
}
