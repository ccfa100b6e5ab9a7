//! [`lines`]: how something changes with a length or a count.

use super::axis::Axis;
use super::legend::{Sample, legend};
use crate::canvas::{Anchor, Canvas};
use crate::chart::{Lines, Role, Series};

/// The dashes of levels, which have no points to tell them apart by. The limit has its own.
const LEVELS: [&str; 6] = ["2 3", "12 3 2 3", "4 4", "1 6", "14 3 2 3 2 3", "7 7"];

/// Returns how a line looks: thickness and dashes. `before` is how many levels stand before it.
fn stroke(series: &Series, before: usize) -> (f64, &'static str) {
    if series.points.len() == 1 && series.role != Role::Limit {
        return (2.0, LEVELS[before % LEVELS.len()]);
    }
    series.role.stroke()
}

/// Draws the lines, the important ones last and so on top.
pub(super) fn lines(canvas: &mut Canvas, lines: &Lines) {
    let bottom = if canvas.is_narrow() { 250.0 } else { 300.0 };
    let top = 30.0;
    let points = || lines.series.iter().flat_map(|series| series.points.iter());
    let y_axis = if lines.is_log {
        Axis::log(points().map(|point| point.1), lines.y_unit, (bottom, top))
    } else {
        let most = points().map(|point| point.1).fold(0.0, f64::max);
        Axis::from_zero(most, lines.y_unit, (bottom, top))
    };
    let left = y_axis.label_room().min(canvas.width / 3.0);
    let right = canvas.width - 12.0;
    let xs = lines.series.iter().filter(|series| series.points.len() > 1);
    let xs = xs.flat_map(|series| series.points.iter().map(|point| point.0));
    let (low, high) = xs.fold((f64::MAX, 1.0_f64), |(low, high), x| (low.min(x), high.max(x)));
    // In powers of two, whatever they count.
    let scale = |x: f64| x.max(1e-9).log2();
    let low = low.min(high);
    let x_axis = Axis::between(scale(low) - 0.2, scale(high) + 0.2, lines.x_unit, (left, right));
    y_axis.left(canvas, left, right);
    let name = crate::canvas::fit(&lines.y_axis, canvas.width - 2.0);
    canvas.text(0.0, 9.0, Anchor::Start, "", &name);

    let mut named: Vec<f64> = points().map(|point| point.0).filter(|x| *x >= low).collect();
    named.sort_by(f64::total_cmp);
    named.dedup();
    name_each(canvas, &named, bottom, |x| (x_axis.at(scale(x)), lines.x_unit.text(x)));
    canvas.line((left, bottom), (right, bottom), "faint", 1.0, "");
    let name = crate::canvas::fit(&lines.x_axis, canvas.width - left);
    canvas.text(f64::midpoint(left, right), bottom + 32.0, Anchor::Middle, "", &name);

    let mut order = strokes(lines);
    let strokes: Vec<(f64, &'static str)> = order.iter().map(|(_, stroke)| *stroke).collect();
    order.sort_by_key(|(series, _)| (series.role == Role::Ours, series.role != Role::Peer));
    for (series, (thick, dash)) in order {
        let colour = series.role.ink().colour;
        if let [(_, level)] = series.points[..] {
            let y = y_axis.at(level);
            canvas.line((left, y), (right, y), colour, thick, dash);
            continue;
        }
        let at: Vec<(f64, f64)> =
            series.points.iter().map(|(x, y)| (x_axis.at(scale(*x)), y_axis.at(*y))).collect();
        canvas.path(&at, colour, thick, dash);
        if series.role != Role::Peer {
            for (point, (x, y)) in at.iter().zip(&series.points) {
                let title = format!(
                    "{}, {}: {}",
                    series.name,
                    lines.x_unit.text(*x),
                    lines.y_unit.text(*y)
                );
                canvas.point(*point, series.role.shape(), colour, &title);
            }
        }
    }
    let entries = entries(lines, &strokes);
    canvas.height = legend(canvas, bottom + 48.0, &entries);
}

/// Returns how each series is drawn.
fn strokes(lines: &Lines) -> Vec<(&Series, (f64, &'static str))> {
    let mut levels = 0;
    let stroke = |series| {
        let stroke = stroke(series, levels);
        levels += usize::from(series.points.len() == 1);
        (series, stroke)
    };
    lines.series.iter().map(stroke).collect()
}

/// Marks values on the axis at `bottom`, and names those whose names do not run into the one before. `place`
/// returns where a value is, and its name.
fn name_each(
    canvas: &mut Canvas,
    values: &[f64],
    bottom: f64,
    place: impl Fn(f64) -> (f64, String),
) {
    let mut free = 0.0;
    for (at, text) in values.iter().map(|value| place(*value)) {
        let half = crate::canvas::width(&text) / 2.0;
        canvas.line((at, bottom), (at, bottom + 4.0), "faint", 1.0, "");
        let middle = at.min(canvas.width - half - 1.0);
        if middle - half >= free {
            canvas.text(middle, bottom + 14.0, Anchor::Middle, "faint", &text);
            free = middle + half + 8.0;
        }
    }
}

/// Returns the entries of the legend; other ways that have a line share one.
fn entries(lines: &Lines, strokes: &[(f64, &'static str)]) -> Vec<(Sample, String)> {
    let mut entries = Vec::new();
    let mut peers = 0;
    for (series, (thick, dash)) in lines.series.iter().zip(strokes.iter().copied()) {
        let colour = series.role.ink().colour;
        let is_level = series.points.len() == 1;
        if series.role == Role::Peer && !is_level {
            peers += 1;
            continue;
        }
        let shape = (!is_level).then(|| series.role.shape());
        entries.push((Sample::Line { colour, thick, dash, shape }, series.name.clone()));
    }
    if peers > 0 {
        let (thick, dash) = Role::Peer.stroke();
        let sample = Sample::Line { colour: "grey", thick, dash, shape: None };
        entries.push((sample, format!("other ways: {peers}, each in the table")));
    }
    entries
}
