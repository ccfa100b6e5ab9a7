//! How a case is skipped that this host cannot run: for the tests beside the code as well.

#[path = "../../../os/tests/common/needs.rs"]
mod needs;

use std::sync::Arc;

use uzone_os::uffd::{Features, KernelFaults, Uffd};

#[allow(unused_imports, reason = "each test program uses its part")]
pub(crate) use self::needs::{Pool, or_skip, skip};

/// Returns a userfaultfd, or prints that the case cannot run.
pub(crate) fn userfaultfd(
    name: &str,
    features: Features,
    faults: KernelFaults,
) -> Option<Arc<Uffd>> {
    or_skip(name, Uffd::open(features, Features::NONE, faults)).map(Arc::new)
}
