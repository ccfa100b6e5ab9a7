//! The page server: another process serves the image, this one attaches to it twice, and the process that
//! answers is killed in between.

use std::error::Error;
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use uzone_attach::{AttachOptions, AttachedMemory};
use uzone_os::signals::Held;
use uzone_pages::ByteLen;

use super::image::{CHUNK, Image};
use super::plan::Plan;
use super::steps::{self, Steps};
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
    /// Starts it. Ctrl-C ends it as well.
    fn start(image: &Image, directory: &Path) -> io::Result<Self> {
        let pid = std::process::id();
        let socket = directory.join(format!("uzone-demo-{pid}.sock"));
        let mut command = Command::new("/proc/self/exe");
        command
            .args(["serve", "--quiet", "--no-sandbox", "--on-failure", "poison", "--socket"])
            .arg(&socket);
        // The file has no name but this, which a confined process of root's may not use.
        command.arg(format!("/proc/{pid}/fd/{}", image.file.as_raw_fd()));
        command.stdin(Stdio::null()).stdout(Stdio::null());
        Ok(Self { child: command.spawn()?, socket })
    }

    /// Waits until it answers.
    fn wait(&mut self) -> io::Result<()> {
        let give_up = Instant::now() + PATIENCE;
        while uzone_server::status(&self.socket).is_err() {
            if let Some(status) = self.child.try_wait()? {
                return Err(io::Error::other(format!("the server has ended: {status}")));
            }
            if Instant::now() > give_up {
                return Err(io::ErrorKind::TimedOut.into());
            }
            thread::sleep(LOOK);
        }
        Ok(())
    }

    /// Attaches to it twice. It accepts no other from then on, and ends with the second: also if this process
    /// does not get to ending it.
    fn attach(&mut self) -> Result<Attached, Box<dyn Error>> {
        self.wait()?;
        let options = AttachOptions::default().share(true);
        let attach = || AttachedMemory::attach(&self.socket, &options);
        let memories = [attach()?, attach()?];
        let worker = uzone_server::drain(&self.socket)?.worker;
        let worker = worker.and_then(|worker| Pid::from_raw(worker.cast_signed()));
        Ok(Attached { memories, worker: worker.ok_or("the server has no worker")? })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let keeper = Pid::from_child(&self.child);
        // Unless it serves already, it ends by this.
        let _ = kill_process(keeper, Signal::TERM);
        let started = Instant::now();
        while matches!(self.child.try_wait(), Ok(None)) {
            if started.elapsed() > 2 * PATIENCE {
                let _ = self.child.kill();
            } else if started.elapsed() > PATIENCE {
                // The second time it leaves its sessions alone: there are none.
                let _ = kill_process(keeper, Signal::TERM);
            }
            thread::sleep(LOOK);
        }
    }
}

/// Two mappings of the image, and the process that answers their faults.
struct Attached {
    memories: [AttachedMemory; 2],
    worker: Pid,
}

/// Has the first part of the image served by another process, and compares every byte of it. Returns whether
/// all are right. A host that cannot do it is named in the step, and is no failure.
pub(super) fn run(
    plan: &Plan,
    image: &Image,
    steps: &mut Steps,
    out: &Output,
) -> Result<bool, Failure> {
    let started = Instant::now();
    let server = Server::start(image, &plan.directory).map_err(Box::<dyn Error>::from);
    // The socket is gone before a signal ends this process. The other one starts with none held.
    let _held = Held::hold();
    let attached = server.and_then(|mut server| Ok((server.attach()?, server)));
    let (attached, server) = match attached {
        Ok(attached) => attached,
        Err(reason) => {
            steps.done("serve", started, format!("left out: {reason}"));
            return Ok(true);
        }
    };
    let wrong = compare(&attached, plan.part, image, out)?;
    drop(attached);
    drop(server);
    let what = match wrong {
        None => format!(
            "{} by another process, killed in between; two mappings share it, and are right",
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

/// Compares two mappings with the image, each in a thread. Returns where the first wrong chunk starts.
fn compare(
    attached: &Attached,
    part: ByteLen,
    image: &Image,
    out: &Output,
) -> Result<Option<u64>, Failure> {
    let progress = Progress::new(out, "comparing what a page server serves", part.get() / CHUNK);
    let check = |memory: &AttachedMemory, is_first: bool| {
        image.first_difference(part, |offset, bytes| {
            let read = memory.mapping().read_at(offset, bytes);
            read.map_err(|cause| steps::no_page(&format!("{:?}", memory.served_by()), cause))?;
            if is_first {
                progress.set(offset / CHUNK + 1);
            }
            Ok(())
        })
    };
    thread::scope(|scope| {
        let [first, other] = &attached.memories;
        let other = scope.spawn(|| check(other, false));
        let killed = kill_process(attached.worker, Signal::KILL);
        let first = check(first, true);
        let other = other.join().unwrap_or(Ok(Some(0)));
        if let Err(cause) = killed {
            out.warn(format_args!("the process that answers faults was not killed: {cause}"));
        }
        Ok(first?.into_iter().chain(other?).min())
    })
}
