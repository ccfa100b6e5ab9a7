//! Helpers of the tests of both programs, `uzone` and `uzone-bench`.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fmt::Display;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use jsonschema::Validator;
use serde_json::Value;

/// Returns a command, without the variables that change its output, and with nothing to read.
pub(crate) fn bare(program: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new(program);
    for name in ["NO_COLOR", "UZONE_STORE_POLICY", "COLUMNS", "TERM", "LC_ALL", "LC_CTYPE", "LANG"]
    {
        command.env_remove(name);
    }
    command.args(arguments).stdin(Stdio::null());
    command
}

pub(crate) fn text(bytes: &[u8]) -> &str {
    str::from_utf8(bytes).expect("output is UTF-8")
}

/// Fails unless a command ended with this code and this text.
pub(crate) fn has_failed(output: &Output, code: i32, part: &str) {
    let stderr = text(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{stderr}");
    let text = stderr.replace("\n  caused by: ", ": ");
    assert!(text.contains(part), "{part}: {stderr}");
}

/// Reports that a case cannot run here, which is an error if `REQUIRE_ALL` is set.
pub(crate) fn skip(name: &str, reason: impl Display) {
    assert!(std::env::var("REQUIRE_ALL").as_deref() != Ok("1"), "{name}: {reason}");
    println!("skipped: {name}: {reason}");
}

/// A directory of one test, removed at its end.
pub(crate) struct Dir(PathBuf);

impl Dir {
    pub(crate) fn new(test: &str) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed); // a name, and nothing else
        let name = format!("uzone-{test}-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
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

/// Returns the schemas of the package, by names such as `uzone.demo-1`.
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

/// Fails unless `object` matches the schema of that name.
pub(crate) fn keeps_to(name: &str, object: &Value) {
    let errors = validators()[name].iter_errors(object).map(|error| error.to_string());
    let errors: Vec<_> = errors.collect();
    assert!(errors.is_empty(), "{errors:#?}");
}
