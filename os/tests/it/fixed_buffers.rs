//! Memory that the kernel pins for an io_uring.

use std::fs;

use rustix::process::{Resource, Rlimit, setrlimit};
use rustix::thread::{CapabilitySet, capabilities, set_capabilities};
use uzone_os::file_system::nameless_file;
use uzone_os::{Access, Anonymous, FixedBuffers, HugeAdvice, Mapping, MappingError, Sharing};
use uzone_pages::{ByteLen, ErrorKind};

use crate::{file_of, is_alone, page, read, skip, small_pages};

/// Makes a ring, or skips the case `name`.
fn ring(name: &str) -> Option<FixedBuffers> {
    match FixedBuffers::new() {
        Ok(ring) => Some(ring),
        Err(error)
            if matches!(error.kind(), ErrorKind::PermissionDenied | ErrorKind::NotSupported) =>
        {
            skip(name, &error.to_string());
            None
        }
        Err(error) => panic!("{error:?}"),
    }
}

/// Returns the KiB of this process that the kernel has pinned, by its own accounting.
fn pinned_kib() -> u64 {
    file_of(&fs::read_to_string("/proc/self/status").unwrap(), "VmPin:")
}

#[test]
fn registered_memory_is_pinned_until_the_registration_is_dropped() {
    const NAME: &str = "registered_memory_is_pinned_until_the_registration_is_dropped";
    // Alone, because it looks at the pinned memory of the whole process.
    if !is_alone(&format!("fixed_buffers::{NAME}")) {
        return;
    }
    let Some(mut ring) = ring(NAME) else { return };
    let small = Mapping::anonymous(ByteLen::mib(3), small_pages()).unwrap();
    let advised = Anonymous { huge: HugeAdvice::Advise, ..Anonymous::default() };
    let large = Mapping::anonymous(ByteLen::mib(4), advised).unwrap();
    let before = pinned_kib();
    for mapping in [&small, &large, &small] {
        mapping.write_at(5, &[7]).unwrap();
        let registered = ring.register(mapping).unwrap();
        assert_eq!(pinned_kib() - before, mapping.len().get() >> 10);
        assert_eq!(mapping.resident().unwrap(), mapping.len(), "all present");
        drop(registered);
        assert_eq!(pinned_kib(), before);
        assert_eq!(read(mapping, 5), [7]);
    }
}

#[test]
fn memory_that_cannot_be_written_is_not_registered() {
    let Some(mut ring) = ring("memory_that_cannot_be_written") else { return };
    let file = nameless_file(&std::env::temp_dir()).unwrap();
    file.set_len(page()).unwrap();
    let mapping =
        Mapping::file(file, 0, ByteLen::new(page()), Access::ReadOnly, Sharing::Shared).unwrap();
    let error = ring.register(&mapping).unwrap_err();
    assert!(matches!(error, MappingError::Pin { limit: None, .. }), "{error:?}");
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    let text = error.to_string();
    assert!(text.contains("map it writable"), "{text}");
}

#[test]
fn more_than_a_ring_has_buffers_for_is_refused_before_the_kernel_is_asked() {
    let Some(mut ring) = ring("more_than_a_ring_has_buffers_for") else { return };
    match Mapping::anonymous(ByteLen::tib(17), small_pages()) {
        Ok(mapping) => {
            let error = ring.register(&mapping).unwrap_err();
            assert!(matches!(error, MappingError::PinTooLong { .. }), "{error:?}");
            assert!(error.to_string().contains("at most 16 TiB"), "{error}");
        }
        Err(error) => skip("more_than_a_ring_has_buffers_for", &error.to_string()),
    }
}

#[test]
fn more_than_may_be_locked_is_refused_by_the_limit() {
    const NAME: &str = "more_than_may_be_locked_is_refused_by_the_limit";
    // Alone, because it limits the process.
    if !is_alone(&format!("fixed_buffers::{NAME}")) {
        return;
    }
    let limit = Rlimit { current: Some(64 << 10), maximum: Some(64 << 10) };
    setrlimit(Resource::Memlock, limit).unwrap();
    let mut sets = capabilities(None).unwrap();
    sets.effective.remove(CapabilitySet::IPC_LOCK);
    set_capabilities(None, sets).unwrap();
    let Some(mut ring) = ring(NAME) else { return };
    let mapping = Mapping::anonymous(ByteLen::mib(1), small_pages()).unwrap();
    let error = ring.register(&mapping).unwrap_err();
    assert!(
        matches!(error, MappingError::Pin { limit: Some(limit), .. } if limit == ByteLen::kib(64)),
        "{error:?}"
    );
    let text = error.to_string();
    assert!(text.contains("RLIMIT_MEMLOCK is 64 KiB") && text.contains("ulimit -l"), "{text}");
    let little = Mapping::anonymous(ByteLen::new(page()), small_pages()).unwrap();
    match ring.register(&little) {
        Ok(registered) => drop(registered),
        // Others of this user have as much pinned.
        Err(error) => {
            assert!(matches!(error, MappingError::Pin { limit: Some(_), .. }), "{error:?}");
        }
    }
}
