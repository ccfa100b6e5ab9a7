//! `uzone pack`: packs memory into an image.

use std::fs::{File, Metadata};
use std::io::{self, Read};
use std::iter;
use std::path::{Path, PathBuf};
use std::time::Instant;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use serde::Serialize;
use uzone_pages::ByteLen;
use uzone_snapshot::{
    Codec, FileSource, Image, ImageRegion, Layers, Packer, SnapshotError, Source, is_url,
    open_source,
};

use super::{EXITS, Requests, Threads, Work, beside, check_output, is_same, smaller};
use crate::exit::{self, Exit, Failure};
use crate::output::{Output, Report, Style};
use crate::progress::Progress;

/// Pack memory into an image: compressed, verified, and readable at any page
///
/// The input is the bytes of memory, such as the memory file of a VM; `-` is standard input. With zstd and without a
/// parent, `zstd -d` decompresses the image to the same bytes. The image appears when it is complete; until then it has
/// no name.
///
/// The input and the image may be objects: s3://BUCKET/KEY, gs://BUCKET/KEY, az://CONTAINER/KEY, and for reading only
/// http://HOST/PATH and https://HOST/PATH. Credentials, regions and endpoints come from the environment (AWS_...,
/// GOOGLE_..., AZURE_...).
///
/// A Firecracker snapshot is the memory file of a full snapshot and the memory files of diffs, the oldest first. The
/// holes of a diff's file are the pages that it lacks. That holds for the file that Firecracker wrote, and not for a
/// copy that has other holes. Files on hugetlbfs, on a tmpfs with huge pages, and on file systems without holes are
/// refused. An object has no holes: the memory file may be an object, and a diff only with --all-data.
#[derive(Debug, clap::Args)]
#[command(allow_missing_positional = true)]
#[command(after_help = exit::help("uzone pack --firecracker vm.mem --diff vm.mem.1 vm.img", &EXITS))]
pub(crate) struct Args {
    /// The bytes to pack
    #[arg(required_unless_present = "firecracker", conflicts_with = "firecracker")]
    input: Option<PathBuf>,
    /// Output: a file, a URL, a pipe, or `-` for standard output; replaced atomically if it exists. A file has the mode of
    /// the input, or 600 if the input is a pipe or an object
    pub(crate) image: PathBuf,
    /// Pack the memory file of a Firecracker snapshot instead
    #[arg(long, value_name = "MEM")]
    firecracker: Option<PathBuf>,
    /// With --firecracker, the memory file of a diff; several, the oldest first
    #[arg(long, value_name = "MEM")]
    diff: Vec<PathBuf>,
    /// Take every byte of each diff, and holes for zeroes
    #[arg(long, requires = "diff")]
    all_data: bool,
    /// A region of guest memory: its guest address, its offset in the input and its length, such as 0x100000000:3G:1G;
    /// may be repeated [default: the whole input, at 0]
    #[arg(long, value_name = "ADDRESS:OFFSET:LENGTH", value_parser = region)]
    region: Vec<ImageRegion>,
    /// Compression of frames
    #[arg(long, default_value = "zstd", value_parser = codec())]
    codec: Codec,
    /// Compression level: up to 22 for zstd, 0 to 12 for lz4 [default: 3 for zstd, 0 for lz4]
    #[arg(long, allow_negative_numbers = true)]
    level: Option<i32>,
    /// Bytes that are compressed together: a power of two from a page to 16M [default: 64K]
    #[arg(long, value_name = "SIZE")]
    frame: Option<ByteLen>,
    /// Page size: a power of two from 4K to 2M [default: 4K]
    #[arg(long, value_name = "SIZE")]
    page: Option<ByteLen>,
    /// Store only pages that differ from this image, whose path must not change
    #[arg(long, value_name = "IMAGE")]
    parent: Option<PathBuf>,
    /// Store a working set: page numbers in access order, one per line
    #[arg(long, value_name = "FILE")]
    working_set: Option<PathBuf>,
    /// Pack these pages together, before all others: page numbers in access order, one per line. `zstd -d` then prints the
    /// pages in that order
    #[arg(long, value_name = "FILE", conflicts_with = "parent")]
    order: Option<PathBuf>,
    /// The input is an image: pack its bytes anew, together with its parents' bytes. Regions, working set and the sizes of
    /// pages and frames are kept
    #[arg(long, conflicts_with = "firecracker")]
    rebase: bool,
    /// Write only hashes of the input to IMAGE, which must be the name of the input with .hashes appended: then every
    /// command takes the input for an image that is verified and not compressed
    #[arg(long, conflicts_with_all = ["firecracker", "parent", "order", "rebase", "codec", "level"])]
    hashes_only: bool,
    /// Pack an image file as raw bytes, and replace a file that is no image
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    requests: Requests,
    #[command(flatten)]
    threads: Threads,
}

/// Reads the name of a codec.
fn codec() -> impl TypedValueParser<Value = Codec> {
    PossibleValuesParser::new(["zstd", "lz4", "none"]).map(|name| match name.as_str() {
        "lz4" => Codec::Lz4,
        "none" => Codec::None,
        _ => Codec::Zstd,
    })
}

/// Reads a part of guest memory, `ADDRESS:OFFSET:LENGTH`; the size of its pages is another argument.
fn region(text: &str) -> Result<ImageRegion, &'static str> {
    let number = |text: &str| match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => text.parse::<ByteLen>().ok().map(ByteLen::get),
    };
    let numbers: Vec<_> = text.split(':').map(number).collect();
    match numbers[..] {
        [Some(guest_addr), Some(offset), Some(len_bytes)] => {
            Ok(ImageRegion { guest_addr, offset, len_bytes, page_bytes: 0 })
        }
        _ => Err("a region is ADDRESS:OFFSET:LENGTH, such as 0x100000000:3G:1G"),
    }
}

#[derive(Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub(crate) struct PackReport {
    image: String,
    root: String,
    codec: &'static str,
    image_bytes: u64,
    file_bytes: u64,
    page_bytes: u64,
    frame_bytes: u64,
    zero_pages: u64,
    written_frames: u64,
    /// Whether the file has only hashes.
    #[serde(skip)]
    holds_hashes: bool,
    #[serde(flatten)]
    work: Work,
}

impl Report for PackReport {
    const SCHEMA: &'static str = "uzone.pack/1";

    fn text(&self, _style: Style) -> String {
        format!(
            "packed {:.1} into {:.1}{} in {}\nroot {}\n",
            ByteLen::new(self.image_bytes),
            ByteLen::new(self.file_bytes),
            smaller(self.image_bytes, self.file_bytes, self.holds_hashes),
            self.work.text(),
            self.root,
        )
    }
}

/// The input of a pack.
enum Input {
    /// A stream of unknown length.
    Stream(Box<dyn Read + Send>),
    /// Bytes that can be read at any offset.
    Source(Box<dyn Source>),
    /// The bytes of an image.
    Image(Box<Image>),
}

/// Packs an image.
pub(crate) fn run(args: &Args, out: &Output) -> Result<Exit, Failure> {
    args.fit_together()?;
    args.check_replaced()?;
    if !args.rebase {
        args.packer(None)?.0.check()?;
    }
    let parent = args.parent.as_ref().map(|path| Image::open(path, &args.requests.open()));
    let parent = parent.transpose()?;
    let mut input = args.open_input(out)?;
    let before = match &input {
        Input::Image(image) => Some(&**image),
        _ => None,
    };
    let (packer, page, frame) = args.packer(before)?;
    for image in parent.iter().chain(before) {
        check_output(image, &args.image)?;
    }
    let len = match &input {
        Input::Stream(_) => 0,
        Input::Source(source) => source.byte_len(),
        Input::Image(image) => image.byte_len(),
    };
    let bar = Progress::new(out, "packing", len);
    let started = Instant::now();
    let show = |done| {
        bar.set(done);
        true
    };
    let packed = match &mut input {
        Input::Stream(input) => packer.pack(input, &args.image, parent.as_ref(), &show)?,
        Input::Source(source) => {
            packer.pack_source(&**source, &args.image, parent.as_ref(), &show)?
        }
        Input::Image(image) => packer.pack_source(&**image, &args.image, parent.as_ref(), &show)?,
    };
    drop(bar);
    out.print(&PackReport {
        image: args.image.display().to_string(),
        root: packed.root.to_string(),
        codec: args.codec().name(),
        image_bytes: packed.image_bytes,
        file_bytes: packed.file_bytes,
        page_bytes: page,
        frame_bytes: frame,
        zero_pages: packed.zero_pages,
        written_frames: packed.stored_frames,
        holds_hashes: args.hashes_only,
        work: Work::of(packed.image_bytes, started),
    })
}

impl Args {
    fn codec(&self) -> Codec {
        if self.hashes_only { Codec::None } else { self.codec }
    }

    fn fit_together(&self) -> Result<(), Failure> {
        let mut inputs =
            self.input.iter().chain(&self.firecracker).chain(&self.diff).chain(&self.parent);
        if inputs.any(|input| is_same(input, &self.image)) {
            let image = self.image.display();
            let text = format!("{image} is both the input and the output: name another output");
            return Err(Failure::usage(text));
        }
        if self.input.is_some() && !self.diff.is_empty() {
            return Err(Failure::usage(
                "--diff applies to the memory file of --firecracker: give --firecracker in place of an input",
            ));
        }
        if self.hashes_only
            && let Some(input) = &self.input
            && self.image.as_os_str() != beside(input).as_os_str()
        {
            let expected = beside(input);
            let text = format!("hashes must be beside their memory: name {}", expected.display());
            return Err(Failure::usage(text));
        }
        let is_pipe = self.input.as_deref() == Some(Path::new("-"));
        if is_pipe && (self.order.is_some() || self.rebase) {
            return Err(Failure::usage(
                "--order and --rebase need an input that can be read at any offset: name a file",
            ));
        }
        Ok(())
    }

    /// Returns the packer, the page size and the frame size. An image that is packed anew keeps its sizes, regions and
    /// working set, unless others are given.
    fn packer(&self, before: Option<&Image>) -> Result<(Packer, u64, u64), Failure> {
        let page = self.page.map(ByteLen::get).or(before.map(Image::page_bytes));
        let frame = self.frame.map(ByteLen::get).or(before.map(Image::frame_bytes));
        let (page, frame) = (page.unwrap_or(4 << 10), frame.unwrap_or(64 << 10));
        let with_pages = |regions: &[ImageRegion]| {
            regions.iter().map(|region| ImageRegion { page_bytes: page, ..*region }).collect()
        };
        let regions = match before {
            Some(image) if self.region.is_empty() => image.regions().to_vec(),
            _ => with_pages(&self.region),
        };
        let working_set = match (&self.working_set, before) {
            (Some(path), _) => read_pages(path)?,
            (None, Some(image)) => image.working_set().to_vec(),
            (None, None) => Vec::new(),
        };
        let order = self.order.as_deref().map(read_pages).transpose()?;
        let codec = self.codec();
        let level = if codec == Codec::Zstd { 3 } else { 0 };
        let packer = Packer::default()
            .codec(codec)
            .hashes_only(self.hashes_only)
            .level(self.level.unwrap_or(level))
            .frame(ByteLen::new(frame))
            .page(ByteLen::new(page))
            .threads(self.threads.get())
            .regions(regions)
            .working_set(working_set)
            .order(order.unwrap_or_default());
        Ok((packer, page, frame))
    }

    /// Refuses to replace a file that is no image: it may be the memory to pack.
    fn check_replaced(&self) -> Result<(), Failure> {
        let is_full = |found: Metadata| found.is_file() && found.len() > 0;
        if self.force || is_url(&self.image) || !self.image.metadata().is_ok_and(is_full) {
            return Ok(());
        }
        let found = FileSource::open(&self.image).map_err(SnapshotError::unopened(&self.image))?;
        if Image::is_packed(&found)? {
            return Ok(());
        }
        let image = self.image.display();
        Err(Failure::usage(format!(
            "{image} exists and is no image: name another output, or replace it with --force"
        )))
    }

    /// Refuses an input that is an image.
    fn check_raw(&self, input: &dyn Source) -> Result<(), Failure> {
        if self.force || !Image::is_packed(input)? {
            return Ok(());
        }
        let name = input.name();
        Err(Failure::new(
            Exit::Data,
            format!(
                "{name} is an image already: pack its bytes anew with --rebase, or the file as it is with --force"
            ),
        ))
    }

    fn open_input(&self, out: &Output) -> Result<Input, Failure> {
        if let Some(memory) = &self.firecracker {
            for path in iter::once(memory).chain(&self.diff).filter(|path| !is_url(path)) {
                let source = FileSource::open(path).map_err(SnapshotError::unopened(path))?;
                self.check_raw(&source)?;
            }
            let layers = Layers::open(memory, &self.diff, self.all_data, &self.requests.options())?;
            if !self.diff.is_empty() && !self.all_data {
                out.warn(format_args!(
                    "holes of a diff's file are taken for pages that it lacks: a copy that lost or gained holes makes \
                     a wrong image"
                ));
            }
            return Ok(Input::Source(Box::new(layers)));
        }
        let path = self.input.as_deref().unwrap_or(Path::new("-"));
        if self.rebase {
            return Ok(Input::Image(Box::new(Image::open(path, &self.requests.open())?)));
        }
        if path == Path::new("-") {
            return Ok(Input::Stream(Box::new(io::stdin())));
        }
        let failed = SnapshotError::unopened(path);
        // Files of procfs report no length, and are read as streams.
        let is_source = |found: Metadata| found.is_file() && found.len() > 0;
        if self.order.is_none() && !is_url(path) && !is_source(path.metadata().map_err(failed)?) {
            let file = File::open(path).map_err(failed)?;
            if file.metadata().map_err(failed)?.is_dir() {
                return Err(failed(io::ErrorKind::IsADirectory.into()).into());
            }
            return Ok(Input::Stream(Box::new(file)));
        }
        let source = open_source(path, &self.requests.options()).map_err(failed)?;
        self.check_raw(&*source)?;
        Ok(Input::Source(source))
    }
}

/// Reads page numbers, one per line.
fn read_pages(path: &Path) -> Result<Vec<u64>, Failure> {
    let bytes = std::fs::read(path).map_err(SnapshotError::unopened(path))?;
    let text = String::from_utf8_lossy(&bytes);
    let pages = (1..).zip(text.lines()).map(|(line, text)| {
        let wrong = || format!("line {line} of {} is no page number", path.display());
        text.trim().parse().map_err(|_| Failure::new(Exit::Data, wrong()))
    });
    pages.collect()
}
