//! What descriptors of one TiB take: the memory, and in the table what else.

use super::Where::{Both, Page};
use super::{Column, cells, foot, heading, known, numbers, tables};
use crate::chart::{Chart, Mark, Plot, Role, Rows, Section, Unit};
use crate::results::{Metadata, MetadataRow, Table};
use crate::text::{bytes, float, ns, sentences};

pub(super) fn section(metadata: &Metadata) -> Section {
    let tables = tables(&metadata.tables, &metadata.results, |row| &row.id);
    let sources = metadata.results.iter().filter_map(|row| row.source.as_deref());
    Section {
        title: "uzone bench bind --metadata".to_owned(),
        note: sentences(&[&metadata.settings]),
        charts: tables.iter().map(|(table, rows)| chart(table, rows)).collect(),
        skipped: metadata.skipped.clone(),
        foot: foot(metadata.machine.sentence(), "Figures of Linux", sources),
    }
}

fn chart(table: &Table, rows: &[&MetadataRow]) -> Chart {
    let marks = rows.iter().map(|row| {
        let role = if row.origin == "measured" { Role::Ours } else { Role::Peer };
        let resident = row.resident_bytes_per_tib;
        Mark::at(label(row), role, float(resident), bytes(resident))
    });
    let marks = Rows {
        axis: "memory of the descriptors of 1 TiB (logarithmic)".to_owned(),
        unit: Unit::Bytes,
        rows: marks.collect(),
        ..Rows::default()
    };
    let note = [&*table.note, "lower is better", "other ways are Linux's"];
    let table_of = numbers(Page, &COLUMNS, rows);
    Chart::new(&table.id, heading(&table.title, &table.id), &note, Plot::Rows(marks), table_of)
}

fn label(row: &MetadataRow) -> String {
    heading(&row.name, &row.id)
}

const COLUMNS: [Column<MetadataRow>; 10] = [
    ("row", Both, |row| Some(label(row))),
    ("id", Page, |row| Some(row.id.clone())),
    ("folio", Page, |row| known(row.folio_bytes).map(bytes)),
    ("bytes each", Both, |row| known(row.descriptor_bytes).map(|bytes| bytes.to_string())),
    ("mapped", Both, |row| row.virtual_bytes_per_tib.map(bytes)),
    ("resident", Both, |row| Some(bytes(row.resident_bytes_per_tib))),
    ("page tables", Both, |row| row.page_table_bytes_per_tib.map(bytes)),
    ("of the region", Both, |row| Some(bytes(row.region_bytes_per_tib))),
    ("bind", Both, |row| row.bind_ns.map(ns)),
    ("figures", Both, |row| Some(row.origin.to_string()).filter(|origin| !origin.is_empty())),
];

impl Metadata {
    /// Returns the headings of a table, and under these what its rows have, as text shows it.
    #[must_use]
    pub fn cells(&self, table: &Table) -> Vec<Vec<String>> {
        cells(table, &COLUMNS, &self.results, |row| &row.id)
    }
}
