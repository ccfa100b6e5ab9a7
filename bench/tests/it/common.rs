//! Helpers that the tests of the program share.

#[path = "../../../cli/tests/it/common/base.rs"]
#[allow(dead_code, reason = "these tests use a part of it")]
mod base;

use std::process::{Command, Output};
use std::sync::{Mutex, PoisonError};

use serde_json::Value;

pub(crate) use self::base::*;

/// Returns the program with nothing to read.
pub(crate) fn uzone_bench(arguments: &[&str]) -> Command {
    bare(env!("CARGO_BIN_EXE_uzone-bench"), arguments)
}

/// Runs the program, one at a time: two would measure each other.
pub(crate) fn run(arguments: &[&str]) -> Output {
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    uzone_bench(arguments).output().expect("the binary under test runs")
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
    println!("{arguments:?}");
    has_failed(&output, code, part);
    output
}

pub(crate) fn array<'a>(object: &'a Value, key: &str) -> &'a Vec<Value> {
    object[key].as_array().unwrap_or_else(|| panic!("{key} is an array"))
}

pub(crate) fn string<'a>(object: &'a Value, key: &str) -> &'a str {
    object[key].as_str().unwrap_or_else(|| panic!("{key} is a string: {object}"))
}
