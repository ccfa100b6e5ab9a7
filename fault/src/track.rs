//! What is known about pages and faults.
//!
//! | file | mechanism |
//! |---|---|
//! | `page_states` | the state of each page |
//! | `bad_pages` | making a page a bad one |
//! | `dirty` | which pages were written |
//! | `capture` | keeping pages of another process before they are written to |
//! | `record` | latencies, a trace, and a USDT probe |
//! | `observe` | what both kinds of memory let their owner see |

pub(crate) mod bad_pages;
pub(crate) mod capture;
pub(crate) mod dirty;
pub(crate) mod observe;
#[cfg_attr(miri, path = "track/page_states/plain.rs")]
pub(crate) mod page_states;
pub(crate) mod record;
