//! Charts with a row for each thing that was measured ([`rows`]).
//!
//! On a page the label stands at the left of its mark, on a phone above it.

use super::axis::Axis;
use super::legend::{Sample, legend};
use crate::canvas::{Anchor, BOLD, Canvas, Ink, Shape, fit, width};
use crate::chart::{Mark, Role, Rows};
use crate::text::count;

/// How many rows of a chart are drawn; the others are in its table.
pub(crate) const MOST_ROWS: usize = 60;

/// Where the parts of rows are.
struct Place {
    /// Between which widths the plot is.
    left: f64,
    right: f64,
    /// How high a row is, how far its mark is below its top, and its label.
    height: f64,
    mark: f64,
    label_room: f64,
    is_narrow: bool,
    rows: usize,
}

const TOP: f64 = 6.0;

/// By how much a role's labels are wider than plain ones.
fn weight(role: Role) -> f64 {
    if role == Role::Ours { BOLD } else { 1.0 }
}

fn place<'a>(
    canvas: &Canvas,
    rows: impl Iterator<Item = (&'a str, Role, &'a str)> + Clone,
) -> Place {
    let texts = rows.clone().map(|(.., text)| width(text)).fold(0.0, f64::max) + 12.0;
    let count = rows.clone().count();
    if canvas.is_narrow() {
        let right = canvas.width - texts.min(canvas.width * 0.5) - 2.0;
        let label_room = canvas.width - 4.0;
        Place {
            left: 6.0,
            right,
            height: 40.0,
            mark: 26.0,
            label_room,
            is_narrow: true,
            rows: count,
        }
    } else {
        let labels = rows.map(|(label, role, _)| width(label) * weight(role));
        let label_room = labels.fold(0.0, f64::max).min(canvas.width * 0.42);
        let right = canvas.width - texts.min(canvas.width * 0.3) - 2.0;
        let left = label_room + 12.0;
        Place { left, right, height: 22.0, mark: 11.0, label_room, is_narrow: false, rows: count }
    }
}

impl Place {
    fn top(&self, row: usize) -> f64 {
        TOP + self.height * count(row)
    }

    fn bottom(&self) -> f64 {
        self.top(self.rows)
    }

    fn label(&self, canvas: &mut Canvas, row: usize, label: &str, role: Role) {
        let class = if role == Role::Ours { "bold" } else { "" };
        let label = fit(label, self.label_room / weight(role) + 0.1);
        if self.is_narrow {
            canvas.text(2.0, self.top(row) + 9.0, Anchor::Start, class, &label);
        } else {
            let y = self.top(row) + self.mark;
            canvas.text(self.left - 10.0, y, Anchor::End, class, &label);
        }
    }

    fn text(&self, canvas: &mut Canvas, row: usize, text: &str) {
        let room = canvas.width - self.right - 10.0;
        let y = self.top(row) + self.mark;
        canvas.text(self.right + 9.0, y, Anchor::Start, "", &fit(text, room));
    }
}

/// Draws a mark for each row.
pub(super) fn rows(canvas: &mut Canvas, chart: &Rows) {
    let rows = &chart.rows[..chart.rows.len().min(MOST_ROWS)];
    let mut place =
        place(canvas, rows.iter().map(|row| (row.label.as_str(), row.role, row.text.as_str())));
    let values = rows.iter().flat_map(|row| {
        let all =
            [Some(row.value), Some(row.low), Some(row.high), row.tick, row.limit, row.published];
        all.into_iter().flatten()
    });
    // A logarithmic axis has no 0: that stands beside it.
    let zero = place.left + 8.0;
    let has_zero = !chart.has_bars && rows.iter().any(|row| row.value <= 0.0);
    let room = if has_zero { 30.0 } else { 0.0 };
    place.left += room;
    let axis = if chart.has_bars {
        Axis::from_zero(values.fold(0.0, f64::max), chart.unit, (place.left, place.right))
    } else {
        Axis::log(values, chart.unit, (place.left, place.right))
    };
    axis.below(canvas, TOP, place.bottom(), &chart.axis);
    if has_zero {
        canvas.line((zero, TOP), (zero, place.bottom()), "faint", 1.0, "3 3");
    }
    place.left -= room;
    for (index, row) in rows.iter().enumerate() {
        place.label(canvas, index, &row.label, row.role);
        let y = place.top(index) + place.mark;
        let Ink { colour, .. } = row.role.ink();
        let title = format!("{}: {}", row.label, row.text);
        if chart.has_bars {
            let wide = (axis.at(row.value) - place.left).max(1.0);
            canvas.area((place.left, y - 7.0), (wide, 14.0), row.role.ink(), &title);
        } else if row.value <= 0.0 {
            canvas.point((zero, y), row.role.shape(), colour, &title);
        } else {
            canvas.line((axis.at(row.low), y), (axis.at(row.high), y), colour, 1.6, "");
            if let Some(tick) = row.tick {
                canvas.point((axis.at(tick), y), Shape::Tick, "ink", &title);
            }
            canvas.point((axis.at(row.value), y), row.role.shape(), colour, &title);
        }
        if let Some(limit) = row.limit {
            let x = axis.at(limit);
            canvas.line((x, y - 10.0), (x, y + 10.0), "paper", 4.0, "");
            canvas.line((x, y - 10.0), (x, y + 10.0), "ink", 2.0, "4 2");
        }
        if let Some(published) = row.published {
            canvas.point((axis.at(published), y), Shape::Diamond, "pink", &title);
        }
        place.text(canvas, index, &row.text);
    }
    let entries = entries(chart, rows, has_zero);
    canvas.height = legend(canvas, place.bottom() + 46.0, &entries);
}

/// Returns the entries of the legend.
fn entries(chart: &Rows, rows: &[Mark], has_zero: bool) -> Vec<(Sample, String)> {
    let mut roles: Vec<Role> = rows.iter().map(|row| row.role).collect();
    roles.sort_unstable();
    roles.dedup();
    let sample = |role: Role| match chart.has_bars {
        true => Sample::Area(role.ink()),
        false => Sample::Point(role.shape(), role.ink().colour),
    };
    let line = |colour, thick, dash| Sample::Line { colour, thick, dash, shape: None };
    let mut entries: Vec<(Sample, String)> =
        roles.into_iter().map(|role| (sample(role), role.words().to_owned())).collect();
    let mut add = |is_there: bool, sample: Sample, words: &str| {
        if is_there {
            entries.push((sample, words.to_owned()));
        }
    };
    let has = |of: fn(&Mark) -> Option<f64>| rows.iter().any(|row| of(row).is_some());
    add(!chart.line.is_empty(), line("faint", 1.6, ""), chart.line);
    add(has(|row| row.tick), Sample::Point(Shape::Tick, "ink"), chart.tick);
    add(has(|row| row.limit), line("ink", 2.0, "4 2"), "the limit of that row");
    let published = Sample::Point(Shape::Diamond, "pink");
    add(has(|row| row.published), published, Role::Published.words());
    add(has_zero, line("faint", 1.0, "3 3"), "none at all");
    entries
}
