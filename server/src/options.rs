//! Options of a server: [`ServerOptions`], [`OnFailure`], [`Prefetch`].

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use uzone_fault::Budget;
use uzone_pages::ByteLen;
use uzone_snapshot::{DiskCache, RequestOptions, Root};

/// The policy for a VM that touches a page which cannot be produced.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum OnFailure {
    /// Its monitor is killed. No other choice is safe for a VM: where the monitor or the kernel emulates an access, a bad
    /// page reads as zero.
    #[default]
    Kill,
    /// The page is bad: an access that is not emulated raises `SIGBUS` in the monitor.
    Poison,
    /// The VM waits until it is ended.
    Hold,
}

/// The options of a server. A keeper and its worker have the same.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ServerOptions {
    /// The users that may connect, as the mode of a file: its owner alone by default.
    pub mode: u32,
    /// The group of the socket, by its number: by default the group of this process. The mode states its rights: 660 lets
    /// its members connect.
    pub group: Option<u32>,
    /// The users that may connect, by their numbers: by default all whom the mode of the socket admits. A connection of
    /// another user is closed, and its VM is treated as one that cannot be served. The user of this process and root may
    /// connect in any case: either can do more to a server than connect to it.
    pub allowed: Option<Vec<u32>>,
    /// The policy for a VM whose page cannot be produced: its monitor is killed by default.
    pub on_failure: OnFailure,
    /// The longest time to produce a page, and the longest time without a worker: 30 seconds by default.
    pub deadline: Duration,
    /// A file for the pages that VMs touch, in that order: a page number a line. Lines that the file has already stay. In
    /// a folder, the file is named by the root hash of the image. Faults are answered one page at a time then, so that
    /// each page is seen.
    pub record: Option<PathBuf>,
    /// The pages that are installed before a VM touches them, while it waits for none: the working set of the image by
    /// default.
    pub prefetch: Prefetch,
    /// Whether VMs get huge pages: by default they have the pages of their monitor. A fault brings the rest of its block
    /// of 2 MiB, zero pages take memory of their own, and the keeper has the kernel make huge pages of filled blocks,
    /// which takes `CAP_SYS_NICE` and the right to read the monitor's memory. Other blocks are served all the same. Memory
    /// that has huge pages already is served by whole pages in any case. With [`ServerOptions::record`] it means nothing.
    pub huge: bool,
    /// The address of metrics for Prometheus by HTTP, at `/metrics`, for every client that can reach it; by default they
    /// are on the control socket alone.
    pub metrics: Option<SocketAddr>,
    /// The root hash that the image must have, which makes its bytes authentic: without it, hashes show damage and not
    /// forgery. Raw memory has none.
    pub root: Option<Root>,
    /// The bytes of decoded frames that are kept, for all VMs: 64 MiB by default.
    pub cache: ByteLen,
    /// The folder for fetched frames of an image in object storage; by default they are not kept on disk.
    pub disk_cache: Option<Arc<DiskCache>>,
    /// The requests for an image in object storage. A page for which they take longer than [`ServerOptions::deadline`]
    /// cannot be produced: [`RequestOptions::longest`] should be less.
    pub requests: RequestOptions,
    /// Whether [`Worker::open`](crate::Worker::open) confines its process, which is the default. A debugger cannot follow
    /// a confined process.
    pub sandbox: bool,
    /// The place of the records by which a server serves VMs on after both processes of an earlier one were killed: none
    /// by default.
    pub recover: Recover,
    /// Whether the server that has the socket is ended, and its VMs are taken: an upgrade. By default it is an error that
    /// there is one.
    pub take_over: bool,
    /// The limits of the work for each VM, so that one that faults without end holds up no other: none by default, and
    /// VMs have their turns.
    pub budget: Budget,
}

/// The pages that are installed before a VM touches them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Prefetch {
    /// The working set of the image, if it has one.
    #[default]
    OfImage,
    /// The pages of a recorded file ([`ServerOptions::record`]), or of the image's file in a folder. The file may be
    /// missing.
    File(PathBuf),
    /// None.
    No,
}

/// The place of the records of VMs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Recover {
    /// None.
    #[default]
    No,
    /// A folder, best of files in memory (tmpfs). Servers of other sockets may have the same.
    Folder(PathBuf),
    /// The descriptor store of the service manager that started this process.
    ServiceManager,
}

impl Default for ServerOptions {
    fn default() -> Self {
        Self {
            mode: 0o600,
            group: None,
            allowed: None,
            on_failure: OnFailure::default(),
            deadline: Duration::from_secs(30),
            record: None,
            prefetch: Prefetch::default(),
            huge: false,
            metrics: None,
            root: None,
            cache: ByteLen::mib(64),
            disk_cache: None,
            requests: RequestOptions::default(),
            sandbox: true,
            recover: Recover::default(),
            take_over: false,
            budget: Budget::default(),
        }
    }
}

impl ServerOptions {
    /// Returns whether a process of `user` may connect to a server of the user `own`.
    pub(crate) fn admits(&self, user: u32, own: u32) -> bool {
        self.allowed
            .as_ref()
            .is_none_or(|allowed| user == 0 || user == own || allowed.contains(&user))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_admits_its_users_that_of_the_server_and_root_and_without_one_the_mode_decides() {
        let of = |users: &[u32]| ServerOptions {
            allowed: Some(users.to_vec()),
            ..ServerOptions::default()
        };
        for (options, admitted) in [
            (ServerOptions::default(), [true, true, true, true]),
            (of(&[]), [true, true, false, false]),
            (of(&[7]), [true, true, true, false]),
            (of(&[7, 8]), [true, true, true, true]),
        ] {
            assert_eq!([0, 5, 7, 8].map(|user| options.admits(user, 5)), admitted, "{options:?}");
        }
    }
}
