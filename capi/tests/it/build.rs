//! Programs of C and C++ that are compiled with the library.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// The libraries of the system that the static library needs.
const SYSTEM: [&str; 5] = ["-lgcc_s", "-lpthread", "-lm", "-ldl", "-lc"];
const WARNINGS: [&str; 4] = ["-Wall", "-Wextra", "-Wpedantic", "-Werror"];
/// The exit status of a program that cannot run here.
const SKIPPED: i32 = 77;

/// Returns the folder of the package.
pub(crate) fn package() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Returns the static library, which Cargo built before this program.
pub(crate) fn archive() -> PathBuf {
    let program = std::env::current_exe().unwrap();
    program.parent().unwrap().join("libuzone.a")
}

/// Prints that a case cannot run, and why. Fails where `REQUIRE_ALL=1` is set.
pub(crate) fn skip(name: &str, reason: &str) {
    let is_required = std::env::var_os("REQUIRE_ALL").is_some_and(|value| value == "1");
    assert!(!is_required, "{name} was to run, and cannot: {reason}");
    eprintln!("skipped: {name}: {reason}");
}

/// Returns whether there is a program.
pub(crate) fn is_there(program: &str) -> bool {
    Command::new(program).arg("--version").output().is_ok()
}

/// A folder that is removed with its files.
pub(crate) struct Folder(pub(crate) PathBuf);

impl Folder {
    pub(crate) fn new(name: &str) -> Self {
        let folder = format!("uzone-capi-{name}-{}", std::process::id());
        let folder = std::env::temp_dir().join(folder);
        std::fs::create_dir_all(&folder).unwrap();
        Self(folder)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn succeeded(what: &str, output: &Output) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{what}: {}\n{out}{err}", output.status);
}

/// Compiles a source by `compiler`, without a warning.
pub(crate) fn compile(compiler: &str, source: &Path, flags: &[&str]) {
    let is_cxx =
        source.extension().is_some_and(|extension| extension == "cpp" || extension == "hpp");
    let (language, standard) = if is_cxx { ("c++", "-std=c++17") } else { ("c", "-std=c11") };
    let mut command = Command::new(compiler);
    command.args(["-x", language, standard, "-D_POSIX_C_SOURCE=200809L", "-O1", "-g"]);
    command.args(WARNINGS).arg("-I").arg(package().join("include"));
    command.arg(source).args(["-x", "none"]).args(flags);
    succeeded(&format!("{compiler} {}", source.display()), &command.output().unwrap());
}

/// Compiles an example with the static library. Returns the program.
pub(crate) fn example(name: &str, folder: &Folder, flags: &[&str]) -> PathBuf {
    let program = folder.0.join(name.replace('.', "-"));
    let compiler = if name.ends_with(".cpp") { "c++" } else { "cc" };
    let (archive, output) = (archive(), program.to_str().unwrap().to_owned());
    let mut all = vec!["-o", &output, archive.to_str().unwrap(), "-Wl,--gc-sections"];
    all.extend(SYSTEM);
    all.extend(flags);
    compile(compiler, &package().join("examples").join(name), &all);
    program
}

/// Runs a program with a folder for its files. It succeeds, or says that it cannot run here.
pub(crate) fn run(name: &str, folder: &Folder, command: &mut Command) -> Option<String> {
    let output = command.arg(&folder.0).output().unwrap();
    if output.status.code() == Some(SKIPPED) {
        skip(name, String::from_utf8_lossy(&output.stderr).trim());
        return None;
    }
    succeeded(name, &output);
    Some(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Returns the output of a tool.
pub(crate) fn output_of(program: &str, arguments: &[&OsStr]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap();
    succeeded(program, &output);
    String::from_utf8(output.stdout).unwrap()
}
