//! Where commands write, and who may read it then: files, links, streams and standard output.

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
        object(&["pack", "--rebase", &image, &back, "--json"]);
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
