//! `uzone verify`: compares every frame of an image with its hash.

use std::time::Instant;

use serde::Serialize;
use uzone_pages::ByteLen;

use super::{EXITS, Whole, Work, chain};
use crate::exit::{self, Exit, Failure};
use crate::output::{Output, Report, Style};
use crate::progress::Progress;

/// Check every frame of an image and of its parents
///
/// It exits with 65 at the first damaged frame, and prints its offset in the file. Hashes detect damage; only --root
/// detects a forged image.
#[derive(Debug, clap::Args)]
#[command(after_help = exit::help("uzone verify memory.img", &EXITS))]
pub(crate) struct Args {
    #[command(flatten)]
    whole: Whole,
    /// Decode each frame too, which also checks the compressor
    #[arg(long)]
    decode: bool,
}

#[derive(Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub(crate) struct VerifyReport {
    root: String,
    /// Whether the root hash was required, so that the bytes are authentic.
    root_was_required: bool,
    images: usize,
    frames: u64,
    file_bytes: u64,
    #[serde(flatten)]
    work: Work,
}

impl Report for VerifyReport {
    const SCHEMA: &'static str = "uzone.verify/1";

    fn text(&self, _style: Style) -> String {
        let authentic = if self.root_was_required {
            "as required"
        } else {
            "not required: damage is detected, forgery is not"
        };
        format!(
            "{} stored frames of {} are right ({:.1} in {})\nroot {} ({authentic})\n",
            self.frames,
            if self.images == 1 {
                "the image".to_owned()
            } else {
                format!("{} images", self.images)
            },
            ByteLen::new(self.file_bytes),
            self.work.text(),
            self.root,
        )
    }
}

/// Verifies an image and its parents.
pub(crate) fn run(args: &Args, out: &Output) -> Result<Exit, Failure> {
    let image = args.whole.open()?;
    let started = Instant::now();
    let (mut images, mut frames, mut file_bytes) = (0, 0, 0);
    for image in chain(&image) {
        let bar = Progress::new(out, "verifying", image.file_len());
        frames += image.verify(args.whole.threads.get(), args.decode, &|done| bar.set(done))?;
        images += 1;
        file_bytes += image.file_len();
    }
    out.print(&VerifyReport {
        root: image.root().to_string(),
        root_was_required: image.root_was_required(),
        images,
        frames,
        file_bytes,
        work: Work::of(file_bytes, started),
    })
}
