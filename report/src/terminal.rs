//! The same charts as text ([`text`]), for a terminal or a log.

use std::fmt::Write as _;

use crate::bench::Role;
use crate::chart::{Bars, Chart, Columns, Heat, Lines, Plot, Section, Spans, Unit};
use crate::draw::{MOST_ROWS, shades};
use crate::text::{cell, count, float, number, plain};

/// What a terminal can show.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Look {
    /// How many letters a line has.
    pub columns: usize,
    /// Whether colours may be used.
    pub has_color: bool,
    /// Whether letters beyond ASCII are shown.
    pub has_unicode: bool,
}

impl Look {
    /// A terminal of so many columns, at least 40, without colour and with ASCII alone.
    #[must_use]
    pub fn new(columns: usize) -> Self {
        Self { columns: columns.clamp(40, 200), has_color: false, has_unicode: false }
    }

    /// The same with colour, or without.
    #[must_use]
    pub fn color(self, has_color: bool) -> Self {
        Self { has_color, ..self }
    }

    /// The same with letters beyond ASCII, or without.
    #[must_use]
    pub fn unicode(self, has_unicode: bool) -> Self {
        Self { has_unicode, ..self }
    }

    fn paint(self, code: &str, text: &str) -> String {
        if self.has_color && !text.trim().is_empty() {
            format!("\x1b[{code}m{text}\x1b[0m")
        } else {
            text.to_owned()
        }
    }

    fn bar(self) -> &'static str {
        if self.has_unicode { "\u{2588}" } else { "#" }
    }

    /// What stands for each shade, the lightest first.
    fn shades(self) -> [char; 5] {
        if self.has_unicode {
            ['\u{b7}', '\u{2591}', '\u{2592}', '\u{2593}', '\u{2588}']
        } else {
            ['.', ':', '+', '*', '#']
        }
    }

    /// Returns text that such a terminal shows.
    fn letters(self, text: &str) -> String {
        let text = plain(text);
        if self.has_unicode {
            return text.into_owned();
        }
        text.chars()
            .map(|letter| match letter {
                '\u{b7}' => ',',
                '\u{2013}' => '-',
                letter if letter.is_ascii() => letter,
                _ => '?',
            })
            .collect()
    }

    fn padded(self, text: &str, wide: usize) -> String {
        let text = self.letters(text);
        let letters = text.chars().count();
        if letters <= wide {
            return text + &" ".repeat(wide - letters);
        }
        let kept: String = text.chars().take(wide.saturating_sub(2)).collect();
        kept + if wide < 2 { "" } else { ".." }
    }
}

/// Returns the charts of some sections.
pub(crate) fn text(sections: &[Section], look: Look) -> String {
    let mut text = String::new();
    for section in sections {
        // Writing to a String does not fail.
        let _ = writeln!(text, "{}", look.paint("1", &look.letters(&section.title)));
        let _ = writeln!(text, "{}", look.letters(&section.note));
        for chart in &section.charts {
            text.push('\n');
            write_chart(&mut text, chart, look);
        }
        for (id, reason) in &section.skipped {
            let _ =
                writeln!(text, "\nnot measured: {}: {}", look.letters(id), look.letters(reason));
        }
        text.push('\n');
        for line in &section.foot {
            let _ = writeln!(text, "{}", look.paint("2", &look.letters(line)));
        }
        text.push('\n');
    }
    text.truncate(text.trim_end().len());
    text.push('\n');
    text
}

fn write_chart(text: &mut String, chart: &Chart, look: Look) {
    let _ = writeln!(text, "{}", look.paint("1", &look.letters(&chart.title)));
    match &chart.plot {
        Plot::Bars(plot) => bars(text, plot, look),
        Plot::Spans(plot) => spans(text, plot, look),
        Plot::Lines(plot) => lines(text, plot, look),
        Plot::Columns(plot) => columns(text, plot, look),
        Plot::Heat(plot) => heat(text, plot, look),
    }
}

fn code(role: Role) -> &'static str {
    match role {
        Role::Ours => "36",
        Role::Naive => "33",
        Role::Limit => "1",
        Role::Peer | Role::Published => "2",
    }
}

/// Returns how wide labels are, and what is left for marks, beside texts so wide.
fn split<'a>(look: Look, labels: impl Iterator<Item = &'a str>, texts: usize) -> (usize, usize) {
    let widest = labels.map(|label| label.chars().count()).max().unwrap_or(0);
    let label = widest.min(look.columns * 2 / 5);
    (label, look.columns.saturating_sub(label + texts + 4).clamp(8, 60))
}

fn bars(text: &mut String, plot: &Bars, look: Look) {
    let rows = &plot.rows[..plot.rows.len().min(MOST_ROWS)];
    let texts = rows.iter().map(|row| row.text.chars().count()).max().unwrap_or(0);
    let (label, room) = split(look, rows.iter().map(|row| row.label.as_str()), texts);
    let most = rows.iter().map(|row| row.value).fold(0.0, f64::max);
    for row in rows {
        let wide = if most > 0.0 { cell(row.value / most, room + 1) } else { 0 };
        let bar = look.paint(code(row.role), &look.padded(&look.bar().repeat(wide), room));
        let _ = writeln!(
            text,
            "  {} {bar} {}",
            look.padded(&row.label, label),
            look.letters(&row.text)
        );
    }
    let _ = writeln!(text, "  ({})", plot.axis);
}

fn spans(text: &mut String, plot: &Spans, look: Look) {
    let rows = &plot.rows[..plot.rows.len().min(MOST_ROWS)];
    let texts = rows.iter().map(|row| row.text.chars().count()).max().unwrap_or(0);
    let (label, room) = split(look, rows.iter().map(|row| row.label.as_str()), texts);
    let above = rows.iter().flat_map(|row| [row.low, row.high]).filter(|value| *value > 0.0);
    let (low, high) =
        above.fold((f64::MAX, 1.0_f64), |(low, high), value| (low.min(value), high.max(value)));
    let scale = (high / low.min(high)).ln().max(1e-9);
    let at = |value: f64| cell((value / low).max(1.0).ln() / scale, room);
    for row in rows {
        let mut marks = vec![' '; room];
        if row.middle > 0.0 {
            marks[at(row.low)..=at(row.high).max(at(row.low))].fill('-');
            if let Some(tick) = row.tick {
                marks[at(tick)] = '|';
            }
            marks[at(row.middle)] = 'o';
        } else {
            marks[0] = '0';
        }
        let marks: String = marks.into_iter().collect();
        let marks = look.paint(code(row.role), &marks);
        let _ = writeln!(
            text,
            "  {} {marks} {}",
            look.padded(&row.label, label),
            look.letters(&row.text)
        );
    }
    let _ = writeln!(text, "  ({})", plot.axis);
}

fn lines(text: &mut String, plot: &Lines, look: Look) {
    let steps: [char; 8] = if look.has_unicode {
        [
            '\u{2581}', '\u{2582}', '\u{2583}', '\u{2584}', '\u{2585}', '\u{2586}', '\u{2587}',
            '\u{2588}',
        ]
    } else {
        ['1', '2', '3', '4', '5', '6', '7', '8']
    };
    let scale = |y: f64| if plot.is_log { y.max(1e-9).ln() } else { y };
    let all = || plot.series.iter().flat_map(|series| &series.points).map(|point| scale(point.1));
    let low = if plot.is_log { all().fold(f64::MAX, f64::min) } else { 0.0 };
    let high = all().fold(f64::MIN, f64::max).max(low + 1e-9);
    let (label, _) = split(look, plot.series.iter().map(|series| series.name.as_str()), 24);
    for series in plot.series.iter().take(MOST_ROWS) {
        let marks = series
            .points
            .iter()
            .take(40)
            .map(|point| steps[cell((scale(point.1) - low) / (high - low), steps.len())]);
        let marks = look.paint(code(series.role), &marks.collect::<String>());
        let value = |point: Option<&(f64, f64)>| {
            point.map_or(String::new(), |point| plot.y_unit.text_of(point.1))
        };
        let (first, last) = (value(series.points.first()), value(series.points.last()));
        let ends = if series.points.len() > 1 { format!("{first} to {last}") } else { first };
        let _ = writeln!(text, "  {} {marks}  {ends}", look.padded(&series.name, label));
    }
    let points = || {
        plot.series
            .iter()
            .filter(|series| series.points.len() > 1)
            .flat_map(|series| &series.points)
    };
    let (first, last) = points().fold((f64::MAX, 0.0), |(low, high): (f64, f64), point| {
        (low.min(point.0), high.max(point.0))
    });
    let _ = writeln!(
        text,
        "  ({}; {} from {} to {})",
        plot.y_axis,
        plot.x_axis,
        plot.x_unit.text(first.min(last)),
        plot.x_unit.text(last)
    );
}

impl Unit {
    /// Returns a value with about three digits, which a point of an axis does not need.
    fn text_of(self, value: f64) -> String {
        if self == Self::Plain { number(value) } else { self.text(value) }
    }
}

fn columns(text: &mut String, plot: &Columns, look: Look) {
    let totals: Vec<u64> = plot
        .counts
        .iter()
        .map(|counts| counts.iter().fold(0, |sum: u64, count| sum.saturating_add(*count)))
        .collect();
    let first = totals.iter().position(|total| *total > 0).unwrap_or(0);
    let last = totals.iter().rposition(|total| *total > 0).unwrap_or(0);
    let most = totals.iter().copied().max().unwrap_or(0);
    let room = look.columns.saturating_sub(36).clamp(8, 60);
    // So many steps make one line that there are not more of them than a screen has.
    let stride = (last + 1 - first).div_ceil(24).max(1);
    let groups: Vec<u64> = totals[first..=last]
        .chunks(stride)
        .map(|group| group.iter().fold(0, |sum: u64, total| sum.saturating_add(*total)))
        .collect();
    let most = groups.iter().copied().max().unwrap_or(most).max(1);
    for (index, total) in groups.iter().enumerate() {
        let at = plot.edges.get(first + index * stride).copied().unwrap_or(0.0);
        let mut wide = cell(float(*total) / float(most), room + 1);
        if *total > 0 {
            wide = wide.max(1);
        }
        let bar = look.paint("36", &look.padded(&look.bar().repeat(wide), room));
        let _ = writeln!(text, "  {:>10} {bar} {total}", plot.x_unit.text(at));
    }
    let _ = writeln!(text, "  ({}, from; faults)", plot.x_axis);
}

fn heat(text: &mut String, plot: &Heat, look: Look) {
    let (shade, least) = shades(&plot.counts);
    let letters = look.shades();
    // Two cells side by side become one where there is no room for all; two rows always do.
    let stride = if plot.columns + 16 <= look.columns { 1 } else { 2 };
    for row in (0..plot.rows).step_by(2).rev() {
        let at = plot.len_bytes * count(row) / count(plot.rows.max(1));
        let line: String = (0..plot.columns)
            .step_by(stride)
            .map(|column| {
                let of = |row: usize, column: usize| {
                    let is_inside = row < plot.rows && column < plot.columns;
                    let found = is_inside.then(|| plot.counts.get(row * plot.columns + column));
                    found.flatten().copied().unwrap_or(0)
                };
                let found = (row..row + 2)
                    .flat_map(|row| (column..column + stride).map(move |column| (row, column)))
                    .map(|(row, column)| of(row, column))
                    .max()
                    .unwrap_or(0);
                shade(found).map_or(' ', |shade| {
                    // Few shades are the darkest ones.
                    letters[(letters.len() - least.len() + shade).min(letters.len() - 1)]
                })
            })
            .collect();
        let _ = writeln!(text, "  {:>10} {}", Unit::Bytes.text(at), look.paint("36", &line));
    }
    let _ = writeln!(
        text,
        "  (offset upwards, {} to {} to the right; the fullest: {} or more faults in a cell)",
        Unit::Ns.text(plot.from_ns),
        Unit::Ns.text(plot.to_ns),
        least.last().copied().unwrap_or(1)
    );
}
