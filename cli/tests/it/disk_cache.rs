//! `--cache-dir`: frames and indexes of images in object storage that are kept on disk, damaged, shared and
//! given up.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt, symlink};
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::sync::mpsc::channel;

use crate::common::{Dir, incompressible, no_disk, object_of, skip, small_disk, text, uzone};
use crate::s3::{Act, Server};
use rustix::fs::{CWD, FileType, Mode};

const LEN: usize = 20 << 20;

/// Returns bytes that do not compress, other ones for each seed, with zeroes in the middle.
fn memory(seed: u64) -> Vec<u8> {
    incompressible(LEN, seed, LEN / 3)
}

/// A server with one image, and a directory with a cache.
struct Case {
    server: Server,
    dir: Dir,
}

impl Case {
    fn new(test: &str) -> Self {
        Self { server: Server::start(test), dir: Dir::new(test) }
    }

    /// Packs an image, and returns its bytes.
    fn pack(&self, key: &str, seed: u64) -> Vec<u8> {
        let bytes = memory(seed);
        let raw = self.dir.file("raw", &bytes);
        object_of(&self.run(&["pack", &raw, &url(key), "--json"]));
        bytes
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = uzone(arguments);
        command.envs(self.server.environment());
        command
    }

    fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().expect("the binary under test runs")
    }

    fn cache(&self) -> String {
        self.dir.name("cache")
    }

    /// Unpacks an image by way of the cache, and returns how many requests that took.
    fn unpack(&self, key: &str, bytes: &[u8]) -> u64 {
        self.server.decide(|_| Act::Pass);
        let output = self.run(&["unpack", &url(key), "-", "--cache-dir", &self.cache()]);
        assert!(output.status.success(), "{}", text(&output.stderr));
        assert!(output.stdout == bytes, "the bytes are those of the image");
        let stderr = text(&output.stderr);
        assert!(stderr.starts_with("unpacked ") && stderr.lines().count() == 1, "{stderr}");
        self.server.requests()
    }

    /// Returns the files of frames.
    fn files(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(self.cache()).expect("it is there");
        let paths = entries.map(|entry| entry.expect("an entry").path());
        paths.filter(|path| path.extension().is_some_and(|end| end == "frames")).collect()
    }

    /// Returns how much room all files take, those of indexes too.
    fn used(&self) -> u64 {
        let entries = fs::read_dir(self.cache()).expect("it is there");
        let files = entries.map(|entry| entry.expect("an entry").metadata().expect("a file"));
        files.map(|file| file.blocks() * 512).sum()
    }
}

fn url(key: &str) -> String {
    format!("s3://images/{key}")
}

#[test]
fn frames_are_fetched_once_and_served_from_the_disk_then() {
    let case = Case::new("cache-once");
    let bytes = case.pack("image", 1);
    let (first, second) = (case.unpack("image", &bytes), case.unpack("image", &bytes));
    // What tells the object from others is asked for each time.
    assert!(first > 6 && second == 1, "{first} requests, then {second}");
    let arguments = ["verify", &url("image"), "--cache-dir", &case.cache(), "--json"];
    let verified = object_of(&case.run(&arguments));
    assert!(verified["frames"].as_u64().expect("a number") > 200);
}

#[test]
fn frames_that_are_damaged_on_the_disk_are_fetched_and_stored_anew() {
    let case = Case::new("cache-damage");
    let bytes = case.pack("image", 2);
    case.unpack("image", &bytes);
    let path = &case.files()[0];
    let file = File::options().read(true).write(true).open(path).expect("a file");
    let len = file.metadata().expect("a file").len();
    for at in (0..len).step_by(1 << 20) {
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).expect("a byte");
        file.write_all_at(&[byte[0] ^ 16], at).expect("a byte");
    }
    let mended = case.unpack("image", &bytes);
    assert!(mended > 6, "{mended} requests");
    assert_eq!(case.unpack("image", &bytes), 1, "it is right again");
    for len in [len / 2, 3, 0] {
        file.set_len(len).expect("it is cut");
        case.unpack("image", &bytes);
    }
    fs::write(path, vec![0x5a; LEN + 5000]).expect("it is overwritten");
    case.unpack("image", &bytes);
}

#[test]
fn a_writer_of_the_cache_that_is_killed_leaves_nothing_that_is_wrong() {
    let case = Case::new("cache-killed");
    let bytes = case.pack("image", 3);
    for last in [1, 4, 7] {
        let (sender, sent) = channel();
        case.server.decide(move |seen| {
            let _ = sender.send(());
            if seen.number >= last { Act::Hang } else { Act::Pass }
        });
        let arguments = ["verify", &url("image"), "--cache-dir", &case.cache(), "--quiet"];
        let mut writer = case.command(&arguments).spawn().expect("the binary under test runs");
        for _ in 0..=last {
            sent.recv().expect("requests");
        }
        writer.kill().expect("it runs");
        writer.wait().expect("it ends");
    }
    case.unpack("image", &bytes);
    assert_eq!(case.unpack("image", &bytes), 1, "all of it is kept");
}

#[test]
fn processes_share_a_cache() {
    let case = Case::new("cache-shared");
    let bytes = case.pack("image", 4);
    let arguments = ["unpack", &url("image"), "-", "--cache-dir", &case.cache(), "--quiet"];
    let start = || {
        let mut command = case.command(&arguments);
        command.stdout(Stdio::piped()).spawn().expect("the binary under test runs")
    };
    let children: Vec<_> = (0..3).map(|_| start()).collect();
    std::thread::scope(|scope| {
        for child in children {
            let bytes = &bytes;
            scope.spawn(move || {
                let output = child.wait_with_output().expect("it ends");
                assert!(output.status.success() && output.stdout == *bytes);
            });
        }
    });
    assert_eq!(case.files().len(), 1);
    assert_eq!(case.unpack("image", &bytes), 1);
}

#[test]
fn the_image_that_was_opened_the_longest_time_ago_gives_room_unless_it_is_in_use() {
    let case = Case::new("cache-limit");
    let limit = 56 << 20;
    let images: Vec<_> = ["a", "b", "c", "d"].into_iter().zip(5..).collect();
    let mut seen = Vec::new();
    let mut locked = None;
    for (key, seed) in images {
        let bytes = case.pack(key, seed);
        let arguments = ["unpack", &url(key), "-", "--cache-disk-bytes", "56M", "--cache-dir"];
        let output = case.run(&[&arguments[..], &[&case.cache()]].concat());
        assert!(output.status.success() && output.stdout == bytes, "{}", text(&output.stderr));
        assert!(case.used() <= limit, "{key}: {} bytes", case.used());
        let new = case.files().into_iter().find(|path| !seen.contains(path)).expect("its file");
        seen.push(new.clone());
        if key == "b" {
            // As a process that has it open.
            let file = File::open(&new).expect("a file");
            file.lock_shared().expect("no process removes");
            locked = Some(file);
        }
    }
    let is_kept: Vec<bool> = seen.iter().map(|path| path.exists()).collect();
    assert_eq!(is_kept, [false, true, false, true], "a is the oldest, and b is in use");
    drop(locked);
}

/// Unpacks where the cache cannot be written, which is no error and one warning.
fn is_no_error(case: &Case, bytes: &[u8], output: &Output) {
    let stderr = text(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    assert!(output.stdout == bytes);
    assert_eq!(stderr.matches("without being kept").count(), 1, "{stderr}");
    assert!(stderr.contains(&case.cache()) && stderr.contains("cannot write"), "{stderr}");
}

#[test]
fn a_cache_that_cannot_grow_is_given_up_with_one_warning() {
    let case = Case::new("cache-full");
    let bytes = case.pack("image", 9);
    // A file of at most 1 MiB.
    let mut command = case.command(&[]);
    let program = command.get_program().to_owned();
    command = Command::new("sh");
    command.arg("-c").arg("ulimit -f 2048; exec \"$0\" \"$@\"").arg(program);
    command.args(["unpack", &url("image"), "-", "--cache-dir", &case.cache()]);
    let output = command.envs(case.server.environment()).output().expect("a shell");
    is_no_error(&case, &bytes, &output);
    // A device that is full.
    fs::remove_dir_all(case.cache()).expect("it is removed");
    if !small_disk(&case.cache(), "size=4m") {
        return skip("a_cache_on_a_full_device", "this user mounts no tmpfs");
    }
    let output = case.run(&["unpack", &url("image"), "-", "--cache-dir", &case.cache()]);
    no_disk(&case.cache());
    is_no_error(&case, &bytes, &output);
    let message = case.run(&["verify", &url("image"), "--cache-dir", "/proc/none"]);
    assert!(text(&message.stderr).contains("cannot create /proc/none"));
    assert!(!message.status.success());
}

#[test]
fn no_link_no_fifo_and_no_lock_of_another_user_is_followed_or_waited_for() {
    let case = Case::new("cache-hostile");
    let bytes = case.pack("image", 10);
    case.unpack("image", &bytes);
    let frames = case.files().remove(0);
    let lock = PathBuf::from(case.cache()).join("lock");
    let victim = case.dir.file("victim", "as it was");
    let unpack = || {
        let program = case.command(&[]).get_program().to_owned();
        let mut command = Command::new("timeout");
        command.arg("30").arg(program).args(["unpack", &url("image"), "-", "--cache-dir"]);
        command.arg(case.cache()).envs(case.server.environment());
        let output = command.output().expect("it runs");
        let stderr = text(&output.stderr).to_owned();
        assert!(output.status.success() && output.stdout == bytes, "{}: {stderr}", output.status);
        assert_eq!(fs::read(&victim).expect("a file"), b"as it was");
        stderr
    };
    fs::remove_file(&frames).expect("it is ours");
    symlink(&victim, &frames).expect("a link");
    let stderr = unpack();
    assert!(stderr.contains(".frames: it is a symbolic link"), "{stderr}");
    fs::remove_file(&frames).expect("it is ours");
    fs::hard_link(&victim, &frames).expect("a link");
    assert!(unpack().contains(".frames: it has another name"));
    fs::remove_file(&frames).expect("it is ours");
    fs::remove_file(&lock).expect("it is ours");
    rustix::fs::mknodat(CWD, &lock, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).expect("a FIFO");
    assert!(unpack().contains("the file lock beside it: it is not a regular file"));
    fs::remove_file(&lock).expect("it is ours");
    // Any user who may read a file may lock it.
    let held = [&lock, &frames].map(|path| {
        let file = File::create(path).expect("a file");
        file.lock().expect("it is ours");
        file
    });
    assert!(unpack().contains("another process has held its lock for 2s"));
    drop(held);
    case.unpack("image", &bytes);
    assert_eq!(case.unpack("image", &bytes), 1, "it is kept again");
}
