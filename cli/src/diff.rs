//! `uzone diff`: packs the changed pages of a running VM into an image.

use std::io::{self, Read};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde::Serialize;
use uzone_pages::ByteLen;
use uzone_report::{human_duration, nanoseconds};
use uzone_server::{CapturedPages, SessionMemory};
use uzone_snapshot::{Image, Packer, is_url};

use crate::exit::{self, Exit, Failure};
use crate::image::{Requests, Threads, Work, check_output};
use crate::output::{Output, Report, Style};
use crate::progress::Progress;
use crate::status::Socket;

const EXITS: [u8; 8] = [0, 2, 65, 66, 71, 74, 75, 77];

/// Write a diff of a running VM's memory against its base image
///
/// Pause the VM first, and save the state of its devices. The server protects the memory against writes and prints a
/// line: then the VM may go on. The server copies each page before the VM writes to it. The pages of the moment of the
/// pause are compared with the image, and packed against it; against a raw image, all of the memory is packed. `uzone
/// status` shows the numbers of sessions.
///
/// A VM that gives memory back meanwhile waits until all of its pages have been copied. If an attached program tracks
/// its writes, its written pages are copied while it is paused.
#[derive(Debug, clap::Args)]
#[command(after_help = exit::help("uzone diff 1 -o changed.image --socket /run/vm.sock", &EXITS))]
pub(crate) struct Args {
    /// The number of the session
    #[arg(value_parser = session)]
    session: u64,
    /// The base image [default: the image that the server serves]
    image: Option<PathBuf>,
    /// Output file; replaced atomically if it exists
    #[arg(short, long, value_name = "IMAGE")]
    pub(crate) output: PathBuf,
    /// Copy the pages while the VM is paused, in place of protecting them
    #[arg(long)]
    paused: bool,
    #[command(flatten)]
    at: Socket,
    #[command(flatten)]
    requests: Requests,
    #[command(flatten)]
    threads: Threads,
}

fn session(text: &str) -> Result<u64, &'static str> {
    text.parse().map_err(|_| "a session is a number that `uzone status` shows")
}

/// `uzone.diff/1`: a line for each step.
#[derive(Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(tag = "event", rename_all = "snake_case")]
pub(crate) enum Step {
    /// The VM may go on: the server copies each page before a write.
    Protected { session: u64, present_bytes: u64, paused_ns: u64 },
    /// The VM may go on: its pages are copied.
    Copied { session: u64, copied_bytes: u64, paused_ns: u64 },
    Packed {
        image: String,
        root: String,
        image_bytes: u64,
        file_bytes: u64,
        zero_pages: u64,
        written_frames: u64,
        kept_pages: u64,
        #[serde(flatten)]
        work: Work,
    },
}

impl Report for Step {
    const SCHEMA: &'static str = "uzone.diff/1";

    fn text(&self, _style: Style) -> String {
        match self {
            Step::Protected { session, present_bytes, paused_ns } => {
                may_go_on(*session, *present_bytes, "protected", *paused_ns)
            }
            Step::Copied { session, copied_bytes, paused_ns } => {
                may_go_on(*session, *copied_bytes, "copied", *paused_ns)
            }
            Step::Packed { root, file_bytes, written_frames, kept_pages, work, .. } => format!(
                "packed {written_frames} frames into {:.1} in {}; the VM wrote to {kept_pages} pages \
                 meanwhile\nroot {root}\n",
                ByteLen::new(*file_bytes),
                work.text()
            ),
        }
    }
}

fn may_go_on(session: u64, bytes: u64, done: &str, paused_ns: u64) -> String {
    let (bytes, time) = (ByteLen::new(bytes), human_duration(Duration::from_nanos(paused_ns)));
    format!("session {session}: {bytes:.1} {done} in {time}; the VM may go on\n")
}

/// Writes a diff of a VM's memory.
pub(crate) fn run(args: &Args, out: &Output) -> Result<Exit, Failure> {
    let socket = args.at.path();
    let image = match &args.image {
        Some(image) => image.clone(),
        None => PathBuf::from(args.at.of(uzone_server::status(&socket))?.image),
    };
    // Slow steps come first: the VM is paused while its memory is protected or copied.
    let below = Image::open_or_raw(&image, &args.requests.open())?;
    check_output(&below, &args.output)?;
    if !below.is_raw() && is_url(&image) != is_url(&args.output) {
        return Err(Failure::usage(format!(
            "{} and {} must both be files, or objects of one store: name another output",
            image.display(),
            args.output.display()
        )));
    }
    let (session, started) = (args.session, Instant::now());
    let memory = args.at.of(SessionMemory::open(&socket, session))?;
    if memory.image() != below.identity() {
        let (image, serves) = (image.display(), memory.image());
        return Err(Failure::new(
            Exit::Data,
            format!(
                "image mismatch: session {session} is served from {serves}, and not from {image}"
            ),
        ));
    }
    let protected = match args.paused || memory.is_tracked() {
        true => Err(Box::new(memory)),
        false => memory.protect().map_err(|(memory, reason)| {
            out.warn(format_args!(
                "cannot protect the pages of the VM: {reason}; copying them while the VM is paused"
            ));
            memory
        }),
    };
    let elapsed_ns = || nanoseconds(started.elapsed());
    let pages = match protected {
        Ok(pages) => {
            let (present_bytes, paused_ns) = (pages.present().get(), elapsed_ns());
            out.event(&Step::Protected { session, present_bytes, paused_ns });
            pages
        }
        Err(memory) => {
            let failed = |cause: io::Error| {
                let text = format!("cannot copy the memory of session {session}: {cause}");
                Failure::of(text, cause).with(Exit::Os)
            };
            let pages = memory.copy(args.threads.get()).map_err(failed)?;
            let (copied_bytes, paused_ns) = (pages.present().get(), elapsed_ns());
            out.event(&Step::Copied { session, copied_bytes, paused_ns });
            pages
        }
    };
    out.event(&pack(args, &below, &pages, out)?);
    Ok(Exit::Ok)
}

const CHANGED: &str = "the raw memory that the VM is served from was changed meanwhile";

/// A reader whose end is an error if raw memory was changed until then: the bytes may be a mixture of old and new.
struct WhileUnchanged<'a, R> {
    from: R,
    below: &'a Image,
}

impl<R: Read> Read for WhileUnchanged<'_, R> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        match self.from.read(out)? {
            0 if !out.is_empty() && !self.below.is_unchanged()? => Err(io::Error::other(CHANGED)),
            len => Ok(len),
        }
    }
}

fn pack(args: &Args, below: &Image, pages: &CapturedPages, out: &Output) -> Result<Step, Failure> {
    let mut packer = Packer::default().threads(args.threads.get());
    if !below.is_raw() {
        // An error of a page is reported when the page is packed.
        let frame = pages.frame_bytes(below).unwrap_or(below.frame_bytes());
        packer = packer
            .page(ByteLen::new(below.page_bytes()))
            .frame(ByteLen::new(frame))
            .regions(below.regions().to_vec())
            .working_set(below.working_set().to_vec());
    }
    let parent = Some(below).filter(|image| !image.is_raw());
    let bar = Progress::new(out, "packing", below.byte_len());
    let started = Instant::now();
    let mut pages_over = WhileUnchanged { from: pages.over(below), below };
    let packed = packer.pack(&mut pages_over, &args.output, parent, &|done| {
        bar.set(done);
        true
    });
    drop(bar);
    // A lost capture is the reason that the input failed.
    let kept = pages.finish();
    let lost = |cause: io::Error| {
        let text = format!(
            "lost the memory of session {} as of the pause ({cause}); nothing was written: pause the VM and try \
             again, with --paused if this recurs",
            args.session
        );
        Failure::of(text, cause).with(Exit::Again)
    };
    let kept_pages = kept.map_err(lost)?;
    if packed.is_err() && matches!(below.is_unchanged(), Ok(false)) {
        let text = format!("{CHANGED} ({}); nothing was written", below.name());
        return Err(Failure::new(Exit::Again, text));
    }
    let packed = packed?;
    Ok(Step::Packed {
        image: args.output.display().to_string(),
        root: packed.root.to_string(),
        image_bytes: packed.image_bytes,
        file_bytes: packed.file_bytes,
        zero_pages: packed.zero_pages,
        written_frames: packed.stored_frames,
        kept_pages,
        work: Work::of(packed.image_bytes, started),
    })
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Cursor;

    use uzone_snapshot::OpenOptions;

    use super::*;

    #[test]
    fn raw_memory_that_is_changed_while_it_is_read_is_no_image() {
        let path = std::env::temp_dir().join(format!("uzone-diff-raw-{}", std::process::id()));
        fs::write(&path, [7; 8192]).unwrap();
        let below = Image::open_or_raw(&path, &OpenOptions::default()).unwrap();
        let read = || {
            let mut from = WhileUnchanged { from: Cursor::new([1; 100]), below: &below };
            from.read_to_end(&mut Vec::new())
        };
        assert_eq!(read().unwrap(), 100);
        std::thread::sleep(Duration::from_millis(20)); // a file system counts its changes by the clock
        fs::write(&path, [8; 8192]).unwrap();
        assert!(read().unwrap_err().to_string().contains("changed"));
        fs::remove_file(&path).unwrap();
    }
}
