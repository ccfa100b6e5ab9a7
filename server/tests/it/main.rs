//! VMs are served from an image: each gets the right bytes, pages that it gives back are zero, a page that cannot be
//! produced ends it, and a client that breaks the protocol harms no other.
//!
//! A VM is this program, started again: it does the same as Firecracker, and its threads touch memory in place of virtual
//! CPUs. So are a worker, and a keeper that is killed.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail by panicking, as tests do")]

use std::fs;
use std::io::{ErrorKind, IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::net::SocketAddr;
use std::ops::{Deref, DerefMut, RangeBounds, RangeInclusive};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use kvm_ioctls::Kvm;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use rustix::process::{Resource, Rlimit, setrlimit};
use uzone_os::uffd::{Doorbell, Features, KernelFaults, Modes, Registered, Uffd};
use uzone_os::{Anonymous, Mapping};
use uzone_pages::{ByteLen, PageSize};
use uzone_server::descriptors;
use uzone_server::{
    FailedKind, FailedPages, Keeper, OnFailure, Prefetch, Recover, ServeError, ServeEvent, Served,
    ServerOptions, SystemdDescriptors, Worker, WorkerStart,
};
use uzone_snapshot::Packer;

use common::needs::{Pool, or_skip, skip};
use common::{Folder, damage, page_of};
use crowd::Machine;
use guest::Guest;

mod cloud_hypervisor;
mod common;
mod corpus;
mod crowd;
mod diff;
mod guest;
mod hostile;
mod jailer;
mod memory_limit;
mod neighbour;
mod receiver;
mod sandbox;
mod stress;
mod targets;

const MACHINE: &str = "UZONE_SERVER_TEST_MACHINE";
const WORKER: &str = "UZONE_SERVER_TEST_WORKER";
const KEEPER: &str = "UZONE_SERVER_TEST_KEEPER";
/// Whether a keeper of another process is an upgrade.
const TAKES_OVER: &str = "UZONE_SERVER_TEST_TAKES_OVER";
/// The name of the image that a keeper of another process serves: `raw` by default.
const IMAGE: &str = "UZONE_SERVER_TEST_IMAGE";
/// The policy of a keeper in another process for pages that cannot be produced, and the user of its workers.
const POLICY: &str = "UZONE_SERVER_TEST_POLICY";
const WORKER_USER: &str = "UZONE_SERVER_TEST_WORKER_USER";
/// Users that own nothing here.
const STRANGER: u32 = 65_534;
const OTHER_STRANGER: u32 = 65_533;
/// The soft and the hard limit of a keeper's descriptors, in another process.
const LIMIT: &str = "UZONE_SERVER_TEST_LIMIT";
/// When a VM stops itself: before its first fault, or while its threads fault.
const STOPS: &str = "UZONE_SERVER_TEST_STOPS";
const BEFORE_ITS_FAULTS: &str = "before its faults";
const AMONG_ITS_FAULTS: &str = "among its faults";
/// Whether it kills its worker on the way.
const KILLS_ITS_WORKER: &str = "UZONE_SERVER_TEST_KILLS_ITS_WORKER";
/// The seconds for which it is stopped: 1 by default.
const SECONDS: &str = "UZONE_TEST_SECONDS";
/// The number of workers that are killed under load: 12 by default.
const KILLS: &str = "UZONE_SERVER_TEST_KILLS";
const PAGE: u64 = 4096;
const PAGES: u64 = 2048;
/// The longest time that anything takes, before it counts as hanging.
const PATIENCE: Duration = Duration::from_secs(60);

/// Returns the name of the test that this is in.
macro_rules! name {
    () => {{
        fn here() {}
        $crate::name_of(here)
    }};
}
pub(crate) use name;

fn name_of<T>(_: T) -> &'static str {
    let path = std::any::type_name::<T>();
    path.trim_end_matches("::here").split_once("::").unwrap().1
}

/// Sends a message as Firecracker does.
fn greet(socket: &Path, message: &str, fds: &[BorrowedFd<'_>]) -> UnixStream {
    let stream = UnixStream::connect(socket).unwrap();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
    }
    // In two parts, as a stream may cut it.
    let (first, rest) = message.split_at(message.len() / 2);
    let parts = [IoSlice::new(first.as_bytes())];
    rustix::net::sendmsg(&stream, &parts, &mut control, SendFlags::empty()).unwrap();
    match (&stream).write_all(rest.as_bytes()) {
        // The first part was refused already.
        Err(error) if error.kind() == ErrorKind::BrokenPipe => {}
        written => written.unwrap(),
    }
    stream
}

fn check(memory: &Registered, at: u64, expected: &[u8]) {
    let mut seen = vec![1; 4096];
    memory.mapping().read_at(at * PAGE, &mut seen).unwrap();
    assert!(seen == expected, "wrong bytes in page {at}");
}

/// Hands over memory for the whole image in one region.
fn one_region(socket: &Path, faults: KernelFaults) -> (Registered, UnixStream) {
    region_of(socket, faults, PAGES)
}

/// Opens a userfaultfd as Firecracker does.
fn userfaultfd(faults: KernelFaults) -> Arc<Uffd> {
    Arc::new(Uffd::open(Features::EVENT_REMOVE, Features::NONE, faults).unwrap())
}

/// Maps so many pages, whose faults a userfaultfd reports.
fn memory_of(uffd: &Arc<Uffd>, pages: u64, align: Option<ByteLen>) -> Registered {
    let how = Anonymous { align, ..Anonymous::default() };
    let mapping = Mapping::anonymous(ByteLen::new(pages * PAGE), how).unwrap();
    Registered::new(uffd.clone(), mapping, Modes::MISSING).unwrap()
}

fn start_of(memory: &Registered) -> u64 {
    memory.mapping().addr().get() as u64
}

/// Returns a region as Firecracker sends it.
fn region(start: u64, size: u64, offset: u64, page: u64) -> String {
    format!(
        r#"{{"base_host_virt_addr":{start},"size":{size},"offset":{offset},"page_size":{page},"page_size_kib":{page}}}"#
    )
}

/// Hands over memory for so many pages in one region.
fn region_of(socket: &Path, faults: KernelFaults, pages: u64) -> (Registered, UnixStream) {
    let uffd = userfaultfd(faults);
    let memory = memory_of(&uffd, pages, None);
    let message = format!("[{}]", region(start_of(&memory), pages * PAGE, 0, PAGE));
    let stream = greet(socket, &message, &[uffd.as_fd()]);
    (memory, stream)
}

/// A VM of two regions, of which the second has a lower offset, touched by four threads in any order; half of the first
/// is given back and is zero then.
fn be_a_machine(socket: &Path) {
    let (uffd, half) = (userfaultfd(KernelFaults::IfAllowed), PAGES / 2);
    let [high, low] = [(); 2].map(|()| memory_of(&uffd, half, None));
    let object = |memory, offset| region(start_of(memory), half * PAGE, offset, PAGE);
    let message = format!("[{},{}]", object(&high, half * PAGE), object(&low, 0));
    let stream = greet(socket, &message, &[uffd.as_fd()]);
    // Like Firecracker before 1.12: the end of the stream means nothing.
    drop(stream);
    let stops = std::env::var(STOPS).unwrap_or_default();
    if stops == BEFORE_ITS_FAULTS {
        send(std::process::id(), rustix::process::Signal::STOP);
    }
    thread::scope(|scope| {
        for seed in 0..4 {
            let stops = stops == AMONG_ITS_FAULTS;
            let (high, low) = (&high, &low);
            scope.spawn(move || {
                for step in 0..half {
                    if stops && seed == 0 && step == half / 2 {
                        send(std::process::id(), rustix::process::Signal::STOP);
                    }
                    let at = (step * 37 + seed * 101) % half;
                    check(high, at, &page_of(half + at));
                    check(low, at, &page_of(at));
                }
            });
        }
    });
    // In many steps, each of which waits until the server has read of it.
    thread::scope(|scope| {
        scope.spawn(|| {
            for at in (0..half / 2).step_by(4) {
                high.mapping().discard(at * PAGE..(at + 4) * PAGE).unwrap();
                check(&high, at + 1, &[0; 4096]);
            }
        });
        scope.spawn(|| (0..half).for_each(|at| check(&low, at, &page_of(at))));
    });
    (0..half / 2).for_each(|at| check(&high, at, &[0; 4096]));
    (half / 2..half).for_each(|at| check(&high, at, &page_of(half + at)));
}

/// Returns this program as another process, which runs one test.
fn program(test: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([test, "--exact", "--nocapture", "--test-threads=1"]).stdout(Stdio::null());
    command
}

/// A process that does not outlive its test.
struct Process(Child);

impl Process {
    fn start(command: &mut Command) -> Self {
        Self(command.spawn().unwrap())
    }
}

impl Deref for Process {
    type Target = Child;

    fn deref(&self) -> &Child {
        &self.0
    }
}

impl DerefMut for Process {
    fn deref_mut(&mut self) -> &mut Child {
        &mut self.0
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // If it has ended there is no such process.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn machine(test: &str, socket: &Path) -> Process {
    Process::start(program(test).env(MACHINE, socket))
}

/// Starts a worker that serves `image`.
fn start_worker(image: &Path, options: &str, keeper: OwnedFd) -> std::io::Result<Child> {
    let mut command = program("a_worker_of_the_other_tests");
    command.env(WORKER, image).env_remove(KEEPER).env("OPTIONS", options).stdin(keeper);
    let user = std::env::var(WORKER_USER).ok().filter(|_| rustix::process::geteuid().is_root());
    if let Some(user) = user.map(|user| user.parse().unwrap()) {
        command.uid(user).gid(user);
    }
    command.spawn()
}

/// Returns the options that a word stands for; a file follows on some.
fn options(words: &str) -> ServerOptions {
    let mut options = ServerOptions::default();
    match words.split_once(' ').unwrap_or((words, "")) {
        ("record", file) => options.record = Some(file.into()),
        ("prefetch", file) => options.prefetch = Prefetch::File(file.into()),
        ("kept", folder) => options = kept_in(Path::new(folder)),
        // For a VM of one user.
        ("allow", user) => {
            (options.mode, options.allowed) = (0o666, Some(vec![user.parse().unwrap()]));
        }
        ("hold", _) => options.on_failure = OnFailure::Hold,
        ("poison", _) => options.on_failure = OnFailure::Poison,
        // For a VM of any user.
        ("open", _) => options.mode = 0o666,
        ("huge", _) => options.huge = true,
        ("metrics", _) => {
            options.on_failure = OnFailure::Hold;
            options.metrics = "127.0.0.1:0".parse::<SocketAddr>().ok();
        }
        _ => {}
    }
    options
}

/// No test, but the process that others start.
#[test]
fn a_worker_of_the_other_tests() {
    let Some(image) = std::env::var_os(WORKER) else { return };
    let policy = std::env::var("OPTIONS").unwrap();
    let keeper = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
    let start = WorkerStart::receive(keeper).unwrap();
    let mut worker = Worker::open(Path::new(&image), options(&policy), Some(start)).unwrap();
    worker.run().unwrap();
}

/// Returns options by which records of VMs lie in a folder, and no VM is ended.
fn kept_in(folder: &Path) -> ServerOptions {
    let mut options = options("hold");
    options.recover = Recover::Folder(folder.to_owned());
    options
}

/// No test, but the process that another kills. It serves an image beside its socket.
#[test]
fn a_keeper_of_another_test() {
    let Some(socket) = std::env::var_os(KEEPER).map(PathBuf::from) else { return };
    if let Ok(limit) = std::env::var(LIMIT) {
        let (soft, hard) = limit.split_once(' ').unwrap();
        let [current, maximum] = [soft, hard].map(|limit| limit.parse().ok());
        setrlimit(Resource::Nofile, Rlimit { current, maximum }).unwrap();
        // Like the command.
        descriptors::raise_limit().unwrap();
    }
    let image = std::env::var(IMAGE).unwrap_or_else(|_| "raw".to_owned());
    let image = socket.with_file_name(image);
    let policy = std::env::var(POLICY).unwrap_or_else(|_| "kill".to_owned());
    let words = policy.clone();
    let start = move |keeper| start_worker(&image, &words, keeper);
    let folder = socket.parent().unwrap().to_owned();
    let log = move |event: &ServeEvent| match event {
        ServeEvent::Connected { session, .. } => {
            fs::write(folder.join(format!("connected-{session}")), "").unwrap();
        }
        ServeEvent::Refused { reason, .. } => fs::write(folder.join("refused"), reason).unwrap(),
        _ => {}
    };
    let mut options = options(&policy);
    (options.mode, options.take_over) = (0o666, std::env::var_os(TAKES_OVER).is_some());
    let mut passed = SystemdDescriptors::default();
    let mut keeper = Keeper::start(&socket, options, &mut passed, log, start).unwrap();
    keeper.run(&Doorbell::new().unwrap()).unwrap();
}

fn send(pid: u32, signal: rustix::process::Signal) {
    let pid = rustix::process::Pid::from_raw(pid.cast_signed()).unwrap();
    // It may have ended.
    let _ = rustix::process::kill_process(pid, signal);
}

/// Waits for the end of a VM; one that hangs is killed, and the test fails.
fn end_of(child: &mut Child) -> ExitStatus {
    let give_up = Instant::now() + PATIENCE;
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status;
        }
        if Instant::now() > give_up {
            child.kill().unwrap();
            panic!("a machine hangs");
        }
        thread::sleep(Duration::from_millis(1));
    }
}

fn is_stopped(machine: &Child) -> bool {
    let stat = fs::read_to_string(format!("/proc/{}/stat", machine.id())).unwrap();
    stat.rsplit_once(") ").is_some_and(|(_, state)| state.starts_with('T'))
}

fn wait_until(what: &str, is_so: impl Fn() -> bool) {
    let give_up = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < give_up, "{what}");
        thread::sleep(Duration::from_millis(1));
    }
}

/// A keeper in a thread, and its worker.
struct Running {
    stop: Arc<Doorbell>,
    events: Arc<Mutex<Vec<ServeEvent>>>,
    /// The process of the latest worker.
    worker: Arc<AtomicU32>,
    metrics: Option<SocketAddr>,
    thread: Option<thread::JoinHandle<Served>>,
}

impl Running {
    fn start(socket: &Path, image: &Path, policy: &str) -> Self {
        Self::started(socket, image, policy, false).unwrap()
    }

    fn started(
        socket: &Path,
        image: &Path,
        policy: &str,
        takes_over: bool,
    ) -> Result<Self, ServeError> {
        let (mut options, policy) = (options(policy), policy.to_owned());
        let (stop, events) = (Arc::new(Doorbell::new().unwrap()), Arc::<Mutex<Vec<_>>>::default());
        let worker = Arc::<AtomicU32>::default();
        let (log, started, image) = (events.clone(), worker.clone(), image.to_owned());
        let log = move |event: &ServeEvent| log.lock().unwrap().push(event.clone());
        let start = move |keeper| {
            let child = start_worker(&image, &policy, keeper)?;
            started.store(child.id(), Ordering::Release);
            Ok(child)
        };
        options.take_over = takes_over;
        let mut passed = SystemdDescriptors::default();
        let mut keeper = Keeper::start(socket, options, &mut passed, log, start)?;
        let (bell, metrics) = (stop.clone(), keeper.metrics());
        let thread = Some(thread::spawn(move || keeper.run(&bell).unwrap()));
        Ok(Self { stop, events, worker, metrics, thread })
    }

    /// Kills the worker, unless it is being replaced.
    fn kill_worker(&self) {
        let pid = self.worker.swap(0, Ordering::AcqRel);
        if pid != 0 {
            send(pid, rustix::process::Signal::KILL);
        }
    }

    fn wait_for(&self, what: &str, is_it: impl Fn(&ServeEvent) -> bool) -> ServeEvent {
        let give_up = Instant::now() + PATIENCE;
        loop {
            if let Some(event) = self.events.lock().unwrap().iter().find(|event| is_it(event)) {
                return event.clone();
            }
            assert!(Instant::now() < give_up, "{what} did not come: {:?}", self.events);
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Stops it when it has served so many VMs, left none, and lost so many workers.
    fn stop_after(self, sessions: u64, deaths: impl RangeBounds<u64>) -> (Served, Vec<ServeEvent>) {
        let (served, events) = self.stop();
        let last = &events[events.len().saturating_sub(20)..];
        assert_eq!((served.sessions, served.left), (sessions, 0), "{last:?}");
        assert!(deaths.contains(&served.deaths), "{served:?}: {last:?}");
        (served, events)
    }

    /// Stops it although VMs are left.
    fn stop_at_once(self) {
        wait_until("it does not end", || {
            self.stop.ring().unwrap();
            self.thread.as_ref().is_none_or(thread::JoinHandle::is_finished)
        });
    }

    fn stop(mut self) -> (Served, Vec<ServeEvent>) {
        self.stop.ring().unwrap();
        let served = self.thread.take().unwrap().join().unwrap();
        (served, self.events.lock().unwrap().clone())
    }
}

/// Returns the folder of a test, and the socket in it. `None` if this process is a VM of the test, which has run
/// `machine`, or this user may have no userfaultfd.
fn case_of(name: &str, folder: &str, machine: fn(&Path)) -> Option<(Folder, PathBuf)> {
    if let Some(socket) = std::env::var_os(MACHINE) {
        machine(Path::new(&socket));
        return None;
    }
    let opened = Uffd::open(Features::EVENT_REMOVE, Features::NONE, KernelFaults::IfAllowed);
    or_skip(name, opened)?;
    let folder = Folder::new(folder, PAGES);
    let socket = folder.join("sock");
    Some((folder, socket))
}

fn case(name: &str, folder: &str) -> Option<(Folder, PathBuf)> {
    case_of(name, folder, be_a_machine)
}

/// Returns the number of workers of a server that have died so far.
fn deaths(server: &Running) -> u64 {
    let events = server.events.lock().unwrap();
    let died = |event: &&ServeEvent| matches!(event, ServeEvent::WorkerEnded { .. });
    events.iter().filter(died).count() as u64
}

#[test]
fn machines_get_their_bytes_from_raw_and_packed_images() {
    let name = name!();
    let Some((folder, socket)) = case(name, "bytes") else { return };
    for image in ["raw", "packed"] {
        let server = Running::start(&socket, &folder.join(image), "kill");
        let mut machines: Vec<Process> = (0..3).map(|_| machine(name, &socket)).collect();
        for machine in &mut machines {
            assert!(end_of(machine).success(), "{image}");
        }
        let totals = uzone_server::status(&socket).unwrap().totals;
        // Raw memory is copied as it is; of a packed image the stored bytes are counted.
        assert_eq!(totals.stored_bytes > 0, image == "packed", "{totals:?}");
        let (_, events) = server.stop_after(3, ..);
        let ended =
            |event: &&ServeEvent| matches!(event, ServeEvent::Ended { faults, .. } if *faults > 0);
        assert_eq!(events.iter().filter(ended).count(), 3, "{events:?}");
        assert!(!socket.exists());
    }
}

#[test]
fn a_page_that_cannot_be_produced_ends_the_machine_before_it_sees_a_byte() {
    let name = name!();
    let Some((folder, socket)) = case(name, "damaged") else { return };
    damage(&folder.join("packed"));
    let server = Running::start(&socket, &folder.join("packed"), "kill");
    let mut victim = program(name);
    let victim = victim.env(MACHINE, &socket).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut victim = Process::start(victim);
    let pid = victim.id();
    let status = end_of(&mut victim);
    // A thread of it that sees a wrong byte complains; it was ended in the middle of its work.
    let (mut result, mut complaints) = (String::new(), String::new());
    victim.stdout.take().unwrap().read_to_string(&mut result).unwrap();
    victim.stderr.take().unwrap().read_to_string(&mut complaints).unwrap();
    assert_eq!((status.signal(), complaints.as_str()), (Some(9), ""), "{status}");
    assert!(result.contains("running 1 test") && !result.contains("test result"), "{result}");
    server.wait_for("the end", |event| matches!(event, ServeEvent::Ended { .. }));
    let totals = uzone_server::status(&socket).unwrap().totals;
    let FailedPages { damaged, io, late, other, .. } = totals.failed;
    assert_eq!((damaged, io, late, other), (1, 0, 0, 0), "counted once, by its kind");
    let (_, events) = server.stop_after(1, 0..=0);
    // The log has one line for the page, and that page is one which the image cannot give.
    let [ServeEvent::Connected { session, .. }, failed, ServeEvent::Ended { .. }] = &events[..]
    else {
        panic!("{events:?}");
    };
    let ServeEvent::Failed { session: of, pid: named, offset, kind, reason, was_killed: true } =
        failed
    else {
        panic!("{failed:?}");
    };
    assert_eq!(*kind, FailedKind::Damaged);
    assert_eq!((of, *named), (session, pid), "{failed:?}");
    assert!(reason.contains("packed") && reason.contains("do not match their hash"), "{failed:?}");
    let packed = folder.join("packed");
    let image = uzone_snapshot::Image::open(packed, &uzone_snapshot::OpenOptions::default());
    let image = image.unwrap();
    assert!(image.read_at(*offset, &mut [0; 8]).is_err(), "{failed:?}");
    assert!((0..PAGES).any(|at| image.read_at(at * PAGE, &mut [0; 8]).is_ok()));
}

#[test]
fn what_breaks_the_protocol_is_refused_by_name_and_harms_no_machine() {
    let name = name!();
    let Some((folder, socket)) = case(name, "rubbish") else { return };
    // This process sends the rubbish, so it must not be killed.
    let server = Running::start(&socket, &folder.join("raw"), "hold");
    let null = fs::File::open("/dev/null").unwrap();
    let uffd = userfaultfd(KernelFaults::IfAllowed);
    let two = |one: String, other: String| format!("[{one},{other}]");
    let small = |offset| region(1 << 30, 1 << 20, offset, PAGE);
    let sizes = two(small(2 << 20), region(0x8000_0000, 2 << 20, 0, 2 << 20));
    let two = two(small(0), small(0));
    let region = |start, size, offset| format!("[{}]", region(start, size, offset, PAGE));
    let good = region(1 << 30, 1 << 20, 0);
    let end = PAGES * PAGE;
    let cases: [(&str, &str, Vec<BorrowedFd<'_>>); 14] = [
        ("no array", "GET / HTTP/1.1\r\n\r\n", vec![]),
        ("1 to 1024 are possible", "[]", vec![uffd.as_fd()]),
        ("a userfaultfd), got 0", &good, vec![]),
        ("a userfaultfd), got 10", &good, vec![uffd.as_fd(); 10]),
        ("where a userfaultfd was expected", &good, vec![null.as_fd()]),
        ("same bytes", &two, vec![uffd.as_fd()]),
        ("region at 0x80000000 has pages of 2 MiB, and the first", &sizes, vec![uffd.as_fd()]),
        // No log is made for so much, which would take half a gigabyte.
        ("16 TiB at offset 0x0", &region(1 << 30, 1 << 44, 0), vec![uffd.as_fd()]),
        ("at offset 0xfffffffffffff000", &region(1 << 30, 1 << 20, !0xfff), vec![uffd.as_fd()]),
        ("of the image, which has", &region(1 << 30, 1 << 20, end - PAGE), vec![uffd.as_fd()]),
        ("0 B at offset 0x0", &region(1 << 30, 0, 0), vec![uffd.as_fd()]),
        ("has address 0x40000800", &region((1 << 30) + 2048, 1 << 20, 0), vec![uffd.as_fd()]),
        ("has offset 0x800", &region(1 << 30, 1 << 20, 2048), vec![uffd.as_fd()]),
        ("", &region(!0xfff, 1 << 20, 0), vec![uffd.as_fd()]),
    ];
    for (count, (reason, message, fds)) in cases.into_iter().enumerate() {
        let mut stream = greet(&socket, message, &fds);
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let closed = stream.read(&mut [0; 8]);
        assert!(matches!(closed, Ok(0) | Err(_)), "{message}: {closed:?}");
        let is_it = |event: &ServeEvent| matches!(event, ServeEvent::Refused { reason: why, was_killed: false, .. } if why.contains(reason));
        server.wait_for(&format!("{reason:?} for {message}"), is_it);
        assert_eq!(server.events.lock().unwrap().len(), count + 1, "{:?}", server.events);
    }
    // Half a message, and then nothing more.
    let half = greet(&socket, &good[..good.len() / 2], &[]);
    let mut well = machine(name, &socket);
    assert!(end_of(&mut well).success());
    drop(half);
    server.wait_for("the half", |event| {
        matches!(event, ServeEvent::Refused { reason, .. } if reason.contains("ended after"))
    });
    server.stop_after(1, ..);
}

#[test]
fn silent_connections_make_room_for_machines() {
    let name = name!();
    let Some((folder, socket)) = case(name, "silent") else { return };
    let server = Running::start(&socket, &folder.join("raw"), "hold");
    let silent: Vec<_> = (0..200).map(|_| greet(&socket, "", &[])).collect();
    let mut well = machine(name, &socket);
    assert!(end_of(&mut well).success());
    drop(silent);
    let (served, events) = server.stop();
    assert_eq!(served.sessions, 1);
    // The VM was the last of 201 in the queue: most before it made room, rather than being waited for.
    let makes_room = |event: &&ServeEvent| matches!(event, ServeEvent::Refused { reason, .. } if reason.contains("at most"));
    assert!(events.iter().filter(makes_room).count() > 100, "they were waited for: {events:?}");
}

#[test]
fn a_machine_that_cannot_be_served_is_ended_and_so_is_the_session_of_one_that_is_killed() {
    let name = name!();
    let Some((folder, socket)) = case(name, "short") else { return };
    fs::write(folder.join("short"), vec![0; 1 << 20]).unwrap();
    let server = Running::start(&socket, &folder.join("short"), "kill");
    let mut refused = machine(name, &socket);
    assert_eq!(end_of(&mut refused).signal(), Some(9), "its faults would wait for ever");
    server.wait_for("the refusal", |event| {
        matches!(event, ServeEvent::Refused { was_killed: true, reason, .. } if reason.contains("of the image, which has 1 MiB"))
    });
    assert_eq!(server.stop().0.sessions, 0);

    let server = Running::start(&socket, &folder.join("short"), "poison");
    assert_eq!(end_of(&mut machine(name, &socket)).signal(), Some(7), "it would wait for ever");
    server.wait_for("the refusal", |event| {
        matches!(event, ServeEvent::Refused { was_killed: false, reason, .. } if reason.contains("gets SIGBUS"))
    });
    assert_eq!(server.stop().0.sessions, 0);

    let server = Running::start(&socket, &folder.join("raw"), "kill");
    let mut killed = machine(name, &socket);
    server.wait_for("the machine", |event| matches!(event, ServeEvent::Connected { .. }));
    killed.kill().unwrap();
    end_of(&mut killed);
    server.wait_for("the end", |event| matches!(event, ServeEvent::Ended { .. }));
    let mut next = machine(name, &socket);
    assert!(end_of(&mut next).success());
    server.stop_after(2, ..);
}

#[test]
fn a_packed_image_that_lost_its_end_is_not_taken_for_raw_memory() {
    let folder = Folder::new("cut", PAGES);
    let packed = fs::read(folder.join("packed")).unwrap();
    let refused = |bytes: &[u8]| {
        fs::write(folder.join("cut"), bytes).unwrap();
        let mut options = ServerOptions::default();
        options.sandbox = false;
        Worker::open(&folder.join("cut"), options, None).is_err()
    };
    assert!(refused(&packed[..packed.len() - 1]));
    assert!(refused(&packed[..packed.len() / 4096 * 4096 - 4096]));
    assert!(refused(&[0; 5000]), "raw memory is whole pages");
    assert!(refused(&[]));
    assert!(!refused(&[0; 8192]));
}

/// Sets a flag when it is dropped, so that a thread ends even if its test fails.
struct SetAtEnd<'a>(&'a AtomicBool);

impl Drop for SetAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

#[test]
fn a_worker_that_is_killed_between_the_hand_over_and_the_first_fault_costs_no_byte() {
    let name = name!();
    let Some((folder, socket)) = case(name, "before-faults") else { return };
    let server = Running::start(&socket, &folder.join("packed"), "kill");
    for round in 1..=4 {
        let mut machine =
            Process::start(program(name).env(MACHINE, &socket).env(STOPS, BEFORE_ITS_FAULTS));
        let is_its = |pid: u32| pid == machine.id();
        let connected =
            |event: &ServeEvent| matches!(event, ServeEvent::Connected { pid, .. } if is_its(*pid));
        server.wait_for("the machine", connected);
        wait_until("the machine does not stop", || is_stopped(&machine));
        server.kill_worker();
        wait_until("the worker does not end", || deaths(&server) == round);
        // Its first faults come before the next worker has it, or after.
        if round % 2 == 0 {
            let taken_over = |event: &ServeEvent| matches!(event, ServeEvent::TakenOver { pid, .. } if is_its(*pid));
            server.wait_for("the next worker", taken_over);
        }
        send(machine.id(), rustix::process::Signal::CONT);
        assert!(end_of(&mut machine).success(), "{:?}", server.events);
    }
    server.stop_after(4, 4..=4);
}

/// The number of workers that a VM kills while they read of pages that it gave back.
const ROUNDS: u64 = 12;

/// A VM with a balloon that kills workers: it gives pages back, which waits until the worker has read of that, and kills
/// the worker. The next one answers the fault of each of those pages.
fn be_a_machine_that_kills(socket: &Path) {
    /// Pages of the lower half for each round, of which the first half is given back.
    const BLOCK: u64 = PAGES / 2 / ROUNDS;
    let (memory, _stream) = one_region(socket, KernelFaults::IfAllowed);
    let mut killed = None;
    for start in (0..ROUNDS).map(|round| round * BLOCK) {
        let (end, others) = (start + BLOCK, PAGES / 2 + start);
        // A part of what is given back was in use.
        (start..start + BLOCK / 4).for_each(|at| check(&memory, at, &page_of(at)));
        let worker = || uzone_server::status(socket).ok().and_then(|status| status.worker);
        wait_until("no next worker", || worker().is_some_and(|worker| Some(worker) != killed));
        killed = worker();
        thread::scope(|scope| {
            scope
                .spawn(|| (others..others + BLOCK).for_each(|at| check(&memory, at, &page_of(at))));
            let removed = start..start + BLOCK / 2;
            memory.mapping().discard(removed.start * PAGE..removed.end * PAGE).unwrap();
            send(killed.unwrap(), rustix::process::Signal::KILL);
            removed.for_each(|at| check(&memory, at, &[0; 4096]));
            (start + BLOCK / 2..end).for_each(|at| check(&memory, at, &page_of(at)));
        });
    }
    for at in 0..PAGES {
        let is_zero = at < ROUNDS * BLOCK && at % BLOCK < BLOCK / 2;
        check(&memory, at, &if is_zero { vec![0; 4096] } else { page_of(at) });
    }
}

#[test]
fn a_balloon_during_takeover_leaves_zeroes_where_pages_were_given_back_and_bytes_elsewhere() {
    let name = name!();
    let Some((folder, socket)) = case_of(name, "balloon-takeover", be_a_machine_that_kills) else {
        return;
    };
    for image in ["raw", "packed"] {
        let server = Running::start(&socket, &folder.join(image), "kill");
        let mut machine = machine(name, &socket);
        assert!(end_of(&mut machine).success(), "{image}: {:?}", server.events);
        server.stop_after(1, ROUNDS..=ROUNDS);
    }
}

/// A VM with a balloon while it is restored: one thread gives back pages that no thread has touched, and others touch the
/// pages between them, block by block at the same time.
fn be_a_machine_with_a_balloon(socket: &Path) {
    const BLOCK: u64 = 64;
    let (memory, _stream) = one_region(socket, KernelFaults::IfAllowed);
    let is_given_back = |at: u64| (at / 4).is_multiple_of(2);
    let together = Barrier::new(4);
    let blocks = || (0..PAGES).step_by(64);
    thread::scope(|scope| {
        for seed in 0..3 {
            let (memory, together) = (&memory, &together);
            scope.spawn(move || {
                for block in blocks() {
                    together.wait();
                    let pages = (0..BLOCK).map(|step| block + (step * 5 + seed * 11) % BLOCK);
                    pages
                        .filter(|at| !is_given_back(*at))
                        .for_each(|at| check(memory, at, &page_of(at)));
                }
            });
        }
        for block in blocks() {
            together.wait();
            for run in (block..block + BLOCK).step_by(8) {
                memory.mapping().discard(run * PAGE..(run + 4) * PAGE).unwrap();
                (run..run + 4).for_each(|at| check(&memory, at, &[0; 4096]));
            }
        }
    });
    let expected = |at| if is_given_back(at) { vec![0; 4096] } else { page_of(at) };
    (0..PAGES).for_each(|at| check(&memory, at, &expected(at)));
}

#[test]
fn a_balloon_during_restore_leaves_zeroes_at_once_where_pages_were_not_touched_yet() {
    let name = name!();
    let Some((folder, socket)) = case_of(name, "balloon-restore", be_a_machine_with_a_balloon)
    else {
        return;
    };
    let set = folder.join("set");
    fs::write(&set, (0..PAGES).map(|page| format!("{page}\n")).collect::<String>()).unwrap();
    // Pages come by demand alone, or also as a set that is replayed.
    let replays = format!("prefetch {}", set.display());
    for (image, policy) in
        [("raw", "kill"), ("packed", "kill"), ("raw", &replays), ("packed", &replays)]
    {
        let server = Running::start(&socket, &folder.join(image), policy);
        let mut machine = machine(name, &socket);
        assert!(end_of(&mut machine).success(), "{image}, {policy}: {:?}", server.events);
        server.stop_after(1, 0..=0);
    }
}

#[test]
fn a_machine_whose_raw_image_is_cut_while_it_is_served_is_ended_before_it_sees_a_zero_for_it() {
    let name = name!();
    let Some((folder, socket)) = case(name, "cut-short") else { return };
    let image = folder.join("raw");
    let server = Running::start(&socket, &image, "kill");
    let mut victim = program(name);
    let victim = victim.env(MACHINE, &socket).env(STOPS, BEFORE_ITS_FAULTS);
    let mut victim = Process::start(victim.stderr(Stdio::piped()));
    server.wait_for("the machine", |event| matches!(event, ServeEvent::Connected { .. }));
    wait_until("the machine does not stop", || is_stopped(&victim));
    // A page of it is a part.
    let cut = PAGES / 2 * PAGE + 100;
    fs::File::options().write(true).open(&image).unwrap().set_len(cut).unwrap();
    send(victim.id(), rustix::process::Signal::CONT);
    let status = end_of(&mut victim);
    let mut complaints = String::new();
    victim.stderr.take().unwrap().read_to_string(&mut complaints).unwrap();
    assert_eq!((status.signal(), complaints.as_str()), (Some(9), ""), "{status}");
    let failed = server.wait_for("the failure", |event| matches!(event, ServeEvent::Failed { .. }));
    let ServeEvent::Failed { pid, offset, reason, was_killed, .. } = &failed else {
        unreachable!()
    };
    assert!(
        *pid == victim.id()
            && *was_killed
            && reason.contains("ends at 0x400064")
            && reason.contains(image.to_str().unwrap()),
        "{failed:?}"
    );
    assert!(*offset >= PAGES / 2 * PAGE, "{failed:?}");
    server.wait_for("the end", |event| matches!(event, ServeEvent::Ended { .. }));
    server.stop_after(1, 0..=0);
}

/// Starts a keeper that keeps its VMs in a folder and serves `raw`, and waits until it listens.
fn keeper_that_keeps(socket: &Path) -> Process {
    start_keeper(socket, |keeper| keeper)
}

/// Starts a keeper that keeps its VMs in a folder, with these additions to its environment, and waits until it listens.
fn start_keeper(socket: &Path, add: impl Fn(&mut Command) -> &mut Command) -> Process {
    let mut keeper = program("a_keeper_of_another_test");
    let policy = format!("kept {}", socket.with_file_name("kept").display());
    let keeper = Process::start(add(keeper.env(KEEPER, socket).env(POLICY, policy)));
    let is_it = || uzone_server::status(socket).is_ok_and(|status| status.keeper == keeper.id());
    wait_until("the keeper does not listen", is_it);
    keeper
}

#[test]
fn a_worker_without_its_keeper_serves_the_vms_that_it_has_and_ends_with_the_last() {
    let name = name!();
    let Some((folder, socket)) = case(name, "unkept") else { return };
    let mut keeper = keeper_that_keeps(&socket);
    let mut machines = [(); 3].map(|()| machine(name, &socket));
    wait_for_machines(&folder, 1..=3);
    let worker = uzone_server::status(&socket).unwrap().worker.unwrap();
    keeper.kill().unwrap();
    keeper.wait().unwrap();
    assert!(UnixStream::connect(&socket).is_err() && uzone_server::status(&socket).is_err());
    for machine in &mut machines {
        assert!(end_of(machine).success());
    }
    wait_until("the worker does not end", || has_ended(worker));
    let keeper = keeper_that_keeps(&socket);
    let status = uzone_server::status(&socket).unwrap();
    assert_eq!((status.keeper, status.sessions.len()), (keeper.id(), 0), "{status:?}");
    assert_eq!(status.totals.sessions, 3, "totals outlive a keeper");
}

/// Returns whether a process that this one has not started is gone.
fn has_ended(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"));
    stat.map_or(true, |stat| stat.contains(") Z "))
}

/// Returns whether tests can be of several users, which takes root and a program that any user may run.
fn has_users(name: &str) -> bool {
    let mut other = program("no_such_test");
    let run = other.uid(STRANGER).gid(STRANGER).stderr(Stdio::null()).status();
    let has_users = rustix::process::geteuid().is_root() && run.is_ok_and(|run| run.success());
    if !has_users {
        skip(name, "it takes root, and a program that others may run");
    }
    has_users
}

/// Starts a VM of a user.
fn machine_of(test: &str, socket: &Path, user: u32) -> Process {
    Process::start(program(test).env(MACHINE, socket).uid(user).gid(user))
}

/// Starts a keeper of a user that owns the folder alone, and waits until it listens.
fn keeper_of_a_stranger(folder: &Path, policy: &str) -> Process {
    std::os::unix::fs::chown(folder, Some(STRANGER), Some(STRANGER)).unwrap();
    let socket = folder.join("sock");
    let mut keeper = program("a_keeper_of_another_test");
    let keeper = keeper.env(KEEPER, &socket).env(POLICY, policy).uid(STRANGER).gid(STRANGER);
    let keeper = Process::start(keeper);
    wait_until("the keeper does not listen", || UnixStream::connect(&socket).is_ok());
    keeper
}

/// Waits until VMs have connected to a keeper of another process.
fn wait_for_machines(folder: &Path, sessions: RangeInclusive<u64>) {
    for session in sessions {
        let connected = folder.join(format!("connected-{session}"));
        wait_until("a machine does not connect", || connected.exists());
    }
}

#[test]
fn a_machine_of_another_user_is_served_and_ended_by_a_keeper_that_may() {
    let name = name!();
    let Some((folder, socket)) = case(name, "users").filter(|_| has_users(name)) else { return };
    let start = || machine_of(name, &socket, STRANGER);
    let server = Running::start(&socket, &folder.join("packed"), "open");
    assert!(end_of(&mut start()).success());
    let is_it = |event: &ServeEvent| {
        matches!(event, ServeEvent::Connected { uid: STRANGER, can_be_killed: true, .. })
    };
    server.wait_for("the machine", is_it);
    server.stop();
    // All frames are damaged: the worker reports it, and the keeper ends the VM.
    damage(&folder.join("packed"));
    let server = Running::start(&socket, &folder.join("packed"), "open");
    assert_eq!(end_of(&mut start()).signal(), Some(9));
    server.wait_for("the failure", |event| {
        matches!(event, ServeEvent::Failed { was_killed: true, .. })
    });
    server.stop();
}

#[test]
fn a_machine_of_a_user_that_may_not_connect_is_refused_and_disturbs_no_other() {
    let name = name!();
    let Some((folder, socket)) = case(name, "allowed").filter(|_| has_users(name)) else { return };
    let start = |user: u32| machine_of(name, &socket, user);
    let policy = format!("allow {STRANGER}");
    let server = Running::start(&socket, &folder.join("packed"), &policy);
    let mut others: Vec<Process> = (0..4).map(|_| start(OTHER_STRANGER)).collect();
    // The user of the server, which is root, as well.
    let mut machines = [STRANGER, STRANGER, 0].map(start);
    for other in &mut others {
        // Its memory is refused when it sends it, or it is ended because it has sent it.
        assert!(!end_of(other).success());
    }
    for machine in &mut machines {
        assert!(end_of(machine).success());
    }
    let (_, events) = server.stop_after(3, 0..=0);
    for other in &others {
        let is_it = |event: &&ServeEvent| {
            matches!(event, ServeEvent::Refused { pid, reason, .. }
                if *pid == other.id() && reason.contains("user 65533 may not connect"))
        };
        assert_eq!(events.iter().filter(is_it).count(), 1, "{events:?}");
    }
}

#[test]
fn a_keeper_that_may_not_end_a_machine_refuses_it_unless_it_may_wait() {
    let name = name!();
    for (policy, is_served) in [("kill", false), ("hold", true)] {
        let Some((folder, socket)) = case(name, "rights").filter(|_| has_users(name)) else {
            return;
        };
        let mut keeper = keeper_of_a_stranger(&folder, policy);
        let mut machine = machine_of(name, &socket, OTHER_STRANGER);
        if is_served {
            assert!(end_of(&mut machine).success());
            assert!(folder.join("connected-2").exists() && !folder.join("refused").exists());
        } else {
            let reason = folder.join("refused");
            wait_until("it is not refused", || fs::read(&reason).is_ok_and(|why| !why.is_empty()));
            let reason = fs::read_to_string(reason).unwrap();
            assert!(reason.contains("may not be killed by this server"), "{reason}");
            // It does not wait for ever, and is not given zeroes.
            assert_eq!(end_of(&mut machine).signal(), Some(7), "no SIGBUS");
        }
        uzone_server::drain(&socket).unwrap();
        assert!(end_of(&mut keeper).success());
    }
}

#[test]
fn what_a_machine_touched_is_recorded_and_is_there_before_the_next_touches_it() {
    let name = name!();
    let Some((folder, socket)) = case(name, "recorded") else { return };
    let set = folder.join("set");
    let faults = |words: &str| {
        let server = Running::start(&socket, &folder.join("packed"), words);
        let mut machine = machine(name, &socket);
        assert!(end_of(&mut machine).success(), "{words}");
        let ended = server.wait_for("the end", |event| matches!(event, ServeEvent::Ended { .. }));
        server.stop();
        let ServeEvent::Ended { faults, demand_pages, around_pages, .. } = ended else {
            unreachable!()
        };
        (faults, demand_pages, around_pages)
    };
    let (recorded, _, around) = faults(&format!("record {}", set.display()));
    assert!(
        recorded >= PAGES && around == 0,
        "each page is seen: {recorded} faults, {around} around"
    );
    let text = fs::read_to_string(&set).unwrap();
    let mut pages: Vec<u64> = text.lines().map(|line| line.parse().unwrap()).collect();
    pages.sort_unstable();
    assert_eq!(pages, (0..PAGES).collect::<Vec<_>>());
    // A set that is wrong costs time alone.
    fs::write(folder.join("wrong"), "4096\nno page\n18446744073709551615\n").unwrap();
    let wrong = faults(&format!("prefetch {}", folder.join("wrong").display()));
    let replayed = faults(&format!("prefetch {}", set.display()));
    // So does one that is not there.
    faults(&format!("prefetch {}", folder.join("none").display()));
    // In a folder, the file is named by the image.
    let sets = folder.join("sets");
    fs::create_dir(&sets).unwrap();
    faults(&format!("prefetch {}", sets.display()));
    faults(&format!("record {}", sets.display()));
    let root =
        uzone_snapshot::Image::open(folder.join("packed"), &uzone_snapshot::OpenOptions::default());
    let of_image = sets.join(format!("{}.pages", root.unwrap().root()));
    assert_eq!(fs::read_to_string(&of_image).unwrap().lines().count() as u64, PAGES);
    assert_eq!(fs::read_dir(&sets).unwrap().count(), 1);
    faults(&format!("prefetch {}", sets.display()));
    eprintln!("faults: {recorded} recorded, {wrong:?} with a wrong set, {replayed:?} replayed");
}

#[test]
fn a_recorded_set_starts_with_the_first_fault_of_its_machine() {
    let name = name!();
    let Some((folder, socket)) = case(name, "set-starts") else { return };
    let set = folder.join("set");
    fs::write(&set, (0..PAGES).map(|page| format!("{page}\n")).collect::<String>()).unwrap();
    let words = format!("prefetch {}", set.display());
    for image in ["raw", "packed"] {
        let server = Running::start(&socket, &folder.join(image), &words);
        let (waits, runs) = (Machine::connect(&socket), Machine::connect(&socket));
        check(&runs.memory, 7, &page_of(7));
        let prefetched = || {
            let sessions = uzone_server::status(&socket).unwrap().sessions;
            sessions.iter().filter_map(|one| Some(one.stats?.prefetched_pages)).collect::<Vec<_>>()
        };
        wait_until("the set", || prefetched().get(1).is_some_and(|pages| *pages > PAGES * 9 / 10));
        assert_eq!(prefetched()[0], 0, "{image}: nothing has run there yet");
        check(&waits.memory, 7, &page_of(7));
        wait_until("the set", || prefetched()[0] > PAGES * 9 / 10);
        server.stop_at_once();
    }
}

#[test]
fn counts_outlive_workers_and_keepers() {
    let name = name!();
    let Some((_folder, socket)) = case(name, "totals") else { return };
    let status = || uzone_server::status(&socket).unwrap();
    let touch = |pages: std::ops::Range<u64>, machine: &Machine| {
        pages.for_each(|at| check(&machine.memory, at, &page_of(at)));
        // The keeper stores the counts of its worker before it answers.
        status().totals
    };
    // Processes of their own: of one process with the VM, the keeper would take its own descriptor for the VM's.
    let mut keeper = start_keeper(&socket, |keeper| keeper.env(IMAGE, "packed"));
    let machine = Machine::connect(&socket);
    let first = touch(0..200, &machine);
    assert!(first.faults > 0);
    send(status().worker.unwrap(), rustix::process::Signal::KILL);
    wait_until("the next worker", || status().worker_deaths == 1);
    let second = touch(200..400, &machine);
    assert!(second.faults > first.faults, "{second:?} after {first:?}");
    // By a server that takes over.
    let mut next = start_keeper(&socket, |next| next.env(IMAGE, "packed").env(TAKES_OVER, ""));
    assert!(end_of(&mut keeper).success());
    let third = touch(400..600, &machine);
    assert!(third.faults > second.faults, "{third:?} after {second:?}");
    assert_eq!((third.sessions, third.worker_deaths), (1, 1));
    assert!(third.fault_counts.iter().sum::<u64>() > 0 && third.fault_ns > 0, "{third:?}");
    assert!(third.decoded_frames > 0 && third.decoded_bytes > 0, "{third:?}");
    // By a start after both processes have died.
    send(status().worker.unwrap(), rustix::process::Signal::STOP);
    next.kill().unwrap();
    next.wait().unwrap();
    let _last = start_keeper(&socket, |last| last.env(IMAGE, "packed"));
    let fourth = touch(600..800, &machine);
    assert!(fourth.faults > third.faults, "{fourth:?} after {third:?}");
}

#[test]
fn an_upgrade_under_load_is_noticed_by_no_machine_and_another_image_is_refused() {
    let name = name!();
    let Some((folder, socket)) = case(name, "upgrade") else { return };
    let image = folder.join("packed");
    let policy = format!("kept {}", folder.join("kept").display());
    let start = |image: &Path, policy: &str| Running::started(&socket, image, policy, true);
    // Without a server to take over from, it is a start.
    let mut server = start(&image, &policy).unwrap();
    let (mut sessions, mut handed_over) = (0, 0);
    for round in 0..6 {
        let mut machines = [(); 3].map(|()| machine(name, &socket));
        // At any point of their work.
        thread::sleep(Duration::from_millis(round * 17 % 60));
        let other = start(&folder.join("raw"), &policy);
        assert!(matches!(other, Err(ServeError::Ask { .. })), "it serves another image");
        let next = start(&image, &policy).unwrap();
        // It is asked where the one before was, from the first moment on and when that has ended.
        uzone_server::status(&socket).unwrap();
        let served = server.thread.take().unwrap().join().unwrap();
        assert_eq!(served.left, 0, "{:?}", server.events);
        sessions += served.sessions;
        let events = server.events.lock().unwrap().clone();
        let Some(ServeEvent::HandedOver { sessions }) = events.last() else {
            panic!("{events:?}");
        };
        handed_over += sessions;
        server = next;
        for machine in &mut machines {
            assert!(end_of(machine).success(), "{:?}", server.events);
        }
        let status = uzone_server::status(&socket).unwrap();
        assert_eq!((status.keeper, status.is_draining), (std::process::id(), false));
    }
    let held = Machine::connect(&socket);
    check(&held.memory, 0, &page_of(0));
    let nowhere = start(&image, "hold");
    assert!(matches!(nowhere, Err(ServeError::Ask { .. })), "it stores VMs elsewhere");
    check(&held.memory, 1, &page_of(1));
    // It is of this process, so the server leaves it.
    server.stop_at_once();
    eprintln!("{handed_over} of {sessions} machines were handed over");
    assert_eq!(fs::read_dir(&*folder).unwrap().count(), 3, "no socket is left");
    assert_eq!(fs::read_dir(folder.join("kept")).unwrap().count(), 1, "one folder is left");
}

#[test]
fn a_machine_that_is_stopped_for_long_holds_up_no_clone_and_goes_on() {
    let name = name!();
    let Some((folder, socket)) = case(name, "stopped") else { return };
    let seconds = std::env::var(SECONDS).map_or(1, |secs| secs.parse().expect("seconds"));
    let server = Running::start(&socket, &folder.join("packed"), "kill");
    let mut stopped =
        Process::start(program(name).env(MACHINE, &socket).env(STOPS, AMONG_ITS_FAULTS));
    wait_until("the machine does not stop", || is_stopped(&stopped));
    let mut clones: Vec<Process> = (0..32).map(|_| machine(name, &socket)).collect();
    for clone in &mut clones {
        assert!(end_of(clone).success());
    }
    let (begin, mut others) = (Instant::now(), 32);
    while others < 36 || begin.elapsed() < Duration::from_secs(seconds) {
        assert!(end_of(&mut machine(name, &socket)).success());
        others += 1;
        // One after the other.
        thread::sleep(Duration::from_millis(200));
        if others == 34 {
            // The next worker takes over a VM that is stopped.
            server.kill_worker();
            wait_until("the worker does not end", || deaths(&server) > 0);
        }
    }
    let sessions = || uzone_server::status(&socket).unwrap().sessions.len();
    wait_until("the sessions of the others do not end", || sessions() <= 1);
    assert!(stopped.try_wait().unwrap().is_none(), "it waits");
    send(stopped.id(), rustix::process::Signal::CONT);
    assert!(end_of(&mut stopped).success());
    server.stop_after(others + 1, 1..=1);
}

/// A VM of two regions of pages of 2 MiB.
fn be_a_huge_machine(socket: &Path) {
    /// The number of 4 KiB in the second region.
    const LAST: u64 = 512;
    let features = Features::EVENT_REMOVE | Features::MISSING_HUGETLB;
    let uffd = Arc::new(Uffd::open(features, Features::NONE, KernelFaults::IfAllowed).unwrap());
    let (len, last_len) = ((PAGES - LAST) * PAGE, LAST * PAGE);
    let [memory, last] = [len, last_len].map(|len| {
        let mapping = Mapping::hugetlb(ByteLen::new(len), PageSize::MIB_2).unwrap();
        Registered::new(uffd.clone(), mapping, Modes::MISSING).unwrap()
    });
    let first = region(start_of(&memory), len, 0, 2 << 20);
    let message = format!("[{first},{}]", region(start_of(&last), last_len, len, 2 << 20));
    let check = |at: u64, expected: &[u8]| match at.checked_sub(PAGES - LAST) {
        None => check(&memory, at, expected),
        Some(at) => check(&last, at, expected),
    };
    let _stream = greet(socket, &message, &[uffd.as_fd()]);
    thread::scope(|scope| {
        for seed in 0..4 {
            let check = &check;
            scope.spawn(move || {
                (0..PAGES).for_each(|step| {
                    let at = (step * 509 + seed * 101) % PAGES;
                    check(at, &page_of(at));
                });
            });
        }
    });
    memory.mapping().discard(0..2 << 20).unwrap();
    (0..PAGES).for_each(|at| check(at, &if at < 512 { vec![0; 4096] } else { page_of(at) }));
}

#[test]
fn machines_of_huge_pages_are_served_from_frames_of_any_size() {
    let name = name!();
    let Some((folder, socket)) = case_of(name, "huge", be_a_huge_machine) else { return };
    let features = Features::EVENT_REMOVE | Features::MISSING_HUGETLB;
    let opened = Uffd::open(features, Features::NONE, KernelFaults::IfAllowed);
    let pool = opened.map_err(|error| error.to_string());
    let pool = pool.and_then(|_| Pool::try_grow(PageSize::MIB_2, 8));
    let Some(_pool) = or_skip(name, pool) else { return };
    let raw = fs::read(folder.join("raw")).unwrap();
    let packer = Packer::default().frame(ByteLen::mib(2));
    packer.pack(&mut &raw[..], &folder.join("frames"), None, &|_| true).unwrap();
    for image in ["raw", "packed", "frames"] {
        let server = Running::start(&socket, &folder.join(image), "kill");
        let mut huge = machine(name, &socket);
        assert!(end_of(&mut huge).success(), "{image}: {:?}", server.events);
        server.stop_after(1, ..);
    }
}

/// A VM whose memory can be made huge pages: a region that starts with a block of 2 MiB, and one that starts a page
/// behind. It waits for a file each time before it goes on.
fn be_a_machine_of_blocks(socket: &Path) {
    let (uffd, half) = (userfaultfd(KernelFaults::IfAllowed), PAGES / 2);
    let [first, second] = [(); 2].map(|()| memory_of(&uffd, half + 1, Some(ByteLen::mib(2))));
    let object = |start, offset| region(start, half * PAGE, offset, PAGE);
    let message = format!(
        "[{},{}]",
        object(start_of(&first), 0),
        object(start_of(&second) + PAGE, half * PAGE)
    );
    let _stream = greet(socket, &message, &[uffd.as_fd()]);
    // Half of the pages by writing the same bytes.
    let check_all = |is_zero: &dyn Fn(u64) -> bool| {
        for at in 0..PAGES {
            let expected = if is_zero(at) { vec![0; 4096] } else { page_of(at) };
            let (memory, at) = if at < half { (&first, at) } else { (&second, at - half + 1) };
            if at % 2 == 1 {
                memory.mapping().write_at(at * PAGE + 8, &expected[8..16]).unwrap();
            }
            check(memory, at, &expected);
        }
    };
    let goes_on = |name: &str| {
        fs::write(socket.with_file_name(format!("{name}-done")), "").unwrap();
        let file = socket.with_file_name(name);
        wait_until("it may not go on", || file.exists());
    };
    check_all(&|_| false);
    goes_on("all");
    check_all(&|_| false);
    // Of a huge page, and of small ones.
    first.mapping().discard(9 * PAGE..11 * PAGE).unwrap();
    second.mapping().discard(PAGE..3 * PAGE).unwrap();
    let is_zero = |at: u64| (9..11).contains(&at) || (half..half + 2).contains(&at);
    check_all(&is_zero);
    goes_on("removed");
    check_all(&is_zero);
}

/// Returns the reason why no huge page can be made of small ones here.
fn no_huge_pages() -> Option<String> {
    let align = Some(ByteLen::mib(2));
    let how = Anonymous { align, ..Anonymous::default() };
    let mapping = Mapping::anonymous(ByteLen::mib(2), how).unwrap();
    match mapping.collapse(0..2 << 20) {
        Ok(None) if mapping.huge_backed().unwrap() == ByteLen::mib(2) => None,
        other => Some(format!("{other:?}")),
    }
}

/// Returns the bytes of a process's memory that are transparent huge pages.
fn huge_bytes(pid: u32) -> u64 {
    let smaps = fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap_or_default();
    let sizes = smaps.lines().filter_map(|line| line.strip_prefix("AnonHugePages:"));
    sizes.map(|size| size.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10).sum()
}

#[test]
fn a_machine_of_small_pages_gets_huge_ones_while_it_runs_and_no_byte_changes() {
    let name = name!();
    for (image, kills) in [("raw", false), ("packed", false), ("packed", true)] {
        let case = case_of(name, "made-huge", be_a_machine_of_blocks);
        let Some((folder, socket)) = case else { return };
        let is_root = rustix::process::geteuid().is_root();
        let reason = no_huge_pages().or((!is_root).then(|| "it takes root".to_owned()));
        if let Some(reason) = reason {
            return skip(name, &reason);
        }
        let server = Running::start(&socket, &folder.join(image), "huge");
        let mut machine = machine(name, &socket);
        let stats = || uzone_server::status(&socket).unwrap().sessions[0].stats.unwrap_or_default();
        wait_until("it does not touch all", || folder.join("all-done").exists());
        // The first region has two blocks, and the second one whole block.
        wait_until("no huge pages are made", || stats().huge_pages == 3);
        assert!(huge_bytes(machine.id()) >= 3 * (2 << 20), "{image}");
        if kills {
            server.kill_worker();
            server
                .wait_for("the next worker", |event| matches!(event, ServeEvent::TakenOver { .. }));
        }
        fs::write(folder.join("all"), "").unwrap();
        wait_until("it does not go on", || folder.join("removed-done").exists());
        fs::write(folder.join("removed"), "").unwrap();
        assert!(end_of(&mut machine).success(), "{image}: {:?}", server.events);
        let (_, events) = server.stop_after(1, ..);
        let is_refused = |event: &ServeEvent| matches!(event, ServeEvent::NotHuge { .. });
        assert!(!events.iter().any(is_refused), "{events:?}");
    }
}

/// A monitor with a guest: it hands its memory over and has the guest walk it, gives memory back and has it walked again,
/// and kills the worker in the middle of both walks.
fn be_a_monitor(socket: &Path) {
    let (memory, _stream) = one_region(socket, KernelFaults::Required);
    let memory = memory.mapping();
    let oracle = Mapping::anonymous(memory.len(), Anonymous::default()).unwrap();
    (0..PAGES).for_each(|at| oracle.write_at(at * PAGE, &page_of(at)).unwrap());
    let mut guest = Guest::new(memory, &oracle);
    let kills = std::env::var_os(KILLS_ITS_WORKER).is_some();
    let mut killed = None;
    let mut kill = || {
        let worker = || uzone_server::status(socket).ok().and_then(|status| status.worker);
        wait_until("no next worker", || worker().is_some_and(|worker| Some(worker) != killed));
        killed = worker();
        send(killed.unwrap(), rustix::process::Signal::KILL);
    };
    for given_back in [0..0, 0..PAGES / 4] {
        assert_eq!(guest.walk(PAGES / 4), Ok(()));
        let bytes = given_back.start * PAGE..given_back.end * PAGE;
        if !bytes.is_empty() {
            memory.discard(bytes.clone()).unwrap();
            oracle.discard(bytes).unwrap();
        }
        if kills {
            kill();
        }
        assert_eq!(guest.walk(PAGES), Ok(()));
    }
    let (mut seen, mut expected) = ([0; 4096], [0; 4096]);
    for at in 0..PAGES {
        memory.read_at(at * PAGE, &mut seen).unwrap();
        oracle.read_at(at * PAGE, &mut expected).unwrap();
        assert!(seen == expected, "page {at} is not what the guest left");
    }
    // It finds a wrong word, wherever that is.
    oracle.write_at((PAGES - 1) * PAGE + 8, &[!expected[8]]).unwrap();
    assert_eq!(guest.walk(PAGES), Err((PAGES - 1) * PAGE + 16));
}

#[test]
fn a_guest_of_kvm_finds_its_memory_while_workers_are_killed() {
    let name = name!();
    let Some((folder, socket)) = case_of(name, "kvm", be_a_monitor) else { return };
    let opened = Uffd::open(Features::EVENT_REMOVE, Features::NONE, KernelFaults::Required);
    let reason = match (opened, Kvm::new()) {
        (Ok(_), Ok(_)) => None,
        (Err(error), _) => Some(error.to_string()),
        (_, Err(error)) => Some(format!("/dev/kvm: {error}")),
    };
    if let Some(reason) = reason {
        return skip(name, &reason);
    }
    let server = Running::start(&socket, &folder.join("packed"), "kill");
    assert!(end_of(&mut machine(name, &socket)).success());
    let machines = [(); 3].map(|()| {
        let mut machine = program(name);
        Process::start(machine.env(MACHINE, &socket).env(KILLS_ITS_WORKER, ""))
    });
    for mut machine in machines {
        assert!(end_of(&mut machine).success(), "{:?}", server.events);
    }
    server.stop_after(4, 2..);
}
