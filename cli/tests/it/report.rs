//! `uzone report`: what it writes, and what it does with inputs and outputs that cannot be.

use std::fs;
use std::num::NonZeroUsize;
use std::path::Path;
use std::process::Output;
use std::sync::Arc;

use crate::common::{
    Dir, has_failed, keeps_to, no_disk, object_of, refuses, skip, small_disk, text, uzone,
};
use serde_json::{Value, json};
use uzone_fault::{Engine, FunctionBacking, LazyOptions};
use uzone_pages::{ByteLen, PageSize};
use uzone_report::{Machine, Trace};

fn run(arguments: &[&str]) -> Output {
    crate::common::run(&[&["report"], arguments].concat())
}

fn bench() -> String {
    json!({"schema": "uzone.bench/1", "benchmark": "pin", "results": [
        {"id": "pin-2m/naive-pin", "name": "naive, pin", "median_ns": 73_800_000},
        {"id": "pin-2m/whole-pin", "name": "whole region, pin", "median_ns": 106_000, "ratio_naive": 705.0}]})
    .to_string()
}

const TRACE: &str = r#"{"schema":"uzone.trace/1","page_size_bytes":4096,"len_bytes":65536,
    "records":[[1000,0,"missing",false,"at_hand",900],[9000,8192,"missing",true,"produced",52000]]}"#;

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

#[test]
fn a_full_disk_leaves_the_old_page_and_nothing_else() {
    let dir = Dir::new("full");
    let bench = dir.file("bench.json", bench());
    let disk = dir.name("disk");
    if !small_disk(&disk, "size=16k") {
        let name = "a_full_disk_leaves_the_old_page_and_nothing_else";
        return skip(name, "it needs to mount a tmpfs");
    }
    let page = format!("{disk}/out.html");
    fs::write(&page, "old").expect("there is room for that");
    // Three of its four pages: the report needs more.
    fs::write(format!("{disk}/ballast"), vec![1; 12 << 10]).expect("there is room for that");
    let output = run(&[&bench, "-o", &page]);
    let old = fs::read_to_string(&page);
    let left = fs::read_dir(&disk).map(Iterator::count);
    no_disk(&disk);
    has_failed(&output, 74, "make room there");
    assert_eq!((old.expect("the page").as_str(), left.expect("the disk")), ("old", 2));
}

#[test]
fn a_real_trace_keeps_to_its_schema_and_is_shown() {
    let engine = Engine::new(NonZeroUsize::MIN).expect("an engine");
    let backing = FunctionBacking::quick(|_, pages: &mut [u8]| {
        pages.fill(1);
        Ok(())
    });
    let (len, options) = (ByteLen::mib(4), LazyOptions::default().trace(100));
    let memory = match engine.map(len, Arc::new(backing), &options) {
        Ok(memory) => memory,
        Err(error) => return skip("a_real_trace_keeps_to_its_schema_and_is_shown", error),
    };
    for offset in (0..len.get()).step_by(64 << 10) {
        memory.read_at(offset, &mut [0]).expect("the page is there");
    }
    // What is noted comes after the answer that the reader waited for.
    while memory.latencies().iter().map(|latency| latency.count).sum::<u64>()
        < memory.stats().faults
    {
        std::thread::yield_now();
    }
    let (faults, lost) = memory.take_trace();
    let trace =
        Trace::new(Machine::default(), PageSize::KIB_4, len, &faults, lost, &memory.latencies());
    assert!(!trace.records.is_empty());
    let mut written = Vec::new();
    trace.write_to(&mut written).expect("memory takes it");
    let object: Value = serde_json::from_slice(&written).expect("JSON");
    keeps_to("uzone.trace-1", &object);
    assert_eq!(serde_json::from_slice::<Trace>(&written).expect("a trace"), trace);
    let dir = Dir::new("trace");
    let file = dir.file("trace.json", written);
    let output = run(&[&file]);
    assert!(text(&output.stdout).contains("missing, at hand"), "{}", text(&output.stdout));
}
