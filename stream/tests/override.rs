//! The environment's word on the path, read by processes of their own: this test binary again.

use std::env;
use std::process::Command;

use uzone_stream::{OVERRIDE, Path, PathError, Reason, best, chosen};

/// Set in a child: what it is to assert.
const EXPECT: &str = "STREAM_TEST_EXPECT";

/// Returns whether children can be started; if not, says by name what is skipped.
fn has_children(name: &str) -> bool {
    if cfg!(miri) {
        eprintln!("skipped: {name}: Miri starts no processes");
    }
    !cfg!(miri)
}

/// Runs the child below with `name` as the override, and asserts that it agrees with `expect`.
fn in_a_child(name: Option<&str>, expect: &str) {
    let mut command = Command::new(env::current_exe().expect("a test binary has a path"));
    command.args(["--exact", "the_child_agrees_with_its_parent", "--nocapture"]);
    command.env(EXPECT, expect).env_remove(OVERRIDE);
    if let Some(name) = name {
        command.env(OVERRIDE, name);
    }
    let output = command.output().expect("a child was started");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{name:?}: {text}{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.contains("child has looked"), "{name:?}: the child ran nothing: {text}");
}

#[test]
fn the_child_agrees_with_its_parent() {
    let Ok(expect) = env::var(EXPECT) else {
        return; // not a child: there is nothing to agree with
    };
    let choice = chosen();
    assert_eq!(best(), choice.path);
    assert!(choice.path.is_available());
    match expect.as_str() {
        "measured" => {
            assert_ne!(choice.reason, Reason::Override);
            assert_eq!(choice.problem, None);
        }
        "unknown" => {
            assert_ne!(choice.reason, Reason::Override);
            let problem = choice.problem.as_ref().unwrap();
            assert!(matches!(problem, PathError::Unknown { .. }), "{problem:?}");
            assert!(problem.to_string().contains("portable, movnti, sse2"), "{problem}");
        }
        "unavailable" => {
            assert_ne!(choice.reason, Reason::Override);
            let problem = choice.problem.as_ref().unwrap();
            assert!(matches!(problem, PathError::Unavailable { .. }), "{problem:?}");
        }
        name => {
            assert_eq!(choice.path.name(), name);
            assert_eq!((choice.reason, &choice.problem), (Reason::Override, &None));
        }
    }
    println!("child has looked");
}

#[test]
fn an_override_that_names_an_available_path_is_followed() {
    if !has_children("an_override_that_names_an_available_path_is_followed") {
        return;
    }
    for path in Path::ALL.into_iter().filter(|path| path.is_available()) {
        in_a_child(Some(path.name()), path.name());
        in_a_child(Some(&path.name().to_uppercase()), path.name());
    }
}

#[test]
fn an_override_that_names_no_path_is_reported() {
    if !has_children("an_override_that_names_no_path_is_reported") {
        return;
    }
    for name in ["sse3", "avx512 ", "0"] {
        in_a_child(Some(name), "unknown");
    }
}

#[test]
fn an_override_that_names_an_unavailable_path_is_reported() {
    if !has_children("an_override_that_names_an_unavailable_path_is_reported") {
        return;
    }
    let absent: Vec<Path> = Path::ALL.into_iter().filter(|path| !path.is_available()).collect();
    if absent.is_empty() {
        eprintln!("skipped: unavailable override: this CPU offers every path");
    }
    for path in absent {
        in_a_child(Some(path.name()), "unavailable");
    }
}

#[test]
fn without_an_override_the_measurement_decides() {
    if !has_children("without_an_override_the_measurement_decides") {
        return;
    }
    in_a_child(None, "measured");
    in_a_child(Some(""), "measured");
}
