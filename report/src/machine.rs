//! The machine of a measurement, for the foot of a report.

use serde::{Deserialize, Serialize};

use crate::text::{bytes, date, plain};

/// A machine and a build, as `uzone-bench --json` and a trace name them.
///
/// A field that a file lacks is empty or 0, and left out of the foot.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default)]
pub struct Machine {
    /// The name of the CPU.
    pub cpu: String,
    /// The number of CPUs that the process may use.
    pub cpus: usize,
    /// The memory of the host.
    pub memory_bytes: u64,
    /// The release of the kernel.
    pub kernel: String,
    /// The size of a host page.
    pub page_bytes: u64,
    /// The setting of transparent huge pages.
    pub transparent_huge_pages: String,
    /// The store that the process used past the cache.
    pub stream: String,
    /// The version of uzone.
    pub version: String,
    /// The commit of the build, if it is known.
    pub commit: Option<String>,
    /// The beginning of the run in seconds since 1970.
    pub unix_seconds: u64,
}

impl Machine {
    /// Returns the machine as a sentence, which a terminal can print.
    #[must_use]
    pub fn sentence(&self) -> String {
        let mut parts = Vec::new();
        let mut add = |is_known: bool, part: String| {
            if is_known {
                parts.push(part);
            }
        };
        add(!self.cpu.is_empty(), self.cpu.clone());
        add(self.cpus != 0, format!("{} CPUs", self.cpus));
        add(self.memory_bytes != 0, bytes(self.memory_bytes));
        add(!self.kernel.is_empty(), format!("Linux {}", self.kernel));
        add(self.page_bytes != 0, format!("pages of {}", bytes(self.page_bytes)));
        let huge = &self.transparent_huge_pages;
        add(!huge.is_empty(), format!("transparent huge pages {huge}"));
        add(!self.stream.is_empty(), format!("{} stores", self.stream));
        let commit = self.commit.as_deref().unwrap_or("unknown");
        add(!self.version.is_empty(), format!("uzone {} (commit {commit})", self.version));
        add(self.unix_seconds != 0, date(self.unix_seconds));
        if parts.is_empty() {
            "a machine that the file does not name".into()
        } else {
            plain(&parts.join(", ")).into_owned()
        }
    }
}
