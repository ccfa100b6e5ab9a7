//! How a case is skipped that this host cannot run: for the tests beside the code as well.

use std::sync::Arc;

use uzone_os::uffd::{Features, KernelFaults, Uffd};

/// Prints that a case cannot run, and why.
pub(crate) fn skip(name: &str, reason: &str) {
    assert!(
        std::env::var_os("REQUIRE_ALL").is_none_or(|value| value != "1"),
        "{name} was to run, and cannot: {reason}"
    );
    eprintln!("skipped: {name}: {reason}");
}

/// Returns a userfaultfd, or prints that the case cannot run.
pub(crate) fn userfaultfd(
    name: &str,
    features: Features,
    faults: KernelFaults,
) -> Option<Arc<Uffd>> {
    match Uffd::open(features, Features::NONE, faults) {
        Ok(uffd) => Some(Arc::new(uffd)),
        Err(error) => {
            skip(name, &error.to_string());
            None
        }
    }
}
