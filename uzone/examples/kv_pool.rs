//! The host memory of an inference server: a pool of key-value blocks for sessions that are not on the
//! accelerator at the moment. It grows without moving, is registered with a device in pieces that its
//! driver takes, and no tenant may ever see a byte of another.
//!
//! `cargo run --release -p uzone --example kv_pool -- 256M`
//!
//! A tebibyte of addresses is reserved and bound, which takes no memory. Half of the size that is asked
//! for is made present by several threads, and the pool hands out its blocks of 2 MiB; when they are
//! used up, the other half comes. Two tenants then take blocks, check that every byte is zero, pin them as
//! for a transfer, write all over them and give them back. Prints the blocks that were handed out, the share
//! that a worker had cleared ahead, and the rates; fails if a tenant finds a byte that is not zero.

use std::error::Error;
use std::num::NonZeroU8;
use std::thread;
use std::time::{Duration, Instant};

use uzone::model::chunks;
use uzone::{BindOptions, ByteLen, MemoryKind, PinOptions, Pool};
use uzone::{PoolError, PoolOptions, Pooled, PopulateOptions, Region, Zone};

type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

const ADDRESSES: ByteLen = ByteLen::tib(1);
const BLOCK: ByteLen = ByteLen::mib(2);
/// The largest registration that the driver of the example takes.
const REGISTRATION: ByteLen = ByteLen::mib(96);
const TENANTS: usize = 2;
const ROUNDS: usize = 4;

/// Makes blocks of the pool present, which it hands out from then on.
fn grow(pool: &Pool, start: u64, len: ByteLen) -> Outcome<()> {
    let end = start + len.get();
    let range = pool.pagemap().range_at(start, len)?;
    println!("{}", pool.populate(range, &PopulateOptions::default())?);
    for chunk in chunks(start..end, REGISTRATION, BLOCK)? {
        println!("  to register: {} at {:#x}", ByteLen::new(chunk.end - chunk.start), chunk.start);
    }
    Ok(())
}

/// Takes a block as a new tenant does: every byte has to be zero. Then writes all over it.
fn use_block(zone: &Zone, block: &Pooled, secret: u8) -> Outcome<()> {
    let at = block.segment();
    let mut bytes = vec![1; BLOCK.to_usize()?];
    block.read_at(0, &mut bytes)?;
    if bytes != vec![0; bytes.len()] {
        return Err(format!("{block:?} has bytes of an earlier tenant").into());
    }
    // As long as a device may be writing, the pool does not give the block to the next tenant.
    let long_term = PinOptions::default().long_term();
    let pinned = zone.pin_with(at.address, ByteLen::new(at.len_bytes), long_term)?;
    bytes.fill(secret);
    block.write_at(0, &bytes)?;
    drop(pinned);
    Ok(())
}

/// Runs one tenant. Returns its wait for each block.
fn tenant(zone: &Zone, pool: &Pool, blocks: usize, secret: u8) -> Outcome<Vec<Duration>> {
    let mut waits = Vec::new();
    for _ in 0..ROUNDS {
        let mut session = Vec::new();
        for _ in 0..blocks {
            let asked = Instant::now();
            let block = pool.take()?;
            waits.push(asked.elapsed());
            use_block(zone, &block, secret)?;
            session.push(block);
        }
        for block in session {
            block.free().map_err(|(_, failure)| failure)?; // else it would be given back silently
        }
    }
    Ok(waits)
}

fn main() -> Outcome<()> {
    let asked = std::env::args().nth(1).unwrap_or_else(|| "256M".to_owned());
    let half = ByteLen::new(asked.parse::<ByteLen>()?.get() / 2).align_up(BLOCK.get())?;
    if half.get() < 8 * BLOCK.get() || half.get() > ADDRESSES.get() / 2 {
        return Err(format!("{asked}: a pool has 32M at least, and {ADDRESSES} at most").into());
    }
    let zone = Zone::new();
    let region = Region::anonymous(ADDRESSES)?;
    let order = region.page_size().order_of(BLOCK.get())?;
    // Nothing is there yet; the example reports populated memory block by block.
    let pagemap = zone.bind(region, BindOptions::new(MemoryKind::Generic).order(order).absent())?;
    println!("{ADDRESSES} of addresses: {}", pagemap.report());
    let worker = NonZeroU8::new(100)
        .map_or(PoolOptions::default(), |percent| PoolOptions::default().worker(percent));
    let pool = Pool::new(pagemap, worker).map_err(|(_, error)| error)?;
    grow(&pool, 0, half)?;

    let mut all = Vec::new();
    let half_blocks = usize::try_from(half.get() / BLOCK.get())?;
    while all.len() < half_blocks {
        all.push(pool.take()?);
    }
    grow(&pool, half.get(), half)?;
    while all.len() < 2 * half_blocks {
        all.push(pool.take()?);
    }
    match pool.take() {
        Err(PoolError::Exhausted { free, .. }) => {
            println!("{} blocks are in use; {free} more are addresses only", all.len());
        }
        other => return Err(format!("a block that was never populated: {other:?}").into()),
    }
    for block in &all {
        use_block(&zone, block, 0xee)?;
    }
    drop(all);

    let (started, zone_ref, pool_ref) = (Instant::now(), &zone, &pool);
    let blocks = half_blocks / TENANTS;
    let waits: Outcome<Vec<_>> = thread::scope(|scope| {
        let start = |secret| scope.spawn(move || tenant(zone_ref, pool_ref, blocks, secret));
        let tenants: Vec<_> = (1..).take(TENANTS).map(start).collect();
        tenants.into_iter().map(|tenant| tenant.join().map_err(|_| "a tenant panicked")?).collect()
    });
    let (mut waits, elapsed) = (waits?.concat(), started.elapsed());
    waits.sort_unstable();
    let stats = pool.stats();
    let handed = ByteLen::new(waits.len() as u64 * BLOCK.get());
    let rate = u128::from(handed.get()) * 1_000_000 / elapsed.as_micros().max(1);
    let rate = ByteLen::new(u64::try_from(rate)?);
    println!(
        "{} blocks handed out, checked and written: {handed} in {elapsed:.1?}, {rate} a second",
        waits.len()
    );
    println!(
        "cleared: {} blocks ahead of need, {} when they were wanted; a block came in {:.1?}, at worst {:.1?}",
        stats.cleared_ahead,
        stats.cleared_on_demand,
        waits[waits.len() / 2],
        waits[waits.len() - 1]
    );
    if stats.used != 0 || stats.cleared_ahead + stats.cleared_on_demand < waits.len() as u64 {
        return Err(format!("blocks were reused that were not cleared: {stats:?}").into());
    }
    let pagemap = pool.into_pagemap().map_err(|_| "a block is still handed out")?;
    let region = pagemap.unbind()?;
    println!("unbound: {} of {} took memory", region.mapping().resident()?, region.len());
    Ok(())
}
