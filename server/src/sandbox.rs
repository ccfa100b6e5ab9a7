//! The rights of a worker: [`Sandbox`]. It parses messages of monitors and reads images that may be forged, so it has no right
//! that it does not need. The keeper has the others, and stays outside.
//!
//! Three walls, each for itself. Capabilities: none. Landlock: the files of the image and the facts about its own
//! descriptors are read, and the folder of `--record` is written. Seccomp: threads that answer faults have the calls of memory, waiting and reading; the main thread also the calls of
//! files and of sockets that it was handed. No thread starts a program, accepts a connection, or makes or connects a socket, so
//! that a worker of root's reaches no other service; for an image in object storage they make sockets of the network, and no
//! others. A call that is not on the list ends the process with a line that has its number, and the next worker takes over: an
//! answer instead would hide a list that is too short.
//!
//! A process that restores one VM ([`Offload::sandbox`](crate::Offload::sandbox)) has the same walls.
//!
//! Scopes of signals are left out: without a keeper, the worker ends VMs itself.
//! Source: landlock(7), seccomp(2), capabilities(7), ioctl_userfaultfd(2).

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::thread;

use crate::privilege;
use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, LandlockStatus, PathBeneath, PathFd, Ruleset,
    RulesetAttr, RulesetCreated, RulesetCreatedAttr, RulesetError, Scope, make_bitflags,
};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch,
};
use serde::{Deserialize, Serialize};

/// The version of Landlock that is asked for; an older kernel confines less.
const LANDLOCK: ABI = ABI::V10;
/// The libraries that the C library loads when it looks up the name of a server, and their list.
const LIBRARIES: [&str; 5] = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache"];

/// The files with names and certificates of servers, and the files that the C library reads to look them up.
const NETWORK: [&str; 9] = [
    "/etc/resolv.conf",
    "/etc/hosts",
    "/etc/host.conf",
    "/etc/nsswitch.conf",
    "/etc/gai.conf",
    "/etc/services",
    "/etc/ssl",
    "/etc/pki",
    "/usr/share/ca-certificates",
];
/// The variables that name a file that clients of object storage read, or a folder of certificates.
const CREDENTIALS: [&str; 7] = [
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE",
    "GOOGLE_APPLICATION_CREDENTIALS",
    "GOOGLE_SERVICE_ACCOUNT",
    "AZURE_FEDERATED_TOKEN_FILE",
];

/// Returns the files, or folders, that the environment names for the credentials and certificates of object
/// storage. They need not be there.
#[must_use]
pub fn credential_files() -> Vec<PathBuf> {
    CREDENTIALS.iter().filter_map(std::env::var_os).map(PathBuf::from).collect()
}

/// The restrictions of a worker.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub struct Sandbox {
    /// The user that it runs as.
    pub user: u32,
    /// Whether it has a capability, or could get one.
    pub has_capabilities: bool,
    /// The version of Landlock that confines it to the files that it needs; `None` if none does.
    pub landlock_abi: Option<u32>,
    /// Whether its threads have only the system calls that they need.
    pub seccomp: bool,
    /// The restrictions that are not in force, and the reasons.
    pub missing: Vec<String>,
}

/// The rest of the sentence "faults are answered as ...".
impl fmt::Display for Sandbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let capabilities = if self.has_capabilities { "with" } else { "without" };
        write!(f, "user {} {capabilities} capabilities", self.user)?;
        if let Some(abi) = self.landlock_abi {
            write!(f, ", Landlock (ABI {abi})")?;
        }
        if self.seccomp {
            f.write_str(", seccomp")?;
        }
        if !self.missing.is_empty() {
            write!(f, "; not in force: {}", self.missing.join("; "))?;
        }
        Ok(())
    }
}

/// The files of a worker.
#[derive(Debug, Default)]
pub(crate) struct Files {
    /// The files that are read.
    pub(crate) read: Vec<PathBuf>,
    /// The folders that are written.
    pub(crate) written: Vec<PathBuf>,
    /// Whether the image comes by the network.
    pub(crate) is_remote: bool,
}

impl Files {
    /// Returns the files for fetching: the names and certificates of servers, and files that the environment names for
    /// credentials.
    pub(crate) fn remote() -> Self {
        let read = NETWORK.iter().map(PathBuf::from).chain(credential_files()).collect();
        Self { read, is_remote: true, ..Self::default() }
    }
}

impl Sandbox {
    /// Returns the sandbox of a process that is not to have one.
    pub(crate) fn off() -> io::Result<Self> {
        let missing = vec!["the options turn the sandbox off".to_owned()];
        Ok(Self { missing, ..Self::now()? })
    }

    /// Takes all capabilities from this thread, and from the threads that it starts.
    pub(crate) fn without_capabilities() -> io::Result<Self> {
        privilege::give_up_capabilities()?;
        uzone_os::report_denied_calls("; --no-sandbox turns that off")?;
        Self::now()
    }

    fn now() -> io::Result<Self> {
        let (capabilities, gets_no_more) = privilege::capabilities()?;
        let has_capabilities = capabilities != 0 || !gets_no_more;
        Ok(Self { user: privilege::user(), has_capabilities, ..Self::default() })
    }

    /// Confines this thread, and the threads that it starts, to some files.
    pub(crate) fn confine_files(&mut self, files: &Files) {
        match restrict(files) {
            Ok(LandlockStatus::Available { effective_abi, .. }) => {
                self.landlock_abi = Some(effective_abi as u32);
            }
            Ok(_) => self.missing.push("Landlock: this kernel has none, or it is off".to_owned()),
            Err(error) => self.missing.push(format!("Landlock: {error}")),
        }
    }

    /// Confines threads that answer faults: `start` starts them, or is one of them.
    pub(crate) fn confine_threads<T: Send>(
        &mut self,
        kind: ThreadKind,
        start: impl FnOnce() -> T + Send,
    ) -> io::Result<T> {
        let (mut calls, mut without) = (answering_calls(), vec![clone3()]);
        let more = match kind {
            ThreadKind::Plain => &[],
            ThreadKind::Cache => CACHING,
            ThreadKind::MemoryFiles => {
                send_where_connected(&mut calls);
                WRITING
            }
        };
        calls.extend(more.iter().map(|call| (*call, Vec::new())));
        if !matches!(kind, ThreadKind::Cache) {
            without.push(opening());
        }
        let started = thread::scope(|scope| {
            let body = || (filter(calls, without), start());
            let thread = thread::Builder::new().name("uzone-start".into());
            // A panic of it was printed when it happened.
            thread.spawn_scoped(scope, body)?.join().map_err(|_| io::ErrorKind::Other.into())
        });
        let (filtered, value) = started.map_err(|cause: io::Error| cause)?;
        self.note(filtered);
        Ok(value)
    }

    /// Confines this thread, and the threads that it starts from then on, to its system calls.
    pub(crate) fn confine_calls(&mut self, is_remote: bool) {
        let (mut calls, mut without) = (main_calls(), vec![clone3()]);
        if is_remote {
            add_network(&mut calls);
            without.push(local_sockets());
        }
        let filtered = filter(calls, without);
        self.note(filtered);
        self.seccomp = !self.missing.iter().any(|missing| missing.starts_with(SECCOMP));
    }

    fn note(&mut self, filtered: Result<(), seccompiler::Error>) {
        if let Err(error) = filtered {
            let missing = format!("{SECCOMP}: {error}");
            if !self.missing.contains(&missing) {
                self.missing.push(missing);
            }
        }
    }
}

/// The kind of a thread that answers faults: its work beside reading the image and installing pages.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ThreadKind {
    /// No other work.
    Plain,
    /// They keep frames in a folder.
    Cache,
    /// They write memory files, and are asked for pages by a socket that is there.
    MemoryFiles,
}

/// The first word of a reason for the lack of a filter of system calls.
const SECCOMP: &str = "seccomp";

fn allow(
    rules: RulesetCreated,
    path: &Path,
    access: BitFlags<AccessFs>,
) -> Result<RulesetCreated, RulesetError> {
    // A file that is missing, or cannot be opened, cannot be used either.
    let Ok(fd) = PathFd::new(path) else { return Ok(rules) };
    rules.add_rule(PathBeneath::new(fd, access))
}

/// Restricts this thread to some files. Returns the Landlock of this kernel.
fn restrict(files: &Files) -> Result<LandlockStatus, RulesetError> {
    let read = make_bitflags!(AccessFs::{ReadFile});
    let change = make_bitflags!(AccessFs::{
        ReadFile | WriteFile | Truncate | ReadDir | MakeReg | RemoveFile
    });
    let mut rules = Ruleset::default().handle_access(AccessFs::from_all(LANDLOCK))?;
    if !files.is_remote {
        rules = rules.handle_access(AccessNet::from_all(LANDLOCK))?;
    }
    let mut rules = rules.scope(Scope::AbstractUnixSocket)?.create()?;
    let libraries = LIBRARIES.map(Path::new).into_iter().filter(|_| files.is_remote);
    for path in files.read.iter().map(PathBuf::as_path).chain(libraries) {
        rules = allow(rules, path, read)?;
    }
    for folder in &files.written {
        rules = allow(rules, folder, change)?;
    }
    // The features of a client's userfaultfd are read there. The folder stays open: the kernel forgets one of `/proc` that
    // nothing uses, and the rule with it.
    if let Ok(facts) = PathFd::new("/proc/self/fdinfo") {
        rules = rules.add_rule(PathBeneath::new(&facts, read))?;
        std::mem::forget(facts);
    }
    let null = make_bitflags!(AccessFs::{ReadFile | WriteFile});
    Ok(allow(rules, Path::new("/dev/null"), null)?.restrict_self()?.landlock)
}

type Calls = BTreeMap<i64, Vec<SeccompRule>>;

/// Restricts this thread, and the threads that it starts, to these system calls. The calls of `without` get an error,
/// with which a program goes on.
fn filter(calls: Calls, without: Vec<(Calls, i32)>) -> Result<(), seccompiler::Error> {
    let arch: TargetArch = std::env::consts::ARCH.try_into()?;
    let apply = |calls, otherwise, action| {
        let filter = SeccompFilter::new(calls, otherwise, action, arch)?;
        let program = BpfProgram::try_from(filter)?;
        seccompiler::apply_filter(&program)
    };
    for (calls, errno) in without {
        apply(calls, SeccompAction::Allow, SeccompAction::Errno(errno.unsigned_abs()))?;
    }
    apply(calls, SeccompAction::Trap, SeccompAction::Allow)
}

/// Admits a call whose arguments, by their index and as far as a mask reaches, have these values.
fn with_arguments(calls: &mut Calls, call: i64, values: &[(u8, u64, u64)]) {
    let conditions = values.iter().map(|(index, mask, value)| {
        let (len, equal) = (SeccompCmpArgLen::Dword, SeccompCmpOp::MaskedEq(*mask));
        SeccompCondition::new(*index, len, equal, *value)
    });
    // An argument has an index below 6, and a rule has a condition.
    let rule = SeccompRule::new(conditions.flatten().collect());
    calls.entry(call).or_default().extend(rule);
}

/// Admits a call whose argument `index`, as far as `mask` reaches, is one of `values`.
fn with_argument(calls: &mut Calls, call: i64, index: u8, mask: u64, values: &[u64]) {
    for value in values {
        with_arguments(calls, call, &[(index, mask, *value)]);
    }
}

/// All bits of an argument of 32 bits.
const ALL: u64 = u32::MAX as u64;
/// The bits of a socket's type that are no flags.
const SOCKET_KIND: u64 = 0xf;
/// The type of the ioctls of a userfaultfd, and its numbers from `UFFDIO_WAKE` to `UFFDIO_POISON`.
const UFFD: u64 = 0xaa00;
const UFFD_ANSWERS: [u64; 7] =
    [UFFD | 2, UFFD | 3, UFFD | 4, UFFD | 5, UFFD | 6, UFFD | 7, UFFD | 8];
/// The request for the number of bytes that a socket has to read: asm-generic/ioctls.h.
const FIONREAD: u64 = 0x541b;
/// `UFFDIO_REGISTER`, `UFFDIO_UNREGISTER` and `UFFDIO_API`.
const UFFD_BEGINNINGS: [u64; 3] = [UFFD, UFFD | 1, UFFD | 0x3f];
/// `UFFD_USER_MODE_ONLY`: linux/userfaultfd.h.
const USER_MODE_ONLY: u64 = 1;

/// The calls of the threads that answer faults and read the image.
const ANSWERING: &[i64] = &[
    // Reading the image and events, and installing pages.
    libc::SYS_read,
    libc::SYS_readv,
    libc::SYS_pread64,
    libc::SYS_preadv,
    libc::SYS_preadv2,
    libc::SYS_write,
    // Pages that are kept before they change.
    libc::SYS_pwrite64,
    libc::SYS_statx,
    libc::SYS_fstat,
    libc::SYS_fadvise64,
    libc::SYS_mincore,
    CACHESTAT,
    libc::SYS_openat,
    // Reports to the keeper, and the end of a VM without one.
    libc::SYS_sendmsg,
    libc::SYS_pidfd_send_signal,
    // Waiting.
    libc::SYS_futex,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_ppoll,
    libc::SYS_nanosleep,
    libc::SYS_clock_nanosleep,
    libc::SYS_clock_gettime,
    libc::SYS_clock_getres,
    libc::SYS_gettimeofday,
    libc::SYS_sched_yield,
    libc::SYS_restart_syscall,
    // Memory.
    libc::SYS_mmap,
    libc::SYS_munmap,
    libc::SYS_mprotect,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_brk,
    libc::SYS_membarrier,
    libc::SYS_getrandom,
    // Descriptors.
    libc::SYS_close,
    libc::SYS_fcntl,
    libc::SYS_lseek,
    libc::SYS_eventfd2,
    libc::SYS_epoll_create1,
    // A thread's beginning, where it runs, and its end.
    libc::SYS_clone3,
    libc::SYS_set_robust_list,
    libc::SYS_rseq,
    libc::SYS_sigaltstack,
    libc::SYS_gettid,
    libc::SYS_getpid,
    libc::SYS_getcpu,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_setaffinity,
    libc::SYS_sched_setscheduler,
    libc::SYS_setpriority,
    libc::SYS_getpriority,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_exit,
    libc::SYS_exit_group,
];

/// The further calls of threads that read the image and keep frames in a folder.
const CACHING: &[i64] = &[
    libc::SYS_openat2,
    libc::SYS_flock,
    libc::SYS_getdents64,
    libc::SYS_newfstatat,
    libc::SYS_unlinkat,
    libc::SYS_utimensat,
    libc::SYS_fallocate,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_unlink,
];

/// The further calls of a thread that writes memory files.
const WRITING: &[i64] = &[libc::SYS_recvfrom, libc::SYS_shutdown];

/// `cachestat(2)` of Linux 6.5: asm-generic/unistd.h.
const CACHESTAT: i64 = 451;

/// The calls of the main thread beside these: of files, and of sockets that it was handed.
const MAIN: &[i64] = &[
    // Files: which of them, Landlock decides.
    libc::SYS_newfstatat,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_openat2,
    libc::SYS_readlinkat,
    libc::SYS_getcwd,
    libc::SYS_flock,
    libc::SYS_utimensat,
    libc::SYS_getdents64,
    libc::SYS_ftruncate,
    libc::SYS_fallocate,
    libc::SYS_writev,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    libc::SYS_linkat,
    libc::SYS_unlinkat,
    libc::SYS_renameat2,
    libc::SYS_fstatfs,
    libc::SYS_statfs,
    libc::SYS_memfd_create,
    // Sockets that there are.
    libc::SYS_recvmsg,
    libc::SYS_recvfrom,
    libc::SYS_shutdown,
    libc::SYS_getsockopt,
    libc::SYS_setsockopt,
    libc::SYS_getsockname,
    libc::SYS_getpeername,
    // This process.
    libc::SYS_uname,
    libc::SYS_sysinfo,
    libc::SYS_getuid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getegid,
    libc::SYS_getppid,
    // Its own sandbox, which can only be narrower.
    libc::SYS_prctl,
    libc::SYS_seccomp,
];

/// The older forms of calls, which x86-64 has still.
#[cfg(target_arch = "x86_64")]
const ANSWERING_OLD: &[i64] = &[libc::SYS_epoll_wait, libc::SYS_poll];
#[cfg(target_arch = "x86_64")]
const MAIN_OLD: &[i64] = &[
    libc::SYS_open,
    libc::SYS_stat,
    libc::SYS_lstat,
    libc::SYS_access,
    libc::SYS_readlink,
    libc::SYS_rename,
    libc::SYS_unlink,
];
#[cfg(not(target_arch = "x86_64"))]
const ANSWERING_OLD: &[i64] = &[];
#[cfg(not(target_arch = "x86_64"))]
const MAIN_OLD: &[i64] = &[libc::SYS_renameat];

fn answering_calls() -> Calls {
    let mut calls: Calls =
        ANSWERING.iter().chain(ANSWERING_OLD).map(|call| (*call, Vec::new())).collect();
    with_argument(&mut calls, libc::SYS_ioctl, 1, 0xffff, &UFFD_ANSWERS);
    // Threads of this process, and no other process.
    let thread = u64::from(libc::CLONE_THREAD.unsigned_abs());
    with_argument(&mut calls, libc::SYS_clone, 0, thread, &[thread]);
    // The end of this process alone: by abort(3), or a call that is denied.
    with_argument(&mut calls, libc::SYS_tgkill, 0, ALL, &[u64::from(std::process::id())]);
    // The limits of this process, such as its stack.
    with_argument(&mut calls, libc::SYS_prlimit64, 0, ALL, &[0]);
    // On which node pages of this process lie, and from which they come: none is moved without a list of nodes.
    with_arguments(&mut calls, libc::SYS_move_pages, &[(0, ALL, 0), (3, ALL, 0)]);
    calls.insert(libc::SYS_mbind, Vec::new());
    let names = [libc::PR_SET_NAME, libc::PR_GET_NAME].map(|name| u64::from(name.unsigned_abs()));
    with_argument(&mut calls, libc::SYS_prctl, 0, ALL, &names);
    calls
}

fn main_calls() -> Calls {
    let mut calls = answering_calls();
    for call in MAIN.iter().chain(MAIN_OLD) {
        // No rule means any argument.
        calls.insert(*call, Vec::new());
    }
    // Probing a terminal, and a descriptor that does not wait.
    let terminal = [libc::TCGETS, libc::TIOCGWINSZ, libc::FIONBIO, libc::FIOCLEX];
    with_argument(&mut calls, libc::SYS_ioctl, 1, ALL, &terminal);
    // A userfaultfd for pages that programs share: of this process, and not for faults of the kernel.
    with_argument(&mut calls, libc::SYS_userfaultfd, 0, USER_MODE_ONLY, &[USER_MODE_ONLY]);
    with_argument(&mut calls, libc::SYS_ioctl, 1, 0xffff, &UFFD_BEGINNINGS);
    // A socket of datagrams would reach any other by its name.
    let unix = u64::from(libc::AF_UNIX.unsigned_abs());
    for kind in [libc::SOCK_STREAM, libc::SOCK_SEQPACKET] {
        let kind = (1, SOCKET_KIND, u64::from(kind.unsigned_abs()));
        with_arguments(&mut calls, libc::SYS_socketpair, &[(0, ALL, unix), kind]);
    }
    send_where_connected(&mut calls);
    calls
}

/// Admits sending to where a socket is connected: the address is none.
fn send_where_connected(calls: &mut Calls) {
    with_argument(calls, libc::SYS_sendto, 5, ALL, &[0]);
}

/// The flags of clone3(2) are in memory, where no filter looks: the C library uses clone(2) then.
fn clone3() -> (Calls, i32) {
    (Calls::from([(libc::SYS_clone3, Vec::new())]), libc::ENOSYS)
}

/// Threads that answer faults open no file; for an error that is explained better, they try to.
fn opening() -> (Calls, i32) {
    (Calls::from([(libc::SYS_openat, Vec::new())]), libc::EACCES)
}

/// Looking a name up, the C library tries services of this host first, and does without.
fn local_sockets() -> (Calls, i32) {
    let mut calls = Calls::new();
    let unix = u64::from(libc::AF_UNIX.unsigned_abs());
    with_argument(&mut calls, libc::SYS_socket, 0, ALL, &[unix]);
    (calls, libc::EACCES)
}

/// Admits sockets of the network, which the sockets of other services of this host are not, and the calls of the threads
/// that fetch.
fn add_network(calls: &mut Calls) {
    // The first is refused by an error: `local_sockets`.
    for domain in [libc::AF_UNIX, libc::AF_INET, libc::AF_INET6, libc::AF_NETLINK] {
        let domain = u64::from(domain.unsigned_abs());
        with_argument(calls, libc::SYS_socket, 0, ALL, &[domain]);
    }
    for call in [libc::SYS_connect, libc::SYS_bind, libc::SYS_sendto, libc::SYS_sendmmsg] {
        calls.insert(call, Vec::new());
    }
    with_argument(calls, libc::SYS_ioctl, 1, ALL, &[FIONREAD]);
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::{UnixDatagram, UnixStream};
    use std::os::unix::process::ExitStatusExt;
    use std::process::Command;

    use std::fs;

    use super::*;

    /// The variable that names an attempt. It is missing in the process that starts the attempts.
    const TRY: &str = "UZONE_SERVER_TEST_TRY";

    /// The attempt of a thread that answers faults.
    fn attempt(what: &str) -> io::Result<()> {
        match what {
            "a thread" => thread::Builder::new().spawn(|| {}).map(drop),
            "its name" => Ok(rustix::thread::name().map(drop)?),
            "a file" => fs::File::open("/etc/passwd").map(drop),
            "a new file" => fs::write("/tmp/uzone-denied", ""),
            "a socket" => UnixStream::connect("/run/uzone-denied").map(drop),
            "a pair" => UnixStream::pair().map(drop),
            "datagrams" => UnixDatagram::pair().map(drop),
            "a program" => Command::new("/bin/true").status().map(drop),
            "another root" => Ok(rustix::process::chroot("/")?),
            "a signal" => {
                let (parent, signal) = (rustix::process::getppid(), rustix::process::Signal::CONT);
                Ok(rustix::process::kill_process(parent.unwrap(), signal)?)
            }
            "capabilities" => privilege::give_up_capabilities(),
            _ => unreachable!("{what}"),
        }
    }

    #[test]
    fn a_thread_that_answers_faults_has_no_other_calls() {
        let test = "sandbox::tests::a_thread_that_answers_faults_has_no_other_calls";
        if let Ok(what) = std::env::var(TRY) {
            let (what, kind) = match what.strip_suffix(" by one that writes") {
                Some(what) => (what, ThreadKind::MemoryFiles),
                None => (&what[..], ThreadKind::Plain),
            };
            let mut sandbox = Sandbox::without_capabilities().unwrap();
            let outcome =
                sandbox.confine_threads(kind, || attempt(what).map_err(|cause| cause.kind()));
            assert_eq!(sandbox.missing, [""; 0]);
            let is_file = what.contains("file");
            let expected = if is_file { Err(io::ErrorKind::PermissionDenied) } else { Ok(()) };
            return assert_eq!(outcome.unwrap(), expected);
        }
        let run = |what: &str| {
            let mut this = Command::new(std::env::current_exe().unwrap());
            this.args([test, "--exact", "--nocapture"]).env(TRY, what).output().unwrap()
        };
        let of_both = |what: &&str| [(*what).to_owned(), format!("{what} by one that writes")];
        for what in ["a thread", "its name", "a file", "a new file"].iter().flat_map(of_both) {
            let output = run(&what);
            assert!(output.status.success(), "{what}: {output:?}");
        }
        let ended = ["a socket", "a pair", "datagrams", "another root", "a signal", "capabilities"];
        for what in ended.iter().flat_map(of_both) {
            let output = run(&what);
            assert_eq!(output.status.signal(), Some(31), "{what}: {output:?}");
            let line = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(line.contains("thread uzone-start made system call "), "{what}: {line}");
        }
        // Signals are held back while a program is started, so this one ends without a line.
        assert_eq!(run("a program").status.signal(), Some(31));
    }

    #[test]
    fn what_is_in_force_is_one_line() {
        let mut sandbox = Sandbox { user: 7, ..Sandbox::default() };
        sandbox.landlock_abi = Some(4);
        sandbox.seccomp = true;
        assert_eq!(sandbox.to_string(), "user 7 without capabilities, Landlock (ABI 4), seccomp");
        sandbox.landlock_abi = None;
        sandbox.missing.push("Landlock: this kernel has none".to_owned());
        assert_eq!(
            sandbox.to_string(),
            "user 7 without capabilities, seccomp; not in force: Landlock: this kernel has none"
        );
    }
}
