//! The facts about pages and faults.

pub(crate) mod bad_pages;
pub(crate) mod capture;
pub(crate) mod claimed;
pub(crate) mod dirty;
pub(crate) mod page_states;
pub(crate) mod record;
