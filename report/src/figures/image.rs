//! Where the pages of a packed image are, by place: zero, stored, shared; and its working set.

use super::faults::stacked;
use crate::canvas::{Fill, Ink};
use crate::chart::{Chart, Columns, Plot, Section, Unit};
use crate::image_map::{ImageMap, ImagePart};
use crate::text::{float, float_bytes, sentences};

/// How the pages of a chart are counted: what they are called, how they are drawn, and how many a part has.
type Kind = (&'static str, Ink, fn(&ImagePart) -> u64);

const KINDS: [Kind; 3] = [
    ("stored", Ink { fill: Fill::Solid, colour: "blue" }, |part| part.stored),
    ("shared, in an image below", Ink { fill: Fill::Diagonal, colour: "orange" }, |part| {
        part.shared
    }),
    ("zero", Ink { fill: Fill::Empty, colour: "grey" }, |part| part.zero),
];

const WORKING_SET: Kind =
    ("of the working set", Ink { fill: Fill::Dots, colour: "green" }, |part| part.working_set);

pub(super) fn section(map: &ImageMap) -> Section {
    let mut charts = vec![chart(map, "pages", "Where the pages are", &KINDS)];
    if map.parts.iter().any(|part| part.working_set > 0) {
        let title = "Where the pages of the working set are";
        charts.push(chart(map, "working-set", title, &[WORKING_SET]));
    }
    Section {
        title: map.name.clone(),
        note: String::new(),
        charts,
        skipped: Vec::new(),
        foot: map.notes.iter().map(|note| sentences(&[note])).collect(),
    }
}

fn chart(map: &ImageMap, id: &str, title: &str, kinds: &[Kind]) -> Chart {
    let mut edges = vec![0.0];
    let mut end = 0_u64;
    for part in &map.parts {
        end = end.saturating_add(part.len_bytes);
        edges.push(float(end));
    }
    let is_there = |kind: &&Kind| map.parts.iter().any(|part| kind.2(part) > 0);
    let there: Vec<&Kind> = kinds.iter().filter(is_there).collect();
    let counts: Vec<Vec<u64>> =
        map.parts.iter().map(|part| there.iter().map(|kind| kind.2(part)).collect()).collect();
    let kinds: Vec<(String, Ink)> =
        there.iter().map(|(name, ink, _)| ((*name).to_owned(), *ink)).collect();
    let table = stacked(&edges, &kinds, &counts, "from", "to", float_bytes);
    let longest = map.parts.iter().map(|part| part.len_bytes).max().unwrap_or(0);
    let plot = Plot::Columns(Columns {
        x_axis: "place in the image".to_owned(),
        x_unit: Unit::Bytes,
        is_log: false,
        y_axis: format!("pages in each {}", float_bytes(float(longest))),
        edges,
        kinds,
        counts,
    });
    Chart::new(id, title, &[], plot, table)
}
