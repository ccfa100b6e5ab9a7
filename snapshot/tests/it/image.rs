//! Images are written and read back: the bytes are the same, and damage is an error.

use std::io::{self, Read};
use std::sync::Arc;

use crate::common::{Directory, all, memory};
use proptest::prelude::*;
use uzone_pages::{ByteLen, ErrorKind};
use uzone_snapshot::{
    Codec, FileSource, Image, ImageRegion, OpenOptions, Packer, PageCounts, SnapshotError, Source,
};

fn pack(packer: &Packer, bytes: &[u8], path: &std::path::Path, parent: Option<&Image>) -> Image {
    let packed = packer.pack(&mut &*bytes, path, parent, &|_| true).unwrap();
    assert_eq!(packed.image_bytes, bytes.len() as u64);
    let image = Image::open(path, &OpenOptions::default().root(packed.root)).unwrap();
    assert_eq!(packed.file_bytes, image.file_len());
    assert_eq!(packed.zero_pages, image.zero_pages());
    image
}

#[test]
fn every_codec_and_frame_size_gives_the_bytes_back() {
    let directory = Directory::new("codecs");
    let bytes = memory(300, 1234, 1);
    for codec in [Codec::None, Codec::Zstd, Codec::Lz4] {
        for frame in [ByteLen::kib(4), ByteLen::kib(64), ByteLen::mib(2)] {
            for threads in [1, 3] {
                let packer = Packer::default().codec(codec).frame(frame).threads(threads);
                let image = pack(&packer, &bytes, &directory.file("image"), None);
                assert!(all(&image) == bytes, "{codec:?} {frame}");
                assert!(image.verify(2, true, &|_| ()).unwrap() > 0);
                assert!(image.verify(1, false, &|_| ()).unwrap() > 0);
            }
        }
    }
    assert_eq!(directory.names(), ["image"]);
}

#[test]
fn the_same_bytes_have_the_same_root_however_many_threads_pack_them() {
    let directory = Directory::new("root");
    let bytes = memory(100, 0, 2);
    let roots = [1, 2, 7].map(|threads| {
        pack(&Packer::default().threads(threads), &bytes, &directory.file("image"), None).root()
    });
    assert_eq!(roots[0], roots[1]);
    assert_eq!(roots[0], roots[2]);
    let with_set = Packer::default().working_set(vec![5, 3, 1_000_000]);
    let image = pack(&with_set, &bytes, &directory.file("image"), None);
    assert_eq!(image.root(), roots[0], "the working set has no part in it");
    assert_eq!(image.working_set(), [5, 3]);
    let text = roots[0].to_string();
    assert_eq!(text.parse::<uzone_snapshot::Root>().unwrap(), roots[0]);
}

#[test]
fn another_root_than_the_required_one_is_refused() {
    let directory = Directory::new("other");
    let one = pack(&Packer::default(), &memory(9, 0, 3), &directory.file("one"), None);
    let two = pack(&Packer::default(), &memory(9, 0, 4), &directory.file("two"), None);
    let error = Image::open(directory.file("two"), &OpenOptions::default().root(one.root()));
    let error = error.unwrap_err();
    assert!(
        matches!(error, SnapshotError::OtherRoot { found, .. } if found == two.root()),
        "{error}"
    );
}

#[test]
fn an_image_without_bytes_is_an_image() {
    let directory = Directory::new("empty");
    for codec in [Codec::None, Codec::Zstd, Codec::Lz4] {
        let image = pack(&Packer::default().codec(codec), &[], &directory.file("image"), None);
        assert_eq!(image.byte_len(), 0);
        assert_eq!(image.frame_counts().frames, 0);
        image.verify(2, true, &|_| ()).unwrap();
        assert!(matches!(image.read_at(0, &mut [0]), Err(SnapshotError::Beyond { .. })));
    }
}

#[test]
fn a_zstd_image_is_a_seekable_stream_for_other_programs() {
    let directory = Directory::new("seekable");
    let bytes = memory(200, 77, 5);
    let path = directory.file("image");
    let _ = pack(&Packer::default(), &bytes, &path, None);
    // A decoder that knows nothing of the index.
    let mut raw = Vec::new();
    let file = std::fs::File::open(&path).unwrap();
    zstd::stream::read::Decoder::new(file).unwrap().read_to_end(&mut raw).unwrap();
    assert!(raw == bytes);
    // Another implementation of the seek table.
    let file = std::fs::File::open(&path).unwrap();
    let mut decoder = zeekstd::DecodeOptions::new(file).into_decoder().unwrap();
    decoder.set_offset(100_000).unwrap();
    decoder.set_offset_limit(300_001).unwrap();
    let mut part = Vec::new();
    io::copy(&mut decoder, &mut part).unwrap();
    assert!(part == bytes[100_000..300_001]);
}

#[test]
fn frames_of_the_parent_are_not_stored_again() {
    let directory = Directory::new("parent");
    std::fs::create_dir(directory.file("below")).unwrap();
    let mut bytes = memory(500, 0, 6);
    let base = pack(&Packer::default(), &bytes, &directory.file("below/base"), None);
    bytes[100 * 4096] ^= 1;
    bytes[400 * 4096..401 * 4096].fill(0);
    bytes.truncate(490 * 4096 + 5);
    let middle =
        pack(&Packer::default().codec(Codec::Lz4), &bytes, &directory.file("middle"), Some(&base));
    let counts = middle.frame_counts();
    assert!(counts.stored <= 3, "{counts:?}");
    assert!(counts.parent > 20, "{counts:?}");
    assert!(all(&middle) == bytes);
    bytes[7] ^= 1;
    let last = pack(&Packer::default(), &bytes, &directory.file("last"), Some(&middle));
    assert!(all(&last) == bytes);
    assert_eq!(last.parent().unwrap().parent().unwrap().root(), base.root());

    std::fs::rename(directory.file("below/base"), directory.file("below/gone")).unwrap();
    let error = Image::open(directory.file("last"), &OpenOptions::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
    assert!(error.to_string().contains("middle"), "{error}");
    std::fs::copy(directory.file("last"), directory.file("below/base")).unwrap();
    let error = Image::open(directory.file("middle"), &OpenOptions::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidData, "another image in its place: {error}");
}

#[test]
fn a_chain_has_sixteen_parents_at_most_and_one_more_is_refused_by_name() {
    let directory = Directory::new("deep");
    let mut bytes = memory(20, 0, 6);
    let mut image = pack(&Packer::default(), &bytes, &directory.file("0"), None);
    for depth in 1..=16 {
        bytes[0] = depth;
        let path = directory.file(&depth.to_string());
        image = pack(&Packer::default(), &bytes, &path, Some(&image));
        assert!(all(&image) == bytes, "{depth} parents");
    }
    let path = directory.file("17");
    let error = Packer::default().pack(&mut &*bytes, &path, Some(&image), &|_| true).unwrap_err();
    let SnapshotError::TooDeep { name, max } = &error else { panic!("{error}") };
    assert!(*max == 16 && name.ends_with("/17"), "{name}");
    assert!(!path.exists());
}

#[test]
fn a_packer_that_fails_or_is_cancelled_leaves_nothing_and_what_was_there() {
    struct Failing(usize);
    impl Read for Failing {
        fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
            self.0 = self.0.checked_sub(1).ok_or(io::Error::from(io::ErrorKind::BrokenPipe))?;
            out.fill(7);
            Ok(out.len())
        }
    }
    let directory = Directory::new("failing");
    let path = directory.file("image");
    std::fs::write(&path, "before").unwrap();
    for threads in [1, 3] {
        let packer = Packer::default().threads(threads);
        let error = packer.pack(&mut Failing(20), &path, None, &|_| true).unwrap_err();
        assert!(matches!(error, SnapshotError::Input { .. }), "{error}");
        let error =
            packer.pack(&mut io::repeat(7), &path, None, &|done| done < 1 << 20).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Cancelled);
        assert_eq!(std::fs::read(&path).unwrap(), b"before");
        assert_eq!(directory.names(), ["image"]);
    }
    let error =
        Packer::default().pack(&mut io::empty(), &directory.file("none/image"), None, &|_| true);
    assert_eq!(error.unwrap_err().kind(), ErrorKind::NotFound);
}

#[test]
fn options_that_cannot_be_are_refused_by_name() {
    let directory = Directory::new("options");
    let far = ImageRegion { guest_addr: 0, offset: 4096, len_bytes: 1, page_bytes: 4096 };
    for (packer, part) in [
        (Packer::default().page(ByteLen::kib(2)), "a page is"),
        (Packer::default().frame(ByteLen::mib(32)), "a frame is"),
        (Packer::default().page(ByteLen::mib(2)), "a frame is"),
        (Packer::default().level(99), "no such level"),
        (Packer::default().codec(Codec::Lz4).level(13), "no such level"),
        (Packer::default().regions(vec![far]), "not inside the input"),
        (Packer::default().order(vec![0]), "can be read at any place"),
        (Packer::default().hashes_only(true), "have no codec"),
    ] {
        let error = packer.pack(&mut &[0; 4096][..], &directory.file("image"), None, &|_| true);
        let error = error.unwrap_err();
        assert!(error.to_string().contains(part), "{error}");
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
        assert!(directory.names().is_empty());
    }
}

#[test]
fn large_frames_that_do_not_compress_are_read_back() {
    let directory = Directory::new("large");
    let mut bytes = vec![0; 16 << 20];
    fastrand::Rng::with_seed(1).fill(&mut bytes);
    for codec in [Codec::None, Codec::Zstd, Codec::Lz4] {
        for frame in [ByteLen::mib(4), ByteLen::mib(16)] {
            let packer = Packer::default().codec(codec).level(1).frame(frame).threads(1);
            let image = pack(&packer, &bytes, &directory.file("image"), None);
            assert!(all(&image) == bytes, "{codec:?} {frame}");
        }
    }
}

#[test]
fn a_parent_that_is_too_short_for_its_child_is_refused() {
    let directory = Directory::new("short");
    let bytes = memory(64, 0, 10);
    let base = pack(&Packer::default(), &bytes, &directory.file("base"), None);
    drop(pack(&Packer::default(), &bytes, &directory.file("child"), Some(&base)));
    let short = pack(&Packer::default(), &bytes[..70_000], &directory.file("base"), None);
    // A child that names the short image as its parent, with a root hash that fits.
    let mut file = std::fs::read(directory.file("child")).unwrap();
    let index = file.windows(8).position(|window| window == b"UZONEIMG").unwrap();
    let hex = short.root().to_string();
    for (at, pair) in hex.as_bytes().chunks(2).enumerate() {
        let pair = std::str::from_utf8(pair).unwrap();
        file[index + 64 + at] = u8::from_str_radix(pair, 16).unwrap();
    }
    crate::targets::fix_root(&mut file[index..]);
    std::fs::write(directory.file("child"), file).unwrap();
    let error = Image::open(directory.file("child"), &OpenOptions::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidData, "{error}");
    assert!(error.to_string().contains("behind the end of the parent"), "{error}");
}

#[test]
fn a_parent_is_beside_its_child_whatever_link_leads_there() {
    let directory = Directory::new("linked");
    for folder in ["store", "names"] {
        std::fs::create_dir(directory.file(folder)).unwrap();
    }
    let mut bytes = memory(100, 0, 6);
    let base = pack(&Packer::default(), &bytes, &directory.file("store/base"), None);
    bytes[5] ^= 1;
    let path = directory.file("store/child");
    let child = pack(&Packer::default(), &bytes, &path, Some(&base));
    let link = directory.file("names/vm");
    std::os::unix::fs::symlink("../store/child", &link).unwrap();
    let image = Image::open(&link, &OpenOptions::default()).unwrap();
    assert!(all(&image) == bytes);
    // A process that has the files alone opens them by the names that they had.
    let files = image.files().into_iter().map(|(name, file)| (name, file.try_clone().unwrap()));
    let options = OpenOptions::default().files(files.collect());
    std::fs::remove_file(&link).unwrap();
    assert!(all(&Image::open(&link, &options).unwrap()) == bytes);
    // It is written beside the file that the link leads to, and names its parent from there.
    std::os::unix::fs::symlink("../store/child", &link).unwrap();
    let _ = pack(&Packer::default(), &bytes, &link, Some(&base));
    assert!(all(&Image::open(&path, &OpenOptions::default()).unwrap()) == bytes);
    drop(child);
    std::fs::remove_file(directory.file("store/base")).unwrap();
    let error = Image::open(&link, &OpenOptions::default()).unwrap_err();
    let text = uzone_os::with_causes(&error);
    assert!(text.contains("/store/base: "), "{text}");
    // A link beside the link does as well.
    let _ = pack(&Packer::default(), &memory(100, 0, 6), &directory.file("names/base"), None);
    assert!(all(&Image::open(&link, &OpenOptions::default()).unwrap()) == bytes);
}

#[test]
fn the_holes_of_a_file_are_packed_without_being_read() {
    use std::os::unix::fs::FileExt;
    const TIB: u64 = 1 << 40;
    let directory = Directory::new("holes");
    let path = directory.file("raw");
    let file = std::fs::File::create(&path).unwrap();
    file.set_len(1 << 20).unwrap();
    if uzone_snapshot::files::hole_problem(&file, 4096).unwrap().is_some() {
        eprintln!("skipped: holes: the temporary directory has none");
        return;
    }
    // The same bytes with holes and without: in the middle of a frame, and at the end.
    let mut bytes = vec![0; (5 << 20) + 777];
    for at in [70_000, 600_000, 600_001, 3 << 20] {
        bytes[at] = 7;
    }
    let dense = directory.file("dense");
    std::fs::write(&dense, &bytes).unwrap();
    file.set_len(bytes.len() as u64).unwrap();
    for (number, page) in (0..).zip(bytes.chunks(4096)).filter(|(_, page)| page.contains(&7)) {
        file.write_all_at(page, number * 4096).unwrap();
    }
    let images = [directory.file("a"), directory.file("b")];
    for codec in [Codec::Zstd, Codec::Lz4, Codec::None] {
        for (from, to) in [&path, &dense].into_iter().zip(&images) {
            let source = FileSource::open(from).unwrap();
            let packer = Packer::default().codec(codec);
            packer.pack_source(&source, to, None, &|_| true).unwrap();
        }
        let [a, b] = images.each_ref().map(|path| std::fs::read(path).unwrap());
        assert!(a == b, "{codec:?}");
        assert!(all(&Image::open(&images[0], &OpenOptions::default()).unwrap()) == bytes);
    }
    // More than anyone reads or compresses in the time of a test.
    file.set_len(TIB).unwrap();
    file.write_all_at(&[9], TIB - 1).unwrap();
    let source = FileSource::open(&path).unwrap();
    let packer = Packer::default().page(ByteLen::mib(2)).frame(ByteLen::mib(16));
    let packed = packer.pack_source(&source, &images[0], None, &|_| true).unwrap();
    assert_eq!(packed.zero_pages, (TIB >> 21) - 3);
    let image = Image::open(&images[0], &OpenOptions::default()).unwrap();
    let mut last = [0; 2];
    image.read_at(TIB - 2, &mut last).unwrap();
    assert_eq!(last, [0, 9]);
    // A file that is cut meanwhile has no hole there.
    file.set_len(1 << 20).unwrap();
    packer.pack_source(&source, &images[0], None, &|_| true).unwrap_err();
}

#[test]
fn what_is_no_regular_file_is_refused_and_not_waited_for() {
    let directory = Directory::new("fifo");
    let fifo = directory.file("fifo");
    let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, mode, 0).unwrap();
    for path in [fifo, directory.file("")] {
        let error = Image::open(&path, &OpenOptions::default()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
        let text = uzone_os::with_causes(&error);
        assert!(text.contains("not a regular file"), "{text}");
    }
}

#[test]
fn an_image_inside_an_image_is_read() {
    struct Inside(Image);
    impl Source for Inside {
        fn name(&self) -> String {
            "an image inside an image".to_owned()
        }
        fn byte_len(&self) -> u64 {
            self.0.byte_len()
        }
        fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
            self.0.read_at(offset, out).map_err(io::Error::other)
        }
    }
    let directory = Directory::new("inside");
    let bytes = memory(40, 9, 11);
    let inner = directory.file("inner");
    drop(pack(&Packer::default().codec(Codec::Lz4), &bytes, &inner, None));
    let file = std::fs::read(&inner).unwrap();
    // Small frames: those of the index are in the cache, and the others are decoded while one is read.
    let packer = Packer::default().frame(ByteLen::kib(4));
    let outer = pack(&packer, &file, &directory.file("outer"), None);
    let options = OpenOptions::default();
    let image = Image::from_source(Box::new(Inside(outer)), &options).unwrap();
    assert!(all(&image) == bytes);
}

#[test]
fn the_first_bad_frame_is_named_with_its_place() {
    let directory = Directory::new("first");
    let path = directory.file("image");
    let bytes = memory(400, 0, 9);
    drop(pack(&Packer::default(), &bytes, &path, None));
    let mut file = std::fs::read(&path).unwrap();
    let middle = file.len() / 3;
    file[middle] ^= 1;
    file[2 * middle] ^= 1;
    let image = Image::from_source(Box::new(file), &OpenOptions::default()).unwrap();
    for decode in [true, false] {
        let error = image.verify(3, decode, &|_| ()).unwrap_err();
        let SnapshotError::BadFrame { offset, frame, .. } = error else { panic!("{error}") };
        assert!(
            offset <= middle as u64 && offset + 70_000 > middle as u64,
            "{offset:#x} {middle:#x}"
        );
        let mut one = [0; 1];
        assert!(image.read_at(frame * image.frame_bytes(), &mut one).is_err());
        assert!(image.read_at((frame - 1) * image.frame_bytes(), &mut one).is_ok());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn any_range_reads_as_from_the_raw_bytes(
        (pages, extra, seed) in (1_usize..80, 0_usize..4096, any::<u64>()),
        reads in proptest::collection::vec((any::<u64>(), 0_usize..200_000), 1..20),
        codec in prop_oneof![Just(Codec::None), Just(Codec::Zstd), Just(Codec::Lz4)],
    ) {
        let directory = Directory::new("ranges");
        let bytes = memory(pages, extra, seed);
        let packer = Packer::default().codec(codec).level(1).threads(2).frame(ByteLen::kib(32));
        let image = Arc::new(pack(&packer, &bytes, &directory.file("image"), None));
        for (at, len) in reads {
            let at = usize::try_from(at % bytes.len() as u64).unwrap();
            let mut out = vec![0xaa; len];
            match image.read_at(at as u64, &mut out) {
                Ok(()) => prop_assert!(out == bytes[at..at + len]),
                Err(error) => prop_assert!(at + len > bytes.len(), "{}", error),
            }
        }
    }

    #[test]
    fn bytes_that_are_no_image_are_never_taken_for_one(bytes in proptest::collection::vec(any::<u8>(), 0..3000)) {
        prop_assert!(Image::from_source(Box::new(bytes), &OpenOptions::default()).is_err());
    }
}

#[test]
fn the_parts_of_an_image_count_each_of_its_pages_once() {
    let directory = Directory::new("parts");
    let mut bytes = vec![0; 100 * 4096 + 5];
    for (number, page) in bytes.chunks_mut(4096).enumerate().filter(|(number, _)| number % 3 > 0) {
        page.fill(u8::try_from(number).unwrap());
    }
    let packer = Packer::default().frame(ByteLen::kib(16)).working_set(vec![0, 99, 100, 4]);
    let (base, child) = (directory.file("base"), directory.file("child"));
    packer.pack(&mut &*bytes, &base, None, &|_| true).unwrap();
    let base = Image::open(&base, &OpenOptions::default()).unwrap();
    bytes[50 * 4096] ^= 1;
    packer.pack(&mut &*bytes, &child, Some(&base), &|_| true).unwrap();
    let child = Image::open(&child, &OpenOptions::default()).unwrap();
    for most in [1, 3, 7, 26, 1000] {
        let parts = child.page_counts(most);
        assert!(parts.len() <= most.min(26), "{most}");
        let sum = |of: fn(&PageCounts) -> u64| parts.iter().map(of).sum::<u64>();
        assert_eq!(sum(|part| part.len_bytes), bytes.len() as u64, "{most}");
        assert_eq!(sum(|part| part.zero), 34, "{most}");
        // The frame of page 50 is pages 48 to 51, of which 48 and 51 are zero.
        assert_eq!(sum(|part| part.stored), 2, "{most}");
        assert_eq!(sum(|part| part.parent), 101 - 34 - 2, "{most}");
        assert_eq!(sum(|part| part.working_set), 4, "{most}");
    }
    let parts = child.page_counts(26);
    assert_eq!((parts[12].stored, parts[12].zero, parts[12].parent), (2, 2, 0));
    assert_eq!((parts[0].working_set, parts[1].working_set, parts[25].working_set), (1, 1, 1));
}
