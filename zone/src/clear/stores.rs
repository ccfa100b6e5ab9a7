//! The stores of this process: [`policy`], and the log entry about a variable that cannot be followed.

use std::sync::Once;

use uzone_stream::StorePolicy;

/// Returns [`StorePolicy::current`]. The first call logs an error if the environment names a policy
/// that cannot be followed.
#[inline]
pub(crate) fn policy() -> &'static StorePolicy {
    static CHECKED: Once = Once::new();
    CHECKED.call_once(|| {
        if let Some(problem) = StorePolicy::problem() {
            tracing::error!(%problem, "the store policy of the environment is not followed");
        }
    });
    StorePolicy::current()
}
