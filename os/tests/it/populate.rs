//! Making memory present and counting what is.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use uzone_os::{
    AccessError, Anonymous, Exclusive, HugeAdvice, Mapping, MappingError, PopulateHow, Populated,
    populate_slice,
};
use uzone_pages::ByteLen;

use crate::{by, page, read, small_pages, whole};

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
fn threads_populate_exactly_the_range_and_report_each_step_in_order() {
    let len: u64 = 200 << 20;
    let mapping = Mapping::anonymous(
        ByteLen::new(len + page()),
        Anonymous { huge: HugeAdvice::Advise, ..Anonymous::default() },
    )
    .unwrap();
    for threads in [1, 2, 5, 64] {
        let mut last = 0;
        let populated = mapping
            .populate_with(
                0..len,
                by(threads),
                |done, of| {
                    assert!(done.get() > last);
                    assert_eq!(of.get(), len);
                    last = done.get();
                },
                &AtomicBool::new(false),
            )
            .unwrap();
        assert_eq!(populated, whole(ByteLen::new(len)));
        assert_eq!(last, len);
        assert_eq!(mapping.resident_in(0..len).unwrap().get(), len);
        assert_eq!(mapping.resident_in(len..len + page()).unwrap(), ByteLen::ZERO);
        mapping.discard(0..len + page()).unwrap();
    }
}

#[test]
fn a_cancelled_request_says_how_much_is_present() {
    let len: u64 = 1 << 30;
    let mapping = Mapping::anonymous(
        ByteLen::new(len),
        Anonymous { huge: HugeAdvice::Advise, ..Anonymous::default() },
    )
    .unwrap();
    let cancel = AtomicBool::new(false);
    let calls = AtomicU64::new(0);
    let populated = mapping
        .populate_with(
            0..len,
            by(2),
            |_, _| {
                calls.fetch_add(1, Ordering::Relaxed);
                cancel.store(true, Ordering::Relaxed);
            },
            &cancel,
        )
        .unwrap();
    let Populated { done, of, is_expired: false } = populated else {
        panic!("{populated:?} after {calls:?} calls");
    };
    assert_eq!(of.get(), len);
    assert!(!done.is_zero() && done < of);
    assert_eq!(mapping.resident().unwrap(), done);
    assert_eq!(mapping.resident_in(0..done.get()).unwrap(), done);

    // Before it began, nothing is done.
    let other = Mapping::anonymous(ByteLen::mib(1), small_pages()).unwrap();
    let populated = other.populate_with(0..1 << 20, by(2), |_, _| (), &cancel).unwrap();
    assert_eq!(
        populated,
        Populated { done: ByteLen::ZERO, of: ByteLen::mib(1), is_expired: false }
    );
    assert_eq!(other.resident().unwrap(), ByteLen::ZERO);
}

#[test]
fn a_panic_in_the_progress_call_reaches_the_caller_and_stops_the_threads() {
    let mapping = Mapping::anonymous(
        ByteLen::gib(1),
        Anonymous { huge: HugeAdvice::Advise, ..Anonymous::default() },
    )
    .unwrap();
    let never = AtomicBool::new(false);
    let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        // Without the hook that prints where, for the threads go on for as long as that takes.
        let fail = |_, _| std::panic::resume_unwind(Box::new("as the test wants"));
        let _ = mapping.populate_with(0..1 << 30, by(1), fail, &never);
    }));
    assert!(caught.is_err());
    assert!(mapping.resident().unwrap() < ByteLen::gib(1));
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

#[test]
fn threads_keep_to_their_nodes_and_nothing_is_begun_after_the_deadline() {
    let mapping = Mapping::anonymous(ByteLen::mib(64), small_pages()).unwrap();
    let all: Vec<u32> = (0..1024).collect();
    let here = uzone_os::numa::usable(&all).unwrap();
    let (range, never) = (0..64 << 20, AtomicBool::new(false));
    // A thread for each of three nodes, which are all here.
    let nodes = [here.clone(), here.clone(), here];
    let how = PopulateHow { nodes: &nodes, ..by(2) };
    let mut calls = 0;
    let populated = mapping.populate_with(range.clone(), how, |_, _| calls += 1, &never).unwrap();
    assert_eq!(populated, whole(ByteLen::mib(64)));
    assert!(calls >= 1);
    mapping.discard(range.clone()).unwrap();

    let past = PopulateHow { deadline: Some(Instant::now()), ..how };
    let populated = mapping.populate_with(range.clone(), past, |_, _| (), &never).unwrap();
    let expired = Populated { done: ByteLen::ZERO, of: ByteLen::mib(64), is_expired: true };
    assert_eq!(populated, expired);
    let nowhere = [vec![1023]];
    let how = PopulateHow { nodes: &nowhere, ..how };
    let error = mapping.populate_with(range, how, |_, _| (), &never).unwrap_err();
    assert!(matches!(error, MappingError::Sys(_)), "{error}");
    assert_eq!(mapping.resident().unwrap(), ByteLen::ZERO);
}
