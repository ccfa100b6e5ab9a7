//! What the colours, points and lines of a chart stand for: [`legend`].

use crate::canvas::{Anchor, Canvas, Ink, Shape, fit, width};

/// What an entry of a legend shows beside its words.
pub(super) enum Sample {
    Area(Ink),
    Point(Shape, &'static str),
    Line { colour: &'static str, thick: f64, dash: &'static str, shape: Option<Shape> },
    Shade(usize, usize),
}

/// Draws a legend from the height `y` on, as many entries side by side as fit. Returns the height below it.
pub(super) fn legend(canvas: &mut Canvas, mut y: f64, entries: &[(Sample, String)]) -> f64 {
    const ROOM: f64 = 34.0;
    let mut x = 2.0;
    y += 10.0;
    for (sample, words) in entries {
        let words = fit(words, canvas.width - ROOM - 8.0);
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
