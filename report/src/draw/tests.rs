//! Whatever is drawn, no text runs into another or out of the picture, and the SVG is XML.

use proptest::prelude::*;

use super::*;
use crate::canvas::{Fill, Ink};
use crate::chart::{Columns, Heat, Lines, Mark, Numbers, Role, Rows, Series, Unit};

fn role() -> impl Strategy<Value = Role> {
    prop_oneof![
        Just(Role::Naive),
        Just(Role::Peer),
        Just(Role::Ours),
        Just(Role::Limit),
        Just(Role::Published)
    ]
}

fn value() -> impl Strategy<Value = f64> {
    prop_oneof![
        4 => 1.0..1e9_f64,
        1 => Just(0.0),
        1 => 1e-6..1.0_f64,
        1 => 1e9..2e19_f64,
    ]
}

fn words() -> impl Strategy<Value = String> {
    prop_oneof!["[a-zA-Z0-9 ,]{0,70}", "\\PC{0,40}", "[mMW%]{0,60}"]
}

fn bars() -> impl Strategy<Value = Plot> {
    let row = (
        words(),
        role(),
        value(),
        proptest::option::of(value()),
        proptest::option::of(value()),
        words(),
    );
    let row = row.prop_map(|(label, role, value, limit, published, text)| Mark {
        limit,
        published,
        ..Mark::at(label, role, value, text)
    });
    (words(), proptest::collection::vec(row, 1..70))
        .prop_map(|(axis, rows)| Plot::Rows(Rows { axis, has_bars: true, rows, ..Rows::default() }))
}

fn unit() -> impl Strategy<Value = Unit> {
    prop_oneof![Just(Unit::Plain), Just(Unit::Ns), Just(Unit::Bytes)]
}

fn spans() -> impl Strategy<Value = Plot> {
    let row = (words(), role(), value(), value(), value(), proptest::option::of(value()), words());
    let row = row.prop_map(|(label, role, low, value, high, tick, text)| Mark {
        low,
        high,
        tick,
        published: tick,
        ..Mark::at(label, role, value, text)
    });
    (words(), unit(), proptest::collection::vec(row, 1..20)).prop_map(|(axis, unit, rows)| {
        let (line, tick) = ("from here to there", "a tick");
        Plot::Rows(Rows { axis, unit, has_bars: false, line, tick, rows })
    })
}

fn lines() -> impl Strategy<Value = Plot> {
    let points = proptest::collection::vec((value(), value()), 1..12);
    let series = (words(), role(), points).prop_map(|(name, role, mut points)| {
        points.sort_by(|one, other| one.0.total_cmp(&other.0));
        Series { name, role, points }
    });
    (words(), unit(), unit(), any::<bool>(), proptest::collection::vec(series, 1..9)).prop_map(
        |(name, x_unit, y_unit, is_log, series)| {
            let (x_axis, y_axis) = (name.clone(), name);
            Plot::Lines(Lines { x_axis, x_unit, y_axis, y_unit, is_log, series })
        },
    )
}

fn columns() -> impl Strategy<Value = Plot> {
    let counts = proptest::collection::vec((0..1_u64 << 40, 0..9_u64), 1..80);
    (counts, unit(), any::<bool>(), 1.0..1e9_f64).prop_map(|(counts, x_unit, is_log, from)| {
        let kind = |name: &str, fill| (name.to_owned(), Ink { fill, colour: "blue" });
        Plot::Columns(Columns {
            x_axis: "time".into(),
            x_unit,
            is_log,
            y_axis: "faults".into(),
            edges: (0..=counts.len()).map(|step| from * crate::text::count(step + 1)).collect(),
            kinds: vec![kind("at hand", Fill::Solid), kind("produced", Fill::Diagonal)],
            counts: counts.into_iter().map(|(one, other)| vec![one, other]).collect(),
        })
    })
}

fn heat() -> impl Strategy<Value = Plot> {
    let counts = proptest::collection::vec(prop_oneof![Just(0_u64), 0..1000_u64, any::<u64>()], 32);
    (counts, value(), value()).prop_map(|(counts, from_ns, len_bytes)| {
        Plot::Heat(Heat { from_ns, to_ns: from_ns * 3.0, len_bytes, columns: 8, rows: 4, counts })
    })
}

/// Returns what is wrong with a picture.
fn problem(canvas: &Canvas) -> Option<String> {
    let boxes = canvas.boxes();
    for (index, one) in boxes.iter().enumerate() {
        if one.left < -0.5 || one.right > canvas.width + 0.5 {
            return Some(format!("{one:?} is cut at {}", canvas.width));
        }
        if one.top < -0.5 || one.bottom > canvas.height + 0.5 {
            return Some(format!("{one:?} is cut at the height {}", canvas.height));
        }
        let is_hit = |other: &&crate::canvas::TextBox| {
            !one.text.is_empty() && !other.text.is_empty() && one.collides(other)
        };
        if let Some(other) = boxes[index + 1..].iter().find(is_hit) {
            return Some(format!("{one:?} runs into {other:?}"));
        }
    }
    let svg = canvas.alone("<a title> & more");
    let tree = match roxmltree::Document::parse(&svg) {
        Ok(tree) => tree,
        Err(error) => return Some(format!("{error}: {svg}")),
    };
    let mut attributes = tree.descendants().flat_map(|node| node.attributes());
    let bad = attributes.find(|one| one.value().contains("NaN") || one.value().contains("inf"))?;
    Some(format!("not a number: {bad:?}"))
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(192) })]

    #[test]
    fn no_label_runs_into_another_or_is_cut_and_every_picture_is_xml(
        plot in prop_oneof![bars(), spans(), lines(), columns(), heat()]
    ) {
        let (id, title, note) = ("chart".into(), "Title".into(), String::new());
        let chart = Chart { id, title, note, plot, table: Numbers::default() };
        for width in [WIDE, NARROW] {
            let canvas = draw(&chart, width);
            prop_assert_eq!(problem(&canvas), None);
        }
    }
}

#[test]
fn the_ids_of_two_pictures_on_a_page_differ() {
    let row = Mark::at("naive".into(), Role::Naive, 1.0, "1".into());
    let rows = Rows { axis: "GB/s".into(), has_bars: true, rows: vec![row], ..Rows::default() };
    let plot = Plot::Rows(rows);
    let (title, note) = (String::new(), String::new());
    let chart = Chart { id: "01-x".into(), title, note, plot, table: Numbers::default() };
    let ids = [WIDE, NARROW].map(|width| {
        let svg = draw(&chart, width).inline("", "");
        let from = svg.find("<pattern id=\"").expect("a pattern") + 13;
        svg[from..].split('"').next().expect("an id").to_owned()
    });
    assert_ne!(ids[0], ids[1]);
}
