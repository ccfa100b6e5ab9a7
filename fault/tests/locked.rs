//! Lazily mapped memory of a process that locks all that it maps, as programs for audio and for trading do. The
//! lock is of a whole process, so this is a program of its own.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail by panicking, as tests do")]

mod common;

use std::sync::Arc;

use common::{check_all, engine, file_of, page, skip};
use rustix::mm::MlockAllFlags;
use uzone_fault::{
    Answer, Backing, FileBacking, LazyMapping, LazyOptions, MemoryBacking, SharedBacking,
    WriteTracking,
};
use uzone_os::Sharing;
use uzone_pages::ByteLen;

const PAGES: u64 = 64;

fn memory_file(sharing: Sharing) -> MemoryBacking {
    MemoryBacking::new(common::memfd_of(PAGES * page()), sharing).unwrap()
}

fn check(memory: &LazyMapping, is_tracked: bool) {
    let whole = 0..PAGES * page();
    check_all(memory);
    if is_tracked {
        assert_eq!(memory.dirty(whole.clone()).unwrap(), [], "{memory:?}");
        memory.write_at(5, &[0]).unwrap();
        memory.write_at(5, &[0xff]).unwrap();
        assert_eq!(memory.dirty(whole.clone()).unwrap().len(), 1, "{memory:?}");
        assert!(memory.evict(whole.clone()).unwrap() > 0);
    }
    // Locked pages are given back as others are.
    assert!(memory.evict_all(whole).unwrap() > 0);
    if !is_tracked {
        check_all(memory);
    }
}

#[test]
fn memory_is_filled_and_given_back_in_a_process_that_locks_all_that_it_maps() {
    let name = "memory_is_filled_and_given_back_in_a_process_that_locks";
    let engine = engine();
    if let Err(refused) = rustix::mm::mlockall(MlockAllFlags::CURRENT | MlockAllFlags::FUTURE) {
        return skip(name, &format!("all cannot be locked: {refused}"));
    }
    let len = PAGES * page();
    for answer in [Answer::Reader, Answer::InThread] {
        for track in [None, Some(WriteTracking::Sync)] {
            let options = LazyOptions::default().answer(answer).track_writes(track);
            let backings: [Arc<dyn Backing>; 4] = [
                Arc::new(FileBacking::new(file_of(len)).unwrap()),
                Arc::new(memory_file(Sharing::Private)),
                Arc::new(memory_file(Sharing::Shared)),
                Arc::new(
                    SharedBacking::new(
                        Arc::new(FileBacking::new(file_of(len)).unwrap()),
                        ByteLen::new(len),
                    )
                    .unwrap(),
                ),
            ];
            for backing in backings {
                let Ok(memory) = engine.map(ByteLen::new(len), backing, &options) else {
                    return skip(name, "no userfaultfd to be had");
                };
                check(&memory, track.is_some());
            }
        }
    }
}
