//! `uzone pack`, `unpack`, `inspect` and `verify`: what they write, print and exit with.

use std::fs;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::process::Stdio;

use crate::common::{Dir, keeps_to, object, refuses, run, skip, text, uzone};

/// Returns 3 MiB of text, with zeroes in the middle.
fn memory() -> Vec<u8> {
    let mut bytes: Vec<u8> = (0..400_000_u32).flat_map(|n| (n / 3).to_le_bytes()).collect();
    bytes[500_000..900_000].fill(0);
    bytes
}

#[test]
fn an_image_is_packed_inspected_verified_and_unpacked() {
    let dir = Dir::new("image");
    let (raw, image, back) = (dir.file("raw", memory()), dir.name("image"), dir.name("back"));
    for codec in ["zstd", "lz4", "none"] {
        let packed = object(&["pack", &raw, &image, "--codec", codec, "--json"]);
        keeps_to("uzone.pack-1", &packed);
        assert_eq!(packed["image_bytes"], memory().len());
        let root = packed["root"].as_str().expect("a hash");
        let shown = object(&["inspect", &image, "--root", root, "--json"]);
        keeps_to("uzone.inspect-1", &shown);
        assert_eq!(shown["chain"][0]["root"], packed["root"]);
        assert_eq!(shown["chain"][0]["zero_pages"], packed["zero_pages"]);
        let verified = object(&["verify", &image, "--decode", "--root", root, "--json"]);
        keeps_to("uzone.verify-1", &verified);
        assert_eq!(verified["root_was_required"], true);
        let unpacked = object(&["unpack", &image, &back, "--json"]);
        keeps_to("uzone.unpack-1", &unpacked);
        assert!(fs::read(&back).expect("a file") == memory(), "{codec}");
        assert!(run(&["unpack", &image, "-"]).stdout == memory(), "{codec}");
    }
    assert_eq!(dir.names(), ["back", "image", "raw"]);
}

#[test]
fn a_firecracker_snapshot_is_packed_with_its_diffs_and_the_regions_of_its_guest() {
    let dir = Dir::new("firecracker");
    let (image, back, diff) = (dir.name("image"), dir.name("back"), dir.name("vm.mem.1"));
    let mut bytes = vec![7; 64 * 4096];
    let memory = dir.file("vm.mem", &bytes);
    let file = fs::File::create(&diff).expect("a file is made");
    file.set_len(64 * 4096).expect("a sparse file");
    for (page, byte) in [(3_usize, 0), (40, 9)] {
        file.write_all_at(&[byte; 4096], page as u64 * 4096).expect("a page is written");
        bytes[page * 4096..(page + 1) * 4096].fill(byte);
    }
    let pack = ["pack", "--firecracker", &memory, "--diff", &diff, &image];
    let output = run(&pack);
    if output.status.code() == Some(69) {
        // A directory without holes is refused, by name.
        let stderr = text(&output.stderr);
        assert!(stderr.contains("cannot be merged by its holes"), "{stderr}");
        return skip("a_firecracker_snapshot", stderr);
    }
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("a copy that lost or gained holes"));
    object(&["unpack", &image, &back, "--json"]);
    assert!(fs::read(&back).expect("a file") == bytes);
    let regions = ["--region", "0:0:128K", "--region", "0x100000000:128K:128K", "--json"];
    keeps_to("uzone.pack-1", &object(&[&pack[..], &regions].concat()));
    let shown = object(&["inspect", &image, "--json"]);
    assert_eq!(shown["regions"][1]["guest_addr"], 1_u64 << 32);
    assert_eq!(shown["regions"][1]["offset_bytes"], 128 << 10);
    // Every byte of the diff: its holes are zeroes.
    // In an order, as the merged memory is packed.
    let (set, merged) = (dir.file("set", "40\n3\n60\n"), dir.name("merged"));
    let ordered = object(&[&pack[..], &["--order", &set, "--json"]].concat());
    assert_eq!(
        object(&["pack", &back, &merged, "--order", &set, "--json"])["root"],
        ordered["root"]
    );
    assert!(fs::read(&image).expect("an image") == fs::read(&merged).expect("an image"));
    assert!(run(&["unpack", &image, "-"]).stdout == bytes);
    object(&[&pack[..], &["--all-data", "--json"]].concat());
    assert!(run(&["unpack", &image, "-"]).stdout == fs::read(&diff).expect("a file"));
    for (arguments, code, part) in [
        (&["pack", "--diff", &diff, &memory, &image][..], 2, "--firecracker"),
        (&["pack", "--firecracker", &memory, "--all-data", &image], 2, "--diff"),
        (&["pack", "--firecracker", &memory, &memory, &image], 2, "cannot be used with"),
        (&["pack", "--firecracker", &memory, "--diff", &image, &image], 2, "name another output"),
        (
            &["pack", "--firecracker", &memory, "--diff", &back, "--region", "5", &image],
            2,
            "a region is",
        ),
        (
            &["pack", "--firecracker", &memory, "--diff", "/proc/self/cmdline", &image],
            65,
            "not a diff of that memory",
        ),
        (&["pack", &image], 2, "required"),
    ] {
        refuses(arguments, code, part);
    }
}

#[test]
fn a_page_shows_where_the_zero_the_stored_and_the_shared_pages_are() {
    let dir = Dir::new("map");
    let [base, child, page] = ["base", "child", "page.html"].map(|name| dir.name(name));
    let mut bytes = memory();
    let raw = dir.file("raw", &bytes);
    object(&["pack", &raw, &base, "--json"]);
    bytes[100_000] ^= 1;
    fs::write(&raw, &bytes).expect("a file is written");
    let set = dir.file("set", "3\n4\n200\n");
    object(&["pack", &raw, &child, "--parent", &base, "--working-set", &set, "--json"]);
    object(&["inspect", &child, "--report", &page, "--json"]);
    let html = fs::read_to_string(&page).expect("a page");
    // A section for each image of the chain; the parent has no working set, and shares nothing.
    let count = |part: &str| html.matches(part).count();
    assert_eq!(count("<h2"), 2, "{html}");
    assert!(
        count("Where the pages are") >= 2 && count("Where the pages of the working set are") >= 1
    );
    for part in [&*child, &*base, "stored", "shared, in an image below", "zero", "Root "] {
        assert!(html.contains(part), "{part}");
    }
    assert!(!html.contains("<script"));
    refuses(&["inspect", &child, "--report", &base], 2, "name another --report");
    // An image without a byte has a picture without a column.
    fs::write(&raw, []).expect("a file is written");
    let empty = dir.name("empty");
    object(&["pack", &raw, &empty, "--json"]);
    object(&["inspect", &empty, "--report", &page, "--json"]);
    assert!(fs::read_to_string(&page).expect("a page").contains("Where the pages are"));
    assert_eq!(object(&["verify", &child, "--json"])["images"], 2);
}

#[test]
fn an_image_is_packed_in_an_order_and_anew_without_its_parent() {
    let dir = Dir::new("order");
    let [ordered, base, child, alone] =
        ["ordered", "base", "child", "alone"].map(|name| dir.name(name));
    let mut bytes = memory();
    let (raw, set) = (dir.file("raw", &bytes), dir.file("set", "300\n7\n7\n100000\n12\n"));
    keeps_to("uzone.pack-1", &object(&["pack", &raw, &ordered, "--order", &set, "--json"]));
    assert!(run(&["unpack", &ordered, "-"]).stdout == bytes);
    object(&["verify", &ordered, "--decode", "--json"]);
    object(&["pack", &raw, &base, "--frame", "16K", "--working-set", &set, "--json"]);
    bytes[1_000_000] ^= 1;
    fs::write(&raw, &bytes).expect("a file is written");
    let arguments = ["--frame", "32K", "--region", "4096:0:1M", "--working-set", &set, "--json"];
    object(&[&["pack", &raw, &child, "--parent", &base], &arguments[..]].concat());
    let anew = object(&["pack", "--rebase", &child, &alone, "--json"]);
    assert_eq!(anew["frame_bytes"], 32 << 10);
    fs::remove_file(&base).expect("it is needed no more");
    assert!(run(&["unpack", &alone, "-"]).stdout == bytes);
    let shown = object(&["inspect", &alone, "--json"]);
    assert_eq!(shown["chain"].as_array().map(Vec::len), Some(1));
    assert_eq!(shown["regions"][0]["guest_addr"], 4096);
    // 300, 7, 7 and 12: one is not in the image.
    assert_eq!(shown["chain"][0]["working_set_pages"], 4);
    object(&["pack", "--rebase", &alone, &child, "--order", &set, "--page", "8K", "--json"]);
    assert!(run(&["unpack", &child, "-"]).stdout == bytes);
    fs::write(&base, "5\nfive\n").expect("a file is written");
    for (arguments, code, part) in [
        (&["pack", "-", &ordered, "--order", &set][..], 2, "name a file"),
        (&["pack", "--rebase", &alone, &alone], 2, "name another output"),
        (&["pack", &raw, &ordered, "--order", &set, "--parent", &alone], 2, "cannot be used with"),
        (&["pack", "--rebase", &raw, &ordered], 65, "not a packed image"),
        (&["pack", &raw, &ordered, "--order", &base], 65, "line 2 of"),
    ] {
        refuses(arguments, code, part);
    }
}

#[test]
fn raw_memory_with_hashes_beside_it_is_an_image() {
    let dir = Dir::new("hashes");
    let bytes = memory();
    let (raw, hashes) = (dir.file("raw", &bytes), dir.name("raw.hashes"));
    assert_eq!(run(&["verify", &raw]).status.code(), Some(65));
    let other = dir.name("other");
    refuses(&["pack", "--hashes-only", &raw, &other], 2, &format!("name {hashes}"));
    let text = run(&["pack", "--hashes-only", &raw, &hashes]).stdout;
    let text = String::from_utf8_lossy(&text);
    assert!(text.contains(" of hashes in ") && !text.contains("smaller"), "{text}");
    let packed = object(&["pack", "--hashes-only", &raw, &hashes, "--json"]);
    keeps_to("uzone.pack-1", &packed);
    assert_eq!((&packed["codec"], &packed["image_bytes"]), (&"none".into(), &bytes.len().into()));
    let root = packed["root"].as_str().expect("a hash");
    let verified = object(&["verify", &raw, "--root", root, "--json"]);
    keeps_to("uzone.verify-1", &verified);
    assert_eq!(verified["root_was_required"], true);
    keeps_to("uzone.inspect-1", &object(&["inspect", &raw, "--json"]));
    assert!(run(&["unpack", &raw, "-"]).stdout == bytes);
    // Also as a parent.
    let mut after = bytes.clone();
    after[70_000..80_000].fill(9);
    let (changed, child) = (dir.file("changed", &after), dir.name("child"));
    object(&["pack", "--parent", &raw, &changed, &child, "--json"]);
    object(&["verify", &child, "--json"]);
    assert!(run(&["unpack", &child, "-"]).stdout == after);
    // Nothing that an image is read from is replaced.
    for output in [&raw, &hashes, &child] {
        refuses(&["unpack", &child, output], 2, "belongs to");
    }
    assert_eq!(run(&["pack", &changed, &hashes, "--parent", &raw]).status.code(), Some(2));
    object(&["verify", &child, "--json"]);
    let file = fs::File::options().write(true).open(&raw).expect("a file");
    file.write_all_at(&[7], 70_000).expect("it is written");
    refuses(&["verify", &raw], 65, "do not match their hash");
}

#[test]
fn a_pipe_is_packed_and_an_image_stores_what_differs_from_its_parent() {
    let dir = Dir::new("chain");
    let (raw, base, child) = (dir.name("raw"), dir.name("base"), dir.name("child"));
    let mut packing = uzone(&["pack", "-", &base])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .expect("the binary under test runs");
    packing.stdin.take().expect("a pipe").write_all(&memory()).expect("it reads");
    assert!(packing.wait().expect("it ends").success());
    let mut bytes = memory();
    bytes[70_000] ^= 1;
    fs::write(&raw, &bytes).expect("a file is written");
    let packed = object(&["pack", &raw, &child, "--parent", &base, "--json"]);
    assert_eq!(packed["written_frames"], 1);
    let shown = object(&["inspect", &child, "--json"]);
    assert!(
        packed["stored_frames"].is_null(),
        "inspect counts the frames that have bytes, also equal ones"
    );
    assert_eq!(shown["chain"].as_array().map(Vec::len), Some(2));
    assert_eq!(object(&["verify", &child, "--json"])["images"], 2);
    assert!(run(&["unpack", &child, "-"]).stdout == bytes);
    fs::remove_file(&base).expect("it is there");
    refuses(&["verify", &child], 66, "the parent \"base\" of");
}

#[test]
fn what_is_wrong_is_named_and_has_its_exit_code() {
    let dir = Dir::new("wrong");
    let (raw, image) = (dir.file("raw", memory()), dir.name("image"));
    object(&["pack", &raw, &image, "--json"]);
    let mut file = fs::read(&image).expect("a file");
    file[9000] ^= 4;
    let bad = dir.file("bad", file);
    let zeroes = "0".repeat(64);
    for (arguments, code, part) in [
        (vec!["verify", &bad], 65, "is damaged: its bytes do not match their hash"),
        (vec!["unpack", &bad, &dir.name("out")], 65, "is damaged"),
        (vec!["inspect", &image, "--root", &zeroes], 65, "root hash mismatch"),
        (vec!["pack", &raw, &raw], 2, "is both the input and the output"),
        (vec!["inspect", &image, "--root", "12"], 2, "64 hexadecimal digits"),
    ] {
        refuses(&arguments, code, part);
    }
    assert_eq!(dir.names(), ["bad", "image", "raw"], "a failure leaves no file");
}

#[test]
fn a_packer_that_is_killed_leaves_nothing() {
    let dir = Dir::new("killed");
    let image = dir.name("image");
    let mut packing = uzone(&["pack", "-", &image])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .expect("the binary under test runs");
    let mut pipe = packing.stdin.take().expect("a pipe");
    // More than a pipe holds, so that frames are under way.
    pipe.write_all(&memory()).expect("it reads");
    packing.kill().expect("it runs");
    let _ = packing.wait().expect("it ends");
    drop(pipe);
    let left = dir.names();
    // A file system without nameless files keeps a hidden one, which is no image.
    assert!(left.iter().all(|name| name.starts_with('.') && name.ends_with(".part")), "{left:?}");
}
