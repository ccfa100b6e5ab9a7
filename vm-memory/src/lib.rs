//! Memory of uzone as the guest memory of the crate [`vm_memory`], which the devices of `rust-vmm` take.
//!
//! A [`GuestRegion`] is a region, a pagemap, a lazy mapping or blocks of a host pool at a guest address.
//! [`GuestMemory`] is a set of them, and answers accesses across their borders. KVM touches a guest's memory in the kernel:
//! a lazy mapping for it is made with [`KernelFaults::Required`](uzone::lazy::KernelFaults::Required).
//!
//! ```
//! use uzone::{ByteLen, Region};
//! use uzone_vm_memory::{GuestMemory, GuestRegion};
//! use vm_memory::{Bytes, GuestAddress};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let region = Region::anonymous(ByteLen::mib(64))?;
//! let region = GuestRegion::new(GuestAddress(0), region).ok_or("it ends beyond every guest address")?;
//! let memory = GuestMemory::from_regions(vec![region])?;
//! memory.write_obj(7_u32, GuestAddress(0x1000))?;
//! assert_eq!(memory.read_obj::<u32>(GuestAddress(0x1000))?, 7);
//! # Ok(())
//! # }
//! ```
//!
//! | file | mechanism |
//! |---|---|
//! | `region` | [`GuestRegion`]: the memory, its guest address, and its volatile slices |
//! | `written` | [`WrittenPages`]: the pages that were written, as a bitmap of `vm_memory` |
//!
//! The example `vmm` restores a VM's memory from a packed image.
//! Unsafe: `region` makes volatile slices, which the trait asks for and has no safe constructor for.

mod region;
mod written;

pub use region::{GuestMemory, GuestRegion, HostMemory};
pub use written::WrittenPages;
