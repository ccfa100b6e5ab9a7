//! From what a command printed to pages: nothing is lost, and nothing of it becomes markup.

use std::path::Path;

use serde_json::{Value, json};
use uzone_report::{Document, ReportError};

fn row(id: &str, name: &str, median_ns: u64) -> Value {
    json!({"id": id, "name": name, "median_ns": median_ns, "min_ns": median_ns, "worst_ns": median_ns * 2,
        "rounds": 3, "bytes": 1 << 30, "items": 512, "gib_per_s": 1e9 / f64::from(u32::try_from(median_ns).expect("a short time")),
        "ratio_naive": 2.5, "share_of_limit": 0.97, "cold": false, "threads": 1,
        "published": {"ns": 96_800_000, "source": "Li Zhe, 2026"},
        "latency": {"p50_ns": 10, "p99_ns": 15, "p999_ns": 20, "worst_ns": 30, "count": 40}, "of_tomorrow": [1]})
}

fn bench(results: &[Value]) -> Value {
    json!({"schema": "uzone.bench/1", "benchmark": "bind", "settings": "all of it",
        "machine": {"cpu": "A CPU", "cpus": 2, "memory_bytes": 1_u64 << 34, "kernel": "6.18", "page_bytes": 4096,
            "transparent_huge_pages": "madvise", "stream": "avx512", "version": "0.1.0",
            "commit": "0123abc", "unix_seconds": 1_795_327_200},
        "tables": [{"id": "bind-4k", "title": "Base pages", "note": "the limit is a fill"}, {"id": "pin-2m"}, {"id": "pin-4k"}],
        "results": results, "skipped": [{"id": "bind-1g/x", "reason": "no huge pages"}]})
}

const OUTCOMES: [&str; 6] = ["at_hand", "produced", "coalesced", "failed", "put_off", "new"];

fn trace(records: usize) -> Value {
    let records: Vec<Value> = (0_u64..)
        .zip(OUTCOMES.into_iter().cycle().take(records))
        .map(|(at, outcome)| {
            json!([
                at * 1000,
                at * 4096 % (1 << 20),
                "missing",
                at % 3 == 0,
                outcome,
                700 + at * at
            ])
        })
        .collect();
    let latencies = OUTCOMES.iter().take(records.len()).map(|outcome| {
        json!({"class": "missing", "outcome": outcome, "count": 9, "p50_ns": 700, "p99_ns": 900, "p999_ns": 950,
            "max_ns": 999})
    });
    json!({"schema": "uzone.trace/1", "page_size_bytes": 4096, "len_bytes": 1 << 20, "lost": 5, "records": records,
        "latencies": latencies.collect::<Vec<_>>()})
}

fn parse(value: &Value) -> Result<Vec<Document>, ReportError> {
    uzone_report::parse(Path::new("in.json"), value.to_string().as_bytes())
}

/// Returns the page of a document, after some checks that hold for every page.
fn page(value: &Value) -> String {
    let documents = parse(value).expect("a document");
    let page = uzone_report::html(&documents);
    for part in
        ["<script", "http://", "https://", "url(http", "@import", "<img", "<link", " onload"]
    {
        assert!(!page.contains(part), "{part}");
    }
    // What can be XML is: the head has elements without an end.
    let body = &page[page.find("<body>").expect("a body")..page.find("</html>").expect("an end")];
    let tree = roxmltree::Document::parse(body).unwrap_or_else(|error| panic!("{error}\n{body}"));
    let mut ids: Vec<_> = tree.descendants().filter_map(|node| node.attribute("id")).collect();
    ids.sort_unstable();
    assert!(ids.windows(2).all(|two| two[0] != two[1]), "an id names one element: {ids:?}");
    for link in tree.descendants().filter_map(|node| node.attribute("href")) {
        assert!(link.strip_prefix('#').is_some_and(|id| ids.contains(&id)), "{link}");
    }
    let mut attributes = tree.descendants().flat_map(|node| node.attributes());
    let bad = attributes.find(|one| one.value().contains("NaN") || one.value().contains("inf"));
    assert!(bad.is_none_or(|bad| bad.name() == "aria-label"), "not a number: {bad:?}");
    // Whatever is wide scrolls inside the column.
    for table in tree.descendants().filter(|node| node.has_tag_name("table")) {
        assert_eq!(table.parent().and_then(|node| node.attribute("class")), Some("box"));
    }
    page
}

/// Returns the cells of the page's tables.
fn cells(page: &str) -> Vec<String> {
    let body = &page[page.find("<body>").expect("a body")..page.find("</html>").expect("an end")];
    let tree = roxmltree::Document::parse(body).expect("checked above");
    let cells = tree.descendants().filter(|node| node.has_tag_name("td"));
    cells.map(|node| node.text().unwrap_or_default().to_owned()).collect()
}

#[test]
fn every_row_of_a_benchmark_is_in_its_table() {
    let rows: Vec<Value> = (0..90)
        .map(|index| row(&format!("bind-4k/row-{index}"), &format!("row {index}"), 1000 + index))
        .collect();
    let page = page(&bench(&rows));
    let cells = cells(&page);
    for row in &rows {
        let id = row["id"].as_str().expect("a string");
        assert!(cells.iter().any(|cell| cell == id), "{id}");
    }
    for part in
        ["A CPU", "Linux 6.18", "0123abc", "2026-11-22 06:00 UTC", "Li Zhe, 2026", "no huge pages"]
    {
        assert!(page.to_lowercase().contains(&part.to_lowercase()), "{part}");
    }
    assert!(cells.iter().any(|cell| cell == "10 ns, 15 ns, 30 ns"), "the latencies have a column");
}

#[test]
fn a_row_is_drawn_by_its_role_and_without_one_as_one_of_the_other_ways() {
    const WORDS: [&str; 3] = ["</i>naive<", "</i>uzone<", "</i>limit<"];
    let rows = |roles: [Option<&str>; 3]| -> String {
        let rows = (0..).zip(roles).map(|(index, role)| {
            let mut row = row(&format!("bind-4k/{index}"), "a way", 1000);
            if let Some(role) = role {
                row["role"] = role.into();
            }
            row
        });
        page(&bench(&rows.collect::<Vec<_>>()))
    };
    let known = rows([Some("naive"), Some("ours"), Some("limit")]);
    assert!(WORDS.iter().all(|word| known.contains(word)) && !known.contains("</i>other ways<"));
    for others in [[Some("peer"), Some("variant"), Some("of tomorrow")], [None; 3]] {
        let page = rows(others);
        assert!(page.contains("</i>other ways<"));
        assert!(WORDS.iter().all(|word| !page.contains(word)), "{others:?}");
    }
}

#[test]
fn the_first_screen_has_the_verdicts_in_words_and_the_charts_follow_by_chapter() {
    let tables = ["bind-4k", "pin-2m", "pin-4k"];
    let claim = |name: &str, ratio: f64, share: f64, within_noise: bool| {
        json!({"name": name, "ours": "bind-4k/ours", "ours_ns": 7, "ratio_naive": ratio, "share_of_limit": share,
            "within_noise": within_noise})
    };
    let mut run = bench(&tables.map(|table| row(&format!("{table}/ours"), "ours", 1000)));
    run["summary"] = json!([
        claim("one", 12.5, 0.97, false),
        claim("two", 0.5, 0.4, false),
        claim("three", 1.0, 0.1, false),
        claim("four", 1.01, 0.1, true)
    ]);
    let shown = page(&run);
    let places: Vec<_> = [
        "12.5 times as fast as naive; at the limit",
        "SLOWER than naive (0.50 times); 40 % of the limit",
        "as fast as naive; 10 % of the limit",
        "no difference to naive beyond the noise; 10 % of the limit",
        "href=\"#c0-0\">bind<",
        "href=\"#c0-1\">pin<",
        "<section>",
        "<h3>bind</h3>",
        "<h3>pin</h3>",
        "class=\"bar\"",
    ]
    .map(|part| shown.find(part).unwrap_or_else(|| panic!("{part}")))
    .into();
    assert!(places[..9].is_sorted(), "{places:?}");
    assert_eq!(shown.matches("<a ").count(), 2, "a link for a chapter, and none for a chart");
}

#[test]
fn a_bar_is_as_long_as_its_share_of_the_largest_and_has_its_limit_as_a_border() {
    let rows = [1.0, 2.0, 4.0].map(|rate| {
        let mut row = row(&format!("bind-4k/r{rate}"), "a way", 1000);
        row["gib_per_s"] = rate.into();
        row["share_of_limit"] = (rate / 4.0).into();
        row["role"] = "ours".into();
        row.as_object_mut().expect("an object").remove("latency");
        row
    });
    let shown = page(&bench(&rows));
    for width in ["25.0", "50.0", "100.0"] {
        assert!(
            shown.contains(&format!("<i class=\"ours\" style=\"width:{width}%\"></i>")),
            "{width}"
        );
    }
    assert_eq!(shown.matches("<b style=\"left:100.0%\"></b>").count(), 3);
}

#[test]
fn a_trace_has_its_map_its_timeline_and_its_latencies_also_if_it_is_empty() {
    let full = page(&trace(500));
    for part in [
        "Where faults were",
        "When faults were",
        "How long faults took",
        "5 before them were dropped",
        "put off",
    ] {
        assert!(full.contains(part), "{part}");
    }
    let empty = page(&trace(0));
    assert!(empty.contains("The trace has no records") && !empty.contains("<svg"));
    page(&trace(1));
    let mut odd = trace(3);
    odd["len_bytes"] = 0.into();
    odd["page_size_bytes"] = 0.into();
    odd["records"][1] = json!([u64::MAX, u64::MAX, "?", true, "?", u64::MAX]);
    page(&odd);
}

#[test]
fn nothing_of_the_input_becomes_markup_or_a_command_to_a_terminal() {
    const HOSTILE: &str = "</title></svg></script><script>alert(1)</script>\"'><img src=x onerror=alert(1)>\u{1b}]0;x\u{7}\u{1b}[2J\u{202e}\u{0}]]>";
    let mut bench =
        bench(&[row(&format!("{HOSTILE}/x"), HOSTILE, 5), row("bind-4k/y", HOSTILE, 5)]);
    for key in ["benchmark", "settings"] {
        bench[key] = HOSTILE.into();
    }
    for key in ["cpu", "kernel", "transparent_huge_pages", "stream", "version", "commit"] {
        bench["machine"][key] = HOSTILE.into();
    }
    for key in ["id", "title", "note"] {
        bench["tables"][0][key] = HOSTILE.into();
    }
    for key in ["id", "reason"] {
        bench["skipped"][0][key] = HOSTILE.into();
    }
    bench["results"][0]["published"]["source"] = HOSTILE.into();
    let page = page(&bench);
    assert!(page.contains("&lt;script&gt;"));
    assert!(!page.contains(['\u{1b}', '\u{202e}', '\0']));
    let documents = parse(&bench).expect("a document");
    let text = uzone_report::terminal(&documents);
    assert!(!text.contains(|letter: char| letter.is_control() && letter != '\n'), "{text:?}");
    assert!(!text.contains('\u{202e}'));
}

#[test]
fn absurd_numbers_are_drawn_as_well() {
    let mut rows = Vec::new();
    for value in [json!(0), json!(u64::MAX)] {
        for float in [json!(0.0), json!(-1e300), json!(1e300), json!(1e-300)] {
            let mut row = row(&format!("bind-4k/r{}", rows.len()), "r", 1);
            for key in ["median_ns", "min_ns", "worst_ns", "bytes", "items", "rounds"] {
                row[key] = value.clone();
            }
            for key in ["gib_per_s", "ratio_naive", "share_of_limit"] {
                row[key] = float.clone();
            }
            rows.push(row);
        }
    }
    page(&bench(&rows));
    for row in &rows {
        page(&bench(std::slice::from_ref(row)));
    }
    page(&bench(&[]));
}

#[test]
fn the_text_has_every_row_of_a_table_in_columns_and_ascii() {
    let rows: Vec<Value> =
        (0..90).map(|index| row(&format!("bind-4k/row-{index:02}"), "a row", 1000)).collect();
    let text = uzone_report::terminal(&parse(&bench(&rows)).expect("a document"));
    for row in &rows {
        assert!(text.contains(row["id"].as_str().expect("a string")), "{text}");
    }
    assert!(text.is_ascii() && !text.contains('\u{1b}'), "{text}");
    let wide = |line: &str| line.starts_with("  ").then(|| line.chars().count());
    let lines: Vec<usize> = text.lines().filter_map(wide).collect();
    assert!(lines.len() > 90 && lines[0] <= 200, "{text}");
    let trace = uzone_report::terminal(&parse(&trace(500)).expect("a document"));
    assert!(trace.is_ascii() && trace.contains("Where faults were"), "{trace}");
}

#[test]
fn what_is_no_document_is_refused_with_what_would_help() {
    let parse = |text: &str| uzone_report::parse(Path::new("in.json"), text.as_bytes());
    let bench = bench(&[row("bind-4k/x", "x", 5)]).to_string();
    for (text, part) in [
        (String::new(), "is empty"),
        ("  \n".into(), "is empty"),
        (bench[..bench.len() / 2].into(), "was cut short"),
        ("<html>".into(), "is not JSON"),
        ("{}".into(), "without a \"schema\""),
        (r#"{"schema":7}"#.into(), "invalid type: integer `7`, expected a string"),
        (bench.replace("bench/1", "bench/2"), "is \"uzone.bench/2\""),
        (r#"{"schema":"\u001b[2J"}"#.into(), "\\u{1b}[2J"),
        (bench.replace("\"results\"", "\"result\""), "does not match it"),
        (bench.replace("\"median_ns\":5", "\"median_ns\":-5"), "does not match it"),
        (r#"{"schema":"uzone.trace/1","records":7}"#.into(), "does not match it"),
        (format!("{bench}{{"), "was cut short"),
        ("[".repeat(100_000), "is not JSON"),
    ] {
        let error = parse(&text).expect_err(part).to_string();
        assert!(error.contains(part) && error.contains("in.json"), "{error}");
    }
    assert_eq!(parse(&format!("{bench}\n{bench}")).expect("two").len(), 2);
    let long = vec![b' '; usize::try_from(uzone_report::MOST_BYTES).expect("64 bits") + 1];
    let error = uzone_report::parse(Path::new("in.json"), &long).expect_err("too long");
    assert!(error.to_string().contains(" is longer than 256"), "{error}");
}
