//! A server as a process of its own, and clones that attach to it and share its pages: the row `attach`.
//!
//! The server is the command `uzone` beside this program. Its memory counts, and its CPU time does not.

use std::fs;
use std::io;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use uzone_attach::{AttachOptions, AttachedMemory};

use super::machine::Restore;
use crate::tables::snapshot::material::failed;
use uzone_harness::{Found, Result};

/// How long a server may take to listen.
const PATIENCE: Duration = Duration::from_secs(20);

/// A server of the packed image. Dropping it ends it.
pub(super) struct Server {
    child: Child,
    folder: PathBuf,
}

impl Server {
    pub(super) fn start(restore: &Restore<'_>) -> Result<Self> {
        let program = std::env::current_exe().map_err(failed)?;
        // The command is installed, and built, beside this program.
        let program = program.with_file_name("uzone");
        let material = restore.material;
        let folder = material.directory.join(format!("uzone-bench-attach-{}", std::process::id()));
        fs::create_dir(&folder).map_err(failed)?;
        let image = folder.join("image");
        let child = material.packed.try_clone().and_then(|mut packed| {
            io::Seek::rewind(&mut packed)?;
            io::copy(&mut packed, &mut fs::File::create(&image)?)?;
            let mut command = Command::new(program);
            command.arg("serve").arg(&image).arg("--socket").arg(folder.join("sock"));
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn()
        });
        match child {
            Ok(child) => Self { child, folder }.listening(),
            Err(cause) => {
                let _ = fs::remove_dir_all(folder);
                Err(failed(cause))
            }
        }
    }

    /// Waits until a worker can be asked.
    fn listening(mut self) -> Result<Self> {
        let give_up = Instant::now() + PATIENCE;
        while self.processes().len() < 2 {
            let has_ended = self.child.try_wait().map_err(failed)?.is_some();
            if has_ended || Instant::now() > give_up {
                return Err(failed(io::Error::other("the server does not listen")));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(self)
    }

    fn socket(&self) -> PathBuf {
        self.folder.join("sock")
    }

    /// Attaches a clone, which touches its pages.
    pub(super) fn clone(
        &self,
        row: &str,
        restore: &Restore<'_>,
        offsets: &[Vec<u64>],
    ) -> Result<(Found, AttachedMemory)> {
        let options = AttachOptions::default().share(true);
        let memory = AttachedMemory::attach(&self.socket(), &options);
        let memory = memory.map_err(|error| failed(io::Error::other(error)))?;
        let found = restore.touch(row, memory.mapping(), offsets)?;
        let status = uzone_server::status(&self.socket());
        let sessions = status.map_err(|error| failed(io::Error::other(error)))?.sessions;
        let latest = sessions.into_iter().max_by_key(|session| session.session);
        let stats = latest.and_then(|session| session.stats).unwrap_or_default();
        let placed = stats.demand_pages + stats.around_pages;
        let wasted = placed.saturating_sub(restore.pages.len() as u64);
        Ok((Found { faults: stats.faults, wasted, ..found }, memory))
    }

    /// Returns the processes of the server.
    pub(super) fn processes(&self) -> Vec<u32> {
        let worker = uzone_server::status(&self.socket()).ok().and_then(|status| status.worker);
        [Some(self.child.id()), worker].into_iter().flatten().collect()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let processes = self.processes();
        // No clone is left, so it ends at once.
        let asked = uzone_server::drain(&self.socket());
        let give_up = Instant::now() + PATIENCE;
        while asked.is_ok() && Instant::now() < give_up {
            if self.child.try_wait().is_ok_and(|ended| ended.is_some()) {
                let _ = fs::remove_dir_all(&self.folder);
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        // Also the worker, which takes the place of one that is killed.
        for process in processes.into_iter().filter_map(|process| i32::try_from(process).ok()) {
            let _ = Pid::from_raw(process).map(|process| kill_process(process, Signal::KILL));
        }
        let _ = self.child.wait();
        let _ = fs::remove_dir_all(&self.folder);
    }
}
