//! A VM that faults at full speed beside one that must stay fast.
//!
//! Both are served by one server, or each by one of its own: the quiet VM may wait longer in the first case,
//! but not by much. Times are compared with times of the same minute only, because the machine that runs the
//! tests may be busy.

use std::path::Path;
use std::time::{Duration, Instant};
use std::{fs, thread};

use uzone_os::uffd::KernelFaults;

use crate::{
    MACHINE, PAGE, PAGES, PATIENCE, Process, Running, case_of, check, end_of, machine, one_region,
    page_of, program, wait_until,
};

const NAME: &str = "neighbour::a_machine_stays_fast_beside_one_that_faults_at_full_speed";
/// The file of the quiet VM's times.
const TIMES: &str = "UZONE_SERVER_TEST_TIMES";
/// The threads of the noisy VM that fault.
const THREADS: u64 = 32;
/// The pages that a thread touches before it gives them back.
const RUN: u64 = 64;
/// The distance between two touches of the quiet VM, so that no page comes along with another.
const APART: u64 = 16;
const PAUSE: Duration = Duration::from_millis(1);
/// The longest wait of the quiet VM beside the noisy one of the same server, as a multiple.
const MOST: u32 = 8;
/// The most measurements of both cases: a fair server keeps to `MOST` long before the last one.
const ROUNDS: usize = 10;

/// Faults and gives pages back without a pause, until the process is killed.
fn be_noisy(socket: &Path) {
    let (memory, _stream) = one_region(socket, KernelFaults::IfAllowed);
    thread::scope(|scope| {
        for part in 0..THREADS {
            let memory = &memory;
            scope.spawn(move || {
                let pages = PAGES / THREADS * part..PAGES / THREADS * (part + 1);
                for round in 0_u64.. {
                    for run in pages.clone().step_by(64) {
                        for at in (0..RUN).map(|step| run + step * 37 % RUN) {
                            let expected = if round == 0 { page_of(at) } else { vec![0; 4096] };
                            check(memory, at, &expected);
                        }
                        memory.mapping().discard(run * PAGE..(run + RUN) * PAGE).unwrap();
                    }
                }
            });
        }
    });
}

/// Returns the number of faults of a process's latest VM that were answered.
fn faults(socket: &Path, pid: u32) -> u64 {
    let status = uzone_server::status(socket).unwrap();
    let sessions = status.sessions.into_iter().filter(|session| session.pid == pid);
    let latest = sessions.max_by_key(|session| session.session);
    latest.and_then(|session| session.stats).map_or(0, |stats| stats.faults)
}

/// Touches pages with pauses, and writes down the nanoseconds of each touch.
fn be_quiet(socket: &Path, times: &Path) {
    let (memory, _stream) = one_region(socket, KernelFaults::IfAllowed);
    let touch = |step: u64| {
        let at = step * 37 % (PAGES / APART) * APART;
        thread::sleep(PAUSE);
        let begin = Instant::now();
        check(&memory, at, &page_of(at));
        format!("{}\n", begin.elapsed().as_nanos())
    };
    fs::write(times, (0..PAGES / APART).map(touch).collect::<String>()).unwrap();
    assert!(faults(socket, std::process::id()) >= PAGES / APART / 8, "its pages were there");
}

/// Runs a quiet VM beside a noisy one. Adds the times of its touches.
fn touch_beside(noisy: &Path, quiet: &Path, times: &mut Vec<Duration>) {
    let mut neighbour = machine(NAME, noisy);
    wait_until("the noisy machine is quiet", || faults(noisy, neighbour.id()) > 4 * PAGES);
    let before = faults(noisy, neighbour.id());
    let file = quiet.with_file_name("times");
    let mut one = Process::start(program(NAME).env(MACHINE, quiet).env(TIMES, &file));
    assert!(end_of(&mut one).success());
    let text = fs::read_to_string(file).unwrap();
    times.extend(text.lines().map(|ns| Duration::from_nanos(ns.parse().unwrap())));
    assert!(
        faults(noisy, neighbour.id()) > before + PAGES / APART,
        "the noisy machine has stopped"
    );
    assert!(neighbour.try_wait().unwrap().is_none(), "the noisy machine saw a wrong byte");
}

/// Returns the time that one in a hundred exceeds.
fn p99(times: &mut [Duration]) -> Duration {
    times.sort_unstable();
    times[times.len() * 99 / 100]
}

#[test]
fn a_machine_stays_fast_beside_one_that_faults_at_full_speed() {
    let machine = |socket: &Path| match std::env::var_os(TIMES) {
        Some(times) => be_quiet(socket, Path::new(&times)),
        None => be_noisy(socket),
    };
    let Some((folder, _)) = case_of(NAME, "neighbour", machine) else { return };
    for image in ["raw", "packed"] {
        let sockets = ["one", "other"].map(|socket| folder.join(socket));
        let servers =
            sockets.each_ref().map(|socket| Running::start(socket, &folder.join(image), "kill"));
        let (mut apart, mut beside) = (Vec::new(), Vec::new());
        let is_fair = (0..ROUNDS).any(|_| {
            touch_beside(&sockets[1], &sockets[0], &mut apart);
            touch_beside(&sockets[0], &sockets[0], &mut beside);
            p99(&mut beside) <= MOST * p99(&mut apart)
        });
        let (longest, touches) = (*beside.iter().max().unwrap(), beside.len());
        let (apart, beside) = (p99(&mut apart), p99(&mut beside));
        eprintln!(
            "{image}: p99 of {touches} touches {beside:?}, apart {apart:?}; {longest:?} at most"
        );
        assert!(is_fair, "p99 {beside:?} beside it, and {apart:?} apart");
        assert!(longest < PATIENCE / 6, "a touch took {longest:?}");
        servers.into_iter().for_each(|server| drop(server.stop()));
    }
}
