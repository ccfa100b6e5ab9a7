//! `uzone bench` without a benchmark, `--check` and `--report`, and what a signal leaves behind.

mod common;

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Output, Stdio};

use common::{
    Dir, interrupts_arrive, keeps_to, object, object_of, pool, refuses, run, skip, text, uzone,
    wait_until,
};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

fn array<'a>(object: &'a Value, key: &str) -> &'a Vec<Value> {
    object[key].as_array().unwrap_or_else(|| panic!("{key} is an array"))
}

/// Returns the object of a command that may have ended with another code than 0.
fn printed(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).expect("one JSON object")
}

fn string<'a>(object: &'a Value, key: &str) -> &'a str {
    object[key].as_str().unwrap_or_else(|| panic!("{key} is a string: {object}"))
}

#[test]
fn the_quick_run_has_every_benchmark_in_one_document_and_ends_with_the_summary() {
    let _pool = pool();
    let dir = Dir::new("bench-all");
    let page = dir.name("out.html");
    let output = run(&["bench", "--quick", "--json", "--report", &page]);
    assert!(output.stderr.is_empty(), "{}", text(&output.stderr));
    let bench = object_of(&output);
    keeps_to("uzone.bench-1", &bench);
    assert_eq!(bench["benchmark"], "all");
    let parts: Vec<&str> =
        array(&bench, "parameters").iter().map(|part| string(part, "benchmark")).collect();
    assert_eq!(parts, ["bind", "pin", "zero", "copy", "fault", "snapshot", "restore"]);
    let rows = array(&bench, "results");
    let find = |id: &str| rows.iter().find(|row| row["id"] == id);
    let mut ids: Vec<&str> = rows.iter().map(|row| string(row, "id")).collect();
    ids.sort_unstable();
    assert!(ids.windows(2).all(|two| two[0] != two[1]), "an id names one row");
    for row in rows {
        // What is faster than its limit by more than that has none.
        assert!(row["share_of_limit"].as_f64().is_none_or(|share| share <= 1.15), "{row}");
        for (key, role) in [("naive_id", "naive"), ("limit_id", "limit")] {
            let Some(id) = row[key].as_str() else { continue };
            let other = find(id).unwrap_or_else(|| panic!("{id}"));
            // Rows of one sort are also compared with each other: one thread with two, say.
            let is_role = other["role"] == role || other["role"] == row["role"];
            assert!(is_role, "{} is the {role} of {}", other["role"], row["id"]);
            let median = |row: &Value| row["median_ns"].as_f64().expect("a time");
            let ratio = row["ratio_naive"].as_f64().filter(|_| role == "naive");
            let follows = |ratio: f64| (ratio / (median(other) / median(row)) - 1.0).abs() < 1e-9;
            assert!(ratio.is_none_or(follows), "the ratio is that of the medians: {row}");
        }
    }
    let is_skipped =
        |part: &str| array(&bench, "skipped").iter().any(|skipped| skipped["id"] == part);
    for (part, row) in [
        ("bind", "bind-4k/ours-1"),
        ("pin", "pin-2m/whole-pin"),
        ("zero", "zero-cold-later/64K-ours"),
        ("copy", "copy-cold-later/64K-ours"),
        ("fault", "fault-seq-memfd-same/auto"),
        ("snapshot", "snapshot-verify/ours"),
        ("restore", "restore-seq-same/raw"),
    ] {
        assert_ne!(is_skipped(part), find(row).is_some(), "{part}");
    }
    if is_skipped("fault") {
        println!("skipped: densities: {}", bench["skipped"]);
    } else {
        has_densities(rows);
    }
    let summary = array(&bench, "summary");
    for line in summary {
        let ours = find(string(line, "ours")).expect("a row");
        assert_eq!(ours["role"], "ours", "{line}");
        assert_eq!((&line["ours_ns"], &line["naive"]), (&ours["median_ns"], &ours["naive_id"]));
        assert_eq!(line["share_of_limit"], ours["share_of_limit"]);
    }
    for name in ["describe 1 GiB: 64-byte", "pin 1 GiB: 2 MiB folios", "copy 64 KiB", "from a pool"]
    {
        assert!(summary.iter().any(|line| string(line, "name").contains(name)), "{name}");
    }
    let counted = array(&bench["metadata"], "results");
    assert!(counted.iter().any(|row| row["id"] == "metadata-2m/eager"), "{counted:?}");
    let page = fs::read_to_string(&page).expect("the page");
    assert!(page.contains("its figures mean little"), "it names a quick run");
    for part in ["64-byte Linux descriptors", "Descriptors of 1 TiB", "<svg"] {
        assert!(page.contains(part), "{part}");
    }
    assert_eq!(dir.names(), ["out.html"]);
}

#[test]
fn a_quick_run_of_one_benchmark_works_and_is_no_base_of_a_check() {
    let dir = Dir::new("bench-quick");
    for name in ["bind", "copy"] {
        let bench = object(&["bench", name, "--quick", "--json"]);
        keeps_to("uzone.bench-1", &bench);
        assert_eq!((&bench["quick"], &bench["benchmark"]), (&json!(true), &json!(name)));
        let file = dir.file("quick.json", bench.to_string());
        for asked in [&["bench", "--check", &file][..], &["bench", name, "--check", &file]] {
            refuses(asked, 2, "quick.json is a run with --quick");
        }
    }
}

/// Every density has `auto` beside the fixed windows, and the ratio of both.
fn has_densities(rows: &[Value]) {
    for density in ["0.2", "1", "5", "20", "100"] {
        let table = format!("fault-density-{density}-same/");
        let of_table: Vec<&Value> =
            rows.iter().filter(|row| string(row, "id").starts_with(&table)).collect();
        assert!(of_table.len() >= 3, "{table}");
        assert!(of_table.iter().any(|row| row["id"] == format!("{table}auto")), "{table}");
        assert!(of_table.iter().all(|row| row["ratio_best"].is_number()), "{of_table:?}");
    }
}

/// Returns the names of the benchmarks that can be checked.
fn benchmarks() -> Vec<String> {
    let output = run(&["bench", "--help"]);
    let (_, help) = text(&output.stdout).split_once("Commands:").expect("benchmarks");
    let (commands, _) = help.split_once("  help ").expect("the last command");
    let mut names: Vec<String> = commands
        .lines()
        .filter_map(|line| line.strip_prefix("  ")?.split(' ').next())
        .filter(|name| !name.is_empty())
        .map(str::to_owned)
        .collect();
    assert!(names.len() >= 8 && names.contains(&"seeds".to_owned()), "{names:?}");
    names.push("all".to_owned());
    names
}

const SMALL: [&str; 6] =
    ["bench", "copy", "--size=64K", "--rounds=5", "--table=copy-cold-later,copy-hot", "--json"];

#[test]
fn a_check_against_a_run_of_just_now_compares_every_row_and_keeps_to_its_schema() {
    let dir = Dir::new("bench-check");
    let earlier = object(&SMALL);
    let file = dir.file("base.json", earlier.to_string());
    let benchmarks = benchmarks();
    for asked in [&["bench", "--check", &file][..], &["bench", "copy", "--check", &file]] {
        let output = run(&[asked, &["--json"]].concat());
        let checked = printed(&output);
        for name in &benchmarks {
            let mut of_another = checked.clone();
            of_another["benchmark"] = json!(name);
            keeps_to("uzone.bench-check-1", &of_another);
        }
        keeps_to("uzone.bench-check-1", &checked);
        let is_ok = checked["is_ok"].as_bool().expect("true or false");
        assert_eq!(output.status.code(), Some(i32::from(!is_ok)), "{checked}");
        let compared = array(&checked, "rows").len();
        assert_eq!(compared, array(&earlier, "results").len());
        for key in ["new", "gone", "not_comparable", "warnings"] {
            assert_eq!(array(&checked, key).len(), 0, "{key}");
        }
        for row in array(&checked, "rows") {
            let is_judged = row["verdict"] != "yardstick";
            assert_eq!(is_judged, ["ours", "variant"].contains(&string(row, "role")), "{row}");
        }
    }
}

#[test]
fn a_row_that_was_three_times_as_good_is_a_regression_that_is_seen_twice() {
    let dir = Dir::new("bench-doctored");
    let mut earlier = object(&SMALL);
    let machine = &mut earlier["machine"];
    // With a command to the terminal.
    machine["cpu"] = json!("Another\u{1b} CPU");
    // As a file of a version that did not name it.
    machine.as_object_mut().expect("an object").remove("stream");
    let rows = earlier["results"].as_array_mut().expect("an array");
    const ID: &str = "copy-cold-later/64K-ours";
    for row in rows.iter_mut().filter(|row| row["id"] == ID) {
        row["noise"] = json!({"median": 0.0, "ratio_naive": 0.0, "share_of_limit": 0.0});
        for key in ["share_of_limit", "ratio_naive"] {
            // More than any round is off by.
            row[key] = json!(row[key].as_f64().expect("a number") * 30.0);
        }
    }
    let mut unknown = rows[0].clone();
    unknown["id"] = json!("copy-cold-later/of-yesterday");
    rows.push(unknown);
    let first = rows.iter_mut().find(|row| row["id"] == "copy-cold-later/4K-ours");
    first.expect("a row")["bytes"] = json!(1);
    let second = rows.iter().position(|row| row["id"] == "copy-cold-later/16K-ours");
    rows.remove(second.expect("a row"));
    let file = dir.file("base.json", earlier.to_string());

    let arguments = ["bench", "--check", &file, "--json"];
    let output = refuses(&arguments, 1, "another CPU (Another\u{fffd} CPU");
    let checked = printed(&output);
    keeps_to("uzone.bench-check-1", &checked);
    let row = array(&checked, "rows").iter().find(|row| row["id"] == ID).expect("the row");
    assert_eq!(
        (&row["verdict"], &row["measure"]),
        (&json!("worse_twice"), &json!("share_of_limit"))
    );
    assert!(row["again"].as_f64().expect("a number") < row["then"].as_f64().expect("a number"));
    assert_eq!(checked["new"], json!(["copy-cold-later/16K-ours"]));
    assert_eq!(checked["gone"], json!(["copy-cold-later/of-yesterday"]));
    assert_eq!(checked["not_comparable"][0]["id"], "copy-cold-later/4K-ours");

    let output = run(&["bench", "--check", &file]);
    assert_eq!(output.status.code(), Some(1));
    for part in [
        ID,
        "slower twice",
        "of its limit",
        "new: copy-cold-later/16K-ours",
        "gone: copy-cold-later/of-yesterday",
        "another amount of work",
        "measured twice",
        "then: Another\u{fffd} CPU, ",
    ] {
        assert!(text(&output.stdout).contains(part), "{part}: {}", text(&output.stdout));
    }
}

#[test]
fn an_earlier_run_that_cannot_be_compared_with_is_refused_with_what_would_help() {
    let dir = Dir::new("bench-refused");
    let earlier = object(&SMALL);
    let base = dir.file("base.json", earlier.to_string());
    let later = dir.file("later.json", earlier.to_string().replace("bench/1", "bench/2"));
    let cut = dir.file("cut.json", &earlier.to_string()[..300]);
    let mut old = earlier.clone();
    old.as_object_mut().expect("an object").remove("parameters");
    let old = dir.file("old.json", old.to_string());
    let twice = dir.file("twice.json", format!("{earlier}{earlier}"));
    let mut none = earlier.clone();
    none["results"] = json!([]);
    let none = dir.file("none.json", none.to_string());
    let report = dir.name("no/where/out.html");
    let missing = dir.name("missing.json");
    for (arguments, code, part) in [
        (&["--check", &missing][..], 66, "cannot read"),
        (&["--check", &later], 65, "is \"uzone.bench/2\", and reports are made of uzone.bench/1"),
        (&["--check", &cut], 65, "was cut short"),
        (&["--check", &old], 65, "measure again with this version"),
        (&["--check", &twice], 65, "something else than one uzone.bench/1"),
        (&["--check", &none], 65, "no row of"),
        (&["--check", "/proc/cpuinfo"], 65, "is not JSON or was cut short: give what `uzone bench"),
        (&["zero", "--check", &base], 2, "check it with `uzone bench copy --check`"),
        (&["copy", "--rounds=9", "--check", &base], 2, "rounds is 5 in"),
        (&["bind", "--metadata", "--check", &base], 2, "leave --check out"),
        (&["--check", &base, "--report", &base], 2, "the page would take its place"),
        (&["--check"], 2, "a value is required"),
        (&["copy", "--size=4K", "--report", &report], 74, "make its directory first"),
        (&["copy", "--size=4K", "--report", "/"], 2, "it is a directory"),
    ] {
        let output = refuses(&[&["bench"], arguments].concat(), code, part);
        assert!(output.stdout.is_empty(), "{arguments:?}");
    }
    let files = ["base.json", "cut.json", "later.json", "none.json", "old.json", "twice.json"];
    assert_eq!(dir.names(), files);
}

/// A run that goes on until it is ended.
struct Running(Child);

impl Running {
    fn new(arguments: &[&str]) -> Self {
        let child = uzone(arguments).stdout(Stdio::null()).stderr(Stdio::piped()).spawn();
        Self(child.expect("the binary under test runs"))
    }

    /// Waits until `is_so`, and returns whether it came to that before the run ended.
    fn wait_until(&mut self, is_so: impl Fn(u32) -> bool) -> bool {
        let mut came = false;
        wait_until("what the run does", || {
            came = is_so(self.0.id());
            came || self.0.try_wait().expect("it is ours").is_some()
        });
        came
    }

    /// Sends a signal, and returns the number of the one that ended the run.
    fn end(mut self, signal: Signal) -> Option<i32> {
        kill_process(Pid::from_child(&self.0), signal).expect("it runs");
        self.0.wait().expect("it is ours").signal()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Also where an assertion failed.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_signal_in_the_middle_of_clearing_leaves_the_pool_of_huge_pages_as_it_was() {
    const NAME: &str = "a_signal_in_the_middle_of_clearing_leaves_the_pool_of_huge_pages_as_it_was";
    const FILE: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";
    let _pool = pool();
    let read = || fs::read_to_string(FILE).unwrap_or_default();
    let before = read();
    if fs::write(FILE, &before).is_err() {
        return skip(NAME, format_args!("{FILE} cannot be written"));
    }
    let zero = ["bench", "zero", "--size=4K", "--table=zero-kernel"];
    let tried = object(&[&zero[..], &["--rounds=1", "--json"]].concat());
    let is_hugetlb = |row: &Value| string(row, "name").starts_with("hugetlb");
    if !array(&tried, "results").iter().any(is_hugetlb) {
        return skip(NAME, "the pool cannot be made larger: free memory is in small pieces");
    }
    for signal in [Signal::INT, Signal::TERM] {
        if signal == Signal::INT && !interrupts_arrive(NAME) {
            continue;
        }
        let arguments = [&zero[..], &["--rounds=10000", "--quiet"]].concat();
        let mut running = Running::new(&arguments);
        assert!(running.wait_until(|_| read() != before), "the pool is made larger");
        assert_eq!(running.end(signal), Some(signal.as_raw()), "it dies of the signal that it got");
        // What it still had of the pool goes with the last of its memory.
        wait_until("the pool as it was", || read() == before);
    }
}

#[test]
fn a_signal_in_the_middle_of_mapping_a_file_leaves_its_directory_empty() {
    if !interrupts_arrive("a_signal_in_the_middle_of_mapping_a_file") {
        return;
    }
    let dir = Dir::new("bench-signal");
    let path = dir.path().to_str().expect("UTF-8");
    let arguments =
        ["bench", "fault", "--size=64M", "--rounds=10000", "--table=fault-seq-file", "--dir", path];
    let mut running = Running::new(&arguments);
    let has_file = |process: u32| {
        let open = fs::read_dir(Path::new("/proc").join(process.to_string()).join("fd"));
        let is_inside = |link: fs::DirEntry| {
            fs::read_link(link.path()).is_ok_and(|target| target.starts_with(dir.path()))
        };
        open.is_ok_and(|links| links.flatten().any(is_inside))
    };
    assert!(running.wait_until(has_file), "the file is made");
    assert_eq!(dir.names(), [""; 0], "it has no name");
    assert_eq!(running.end(Signal::INT), Some(Signal::INT.as_raw()));
    assert_eq!(dir.names(), [""; 0]);
}
