//! What the processes of a server may do: which user answers faults ([`user_of_worker`]), and which capabilities
//! the keeper goes on with ([`of_keeper`]).

use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Command, Stdio};

use uzone_os::privilege::{self, CapabilitySet};

use super::{Args, NONE, PROGRAM};
use crate::exit::{Exit, Failure};
use crate::output::Output;
use crate::user::User;

/// The users that root tries before the owner of the image: the one that a package makes for uzone, and the
/// unprivileged user of the system.
const USERS: [&str; 2] = ["uzone", "65534"];
/// Ports below this one are root's.
const FIRST_FREE_PORT: u16 = 1024;

/// Returns the user that answers faults, unless it is that of this process. `arguments` start a worker.
pub(super) fn user_of_worker(
    args: &Args,
    arguments: &[OsString],
    out: &Output,
) -> Result<Option<User>, Failure> {
    if let Some(name) = &args.user {
        return User::named(name).map(Some);
    }
    if args.no_sandbox || privilege::user() != 0 {
        return Ok(None);
    }
    let owner = args.image.as_deref().and_then(|image| fs::metadata(image).ok());
    let owner = owner.map(|image| image.uid()).filter(|owner| *owner != 0);
    let names = USERS.into_iter().map(str::to_owned).chain(owner.map(|owner| owner.to_string()));
    // A name that the system does not have is left out.
    for user in names.filter_map(|name| User::named(&name).ok()) {
        match can_serve(arguments, user) {
            Ok(Exit::Ok) => return Ok(Some(user)),
            Ok(Exit::Permission) | Err(_) => {}
            // Root fares no better, and the worker states why.
            Ok(_) => return Ok(None),
        }
    }
    out.warn(format_args!(
        "faults are answered as root, without its capabilities: the users uzone and 65534 and the owner of the image \
         cannot open all files of this server; let a user read them, and name it with --user"
    ));
    Ok(None)
}

/// Starts a worker as a user, which opens its files and ends.
fn can_serve(arguments: &[OsString], user: User) -> io::Result<Exit> {
    let mut command = Command::new(PROGRAM);
    command.args(arguments).args(["--worker", "--check"]);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    user.runs(&mut command);
    Exit::of_process(command.status()?).ok_or_else(|| io::ErrorKind::Other.into())
}

/// Returns whether this process may open the local files of a server whose image is in object storage. The storage
/// is not asked: a request that fails would be repeated for each user.
pub(super) fn opens_local_files(args: &Args) -> bool {
    let is_denied = |opened: io::Result<File>| {
        opened.is_err_and(|cause| cause.kind() == io::ErrorKind::PermissionDenied)
    };
    let read = args.prefetch.clone().into_iter().chain(uzone_server::credential_files());
    let is_closed = read.map(File::open).any(is_denied);
    let written = args.record.as_deref().map(|path| match path.is_dir() {
        // Its file is named by the image, so another one is made in its place.
        true => {
            let other = path.join(format!(".uzone-{}", std::process::id()));
            File::create_new(&other).inspect(|_| drop(fs::remove_file(&other)))
        }
        false => File::options().append(true).create(true).open(path),
    });
    !is_closed && !written.is_some_and(is_denied)
}

/// Returns the capabilities that the keeper of a socket needs, if it has them.
pub(super) fn of_keeper(args: &Args, socket: &Path, has_user: bool) -> CapabilitySet {
    // Ending monitors, taking their descriptors, and reading their memory, whose files are their user's.
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
    // It makes names there, and removes them at the end.
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
