//! Charts with a row for each thing that was measured: [`bars`] and [`spans`].
//!
//! On a page the label stands at the left of its mark, on a phone above it.

use super::axis::Axis;
use super::{MOST_ROWS, Sample, is_narrow, legend};
use crate::canvas::{Anchor, BOLD, Canvas, Ink, Shape, fit, width};
use crate::chart::{Bars, Role, Spans, Unit};
use crate::text::count;

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
    if is_narrow(canvas) {
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

fn roles(of: impl Iterator<Item = Role>) -> Vec<Role> {
    let mut roles: Vec<Role> = of.collect();
    roles.sort_unstable();
    roles.dedup();
    roles
}

/// Draws a bar for each row.
pub(super) fn bars(canvas: &mut Canvas, bars: &Bars) {
    let rows = &bars.rows[..bars.rows.len().min(MOST_ROWS)];
    let place =
        place(canvas, rows.iter().map(|row| (row.label.as_str(), row.role, row.text.as_str())));
    let most = rows
        .iter()
        .flat_map(|row| [Some(row.value), row.limit, row.published])
        .flatten()
        .fold(0.0, f64::max);
    let axis = Axis::from_zero(most, Unit::Plain, (place.left, place.right));
    axis.below(canvas, TOP, place.bottom(), &bars.axis);
    for (index, row) in rows.iter().enumerate() {
        place.label(canvas, index, &row.label, row.role);
        let y = place.top(index) + place.mark;
        let title = format!("{}: {}", row.label, row.text);
        let wide = (axis.at(row.value) - place.left).max(1.0);
        canvas.area((place.left, y - 7.0), (wide, 14.0), row.role.ink(), &title);
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
    let mut entries: Vec<(Sample, String)> = roles(rows.iter().map(|row| row.role))
        .into_iter()
        .map(|role| (Sample::Area(role.ink()), role.words().to_owned()))
        .collect();
    if rows.iter().any(|row| row.limit.is_some()) {
        let sample = Sample::Line { colour: "ink", thick: 2.0, dash: "4 2", shape: None };
        entries.push((sample, "the limit of that row".to_owned()));
    }
    if rows.iter().any(|row| row.published.is_some()) {
        entries.push((Sample::Point(Shape::Diamond, "pink"), Role::Published.words().to_owned()));
    }
    canvas.height = legend(canvas, place.bottom() + 46.0, &entries);
}

/// Draws a point with its spread for each row.
pub(super) fn spans(canvas: &mut Canvas, spans: &Spans) {
    let rows = &spans.rows[..spans.rows.len().min(MOST_ROWS)];
    let mut place =
        place(canvas, rows.iter().map(|row| (row.label.as_str(), row.role, row.text.as_str())));
    let values = rows.iter().flat_map(|row| {
        let whole = [Some(row.low), Some(row.middle), Some(row.high), row.tick, row.published];
        whole.into_iter().flatten()
    });
    // A logarithmic axis has no 0: that stands beside it.
    let zero = place.left + 8.0;
    let has_zero = rows.iter().any(|row| row.middle <= 0.0);
    if has_zero {
        place.left += 30.0;
    }
    let axis = Axis::log(values, spans.unit, (place.left, place.right));
    axis.below(canvas, TOP, place.bottom(), &spans.axis);
    if has_zero {
        canvas.line((zero, TOP), (zero, place.bottom()), "faint", 1.0, "3 3");
    }
    place.left -= if has_zero { 30.0 } else { 0.0 };
    for (index, row) in rows.iter().enumerate() {
        place.label(canvas, index, &row.label, row.role);
        let y = place.top(index) + place.mark;
        let Ink { colour, .. } = row.role.ink();
        let title = format!("{}: {}", row.label, row.text);
        if row.middle <= 0.0 {
            canvas.point((zero, y), row.role.shape(), colour, &title);
        } else {
            canvas.line((axis.at(row.low), y), (axis.at(row.high), y), colour, 1.6, "");
            if let Some(tick) = row.tick {
                canvas.point((axis.at(tick), y), Shape::Tick, "ink", &title);
            }
            canvas.point((axis.at(row.middle), y), row.role.shape(), colour, &title);
        }
        if let Some(published) = row.published {
            canvas.point((axis.at(published), y), Shape::Diamond, "pink", &title);
        }
        place.text(canvas, index, &row.text);
    }
    let mut entries: Vec<(Sample, String)> = roles(rows.iter().map(|row| row.role))
        .into_iter()
        .map(|role| (Sample::Point(role.shape(), role.ink().colour), role.words().to_owned()))
        .collect();
    if !spans.line.is_empty() {
        let sample = Sample::Line { colour: "faint", thick: 1.6, dash: "", shape: None };
        entries.push((sample, spans.line.to_owned()));
    }
    if rows.iter().any(|row| row.tick.is_some()) {
        entries.push((Sample::Point(Shape::Tick, "ink"), spans.tick.to_owned()));
    }
    if rows.iter().any(|row| row.published.is_some()) {
        entries.push((Sample::Point(Shape::Diamond, "pink"), Role::Published.words().to_owned()));
    }
    if has_zero {
        let empty = Sample::Line { colour: "faint", thick: 1.0, dash: "3 3", shape: None };
        entries.push((empty, "none at all".to_owned()));
    }
    canvas.height = legend(canvas, place.bottom() + 46.0, &entries);
}
