//! One benchmark at a time, on sizes that take a second.

use std::time::Duration;

use serde_json::Value;

use crate::common::{array, document, keeps_to, printed, refuses, run, skip, string, text};

/// Returns the row of an id.
fn row<'a>(rows: &'a [Value], id: &str) -> &'a Value {
    rows.iter().find(|row| row["id"] == id).unwrap_or_else(|| panic!("no row {id}"))
}

/// Runs what prints text for people and nothing to standard error, and checks that the text has these parts.
fn shows(arguments: &[&str], parts: &[&str]) -> String {
    let output = run(arguments);
    let shown = text(&output.stdout);
    for part in parts {
        assert!(shown.contains(part), "{part}: {shown}");
    }
    assert!(output.stderr.is_empty(), "{}", text(&output.stderr));
    shown.to_owned()
}

/// Returns the ids of the rows, each of which names one; every table has some.
fn ids(bench: &Value) -> Vec<&str> {
    fn id(object: &Value) -> &str {
        object["id"].as_str().expect("a string")
    }
    let ids: Vec<&str> = array(bench, "results").iter().map(id).collect();
    for table in array(bench, "tables") {
        let prefix = format!("{}/", id(table));
        assert!(ids.iter().any(|id| id.starts_with(&prefix)), "{prefix}");
    }
    let mut unique = ids.clone();
    unique.sort_unstable();
    unique.dedup();
    assert_eq!(unique.len(), ids.len(), "an id names one row");
    ids
}

const SMALL: [&str; 5] = ["bind", "--size=1G", "--rebinds=2", "--first-binds=1", "--threads=2"];

#[test]
fn the_bench_object_keeps_to_its_schema_and_every_table_has_rows() {
    let bench = document(&SMALL);
    let ids = ids(&bench);
    let rows = ["bind-4k/naive", "bind-4k/ours-1", "bind-2m/ours-all", "bind-first/ours-1"];
    for row in rows.into_iter().chain(["bind-altmap/own", "bind-altmap/both"]) {
        assert!(ids.contains(&row), "{row}");
    }
}

#[test]
fn the_bench_text_names_the_machine_and_shows_no_bar_where_no_terminal_reads() {
    let parts = ["naive", "of limit", "GB/s", "Linux", "resident/TiB"];
    shows(&[&SMALL[..], &["--table=bind-4k"]].concat(), &parts);
}

#[test]
fn the_pin_object_keeps_to_the_same_schema() {
    let bench = document(&["pin", "--size=1G", "--rounds=2"]);
    let results = array(&bench, "results");
    let row = |id: &str| row(results, id);
    for id in ["pin-2m/naive-pin", "pin-2m/call-pin", "pin-list/ours", "pin-4k/whole-pin"] {
        assert!(row(id)["ns_per_call"].as_f64().expect("a number") > 0.0, "{id}");
    }
    assert_eq!(row("pin-2m/call-pin")["calls"], 512);
    assert_eq!(row("pin-2m/whole-pin")["folios"], 512);
    // A busy machine may have put the limit farther away than the row: then the row has none.
    let whole = row("pin-2m/whole-pin");
    assert!(whole["limit_id"].is_null() || whole["share_of_limit"].as_f64() > Some(0.0), "{whole}");
}

#[test]
fn the_pin_text_shows_what_a_call_costs_and_leaves_empty_columns_out() {
    let arguments = ["pin", "--size=1G", "--rounds=1", "--table=pin-2m"];
    let text = shows(&arguments, &["ns/call", "ns/folio", "x naive"]);
    assert!(!text.contains("resident/TiB"), "{text}");
}

#[test]
fn the_zero_and_copy_objects_keep_to_the_same_schema_and_every_table_has_rows() {
    let runs: [&[&str]; 2] = [
        &["zero", "--size=64K", "--rounds=1", "--populate-size=64M", "--first-touches=1"],
        &["copy", "--size=64K", "--rounds=1"],
    ];
    for arguments in runs {
        let bench = document(arguments);
        let (rows, ids) = (array(&bench, "results"), ids(&bench));
        let work = arguments[0];
        let cases = if work == "zero" { &["cold-later", "cold-soon"][..] } else { &["cold-later"] };
        for case in cases {
            for row in ["page-at-a-time", "libc", "ours", "limit"] {
                let id = format!("{work}-{case}/64K-{row}");
                assert!(ids.contains(&id.as_str()), "{id}");
            }
            // Of the rows that do the same work, the fastest is the measure of all.
            let best = rows
                .iter()
                .filter(|row| {
                    row["id"].as_str().is_some_and(|id| id.contains(&format!("{case}/4K")))
                })
                .filter_map(|row| row["ratio_best"].as_f64())
                .fold(f64::MAX, f64::min);
            assert!((best - 1.0).abs() < 1e-9, "{case}: {best}");
        }
        if work == "zero" {
            assert!(ids.contains(&"populate/naive"));
            for row in ["naive", "worker-idle", "worker-busy", "cleared-on-release", "on-demand"] {
                let id = format!("pool-take/{row}");
                let taken = self::row(rows, &id);
                let latency = &taken["latency"];
                let of = |key: &str| latency[key].as_u64().expect("a number");
                // A round that is not counted comes first.
                assert_eq!(of("count") % taken["calls"].as_u64().expect("a number"), 0, "{id}");
                assert!(of("p50_ns") <= of("p99_ns") && of("p99_ns") <= of("worst_ns"), "{id}");
            }
        }
    }
}

#[test]
fn the_fault_object_keeps_to_the_same_schema_and_counts_what_was_published() {
    // Nothing is asked of the file of the densities, which is large by default.
    let arguments = ["fault", "--size=4M", "--density-size=4M", "--rounds=1", "--dir=."];
    let output = run(&[&arguments[..], &["--json"]].concat());
    if output.status.code() == Some(69) || output.status.code() == Some(77) {
        // A host without userfaultfd reports it.
        let stderr = text(&output.stderr);
        assert!(stderr.contains("userfaultfd"), "{stderr}");
        return skip("the_fault_object", stderr);
    }
    let bench = printed(&output);
    keeps_to("uzone.bench-1", &bench);
    let rows = array(&bench, "results");
    let row = |id: &str| row(rows, id);
    let count = |id: &str, key: &str| row(id)["faults"][key].as_u64().expect("a number");
    // A warm scan faults once a window, or once a page.
    for (row, faults) in [("naive", 1024), ("order-0", 1024), ("thread-bare-9", 2)] {
        let id = format!("fault-seq-memfd-same/{row}");
        assert_eq!(count(&id, "count"), faults, "{id}");
        assert_eq!(count(&id, "wasted_pages"), 0, "{id}");
    }
    // A need that this host lacks is skipped by name: a second CPU, or a disk.
    let skipped = bench["skipped"].as_array().expect("an array");
    for id in ["fault-random-file/auto", "fault-cold/auto"] {
        let table = id.trim_end_matches("/auto");
        let is_skipped = skipped.iter().any(|skip| skip["id"] == table);
        assert_ne!(is_skipped, rows.iter().any(|row| row["id"] == id), "{id}");
    }
}

#[test]
fn the_published_experiments_are_one_document_with_the_figures_of_each() {
    let output = run(&["seeds", "--quick", "--dir=.", "--json"]);
    assert_eq!(output.status.code(), Some(2), "--quick has a directory of its own");
    let bench = document(&["seeds", "--quick"]);
    assert_eq!(bench["benchmark"], "seeds");
    let rows = array(&bench, "results");
    let published = |id: &str| {
        let figure = row(rows, id)["published"]["ns"].as_u64();
        figure.unwrap_or_else(|| panic!("{id} has no published figure"))
    };
    // 100 GiB in the text, 1 GiB here.
    for (id, ms) in [
        ("bind-4k/naive", 273.52),
        ("bind-4k/template-portable", 246.65),
        ("bind-4k/template-movnti", 104.59),
        ("bind-4k/ours-1", 114.31),
        ("bind-2m/naive", 313.45),
        ("bind-2m/template-portable", 240.42),
        ("bind-2m/template-movnti", 116.93),
        ("bind-2m/ours-1", 99.37),
        ("bind-first/naive", 1486.0),
        ("bind-first/template-portable", 1422.0),
        ("bind-first/ours-1", 1285.0),
        ("bind-altmap/bind", 114.31),
    ] {
        let expected = Duration::from_secs_f64(ms / 1e5).as_nanos();
        assert!(u128::from(published(id)).abs_diff(expected) < 2, "{id}");
    }
    for id in [
        "bind-small/derived-2m-64-bytes",
        "pin-2m/naive-pin",
        "pin-2m/call-get",
        "fault-whole-seq-8/order-4",
        "fault-whole-random-1/thread-order-4",
        "fault-whole-sparse-8/order-4",
    ] {
        assert!(published(id) > 0, "{id}");
    }
}

#[test]
fn a_quick_run_of_several_benchmarks_has_the_tables_that_are_asked_for() {
    for benchmark in [&["seeds"][..], &[]] {
        let bench = document(&[benchmark, &["--quick", "--table=pin-2m"]].concat());
        let tables = array(&bench, "tables");
        let ids: Vec<&str> = tables.iter().map(|table| string(table, "id")).collect();
        let is_asked = ids.iter().all(|id| id.starts_with("pin-2m"));
        assert!(ids.contains(&"pin-2m") && is_asked, "{ids:?}");
    }
}

#[test]
fn the_snapshot_object_keeps_to_the_same_schema_and_every_table_has_its_rows() {
    let arguments = ["snapshot", "--size=4M", "--rounds=1", "--threads=2", "--dir=."];
    let bench = document(&arguments);
    let (rows, skipped) = (array(&bench, "results"), array(&bench, "skipped"));
    for (table, expected) in [
        ("snapshot-pack", &["zstd", "frames", "ours", "ours-lz4"][..]),
        ("snapshot-unpack", &["zstd", "frames", "ours"]),
        ("snapshot-read", &["zeekstd", "decode", "ours"]),
        ("snapshot-read-cold", &["zeekstd", "decode", "ours"]),
        ("snapshot-s3-seq", &["link", "ours"]),
        ("snapshot-verify", &["blake3", "ours"]),
        ("snapshot-touch-seq", &["read-first", "copy", "ours"]),
    ] {
        for row in expected {
            let id = format!("{table}/{row}");
            // The command zstd may not be installed, and there may be no userfaultfd.
            let is_skipped = skipped.iter().any(|skip| skip["id"] == table || skip["id"] == *id);
            let row = rows.iter().find(|row| row["id"] == *id);
            assert_ne!(is_skipped, row.is_some(), "{id}");
            if let Some(row) = row {
                assert!(
                    row["median_ns"].as_u64() > Some(0) && row["gib_per_s"].as_f64() > Some(0.0),
                    "{id}"
                );
            }
        }
    }
    let names: Vec<&str> = rows.iter().filter_map(|row| row["name"].as_str()).collect();
    assert!(
        names
            .iter()
            .any(|name| name.starts_with("ours, zstd, ") && name.ends_with(" times smaller"))
    );
    let left: Vec<_> = std::fs::read_dir(".").expect("the directory").flatten().collect();
    assert!(left.iter().all(|entry| !entry.file_name().to_string_lossy().contains("uzone-bench")));
}

#[test]
fn the_restore_object_keeps_to_the_same_schema_and_every_table_has_its_rows() {
    let bench = document(&["restore", "--size=4M", "--rounds=1", "--dir=."]);
    let (rows, skipped) = (array(&bench, "results"), array(&bench, "skipped"));
    let rivals = ["naive", "kernel", "decode"];
    let rows_of_set = [&rivals[..], &["raw", "packed", "replay", "ordered"]].concat();
    for (table, of_table) in [
        ("restore-set-same", &rows_of_set[..]),
        ("restore-set-cold", &rows_of_set),
        ("restore-clones", &["own", "share", "kernel"]),
        ("restore-far", &["naive", "packed", "replay", "read-first", "link"]),
    ] {
        for row in of_table {
            let id = format!("{table}/{row}");
            // There may be no userfaultfd.
            let is_skipped = skipped.iter().any(|skip| skip["id"] == table);
            let row = rows.iter().find(|row| row["id"] == *id);
            assert_ne!(is_skipped, row.is_some(), "{id}");
            if let Some(row) = row {
                assert!(row["median_ns"].as_u64() > Some(0), "{id}");
                let faults = &row["faults"];
                assert_eq!(
                    faults["clone_resident_bytes"].is_u64(),
                    table == "restore-clones",
                    "{id}"
                );
                if row["role"] == "naive" && table != "restore-clones" {
                    assert!(
                        faults["demand"]["count"].as_u64() >= row["items"].as_u64(),
                        "{id}: {row}"
                    );
                }
            }
        }
    }
}

#[test]
fn sizes_that_cannot_be_are_refused_with_what_would_help() {
    for (arguments, code, part) in [
        (&["frobnicate"][..], 2, "Usage"),
        (&["zero", "--quick", "--rounds=3"], 2, "leave the arguments of zero out, all but --table"),
        (&["--quick", "--check", "x"], 2, "cannot be used with"),
        (&["pin", "--size", "1G", "--table", "zero"], 2, "no table begins with zero"),
        (&["bind", "--rebinds", "0"], 2, "0 is not in"),
        (&["bind", "--threads", "0"], 2, "0 is not in"),
        (&["pin", "--size", "1M"], 2, "multiple of 1 GiB"),
        (&["snapshot", "--size", "3M"], 2, "multiple of 2 MiB"),
        (&["zero", "--size", "3M"], 2, "a power of two from 4K"),
        (&["copy", "--size", "3M"], 2, "a power of two from 4K"),
        (&["zero", "--size", "4K", "--populate-size", "64T"], 71, "of memory are needed"),
        (&["copy", "--rounds", "0"], 2, "0 is not in"),
        (&["fault", "--size", "3M"], 2, "multiple of 2 MiB"),
        (&["fault", "--size", "0"], 2, "multiple of 2 MiB"),
        (&["fault", "--size", "4M", "--dir", "/none"], 66, "with --dir"),
        (&["fault", "--size", "4M", "--table", "pin"], 2, "no table begins with pin"),
        (&["bind", "--size", "5000G"], 71, "of memory are needed"),
    ] {
        assert!(refuses(arguments, code, part).stdout.is_empty());
    }
}

#[test]
fn without_huge_pages_of_the_pool_the_rows_that_need_them_are_named_and_not_measured() {
    let bench = document(&["zero", "--size=4K", "--populate-size=2M", "--table=zero-demand"]);
    let skipped = array(&bench, "skipped");
    let reason = |table: &str| {
        let skipped = skipped.iter().find(|skipped| skipped["id"] == table);
        skipped.map(|skipped| string(skipped, "reason"))
    };
    assert!(
        reason("zero-demand-1g").is_some_and(|reason| reason.contains("raise --populate-size"))
    );
    match reason("zero-demand-2m") {
        Some(reason) => assert!(reason.contains("nr_hugepages"), "{reason}"),
        None => assert!(ids(&bench).contains(&"zero-demand-2m/ours-1")),
    }
}
