//! `uzone-bench --check`: a comparison with an earlier run.

use serde_json::json;

use crate::common::{Dir, array, document, keeps_to, printed, refuses, run, string, text};

const SMALL: [&str; 4] = ["copy", "--size=64K", "--rounds=5", "--table=copy-cold-later"];

#[test]
fn a_check_against_a_run_of_just_now_compares_every_row_and_keeps_to_its_schema() {
    let dir = Dir::new("bench-check");
    let earlier = document(&SMALL);
    let file = dir.file("base.json", earlier.to_string());
    for asked in [&["--check", &file][..], &["copy", "--check", &file]] {
        let output = run(&[asked, &["--json"]].concat());
        let checked = printed(&output);
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
    let mut earlier = document(&SMALL);
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
    let second = rows.iter().position(|row| row["id"] == "copy-cold-later/64K-libc");
    rows.remove(second.expect("a row"));
    let file = dir.file("base.json", earlier.to_string());

    let arguments = ["--check", &file, "--json"];
    let output = refuses(&arguments, 1, "another CPU (Another\u{fffd} CPU");
    let checked = printed(&output);
    keeps_to("uzone.bench-check-1", &checked);
    let row = array(&checked, "rows").iter().find(|row| row["id"] == ID).expect("the row");
    assert_eq!(
        (&row["verdict"], &row["measure"]),
        (&json!("worse_twice"), &json!("share_of_limit"))
    );
    assert!(row["again"].as_f64().expect("a number") < row["then"].as_f64().expect("a number"));
    assert_eq!(checked["new"], json!(["copy-cold-later/64K-libc"]));
    assert_eq!(checked["gone"], json!(["copy-cold-later/of-yesterday"]));
    assert_eq!(checked["not_comparable"][0]["id"], "copy-cold-later/4K-ours");

    let output = run(&["--check", &file]);
    assert_eq!(output.status.code(), Some(1));
    for part in [
        ID,
        "slower twice",
        "of its limit",
        "new: copy-cold-later/64K-libc",
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
    let earlier = document(&SMALL);
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
    let missing = dir.name("missing.json");
    for (arguments, code, part) in [
        (&["--check", &missing][..], 66, "cannot read"),
        (&["--check", &later], 65, "is \"uzone.bench/2\", and reports are made of uzone.bench/1"),
        (&["--check", &cut], 65, "was cut short"),
        (&["--check", &old], 65, "create a new file with this version"),
        (&["--check", &twice], 65, "is not a uzone.bench/1 document"),
        (&["--check", &none], 65, "none of the rows in"),
        (&["--check", "/proc/cpuinfo"], 65, "is not JSON or was cut short"),
        (&["zero", "--check", &base], 2, "check it with `uzone-bench copy --check`"),
        (&["copy", "--rounds=9", "--check", &base], 2, "rounds is 5 in"),
        (&["--check"], 2, "a value is required"),
    ] {
        let output = refuses(arguments, code, part);
        assert!(output.stdout.is_empty(), "{arguments:?}");
    }
    let files = ["base.json", "cut.json", "later.json", "none.json", "old.json", "twice.json"];
    assert_eq!(dir.names(), files);
}
