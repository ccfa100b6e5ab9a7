//! A VM in a memory control group that is full: its faults wait until there is room, and no page of it is bad.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use rustix::process::Signal;
use uzone_server::ServeEvent;

use crate::{
    BEFORE_ITS_FAULTS, MACHINE, Process, Running, STOPS, case, end_of, is_stopped, name, or_skip,
    program, send, wait_until,
};

/// A memory control group of its own, of version 2 or else of version 1.
struct Group {
    folder: PathBuf,
    is_new: bool,
    /// The file of the limit, and the text for none.
    limit: &'static str,
    none: &'static str,
}

impl Group {
    fn new() -> io::Result<Self> {
        let root = Path::new("/sys/fs/cgroup");
        let controllers = fs::read_to_string(root.join("cgroup.controllers"));
        let is_new =
            controllers.is_ok_and(|names| names.split_whitespace().any(|it| it == "memory"));
        let (root, limit, none) = match is_new {
            true => (root.to_owned(), "memory.max", "max"),
            false => (root.join("memory"), "memory.limit_in_bytes", "-1"),
        };
        let folder = root.join(format!("uzone-test-{}", std::process::id()));
        fs::create_dir(&folder)?;
        let group = Self { folder, is_new, limit, none };
        // The folder above may not pass the controller on.
        fs::metadata(group.folder.join(limit)).map(|_| group)
    }

    /// Takes a process that the kernel does not end for want of memory.
    fn take(&self, pid: u32) -> io::Result<()> {
        match self.is_new {
            true => fs::write(format!("/proc/{pid}/oom_score_adj"), "-1000")?,
            false => fs::write(self.folder.join("memory.oom_control"), "1")?,
        }
        fs::write(self.folder.join("cgroup.procs"), pid.to_string())
    }

    fn set_limit(&self, limit: &str) {
        fs::write(self.folder.join(self.limit), limit).unwrap();
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // A process that has just ended may still be in it.
        wait_until("the group stays", || fs::remove_dir(&self.folder).is_ok());
    }
}

#[test]
fn a_machine_whose_memory_group_is_full_waits_for_room_and_gets_each_byte() {
    let name = name!();
    let Some((folder, socket)) = case(name, "memory-limit") else { return };
    let group = Group::new().map_err(|cause| format!("no memory control group: {cause}"));
    let Some(group) = or_skip(name, group) else { return };
    for image in ["raw", "packed"] {
        let server = Running::start(&socket, &folder.join(image), "kill");
        let mut machine =
            Process::start(program(name).env(MACHINE, &socket).env(STOPS, BEFORE_ITS_FAULTS));
        wait_until("the machine does not stop", || is_stopped(&machine));
        let taken = group.take(machine.id());
        let taken = taken.map_err(|cause| format!("no process without an OOM killer: {cause}"));
        let Some(()) = or_skip(name, taken) else { return };
        group.set_limit("2M");
        send(machine.id(), Signal::CONT);
        let waits = || {
            let status = uzone_server::status(&socket).unwrap();
            let stats = status.sessions.first().and_then(|session| session.stats);
            stats.is_some_and(|stats| stats.oldest_pending_ns > 200_000_000)
        };
        wait_until("no fault waits for room", waits);
        group.set_limit(group.none);
        assert!(end_of(&mut machine).success(), "{image}: {:?}", server.events);
        let (_, events) = server.stop_after(1, 0..=0);
        let failed = |event: &ServeEvent| matches!(event, ServeEvent::Failed { .. });
        assert!(!events.iter().any(failed), "{events:?}");
    }
}
