//! Servers that are killed and replaced while VMs run: each VM finds its bytes, and none waits for ever.
//!
//! `UZONE_SERVER_TEST_KILLS` is the number of kills, and of upgrades a twentieth: 24 by default. `UZONE_TEST_SECONDS` is the
//! time of each instead.

use std::fs;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Child;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use uzone_os::peer;
use uzone_os::uffd::{KernelFaults, Registered};

use crate::common::page_of;
use crate::{
    IMAGE, KILLS, PAGE, PAGES, PATIENCE, Process, TAKES_OVER, case_of, check, end_of, has_ended,
    keeper_that_keeps, machine, memory_of, name, region, send, start_keeper, start_of, userfaultfd,
    wait_until,
};

/// The number of VMs that run at a time.
const VMS: usize = 8;
const SECONDS: &str = "UZONE_TEST_SECONDS";

/// A sequence of numbers without a pattern.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        (self.0 >> 33) % end
    }
}

/// Hands memory over in two parts, with a pause of some milliseconds between them. `None` if the keeper died meanwhile, so
/// that the second part cannot be sent, or before it had stored the first part.
fn try_hand_over(socket: &Path, pause: u64) -> Option<(Registered, UnixStream)> {
    let uffd = userfaultfd(KernelFaults::IfAllowed);
    let memory = memory_of(&uffd, PAGES, None);
    let message = format!("[{}]", region(start_of(&memory), PAGES * PAGE, 0, PAGE));
    let mut stream = UnixStream::connect(socket).ok()?;
    let (first, rest) = message.split_at(20);
    peer::send(&stream, first.as_bytes(), &[uffd.as_fd()]).ok()?;
    thread::sleep(Duration::from_millis(pause));
    stream.write_all(rest.as_bytes()).ok()?;
    // A keeper that is killed before it has stored a message loses it, as the guide of operators states.
    let kept = socket.with_file_name("kept");
    let begun = Instant::now();
    while !is_kept(&kept, rest) {
        stream.set_nonblocking(true).unwrap();
        if matches!(stream.read(&mut [0; 8]), Ok(0)) && !is_kept(&kept, rest) {
            return None;
        }
        assert!(begun.elapsed() < PATIENCE, "it is not stored");
        thread::sleep(Duration::from_millis(1));
    }
    Some((memory, stream))
}

/// Returns whether a record of this process in the folder ends with these bytes.
fn is_kept(folder: &Path, rest: &str) -> bool {
    let own = format!("\"pid\":{},", std::process::id());
    let servers = fs::read_dir(folder).into_iter().flatten().flatten();
    let files = servers.filter_map(|server| fs::read_dir(server.path()).ok()).flatten().flatten();
    files
        .filter_map(|file| fs::read_to_string(file.path()).ok())
        .any(|record| record.contains(&own) && record.ends_with(rest))
}

/// A VM: it hands its memory over, touches pages, writes some and gives others back, and checks each of them.
fn be_a_vm(socket: &Path) {
    let mut random = Random(u64::from(std::process::id()));
    let begun = Instant::now();
    let (memory, _stream) = loop {
        let pause = random.below(8);
        if let Some(memory) = try_hand_over(socket, pause) {
            break memory;
        }
        assert!(begun.elapsed() < PATIENCE, "no server listens");
        thread::sleep(Duration::from_millis(1));
    };
    let mut expected: Vec<Option<Vec<u8>>> = vec![None; usize::try_from(PAGES).unwrap()];
    for step in 0..PAGES {
        let at = random.below(PAGES);
        let slot = usize::try_from(at).unwrap();
        check(&memory, at, expected[slot].as_deref().unwrap_or(&page_of(at)));
        match random.below(8) {
            0 => {
                let end = (at + 1 + random.below(16)).min(PAGES);
                memory.mapping().discard(at * PAGE..end * PAGE).unwrap();
                let end = usize::try_from(end).unwrap();
                expected[slot..end].fill(Some(vec![0; 4096]));
            }
            1 => {
                let written = vec![step.to_le_bytes()[0]; 4096];
                memory.mapping().write_at(at * PAGE, &written).unwrap();
                expected[slot] = Some(written);
            }
            2 => thread::sleep(Duration::from_millis(1)),
            _ => {}
        }
    }
    for (at, expected) in (0..).zip(&expected) {
        check(&memory, at, expected.as_deref().unwrap_or(&page_of(at)));
    }
}

/// VMs that run one after the other, a number of them at a time.
struct Vms<'a> {
    name: &'a str,
    socket: &'a Path,
    running: Vec<(Process, Instant)>,
    ended: u64,
}

impl<'a> Vms<'a> {
    fn start(name: &'a str, socket: &'a Path) -> Self {
        let running = (0..VMS).map(|_| (machine(name, socket), Instant::now())).collect();
        Self { name, socket, running, ended: 0 }
    }

    /// Starts a VM for each that has ended well, for a while.
    fn run_for(&mut self, time: Duration) {
        let until = Instant::now() + time;
        while Instant::now() < until {
            for (vm, since) in &mut self.running {
                if let Some(status) = vm.try_wait().unwrap() {
                    assert!(status.success(), "a VM found wrong bytes, or was ended: {status}");
                    (*vm, *since) = (machine(self.name, self.socket), Instant::now());
                    self.ended += 1;
                }
                assert!(since.elapsed() < PATIENCE, "VM {} waits for ever", vm.id());
            }
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Waits for the end of all, and returns the number of VMs.
    fn end(mut self) -> u64 {
        for (vm, _) in &mut self.running {
            assert!(end_of(vm).success());
        }
        self.ended + self.running.len() as u64
    }
}

/// Returns whether another round is to be done.
fn goes_on(begun: Instant, rounds: u64, divisor: u64) -> bool {
    if let Ok(seconds) = std::env::var(SECONDS) {
        return begun.elapsed() < Duration::from_secs(seconds.parse().unwrap());
    }
    let most: u64 = std::env::var(KILLS).map_or(24, |kills| kills.parse().unwrap());
    rounds < most.div_ceil(divisor)
}

fn worker_of(socket: &Path) -> u32 {
    let worker = || uzone_server::status(socket).ok().and_then(|status| status.worker);
    wait_until("no worker", || worker().is_some());
    worker().unwrap()
}

fn kill(keeper: &mut Child) {
    keeper.kill().unwrap();
    keeper.wait().unwrap();
}

#[test]
fn eight_vms_find_their_bytes_while_workers_and_keepers_are_killed_at_any_moment() {
    let name = name!();
    let Some((_folder, socket)) = case_of(name, "kills", be_a_vm) else { return };
    let (mut random, mut kills, mut rounds) = (Random(7), [0; 3], 0);
    let start = || start_keeper(&socket, |keeper| keeper.env(IMAGE, "packed"));
    let mut keeper = start();
    let mut vms = Vms::start(name, &socket);
    let begun = Instant::now();
    while goes_on(begun, rounds, 1) {
        rounds += 1;
        vms.run_for(Duration::from_millis(random.below(60)));
        let worker = worker_of(&socket);
        // VMs that come after this are offered, and are not served yet.
        let is_stopped_first = random.below(3) == 0;
        if is_stopped_first {
            send(worker, Signal::STOP);
            vms.run_for(Duration::from_millis(random.below(30)));
        }
        let kind = usize::try_from(random.below(3)).unwrap();
        kills[kind] += 1;
        if kind != 0 {
            kill(&mut keeper);
        }
        if kind != 1 {
            send(worker, Signal::KILL);
        } else if is_stopped_first {
            send(worker, Signal::CONT);
        }
        if kind != 0 {
            vms.run_for(Duration::from_millis(random.below(20)));
            keeper = start();
        }
    }
    let vms = vms.end();
    eprintln!("kills of worker, keeper, both: {kills:?}; {vms} VMs in {:?}", begun.elapsed());
    kill(&mut keeper);
}

#[test]
fn eight_vms_find_their_bytes_while_servers_are_replaced() {
    let name = name!();
    let Some((_folder, socket)) = case_of(name, "replaced", be_a_vm) else { return };
    let (mut random, mut rounds) = (Random(11), 0);
    let mut keeper = keeper_that_keeps(&socket);
    let mut vms = Vms::start(name, &socket);
    let begun = Instant::now();
    while goes_on(begun, rounds, 20) {
        rounds += 1;
        vms.run_for(Duration::from_millis(random.below(100)));
        let worker = worker_of(&socket);
        let next = start_keeper(&socket, |next| next.env(TAKES_OVER, ""));
        assert!(end_of(&mut keeper).success(), "the server before has ended well");
        assert!(has_ended(worker));
        keeper = next;
    }
    let vms = vms.end();
    eprintln!("{rounds} upgrades; {vms} VMs in {:?}", begun.elapsed());
    kill(&mut keeper);
}
