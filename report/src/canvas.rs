//! A picture under way ([`Canvas`]): SVG elements, with every text's box noted so that layouts can be
//! checked for what collides.
//!
//! Written by hand, and not with a library of plots: hatches that differ without colour,
//! colours that follow the page's theme, and labels that are measured before they are placed are what
//! a report is about, and they are most of this file.
//!
//! Units: CSS pixels. A picture is drawn for the width at which it is shown.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use crate::text::{escape, plain};

/// The height of text.
pub(crate) const TEXT: f64 = 12.0;

/// The colours: what a class is called, then the colour on white, then on black. Those of marks are of
/// Okabe and Ito, or darker ones of their kind, so that red and green need not be distinguished.
const COLOURS: [(&str, &str, &str); 9] = [
    ("ink", "#1b1b1b", "#ededed"),
    ("faint", "#595959", "#b4b4b4"),
    ("rule", "#d4d4d4", "#444a50"),
    ("paper", "#ffffff", "#15181b"),
    ("blue", "#0072b2", "#56b4e9"),
    ("orange", "#b35900", "#f0a534"),
    ("grey", "#6e6e6e", "#a3a3a3"),
    ("green", "#00795a", "#35c698"),
    ("pink", "#a8417f", "#dd93bd"),
];

/// Returns the rules of all pictures, with colours of a page that follow its theme.
pub(crate) fn page_style() -> String {
    let list = |dark: bool| -> String {
        COLOURS
            .iter()
            .map(|(name, light, black)| format!("--{name}:{};", if dark { black } else { light }))
            .collect()
    };
    let (light, dark) = (list(false), list(true));
    format!(
        ":root{{color-scheme:light dark;{light}}}\
         @media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}\
         {}",
        rules(|name| format!("var(--{name})"))
    )
}

/// Returns the rules of a picture that stands alone, on white.
fn own_style() -> String {
    rules(|name| {
        COLOURS
            .iter()
            .find(|(known, _, _)| *known == name)
            .map_or("#000", |(_, light, _)| light)
            .into()
    })
}

fn rules(colour: impl Fn(&str) -> String) -> String {
    let mut text = format!(
        ".c text{{font:{TEXT}px/1 system-ui,'Liberation Sans',Arial,sans-serif;fill:{}}}\
         .c text.faint{{fill:{}}}.c text.bold{{font-weight:600}}\
         .c .halo{{paint-order:stroke;stroke:{};stroke-width:3px}}",
        colour("ink"),
        colour("faint"),
        colour("paper"),
    );
    for (name, _, _) in COLOURS {
        let colour = colour(name);
        // Writing to a String does not fail.
        let _ = write!(text, ".c .f-{name}{{fill:{colour}}}.c .s-{name}{{stroke:{colour}}}");
    }
    text
}

/// How an area is filled: distinct in black and white, and by a colour as well.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Fill {
    Solid,
    Diagonal,
    Dots,
    Cross,
    Horizontal,
    Empty,
}

/// A fill and the colour of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Ink {
    pub(crate) fill: Fill,
    pub(crate) colour: &'static str,
}

/// The shape of a point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shape {
    Disc,
    Ring,
    Square,
    Diamond,
    Triangle,
    Tick,
}

/// On which side of its point a text stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Anchor {
    Start,
    Middle,
    End,
}

/// A rectangle that a text needs.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct TextBox {
    pub(crate) left: f64,
    pub(crate) right: f64,
    pub(crate) top: f64,
    pub(crate) bottom: f64,
    pub(crate) text: String,
}

impl TextBox {
    /// Returns whether two texts run into each other.
    #[cfg(test)]
    pub(crate) fn collides(&self, other: &Self) -> bool {
        self.left < other.right
            && other.left < self.right
            && self.top < other.bottom
            && other.top < self.bottom
    }
}

/// Returns how wide a text is at most in a common font without serifs.
pub(crate) fn width(text: &str) -> f64 {
    let of = |character: char| match character {
        'i' | 'j' | 'l' | '.' | ',' | ':' | ';' | '\'' | '|' | '!' | ' ' | 'I' => 0.32,
        'f' | 't' | 'r' | '(' | ')' | '/' | '-' | '[' | ']' => 0.42,
        'm' | 'w' | 'M' | 'W' | '%' | '@' => 0.98,
        'A'..='Z' | '+' | '=' | '<' | '>' => 0.75,
        // A script of which every letter may be as wide as it is high, or more.
        character
            if u32::from(character) > 0x2ff && !('\u{2010}'..='\u{2026}').contains(&character) =>
        {
            1.3
        }
        '\u{2026}' => 1.0,
        _ => 0.62,
    };
    text.chars().map(of).sum::<f64>() * TEXT
}

/// By how much a bold text is wider.
pub(crate) const BOLD: f64 = 1.14;

/// Returns as much of a text as fits, with an ellipsis if that is not all.
pub(crate) fn fit(text: &str, room: f64) -> String {
    let text = plain(text);
    if width(&text) <= room {
        return text.into_owned();
    }
    let mut kept = String::new();
    let mut used = width("\u{2026}");
    for character in text.chars() {
        used += width(character.encode_utf8(&mut [0; 4]));
        if used > room {
            break;
        }
        kept.push(character);
    }
    kept.truncate(kept.trim_end().len());
    kept + "\u{2026}"
}

/// A picture under way.
#[derive(Debug)]
pub(crate) struct Canvas {
    /// What the ids of its patterns begin with, as no other picture's of the page do.
    id: String,
    pub(crate) width: f64,
    pub(crate) height: f64,
    body: String,
    boxes: Vec<TextBox>,
    inks: BTreeSet<Ink>,
}

impl Canvas {
    /// Returns whether the picture is drawn for a phone.
    pub(crate) fn is_narrow(&self) -> bool {
        self.width < 600.0
    }

    pub(crate) fn new(id: &str, width: f64) -> Self {
        let (body, boxes, inks) = (String::new(), Vec::new(), BTreeSet::new());
        Self { id: id.to_owned(), width, height: 0.0, body, boxes, inks }
    }

    /// Puts a text whose middle is at the height `y`. `class` is empty, `faint` or `bold`.
    pub(crate) fn text(&mut self, x: f64, y: f64, anchor: Anchor, class: &str, text: &str) {
        let text = plain(text);
        let width = width(&text) * if class == "bold" { BOLD } else { 1.0 };
        let (left, name) = match anchor {
            Anchor::Start => (x, "start"),
            Anchor::Middle => (x - width / 2.0, "middle"),
            Anchor::End => (x - width, "end"),
        };
        // Letters reach from the line to three quarters of their size above it, and a quarter below.
        let (top, bottom) = (y - TEXT * 0.55, y + TEXT * 0.55);
        self.boxes.push(TextBox { left, right: left + width, top, bottom, text: text.to_string() });
        let line = y + TEXT * 0.35;
        let _ = writeln!(
            self.body,
            r#"<text x="{x:.1}" y="{line:.1}" text-anchor="{name}" class="halo {class}">{}</text>"#,
            escape(&text)
        );
    }

    /// Fills an area; `title` is shown when the pointer is on it.
    pub(crate) fn area(&mut self, at: (f64, f64), size: (f64, f64), ink: Ink, title: &str) {
        let (x, y) = at;
        let (width, height) = (size.0.max(0.0), size.1.max(0.0));
        let fill = self.fill(ink);
        let solid = if ink.fill == Fill::Solid { "f-" } else { "" };
        let _ = writeln!(
            self.body,
            r#"<rect x="{x:.1}" y="{y:.1}" width="{width:.1}" height="{height:.1}" class="s-{colour} {solid}{colour}"{fill} stroke-width="1"><title>{}</title></rect>"#,
            escape(title),
            colour = ink.colour
        );
    }

    /// Fills a cell of a map: the darker the more, in `of` steps.
    pub(crate) fn shade(&mut self, at: (f64, f64), size: (f64, f64), step: usize, of: usize) {
        let opacity = 0.16 + 0.84 * crate::text::count(step) / crate::text::count(of.max(2) - 1);
        let _ = writeln!(
            self.body,
            r#"<rect x="{:.1}" y="{:.1}" width="{:.1}" height="{:.1}" class="f-ink" fill-opacity="{:.2}"/>"#,
            at.0,
            at.1,
            size.0,
            size.1,
            opacity.min(1.0)
        );
    }

    /// Draws a line; `dash` is empty or a list of lengths.
    pub(crate) fn line(
        &mut self,
        from: (f64, f64),
        to: (f64, f64),
        colour: &str,
        thick: f64,
        dash: &str,
    ) {
        let _ = writeln!(
            self.body,
            r#"<line x1="{:.1}" y1="{:.1}" x2="{:.1}" y2="{:.1}" class="s-{colour}" stroke-width="{thick}"{}/>"#,
            from.0,
            from.1,
            to.0,
            to.1,
            dashes(dash)
        );
    }

    /// Draws a line through points.
    pub(crate) fn path(&mut self, points: &[(f64, f64)], colour: &str, thick: f64, dash: &str) {
        if points.len() < 2 {
            return;
        }
        let list: Vec<String> = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        let _ = writeln!(
            self.body,
            r#"<polyline points="{}" class="s-{colour}" fill="none" stroke-width="{thick}" stroke-linejoin="round"{}/>"#,
            list.join(" "),
            dashes(dash)
        );
    }

    /// Draws a point.
    pub(crate) fn point(&mut self, at: (f64, f64), shape: Shape, colour: &str, title: &str) {
        let (x, y) = at;
        let paper = r#"class="f-paper s-"#;
        let solid = format!(r#"class="f-{colour} s-{colour}" stroke-width="1""#);
        let mark = match shape {
            Shape::Disc => format!(r#"<circle cx="{x:.1}" cy="{y:.1}" r="4.5" {solid}>"#),
            Shape::Ring => {
                format!(
                    r#"<circle cx="{x:.1}" cy="{y:.1}" r="4" {paper}{colour}" stroke-width="2">"#
                )
            }
            Shape::Square => format!(
                r#"<rect x="{:.1}" y="{:.1}" width="8" height="8" {paper}{colour}" stroke-width="2">"#,
                x - 4.0,
                y - 4.0
            ),
            Shape::Diamond => format!(
                r#"<path d="M{x:.1} {:.1}l5 5l-5 5l-5 -5z" {paper}{colour}" stroke-width="2">"#,
                y - 5.0
            ),
            Shape::Triangle => {
                format!(r#"<path d="M{x:.1} {:.1}l5 9h-10z" {solid}>"#, y - 5.0)
            }
            Shape::Tick => format!(
                r#"<path d="M{x:.1} {:.1}v14" class="s-{colour}" stroke-width="3" fill="none">"#,
                y - 7.0
            ),
        };
        let name = match shape {
            Shape::Disc | Shape::Ring => "circle",
            Shape::Square => "rect",
            _ => "path",
        };
        let _ = writeln!(self.body, "{mark}<title>{}</title></{name}>", escape(title));
    }

    fn fill(&mut self, ink: Ink) -> String {
        match ink.fill {
            // Its class sets the fill.
            Fill::Solid => String::new(),
            Fill::Empty => r#" fill="none""#.to_owned(),
            _ => {
                self.inks.insert(ink);
                format!(r#" fill="url(#{}-{:?}-{})""#, self.id, ink.fill, ink.colour)
            }
        }
    }

    fn patterns(&self) -> String {
        let mut text = String::new();
        for Ink { fill, colour } in &self.inks {
            let line = |d: &str| {
                format!(r#"<path d="{d}" class="s-{colour}" stroke-width="1.6" fill="none"/>"#)
            };
            let inside = match fill {
                Fill::Diagonal => line("M-1 7L7 -1M-1 1L1 -1M5 7L7 5"),
                Fill::Cross => line("M0 0L6 6M6 0L0 6"),
                Fill::Horizontal => line("M0 2H6"),
                Fill::Dots => format!(r#"<circle cx="3" cy="3" r="1.2" class="f-{colour}"/>"#),
                Fill::Solid | Fill::Empty => continue,
            };
            let size = if *fill == Fill::Dots { 5 } else { 6 };
            let _ = write!(
                text,
                r#"<pattern id="{}-{fill:?}-{colour}" width="{size}" height="{size}" patternUnits="userSpaceOnUse"><rect width="{size}" height="{size}" class="f-paper"/>{inside}</pattern>"#,
                self.id
            );
        }
        if text.is_empty() { text } else { format!("<defs>{text}</defs>") }
    }

    /// Returns the picture for a page, which has the rules for its classes.
    pub(crate) fn inline(&self, title: &str, class: &str) -> String {
        self.svg(&format!(r#" class="c {class}""#), "", title)
    }

    /// Returns the picture as a file of its own.
    pub(crate) fn alone(&self, title: &str) -> String {
        let style = format!("<style>{}</style>", own_style());
        let paper = r#"<rect width="100%" height="100%" class="f-paper"/>"#;
        let xml = r#" xmlns="http://www.w3.org/2000/svg" class="c""#;
        self.svg(xml, &format!("{style}{paper}"), title)
    }

    fn svg(&self, attributes: &str, first: &str, title: &str) -> String {
        let (width, height) = (self.width, self.height);
        format!(
            "<svg{attributes} viewBox=\"0 0 {width:.0} {height:.0}\" width=\"{width:.0}\" height=\"{height:.0}\" role=\"img\">\n<title>{}</title>{first}{}\n{}</svg>\n",
            escape(title),
            self.patterns(),
            self.body
        )
    }

    /// Returns where its texts are.
    #[cfg(test)]
    pub(crate) fn boxes(&self) -> &[TextBox] {
        &self.boxes
    }
}

fn dashes(dash: &str) -> String {
    if dash.is_empty() { String::new() } else { format!(r#" stroke-dasharray="{dash}""#) }
}
