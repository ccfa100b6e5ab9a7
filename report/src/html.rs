//! A self-contained HTML page ([`page`]): no script, and nothing is fetched. One layout serves a desk, a phone and paper: bars are cells of tables, pictures have the width of their column, and wide tables scroll inside it.

use std::fmt::Write as _;

use crate::chart::{Bar, Chart, Section, Table};
use crate::results::Skipped;
use crate::svg::svg;
use crate::text::escape;

/// The rules of the page. Bars differ in black and white too. The colours come from Okabe and Ito, or are
/// darker, so that no reader has to tell red from green.
const STYLE: &str = "\
:root{color-scheme:light dark;--ink:#1b1b1b;--faint:#595959;--rule:#d4d4d4;--paper:#fff;\
--ours:#0072b2;--naive:#b35900;--peer:#8a8a8a;--green:#00795a;--published:#a8417f}\
@media screen and (prefers-color-scheme:dark){:root{--ink:#ededed;--faint:#b4b4b4;--rule:#444a50;--paper:#15181b;\
--ours:#56b4e9;--naive:#f0a534;--peer:#8a8a8a;--green:#35c698;--published:#dd93bd}}\
*{box-sizing:border-box}\
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.5 system-ui,'Liberation Sans',Arial,sans-serif}\
main{max-width:56rem;margin:0 auto;padding:0 1rem 2rem;overflow-wrap:anywhere}\
h1{font-size:1.7rem;margin:1.2rem 0 .3rem}\
h2{font-size:1.35rem;margin:2.5rem 0 .3rem;padding-top:.8rem;border-top:2px solid var(--ink)}\
h3{font-size:1.15rem;margin:2rem 0 0}h4{font-size:1rem;margin:0}\
p{margin:.2rem 0 .6rem}.note,footer{color:var(--faint);font-size:.9rem}\
nav a{margin-right:1rem}a{color:var(--ours)}\
figure{margin:1.4rem 0;padding:0}\
svg{display:block;width:100%;max-width:35rem;height:auto}\
svg text{font-size:12px;fill:var(--ink)}svg rect{fill:var(--ink)}\
svg line{stroke:var(--rule);stroke-width:1}\
.legend{list-style:none;margin:.2rem 0 .4rem;padding:0;font-size:.85rem}.legend li{display:inline-block;margin-right:1.2rem}\
.legend i{display:inline-block;width:1.6rem;margin-right:.4rem}\
i{height:.8rem;border:1px solid var(--ink);print-color-adjust:exact;-webkit-print-color-adjust:exact}\
i.ours{background:var(--ours)}\
i.naive{background:repeating-linear-gradient(-45deg,var(--naive) 0 2px,var(--paper) 2px 5px)}\
i.peer{background:var(--rule)}\
i.limit{background:repeating-linear-gradient(90deg,var(--ink) 0 1px,var(--paper) 1px 4px)}\
i.published{background:var(--paper);border-color:var(--published)}\
i.green{background:repeating-linear-gradient(0deg,var(--green) 0 2px,var(--paper) 2px 4px)}\
i.ink{background:var(--ink)}i.border{width:0!important;border-width:0 0 0 3px}\
.bar{min-width:9rem;width:40%}.track{position:relative;display:flex;height:.8rem}\
.track b{position:absolute;top:-.2rem;bottom:-.2rem;border-left:3px solid var(--ink)}\
.box{overflow-x:auto;max-width:100%}.box:focus-visible{outline:2px solid var(--ours)}\
table{border-collapse:collapse;width:100%;font-size:.8rem;font-variant-numeric:tabular-nums}\
th,td{padding:.2rem .4rem;text-align:right;white-space:nowrap;overflow-wrap:normal}\
th{border-bottom:1px solid var(--ink)}tr+tr td{border-top:1px solid var(--rule)}\
td:first-child,th:first-child,.l{text-align:left;white-space:normal;min-width:7rem}\
@media (min-width:40rem){td:first-child{min-width:12rem}}\
@media print{.box{overflow:visible}table{font-size:6.5pt}th,td{white-space:normal;padding:.1rem .2rem}\
.bar{min-width:4rem}td:first-child,th:first-child,.l{min-width:3rem}tr,svg{break-inside:avoid}nav{display:none}}";

/// Returns the page: the summaries of all documents first, then the charts by chapter.
pub(crate) fn page(sections: &[Section]) -> String {
    let mut page = format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n\
         <title>uzone report</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n<h1>uzone report</h1>\n"
    );
    for section in sections {
        // Writing to a String does not fail.
        let _ = writeln!(page, "<p><strong>{}</strong></p>", escape(&section.title));
        paragraph(&mut page, &section.note);
        if !section.summary.rows.is_empty() {
            write_table(&mut page, &section.summary, &section.title);
        }
    }
    let named = |section: &Section| {
        section.chapters.iter().filter(|chapter| !chapter.title.is_empty()).count()
    };
    if sections.iter().map(named).sum::<usize>() > 1 {
        page.push_str("<nav aria-label=\"Chapters\">");
        for (number, section) in sections.iter().enumerate() {
            for (chapter, title) in
                section.chapters.iter().map(|chapter| &chapter.title).enumerate()
            {
                let title = if title.is_empty() { &section.title } else { title };
                let _ = write!(page, "<a href=\"#c{number}-{chapter}\">{}</a> ", escape(title));
            }
        }
        page.push_str("</nav>\n");
    }
    for (number, section) in sections.iter().enumerate() {
        write_section(&mut page, section, number);
    }
    page.push_str("</main>\n</body>\n</html>\n");
    page
}

fn paragraph(page: &mut String, text: &str) {
    if !text.is_empty() {
        let _ = writeln!(page, "<p class=\"note\">{}</p>", escape(text));
    }
}

fn write_section(page: &mut String, section: &Section, number: usize) {
    let _ = writeln!(page, "<section>\n<h2>{}</h2>", escape(&section.title));
    for (index, chapter) in section.chapters.iter().enumerate() {
        let _ = writeln!(page, "<div id=\"c{number}-{index}\">");
        if !chapter.title.is_empty() {
            let _ = writeln!(page, "<h3>{}</h3>", escape(&chapter.title));
        }
        for chart in &chapter.charts {
            write_chart(page, chart);
        }
        page.push_str("</div>\n");
    }
    if !section.skipped.is_empty() {
        page.push_str("<h3>Not measured</h3>\n<ul class=\"note\">\n");
        for Skipped { id, reason } in &section.skipped {
            let _ = writeln!(page, "<li>{}: {}</li>", escape(id), escape(reason));
        }
        page.push_str("</ul>\n");
    }
    page.push_str("<footer>\n");
    for line in &section.foot {
        let _ = writeln!(page, "<p>{}</p>", escape(line));
    }
    page.push_str("</footer>\n</section>\n");
}

fn write_chart(page: &mut String, chart: &Chart) {
    let _ = writeln!(page, "<figure>\n<figcaption><h4>{}</h4>", escape(&chart.title));
    paragraph(page, &chart.note);
    page.push_str("</figcaption>\n");
    if !chart.legend.is_empty() {
        page.push_str("<ul class=\"legend\">");
        for (class, name) in &chart.legend {
            let _ = write!(page, "<li><i class=\"{class}\"></i>{}</li>", escape(name));
        }
        page.push_str("</ul>\n");
    }
    if let Some(picture) = &chart.picture {
        page.push_str(&svg(picture, &chart.title));
    }
    write_table(page, &chart.table, &chart.title);
    page.push_str("</figure>\n");
}

/// Writes a table in a box that can be scrolled with the keyboard. Bars are its second column.
fn write_table(page: &mut String, table: &Table, title: &str) {
    let _ = write!(
        page,
        "<div class=\"box\" tabindex=\"0\" role=\"region\" aria-label=\"Numbers: {}\">\n<table>\n<thead><tr>",
        escape(title)
    );
    for (column, heading) in table.headings.iter().enumerate() {
        let _ = write!(page, "<th scope=\"col\"{}>{}</th>", class(heading), escape(heading));
        if column == 0 && !table.bars.is_empty() {
            let _ = write!(page, "<th scope=\"col\" class=\"l\">{}</th>", table.scale);
        }
    }
    page.push_str("</tr></thead>\n<tbody>\n");
    let mut bars = table.bars.iter();
    for row in &table.rows {
        page.push_str("<tr>");
        let mut bar = bars.next();
        for (cell, heading) in row.iter().zip(&table.headings) {
            let _ = write!(page, "<td{}>{}</td>", class(heading), escape(cell));
            if let Some(bar) = bar.take() {
                write_bar(page, bar);
            }
        }
        page.push_str("</tr>\n");
    }
    page.push_str("</tbody>\n</table>\n</div>\n");
}

fn write_bar(page: &mut String, bar: &Bar) {
    let percent = |share: f64| 100.0 * if share.is_finite() { share.clamp(0.0, 1.0) } else { 0.0 };
    page.push_str("<td class=\"bar\"><div class=\"track\">");
    for (class, share) in &bar.parts {
        let _ = write!(page, "<i class=\"{class}\" style=\"width:{:.1}%\"></i>", percent(*share));
    }
    if let Some(limit) = bar.limit {
        let _ = write!(page, "<b style=\"left:{:.1}%\"></b>", percent(limit));
    }
    page.push_str("</div></td>");
}

/// Returns the class of a column: words stand at the left.
fn class(heading: &str) -> &'static str {
    if matches!(heading, "id" | "of" | "verdict") { " class=\"l\"" } else { "" }
}
