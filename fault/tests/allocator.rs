//! Faults inside an allocator. That of this program has its memory, and what it knows about it, in memory that is
//! mapped lazily, and touches it while it holds its lock. A handler that allocated would wait for ever for the
//! thread that it interrupted.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail by panicking, as tests do")]

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::collections::HashMap;
use std::hint::{black_box, spin_loop};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Barrier};
use std::thread;

use common::{engine, page, skip, unnamed_file, usize_of};
use uzone_fault::{Answer, FileBacking, LazyMapping, LazyOptions};
use uzone_os::sigbus;
use uzone_os::uffd::{Features, KernelFaults, Uffd};
use uzone_pages::{Advice, ByteLen};

/// Blocks have 16 bytes to 64 KiB, a power of two.
const SMALLEST: usize = 16;
const LARGEST: usize = 64 << 10;
const CLASSES: usize = 13;
const ARENA: usize = 128 << 20;
const THREADS: usize = 6;
const STEPS: u64 = 4000;

/// Lists of free blocks in lazily mapped memory, once there is some. Before, and for what is larger, it is the
/// system's.
struct Arena {
    is_locked: AtomicBool,
    /// Where the memory is, or 0. It starts with the first block of each list and the end of what was given out.
    start: AtomicUsize,
    blocks: AtomicUsize,
}

#[global_allocator]
static ALLOCATOR: Arena = Arena {
    is_locked: AtomicBool::new(false),
    start: AtomicUsize::new(0),
    blocks: AtomicUsize::new(0),
};

/// Returns the list that has blocks for a layout, and their size.
fn class_of(layout: Layout) -> (usize, usize) {
    let size = layout.size().max(layout.align()).max(SMALLEST).next_power_of_two();
    ((size / SMALLEST).ilog2() as usize, size)
}

impl Arena {
    /// Calls `step` with the address of the memory while no other thread is in there.
    fn locked<T>(&self, step: impl FnOnce(usize) -> T) -> T {
        while self.is_locked.swap(true, Ordering::Acquire) {
            while self.is_locked.load(Ordering::Relaxed) {
                spin_loop();
                thread::yield_now();
            }
        }
        let done = step(self.start.load(Ordering::Relaxed));
        self.is_locked.store(false, Ordering::Release);
        done
    }

    /// Returns whether a block is of the memory.
    fn has(&self, block: *mut u8) -> bool {
        let start = self.start.load(Ordering::Relaxed);
        start != 0 && (start..start + ARENA).contains(&block.addr())
    }
}

/// Returns a word of the memory, which only the holder of the lock uses.
fn word(address: usize) -> *mut usize {
    ptr::with_exposed_provenance_mut(address)
}

// SAFETY: a block is of the system's allocator, or of the memory from `start` on, which is never unmapped: blocks of
// it are multiples of their size and do not overlap, and one is on a list or given out. It does not unwind.
unsafe impl GlobalAlloc for Arena {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let (class, size) = class_of(layout);
        if self.start.load(Ordering::Acquire) == 0 || size > LARGEST {
            // SAFETY: as this function wants it.
            return unsafe { System.alloc(layout) };
        }
        self.blocks.fetch_add(1, Ordering::Relaxed);
        let block = self.locked(|start| {
            let (first, end) = (word(start + 8 * class), word(start + 8 * CLASSES));
            // SAFETY: it is a word of the memory, under the lock.
            let free = unsafe { first.read() };
            if free != 0 {
                // SAFETY: a free block is no other thread's, and its last word is the next one of the list.
                let next = unsafe { word(free + size - 8).read() };
                // SAFETY: as above.
                unsafe { first.write(next) };
                return free;
            }
            // SAFETY: as above.
            let used = unsafe { end.read() };
            let at = used.max(8 * (CLASSES + 1)).next_multiple_of(size);
            if at + size > ARENA {
                return 0;
            }
            // SAFETY: as above.
            unsafe { end.write(at + size) };
            start + at
        });
        match block {
            // SAFETY: as this function wants it.
            0 => unsafe { System.alloc(layout) },
            _ => ptr::with_exposed_provenance_mut(block),
        }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        if !self.has(block) {
            // SAFETY: as this function wants it: the block is the system's.
            return unsafe { System.dealloc(block, layout) };
        }
        let (class, size) = class_of(layout);
        self.locked(|start| {
            let first = word(start + 8 * class);
            // SAFETY: it is a word of the memory, under the lock.
            let next = unsafe { first.read() };
            // SAFETY: the block is given back, so its words are the list's.
            unsafe { word(block.expose_provenance() + size - 8).write(next) };
            // SAFETY: as above.
            unsafe { first.write(block.addr()) };
        });
    }
}

/// Allocates, writes, checks and gives back, also what other threads allocated.
fn churn(
    seed: u64,
    send: &std::sync::mpsc::Sender<Vec<u64>>,
    given: &std::sync::mpsc::Receiver<Vec<u64>>,
) {
    let (mut kept, mut named) = (Vec::new(), HashMap::new());
    for step in 0..STEPS {
        let random = (seed << 32 | step).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let len = usize_of(1 + (random >> 40) % [8, 64, 512, 6000][usize_of(random >> 62)]);
        let mut block = Vec::with_capacity(len);
        block.resize(len, random);
        kept.push(block);
        named.insert(format!("{seed} {}", step % 97), vec![step; usize_of(step % 33)]);
        if kept.len() > 24 {
            let block: Vec<u64> = kept.swap_remove(usize_of(random >> 33) % kept.len());
            assert!(block.iter().all(|&word| word == block[0]), "a block was given out twice");
            send.send(block).unwrap();
        }
        while let Ok(block) = given.try_recv() {
            assert!(block.iter().all(|&word| word == block[0]), "a block was given out twice");
        }
    }
    for (name, steps) in &named {
        let last: u64 = name.split(' ').next_back().unwrap().parse().unwrap();
        assert!(steps.iter().all(|step| step % 97 == last), "{name}");
    }
}

/// Gives blocks back of which no byte was touched: their last page is missing then.
fn give_back_untouched(memory: &LazyMapping) {
    let layout = Layout::from_size_align(LARGEST, 8).unwrap();
    // SAFETY: the size is not zero.
    let blocks: Vec<_> = (0..32).map(|_| unsafe { ALLOCATOR.alloc(layout) }).collect();
    assert!(blocks.iter().all(|block| ALLOCATOR.has(*block)));
    let before = memory.stats().faults;
    for block in black_box(blocks) {
        // SAFETY: it was allocated so, and is given back once.
        unsafe { ALLOCATOR.dealloc(block, layout) };
    }
    let faults = memory.stats().faults - before;
    assert!(faults >= 32, "{faults} faults of an allocator that holds its lock");
}

#[test]
fn an_allocator_whose_memory_is_mapped_lazily_takes_faults_under_its_lock() {
    let name = "an_allocator_whose_memory_is_mapped_lazily_takes_faults_under_its_lock";
    if let Err(error) = Uffd::open(Features::SIGBUS, Features::NONE, KernelFaults::Never) {
        return skip(name, &error.to_string());
    }
    if !sigbus::recovers_copies() {
        return skip(name, "copies do not recover from SIGBUS in this build");
    }
    if !common::is_child(name) {
        // One that hangs is ended.
        let mut child = common::again(name).spawn().unwrap();
        let status = common::ends(&mut child).expect("a thread waits for the allocator for ever");
        assert!(status.success(), "{status}");
        return;
    }
    let file = unnamed_file();
    file.set_len(ARENA as u64).unwrap();
    let engine = engine();
    let map = |len: usize| {
        let backing = Arc::new(FileBacking::new(file.try_clone().unwrap()).unwrap());
        let options = LazyOptions::default().answer(Answer::InThread).advice(Advice::Random);
        let memory = engine.map(ByteLen::new(len as u64), backing, &options).unwrap();
        assert_eq!(memory.answered_in_thread(), Ok(()));
        memory
    };
    // What is allocated there is given back until the process ends.
    let memory: &'static LazyMapping = Box::leak(Box::new(map(ARENA)));
    ALLOCATOR.start.store(memory.addr().get(), Ordering::Release);
    give_back_untouched(memory);
    let (senders, receivers): (Vec<_>, Vec<_>) = (0..THREADS).map(|_| channel()).unzip();
    let begin = Barrier::new(THREADS);
    thread::scope(|scope| {
        for (seed, given) in receivers.into_iter().enumerate() {
            let send = senders[(seed + 1) % THREADS].clone();
            let (begin, map) = (&begin, &map);
            scope.spawn(move || {
                begin.wait();
                churn(seed as u64, &send, &given);
                // Mapping allocates, and the memory has faults of its own.
                let other = map(64 * usize_of(page()));
                (0..64).for_each(|at| other.read_at(at * page(), &mut [1]).unwrap());
                begin.wait();
                drop((send, given));
            });
        }
    });
    let (blocks, faults) = (ALLOCATOR.blocks.load(Ordering::Relaxed), memory.stats().faults);
    eprintln!("{blocks} blocks, {faults} faults");
    assert!(blocks as u64 > THREADS as u64 * STEPS && faults > 500, "{blocks}, {faults}");
}
