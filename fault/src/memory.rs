//! The memory whose faults are answered.
//!
//! | file | mechanism |
//! |---|---|
//! | `lazy` | [`LazyMapping`](crate::LazyMapping): memory of this process |
//! | `adopted` | [`AdoptedMemory`](crate::AdoptedMemory): memory of another process |
//! | `fault_memory`, `remote_region` | what both are to their reader, and where memory of another process is |
//! | `populate` | pages made present before they are touched, and for pins |

pub(crate) mod adopted;
pub(crate) mod fault_memory;
pub(crate) mod lazy;
pub(crate) mod populate;
pub(crate) mod remote_region;
