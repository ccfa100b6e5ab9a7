//! One page with everything in it ([`page`]): no script, and nothing is fetched.

use std::fmt::Write as _;

use crate::canvas::page_style;
use crate::chart::{Chart, Numbers, Section};
use crate::draw::{NARROW, WIDE, draw};
use crate::results::Skipped;
use crate::text::escape;

/// The rules of the page. A picture is drawn twice, and the one that fits is shown.
const STYLE: &str = "\
*{box-sizing:border-box}\
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.5 system-ui,'Liberation Sans',Arial,sans-serif}\
main,header,footer{max-width:920px;margin:0 auto;padding:0 20px;overflow-wrap:anywhere}\
h1{font-size:1.7rem;margin:1.6rem 0 .3rem}\
h2{font-size:1.35rem;margin:3rem 0 .3rem;padding-top:1rem;border-top:2px solid var(--ink)}\
h3{font-size:1.05rem;margin:0 0 .2rem}\
p{margin:.2rem 0 .8rem}.note{color:var(--faint);font-size:.9rem}\
nav ul{padding-left:1.2rem;margin:.2rem 0;columns:2;column-gap:2.5rem;font-size:.9rem}nav li{break-inside:avoid}\
a{color:var(--blue)}\
figure{margin:2.2rem 0;padding:0}\
svg{display:block;max-width:100%;height:auto}svg.narrow{display:none}\
.box{overflow:auto;max-height:22rem;margin-top:.8rem;border:1px solid var(--rule);\
position:relative;left:50%;transform:translateX(-50%);width:max-content;\
min-width:100%;max-width:calc(100vw - 28px)}\
.box:focus-visible{outline:2px solid var(--blue)}\
table{border-collapse:collapse;font-size:.72rem;font-variant-numeric:tabular-nums}\
th,td{padding:.2rem .28rem;text-align:right;white-space:nowrap;overflow-wrap:normal}th,td:first-child{white-space:normal}td:first-child{min-width:8rem}\
th{position:sticky;top:0;background:var(--paper);box-shadow:inset 0 -1px var(--ink);font-weight:600}\
td:first-child,th:first-child,.l{text-align:left}\
tr+tr td{border-top:1px solid var(--rule)}\
footer{margin-top:3rem;padding-bottom:2rem;font-size:.85rem}\
footer hr{border:0;border-top:2px solid var(--ink)}\
@media (max-width:719px){main,header,footer{padding:0 16px}\
.box{max-width:100%}td:first-child{min-width:7rem}nav ul{columns:1}\
svg.wide{display:none}svg.narrow{display:block}}\
@media print{.box{max-height:none;overflow:visible;border:0}th{position:static}\
table{font-size:7pt}figure{break-inside:avoid-page}svg.wide{display:block}svg.narrow{display:none}}";

/// Returns the page.
pub(crate) fn page(sections: &[Section]) -> String {
    let mut page = format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n\
         <title>uzone report</title>\n<style>{}{STYLE}</style>\n</head>\n<body>\n",
        page_style()
    );
    page.push_str("<header>\n<h1>uzone report</h1>\n");
    page.push_str("<p class=\"note\">Measurements and traces. Each chart has its numbers below it; the machine is named at the foot.</p>\n");
    contents(&mut page, sections);
    page.push_str("</header>\n<main>\n");
    for section in sections {
        write_section(&mut page, section);
    }
    page.push_str("</main>\n<footer>\n<hr/>\n");
    for section in sections {
        let _ = writeln!(page, "<p><strong>{}</strong>", escape(&section.title));
        for line in &section.foot {
            let _ = writeln!(page, "<br/>{}", escape(line));
        }
        page.push_str("</p>\n");
    }
    page.push_str("</footer>\n</body>\n</html>\n");
    page
}

fn contents(page: &mut String, sections: &[Section]) {
    page.push_str("<nav aria-label=\"Charts\">\n<ul>\n");
    for chart in sections.iter().flat_map(|section| &section.charts) {
        // Writing to a String does not fail.
        let _ = writeln!(page, "<li><a href=\"#{}\">{}</a></li>", chart.id, escape(&chart.title));
    }
    page.push_str("</ul>\n</nav>\n");
}

fn write_section(page: &mut String, section: &Section) {
    let _ = writeln!(
        page,
        "<section>\n<h2>{}</h2>\n<p class=\"note\">{}</p>",
        escape(&section.title),
        escape(&section.note)
    );
    for chart in &section.charts {
        write_chart(page, chart);
    }
    if !section.skipped.is_empty() {
        page.push_str("<h3>Not measured</h3>\n<ul class=\"note\">\n");
        for Skipped { id, reason } in &section.skipped {
            let _ = writeln!(page, "<li>{}: {}</li>", escape(id), escape(reason));
        }
        page.push_str("</ul>\n");
    }
    page.push_str("</section>\n");
}

fn write_chart(page: &mut String, chart: &Chart) {
    let title = escape(&chart.title);
    let _ = writeln!(
        page,
        "<figure id=\"{}\">\n<figcaption><h3>{title}</h3><p class=\"note\">{}</p></figcaption>",
        chart.id,
        escape(&chart.note)
    );
    for (width, class) in [(WIDE, "wide"), (NARROW, "narrow")] {
        page.push_str(&draw(chart, width).inline(&chart.title, class));
    }
    // The box can be scrolled with the keyboard.
    let _ = writeln!(
        page,
        "<div class=\"box\" tabindex=\"0\" role=\"region\" aria-label=\"Numbers: {title}\">"
    );
    write_table(page, &chart.table);
    page.push_str("</div>\n</figure>\n");
}

fn write_table(page: &mut String, numbers: &Numbers) {
    page.push_str("<table>\n<thead><tr>");
    for heading in &numbers.headings {
        let class = if is_words(heading) { " class=\"l\"" } else { "" };
        let _ = write!(page, "<th scope=\"col\"{class}>{}</th>", escape(heading));
    }
    page.push_str("</tr></thead>\n<tbody>\n");
    for row in &numbers.rows {
        page.push_str("<tr>");
        for (cell, heading) in row.iter().zip(&numbers.headings) {
            let class = if is_words(heading) { " class=\"l\"" } else { "" };
            let _ = write!(page, "<td{class}>{}</td>", escape(cell));
        }
        page.push_str("</tr>\n");
    }
    page.push_str("</tbody>\n</table>\n");
}

/// Returns whether a column has words, which stand at the left.
fn is_words(heading: &str) -> bool {
    matches!(heading, "id" | "of" | "figures")
}
