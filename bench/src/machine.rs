//! What a run was measured on: the foot of every table.

use serde::Serialize;
use uzone_os::{SystemRoot, hugepages, memory, numa, probe};

/// The machine and the build of one run.
#[derive(Clone, Debug, Serialize)]
pub struct Machine {
    /// The name of the CPU.
    pub cpu: String,
    /// How many CPUs this process may use.
    pub cpus: usize,
    /// The memory of the host.
    pub memory_bytes: u64,
    /// The release of the kernel.
    pub kernel: String,
    /// The size of a base page.
    pub page_bytes: u64,
    /// The setting of transparent huge pages.
    pub transparent_huge_pages: String,
    /// The widest store that wins on this machine.
    pub stream: &'static str,
    /// The version of uzone.
    pub version: &'static str,
    /// The commit that it was built from, if the build knew it.
    pub commit: Option<&'static str>,
    /// When the run began: seconds since 1970.
    pub unix_seconds: u64,
}

impl Machine {
    /// Asks the host.
    #[must_use]
    pub fn here() -> Self {
        let root = SystemRoot::host();
        let unknown = || String::from("unknown");
        Self {
            cpu: probe::cpu_model(&root).ok().flatten().unwrap_or_else(unknown),
            cpus: numa::current_cpu_count().unwrap_or(1),
            memory_bytes: memory::system(&root).map_or(0, |system| system.total.get()),
            kernel: probe::kernel_release(),
            page_bytes: probe::page_size().bytes(),
            transparent_huge_pages: hugepages::thp(&root)
                .ok()
                .flatten()
                .map_or_else(|| String::from("none"), |thp| thp.enabled.to_string()),
            stream: uzone_stream::best().name(),
            version: env!("CARGO_PKG_VERSION"),
            commit: option_env!("UZONE_COMMIT"),
            unix_seconds: std::time::SystemTime::now()
                .duration_since(std::time::UNIX_EPOCH)
                .map_or(0, |since| since.as_secs()),
        }
    }
}
