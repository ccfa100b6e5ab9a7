//! The worker of a keeper: starting it, giving it orders, handling its reports, and replacing it.

use std::fs::File;
use std::io;
use std::mem;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::process::Child;
use std::thread;
use std::time::{Duration, Instant};

use uzone_os::Vaddr;
use uzone_os::descriptors::is_shortage;
use uzone_os::unix_socket::MessageSocket;

use super::estate::Heirlooms;
use super::huge::{Collapser, Outcome};
use super::recovery::Recovery;
use super::{HUGE, Keeper, WORKER};
use crate::control::Control;
use crate::error::ServeError;
use crate::event::ServeEvent;
use crate::link::{self, BLOCKS, Order, Report, SHORTAGE, Titled};

/// A worker that ran this long resets the count of deaths in a row.
const STEADY: Duration = Duration::from_secs(1);
/// How long to wait for the next start after the second death in a row; doubled with each, up to the limit.
const BACKOFF: Duration = Duration::from_millis(5);
const BACKOFF_MOST: Duration = Duration::from_millis(50);
/// How many workers may die of taking one connection.
const DEATHS: u32 = 3;
/// `SIGKILL`, as the status of a process has it.
const KILL: i32 = 9;
/// `SIGSYS`, by which a process ends that makes a system call which its sandbox denies.
const DENIED: i32 = 31;

/// A worker, and what is known of it.
pub(super) struct RunningWorker {
    pub(super) child: Child,
    socket: MessageSocket,
    since: Instant,
    pub(super) is_ready: bool,
    /// Whether it has what the next keeper needs, in case that this process dies.
    has_heirlooms: bool,
    /// Whether it waits for an order.
    asks: bool,
    /// Whether it was asked for its counts, and has not reported all.
    is_counting: bool,
    /// The connection that it was handed last, until it asks for the next.
    pub(super) taking: Option<u64>,
}

impl Drop for RunningWorker {
    /// Ends the process. When this returns, none of its threads answers a fault any more. If this process
    /// dies of a bug, the worker takes its place.
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
    /// Starts a worker. Where machines may wait for it, it goes on without what they can do without.
    pub(super) fn start_worker(&mut self, has_machines: bool) -> io::Result<()> {
        let (socket, other) = MessageSocket::pair()?;
        self.set.add(&socket, WORKER)?;
        // Before it starts: without that it would end at once.
        let names = self.files.iter().map(|(name, _)| name.clone()).collect();
        let files: Vec<_> = self.files.iter().map(|(_, file)| file.as_fd()).collect();
        link::send(&socket, &Order::Start { names, has_machines }, &files)?;
        let child = (self.start)(other.into_fd())?;
        let since = Instant::now();
        self.worker = Some(RunningWorker {
            child,
            socket,
            since,
            is_ready: false,
            has_heirlooms: false,
            asks: false,
            is_counting: false,
            taking: None,
        });
        Ok(())
    }

    /// Waits for a report of the first worker.
    pub(super) fn first_words(&mut self) -> Result<(), ServeError> {
        let Some(worker) = &mut self.worker else { return Ok(()) };
        match link::receive_any(&worker.socket) {
            Ok(report) => self.handle(report),
            Err(_) => {
                let status = worker.child.wait().map_err(ServeError::Start)?;
                return Err(ServeError::Worker { status });
            }
        }
        Ok(())
    }

    /// Sends the next order to a worker that waits for one: what the next keeper needs, a client, a connection, or a
    /// request for its counts.
    pub(super) fn hand_over(&mut self) {
        while let Some(worker) = self.worker.as_mut().filter(|worker| worker.asks) {
            let sent = if !worker.has_heirlooms {
                worker.has_heirlooms = true;
                let listener = self.socket.as_ref().map(|socket| socket.listener.as_fd());
                let [control, metrics] = self.control.as_ref().map_or([None; 2], Control::sockets);
                let manager = self.manager.as_ref().map(AsFd::as_fd);
                let held = self.recovery.as_ref().map(Recovery::held);
                let folder = held.or(self.folder.as_ref());
                let (fds, totals) = ([listener, control, metrics, manager], self.totals.clone());
                Heirlooms::hand_over(&worker.socket, fds, folder, totals)
            } else if let Some((session, client, pending)) = self.captures.pop_front() {
                let fds = [client.as_fd(), pending.as_fd()];
                link::send(&worker.socket, &Order::Capture(session), &fds)
            } else if let Some(key) = self.news.pop_front() {
                let Some(connection) = self.connections.get_mut(&key) else { continue };
                worker.taking = Some(key);
                if connection.may_be_a_machine() {
                    // If it fails, so it does when the machine is kept, which warns.
                    let _ = Self::make_log(self.recovery.as_ref(), connection);
                }
                let (order, fds) = (Order::Take(connection.kept(key)), connection.descriptors());
                link::send_with(&worker.socket, &order, &fds, &connection.bytes)
            } else if !self.asking.is_empty() {
                worker.is_counting = true;
                link::send(&worker.socket, &Order::Stats, &[])
            } else {
                return;
            };
            match sent {
                Ok(()) => worker.asks = false,
                // Its content is sent again at the next tick of the clock.
                Err(cause) if is_shortage(&cause) => {
                    worker.has_heirlooms = false;
                    self.news.extend(worker.taking.take());
                    self.is_short = true;
                    return;
                }
                Err(_) => return self.worker_ended(),
            }
        }
    }

    /// Has the worker get what the next keeper needs, once more.
    pub(super) fn heirlooms_changed(&mut self) {
        if let Some(worker) = &mut self.worker {
            worker.has_heirlooms = false;
        }
    }

    /// Receives what the worker reports.
    pub(super) fn hear(&mut self) {
        let Some(worker) = &self.worker else { return };
        match link::receive_any(&worker.socket) {
            Ok(report) => self.handle(report),
            // The report stays.
            Err(cause) if is_shortage(&cause) => thread::sleep(SHORTAGE),
            Err(_) => self.worker_ended(),
        }
    }

    fn handle(&mut self, Titled { title, fds, lacks_fds, .. }: Titled<Report>) {
        match title {
            Report::Opened { image, path, names, sandbox } => {
                let before = mem::replace(&mut self.image, image);
                if !before.is_empty() && before != self.image {
                    // It was opened by its name again, or changed in place: no machine gets bytes of both.
                    for connection in self.connections.values_mut().filter(|it| !it.is_greeting()) {
                        connection.image.get_or_insert(before.clone());
                    }
                    self.refuse_other_images();
                }
                (self.image_path, self.sandbox) = (path, sandbox);
                self.files = names.into_iter().zip(fds.into_iter().map(File::from)).collect();
            }
            Report::Next => {
                let Some(worker) = &mut self.worker else { return };
                (worker.is_ready, worker.asks, worker.taking) = (true, true, None);
                if mem::take(&mut worker.is_counting) {
                    self.answer_all();
                }
                if self.news.is_empty() {
                    self.down_since = None;
                }
            }
            Report::Reading(key) => {
                if let Some(connection) = self.connections.get_mut(&key).filter(|_| !lacks_fds) {
                    // More of it means nothing, and nor does its end: of older monitors it comes at once.
                    if connection.is_greeting() && !connection.known.is_ended {
                        let _ = self.set.remove(&connection.stream);
                    }
                    connection.known.is_ended = true;
                    connection.log = fds.into_iter().next();
                }
                // If it is of another keeper: its file has all of the log before only now.
                if !lacks_fds {
                    self.keep_logged(key);
                }
                if let Some(worker) = &self.worker {
                    // It has died otherwise, which the next wait reports.
                    let _ = link::send(&worker.socket, &Order::Log { is_kept: !lacks_fds }, &[]);
                }
            }
            Report::Stats(key, stats) => {
                if let Some(connection) = self.connections.get_mut(&key) {
                    connection.stats = Some(stats);
                }
            }
            Report::Totals(counted) => self.counted = counted,
            Report::Blocks(key, blocks) => self.make_huge(key, blocks),
            Report::Probe(key) => drop(self.forget(key)),
            Report::Event(event) => self.happened(event),
        }
    }

    /// Has huge pages made of blocks that a worker found filled.
    fn make_huge(&mut self, key: u64, mut blocks: Vec<u64>) {
        let Some(connection) = self.connections.get(&key) else { return };
        blocks.truncate(BLOCKS);
        let peer = connection.peer.clone();
        let refusal = if self.is_confined {
            Some("this keeper was a worker, and has its rights: start the server again".to_owned())
        } else if connection.known.is_foreign {
            Some("the process was named by a worker, and has not the userfaultfd".to_owned())
        } else {
            self.start_collapser().err().map(|cause| cause.to_string())
        };
        match (refusal, &self.collapser) {
            (None, Some(collapser)) => {
                collapser.add(key, peer, blocks.into_iter().map(Vaddr::new).collect());
            }
            (reason, _) => {
                let refused = blocks.len() as u64;
                self.count_huge(key, Outcome { refused, reason, ..Outcome::default() });
            }
        }
    }

    fn start_collapser(&mut self) -> io::Result<()> {
        if self.collapser.is_none() {
            let collapser = Collapser::start()?;
            self.set.add(&collapser, HUGE)?;
            self.collapser = Some(collapser);
        }
        Ok(())
    }

    /// Notes which huge pages were made.
    pub(super) fn note_huge(&mut self) -> Result<(), ServeError> {
        let Some(collapser) = &self.collapser else { return Ok(()) };
        for (key, outcome) in collapser.take().map_err(ServeError::Wait)? {
            self.count_huge(key, outcome);
        }
        Ok(())
    }

    fn count_huge(&mut self, session: u64, outcome: Outcome) {
        // It may have ended.
        let Some(connection) = self.connections.get_mut(&session) else { return };
        let (pid, is_first) = (connection.peer.pid(), connection.not_huge == 0);
        connection.huge_pages += outcome.made;
        connection.not_huge += outcome.refused;
        if let Some(reason) = outcome.reason.filter(|_| is_first) {
            self.happened(ServeEvent::NotHuge { session, pid, reason });
        }
    }

    pub(super) fn start_later(&mut self) {
        self.failures += 1;
        let doubled = BACKOFF * 2_u32.saturating_pow(self.failures.saturating_sub(2));
        let delay = if self.failures < 2 { Duration::ZERO } else { doubled.min(BACKOFF_MOST) };
        self.start_at = Some(Instant::now() + delay);
    }

    /// Starts the next worker, which gets all connections, those of machines first.
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
        self.totals.add(&counted);
        let sessions = self.connections.len() - self.greetings();
        self.happened(ServeEvent::WorkerEnded { status, sessions });
        // One that served all machines and was killed from outside is no repetition, however soon that was. A kernel
        // that kills for want of memory is outside too: the machines get on between two deaths. The pause after one
        // that was killed before does not grow.
        if ran >= STEADY || (was_killed && had_all) {
            self.failures = 0;
        } else if was_killed {
            self.failures = self.failures.min(1);
        }
        // A process that was killed from outside did not die of what it did.
        if let Some(key) = taking.filter(|_| !was_killed)
            && let Some(connection) = self.connections.get_mut(&key)
        {
            connection.deaths += 1;
            if connection.deaths >= DEATHS {
                self.refuse(key, format!("{DEATHS} workers died of taking it"));
            }
        }
        self.renew();
        self.start_later();
    }

    /// Has all connections handed over again, those of machines first.
    pub(super) fn renew(&mut self) {
        // The counts of the next worker start anew.
        self.connections.values_mut().for_each(|connection| connection.stats = None);
        let (machines, greetings): (Vec<_>, Vec<_>) =
            self.connections.iter().partition(|(_, connection)| !connection.is_greeting());
        self.news = machines.iter().chain(&greetings).map(|(key, _)| **key).collect();
    }
}
