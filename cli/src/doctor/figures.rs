//! The facts as raw figures, for machines: [`Figures`].
//!
//! Integers are raw, with the unit as the last word of the key. `null` is a fact that could not be
//! had, or (for a limit) none; the check of the same name states which.

use serde::Serialize;
use uzone_stream::Basis;

use super::checks::missing_features;
use super::facts::Facts;
use super::words;

#[derive(Debug, Serialize)]
pub(super) struct Figures<'a> {
    kernel: Kernel<'a>,
    memory: Memory<'a>,
    numa_nodes: Option<Vec<Node<'a>>>,
    cpu: Cpu<'a>,
    stores: Option<Stores<'a>>,
    transparent_huge_pages: Option<Thp>,
    huge_page_pools: Option<Vec<Pool>>,
    huge_page_pools_by_node: Option<Vec<NodePool>>,
    calls: Calls,
    userfaultfd: Userfaultfd,
    limits: Limits,
}

#[derive(Debug, Serialize)]
struct Kernel<'a> {
    system: &'static str,
    release: &'a str,
    machine: &'static str,
    page_size_bytes: u64,
}

#[derive(Debug, Serialize)]
struct Memory<'a> {
    host_total_bytes: Option<u64>,
    host_available_bytes: Option<u64>,
    available_bytes: Option<u64>,
    limited_by: Option<&'static str>,
    limited_by_path: Option<std::borrow::Cow<'a, str>>,
}

#[derive(Debug, Serialize)]
struct Node<'a> {
    node: u32,
    cpus: &'a [u32],
    total_bytes: u64,
    free_bytes: u64,
}

#[derive(Debug, Serialize)]
struct Cpu<'a> {
    model: Option<&'a str>,
    usable_cpus: Option<usize>,
}

#[derive(Debug, Serialize)]
struct Stores<'a> {
    available: Vec<&'static str>,
    chosen: &'static str,
    policy: &'a str,
    reason: &'static str,
    problem: Option<String>,
    faster_policy: Option<&'a str>,
    zero: From,
    copy: From,
    measure_ns: u64,
}

/// From which length on streaming stores are used; `null` is never.
#[derive(Debug, Serialize)]
struct From {
    cold_read_later_from_bytes: Option<usize>,
    cold_read_at_once_from_bytes: Option<usize>,
    in_cache_from_bytes: Option<usize>,
}

#[derive(Debug, Serialize)]
struct Thp {
    enabled: String,
    defrag: String,
    shmem: String,
    size_bytes: u64,
}

#[derive(Debug, Serialize)]
struct Pool {
    page_size_bytes: u64,
    total_pages: u64,
    free_pages: u64,
    reserved_pages: u64,
    surplus_pages: u64,
    overcommit_pages: u64,
}

#[derive(Debug, Serialize)]
struct NodePool {
    node: u32,
    page_size_bytes: u64,
    total_pages: u64,
    free_pages: u64,
    surplus_pages: u64,
}

#[derive(Debug, Serialize)]
struct Calls {
    madv_populate_write: bool,
    madv_collapse: bool,
    pagemap_scan: Option<bool>,
}

#[derive(Debug, Serialize)]
struct Userfaultfd {
    system_call: &'static str,
    device: &'static str,
    unprivileged: Option<bool>,
    features: Option<Vec<&'static str>>,
    missing_features: Option<Vec<&'static str>>,
    features_raw: Option<u64>,
    ioctls: Option<Vec<&'static str>>,
}

#[derive(Debug, Serialize)]
struct Limits {
    memlock_bytes: Option<u64>,
    memlock_is_exempt: bool,
    max_map_count: Option<u64>,
    overcommit: Option<&'static str>,
}

impl<'a> Figures<'a> {
    /// Takes the figures out of the facts.
    pub(super) fn of(facts: &'a Facts) -> Self {
        Self {
            kernel: Kernel {
                system: facts.system,
                release: &facts.release,
                machine: facts.machine,
                page_size_bytes: facts.page_size.bytes(),
            },
            memory: Memory::of(facts),
            numa_nodes: facts.nodes.as_ref().ok().map(|nodes| {
                let node = |node: &'a uzone_os::numa::Node| Node {
                    node: node.number,
                    cpus: &node.cpus,
                    total_bytes: node.total.get(),
                    free_bytes: node.free.get(),
                };
                nodes.iter().map(node).collect()
            }),
            cpu: Cpu {
                model: facts.cpu_model.as_ref().ok().and_then(Option::as_deref),
                usable_cpus: facts.usable_cpus.as_ref().ok().copied(),
            },
            stores: facts.stores.as_ref().map(Stores::of),
            transparent_huge_pages: facts.thp.as_ref().ok().and_then(Option::as_ref).map(Thp::of),
            huge_page_pools: facts.pools.as_ref().ok().map(|pools| {
                let pool = |pool: &uzone_os::hugepages::Pool| Pool {
                    page_size_bytes: pool.size.page_size().bytes(),
                    total_pages: pool.total,
                    free_pages: pool.free,
                    reserved_pages: pool.reserved,
                    surplus_pages: pool.surplus,
                    overcommit_pages: pool.overcommit,
                };
                pools.iter().map(pool).collect()
            }),
            huge_page_pools_by_node: facts.node_pools.as_ref().ok().map(|pools| {
                let pool = |pool: &uzone_os::hugepages::NodePool| NodePool {
                    node: pool.node,
                    page_size_bytes: pool.size.page_size().bytes(),
                    total_pages: pool.total,
                    free_pages: pool.free,
                    surplus_pages: pool.surplus,
                };
                pools.iter().map(pool).collect()
            }),
            calls: Calls {
                madv_populate_write: facts.can_populate,
                madv_collapse: facts.can_collapse,
                pagemap_scan: facts.can_scan.as_ref().ok().copied(),
            },
            userfaultfd: Userfaultfd::of(facts),
            limits: Limits {
                memlock_bytes: facts.memlock.map(uzone_pages::ByteLen::get),
                memlock_is_exempt: facts.is_memlock_exempt,
                max_map_count: facts.max_map_count.as_ref().ok().copied(),
                overcommit: facts.overcommit.as_ref().ok().map(|&mode| words::overcommit(mode)),
            },
        }
    }
}

impl<'a> Memory<'a> {
    fn of(facts: &'a Facts) -> Self {
        let host = facts.memory.as_ref().ok();
        let available = facts.available.as_ref().ok();
        let limit = available.map(|available| words::limit(&available.limited_by));
        Self {
            host_total_bytes: host.map(|host| host.total.get()),
            host_available_bytes: host.map(|host| host.available.get()),
            available_bytes: available.map(|available| available.bytes.get()),
            limited_by: limit.map(|(word, _)| word),
            limited_by_path: limit.and_then(|(_, path)| path).map(|path| path.to_string_lossy()),
        }
    }
}

impl<'a> Stores<'a> {
    fn of(stores: &'a super::facts::Stores) -> Self {
        Self {
            available: stores.available.iter().map(|path| path.name()).collect(),
            chosen: stores.chosen.name(),
            policy: &stores.policy,
            reason: match stores.basis {
                Basis::Table => "table",
                Basis::Widest => "widest",
                Basis::Environment => "environment",
                Basis::NoStreaming => "only_one",
                _ => "other",
            },
            problem: stores.problem.as_ref().map(ToString::to_string),
            faster_policy: stores.faster.as_deref(),
            zero: From::of(stores.zero),
            copy: From::of(stores.copy),
            measure_ns: u64::try_from(stores.elapsed.as_nanos()).unwrap_or(u64::MAX),
        }
    }
}

impl From {
    fn of(from: super::facts::From) -> Self {
        Self {
            cold_read_later_from_bytes: from.cold_later,
            cold_read_at_once_from_bytes: from.cold_soon,
            in_cache_from_bytes: from.hot,
        }
    }
}

impl Thp {
    fn of(thp: &uzone_os::hugepages::Thp) -> Self {
        Self {
            enabled: thp.enabled.to_string(),
            defrag: thp.defrag.to_string(),
            shmem: thp.shmem.to_string(),
            size_bytes: thp.pmd_size.get(),
        }
    }
}

impl Userfaultfd {
    fn of(facts: &Facts) -> Self {
        let features = facts.uffd_features.as_ref().ok();
        Self {
            system_call: words::access(&facts.uffd_syscall),
            device: words::access(&facts.uffd_device),
            unprivileged: facts.uffd_unprivileged.as_ref().ok().copied(),
            features: features.map(|features| features.names().collect()),
            missing_features: features.map(missing_features),
            features_raw: features.map(|features| features.raw),
            ioctls: features.map(|features| features.ioctl_names().collect()),
        }
    }
}
