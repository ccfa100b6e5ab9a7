//! The NUMA node that the pages of a mapping come from: [`Mapping::prefer_node`].
//!
//! Unsafe: a call of mbind(2), which touches no byte.
//! Source: mbind(2), set_mempolicy(2).

use std::io;

use crate::mapping::Mapping;

/// A bit for each node that Linux can be built for.
const WORDS: usize = 16;

impl Mapping {
    /// Asks that pages which are not present yet come from a node when they are touched, and from the
    /// nearest one where that has no memory left (`MPOL_PREFERRED`). Pages that are present stay where they
    /// are. Memory of a device is not moved by this.
    ///
    /// # Errors
    /// The error of mbind(2): there is no such node, the kernel was built without nodes, or a filter of
    /// system calls forbids it, as that of common containers does.
    pub fn prefer_node(&self, node: u32) -> io::Result<()> {
        let mut nodes = [0_u64; WORDS];
        let word = nodes.get_mut(node as usize / 64).ok_or(io::ErrorKind::InvalidInput)?;
        *word = 1 << (node % 64);
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
                libc::MPOL_PREFERRED,
                nodes.as_ptr(),
                bits,
                0_u32,
            )
        };
        if answer == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

#[cfg(test)]
mod tests {
    use uzone_pages::ByteLen;

    use crate::{Anonymous, Mapping, SystemRoot, numa};

    #[test]
    #[cfg_attr(miri, ignore = "Miri has no mbind(2)")]
    fn memory_is_asked_of_a_node_that_exists_and_of_no_other() {
        let memory = Mapping::anonymous(ByteLen::mib(1), Anonymous::default()).unwrap();
        assert!(memory.prefer_node(1023).is_err());
        assert!(memory.prefer_node(1 << 20).is_err());
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
