//! What the demo needs, looked up before anything is made ([`first_that_fits`]).

use std::fs;
use std::path::Path;

use uzone_bench::brief;
use uzone_os::uffd::{Features, KernelFaults, Uffd};
use uzone_os::{SystemRoot, file_system, memory};
use uzone_pages::ByteLen;
use uzone_report::ReportError;

use super::{DemoError, Plan};
use crate::exit::Failure;
use crate::output::Output;

/// What trace and page may take.
const FILES: ByteLen = ByteLen::mib(16);
/// For the process itself.
const PROCESS: u64 = 64 << 20;
/// The addresses of the stacks and heaps of a few threads.
const THREADS: u64 = 512 << 20;

/// Returns the first of the plans for which there is enough memory and disk, and whether lazily mapped
/// memory reports faults of the kernel too. A plan that is not the first is named in the log.
///
/// # Errors
/// What the last plan lacks, with numbers and what would help.
pub(super) fn first_that_fits(plans: Vec<Plan>, out: &Output) -> Result<(Plan, bool), Failure> {
    let mut is_first = true;
    let mut refused = None;
    for plan in plans {
        if is_first {
            outputs(&plan)?;
        }
        match check(&plan) {
            Ok(sees_kernel_faults) => {
                if let Some((_, reason)) = refused.filter(|_| !is_first) {
                    out.warn(format_args!(
                        "smaller than by default, because {reason}: an image of {} and a region of {}",
                        plan.size, plan.reserve
                    ));
                }
                return Ok((plan, sees_kernel_faults));
            }
            Err(Lack::Size(failure, reason)) => {
                // The first reason is why the default does not fit; the last failure is what is left.
                let reason = refused.map_or(reason, |(_, first)| first);
                refused = Some((failure, reason));
            }
            Err(Lack::Other(failure)) => return Err(failure),
        }
        is_first = false;
    }
    match refused {
        Some((failure, _)) => Err(failure),
        None => Err(DemoError::Size { size: ByteLen::ZERO }.failure()),
    }
}

/// Why a plan cannot be followed.
enum Lack {
    /// A smaller plan may fit: the failure if there is none, and the reason in a few words.
    Size(Failure, String),
    /// No plan fits.
    Other(Failure),
}

fn check(plan: &Plan) -> Result<bool, Lack> {
    let uffd = Uffd::open(Features::NONE, Features::NONE, KernelFaults::IfAllowed)
        .map_err(|cause| Lack::Other(DemoError::NoFaults { cause }.into()))?;
    let room = file_system::room(&plan.directory).map_err(|cause| {
        Lack::Other(DemoError::Directory { directory: plan.directory.clone(), cause }.into())
    })?;
    if let Some(longest) = room.longest_file.filter(|longest| *longest < plan.size) {
        let reason = format!("a file may have {longest:.1}");
        return Err(Lack::Size(
            DemoError::FileLimit { size: plan.size, longest }.failure(),
            reason,
        ));
    }
    // A file system needs something for itself.
    let needed = ByteLen::new(plan.size.get().saturating_add(plan.size.get() / 64));
    if room.free < needed {
        let (directory, free) = (plan.directory.clone(), room.free);
        let reason = format!("{free:.1} are free in {}", directory.display());
        return Err(Lack::Size(DemoError::Disk { needed, free, directory }.failure(), reason));
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
    let measured = brief::memory(plan.described, plan.arena).get();
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
    let reason = format!("{available:.1} of memory can be had, limited by {limited_by}");
    Err(Lack::Size(DemoError::Memory { needed, available, limited_by }.into(), reason))
}

/// Looks whether what comes of it can be written.
fn outputs(plan: &Plan) -> Result<(), Failure> {
    let refused = |path: &Path, cause| {
        Failure::from(ReportError::Write { path: path.to_owned(), step: "write into", cause })
    };
    let output = &plan.output;
    // Where a file without a name can be made, one with a name can.
    drop(file_system::nameless_file(output).map_err(|cause| refused(output, cause))?);
    for path in [plan.trace_path(), plan.page_path()] {
        if fs::metadata(&path).is_ok_and(|found| !found.is_file()) {
            return Err(ReportError::NotAFile { path }.into());
        }
    }
    let room = file_system::room(output).map_err(|cause| refused(output, cause))?;
    if room.free < FILES {
        let (directory, free) = (output.clone(), room.free);
        return Err(DemoError::Output { needed: FILES, free, directory }.failure());
    }
    Ok(())
}
