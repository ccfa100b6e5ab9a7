//! The NUMA nodes that the pages of a mapping come from: [`Mapping::prefer_node`], [`Mapping::interleave`],
//! [`Mapping::node_of_most`].
//!
//! Unsafe: calls of mbind(2) and move_pages(2), which touch no byte, and of getcpu(2).
//! Source: mbind(2), set_mempolicy(2), move_pages(2), getcpu(2).

use core::ptr;
use std::io;

use crate::map::mapping::Mapping;

/// A bit for each node that Linux can be built for.
const WORDS: usize = 16;
/// The number of pages of a mapping that are looked at.
const SAMPLE: usize = 16;

/// Returns the node of the CPU that this thread runs on; `None` if the kernel does not say.
#[must_use]
pub fn current_node() -> Option<u32> {
    let mut node = 0_u32;
    // SAFETY: getcpu(2) writes one number to each pointer that is not null, and the last argument is unused.
    let answer = unsafe {
        let (cpu, unused) = (ptr::null_mut::<u32>(), ptr::null_mut::<u8>());
        libc::syscall(libc::SYS_getcpu, cpu, &raw mut node, unused)
    };
    (answer == 0).then_some(node)
}

impl Mapping {
    /// Asks that pages which are not present yet come from a node when they are touched, and from the
    /// nearest one where that has no memory left (`MPOL_PREFERRED`). Pages that are present stay where they
    /// are. Memory of a device is not moved by this.
    ///
    /// # Errors
    /// The error of mbind(2): there is no such node, the kernel was built without nodes, or a filter of
    /// system calls forbids it, as that of common containers does.
    pub fn prefer_node(&self, node: u32) -> io::Result<()> {
        self.set_policy(libc::MPOL_PREFERRED, &[node])
    }

    /// Asks that pages which are not present yet come from these nodes in turn when they are touched
    /// (`MPOL_INTERLEAVE`).
    ///
    /// # Errors
    /// Like [`Mapping::prefer_node`].
    pub fn interleave(&self, nodes: &[u32]) -> io::Result<()> {
        self.set_policy(libc::MPOL_INTERLEAVE, nodes)
    }

    fn set_policy(&self, policy: libc::c_int, of: &[u32]) -> io::Result<()> {
        let mut nodes = [0_u64; WORDS];
        for node in of {
            let word = nodes.get_mut(*node as usize / 64).ok_or(io::ErrorKind::InvalidInput)?;
            *word |= 1 << (node % 64);
        }
        // The kernel reads one bit less than it is given.
        let bits = WORDS * 64 + 1;
        let start = self.addr().get();
        // SAFETY: mbind(2) acts on pages of this mapping, and changes where those come from that are not
        // there yet. It reads `bits` bits of `nodes`, rounded up to words: the kernel takes one less than
        // it was given, which is all of `nodes`.
        let answer = unsafe {
            libc::syscall(
                libc::SYS_mbind,
                start,
                self.mapped_len(),
                policy,
                nodes.as_ptr(),
                bits,
                0_u32,
            )
        };
        if answer == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Returns the node that more than half of some of its pages lie on, of those that are present: 16 of them,
    /// from its start to its end. `None` if none is, if they lie on several nodes, or if the kernel does not say,
    /// as under a filter of system calls.
    ///
    /// Costs one system call, some microseconds. No page is made present.
    #[must_use]
    pub fn node_of_most(&self) -> Option<u32> {
        let (start, page) = (self.addr().get(), crate::host::probe::page_size().bytes());
        let pages = self.mapped_len() / usize::try_from(page).ok()?;
        let count = pages.min(SAMPLE);
        let mut sample = [0_usize; SAMPLE];
        for (index, address) in sample.iter_mut().enumerate().take(count) {
            *address = start + (pages * index / count) * usize::try_from(page).ok()?;
        }
        let mut nodes = [-1_i32; SAMPLE];
        // SAFETY: move_pages(2) without a list of nodes moves nothing. It reads `count` addresses, which it looks up
        // and does not follow, and writes as many numbers: both arrays have that many.
        let answer = unsafe {
            libc::syscall(
                libc::SYS_move_pages,
                0,
                count,
                sample.as_ptr(),
                ptr::null::<i32>(),
                nodes.as_mut_ptr(),
                0,
            )
        };
        if answer == 0 { most_of(&nodes) } else { None }
    }
}

/// Returns the node of more than half of some pages. That of a page that is not there is a negative number.
fn most_of(nodes: &[i32]) -> Option<u32> {
    let there = || nodes.iter().filter(|node| **node >= 0);
    let all = there().count();
    let most = there().find(|&one| there().filter(|&other| other == one).count() * 2 > all);
    most.map(|node| node.unsigned_abs())
}

#[cfg(test)]
mod tests {
    use uzone_pages::ByteLen;

    use super::{current_node, most_of};
    use crate::{Anonymous, Mapping, SystemRoot, numa};

    #[test]
    fn a_node_is_that_of_more_than_half_of_the_pages() {
        for (nodes, most) in [
            (&[][..], None),
            (&[-2, -14], None),
            (&[3], Some(3)),
            (&[0, 1], None),
            (&[0, -2, 1, 1], Some(1)),
            (&[0, 1, 2, 1], None),
        ] {
            assert_eq!(most_of(nodes), most, "{nodes:?}");
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri has no move_pages(2)")]
    fn pages_that_are_there_have_a_node_and_none_is_made_by_asking() {
        let len = ByteLen::mib(2);
        let memory = Mapping::anonymous(len, Anonymous::default()).unwrap();
        assert_eq!(memory.node_of_most(), None);
        assert_eq!(memory.resident().unwrap(), ByteLen::ZERO);
        memory.populate(0..len.get()).unwrap();
        let nodes = numa::nodes(&SystemRoot::host()).unwrap_or_default();
        let Some(node) = memory.node_of_most() else {
            eprintln!("skipped: pages_that_are_there_have_a_node: the kernel does not say");
            return;
        };
        assert!(
            nodes.is_empty() || nodes.iter().any(|it| it.number == node),
            "{node} of {nodes:?}"
        );
        let current = current_node().unwrap();
        assert!(nodes.is_empty() || nodes.iter().any(|it| it.number == current), "{current}");
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri has no mbind(2)")]
    fn memory_is_asked_of_a_node_that_exists_and_of_no_other() {
        let memory = Mapping::anonymous(ByteLen::mib(1), Anonymous::default()).unwrap();
        assert!(memory.prefer_node(1023).is_err());
        assert!(memory.prefer_node(1 << 20).is_err());
        assert!(memory.interleave(&[0, 1 << 20]).is_err());
        let nodes = numa::nodes(&SystemRoot::host()).unwrap_or_default();
        let Some(node) = nodes.last() else {
            eprintln!("skipped: a node that exists: this kernel knows none");
            return;
        };
        match memory.prefer_node(node.number) {
            Ok(()) => {
                let policies = std::fs::read_to_string("/proc/self/numa_maps").unwrap();
                let start = format!("{:08x} prefer:{}", memory.addr().get(), node.number);
                assert!(
                    policies.lines().any(|line| line.starts_with(&start)),
                    "{start}\n{policies}"
                );
            }
            Err(cause) => eprintln!("skipped: a node that exists: {cause}"),
        }
    }
}
