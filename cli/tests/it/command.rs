//! What every command keeps: where output goes, in which form, and with which exit code.

use std::fs::File;
use std::io;
use std::process::Stdio;

use crate::common::{keeps_to, run, text, uzone};
use serde_json::Value;

const ERROR: &str = "uzone.error-1";

#[test]
fn the_version_is_printed_to_standard_output() {
    let output = run(&["--version"]);
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(text(&output.stdout), format!("uzone {}\n", env!("CARGO_PKG_VERSION")));
    assert!(output.stderr.is_empty());
}

#[test]
fn help_is_printed_to_standard_output_with_an_example_and_the_exit_codes() {
    for arguments in [&["--help"][..], &["-h"], &["doctor", "--help"], &["help", "doctor"]] {
        let output = run(arguments);
        assert_eq!(output.status.code(), Some(0), "{arguments:?}");
        let help = text(&output.stdout);
        assert!(help.contains("Usage: uzone"), "{help}");
        assert!(help.contains("Example:\n  uzone doctor"), "{help}");
        assert!(help.contains("\n\nExit codes:\n   0  ok\n"), "{help}");
        assert!(help.contains("\n   2  wrong usage\n"), "{help}");
        // The codes of the command alone.
        let has_65 = help.contains("\n  65  the input is not valid\n");
        assert_eq!(has_65, !arguments.contains(&"doctor"), "{help}");
        assert!(output.stderr.is_empty());
    }
}

#[test]
fn wrong_usage_exits_2_with_the_usage_on_standard_error() {
    for arguments in [
        &["frobnicate"][..],
        &["--frobnicate"],
        &["doctor", "--frobnicate"],
        &["doctor", "surplus"],
        &["doctor", "--quiet", "--verbose"],
        &[],
    ] {
        let output = run(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(text(&output.stderr).contains("Usage: uzone"), "{arguments:?}: {output:?}");
        assert!(output.stdout.is_empty(), "{arguments:?}");
    }
}

#[test]
fn with_json_wrong_usage_is_an_object_as_well() {
    for arguments in [&["doctor", "--json", "--frobnicate"][..], &["--json", "frobnicate"]] {
        let output = run(arguments);
        assert_eq!(output.status.code(), Some(2));
        let object: Value = serde_json::from_slice(&output.stdout).expect("an object");
        keeps_to(ERROR, &object);
        assert_eq!(object["exit_code"], 2);
        assert!(object["error"].as_str().is_some_and(|error| error.contains("frobnicate")));
        assert!(!output.stderr.is_empty());
    }
}

#[test]
fn a_closed_pipe_ends_the_command_quietly() {
    for arguments in [
        &["doctor"][..],
        &["doctor", "--json"],
        &["completions", "bash"],
        &["--help"],
        &["--version"],
    ] {
        let (reader, writer) = io::pipe().expect("a pipe");
        drop(reader);
        let output = uzone(arguments)
            .stdout(writer)
            .stderr(Stdio::piped())
            .output()
            .expect("the binary under test runs");
        assert_eq!(output.status.code(), Some(0), "{arguments:?}: {output:?}");
        assert_eq!(text(&output.stderr), "", "{arguments:?}");
    }
}

#[test]
fn a_closed_standard_error_does_not_change_the_exit_code() {
    for (arguments, code) in [(&["--frobnicate"][..], 2), (&["doctor", "--verbose"], 0)] {
        let (reader, writer) = io::pipe().expect("a pipe");
        drop(reader);
        let status = uzone(arguments)
            .stdout(Stdio::null())
            .stderr(writer)
            .status()
            .expect("the binary under test runs");
        assert_eq!(status.code(), Some(code), "{arguments:?}");
    }
}

#[test]
fn a_full_device_is_an_error_with_its_cause() {
    let full = File::options().write(true).open("/dev/full").expect("Linux has /dev/full");
    let output = uzone(&["doctor"])
        .stdout(full)
        .stderr(Stdio::piped())
        .output()
        .expect("the binary under test runs");
    assert_eq!(output.status.code(), Some(74));
    assert_eq!(
        text(&output.stderr),
        "error: cannot write the result to standard output\n  caused by: No space left on device (os error 28)\n"
    );
}

#[test]
fn where_no_terminal_reads_there_are_no_escape_bytes_unless_asked_for() {
    for arguments in [
        &["doctor"][..],
        &["doctor", "--verbose"],
        &["doctor", "--color", "never"],
        &["--help"],
        &["--frobnicate"],
    ] {
        let output = run(arguments);
        assert!(!output.stdout.contains(&0x1b), "{arguments:?}");
        assert!(!output.stderr.contains(&0x1b), "{arguments:?}");
    }
    let output = run(&["doctor", "--color", "always"]);
    assert!(text(&output.stdout).starts_with("\x1b[32mok\x1b[0m"));
    let output = run(&["--color=always", "--frobnicate"]);
    assert!(output.stderr.contains(&0x1b));
    // A flag is closer than a variable.
    let output = uzone(&["doctor", "--color=always"]).env("NO_COLOR", "1").output();
    assert!(output.expect("the binary under test runs").stdout.contains(&0x1b));
}
