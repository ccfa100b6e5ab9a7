//! Memory that the caller mapped, keeps, and lends to a mapping.

use std::ptr::{self, NonNull};

use uzone_os::{Access, Exclusive, Exclusivity, MapError, Mapping, probe};
use uzone_pages::{ByteLen, PageSize};

use crate::{page, read};

/// Anonymous memory of this test, unmapped by it.
struct Own {
    start: NonNull<u8>,
    len: usize,
}

impl Own {
    fn new(pages: u64) -> Self {
        let len = usize::try_from(pages * page()).unwrap();
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: mmap(2) with a null address and no `MAP_FIXED` makes new addresses ours and
        // touches no memory that exists.
        let start = unsafe { libc::mmap(ptr::null_mut(), len, prot, flags, -1, 0) };
        assert_ne!(start, libc::MAP_FAILED);
        Self { start: NonNull::new(start.cast()).unwrap(), len }
    }

    fn adopt(&self) -> Mapping {
        let len = ByteLen::new(self.len as u64);
        // SAFETY: `adopt` wants the memory mapped, initialised and not accessed otherwise until the mapping
        // is dropped. It is anonymous, each case drops the mapping before `self`, and nothing but `byte`
        // looks at it, which no case calls meanwhile.
        unsafe { Mapping::adopt(self.start, len, probe::page_size()) }.unwrap()
    }

    /// Returns a byte. No mapping of the memory may be alive.
    fn byte(&self, offset: usize) -> u8 {
        assert!(offset < self.len);
        // SAFETY: `add` wants to stay in the allocation, which has `len` bytes.
        let at = unsafe { self.start.add(offset) };
        // SAFETY: `read` wants an initialised byte that is not written meanwhile: the kernel or the dropped
        // mapping wrote it, and this thread is the only one to know the memory.
        unsafe { at.read() }
    }

    /// Returns whether the kernel still has all of it mapped.
    fn is_mapped(&self) -> bool {
        let mut present = vec![0_u8; self.len.div_ceil(usize::try_from(page()).unwrap())];
        // SAFETY: mincore(2) writes a byte for each page of the range to `present`, which has as
        // many; it touches no byte of the range.
        unsafe { libc::mincore(self.start.as_ptr().cast(), self.len, present.as_mut_ptr()) == 0 }
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        // SAFETY: munmap(2) ends the life of memory that `new` mapped and that is not borrowed.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
    }
}

#[test]
fn adopted_memory_is_read_and_written_and_outlives_its_mapping() {
    let own = Own::new(3);
    let mapping = own.adopt();
    assert_eq!((mapping.addr().get(), mapping.len().get()), (own.start.addr().get(), 3 * page()));
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
    assert!(own.is_mapped());
    assert_eq!(own.byte(usize::try_from(page()).unwrap() - 2), b'o');
    // And it can be adopted again.
    let again = own.adopt();
    assert_eq!(&read(&again, page() - 2), b"over");
    again.discard(0..page()).unwrap();
    assert_eq!(&read(&again, page() - 2), b"\0\0er");
}

#[test]
fn parts_of_adopted_memory_join_again_and_leave_it_mapped() {
    let own = Own::new(4);
    let (front, behind) = own.adopt().cut(ByteLen::new(page())).unwrap();
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
    assert!(own.is_mapped());
    assert_eq!(own.byte(7), 7);
}

#[test]
fn adopted_memory_is_never_exclusive() {
    let own = Own::new(1);
    let refused = Exclusive::try_from_mapping(own.adopt()).unwrap_err();
    assert!(refused.value.is_adopted());
    drop(refused);
    assert!(own.is_mapped());
    // Memory that we mapped ourselves is unmapped, as before.
    assert!(!Mapping::anonymous(ByteLen::mib(1), crate::small_pages()).unwrap().is_adopted());
}

#[test]
fn what_is_no_range_of_whole_pages_is_not_adopted() {
    let own = Own::new(2);
    let adopt = |start: NonNull<u8>, len_bytes: u64, page: PageSize| {
        // SAFETY: every call here is refused before the memory counts, which is what is tested.
        unsafe { Mapping::adopt(start, ByteLen::new(len_bytes), page) }.unwrap_err()
    };
    let host = probe::page_size();
    let huge = PageSize::try_from_bytes(1 << 30).unwrap();
    let inside = own.start.map_addr(|addr| addr.saturating_add(8));
    // No memory is there; the addresses are only calculated with.
    let last = NonNull::new(ptr::without_provenance_mut::<u8>(usize::MAX - 0x3fff_ffff)).unwrap();
    assert!(matches!(adopt(own.start, 0, host), MapError::Empty));
    for len_bytes in [u64::MAX, 1 << 63] {
        let error = adopt(own.start, len_bytes, host);
        assert!(matches!(error, MapError::TooLong { .. }), "{error}");
    }
    for (start, len_bytes, page) in [
        (inside, page(), host),
        (own.start, page() + 8, host),
        (own.start, 1, host),
        (own.start, page(), huge),
    ] {
        let error = adopt(start, len_bytes, page);
        assert!(matches!(error, MapError::CutsPage { .. }), "{error}");
    }
    for len_bytes in [1 << 30, 2 << 30] {
        let error = adopt(last, len_bytes, huge);
        assert!(matches!(error, MapError::AdoptedWraps { .. }), "{error}");
    }
    if host > PageSize::KIB_4 {
        let error = adopt(own.start, page(), PageSize::KIB_4);
        assert!(matches!(error, MapError::AdoptedPage { .. }), "{error}");
    }
}
