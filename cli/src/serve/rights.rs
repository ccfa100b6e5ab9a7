//! The privileges of a server: the user of its worker ([`user_of_worker`]), and the capabilities of its keeper
//! ([`of_keeper`]).

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use uzone_server::privilege::{self, CapabilitySet};

use super::{Args, NONE};
use crate::exit::Failure;
use crate::output::Output;
use crate::user::User;

/// The user that a package adds for uzone.
const USER: &str = "uzone";
/// Ports below this one are root's.
const FIRST_FREE_PORT: u16 = 1024;

/// Returns the user of the worker, unless it is the user of this process.
pub(super) fn user_of_worker(args: &Args, out: &Output) -> Result<Option<User>, Failure> {
    if let Some(name) = &args.user {
        return User::named(name).map(Some);
    }
    if args.no_sandbox || privilege::user() != 0 {
        return Ok(None);
    }
    let user = User::named(USER).ok();
    if user.is_none() {
        out.warn(format_args!(
            "the worker runs as root, without its capabilities: name a user that can read the image with --user"
        ));
    }
    Ok(user)
}

/// Returns the capabilities that the keeper of a socket needs, if it has them.
pub(super) fn of_keeper(args: &Args, socket: &Path, has_user: bool) -> CapabilitySet {
    // To end monitors, to take their descriptors, and to read their memory, whose files belong to their user.
    let mut needed =
        CapabilitySet::KILL | CapabilitySet::SYS_PTRACE | CapabilitySet::DAC_READ_SEARCH;
    if has_user {
        needed |= CapabilitySet::SETUID | CapabilitySet::SETGID;
    }
    if args.group.is_some() {
        needed |= CapabilitySet::CHOWN;
    }
    if args.huge {
        needed |= CapabilitySet::SYS_NICE;
    }
    if args.metrics.is_some_and(|at| at.port() < FIRST_FREE_PORT) {
        needed |= CapabilitySet::NET_BIND_SERVICE;
    }
    // The keeper creates files in these folders, and removes them at the end.
    let written = socket.parent().into_iter().chain(args.recover.as_deref());
    let is_of_another = |folder: &Path| {
        let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
        !fs::metadata(folder).is_ok_and(|folder| folder.uid() == privilege::user())
    };
    if written.filter(|folder| folder.as_os_str() != NONE).any(is_of_another) {
        needed |= CapabilitySet::DAC_OVERRIDE;
    }
    needed
}
