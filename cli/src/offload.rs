//! `uzone offload`: restores a VM of Cloud Hypervisor from an image of its memory, page by page.

use std::fs;
use std::io;
use std::path::PathBuf;
use std::time::Instant;

use serde::Serialize;
use uzone_pages::ByteLen;
use uzone_report::{human_duration, nanoseconds};
use uzone_server::{Offload, Offloaded, ServeError};
use uzone_snapshot::Image;

use crate::exit::{self, Exit, Failure};
use crate::image::Required;
use crate::output::{Output, Report, Style};

const EXITS: [u8; 7] = [0, 2, 65, 66, 71, 74, 77];

/// Restore a VM of Cloud Hypervisor from an image of its memory, page by page
///
/// Let Cloud Hypervisor receive a VM at the socket first: `ch-remote receive-migration
/// receiver_url=unix:SOCKET,memory_mode=postcopy`. The folder has the files that its offload daemon saves beside the
/// memory: migration_config.json and state.json. The image has the slots of the memory (memory-0, memory-1, ...) in the
/// order of their guest addresses. The command ends when the VM needs no more pages.
#[derive(Debug, clap::Args)]
#[command(after_help = exit::help("uzone offload --socket /run/ch.sock --state /var/vm vm.image --resume", &EXITS))]
pub(crate) struct Args {
    /// The image: packed, or the raw bytes of memory
    image: PathBuf,
    /// The socket at which Cloud Hypervisor listens
    #[arg(long, value_name = "PATH")]
    socket: PathBuf,
    /// The folder of the VM's configuration and state
    #[arg(long, value_name = "DIR")]
    state: PathBuf,
    /// Let the VM run when it is restored; without it, the VM stays paused
    #[arg(long)]
    resume: bool,
    #[command(flatten)]
    required: Required,
    /// Do not confine this process while it answers faults, for a debugger: by default it has no capability, and only the
    /// files and system calls that it needs
    #[arg(long)]
    no_sandbox: bool,
}

#[derive(Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub(crate) struct OffloadReport {
    faults: u64,
    asked_bytes: u64,
    around_bytes: u64,
    served_ns: u64,
}

impl Report for OffloadReport {
    const SCHEMA: &'static str = "uzone.offload/1";

    fn text(&self, _style: Style) -> String {
        format!(
            "restored by {} faults in {}: {:.1} were asked for, and {:.1} came along\n",
            self.faults,
            human_duration(std::time::Duration::from_nanos(self.served_ns)),
            ByteLen::new(self.asked_bytes),
            ByteLen::new(self.around_bytes)
        )
    }
}

/// Restores a VM.
pub(crate) fn run(args: &Args, out: &Output) -> Result<Exit, Failure> {
    // A confined process has no use for the caller's descriptors.
    uzone_os::close_inherited();
    let read = |name| {
        let path = args.state.join(name);
        let failed = |cause: &io::Error| format!("cannot read {}: {cause}", path.display());
        fs::read(&path).map_err(|cause| Failure::of(failed(&cause), cause))
    };
    let (config, state) = (read("migration_config.json")?, read("state.json")?);
    let bytes = Image::open_or_raw(&args.image, &args.required.options())?;
    let offload = Offload::new(bytes, config, state)?.sandbox(!args.no_sandbox);
    let started = Instant::now();
    out.log(format_args!("restoring a VM at {}", args.socket.display()));
    let done: Result<_, ServeError> = offload.restore(&args.socket, args.resume);
    let Offloaded { faults, asked_bytes, around_bytes, .. } = done?;
    let served_ns = nanoseconds(started.elapsed());
    out.print(&OffloadReport { faults, asked_bytes, around_bytes, served_ns })
}
