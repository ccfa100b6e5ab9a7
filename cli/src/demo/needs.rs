//! What the demo needs, looked up before anything is made ([`first_that_fits`]).

use std::path::Path;

use uzone_harness::demo;
use uzone_os::uffd::{Features, KernelFaults, Uffd};
use uzone_os::{SystemRoot, file_system, memory};
use uzone_pages::ByteLen;
use uzone_report::ReportError;

use super::image::no_file;
use super::plan::Plan;
use crate::exit::{Exit, Failure};
use crate::output::Output;

/// What trace and page may take.
const FILES: ByteLen = ByteLen::mib(16);
/// For the process itself.
const PROCESS: u64 = 64 << 20;
/// The addresses of the stacks and heaps of a few threads.
const THREADS: u64 = 512 << 20;

/// Returns the first of the plans for which there is enough memory and disk, and whether lazily mapped
/// memory reports faults of the kernel too. A plan that is not the first is named in the log.
pub(super) fn first_that_fits(plans: Vec<Plan>, out: &Output) -> Result<(Plan, bool), Failure> {
    let mut refused: Option<(Failure, String)> = None;
    for plan in plans {
        if refused.is_none() {
            outputs(&plan)?;
        }
        match (check(&plan), refused.take()) {
            (Ok(sees_kernel_faults), smaller) => {
                if let Some((_, reason)) = smaller {
                    out.warn(format_args!(
                        "smaller than by default, because {reason}: an image of {} and a region of {}",
                        plan.size, plan.reserve
                    ));
                }
                return Ok((plan, sees_kernel_faults));
            }
            // The first reason is why the default does not fit; the last failure is what is left.
            (Err(Lack::Size(failure, reason)), first) => {
                refused = Some((failure, first.map_or(reason, |(_, first)| first)));
            }
            (Err(Lack::Other(failure)), _) => return Err(failure),
        }
    }
    Err(refused.map_or_else(|| Failure::usage("there is no plan"), |(failure, _)| failure))
}

/// Why a plan cannot be followed.
enum Lack {
    /// A smaller plan may fit: the failure if there is none, and the reason in a few words.
    Size(Failure, String),
    /// No plan fits.
    Other(Failure),
}

fn check(plan: &Plan) -> Result<bool, Lack> {
    let uffd = Uffd::open(Features::NONE, Features::NONE, KernelFaults::IfAllowed);
    let uffd = uffd.map_err(|cause| {
        let text = "memory cannot be mapped lazily: set vm.unprivileged_userfaultfd to 1 (sysctl), give \
             access to /dev/userfaultfd, or where a container forbids userfaultfd(2), allow that";
        Lack::Other(Failure::of(text, cause))
    })?;
    let (size, directory) = (plan.size, plan.directory.display());
    let room = file_system::room(&plan.directory)
        .map_err(|cause| Lack::Other(no_file(&plan.directory, cause)))?;
    let lack = |text, reason| Err(Lack::Size(Failure::new(Exit::Io, text), reason));
    if let Some(longest) = room.longest_file.filter(|longest| *longest < size) {
        let text = format!(
            "an image of {size} is longer than a file may be here, which is {longest}: ask for less \
             with --size, or raise `ulimit -f`"
        );
        return lack(text, format!("a file may have {longest:.1}"));
    }
    // A file system needs something for itself.
    let needed = ByteLen::new(size.get().saturating_add(size.get() / 64));
    let free = room.free;
    if free < needed {
        let text = format!(
            "the image takes {needed:.1} and {free:.1} are free in {directory}: ask for less with --size, or \
             name another directory with --dir"
        );
        return lack(text, format!("{free:.1} are free in {directory}"));
    }
    enough_memory(plan, room.is_memory)?;
    Ok(uffd.sees_kernel_faults())
}

fn enough_memory(plan: &Plan, is_image_in_memory: bool) -> Result<(), Lack> {
    let Ok(available) = memory::available(&SystemRoot::host()) else {
        return Ok(()); // unknown here: an allocation that fails reports it later
    };
    let size = plan.size.get();
    // The image once more where it is mapped, with page tables; the file itself may be in memory too.
    let image = if is_image_in_memory { size } else { 0 };
    let mapped = image.saturating_add(size).saturating_add(size / 64);
    let measured = demo::memory(plan.described, plan.arena).get();
    let mut needed = mapped.max(measured).saturating_add(PROCESS);
    if matches!(available.limited_by, memory::Limit::AddressSpace | memory::Limit::Data) {
        // There addresses count as well as memory does, and each thread has some of its own.
        needed =
            needed.saturating_add(plan.reserve.get()).saturating_add(size).saturating_add(THREADS);
    }
    let needed = ByteLen::new(needed);
    if available.bytes >= needed {
        return Ok(());
    }
    let (available, limited_by) = (available.bytes, available.limited_by);
    let text = format!(
        "{needed:.1} of memory are needed and {available:.1} can be had, limited by {limited_by}: raise that \
         limit, or leave --size and --reserve out, so that they follow it"
    );
    let reason = format!("{available:.1} of memory can be had, limited by {limited_by}");
    Err(Lack::Size(Failure::new(Exit::Os, text), reason))
}

/// Looks whether what comes of it can be written.
fn outputs(plan: &Plan) -> Result<(), Failure> {
    let refused = |path: &Path, cause| Failure::from(ReportError::write(path, "write into", cause));
    let output = &plan.output;
    // Where a file without a name can be made, one with a name can.
    drop(file_system::nameless_file(output).map_err(|cause| refused(output, cause))?);
    for path in [plan.trace_path(), plan.page_path()] {
        uzone_report::check_replace(&path)?;
    }
    let room = file_system::room(output).map_err(|cause| refused(output, cause))?;
    if room.free < FILES {
        let text = format!(
            "the results take up to {FILES:.1} and {:.1} are free in {}: name another directory with --output",
            room.free,
            output.display()
        );
        return Err(Failure::new(Exit::Io, text));
    }
    Ok(())
}
