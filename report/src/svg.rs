//! The picture that is drawn: a map of faults ([`svg`]).
//!
//! Units: pixels of the view box, which a page scales to its column. Classes and colours are the page's.

use std::fmt::Write as _;

use crate::chart::Heat;
use crate::text::{count, escape, float, float_bytes, float_ns};

const WIDTH: f64 = 480.0;
const HEIGHT: f64 = 280.0;
/// The plot: left, right, top and bottom.
const LEFT: f64 = 64.0;
const RIGHT: f64 = WIDTH - 22.0;
const TOP: f64 = 24.0;
const BOTTOM: f64 = HEIGHT - 44.0;
/// The number of steps between named points of an axis.
const STEPS: usize = 4;

/// Returns a map as an element of a page: time to the right, addresses upwards. The more faults, the darker.
pub(crate) fn svg(heat: &Heat, title: &str) -> String {
    let mut body = String::new();
    for step in 0..=STEPS {
        let share = count(step) / count(STEPS);
        let x = LEFT + (RIGHT - LEFT) * share;
        line(&mut body, (x, TOP), (x, BOTTOM + 4.0));
        let time = heat.from_ns + (heat.to_ns - heat.from_ns) * share;
        text(&mut body, (x, BOTTOM + 18.0), "middle", &float_ns(time));
        let y = BOTTOM - (BOTTOM - TOP) * share;
        line(&mut body, (LEFT - 4.0, y), (RIGHT, y));
        text(&mut body, (LEFT - 7.0, y + 4.0), "end", &float_bytes(heat.len_bytes * share));
    }
    let middle = f64::midpoint(LEFT, RIGHT);
    text(&mut body, (middle, HEIGHT - 8.0), "middle", "time since the mapping was made");
    text(&mut body, (2.0, 12.0), "start", "offset in the backing");
    cells(&mut body, heat);
    format!(
        "<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\">\n<title>{}</title>\n{body}</svg>\n",
        escape(title)
    )
}

fn text(body: &mut String, (x, y): (f64, f64), anchor: &str, text: &str) {
    // Writing to a String does not fail.
    let _ = writeln!(
        body,
        r#"<text x="{x:.1}" y="{y:.1}" text-anchor="{anchor}">{}</text>"#,
        escape(text)
    );
}

fn line(body: &mut String, (x1, y1): (f64, f64), (x2, y2): (f64, f64)) {
    let _ = writeln!(body, r#"<line x1="{x1:.1}" y1="{y1:.1}" x2="{x2:.1}" y2="{y2:.1}"/>"#);
}

fn cells(body: &mut String, heat: &Heat) {
    let columns = heat.columns.max(1);
    let rows = (heat.counts.len() / columns).max(1);
    let (wide, high) = ((RIGHT - LEFT) / count(columns), (BOTTOM - TOP) / count(rows));
    let most = heat.counts.iter().copied().max().unwrap_or(0);
    for (place, found) in heat.counts.iter().enumerate().filter(|(_, found)| **found > 0) {
        let shade = 0.2 + 0.8 * (float(*found).ln_1p() / float(most).ln_1p());
        let (row, column) = (place / columns, place % columns);
        let (x, y) = (LEFT + wide * count(column), BOTTOM - high * count(row + 1));
        let _ = writeln!(
            body,
            r#"<rect x="{x:.1}" y="{y:.1}" width="{wide:.1}" height="{high:.1}" fill-opacity="{shade:.2}"><title>{found}</title></rect>"#
        );
    }
}
