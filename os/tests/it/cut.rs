//! One mapping as two, two as one again, and promises about parts of it.

use std::ffi::c_void;
use std::fs::OpenOptions;

use uzone_os::{
    Access, AccessError, Exclusive, Exclusivity, Mapped, Mapping, MappingError, Sharing,
};
use uzone_pages::{ByteLen, PageSize};

use crate::needs::Pool;
use crate::{is_alone, page, read, small_pages};

fn anonymous(pages: u64) -> Mapping {
    Mapping::anonymous(ByteLen::new(pages * page()), small_pages()).unwrap()
}

fn pages(count: u64) -> ByteLen {
    ByteLen::new(count * page())
}

/// Returns whether the kernel has anything mapped at every page of the range.
fn is_mapped(start: usize, count: u64) -> bool {
    let mut present = vec![0_u8; usize::try_from(count).unwrap()];
    let len = usize::try_from(count * page()).unwrap();
    let address = std::ptr::without_provenance_mut::<c_void>(start);
    // SAFETY: mincore(2) writes a byte for each page of the range to `present`, which has as many; it
    // touches no byte of the range.
    unsafe { libc::mincore(address, len, present.as_mut_ptr()) == 0 }
}

#[test]
fn each_part_of_a_cut_mapping_has_its_own_bytes_and_unmaps_only_those() {
    // Alone: another case could map something where this one has unmapped.
    if !is_alone("cut::each_part_of_a_cut_mapping_has_its_own_bytes_and_unmaps_only_those") {
        return;
    }
    let whole = anonymous(9);
    let start = whole.addr().get();
    let step = usize::try_from(page()).unwrap();
    whole.write_at(3 * page() - 2, b"over").unwrap();
    let (front, behind) = whole.cut(pages(3)).unwrap();
    assert_eq!((front.addr().get(), front.len()), (start, pages(3)));
    assert_eq!((behind.addr().get(), behind.len()), (start + 3 * step, pages(6)));
    assert_eq!((&read(&front, 3 * page() - 2), &read(&behind, 0)), (b"ov", b"er"));
    assert!(front.read_at(3 * page() - 1, &mut [0; 2]).is_err(), "the next byte is the other's");
    assert!(front.write_at(3 * page(), b"x").is_err());
    assert!(front.populate(0..4 * page()).is_err());
    let (middle, last) = behind.cut(pages(2)).unwrap();
    drop(middle);
    assert!(is_mapped(start, 3) && is_mapped(start + 5 * step, 4));
    assert!(!is_mapped(start + 3 * step, 1) && !is_mapped(start + 4 * step, 1));
    front.write_at(0, b"alive").unwrap();
    last.write_at(4 * page() - 5, b"alive").unwrap();
    drop(front);
    assert!(!is_mapped(start, 1) && is_mapped(start + 5 * step, 4));
    drop(last);
    assert!(!is_mapped(start + 5 * step, 1));
}

#[test]
fn parts_that_are_joined_are_what_was_cut() {
    // Alone: another case could map something where this one has unmapped.
    if !is_alone("cut::parts_that_are_joined_are_what_was_cut") {
        return;
    }
    for order in [[0, 1], [1, 0]] {
        // A length inside of a page: the last part has it.
        let whole = Mapping::anonymous(ByteLen::new(8 * page() + 5), small_pages()).unwrap();
        let (addr, len) = (whole.addr(), whole.len());
        let (front, behind) = whole.cut(pages(2)).unwrap();
        let (middle, last) = behind.cut(pages(5)).unwrap();
        assert_eq!(last.len(), ByteLen::new(page() + 5));
        middle.write_at(7, b"kept").unwrap();
        // Whichever two are joined first.
        let joined = if order == [0, 1] {
            front.join(middle).unwrap().join(last).unwrap()
        } else {
            front.join(middle.join(last).unwrap()).unwrap()
        };
        assert_eq!((joined.addr(), joined.len()), (addr, len));
        assert_eq!(&read(&joined, 2 * page() + 7), b"kept");
        joined.write_at(8 * page() + 4, b"x").unwrap();
        assert!(joined.write_at(8 * page() + 5, b"x").is_err());
        drop(joined);
        assert!(!is_mapped(addr.get(), 1), "all of it is unmapped");
    }
}

#[test]
fn a_cut_that_leaves_nothing_or_half_a_page_is_refused_and_gives_the_mapping_back() {
    let mut whole = anonymous(4);
    let len_bytes = 4 * page();
    for (at, expected) in [
        (0, AccessError::Empty { start: 0, end: 0 }),
        (len_bytes, AccessError::Empty { start: len_bytes, end: len_bytes }),
        (5 * page(), AccessError::Beyond { start: 0, end: 5 * page(), len_bytes }),
        (u64::MAX, AccessError::Beyond { start: 0, end: u64::MAX, len_bytes }),
        (page() + 1, AccessError::CutsPage { start: 0, end: page() + 1, page: whole.page_size() }),
    ] {
        let refused = whole.cut(ByteLen::new(at)).unwrap_err();
        assert!(matches!(refused.cause, MappingError::Access(cause) if cause == expected));
        whole = *refused.value;
        assert_eq!(whole.len(), pages(4));
    }
    assert!(whole.cut(pages(1)).is_ok());
}

#[test]
fn mappings_that_were_never_one_are_not_joined() {
    let (front, behind) = anonymous(4).cut(pages(1)).unwrap();
    let (middle, last) = behind.cut(pages(1)).unwrap();
    // Of one mapping, but the wrong way round or with a gap.
    let refused = front.join(last).unwrap_err();
    assert!(matches!(refused.cause, MappingError::NotNeighbours { len, .. } if len == pages(1)));
    let (front, last) = *refused.value;
    let refused = middle.join(front).unwrap_err();
    assert!(matches!(refused.cause, MappingError::NotNeighbours { .. }));
    let (middle, front) = *refused.value;
    // A mapping that comes to lie in the place of a part is another one, wherever that is.
    let refused = last.join(anonymous(1)).unwrap_err();
    assert!(matches!(refused.cause, MappingError::NotNeighbours { .. }));
    let last = refused.value.0;
    drop(middle);
    let stranger = anonymous(1);
    let refused = front.join(stranger).unwrap_err();
    assert!(matches!(refused.cause, MappingError::NotNeighbours { .. }), "{}", refused.cause);
    drop(last);
}

#[test]
fn parts_of_a_file_know_their_offset_and_share_its_descriptor() {
    let whole = Mapping::memfd("cut", pages(6), None).unwrap();
    let id = whole.file_id();
    let (front, behind) = whole.cut(pages(2)).unwrap();
    assert_eq!((front.file_offset(), behind.file_offset()), (Some(0), Some(2 * page())));
    assert_eq!((front.file_id(), behind.file_id()), (id, id));
    let file = behind.fd().unwrap().try_clone_to_owned().unwrap();
    drop(front);
    // The descriptor is the other part's as well.
    assert!(behind.fd().is_some() && behind.file_id() == id);
    behind.write_at(1, b"through").unwrap();
    let again =
        Mapping::file(file, 2 * page(), pages(1), Access::ReadOnly, Sharing::Shared).unwrap();
    assert_eq!(&read(&again, 1), b"through");
    let (first, second) = behind.cut(pages(1)).unwrap();
    assert_eq!(second.file_offset(), Some(3 * page()));
    assert_eq!(first.join(second).unwrap().file_offset(), Some(2 * page()));
}

#[test]
fn a_cut_inside_a_huge_page_is_refused_with_its_size() {
    let size = PageSize::MIB_2;
    let Some(pool) = Pool::grow("a_cut_inside_a_huge_page_is_refused", size, 4) else { return };
    for mapping in [
        Mapping::hugetlb(ByteLen::mib(4), size).unwrap(),
        Mapping::memfd("cut", ByteLen::mib(4), Some(size)).unwrap(),
    ] {
        let refused = mapping.cut(pages(1)).unwrap_err();
        let cut = AccessError::CutsPage { start: 0, end: page(), page: size };
        assert!(matches!(refused.cause, MappingError::Access(cause) if cause == cut));
        let (front, behind) = refused.value.cut(ByteLen::mib(2)).unwrap();
        front.write_at(0, b"front").unwrap();
        behind.write_at(0, b"behind").unwrap();
        drop(front);
        assert_eq!(&read(&behind, 0), b"behind");
    }
    drop(pool);
}

#[test]
fn the_front_of_anonymous_memory_is_exclusive_and_comes_back() {
    let (front, behind) = anonymous(4).cut(pages(1)).unwrap();
    let exclusive = Exclusive::try_from_mapping(front).unwrap();
    assert!(exclusive.is_private());
    let mut values = Mapped::<u64>::try_new(exclusive, 3).unwrap();
    values[2] = u64::from_ne_bytes(*b"in front");
    behind.write_at(0, b"behind").unwrap();
    let front = values.into_exclusive().into_mapping();
    let whole = front.join(behind).unwrap();
    assert_eq!(&read(&whole, 16), b"in front");
}

#[test]
fn a_promise_is_good_for_its_mapping_and_the_parts_of_it() {
    let whole = Mapping::memfd("promise", pages(4), None).unwrap();
    // SAFETY: the descriptor is not handed out and the memory is given to no other process; this test reads
    // it through the parts of this mapping alone.
    let promise = unsafe { Exclusivity::assert(&whole) };
    let whole = Exclusive::try_from_mapping(whole).unwrap_err().value;
    let (front, behind) = whole.cut(pages(1)).unwrap();
    let mut exclusive = Exclusive::try_from_promised(front, promise).unwrap();
    assert!(!exclusive.is_private());
    exclusive.as_bytes_mut()[..4].copy_from_slice(b"ours");
    behind.write_at(0, b"shared").unwrap();
    let whole = exclusive.into_mapping().join(behind).unwrap();
    assert_eq!(&read(&whole, 0), b"ours");

    let other = Mapping::memfd("other", pages(1), None).unwrap();
    let refused = Exclusive::try_from_promised(other, promise).unwrap_err();
    assert!(matches!(refused.cause, MappingError::AnotherMapping));
    // Not even for another mapping of the same file.
    let file = whole.fd().unwrap().try_clone_to_owned().unwrap();
    drop(whole);
    let again = Mapping::file(file, 0, pages(4), Access::ReadWrite, Sharing::Shared).unwrap();
    let refused = Exclusive::try_from_promised(again, promise).unwrap_err();
    assert!(matches!(refused.cause, MappingError::AnotherMapping));
}

#[test]
fn a_promise_makes_no_read_only_mapping_exclusive() {
    let path = std::env::temp_dir().join(format!("uzone-os-live-{}-promise", std::process::id()));
    std::fs::write(&path, vec![1; usize::try_from(page()).unwrap()]).unwrap();
    let file = OpenOptions::new().read(true).open(&path).unwrap();
    let mapping = Mapping::file(file, 0, pages(1), Access::ReadOnly, Sharing::Shared).unwrap();
    std::fs::remove_file(&path).unwrap();
    // SAFETY: the file has neither a name nor another descriptor.
    let promise = unsafe { Exclusivity::assert(&mapping) };
    let refused = Exclusive::try_from_promised(mapping, promise).unwrap_err();
    assert!(matches!(refused.cause, MappingError::ReadOnly));
    assert_eq!(refused.value.len(), pages(1));
}

#[test]
fn exclusive_memory_is_lent_in_parts_and_joined_again() {
    let whole = Exclusive::anonymous(pages(3), small_pages()).unwrap();
    let start = whole.addr();
    let (mut front, mut behind) = whole.cut(pages(1)).unwrap();
    front.as_bytes_mut().fill(1);
    behind.as_bytes_mut().fill(2);
    assert!(front.as_bytes().iter().all(|byte| *byte == 1));
    let mut whole = front.join(behind).unwrap();
    assert_eq!((whole.addr(), whole.len()), (start, pages(3)));
    let page = usize::try_from(page()).unwrap();
    let (first, rest) = whole.as_bytes_mut().split_at(page);
    assert!(first.iter().all(|byte| *byte == 1) && rest.iter().all(|byte| *byte == 2));
    let refused = whole.cut(ByteLen::new(1)).unwrap_err();
    let whole = Exclusive::try_from_mapping(*refused.value).unwrap();
    let stranger = Exclusive::anonymous(pages(1), small_pages()).unwrap();
    assert!(matches!(whole.join(stranger).unwrap_err().cause, MappingError::NotNeighbours { .. }));
}

#[test]
fn a_file_that_cannot_be_mapped_takes_no_addresses_with_it() {
    let path = std::env::temp_dir().join(format!("uzone-not-mapped-{}", std::process::id()));
    let len = ByteLen::mib(4);
    std::fs::write(&path, vec![7; 4 << 20]).unwrap();
    for offset in [0, page()] {
        let file = std::fs::File::open(&path).unwrap();
        let len = ByteLen::new(len.get() - offset);
        let align = ByteLen::mib(2);
        let (write, shared) = (Access::ReadWrite, Sharing::Shared);
        Mapping::file_aligned(file, offset, len, write, shared, align).unwrap_err();
        let file = std::fs::File::open(&path).unwrap();
        let mapping =
            Mapping::file_aligned(file, offset, len, Access::ReadOnly, shared, align).unwrap();
        assert_eq!((mapping.addr().get() as u64 - offset) % align.get(), 0);
        assert_eq!(read(&mapping, len.get() - 1), [7]);
    }
    std::fs::remove_file(&path).unwrap();
    assert_eq!(uzone_os::leaked(), ByteLen::ZERO);
}
