//! [`columns`]: how many of each kind in each step of time or latency.

use super::axis::Axis;
use super::legend::{Sample, legend};
use crate::canvas::{Anchor, Canvas, fit};
use crate::chart::{Columns, Unit};
use crate::text::float;

/// Draws stacked columns.
pub(super) fn columns(canvas: &mut Canvas, columns: &Columns) {
    let (top, bottom) = (30.0, if canvas.is_narrow() { 200.0 } else { 230.0 });
    let most = columns.counts.iter().map(|counts| total(counts)).max().unwrap_or(0);
    let y_axis = Axis::from_zero(float(most.max(4)), Unit::Plain, (bottom, top));
    let (left, right) = (y_axis.label_room(), canvas.width - 6.0);
    y_axis.left(canvas, left, right);
    canvas.text(0.0, 9.0, Anchor::Start, "", &fit(&columns.y_axis, canvas.width - 2.0));
    let (first, last) = match columns.edges[..] {
        [first, .., last] => (first, last),
        _ => (0.0, 1.0),
    };
    let x_axis = if columns.is_log {
        Axis::log([first, last].into_iter(), columns.x_unit, (left, right))
    } else {
        Axis::between(first, last, columns.x_unit, (left, right))
    };
    x_axis.below(canvas, bottom, bottom, &columns.x_axis);
    for (edges, counts) in columns.edges.windows(2).zip(&columns.counts) {
        let (from, to) = (x_axis.at(edges[0]), x_axis.at(edges[1]));
        let mut below = 0;
        for ((name, ink), count) in columns.kinds.iter().zip(counts) {
            if *count == 0 {
                continue;
            }
            let (low, high) = (y_axis.at(float(below)), y_axis.at(float(below + count)));
            let unit = columns.x_unit;
            let title =
                format!("{} to {}, {name}: {count}", unit.text(edges[0]), unit.text(edges[1]));
            let wide = (to - from - 1.0).max(1.0);
            canvas.area((from + 0.5, high), (wide, (low - high).max(0.5)), *ink, &title);
            below = below.saturating_add(*count);
        }
    }
    let entries: Vec<(Sample, String)> =
        columns.kinds.iter().map(|(name, ink)| (Sample::Area(*ink), name.clone())).collect();
    canvas.height = legend(canvas, bottom + 46.0, &entries);
}

fn total(counts: &[u64]) -> u64 {
    counts.iter().fold(0, |sum, count| sum.saturating_add(*count))
}
