//! Cases that bind regions, and the check of the descriptors that a bind wrote.

use std::num::NonZeroUsize;
use std::time::{Duration, Instant};

use uzone_pages::{ByteLen, LinuxPage, LinuxSeed, MemoryKind, Order, Payload, Pfn, Tails, Word};
use uzone_zone::{BindOptions, Init, MemmapPages, Pagemap, Region, Zone};
use zerocopy::Immutable;

use crate::{BenchError, Result, Role, RowSpec, Suite};

/// Returns the values that Linux's descriptors share in all rows.
#[must_use]
pub fn seed() -> LinuxSeed {
    LinuxSeed { pagemap_address: 0xffff_8881_0abc_d000, ..LinuxSeed::default() }
}

/// Returns options for Linux's 64-byte descriptors, all of them written.
#[must_use]
pub fn linux(order: Order, tails: Tails, threads: usize) -> BindOptions<LinuxPage> {
    eager(BindOptions::with_payload(MemoryKind::Generic, seed()), order, tails, threads)
}

/// Returns options for 8-byte descriptors, all of them written by one thread.
#[must_use]
pub fn small(order: Order) -> BindOptions {
    eager(BindOptions::new(MemoryKind::Generic), order, Tails::Derived, 1)
}

fn eager<P: Payload>(
    options: BindOptions<P>,
    order: Order,
    tails: Tails,
    threads: usize,
) -> BindOptions<P> {
    let threads = NonZeroUsize::new(threads).unwrap_or(NonZeroUsize::MIN);
    options.order(order).tails(tails).threads(threads).init(Init::Eager)
}

/// Returns a zone that keeps `bytes` of descriptors after an unbind, and 64 MiB of its own.
#[must_use]
pub fn keeping(bytes: u64) -> Zone {
    Zone::with_keep_limit(ByteLen::new(bytes + (64 << 20)))
}

/// One page in this many is compared with the slow path before a row is timed.
const CHECK_EVERY: usize = 31;

impl<'a> Suite<'a> {
    /// Adds a case that binds a region and unbinds it, again and again, after it was checked once.
    pub fn bind<P: Payload + Immutable>(
        &mut self,
        role: Role,
        row: &str,
        name: impl Into<String>,
        zone: &'a Zone,
        options: BindOptions<P>,
    ) -> Result<&mut RowSpec> {
        let pagemap = zone.bind(Region::anonymous(self.size)?, options.clone())?;
        check_descriptors(&pagemap, &self.id(row))?;
        let resident = u128::from(pagemap.metadata_resident()?.get());
        let per_tib = u64::try_from((resident << 40) / u128::from(self.size.get())).ok();
        // Twice: the first bind takes fresh memory, which the zone keeps for the second.
        let pagemap = zone.bind(unbind(pagemap)?, options.clone())?;
        let report = pagemap.report();
        let is_written = report.init == Init::Eager;
        let bytes = if is_written { report.bytes.get() } else { 0 };
        let is_fresh = !report.is_kept && report.memmap_pages != MemmapPages::Region;
        let cold = is_written && is_fresh;
        let threads = report.threads;
        let mut region = Some(unbind(pagemap)?);
        let spec = self.add(role, row, name, move |_| {
            Ok(rebind(&mut region, zone, options.clone(), |_| Ok(()))?.0)
        });
        spec.row.metadata_resident_bytes_per_tib = per_tib;
        (spec.row.bytes, spec.row.threads, spec.row.cold) = (bytes, threads, cold);
        Ok(spec)
    }
}

/// Binds a region, checks the pagemap, and unbinds it. Returns the time of the bind, and of all three.
pub fn rebind<P: Payload>(
    region: &mut Option<Region>,
    zone: &Zone,
    options: BindOptions<P>,
    check: impl FnOnce(&Pagemap<P>) -> Result,
) -> Result<(Duration, Duration)> {
    // It is back at the end of every round that did not fail.
    let Some(mine) = region.take() else { return Ok((Duration::ZERO, Duration::ZERO)) };
    let started = Instant::now();
    let pagemap = zone.bind(mine, options)?;
    let bound = started.elapsed();
    check(&pagemap)?;
    *region = Some(unbind(pagemap)?);
    Ok((bound, started.elapsed()))
}

/// Unbinds a region that no guard holds.
pub fn unbind<P: Payload>(pagemap: Pagemap<P>) -> Result<Region> {
    pagemap.unbind().map_err(|busy| BenchError::failed("unbind", false, busy.to_string()))
}

/// Compares descriptors with the slow path.
pub fn check_descriptors<P: Payload + Immutable>(pagemap: &Pagemap<P>, row: &str) -> Result {
    let is_on_touch = pagemap.report().init == Init::OnTouch;
    let every = if is_on_touch { 1 << 20 } else { CHECK_EVERY };
    let range = pagemap.range();
    let pfns = (range.start().get()..range.end().get()).step_by(every);
    for page in pfns.filter_map(|pfn| pagemap.page(Pfn::new(pfn))) {
        let is_right = match (page.payload(), pagemap.fresh_payload(page.pfn())) {
            (Some(written), Some(fresh)) => written.as_bytes() == fresh.as_bytes(),
            (None, Some(_)) => page.is_tail(),
            (_, None) => false,
        };
        if !is_right || page.word() != Word::initial(pagemap.kind()) {
            return Err(BenchError::wrong_page(row, page.pfn()));
        }
    }
    Ok(())
}
