//! The policy of a process, seen by processes of their own: this test binary again.

use std::env;
use std::process::Command;
use std::time::{Duration, Instant};

use uzone_stream::{Basis, Path, STORE_POLICY, StorePolicy, StreamError, Work, best};

/// Set in a child: the assertion to make.
const EXPECT: &str = "STREAM_TEST_EXPECT";

/// Returns whether children can be started; if not, prints the name of the skipped test.
fn has_children(name: &str) -> bool {
    if cfg!(miri) {
        eprintln!("skipped: {name}: Miri starts no processes");
    }
    !cfg!(miri)
}

/// Runs the child below with this value of the variable, and asserts that it agrees with `expect`.
fn in_a_child(value: Option<&str>, expect: &str) {
    if let Err(why) = tried_in_a_child(value, expect) {
        panic!("{why}");
    }
}

/// The same, and returns why it does not agree.
fn tried_in_a_child(value: Option<&str>, expect: &str) -> Result<(), String> {
    let mut command = Command::new(env::current_exe().expect("a test binary has a path"));
    command.args(["--exact", "the_child_agrees_with_its_parent", "--nocapture"]);
    command.env(EXPECT, expect).env_remove(STORE_POLICY);
    if let Some(value) = value {
        command.env(STORE_POLICY, value);
    }
    let output = command.output().expect("a child was started");
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    match output.status.success() && text.contains("child has looked") {
        true => Ok(()),
        false => Err(format!("{value:?}: {text}{errors}")),
    }
}

#[test]
fn the_child_agrees_with_its_parent() {
    let Ok(expect) = env::var(EXPECT) else {
        return; // not a child: there is nothing to agree with
    };
    let start = Instant::now();
    let policy = StorePolicy::current();
    let elapsed = start.elapsed();
    assert_eq!(best(), policy.store(Work::Fill));
    assert_eq!(policy.make_current(), Err(policy), "the policy was decided");
    let problem = StorePolicy::problem();
    match expect.as_str() {
        "default" => {
            assert_eq!((policy, problem), (&StorePolicy::for_cpu(), None));
        }
        // Reading the environment and asking the CPU: the margin is for a host that traps CPUID and
        // has other work.
        "soon" => assert!(elapsed < Duration::from_millis(5), "the first policy took {elapsed:?}"),
        "malformed" => {
            assert_eq!(policy, &StorePolicy::for_cpu());
            let problem = problem.expect("a problem");
            assert!(matches!(problem, StreamError::Malformed { .. }), "{problem:?}");
        }
        text => {
            assert_eq!((policy.to_string().as_str(), problem), (text, None));
            assert_eq!(policy.basis(), Basis::Environment);
        }
    }
    println!("child has looked");
}

#[test]
fn the_environment_decides_the_stores_of_a_process() {
    if !has_children("the_environment_decides_the_stores_of_a_process") {
        return;
    }
    for path in Path::ALL.into_iter().filter(|path| path.is_available()) {
        let text = format!("fill={path},zero={path},copy={path}");
        in_a_child(Some(&text), &text);
    }
    in_a_child(None, "default");
    in_a_child(Some(""), "default");
    in_a_child(Some("avx512"), "malformed");
}

#[test]
fn the_first_policy_of_a_process_costs_no_measurement() {
    if !has_children("the_first_policy_of_a_process_costs_no_measurement") {
        return;
    }
    // On a busy machine a child may have to wait for a CPU; one of some has not.
    let tries: Vec<_> = (0..20).map_while(|_| tried_in_a_child(None, "soon").err()).collect();
    assert!(tries.len() < 20, "{}", tries[0]);
}
