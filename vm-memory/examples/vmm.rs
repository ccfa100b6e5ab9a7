//! A monitor restores a VM's memory from a packed image, before that has been read, and takes the pages that the guest
//! wrote. No `unsafe`.
//!
//! `cargo run --release -p uzone-vm-memory --example vmm -- 2G`
//!
//! The image is mapped lazily at guest address 0, and memory that was plugged in later lies at 4 GiB. The guest is played by
//! threads that use the memory as a virtio device does: they follow descriptors of a queue, read and write buffers, also
//! across pages. Prints how soon the first access was answered, and how much of the image was read for all of them; fails
//! if a byte is wrong, or if a page that was written is not among the pages that are to be stored.

use std::error::Error;
use std::io::Read;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Instant;

use uzone::lazy::{Engine, LazyOptions, WriteTracking};
use uzone::snapshot::{Image, OpenOptions, Packer, SnapshotBacking};
use uzone::{ByteLen, Region};
use uzone_vm_memory::{GuestMemory, GuestRegion, HostMemory};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryRegion};

type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

const PAGE: u64 = 4096;
const PLUGGED: GuestAddress = GuestAddress(4 << 30);
const VCPUS: u64 = 2;
/// Descriptors that each thread follows.
const REQUESTS: u64 = 2000;

/// The memory of the VM when it was stored: each page starts with its number, and is otherwise text that repeats.
struct Stored {
    at: u64,
    len: u64,
}

/// Returns the byte at an address when the VM was stored.
fn stored(at: u64) -> u8 {
    let page = (at / PAGE).to_le_bytes();
    let inside = at % PAGE;
    let text = b"a guest's memory repeats itself. ";
    match (usize::try_from(inside), usize::try_from(inside % text.len() as u64)) {
        (Ok(byte), _) if byte < page.len() => page[byte],
        (_, Ok(byte)) => text[byte],
        _ => 0,
    }
}

impl Read for Stored {
    fn read(&mut self, out: &mut [u8]) -> std::io::Result<usize> {
        let len = out.len().min(usize::try_from(self.len - self.at).unwrap_or(usize::MAX));
        for (byte, at) in out[..len].iter_mut().zip(self.at..) {
            *byte = stored(at);
        }
        self.at += len as u64;
        Ok(len)
    }
}

/// A device follows the descriptors of one queue: it reads a buffer, and writes its answer behind a page's end.
/// Returns the pages that it wrote to.
fn device(memory: &GuestMemory, vcpu: u64, pages: u64) -> Outcome<Vec<u64>> {
    let (mut random, mut written, mut buffer) = (vcpu + 1, Vec::new(), vec![0; 600]);
    let ring = PLUGGED.0 + vcpu * 64 * 1024;
    for request in 0..REQUESTS {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        // A vCPU has every second pair of pages to itself.
        let pair = (random >> 33) % (pages / 2 / VCPUS) * VCPUS + vcpu;
        let at = pair * 2 * PAGE + PAGE - 300;
        // The driver of the guest makes the descriptor available, and the device takes it.
        let slot = GuestAddress(ring + request % 256 * 16);
        memory.store(at, slot, Ordering::Release)?;
        let at: u64 = memory.load(slot, Ordering::Acquire)?;
        memory.read_slice(&mut buffer, GuestAddress(at))?;
        let is_ours = buffer.iter().all(|byte| *byte == 0xa0 | vcpu.to_le_bytes()[0]);
        if !is_ours && !buffer.iter().zip(at..).all(|(byte, at)| *byte == stored(at)) {
            return Err(format!("the guest reads wrong bytes at {at:#x}").into());
        }
        if request % 4 == 0 {
            buffer.fill(0xa0 | vcpu.to_le_bytes()[0]);
            memory.write_slice(&buffer, GuestAddress(at))?;
            written.extend([at / PAGE, at / PAGE + 1]);
        }
    }
    Ok(written)
}

fn main() -> Outcome<()> {
    let size: ByteLen = std::env::args().nth(1).as_deref().unwrap_or("2G").parse()?;
    let path = std::env::temp_dir().join(format!("uzone-vmm-{}", std::process::id()));
    let mut source = Stored { at: 0, len: size.get() };
    let packed = Packer::default().pack(&mut source, &path, None, &|_| true)?;
    let image = Image::open(&path, &OpenOptions::default().root(packed.root));
    std::fs::remove_file(&path)?; // the open image keeps its bytes
    println!("an image of {size} in {:.1}", ByteLen::new(packed.file_bytes));

    let started = Instant::now();
    let engine = Engine::new(NonZeroUsize::MIN)?;
    let backing = Arc::new(SnapshotBacking::new(Arc::new(image?)));
    let options = LazyOptions::default().track_writes(WriteTracking::Async);
    let restored = match engine.map(size, backing, &options) {
        Ok(restored) => restored,
        // The error names the feature that the host lacks.
        Err(error) => {
            println!("{error}");
            return Ok(());
        }
    };
    let restored = GuestRegion::new(GuestAddress(0), restored).ok_or("too long for a guest")?;
    let plugged = Region::memfd("plugged", ByteLen::mib(16))?; // of a file, for devices of other processes
    let plugged = GuestRegion::new(PLUGGED, plugged).ok_or("too long for a guest")?;
    let memory = GuestMemory::from_regions(vec![restored, plugged])?;
    let first: u64 = memory.read_obj(GuestAddress(size.get() / 2))?;
    println!("the guest read the number of page {first} after {:.1?}", started.elapsed());

    let started = Instant::now();
    let (memory_ref, pages) = (&memory, size.get() / PAGE);
    let written: Outcome<Vec<_>> = thread::scope(|scope| {
        let start = |vcpu| scope.spawn(move || device(memory_ref, vcpu, pages));
        let vcpus: Vec<_> = (0..VCPUS).map(start).collect();
        vcpus.into_iter().map(|vcpu| vcpu.join().map_err(|_| "a thread panicked")?).collect()
    });
    let (mut written, elapsed) = (written?.concat(), started.elapsed());
    written.sort_unstable();
    written.dedup();

    let region = memory.find_region(GuestAddress(0)).ok_or("the memory is gone")?;
    let taken = region.written().take()?;
    let taken: Vec<u64> = taken.iter().flat_map(|run| run.start / PAGE..run.end / PAGE).collect();
    println!(
        "{} requests in {elapsed:.1?}; {} pages are to be stored",
        VCPUS * REQUESTS,
        taken.len()
    );
    if let HostMemory::Lazy(mapping) = region.memory() {
        println!("{} faults, of {} pages", mapping.stats().faults, region.len() / PAGE);
    }
    if taken != written || !region.written().take()?.is_empty() {
        return Err(format!("{} pages were written", written.len()).into());
    }
    println!("each page that was written is among them, and no other");
    Ok(())
}
