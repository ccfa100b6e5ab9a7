//! The memory whose faults are answered.

pub(crate) mod adopted;
pub(crate) mod collapse;
pub(crate) mod kernel;
pub(crate) mod lazy;
pub(crate) mod mapping;
pub(crate) mod own;
pub(crate) mod populate;
pub(crate) mod prefetch;
pub(crate) mod remote;
pub(crate) mod remote_region;
