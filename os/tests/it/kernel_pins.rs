//! Memory that the kernel keeps in place, by an io_uring, and its place in the memory of the machine.

use std::fs;
use std::io::{Read, Write, pipe};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::{Arc, Mutex};

use rustix::process::{Resource, Rlimit, setrlimit};
use rustix::thread::{CapabilitySet, capabilities, set_capabilities};
use tempfile::tempfile_in;
use uzone_os::{
    Access, AccessError, Anonymous, HugeAdvice, KernelPin, KernelPinError, KernelPins, Mapping,
    Sharing,
};
use uzone_pages::{ByteLen, ErrorKind};

use crate::{file_of, is_alone, page, read, skip, small_pages};

/// Pins all of a mapping, or skips the case `name`.
fn pin(pins: &KernelPins, mapping: &Mapping, name: &str) -> Option<KernelPin> {
    match pins.pin(mapping, 0..mapping.len().get()) {
        Ok(pin) => Some(pin),
        Err(error @ (KernelPinError::NoRing { .. } | KernelPinError::Limit { .. })) => {
            skip(name, &error.to_string());
            None
        }
        Err(error) => panic!("{error:?}"),
    }
}

/// Returns how many KiB of this process the kernel has pinned, by its own accounting.
fn pinned_kib() -> u64 {
    file_of(&fs::read_to_string("/proc/self/status").unwrap(), "VmPin:")
}

/// Returns the address of each page of a mapping in the memory of the machine, or skips the case `name`.
fn frames(mapping: &Mapping, name: &str) -> Option<Vec<u64>> {
    match mapping.physical(0..mapping.len().get()) {
        Ok(segments) => Some(segments.iter().flat_map(|part| part.clone().step_by(4096)).collect()),
        Err(KernelPinError::Hidden) => {
            skip(name, "the kernel shows no page frames to this process");
            None
        }
        Err(error) => panic!("{error:?}"),
    }
}

/// Maps small pages, and writes to each.
fn small(len: ByteLen) -> Mapping {
    let mapping = Mapping::anonymous(len, small_pages()).unwrap();
    touch(&mapping);
    mapping
}

fn touch(mapping: &Mapping) {
    for offset in (0..mapping.len().get()).step_by(4096) {
        mapping.write_at(offset, &[1]).unwrap();
    }
}

#[test]
fn memory_is_pinned_and_present_until_the_pin_is_dropped() {
    const NAME: &str = "memory_is_pinned_and_present_until_the_pin_is_dropped";
    // Alone, because it counts the pinned memory of the whole process.
    if !is_alone(&format!("kernel_pins::{NAME}")) {
        return;
    }
    let small = Mapping::anonymous(ByteLen::mib(3), small_pages()).unwrap();
    let advised = Anonymous { huge: HugeAdvice::Advise, ..Anonymous::default() };
    let large = Mapping::anonymous(ByteLen::mib(4), advised).unwrap();
    let pins = KernelPins::default();
    for mapping in [&small, &large, &small] {
        mapping.write_at(5, &[7]).unwrap();
        let Some(pinned) = pin(&pins, mapping, NAME) else { return };
        assert_eq!(pinned_kib(), mapping.len().get() >> 10);
        assert_eq!(mapping.resident().unwrap(), mapping.len(), "all present");
        drop(pinned);
        assert_eq!(pinned_kib(), 0);
        assert_eq!(read(mapping, 5), [7]);
    }
    // A part, from the middle of a page on.
    let part = pins.pin(&small, page() + 1..3 * page()).unwrap();
    assert_eq!(pinned_kib(), (2 * page()) >> 10);
    // The mapping may go first, and the ring too.
    drop((small, pins));
    assert_eq!(pinned_kib(), (2 * page()) >> 10);
    drop(part);
    assert_eq!(pinned_kib(), 0);
}

#[test]
fn memory_of_more_than_a_buffer_is_pinned_in_parts() {
    const NAME: &str = "memory_of_more_than_a_buffer_is_pinned_in_parts";
    if !is_alone(&format!("kernel_pins::{NAME}")) {
        return;
    }
    let advised = Anonymous { huge: HugeAdvice::Advise, ..Anonymous::default() };
    let mapping = Mapping::anonymous(ByteLen::new((1 << 30) + page()), advised).unwrap();
    let pins = KernelPins::default();
    let Some(pinned) = pin(&pins, &mapping, NAME) else { return };
    assert_eq!(pinned_kib(), mapping.len().get() >> 10);
    drop(pinned);
    assert_eq!(pinned_kib(), 0);
}

#[test]
fn memory_that_cannot_be_written_is_not_pinned() {
    let file = tempfile_in(std::env::temp_dir()).unwrap();
    file.set_len(page()).unwrap();
    let mapping =
        Mapping::file(file, 0, ByteLen::new(page()), Access::ReadOnly, Sharing::Shared).unwrap();
    let error = KernelPins::default().pin(&mapping, 0..page()).unwrap_err();
    if matches!(error, KernelPinError::NoRing { .. }) {
        return skip("memory_that_cannot_be_written", &error.to_string());
    }
    assert!(matches!(error, KernelPinError::Refused { .. }), "{error:?}");
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    let text = error.to_string();
    assert!(text.contains("map it writable"), "{text}");
}

#[test]
fn bytes_that_are_not_in_the_mapping_are_not_pinned() {
    let mapping = Mapping::anonymous(ByteLen::new(page()), small_pages()).unwrap();
    let error = KernelPins::default().pin(&mapping, 0..2 * page()).unwrap_err();
    assert!(matches!(error, KernelPinError::Access(AccessError::Beyond { .. })), "{error:?}");
}

#[test]
fn any_number_of_pins_is_dropped_in_any_order() {
    const NAME: &str = "any_number_of_pins_is_dropped_in_any_order";
    // Alone, because it counts the pinned memory of the whole process.
    if !is_alone(&format!("kernel_pins::{NAME}")) {
        return;
    }
    let mapping = Mapping::anonymous(ByteLen::new(page()), small_pages()).unwrap();
    let pins = KernelPins::default();
    let mut all = Vec::new();
    // A ring has 64 buffers.
    for _ in 0..1000 {
        let Some(pin) = pin(&pins, &mapping, NAME) else { return };
        all.push(pin);
    }
    assert_eq!(pinned_kib(), (1000 * page()) >> 10);
    let mut at = 0;
    while all.len() > 300 {
        at = (at + 577) % all.len();
        drop(all.swap_remove(at));
    }
    assert_eq!(pinned_kib(), (300 * page()) >> 10);
    let before = fs::read_dir("/proc/self/fd").unwrap().count();
    for _ in 300..1000 {
        all.push(pins.pin(&mapping, 0..page()).unwrap());
    }
    assert_eq!(pinned_kib(), (1000 * page()) >> 10);
    assert_eq!(fs::read_dir("/proc/self/fd").unwrap().count(), before, "rings are used again");
    drop(all);
    assert_eq!(pinned_kib(), 0);
}

#[test]
fn more_than_may_be_locked_is_refused_by_the_limit() {
    const NAME: &str = "more_than_may_be_locked_is_refused_by_the_limit";
    // Alone, because it limits the process.
    if !is_alone(&format!("kernel_pins::{NAME}")) {
        return;
    }
    let limit = Rlimit { current: Some(64 << 10), maximum: Some(64 << 10) };
    setrlimit(Resource::Memlock, limit).unwrap();
    let mut sets = capabilities(None).unwrap();
    sets.effective.remove(CapabilitySet::IPC_LOCK);
    set_capabilities(None, sets).unwrap();
    let mapping = Mapping::anonymous(ByteLen::mib(1), small_pages()).unwrap();
    let pins = KernelPins::default();
    let error = pins.pin(&mapping, 0..1 << 20).unwrap_err();
    if matches!(error, KernelPinError::NoRing { .. }) {
        return skip(NAME, &error.to_string());
    }
    let expected = KernelPinError::Limit { len: ByteLen::mib(1), limit: ByteLen::kib(64) };
    assert_eq!((error, error.kind()), (expected, ErrorKind::OutOfMemory));
    let text = error.to_string();
    let parts = ["cannot pin 1 MiB", "RLIMIT_MEMLOCK is 64 KiB", "ulimit -l", "CAP_IPC_LOCK"];
    assert!(parts.iter().all(|part| text.contains(part)), "{text}");
    assert_eq!(pinned_kib(), 0, "nothing is left of it");
    match pins.pin(&mapping, 0..page()) {
        Ok(pin) => drop(pin),
        // Others of this user have as much pinned.
        Err(error) => assert!(matches!(error, KernelPinError::Limit { .. }), "{error:?}"),
    }
}

#[test]
fn compaction_moves_memory_and_never_what_is_pinned() {
    const NAME: &str = "compaction_moves_memory_and_never_what_is_pinned";
    // The kernel moves pages that lie in the lower half of its memory, and not every layout has some there.
    for _ in 0..8 {
        match moved_by_compaction(NAME) {
            None => return,
            Some(0) => {}
            Some(moved) => return eprintln!("{moved} pages without a pin were moved"),
        }
    }
    skip(NAME, "the kernel moved no page, pinned or not");
}

/// Fragments memory and has the kernel compact it. Returns how many pages without a pin were moved, unless the case
/// `name` is skipped.
fn moved_by_compaction(name: &str) -> Option<usize> {
    const COMPACT: &str = "/proc/sys/vm/compact_memory";
    let len = ByteLen::mib(16);
    let [fixed, free] = [(); 2].map(|()| Mapping::anonymous(len, small_pages()).unwrap());
    let gaps = [(); 14].map(|()| Mapping::anonymous(len, small_pages()).unwrap());
    // Their pages lie between each other, so that most of the memory is free when the gaps are dropped.
    for offset in (0..len.get()).step_by(4096) {
        for mapping in gaps.iter().chain([&fixed, &free]) {
            mapping.write_at(offset, &[1]).unwrap();
        }
    }
    let pins = KernelPins::default();
    let _pinned = pin(&pins, &fixed, name)?;
    let (fixed_before, free_before) = (frames(&fixed, name)?, frames(&free, name)?);
    drop(gaps);
    if let Err(error) = fs::write(COMPACT, "1") {
        skip(name, &format!("{COMPACT}: {error}"));
        return None;
    }
    assert!(frames(&fixed, name)? == fixed_before, "a pinned page was moved");
    let after = frames(&free, name)?;
    Some(free_before.iter().zip(&after).filter(|(before, after)| before != after).count())
}

#[test]
fn a_huge_page_is_made_of_small_ones_only_where_none_is_pinned() {
    const NAME: &str = "a_huge_page_is_made_of_small_ones_only_where_none_is_pinned";
    let huge = ByteLen::mib(2);
    let how = Anonymous { huge: HugeAdvice::Never, ..Anonymous::default() };
    let [fixed, free] = [(); 2].map(|()| Mapping::anonymous(ByteLen::mib(4), how).unwrap());
    for mapping in [&fixed, &free] {
        touch(mapping);
        mapping.advise_huge().unwrap();
    }
    let pins = KernelPins::default();
    let Some(_pinned) = pin(&pins, &fixed, NAME) else { return };
    let (Some(fixed_before), Some(free_before)) = (frames(&fixed, NAME), frames(&free, NAME))
    else {
        return;
    };
    for mapping in [&fixed, &free] {
        if let Err(error) = mapping.collapse(0..mapping.len().get()) {
            return skip(NAME, &error.to_string());
        }
    }
    assert!(frames(&fixed, NAME).unwrap() == fixed_before, "a pinned page was moved");
    if free.huge_backed().unwrap() < huge {
        return skip(NAME, "there was no free huge page");
    }
    assert!(frames(&free, NAME).unwrap() != free_before);
}

/// A process that was forked off and has the memory of this one until it is dropped.
struct Child {
    go_on: std::io::PipeWriter,
    status: Option<std::thread::JoinHandle<bool>>,
}

impl Child {
    /// Forks; the child calls `work`, then waits.
    fn fork(mut work: impl FnMut() -> bool + Send + Sync + 'static) -> Self {
        let ((mut ready, said), (mut waits, go_on)) = (pipe().unwrap(), pipe().unwrap());
        let mut command = Command::new("/bin/true");
        let in_child = move || {
            let is_right = work();
            (&said).write_all(&[u8::from(is_right)])?;
            waits.read_exact(&mut [0])
        };
        // SAFETY: the child has no other thread. `work` may allocate, as no thread of this test does meanwhile, and the
        // C library keeps its allocator usable in a child.
        unsafe { command.pre_exec(in_child) };
        // It waits for the child to become another program.
        let status = std::thread::spawn(move || command.status().unwrap().success());
        let mut is_right = [0];
        ready.read_exact(&mut is_right).unwrap();
        assert_eq!(is_right, [1], "in the child");
        Self { go_on, status: Some(status) }
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        self.go_on.write_all(&[1]).unwrap();
        assert!(self.status.take().unwrap().join().unwrap());
    }
}

#[test]
fn a_fork_leaves_pinned_pages_with_the_parent() {
    const NAME: &str = "a_fork_leaves_pinned_pages_with_the_parent";
    if !is_alone(&format!("kernel_pins::{NAME}")) {
        return;
    }
    let [fixed, free] = [(); 2].map(|()| small(ByteLen::mib(1)));
    let pins = KernelPins::default();
    let Some(_pinned) = pin(&pins, &fixed, NAME) else { return };
    let (Some(fixed_before), Some(free_before)) = (frames(&fixed, NAME), frames(&free, NAME))
    else {
        return;
    };
    let child = Child::fork(|| true);
    // A process that writes to a page of both gets a copy.
    touch(&fixed);
    touch(&free);
    assert!(frames(&fixed, NAME).unwrap() == fixed_before, "a device would write to the child's");
    let after = frames(&free, NAME).unwrap();
    assert!(after.iter().zip(&free_before).all(|(after, before)| after != before));
    drop(child);
}

#[test]
fn a_child_drops_pins_of_its_parent_without_effect_and_takes_its_own() {
    const NAME: &str = "a_child_drops_pins_of_its_parent_without_effect_and_takes_its_own";
    if !is_alone(&format!("kernel_pins::{NAME}")) {
        return;
    }
    let (mapping, pins) = (small(ByteLen::mib(1)), KernelPins::default());
    let Some(pinned) = pin(&pins, &mapping, NAME) else { return };
    let held = Arc::new(Mutex::new(Some((mapping, pins, pinned))));
    let theirs = held.clone();
    let child = Child::fork(move || {
        let (mapping, pins, pinned) = theirs.lock().unwrap().take().unwrap();
        drop(pinned);
        let own = pins.pin(&mapping, 0..page()).unwrap();
        let is_own = pinned_kib() == page() >> 10;
        drop(own);
        is_own && pinned_kib() == 0
    });
    assert_eq!(pinned_kib(), 1024);
    let (mapping, pins, pinned) = held.lock().unwrap().take().unwrap();
    // The child has the descriptor of the ring still, and keeps nothing pinned by it.
    drop(pinned);
    assert_eq!(pinned_kib(), 0);
    drop(pins.pin(&mapping, 0..page()).unwrap());
    drop(child);
}

#[test]
fn page_frames_are_the_kernel_s_and_hidden_without_the_right_to_see_them() {
    const NAME: &str = "page_frames_are_the_kernel_s_and_hidden_without_the_right_to_see_them";
    // Alone, because it gives a right up.
    if !is_alone(&format!("kernel_pins::{NAME}")) {
        return;
    }
    let mapping = small(ByteLen::new(16 * page()));
    if let Some(frames) = frames(&mapping, NAME) {
        let mut distinct = frames.clone();
        distinct.sort_unstable();
        distinct.dedup();
        assert_eq!((frames.len(), distinct.len()), (16, 16));
        let one = mapping.physical(5 * page() + 7..5 * page() + 8).unwrap();
        assert_eq!((one[0].clone(), one.len()), (frames[5]..frames[5] + page(), 1));
    }
    mapping.discard(3 * page()..4 * page()).unwrap();
    let absent = mapping.physical(0..16 * page());
    let mut sets = capabilities(None).unwrap();
    sets.effective.remove(CapabilitySet::SYS_ADMIN);
    set_capabilities(None, sets).unwrap();
    let hidden = mapping.physical(0..page()).unwrap_err();
    assert_eq!((hidden, hidden.kind()), (KernelPinError::Hidden, ErrorKind::PermissionDenied));
    assert!(hidden.to_string().contains("CAP_SYS_ADMIN"), "{hidden}");
    if absent != Err(KernelPinError::Hidden) {
        assert_eq!(absent, Err(KernelPinError::NotPresent { offset: 3 * page() }));
    }
}
