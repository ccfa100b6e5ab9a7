//! `uzone diff`: an image of what a machine has changed, made while a page server serves it.

use std::path::PathBuf;
use std::time::Instant;

use serde::Serialize;
use uzone_pages::ByteLen;
use uzone_report::human_duration;
use uzone_server::{CapturedPages, SessionMemory};
use uzone_snapshot::{Image, Packer, Source};

use crate::exit::{self, Exit, Failure};
use crate::image::{Requests, Threads, Work, is_same};
use crate::output::{Output, Report, Style};
use crate::progress::Progress;
use crate::serve::default_socket;

const EXITS: [Exit; 8] = [
    Exit::Ok,
    Exit::Usage,
    Exit::Data,
    Exit::Input,
    Exit::Os,
    Exit::Io,
    Exit::Again,
    Exit::Permission,
];

/// Pack what a machine has changed in its memory, against the image that it is served from
///
/// Pause the machine first, and save the state of its devices. The pages that it has are copied, which a line
/// reports: then it may go on. Afterwards they are compared with the image, and packed against it; of a raw
/// image, all of the memory is packed. `uzone status` has the numbers of sessions.
#[derive(Debug, clap::Args)]
#[command(after_help = exit::help("uzone diff 1 vm.image changed.image --socket /run/vm.sock", &EXITS))]
pub(crate) struct Args {
    /// The number of the session
    session: u64,
    /// The image that it is served from
    image: PathBuf,
    /// The image to write; one that is there is replaced as a whole
    output: PathBuf,
    /// Where monitors connect [default: uzone.sock in $XDG_RUNTIME_DIR, or else in this directory]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    #[command(flatten)]
    requests: Requests,
    #[command(flatten)]
    threads: Threads,
}

#[derive(Debug, thiserror::Error)]
enum DiffError {
    #[error(
        "session {session} is served from another image than {}: from {serves}", image.display()
    )]
    OtherImage { session: u64, image: PathBuf, serves: String },
    #[error("{} is both the image and the output: name another output", path.display())]
    SameFile { path: PathBuf },
    #[error("cannot copy the memory of session {session}: {cause}")]
    Copy {
        session: u64,
        #[source]
        cause: std::io::Error,
    },
}

/// `uzone.diff/1`: a line for each step.
#[derive(Debug, Serialize)]
struct Line {
    schema: &'static str,
    #[serde(flatten)]
    step: Step,
}

#[derive(Debug, Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
enum Step {
    Copied {
        session: u64,
        copied_bytes: u64,
        paused_ns: u64,
    },
    Packed {
        image: String,
        root: String,
        image_bytes: u64,
        file_bytes: u64,
        zero_pages: u64,
        stored_frames: u64,
        #[serde(flatten)]
        work: Work,
    },
}

impl Report for Line {
    fn text(&self, _style: Style) -> String {
        match &self.step {
            Step::Copied { session, copied_bytes, paused_ns } => format!(
                "session {session}: {:.1} copied in {}; the machine may go on\n",
                ByteLen::new(*copied_bytes),
                human_duration(std::time::Duration::from_nanos(*paused_ns))
            ),
            Step::Packed { root, file_bytes, stored_frames, work, .. } => format!(
                "packed {stored_frames} frames into {:.1} in {}\nroot {root}\n",
                ByteLen::new(*file_bytes),
                work.text()
            ),
        }
    }
}

impl Line {
    fn new(step: Step) -> Self {
        Self { schema: "uzone.diff/1", step }
    }
}

/// Writes an image of what a machine has changed.
///
/// # Errors
/// If there is no such session, it runs from another image, or the image cannot be written.
pub(crate) fn run(args: &Args, out: &Output) -> Result<Exit, Failure> {
    if is_same(&args.image, &args.output) {
        let path = args.output.clone();
        return Err(Failure::with(Exit::Usage, DiffError::SameFile { path }));
    }
    // What takes long comes before the memory is looked at: the machine is paused.
    let below = Image::open_or_raw(&args.image, &args.requests.open())?;
    let socket = args.socket.clone().unwrap_or_else(default_socket);
    let (session, started) = (args.session, Instant::now());
    let memory = SessionMemory::open(&socket, session)?;
    if memory.image() != below.identity() {
        let (image, serves) = (args.image.clone(), memory.image().to_owned());
        return Err(Failure::with(Exit::Data, DiffError::OtherImage { session, image, serves }));
    }
    let copied = memory.capture(args.threads.get());
    let copied =
        copied.map_err(|cause| Failure::with(Exit::Os, DiffError::Copy { session, cause }))?;
    let paused_ns = u64::try_from(started.elapsed().as_nanos()).unwrap_or(u64::MAX);
    let copied_bytes = copied.copied().get();
    out.event(&Line::new(Step::Copied { session, copied_bytes, paused_ns }));
    out.event(&Line::new(pack(args, &below, &copied, out)?));
    Ok(Exit::Ok)
}

fn pack(args: &Args, below: &Image, copied: &CapturedPages, out: &Output) -> Result<Step, Failure> {
    let mut packer = Packer::default().threads(args.threads.get());
    if !below.is_raw() {
        packer = packer
            .page(ByteLen::new(below.page_bytes()))
            .frame(ByteLen::new(below.frame_bytes()))
            .regions(below.regions().to_vec())
            .working_set(below.working_set().to_vec());
    }
    let parent = Some(below).filter(|image| !image.is_raw());
    let memory = copied.over(below);
    let bar = Progress::bytes(out, "packing", memory.byte_len());
    let started = Instant::now();
    let packed = packer.pack_source(&memory, &args.output, parent, &|done| {
        bar.set(done);
        true
    })?;
    drop(bar);
    Ok(Step::Packed {
        image: args.output.display().to_string(),
        root: packed.root.to_string(),
        image_bytes: packed.image_bytes,
        file_bytes: packed.file_bytes,
        zero_pages: packed.zero_pages,
        stored_frames: packed.stored_frames,
        work: Work::of(packed.image_bytes, started),
    })
}
