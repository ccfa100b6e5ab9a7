//! What the tables of `uzone bench fault` share: [`Run`].

use crate::group::Watch;
use crate::report::{Bench, Skipped};
use crate::settings::{FaultSettings, wants};

/// The page that the tables count in; a host with another one is refused.
pub(super) const PAGE: u64 = 4096;

/// What the tables are run with.
pub(super) struct Run<'a> {
    pub(super) settings: &'a FaultSettings,
    pub(super) watch: Watch<'a>,
    pub(super) bench: Bench,
    /// Whether mappings can have transparent huge pages.
    pub(super) has_huge: bool,
}

impl Run<'_> {
    /// Returns whether a table was asked for.
    pub(super) fn wants(&self, table: &str) -> bool {
        wants(&self.settings.tables, table)
    }

    pub(super) fn skip(&mut self, table: &str, reason: String) {
        if self.wants(table) {
            self.bench.skipped.push(Skipped { id: table.to_owned(), reason });
        }
    }
}
