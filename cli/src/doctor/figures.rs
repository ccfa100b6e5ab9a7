//! The facts as raw figures, for machines: [`of`].
//!
//! Integers are raw, with the unit as the last word of the key. `null` is a fact that could not be
//! had, or (for a limit) none; the check of the same name states which.

use std::io;

use serde_json::{Value, json};
use uzone_os::hugepages::Pool;
use uzone_os::memory::Limit;
use uzone_os::probe::uffd_is_absent;
use uzone_pages::ByteLen;
use uzone_report::nanoseconds;
use uzone_stream::Basis;

use super::checks::missing_features;
use super::facts::{Facts, From, Stores};

/// Takes the figures out of the facts, with the settings of the host in the kernel's own words.
pub(super) fn of(facts: &Facts) -> Value {
    let thp = facts.thp.as_ref().ok().and_then(Option::as_ref);
    json!({
        "kernel": {
            "system": facts.system,
            "release": facts.release,
            "machine": facts.machine,
            "page_size_bytes": facts.page_size.bytes(),
        },
        "memory": memory(facts),
        "numa_nodes": each(facts.nodes.as_deref(), |node| json!({
            "node": node.number,
            "cpus": node.cpus,
            "total_bytes": node.total.get(),
            "free_bytes": node.free.get(),
        })),
        "dax_devices": each(facts.dax.as_deref(), |(name, device)| json!({
            "name": name,
            "size_bytes": device.size.get(),
            "align_bytes": device.align.bytes(),
            "node": device.node,
        })),
        "cpu": {
            "model": facts.cpu_model.as_ref().ok(),
            "usable_cpus": facts.usable_cpus.as_ref().ok(),
        },
        "stores": facts.stores.as_ref().map(stores),
        "transparent_huge_pages": thp.map(|thp| json!({
            "enabled": thp.enabled,
            "defrag": thp.defrag,
            "shmem": thp.shmem,
            "size_bytes": thp.pmd_size.get(),
            "switched_off_for_process": facts.thp_is_switched_off,
        })),
        "huge_page_pools": each(facts.pools.as_deref(), pool),
        "huge_page_pools_by_node": each(facts.node_pools.as_deref(), pool_of_node),
        "calls": {
            "madv_populate_write": facts.can_populate,
            "madv_collapse": facts.can_collapse,
            "pagemap_scan": facts.can_scan.as_ref().ok(),
        },
        "userfaultfd": userfaultfd(facts),
        "limits": limits(facts),
    })
}

fn memory(facts: &Facts) -> Value {
    let host = facts.memory.as_ref().ok();
    let available = facts.available.as_ref().ok();
    let limit = available.map(|available| limit(&available.limited_by));
    json!({
        "host_total_bytes": host.map(|(total, _)| total.get()),
        "host_available_bytes": host.map(|(_, available)| available.get()),
        "available_bytes": available.map(|available| available.bytes.get()),
        "limited_by": limit.as_ref().map(|(word, _)| word),
        "limited_by_path": limit.as_ref().and_then(|(_, path)| path.as_ref()),
    })
}

fn pool(pool: &Pool) -> Value {
    json!({
        "page_size_bytes": pool.size.bytes(),
        "total_pages": pool.total,
        "free_pages": pool.free,
        "reserved_pages": pool.reserved,
        "surplus_pages": pool.surplus,
        "overcommit_pages": pool.overcommit,
    })
}

fn pool_of_node((node, pool): &(u32, Pool)) -> Value {
    json!({
        "node": node,
        "page_size_bytes": pool.size.bytes(),
        "total_pages": pool.total,
        "free_pages": pool.free,
        "surplus_pages": pool.surplus,
    })
}

fn userfaultfd(facts: &Facts) -> Value {
    let features = facts.uffd_features.as_ref().ok();
    json!({
        "system_call": access(&facts.uffd_syscall),
        "device": access(&facts.uffd_device),
        "unprivileged": facts.uffd_unprivileged.as_ref().ok(),
        "features": features.map(|(features, _)| features.names().collect::<Vec<_>>()),
        "missing_features": features.map(|(features, _)| missing_features(*features)),
        "features_raw": features.map(|(features, _)| features.bits()),
        "ioctls": features.map(|(_, ioctls)| ioctls),
    })
}

fn limits(facts: &Facts) -> Value {
    json!({
        "memlock_bytes": facts.memlock.map(ByteLen::get),
        "memlock_is_exempt": facts.is_memlock_exempt,
        "max_map_count": facts.max_map_count.as_ref().ok(),
        "overcommit": facts.overcommit.as_ref().ok().map(|mode| match mode {
            0 => "heuristic",
            1 => "always",
            _ => "never",
        }),
    })
}

fn each<T, E>(items: Result<&[T], E>, figures: fn(&T) -> Value) -> Option<Value> {
    items.ok().map(|items| items.iter().map(figures).collect())
}

fn stores(stores: &Stores) -> Value {
    // From which length on streaming stores are used; `null` is never.
    let from = |from: From| {
        json!({
            "cold_read_later_from_bytes": from.cold_later,
            "cold_read_at_once_from_bytes": from.cold_soon,
            "in_cache_from_bytes": from.hot,
        })
    };
    json!({
        "available": stores.available.iter().map(|path| path.name()).collect::<Vec<_>>(),
        "chosen": stores.chosen.name(),
        "policy": stores.policy,
        "reason": match stores.basis {
            Basis::Table => "table",
            Basis::Widest => "widest",
            Basis::Environment => "environment",
            Basis::NoStreaming => "only_one",
            _ => "other",
        },
        "problem": stores.problem.as_ref().map(ToString::to_string),
        "faster_policy": stores.faster,
        "zero": from(stores.zero),
        "copy": from(stores.copy),
        "measure_ns": nanoseconds(stores.elapsed),
    })
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

/// Returns the word of a limit, and the path that belongs to it.
fn limit(limit: &Limit) -> (&'static str, Option<String>) {
    match limit {
        Limit::System => ("system", None),
        Limit::Cgroup { path } => ("cgroup", Some(path.to_string_lossy().into_owned())),
        Limit::AddressSpace => ("address_space", None),
        Limit::Data => ("data", None),
        _ => ("other", None),
    }
}
