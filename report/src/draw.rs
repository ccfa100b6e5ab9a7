//! How charts are drawn: the layout of each kind of [`Plot`], for a page and for a narrow one.

mod axis;
mod columns;
mod heat;
mod legend;
mod lines;
mod rows;

pub(crate) use self::rows::MOST_ROWS;

use crate::canvas::Canvas;
use crate::chart::{Chart, Plot};

/// The width of a picture on a page, and on a phone.
pub(crate) const WIDE: f64 = 880.0;
/// On a phone of 360 pixels or more, between margins.
pub(crate) const NARROW: f64 = 328.0;

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

#[cfg(test)]
mod tests;
