//! `uzone pack`, `unpack`, `inspect` and `verify`: images of memory.

use std::fs::File;
use std::io::{self, Read, Write as _};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::Serialize;
use uzone_pages::ByteLen;
use uzone_report::{Document, ImageMap, ImagePart, nanoseconds};
use uzone_snapshot::{
    Codec, DiskCache, HASHES, Image, ImageRegion, Layers, OpenOptions, Packer, RequestOptions,
    Root, SnapshotError, Source, is_url, open_source,
};

use crate::exit::{self, Exit, Failure};
use crate::output::{Output, Report, Style};
use crate::progress::Progress;

const EXITS: [u8; 8] = [0, 2, 65, 66, 69, 71, 74, 77];

/// Pack memory into an image: compressed, verified, and readable at any page
///
/// The input is the bytes of memory, such as the memory file of a virtual machine; `-` is standard input.
/// With zstd and without a parent, `zstd -d` makes the same bytes of the image. It appears when it is whole;
/// until then it has no name.
///
/// The input and the image may be objects: s3://BUCKET/KEY, gs://BUCKET/KEY, az://CONTAINER/KEY, and to read
/// alone http://HOST/PATH and https://HOST/PATH. Credentials, regions and endpoints come from the environment
/// (AWS_..., GOOGLE_..., AZURE_...).
///
/// A Firecracker snapshot is the memory file of a full snapshot and those of diffs, the oldest first. What a
/// diff has is known from the holes of its file, which is right on the file that Firecracker wrote, and wrong
/// on a copy that has other holes. Files on hugetlbfs, on a tmpfs with huge pages, and on file systems
/// without holes are refused by name. An object has no holes: the memory file may be one, and a diff only
/// with --all-data.
#[derive(Debug, clap::Args)]
#[command(allow_missing_positional = true)]
#[command(after_help = exit::help("uzone pack --firecracker vm.mem --diff vm.mem.1 vm.img", &EXITS))]
pub(crate) struct PackArgs {
    /// The bytes to pack
    #[arg(required_unless_present = "firecracker", conflicts_with = "firecracker")]
    input: Option<PathBuf>,
    /// The image to write; one that is there is replaced as a whole
    image: PathBuf,
    /// Pack the memory file of a Firecracker snapshot instead
    #[arg(long, value_name = "MEM")]
    firecracker: Option<PathBuf>,
    /// With --firecracker, the memory file of a diff on top; several, the oldest first
    #[arg(long, value_name = "MEM")]
    diff: Vec<PathBuf>,
    /// Take every byte of each diff, and holes for zeroes
    #[arg(long, requires = "diff")]
    all_data: bool,
    /// Where bytes of the input are in the guest: the address, where they start in the input, and how many
    /// they are, such as 0x100000000:3G:1G; several for several regions [default: all of it, at 0]
    #[arg(long, value_name = "ADDRESS:OFFSET:LENGTH")]
    region: Vec<GuestRegion>,
    /// How frames are stored
    #[arg(long, value_enum, default_value_t = CodecName::Zstd)]
    codec: CodecName,
    /// How hard to compress: up to 22 for zstd, 0 to 12 for lz4 [default: 3 for zstd, 0 for lz4]
    #[arg(long, allow_negative_numbers = true)]
    level: Option<i32>,
    /// How many bytes are compressed together: a power of two from a page to 16M [default: 64K]
    #[arg(long, value_name = "SIZE")]
    frame: Option<ByteLen>,
    /// The size of a page, of which zero ones are noted: a power of two from 4K to 2M [default: 4K]
    #[arg(long, value_name = "SIZE")]
    page: Option<ByteLen>,
    /// Store only what differs from this image, which has to stay where it is
    #[arg(long, value_name = "IMAGE")]
    parent: Option<PathBuf>,
    /// Take down the pages that a run touched: their numbers in order, one a line
    #[arg(long, value_name = "FILE")]
    working_set: Option<PathBuf>,
    /// Pack these pages together, before all others: their numbers in order, one a line, as a run touches
    /// them. `zstd -d` then gives the pages in that order
    #[arg(long, value_name = "FILE", conflicts_with = "parent")]
    order: Option<PathBuf>,
    /// The input is an image: pack its bytes anew, with those of the images below it. It keeps its regions,
    /// its working set, and the sizes of its pages and frames
    #[arg(long, conflicts_with = "firecracker")]
    rebase: bool,
    /// Write only hashes of the input, as IMAGE, which is the name of the input with .hashes behind it: then
    /// each command that takes an image takes the input for one, verified and not compressed
    #[arg(long, conflicts_with_all = ["firecracker", "parent", "order", "rebase", "codec", "level"])]
    hashes_only: bool,
    #[command(flatten)]
    requests: Requests,
    #[command(flatten)]
    threads: Threads,
}

/// Write the raw bytes of an image to a file
///
/// Each frame is verified before its bytes are written. Zeroes become holes.
#[derive(Debug, clap::Args)]
#[command(after_help = exit::help("uzone unpack memory.img memory.raw", &EXITS))]
pub(crate) struct UnpackArgs {
    /// The image: a file, or a URL such as s3://BUCKET/KEY#root=HASH
    image: PathBuf,
    /// The file or the URL to write, or `-` for standard output; what is there is replaced as a whole
    output: PathBuf,
    #[command(flatten)]
    required: Required,
    #[command(flatten)]
    on_disk: OnDisk,
    #[command(flatten)]
    threads: Threads,
}

/// Show what an image holds, and which images it needs
///
/// With --report, an HTML page shows where the zero, the stored and the shared pages lie.
#[derive(Debug, clap::Args)]
#[command(after_help = exit::help("uzone inspect memory.img", &EXITS))]
pub(crate) struct InspectArgs {
    /// The image: a file, or a URL such as s3://BUCKET/KEY#root=HASH
    image: PathBuf,
    /// Write an HTML page with a picture of where the pages are as well
    #[arg(long, value_name = "HTML")]
    report: Option<PathBuf>,
    #[command(flatten)]
    required: Required,
}

/// Check every frame of an image, and of the images below it
///
/// It exits with 65 and names the first frame that is damaged and where it is in the file. Hashes show
/// damage; that the image is the one that was made, and not a forgery, shows only --root.
#[derive(Debug, clap::Args)]
#[command(after_help = exit::help("uzone verify memory.img", &EXITS))]
pub(crate) struct VerifyArgs {
    /// The image: a file, or a URL such as s3://BUCKET/KEY#root=HASH
    image: PathBuf,
    /// Decode each frame as well, which checks the compressor too
    #[arg(long)]
    decode: bool,
    #[command(flatten)]
    required: Required,
    #[command(flatten)]
    on_disk: OnDisk,
    #[command(flatten)]
    threads: Threads,
}

#[derive(Debug, clap::Args)]
struct Required {
    /// Require this root hash, as `uzone pack` printed it
    #[arg(long, value_name = "HASH")]
    root: Option<Root>,
    #[command(flatten)]
    requests: Requests,
}

impl Required {
    fn options(&self) -> OpenOptions {
        self.root.into_iter().fold(self.requests.open(), OpenOptions::root)
    }
}

/// How images in object storage are requested.
#[derive(Debug, clap::Args)]
pub(crate) struct Requests {
    /// How long a request to object storage may take to connect, and its server may be silent then; a number
    /// alone is seconds
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = time, env = "UZONE_SOURCE_TIMEOUT")]
    pub(crate) source_timeout: Duration,
    /// Until when a request that fails is repeated, from its beginning
    #[arg(long, value_name = "TIME", default_value = "15s", value_parser = time, env = "UZONE_SOURCE_RETRY")]
    pub(crate) source_retry: Duration,
    /// How often a request that fails is repeated at most
    #[arg(long, value_name = "COUNT", default_value_t = 6, env = "UZONE_SOURCE_RETRY_COUNT")]
    source_retry_count: u32,
    /// How long the pauses before repetitions are at most: they are random, and grow from 50ms on
    #[arg(long, value_name = "TIME", default_value = "3s", value_parser = time, env = "UZONE_SOURCE_RETRY_PAUSE")]
    source_retry_pause: Duration,
}

impl Requests {
    pub(crate) fn options(&self) -> RequestOptions {
        RequestOptions::default()
            .timeout(self.source_timeout)
            .retry(self.source_retry)
            .retry_count(self.source_retry_count)
            .retry_pause(self.source_retry_pause)
    }

    /// Returns how an image is opened.
    pub(crate) fn open(&self) -> OpenOptions {
        OpenOptions::default().requests(self.options())
    }
}

/// Reads a time, such as `5s`, `500ms` or `20`, which is in seconds as `--deadline` is.
fn time(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().map(Duration::from_secs);
    let time = seconds.or_else(|_| humantime::parse_duration(text));
    let time = time.map_err(|_| "a time is such as 5s, 500ms, or 20 for as many seconds")?;
    let (least, most) = (Duration::from_millis(1), Duration::from_hours(24));
    if (least..=most).contains(&time) { Ok(time) } else { Err("a time is 1ms to 24h".into()) }
}

/// Where frames and indexes of images in object storage are kept.
#[derive(Debug, clap::Args)]
pub(crate) struct OnDisk {
    /// Keep the index and fetched frames of an image in object storage in DIR, for this and other processes
    #[arg(long, value_name = "DIR", env = "UZONE_CACHE_DIR")]
    cache_dir: Option<PathBuf>,
    /// How many bytes DIR may take; images that were not opened for the longest time give room
    #[arg(long, value_name = "SIZE", default_value = "16G", env = "UZONE_CACHE_DISK_BYTES")]
    cache_disk_bytes: ByteLen,
}

impl OnDisk {
    pub(crate) fn open(&self) -> Result<Option<Arc<DiskCache>>, SnapshotError> {
        let open = |dir| DiskCache::open(dir, self.cache_disk_bytes.get());
        self.cache_dir.as_ref().map(open).transpose()
    }

    fn open_image(&self, image: &Path, required: &Required) -> Result<Image, SnapshotError> {
        let disk = self.open()?;
        Image::open(image, &disk.into_iter().fold(required.options(), OpenOptions::disk_cache))
    }
}

#[derive(Debug, clap::Args)]
pub(crate) struct Threads {
    /// How many threads work [default: one for each CPU]
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
}

impl Threads {
    pub(crate) fn get(&self) -> usize {
        self.threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from))
    }
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum CodecName {
    Zstd,
    Lz4,
    None,
}

impl From<CodecName> for Codec {
    fn from(name: CodecName) -> Self {
        match name {
            CodecName::Zstd => Self::Zstd,
            CodecName::Lz4 => Self::Lz4,
            CodecName::None => Self::None,
        }
    }
}

/// A part of guest memory, as it is given: `ADDRESS:OFFSET:LENGTH`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct GuestRegion {
    guest_addr: u64,
    offset: u64,
    len_bytes: u64,
}

impl GuestRegion {
    fn with_pages(self, page_bytes: u64) -> ImageRegion {
        let Self { guest_addr, offset, len_bytes } = self;
        ImageRegion { guest_addr, offset, len_bytes, page_bytes }
    }
}

impl FromStr for GuestRegion {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let number = |text: &str| match text.strip_prefix("0x") {
            Some(digits) => u64::from_str_radix(digits, 16).ok(),
            None => text.parse::<ByteLen>().ok().map(ByteLen::get),
        };
        let mut numbers = text.split(':').map(number);
        let mut next = || numbers.next().flatten();
        match ((next(), next(), next()), numbers.next()) {
            ((Some(guest_addr), Some(offset), Some(len_bytes)), None) => {
                Ok(Self { guest_addr, offset, len_bytes })
            }
            _ => Err("a region is ADDRESS:OFFSET:LENGTH, such as 0x100000000:3G:1G"),
        }
    }
}

/// What of a rate is printed and put into objects.
#[derive(Debug, Serialize)]
pub(crate) struct Work {
    wall_ns: u64,
    bytes_per_s: u64,
}

impl Work {
    pub(crate) fn of(bytes: u64, started: Instant) -> Self {
        let wall_ns = nanoseconds(started.elapsed()).max(1);
        let rate = u128::from(bytes) * 1_000_000_000 / u128::from(wall_ns);
        Self { wall_ns, bytes_per_s: u64::try_from(rate).unwrap_or(u64::MAX) }
    }

    pub(crate) fn text(&self) -> String {
        let seconds = self.wall_ns / 1_000_000;
        format!(
            "{}.{:03} s, {:.1}/s",
            seconds / 1000,
            seconds % 1000,
            ByteLen::new(self.bytes_per_s)
        )
    }
}

/// How many bytes a byte of the file stands for, in hundredths.
fn ratio(image_bytes: u64, file_bytes: u64) -> String {
    let hundredths = u128::from(image_bytes) * 100 / u128::from(file_bytes.max(1));
    format!("{}.{:02}", hundredths / 100, hundredths % 100)
}

/// `uzone.pack/1`
#[derive(Debug, Serialize)]
struct PackReport {
    image: String,
    root: String,
    codec: &'static str,
    image_bytes: u64,
    file_bytes: u64,
    page_bytes: u64,
    frame_bytes: u64,
    zero_pages: u64,
    stored_frames: u64,
    #[serde(flatten)]
    work: Work,
}

impl Report for PackReport {
    const SCHEMA: &'static str = "uzone.pack/1";

    fn text(&self, _style: Style) -> String {
        format!(
            "packed {:.1} into {:.1} ({} times smaller) in {}\nroot {}\n",
            ByteLen::new(self.image_bytes),
            ByteLen::new(self.file_bytes),
            ratio(self.image_bytes, self.file_bytes),
            self.work.text(),
            self.root,
        )
    }
}

/// What is packed.
enum Input {
    /// Bytes that come in order, and how many they are; 0 if that is not known.
    Stream(Box<dyn Read + Send>, u64),
    /// Bytes that can be read at any place.
    Source(Box<dyn Source>),
    /// Those of an image.
    Image(Box<Image>),
}

/// Packs an image.
///
/// # Errors
/// If the input cannot be read or the image cannot be written.
pub(crate) fn pack(args: &PackArgs, out: &Output) -> Result<Exit, Failure> {
    args.fit_together()?;
    let parent = args.parent.as_ref().map(|path| Image::open(path, &args.requests.open()));
    let parent = parent.transpose()?;
    let mut input = args.open_input(out)?;
    let (packer, page, frame) = args.packer(&input)?;
    let below = parent.iter().chain(match &input {
        Input::Image(image) => Some(&**image),
        _ => None,
    });
    for image in below {
        check_output(image, &args.image)?;
    }
    let len = match &input {
        Input::Stream(_, len) => *len,
        Input::Source(source) => source.byte_len(),
        Input::Image(image) => image.byte_len(),
    };
    let bar = Progress::bytes(out, "packing", len);
    let started = Instant::now();
    let show = |done| {
        bar.set(done);
        true
    };
    let packed = match &mut input {
        Input::Stream(input, _) => packer.pack(input, &args.image, parent.as_ref(), &show)?,
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
        stored_frames: packed.stored_frames,
        work: Work::of(packed.image_bytes, started),
    })?;
    Ok(Exit::Ok)
}

impl PackArgs {
    fn codec(&self) -> Codec {
        if self.hashes_only { Codec::None } else { self.codec.into() }
    }

    fn fit_together(&self) -> Result<(), Failure> {
        let mut inputs =
            self.input.iter().chain(&self.firecracker).chain(&self.diff).chain(&self.parent);
        if inputs.any(|input| is_same(input, &self.image)) {
            let image = self.image.display();
            let text = format!("{image} is both the input and the image: name another image");
            return Err(Failure::usage(text));
        }
        if self.input.is_some() && !self.diff.is_empty() {
            return Err(Failure::usage(
                "--diff changes the memory file of --firecracker: name that as well, in the place of an input",
            ));
        }
        if self.hashes_only
            && let Some(input) = &self.input
            && self.image.as_os_str() != beside(input).as_os_str()
        {
            let expected = beside(input);
            let text =
                format!("hashes are found beside their memory alone: name {}", expected.display());
            return Err(Failure::usage(text));
        }
        let is_pipe = self.input.as_deref() == Some(Path::new("-"));
        if is_pipe && (self.order.is_some() || self.rebase) {
            return Err(Failure::usage(
                "--order and --rebase need an input that can be read at any place: name a file",
            ));
        }
        Ok(())
    }

    /// Returns what writes the image, and the size of its pages and of its frames: an image that is packed
    /// anew has those it had, its regions and its working set, unless others are given.
    fn packer(&self, input: &Input) -> Result<(Packer, u64, u64), Failure> {
        let before = match input {
            Input::Image(image) => Some(image),
            _ => None,
        };
        let page = self.page.map(ByteLen::get).or(before.map(|image| image.page_bytes()));
        let frame = self.frame.map(ByteLen::get).or(before.map(|image| image.frame_bytes()));
        let (page, frame) = (page.unwrap_or(4 << 10), frame.unwrap_or(64 << 10));
        let regions = match before {
            Some(image) if self.region.is_empty() => image.regions().to_vec(),
            _ => self.region.iter().map(|region| region.with_pages(page)).collect(),
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

    fn open_input(&self, out: &Output) -> Result<Input, SnapshotError> {
        if let Some(memory) = &self.firecracker {
            let layers = Layers::open(memory, &self.diff, self.all_data, &self.requests.options())?;
            if !self.diff.is_empty() && !self.all_data {
                out.warn(format_args!(
                    "the holes of a diff are the pages that it does not have: that is so of the file that \
                     Firecracker wrote; a copy may have lost or gained holes, and would make a wrong image"
                ));
            }
            return Ok(Input::Source(Box::new(layers)));
        }
        let path = self.input.as_deref().unwrap_or(Path::new("-"));
        if self.rebase {
            return Ok(Input::Image(Box::new(Image::open(path, &self.requests.open())?)));
        }
        if self.order.is_some() || is_url(path) {
            let source = open_source(path, &self.requests.options());
            return Ok(Input::Source(source.map_err(|cause| unread(path, cause))?));
        }
        let (input, len) = open_input(path)?;
        Ok(Input::Stream(input, len))
    }
}

/// Returns where the hashes of raw memory are looked for.
fn beside(raw: &Path) -> PathBuf {
    let mut name = raw.as_os_str().to_owned();
    name.push(HASHES);
    name.into()
}

fn unread(path: &Path, cause: io::Error) -> SnapshotError {
    SnapshotError::Read { name: path.display().to_string(), offset: 0, len_bytes: 0, cause }
}

fn open_input(path: &Path) -> Result<(Box<dyn Read + Send>, u64), SnapshotError> {
    if path == Path::new("-") {
        return Ok((Box::new(io::stdin()), 0));
    }
    let failed = |cause| unread(path, cause);
    let file = File::open(path).map_err(failed)?;
    let metadata = file.metadata().map_err(failed)?;
    if metadata.is_dir() {
        return Err(failed(io::ErrorKind::IsADirectory.into()));
    }
    Ok((Box::new(file), metadata.len()))
}

/// Reads the numbers of pages, one a line.
fn read_pages(path: &Path) -> Result<Vec<u64>, Failure> {
    let text = std::fs::read_to_string(path).map_err(|cause| unread(path, cause))?;
    let pages = (1..).zip(text.lines()).map(|(line, text)| {
        let wrong = || format!("line {line} of {} is not the number of a page", path.display());
        text.trim().parse().map_err(|_| Failure::new(Exit::Data, wrong()))
    });
    pages.collect()
}

/// `uzone.unpack/1`
#[derive(Debug, Serialize)]
struct UnpackReport {
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

/// How much is written to standard output at a time.
const PIPE_BYTES: u64 = 4 << 20;

/// Unpacks an image.
///
/// # Errors
/// If a frame is damaged or the output cannot be written.
pub(crate) fn unpack(args: &UnpackArgs, out: &Output) -> Result<Exit, Failure> {
    let image = args.on_disk.open_image(&args.image, &args.required)?;
    check_output(&image, &args.output)?;
    let bar = Progress::bytes(out, "unpacking", image.byte_len());
    let started = Instant::now();
    if args.output == Path::new("-") {
        let mut to = io::stdout().lock();
        let (mut at, mut part) = (0, Vec::new());
        while at < image.byte_len() {
            let len = PIPE_BYTES.min(image.byte_len() - at);
            part.resize(usize::try_from(len).unwrap_or(usize::MAX), 0);
            image.read_at(at, &mut part)?;
            to.write_all(&part)?;
            at += len;
            bar.set(at);
        }
        to.flush()?;
        return Ok(Exit::Ok);
    }
    image.unpack(&args.output, args.threads.get(), &|done| {
        bar.set(done);
        true
    })?;
    drop(bar);
    out.print(&UnpackReport {
        output: args.output.display().to_string(),
        root: image.root().to_string(),
        image_bytes: image.byte_len(),
        work: Work::of(image.byte_len(), started),
    })?;
    Ok(Exit::Ok)
}

/// What is known of one image of a chain.
#[derive(Debug, Serialize)]
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
struct Region {
    guest_addr: u64,
    offset_bytes: u64,
    len_bytes: u64,
    page_bytes: u64,
}

/// `uzone.inspect/1`
#[derive(Debug, Serialize)]
struct InspectReport {
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

/// Returns whether two paths are one file, or one URL.
pub(crate) fn is_same(a: &Path, b: &Path) -> bool {
    let is_one_url = is_url(a) && a == b;
    is_one_url || matches!((a.canonicalize(), b.canonicalize()), (Ok(a), Ok(b)) if a == b)
}

/// Checks that an output takes the place of none of the files that an image is read from, nor of the hashes that raw memory
/// would have.
pub(crate) fn check_output(image: &Image, output: &Path) -> Result<(), Failure> {
    let sources = image.sources();
    let is_source = sources.iter().any(|source| is_same(Path::new(source), output));
    let beside = image.is_raw().then(|| beside(Path::new(&image.name())));
    if is_source || beside.is_some_and(|beside| is_at(&beside, output)) {
        return Err(Failure::usage(format!(
            "{} belongs to {}: name another output",
            output.display(),
            image.name()
        )));
    }
    Ok(())
}

/// Returns whether two paths name one file, which is perhaps not there.
fn is_at(a: &Path, b: &Path) -> bool {
    let folder = |path: &Path| match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder.canonicalize(),
        _ => Path::new(".").canonicalize(),
    };
    a.file_name() == b.file_name() && matches!((folder(a), folder(b)), (Ok(a), Ok(b)) if a == b)
}

/// Returns an image and those below it.
fn chain(image: &Image) -> impl Iterator<Item = &Image> {
    std::iter::successors(Some(image), |image| image.parent())
}

/// How many columns a picture has.
const COLUMNS: usize = 128;

/// Writes a page with a picture of each image of a chain.
fn write_map(page: &Path, image: &Image, out: &Output) -> Result<(), Failure> {
    if chain(image).any(|image| is_same(Path::new(&image.name()), page)) {
        return Err(Failure::usage(format!(
            "{} is an image, and the page would take its place: name another --report",
            page.display()
        )));
    }
    let maps: Vec<Document> = chain(image).map(|image| Document::Image(map_of(image))).collect();
    uzone_report::replace(page, uzone_report::html(&maps).as_bytes())?;
    out.log(format_args!("wrote {}", page.display()));
    Ok(())
}

/// Returns where the pages of an image are, for a picture.
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
///
/// # Errors
/// If the image, or one below it, cannot be opened.
pub(crate) fn inspect(args: &InspectArgs, out: &Output) -> Result<Exit, Failure> {
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
    })?;
    Ok(Exit::Ok)
}

/// `uzone.verify/1`
#[derive(Debug, Serialize)]
struct VerifyReport {
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
            "not required: damage would be found, forgery would not"
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

/// Verifies an image and those below it.
///
/// # Errors
/// If a frame is damaged, or a file cannot be read.
pub(crate) fn verify(args: &VerifyArgs, out: &Output) -> Result<Exit, Failure> {
    let image = args.on_disk.open_image(&args.image, &args.required)?;
    let started = Instant::now();
    let (mut images, mut frames, mut file_bytes) = (0, 0, 0);
    for image in chain(&image) {
        let bar = Progress::bytes(out, "verifying", image.file_len());
        frames += image.verify(args.threads.get(), args.decode, &|done| bar.set(done))?;
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
    })?;
    Ok(Exit::Ok)
}
