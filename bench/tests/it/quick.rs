//! `uzone-bench --quick`: every benchmark in one document.

use std::path::Path;

use serde_json::{Value, json};

use crate::common::{Dir, array, document, refuses, string};

#[test]
fn the_quick_run_has_every_benchmark_in_one_document_and_ends_with_the_summary() {
    let bench = document(&["--quick"]);
    assert_eq!(bench["benchmark"], "all");
    let parts: Vec<&str> =
        array(&bench, "parameters").iter().map(|part| string(part, "benchmark")).collect();
    assert_eq!(parts, ["bind", "pin", "zero", "copy", "fault", "snapshot", "restore", "hostpool"]);
    let rows = array(&bench, "results");
    println!("{} rows in {} tables", rows.len(), array(&bench, "tables").len());
    assert!((100..=260).contains(&rows.len()), "{} rows", rows.len());
    assert!(rows.iter().all(|row| row["median_ns"].as_u64() > Some(0)), "a row measured nothing");
    let find = |id: &str| rows.iter().find(|row| row["id"] == id);
    let mut ids: Vec<&str> = rows.iter().map(|row| string(row, "id")).collect();
    ids.sort_unstable();
    assert!(ids.windows(2).all(|two| two[0] != two[1]), "an id names one row");
    for row in rows {
        // A row that is faster than its limit by more than that has none.
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
        ("restore", "restore-set-same/raw"),
        ("hostpool", "hostpool/all"),
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
    let documents = uzone_report::parse(Path::new("out.json"), bench.to_string().as_bytes());
    let page = uzone_report::html(&documents.expect("a document"));
    assert!(page.contains("its figures mean little"), "it names a quick run");
    assert!(page.contains("64-byte Linux descriptors"));
}

#[test]
fn a_quick_run_of_one_benchmark_works_and_is_no_base_of_a_check() {
    let dir = Dir::new("bench-quick");
    for name in ["bind", "copy"] {
        let bench = document(&[name, "--quick"]);
        assert_eq!((&bench["quick"], &bench["benchmark"]), (&json!(true), &json!(name)));
        let file = dir.file("quick.json", bench.to_string());
        for asked in [&["--check", &file][..], &[name, "--check", &file]] {
            refuses(asked, 2, "quick.json is a run with --quick");
        }
    }
}

/// Every density has `auto` beside the fixed windows, and the ratio of both.
fn has_densities(rows: &[Value]) {
    let apart = rows.iter().any(|row| row["id"] == "fault-seq-memfd/naive");
    let end = if apart { "" } else { "-same" };
    for density in ["file-1", "file-100", "memfd-5", "memfd-20"] {
        let table = format!("fault-density-thread-{density}{end}/");
        let of_table: Vec<&Value> =
            rows.iter().filter(|row| string(row, "id").starts_with(&table)).collect();
        assert!(of_table.len() >= 3, "{table}");
        assert!(of_table.iter().any(|row| row["id"] == format!("{table}thread-auto")), "{table}");
        assert!(of_table.iter().all(|row| row["ratio_best"].is_number()), "{of_table:?}");
    }
}
