//! Diffs of VMs that run, by the library: as long as the changed pages, and of one moment while a balloon moves.
//!
//! `UZONE_TEST_SECONDS` makes it 200 diffs beside the balloon: 8 by default.

use std::fs;
use std::io::Read;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use uzone_os::lock;
use uzone_os::uffd::KernelFaults;
use uzone_pages::ByteLen;
use uzone_server::SessionMemory;
use uzone_snapshot::{Image, OpenOptions, Packer};

use crate::{
    PAGE, PAGES, Running, SECONDS, SetAtEnd, case, check, name, one_region, page_of, region_of,
};

/// Returns a page that does not compress.
fn noise(seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_ne_bytes()
    };
    (0..512).flat_map(|_| next()).collect()
}

fn bytes_of(pages: std::ops::Range<u64>) -> std::ops::Range<usize> {
    let byte = |page: u64| usize::try_from(page * PAGE).unwrap();
    byte(pages.start)..byte(pages.end)
}

#[test]
fn a_diff_of_a_thousand_scattered_pages_that_do_not_compress_is_as_long_as_they_are() {
    const CHANGED: u64 = 1000;
    /// The pages of a frame, of which one is written to.
    const APART: u64 = 16;
    let name = name!();
    let Some((folder, socket)) = case(name, "scattered") else { return };
    let mut expected: Vec<u8> = (0..CHANGED * APART).flat_map(noise).collect();
    let (image, changed) = (folder.join("image"), folder.join("changed"));
    Packer::default().pack(&mut &expected[..], &image, None, &|_| true).unwrap();
    let server = Running::start(&socket, &image, "hold");
    let (memory, _stream) = region_of(&socket, KernelFaults::IfAllowed, CHANGED * APART);
    for page in (0..CHANGED).map(|step| step * APART + step * 7 % APART) {
        let bytes = noise(page + CHANGED * APART);
        memory.mapping().write_at(page * PAGE, &bytes).unwrap();
        expected[bytes_of(page..page + 1)].copy_from_slice(&bytes);
    }
    let below = Image::open(&image, &OpenOptions::default()).unwrap();
    let captured = SessionMemory::open(&socket, 1).unwrap().protect().unwrap();
    let frame = captured.frame_bytes(&below).unwrap();
    let packer = Packer::default().frame(ByteLen::new(frame));
    packer.pack(&mut captured.over(&below), &changed, Some(&below), &|_| true).unwrap();
    let len = fs::metadata(&changed).unwrap().len();
    eprintln!("{len} bytes for {CHANGED} pages of {PAGE}");
    assert!(len <= CHANGED * PAGE * 11 / 10, "{len} bytes");
    let mut seen = vec![1; expected.len()];
    Image::open(&changed, &OpenOptions::default()).unwrap().read_at(0, &mut seen).unwrap();
    assert!(seen == expected, "wrong bytes");
    drop(memory);
    server.stop_at_once();
}

#[test]
fn no_diff_is_refused_while_a_balloon_moves_and_each_is_of_one_moment() {
    let name = name!();
    let Some((folder, socket)) = case(name, "balloon-diffs") else { return };
    let rounds = if std::env::var_os(SECONDS).is_some() { 200 } else { 8 };
    let image = folder.join("packed");
    let server = Running::start(&socket, &image, "hold");
    let (memory, _stream) = one_region(&socket, KernelFaults::IfAllowed);
    let below = Image::open(&image, &OpenOptions::default()).unwrap();
    // The bytes of the half with the balloon, and of the half that the VM writes to. A thread that has both locks has
    // paused the VM.
    const HALF: u64 = PAGES / 2;
    let half =
        |start: u64| Mutex::new((start..start + HALF).flat_map(page_of).collect::<Vec<u8>>());
    let halves = [half(0), half(HALF)];
    let (is_over, mapping) = (AtomicBool::new(false), memory.mapping());
    let mut kept_pages = 0;
    // Pages that are missing are not captured.
    (0..PAGES).for_each(|at| check(&memory, at, &page_of(at)));
    thread::scope(|scope| {
        let _end = SetAtEnd(&is_over);
        // It inflates by 60 to 250 pages in one step, and deflates: a page is written to again.
        scope.spawn(|| {
            for step in 0_u64.. {
                if is_over.load(Ordering::Acquire) {
                    return;
                }
                let start = step * 509 % HALF;
                let pages = start..(start + 60 + step * 37 % 191).min(HALF);
                let mut expected = lock(&halves[0]);
                mapping.discard(pages.start * PAGE..pages.end * PAGE).unwrap();
                expected[bytes_of(pages)].fill(0);
                let (page, bytes) = (step * 7 % HALF, noise(step));
                mapping.write_at(page * PAGE, &bytes).unwrap();
                expected[bytes_of(page..page + 1)].copy_from_slice(&bytes);
                drop(expected);
                thread::sleep(Duration::from_millis(step % 4));
            }
        });
        scope.spawn(|| {
            for step in 0_u64.. {
                if is_over.load(Ordering::Acquire) {
                    return;
                }
                let (page, bytes) = (step * 61 % HALF, noise(step));
                let mut expected = lock(&halves[1]);
                mapping.write_at((HALF + page) * PAGE, &bytes).unwrap();
                expected[bytes_of(page..page + 1)].copy_from_slice(&bytes);
                drop(expected);
                thread::sleep(Duration::from_micros(50));
            }
        });
        for round in 0..rounds {
            let (captured, expected) = {
                let paused = halves.each_ref().map(lock);
                let memory = SessionMemory::open(&socket, 1).unwrap();
                (memory.protect().unwrap(), paused.map(|half| half.clone()).concat())
            };
            let mut seen = Vec::new();
            let read = captured.over(&below).read_to_end(&mut seen);
            read.unwrap_or_else(|cause| panic!("diff {round} is refused: {cause}"));
            assert!(seen == expected, "diff {round} is not of one moment");
            kept_pages += captured.finish().unwrap();
            // The balloon moves between two diffs as well.
            thread::sleep(Duration::from_millis(5));
        }
    });
    eprintln!("{rounds} diffs, and {kept_pages} pages that were kept before they changed");
    let mut seen = vec![1; usize::try_from(PAGES * PAGE).unwrap()];
    mapping.read_at(0, &mut seen).unwrap();
    let expected = halves.map(|half| half.into_inner().unwrap()).concat();
    assert!(seen == expected, "the VM has other bytes");
    drop(memory);
    server.stop_at_once();
}
