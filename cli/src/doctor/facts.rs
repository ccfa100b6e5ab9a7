//! The facts of the host, unchanged: [`Facts`]. `checks.rs` judges them.
//!
//! A fact that could not be read stays an error, so that the report can name the cause.
//! Cost: reading some forty small files, a mapping of [`TRIAL`], and the measurement of the stores (some 100 ms).

use std::env::consts;
use std::io;

use rustix::thread::{CapabilitySet, capabilities};
use uzone_harness::stores::faster_stores;
use uzone_os::dax::{self, DaxDevice};
use uzone_os::hugepages::{self, Pool, Thp};
use uzone_os::memory::{self, Available};
use uzone_os::numa::{self, Node};
use uzone_os::probe;
use uzone_os::uffd::{Features, UffdError};
use uzone_os::{Anonymous, Exclusive, MapError, SysError, SystemRoot};
use uzone_pages::{ByteLen, PageSize};
use uzone_stream::{Basis, Path, StorePolicy, Work};

/// The length of a trial mapping, which shows whether there is memory at all. The measurement of the stores takes less,
/// and ends the process if there is none.
pub(super) const TRIAL: ByteLen = ByteLen::mib(16);

/// The facts of the host.
#[derive(Debug)]
pub(super) struct Facts {
    /// The architecture.
    pub(super) machine: &'static str,
    pub(super) release: String,
    pub(super) page_size: PageSize,
    pub(super) cpu_model: Result<Option<String>, SysError>,
    /// The number of CPUs that this process may use.
    pub(super) usable_cpus: Result<usize, SysError>,
    /// `None` if [`TRIAL`] could not be mapped.
    pub(super) stores: Option<Stores>,
    pub(super) thp: Result<Option<Thp>, SysError>,
    /// Whether a parent has switched them off for this process.
    pub(super) thp_is_switched_off: bool,
    pub(super) pools: Result<Vec<Pool>, SysError>,
    pub(super) uffd_syscall: io::Result<bool>,
    pub(super) uffd_device: io::Result<bool>,
    pub(super) uffd_unprivileged: Result<bool, SysError>,
    pub(super) uffd_features: Result<(Features, Vec<&'static str>), UffdError>,
    /// The memory that a process may lock; `None` is no limit.
    pub(super) memlock: Option<ByteLen>,
    /// Whether this process may lock more than that.
    pub(super) is_memlock_exempt: bool,
    pub(super) max_map_count: Result<u64, SysError>,
    pub(super) overcommit: Result<u64, SysError>,
    pub(super) nodes: Result<Vec<Node>, SysError>,
    /// The DAX devices that can be mapped, by name.
    pub(super) dax: Result<Vec<(String, DaxDevice)>, MapError>,
    /// The host's memory: total and available.
    pub(super) memory: Result<(ByteLen, ByteLen), SysError>,
    pub(super) available: Result<Available, SysError>,
    /// Whether [`TRIAL`] could be mapped and made present.
    pub(super) trial: Result<(), Box<dyn std::error::Error + Send + Sync>>,
}

/// The store instructions.
#[derive(Clone, Debug)]
pub(super) struct Stores {
    pub(super) available: Vec<&'static str>,
    /// The store that fills memory past the cache.
    pub(super) chosen: &'static str,
    /// The whole policy, in the form of the environment variable.
    pub(super) policy: String,
    /// The origin of the policy.
    pub(super) basis: Basis,
    /// The reason that the environment variable was not followed.
    pub(super) problem: Option<String>,
    /// The policy that is faster here than the policy of the process, if the measurement found one.
    pub(super) faster_policy: Option<String>,
}

impl Facts {
    /// Asks the host.
    pub(super) fn of_host() -> Self {
        let root = &SystemRoot::host();
        let trial = try_to_map();
        Self {
            machine: consts::ARCH,
            release: probe::kernel_release(),
            page_size: probe::page_size(),
            cpu_model: probe::cpu_model(root),
            usable_cpus: numa::current_cpu_count(),
            stores: trial.is_ok().then(Stores::of_host),
            thp: hugepages::thp(root),
            thp_is_switched_off: probe::thp_is_switched_off(),
            pools: hugepages::pools(root),
            uffd_syscall: probe::uffd_syscall(),
            uffd_device: probe::uffd_device(),
            uffd_unprivileged: probe::uffd_is_unprivileged(root),
            uffd_features: probe::uffd_features(),
            memlock: probe::memlock_limit(),
            // If it cannot be read, the report shows the limit, which is on the safe side.
            is_memlock_exempt: capabilities(None)
                .is_ok_and(|sets| sets.effective.contains(CapabilitySet::IPC_LOCK)),
            max_map_count: probe::max_map_count(root),
            overcommit: probe::overcommit(root),
            nodes: numa::nodes(root),
            dax: dax::devices(root),
            memory: memory::system(root),
            available: memory::available(root),
            trial,
        }
    }
}

impl Stores {
    fn of_host() -> Self {
        let policy = StorePolicy::current();
        // A store that the user names is not second-guessed.
        let faster = match policy.basis() {
            Basis::Environment => None,
            _ => faster_stores().filter(|faster| faster.to_string() != policy.to_string()),
        };
        let available = Path::ALL.into_iter().filter(|path| path.is_available());
        Self {
            available: available.map(Path::name).collect(),
            chosen: policy.store(Work::Fill).name(),
            policy: policy.to_string(),
            basis: policy.basis(),
            problem: StorePolicy::problem().map(ToString::to_string),
            faster_policy: faster.map(|faster| faster.to_string()),
        }
    }
}

fn try_to_map() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let mut mapping = Exclusive::anonymous(TRIAL, Anonymous::default())?;
    mapping.populate(0..TRIAL.get())?;
    Ok(())
}
