//! The worker of a keeper: starting it, giving it orders, handling its reports, and replacing it.

use std::fs::File;
use std::io;
use std::mem;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::process::Child;
use std::thread;
use std::time::{Duration, Instant};

use crate::descriptors::is_shortage;
use crate::message_socket::MessageSocket;
use uzone_os::Vaddr;
use uzone_os::peer::Peer;

use super::huge::{Collapser, Outcome};
use super::{HUGE, Keeper, Opened, WORKER};
use crate::error::ServeError;
use crate::event::ServeEvent;
use crate::machine::{Machine, State, Step};
use crate::messages::{self, BLOCKS, Order, Report, SHORTAGE, Titled};

/// A worker that ran this long resets the count of deaths in a row.
const STEADY: Duration = Duration::from_secs(1);
/// The pause before the next start after the second death in a row; doubled with each, up to the limit.
const BACKOFF: Duration = Duration::from_millis(5);
const BACKOFF_MOST: Duration = Duration::from_millis(50);
/// The most workers that may die of taking one connection.
const DEATHS: u32 = 3;
/// `SIGKILL`, as the status of a process has it.
const KILL: i32 = 9;
/// `SIGSYS`, by which a process ends that makes a system call which its sandbox denies.
const DENIED: i32 = 31;

/// A running worker, and its last reports.
pub(super) struct RunningWorker {
    pub(super) child: Child,
    socket: MessageSocket,
    since: Instant,
    pub(super) is_ready: bool,
    /// Whether it waits for an order.
    asks: bool,
    /// Whether it was asked for its counts, and has not reported all.
    is_counting: bool,
    /// The connection that it was handed last, until it asks for the next.
    pub(super) taking: Option<u64>,
}

impl Drop for RunningWorker {
    /// Ends the process. When this returns, none of its threads answers a fault. If this process dies of a bug, the
    /// worker answers on.
    fn drop(&mut self) {
        if thread::panicking() {
            return;
        }
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Starts a worker with the descriptor that it is handed.
pub(super) type Start = Box<dyn FnMut(OwnedFd) -> io::Result<Child> + Send>;

impl Keeper {
    /// Starts the first worker, and waits until it asks for work.
    pub(super) fn start_first_worker(&mut self, has_machines: bool) -> Result<(), ServeError> {
        self.start_worker(has_machines).map_err(ServeError::Start)?;
        while self.worker.as_ref().is_some_and(|worker| !worker.is_ready) {
            self.hear_first()?;
        }
        Ok(())
    }

    /// Starts a worker. Where VMs may wait for it, it goes on without files that save time alone.
    pub(super) fn start_worker(&mut self, has_machines: bool) -> io::Result<()> {
        let (socket, other) = MessageSocket::pair()?;
        self.set.add(&socket, WORKER)?;
        // Before it starts: without that it would end at once.
        let names = self.opened.files.iter().map(|(name, _)| name.clone()).collect();
        let files: Vec<_> = self.opened.files.iter().map(|(_, file)| file.as_fd()).collect();
        messages::send(&socket, &Order::Start { names, has_machines }, &files)?;
        let child = (self.start)(other.into_fd())?;
        let worker = RunningWorker {
            child,
            socket,
            since: Instant::now(),
            is_ready: false,
            asks: false,
            is_counting: false,
            taking: None,
        };
        // Before it has a VM: the next keeper ends it. If that fails, it ends.
        let peer = Peer::of_number_now(worker.child.id());
        match peer.and_then(|peer| self.store.put_worker(&peer)) {
            // It has ended already, which its socket tells.
            Err(cause) if cause.kind() == io::ErrorKind::NotFound => {}
            stored => stored?,
        }
        self.worker = Some(worker);
        Ok(())
    }

    /// Waits for a report of the first worker.
    fn hear_first(&mut self) -> Result<(), ServeError> {
        let Some(worker) = &mut self.worker else { return Ok(()) };
        match messages::receive_any(&worker.socket) {
            Ok(report) => self.handle(report),
            Err(_) => {
                let status = worker.child.wait().map_err(ServeError::Start)?;
                return Err(ServeError::Worker { status });
            }
        }
        Ok(())
    }

    /// Sends the next order to a worker that waits for one: a client that reads memory, a client, or a request for its
    /// counts.
    pub(super) fn hand_over(&mut self) {
        while let Some(worker) = self.worker.as_mut().filter(|worker| worker.asks) {
            let sent = if let Some((session, client, pending)) = self.captures.pop_front() {
                let fds = [client.as_fd(), pending.as_fd()];
                messages::send(&worker.socket, &Order::Capture(session), &fds)
            } else if let Some(key) = self.news.pop_front() {
                let is_offered = |machine: &&mut Machine| machine.state == State::Offered;
                let Some(machine) = self.machines.get_mut(&key).filter(is_offered) else {
                    continue;
                };
                worker.taking = Some(key);
                let (order, fds) = (Order::Serve(machine.offer(key)), machine.descriptors());
                messages::send_with(&worker.socket, &order, &fds, &machine.bytes)
            } else if !self.asking.is_empty() {
                worker.is_counting = true;
                messages::send(&worker.socket, &Order::Stats, &[])
            } else {
                return;
            };
            match sent {
                Ok(()) => worker.asks = false,
                // It is sent again at the next tick of the clock.
                Err(cause) if is_shortage(&cause) => {
                    self.news.extend(worker.taking.take());
                    self.is_short = true;
                    return;
                }
                Err(_) => return self.worker_ended(),
            }
        }
    }

    /// Receives a report of the worker.
    pub(super) fn hear(&mut self) {
        let Some(worker) = &self.worker else { return };
        match messages::receive_any(&worker.socket) {
            Ok(report) => self.handle(report),
            // The report stays.
            Err(cause) if is_shortage(&cause) => thread::sleep(SHORTAGE),
            Err(_) => self.worker_ended(),
        }
    }

    fn handle(&mut self, Titled { title, fds, lacks_fds, .. }: Titled<Report>) {
        match title {
            Report::Opened { image, path, names, sandbox } => {
                let files = names.into_iter().zip(fds.into_iter().map(File::from)).collect();
                let opened = Opened { image, path, files, sandbox };
                let before = mem::replace(&mut self.opened, opened).image;
                if !before.is_empty() && before != self.opened.image {
                    // It was opened by its name again, or changed in place: no VM gets bytes of both.
                    for machine in self.machines.values_mut().filter(|one| !one.is_new()) {
                        machine.image.get_or_insert(before.clone());
                    }
                    self.refuse_other_images();
                }
            }
            Report::Ready { no_room } => self.worker_is_ready(no_room),
            Report::Log(key) => {
                self.stop_reading(key);
                if let Some(machine) = self.machines.get_mut(&key) {
                    // Without a descriptor for it, the program keeps the log alone.
                    machine.log = fds.into_iter().next().filter(|_| !lacks_fds);
                }
            }
            Report::Stats { totals, sessions } => {
                self.counted = totals;
                for (key, stats) in sessions {
                    if let Some(machine) = self.machines.get_mut(&key) {
                        machine.stats = Some(stats);
                    }
                }
                let mut totals = self.totals.clone();
                totals.add(self.counted.clone());
                self.store.put_totals(&totals);
            }
            Report::Blocks(key, blocks) => self.make_huge(key, blocks),
            Report::Event(event) => self.happened(event),
        }
    }

    fn worker_is_ready(&mut self, no_room: Option<u64>) {
        let Some(worker) = &mut self.worker else { return };
        (worker.is_ready, worker.asks) = (true, true);
        let (taken, is_counted) = (worker.taking.take(), mem::take(&mut worker.is_counting));
        if let Some(key) = taken
            && let Some(machine) = self.machines.get_mut(&key)
        {
            if no_room == taken && machine.record.is_none() {
                self.refuse(key, "there is no memory for its log".to_owned());
            } else if no_room == taken {
                let cause = io::Error::new(io::ErrorKind::StorageFull, "no room for its log");
                self.store.serve_without_record(key, machine, &cause);
                self.news.push_back(key);
            } else if !self.news.contains(&key) {
                machine.step(Step::Part);
            }
        }
        if is_counted {
            self.answer_all();
        }
        if self.news.is_empty() {
            self.down_since = None;
        }
    }

    /// Has huge pages made of blocks that a worker found filled.
    fn make_huge(&mut self, key: u64, mut blocks: Vec<u64>) {
        let Some(machine) = self.machines.get(&key) else { return };
        blocks.truncate(BLOCKS);
        let (peer, refused) = (machine.peer.clone(), blocks.len() as u64);
        let blocks = blocks.into_iter().map(Vaddr::new).collect();
        let started = self.collapser().map_err(|cause| cause.to_string());
        if let Err(reason) = started.and_then(|collapser| collapser.add((key, peer, blocks))) {
            self.count_huge(Outcome { session: key, made: 0, refused, reason: Some(reason) });
        }
    }

    fn collapser(&mut self) -> io::Result<&Collapser> {
        let set = &self.set;
        match &mut self.collapser {
            Some(collapser) => Ok(collapser),
            none => {
                let collapser = Collapser::start()?;
                set.add(&collapser, HUGE)?;
                Ok(none.insert(collapser))
            }
        }
    }

    /// Notes which huge pages were made.
    pub(super) fn note_huge(&mut self) -> Result<(), ServeError> {
        let Some(collapser) = &self.collapser else { return Ok(()) };
        let outcomes = collapser.take().map_err(ServeError::Wait)?;
        outcomes.into_iter().for_each(|outcome| self.count_huge(outcome));
        Ok(())
    }

    fn count_huge(&mut self, outcome: Outcome) {
        let Outcome { session, made, refused, reason } = outcome;
        // It may have ended.
        let Some(machine) = self.machines.get_mut(&session) else { return };
        let (pid, is_first) = (machine.peer.pid(), machine.not_huge == 0);
        machine.huge_pages += made;
        machine.not_huge += refused;
        if let Some(reason) = reason.filter(|_| is_first) {
            self.happened(ServeEvent::NotHuge { session, pid, reason });
        }
    }

    pub(super) fn start_later(&mut self) {
        self.failures += 1;
        let doubled = BACKOFF * 2_u32.saturating_pow(self.failures.saturating_sub(2));
        let delay = if self.failures < 2 { Duration::ZERO } else { doubled.min(BACKOFF_MOST) };
        self.start_at = Some(Instant::now() + delay);
    }

    /// Starts the next worker, which gets all clients, the served ones first.
    fn worker_ended(&mut self) {
        let Some(mut worker) = self.worker.take() else { return };
        let had_all = self.down_since.is_none();
        self.down_since.get_or_insert_with(Instant::now);
        let _ = self.set.remove(&worker.socket);
        let _ = worker.child.kill();
        let status = worker.child.wait();
        let was_killed = status.as_ref().is_ok_and(|status| status.signal() == Some(KILL));
        let was_denied = status.as_ref().is_ok_and(|status| status.signal() == Some(DENIED));
        let mut status = status.map_or_else(|cause| cause.to_string(), |status| status.to_string());
        if was_denied {
            status.push_str(": it made a system call that its sandbox denies");
        }
        let (taking, ran) = (worker.taking, worker.since.elapsed());
        drop(worker);
        self.served.deaths += 1;
        self.totals.worker_deaths += 1;
        let counted = mem::take(&mut self.counted);
        self.totals.add(counted);
        let sessions = self.machines.len() - self.greetings();
        self.happened(ServeEvent::WorkerEnded { status, sessions });
        // A worker that served all VMs and was killed from outside is no repetition, however soon that was. A kernel
        // that kills for want of memory is outside too: the VMs get on between two deaths. The pause after a worker
        // that was killed earlier does not grow.
        if ran >= STEADY || (was_killed && had_all) {
            self.failures = 0;
        } else if was_killed {
            self.failures = self.failures.min(1);
        }
        // A process that was killed from outside did not die of its own work.
        if let Some(key) = taking.filter(|_| !was_killed)
            && let Some(machine) = self.machines.get_mut(&key)
        {
            machine.deaths += 1;
            if machine.deaths >= DEATHS {
                self.refuse(key, format!("{DEATHS} workers died of taking it"));
            }
        }
        self.offer_again();
        self.start_later();
    }

    /// Offers all clients to the next worker, the served ones first.
    fn offer_again(&mut self) {
        // A program whose log this process lacks attaches again, with the log that it has.
        let lacks_log = |one: &Machine| one.is_program() && !one.is_new() && one.log.is_none();
        let lost = self.machines.iter().filter(|(_, one)| lacks_log(one)).map(|(key, _)| *key);
        for key in lost.collect::<Vec<_>>() {
            self.forget(key);
        }
        for machine in self.machines.values_mut() {
            // The counts of the next worker start anew.
            machine.stats = None;
            machine.step(Step::WorkerDied);
        }
        let offered = self.machines.iter().filter(|(_, one)| one.state == State::Offered);
        let (served, new): (Vec<_>, Vec<_>) = offered.partition(|(_, one)| !one.is_new());
        self.news = served.iter().chain(&new).map(|(key, _)| **key).collect();
    }
}
