//! The two pictures that are drawn: lines ([`lines`]) and a map of faults ([`heat`]).
//!
//! Units: pixels of the view box, which a page scales to its column. Classes and colours are the page's.

use std::fmt::Write as _;

use crate::chart::{Heat, Lines, Picture, Role, Unit};
use crate::text::{cell, count, escape, float};

const WIDTH: f64 = 480.0;
const HEIGHT: f64 = 280.0;
/// The plot: left, right, top and bottom.
const LEFT: f64 = 64.0;
const RIGHT: f64 = WIDTH - 22.0;
const TOP: f64 = 24.0;
const BOTTOM: f64 = HEIGHT - 44.0;
/// An axis has at most so many named points.
const TICKS: usize = 6;

/// Returns a picture as an element of a page.
pub(crate) fn svg(picture: &Picture, title: &str) -> String {
    let body = match picture {
        Picture::Lines(picture) => lines(picture),
        Picture::Heat(picture) => heat(picture),
    };
    format!(
        "<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\">\n<title>{}</title>\n{body}</svg>\n",
        escape(title)
    )
}

/// From a range of values to a range of pixels.
struct Axis {
    low: f64,
    high: f64,
    /// The base of a logarithmic axis.
    base: Option<f64>,
    unit: Unit,
    from: f64,
    to: f64,
}

impl Axis {
    /// An axis between two values.
    fn even(low: f64, high: f64, unit: Unit, (from, to): (f64, f64)) -> Self {
        let high = if high > low && high.is_finite() { high } else { low + 1.0 };
        Self { low, high, base: None, unit, from, to }
    }

    /// A logarithmic axis between powers of `base`, which holds all of `values` that are above 0.
    fn powers(
        base: f64,
        values: impl Iterator<Item = f64>,
        unit: Unit,
        (from, to): (f64, f64),
    ) -> Self {
        let above = values.filter(|value| value.is_finite() && *value > 0.0);
        let (low, high) =
            above.fold((f64::MAX, 0.0_f64), |(low, high), value| (low.min(value), high.max(value)));
        let (low, high) = if high > 0.0 { (low, high) } else { (1.0, base) };
        let power = |value: f64| value.clamp(1e-9, 1e30).log(base);
        let low = (power(low) + 1e-9).floor();
        let high = (power(high) - 1e-9).ceil().max(low + 1.0);
        let (low, high) = (base.powf(low), base.powf(high));
        Self { low, high, base: Some(base), unit, from, to }
    }

    /// Returns where a value is; beyond the ends, at the end.
    fn at(&self, value: f64) -> f64 {
        let share = match self.base {
            Some(_) => (value.max(self.low) / self.low).ln() / (self.high / self.low).ln(),
            None => (value - self.low) / (self.high - self.low),
        };
        let share = if share.is_finite() { share.clamp(0.0, 1.0) } else { 0.0 };
        self.from + (self.to - self.from) * share
    }

    /// Returns the points that are named, evenly spaced.
    fn ticks(&self) -> Vec<f64> {
        if let Some(base) = self.base {
            let powers = cell((self.high / self.low).log(base) / 400.0 + 1e-9, 400);
            let step = powers.div_ceil(TICKS - 1).max(1);
            let at = |power| self.low * base.powf(count(power));
            return (0..=powers).step_by(step).map(at).collect();
        }
        let step = round_step((self.high - self.low) / count(TICKS - 1), self.unit);
        let first = (self.low / step - 1e-9).ceil();
        let at = |index| (first + count(index)) * step;
        (0..TICKS).map(at).take_while(|value| *value <= self.high + step * 1e-6).collect()
    }

    fn below(&self, body: &mut String, name: &str) {
        for tick in self.ticks() {
            let x = self.at(tick);
            line(body, (x, TOP), (x, BOTTOM + 4.0), "rule");
            text(body, (x, BOTTOM + 18.0), "middle", &self.unit.text(tick));
        }
        text(body, (f64::midpoint(LEFT, RIGHT), HEIGHT - 8.0), "middle", name);
    }

    fn left(&self, body: &mut String, name: &str) {
        for tick in self.ticks() {
            let y = self.at(tick);
            line(body, (LEFT - 4.0, y), (RIGHT, y), "rule");
            text(body, (LEFT - 7.0, y + 4.0), "end", &self.unit.text(tick));
        }
        text(body, (2.0, 12.0), "start", name);
    }
}

/// Returns the next of 1, 2 and 5 times a power of ten, or of two for bytes, from `least` on.
fn round_step(least: f64, unit: Unit) -> f64 {
    let least = if least.is_finite() && least > 0.0 { least } else { 1.0 };
    if unit == Unit::Bytes {
        return 2.0_f64.powf(least.log2().ceil()).max(1.0);
    }
    let power = 10.0_f64.powf(least.log10().floor());
    let steps = [1.0, 2.0, 5.0, 10.0];
    let step = steps.into_iter().find(|step| step * power >= least * (1.0 - 1e-9)).unwrap_or(10.0);
    step * power
}

fn text(body: &mut String, (x, y): (f64, f64), anchor: &str, text: &str) {
    // Writing to a String does not fail.
    let _ = writeln!(
        body,
        r#"<text x="{x:.1}" y="{y:.1}" text-anchor="{anchor}">{}</text>"#,
        escape(text)
    );
}

fn line(body: &mut String, from: (f64, f64), to: (f64, f64), class: &str) {
    path(body, &[from, to], class);
}

fn path(body: &mut String, points: &[(f64, f64)], class: &str) {
    let list: Vec<String> = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
    let _ = writeln!(body, r#"<polyline points="{}" class="{class}"/>"#, list.join(" "));
}

/// Draws the lines, ours last and so on top.
fn lines(lines: &Lines) -> String {
    let mut body = String::new();
    let points = || lines.series.iter().flat_map(|series| series.points.iter());
    let vertical = (BOTTOM, TOP);
    let y_axis = if lines.is_log {
        Axis::powers(10.0, points().map(|point| point.1), lines.y_unit, vertical)
    } else {
        let most = points().map(|point| point.1).fold(0.0, f64::max);
        let step = round_step(most / count(TICKS - 1), lines.y_unit);
        Axis::even(0.0, (most / step).ceil() * step, lines.y_unit, vertical)
    };
    let sweeps = lines.series.iter().filter(|series| series.points.len() > 1);
    let xs = sweeps.flat_map(|series| series.points.iter().map(|point| point.0));
    let x_axis = Axis::powers(2.0, xs, lines.x_unit, (LEFT, RIGHT));
    x_axis.below(&mut body, lines.x_axis);
    y_axis.left(&mut body, lines.y_axis);
    let mut order: Vec<_> = lines.series.iter().collect();
    order.sort_by_key(|series| (series.role == Role::Ours, series.role != Role::Peer));
    for series in order {
        let class = series.role.class();
        if let [(_, level)] = series.points[..] {
            let y = y_axis.at(level);
            line(&mut body, (LEFT, y), (RIGHT, y), class);
            continue;
        }
        let at: Vec<(f64, f64)> =
            series.points.iter().map(|(x, y)| (x_axis.at(*x), y_axis.at(*y))).collect();
        path(&mut body, &at, class);
        for ((x, y), point) in at.iter().zip(&series.points) {
            let title = format!(
                "{}, {}: {}",
                series.name,
                lines.x_unit.text(point.0),
                lines.y_unit.text(point.1)
            );
            let _ = writeln!(
                body,
                r#"<circle cx="{x:.1}" cy="{y:.1}" r="3.5" class="{class}"><title>{}</title></circle>"#,
                escape(&title)
            );
        }
    }
    body
}

/// Draws the map: time to the right, addresses upwards. The more faults, the darker.
fn heat(heat: &Heat) -> String {
    let mut body = String::new();
    let rows = heat.counts.len() / heat.columns.max(1);
    let y_axis = Axis::even(0.0, heat.len_bytes, Unit::Bytes, (BOTTOM, TOP));
    let x_axis = Axis::even(heat.from_ns, heat.to_ns, Unit::Ns, (LEFT, RIGHT));
    x_axis.below(&mut body, "time since the mapping was made");
    y_axis.left(&mut body, "offset in the backing");
    let (wide, high) = ((RIGHT - LEFT) / count(heat.columns), (BOTTOM - TOP) / count(rows.max(1)));
    let most = heat.counts.iter().copied().max().unwrap_or(0);
    for (row, counts) in heat.counts.chunks(heat.columns.max(1)).enumerate() {
        for (column, found) in counts.iter().enumerate().filter(|(_, found)| **found > 0) {
            let shade = 0.2 + 0.8 * (float(*found).ln_1p() / float(most).ln_1p());
            let (x, y) = (LEFT + wide * count(column), BOTTOM - high * count(row + 1));
            let _ = writeln!(
                body,
                r#"<rect x="{x:.1}" y="{y:.1}" width="{wide:.1}" height="{high:.1}" fill-opacity="{shade:.2}"><title>{found}</title></rect>"#
            );
        }
    }
    body
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_few_and_inside() {
        let pixels = (10.0, 90.0);
        assert_eq!(
            Axis::even(0.0, 50.0, Unit::Plain, pixels).ticks(),
            [0.0, 10.0, 20.0, 30.0, 40.0, 50.0]
        );
        let axis = Axis::powers(10.0, [3e3, 7e7].into_iter(), Unit::Ns, pixels);
        assert_eq!((axis.low.round(), axis.high.round()), (1e3, 1e8));
        for values in [vec![], vec![0.0], vec![f64::NAN], vec![f64::MAX, 1e-300], vec![5.0]] {
            for unit in [Unit::Plain, Unit::Ns, Unit::Bytes] {
                let first = values.first().copied().unwrap_or(0.0);
                for axis in [
                    Axis::powers(2.0, values.iter().copied(), unit, pixels),
                    Axis::powers(10.0, values.iter().copied(), unit, pixels),
                    Axis::even(0.0, first, unit, pixels),
                ] {
                    assert!(axis.ticks().len() <= TICKS, "{values:?}");
                    for value in [0.0, 1.0, f64::MAX, f64::NAN, f64::INFINITY] {
                        assert!((10.0..=90.0).contains(&axis.at(value)), "{values:?} {value}");
                    }
                }
            }
        }
    }
}
