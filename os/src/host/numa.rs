//! Nodes and CPUs: a list of them, the CPUs that this thread may use, and keeping to some of them.
//!
//! Source: `/sys/devices/system/node`, sched_getaffinity(2), sched_setaffinity(2).

use std::num::NonZeroU32;
use std::sync::OnceLock;

use rustix::io::Errno;
use rustix::thread::{CpuSet, Pid, sched_getaffinity, sched_setaffinity};
use uzone_pages::ByteLen;

use crate::host::root::{SysError, SystemRoot, if_there, kib_field};

const NODES: &str = "sys/devices/system/node";

/// The largest number that a list may hold: more CPUs than Linux can be built for.
const MAX_LISTED: u32 = 1 << 16;

/// One NUMA node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// Its number.
    pub number: u32,
    /// Its CPUs; none on a node of memory alone.
    pub cpus: Vec<u32>,
    /// The memory that it has.
    pub total: ByteLen,
    /// The free part of it.
    pub free: ByteLen,
}

/// Returns the numbers of a list such as `0-3,8,10-11`, in the order in which they stand there, or
/// `None` if it is no such list.
fn parse_list(text: &str) -> Option<Vec<u32>> {
    let text = text.trim();
    if text.is_empty() {
        return Some(Vec::new());
    }
    let mut numbers = Vec::new();
    for part in text.split(',') {
        let (first, last) = match part.split_once('-') {
            Some((first, last)) => (first.parse().ok()?, last.parse().ok()?),
            None => {
                let number: u32 = part.parse().ok()?;
                (number, number)
            }
        };
        if first > last || last >= MAX_LISTED {
            return None;
        }
        numbers.extend(first..=last);
        if numbers.len() > MAX_LISTED as usize {
            return None;
        }
    }
    Some(numbers)
}

/// Returns the numbers of the nodes that are online; none on a kernel without nodes.
///
/// # Errors
/// [`SysError`] names the file that could not be read or understood.
pub(crate) fn node_numbers(root: &SystemRoot) -> Result<Vec<u32>, SysError> {
    let online = root.parse(format!("{NODES}/online"), "a list of nodes", parse_list);
    Ok(if_there(online)?.unwrap_or_default())
}

/// Returns the nodes that are online; none on a kernel without nodes.
///
/// # Errors
/// [`SysError`] names the file that could not be read or understood.
pub fn nodes(root: &SystemRoot) -> Result<Vec<Node>, SysError> {
    let read = |number| {
        let meminfo = format!("{NODES}/node{number}/meminfo");
        let field = |wanted, name| root.parse(&meminfo, wanted, |text| kib_field(text, name));
        Ok(Node {
            number,
            cpus: root.parse(
                format!("{NODES}/node{number}/cpulist"),
                "a list of CPUs",
                parse_list,
            )?,
            total: ByteLen::new(field("a line MemTotal in kB", "MemTotal")?),
            free: ByteLen::new(field("a line MemFree in kB", "MemFree")?),
        })
    };
    node_numbers(root)?.into_iter().map(read).collect()
}

/// Returns whether this host had several nodes when that was asked first.
#[must_use]
pub fn has_several_nodes() -> bool {
    static SEVERAL: OnceLock<bool> = OnceLock::new();
    *SEVERAL.get_or_init(|| node_numbers(&SystemRoot::host()).is_ok_and(|nodes| nodes.len() > 1))
}

/// Returns the number of CPUs that this thread may use. A quota of its control group is another matter, and
/// `std::thread::available_parallelism` heeds it.
///
/// # Errors
/// [`SysError::Cpus`] if the kernel does not say, as on a host with more than 1024 CPUs.
pub fn current_cpu_count() -> Result<usize, SysError> {
    let set = sched_getaffinity(None).map_err(|cause| SysError::Cpus(cause.into()))?;
    Ok(set.count() as usize) // a `u32` fits: the crate compiles for 64-bit targets alone
}

/// Returns the CPUs of `cpus` that this thread may use.
///
/// # Errors
/// [`SysError::Cpus`] if the kernel does not say.
pub fn usable(cpus: impl IntoIterator<Item = u32>) -> Result<impl Iterator<Item = u32>, SysError> {
    let set = sched_getaffinity(None).map_err(|cause| SysError::Cpus(cause.into()))?;
    Ok(cpus.into_iter().filter(move |cpu| is_in(&set, *cpu)))
}

/// Returns the CPU of a thread that may use no other.
///
/// # Errors
/// [`SysError::Cpus`] if there is no such thread, or the kernel does not say.
pub fn only_cpu_of(thread: NonZeroU32) -> Result<Option<u32>, SysError> {
    // The kernel numbers threads up to 2^22.
    let Some(thread) = Pid::from_raw(thread.get().cast_signed()) else { return Ok(None) };
    let set = sched_getaffinity(Some(thread)).map_err(|cause| SysError::Cpus(cause.into()))?;
    if set.count() != 1 {
        return Ok(None);
    }
    let cpu = (0..CpuSet::MAX_CPU).find(|&cpu| set.is_set(cpu));
    Ok(cpu.and_then(|cpu| u32::try_from(cpu).ok()))
}

/// Keeps this thread to those of `cpus` that its process may use, until its affinity is set again: also to
/// others than the thread was kept to before. Memory that it touches first then comes from their node,
/// unless a memory policy is set.
///
/// # Errors
/// [`SysError::NoCpu`] if the process may use none of them; then it goes on where it was.
pub fn keep_thread_to(cpus: &[u32]) -> Result<(), SysError> {
    let asked = cpus.len();
    let mut set = CpuSet::new();
    for &cpu in cpus {
        let cpu = cpu as usize; // a `usize` has 64 bits: the crate compiles for nothing else
        if cpu < CpuSet::MAX_CPU {
            set.set(cpu);
        }
    }
    // The kernel leaves out the CPUs that the control group of the process lacks, and refuses an empty rest.
    sched_setaffinity(None, &set).map_err(|cause| {
        if cause == Errno::INVAL {
            SysError::NoCpu { asked }
        } else {
            SysError::Placement { asked, cause: cause.into() }
        }
    })
}

fn is_in(set: &CpuSet, cpu: u32) -> bool {
    let cpu = cpu as usize; // as in `keep_thread_to`
    cpu < CpuSet::MAX_CPU && set.is_set(cpu)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::root::MadeUp;

    #[test]
    fn a_thread_keeps_to_the_cpus_it_may_use_and_to_no_others() {
        let mine: Vec<u32> = usable(0..1024).unwrap().collect();
        assert_eq!(mine.len(), current_cpu_count().unwrap());
        std::thread::spawn(move || {
            keep_thread_to(&[mine[0], 5000]).unwrap();
            assert!(usable(0..1024).unwrap().eq([mine[0]]));
            let error = keep_thread_to(&[1023, 4000]).unwrap_err();
            assert!(matches!(error, SysError::NoCpu { asked: 2 }), "{error}");
            assert_eq!(current_cpu_count().unwrap(), 1);
        })
        .join()
        .unwrap();
        assert!(matches!(keep_thread_to(&[]), Err(SysError::NoCpu { asked: 0 })));
    }

    #[test]
    fn a_list_is_numbers_and_ranges_and_nothing_else() {
        for (text, numbers) in [
            ("0\n", Some(vec![0])),
            ("0-3,8,10-11", Some(vec![0, 1, 2, 3, 8, 10, 11])),
            ("\n", Some(vec![])),
            ("5-5", Some(vec![5])),
            ("3-0", None),
            ("0-", None),
            ("-1", None),
            ("0,,1", None),
            ("0-4294967295", None),
            ("65535", Some(vec![65535])),
            ("65536", None),
            ("a", None),
        ] {
            assert_eq!(parse_list(text), numbers, "{text:?}");
        }
        // Ranges that overlap do not make it grow without an end.
        let hostile = ["0-65535"; 64].join(",");
        assert_eq!(parse_list(&hostile), None);
    }

    #[test]
    fn a_made_up_host_has_the_nodes_that_stand_there() {
        let tree = MadeUp::new(&[
            ("sys/devices/system/node/online", "0,2\n"),
            ("sys/devices/system/node/node0/cpulist", "0-1,4\n"),
            (
                "sys/devices/system/node/node0/meminfo",
                "Node 0 MemTotal:  1024 kB\nNode 0 MemFree:  512 kB\n",
            ),
            ("sys/devices/system/node/node2/cpulist", "\n"),
            (
                "sys/devices/system/node/node2/meminfo",
                "Node 2 MemTotal:  2048 kB\nNode 2 MemFree:  0 kB\n",
            ),
        ]);
        assert_eq!(
            nodes(&tree.root()).unwrap(),
            [
                Node {
                    number: 0,
                    cpus: vec![0, 1, 4],
                    total: ByteLen::mib(1),
                    free: ByteLen::kib(512)
                },
                Node { number: 2, cpus: vec![], total: ByteLen::mib(2), free: ByteLen::ZERO },
            ]
        );
        let bare = MadeUp::new(&[("proc/version", "")]);
        assert_eq!(nodes(&bare.root()).unwrap(), []);
        let broken = MadeUp::new(&[("sys/devices/system/node/online", "0\n")]);
        assert!(nodes(&broken.root()).unwrap_err().is_absent());
    }
}
