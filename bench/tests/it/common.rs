//! Helpers that the tests of the program share.

use std::collections::HashMap;
use std::fmt::Display;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use jsonschema::Validator;
use serde_json::Value;

/// Returns the program, without the variables that change its output, and with nothing to read.
pub(crate) fn uzone_bench(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_uzone-bench"));
    for name in ["NO_COLOR", "UZONE_STORE_POLICY", "COLUMNS", "TERM", "LC_ALL", "LC_CTYPE", "LANG"]
    {
        command.env_remove(name);
    }
    command.args(arguments).stdin(Stdio::null());
    command
}

/// Runs the program, one at a time: two would measure each other.
pub(crate) fn run(arguments: &[&str]) -> Output {
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    uzone_bench(arguments).output().expect("the binary under test runs")
}

pub(crate) fn text(bytes: &[u8]) -> &str {
    str::from_utf8(bytes).expect("output is UTF-8")
}

/// Returns the object of a run that may have ended with another code than 0.
pub(crate) fn printed(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).expect("one JSON object and nothing else")
}

/// Runs a benchmark that must end well, and returns its object, which keeps to its schema.
pub(crate) fn document(arguments: &[&str]) -> Value {
    let output = run(&[arguments, &["--json"]].concat());
    assert!(output.status.success(), "{}", text(&output.stderr));
    let bench = printed(&output);
    keeps_to("uzone.bench-1", &bench);
    bench
}

/// Runs a command that must fail with this code and this text.
pub(crate) fn refuses(arguments: &[&str], code: i32, part: &str) -> Output {
    let output = run(arguments);
    let stderr = text(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {stderr}");
    assert!(stderr.contains(part), "{arguments:?}: {part}: {stderr}");
    output
}

pub(crate) fn array<'a>(object: &'a Value, key: &str) -> &'a Vec<Value> {
    object[key].as_array().unwrap_or_else(|| panic!("{key} is an array"))
}

pub(crate) fn string<'a>(object: &'a Value, key: &str) -> &'a str {
    object[key].as_str().unwrap_or_else(|| panic!("{key} is a string: {object}"))
}

/// Reports that a case cannot run here, which is an error if all have to.
pub(crate) fn skip(name: &str, reason: impl Display) {
    assert!(std::env::var("REQUIRE_ALL").as_deref() != Ok("1"), "{name}: {reason}");
    println!("skipped: {name}: {reason}");
}

/// Takes the host's pool of huge pages, which one test uses at a time.
pub(crate) fn pool() -> MutexGuard<'static, ()> {
    static POOL: Mutex<()> = Mutex::new(());
    POOL.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A directory of one test, removed at its end.
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

    /// Returns the names of its files.
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

/// Fails unless `object` keeps to the schema of that name, such as `uzone.bench-1`.
pub(crate) fn keeps_to(name: &str, object: &Value) {
    static VALIDATORS: OnceLock<HashMap<String, Validator>> = OnceLock::new();
    let validators = VALIDATORS.get_or_init(|| {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("schema");
        let validator = |entry: Result<fs::DirEntry, std::io::Error>| {
            let text = fs::read_to_string(entry.expect("an entry").path()).expect("text");
            let schema: Value = serde_json::from_str(&text).expect("a schema is JSON");
            let validator = jsonschema::validator_for(&schema).expect("a schema is a schema");
            (string(&schema, "$id").to_owned(), validator)
        };
        fs::read_dir(folder).expect("the schemas").map(validator).collect()
    });
    let validator = &validators[&format!("{name}.schema.json")];
    let errors: Vec<_> = validator.iter_errors(object).map(|error| error.to_string()).collect();
    assert!(errors.is_empty(), "{errors:#?}");
}
