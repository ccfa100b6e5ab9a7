//! Where commands write, and who may read it then: files, links, streams and standard output.

#[path = "it/common/mod.rs"]
mod common;

use std::fs::{self, File, Permissions};
use std::io::Read;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt, symlink};

use common::{Dir, keeps_to, object, object_of, refuses, run, skip, text, uzone};
use rustix::fs::{CWD, FileType, Mode, OFlags};

/// Returns 40 KiB, which a pipe takes as a whole.
fn memory() -> Vec<u8> {
    (0..10_000_u32).flat_map(|n| (n / 3).to_le_bytes()).collect()
}

/// A FIFO that this process has open at both ends, so that no other one waits for it.
struct Fifo {
    name: String,
    file: File,
}

impl Fifo {
    fn new(dir: &Dir, name: &str) -> Self {
        let name = dir.name(name);
        rustix::fs::mknodat(CWD, &name, FileType::Fifo, Mode::from(0o600), 0).expect("a FIFO");
        let flags = OFlags::NONBLOCK.bits().cast_signed();
        let file = File::options().read(true).write(true).custom_flags(flags).open(&name);
        Self { file: file.expect("it is opened"), name }
    }

    /// Returns all bytes that were written to it.
    fn bytes(&mut self) -> Vec<u8> {
        let metadata = fs::symlink_metadata(&self.name).expect("it is there");
        assert!(metadata.file_type().is_fifo(), "a file took the place of the FIFO");
        let mut bytes = Vec::new();
        let end = self.file.read_to_end(&mut bytes).expect_err("a writer is left: this process");
        assert_eq!(end.kind(), std::io::ErrorKind::WouldBlock);
        bytes
    }
}

const RESULTS: &str = r#"{"schema": "uzone.bench/1", "benchmark": "pin", "results": [
    {"id": "pin-2m/naive-pin", "name": "naive, pin", "median_ns": 73800000}]}"#;

#[test]
fn a_stream_gets_all_bytes_and_stays_what_it_is() {
    let dir = Dir::new("streams");
    let (raw, image) = (dir.file("raw", memory()), dir.name("image"));
    object(&["pack", &raw, &image, "--json"]);
    let packed = fs::read(&image).expect("an image");
    let results = dir.file("results", RESULTS);
    let mut fifo = Fifo::new(&dir, "fifo");
    let name = fifo.name.clone();
    keeps_to("uzone.pack-1", &object(&["pack", &raw, &name, "--json"]));
    assert!(fifo.bytes() == packed);
    keeps_to("uzone.unpack-1", &object(&["unpack", &image, &name, "--json"]));
    assert!(fifo.bytes() == memory());
    object(&["report", &results, "-o", &name, "--json"]);
    assert!(text(&fifo.bytes()).contains("</html>"));
    // So does a device, such as /dev/null.
    let null = dir.name("null");
    let device = rustix::fs::makedev(1, 3);
    let mode = Mode::from(0o666);
    if let Err(cause) = rustix::fs::mknodat(CWD, &null, FileType::CharacterDevice, mode, device) {
        return skip("a_stream_gets_all_bytes", cause);
    }
    for arguments in
        [&["pack", &raw, &null][..], &["unpack", &image, &null], &["report", &results, "-o", &null]]
    {
        let output = run(arguments);
        assert!(output.status.success(), "{}", text(&output.stderr));
        let metadata = fs::symlink_metadata(&null).expect("it is there");
        assert!(metadata.file_type().is_char_device(), "a file took the place of {arguments:?}");
    }
}

#[test]
fn the_target_of_a_link_is_replaced_and_the_link_stays() {
    let dir = Dir::new("links");
    let (raw, image) = (dir.file("raw", memory()), dir.name("image"));
    object(&["pack", &raw, &image, "--json"]);
    fs::create_dir(dir.path().join("there")).expect("a directory");
    for (name, first) in [("link", "there/image"), ("free", "there/new")] {
        let (link, target) = (dir.name(name), dir.name(first));
        symlink(first, &link).expect("a link");
        object(&["pack", &raw, &link, "--json"]);
        assert!(fs::symlink_metadata(&link).expect("the link").is_symlink());
        assert!(fs::read(&target).expect("a file") == fs::read(&image).expect("a file"));
        object(&["unpack", &image, &link, "--json"]);
        assert!(fs::symlink_metadata(&link).expect("the link").is_symlink());
        assert!(fs::read(&target).expect("a file") == memory());
    }
    symlink("round", dir.path().join("round")).expect("a link");
    refuses(&["pack", &raw, &dir.name("round")], 74, "cannot create");
}

#[test]
fn a_dash_is_standard_output_and_the_summary_goes_to_standard_error() {
    let dir = Dir::new("dash");
    let (raw, image) = (dir.file("raw", memory()), dir.name("image"));
    object(&["pack", &raw, &image, "--json"]);
    let (packed, results) = (fs::read(&image).expect("an image"), dir.file("results", RESULTS));
    let page = dir.name("page.html");
    object(&["report", &results, "-o", &page, "--json"]);
    let page = fs::read(&page).expect("a page");
    let in_it = |arguments: &[&str]| {
        let output = uzone(arguments).current_dir(dir.path()).output().expect("it runs");
        assert!(output.status.success(), "{}", text(&output.stderr));
        output
    };
    let table: [(&[&str], &[u8], &str); 5] = [
        (&["pack", "raw", "-"], &packed, "packed"),
        (&["pack", "raw", "/dev/stdout"], &packed, "packed"),
        (&["unpack", "image", "-"], &memory(), "unpacked"),
        (&["unpack", "image", "/dev/stdout"], &memory(), "unpacked"),
        (&["report", "results", "-o", "-"], &page, "-\n"),
    ];
    for (arguments, bytes, part) in table {
        let output = in_it(arguments);
        assert!(output.stdout == bytes, "{arguments:?}");
        assert!(text(&output.stderr).contains(part), "{arguments:?}: {}", text(&output.stderr));
        let json = in_it(&[arguments, &["--json"]].concat());
        assert!(json.stdout == bytes, "{arguments:?}");
        serde_json::from_slice::<serde_json::Value>(&json.stderr).expect("an object");
    }
    // A failure leaves no object among the data.
    let output = run(&["pack", &dir.name("none"), "-", "--json"]);
    assert_eq!((output.status.code(), output.stdout.len()), (Some(66), 0));
    assert_eq!(dir.names(), ["image", "page.html", "raw", "results"], "no file is called -");
}

#[test]
fn an_image_is_for_no_more_users_than_its_bytes_were() {
    let dir = Dir::new("modes");
    let (raw, image, back) = (dir.file("raw", memory()), dir.name("image"), dir.name("back"));
    let diff = dir.file("diff", memory());
    let mode = |name: &str| fs::metadata(name).expect("a file").mode() & 0o777;
    let set = |name: &str, mode| {
        fs::set_permissions(name, Permissions::from_mode(mode)).expect("it is ours");
    };
    let old = rustix::process::umask(Mode::from(0o022));
    for (own, expected) in [(0o600, 0o600), (0o640, 0o640), (0o444, 0o644), (0o777, 0o644)] {
        set(&raw, own);
        object(&["pack", &raw, &image, "--json"]);
        assert_eq!(mode(&image), expected, "packed from {own:o}");
        object(&["unpack", &image, &back, "--json"]);
        assert_eq!(mode(&back), expected, "unpacked from {own:o}");
        object(&["pack", "--rebase", &image, &back, "--force", "--json"]);
        assert_eq!(mode(&back), expected, "packed anew from {own:o}");
    }
    // Of several, by the narrowest.
    set(&raw, 0o644);
    set(&diff, 0o600);
    let layers = ["pack", "--firecracker", &raw, "--diff", &diff, "--all-data", &image, "--json"];
    object(&layers);
    assert_eq!(mode(&image), 0o600);
    // Nothing is known of a pipe.
    fs::remove_file(&image).expect("it is there");
    let input = File::open(&raw).expect("a file");
    let output = uzone(&["pack", "-", &image, "--json"]).stdin(input).output();
    object_of(&output.expect("it runs"));
    assert_eq!(mode(&image), 0o600);
    rustix::process::umask(old);
}

#[test]
fn an_image_in_the_place_of_memory_and_an_image_of_an_image_are_refused() {
    let dir = Dir::new("swapped");
    let (raw, image) = (dir.file("raw", memory()), dir.name("image"));
    object(&["pack", &raw, &image, "--json"]);
    let packed = fs::read(&image).expect("an image");
    let (new, hashes, set) = (dir.name("new"), dir.name("image.hashes"), dir.file("set", "1\n"));
    for (arguments, code, part) in [
        (&["pack", &image, &raw][..], 2, "is no image"),
        (&["pack", "--force", &raw, &raw], 2, "name another output"),
        (&["pack", &image, &new], 65, "--rebase"),
        (&["pack", "--order", &set, &image, &new], 65, "is an image already"),
        (&["pack", "--hashes-only", &image, &hashes], 65, "is an image already"),
        (&["pack", "--firecracker", &image, &new], 65, "is an image already"),
        (&["pack", "--rebase", &image, &raw], 2, "is no image"),
        (&["pack", &raw, &dir.file("other", "text")], 2, "--force"),
    ] {
        refuses(arguments, code, part);
    }
    assert!(
        fs::read(&raw).expect("a file") == memory() && fs::read(&image).expect("a file") == packed
    );
    assert_eq!(dir.names(), ["image", "other", "raw", "set"]);
    // An image, its hashes and a file without a byte give way, and by force any file.
    object(&["pack", &raw, &image, "--json"]);
    object(&["pack", "--hashes-only", &raw, &dir.file("raw.hashes", ""), "--json"]);
    object(&["pack", "--hashes-only", &raw, &dir.name("raw.hashes"), "--json"]);
    object(&["pack", "--force", &image, &dir.name("other"), "--json"]);
    assert!(run(&["unpack", &dir.name("other"), "-"]).stdout == packed);
}

#[test]
fn arguments_that_cannot_be_followed_are_refused_before_the_input_is_read() {
    let dir = Dir::new("early");
    let (raw, image) = (dir.name("raw"), dir.name("image"));
    // More than is read while anyone waits.
    File::create(&raw).and_then(|file| file.set_len(1 << 42)).expect("a sparse file");
    let small = dir.file("small", memory());
    object(&["pack", &small, &image, "--json"]);
    let (folder, free) = (dir.name("folder"), dir.name("free/"));
    fs::create_dir(&folder).expect("a directory");
    let socket = dir.name("socket");
    let _listener = std::os::unix::net::UnixListener::bind(&socket).expect("a socket");
    for (arguments, code, part) in [
        (&["pack", &raw, &folder][..], 2, "it is a directory"),
        (&["pack", &raw, &free], 2, "it is the name of a directory"),
        (&["pack", &raw, &socket], 2, "it is a socket"),
        (&["unpack", &image, &folder], 2, "it is a directory"),
        (&["unpack", &image, &socket], 2, "it is a socket"),
        (&["pack", &raw, &image, "--region", "0:4T:4K"], 2, "not inside the input"),
        (&["pack", "/dev/zero", &image, "--region", "0xffffffffffffffff:0:4K"], 2, "a region"),
        (&["pack", &raw, &image, "--frame", "3K"], 2, "a frame is a power of two"),
        (&["pack", "s3://bucket/raw", &image, "--level", "40"], 2, "no such level"),
        (&["pack", &small, &image, "--parent", "s3://bucket/x", "--page", "3K"], 2, "a page is"),
    ] {
        refuses(arguments, code, part);
    }
}
