//! Mapping, copying, and memory seen as values.

use std::fs;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use uzone_os::{
    Access, AccessError, Anonymous, Exclusive, HugeAdvice, MapError, Mapped, Mapping, MappingError,
    Sharing,
};
use uzone_pages::{ByteLen, PageSize};

use crate::{file_of, is_alone, page, read, skip, small_pages, vm_flags};

/// A file in the temporary directory, removed when dropped.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str, bytes: &[u8]) -> Self {
        let path =
            std::env::temp_dir().join(format!("uzone-os-live-{}-{name}", std::process::id()));
        fs::write(&path, bytes).unwrap();
        Self(path)
    }

    fn open(&self) -> File {
        OpenOptions::new().read(true).write(true).open(&self.0).unwrap()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

#[test]
fn mapping_and_unmapping_leaves_the_process_as_it_was() {
    if !is_alone("mapping::mapping_and_unmapping_leaves_the_process_as_it_was") {
        return;
    }
    let state = || {
        let maps = fs::read_to_string("/proc/self/maps").unwrap().lines().count();
        let status = fs::read_to_string("/proc/self/status").unwrap();
        let fds = fs::read_dir("/proc/self/fd").unwrap().count();
        (maps, file_of(&status, "VmRSS:"), fds)
    };
    let round = |index: u64| {
        let how = Anonymous {
            huge: if index.is_multiple_of(2) { HugeAdvice::Never } else { HugeAdvice::Advise },
            is_accounted: !index.is_multiple_of(3),
            align: index.is_multiple_of(5).then_some(ByteLen::mib(16)),
        };
        let mapping = Mapping::anonymous(ByteLen::new(4 * page() * (1 + index % 7)), how).unwrap();
        mapping.write_at(3, b"some bytes").unwrap();
        let file = Mapping::memfd("round", ByteLen::new(3 * page()), None).unwrap();
        file.write_at(page(), b"more bytes").unwrap();
    };
    (0..20).for_each(round);
    let (maps, rss, fds) = state();
    (0..1000).for_each(round);
    let (maps_after, rss_after, fds_after) = state();
    assert_eq!(maps_after, maps);
    assert_eq!(fds_after, fds);
    // The least that 1,000 rounds could have kept is a page each, 4 MiB. The counter of the kernel
    // itself may be off by some pages for each CPU.
    assert!(rss_after < rss + 1024, "{rss} kB became {rss_after} kB");
}

#[test]
fn a_mapping_starts_where_it_was_asked_to() {
    for align in [page(), 2 * page(), 2 << 20, 1 << 30, 4 << 30] {
        for len in [1, page(), 3 * page() + 1, 5 << 20] {
            let how = Anonymous { align: Some(ByteLen::new(align)), ..Anonymous::default() };
            let mapping = Mapping::anonymous(ByteLen::new(len), how).unwrap();
            assert!(mapping.addr().is_aligned(ByteLen::new(align)), "{mapping:?}");
            assert_eq!(mapping.len().get(), len);
            // The first and the last byte are ours.
            mapping.write_at(0, &[1]).unwrap();
            mapping.write_at(len - 1, &[2]).unwrap();
        }
    }
    let advised = Anonymous { huge: HugeAdvice::Advise, ..Anonymous::default() };
    let mapping = Mapping::anonymous(ByteLen::mib(2), advised).unwrap();
    assert!(mapping.addr().is_aligned(ByteLen::mib(2)));
    for align in [0, 3, (1 << 20) + 1, 8 << 30, u64::MAX] {
        let how = Anonymous { align: Some(ByteLen::new(align)), ..Anonymous::default() };
        let error = Mapping::anonymous(ByteLen::mib(1), how).unwrap_err();
        assert!(
            matches!(error, MapError::BadAlign { align_bytes } if align_bytes == align),
            "{error}"
        );
    }
}

#[test]
fn no_length_and_lengths_beyond_the_address_space_are_errors() {
    let empty = |error: MapError| assert!(matches!(error, MapError::Empty), "{error:?}");
    empty(Mapping::anonymous(ByteLen::ZERO, Anonymous::default()).unwrap_err());
    empty(Mapping::memfd("x", ByteLen::ZERO, None).unwrap_err());
    empty(Mapping::hugetlb(ByteLen::ZERO, PageSize::MIB_2).unwrap_err());
    let scratch = Scratch::new("empty", b"x");
    empty(
        Mapping::file(scratch.open(), 0, ByteLen::ZERO, Access::ReadOnly, Sharing::Shared)
            .unwrap_err(),
    );
    for len in [u64::MAX, u64::MAX - 4095, 1 << 63, (1 << 63) - 1] {
        let error = Mapping::anonymous(ByteLen::new(len), Anonymous::default()).unwrap_err();
        assert!(matches!(error, MapError::TooLong { len_bytes } if len_bytes == len), "{error:?}");
        assert!(Mapping::hugetlb(ByteLen::new(len), PageSize::GIB_1).is_err());
        assert!(Mapping::memfd("x", ByteLen::new(len), None).is_err());
    }
    let error = Mapping::anonymous(ByteLen::tib(1 << 20), Anonymous::default()).unwrap_err();
    assert!(matches!(error, MapError::Memory { .. }), "{error:?}");
    assert!(error.to_string().contains("the address space has no such gap"), "{error}");
}

#[test]
fn memory_that_is_left_out_of_core_dumps_is_so_to_the_kernel() {
    let mapping = Mapping::anonymous(ByteLen::gib(1), Anonymous::default()).unwrap();
    let is_left_out = || Some(vm_flags(&mapping)?.split(' ').any(|flag| flag == "dd"));
    let Some(before) = is_left_out() else {
        return skip("left_out_of_core_dumps", "no VmFlags in /proc/self/smaps");
    };
    assert!(!before);
    mapping.leave_out_of_dumps().unwrap();
    assert_eq!(is_left_out(), Some(true));
    // The flags are of the part of the first page.
    mapping.include_in_dumps(page()..page() + 1).unwrap();
    assert_eq!(is_left_out(), Some(true));
    mapping.include_in_dumps(0..1).unwrap();
    assert_eq!(is_left_out(), Some(false));
    assert!(mapping.include_in_dumps(0..(1 << 30) + 1).is_err());
}

#[test]
fn sixteen_tebibytes_are_reserved_at_once_or_the_limit_is_named() {
    let start = Instant::now();
    match Mapping::anonymous(ByteLen::tib(16), Anonymous::default()) {
        Ok(mapping) => {
            // Not a benchmark: it would take minutes if a page of it were touched.
            assert!(start.elapsed() < Duration::from_secs(1));
            assert_eq!(mapping.resident().unwrap(), ByteLen::ZERO);
            mapping.write_at((16 << 40) - 1, &[7]).unwrap();
            assert!(!mapping.resident().unwrap().is_zero());
        }
        Err(MapError::Memory { shortage, .. }) => {
            assert!(!shortage.contains("no such gap"), "{shortage}");
            skip("sixteen_tebibytes", &shortage);
        }
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn a_file_is_mapped_where_it_has_bytes_and_nowhere_else() {
    let bytes: Vec<u8> = (0..2 * page() + 100).map(|index| (index % 251) as u8).collect();
    let scratch = Scratch::new("file", &bytes);
    let len = bytes.len() as u64;
    let map = |offset, len, access, sharing| {
        Mapping::file(scratch.open(), offset, ByteLen::new(len), access, sharing)
    };
    let whole = map(0, len, Access::ReadOnly, Sharing::Shared).unwrap();
    let mut seen = vec![0; bytes.len()];
    whole.read_at(0, &mut seen).unwrap();
    assert_eq!(seen, bytes);
    assert_eq!(whole.access(), Access::ReadOnly);
    assert!(matches!(
        whole.write_at(7, b"no"),
        Err(AccessError::ReadOnly { offset: 7, len_bytes: 2 })
    ));
    // Populating a read-only mapping reads it in.
    assert_eq!(whole.populate(0..len).unwrap().get(), 3 * page());
    assert_eq!(whole.resident().unwrap().get(), 3 * page());

    let tail = map(2 * page(), 100, Access::ReadWrite, Sharing::Shared).unwrap();
    tail.write_at(99, &[0xdd]).unwrap();
    assert_eq!(read(&whole, len - 1), [0xdd]);
    let private = map(0, len, Access::ReadWrite, Sharing::Private).unwrap();
    private.write_at(0, b"private").unwrap();
    assert_eq!(fs::read(&scratch.0).unwrap()[..7], bytes[..7]);

    for (offset, asked) in [(0, len + 1), (3 * page(), 1), (page(), len), (!(page() - 1), page())] {
        let error = map(offset, asked, Access::ReadOnly, Sharing::Shared).unwrap_err();
        assert!(
            matches!(error, MapError::BeyondEnd { offset: o, len_bytes, file_len }
                if (o, len_bytes, file_len) == (offset, asked, len)),
            "{error:?}"
        );
    }
    for offset in [1, page() - 1, page() + 8] {
        let error = map(offset, 1, Access::ReadOnly, Sharing::Shared).unwrap_err();
        assert!(matches!(error, MapError::CutsPage { .. }), "{error:?}");
    }
}

#[test]
fn what_cannot_be_mapped_is_said_by_its_kind() {
    let one = ByteLen::new(1);
    let directory = File::open("/").unwrap();
    let error = Mapping::file(directory, 0, one, Access::ReadOnly, Sharing::Shared).unwrap_err();
    assert_eq!(error.to_string(), "a directory cannot be mapped: pass a regular file or a device");
    let (reader, _writer) = std::io::pipe().unwrap();
    let error = Mapping::file(OwnedFd::from(reader), 0, one, Access::ReadOnly, Sharing::Shared)
        .unwrap_err();
    assert!(error.to_string().starts_with("a pipe"), "{error}");
    let (socket, _) = std::os::unix::net::UnixStream::pair().unwrap();
    let error = Mapping::file(socket, 0, one, Access::ReadOnly, Sharing::Shared).unwrap_err();
    assert!(error.to_string().starts_with("a socket"), "{error}");

    let scratch = Scratch::new("kind", b"some bytes");
    let read_only = || File::open(&scratch.0).unwrap();
    let error = Mapping::file(read_only(), 0, one, Access::ReadWrite, Sharing::Shared).unwrap_err();
    assert!(
        matches!(
            error,
            MapError::NotOpenFor { access: Access::ReadWrite, sharing: Sharing::Shared, .. }
        ),
        "{error:?}"
    );
    assert_eq!(
        error.to_string(),
        "the file is not open for a shared writable mapping: open it for reading and writing"
    );
    // A private copy needs no right to write.
    let private = Mapping::file(read_only(), 0, one, Access::ReadWrite, Sharing::Private).unwrap();
    private.write_at(0, b"S").unwrap();
    let write_only = OpenOptions::new().write(true).open(&scratch.0).unwrap();
    let error = Mapping::file(write_only, 0, one, Access::ReadOnly, Sharing::Shared).unwrap_err();
    assert!(error.to_string().ends_with("open it for reading"), "{error}");
}

#[test]
fn a_memory_file_shows_what_others_write_and_cannot_be_truncated() {
    let mapping = Mapping::memfd("shared", ByteLen::new(page() + 5), None).unwrap();
    let mut file = File::from(mapping.fd().unwrap().try_clone_to_owned().unwrap());
    file.write_all(b"from outside").unwrap();
    assert_eq!(&read(&mapping, 0), b"from outside");
    assert!(file.set_len(0).is_err());
    assert!(file.set_len(1 << 20).is_err());
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    assert!(maps.contains("/memfd:shared"), "{maps}");
    // Its bytes can be copied and not lent, and it comes back unharmed.
    let refused = Exclusive::try_from_mapping(mapping).unwrap_err();
    assert_eq!(&read(&refused.value, 5), b"outside");
    assert!(Mapping::memfd("a\0b", ByteLen::new(1), None).is_err());
}

#[test]
fn copies_end_at_the_last_byte_of_the_mapping() {
    let len = page() + 13;
    let mapping = Mapping::anonymous(ByteLen::new(len), small_pages()).unwrap();
    mapping.write_at(len - 3, b"end").unwrap();
    assert_eq!(&read(&mapping, len - 3), b"end");
    mapping.read_at(len, &mut []).unwrap();
    mapping.write_at(len, &[]).unwrap();
    for (offset, asked) in [(len - 2, 3), (len, 1), (len + 1, 0), (u64::MAX, 3), (u64::MAX, 0)] {
        let mut out = vec![0x77; asked];
        let error = mapping.read_at(offset, &mut out).unwrap_err();
        let end = offset.saturating_add(asked as u64);
        let expected = AccessError::Beyond { start: offset, end, len_bytes: len };
        assert_eq!(error, expected);
        assert_eq!(out, vec![0x77; asked], "nothing was copied");
        assert_eq!(mapping.write_at(offset, &out), Err(expected));
    }
}

#[test]
fn values_fit_the_memory_and_its_alignment_or_it_comes_back() {
    #[repr(C, align(8192))]
    #[derive(zerocopy::FromBytes, zerocopy::IntoBytes)]
    struct Wide([u8; 8192]);

    let len = ByteLen::new(page() + 7);
    let map = || Exclusive::anonymous(len, small_pages()).unwrap();
    let fitting = usize::try_from(len.get() / 8).unwrap();
    let mut values = Mapped::<u64>::try_new(map(), fitting).unwrap();
    assert_eq!(values.len(), fitting);
    assert!(values.iter().all(|&value| value == 0));
    values[fitting - 1] = 7;
    values.as_bytes_mut()[0] = 1;
    assert_eq!(values[0].to_ne_bytes()[0], 1);
    let memory = values.into_exclusive().into_mapping();
    assert_eq!(memory.len(), len);
    assert_eq!(u64::from_ne_bytes(read(&memory, 8 * (fitting as u64 - 1))), 7);

    for count in [0, fitting + 1, usize::MAX] {
        let refused = Mapped::<u64>::try_new(map(), count).unwrap_err();
        assert!(matches!(refused.cause, MappingError::NotSoMany { size_bytes: 8, .. }));
        assert_eq!(refused.value.len(), len);
    }
    let how = Anonymous { align: Some(ByteLen::kib(8)), ..small_pages() };
    let aligned = Exclusive::anonymous(ByteLen::kib(64), how).unwrap();
    assert_eq!(Mapped::<Wide>::try_new(aligned, 8).unwrap().len(), 8);
    // A thousand mappings of a page: some of them start between two multiples of 8192.
    if page() == 4096 {
        let some: Vec<_> = (0..64)
            .map(|_| Exclusive::anonymous(ByteLen::kib(12), small_pages()).unwrap())
            .collect();
        let odd = some.into_iter().find(|memory| !memory.addr().is_aligned(ByteLen::kib(8)));
        if let Some(odd) = odd {
            let refused = Mapped::<Wide>::try_new(odd, 1).unwrap_err();
            assert!(matches!(refused.cause, MappingError::Unaligned { align_bytes: 8192, .. }));
        }
    }
    // Atomics qualify, and threads share them.
    let shared = Mapped::<AtomicU64>::try_new(map(), 1).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                (0..1000).for_each(|_| {
                    shared[0].fetch_add(1, Ordering::Relaxed);
                });
            });
        }
    });
    assert_eq!(shared[0].load(Ordering::Relaxed), 4000);
}

#[test]
fn padding_of_values_becomes_bytes_when_the_memory_is_seen_as_bytes() {
    #[repr(C)]
    #[derive(Clone, Copy, zerocopy::FromBytes)]
    struct Padded {
        byte: u8,
        word: u64,
    }

    let memory = Exclusive::anonymous(ByteLen::new(page()), small_pages()).unwrap();
    let mut values = Mapped::<Padded>::try_new(memory, 4).unwrap();
    values[1] = Padded { byte: 3, word: 5 };
    assert_eq!((values[1].byte, values[1].word), (3, 5));
    assert_eq!(values.as_bytes_mut()[16], 3);
    let memory = values.into_exclusive();
    assert_eq!(memory.as_bytes()[16], 3);
    assert_eq!(memory.as_bytes()[24..32], 5_u64.to_ne_bytes());
    // Whatever the padding is: it is bytes, and they are added up here.
    let sum: u64 = memory.as_bytes().iter().map(|&byte| u64::from(byte)).sum();
    assert!(sum >= 8);
}

#[test]
fn mappings_are_used_and_dropped_by_other_threads() {
    let mapping = Mapping::anonymous(ByteLen::mib(1), Anonymous::default()).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..4_u64 {
            let mapping = &mapping;
            scope.spawn(move || {
                let byte = u8::try_from(thread).unwrap();
                for index in 0..1000 {
                    let at = thread * 5 + index * 20;
                    mapping.write_at(at, &[byte; 5]).unwrap();
                    assert_eq!(read(mapping, at), [byte; 5]);
                }
            });
        }
    });
    std::thread::spawn(move || drop(mapping)).join().unwrap();
}

#[test]
fn words_are_lent_where_they_are_whole_and_may_be_written() {
    let mapping = Mapping::anonymous(ByteLen::new(page() + 3), Anonymous::default()).unwrap();
    mapping.write_at(8, &7_u64.to_ne_bytes()).unwrap();
    let words = mapping.as_words(8..24).unwrap();
    assert_eq!((words.len(), words[0].load(Ordering::Relaxed)), (2, 7));
    words[1].store(u64::MAX, Ordering::Relaxed);
    assert_eq!(read(&mapping, 15), [0, 255, 255, 255, 255, 255, 255, 255, 255, 0]);
    assert!(mapping.as_words(page()..page()).unwrap().is_empty());
    for (start, end) in [(4, 12), (8, 12), (page(), page() + 3)] {
        assert_eq!(
            mapping.as_words(start..end).unwrap_err(),
            AccessError::CutsWord { start, end },
            "{start}..{end}"
        );
    }
    let len_bytes = page() + 3;
    for (start, end) in [(0, page() + 8), (page() + 8, page() + 16), (0, u64::MAX)] {
        assert_eq!(
            mapping.as_words(start..end).unwrap_err(),
            AccessError::Beyond { start, end, len_bytes }
        );
    }
    #[expect(clippy::reversed_empty_ranges, reason = "that is the point")]
    let backwards = mapping.as_words(16..8).unwrap_err();
    assert_eq!(backwards, AccessError::Empty { start: 16, end: 8 });

    let scratch = Scratch::new("words", &vec![1; usize::try_from(page()).unwrap()]);
    let len = ByteLen::new(page());
    let file = Mapping::file(scratch.open(), 0, len, Access::ReadOnly, Sharing::Shared).unwrap();
    assert_eq!(
        file.as_words(0..16).unwrap_err(),
        AccessError::ReadOnly { offset: 0, len_bytes: 16 }
    );
}

#[test]
fn a_file_that_is_sealed_against_writing_keeps_its_bytes_when_it_is_to_have_a_hole() {
    let mapping = Mapping::memfd("sealed", ByteLen::new(4 * page()), None).unwrap();
    mapping.write_at(0, &[7; 8]).unwrap();
    mapping.punch(page()..2 * page()).unwrap();
    let seal = rustix::fs::SealFlags::FUTURE_WRITE;
    if rustix::fs::fcntl_add_seals(mapping.fd().unwrap(), seal).is_err() {
        return skip("a_file_that_is_sealed", "F_SEAL_FUTURE_WRITE needs Linux 5.1");
    }
    let error = mapping.punch(0..page()).unwrap_err();
    assert!(matches!(error, MappingError::Punch { .. }), "{error}");
    assert_eq!(read(&mapping, 0), [7; 8]);
    assert!(matches!(mapping.punch(1..page()), Err(MappingError::Access(_))));
}
