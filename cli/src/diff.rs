//! `uzone diff`: an image of what a machine has changed, made while a page server serves it.

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

/// Pack what a machine has changed in its memory, against the image that it is served from
///
/// Pause the machine first, and save the state of its devices. Its memory is protected against writing, which a
/// line reports: then it may go on. Each page that it writes to from then on is kept first as it was. The pages
/// that it had are compared with the image, and packed against it; of a raw image, all of the memory is packed.
/// `uzone status` has the numbers of sessions.
///
/// A machine that gives memory back meanwhile waits until all of its pages have been copied. Of a program that
/// attached with tracking of its writes, the pages that were written to are copied while it is paused.
#[derive(Debug, clap::Args)]
#[command(after_help = exit::help("uzone diff 1 -o changed.image --socket /run/vm.sock", &EXITS))]
pub(crate) struct Args {
    /// The number of the session
    #[arg(value_parser = session)]
    session: u64,
    /// The image that it is served from [default: as the server names it]
    image: Option<PathBuf>,
    /// The image to write; one that is there is replaced as a whole
    #[arg(short, long, value_name = "IMAGE")]
    pub(crate) output: PathBuf,
    /// Copy the pages while the machine is paused, in place of protecting them
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
    text.parse().map_err(|_| "a session is a number, such as `uzone status` shows it")
}

/// `uzone.diff/1`: a line for each step.
#[derive(Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(tag = "event", rename_all = "snake_case")]
pub(crate) enum Step {
    /// The machine may go on: its pages are kept before they are written to.
    Protected { session: u64, present_bytes: u64, paused_ns: u64 },
    /// The machine may go on: its pages are copied.
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
                "packed {written_frames} frames into {:.1} in {}; the machine wrote to {kept_pages} pages \
                 meanwhile\nroot {root}\n",
                ByteLen::new(*file_bytes),
                work.text()
            ),
        }
    }
}

fn may_go_on(session: u64, bytes: u64, what: &str, paused_ns: u64) -> String {
    let (bytes, time) = (ByteLen::new(bytes), human_duration(Duration::from_nanos(paused_ns)));
    format!("session {session}: {bytes:.1} {what} in {time}; the machine may go on\n")
}

/// Writes an image of what a machine has changed.
pub(crate) fn run(args: &Args, out: &Output) -> Result<Exit, Failure> {
    let socket = args.at.path();
    let image = match &args.image {
        Some(image) => image.clone(),
        None => PathBuf::from(args.at.of(uzone_server::status(&socket))?.image),
    };
    // What takes long comes before the memory is looked at: the machine is paused.
    let below = Image::open_or_raw(&image, &args.requests.open())?;
    check_output(&below, &args.output)?;
    if !below.is_raw() && is_url(&image) != is_url(&args.output) {
        return Err(Failure::usage(format!(
            "{} and {} are not both files, nor objects of one store: name an output where the image is",
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
            format!("session {session} is served from another image than {image}: from {serves}"),
        ));
    }
    let protected = match args.paused || memory.is_tracked() {
        true => Err(Box::new(memory)),
        false => memory.protect().map_err(|(memory, reason)| {
            out.warn(format_args!(
                "the server does not keep the machine's pages before they are written to: {reason}; its pages are \
                 copied while it is paused"
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

const CHANGED: &str = "the raw memory that the machine is served from was changed meanwhile";

/// Reads to the end, which fails if raw memory was changed until then: what was read of it may be of both.
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
        // A page that cannot be read now is reported when its turn comes.
        let frame = pages.frame_bytes(below).unwrap_or(below.frame_bytes());
        packer = packer
            .page(ByteLen::new(below.page_bytes()))
            .frame(ByteLen::new(frame))
            .regions(below.regions().to_vec())
            .working_set(below.working_set().to_vec());
    }
    let parent = Some(below).filter(|image| !image.is_raw());
    let bar = Progress::bytes(out, "packing", below.byte_len());
    let started = Instant::now();
    let mut pages_over = WhileUnchanged { from: pages.over(below), below };
    let packed = packer.pack(&mut pages_over, &args.output, parent, &|done| {
        bar.set(done);
        true
    });
    drop(bar);
    // If it was lost, that is why the input failed.
    let kept = pages.finish();
    let lost = |cause: io::Error| {
        let text = format!(
            "the memory of session {} was not read as it was when the machine was paused ({cause}); nothing was \
             written: pause the machine and try again, with --paused if this recurs",
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
