//! The arguments of the demo ([`Args`]), and the sizes that fit this machine ([`Plan`]).

use std::path::PathBuf;

use uzone_harness::demo;
use uzone_os::uffd::{Features, KernelFaults, Uffd};
use uzone_os::{SystemRoot, memory};
use uzone_pages::ByteLen;
use uzone_report::ReportError;
use uzone_snapshot::files;

use super::image::no_file;
use crate::exit::{self, Exit, Failure};
use crate::output::Output;

/// Map a file lazily, compare every byte, and show a few figures of this machine
///
/// It makes a file, maps it lazily, touches every page and compares every byte. Then it measures that, and describing,
/// clearing and pinning memory, beside the plain way and the limit of this machine. It needs no root and no network,
/// takes under a minute, and leaves two files: a page with charts, and the trace of page faults that they are drawn
/// from.
#[derive(Debug, clap::Args)]
#[command(after_help = exit::help("uzone demo --size 4G --output /tmp", &EXITS))]
pub(crate) struct Args {
    /// Length of the file, in multiples of 8 MiB [default: 1G, or less where that does not fit]
    #[arg(long, value_name = "SIZE")]
    size: Option<ByteLen>,
    /// Folder for the file, which has no name [default: where temporary files go]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Folder for uzone-demo.html and uzone-demo.trace.json
    #[arg(short, long, default_value = ".", value_name = "DIR")]
    output: PathBuf,
    /// Stop this process at a point, for a test
    #[arg(long, hide = true)]
    stop_at: Option<Point>,
}

/// A point at which a test stops the demo.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Point {
    /// The image is complete.
    Made,
    /// The image is mapped, and no page is there.
    Mapped,
    /// One of the two files is written.
    HalfWritten,
}

const EXITS: [u8; 8] = [0, 1, 2, 66, 69, 71, 74, 77];

/// The sizes that are tried until one fits the available memory.
const SIZES: [ByteLen; 5] =
    [ByteLen::gib(1), ByteLen::mib(512), ByteLen::mib(256), ByteLen::mib(128), ByteLen::mib(64)];
/// The largest memory that is described in the comparison.
const DESCRIBED: ByteLen = ByteLen::gib(4);
/// The least memory that is cleared in the comparison.
const LEAST_ARENA: ByteLen = ByteLen::mib(32);
/// Memory of the process itself.
const PROCESS: u64 = 64 << 20;
/// Addresses of the stacks and heaps of a few threads.
const THREADS: u64 = 512 << 20;

/// The plan of the demo.
pub(super) struct Plan {
    pub(super) size: ByteLen,
    /// The memory that is described in the comparison.
    pub(super) described: ByteLen,
    /// The memory that is cleared in the comparison, twice.
    pub(super) arena: ByteLen,
    /// Folder of the image.
    pub(super) directory: PathBuf,
    /// Folder of the results.
    output: PathBuf,
    pub(super) stop_at: Option<Point>,
}

impl Plan {
    /// Returns the largest plan for which there is enough memory and disk, and whether lazily mapped memory reports
    /// faults of the kernel too. A smaller one than by default is a warning.
    pub(super) fn that_fits(args: &Args, out: &Output) -> Result<(Self, bool), Failure> {
        if args.size.is_some_and(|size| size.is_zero() || !size.get().is_multiple_of(8 << 20)) {
            return Err(Failure::usage("a size is a multiple of 8 MiB, such as 1G"));
        }
        let sizes = args.size.map_or(SIZES.to_vec(), |size| vec![size]);
        let plan = |size: ByteLen| Self {
            size,
            described: DESCRIBED.min(ByteLen::new((size.get() * 4).max(1 << 30))),
            arena: size.min(demo::ARENA).max(LEAST_ARENA),
            directory: args.dir.clone().unwrap_or_else(std::env::temp_dir),
            output: args.output.clone(),
            stop_at: args.stop_at,
        };
        plan(sizes[0]).check_outputs()?;
        let uffd = Uffd::open(Features::NONE, Features::NONE, KernelFaults::IfAllowed);
        let uffd = uffd.map_err(|cause| {
            let text = "memory cannot be mapped lazily: set vm.unprivileged_userfaultfd to 1 (sysctl), give \
                 access to /dev/userfaultfd, or where a container forbids userfaultfd(2), allow that";
            Failure::of(text, cause)
        })?;
        let mut reason: Option<String> = None;
        for (index, size) in sizes.iter().enumerate() {
            let plan = plan(*size);
            match plan.lack()? {
                None => {
                    if let Some(reason) = reason {
                        out.warn(format_args!("an image of {size}, not {}: {reason}", sizes[0]));
                    }
                    return Ok((plan, uffd.sees_kernel_faults()));
                }
                Some((exit, lack)) if index + 1 == sizes.len() => {
                    return Err(Failure::new(exit, lack));
                }
                Some((_, lack)) => reason = reason.or(Some(lack)),
            }
        }
        Err(Failure::usage("there is no size"))
    }

    pub(super) fn page_path(&self) -> PathBuf {
        self.output.join("uzone-demo.html")
    }

    pub(super) fn trace_path(&self) -> PathBuf {
        self.output.join("uzone-demo.trace.json")
    }

    /// Returns the reason that the image does not fit, with its exit code.
    fn lack(&self) -> Result<Option<(Exit, String)>, Failure> {
        let (size, directory) = (self.size, self.directory.display());
        let room = files::room(&self.directory);
        let room = room.map_err(|cause| no_file(&self.directory, cause))?;
        if let Some(longest) = room.longest_file.filter(|longest| *longest < size) {
            let text = format!(
                "an image of {size} exceeds the longest file, {longest}: ask for less with --size, or raise `ulimit -f`"
            );
            return Ok(Some((Exit::Io, text)));
        }
        // A file system needs some space for itself.
        let needed = ByteLen::new(size.get().saturating_add(size.get() / 64));
        if room.free < needed {
            let text = format!(
                "the image takes {needed:.1} and {:.1} are free in {directory}: ask for less with --size, or name \
                 another directory with --dir",
                room.free
            );
            return Ok(Some((Exit::Io, text)));
        }
        let Ok(available) = memory::available(&SystemRoot::host()) else {
            return Ok(None); // an allocation that fails reports it later
        };
        let size = size.get();
        // The image where it is mapped, with page tables; the file itself may be in memory too.
        let image = if room.is_memory { size } else { 0 };
        let mapped = image.saturating_add(size).saturating_add(size / 64);
        let measured = demo::memory(self.described, self.arena).get();
        let mut needed = mapped.max(measured).saturating_add(PROCESS);
        if matches!(available.limited_by, memory::Limit::AddressSpace | memory::Limit::Data) {
            // Addresses count there, of threads too.
            needed = needed
                .saturating_add(size)
                .saturating_add(self.described.get())
                .saturating_add(THREADS);
        }
        let needed = ByteLen::new(needed);
        let text = format!(
            "{needed:.1} of memory are needed and {:.1} are available, limited by {}: raise that limit, or leave --size out",
            available.bytes, available.limited_by
        );
        Ok((available.bytes < needed).then_some((Exit::Os, text)))
    }

    /// Checks that the results can be written.
    fn check_outputs(&self) -> Result<(), ReportError> {
        uzone_report::check_replace(&self.trace_path())?;
        uzone_report::check_replace(&self.page_path())
    }
}
