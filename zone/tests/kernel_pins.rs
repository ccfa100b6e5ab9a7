//! Pins that the kernel has taken too. A program of its own, because it counts the pinned memory of the whole process,
//! and limits that.
#![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]

mod common;

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::io_uring::{
    IoringRegisterOp, io_uring_params, io_uring_register, io_uring_setup, iovec,
};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::{CapabilitySet, capabilities, set_capabilities};
use uzone_os::{Anonymous, HugeAdvice, KernelPinError, Mapping, SystemRoot, mempolicy, numa};
use uzone_pages::{ByteLen, ErrorKind, MemoryKind, Order, PageCount};
use uzone_zone::{BindOptions, Pagemap, PinError, PinOptions, Pinned, Region, Zone};

use crate::common::needs::{skip, skip_dax};
use crate::common::pages_in;

const MIB: u64 = 1 << 20;

/// Cases take turns, for they count the pins of the process.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

fn small(len: u64) -> Region {
    let how = Anonymous { huge: HugeAdvice::Never, ..Anonymous::default() };
    Region::adopt(Mapping::anonymous(ByteLen::new(len), how).unwrap()).unwrap()
}

fn bind(zone: &Zone, region: Region, order: Order) -> Pagemap {
    zone.bind(region, BindOptions::new(MemoryKind::Generic).order(order)).unwrap()
}

/// Returns how many bytes of this process the kernel has pinned.
fn pinned_bytes() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmPin:")).unwrap();
    line.split_whitespace().next().unwrap().parse::<u64>().unwrap() << 10
}

/// Returns the numbers of page frames at an address, as the kernel shows them: zeroes, unless this process may see
/// them.
fn frames(address: usize, pages: usize) -> Vec<u64> {
    let mut entries = vec![0; pages * 8];
    let pagemap = File::open("/proc/self/pagemap").unwrap();
    pagemap.read_exact_at(&mut entries, (address / 4096 * 8) as u64).unwrap();
    let entries = entries.as_chunks().0.iter().map(|entry| u64::from_ne_bytes(*entry));
    entries.map(|entry| entry & ((1 << 55) - 1)).collect()
}

/// Pins by the kernel, or skips the case `name`.
fn kernel(taken: Result<Pinned, PinError>, name: &str) -> Option<Pinned> {
    match taken {
        Ok(pinned) => Some(pinned),
        Err(PinError::Kernel(error))
            if matches!(*error, KernelPinError::NoRing { .. } | KernelPinError::Limit { .. }) =>
        {
            skip(name, &error.to_string());
            None
        }
        Err(error) => panic!("{error:?}"),
    }
}

#[test]
fn the_place_of_a_page_is_known_and_stays_while_the_kernel_has_it_pinned() {
    const NAME: &str = "the_place_of_a_page_is_known_and_stays_while_the_kernel_has_it_pinned";
    let _turn = turn();
    let zone = Zone::new();
    let pagemap = bind(&zone, small(4 * MIB), Order::BASE);
    let range = pages_in(&pagemap, 3, 1020);
    let plain = pagemap.pin(range).unwrap();
    assert_eq!(plain.physical().unwrap_err(), PinError::NotKept { range });
    let taken = pagemap.pin_with(range, PinOptions::default().kernel());
    let Some(pinned) = kernel(taken, NAME) else { return };
    let segment = pinned.segments().next().unwrap();
    let seen = || frames(segment.address, 1020);
    let before = seen();
    match pinned.physical() {
        Ok(places) => {
            let ours = places.into_iter().flat_map(|place| place.step_by(4096));
            assert!(ours.map(|address| address >> 12).eq(before.iter().copied()));
        }
        Err(PinError::Kernel(error)) => {
            assert_eq!(*error, KernelPinError::Hidden);
            skip(NAME, &error.to_string());
        }
        Err(error) => panic!("{error:?}"),
    }
    // It moves pages to the lower or upper end of memory where it finds some to move.
    let _ = fs::write("/proc/sys/vm/compact_memory", "1");
    let again = pinned.try_clone().unwrap();
    drop(pinned);
    assert!(seen() == before);
    let busy = pagemap.unbind().unwrap_err();
    assert_eq!(busy.pins, 2);
    drop((plain, again));
    assert_eq!(pinned_bytes(), 0);
    busy.pagemap.unbind().unwrap();
}

/// Asks the kernel to move pages to a node.
fn move_to(node: u32, address: usize, pages: usize) {
    let addresses: Vec<usize> = (0..pages).map(|page| address + page * 4096).collect();
    let nodes = vec![node.cast_signed(); pages];
    let mut states = vec![0_i32; pages];
    const MOVE: i32 = 2; // MPOL_MF_MOVE
    // SAFETY: move_pages(2) reads as many addresses and nodes as there are pages, and writes as many numbers. It changes
    // no byte of the pages.
    let _ = unsafe {
        let (addresses, nodes, states) = (addresses.as_ptr(), nodes.as_ptr(), states.as_mut_ptr());
        libc::syscall(libc::SYS_move_pages, 0, pages, addresses, nodes, states, MOVE)
    };
}

#[test]
fn the_kernel_moves_pages_under_a_pin_and_none_that_it_has_pinned_itself() {
    const NAME: &str = "the_kernel_moves_pages_under_a_pin_and_none_that_it_has_pinned_itself";
    let _turn = turn();
    let nodes = numa::nodes(&SystemRoot::host()).unwrap_or_default();
    let here = mempolicy::current_node();
    let has_room = |node: &&numa::Node| Some(node.number) != here && node.free > ByteLen::mib(16);
    let (Some(here), Some(there)) = (here, nodes.iter().find(has_room).map(|node| node.number))
    else {
        return skip_dax(NAME, "there is no second node with memory");
    };
    let region = small(MIB);
    region.write_at(0, &vec![7; 1 << 20]).unwrap();
    let pagemap = bind(&Zone::new(), region, Order::BASE);
    let address = pagemap.region().addr().get();
    let node = || {
        let maps = fs::read_to_string("/proc/self/numa_maps").unwrap();
        let start = format!("{address:08x} ");
        let line = maps.lines().find(|line| line.starts_with(&start)).unwrap();
        let on = |node: u32| line.contains(&format!(" N{node}=256"));
        [here, there].into_iter().find(|node| on(*node))
    };
    assert_eq!(node(), Some(here));
    let plain = pagemap.pin(pagemap.range()).unwrap();
    move_to(there, address, 256);
    assert_eq!(node(), Some(there), "a pin of uzone alone holds off uzone alone");
    let taken = pagemap.pin_with(pagemap.range(), PinOptions::default().kernel());
    let Some(pinned) = kernel(taken, NAME) else { return };
    move_to(here, address, 256);
    assert_eq!(node(), Some(there), "the kernel has pinned the pages");
    drop(pinned);
    move_to(here, address, 256);
    assert_eq!(node(), Some(here));
    drop(plain);
}

#[test]
fn guards_of_many_ranges_are_dropped_in_any_order_and_leave_nothing_pinned() {
    const NAME: &str = "guards_of_many_ranges_are_dropped_in_any_order_and_leave_nothing_pinned";
    let _turn = turn();
    for order in [Order::BASE, Order::PMD] {
        let zone = Zone::new();
        let pagemap = bind(&zone, small(8 * MIB), order);
        let (mut held, mut random) = (Vec::<Pinned>::new(), 1_u64);
        let mut below = |most: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (random >> 33) % most
        };
        for _ in 0..2000 {
            let at = usize::try_from(below(1 << 20)).unwrap();
            if held.len() < 40 && below(3) > 0 {
                let from = below(2040);
                let range = pages_in(&pagemap, from, 1 + below(2047 - from).min(80));
                let options = PinOptions::default();
                let options = if below(4) > 0 { options.kernel() } else { options };
                let Some(pinned) = kernel(pagemap.pin_with(range, options), NAME) else { return };
                held.push(pinned);
            } else if !held.is_empty() {
                let pinned = held.swap_remove(at % held.len());
                match below(4) {
                    0 => held.push(pinned.try_clone().unwrap()),
                    1 if pinned.range().pages() > PageCount::new(1) => {
                        let (first, second) = pinned.split(PageCount::new(1)).unwrap();
                        held.extend([first, second]);
                    }
                    2 => {
                        let raw = pinned.into_raw().unwrap();
                        let _ = zone.redeem(raw).unwrap();
                    }
                    _ => drop(pinned),
                }
            }
        }
        drop(held);
        assert_eq!(pinned_bytes(), 0, "{order:?}");
        assert!(pagemap.pages().all(|page| page.word().pins() == 0));
        pagemap.unbind().unwrap();
    }
}

#[test]
fn the_parts_of_a_guard_share_the_pin_of_the_kernel_until_the_last_is_dropped() {
    const NAME: &str = "the_parts_of_a_guard_share_the_pin_of_the_kernel";
    let _turn = turn();
    let pagemap = bind(&Zone::new(), small(MIB), Order::BASE);
    let options = PinOptions::default().kernel();
    let Some(pinned) = kernel(pagemap.pin_with(pagemap.range(), options), NAME) else { return };
    let (first, second) = pinned.split(PageCount::new(5)).unwrap();
    let clone = second.try_clone().unwrap();
    drop((first, second));
    assert_eq!(pinned_bytes(), MIB);
    // The memory lives as long as the guard.
    drop(pagemap);
    clone.write_at(0, &[5]).unwrap();
    drop(clone);
    assert_eq!(pinned_bytes(), 0);
}

#[test]
fn memory_of_several_regions_is_pinned_in_all_of_them_or_in_none() {
    const NAME: &str = "memory_of_several_regions_is_pinned_in_all_of_them_or_in_none";
    let _turn = turn();
    let zone = Zone::new();
    let base = |base| BindOptions::new(MemoryKind::Generic).base(base);
    let start = uzone_pages::Pfn::new;
    let mut regions = common::neighbours(2);
    let second = zone.bind(regions.pop().unwrap(), base(start(0x1100))).unwrap();
    let first = zone.bind(regions.pop().unwrap(), base(start(0x1000))).unwrap();
    let start = first.region().addr().get() + 0x80 * 4096;
    let options = PinOptions::default().kernel();
    let across = match zone.pin_with(start, ByteLen::mib(1), options) {
        Ok(across) => across,
        Err(PinError::Kernel(error)) => return skip(NAME, &error.to_string()),
        Err(error) => panic!("{error:?}"),
    };
    assert_eq!(pinned_bytes(), MIB);
    drop(across);
    second.poison(second.range().start()).unwrap();
    let refused = zone.pin_with(start, ByteLen::mib(1), options);
    assert!(matches!(refused, Err(PinError::Poisoned { .. })), "{refused:?}");
    assert_eq!(pinned_bytes(), 0);
    assert!(first.unbind().is_ok() && second.unbind().is_ok());
}

#[test]
fn more_than_the_user_may_lock_is_refused_and_holds_nothing() {
    const NAME: &str = "more_than_the_user_may_lock_is_refused_and_holds_nothing";
    let _turn = turn();
    let before = getrlimit(Resource::Memlock);
    let little = Rlimit { current: Some(64 << 10), ..before };
    if setrlimit(Resource::Memlock, little).is_err() {
        return skip(NAME, "the hard limit is lower");
    }
    // Rights are a thread's.
    let taken = std::thread::spawn(|| {
        let mut sets = capabilities(None).unwrap();
        sets.effective.remove(CapabilitySet::IPC_LOCK);
        set_capabilities(None, sets).unwrap();
        let pagemap = bind(&Zone::new(), small(MIB), Order::BASE);
        let options = PinOptions::default().kernel();
        let refused = pagemap.pin_with(pagemap.range(), options).unwrap_err();
        assert!(pagemap.pages().all(|page| page.word().pins() == 0));
        (refused, pagemap.unbind().is_ok())
    });
    let (refused, is_unbound) = taken.join().unwrap();
    setrlimit(Resource::Memlock, before).unwrap();
    if let PinError::Kernel(error) = &refused
        && matches!(**error, KernelPinError::NoRing { .. })
    {
        return skip(NAME, &error.to_string());
    }
    assert!(is_unbound);
    assert_eq!(refused.kind(), ErrorKind::OutOfMemory);
    let text = refused.to_string();
    assert!(text.contains("1 MiB") && text.contains("RLIMIT_MEMLOCK is 64 KiB"), "{text}");
}

/// Times one registration of memory with an io_uring, and nothing else.
fn bare(address: usize, len: ByteLen) -> rustix::io::Result<Duration> {
    let mut params = io_uring_params::default();
    // SAFETY: it reads and writes `params`, which is borrowed mutably, and has no descriptor in it.
    let ring = unsafe { io_uring_setup(1, &mut params) }?;
    let start = std::ptr::with_exposed_provenance_mut(address);
    let buffer = iovec { iov_base: start, iov_len: len.to_usize().unwrap() };
    let started = Instant::now();
    let op = IoringRegisterOp::RegisterBuffers;
    // SAFETY: it reads one `iovec`, and pins the memory that it names. No request reads or writes that.
    unsafe { io_uring_register(&ring, op, (&raw const buffer).cast(), 1) }?;
    let elapsed = started.elapsed();
    // SAFETY: it reads no memory.
    unsafe { io_uring_register(&ring, IoringRegisterOp::UnregisterBuffers, std::ptr::null(), 0) }?;
    Ok(elapsed)
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

#[test]
fn a_pin_of_the_kernel_costs_little_more_than_a_bare_registration() {
    const NAME: &str = "a_pin_of_the_kernel_costs_little_more_than_a_bare_registration";
    const ROUNDS: usize = 31;
    let _turn = turn();
    for (huge, order) in [(HugeAdvice::Never, Order::BASE), (HugeAdvice::Advise, Order::PMD)] {
        let how = Anonymous { huge, ..Anonymous::default() };
        let gib = ByteLen::gib(1);
        let mapping = Mapping::anonymous(gib, how).unwrap();
        if let Err(error) = mapping.populate(0..gib.get()) {
            return skip(NAME, &error.to_string());
        }
        let (address, region) = (mapping.addr().get(), Region::adopt(mapping).unwrap());
        let pagemap = bind(&Zone::new(), region, order);
        let (mut ours, mut bares) = (Vec::new(), Vec::new());
        for round in 0..=ROUNDS {
            let Ok(bare) = bare(address, gib) else { return skip(NAME, "no io_uring") };
            let started = Instant::now();
            let taken = pagemap.pin_with(pagemap.range(), PinOptions::default().kernel());
            let elapsed = started.elapsed();
            let Some(pinned) = kernel(taken, NAME) else { return };
            assert_eq!(pinned_bytes(), gib.get());
            drop(pinned);
            // The first round warms up.
            if round > 0 {
                ours.push(elapsed);
                bares.push(bare);
            }
        }
        let ratios = ours.iter().zip(&bares).map(|(ours, bare)| ours.div_duration_f64(*bare));
        let mut ratios: Vec<f64> = ratios.collect();
        ratios.sort_unstable_by(f64::total_cmp);
        let ratio = ratios[ROUNDS / 2];
        eprintln!(
            "1 GiB, {order:?}: kernel pin {:?}, bare registration {:?}, {ratio:.3} x",
            median(ours),
            median(bares)
        );
        // Far from the figure, so that a busy machine does not matter.
        assert!(ratio < 2.0, "{ratio:.3} x");
    }
}
