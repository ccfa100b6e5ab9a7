//! Many instances of one warm image: test runs that each start from the same loaded data, sandboxes of
//! one snapshot, replicas of a model with a few words of their own. Each needs all of it and writes to
//! little of it.
//!
//! `cargo run --release -p uzone --example memfd_clones`
//!
//! An image of 32 MiB lies in a memory file. Four clones map it privately, and a page of theirs is the
//! file's until they write to it: a fault maps the page that is there already, and copies nothing. Each
//! clone is read by a thread of its own, then writes to some pages. Prints the kernel's counts for each
//! (`/proc/self/smaps`): present, its share, its own copies; fails if the clones take more than the image
//! and the pages that were written, or if a byte of a clone or of the image is wrong.

use std::error::Error;
use std::fs;
use std::sync::Arc;
use std::thread;

use uzone::ByteLen;
use uzone::Sharing;
use uzone::lazy::MemoryBacking;
use uzone::lazy::{Engine, EngineOptions, LazyMapping, LazyOptions};
use uzone::os::Mapping;

type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

const LEN: ByteLen = ByteLen::mib(32);
const CLONES: u64 = 4;
const PAGE: usize = 4096;
/// Each clone writes to one page of so many, and the first to none.
const EVERY: u64 = 16;

/// Returns page `page` of the image.
fn image(page: u64) -> Vec<u8> {
    let words =
        (1..=PAGE as u64 / 8).map(|word| (page << 32 | word).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    words.flat_map(u64::to_le_bytes).collect()
}

/// Returns the bytes of a page of a clone after its writes.
fn changed(clone: u64, page: u64) -> Vec<u8> {
    if writes_to(clone, page) { clone.to_le_bytes().repeat(PAGE / 8) } else { image(page) }
}

fn writes_to(clone: u64, page: u64) -> bool {
    clone > 0 && page % EVERY < clone
}

/// Checks every byte of a clone.
fn check(memory: &LazyMapping, expected: impl Fn(u64) -> Vec<u8>) -> Outcome<()> {
    let mut bytes = vec![0; PAGE];
    for page in 0..LEN.get() / PAGE as u64 {
        memory.read_at(page * PAGE as u64, &mut bytes)?;
        if bytes != expected(page) {
            return Err(format!("page {page} of a clone is wrong").into());
        }
    }
    Ok(())
}

/// The kernel's counts for a range of addresses, in bytes.
#[derive(Default)]
struct Usage {
    present: u64,
    /// A page that n mappings have counts 1/n for each.
    share: u64,
    /// Copies that no file has.
    own: u64,
}

fn usage(start: usize) -> Outcome<Usage> {
    let range = start as u64..start as u64 + LEN.get();
    let (mut is_ours, mut usage) = (false, Usage::default());
    for line in fs::read_to_string("/proc/self/smaps")?.lines() {
        let mut words = line.split_whitespace();
        let first = words.next().unwrap_or_default();
        if let Some((from, _)) = first.split_once('-') {
            is_ours = u64::from_str_radix(from, 16).is_ok_and(|from| range.contains(&from));
        }
        let field = match first {
            "Rss:" if is_ours => &mut usage.present,
            "Pss:" if is_ours => &mut usage.share,
            "Anonymous:" if is_ours => &mut usage.own,
            _ => continue,
        };
        *field += words.next().unwrap_or_default().parse::<u64>()? << 10;
    }
    Ok(usage)
}

/// Prints the memory of each clone. Returns the memory of clones and image together, and of the copies.
fn report(file: &Mapping, clones: &[LazyMapping]) -> Outcome<(u64, u64)> {
    println!("  clone    present      share        own");
    let (mut share, mut own) = (usage(file.addr().get())?.share, 0);
    for (index, clone) in clones.iter().enumerate() {
        let usage = usage(clone.addr().get())?;
        let [present, its, copies] = [usage.present, usage.share, usage.own].map(ByteLen::new);
        println!(
            "  {index:>5} {:>10} {:>10} {:>10}",
            present.to_string(),
            its.to_string(),
            copies.to_string()
        );
        share += usage.share;
        own += usage.own;
    }
    println!(
        "  {} for all of them and the image, of which copies: {}",
        ByteLen::new(share),
        ByteLen::new(own)
    );
    Ok((share, own))
}

fn main() -> Outcome<()> {
    let file = Arc::new(Mapping::memfd("image", LEN, None)?);
    for page in 0..LEN.get() / PAGE as u64 {
        file.write_at(page * PAGE as u64, &image(page))?;
    }
    let engine = Engine::with(EngineOptions::default())?;
    let clones: Outcome<Vec<_>> = (0..CLONES)
        .map(|_| {
            let backing = MemoryBacking::new(file.clone(), Sharing::Private)?;
            Ok(engine.map(LEN, Arc::new(backing), &LazyOptions::default())?)
        })
        .collect();
    let clones = clones?;
    let each = |work: &(dyn Fn(u64, &LazyMapping) -> Outcome<()> + Sync)| -> Outcome<()> {
        thread::scope(|scope| {
            let start = |(index, clone)| scope.spawn(move || work(index, clone));
            let threads: Vec<_> = (0..).zip(&clones).map(start).collect();
            threads.into_iter().try_for_each(|one| one.join().map_err(|_| "a thread panicked")?)
        })
    };

    each(&|_, clone| check(clone, image))?;
    println!("{CLONES} clones of {LEN} have read all of it:");
    let (share, own) = report(&file, &clones)?;
    if own != 0 || share > LEN.get() {
        return Err("clones that only read have copies".into());
    }
    let faults: u64 = clones.iter().map(|clone| clone.stats().faults).sum();
    println!("  {faults} faults for {} pages mapped", CLONES * LEN.get() / PAGE as u64);

    each(&|index, clone| {
        for page in (0..LEN.get() / PAGE as u64).filter(|page| writes_to(index, *page)) {
            clone.write_at(page * PAGE as u64, &changed(index, page))?;
        }
        Ok(())
    })?;
    println!("they have written to one page in {EVERY}, two, three, and the first to none:");
    let (share, own) = report(&file, &clones)?;
    let written = (0..CLONES).sum::<u64>() * (LEN.get() / EVERY);
    if own != written || share > LEN.get() + written {
        return Err(format!("{written} bytes were written, and {own} are copies").into());
    }
    each(&|index, clone| check(clone, |page| changed(index, page)))?;
    let mut bytes = vec![0; PAGE];
    for page in 0..LEN.get() / PAGE as u64 {
        file.read_at(page * PAGE as u64, &mut bytes)?;
        if bytes != image(page) {
            return Err(format!("page {page} of the image was changed").into());
        }
    }
    println!("every clone has its own bytes, and the image is as it was");
    Ok(())
}
