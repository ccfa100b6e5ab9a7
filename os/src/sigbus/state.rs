//! The watches of this process, and whether the handler is installed.

use core::sync::atomic::{AtomicBool, Ordering};

use super::table::Table;

/// The most watches at a time.
pub const SLOTS: usize = 256;

/// The most events that wait in a watch; further ones are counted and lost.
pub const EVENTS: usize = 64;

/// The watches of this process. It is never freed, so the handler may look at it at any time.
#[cfg(not(loom))]
pub(super) static TABLE: Table<SLOTS, EVENTS> = Table::new();
/// The same, where the table is built for the model checker and this crate only has to compile.
#[cfg(loom)]
pub(super) static TABLE: std::sync::LazyLock<Table<SLOTS, EVENTS>> =
    std::sync::LazyLock::new(Table::new);

/// Whether the handler was ever installed. Relaxed is enough: it publishes nothing else.
pub(super) static IS_INSTALLED: AtomicBool = AtomicBool::new(false);

pub(crate) fn is_installed() -> bool {
    IS_INSTALLED.load(Ordering::Relaxed)
}
