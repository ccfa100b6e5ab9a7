//! Sets `UZONE_COMMIT` to the commit of the build, if there is a repository.

use std::path::Path;
use std::process::Command;

fn main() {
    // It grows with every commit; without it there is no repository.
    let log = Path::new("../../.git/logs/HEAD");
    if !log.exists() {
        println!("cargo::rerun-if-changed=build.rs");
        return;
    }
    println!("cargo::rerun-if-changed={}", log.display());
    let commit = Command::new("git").args(["rev-parse", "--short=12", "HEAD"]).output();
    if let Ok(commit) = commit
        && commit.status.success()
        && let Ok(commit) = String::from_utf8(commit.stdout)
    {
        println!("cargo::rustc-env=UZONE_COMMIT={}", commit.trim());
    }
}
