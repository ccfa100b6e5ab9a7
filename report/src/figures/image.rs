//! The places of zero, stored and shared pages in a packed image, and of its working set.

use super::{one_chapter, stacked};
use crate::chart::{Chart, Section};
use crate::image_map::ImageMap;
use crate::text::{float, float_bytes, sentences};

const KINDS: [(&str, &str); 3] =
    [("ours", "stored"), ("naive", "shared, in an image below"), ("peer", "zero")];
const WORKING_SET: [(&str, &str); 1] = [("green", "of the working set")];

pub(super) fn section(map: &ImageMap) -> Section {
    let mut edges = vec![0.0];
    let mut end = 0_u64;
    for part in &map.parts {
        end = end.saturating_add(part.len_bytes);
        edges.push(float(end));
    }
    let chart = |title: &str, kinds, counts: Vec<Vec<u64>>| Chart {
        title: title.to_owned(),
        note: String::from("Pages by their place in the image."),
        ..stacked(&edges, kinds, &counts, ("from", "to"), float_bytes)
    };
    let counts = map.parts.iter().map(|part| vec![part.stored, part.shared, part.zero]);
    let mut charts = vec![chart("Where the pages are", &KINDS, counts.collect())];
    if map.parts.iter().any(|part| part.working_set > 0) {
        let counts = map.parts.iter().map(|part| vec![part.working_set]).collect();
        charts.push(chart("Where the pages of the working set are", &WORKING_SET, counts));
    }
    Section {
        title: map.name.clone(),
        chapters: one_chapter(charts),
        foot: map.notes.iter().map(|note| sentences(&[note])).collect(),
        ..Section::default()
    }
}
