//! Servers with more VMs than their descriptors suffice for, and with many.

use std::fs;
use std::io::{ErrorKind, Read};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, Signal, getrlimit, setrlimit};
use uzone_os::uffd::{KernelFaults, Registered};

use crate::{
    KEEPER, LIMIT, PATIENCE, POLICY, Process, case, check, name, one_region, page_of, program,
    send, skip, wait_until,
};

/// Starts a keeper whose processes may have so many descriptors, at first and at most.
pub(crate) fn keeper_with_descriptors(socket: &Path, soft: u64, hard: u64) -> Process {
    let mut keeper = program("a_keeper_of_another_test");
    keeper.env(KEEPER, socket).env(POLICY, "hold").env(LIMIT, format!("{soft} {hard}"));
    let keeper = Process::start(&mut keeper);
    wait_until("the keeper does not listen", || uzone_server::status(socket).is_ok());
    keeper
}

/// A VM of this process.
pub(crate) struct Machine {
    pub(crate) memory: Registered,
    stream: UnixStream,
}

impl Machine {
    pub(crate) fn connect(socket: &Path) -> Self {
        let (memory, stream) = one_region(socket, KernelFaults::IfAllowed);
        stream.set_nonblocking(true).unwrap();
        Self { memory, stream }
    }

    pub(crate) fn is_closed(&self) -> bool {
        !matches!((&self.stream).read(&mut [0; 8]), Err(cause) if cause.kind() == ErrorKind::WouldBlock)
    }

    /// Waits until it is served, beside so many others, or refused. Returns whether it is served.
    fn is_served(&self, socket: &Path, before: usize) -> bool {
        wait_until("neither served nor refused", || {
            let sessions = uzone_server::status(socket).map_or(0, |now| now.sessions.len());
            sessions > before || self.is_closed()
        });
        !self.is_closed()
    }
}

#[test]
fn of_few_descriptors_the_machine_too_many_is_refused_by_name_and_the_others_live() {
    let name = name!();
    let Some((folder, socket)) = case(name, "few-descriptors") else { return };
    let _keeper = keeper_with_descriptors(&socket, 64, 64);
    let before = uzone_server::status(&socket).unwrap();
    let (mut machines, begun) = (Vec::new(), Instant::now());
    let refused = loop {
        let asked = Instant::now();
        let machine = Machine::connect(&socket);
        if !machine.is_served(&socket, machines.len()) {
            assert!(asked.elapsed() < Duration::from_secs(1), "{:?}", asked.elapsed());
            break machine;
        }
        check(&machine.memory, 1, &page_of(1));
        machines.push(machine);
        assert!(machines.len() < 16 && begun.elapsed() < PATIENCE, "none is refused");
    };
    let reason = folder.join("refused");
    wait_until("no line", || fs::read(&reason).is_ok_and(|why| !why.is_empty()));
    let reason = fs::read_to_string(reason).unwrap();
    assert!(machines.len() >= 3, "{} machines: {reason}", machines.len());
    assert!(reason.contains("64 descriptors") && reason.contains("LimitNOFILE"), "{reason}");
    drop(refused);
    // The same two processes serve the others, and so does the next worker.
    let after = uzone_server::status(&socket).unwrap();
    assert_eq!((after.keeper, after.worker), (before.keeper, before.worker));
    assert_eq!(after.worker_deaths, 0);
    machines.iter().for_each(|machine| check(&machine.memory, 2, &page_of(2)));
    send(after.worker.unwrap(), Signal::KILL);
    machines.iter().for_each(|machine| check(&machine.memory, 900, &page_of(900)));
    let after = uzone_server::status(&socket).unwrap();
    assert_eq!((after.sessions.len(), after.worker_deaths), (machines.len(), 1), "{after:?}");
}

/// Lets this process have as many descriptors as it may.
fn have_descriptors() -> u64 {
    let maximum = getrlimit(Resource::Nofile).maximum;
    setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).unwrap();
    maximum.unwrap_or(u64::MAX)
}

#[test]
fn five_hundred_machines_are_served_where_the_soft_limit_is_1024_at_first() {
    let name = name!();
    let Some((_folder, socket)) = case(name, "many-machines") else { return };
    let hard = have_descriptors();
    if hard < 6000 {
        return skip(name, &format!("the limit of descriptors is {hard}"));
    }
    let _keeper = keeper_with_descriptors(&socket, 1024, hard);
    let machines: Vec<Machine> = (0..500).map(|_| Machine::connect(&socket)).collect();
    for (at, machine) in (0..).zip(&machines) {
        check(&machine.memory, at, &page_of(at));
    }
    let status = uzone_server::status(&socket).unwrap();
    assert_eq!((status.sessions.len(), status.worker_deaths), (500, 0));
}
