//! `uzone doctor` on the host that runs the tests.

use std::process::{Command, Output, Stdio};

use crate::common::{keeps_to, object_of, text, uzone};
use serde_json::Value;

fn doctor(arguments: &[&str], variables: &[(&str, &str)]) -> Output {
    let mut command = uzone(&[&["doctor"], arguments].concat());
    command.envs(variables.iter().copied()).output().expect("the binary under test runs")
}

/// Returns the check of that name.
fn check<'a>(report: &'a Value, name: &str) -> &'a Value {
    let checks = report["checks"].as_array().expect("a list of checks");
    checks.iter().find(|check| check["name"] == name).expect("a check of that name")
}

#[test]
fn the_text_is_one_line_for_each_check_and_ends_with_the_sum() {
    let output = doctor(&[], &[]);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert!(output.stderr.is_empty(), "{output:?}");
    let text = text(&output.stdout);
    for name in ["kernel", "memory", "transparent huge pages", "userfaultfd", "overcommit"] {
        let lines = text.lines().filter(|line| {
            let name_and_value = line.get(6..).unwrap_or_default();
            name_and_value.starts_with(&format!("{name}  "))
        });
        assert_eq!(lines.count(), 1, "{name}: {text}");
    }
    let last = text.lines().last().unwrap_or_default();
    assert!(last.starts_with("ready"), "{last}");
    for line in text.lines() {
        assert_eq!(line, line.trim_end(), "no blanks at the end of a line");
    }
}

#[test]
fn the_object_keeps_to_its_schema_and_agrees_with_itself() {
    let output = doctor(&["--json"], &[]);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let report = object_of(&output);
    keeps_to("uzone.doctor-1", &report);
    assert_eq!(report["is_ready"], true);
    let checks = report["checks"].as_array().expect("a list of checks");
    for status in ["ok", "note", "warn", "fail"] {
        let count = checks.iter().filter(|check| check["status"] == status).count();
        assert_eq!(report["counts"][status], count, "{status}");
    }
}

#[test]
fn a_stream_path_that_does_not_exist_is_reported_and_not_followed() {
    let output = doctor(&["--json"], &[("UZONE_STORE_POLICY", "bogus")]);
    assert_eq!(output.status.code(), Some(0));
    let report = object_of(&output);
    let stores = check(&report, "store instructions");
    assert_eq!(stores["status"], "warn");
    assert_eq!(stores["fix"], "unset UZONE_STORE_POLICY");
    assert!(stores["value"].as_str().is_some_and(|text| text.contains("bogus")));
    let output = doctor(&["--quiet"], &[("UZONE_STORE_POLICY", "bogus")]);
    assert!(text(&output.stdout).contains("warn  store instructions"), "{output:?}");
}

#[test]
fn a_stream_path_that_exists_is_followed_and_said_so() {
    let report =
        object_of(&doctor(&["--json"], &[("UZONE_STORE_POLICY", "fill=portable,zero=portable")]));
    let stores = check(&report, "store instructions");
    assert_eq!(stores["status"], "ok");
    assert!(
        stores["value"].as_str().is_some_and(|text| text.contains("set by UZONE_STORE_POLICY"))
    );
}

#[test]
fn no_memory_to_map_makes_the_host_not_ready() {
    // Enough to start, which grows with the program, and too little for the 16 MiB of the trial.
    let limited = |mib: u64| {
        let script = format!("ulimit -v {} && exec \"$0\" doctor --json", mib << 10);
        let mut command = Command::new("sh");
        command.args(["-c", &script, env!("CARGO_BIN_EXE_uzone")]).stdin(Stdio::null());
        command.output().expect("a shell runs")
    };
    let mut outputs = (16..1024).step_by(8).map(limited);
    let output = outputs.find(|output| output.status.code() == Some(1));
    let output = output.expect("it starts, and has no memory for the trial");
    let report: Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
    let memory = check(&report, "memory");
    assert_eq!(memory["status"], "fail");
    assert_eq!(memory["fix"], "ulimit -v unlimited");
    assert_eq!(report["is_ready"], false);
    assert_eq!(check(&report, "store instructions")["status"], "note");
}

#[test]
fn quiet_has_fewer_lines() {
    let lines = |arguments: &[&str]| text(&doctor(arguments, &[]).stdout).lines().count();
    let normal = lines(&[]);
    assert!(lines(&["--quiet"]) < normal);
    assert!(lines(&["--verbose"]) >= normal);
}
