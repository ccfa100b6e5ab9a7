//! The log of a server: [`Line`].

use std::net::SocketAddr;
use std::time::{Duration, SystemTime};

use serde::Serialize;
use uzone_pages::ByteLen;
use uzone_report::human_duration;
use uzone_server::{Sandbox, ServeEvent};

use crate::output::{Report, Style};

/// `uzone.serve/1`: one line for each event.
#[derive(Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub(crate) struct Line<'a> {
    /// The time of the event in the form of RFC 3339, to milliseconds.
    time: String,
    #[serde(flatten)]
    happened: Happened<'a>,
}

impl<'a> Line<'a> {
    pub(super) fn at(at: SystemTime, happened: Happened<'a>) -> Self {
        Self { time: humantime::format_rfc3339_millis(at).to_string(), happened }
    }

    pub(super) fn now(happened: Happened<'a>) -> Self {
        Self::at(SystemTime::now(), happened)
    }
}

#[derive(Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(tag = "event", rename_all = "snake_case")]
pub(crate) enum Happened<'a> {
    Listening {
        socket: String,
        image: String,
        metrics: Option<SocketAddr>,
        sandbox: Sandbox,
    },
    Stopped {
        sessions: u64,
        left: usize,
        worker_deaths: u64,
        dropped_events: u64,
    },
    #[serde(untagged)]
    Session(&'a ServeEvent),
}

impl Report for Line<'_> {
    const SCHEMA: &'static str = "uzone.serve/1";

    fn text(&self, _style: Style) -> String {
        self.happened.text().lines().map(|line| format!("{} {line}\n", self.time)).collect()
    }
}

impl Happened<'_> {
    fn text(&self) -> String {
        match self {
            Self::Session(event) => session_text(event),
            Self::Listening { socket, image, metrics, sandbox } => {
                let metrics = metrics.map(|at| format!("; metrics at http://{at}/metrics"));
                let metrics = metrics.unwrap_or_default();
                format!("serving {image} on {socket}{metrics}\nthe worker runs as {sandbox}\n")
            }
            Self::Stopped { sessions, left, dropped_events, .. } => {
                let left = match left {
                    0 => String::new(),
                    left => format!("; {left} of them are left without a server"),
                };
                let dropped = match dropped_events {
                    0 => String::new(),
                    lines => format!("; {lines} events were not printed in time"),
                };
                format!("served {sessions} VMs{left}{dropped}\n")
            }
        }
    }
}

/// Returns the text of an event of a VM, or of the server's processes.
fn session_text(event: &ServeEvent) -> String {
    let killed = |was_killed: bool| if was_killed { ", and it was killed" } else { "" };
    let time = |ns| human_duration(Duration::from_nanos(ns));
    // An event of a VM begins with its session.
    let (session, text) = match event {
        ServeEvent::Connected { session, pid, uid, regions, len_bytes, page_bytes, .. } => {
            let (len, page) = (ByteLen::new(*len_bytes), ByteLen::new(*page_bytes));
            let noun = if *regions == 1 { "region" } else { "regions" };
            let text = format!(
                "process {pid} of user {uid} has {len:.1} in {regions} {noun} of {page:.1} pages"
            );
            (session, text + rights_text(event))
        }
        ServeEvent::Refused { session, pid, reason, was_killed } => {
            (session, format!("process {pid} is not served{}: {reason}", killed(*was_killed)))
        }
        ServeEvent::TakenOver { session, pid, after_ns } => {
            (session, format!("process {pid} is served again after {}", time(*after_ns)))
        }
        ServeEvent::Failed { session, pid, offset, reason, was_killed, .. } => {
            let killed = killed(*was_killed);
            (
                session,
                format!("process {pid}: cannot read the page at {offset:#x}{killed}: {reason}"),
            )
        }
        ServeEvent::NotHuge { session, pid, reason } => {
            (session, format!("the memory of process {pid} is not all in huge pages: {reason}"))
        }
        ServeEvent::Ended { session, pid, served_ns, faults, demand_pages, around_pages } => {
            let brought = format!(
                "{faults} faults brought {demand_pages} pages, and {around_pages} came along"
            );
            (session, format!("process {pid} ended after {}; {brought}", time(*served_ns)))
        }
        ServeEvent::WorkerEnded { status, sessions } => {
            return format!(
                "worker died ({status}) with {sessions} VMs; the next worker takes over\n"
            );
        }
        ServeEvent::HandedOver { sessions } => {
            return format!("another server took over {sessions} VMs\n");
        }
        // An event of a newer library.
        event => return format!("{event:?}\n"),
    };
    format!("session {session}: {text}\n")
}

/// Returns the rights over a VM's process that the server lacks.
fn rights_text(event: &ServeEvent) -> &'static str {
    match event {
        ServeEvent::Connected { can_be_killed: true, can_be_read: false, .. } => {
            "; this server may not read its memory, so neither diff nor recover it"
        }
        ServeEvent::Connected { can_be_killed: false, can_be_read: true, .. } => {
            "; this server may not kill it"
        }
        ServeEvent::Connected { can_be_killed: false, can_be_read: false, .. } => {
            "; this server may neither kill it nor read its memory"
        }
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_region_is_no_plural() {
        let of = |regions| {
            session_text(&ServeEvent::Connected {
                session: 1,
                pid: 2,
                uid: 3,
                can_be_killed: true,
                can_be_read: true,
                regions,
                len_bytes: 4096,
                page_bytes: 4096,
            })
        };
        assert!(of(1).contains(" in 1 region of "), "{}", of(1));
        assert!(of(2).contains(" in 2 regions of "), "{}", of(2));
    }
}
