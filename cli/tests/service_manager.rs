//! A service manager keeps the descriptors of machines: they are served on when both processes of a server
//! were killed at once. The manager is this test, which does what systemd does: it keeps what it is sent,
//! passes it to the next process, and makes sockets. It is a program of its own, since what it passes must
//! not be inherited by another test's processes.

#[path = "it/common/mod.rs"]
mod common;

use std::fs;
use std::io::{ErrorKind, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::process::Command;

use common::served::{KILLS, Machine, PAGES, Server, page_of, write_image};
use common::{Dir, wait_until};
use rustix::io::FdFlags;
use uzone_os::peer;

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
    /// How many it keeps; it drops others without an answer.
    most: usize,
    is_ready: bool,
}

impl Manager {
    fn new(dir: &Dir) -> Self {
        let path = dir.name("manager");
        let socket = UnixDatagram::bind(&path).expect("it listens");
        socket.set_nonblocking(true).expect("it does not wait");
        Self { socket, path, kept: Vec::new(), most: usize::MAX, is_ready: false }
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
                    let is_kept = self.kept.iter().any(|(_, other)| is_same(other, &fd));
                    if !is_kept && self.kept.len() < self.most {
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
        // One after the other: the shell uses the numbers from 10 on while it runs one of them.
        let moves = sources.iter().zip(3..);
        let moves = moves.map(|(fd, to)| format!("exec {to}<&{0} {0}<&-\n", fd.as_raw_fd()));
        let script = format!(
            "{}export LISTEN_PID=$$ LISTEN_FDS={} LISTEN_FDNAMES='{}'\nexec \"$0\" \"$@\"",
            moves.collect::<String>(),
            sources.len(),
            names.join(":")
        );
        let mut command = Command::new("bash");
        command.args(["-c", &script, env!("CARGO_BIN_EXE_uzone"), "serve", "--json"]);
        command.args(["--on-failure", "poison"]).args(arguments).env("NOTIFY_SOCKET", &self.path);
        Server::spawn(&mut command)
    }
}

#[test]
fn machines_outlive_both_processes_of_a_server_that_a_service_manager_starts_again() {
    let dir = Dir::new("service-manager");
    let (image, socket) = (write_image(&dir, "raw", 0), dir.name("a b.sock"));
    let other = dir.file("other", page_of(7).repeat(1024));
    let mut manager = Manager::new(&dir);
    let arguments = [&image[..], "--socket", &socket];
    let mut server = manager.start(&arguments, None);
    let Some(machine) = Machine::connect(&socket) else { return drop(server.stop()) };
    // Each time, a part is touched and a part is given back, also right before the kill.
    let part = PAGES / KILLS;
    for kill in 0..KILLS {
        let (first, half) = (kill * part, kill * part + part / 2);
        (first..half).for_each(|page| machine.check_page(page));
        machine.give_back(first..half);
        server.kill();
        server = manager.start(&arguments, None);
        (first..half).for_each(|page| machine.check(page, &[0; 4096]));
        (half..half + part / 4).for_each(|page| machine.check_page(page));
        assert_eq!(server.event("taken_over")["pid"], std::process::id());
    }
    for page in 0..PAGES {
        let is_zero = page % part < part / 2;
        machine.check(page, &if is_zero { vec![0; 4096] } else { page_of(page) });
    }
    let names = manager.names().join(" ");
    assert_eq!(manager.names().len(), 8, "three of the server and five of the VM: {names}");
    // There is no room for more, nor is any taken when a worker dies alone.
    manager.most = 8;
    server.kill_workers();
    server.event("taken_over");
    machine.give_back(PAGES - 1..PAGES);
    server.kill();
    let mut server = manager.start(&arguments, None);
    machine.check(PAGES - 1, &[0; 4096]);
    server.event("taken_over");
    // Of another machine, a part is dropped: it is not served from what is left.
    manager.most = 9;
    let second = Machine::connect(&socket).expect("it did before");
    second.check_page(0);
    server.event("connected");
    assert_eq!(manager.names().len(), 9);
    server.kill();
    let mut server = manager.start(&arguments, None);
    server.event("taken_over");
    machine.check(0, &[0; 4096]);
    assert_eq!(manager.names().len(), 8, "the server and the first VM");
    drop(second);
    // Another image is refused, and not mistaken for the one that the machine has pages of.
    server.kill();
    let mut server = manager.start(&[&other, "--socket", &socket], None);
    let refused = server.event("refused");
    assert!(refused["reason"].as_str().is_some_and(|text| text.contains("another image")));
    assert_eq!(manager.names().len(), 3, "the server alone");
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
    machine.check_page(5);
    server.kill();
    // A part of another machine is left.
    manager.obey();
    let (name, fd) = manager.kept.iter().find(|(name, _)| name.contains(".machine.")).expect("one");
    let left = format!("uzone.machine.1.{}", name.splitn(4, '.').last().expect("a path"));
    let fd = fd.try_clone().expect("a descriptor");
    manager.kept.push((left.clone(), fd));
    let server = manager.start(&[image], Some(made.as_fd()));
    machine.check_page(6);
    assert!(!manager.names().contains(&&left[..]), "it is given up");
    wait_until("readiness", || manager.is_ready());
    server.kill();
    assert!(fs::exists(&path).expect("a folder"), "the socket is the manager's");
    assert!(UnixStream::connect(&path).is_ok());
}
