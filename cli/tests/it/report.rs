//! `uzone report`: what it writes, and what it does with inputs and outputs that cannot be.

use std::fs;
use std::path::Path;
use std::process::Output;

use crate::common::{Dir, keeps_to, object_of, refuses, text, uzone};
use serde_json::json;

fn run(arguments: &[&str]) -> Output {
    crate::common::run(&[&["report"], arguments].concat())
}

fn bench() -> String {
    json!({"schema": "uzone.bench/1", "benchmark": "pin", "tables": [{"id": "pin-2m"}], "results": [
        {"id": "pin-2m/naive-pin", "name": "naive, pin", "median_ns": 73_800_000},
        {"id": "pin-2m/whole-pin", "name": "whole region, pin", "median_ns": 106_000, "ratio_naive": 705.0}]})
    .to_string()
}

const TRACE: &str = r#"{"schema":"uzone.trace/1","page_size_bytes":4096,"len_bytes":65536,
    "records":[[1000,0,"missing",false,"at_hand",900],[9000,8192,"missing",true,"produced",52000]],
    "latencies":[{"class":"missing","outcome":"at_hand","count":1,"p50_ns":900,"p99_ns":900,"p999_ns":900,"max_ns":900}]}"#;

#[test]
fn a_page_is_written_and_named_and_nothing_else_is_left() {
    let dir = Dir::new("written");
    let (bench, trace) = (dir.file("bench.json", bench()), dir.file("trace.json", TRACE));
    let page = dir.name("out.html");
    let object = object_of(&run(&[&bench, &trace, "-o", &page, "--json"]));
    keeps_to("uzone.report-1", &object);
    assert_eq!(object["documents"], 2);
    for file in object["files"].as_array().expect("an array") {
        assert!(Path::new(file.as_str().expect("a name")).is_file(), "{file}");
    }
    assert_eq!(dir.names(), ["bench.json", "out.html", "trace.json"]);
    let html = fs::read_to_string(&page).expect("the page");
    assert!(html.contains("whole region, pin") && html.contains("Where faults were"));
    // Again, over what is there.
    let output = run(&[&trace, "-o", &page]);
    assert_eq!(text(&output.stdout), format!("{page}\n"));
    assert!(!fs::read_to_string(&page).expect("the page").contains("whole region, pin"));
}

#[test]
fn without_an_output_the_tables_are_printed_in_ascii_and_without_colour() {
    let dir = Dir::new("text");
    let trace = dir.file("trace.json", TRACE);
    let output = run(&[&trace]);
    assert!(output.status.success());
    assert!(text(&output.stdout).is_ascii() && text(&output.stdout).contains("Where faults were"));
    assert!(!output.stdout.contains(&0x1b));
    assert!(text(&output.stdout).contains("missing, at hand"), "{}", text(&output.stdout));
    assert_eq!(dir.names(), ["trace.json"]);
}

#[test]
fn wrong_missing_and_duplicate_arguments_are_refused() {
    let dir = Dir::new("usage");
    let bench = dir.file("bench.json", bench());
    let (out, missing) = (dir.name("out.html"), dir.name("missing.json"));
    let alias = format!("{}/./bench.json", dir.path().display());
    let cut = dir.file("cut.json", &TRACE[..90]);
    let empty = dir.file("empty.json", "");
    let later = dir.file("later.json", TRACE.replace("trace/1", "trace/9"));
    let deep = dir.name("no/where/out.html");
    for (arguments, code, part) in [
        (&[][..], 2, "<FILE>"),
        (&[&bench, "-o"], 2, "a value is required"),
        (&[&bench, "-o", &out, "-o", &out], 2, "cannot be used multiple times"),
        (&[&bench, &alias, "-o", &out], 2, "is given twice"),
        (&[&bench, "-o", &bench], 2, "is an input: name another -o"),
        (&[&bench, "--pdf", &out], 2, "unexpected argument"),
        (&[&missing, "-o", &out], 66, "cannot read"),
        (&[&cut, "-o", &out], 65, "was cut short"),
        (&[&empty, "-o", &out], 65, "is empty"),
        (&[&later, "-o", &out], 65, "uzone.trace/9"),
        (&["/proc/cpuinfo", "-o", &out], 65, "is not JSON"),
        (&["/dev/zero", "-o", &out], 65, "is longer than 256 MiB"),
        (&[&bench, "-o", &dir.name("")], 2, "it is a directory"),
        (&[&bench, "-o", &deep], 74, "make its directory first"),
        (&[&bench, "-o", "/proc/out.html"], 74, "cannot create"),
    ] {
        let output = refuses(&[&["report"], arguments].concat(), code, part);
        assert!(output.stdout.is_empty(), "{arguments:?}");
    }
    assert_eq!(dir.names(), ["bench.json", "cut.json", "empty.json", "later.json"]);
}

#[test]
fn standard_input_is_an_input() {
    let dir = Dir::new("stdin");
    let trace = dir.file("trace.json", TRACE);
    let input = fs::File::open(&trace).expect("the trace");
    let output = uzone(&["report", "-"]).stdin(input).output().expect("it runs");
    assert!(output.status.success() && text(&output.stdout).contains("When faults were"));
    assert_eq!(run(&["-"]).status.code(), Some(65), "there is nothing in it");
}
