//! The header and the manual page in the repository are written of the sources.

use std::fmt::Write as _;

use crate::build::{is_there, output_of, package};

/// The files in the order in which a reader of the header wants them.
const FILES: [&str; 7] = ["error", "progress", "pin", "pool", "lazy", "pack", "region"];

/// An item of the header: its documentation, and its declaration.
struct Item<'a> {
    text: Vec<&'a str>,
    lines: Vec<&'a str>,
}

impl<'a> Item<'a> {
    /// Returns the items of a header, in order.
    fn all(header: &'a str) -> Vec<Self> {
        let paragraphs = header.split("\n\n").map(|paragraph| paragraph.trim_start_matches('\n'));
        let documented = paragraphs.filter(|paragraph| paragraph.starts_with("/// "));
        let item = |paragraph: &'a str| {
            let is_text = |line: &&str| line.starts_with("///");
            let text = paragraph.lines().take_while(is_text);
            let text = text.map(|line| line.trim_start_matches('/').trim()).collect();
            Item { text, lines: paragraph.lines().skip_while(is_text).collect() }
        };
        documented.map(item).collect()
    }

    /// Returns the name of a function, a type or a constant.
    fn name(&self) -> &'a str {
        let line = match self.lines[0].strip_prefix("typedef int (*") {
            Some(function) => function.split(')').next().unwrap(),
            None if self.lines[0].starts_with("typedef") => {
                self.lines.last().unwrap().trim_end_matches(';')
            }
            None => self.lines[0].split('(').next().unwrap(),
        };
        let mut words =
            line.split([' ', '*']).filter(|word| word.to_lowercase().starts_with("uzone_"));
        words.next_back().unwrap()
    }

    fn section(&self) -> &'static str {
        match self.lines[0] {
            line if line.starts_with("#define") => "CONSTANTS",
            line if line.starts_with("typedef") => "TYPES",
            _ => "FUNCTIONS",
        }
    }
}

fn header() -> String {
    let package = package();
    let config = cbindgen::Config::from_file(package.join("cbindgen.toml")).unwrap();
    let mut builder = cbindgen::Builder::new().with_config(config);
    for file in FILES {
        builder = builder.with_src(package.join(format!("src/{file}.rs")));
    }
    let mut header = Vec::new();
    builder.generate().unwrap().write(&mut header);
    String::from_utf8(header).unwrap()
}

/// Returns the names of the functions of the library.
pub(crate) fn functions() -> Vec<String> {
    let header = include_str!("../../include/uzone.h");
    let items = Item::all(header);
    let functions = items.iter().filter(|item| item.section() == "FUNCTIONS");
    functions.map(|item| item.name().to_owned()).collect()
}

/// Escapes a line for roff.
fn roff(line: &str) -> String {
    let line = line.replace('\\', "\\e").replace('-', "\\-").replace('`', "");
    if line.starts_with(['.', '\'']) { format!("\\&{line}") } else { line }
}

/// Returns the manual page of a header.
fn manual(header: &str) -> String {
    let mut page = String::from(
        ".\\\" Written of include/uzone.h: UZONE_WRITE_HEADER=1 cargo test \\-p uzone\\-capi header\n\
         .TH UZONE 3 \"\" \"uzone 0.1\" \"Library Functions Manual\"\n.SH NAME\n\
         uzone \\- memory management for very large memory, in user space\n.SH SYNOPSIS\n.nf\n\
         .B #include <uzone.h>\n.sp\n.BI \"cc \" program.c \" $(pkg\\-config \\-\\-cflags \\-\\-libs uzone)\"\n.fi\n\
         .SH DESCRIPTION\n",
    );
    let head = header.split("/*\n").nth(1).and_then(|head| head.split("*/").next()).unwrap();
    for line in head.lines().skip(1).map(|line| line.trim_start_matches(" *")) {
        let is_code = line.starts_with("     ");
        let line = if line.trim().is_empty() { ".PP".to_owned() } else { roff(line.trim()) };
        let _ = if is_code { writeln!(page, ".br\n{line}\n.br") } else { writeln!(page, "{line}") };
    }
    let items = Item::all(header);
    for section in ["FUNCTIONS", "TYPES", "CONSTANTS"] {
        let _ = writeln!(page, ".SH {section}");
        for item in items.iter().filter(|item| item.section() == section) {
            let _ = writeln!(page, ".SS {}\n.nf", item.name());
            item.lines.iter().for_each(|line| writeln!(page, "{}", roff(line)).unwrap());
            page.push_str(".fi\n.PP\n");
            for line in &item.text {
                page.push_str(&if line.is_empty() { ".PP".to_owned() } else { roff(line) });
                page.push('\n');
            }
        }
    }
    page.push_str(".SH SEE ALSO\n.BR errno (3),\n.BR mlock (2),\n.BR userfaultfd (2)\n");
    page
}

/// Compares a file with its text, or writes it.
fn is_written(file: &str, text: &str) {
    let path = package().join(file);
    if std::env::var_os("UZONE_WRITE_HEADER").is_some_and(|value| value == "1") {
        std::fs::write(&path, text).unwrap();
    }
    assert!(
        std::fs::read_to_string(&path).unwrap() == text,
        "{file} is not as the sources: UZONE_WRITE_HEADER=1 cargo test -p uzone-capi header"
    );
}

#[test]
fn the_header_and_the_manual_are_written_of_the_sources() {
    let header = header();
    is_written("include/uzone.h", &header);
    is_written("man/uzone.3", &manual(&header));
}

#[test]
fn the_manual_names_every_function_and_has_no_error() {
    let functions = functions();
    assert!(functions.len() > 30, "{functions:?}");
    let path = package().join("man/uzone.3");
    let page = std::fs::read_to_string(&path).unwrap();
    for function in functions {
        assert!(page.contains(&format!(".SS {function}\n")), "{function}");
    }
    if is_there("man") {
        let text = output_of("man", &["--warnings".as_ref(), "-l".as_ref(), path.as_ref()]);
        assert!(text.contains("uzone_unpin"), "{text}");
    }
}
