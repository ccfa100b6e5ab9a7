//! Private mappings of one memory file share its pages until they write, by the kernel's own count.

use std::thread;

use crate::common::{
    bytes_of, check_all, engine, map, memfd_of, options, page, usize_of, word, word_in, words,
};
use uzone_fault::MemoryBacking;
use uzone_os::Sharing;
use uzone_pages::Advice;

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
    for (name, bytes) in crate::common::smaps(start, len) {
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
    let file = memfd_of(len);
    let clone = || {
        let backing = MemoryBacking::new(file.clone(), Sharing::Private).unwrap();
        map(name, &engine(), len, backing, &options(Advice::Auto, 16))
    };
    let clones: Vec<_> = (0..4).map_while(|_| clone()).collect();
    if clones.len() < 4 {
        return;
    }
    let of = |index: usize| usage(clones[index].addr().get() as u64, len);
    assert_eq!(of(0), Usage::default());
    // Two by faults, two by populating.
    thread::scope(|scope| {
        for clone in &clones[..2] {
            scope.spawn(|| check_all(clone));
        }
    });
    let stats = clones[1].stats();
    assert!(stats.minor > 0 && stats.queued == 0, "{stats:?}");
    // It grows: 16, 16, 32, 64 and so on, up to 512 at a time.
    assert!(stats.faults < 30, "{stats:?}");
    for clone in &clones[2..] {
        clone.populate(0..len).unwrap();
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
    assert_eq!(bytes_of(&clones[0], 3 * page(), 1), [1]);
    check_all(&clones[1]);
    // A write to a page that is not there.
    let Some(fifth) = clone() else { return };
    fifth.write_at(6 * page(), &[8; 8]).unwrap();
    assert_eq!(bytes_of(&fifth, 6 * page(), 8), [8; 8]);
    assert_eq!(word_in(&fifth, 6 * page() + 8), word(6 * page() + 8));
    let mut bytes = vec![0; usize_of(len)];
    file.read_at(0, &mut bytes).unwrap();
    assert!(bytes == words(len), "the file itself is as it was");
}
