//! [`heat`]: which addresses were wanted when.

use super::axis::Axis;
use super::legend::{Sample, legend};
use crate::canvas::{Anchor, Canvas, fit};
use crate::chart::{Heat, Unit};
use crate::text::count;

/// How many shades there are.
pub(crate) const SHADES: usize = 5;

/// Returns the shade of a cell and the least count of each shade.
fn shades(counts: &[u64]) -> (impl Fn(u64) -> Option<usize>, Vec<u64>) {
    let most = counts.iter().copied().max().unwrap_or(0);
    // Each shade begins at a multiple of the one before.
    let step = crate::text::float(most.max(1)).powf(1.0 / count(SHADES)).max(1.0001);
    let mut least: Vec<u64> = (0..SHADES)
        .map(|shade| {
            let floor = step.powf(count(shade)).round();
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "between 1 and the largest count"
            )]
            let floor = floor as u64;
            floor.max(1)
        })
        .collect();
    least.dedup();
    let steps = least.clone();
    let shade = move |found: u64| steps.iter().rposition(|least| found >= *least);
    (shade, least)
}

/// Draws the map: time to the right, addresses upwards.
pub(super) fn heat(canvas: &mut Canvas, heat: &Heat) {
    let (top, bottom) = (30.0, if canvas.is_narrow() { 270.0 } else { 350.0 });
    let y_axis = Axis::between(0.0, heat.len_bytes, Unit::Bytes, (bottom, top));
    let (left, right) = (y_axis.label_room(), canvas.width - 8.0);
    y_axis.left(canvas, left, right);
    canvas.text(0.0, 9.0, Anchor::Start, "", &fit("offset in the backing", canvas.width - 2.0));
    let x_axis = Axis::between(heat.from_ns, heat.to_ns, Unit::Ns, (left, right));
    x_axis.below(canvas, bottom, bottom, "time since the mapping was made");
    canvas.line((left, top), (left, bottom), "faint", 1.0, "");
    let size = ((right - left) / count(heat.columns), (bottom - top) / count(heat.rows));
    let (shade, least) = shades(&heat.counts);
    for row in 0..heat.rows {
        for column in 0..heat.columns {
            let found = heat.counts.get(row * heat.columns + column).copied().unwrap_or(0);
            let Some(shade) = shade(found) else { continue };
            let x = left + size.0 * count(column);
            let y = bottom - size.1 * count(row + 1);
            canvas.shade((x, y), size, shade, least.len());
        }
    }
    let mut entries = Vec::new();
    for (index, from) in least.iter().enumerate() {
        let words = match least.get(index + 1) {
            Some(next) if *next == from + 1 => from.to_string(),
            Some(next) => format!("{from} to {}", next - 1),
            None => format!("{from} or more faults"),
        };
        entries.push((Sample::Shade(index, least.len()), words));
    }
    canvas.height = legend(canvas, bottom + 46.0, &entries);
}
