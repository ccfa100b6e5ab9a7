//! Memory that the caller mapped, keeps, and lends to a mapping.

use std::ptr::{self, NonNull};

use uzone_os::{Access, Exclusive, Exclusivity, MapError, Mapping, probe};
use uzone_pages::{ByteLen, PageSize};

use crate::{page, read, small_pages};

/// Memory of this test, unmapped by it.
fn owner(pages: u64) -> Mapping {
    Mapping::anonymous(ByteLen::new(pages * page()), small_pages()).unwrap()
}

fn start_of(owner: &Mapping) -> NonNull<u8> {
    NonNull::new(ptr::with_exposed_provenance_mut(owner.addr().get())).unwrap()
}

fn adopt(owner: &Mapping) -> Mapping {
    // SAFETY: `adopt` wants the memory mapped, initialised, and reached by nothing but mappings
    // until the new one is dropped. It is anonymous and has no other user, and each case drops the
    // mapping before `owner`.
    unsafe { Mapping::adopt(start_of(owner), owner.len(), probe::page_size()) }.unwrap()
}

/// Returns whether the kernel still has all of it mapped.
fn is_mapped(owner: &Mapping) -> bool {
    owner.populate(0..owner.len().get()).is_ok()
}

#[test]
fn adopted_memory_is_read_and_written_and_outlives_its_mapping() {
    let own = owner(3);
    let mapping = adopt(&own);
    assert_eq!((mapping.addr(), mapping.len()), (own.addr(), own.len()));
    assert!(mapping.is_adopted());
    assert_eq!(mapping.access(), Access::ReadWrite);
    assert!(mapping.fd().is_none() && mapping.file_id().is_none());
    assert!(mapping.file_offset().is_none());
    mapping.write_at(page() - 2, b"over").unwrap();
    assert!(mapping.write_at(3 * page() - 1, b"xy").is_err());
    assert_eq!(&read(&mapping, page() - 2), b"over");
    mapping.populate(0..3 * page()).unwrap();
    assert_eq!(mapping.resident().unwrap().get(), 3 * page());
    std::thread::spawn(move || drop(mapping)).join().unwrap();
    assert!(is_mapped(&own));
    assert_eq!(&read(&own, page() - 2), b"over");
    // And it can be adopted again.
    let again = adopt(&own);
    assert_eq!(&read(&again, page() - 2), b"over");
    again.discard(0..page()).unwrap();
    assert_eq!(&read(&again, page() - 2), b"\0\0er");
}

#[test]
fn parts_of_adopted_memory_join_again_and_leave_it_mapped() {
    let own = owner(4);
    let (front, behind) = adopt(&own).cut(ByteLen::new(page())).unwrap();
    assert!(front.is_adopted() && behind.is_adopted());
    behind.write_at(0, b"part").unwrap();
    let whole = front.join(behind).unwrap();
    assert_eq!(&read(&whole, page()), b"part");
    let (front, behind) = whole.cut(ByteLen::new(3 * page())).unwrap();
    // SAFETY: the memory is this test's, and nothing else looks at it before `exclusive` is dropped.
    let promise = unsafe { Exclusivity::assert(&front) };
    let mut exclusive = Exclusive::try_from_promised(front, promise).unwrap();
    exclusive.as_bytes_mut()[7] = 7;
    drop((exclusive, behind));
    assert!(is_mapped(&own));
    assert_eq!(read(&own, 7), [7]);
}

#[test]
fn adopted_memory_is_never_exclusive() {
    let own = owner(1);
    let refused = Exclusive::try_from_mapping(adopt(&own)).unwrap_err();
    assert!(refused.value.is_adopted());
    drop(refused);
    assert!(is_mapped(&own));
    // Memory that we mapped ourselves is unmapped, as before.
    assert!(!Mapping::anonymous(ByteLen::mib(1), small_pages()).unwrap().is_adopted());
}

#[test]
fn what_is_no_range_of_whole_pages_is_not_adopted() {
    let own = owner(2);
    let adopt = |start: NonNull<u8>, len_bytes: u64, page: PageSize| {
        // SAFETY: every call here is refused before the memory counts, which the tests check.
        unsafe { Mapping::adopt(start, ByteLen::new(len_bytes), page) }.unwrap_err()
    };
    let host = probe::page_size();
    let huge = PageSize::try_from_bytes(1 << 30).unwrap();
    let start = start_of(&own);
    let inside = start.map_addr(|addr| addr.saturating_add(8));
    // No memory is there; the addresses are only calculated with.
    let last = NonNull::new(ptr::without_provenance_mut::<u8>(usize::MAX - 0x3fff_ffff)).unwrap();
    assert!(matches!(adopt(start, 0, host), MapError::Empty));
    for len_bytes in [u64::MAX, 1 << 63] {
        let error = adopt(start, len_bytes, host);
        assert!(matches!(error, MapError::TooLong { .. }), "{error}");
    }
    for (from, len_bytes, page) in
        [(inside, page(), host), (start, page() + 8, host), (start, 1, host), (start, page(), huge)]
    {
        let error = adopt(from, len_bytes, page);
        assert!(matches!(error, MapError::CutsPage { .. }), "{error}");
    }
    for len_bytes in [1 << 30, 2 << 30] {
        let error = adopt(last, len_bytes, huge);
        assert!(matches!(error, MapError::AdoptedWraps { .. }), "{error}");
    }
    if host > PageSize::KIB_4 {
        let error = adopt(start, page(), PageSize::KIB_4);
        assert!(matches!(error, MapError::AdoptedPage { .. }), "{error}");
    }
}
