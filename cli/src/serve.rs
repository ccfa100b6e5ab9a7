//! `uzone serve`: restores VMs from an image of their memory, page by page. The command is the keeper; it
//! starts itself again as the worker.

mod events;
mod rights;

use std::env;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::net::SocketAddr;
use std::num::{NonZeroU32, NonZeroUsize};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread;
use std::time::{Duration, SystemTime};

use clap::builder::ArgPredicate;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use uzone_fault::Budget;
use uzone_os::uffd::Doorbell;
use uzone_pages::ByteLen;
use uzone_server::{
    Keeper, OnFailure, Prefetch, Recover, ServeError, ServeEvent, ServerOptions, ServiceManager,
    SystemdDescriptors, Worker, WorkerStart, descriptors, privilege,
};
use uzone_snapshot::{Root, is_url};

pub(crate) use self::events::Line;

use self::events::Happened;
use crate::exit::{self, Exit, Failure};
use crate::image::{OnDisk, Requests};
use crate::output::Output;
use crate::user::{self, User};

const EXITS: [u8; 9] = [0, 2, 65, 66, 69, 71, 74, 75, 77];

/// Restore VMs from an image of their memory, page by page
///
/// Firecracker connects by `"mem_backend": {"backend_type": "Uffd", "backend_path": SOCKET}` when it loads a
/// snapshot. Each page is read, and verified if the image is packed, when the VM touches it. One server serves many VMs.
///
/// On the first SIGINT or SIGTERM the server stops accepting VMs and exits when the last one ends. The second signal
/// ends it at once: a VM that is left waits at the next missing page until the same command is started again.
///
/// A worker process answers faults. If the worker dies, the next worker takes over all VMs, which notice only a pause.
/// If this command is killed, its worker goes on with the VMs that it has; the same command, started again, takes over.
#[derive(Debug, clap::Args)]
#[command(after_help = exit::help("uzone serve --socket /run/vm.sock memory.img", &EXITS))]
pub(crate) struct Args {
    /// The image: packed, or the raw bytes of memory; a URL such as s3://BUCKET/KEY, with #root=HASH if it
    /// is packed
    image: PathBuf,
    /// Socket for monitors [default: uzone.sock in $XDG_RUNTIME_DIR, or else in this directory]
    #[arg(long, value_name = "PATH", env = "UZONE_SERVE_SOCKET")]
    socket: Option<PathBuf>,
    /// Mode of the socket, in octal: 660 by default with --group, and 666 with --allow-uid alone
    #[arg(long, value_name = "MODE", default_value = "600", default_value_ifs = MODES, value_parser = mode, env = "UZONE_SERVE_MODE")]
    mode: u32,
    /// Group of the socket, a name or a number; unless it is root, the user of this command must be a member [default: the
    /// group of this command]
    #[arg(long, value_name = "GROUP", env = "UZONE_SERVE_GROUP")]
    group: Option<String>,
    /// Users that may connect, names or numbers, beside root and the user of this command [default: all users that the
    /// mode admits]
    #[arg(long, value_name = "USER,...", env = "UZONE_SERVE_ALLOW_UID")]
    allow_uid: Option<String>,
    /// Treatment of a VM when a page cannot be read
    #[arg(long, value_enum, value_name = "WHAT", default_value_t, env = "UZONE_SERVE_ON_FAILURE")]
    on_failure: Failing,
    /// Give up on a page after this many seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = deadline, env = "UZONE_SERVE_DEADLINE")]
    deadline: u64,
    /// Append the pages that VMs touch to FILE, in access order; a folder gets a file named by the image's root hash.
    /// Faults are then answered one page at a time
    #[arg(long, value_name = "FILE", env = "UZONE_SERVE_RECORD")]
    record: Option<PathBuf>,
    /// Pages to install before they are touched: a file or folder of --record, which may be empty, or `none` [default:
    /// the working set of the image]
    #[arg(long, value_name = "FILE", env = "UZONE_SERVE_PREFETCH")]
    prefetch: Option<PathBuf>,
    /// Give VMs huge pages: a fault fills its whole block of 2 MiB, and the kernel collapses the block into a huge page,
    /// which takes root, or CAP_SYS_NICE and the monitor's user. Zero pages then take memory. Memory that has pages of
    /// 2 MiB is always served by whole pages
    #[arg(long, conflicts_with = "record", env = "UZONE_SERVE_HUGE")]
    huge: bool,
    /// Serve metrics for Prometheus by HTTP at ADDRESS:PORT to every client that can reach it; the control socket always
    /// has them
    #[arg(long, value_name = "ADDRESS", env = "UZONE_SERVE_METRICS")]
    metrics: Option<SocketAddr>,
    /// Upgrade: end the server that runs at the socket, if there is one, and take over its socket and VMs. The image must
    /// be the same
    #[arg(long)]
    take_over: bool,
    /// Faults of one VM per second, so that it delays no other [default: no limit]
    #[arg(long, value_name = "COUNT", env = "UZONE_SERVE_SESSION_FAULTS")]
    session_faults: Option<NonZeroU32>,
    /// Bytes installed for one VM per second, at least 1M [default: no limit]
    #[arg(long, value_name = "SIZE", env = "UZONE_SERVE_SESSION_BYTES", value_parser = session_bytes)]
    session_bytes: Option<ByteLen>,
    /// Pages read from the image for one VM at once [default: no limit]
    #[arg(long, value_name = "PAGES", env = "UZONE_SERVE_SESSION_PENDING")]
    session_pending: Option<NonZeroUsize>,
    /// Store recovery records of VMs in FOLDER: the same command, started again, resumes them after this one was killed.
    /// `none` stores nothing [default: uzone-recover in /run for root, and in $XDG_RUNTIME_DIR for others; the descriptor
    /// store of the service manager, if one started this command]
    #[arg(long, value_name = "FOLDER", env = "UZONE_SERVE_RECOVER")]
    recover: Option<PathBuf>,
    /// Serve only the image with this root hash; without it, a forged image is not noticed
    #[arg(long, value_name = "HASH", env = "UZONE_SERVE_ROOT")]
    root: Option<Root>,
    /// Size of the cache of decoded frames, for all VMs together
    #[arg(long, value_name = "SIZE", default_value = "64M", env = "UZONE_SERVE_CACHE_BYTES")]
    cache_bytes: ByteLen,
    /// User of the worker, a name or a number, which must be able to read the image; only root can choose it [default: the
    /// user uzone, if root starts this command and the system has that user; otherwise the user of this command]
    #[arg(long, value_name = "USER", env = "UZONE_SERVE_USER")]
    user: Option<String>,
    /// Do not confine the worker, for a debugger: by default it has no capability, and only the files and system calls that
    /// it needs
    #[arg(long, env = "UZONE_SERVE_NO_SANDBOX")]
    no_sandbox: bool,
    #[command(flatten)]
    on_disk: OnDisk,
    #[command(flatten)]
    requests: Requests,
    /// Run as the worker of the keeper at standard input
    #[arg(long, hide = true)]
    worker: bool,
}

/// Default modes of a socket for users other than its owner.
const MODES: [(&str, ArgPredicate, &str); 2] =
    [("group", ArgPredicate::IsPresent, "660"), ("allow_uid", ArgPredicate::IsPresent, "666")];

/// The value that turns an option with a file or a folder off.
const NONE: &str = "none";
/// This program, even if its file was replaced.
const PROGRAM: &str = "/proc/self/exe";
/// The largest number of events that wait to be printed; further events are dropped, so that VMs do not wait for a log.
const WAITING: usize = 4096;

/// The treatment of a VM when a page cannot be read.
#[derive(Clone, Copy, Debug, Default, clap::ValueEnum)]
enum Failing {
    /// Kill its monitor
    #[default]
    Kill,
    /// Raise SIGBUS at the page; where the access is emulated, the VM reads zeroes
    Poison,
    /// Let it wait until it is killed
    Hold,
}

fn mode(text: &str) -> Result<u32, String> {
    let mode = u32::from_str_radix(text, 8).ok().filter(|mode| *mode <= 0o777);
    mode.ok_or_else(|| "a mode is octal digits, such as 660, and at most 777".into())
}

fn deadline(text: &str) -> Result<u64, &'static str> {
    let seconds = text.parse().ok().filter(|seconds| (1..=86_400).contains(seconds));
    seconds.ok_or("a deadline is a number of seconds from 1 to 86400")
}

/// Returns the default socket for monitors.
pub(crate) fn default_socket() -> PathBuf {
    runtime_folder().unwrap_or_else(|| PathBuf::from(".")).join("uzone.sock")
}

/// Returns the socket for monitors.
fn socket_of(args: &Args, passed: &SystemdDescriptors) -> PathBuf {
    args.socket.clone().or_else(|| passed.socket()).unwrap_or_else(default_socket)
}

/// Returns the runtime folder of the user.
fn runtime_folder() -> Option<PathBuf> {
    env::var_os("XDG_RUNTIME_DIR").filter(|folder| !folder.is_empty()).map(PathBuf::from)
}

fn session_bytes(text: &str) -> Result<ByteLen, String> {
    let bytes: ByteLen = text.parse().map_err(|error| format!("{error}"))?;
    if bytes < Budget::LEAST_BYTES {
        return Err(format!(
            "a VM needs at least {} a second, or each of its faults waits for minutes",
            Budget::LEAST_BYTES
        ));
    }
    Ok(bytes)
}

/// Returns the numbers of the users that may connect; `None` is all users.
fn allowed(args: &Args) -> Result<Option<Vec<u32>>, Failure> {
    match &args.allow_uid {
        Some(names) => {
            names.split(',').map(user::number_of_user).collect::<Result<_, _>>().map(Some)
        }
        None => Ok(None),
    }
}

fn options(args: &Args) -> ServerOptions {
    let budget = Budget::default()
        .faults_per_second(args.session_faults)
        .bytes_per_second(args.session_bytes)
        .pending(args.session_pending);
    let mut options = ServerOptions::default();
    options.mode = args.mode;
    options.deadline = Duration::from_secs(args.deadline);
    options.record.clone_from(&args.record);
    options.huge = args.huge;
    options.metrics = args.metrics;
    options.root = args.root;
    options.cache = args.cache_bytes;
    options.sandbox = !args.no_sandbox;
    options.requests = args.requests.options();
    options.budget = budget;
    options.prefetch = match &args.prefetch {
        None => Prefetch::OfImage,
        Some(file) if file.as_os_str() == NONE => Prefetch::No,
        Some(file) => Prefetch::File(file.clone()),
    };
    options.on_failure = match args.on_failure {
        Failing::Kill => OnFailure::Kill,
        Failing::Poison => OnFailure::Poison,
        Failing::Hold => OnFailure::Hold,
    };
    options
}

/// Serves VMs until a signal.
pub(crate) fn run(args: &Args, out: &Output) -> Result<Exit, Failure> {
    if args.worker {
        return work(args, out);
    }
    // Before this process opens anything.
    let mut passed = SystemdDescriptors::of_environment();
    have_own_descriptors();
    // Before the sockets: a signal that comes after their creation removes them.
    let signals = Signals::new([SIGINT, SIGTERM])?;
    // A closed terminal, or a service manager that asks for a reload, ends no VM.
    signal_hook::flag::register(SIGHUP, Arc::default())?;
    warn_of_long_requests(args, out);
    let user = rights::user_of_worker(args, out)?;
    // Before this process starts a thread.
    let socket = socket_of(args, &passed);
    let needed = rights::of_keeper(args, &socket, user.is_some());
    privilege::keep_capabilities(needed).map_err(ServeError::Capabilities)?;
    let group = args.group.as_deref().map(user::number_of_group).transpose()?;
    let mut options = options(args);
    (options.group, options.allowed) = (group, allowed(args)?);
    (options.recover, options.take_over) = (place_of_records(args, out), args.take_over);
    let (log, printer) = printer();
    let keeper = match Keeper::start(&socket, options, &mut passed, log, start_worker(user)) {
        // The worker has printed the reason.
        Err(ServeError::Worker { status }) if let Some(exit) = Exit::of_process(status) => {
            return Ok(exit);
        }
        keeper => keeper?,
    };
    serve(keeper, &args.image, &socket, printer, signals, out)
}

/// Closes descriptors that the caller left open, and raises the limit of descriptors for this process and its workers.
fn have_own_descriptors() {
    uzone_os::close_inherited();
    // If this fails, the server serves fewer VMs, and its log names the limit.
    let _ = descriptors::raise_limit();
}

/// Warns if the server gives up on a page while its requests to object storage still run. That is no error: the answers
/// come too late for the page.
fn warn_of_long_requests(args: &Args, out: &Output) {
    let requests = &args.requests;
    let longest = requests.options().longest();
    if is_url(&args.image) && longest >= Duration::from_secs(args.deadline) {
        out.warn(format_args!(
            "--deadline {} gives up on a page before its requests end, which is after {longest:?}: --source-retry \
             {:?} and twice --source-timeout {:?}",
            args.deadline, requests.source_retry, requests.source_timeout
        ));
    }
}

/// Returns the place of the records of VMs.
fn place_of_records(args: &Args, out: &Output) -> Recover {
    match &args.recover {
        Some(folder) if folder.as_os_str() == NONE => return Recover::No,
        Some(folder) => return Recover::Folder(folder.clone()),
        None if ServiceManager::of_environment().is_some() => return Recover::ServiceManager,
        None => {}
    }
    let folder = match privilege::user() {
        0 => Some(PathBuf::from("/run")),
        _ => runtime_folder(),
    };
    let folder = folder.map(|folder| folder.join("uzone-recover"));
    let made = folder
        .as_deref()
        .map(|folder| fs::DirBuilder::new().recursive(true).mode(0o700).create(folder));
    let reason = match (folder, made) {
        (Some(folder), Some(Ok(()))) => return Recover::Folder(folder),
        (_, Some(Err(cause))) => cause.to_string(),
        _ => "$XDG_RUNTIME_DIR is not set".to_owned(),
    };
    out.warn(format_args!(
        "no recovery folder ({reason}): if keeper and worker are both killed, VMs hang; set --recover FOLDER, or \
         --recover none to accept this"
    ));
    Recover::No
}

/// Notifies the service manager of a state, as sd_notify(3) has it.
fn notify(manager: Option<&ServiceManager>, state: &str) {
    if let Some(manager) = manager {
        manager.notify(state);
    }
}

/// Events on their way to be printed.
struct Printer {
    events: Receiver<(SystemTime, ServeEvent)>,
    dropped: Arc<AtomicU64>,
}

/// Returns a log that never blocks, and the receiver of its events.
fn printer() -> (impl Fn(&ServeEvent) + Send + 'static, Printer) {
    let (sender, events) = sync_channel::<(SystemTime, ServeEvent)>(WAITING);
    let dropped = Arc::new(AtomicU64::new(0));
    let is_dropped = dropped.clone();
    let log = move |event: &ServeEvent| {
        if sender.try_send((SystemTime::now(), event.clone())).is_err() {
            // Relaxed: a statistic.
            is_dropped.fetch_add(1, Ordering::Relaxed);
        }
    };
    (log, Printer { events, dropped })
}

/// Serves VMs until a signal.
fn serve(
    mut keeper: Keeper,
    image: &Path,
    socket: &Path,
    Printer { events, dropped }: Printer,
    mut signals: Signals,
    out: &Output,
) -> Result<Exit, Failure> {
    let manager = ServiceManager::of_environment();
    let manager = manager.as_ref();
    let stop = Arc::new(Doorbell::new()?);
    if keeper.is_listening() {
        out.event(&Line::now(Happened::Listening {
            socket: socket.display().to_string(),
            image: image.display().to_string(),
            metrics: keeper.metrics(),
            sandbox: keeper.sandbox().clone(),
        }));
    } else {
        out.warn(format_args!(
            "another server listens on {}: this one serves the VMs of a server that was killed, and exits when the \
             last one ends",
            socket.display()
        ));
    }
    notify(manager, &format!("READY=1\nMAINPID={}\n", std::process::id()));
    let bell = stop.clone();
    thread::Builder::new().name("uzone-signals".into()).spawn(move || {
        for _ in signals.forever() {
            // The counter of a bell is never full.
            let _ = bell.ring();
        }
    })?;
    let lines = *out;
    let printer = thread::Builder::new().name("uzone-log".into()).spawn(move || {
        for (at, event) in events {
            lines.event(&Line::at(at, Happened::Session(&event)));
        }
    })?;
    let served = keeper.run(&stop)?;
    // The last sender, so that the printer ends.
    drop(keeper);
    let _ = printer.join();
    out.event(&Line::now(Happened::Stopped {
        sessions: served.sessions,
        left: served.left,
        worker_deaths: served.deaths,
        dropped_events: dropped.load(Ordering::Relaxed),
    }));
    notify(manager, "STOPPING=1\n");
    Ok(if served.left == 0 { Exit::Ok } else { Exit::Again })
}

/// Returns a function that starts this program as the worker, in a process group that gets no signals of the terminal.
fn start_worker(user: Option<User>) -> impl FnMut(OwnedFd) -> io::Result<Child> + Send + 'static {
    let mut arguments: Vec<OsString> = env::args_os().skip(1).collect();
    arguments.retain(|argument| argument != "--take-over");
    arguments.push("--worker".into());
    move |keeper| {
        let mut command = Command::new(PROGRAM);
        command.args(&arguments);
        command.stdin(keeper).process_group(0);
        if let Some(user) = user {
            user.runs(&mut command);
        }
        command.spawn()
    }
}

/// Answers the faults of the VMs that the keeper offers.
fn work(args: &Args, out: &Output) -> Result<Exit, Failure> {
    have_own_descriptors();
    // At most 15 bytes. Without it, the process has the name of the command.
    let _ = uzone_os::thread::set_name("uzone-worker");
    // The keeper ends its worker: signals to stop are for the keeper.
    let _signals = Signals::new([SIGINT, SIGTERM])?;
    // The kernel sends SIGHUP to a stopped process whose parent dies: the worker goes on then.
    signal_hook::flag::register(SIGHUP, Arc::default())?;
    let start = WorkerStart::receive(io::stdin().as_fd().try_clone_to_owned()?)?;
    let disk = match args.on_disk.open() {
        Err(error) if start.has_machines() => {
            out.warn(format_args!("serving VMs without a cache on disk: {error}"));
            None
        }
        opened => opened?,
    };
    let mut options = options(args);
    options.disk_cache = disk;
    let mut worker = Worker::open(&args.image, options, Some(start))?;
    worker.run()?;
    Ok(Exit::Ok)
}
