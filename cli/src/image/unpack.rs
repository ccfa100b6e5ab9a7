//! `uzone unpack`: writes the raw bytes of an image.

use std::path::PathBuf;
use std::time::Instant;

use serde::Serialize;
use uzone_pages::ByteLen;

use super::{EXITS, Whole, Work, check_output};
use crate::exit::{self, Exit, Failure};
use crate::output::{Output, Report, Style};
use crate::progress::Progress;

/// Write the raw bytes of an image to a file
///
/// Each frame is verified before its bytes are written. Zeroes become holes.
#[derive(Debug, clap::Args)]
#[command(after_help = exit::help("uzone unpack memory.img memory.raw", &EXITS))]
pub(crate) struct Args {
    #[command(flatten)]
    whole: Whole,
    /// Output: a file, a URL, a pipe, a device, or `-` for standard output; a file is replaced atomically if it exists, and
    /// has the mode of the image
    pub(crate) output: PathBuf,
}

#[derive(Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub(crate) struct UnpackReport {
    output: String,
    root: String,
    image_bytes: u64,
    #[serde(flatten)]
    work: Work,
}

impl Report for UnpackReport {
    const SCHEMA: &'static str = "uzone.unpack/1";

    fn text(&self, _style: Style) -> String {
        format!("unpacked {:.1} in {}\n", ByteLen::new(self.image_bytes), self.work.text())
    }
}

/// Unpacks an image.
pub(crate) fn run(args: &Args, out: &Output) -> Result<Exit, Failure> {
    let image = args.whole.open()?;
    check_output(&image, &args.output)?;
    let bar = Progress::new(out, "unpacking", image.byte_len());
    let started = Instant::now();
    image.unpack(&args.output, args.whole.threads.get(), &|done| {
        bar.set(done);
        true
    })?;
    drop(bar);
    out.print(&UnpackReport {
        output: args.output.display().to_string(),
        root: image.root().to_string(),
        image_bytes: image.byte_len(),
        work: Work::of(image.byte_len(), started),
    })
}
