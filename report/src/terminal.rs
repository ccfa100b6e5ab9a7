//! The tables of a report as text ([`text`]), for a terminal or a log.

use std::fmt::Write as _;

use crate::chart::{Section, Table};
use crate::results::Skipped;
use crate::text::{columns, plain};

/// Returns text without commands to a terminal, and with the letters of our own that are not ASCII
/// replaced.
fn letters(text: &str) -> String {
    plain(text).replace('\u{b7}', ",").replace('\u{2013}', "-")
}

/// Returns the tables of some sections.
pub(crate) fn text(sections: &[Section]) -> String {
    let mut text = String::new();
    for section in sections {
        // Writing to a String does not fail.
        let _ = writeln!(text, "{}\n{}", letters(&section.title), letters(&section.note));
        if !section.summary.rows.is_empty() {
            write_table(&mut text, &section.summary);
        }
        for chart in section.chapters.iter().flat_map(|chapter| &chapter.charts) {
            let _ = writeln!(text, "\n{}", letters(&chart.title));
            write_table(&mut text, &chart.table);
        }
        for Skipped { id, reason } in &section.skipped {
            let _ = writeln!(text, "\nnot measured: {}: {}", letters(id), letters(reason));
        }
        text.push('\n');
        for line in &section.foot {
            let _ = writeln!(text, "{}", letters(line));
        }
        text.push('\n');
    }
    text.truncate(text.trim_end().len());
    text.push('\n');
    text
}

/// Writes a table below its title.
fn write_table(text: &mut String, numbers: &Table) {
    let rows = std::iter::once(&numbers.headings).chain(&numbers.rows);
    let rows: Vec<Vec<String>> =
        rows.map(|cells| cells.iter().map(|cell| letters(cell)).collect()).collect();
    columns(&rows).lines().for_each(|line| text.push_str(&format!("  {line}\n")));
}
