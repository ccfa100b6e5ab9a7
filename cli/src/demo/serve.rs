//! The page server: another process serves the image, this one attaches to it twice, and the process that
//! answers is killed in between.

use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use uzone_attach::{AttachError, AttachOptions, AttachedMemory};
use uzone_pages::ByteLen;

use super::image::{CHUNK, Image};
use super::{DemoError, Plan, Steps};
use crate::exit::Failure;
use crate::output::Output;
use crate::progress::Progress;

/// How long the server may take to start, and to end.
const PATIENCE: Duration = Duration::from_secs(10);
/// How often it is looked at.
const LOOK: Duration = Duration::from_millis(2);

/// This command as a page server, which ends with this value.
struct Server {
    child: Child,
    socket: PathBuf,
}

impl Server {
    /// Starts it, and waits until it answers.
    fn start(image: &Image, directory: &Path) -> io::Result<Self> {
        let pid = std::process::id();
        let socket = directory.join(format!("uzone-demo-{pid}.sock"));
        let mut command = Command::new("/proc/self/exe");
        command.args(["serve", "--quiet", "--prefetch", "none", "--socket"]).arg(&socket);
        // The file has no name but this.
        command.arg(format!("/proc/{pid}/fd/{}", image.file.as_raw_fd()));
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn()?;
        let mut server = Self { child, socket };
        let give_up = Instant::now() + PATIENCE;
        while uzone_server::status(&server.socket).is_err() {
            if let Some(status) = server.child.try_wait()? {
                return Err(io::Error::other(format!("the server has ended: {status}")));
            }
            if Instant::now() > give_up {
                return Err(io::ErrorKind::TimedOut.into());
            }
            thread::sleep(LOOK);
        }
        Ok(server)
    }

    /// Kills the process that answers faults. The next one takes its place.
    fn kill_worker(&self) -> io::Result<()> {
        let status = uzone_server::status(&self.socket).map_err(io::Error::other)?;
        let worker = status.worker.and_then(|worker| Pid::from_raw(worker.cast_signed()));
        let worker = worker.ok_or_else(|| io::Error::other("the server has no worker"))?;
        Ok(kill_process(worker, Signal::KILL)?)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It ends with its last session. If it has not in time, its worker would take its place: both go.
        let _ = kill_process(Pid::from_child(&self.child), Signal::TERM);
        let give_up = Instant::now() + PATIENCE;
        while matches!(self.child.try_wait(), Ok(None)) {
            if Instant::now() > give_up {
                let _ = kill_process(Pid::from_child(&self.child), Signal::STOP);
                let _ = self.kill_worker();
                let _ = self.child.kill();
            }
            thread::sleep(LOOK);
        }
    }
}

/// Has the first part of the image served by another process, and compares every byte of it. Returns whether
/// all are right. A host that cannot do it is named in the step, and is no failure.
///
/// # Errors
/// If a page cannot be had.
pub(super) fn run(
    plan: &Plan,
    image: &Image,
    steps: &mut Steps,
    out: &Output,
) -> Result<bool, Failure> {
    let started = Instant::now();
    let attached = Server::start(image, &plan.directory)
        .map_err(|cause| cause.to_string())
        .and_then(|server| {
            let memories = attach(&server.socket).map_err(|error| error.to_string())?;
            Ok((server, memories))
        });
    let (server, memories) = match attached {
        Ok(attached) => attached,
        Err(reason) => {
            steps.done("serve", started, format!("left out: {reason}"));
            return Ok(true);
        }
    };
    let wrong = compare(&server, &memories, plan.part, image, out)?;
    drop(memories);
    drop(server);
    let what = match wrong {
        None => format!(
            "by another process, to two mappings that share {}; it was killed in between, and every \
             byte is right",
            plan.part
        ),
        Some(offset) => {
            format!(
                "by another process: bytes DIFFER, in the {} from {offset:#x} on",
                ByteLen::new(CHUNK)
            )
        }
    };
    steps.done("serve", started, what);
    Ok(wrong.is_none())
}

fn attach(socket: &Path) -> Result<[AttachedMemory; 2], AttachError> {
    let options = AttachOptions::default().share(true);
    Ok([AttachedMemory::attach(socket, &options)?, AttachedMemory::attach(socket, &options)?])
}

/// Compares two mappings with the image, each in a thread. Returns where the first wrong chunk starts.
fn compare(
    server: &Server,
    memories: &[AttachedMemory; 2],
    part: ByteLen,
    image: &Image,
    out: &Output,
) -> Result<Option<u64>, Failure> {
    let progress = Progress::new(out, "comparing what a page server serves", part.get() / CHUNK);
    let check = |memory: &AttachedMemory, is_first: bool| -> Result<Option<u64>, DemoError> {
        let mut bytes = vec![0; usize::try_from(CHUNK).unwrap_or(0)];
        let mut wrong = None;
        for offset in (0..part.get()).step_by(bytes.len()) {
            let left = usize::try_from(part.get() - offset).unwrap_or(usize::MAX).min(bytes.len());
            let part_of = &mut bytes[..left];
            memory.mapping().read_at(offset, part_of).map_err(|cause| {
                let reason = format!("{:?}", memory.served_by());
                DemoError::Page { reason, cause }
            })?;
            if !image.has(offset, &blake3::hash(part_of).to_hex()) {
                wrong.get_or_insert(offset);
            }
            if is_first {
                progress.set(offset / CHUNK + 1);
            }
        }
        Ok(wrong)
    };
    thread::scope(|scope| {
        let other = scope.spawn(|| check(&memories[1], false));
        let killed = server.kill_worker();
        let first = check(&memories[0], true);
        let other = other.join().unwrap_or(Ok(Some(0)));
        if let Err(cause) = killed {
            out.warn(format_args!("the process that answers faults was not killed: {cause}"));
        }
        let (first, other) =
            (first.map_err(DemoError::failure)?, other.map_err(DemoError::failure)?);
        Ok(first.into_iter().chain(other).min())
    })
}
