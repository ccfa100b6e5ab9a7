//! `uzone status` and `uzone drain`: the sessions of a page server, and its end.

use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use serde::Serialize;
use uzone_pages::ByteLen;
use uzone_report::human_duration;
use uzone_server::{ServeError, SessionStatus, Status, control_path};

use crate::exit::{self, Exit, Failure};
use crate::output::{Output, Report, Style, columns, headings};
use crate::serve::default_socket;

const EXITS: [u8; 5] = [0, 2, 66, 74, 77];

/// The time between two questions to a server that drains.
const ASK_AGAIN: Duration = Duration::from_millis(200);

/// Show the VMs of a page server, with counters of each
///
/// The command asks at the control socket beside the socket for monitors, which is open to the server's user and root.
#[derive(Debug, clap::Args)]
#[command(after_help = exit::help("uzone status --socket /run/vm.sock", &EXITS))]
pub(crate) struct StatusArgs {
    #[command(flatten)]
    at: Socket,
    /// Print in the text format of Prometheus, unless with --json
    #[arg(long)]
    metrics: bool,
}

/// Stop accepting VMs and wait until the last one ends
#[derive(Debug, clap::Args)]
#[command(after_help = exit::help("uzone drain --socket /run/vm.sock", &EXITS))]
pub(crate) struct DrainArgs {
    #[command(flatten)]
    at: Socket,
    /// Return at once
    #[arg(long)]
    no_wait: bool,
}

/// The socket of a server.
#[derive(Debug, clap::Args)]
pub(crate) struct Socket {
    /// Socket for monitors [default: uzone.sock in $XDG_RUNTIME_DIR, or else in this directory]
    #[arg(long, value_name = "PATH", env = "UZONE_SERVE_SOCKET")]
    socket: Option<PathBuf>,
}

impl Socket {
    pub(crate) fn path(&self) -> PathBuf {
        self.socket.clone().unwrap_or_else(default_socket)
    }

    /// Returns the answer of the server, or an error that names the missing server.
    pub(crate) fn of<T>(&self, asked: Result<T, ServeError>) -> Result<T, Failure> {
        use std::io::ErrorKind::{ConnectionRefused, NotFound};
        asked.map_err(|error| match error {
            ServeError::Ask { cause, .. } if matches!(cause.kind(), NotFound | ConnectionRefused) => {
                let socket = self.path();
                let socket = socket.display();
                let text = format!(
                    "no server at {socket}: start one with `uzone serve --socket {socket} IMAGE`, or name another --socket"
                );
                Failure::of(text, cause).with(Exit::Input)
            }
            error => error.into(),
        })
    }
}

#[derive(Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub(crate) struct StatusReport {
    #[serde(flatten)]
    status: Status,
    /// Whether the text form is metrics.
    #[serde(skip)]
    is_metrics: bool,
}

impl Report for StatusReport {
    const SCHEMA: &'static str = "uzone.status/1";

    fn text(&self, _style: Style) -> String {
        if self.is_metrics {
            return self.status.metrics();
        }
        let Status { socket, image, keeper, worker, sessions, .. } = &self.status;
        let worker = match worker {
            Some(worker) => format!("worker {worker}"),
            None => "no worker".to_owned(),
        };
        let deaths = match self.status.worker_deaths {
            0 => String::new(),
            deaths => format!(", {deaths} workers died"),
        };
        let draining = if self.status.is_draining { "; draining" } else { "" };
        let mut text = format!(
            "{socket}: {image}, keeper {keeper}, {worker}{deaths}; {} VMs, {} so far{draining}\n",
            sessions.len(),
            self.status.sessions_served
        );
        if self.status.worker.is_some() {
            text.push_str(&format!("the worker runs as {}\n", self.status.sandbox));
        }
        if !sessions.is_empty() {
            let cells = |session| COLUMNS.map(|(_, cell)| cell(session)).to_vec();
            let mut rows = vec![headings(&COLUMNS.map(|(heading, _)| heading))];
            rows.extend(sessions.iter().map(cells));
            text.push_str(&columns(&rows));
        }
        for one in sessions {
            let (made, not) = one.stats.map_or((0, 0), |stats| (stats.huge_pages, stats.not_huge));
            if made + not > 0 {
                text.push_str(&format!(
                    "session {}: {made} blocks of 2 MiB were made huge pages, and {not} were not\n",
                    one.session
                ));
            }
        }
        text
    }
}

/// A heading, and the cell of a session.
type Column = (&'static str, fn(&SessionStatus) -> String);

const COLUMNS: [Column; 10] = [
    ("session", |one| one.session.to_string()),
    ("process", |one| one.pid.to_string()),
    ("user", |one| match (one.can_be_killed, one.can_be_read) {
        (true, true) => one.uid.to_string(),
        (true, false) => format!("{} (may not be read)", one.uid),
        (false, true) => format!("{} (may not be killed)", one.uid),
        (false, false) => format!("{} (may not be killed nor read)", one.uid),
    }),
    ("memory", |one| format!("{:.1}", ByteLen::new(one.len_bytes))),
    ("since", |one| human_duration(Duration::from_nanos(one.connected_ns))),
    ("faults", |one| one.stats.unwrap_or_default().faults.to_string()),
    ("waited for", |one| one.stats.unwrap_or_default().demand_pages.to_string()),
    ("around", |one| one.stats.unwrap_or_default().around_pages.to_string()),
    ("prefetched", |one| one.stats.unwrap_or_default().prefetched_pages.to_string()),
    ("pending", |one| one.stats.unwrap_or_default().pending_pages.to_string()),
];

/// Prints the sessions of a server.
pub(crate) fn status(args: &StatusArgs, out: &Output) -> Result<Exit, Failure> {
    let status = args.at.of(uzone_server::status(&args.at.path()))?;
    out.print(&StatusReport { status, is_metrics: args.metrics })
}

/// Ends a server, and prints its sessions as of the beginning of the drain.
pub(crate) fn drain(args: &DrainArgs, out: &Output) -> Result<Exit, Failure> {
    let socket = args.at.path();
    let status = args.at.of(uzone_server::drain(&socket))?;
    let report = StatusReport { status, is_metrics: false };
    let mut left = report.status.sessions.len();
    out.log(format_args!("{left} VMs are left"));
    while !args.no_wait && control_path(&socket).exists() {
        thread::sleep(ASK_AGAIN);
        match uzone_server::status(&socket) {
            Ok(status) if status.keeper != report.status.keeper => break,
            Ok(status) if status.sessions.len() != left => {
                left = status.sessions.len();
                out.log(format_args!("{left} VMs are left"));
            }
            // The server was killed.
            Err(ServeError::Ask { cause, .. })
                if cause.kind() == std::io::ErrorKind::ConnectionRefused =>
            {
                break;
            }
            // The server may be ending.
            Ok(_) | Err(ServeError::Ask { .. }) => {}
            Err(error) => return Err(error.into()),
        }
    }
    out.print(&report)
}
