//! The host and the build of a run: the foot of every table.

use uzone_os::{SystemRoot, hugepages, memory, numa, probe};
use uzone_report::Machine;

/// Returns the host and the build of this run.
#[must_use]
pub fn here() -> Machine {
    let root = SystemRoot::host();
    let unknown = || String::from("unknown");
    Machine {
        cpu: probe::cpu_model(&root).ok().flatten().unwrap_or_else(unknown),
        cpus: numa::current_cpu_count().unwrap_or(1),
        memory_bytes: memory::system(&root).map_or(0, |(total, _)| total.get()),
        kernel: probe::kernel_release(),
        page_bytes: probe::page_size().bytes(),
        transparent_huge_pages: hugepages::thp(&root)
            .ok()
            .flatten()
            .map_or_else(|| String::from("none"), |thp| thp.enabled.to_string()),
        stream: uzone_stream::best().name().to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        commit: option_env!("UZONE_COMMIT").map(str::to_owned),
        unix_seconds: std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .map_or(0, |since| since.as_secs()),
    }
}
