//! A payload that makes a descriptor Linux's `struct page`: [`LinuxPage`], 64 bytes.
//!
//! A fresh memmap of it equals that of Linux 6.12 on x86-64 for a ZONE_DEVICE pagemap byte by
//! byte, so that our initialiser can be compared with the kernel's, and so that tools which
//! know the kernel's layout can read ours. It is a picture of the initial state only: references
//! and pins of a uzone page live in the word behind the payload, where Linux has its memory-cgroup
//! pointer and leaves it null.
//!
//! ```text
//!  word   base page or head        first tail                other tails
//!  0      flags (head: bit 6)      flags, low byte = order   flags
//!  1      pagemap                  head's address + 1        head's address + 1
//!  2      0 (driver-private)       mapcounts, all ones       0
//!  3      0 (mapping)              pages mapped, pins: 0     tail poison
//!  4      0 (index)                number of pages           0
//!  5      0 (private)              0                         0
//!  6      refcount:mapcount        0:-1                      0:-1
//!  7      the word of uzone        "                         "
//! ```
//!
//! Descriptors of 56 to 96 bytes are [`LinuxPage`] with 6 to 11 payload words: without word 6, or
//! with the address of the page's bytes as word 7 and zero words after it.
//!
//! Source: the values were read back from a running 6.12 kernel; the fields are described in the
//! kernel's `mm_types.h` and the flag bits in `page-flags-layout.h`.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::addr::Order;
use crate::kind::MemoryKind;
use crate::layout::{Class, Slot};
use crate::payload::{Payload, Refresh};

/// The flag of a head page.
const HEAD: u64 = 1 << 6;
/// The flag of a page that no allocator owns.
const RESERVED: u64 = 1 << 13;
/// The zone of device memory.
const ZONE_DEVICE: u64 = 4;
/// The value of a tail's mapping, so that a use of it faults.
const TAIL_MAPPING: u64 = 0xdead_0000_0000_0400;
/// A mapcount of minus one: mapped nowhere.
const NOT_MAPPED: u64 = 0xffff_ffff;
/// Both mapcounts of a folio that is mapped nowhere.
const FOLIO_NOT_MAPPED: u64 = u64::MAX;
/// The lowest bit of the section number, in the flags of a kernel without a virtual memmap.
const SECTION_SHIFT: u32 = 45;
/// The order of a section: 128 MiB.
const SECTION_ORDER: Order = Order::new(15);

/// The common part of the descriptors of one Linux pagemap. By default: Linux 6.12, node 0 and a
/// virtual memmap, as on most machines.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct LinuxSeed {
    /// Whether a page of a file system with direct access starts without a reference, as since Linux
    /// 6.15. In 6.12 it starts with one.
    pub dax_starts_free: bool,
    /// The number of the memory node, 0 to 1023.
    pub node: u16,
    /// The address of the pagemap's own structure.
    pub pagemap_address: u64,
    /// Whether the flags have the section number, as in a kernel without a virtual memmap: 19 bits
    /// at the top, sections of 128 MiB.
    pub section: bool,
    /// The address of page frame 0's bytes, for a kernel that keeps each page's address.
    /// It has effect in descriptors of 72 bytes and more.
    pub virtual_base: Option<u64>,
}

/// A Linux page descriptor of `WORDS + 1` 64-bit words, the last of which is uzone's own. By default it is
/// the 64-byte `struct page`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct LinuxPage<const WORDS: usize = 7> {
    words: [u64; WORDS],
}

const _: () = assert!(size_of::<crate::Page<LinuxPage>>() == 64 || cfg!(loom));

impl<const WORDS: usize> LinuxPage<WORDS> {
    /// Returns the words, in memory order.
    #[must_use]
    pub const fn words(&self) -> &[u64; WORDS] {
        &self.words
    }

    fn set(&mut self, index: usize, value: u64) {
        if let Some(word) = self.words.get_mut(index) {
            *word = value;
        }
    }

    /// Links: the node, the zone, and the section where it stands in the flags; and no CPU has
    /// touched the page yet, which is all ones.
    fn set_links(&mut self, seed: &LinuxSeed, slot: &Slot) {
        const LAST_CPUPID_SHIFT: u32 = 30;
        const LAST_CPUPID: u64 = (1 << 21) - 1;
        let node = u64::from(seed.node & 0x3ff);
        self.words[0] |= if seed.section {
            let number = slot.pfn.get() >> SECTION_ORDER.get();
            let node_shift = SECTION_SHIFT - 10;
            number << SECTION_SHIFT | node << node_shift | ZONE_DEVICE << (node_shift - 3)
        } else {
            node << 54 | ZONE_DEVICE << 51 | LAST_CPUPID << LAST_CPUPID_SHIFT
        };
    }

    fn set_counts(&mut self, refcount: u32) {
        self.set(6, u64::from(refcount) << 32 | NOT_MAPPED);
    }
}

impl<const WORDS: usize> Payload for LinuxPage<WORDS> {
    type Seed = LinuxSeed;

    /// In the order of the kernel's slow path: links, counts, reserved, pagemap; then the words
    /// of a head or a tail. The kernel writes some words of the first tail after all tails, when it
    /// prepares the head; here they are written with the tail itself, so that nothing written is ever
    /// patched.
    fn init(&mut self, seed: &LinuxSeed, slot: &Slot) {
        const { assert!(WORDS >= 6, "a struct page has at least 56 bytes") };
        self.set_links(seed, slot);
        self.set_counts(1);
        self.words[0] |= RESERVED;
        if let Some(base) = seed.virtual_base {
            self.set(7, base.wrapping_add(slot.pfn.get() << 12));
        }
        match slot.class {
            Class::Base => self.set(1, seed.pagemap_address),
            Class::Head => {
                self.words[0] |= HEAD;
                self.set(1, seed.pagemap_address);
            }
            Class::FirstTail => {
                self.words[0] |= u64::from(slot.order.get());
                self.set(1, slot.head_address + 1);
                self.set(2, FOLIO_NOT_MAPPED);
                self.set(4, slot.order.pages().get());
            }
            Class::Tail => {
                self.set(1, slot.head_address + 1);
                self.set(3, TAIL_MAPPING);
            }
        }
        self.set_counts(match slot.class {
            Class::Base | Class::Head if slot.kind == MemoryKind::FsDax => {
                u32::from(!seed.dax_starts_free)
            }
            Class::Base | Class::Head => slot.kind.initial_references(),
            Class::FirstTail | Class::Tail => 0,
        });
    }

    fn refresh(seed: &LinuxSeed) -> Refresh {
        if seed.section { Refresh::LinearWithin(SECTION_ORDER) } else { Refresh::Linear }
    }
}
