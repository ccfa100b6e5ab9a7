//! Mapping where the process has used up what it may: an error names that, or the memory works. The limits are of a
//! whole process, so this is a program of its own.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail by panicking, as tests do")]

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{check_page, engine, file_of, page, skip};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use uzone_fault::{Answer, FileBacking, LazyOptions, MapError};
use uzone_os::uffd::UffdError;
use uzone_pages::{ByteLen, ErrorKind};

const PAGES: u64 = 64;

fn limit(resource: Resource, to: u64) {
    let maximum = getrlimit(resource).maximum;
    setrlimit(resource, Rlimit { current: Some(to), maximum }).unwrap();
}

#[test]
fn memory_that_is_mapped_at_a_limit_is_filled() {
    let name = "memory_that_is_mapped_at_a_limit_is_filled";
    let engine = engine();
    let backing = Arc::new(FileBacking::new(file_of(PAGES * page())).unwrap());
    let options =
        LazyOptions::default().answer(Answer::InThread).deadline(Duration::from_secs(100));
    let map = || engine.map(ByteLen::new(PAGES * page()), backing.clone(), &options);
    let Ok(memory) = map() else { return skip(name, "no userfaultfd to be had") };
    drop(memory);
    let before = getrlimit(Resource::As);
    let mapped = std::fs::read_to_string("/proc/self/statm").unwrap();
    let mapped: u64 = mapped.split(' ').next().unwrap().parse().unwrap();
    let mut refused = 0;
    for more in 0..160 {
        limit(Resource::As, (mapped + 8 * more) * page());
        let memory = map();
        setrlimit(Resource::As, before).unwrap();
        match memory {
            Ok(memory) => (0..PAGES).for_each(|at| check_page(&memory, at * page())),
            Err(_) => refused += 1,
        }
    }
    assert!(refused > 0);
    // Descriptors: as many as there are.
    let before = getrlimit(Resource::Nofile);
    limit(Resource::Nofile, 3);
    let answer = map();
    setrlimit(Resource::Nofile, before).unwrap();
    match answer {
        Err(error @ MapError::Open(UffdError::NoDescriptor { .. })) => {
            let text = uzone_os::with_causes(&error);
            assert!(text.contains("ulimit -n"), "{text}");
            assert_eq!(error.kind(), ErrorKind::OutOfMemory);
        }
        answer => panic!("{answer:?}"),
    }
}
