//! Huge pages: of a pool, advised and collapsed.

use uzone_os::{
    Access, AccessError, Anonymous, Exclusive, HugeAdvice, MapError, Mapped, Mapping, MappingError,
    Sharing, SystemRoot, hugepages, probe,
};
use uzone_pages::{ByteLen, PageSize};

use crate::needs::{Pool, pool_turn};
use crate::{is_alone, page, read, skip, vm_flags};

#[test]
fn a_pool_that_is_too_small_is_reported_with_its_numbers() {
    let _turn = pool_turn();
    let root = SystemRoot::host();
    let Some(pool) = hugepages::pool(&root, PageSize::MIB_2).unwrap() else {
        return skip("a_pool_that_is_too_small", "no pool of 2 MiB pages");
    };
    let more = pool.free - pool.reserved + pool.overcommit - pool.surplus + 800;
    let len = ByteLen::mib(2 * more);
    for error in [
        Mapping::hugetlb(len, PageSize::MIB_2).unwrap_err(),
        Mapping::memfd("pool", len, Some(PageSize::MIB_2)).unwrap_err(),
    ] {
        let MapError::HugePool { pages, free, total, .. } = error else {
            panic!("{error:?}");
        };
        assert_eq!(pages, more);
        assert_eq!((free, total), (pool.free - pool.reserved, pool.total));
        let text = error.to_string();
        assert!(text.starts_with(&format!("asked for {more} pages of 2 MiB, the pool has {free} free of {total}: `sysctl vm.nr_hugepages=")), "{text}");
    }
}

#[test]
fn pages_of_a_size_that_no_kernel_has_are_refused_by_their_size() {
    let odd = PageSize::try_from_bytes(128 << 40).unwrap();
    for error in [
        Mapping::hugetlb(ByteLen::mib(1), odd).unwrap_err(),
        Mapping::memfd("odd", ByteLen::mib(1), Some(PageSize::try_from_bytes(8192).unwrap()))
            .unwrap_err(),
    ] {
        assert!(
            matches!(
                error,
                MapError::HugeSize { .. } | MapError::TooLong { .. } | MapError::HugePool { .. }
            ),
            "{error:?}"
        );
    }
}

#[test]
fn huge_pages_of_the_pool_are_private_memory_and_memory_files() {
    let Some(_pool) = Pool::grow("huge_pages_of_the_pool", PageSize::MIB_2, 8) else { return };
    let mut memory = Exclusive::hugetlb(ByteLen::mib(3), PageSize::MIB_2).unwrap();
    assert_eq!(memory.resident().unwrap(), ByteLen::ZERO);
    assert_eq!(memory.populate(0..1).unwrap(), ByteLen::mib(2));
    assert_eq!(memory.huge_backed().unwrap(), ByteLen::mib(2));
    assert!(memory.as_bytes().iter().all(|&byte| byte == 0));
    assert!(matches!(
        memory.discard(0..4096),
        Err(MappingError::Access(AccessError::CutsPage { .. }))
    ));
    // The whole of it is lent, as bytes and as values, whose bytes stay.
    memory.as_bytes_mut().fill(0xa5);
    assert_eq!(memory.as_bytes().len(), 3 << 20);
    assert_eq!(memory.page_size().bytes(), 2 << 20);
    let values = Mapped::<u64>::try_new(memory, 100).unwrap();
    assert_eq!(values[99], 0xa5a5_a5a5_a5a5_a5a5);
    assert_eq!(values.huge_backed().unwrap(), ByteLen::mib(4));
    let mapping = values.into_exclusive().into_mapping();
    assert!(mapping.fd().is_none());
    let shared = Mapping::memfd("huge", ByteLen::mib(4), Some(PageSize::MIB_2)).unwrap();
    shared.write_at(3, b"shared").unwrap();
    let fd = shared.fd().unwrap().try_clone_to_owned().unwrap();
    let other = Mapping::file(fd, 0, ByteLen::mib(4), Access::ReadOnly, Sharing::Shared).unwrap();
    assert_eq!(other.page_size().bytes(), 2 << 20);
    assert_eq!(&read(&other, 3), b"shared");
    let fd = shared.fd().unwrap().try_clone_to_owned().unwrap();
    let error = Mapping::file(fd, 4096, ByteLen::mib(1), Access::ReadOnly, Sharing::Shared);
    assert!(matches!(error, Err(MapError::CutsPage { .. })), "{error:?}");
}

#[test]
fn a_pool_that_was_raised_is_as_before_also_after_a_panic() {
    let size = PageSize::MIB_2;
    let total = || hugepages::pool(&SystemRoot::host(), size).unwrap().unwrap().total;
    if hugepages::pool(&SystemRoot::host(), size).unwrap().is_none() {
        return skip("a_pool_that_was_raised", "no pool of 2 MiB pages");
    }
    let turn = pool_turn();
    let before = total();
    drop(turn);
    let caught = std::panic::catch_unwind(|| {
        let pool = Pool::try_grow(size, 2);
        let pool = pool.unwrap();
        assert!(pool.added == 0, "as the test wants");
    });
    assert!(caught.is_err());
    let _turn = pool_turn();
    assert_eq!(total(), before);
}

#[test]
fn huge_pages_are_there_where_they_were_advised_or_collapsed() {
    let Some(thp) = hugepages::thp(&SystemRoot::host()).unwrap() else {
        return skip("huge_pages_are_there", "the kernel has no transparent huge pages");
    };
    let huge = thp.pmd_size;
    // A memory file takes the advice after it was made.
    Mapping::memfd("advised", huge, None).unwrap().advise_huge().unwrap();
    let how = Anonymous { huge: HugeAdvice::Advise, align: Some(huge), ..Anonymous::default() };
    let two = 2 * huge.get();
    let mut memory = Exclusive::anonymous(ByteLen::new(two), how).unwrap();
    memory.populate(0..two).unwrap();
    if thp.enabled == "never" || memory.huge_backed().unwrap().get() != two {
        return skip(
            "huge_pages_are_there",
            "no huge pages by advice: set enabled to madvise, or free memory",
        );
    }
    memory.discard(huge.get()..two).unwrap();
    assert_eq!(memory.huge_backed().unwrap(), huge);
    assert!(matches!(
        memory.discard(1..huge.get()),
        Err(MappingError::Access(AccessError::CutsPage { .. }))
    ));

    let small =
        Mapping::anonymous(ByteLen::new(two), Anonymous { huge: HugeAdvice::Default, ..how })
            .unwrap();
    small.write_at(5, &[5]).unwrap();
    assert!(small.collapse(0..huge.get() - 1 - page()).unwrap().is_none());
    if !probe::madvise_collapse_is_known() {
        return skip("collapse", "MADV_COLLAPSE needs Linux 6.1");
    }
    match small.collapse(0..two).unwrap() {
        None => assert_eq!(small.huge_backed().unwrap().get(), two),
        Some(cause) => skip("collapse", &cause.to_string()),
    }
    assert_eq!(read(&small, 5), [5]);
}

#[test]
fn a_process_whose_huge_pages_were_switched_off_is_known_and_collapses_none() {
    let name = "huge::a_process_whose_huge_pages_were_switched_off_is_known_and_collapses_none";
    if !is_alone(name) {
        return;
    }
    if rustix::thread::disable_transparent_huge_pages(true).is_err() {
        return skip(name, "no PR_SET_THP_DISABLE");
    }
    assert!(probe::thp_is_switched_off());
    let mapping = Mapping::anonymous(ByteLen::mib(8), Anonymous::default()).unwrap();
    if matches!(hugepages::thp(&SystemRoot::host()), Ok(None)) {
        return skip(name, "the kernel has no transparent huge pages");
    }
    let error = mapping.collapse(0..8 << 20).unwrap_err();
    let MappingError::Advice { cause, .. } = &error else { panic!("{error:?}") };
    assert!(cause.to_string().contains("PR_SET_THP_DISABLE"), "{cause}");
    rustix::thread::disable_transparent_huge_pages(false).unwrap();
    assert!(!probe::thp_is_switched_off());
}

#[test]
fn memory_that_is_never_huge_is_so_to_the_kernel_however_it_was_asked_for() {
    let len = ByteLen::mib(8);
    let never = Anonymous { huge: HugeAdvice::Never, ..Anonymous::default() };
    let memory = Mapping::anonymous(len, never).unwrap();
    if matches!(hugepages::thp(&SystemRoot::host()), Ok(None)) {
        return skip("memory_that_is_never_huge", "the kernel has no transparent huge pages");
    }
    let Some(flags) = vm_flags(&memory) else {
        return skip("memory_that_is_never_huge", "no VmFlags in /proc/self/smaps");
    };
    assert!(flags.split(' ').any(|flag| flag == "nh"), "{flags}");
}
