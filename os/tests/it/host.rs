//! The limits and the facts of this host.

use std::os::fd::AsFd;

use rustix::process::{Resource, Rlimit, setrlimit};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use uzone_os::{Anonymous, MapError, Mapping, SystemRoot, hugepages, memory, numa, probe};
use uzone_pages::ByteLen;

use crate::{is_alone, skip};

#[test]
fn a_limit_on_addresses_is_named_when_it_forbids_a_mapping() {
    if !is_alone("host::a_limit_on_addresses_is_named_when_it_forbids_a_mapping") {
        return;
    }
    let limit = Rlimit { current: Some(1 << 30), maximum: Some(1 << 30) };
    setrlimit(Resource::As, limit).unwrap();
    let error = Mapping::anonymous(ByteLen::gib(2), Anonymous::default()).unwrap_err();
    let MapError::Memory { len, shortage, .. } = error else {
        panic!("{error:?}");
    };
    assert_eq!(len, ByteLen::gib(2));
    assert!(shortage.starts_with("RLIMIT_AS is 1 GiB"), "{shortage}");
    let available = memory::available(&SystemRoot::host()).unwrap();
    assert!(available.bytes < ByteLen::gib(1));
}

#[test]
fn this_host_answers_every_probe() {
    let root = SystemRoot::host();
    assert!(probe::kernel_release().starts_with(|first: char| first.is_ascii_digit()));
    probe::cpu_model(&root).unwrap();
    assert!(probe::max_map_count(&root).unwrap() > 0);
    probe::overcommit(&root).unwrap();
    let _ = probe::memlock_limit();
    let available = memory::available(&root).unwrap();
    assert!(available.bytes <= memory::system(&root).unwrap().0);
    hugepages::pools(&root).unwrap();
    let nodes = numa::nodes(&root).unwrap();
    assert!(nodes.iter().all(|node| node.free <= node.total));
    assert!(numa::current_cpu_count().unwrap() > 0);
    let _ = (probe::uffd_syscall(), probe::uffd_device());
    match probe::uffd_features() {
        Ok((features, ioctls)) => {
            assert!(ioctls.contains(&"REGISTER"));
            assert!(features.names().count() > 0);
        }
        Err(error) => skip("uffd_features", &error.to_string()),
    }
    assert!(mapping_fd_is_closed_on_exec());
}

fn mapping_fd_is_closed_on_exec() -> bool {
    let mapping = Mapping::memfd("exec", ByteLen::new(1), None).unwrap();
    let flags = rustix::io::fcntl_getfd(mapping.fd().unwrap().as_fd()).unwrap();
    flags.contains(rustix::io::FdFlags::CLOEXEC)
}

#[test]
fn the_number_of_cpus_is_that_of_the_thread_and_not_of_the_host() {
    std::thread::spawn(|| {
        let before = sched_getaffinity(None).unwrap();
        assert_eq!(numa::current_cpu_count().unwrap(), before.count() as usize);
        let first = (0..CpuSet::MAX_CPU).find(|&cpu| before.is_set(cpu)).unwrap();
        let mut one = CpuSet::new();
        one.set(first);
        sched_setaffinity(None, &one).unwrap();
        assert_eq!(numa::current_cpu_count().unwrap(), 1);
    })
    .join()
    .unwrap();
}
