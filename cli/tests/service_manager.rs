//! A service manager keeps the descriptors of machines: they are served on when both processes of a server
//! were killed at once. The manager is this test, which does what systemd does: it keeps what it is sent,
//! passes it to the next process, and makes sockets. It is a program of its own, since what it passes must
//! not be inherited by another test's processes.

mod common;

use std::fs;
use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use common::{Dir, keeps_to};
use rustix::io::FdFlags;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use uzone_os::uffd::{Features, KernelFaults, Modes, Registered, Uffd};
use uzone_os::{Anonymous, Mapping, peer};
use uzone_pages::ByteLen;

const PAGE: u64 = 4096;
const PAGES: u64 = 1024;
/// How often both processes are killed.
const KILLS: u64 = 8;
/// How long anything may take before it counts as hanging.
const PATIENCE: Duration = Duration::from_secs(60);

fn page_of(index: u64) -> Vec<u8> {
    let word = |at: u64| ((index * 512 + at + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)).to_le_bytes();
    (0..512).flat_map(word).collect()
}

/// Returns whether two descriptors are of the same thing. Of those without an inode of their own, there is
/// one of a kind here.
fn is_same(one: &OwnedFd, other: &OwnedFd) -> bool {
    let link = |fd: &OwnedFd| fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())).ok();
    let inode = |fd: &OwnedFd| rustix::fs::fstat(fd).expect("it is open").st_ino;
    (link(one), inode(one)) == (link(other), inode(other))
}

/// What a service manager has of a service.
struct Manager {
    socket: UnixDatagram,
    path: String,
    kept: Vec<(String, OwnedFd)>,
    is_ready: bool,
}

impl Manager {
    fn new(dir: &Dir) -> Self {
        let path = dir.name("manager");
        let socket = UnixDatagram::bind(&path).expect("it listens");
        socket.set_nonblocking(true).expect("it does not wait");
        Self { socket, path, kept: Vec::new(), is_ready: false }
    }

    /// Does what the messages so far ask for.
    fn obey(&mut self) {
        let mut room = [0; 4096];
        loop {
            let mut fds = Vec::new();
            let len = match peer::receive(&self.socket, &mut room, &mut fds) {
                Err(cause) if cause.kind() == ErrorKind::WouldBlock => return,
                received => received.expect("a message"),
            };
            let text = std::str::from_utf8(&room[..len]).expect("text");
            let value = |name: &str| text.lines().find_map(|line| line.strip_prefix(name));
            let name = value("FDNAME=").unwrap_or_default();
            let is_valid = name.len() <= 255 && name.bytes().all(|byte| byte.is_ascii_graphic());
            assert!(is_valid && !name.contains(':'), "{name}");
            if value("FDSTOREREMOVE=").is_some() {
                self.kept.retain(|(kept, _)| kept != name);
            } else if value("FDSTORE=").is_some() {
                assert_eq!(value("FDPOLL="), Some("0"));
                for fd in fds {
                    // It is not kept twice, whatever its name is.
                    if !self.kept.iter().any(|(_, other)| is_same(other, &fd)) {
                        self.kept.push((name.to_owned(), fd));
                    }
                }
            } else {
                self.is_ready |= text.contains("READY=1");
            }
        }
    }

    /// Returns whether the latest server has reported that it is ready.
    fn is_ready(&mut self) -> bool {
        self.obey();
        self.is_ready
    }

    fn names(&mut self) -> Vec<&str> {
        self.obey();
        let mut names: Vec<_> = self.kept.iter().map(|(name, _)| &name[..]).collect();
        names.sort_unstable();
        names
    }

    /// Starts a server with what is kept and with sockets that the manager made.
    fn start(&mut self, arguments: &[&str], made: Option<BorrowedFd<'_>>) -> Server {
        self.obey();
        self.is_ready = false;
        let kept = self.kept.iter().map(|(name, fd)| (&name[..], fd.as_fd()));
        // Not in the order in which it came.
        let passed: Vec<_> = kept.chain(made.map(|fd| ("vm.socket", fd))).rev().collect();
        let names: Vec<_> = passed.iter().map(|(name, _)| *name).collect();
        let sources = passed.iter().map(|(_, fd)| {
            let fd = rustix::io::fcntl_dupfd_cloexec(fd, 100).expect("a descriptor");
            rustix::io::fcntl_setfd(&fd, FdFlags::empty()).expect("it is inherited");
            fd
        });
        let sources: Vec<OwnedFd> = sources.collect();
        assert!(sources.len() <= 7, "a shell uses the numbers from 10 on itself");
        let moves = sources.iter().zip(3..);
        let moves = moves.map(|(fd, to)| format!("{to}<&{0} {0}<&-", fd.as_raw_fd()));
        let script = format!(
            "exec {}\nexport LISTEN_PID=$$ LISTEN_FDS={} LISTEN_FDNAMES='{}'\nexec \"$0\" \"$@\"",
            moves.collect::<Vec<_>>().join(" "),
            sources.len(),
            names.join(":")
        );
        let mut command = Command::new("bash");
        command.args(["-c", &script, env!("CARGO_BIN_EXE_uzone"), "serve", "--json"]);
        command.args(["--on-failure", "poison"]).args(arguments).env("NOTIFY_SOCKET", &self.path);
        let mut child =
            command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().expect("it runs");
        let lines = BufReader::new(child.stdout.take().expect("a pipe"));
        let mut server = Server { child, lines };
        server.event("listening");
        server
    }
}

struct Server {
    child: Child,
    lines: BufReader<ChildStdout>,
}

impl Server {
    /// Waits for an event.
    fn event(&mut self, what: &str) -> Value {
        loop {
            let mut line = String::new();
            assert!(self.lines.read_line(&mut line).expect("it is read") > 0, "{what}: it ended");
            let object: Value = serde_json::from_str(&line).expect("an object a line");
            keeps_to("uzone.serve-1", &object);
            if object["event"] == what {
                return object;
            }
        }
    }

    fn workers(&self) -> Vec<Pid> {
        let threads = fs::read_dir(format!("/proc/{}/task", self.child.id())).expect("it runs");
        let children = threads
            .filter_map(|thread| fs::read_to_string(thread.ok()?.path().join("children")).ok());
        let children = children.collect::<Vec<_>>().join(" ");
        let numbers = children.split_whitespace().filter_map(|number| number.parse().ok());
        numbers.filter_map(Pid::from_raw).collect()
    }

    /// Kills both processes at once, and waits until they are gone.
    fn kill(mut self) {
        let keeper = Pid::from_child(&self.child);
        kill_process(keeper, Signal::STOP).expect("it runs");
        let workers = self.workers();
        for worker in &workers {
            kill_process(*worker, Signal::KILL).expect("it is not waited for");
        }
        kill_process(keeper, Signal::KILL).expect("it runs");
        self.child.wait().expect("it ends");
        let end = Instant::now() + PATIENCE;
        // As systemd does, which starts a service when none of its processes is left.
        let is_there = |worker: &Pid| {
            let state = fs::read_to_string(format!("/proc/{}/stat", worker.as_raw_nonzero()));
            state.is_ok_and(|state| !state.contains(") Z "))
        };
        while workers.iter().any(is_there) {
            assert!(Instant::now() < end, "a worker does not end");
            thread::sleep(Duration::from_millis(1));
        }
    }

    fn stop(mut self) -> Value {
        kill_process(Pid::from_child(&self.child), Signal::TERM).expect("it runs");
        let stopped = self.event("stopped");
        assert!(self.child.wait().expect("it ends").success());
        stopped
    }
}

/// A machine of this process.
struct Machine {
    memory: Registered,
    _stream: UnixStream,
}

impl Machine {
    fn connect(socket: &str) -> Option<Self> {
        let uffd = match Uffd::open(Features::EVENT_REMOVE, Features::NONE, KernelFaults::IfAllowed)
        {
            Ok(uffd) => Arc::new(uffd),
            Err(error) => {
                assert!(std::env::var("REQUIRE_ALL").as_deref() != Ok("1"), "{error}");
                println!("skipped: machines that a service manager keeps: {error}");
                return None;
            }
        };
        let len = ByteLen::new(PAGES * PAGE);
        let mapping = Mapping::anonymous(len, Anonymous::default()).expect("memory");
        let memory = Registered::new(uffd.clone(), mapping, Modes::MISSING).expect("it is ours");
        let message = format!(
            r#"[{{"base_host_virt_addr":{},"size":{len},"offset":0,"page_size":4096}}]"#,
            memory.mapping().addr().get(),
            len = len.get()
        );
        let stream = UnixStream::connect(socket).expect("it listens");
        peer::send(&stream, message.as_bytes(), &[uffd.as_fd()]).expect("it is taken");
        Some(Self { memory, _stream: stream })
    }

    fn check(&self, page: u64, expected: &[u8]) {
        let mut seen = vec![1; 4096];
        self.memory.mapping().read_at(page * PAGE, &mut seen).expect("it is served");
        assert!(seen == expected, "wrong bytes in page {page}");
    }
}

#[test]
fn machines_outlive_both_processes_of_a_server_that_a_service_manager_starts_again() {
    let dir = Dir::new("service-manager");
    let (image, other, socket) = (dir.name("raw"), dir.name("other"), dir.name("a b.sock"));
    let bytes: Vec<u8> = (0..PAGES).flat_map(page_of).collect();
    fs::write(&image, bytes).expect("a file is written");
    fs::write(&other, page_of(7).repeat(1024)).expect("a file is written");
    let mut manager = Manager::new(&dir);
    let arguments = [&image[..], "--socket", &socket];
    let mut server = manager.start(&arguments, None);
    let Some(machine) = Machine::connect(&socket) else { return drop(server.stop()) };
    // Each time, a part is touched and a part is given back, also right before the kill.
    let part = PAGES / KILLS;
    for kill in 0..KILLS {
        let (first, half) = (kill * part, kill * part + part / 2);
        (first..half).for_each(|page| machine.check(page, &page_of(page)));
        machine.memory.mapping().discard(first * PAGE..half * PAGE).expect("it is given back");
        server.kill();
        server = manager.start(&arguments, None);
        (first..half).for_each(|page| machine.check(page, &[0; 4096]));
        (half..half + part / 4).for_each(|page| machine.check(page, &page_of(page)));
        assert_eq!(server.event("taken_over")["pid"], std::process::id());
    }
    for page in 0..PAGES {
        let is_zero = page % part < part / 2;
        machine.check(page, &if is_zero { vec![0; 4096] } else { page_of(page) });
    }
    let names = manager.names().join(" ");
    assert_eq!(manager.names().len(), 6, "the socket, four of the machine and one log: {names}");
    // A worker that dies alone is followed by another log.
    for worker in server.workers() {
        kill_process(worker, Signal::KILL).expect("it is not waited for");
    }
    server.event("taken_over");
    // Another image is refused, and not mistaken for the one that the machine has pages of.
    server.kill();
    let mut server = manager.start(&[&other, "--socket", &socket], None);
    let refused = server.event("refused");
    assert!(refused["reason"].as_str().is_some_and(|text| text.contains("another image")));
    assert_eq!(manager.names().len(), 1, "the socket alone");
    drop(machine);
    server.stop();
    assert_eq!(manager.names(), [""; 0], "what a server gave up is kept for none");

    a_socket_that_the_manager_made(&mut manager, &dir, &image);
}

/// A server that is started when a machine connects finds the connection, and leaves the socket.
fn a_socket_that_the_manager_made(manager: &mut Manager, dir: &Dir, image: &str) {
    let path = dir.name("made.sock");
    let made = UnixListener::bind(&path).expect("it listens");
    let mut waits = UnixStream::connect(&path).expect("it listens");
    waits.write_all(b"rubbish").expect("it is taken");
    let mut server = manager.start(&[image], Some(made.as_fd()));
    let refused = server.event("refused");
    assert!(refused["reason"].as_str().is_some_and(|text| text.contains("no array of regions")));
    let machine = Machine::connect(&path).expect("as before");
    machine.check(5, &page_of(5));
    server.kill();
    // The server was killed while it gave a machine up, so that its log is left.
    manager.obey();
    let (log, fd) = manager.kept.iter().find(|(name, _)| name.contains(".log.")).expect("a log");
    let left = format!("uzone.log.1.0.{}", log.splitn(5, '.').last().expect("a path"));
    let fd = fd.try_clone().expect("a descriptor");
    manager.kept.push((left.clone(), fd));
    let server = manager.start(&[image], Some(made.as_fd()));
    machine.check(6, &page_of(6));
    assert!(!manager.names().contains(&&left[..]), "it is given up");
    let end = Instant::now() + PATIENCE;
    while !manager.is_ready() {
        assert!(Instant::now() < end, "it is not ready");
        thread::sleep(Duration::from_millis(1));
    }
    server.kill();
    assert!(fs::exists(&path).expect("a folder"), "the socket is the manager's");
    assert!(UnixStream::connect(&path).is_ok());
}
