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

/// Room for decoded frames.
const CACHE: ByteLen = ByteLen::mib(64);

/// The options of a server. A keeper and its worker have the same.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    pub(crate) mode: u32,
    pub(crate) group: Option<u32>,
    pub(crate) allowed: Option<Vec<u32>>,
    pub(crate) on_failure: OnFailure,
    pub(crate) deadline: Duration,
    pub(crate) record: Option<PathBuf>,
    pub(crate) prefetch: Prefetch,
    pub(crate) huge: bool,
    pub(crate) metrics: Option<SocketAddr>,
    pub(crate) root: Option<Root>,
    pub(crate) cache: ByteLen,
    pub(crate) disk_cache: Option<Arc<DiskCache>>,
    pub(crate) requests: RequestOptions,
    pub(crate) share: Option<ByteLen>,
    pub(crate) sandbox: bool,
    pub(crate) recover: Recover,
    pub(crate) take_over: bool,
    pub(crate) budget: Budget,
    pub(crate) descriptors: Option<u64>,
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
        let (mode, on_failure) = (0o600, OnFailure::default());
        let (deadline, prefetch) = (Duration::from_secs(30), Prefetch::default());
        Self {
            mode,
            group: None,
            allowed: None,
            on_failure,
            deadline,
            record: None,
            prefetch,
            huge: false,
            metrics: None,
            root: None,
            cache: CACHE,
            disk_cache: None,
            requests: RequestOptions::default(),
            share: None,
            sandbox: true,
            recover: Recover::default(),
            take_over: false,
            budget: Budget::default(),
            descriptors: None,
        }
    }
}

impl ServerOptions {
    /// Sets the users that may connect, as the mode of a file: its owner alone by default.
    #[must_use]
    pub fn mode(mut self, mode: u32) -> Self {
        self.mode = mode;
        self
    }

    /// Gives the socket to a group, by its number, before it gets its name: by default to the group of this process. The
    /// mode states the rights of the group: 660 lets its members connect.
    #[must_use]
    pub fn group(mut self, group: impl Into<Option<u32>>) -> Self {
        self.group = group.into();
        self
    }

    /// Sets which users may connect, by their numbers: by default all whom the mode of the socket admits. A
    /// connection of another user is closed, and its VM is treated as one that cannot be served. The user of
    /// this process and root may connect in any case: either can do more to a server than connect to it.
    #[must_use]
    pub fn allow_users(mut self, users: impl Into<Option<Vec<u32>>>) -> Self {
        self.allowed = users.into();
        self
    }

    /// Returns whether a process of `user` may connect to a server of the user `own`.
    pub(crate) fn admits(&self, user: u32, own: u32) -> bool {
        self.allowed
            .as_ref()
            .is_none_or(|allowed| user == 0 || user == own || allowed.contains(&user))
    }

    /// Sets the policy for a VM whose page cannot be produced: its monitor is killed by default.
    #[must_use]
    pub fn on_failure(mut self, on_failure: OnFailure) -> Self {
        self.on_failure = on_failure;
        self
    }

    /// Sets the longest time to produce a page, and the longest time without a worker: 30 seconds by default.
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// Records the pages that VMs touch, in that order, in a file: a page number a line. Lines that the file has already
    /// stay. In a folder, the file is named by the root hash of the image. Faults are answered one page at a time then,
    /// so that each page is seen.
    #[must_use]
    pub fn record(mut self, path: impl Into<Option<PathBuf>>) -> Self {
        self.record = path.into();
        self
    }

    /// Sets which pages are installed before a VM touches them, while it waits for none: the working
    /// set of the image by default.
    #[must_use]
    pub fn prefetch(mut self, prefetch: Prefetch) -> Self {
        self.prefetch = prefetch;
        self
    }

    /// Sets whether VMs get huge pages: by default they have what their monitor gave them. A fault brings what
    /// is left of its block of 2 MiB, zero pages take memory of their own, and the keeper has the kernel make huge
    /// pages of blocks that are filled, which takes `CAP_SYS_NICE` and the right to read the monitor's memory. What
    /// is no huge page is served all the same. Memory that has huge pages already is served by whole pages in any
    /// case. With [`ServerOptions::record`] it means nothing.
    #[must_use]
    pub fn huge(mut self, huge: bool) -> Self {
        self.huge = huge;
        self
    }

    /// Serves metrics for Prometheus by HTTP on an address, at `/metrics`, to every client that can reach it; by
    /// default on the control socket alone.
    #[must_use]
    pub fn metrics(mut self, address: impl Into<Option<SocketAddr>>) -> Self {
        self.metrics = address.into();
        self
    }

    /// Requires this root hash of the image, which makes its bytes authentic: without it, hashes show damage
    /// and not forgery. Raw memory has none.
    #[must_use]
    pub fn root(mut self, root: impl Into<Option<Root>>) -> Self {
        self.root = root.into();
        self
    }

    /// Sets the bytes of decoded frames that are kept, for all VMs: 64 MiB by default.
    #[must_use]
    pub fn cache(mut self, cache: ByteLen) -> Self {
        self.cache = cache;
        self
    }

    /// Sets where fetched frames of an image in object storage are kept on disk; by default they are not.
    #[must_use]
    pub fn disk_cache(mut self, disk_cache: Option<Arc<DiskCache>>) -> Self {
        self.disk_cache = disk_cache;
        self
    }

    /// Sets how an image in object storage is requested. A page for which that takes longer than
    /// [`ServerOptions::deadline`] counts as one that cannot be produced: [`RequestOptions::longest`] should be
    /// less.
    #[must_use]
    pub fn requests(mut self, requests: RequestOptions) -> Self {
        self.requests = requests;
        self
    }

    /// Sets the bytes of pages that are kept for the programs that attach and share them: the whole image by default.
    /// Beyond that, each has copies of its own.
    #[must_use]
    pub fn share(mut self, share: impl Into<Option<ByteLen>>) -> Self {
        self.share = share.into();
        self
    }

    /// Sets whether [`Worker::open`](crate::Worker::open) confines its process, which is the default. A
    /// debugger cannot follow one that is.
    #[must_use]
    pub fn sandbox(mut self, sandbox: bool) -> Self {
        self.sandbox = sandbox;
        self
    }

    /// Limits the work for each VM, so that one that faults without end holds up no other: by default there is no limit,
    /// and VMs have their turns.
    #[must_use]
    pub fn budget(mut self, budget: Budget) -> Self {
        self.budget = budget;
        self
    }

    /// Sets the most descriptors of the keeper, and of each worker: by default the limit of the process. One VM too many
    /// is refused by name.
    #[must_use]
    pub fn descriptors(mut self, descriptors: impl Into<Option<u64>>) -> Self {
        self.descriptors = descriptors.into();
        self
    }

    /// Sets the place of the records by which a server serves VMs on after both processes of an earlier one were killed: by
    /// default there are none.
    #[must_use]
    pub fn recover(mut self, recover: Recover) -> Self {
        self.recover = recover;
        self
    }

    /// Has the server that is there end, and takes its VMs: an upgrade. By default it is an error that one is there.
    #[must_use]
    pub fn take_over(mut self, take_over: bool) -> Self {
        self.take_over = take_over;
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_admits_its_users_that_of_the_server_and_root_and_without_one_the_mode_decides() {
        let of = |users: &[u32]| ServerOptions::default().allow_users(users.to_vec());
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
