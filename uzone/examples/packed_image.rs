//! An image of memory is packed, and mapped lazily: each page is decoded, and verified, when it is touched.
//!
//! Run it with `cargo run --release -p uzone --example packed_image [SIZE]`. It prints how long packing took,
//! and how long it takes to touch the mapped image in order and at random, beside decoding all of it first.

use std::error::Error;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Instant;

use uzone::ByteLen;
use uzone::lazy::{Engine, LazyMapping, LazyOptions};
use uzone::snapshot::{Image, OpenOptions, Packer, SnapshotBacking};

const PAGE: usize = 4096;

/// Returns memory as programs have it: a third is zero, the rest is records that repeat in part.
fn memory(len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    let mut state = 1_u64;
    for (number, page) in bytes.chunks_mut(PAGE).enumerate() {
        if number / 40 % 3 == 0 {
            continue;
        }
        for record in page.chunks_exact_mut(32) {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            record[..8].copy_from_slice(&(state >> 20).to_le_bytes());
            record[8..16].copy_from_slice(&(number as u64).to_le_bytes());
            record[16..24].copy_from_slice(&0x7f3a_0000_1000_u64.to_le_bytes());
        }
    }
    bytes
}

fn map(image: &Arc<Image>) -> Result<LazyMapping, Box<dyn Error>> {
    let engine = Engine::new(NonZeroUsize::new(2).unwrap_or(NonZeroUsize::MIN))?;
    let backing = Arc::new(SnapshotBacking::new(image.clone()));
    Ok(engine.map(ByteLen::new(image.byte_len()), backing, &LazyOptions::default())?)
}

/// Touches pages of the mapping, and compares each with the original.
fn touch(
    mapping: &LazyMapping,
    original: &[u8],
    pages: impl Iterator<Item = usize>,
) -> Result<(), Box<dyn Error>> {
    let mut read = [0; PAGE];
    for page in pages {
        mapping.read_at((page * PAGE) as u64, &mut read)?;
        if read != original[page * PAGE..][..PAGE] {
            return Err(format!("page {page} has other bytes").into());
        }
    }
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let size: ByteLen = std::env::args().nth(1).as_deref().unwrap_or("64M").parse()?;
    let original = memory(usize::try_from(size.get())? / PAGE * PAGE);
    let path = std::env::temp_dir().join(format!("packed-image-{}", std::process::id()));
    let started = Instant::now();
    let packed = Packer::default().pack(&mut &*original, &path, None, &|_| true)?;
    println!(
        "packed {:.1} into {:.1} in {:.0?}, root {}",
        ByteLen::new(packed.image_bytes),
        ByteLen::new(packed.file_bytes),
        started.elapsed(),
        packed.root
    );
    // The root hash makes the image authentic: another one is refused.
    let image = || Image::open(&path, &OpenOptions::default().root(packed.root)).map(Arc::new);
    let (whole, in_order, at_random) = (image()?, image()?, image()?);
    std::fs::remove_file(&path)?;

    let started = Instant::now();
    let mut read = vec![0; original.len()];
    whole.read_at(0, &mut read)?;
    println!("decoded all of it by one thread in {:.1?}", started.elapsed());

    let pages = original.len() / PAGE;
    let mapping = map(&in_order)?;
    let started = Instant::now();
    touch(&mapping, &original, 0..pages)?;
    println!("touched every page in order in {:.1?}", started.elapsed());

    let mapping = map(&at_random)?;
    let started = Instant::now();
    touch(&mapping, &original, (0..100).map(|n| n * 7919 % pages))?;
    println!("touched 100 pages at random in {:.1?}: the rest was not decoded", started.elapsed());
    Ok(())
}
