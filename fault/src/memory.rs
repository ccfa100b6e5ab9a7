//! The memory whose faults are answered.

pub(crate) mod adopted;
pub(crate) mod collapse;
pub(crate) mod fault_memory;
pub(crate) mod lazy;
pub(crate) mod populate;
pub(crate) mod remote_region;
