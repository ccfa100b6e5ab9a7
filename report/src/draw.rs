//! How charts are drawn: the layout of each kind of [`Plot`], for a page and for a narrow one.

mod axis;
mod columns;
mod heat;
mod lines;
mod rows;

use crate::canvas::{Anchor, Canvas, Ink, Shape, width};
use crate::chart::{Chart, Plot};

/// The width of a picture on a page, and on a phone.
pub(crate) const WIDE: f64 = 880.0;
/// On a phone of 360 pixels or more, between margins.
pub(crate) const NARROW: f64 = 328.0;

/// How many rows of a chart are drawn; the others are in its table.
pub(crate) const MOST_ROWS: usize = 60;

/// Draws a chart so wide.
pub(crate) fn draw(chart: &Chart, width: f64) -> Canvas {
    let id = format!("{}-{width:.0}", chart.id);
    let mut canvas = Canvas::new(&id, width);
    match &chart.plot {
        Plot::Rows(rows) => rows::rows(&mut canvas, rows),
        Plot::Lines(lines) => lines::lines(&mut canvas, lines),
        Plot::Columns(columns) => columns::columns(&mut canvas, columns),
        Plot::Heat(heat) => heat::heat(&mut canvas, heat),
    }
    canvas
}

fn is_narrow(canvas: &Canvas) -> bool {
    canvas.width < 600.0
}

/// What an entry of a legend shows beside its words.
enum Sample {
    Area(Ink),
    Point(Shape, &'static str),
    Line { colour: &'static str, thick: f64, dash: &'static str, shape: Option<Shape> },
    Shade(usize, usize),
}

/// Draws a legend from the height `y` on, as many entries side by side as fit. Returns the height below it.
fn legend(canvas: &mut Canvas, mut y: f64, entries: &[(Sample, String)]) -> f64 {
    const ROOM: f64 = 34.0;
    let mut x = 2.0;
    y += 10.0;
    for (sample, words) in entries {
        let words = crate::canvas::fit(words, canvas.width - ROOM - 8.0);
        let wide = ROOM + width(&words) + 18.0;
        if x > 2.0 && x + wide - 18.0 > canvas.width {
            x = 2.0;
            y += 20.0;
        }
        match sample {
            Sample::Area(ink) => canvas.area((x, y - 6.0), (26.0, 12.0), *ink, ""),
            Sample::Point(shape, colour) => canvas.point((x + 13.0, y), *shape, colour, ""),
            Sample::Line { colour, thick, dash, shape } => {
                canvas.line((x, y), (x + 26.0, y), colour, *thick, dash);
                if let Some(shape) = shape {
                    canvas.point((x + 13.0, y), *shape, colour, "");
                }
            }
            Sample::Shade(step, of) => canvas.shade((x + 4.0, y - 7.0), (18.0, 14.0), *step, *of),
        }
        canvas.text(x + ROOM, y, Anchor::Start, "", &words);
        x += wide;
    }
    y + 14.0
}

#[cfg(test)]
mod tests;
