//! Making memory present and counting present memory.

use std::time::Instant;

use uzone_os::{AccessError, Exclusive, Mapping, MappingError, populate_slice};
use uzone_pages::ByteLen;

use crate::{page, read, small_pages};

#[test]
fn populating_makes_exactly_the_range_present() {
    let pages = 300;
    let mapping = Mapping::anonymous(ByteLen::new(pages * page()), small_pages()).unwrap();
    assert_eq!(mapping.resident().unwrap(), ByteLen::ZERO);
    let done = mapping.populate(10 * page()..60 * page()).unwrap();
    assert_eq!(done.get(), 50 * page());
    assert_eq!(mapping.resident().unwrap().get(), 50 * page());
    assert_eq!(mapping.resident_in(0..10 * page()).unwrap(), ByteLen::ZERO);
    assert_eq!(mapping.resident_in(60 * page()..pages * page()).unwrap(), ByteLen::ZERO);
    // A byte makes its page present.
    let done = mapping.populate(100 * page() + 1..100 * page() + 2).unwrap();
    assert_eq!(done.get(), page());
    assert_eq!(mapping.resident().unwrap().get(), 51 * page());
    // Again, it changes nothing.
    mapping.write_at(10 * page(), b"kept").unwrap();
    mapping.populate(0..pages * page()).unwrap();
    assert_eq!(&read(&mapping, 10 * page()), b"kept");
    mapping.discard(0..pages * page()).unwrap();
    assert_eq!(mapping.resident().unwrap(), ByteLen::ZERO);
    let backwards = std::ops::Range { start: 5, end: 4 };
    for range in [0..0, backwards, 0..pages * page() + 1, u64::MAX - 1..u64::MAX] {
        assert!(matches!(mapping.populate(range.clone()), Err(MappingError::Access(_))));
        assert!(mapping.resident_in(range).is_err());
    }
}

#[test]
fn reading_untouched_memory_does_not_make_it_resident() {
    let mapping = Mapping::anonymous(ByteLen::new(8 * page()), small_pages()).unwrap();
    let mut bytes = vec![1; 8 * usize::try_from(page()).unwrap()];
    mapping.read_at(0, &mut bytes).unwrap();
    assert!(bytes.iter().all(|&byte| byte == 0));
    assert_eq!(mapping.resident().unwrap(), ByteLen::ZERO);
}

#[test]
fn a_sparse_mapping_is_counted_without_walking_it() {
    let mapping = Mapping::anonymous(ByteLen::gib(32), small_pages()).unwrap();
    for gib in 0..32 {
        mapping.write_at((gib << 30) + 5 * page(), &[1]).unwrap();
    }
    let start = Instant::now();
    assert_eq!(mapping.resident().unwrap().get(), 32 * page());
    // Reading an entry for each of its 8 million pages takes longer than this, on any machine.
    eprintln!("32 GiB with 32 pages present: {:?}", start.elapsed());
    assert_eq!(mapping.resident_in(1 << 30..2 << 30).unwrap().get(), page());
}

#[test]
fn a_slice_is_made_present_with_the_pages_it_lies_in_and_no_others() {
    let mut memory = Exclusive::anonymous(ByteLen::new(64 * page()), small_pages()).unwrap();
    let size = usize::try_from(page()).unwrap();
    populate_slice(&mut memory.as_bytes_mut()[10 * size..20 * size]).unwrap();
    assert_eq!(memory.resident().unwrap().get(), 10 * page());
    assert_eq!(memory.resident_in(10 * page()..20 * page()).unwrap().get(), 10 * page());
    // Two bytes on both sides of a page's end.
    populate_slice(&mut memory.as_bytes_mut()[31 * size - 1..31 * size + 1]).unwrap();
    assert_eq!(memory.resident_in(30 * page()..32 * page()).unwrap().get(), 2 * page());
    assert_eq!(memory.resident().unwrap().get(), 12 * page());
    assert!(memory.as_bytes().iter().all(|&byte| byte == 0));
    assert!(matches!(
        populate_slice(&mut []),
        Err(MappingError::Access(AccessError::Empty { .. }))
    ));
    // Any memory of ours will do, and keeps its bytes.
    let mut heap = vec![7_u8; 3];
    populate_slice(&mut heap).unwrap();
    assert_eq!(heap, [7; 3]);
}
