//! The facts as raw figures, for programs: [`Figures`].
//!
//! The last word of a key is the unit. `null` is a fact that could not be read, or a limit that does not exist; the check
//! of the same name tells these apart.

use std::io;

use serde::Serialize;
use uzone_os::hugepages::Pool;
use uzone_os::memory::Limit;
use uzone_os::probe::uffd_is_absent;
use uzone_pages::ByteLen;

use super::checks::missing_features;
use super::facts::{Facts, Stores};

/// Declares structs that are printed, with schemas.
macro_rules! printed {
    ($($(#[$doc:meta])* struct $name:ident { $($(#[$of:meta])* $field:ident: $type:ty,)* })*) => { $(
        $(#[$doc])*
        #[derive(Debug, Serialize)]
        #[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
        pub(super) struct $name { $($(#[$of])* $field: $type,)* }
    )* };
}

printed! {
    /// All figures of a host.
    struct Figures {
        kernel: Kernel,
        memory: Memory,
        numa_nodes: Option<Vec<Node>>,
        dax_devices: Option<Vec<Dax>>,
        cpu: Cpu,
        stores: Option<Stores>,
        transparent_huge_pages: Option<Thp>,
        huge_page_pools: Option<Vec<HugePool>>,
        huge_page_pools_by_node: Option<Vec<HugePool>>,
        calls: Calls,
        userfaultfd: Userfaultfd,
        limits: Limits,
    }
    struct Kernel { system: &'static str, release: String, machine: &'static str, page_size_bytes: u64, }
    struct Memory {
        host_total_bytes: Option<u64>,
        host_available_bytes: Option<u64>,
        available_bytes: Option<u64>,
        /// The limit of the available bytes.
        limited_by: Option<&'static str>,
        /// The path of a control group.
        limited_by_path: Option<String>,
    }
    struct Node { node: u32, cpus: Vec<u32>, total_bytes: u64, free_bytes: u64, }
    struct Dax { name: String, size_bytes: u64, align_bytes: u64, node: Option<u32>, }
    struct Cpu { model: Option<Option<String>>, usable_cpus: Option<usize>, }
    struct Thp {
        enabled: &'static str,
        defrag: &'static str,
        shmem: &'static str,
        size_bytes: u64,
        switched_off_for_process: bool,
    }
    struct HugePool {
        /// The node, of a pool by node.
        #[serde(skip_serializing_if = "Option::is_none")]
        node: Option<u32>,
        page_size_bytes: u64,
        total_pages: u64,
        free_pages: u64,
        surplus_pages: u64,
        #[serde(skip_serializing_if = "Option::is_none")]
        reserved_pages: Option<u64>,
        #[serde(skip_serializing_if = "Option::is_none")]
        overcommit_pages: Option<u64>,
    }
    struct Calls { madv_collapse: bool, }
    struct Userfaultfd {
        system_call: &'static str,
        device: &'static str,
        unprivileged: Option<bool>,
        features: Option<Vec<&'static str>>,
        missing_features: Option<Vec<&'static str>>,
        features_raw: Option<u64>,
        ioctls: Option<Vec<&'static str>>,
    }
    struct Limits {
        memlock_bytes: Option<u64>,
        memlock_is_exempt: bool,
        max_map_count: Option<u64>,
        overcommit: Option<&'static str>,
    }
}

impl From<&Facts> for Figures {
    fn from(facts: &Facts) -> Self {
        let thp = facts.thp.as_ref().ok().and_then(Option::as_ref);
        let features = facts.uffd_features.as_ref().ok();
        Self {
            kernel: Kernel {
                system: facts.system,
                release: facts.release.clone(),
                machine: facts.machine,
                page_size_bytes: facts.page_size.bytes(),
            },
            memory: memory(facts),
            numa_nodes: each(facts.nodes.as_deref(), |node| Node {
                node: node.number,
                cpus: node.cpus.clone(),
                total_bytes: node.total.get(),
                free_bytes: node.free.get(),
            }),
            dax_devices: each(facts.dax.as_deref(), |(name, device)| Dax {
                name: name.clone(),
                size_bytes: device.size.get(),
                align_bytes: device.align.bytes(),
                node: device.node,
            }),
            cpu: Cpu {
                model: facts.cpu_model.as_ref().ok().cloned(),
                usable_cpus: facts.usable_cpus.as_ref().ok().copied(),
            },
            stores: facts.stores.clone(),
            transparent_huge_pages: thp.map(|thp| Thp {
                enabled: thp.enabled,
                defrag: thp.defrag,
                shmem: thp.shmem,
                size_bytes: thp.pmd_size.get(),
                switched_off_for_process: facts.thp_is_switched_off,
            }),
            huge_page_pools: each(facts.pools.as_deref(), |one| HugePool {
                reserved_pages: Some(one.reserved),
                overcommit_pages: Some(one.overcommit),
                ..pool(None, one)
            }),
            huge_page_pools_by_node: each(facts.node_pools.as_deref(), |(node, one)| {
                pool(Some(*node), one)
            }),
            calls: Calls { madv_collapse: facts.can_collapse },
            userfaultfd: Userfaultfd {
                system_call: access(&facts.uffd_syscall),
                device: access(&facts.uffd_device),
                unprivileged: facts.uffd_unprivileged.as_ref().ok().copied(),
                features: features.map(|(features, _)| features.names().collect()),
                missing_features: features.map(|(features, _)| missing_features(*features)),
                features_raw: features.map(|(features, _)| features.bits()),
                ioctls: features.map(|(_, ioctls)| ioctls.clone()),
            },
            limits: Limits {
                memlock_bytes: facts.memlock.map(ByteLen::get),
                memlock_is_exempt: facts.is_memlock_exempt,
                max_map_count: facts.max_map_count.as_ref().ok().copied(),
                overcommit: facts.overcommit.as_ref().ok().map(|mode| match mode {
                    0 => "heuristic",
                    1 => "always",
                    _ => "never",
                }),
            },
        }
    }
}

fn memory(facts: &Facts) -> Memory {
    let host = facts.memory.as_ref().ok();
    let available = facts.available.as_ref().ok();
    let limit = available.map(|available| match &available.limited_by {
        Limit::System => ("system", None),
        Limit::Cgroup { path } => ("cgroup", Some(path.to_string_lossy().into_owned())),
        Limit::AddressSpace => ("address_space", None),
        Limit::Data => ("data", None),
        _ => ("other", None),
    });
    Memory {
        host_total_bytes: host.map(|(total, _)| total.get()),
        host_available_bytes: host.map(|(_, available)| available.get()),
        available_bytes: available.map(|available| available.bytes.get()),
        limited_by: limit.as_ref().map(|(word, _)| *word),
        limited_by_path: limit.and_then(|(_, path)| path),
    }
}

fn pool(node: Option<u32>, pool: &Pool) -> HugePool {
    HugePool {
        node,
        page_size_bytes: pool.size.bytes(),
        total_pages: pool.total,
        free_pages: pool.free,
        surplus_pages: pool.surplus,
        reserved_pages: None,
        overcommit_pages: None,
    }
}

fn each<T, F, E>(items: Result<&[T], E>, figures: fn(&T) -> F) -> Option<Vec<F>> {
    items.ok().map(|items| items.iter().map(figures).collect())
}

fn access(access: &io::Result<bool>) -> &'static str {
    match access {
        Ok(true) => "full",
        Ok(false) => "user_mode_only",
        Err(cause) if cause.kind() == io::ErrorKind::PermissionDenied => "denied",
        Err(cause) if uffd_is_absent(cause) => "absent",
        Err(_) => "failed",
    }
}
