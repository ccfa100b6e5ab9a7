//! A server as a process of its own, and a machine of this one: what tests kill both processes of a server
//! with.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::ops::Range;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::Arc;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use uzone_os::uffd::{Features, KernelFaults, Modes, Registered, Uffd};
use uzone_os::{Anonymous, Mapping, peer};
use uzone_pages::ByteLen;

use super::{Dir, keeps_to, object, skip, uzone, wait_until};

pub(crate) const PAGE: u64 = 4096;
pub(crate) const PAGES: u64 = 1024;
/// How often both processes are killed.
pub(crate) const KILLS: u64 = 8;
pub(crate) fn page_of(index: u64) -> Vec<u8> {
    let word = |at: u64| ((index * 512 + at + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)).to_le_bytes();
    (0..512).flat_map(word).collect()
}

/// Writes an image of pages from this one on, and returns its name.
pub(crate) fn write_image(dir: &Dir, name: &str, first: u64) -> String {
    let bytes: Vec<u8> = (first..first + PAGES).flat_map(page_of).collect();
    dir.file(name, bytes)
}

/// Returns what a server does.
pub(crate) fn status_at(socket: &str) -> Value {
    let status = object(&["status", "--json", "--socket", socket]);
    keeps_to("uzone.status-1", &status);
    status
}

/// A server, or another command that prints events.
pub(crate) struct Server {
    pub(crate) child: Child,
    pub(crate) lines: BufReader<ChildStdout>,
    /// What its events keep to.
    schema: &'static str,
}

impl Server {
    /// Starts `uzone serve` with these arguments, and waits until it listens.
    pub(crate) fn start(arguments: &[&str]) -> Self {
        Self::spawn(uzone(&["serve", "--json"]).args(arguments))
    }

    /// Starts a command that prints events, and waits until it listens.
    pub(crate) fn spawn(command: &mut Command) -> Self {
        let mut server = Self::beside(command);
        server.event("listening");
        server
    }

    /// Starts a server, and does not wait until it listens.
    pub(crate) fn beside(command: &mut Command) -> Self {
        Self::printing("uzone.serve-1", command)
    }

    /// Starts a command that prints events of this schema.
    pub(crate) fn printing(schema: &'static str, command: &mut Command) -> Self {
        let mut child =
            command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().expect("it runs");
        let lines = BufReader::new(child.stdout.take().expect("a pipe"));
        Self { child, lines, schema }
    }

    /// Waits for an event of any kind.
    pub(crate) fn any_event(&mut self) -> Value {
        let mut line = String::new();
        if self.lines.read_line(&mut line).expect("it is read") == 0 {
            panic!("it has ended: {:?}", self.end());
        }
        let object: Value = serde_json::from_str(&line).expect("an object a line");
        keeps_to(self.schema, &object);
        object
    }

    /// Waits for an event of this kind.
    pub(crate) fn event(&mut self, what: &str) -> Value {
        loop {
            let object = self.any_event();
            if object["event"] == what {
                return object;
            }
        }
    }

    /// Waits for an event, which must be of this kind.
    pub(crate) fn next_event(&mut self, what: &str) -> Value {
        let object = self.any_event();
        assert_eq!(object["event"], what, "{object}");
        object
    }

    pub(crate) fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    pub(crate) fn workers(&self) -> Vec<Pid> {
        children(self.pid())
    }

    /// Kills the processes that answer faults.
    pub(crate) fn kill_workers(&self) {
        for worker in self.workers() {
            kill_process(worker, Signal::KILL).expect("it is not waited for");
        }
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(self.pid(), signal).expect("it runs");
    }

    pub(crate) fn wait(&mut self) -> ExitStatus {
        self.child.wait().expect("it ends")
    }

    /// Waits for the end, and returns the exit code, and what it wrote to standard error if that is a pipe.
    pub(crate) fn end(&mut self) -> (Option<i32>, String) {
        let mut message = String::new();
        if let Some(mut stderr) = self.child.stderr.take() {
            stderr.read_to_string(&mut message).expect("text");
        }
        (self.wait().code(), message)
    }

    /// Kills both processes at once, and waits until they are gone.
    pub(crate) fn kill(mut self) {
        let workers = kill_with_children(self.pid());
        self.child.wait().expect("it ends");
        wait_for_the_end(&workers);
    }

    /// Kills the keeper, and returns its worker.
    pub(crate) fn kill_keeper(mut self) -> Pid {
        let workers = self.workers();
        self.signal(Signal::KILL);
        self.wait();
        workers[0]
    }

    /// Ends a server by two signals, the second when it has removed its socket, and returns its last event.
    pub(crate) fn stop_at_once(&mut self, socket: &str) -> Value {
        self.signal(Signal::TERM);
        wait_until("the end of the socket", || !fs::exists(socket).expect("it is known"));
        self.signal(Signal::TERM);
        self.event("stopped")
    }

    pub(crate) fn stop(mut self) -> Value {
        self.signal(Signal::TERM);
        let stopped = self.event("stopped");
        assert!(self.wait().success());
        stopped
    }
}

impl Drop for Server {
    /// Ends both processes, unless the test has.
    fn drop(&mut self) {
        if self.child.try_wait().is_ok_and(|ended| ended.is_none()) {
            wait_for_the_end(&kill_with_children(self.pid()));
            // It was killed.
            let _ = self.child.wait();
        }
    }
}

/// Returns the processes that a process has started.
pub(crate) fn children(process: Pid) -> Vec<Pid> {
    let threads = fs::read_dir(format!("/proc/{}/task", process.as_raw_nonzero()));
    let children = threads
        .expect("it runs")
        .filter_map(|thread| fs::read_to_string(thread.ok()?.path().join("children")).ok());
    let children = children.collect::<Vec<_>>().join(" ");
    let numbers = children.split_whitespace().filter_map(|number| number.parse().ok());
    numbers.filter_map(Pid::from_raw).collect()
}

/// Kills a process and those that it started, and returns those.
pub(crate) fn kill_with_children(process: Pid) -> Vec<Pid> {
    kill_process(process, Signal::STOP).expect("it runs");
    let workers = children(process);
    for worker in &workers {
        kill_process(*worker, Signal::KILL).expect("it is not waited for");
    }
    kill_process(process, Signal::KILL).expect("it runs");
    workers
}

/// Waits until processes that this one did not start are gone.
pub(crate) fn wait_for_the_end(processes: &[Pid]) {
    // As systemd does, which starts a service when none of its processes is left.
    let is_there = |process: &Pid| {
        let directory = format!("/proc/{}", process.as_raw_nonzero());
        let state = fs::read_to_string(format!("{directory}/stat"));
        // A process whose first thread has ended has its files until the others have.
        let threads = fs::read_dir(format!("{directory}/task")).map_or(0, Iterator::count);
        threads > 1 || state.is_ok_and(|state| !state.contains(") Z "))
    };
    wait_until("the end of a process", || !processes.iter().any(is_there));
}

/// A machine of this process.
pub(crate) struct Machine {
    pub(crate) memory: Registered,
    _stream: UnixStream,
}

impl Machine {
    pub(crate) fn connect(socket: &str) -> Option<Self> {
        Self::on(UnixStream::connect(socket).expect("it listens"))
    }

    /// Hands its memory over.
    pub(crate) fn on(stream: UnixStream) -> Option<Self> {
        let uffd = match Uffd::open(Features::EVENT_REMOVE, Features::NONE, KernelFaults::IfAllowed)
        {
            Ok(uffd) => Arc::new(uffd),
            Err(error) => {
                skip("machines that outlive a server", error);
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
        peer::send(&stream, message.as_bytes(), &[uffd.as_fd()]).expect("it is taken");
        Some(Self { memory, _stream: stream })
    }

    pub(crate) fn give_back(&self, pages: Range<u64>) {
        let bytes = pages.start * PAGE..pages.end * PAGE;
        self.memory.mapping().discard(bytes).expect("it is given back");
    }

    /// Checks that a page is the image's.
    pub(crate) fn check_page(&self, page: u64) {
        self.check(page, &page_of(page));
    }

    pub(crate) fn check(&self, page: u64, expected: &[u8]) {
        let mut seen = vec![1; 4096];
        self.memory.mapping().read_at(page * PAGE, &mut seen).expect("it is served");
        assert!(seen == expected, "wrong bytes in page {page}");
    }
}

/// Stops a process, and waits until none of its threads runs.
pub(crate) fn stop_process(process: Pid) {
    kill_process(process, Signal::STOP).expect("it runs");
    let has_stopped = |thread: fs::DirEntry| {
        fs::read_to_string(thread.path().join("stat")).is_ok_and(|state| state.contains(") T "))
    };
    let threads = || {
        let threads = fs::read_dir(format!("/proc/{}/task", process.as_raw_nonzero()));
        threads.expect("it runs").map(|thread| thread.expect("a thread"))
    };
    wait_until("the stop of a process", || threads().all(has_stopped));
}
