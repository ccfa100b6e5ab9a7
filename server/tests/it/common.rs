//! Helpers of the tests of the page server: an image of known pages, and a folder for it.
#![allow(dead_code, reason = "each test file is a program of its own and takes what it needs")]

use std::fs::{self, File};
use std::io;
use std::ops::Deref;
use std::os::unix::fs::FileExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use uzone_snapshot::{FileSource, Packer};

#[path = "../../../os/tests/common/needs.rs"]
pub(crate) mod needs;

/// The oracle: a page of the image.
pub(crate) fn page_of(index: u64) -> Vec<u8> {
    if index % 5 == 3 {
        return vec![0; 4096];
    }
    let word = |at: u64| ((index * 512 + at + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)).to_le_bytes();
    (0..512).flat_map(word).collect()
}

/// The folder of one test, with an image in it, `raw` and `packed`. It is taken away at the end.
pub(crate) struct Folder(PathBuf);

impl Folder {
    pub(crate) fn new(name: &str, pages: u64) -> Self {
        let folder = std::env::temp_dir().join(format!("uzone-{name}-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let raw: Vec<u8> = (0..pages).flat_map(page_of).collect();
        fs::write(folder.join("raw"), &raw).unwrap();
        // Every user may read the image: a worker is another user.
        let source = FileSource::open(folder.join("raw")).unwrap();
        let packer = Packer::default();
        packer.pack_source(&source, &folder.join("packed"), None, &|_| true).unwrap();
        Self(folder)
    }
}

impl Deref for Folder {
    type Target = Path;

    fn deref(&self) -> &Path {
        &self.0
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Makes a byte of a frame in the first half of a packed image another one.
pub(crate) fn damage(packed: &Path) {
    let file = File::options().read(true).write(true).open(packed).unwrap();
    let (mut byte, at) = ([0], file.metadata().unwrap().len() / 4);
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 1], at).unwrap();
}

/// The variable that names an attempt of a confined process, and the folder of its image.
const TRY: &str = "UZONE_SERVER_TEST_TRY";
const FOLDER: &str = "UZONE_SERVER_TEST_FOLDER";

/// Returns the attempt of this process, and the folder, if another process has started it for one.
pub(crate) fn to_try() -> Option<(String, PathBuf)> {
    Some((std::env::var(TRY).ok()?, std::env::var_os(FOLDER)?.into()))
}

/// Makes an attempt that no confined process may, beside the image `packed` of a folder.
pub(crate) fn attempt(what: &str, folder: &Path) -> io::Result<()> {
    match what {
        "to read the image" => fs::read(folder.join("packed")).map(drop),
        "to read the memory of its parent" => {
            let parent = rustix::process::getppid().unwrap().as_raw_nonzero();
            File::open(format!("/proc/{parent}/mem")).map(drop)
        }
        "to list a folder" => fs::read_dir("/").map(drop),
        "to write to the image" => {
            File::options().write(true).open(folder.join("packed")).map(drop)
        }
        "to make a file beside the image" => fs::write(folder.join("new"), "x"),
        "to start a shell" => Command::new("/bin/sh").status().map(drop),
        "to have another root" => Ok(rustix::process::chroot("/")?),
        "to be another user" => {
            Ok(rustix::thread::set_thread_uid(rustix::process::Uid::from_raw(65534))?)
        }
        _ => unreachable!("{what}"),
    }
}

/// Prints the outcome of an attempt, for the process that has started this one.
pub(crate) fn report(outcome: io::Result<()>) {
    match outcome {
        Ok(()) => println!("outcome: done"),
        // The second is Landlock's answer to moving a file to another folder.
        Err(cause)
            if matches!(
                cause.kind(),
                io::ErrorKind::PermissionDenied | io::ErrorKind::CrossesDevices
            ) =>
        {
            println!("outcome: refused");
        }
        Err(cause) => println!("outcome: {cause:?}"),
    }
}

/// Starts a test of this program as a process that makes an attempt. Returns its report, unless it has ended before.
pub(crate) fn outcome_of(test: &str, what: &str, folder: &Path) -> (Option<String>, Output) {
    let mut this = Command::new(std::env::current_exe().unwrap());
    this.args([test, "--exact", "--nocapture", "--test-threads=1"]);
    let output = this.env(TRY, what).env(FOLDER, folder).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let line = text.lines().find_map(|line| line.split("outcome: ").nth(1).map(str::to_owned));
    (line, output)
}

/// Fails unless a process was ended by a system call that it may not make, and has named that.
pub(crate) fn was_ended(what: &str, (line, output): (Option<String>, Output)) {
    // `SIGSYS`.
    assert_eq!((line, output.status.signal()), (None, Some(31)), "{what}: {output:?}");
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(message.contains("made system call "), "{what}: {message}");
}
