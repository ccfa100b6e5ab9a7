//! `uzone inspect`: the contents of an image and its parents.

use std::path::{Path, PathBuf};

use serde::Serialize;
use uzone_pages::ByteLen;
use uzone_report::{Document, ImageMap, ImagePart};
use uzone_snapshot::{Image, ImageRegion};

use super::{EXITS, Required, chain, is_same, ratio};
use crate::exit::{self, Exit, Failure};
use crate::output::{Output, Report, Style};

/// Show the contents of an image, and its parents
///
/// With --report, an HTML page shows the places of zero, stored and shared pages.
#[derive(Debug, clap::Args)]
#[command(after_help = exit::help("uzone inspect memory.img", &EXITS))]
pub(crate) struct Args {
    /// The image: a file, or a URL such as s3://BUCKET/KEY#root=HASH
    image: PathBuf,
    /// Write an HTML page with a map of the pages too
    #[arg(long, value_name = "HTML")]
    pub(crate) report: Option<PathBuf>,
    #[command(flatten)]
    required: Required,
}

/// One image of a chain.
#[derive(Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
struct Shown {
    image: String,
    root: String,
    codec: &'static str,
    image_bytes: u64,
    file_bytes: u64,
    page_bytes: u64,
    frame_bytes: u64,
    frames: u64,
    zero_frames: u64,
    stored_frames: u64,
    parent_frames: u64,
    zero_pages: u64,
    working_set_pages: usize,
}

impl Shown {
    fn of(image: &Image) -> Self {
        let counts = image.frame_counts();
        Self {
            image: image.name(),
            root: image.root().to_string(),
            codec: image.codec().name(),
            image_bytes: image.byte_len(),
            file_bytes: image.file_len(),
            page_bytes: image.page_bytes(),
            frame_bytes: image.frame_bytes(),
            frames: counts.frames,
            zero_frames: counts.zero,
            stored_frames: counts.stored,
            parent_frames: counts.parent,
            zero_pages: image.zero_pages(),
            working_set_pages: image.working_set().len(),
        }
    }

    fn text(&self) -> String {
        let pages = self.image_bytes.div_ceil(self.page_bytes).max(1);
        let set = match self.working_set_pages {
            0 => "none".to_owned(),
            pages => format!("{pages} pages"),
        };
        format!(
            "{}\n  root         {}\n  size         {:.1}, {:.1} in the file ({} times smaller)\n  \
             frames       {} of {}: {} stored ({}), {} zero, {} in the parent\n  \
             zero pages   {} of {} ({} %)\n  working set  {set}\n",
            self.image,
            self.root,
            ByteLen::new(self.image_bytes),
            ByteLen::new(self.file_bytes),
            ratio(self.image_bytes, self.file_bytes),
            self.frames,
            ByteLen::new(self.frame_bytes),
            self.stored_frames,
            self.codec,
            self.zero_frames,
            self.parent_frames,
            self.zero_pages,
            pages,
            self.zero_pages * 100 / pages,
        )
    }
}

/// A region of guest memory.
#[derive(Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
struct Region {
    guest_addr: u64,
    offset_bytes: u64,
    len_bytes: u64,
    page_bytes: u64,
}

#[derive(Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub(crate) struct InspectReport {
    /// The image, its parent, and so on.
    chain: Vec<Shown>,
    regions: Vec<Region>,
}

impl Report for InspectReport {
    const SCHEMA: &'static str = "uzone.inspect/1";

    fn text(&self, _style: Style) -> String {
        let mut text = String::new();
        for (number, shown) in self.chain.iter().enumerate() {
            text.push_str(if number == 0 { "" } else { "parent: " });
            text.push_str(&shown.text());
        }
        for region in &self.regions {
            let (start, len) = (region.guest_addr, ByteLen::new(region.len_bytes));
            let line = format!(
                "region at {start:#x}: {len} from byte {:#x} of the image on, in pages of {}\n",
                region.offset_bytes,
                ByteLen::new(region.page_bytes)
            );
            text.push_str(&line);
        }
        text
    }
}

/// The number of columns of a map.
const COLUMNS: usize = 128;

/// Writes a page with a map of each image of a chain.
fn write_map(page: &Path, image: &Image, out: &Output) -> Result<(), Failure> {
    if chain(image).any(|image| is_same(Path::new(&image.name()), page)) {
        return Err(Failure::usage(format!(
            "{} is the image: name another --report",
            page.display()
        )));
    }
    let maps: Vec<Document> = chain(image).map(|image| Document::Image(map_of(image))).collect();
    out.write_page(page, &maps)
}

/// Returns the map of an image.
fn map_of(image: &Image) -> ImageMap {
    let parts = image.page_counts(COLUMNS).into_iter().map(|part| ImagePart {
        len_bytes: part.len_bytes,
        zero: part.zero,
        stored: part.stored,
        shared: part.parent,
        working_set: part.working_set,
    });
    let shown = Shown::of(image);
    let notes = vec![
        format!(
            "{:.1} in pages of {}, {:.1} in the file ({} times smaller)",
            ByteLen::new(shown.image_bytes),
            ByteLen::new(shown.page_bytes),
            ByteLen::new(shown.file_bytes),
            ratio(shown.image_bytes, shown.file_bytes)
        ),
        format!("Root {}", shown.root),
    ];
    ImageMap { name: shown.image, notes, parts: parts.collect() }
}

/// Shows an image.
pub(crate) fn run(args: &Args, out: &Output) -> Result<Exit, Failure> {
    let image = Image::open(&args.image, &args.required.options())?;
    if let Some(page) = &args.report {
        write_map(page, &image, out)?;
    }
    let region = |region: &ImageRegion| Region {
        guest_addr: region.guest_addr,
        offset_bytes: region.offset,
        len_bytes: region.len_bytes,
        page_bytes: region.page_bytes,
    };
    out.print(&InspectReport {
        chain: chain(&image).map(Shown::of).collect(),
        regions: image.regions().iter().map(region).collect(),
    })
}
