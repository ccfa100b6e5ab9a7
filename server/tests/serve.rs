//! Machines are served from an image: each gets the right bytes, what it gives back is zero, a page that
//! cannot be produced ends it, and a client that breaks the protocol harms no other.
//!
//! A machine is this program, started again: it does what Firecracker does, and its threads touch memory
//! in place of virtual CPUs.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail by panicking, as tests do")]

use std::fs;
use std::io::{ErrorKind, IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use uzone_os::uffd::{Doorbell, Features, KernelFaults, Modes, Registered, Uffd};
use uzone_os::{Anonymous, Mapping};
use uzone_pages::ByteLen;
use uzone_server::{OnFailure, Served, Server, ServerOptions, SessionEvent};
use uzone_snapshot::Packer;

const MACHINE: &str = "UZONE_SERVER_TEST_MACHINE";
const PAGE: u64 = 4096;
const PAGES: u64 = 2048;
/// How long anything may take before it counts as hanging.
const PATIENCE: Duration = Duration::from_secs(60);

/// The oracle: a page of the image.
fn page_of(index: u64) -> Vec<u8> {
    if index % 5 == 3 {
        return vec![0; 4096];
    }
    let word = |at: u64| ((index * 512 + at + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)).to_le_bytes();
    (0..512).flat_map(word).collect()
}

/// Sends what Firecracker sends.
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

/// What a machine does: two regions, of which the second has a lower offset, touched by four threads in
/// any order; half of the first is given back and is zero then.
fn be_a_machine(socket: &Path) {
    let features = Features::EVENT_REMOVE;
    let uffd = Arc::new(Uffd::open(features, Features::NONE, KernelFaults::IfAllowed).unwrap());
    let half = PAGES / 2;
    let region = || {
        let len = ByteLen::new(half * PAGE);
        let mapping = Mapping::anonymous(len, Anonymous::default()).unwrap();
        Registered::new(uffd.clone(), mapping, Modes::MISSING).unwrap()
    };
    let (high, low) = (region(), region());
    let object = |memory: &Registered, offset: u64| {
        format!(
            r#"{{"base_host_virt_addr":{},"size":{},"offset":{offset},"page_size":4096,"page_size_kib":4096}}"#,
            memory.mapping().addr().get(),
            half * PAGE
        )
    };
    let message = format!("[{},{}]", object(&high, half * PAGE), object(&low, 0));
    let stream = greet(socket, &message, &[uffd.as_fd()]);
    // As before Firecracker 1.12: the end of the stream means nothing.
    drop(stream);
    thread::scope(|scope| {
        for seed in 0..4 {
            let (high, low) = (&high, &low);
            scope.spawn(move || {
                for step in 0..half {
                    let at = (step * 37 + seed * 101) % half;
                    check(high, at, &page_of(half + at));
                    check(low, at, &page_of(at));
                }
            });
        }
    });
    let cut = half / 2 * PAGE;
    thread::scope(|scope| {
        scope.spawn(|| high.mapping().discard(0..cut).unwrap());
        scope.spawn(|| (0..half).for_each(|at| check(&low, at, &page_of(at))));
    });
    (0..half / 2).for_each(|at| check(&high, at, &[0; 4096]));
    (half / 2..half).for_each(|at| check(&high, at, &page_of(half + at)));
}

/// Returns the folder of one test with an image in it, raw and packed.
fn folder(name: &str) -> PathBuf {
    let folder = std::env::temp_dir().join(format!("uzone-{name}-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let raw: Vec<u8> = (0..PAGES).flat_map(page_of).collect();
    fs::write(folder.join("raw"), &raw).unwrap();
    Packer::default().pack(&mut &raw[..], &folder.join("packed"), None, &|_| true).unwrap();
    folder
}

fn machine(test: &str, socket: &Path) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args([test, "--exact", "--nocapture", "--test-threads=1"])
        .env(MACHINE, socket)
        .stdout(Stdio::null())
        .spawn()
        .unwrap()
}

/// Waits for the end of a machine; one that hangs is killed, and the test fails.
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

/// A server in a thread.
struct Running {
    stop: Arc<Doorbell>,
    events: Arc<Mutex<Vec<SessionEvent>>>,
    thread: Option<thread::JoinHandle<Served>>,
}

impl Running {
    fn start(socket: &Path, image: &Path, options: ServerOptions) -> Self {
        let (stop, events) = (Arc::new(Doorbell::new().unwrap()), Arc::<Mutex<Vec<_>>>::default());
        let log = events.clone();
        let mut server = Server::bind(socket, image, options, move |event| {
            log.lock().unwrap().push(event.clone());
        })
        .unwrap();
        let bell = stop.clone();
        let thread = Some(thread::spawn(move || server.run(&bell).unwrap()));
        Self { stop, events, thread }
    }

    fn wait_for(&self, what: &str, is_it: impl Fn(&SessionEvent) -> bool) -> SessionEvent {
        let give_up = Instant::now() + PATIENCE;
        loop {
            if let Some(event) = self.events.lock().unwrap().iter().find(|event| is_it(event)) {
                return event.clone();
            }
            assert!(Instant::now() < give_up, "{what} did not come: {:?}", self.events);
            thread::sleep(Duration::from_millis(1));
        }
    }

    fn stop(mut self) -> (Served, Vec<SessionEvent>) {
        self.stop.ring().unwrap();
        let served = self.thread.take().unwrap().join().unwrap();
        (served, self.events.lock().unwrap().clone())
    }
}

/// Plays the machine if this process is one. Returns whether the test is over.
fn is_machine(name: &str) -> bool {
    if let Some(socket) = std::env::var_os(MACHINE) {
        be_a_machine(Path::new(&socket));
        return true;
    }
    let opened = Uffd::open(Features::EVENT_REMOVE, Features::NONE, KernelFaults::IfAllowed);
    if let Err(error) = &opened {
        assert!(std::env::var("REQUIRE_ALL").as_deref() != Ok("1"), "{name}: {error}");
        eprintln!("skipped: {name}: {error}");
    }
    opened.is_err()
}

#[test]
fn machines_get_their_bytes_from_raw_and_packed_images() {
    let name = "machines_get_their_bytes_from_raw_and_packed_images";
    if is_machine(name) {
        return;
    }
    let folder = folder("bytes");
    for image in ["raw", "packed"] {
        let socket = folder.join(format!("{image}.sock"));
        let server = Running::start(&socket, &folder.join(image), ServerOptions::default());
        let mut machines: Vec<Child> = (0..3).map(|_| machine(name, &socket)).collect();
        for machine in &mut machines {
            assert!(end_of(machine).success(), "{image}");
        }
        let (served, events) = server.stop();
        assert_eq!((served.sessions, served.left), (3, 0), "{events:?}");
        let ended = |event: &&SessionEvent| matches!(event, SessionEvent::Ended { faults, .. } if *faults > 0);
        assert_eq!(events.iter().filter(ended).count(), 3, "{events:?}");
        assert!(!socket.exists());
    }
    fs::remove_dir_all(folder).unwrap();
}

#[test]
fn a_page_that_cannot_be_produced_ends_the_machine_before_it_sees_a_byte() {
    let name = "a_page_that_cannot_be_produced_ends_the_machine_before_it_sees_a_byte";
    if is_machine(name) {
        return;
    }
    let folder = folder("damaged");
    // A byte of a frame in the first half of the file is another.
    let file = fs::File::options().read(true).write(true).open(folder.join("packed")).unwrap();
    let mut byte = [0];
    let at = file.metadata().unwrap().len() / 4;
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 1], at).unwrap();
    let socket = folder.join("sock");
    let server = Running::start(&socket, &folder.join("packed"), ServerOptions::default());
    let mut victim = machine(name, &socket);
    let pid = victim.id();
    let status = end_of(&mut victim);
    assert_eq!(status.signal(), Some(9), "{status}: it saw wrong bytes, or an error of its own");
    let failed =
        server.wait_for("the failure", |event| matches!(event, SessionEvent::Failed { .. }));
    let SessionEvent::Failed { pid: of, reason, was_killed, .. } = &failed else { unreachable!() };
    assert!(*of == pid && *was_killed && reason.contains("packed"), "{failed:?}");
    server.wait_for("the end", |event| matches!(event, SessionEvent::Ended { .. }));
    let (served, events) = server.stop();
    assert_eq!((served.sessions, served.left), (1, 0), "{events:?}");
    fs::remove_dir_all(folder).unwrap();
}

#[test]
fn what_breaks_the_protocol_is_refused_by_name_and_harms_no_machine() {
    let name = "what_breaks_the_protocol_is_refused_by_name_and_harms_no_machine";
    if is_machine(name) {
        return;
    }
    let folder = folder("rubbish");
    let socket = folder.join("sock");
    // This process sends the rubbish, so it must not be killed.
    let options = ServerOptions::default().on_failure(OnFailure::Hold);
    let server = Running::start(&socket, &folder.join("raw"), options);
    let null = fs::File::open("/dev/null").unwrap();
    let uffd = Uffd::open(Features::EVENT_REMOVE, Features::NONE, KernelFaults::IfAllowed).unwrap();
    let region = |start: u64, size: u64, offset: u64| {
        format!(r#"[{{"base_host_virt_addr":{start},"size":{size},"offset":{offset}}}]"#)
    };
    let good = region(1 << 30, 1 << 20, 0);
    let two = format!("[{0},{0}]", &good[1..good.len() - 1]);
    let cases: [(&str, &str, Vec<BorrowedFd<'_>>); 9] = [
        ("no array", "GET / HTTP/1.1\r\n\r\n", vec![]),
        ("1 to 1024 are possible", "[]", vec![uffd.as_fd()]),
        ("came with 0 descriptors", &good, vec![]),
        ("came with 10 descriptors", &good, vec![uffd.as_fd(); 10]),
        ("where a userfaultfd was expected", &good, vec![null.as_fd()]),
        ("same bytes", &two, vec![uffd.as_fd()]),
        ("cannot map", &region(1 << 30, 1 << 40, 0), vec![uffd.as_fd()]),
        ("", &region(1 << 30, 1 << 20, !0xfff), vec![uffd.as_fd()]),
        ("", &region(!0xfff, 1 << 20, 0), vec![uffd.as_fd()]),
    ];
    for (count, (reason, message, fds)) in cases.into_iter().enumerate() {
        let mut stream = greet(&socket, message, &fds);
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let closed = stream.read(&mut [0; 8]);
        assert!(matches!(closed, Ok(0) | Err(_)), "{message}: {closed:?}");
        let is_it = |event: &SessionEvent| matches!(event, SessionEvent::Refused { reason: why, was_killed: false, .. } if why.contains(reason));
        server.wait_for(&format!("{reason:?} for {message}"), is_it);
        assert_eq!(server.events.lock().unwrap().len(), count + 1, "{:?}", server.events);
    }
    // Half a message, and then nothing more.
    let half = greet(&socket, &good[..good.len() / 2], &[]);
    let mut well = machine(name, &socket);
    assert!(end_of(&mut well).success());
    drop(half);
    server.wait_for("the half", |event| {
        matches!(event, SessionEvent::Refused { reason, .. } if reason.contains("ended after"))
    });
    let (served, _) = server.stop();
    assert_eq!((served.sessions, served.left), (1, 0));
    fs::remove_dir_all(folder).unwrap();
}

#[test]
fn a_machine_that_cannot_be_served_is_ended_and_so_is_the_session_of_one_that_is_killed() {
    let name =
        "a_machine_that_cannot_be_served_is_ended_and_so_is_the_session_of_one_that_is_killed";
    if is_machine(name) {
        return;
    }
    let folder = folder("short");
    fs::write(folder.join("short"), vec![0; 1 << 20]).unwrap();
    let socket = folder.join("sock");
    let server = Running::start(&socket, &folder.join("short"), ServerOptions::default());
    let mut refused = machine(name, &socket);
    assert_eq!(end_of(&mut refused).signal(), Some(9), "its faults would wait for ever");
    server.wait_for("the refusal", |event| {
        matches!(event, SessionEvent::Refused { was_killed: true, reason, .. } if reason.contains("cannot map"))
    });
    assert_eq!(server.stop().0.sessions, 0);

    let server = Running::start(&socket, &folder.join("raw"), ServerOptions::default());
    let mut killed = machine(name, &socket);
    server.wait_for("the machine", |event| matches!(event, SessionEvent::Connected { .. }));
    killed.kill().unwrap();
    end_of(&mut killed);
    server.wait_for("the end", |event| matches!(event, SessionEvent::Ended { .. }));
    let mut next = machine(name, &socket);
    assert!(end_of(&mut next).success());
    let (served, _) = server.stop();
    assert_eq!((served.sessions, served.left), (2, 0));
    fs::remove_dir_all(folder).unwrap();
}

#[test]
fn a_packed_image_that_lost_its_end_is_not_taken_for_raw_memory() {
    let folder = folder("cut");
    let packed = fs::read(folder.join("packed")).unwrap();
    let refused = |bytes: &[u8]| {
        fs::write(folder.join("cut"), bytes).unwrap();
        let options = ServerOptions::default();
        Server::bind(&folder.join("sock"), &folder.join("cut"), options, |_| {}).is_err()
    };
    assert!(refused(&packed[..packed.len() - 1]));
    assert!(refused(&packed[..packed.len() / 4096 * 4096 - 4096]));
    assert!(refused(&[0; 5000]), "raw memory is whole pages");
    assert!(refused(&[]));
    assert!(!refused(&[0; 8192]));
    assert!(!folder.join("sock").exists(), "the socket goes with its server");
    fs::remove_dir_all(folder).unwrap();
}
