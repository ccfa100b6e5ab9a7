//! What the kernel itself takes to pin memory that is present: the buffers of an io_uring, which are
//! pinned when they are registered and let go when they are not any more.
//!
//! It has more to do than we have, since it finds the pages by the tables of the process; it is the
//! way to the same end on this host, and not a baseline.

use std::cell::RefCell;
use std::time::Instant;

use uzone_os::{Anonymous, FixedBuffers, HugeAdvice, MapError, Mapping};
use uzone_pages::{ByteLen, PageSize};

use crate::harness::{PinSettings, Result, Role, Session, Suite, sentence};

/// Memory of one kind, present, or why this host does not have it.
type Made = Result<Result<Mapping, String>>;
type Make = fn(ByteLen) -> Made;

pub(super) fn run(settings: &PinSettings, session: &mut Session<'_>) -> Result {
    // A sixteenth, which is what the machine can have present of a region that is only reserved.
    let len = ByteLen::new((settings.size.get() / 16).min(1 << 30));
    let ring = match FixedBuffers::new() {
        Ok(ring) => RefCell::new(ring),
        Err(error) => {
            session.skip("pin-kernel", error.to_string());
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
            Ok(mapping) => memories.push((row, name, mapping, folio_bytes)),
            Err(reason) => session.skip(format!("pin-kernel/{row}-pin"), reason),
        }
    }
    if memories.is_empty() {
        return Ok(());
    }
    let mut suite = Suite::new("pin-kernel", len);
    for (row, name, mapping, folio_bytes) in &memories {
        let ring = &ring;
        for (kind, what) in [("pin", "pin"), ("both", "pin and unpin")] {
            let name = format!("{name}, {what}");
            let spec = suite.add(Role::Peer, &format!("{row}-{kind}"), name, move |_| {
                let mut ring = ring.borrow_mut();
                let started = Instant::now();
                let registered = ring.register(mapping)?;
                let pinned = started.elapsed();
                drop(registered);
                Ok(if kind == "both" { started.elapsed() } else { pinned })
            });
            spec.counts(Some(1), Some(len.get() / folio_bytes));
        }
    }
    session.measure(
        suite,
        format!("The kernel's own pins: {len} registered as a buffer of an io_uring"),
        "memory present, one thread; the kernel finds the pages in the page tables",
    )
}

/// Memory of this process, present.
fn present(len: ByteLen, huge: HugeAdvice) -> Result<Mapping> {
    let mapping = Mapping::anonymous(len, Anonymous { huge, ..Anonymous::default() })?;
    mapping.populate(0..len.get())?;
    Ok(mapping)
}

fn base_pages(len: ByteLen) -> Made {
    present(len, HugeAdvice::Never).map(Ok)
}

fn transparent(len: ByteLen) -> Made {
    let mapping = present(len, HugeAdvice::Advise)?;
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
    match Mapping::hugetlb(len, PageSize::MIB_2) {
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
