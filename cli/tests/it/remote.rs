//! `uzone pack`, `unpack`, `inspect`, `verify` and `serve` with images in object storage.

use std::fs;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use crate::common::served::Server as PageServer;
use crate::common::{
    Dir, has_failed, incompressible, keeps_to, object_of, skip, small_disk, text, uzone,
};
use crate::s3::{Act, Server};
use rustix::process::Signal;
use serde_json::Value;
use uzone_attach::{AttachOptions, AttachedMemory};

fn command(server: &Server, arguments: &[&str]) -> Command {
    let mut command = uzone(arguments);
    command.envs(server.environment());
    command
}

fn run(server: &Server, arguments: &[&str]) -> Output {
    command(server, arguments).output().expect("the binary under test runs")
}

fn object(server: &Server, arguments: &[&str]) -> Value {
    object_of(&run(server, arguments))
}

/// Runs what must fail with this code, and state this. Returns all that it states.
fn fails(server: &Server, code: i32, arguments: &[&str], part: &str) -> String {
    let output = run(server, arguments);
    println!("{arguments:?}");
    has_failed(&output, code, part);
    text(&output.stderr).to_owned()
}

/// Lets a page server end.
fn drain(server: &Server, socket: &str, mut served: PageServer) {
    object(server, &["drain", "--socket", socket, "--json"]);
    assert!(served.wait().success());
}

/// Attaches to a server, if this user may.
fn attach(socket: &str) -> Option<AttachedMemory> {
    crate::common::attach("reading what is served", socket, &AttachOptions::default())
}

/// Packs an image into a bucket. Returns its bytes, and the command that serves it: this process attaches to
/// that, and must outlive a page that fails.
fn in_bucket(
    server: &Server,
    dir: &Dir,
    url: &str,
    cache: &str,
    bytes: Vec<u8>,
) -> (Vec<u8>, Command) {
    let (raw, socket) = (dir.file("raw", &bytes), dir.name("sock"));
    object(server, &["pack", &raw, url, "--json"]);
    let arguments = ["serve", "--json", url, "--socket", &socket, "--on-failure", "hold"];
    (bytes, command(server, &[&arguments[..], &["--cache-dir", cache]].concat()))
}

fn is_served(memory: &AttachedMemory, bytes: &[u8]) -> bool {
    let mut seen = vec![0; bytes.len()];
    memory.mapping().read_at(0, &mut seen).expect("it is served");
    seen == bytes
}

/// Returns bytes that do not compress, with zeroes in the middle.
fn memory(len: usize) -> Vec<u8> {
    incompressible(len, 7, len / 2)
}

#[test]
fn an_image_is_packed_into_a_bucket_and_inspected_verified_and_unpacked_from_there() {
    let (server, dir) = (Server::start("cli"), Dir::new("remote"));
    let bytes = memory(3 << 20);
    let (raw, back) = (dir.file("raw", &bytes), dir.name("back"));
    let packed = object(&server, &["pack", &raw, "s3://images/vm/image", "--json"]);
    keeps_to("uzone.pack-1", &packed);
    assert_eq!(packed["image"], "s3://images/vm/image");
    let url = format!("s3://images/vm/image#root={}", packed["root"].as_str().expect("a hash"));
    let shown = object(&server, &["inspect", &url, "--json"]);
    assert_eq!(shown["chain"][0]["image"], "s3://images/vm/image");
    assert_eq!(shown["chain"][0]["file_bytes"], packed["file_bytes"]);
    let verified = object(&server, &["verify", &url, "--decode", "--json"]);
    keeps_to("uzone.verify-1", &verified);
    assert_eq!(verified["root_was_required"], true);
    object(&server, &["unpack", &url, &back, "--json"]);
    assert!(fs::read(&back).expect("a file") == bytes);
    assert!(run(&server, &["unpack", &url, "-"]).stdout == bytes);
    // Raw bytes as objects, in and out.
    object(&server, &["unpack", &url, "s3://images/raw", "--json"]);
    assert!(fs::read(server.object("raw")).expect("an object") == bytes);
    let again = object(&server, &["pack", "s3://images/raw", &dir.name("again"), "--json"]);
    assert_eq!(again["root"], packed["root"]);
    // With hashes beside them, they are an image.
    let to = "s3://images/raw.hashes";
    let hashes = object(&server, &["pack", "--hashes-only", "s3://images/raw", to, "--json"]);
    let url = format!("s3://images/raw#root={}", hashes["root"].as_str().expect("a hash"));
    assert!(run(&server, &["unpack", &url, "-"]).stdout == bytes);
}

#[test]
fn a_firecracker_snapshot_in_a_bucket_is_packed_with_its_diffs_and_in_an_order() {
    let (server, dir) = (Server::start("firecracker"), Dir::new("firecracker-remote"));
    let (diff, image, merged) = (dir.name("diff"), dir.name("image"), dir.name("merged"));
    let mut bytes = memory(4 << 20);
    server.put("vm.mem", &bytes);
    let file = fs::File::create(&diff).expect("a file is made");
    file.set_len(4 << 20).expect("a sparse file");
    for (page, byte) in [(3_usize, 0), (40, 9), (900, 8)] {
        file.write_all_at(&[byte; 4096], page as u64 * 4096).expect("a page is written");
        bytes[page * 4096..(page + 1) * 4096].fill(byte);
    }
    let raw = dir.file("raw", &bytes);
    let numbers: String = (0..300).map(|number| format!("{}\n", number * 499 % 1024)).collect();
    let set = dir.file("set", numbers);
    let pack = ["pack", "--firecracker", "s3://images/vm.mem", &image];
    for options in [&[][..], &["--order", &set]] {
        let output = run(&server, &[&pack[..], &["--diff", &diff, "--quiet"], options].concat());
        if output.status.code() == Some(69) {
            skip("a Firecracker snapshot in a bucket", text(&output.stderr));
            break;
        }
        assert!(output.status.success(), "{}", text(&output.stderr));
        object(&server, &[&["pack", &raw, &merged, "--json"], options].concat());
        let read = |name: &String| fs::read(name).expect("an image");
        assert!(read(&image) == read(&merged), "{options:?}");
    }
    // A diff in the bucket has no holes.
    server.put("vm.mem.1", &bytes);
    let with_object = [&pack[..], &["--diff", "s3://images/vm.mem.1", "--json"]].concat();
    let message = fails(&server, 69, &with_object, "s3://images/vm.mem.1 is in object storage");
    assert!(message.contains("the local file") && message.contains("--all-data"), "{message}");
    object(&server, &[&with_object[..], &["--all-data"]].concat());
    assert!(run(&server, &["unpack", &image, "-"]).stdout == bytes);
    let none = ["pack", "--firecracker", "s3://images/none", &image];
    fails(&server, 66, &none, "s3://images/none: there is no such object");
}

#[test]
fn an_object_appears_when_it_is_whole_and_what_was_sent_of_another_is_removed() {
    let (server, dir) = (Server::start("whole"), Dir::new("whole"));
    let bytes = memory(40 << 20);
    let raw = dir.file("raw", &bytes);
    let url = "s3://images/image";
    let part = |seen: &crate::s3::Seen<'_>| seen.query.contains("partNumber=3");
    server.decide(move |seen| if part(seen) { Act::Fail(403) } else { Act::Pass });
    let pack = ["pack", &raw, url, "--threads", "2"];
    fails(&server, 77, &pack, "s3://images/image: the store refuses");
    assert_eq!(server.files(), [""; 0]);
    // The whole upload fails when it is to be completed.
    let completes =
        |seen: &crate::s3::Seen<'_>| seen.method == "POST" && seen.query.contains("uploadId");
    server.decide(move |seen| if completes(seen) { Act::Fail(403) } else { Act::Pass });
    fails(&server, 77, &["pack", &raw, url], "cannot finish s3://images/image");
    assert_eq!(server.files(), [""; 0]);
    server.decide(|_| Act::Pass);
    let packed = object(&server, &["pack", &raw, url, "--json"]);
    assert!(server.requests() >= 6, "it is sent in parts");
    let len = fs::metadata(server.object("image")).expect("an object").len();
    assert_eq!(packed["file_bytes"], len);
    assert!(run(&server, &["unpack", url, "-"]).stdout == bytes);
}

#[test]
fn a_packer_that_is_killed_leaves_no_object() {
    let (server, dir) = (Server::start("killed"), Dir::new("killed"));
    let raw = dir.file("raw", memory(40 << 20));
    let (sender, sent) = std::sync::mpsc::channel();
    server.decide(move |seen| {
        let _ = sender.send(());
        if seen.query.contains("partNumber=2") { Act::Hang } else { Act::Pass }
    });
    let mut packer = command(&server, &["pack", &raw, "s3://images/image", "--quiet"]);
    let mut packer = packer.spawn().expect("the binary under test runs");
    for _ in 0..3 {
        sent.recv().expect("requests");
    }
    packer.kill().expect("it runs");
    packer.wait().expect("it ends");
    assert!(!server.object("image").exists());
    server.decide(|_| Act::Pass);
    let inspect = ["inspect", "s3://images/image"];
    fails(&server, 66, &inspect, "there is no such object; check the URL");
}

#[test]
fn a_child_finds_its_parent_in_the_same_bucket_and_no_other_place_is_taken() {
    let (server, dir) = (Server::start("parents"), Dir::new("parents"));
    let mut bytes = memory(2 << 20);
    let (raw, local) = (dir.file("raw", &bytes), dir.name("local"));
    object(&server, &["pack", &raw, "s3://images/base/parent", "--json"]);
    object(&server, &["pack", &raw, &local, "--json"]);
    bytes[100] ^= 1;
    fs::write(&raw, &bytes).expect("a file is written");
    let to = ["pack", &raw, "s3://images/vm/child", "--json", "--parent"];
    let packed = object(&server, &[&to[..], &["s3://images/base/parent"]].concat());
    assert_eq!(packed["written_frames"], 1);
    let shown = object(&server, &["inspect", "s3://images/vm/child", "--json"]);
    assert_eq!(shown["chain"][1]["image"], "s3://images/base/parent");
    assert!(run(&server, &["unpack", "s3://images/vm/child", "-"]).stdout == bytes);
    fails(&server, 2, &[&to[..], &[&local]].concat(), "objects of one store");
}

#[test]
fn a_key_is_the_one_that_its_url_has_with_escapes_or_without() {
    let (server, dir) = (Server::start("keys"), Dir::new("keys"));
    let mut bytes = memory(1 << 20);
    let (raw, changed) = (dir.file("raw", &bytes), dir.name("changed"));
    bytes[100] ^= 1;
    fs::write(&changed, &bytes).expect("a file is written");
    for (parent, key, child) in [
        ("ü/parent", "ü/parent", "ü/child"),
        ("%C3%BC/again", "ü/again", "ü/child"),
        ("p%q", "p%q", "p%r"),
        ("v/p%2541q", "v/p%41q", "v/child"),
        ("a b/parent", "a b/parent", "a%20b/child"),
    ] {
        let [parent, child] = [parent, child].map(|key| format!("s3://images/{key}"));
        object(&server, &["pack", &raw, &parent, "--json"]);
        assert!(server.object(key).exists(), "{parent}: {:?}", server.files());
        let packed = object(&server, &["pack", &changed, &child, "--parent", &parent, "--json"]);
        assert_eq!(packed["written_frames"], 1);
        assert!(run(&server, &["unpack", &child, "-"]).stdout == bytes, "{child}");
        // The parent by the name that the child has for it.
        let shown = object(&server, &["inspect", &child, "--json"]);
        let name = shown["chain"][1]["image"].as_str().expect("a name");
        assert_eq!(object(&server, &["inspect", name, "--json"])["chain"][0]["image"], name);
    }
    let files = server.files();
    for url in ["s3://images/out/", "s3://images/a//b", "s3://images/a/../b"] {
        fails(&server, 2, &["pack", &raw, url], "does not name one object");
    }
    for url in ["s3://images", "s3://images/"] {
        fails(&server, 2, &["pack", &raw, url], "names no object");
        fails(&server, 2, &["inspect", url], "names no object");
    }
    assert_eq!(server.files(), files);
}

#[test]
fn what_a_store_or_the_environment_lacks_is_named() {
    let (server, dir) = (Server::start("lacks"), Dir::new("lacks"));
    let raw = dir.file("raw", memory(1 << 20));
    object(&server, &["pack", &raw, "s3://images/image", "--json"]);
    let inspect = ["inspect", "s3://images/image", "--source-retry-count", "0"];
    let without = |names: &[&str]| {
        let mut command = command(&server, &inspect);
        names.iter().for_each(|name| _ = command.env_remove(name));
        // Where a machine of AWS finds its credentials.
        command.env("AWS_METADATA_ENDPOINT", "http://127.0.0.1:1");
        let output = command.output().expect("the binary under test runs");
        assert_eq!(output.status.code(), Some(74), "{}", text(&output.stderr));
        text(&output.stderr).to_owned()
    };
    let message = without(&["AWS_ALLOW_HTTP"]);
    assert!(message.contains("set AWS_ALLOW_HTTP=true"), "{message}");
    let message = without(&["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"]);
    assert!(message.contains("set AWS_ACCESS_KEY_ID and"), "{message}");
    assert!(message.contains("~/.aws/credentials are not read"), "{message}");
    server.decide(|_| Act::Chunked);
    fails(&server, 74, &inspect, "in chunks, without a Content-Length");
    server.decide(|_| Act::NoTotal);
    fails(&server, 74, &inspect, "a Content-Range that does not state the length");
}

#[test]
fn what_cannot_be_read_or_written_names_the_url_the_operation_and_the_fix() {
    let (server, dir) = (Server::start("names"), Dir::new("names"));
    let raw = dir.file("raw", "text ".repeat(5000));
    object(&server, &["pack", &raw, "s3://images/image", "--json"]);
    let other = format!("s3://images/image#root={}", "7".repeat(64));
    fails(&server, 65, &["verify", &other], "root hash mismatch");
    let hash = "s3://images/image#hash=7";
    fails(&server, 2, &["verify", hash], "root= and the 64 hexadecimal digits");
    let to = "http://127.0.0.1:1/image";
    let message = fails(&server, 74, &["pack", &raw, to], &format!("cannot create {to}"));
    assert!(message.contains("write to s3, gs or az"), "{message}");
    server.decide(|_| Act::Fail(403));
    let message = fails(&server, 77, &["inspect", "s3://images/image"], "open s3://images/image");
    assert!(message.contains("grant it, or set others in the environment"), "{message}");
}

#[test]
fn requests_are_repeated_as_the_options_have_it_and_a_bad_value_names_its_option() {
    let (server, dir) = (Server::start("requests"), Dir::new("requests"));
    let raw = dir.file("raw", memory(1 << 20));
    let url = "s3://images/image";
    object(&server, &["pack", &raw, url, "--json"]);
    let pause = ["--source-retry-pause", "1ms"];
    let fails_for = |first: u64| {
        server.decide(move |seen| if seen.number < first { Act::Fail(503) } else { Act::Pass });
    };
    let packed = dir.name("packed");
    for command in [
        &["inspect", url][..],
        &["verify", url],
        &["unpack", url, "-"],
        &["pack", "--rebase", url, &packed],
    ] {
        let run = |options: &[&str]| run(&server, &[command, &pause, options].concat());
        fails_for(9);
        let done = run(&["--source-retry-count", "9"]);
        assert!(done.status.success(), "{command:?}: {}", text(&done.stderr));
        // As often by its length alone.
        fails_for(8);
        let done = run(&["--source-retry-count", "3"]);
        assert_eq!(done.status.code(), Some(74), "{command:?}");
        assert!(text(&done.stderr).contains("check the network"), "{}", text(&done.stderr));
        assert_eq!(server.requests(), 8, "{command:?}");
    }
    fails_for(u64::MAX);
    let socket = dir.name("sock");
    let serve = ["serve", url, "--socket", &socket, "--source-retry-count=1", "--deadline", "9"];
    let message = fails(&server, 74, &[&serve[..], &pause].concat(), "");
    assert_eq!(server.requests(), 4);
    for part in ["--deadline 9", "25s", "--source-retry 15s", "--source-timeout 5s"] {
        assert!(message.contains(part), "{message}");
    }
    let long = ["--deadline", "26"];
    let message = fails(&server, 74, &[&serve[..5], &pause, &long].concat(), "");
    assert!(!message.contains("--deadline"), "{message}");
    for option in ["--source-timeout", "--source-retry", "--source-retry-pause"] {
        for value in ["0", "0s", "25h", "soon"] {
            let message = fails(&server, 2, &["serve", url, option, value], "a time is");
            assert!(message.contains(option), "{message}");
        }
    }
    fails(&server, 2, &["inspect", url, "--source-retry-count=-1"], "--source-retry-count");
}

#[test]
fn a_server_serves_an_image_of_a_bucket() {
    let (server, dir) = (Server::start("serve"), Dir::new("serve-remote"));
    let (url, socket, cache) = ("s3://images/image", dir.name("sock"), dir.name("cache"));
    let (bytes, mut serve) = in_bucket(&server, &dir, url, &cache, memory(1 << 20));
    // By a name, which is looked up.
    let [_, _, (variable, endpoint), ..] = server.environment();
    serve.env(variable, endpoint.replace("127.0.0.1", "localhost"));
    let mut served = PageServer::beside(&mut serve);
    let listening = served.next_event("listening");
    assert_eq!(listening["image"], url);
    assert_eq!(listening["sandbox"]["seccomp"], true, "{listening}");
    let worker = &object(&server, &["status", "--socket", &socket, "--json"])["worker"];
    for task in fs::read_dir(format!("/proc/{worker}/task")).expect("it runs") {
        let status = fs::read_to_string(task.expect("a thread").path().join("status"));
        let status = status.expect("it is read");
        assert!(status.contains("\nSeccomp:\t2\n"), "also those that fetch: {status}");
        assert!(status.contains("\nCapEff:\t0000000000000000\n"), "{status}");
    }
    if let Some(memory) = attach(&socket) {
        assert!(is_served(&memory, &bytes));
        // A confined process keeps what it fetched, by threads that answer.
        let kept = fs::read_dir(&cache).expect("a directory");
        let kept: Vec<_> = kept.map(|entry| entry.expect("a file")).collect();
        let lens = kept.iter().map(|file| file.metadata().expect("it is there").len());
        assert!(lens.sum::<u64>() > bytes.len() as u64 / 2);
        let is_index = |name: &str| name.ends_with(".index");
        assert!(
            kept.iter().any(|file| file.file_name().to_str().is_some_and(is_index)),
            "{kept:?}"
        );
        let status = object(&server, &["status", "--socket", &socket, "--json"]);
        assert_eq!(status["worker_deaths"], 0);
    }
    drain(&server, &socket, served);
}

#[test]
fn a_server_serves_raw_memory_of_a_bucket_until_it_is_replaced() {
    uzone_os::sigbus::install().expect("a handler");
    let (server, dir) = (Server::start("raw"), Dir::new("serve-raw"));
    let (socket, cache, log) = (dir.name("sock"), dir.name("cache"), dir.name("log"));
    let bytes = memory(3 << 20);
    server.put("raw", &bytes);
    server.put("cut", &bytes[..5000]);
    for url in ["s3://images/cut", &format!("s3://images/raw#root={}", "7".repeat(64))] {
        fails(&server, 65, &["serve", url, "--socket", &socket], "is not a packed image");
    }
    let arguments = ["serve", "--json", "s3://images/raw", "--socket", &socket];
    let others = ["--on-failure", "poison", "--cache-dir", &cache, "--cache-bytes", "1M"];
    let arguments = [&arguments[..], &others].concat();
    let mut serve = command(&server, &arguments);
    let served = PageServer::spawn(serve.stderr(fs::File::create(&log).expect("a file")));
    let memories = [attach(&socket), attach(&socket)];
    if let [Some(first), Some(second)] = &memories {
        assert!(is_served(first, &bytes));
        let log = fs::read_to_string(log).expect("its messages");
        assert!(
            log.contains("raw memory has no hashes and is not kept in the disk cache"),
            "{log}"
        );
        let others: Vec<u8> = bytes.iter().map(|byte| !byte).collect();
        let mut page = [0; 4096];
        second.mapping().read_at(1 << 20, &mut page).expect("it is served");
        server.put("raw", &others);
        // Some pages were fetched along with others, and none is of the other object.
        let mut failed = 0;
        for at in (0..bytes.len()).step_by(64 << 10) {
            match second.mapping().read_at(at as u64, &mut page) {
                Ok(()) => assert!(page == bytes[at..at + 4096], "a wrong byte at {at}"),
                Err(_) => failed += 1,
            }
        }
        assert!(failed > 0, "they cannot be had any more");
        let status = object(&server, &["status", "--socket", &socket, "--json"]);
        assert_eq!(status["worker_deaths"], 0);
    }
    drop(memories);
    drain(&server, &socket, served);
}

#[test]
fn a_worker_whose_keeper_dies_answers_on_from_the_bucket() {
    let (server, dir) = (Server::start("keeper"), Dir::new("serve-keeper"));
    let (url, socket, cache) = ("s3://images/image", dir.name("sock"), dir.name("cache"));
    let (bytes, mut serve) = in_bucket(&server, &dir, url, &cache, memory(1 << 20));
    let mut served = PageServer::spawn(&mut serve);
    let memory = attach(&socket);
    served.signal(Signal::KILL);
    served.wait();
    if let Some(memory) = memory {
        assert!(is_served(&memory, &bytes));
    }
    // The last process that has the pipe has ended.
    let mut rest = String::new();
    served.lines.read_to_string(&mut rest).expect("it is read");
    assert!(!rest.contains("worker_ended"), "{rest}");
}

/// A file system in memory at a directory with room for 128 KiB, unmounted when this ends.
struct SmallDisk(String);

impl SmallDisk {
    fn mount(at: String) -> Option<Self> {
        let disk = small_disk(&at, "size=4m").then_some(Self(at))?;
        fs::write(format!("{}/other", disk.0), vec![1; (4 << 20) - (128 << 10)]).expect("it fits");
        Some(disk)
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // A test that failed may have left a process with a file open.
        let _ = Command::new("umount").args(["--lazy", &self.0]).status();
    }
}

#[test]
fn a_server_with_a_full_disk_under_its_cache_serves_from_the_bucket_and_names_the_disk() {
    let (server, dir) = (Server::start("full"), Dir::new("serve-full"));
    let (socket, log) = (dir.name("sock"), dir.name("log"));
    let Some(disk) = SmallDisk::mount(dir.name("cache")) else {
        return skip("a full disk under the cache", "this user mounts no tmpfs");
    };
    let url = "s3://images/image";
    let (bytes, mut serve) = in_bucket(&server, &dir, url, &disk.0, memory(8 << 20));
    let served = PageServer::spawn(serve.stderr(fs::File::create(&log).expect("a file")));
    let mut has_attached = true;
    // A part of what the second program needs is on the disk.
    for _ in 0..2 {
        match attach(&socket) {
            Some(memory) => assert!(is_served(&memory, &bytes)),
            None => has_attached = false,
        }
    }
    let status = object(&server, &["status", "--socket", &socket, "--json"]);
    let log = fs::read_to_string(log).expect("its messages");
    assert_eq!(status["worker_deaths"], 0, "{log}");
    drain(&server, &socket, served);
    let warnings = log.matches("without being kept").count();
    assert_eq!(warnings, usize::from(has_attached), "{log}");
    assert!(!has_attached || log.contains(&format!("cannot write {}", disk.0)), "{log}");
}

/// The socket for a program that is ended: these tests, started again.
const VICTIM: &str = "UZONE_REMOTE_TEST_VICTIM";
/// The name of the test that starts these tests again.
const THIS: &str =
    "remote::a_machine_whose_source_is_slower_than_the_deadline_is_ended_at_the_deadline_and_named";

#[test]
fn a_machine_whose_source_is_slower_than_the_deadline_is_ended_at_the_deadline_and_named() {
    if let Ok(socket) = std::env::var(VICTIM) {
        let Some(memory) = attach(&socket) else { return };
        let mut page = [0; 4096];
        let read = memory.mapping().read_at(0, &mut page);
        panic!("it saw {:?} and {read:?}", &page[..8]);
    }
    let (server, dir) = (Server::start("deadline"), Dir::new("serve-deadline"));
    let (raw, socket) = (dir.file("raw", memory(1 << 20)), dir.name("sock"));
    let url = "s3://images/image";
    object(&server, &["pack", &raw, url, "--json"]);
    for slow in [Act::Hang, Act::Late(Duration::from_secs(300))] {
        server.decide(|_| Act::Pass);
        // Far longer than the deadline, so that it is not the source that gives up.
        let serve = ["serve", "--json", url, "--socket", &socket, "--deadline", "1"];
        let patient = ["--source-timeout", "300s", "--source-retry", "300s"];
        let mut serve = command(&server, &[&serve[..], &patient].concat());
        let mut served = PageServer::spawn(serve.stderr(Stdio::null()));
        // The program can attach, if this user may: it would end well otherwise.
        if attach(&socket).is_none() {
            return drain(&server, &socket, served);
        }
        let (sender, asked) = std::sync::mpsc::channel();
        server.decide(move |_| {
            let _ = sender.send(Instant::now());
            slow
        });
        let mut victim = Command::new(std::env::current_exe().expect("these tests"));
        victim.args([THIS, "--exact", "--nocapture"]).env(VICTIM, &socket).stdout(Stdio::null());
        let mut victim = victim.stderr(Stdio::piped()).spawn().expect("these tests run");
        let mut saw = String::new();
        victim.stderr.take().expect("a pipe").read_to_string(&mut saw).expect("it is read");
        let status = victim.wait().expect("it ends");
        let ended = Instant::now();
        assert_eq!((status.signal(), saw.as_str()), (Some(9), ""), "{slow:?}: {status}");
        let waited = ended - asked.recv().expect("a request");
        // Half of it is left for what comes before the first request.
        let (least, most) = (Duration::from_millis(500), Duration::from_secs(60));
        assert!((least..most).contains(&waited), "{slow:?}: {waited:?}");
        let failed = served.event("failed");
        assert_eq!((&failed["pid"], &failed["was_killed"]), (&victim.id().into(), &true.into()));
        assert_eq!(failed["offset"], 0, "{failed}");
        assert!(failed["reason"].as_str().is_some_and(|why| why.contains("1s")), "{failed}");
        drain(&server, &socket, served);
    }
}
