//! `uzone bench bind --metadata`: what descriptors of one TiB take.
//!
//! Linux's figures are published or derived from its documentation of each folio; every row
//! states which. Ours are measured: a region of one TiB is reserved and bound, and the kernel is asked
//! before and after what this process has mapped and what its page tables take, and which pages of
//! the descriptors' memory are present. None of ours is calculated.
//!
//! | row | what it is |
//! |---|---|
//! | linux-all | a descriptor of 64 bytes for every page |
//! | linux-dedup | tails that share pages, for DAX |
//! | linux-hvo | the same for huge pages of a pool |
//! | linux-on-device | descriptors in the device's own pages: no sharing of tails there |
//! | on-touch, eager | ours, in memory of their own |
//! | altmap-… | ours, in the region itself |
//!
//! *Touched* is a row on touch of which one descriptor in every base page of them was used.

use std::time::Instant;

use uzone_os::memory;
use uzone_os::{SystemRoot, probe};
use uzone_pages::{ByteLen, LinuxPage, LinuxSeed, MemoryKind, Order, Payload, PfnRange, Tails};
use uzone_report::results::{METADATA_SCHEMA, Metadata, MetadataRow};
use uzone_zone::{AltmapOptions, BindOptions, Init, Pagemap, Region, Zone};
use zerocopy::Immutable;

use super::bind::{check_every, unbind};
use crate::harness::{Phase, Result, Skipped, Table, Watch, machine, nanoseconds};

/// How much is described.
const SIZE: ByteLen = ByteLen::tib(1);

/// Every so many pages one is compared with the slow path: an odd number, so that all places in a
/// folio come up.
const CHECK_EVERY: usize = (1 << 12) - 1;

/// Of the memory that can be had, the part that a row takes at most by default: other programs
/// need some too.
const SHARE: u64 = 2;

/// Where a figure comes from that is arithmetic over documented sizes.
const DERIVED: &str = "derived";
const MARTINS: &str = "Joao Martins, compound pagemaps v2, June 2021";
const DOCUMENTED: &str =
    "Linux documentation, vmemmap_dedup: pages kept of each folio's descriptors";
const SIZES: &str = "64 bytes for each page of 4 KiB";

/// Runs the tables. The descriptors of a row take at most so much memory, by default half of what
/// can be had; rows that need more are left out.
///
/// # Errors
/// [`BenchError`](crate::BenchError) if a TiB cannot be reserved, or the kernel does not count what is resident.
pub fn run(most: Option<ByteLen>, watch: Watch<'_>) -> Result<Metadata> {
    let mut metadata = Metadata {
        schema: METADATA_SCHEMA.to_owned(),
        benchmark: "bind-metadata".to_owned(),
        machine: machine::here(),
        settings: format!("{SIZE} reserved and bound, once a row"),
        ..Metadata::default()
    };
    for (done, folio) in (0..).zip(&FOLIOS) {
        watch(Phase { what: "metadata", done, total: FOLIOS.len() as u64, part: None });
        metadata.tables.push(Table {
            id: folio.table.to_owned(),
            title: format!("Descriptors of {SIZE}, folios of {}", folio.len),
            note: "Linux: kernel memory, published or derived; uzone: the kernel's own accounting \
                   of this process after a bind"
                .to_owned(),
        });
        metadata.results.extend(folio.linux.iter().map(|row| row.row(folio)));
        measure(folio, most, &mut metadata)?;
    }
    let total = FOLIOS.len() as u64;
    watch(Phase { what: "metadata", done: total, total, part: None });
    Ok(metadata)
}

/// A size of folios, and what Linux needs for it.
struct Folio {
    table: &'static str,
    order: Order,
    len: ByteLen,
    linux: &'static [Linux],
}

/// What Linux needs for descriptors of a TiB.
struct Linux {
    id: &'static str,
    name: &'static str,
    origin: &'static str,
    source: &'static str,
    resident: ByteLen,
    page_tables: Option<ByteLen>,
    on_device: bool,
}

/// Shared tails are mapped by base pages: the 16 GiB of addresses that descriptors of a TiB have take
/// 8192 page tables of 4 KiB.
const SHARED_TABLES: Option<ByteLen> = Some(ByteLen::mib(32));

const ALL: Linux = Linux {
    id: "linux-all",
    name: "Linux, every descriptor",
    origin: DERIVED,
    source: SIZES,
    resident: ByteLen::gib(16),
    page_tables: None,
    on_device: false,
};

const ON_DEVICE: Linux = Linux {
    id: "linux-on-device",
    name: "Linux, descriptors on the device",
    source: "64 bytes for each page of 4 KiB: with an altmap, tails are not shared",
    on_device: true,
    ..ALL
};

const DEDUP: Linux = Linux {
    id: "linux-dedup",
    name: "Linux, shared tails (DAX)",
    source: DOCUMENTED,
    resident: ByteLen::mib(8),
    page_tables: SHARED_TABLES,
    ..ALL
};

const DEDUP_TABLES: Linux = Linux {
    id: "linux-dedup-tables",
    name: "Linux, shared tails and page tables (a patch)",
    origin: "published",
    source: MARTINS,
    // Of the 8 tables that map the descriptors of a folio of 1 GiB, all but the first are one.
    page_tables: Some(ByteLen::mib(8)),
    ..DEDUP
};

const HVO: Linux = Linux {
    id: "linux-hvo",
    name: "Linux, shared tails (HugeTLB)",
    resident: ByteLen::mib(4),
    ..DEDUP
};

const FOLIOS: [Folio; 3] = [
    Folio {
        table: "metadata-4k",
        order: Order::BASE,
        len: ByteLen::kib(4),
        linux: &[ALL, ON_DEVICE],
    },
    Folio {
        table: "metadata-2m",
        order: Order::PMD,
        len: ByteLen::mib(2),
        linux: &[
            ALL,
            Linux { origin: "published", source: MARTINS, resident: ByteLen::gib(4), ..DEDUP },
            Linux { resident: ByteLen::gib(2), ..HVO },
            ON_DEVICE,
        ],
    },
    Folio {
        table: "metadata-1g",
        order: Order::PUD,
        len: ByteLen::gib(1),
        linux: &[ALL, DEDUP, DEDUP_TABLES, HVO, ON_DEVICE],
    },
];

impl Linux {
    fn row(&self, folio: &Folio) -> MetadataRow {
        MetadataRow {
            id: format!("{}/{}", folio.table, self.id),
            name: self.name.to_owned(),
            folio_bytes: folio.len.get(),
            descriptor_bytes: 64,
            origin: self.origin.into(),
            source: Some(self.source.into()),
            virtual_bytes_per_tib: None,
            resident_bytes_per_tib: self.resident.get(),
            page_table_bytes_per_tib: self.page_tables.map(ByteLen::get),
            region_bytes_per_tib: if self.on_device { self.resident.get() } else { 0 },
            bind_ns: None,
        }
    }
}

/// One row of ours.
struct Ours<'a> {
    folio: &'a Folio,
    id: &'static str,
    name: &'static str,
    /// Whether a descriptor in each base page of them is used before the kernel is asked.
    is_touched: bool,
    /// The most memory that the descriptors may take.
    most: ByteLen,
}

fn measure(folio: &Folio, most: Option<ByteLen>, into: &mut Metadata) -> Result {
    let most = match most {
        Some(most) => most,
        None => ByteLen::new(memory::available(&SystemRoot::host())?.bytes.get() / SHARE),
    };
    let small = || BindOptions::new(MemoryKind::Generic).order(folio.order);
    let altmap = || small().altmap(AltmapOptions::new());
    let linux = || {
        BindOptions::<LinuxPage>::with_payload(MemoryKind::Generic, LinuxSeed::default())
            .order(folio.order)
            .tails(Tails::Derived)
            .init(Init::Eager)
    };
    let row = |id, name| Ours { folio, id, name, is_touched: false, most };
    row("on-touch", "uzone, on touch").measure(&small(), into)?;
    let touched = row("on-touch-touched", "uzone, on touch, all touched");
    Ours { is_touched: true, ..touched }.measure(&small(), into)?;
    row("eager", "uzone, eager").measure(&small().init(Init::Eager), into)?;
    row("eager-64-bytes", "uzone, eager, 64 bytes a folio").measure(&linux(), into)?;
    row("altmap-on-touch", "uzone, in the region, on touch").measure(&altmap(), into)?;
    row("altmap-eager", "uzone, in the region, eager")
        .measure(&altmap().init(Init::Eager), into)?;
    Ok(())
}

impl Ours<'_> {
    fn measure<P: Payload + Immutable>(
        &self,
        options: &BindOptions<P>,
        into: &mut Metadata,
    ) -> Result {
        let id = format!("{}/{}", self.folio.table, self.id);
        // One thread: the stack of another would count as mapped.
        let options = options.clone().threads(std::num::NonZeroUsize::MIN);
        let zone = Zone::with_keep_limit(ByteLen::ZERO);
        // What a bind of this kind takes from the heap is taken before it is measured.
        let small = zone.bind(Region::anonymous(ByteLen::gib(4))?, options.clone())?;
        let is_written = small.report().init == Init::Eager || self.is_touched;
        let needed = ByteLen::new(small.report().metadata.get() << 8);
        drop(small);
        let root = SystemRoot::host();
        memory::of_this_process(&root)?;
        if is_written && needed > self.most {
            let reason = format!(
                "its descriptors take about {needed:.1}, and a row may take {:.1}: raise --max-memory",
                self.most
            );
            into.skipped.push(Skipped { id, reason });
            return Ok(());
        }
        let region = Region::anonymous(SIZE)?;
        let before = memory::of_this_process(&root)?;
        let started = Instant::now();
        let pagemap = zone.bind(region, options)?;
        let elapsed = started.elapsed();
        if self.is_touched {
            touch(&pagemap)?;
        }
        let after = memory::of_this_process(&root)?;
        let resident = pagemap.metadata_resident()?;
        if !self.is_touched {
            check_every(&pagemap, &id, CHECK_EVERY)?;
        }
        let metadata = pagemap.metadata_range().map_or(0, |range| range.pages().get());
        into.results.push(MetadataRow {
            id,
            name: self.name.to_owned(),
            folio_bytes: self.folio.len.get(),
            descriptor_bytes: pagemap.report().descriptor_bytes as u64,
            origin: "measured".into(),
            source: None,
            virtual_bytes_per_tib: Some(grown(before.0, after.0)),
            resident_bytes_per_tib: resident.get(),
            page_table_bytes_per_tib: Some(grown(before.1, after.1)),
            region_bytes_per_tib: metadata << probe::page_size().shift(),
            bind_ns: Some(nanoseconds(elapsed)),
        });
        unbind(pagemap)?;
        Ok(())
    }
}

fn grown(before: ByteLen, after: ByteLen) -> u64 {
    after.get().saturating_sub(before.get())
}

/// Pins and lets go a page whose descriptor lies in each base page of descriptors.
fn touch<P: Payload>(pagemap: &Pagemap<P>) -> Result {
    let report = pagemap.report();
    let a_page = probe::page_size().bytes() / report.descriptor_bytes as u64;
    let pages_per_descriptor = report.pages.get() / report.descriptors;
    let stride = usize::try_from(a_page * pages_per_descriptor).unwrap_or(usize::MAX);
    for pfn in pagemap.range().iter().step_by(stride) {
        // It was one of a range, so there is a number behind it.
        if let Ok(range) = PfnRange::try_single(pfn) {
            drop(pagemap.pin(range)?);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns what Linux keeps for a TiB if it keeps so many pages of each folio's descriptors.
    fn kept(folio: &Folio, pages: u64) -> ByteLen {
        ByteLen::new(SIZE.get() / folio.len.get() * pages * 4096)
    }

    #[test]
    fn what_is_said_of_linux_follows_from_the_pages_that_it_keeps_of_each_folio() {
        for folio in &FOLIOS {
            let all = ByteLen::new(SIZE.get() / 4096 * 64);
            for row in folio.linux {
                let expected = match row.id {
                    "linux-dedup" | "linux-dedup-tables" => kept(folio, 2),
                    "linux-hvo" => kept(folio, 1),
                    _ => all,
                };
                assert_eq!(row.resident, expected, "{}/{}", folio.table, row.id);
                let tables = match row.id {
                    "linux-dedup-tables" => kept(folio, 2).get(),
                    _ => all.get() / (2 << 20) * 4096,
                };
                assert!(row.page_tables.is_none_or(|found| found.get() == tables));
            }
            assert_eq!(folio.order.pages().get() * 4096, folio.len.get());
        }
        // As merged, and published as the sum: 40 MB for each TB of 1 GiB folios.
        let [_, _, Folio { linux, .. }] = &FOLIOS;
        let dedup = &linux[1];
        let sum = dedup.resident.checked_add(ByteLen::mib(32)).unwrap();
        assert_eq!(sum, ByteLen::mib(40));
        let shared = &linux[2];
        assert_eq!(shared.resident.checked_add(shared.page_tables.unwrap()), Ok(ByteLen::mib(16)));
    }
}
