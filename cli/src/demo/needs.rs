//! What the demo needs, looked up before anything is made ([`check`]).

use std::fs;
use std::path::Path;

use uzone_bench::brief;
use uzone_os::uffd::{Features, KernelFaults, Uffd};
use uzone_os::{SystemRoot, file_system, memory};
use uzone_pages::ByteLen;
use uzone_report::ReportError;

use super::{DemoError, Plan};
use crate::exit::Failure;

/// What trace and page may take.
const FILES: ByteLen = ByteLen::mib(16);
/// For the two processes themselves.
const PROCESSES: u64 = 64 << 20;

/// Returns whether lazily mapped memory is told of faults of the kernel too, if all that the plan
/// needs is there.
///
/// # Errors
/// What is missing, with numbers and what would help.
pub(super) fn check(plan: &Plan) -> Result<bool, Failure> {
    outputs(plan)?;
    let uffd = Uffd::open(Features::NONE, Features::NONE, KernelFaults::IfAllowed)
        .map_err(|cause| DemoError::NoFaults { cause })?;
    let room = file_system::room(&plan.directory)
        .map_err(|cause| DemoError::Directory { directory: plan.directory.clone(), cause })?;
    if let Some(longest) = room.longest_file.filter(|longest| *longest < plan.size) {
        return Err(DemoError::FileLimit { size: plan.size, longest }.failure());
    }
    // A file system needs something for itself.
    let needed = ByteLen::new(plan.size.get().saturating_add(plan.size.get() / 64));
    if room.free < needed {
        let (directory, free) = (plan.directory.clone(), room.free);
        return Err(DemoError::Disk { needed, free, directory }.failure());
    }
    enough_memory(plan, room.is_memory)?;
    Ok(uffd.sees_kernel_faults())
}

fn enough_memory(plan: &Plan, is_image_in_memory: bool) -> Result<(), Failure> {
    let Ok(available) = memory::available(&SystemRoot::host()) else {
        return Ok(()); // a host that does not say is found out later
    };
    let size = plan.size.get();
    // The image again in the other process, with its page tables, while the image may be in memory.
    let image = if is_image_in_memory { size } else { 0 };
    let mapped = image.saturating_add(size).saturating_add(size / 64);
    let measured = brief::memory(plan.described).get();
    let mut needed = mapped.max(measured).saturating_add(PROCESSES);
    if matches!(available.limited_by, memory::Limit::AddressSpace | memory::Limit::Data) {
        // There addresses count as well as memory does.
        needed = needed.saturating_add(plan.reserve.get()).saturating_add(size);
    }
    let needed = ByteLen::new(needed);
    if available.bytes >= needed {
        return Ok(());
    }
    let (available, limited_by) = (available.bytes, available.limited_by);
    let least = ByteLen::new(measured + PROCESSES);
    Err(DemoError::Memory { needed, available, limited_by, least }.failure())
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
