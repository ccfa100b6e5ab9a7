//! What descriptors of one TiB take: the memory, and in the table what else.

use super::tables::{known, none};
use super::{heading, sentences};
use crate::chart::{Chart, Mark, Numbers, Plot, Role, Rows, Section, Unit};
use crate::results::{Metadata, MetadataRow, Table};
use crate::text::{bytes, float, ns};

pub(super) fn section(metadata: &Metadata) -> Section {
    let mut tables: Vec<(Table, Vec<&MetadataRow>)> =
        metadata.tables.iter().map(|table| (table.clone(), Vec::new())).collect();
    for row in &metadata.results {
        let id = row.id.split_once('/').map_or(row.id.as_str(), |(table, _)| table);
        match tables.iter_mut().find(|(table, _)| table.id == id) {
            Some((_, rows)) => rows.push(row),
            None => tables.push((Table { id: id.to_owned(), ..Table::default() }, vec![row])),
        }
    }
    tables.retain(|(_, rows)| !rows.is_empty());
    let mut sources: Vec<&str> =
        metadata.results.iter().filter_map(|row| row.source.as_deref()).collect();
    sources.sort_unstable();
    sources.dedup();
    let mut foot = vec![metadata.machine.sentence()];
    foot.extend(sources.iter().map(|source| format!("Figures of Linux: {source}")));
    Section {
        title: "uzone bench bind --metadata".to_owned(),
        note: sentences(&[&metadata.settings]),
        charts: tables.iter().map(|(table, rows)| chart(table, rows)).collect(),
        skipped: metadata
            .skipped
            .iter()
            .map(|skipped| (skipped.id.clone(), skipped.reason.clone()))
            .collect(),
        foot,
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
    Chart {
        id: table.id.clone(),
        title: heading(&table.title, &table.id),
        note: sentences(&[&table.note, "lower is better", "other ways are Linux's"]),
        plot: Plot::Rows(marks),
        table: numbers(rows),
    }
}

fn label(row: &MetadataRow) -> String {
    heading(&row.name, &row.id)
}

fn numbers(rows: &[&MetadataRow]) -> Numbers {
    let headings = [
        "row",
        "id",
        "resident/TiB",
        "mapped/TiB",
        "page tables/TiB",
        "of the region/TiB",
        "bytes each",
        "folio",
        "bind",
        "figures",
    ];
    let optional = |value: Option<u64>| value.map_or_else(none, bytes);
    let rows = rows.iter().map(|row| {
        vec![
            label(row),
            row.id.clone(),
            bytes(row.resident_bytes_per_tib),
            optional(row.virtual_bytes_per_tib),
            optional(row.page_table_bytes_per_tib),
            bytes(row.region_bytes_per_tib),
            known(row.descriptor_bytes).map_or_else(none, |bytes| bytes.to_string()),
            optional(known(row.folio_bytes)),
            row.bind_ns.map_or_else(none, ns),
            heading(&row.origin, "\u{2013}"),
        ]
    });
    Numbers { headings: headings.map(String::from).into(), rows: rows.collect() }
}
