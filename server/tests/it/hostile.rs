//! Clients that break the rules, or are too many, beside VMs that keep to them: they cost themselves alone.

use std::fs::File;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, SealFlags};
use uzone_attach::protocol::{Request, VERSION};
use uzone_os::uffd::KernelFaults;
use uzone_server::ServeEvent;

use crate::crowd::{Machine, keeper_with_descriptors};
use crate::{
    PAGE, PAGES, PATIENCE, Running, case, check, deaths, greet, name, page_of, region, userfaultfd,
};

/// The seconds of hostile clients beside honest VMs: 2 by default.
const SECONDS: &str = "UZONE_TEST_SECONDS";

#[test]
fn connections_with_many_descriptors_cost_no_machine() {
    let name = name!();
    let Some((_folder, socket)) = case(name, "many-descriptors") else { return };
    let _keeper = keeper_with_descriptors(&socket, 512, 512);
    let before = Machine::connect(&socket);
    check(&before.memory, 1, &page_of(1));
    let null = File::open("/dev/null").unwrap();
    let hostile: Vec<_> = (0..60).map(|_| greet(&socket, "[{", &[null.as_fd(); 16])).collect();
    let after = Machine::connect(&socket);
    check(&after.memory, 1, &page_of(1));
    check(&before.memory, 900, &page_of(900));
    let status = uzone_server::status(&socket).unwrap();
    assert_eq!((status.worker_deaths, status.sessions.len()), (0, 2));
    drop(hostile);
}

/// Makes a log of an earlier server, sealed as one, with so many marks, of which no byte takes memory.
fn sparse_log(marks: u64) -> File {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = File::from(rustix::fs::memfd_create("log", flags).unwrap());
    file.set_len((4 + 128 * 4 + marks.div_ceil(64)) * 8).unwrap();
    let header = [u64::from_le_bytes(*b"uzonlog1"), 128, marks];
    let header: Vec<u8> = header.into_iter().flat_map(u64::to_ne_bytes).collect();
    (&file).write_all(&header).unwrap();
    let seals = SealFlags::FUTURE_WRITE | SealFlags::SHRINK | SealFlags::GROW;
    rustix::fs::fcntl_add_seals(&file, seals).unwrap();
    file
}

/// Attaches memory with the log of an earlier server, and returns the server's answer.
fn attach_with(socket: &Path, log: &File) -> String {
    let mut stream = greet(socket, "", &[]);
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let request = Request::Attach { version: VERSION, share: false, image: None, tracks: false };
    stream.write_all(format!("{}\n", serde_json::to_string(&request).unwrap()).as_bytes()).unwrap();
    let mut answer = [0; 4096];
    let len = stream.read(&mut answer).unwrap();
    assert!(String::from_utf8_lossy(&answer[..len]).contains("len_bytes"));
    let uffd = userfaultfd(KernelFaults::IfAllowed);
    let region = format!("[{}]", region(1 << 30, PAGES * PAGE, 0, PAGE));
    let fds: [BorrowedFd<'_>; 2] = [uffd.as_fd(), log.as_fd()];
    uzone_os::peer::send(&stream, region.as_bytes(), &fds).unwrap();
    let len = stream.read(&mut answer).unwrap_or(0);
    String::from_utf8_lossy(&answer[..len]).into_owned()
}

#[test]
fn a_log_of_other_memory_is_refused_before_it_is_read() {
    let name = name!();
    let Some((folder, socket)) = case(name, "sparse-log") else { return };
    let server = Running::start(&socket, &folder.join("raw"), "hold");
    // 8 TiB, 32 GiB, and a page more than the memory has.
    for marks in [1 << 46, 1 << 38, PAGES + 1] {
        let answer = attach_with(&socket, &sparse_log(marks));
        assert!(answer.contains("refused") && answer.contains("of other memory"), "{answer}");
        assert_eq!(deaths(&server), 0, "{marks} marks");
    }
    let answer = attach_with(&socket, &sparse_log(PAGES));
    assert!(!answer.contains("of other memory"), "{answer}");
    server.stop();
}

#[test]
fn a_message_that_may_be_whole_again_and_again_is_refused() {
    let name = name!();
    let Some((folder, socket)) = case(name, "parts") else { return };
    let server = Running::start(&socket, &folder.join("raw"), "hold");
    let mut stream = greet(&socket, r#"[{"x":[]"#, &[]);
    let begun = Instant::now();
    while stream.write_all(br#","x":[]"#).is_ok() {
        assert!(begun.elapsed() < Duration::from_secs(5), "all parts are looked at");
        // So that the server reads it by itself.
        thread::sleep(Duration::from_millis(2));
    }
    server.wait_for(
        "the refusal",
        |event| matches!(event, ServeEvent::Refused { reason, .. } if reason.contains("parts")),
    );
    server.stop();
}

/// Returns the answer of the port for metrics.
fn scrape(server: &Running) -> String {
    let mut client = TcpStream::connect(server.metrics.unwrap()).unwrap();
    client.set_read_timeout(Some(PATIENCE)).unwrap();
    client.write_all(b"GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n").unwrap();
    let mut answer = String::new();
    client.read_to_string(&mut answer).unwrap();
    answer
}

/// Sends bytes of a request, one at a time, and returns for how long the server took them.
fn drip(mut client: impl Read + Write, most: Duration) -> Duration {
    let begun = Instant::now();
    while begun.elapsed() < most && client.write_all(b"G").is_ok() {
        thread::sleep(Duration::from_millis(50));
    }
    begun.elapsed()
}

#[test]
fn clients_of_side_sockets_that_are_slow_delay_neither_others_nor_the_end() {
    let name = name!();
    let Some((folder, socket)) = case(name, "slow-clients") else { return };
    let server = Running::start(&socket, &folder.join("raw"), "metrics");
    let (address, control) = (server.metrics.unwrap(), uzone_server::control_path(&socket));
    let half: Vec<_> = (0..5)
        .map(|_| {
            let mut client = TcpStream::connect(address).unwrap();
            client.write_all(b"GET /met").unwrap();
            (client, UnixStream::connect(&control).unwrap())
        })
        .collect();
    let begun = Instant::now();
    assert!(scrape(&server).contains("\nuzone_worker_up 1\n"));
    assert!(uzone_server::status(&socket).is_ok());
    assert!(begun.elapsed() < Duration::from_millis(1500), "{:?}", begun.elapsed());
    // One that sends a byte at a time has two seconds for all of them.
    let most = Duration::from_secs(6);
    thread::scope(|scope| {
        let slow = scope.spawn(|| drip(TcpStream::connect(address).unwrap(), most));
        let slow_too = scope.spawn(|| drip(UnixStream::connect(&control).unwrap(), most));
        assert!(slow.join().unwrap() < most && slow_too.join().unwrap() < most);
    });
    drop(half);
    thread::scope(|scope| {
        scope.spawn(|| drip(TcpStream::connect(address).unwrap(), most));
        scope.spawn(|| drip(UnixStream::connect(&control).unwrap(), most));
        thread::sleep(Duration::from_millis(100));
        let begun = Instant::now();
        server.stop();
        assert!(begun.elapsed() < Duration::from_millis(1500), "{:?}", begun.elapsed());
    });
}

/// The attacks of hostile clients, one after another, until the end.
fn be_hostile(socket: &Path, metrics: SocketAddr, is_over: &AtomicBool, seed: u64) {
    let null = File::open("/dev/null").unwrap();
    let (mut open, mut step) = (Vec::new(), seed);
    while !is_over.load(Ordering::Acquire) {
        step += 1;
        match step % 4 {
            0 => open.push(greet(socket, "[{", &[null.as_fd(); 16])),
            1 => drop(attach_with(socket, &sparse_log(1 << 46))),
            2 => {
                if let Ok(mut client) = TcpStream::connect(metrics) {
                    let _ = client.write_all(b"GET /met");
                    let fd = OwnedFd::from(client);
                    open.push(fd.into());
                }
            }
            _ => open.push(greet(socket, r#"[{"x":[]"#, &[])),
        }
        if open.len() > 100 {
            open.clear();
        }
        thread::sleep(Duration::from_millis(10));
    }
}

/// Touches pages until the end, and returns the time of each touch.
fn be_honest(machine: &Machine, is_over: &AtomicBool) -> Vec<Duration> {
    let mut times = Vec::new();
    for step in 0.. {
        let at = step * 37 % PAGES;
        let expected = if step < PAGES { page_of(at) } else { vec![0; 4096] };
        let begun = Instant::now();
        check(&machine.memory, at, &expected);
        times.push(begun.elapsed());
        machine.memory.mapping().discard(at * PAGE..(at + 1) * PAGE).unwrap();
        if is_over.load(Ordering::Acquire) {
            break;
        }
        thread::sleep(Duration::from_millis(1));
    }
    times
}

/// Returns the time within which 99 of 100 faults of all VMs were answered.
fn slow_fault(machines: &[Machine], beside: impl FnOnce(&AtomicBool)) -> Duration {
    let is_over = AtomicBool::new(false);
    let mut times: Vec<Duration> = thread::scope(|scope| {
        let threads: Vec<_> =
            machines.iter().map(|machine| scope.spawn(|| be_honest(machine, &is_over))).collect();
        beside(&is_over);
        is_over.store(true, Ordering::Release);
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    times.sort_unstable();
    times[times.len() * 99 / 100]
}

#[test]
fn hostile_clients_cost_ten_machines_neither_their_lives_nor_their_pace() {
    let name = name!();
    let Some((folder, socket)) = case(name, "hostile") else { return };
    let seconds = std::env::var(SECONDS).ok().map(|seconds| seconds.parse().unwrap());
    let time = Duration::from_secs(seconds.unwrap_or(2));
    let server = Running::start(&socket, &folder.join("packed"), "metrics");
    let start = || (0..10).map(|_| Machine::connect(&socket)).collect::<Vec<_>>();
    let alone = start();
    let without = slow_fault(&alone, |_| thread::sleep(time));
    let machines = start();
    let with = slow_fault(&machines, |is_over| {
        thread::scope(|scope| {
            let (socket, metrics) = (&socket, server.metrics.unwrap());
            for seed in 0..4 {
                scope.spawn(move || be_hostile(socket, metrics, is_over, seed));
            }
            thread::sleep(time);
            is_over.store(true, Ordering::Release);
        });
    });
    eprintln!("99 of 100 faults within {without:?} alone, and {with:?} beside hostile clients");
    let machines = alone.iter().chain(&machines);
    machines.for_each(|machine| assert!(!machine.is_closed(), "a machine is lost"));
    let status = uzone_server::status(&socket).unwrap();
    assert_eq!((status.worker_deaths, status.sessions.len()), (0, 20));
    // The host may be busy in a short time.
    assert!(seconds.is_none() || with <= 2 * without, "{with:?} for {without:?}");
    server.stop_at_once();
}
