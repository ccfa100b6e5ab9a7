//! Private mappings of one memory file share its pages until they write, by the kernel's own count.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail by panicking, as tests do")]

mod common;

use std::sync::Arc;

use common::{bytes_of, engine, map, page, usize_of, words};
use uzone_fault::{LazyOptions, MemoryBacking};
use uzone_os::{Mapping, Sharing};
use uzone_pages::ByteLen;

/// The fields of `smaps` for some addresses, in bytes.
#[derive(Debug, Default, PartialEq, Eq)]
struct Usage {
    rss: u64,
    /// The share of this mapping, where a page that n have counts 1/n.
    pss: u64,
    shared: u64,
    /// Copies of its own.
    anonymous: u64,
}

fn usage(start: u64, len: u64) -> Usage {
    let mut usage = Usage::default();
    for (name, bytes) in common::smaps(start, len) {
        match name.as_str() {
            "Rss:" => usage.rss += bytes,
            "Pss:" => usage.pss += bytes,
            "Shared_Clean:" | "Shared_Dirty:" => usage.shared += bytes,
            "Anonymous:" => usage.anonymous += bytes,
            _ => {}
        }
    }
    usage
}

#[test]
fn four_clones_have_one_physical_copy_and_one_of_each_page_that_they_write() {
    let name = "four_clones_have_one_physical_copy";
    let len = 8 << 20;
    let file = Arc::new(Mapping::memfd("clones", ByteLen::new(len), None).unwrap());
    file.write_at(0, &words(len)).unwrap();
    let clones: Vec<_> = (0..4)
        .map_while(|_| {
            let backing = MemoryBacking::new(file.clone(), Sharing::Private).unwrap();
            map(name, &engine(), len, backing, &LazyOptions::default())
        })
        .collect();
    if clones.len() < 4 {
        return;
    }
    let of = |index: usize| usage(clones[index].addr().get() as u64, len);
    assert_eq!(of(0), Usage::default());
    // Two by faults, two by populating.
    for (index, clone) in clones.iter().enumerate() {
        if index < 2 {
            let bytes = words(len);
            for at in (0..len).step_by(usize_of(page())) {
                let right = &bytes[usize_of(at)..][..usize_of(page())];
                assert!(bytes_of(clone, at, page()) == right, "at {at:#x}");
            }
        } else {
            clone.populate(0..len).unwrap();
        }
    }
    let taken = |index: usize| {
        let usage = of(index);
        assert_eq!(usage.rss, len, "{usage:?}");
        usage
    };
    for index in 0..4 {
        let usage = taken(index);
        assert_eq!((usage.shared, usage.anonymous), (len, 0), "{usage:?}");
    }
    let whole = |own: u64| {
        let sum: u64 = (0..4).map(|index| of(index).pss).sum();
        let sum = sum + usage(file.addr().get() as u64, len).pss;
        // A share is rounded down to 1 KiB a mapping.
        assert!(sum <= len + own && sum + 8192 >= len + own, "{sum} of {len} and {own}");
        sum
    };
    eprintln!("four clones and the file take {} bytes, of {len} each", whole(0));
    for (index, pages) in [(0, 10), (2, 300)] {
        for at in 0..pages {
            clones[index].write_at(at * page() * 3, &[1]).unwrap();
        }
        let usage = taken(index);
        assert_eq!(usage.anonymous, pages * page(), "{usage:?}");
    }
    assert_eq!((of(1).anonymous, of(3).anonymous), (0, 0));
    eprintln!("after 310 pages were written: {} bytes", whole(310 * page()));
    assert_eq!(bytes_of(&clones[1], 0, 8), common::word(0).to_ne_bytes());
}
