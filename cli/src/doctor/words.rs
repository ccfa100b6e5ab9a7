//! The host's settings in the kernel's own words, for text and for machines alike.

use std::path::Path;

use uzone_os::memory::Limit;
use uzone_os::probe::{Overcommit, UffdAccess};

pub(super) const fn overcommit(overcommit: Overcommit) -> &'static str {
    match overcommit {
        Overcommit::Heuristic => "heuristic",
        Overcommit::Always => "always",
        Overcommit::Never => "never",
    }
}

pub(super) const fn access(access: &UffdAccess) -> &'static str {
    match access {
        UffdAccess::Full => "full",
        UffdAccess::UserModeOnly => "user_mode_only",
        UffdAccess::Denied { .. } => "denied",
        UffdAccess::Absent { .. } => "absent",
        _ => "failed",
    }
}

/// Returns the word of a limit, and the path that belongs to it.
pub(super) fn limit(limit: &Limit) -> (&'static str, Option<&Path>) {
    match limit {
        Limit::System => ("system", None),
        Limit::Cgroup { path } => ("cgroup", Some(path)),
        Limit::AddressSpace => ("address_space", None),
        Limit::Data => ("data", None),
        _ => ("other", None),
    }
}
