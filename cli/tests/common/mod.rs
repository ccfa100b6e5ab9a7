//! What the tests of the commands share.
#![allow(dead_code, reason = "each test file is a program of its own and takes what it needs")]

pub(crate) mod served;

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fmt::Display;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use jsonschema::Validator;
use serde_json::Value;
use uzone_attach::{AttachError, AttachOptions, AttachedMemory};

/// How long anything may take before it counts as hanging.
const PATIENCE: Duration = Duration::from_secs(60);
/// The user and the group without rights, by their number on every system.
pub(crate) const UNPRIVILEGED: u32 = 65534;

/// Returns the command, without the variables that change what it prints, and with nothing to read.
pub(crate) fn uzone(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_uzone"));
    for name in ["NO_COLOR", "UZONE_STORE_POLICY", "COLUMNS", "TERM", "LC_ALL", "LC_CTYPE", "LANG"]
    {
        command.env_remove(name);
    }
    command.args(arguments).stdin(Stdio::null());
    command
}

pub(crate) fn run(arguments: &[&str]) -> Output {
    uzone(arguments).output().expect("the binary under test runs")
}

pub(crate) fn text(bytes: &[u8]) -> &str {
    str::from_utf8(bytes).expect("output is UTF-8")
}

/// Returns the object that a command printed which ended well.
pub(crate) fn object_of(output: &Output) -> Value {
    assert!(output.status.success(), "{}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("one JSON object and nothing else")
}

/// Runs what must end well, and returns the object that it prints.
pub(crate) fn object(arguments: &[&str]) -> Value {
    object_of(&run(arguments))
}

/// Fails unless a command ended with this code, and stated this.
pub(crate) fn has_failed(output: &Output, code: i32, part: &str) {
    let stderr = text(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{stderr}");
    assert!(stderr.contains(part), "{part}: {stderr}");
}

/// Runs what must fail with this code, and state this.
pub(crate) fn refuses(arguments: &[&str], code: i32, part: &str) -> Output {
    let output = run(arguments);
    println!("{arguments:?}");
    has_failed(&output, code, part);
    output
}

/// Reports that a case cannot run here, which is an error where all have to.
pub(crate) fn skip(name: &str, reason: impl Display) {
    assert!(std::env::var("REQUIRE_ALL").as_deref() != Ok("1"), "{name}: {reason}");
    println!("skipped: {name}: {reason}");
}

pub(crate) fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let give_up = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < give_up, "{what} is waited for");
        thread::sleep(Duration::from_millis(1));
    }
}

/// Mounts a file system in memory of this size at a new directory, if this user may.
pub(crate) fn small_disk(at: &str, size: &str) -> bool {
    fs::create_dir_all(at).expect("a directory is made");
    let options = ["-t", "tmpfs", "-o", size, "tmpfs", at];
    Command::new("mount").args(options).output().is_ok_and(|output| output.status.success())
}

/// Unmounts it.
pub(crate) fn no_disk(at: &str) {
    let unmounted = Command::new("umount").arg(at).status();
    assert!(unmounted.is_ok_and(|status| status.success()), "a process still has a file there");
}

/// Returns whether an interrupt ends the processes that this one starts, or reports that a case cannot run:
/// a shell has its background commands ignore interrupts, and what they start ignores them too.
pub(crate) fn interrupts_arrive(name: &str) -> bool {
    let status = fs::read_to_string("/proc/self/status").expect("it can be read");
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).expect("a mask");
    let ignored = u64::from_str_radix(ignored.trim(), 16).expect("a hexadecimal number");
    let arrive = ignored & 1 << (2 - 1) == 0; // SIGINT is 2
    if !arrive {
        skip(name, "interrupts are ignored here, as in a background command");
    }
    arrive
}

/// A directory of one test, taken away at its end.
pub(crate) struct Dir(PathBuf);

impl Dir {
    pub(crate) fn new(test: &str) -> Self {
        let path = std::env::temp_dir().join(format!("uzone-{test}-{}", std::process::id()));
        fs::create_dir_all(&path).expect("a directory of our own");
        Self(path)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    pub(crate) fn file(&self, name: &str, bytes: impl AsRef<[u8]>) -> String {
        fs::write(self.0.join(name), bytes).expect("it can be written");
        self.name(name)
    }

    pub(crate) fn name(&self, name: &str) -> String {
        self.0.join(name).to_str().expect("UTF-8").to_owned()
    }

    /// Returns what is in it.
    pub(crate) fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.0).expect("it is there");
        let mut names: Vec<String> = entries
            .map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned())
            .collect();
        names.sort();
        names
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Returns the schemas of `cli/schema`, by names such as `uzone.demo-1`.
fn validators() -> &'static HashMap<String, Validator> {
    static VALIDATORS: OnceLock<HashMap<String, Validator>> = OnceLock::new();
    VALIDATORS.get_or_init(|| {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("schema");
        let entries = fs::read_dir(folder).expect("the schemas");
        let validator = |path: PathBuf| {
            let text = fs::read_to_string(&path).expect("a schema is text");
            let schema = serde_json::from_str(&text).expect("a schema is JSON");
            let name = path.file_name().and_then(OsStr::to_str).expect("UTF-8");
            let name = name.strip_suffix(".schema.json").expect("a schema").to_owned();
            (name, jsonschema::validator_for(&schema).expect("a schema is a schema"))
        };
        entries.map(|entry| validator(entry.expect("an entry").path())).collect()
    })
}

/// Fails unless `object` keeps to the schema of that name.
pub(crate) fn keeps_to(name: &str, object: &Value) {
    let errors = validators()[name].iter_errors(object).map(|error| error.to_string());
    let errors: Vec<_> = errors.collect();
    assert!(errors.is_empty(), "{errors:#?}");
}

/// One test at a time uses the host's pool of huge pages, which some change.
pub(crate) fn pool() -> MutexGuard<'static, ()> {
    static POOL: Mutex<()> = Mutex::new(());
    POOL.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns `len` bytes that do not compress, others for each seed, with zeroes from a quarter to `zeroes_end`.
pub(crate) fn incompressible(len: usize, seed: u64, zeroes_end: usize) -> Vec<u8> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 56) as u8
    };
    let mut bytes: Vec<u8> = (0..len).map(|_| next()).collect();
    bytes[len / 4..zeroes_end].fill(0);
    bytes
}

/// Attaches to a server, if this user may.
pub(crate) fn attach(name: &str, socket: &str, options: &AttachOptions) -> Option<AttachedMemory> {
    match AttachedMemory::attach(Path::new(socket), options) {
        Ok(memory) => Some(memory),
        Err(AttachError::Open(error)) => {
            skip(name, error);
            None
        }
        Err(error) => panic!("{name}: {error}"),
    }
}
