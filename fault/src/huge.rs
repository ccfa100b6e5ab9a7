//! Huge pages.
//!
//! | file | mechanism |
//! |---|---|
//! | `collapse` | making huge pages of filled ones |
//! | `transparent`, `slot` | transparent huge pages, filled whole |
//! | `blocks` | the blocks of another process's memory of which huge pages can be made |

pub(crate) mod blocks;
pub(crate) mod collapse;
pub(crate) mod slot;
pub(crate) mod transparent;
