//! Attempts of a worker to break out, as a process that was taken over by parsed bytes would.
//!
//! Each attempt is a process of its own, which opens an image as a worker does and then makes the attempt: a
//! denied system call ends it.

use std::fs;
use std::io;
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use uzone_os::uffd::{Features, KernelFaults, Uffd};
use uzone_server::{ServerOptions, Worker};
use uzone_snapshot::Packer;

use crate::common::needs::skip;
use crate::common::{outcome_of, report, to_try, was_ended};

/// Makes an attempt. An attempt that must end the process returns its result.
fn attempt(what: &str, folder: &Path) -> io::Result<()> {
    match what {
        "to read its parent" => fs::read(folder.join("below")).map(drop),
        "to read the recorded set" => fs::read(folder.join("record/set")).map(drop),
        "to make a file beside the recorded set" => fs::write(folder.join("record/other"), "x"),
        "to start this program again" => {
            let mut again = Command::new(std::env::current_exe()?);
            let status = again.arg("no_such_test").status()?;
            assert!(status.success());
            Ok(())
        }
        "to start a thread" => std::thread::Builder::new().spawn(|| {}).map(drop),
        "to read a secret beside the image" => fs::read(folder.join("secret")).map(drop),
        "to read a file of root's" => fs::read("/etc/shadow").map(drop),
        "to read its own memory map" => fs::read("/proc/self/maps").map(drop),
        "to remove the image" => fs::remove_file(folder.join("packed")),
        "to rename the image" => fs::rename(folder.join("packed"), folder.join("record/packed")),
        "to link the secret" => fs::hard_link(folder.join("secret"), folder.join("record/secret")),
        "to make a socket's name" => UnixListener::bind(folder.join("record/socket")).map(drop),
        "to open the device of faults" => fs::File::open("/dev/userfaultfd").map(drop),
        "to start a copy of this program" => {
            Command::new(folder.join("record/copy")).status().map(drop)
        }
        "to have all capabilities" => {
            let all = rustix::thread::CapabilitySet::all();
            let (effective, permitted, inheritable) = (all, all, all);
            let sets = rustix::thread::CapabilitySets { effective, permitted, inheritable };
            Ok(rustix::thread::set_capabilities(None, sets)?)
        }
        "to connect to a service" => UnixStream::connect(folder.join("service")).map(drop),
        "to send to a service" => UnixDatagram::pair().map(drop),
        "to connect by TCP" => TcpStream::connect("127.0.0.1:9").map(drop),
        "to listen by TCP" => TcpListener::bind("127.0.0.1:0").map(drop),
        "to see faults of the kernel" => {
            let opened = Uffd::open(Features::NONE, Features::NONE, KernelFaults::Required);
            opened.map(drop).map_err(io::Error::other)
        }
        "to have an io_uring" => {
            let mut params = rustix::io_uring::io_uring_params::default();
            // SAFETY: it reads and writes `params`, which has no descriptor in it.
            let ring = unsafe { rustix::io_uring::io_uring_setup(1, &mut params) };
            Ok(ring.map(drop)?)
        }
        what => crate::common::attempt(what, folder),
    }
}

const ALLOWED: [&str; 5] = [
    "to read the image",
    "to read its parent",
    "to read the recorded set",
    "to make a file beside the recorded set",
    "to start a thread",
];
/// These get an error.
const REFUSED: [&str; 11] = [
    "to read a secret beside the image",
    "to read a file of root's",
    "to read its own memory map",
    "to read the memory of its parent",
    "to list a folder",
    "to write to the image",
    "to make a file beside the image",
    "to remove the image",
    "to rename the image",
    "to link the secret",
    "to open the device of faults",
];
/// These end the process.
const ENDED: [&str; 10] = [
    "to have all capabilities",
    "to make a socket's name",
    "to connect to a service",
    "to send to a service",
    "to connect by TCP",
    "to listen by TCP",
    "to have another root",
    "to be another user",
    "to see faults of the kernel",
    "to have an io_uring",
];

/// These end the process without a line: the C library holds signals back while it starts a program.
const STARTED: [&str; 3] =
    ["to start this program again", "to start a shell", "to start a copy of this program"];

/// No test, but the process that others start.
#[test]
fn a_worker_that_tries_to_break_out() {
    let Some((what, folder)) = to_try() else { return };
    let mut options = ServerOptions::default();
    options.record = Some(folder.join("record/set"));
    let worker = Worker::open(&folder.join("packed"), options, None).unwrap();
    assert!(!worker.sandbox().has_capabilities);
    for missing in &worker.sandbox().missing {
        println!("missing: {missing}");
    }
    report(attempt(&what, &folder));
}

/// Makes an image with a parent, and files that are none of a worker's business.
fn folder() -> PathBuf {
    let folder = std::env::temp_dir().join(format!("uzone-break-out-{}", std::process::id()));
    fs::create_dir_all(folder.join("record")).unwrap();
    let mut bytes = vec![7; 1 << 20];
    let below = folder.join("below");
    Packer::default().pack(&mut &bytes[..], &below, None, &|_| true).unwrap();
    bytes[4096] = 8;
    let parent = uzone_snapshot::Image::open(&below, &uzone_snapshot::OpenOptions::default());
    let parent = parent.unwrap();
    let packed = folder.join("packed");
    Packer::default().pack(&mut &bytes[..], &packed, Some(&parent), &|_| true).unwrap();
    for image in [&below, &packed] {
        fs::set_permissions(image, fs::Permissions::from_mode(0o644)).unwrap();
    }
    fs::write(folder.join("secret"), "of another").unwrap();
    fs::copy("/bin/true", folder.join("record/copy")).unwrap();
    folder
}

#[test]
fn a_worker_reads_its_image_and_does_nothing_else() {
    let folder = folder();
    let _service = UnixListener::bind(folder.join("service")).unwrap();
    let outcome =
        |what: &str| outcome_of("sandbox::a_worker_that_tries_to_break_out", what, &folder);
    let (_, first) = outcome(ALLOWED[0]);
    let text = String::from_utf8_lossy(&first.stdout).into_owned();
    if let Some(missing) = text.lines().find(|line| line.contains("missing: ")) {
        fs::remove_dir_all(folder).unwrap();
        return skip("a_worker_reads_its_image_and_does_nothing_else", missing);
    }
    let expected = ALLOWED.map(|what| (what, "done"));
    for (what, expected) in expected.into_iter().chain(REFUSED.map(|what| (what, "refused"))) {
        let (line, output) = outcome(what);
        assert_eq!(line.as_deref(), Some(expected), "{what}: {output:?}");
    }
    ENDED.into_iter().for_each(|what| was_ended(what, outcome(what)));
    for what in STARTED {
        let (line, output) = outcome(what);
        assert_eq!((line, output.status.signal()), (None, Some(31)), "{what}: {output:?}");
    }
    assert_eq!(fs::read(folder.join("secret")).unwrap(), b"of another");
    assert!(!folder.join("new").exists() && folder.join("packed").exists());
    fs::remove_dir_all(folder).unwrap();
}
