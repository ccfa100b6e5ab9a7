//! Which charts a document has: [`sections`].

mod faults;
mod image;
mod metadata;
mod tables;

use std::iter;

use crate::chart::Section;
use crate::input::Document;

/// Returns what is shown of some documents, in their order.
pub(crate) fn sections(documents: &[Document]) -> Vec<Section> {
    let mut sections: Vec<Section> = documents
        .iter()
        .flat_map(|document| match document {
            Document::Bench(bench) => {
                let metadata = bench.metadata.as_deref().map(metadata::section);
                iter::once(tables::section(bench)).chain(metadata).collect()
            }
            Document::Metadata(metadata) => vec![metadata::section(metadata)],
            Document::Trace(trace) => vec![faults::section(trace)],
            Document::Image(map) => vec![image::section(map)],
        })
        .collect();
    let mut number = 0;
    for chart in sections.iter_mut().flat_map(|section| &mut section.charts) {
        number += 1;
        chart.id = format!("{number:02}-{}", slug(&chart.id));
    }
    sections
}

/// Returns a name as part of an id, and of the name of a file.
fn slug(name: &str) -> String {
    let letters = name.chars().map(|letter| match letter {
        'a'..='z' | '0'..='9' => letter,
        'A'..='Z' => letter.to_ascii_lowercase(),
        _ => '-',
    });
    let slug: String = letters.take(40).collect();
    slug.trim_matches('-').to_owned()
}

/// Returns a heading, or what stands for it where there is none.
fn heading(title: &str, id: &str) -> String {
    let heading = if title.is_empty() { id } else { title };
    heading.to_owned()
}

/// Returns some sentences as one text.
fn sentences(parts: &[&str]) -> String {
    let mut text = String::new();
    for part in parts.iter().filter(|part| !part.is_empty()) {
        if !text.is_empty() {
            text.push(' ');
        }
        let mut letters = part.chars();
        text.extend(letters.next().into_iter().flat_map(char::to_uppercase));
        text.push_str(letters.as_str());
        if !part.ends_with(['.', '!', '?']) {
            text.push('.');
        }
    }
    text
}
