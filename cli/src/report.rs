//! `uzone report`: charts and tables of measurements and traces.

use std::path::PathBuf;

use serde::Serialize;
use uzone_report::Document;

use crate::exit::{self, Exit, Failure};
use crate::output::{Output, Report, Style, is_same_file};

/// Show measurements and traces as one HTML page, or print their tables
///
/// The input is the output of `uzone-bench ... --json`, or a trace of faults. A file may hold several
/// objects; `-` is standard input. The page needs no network and no script. Without -o, the
/// tables are printed as text.
#[derive(Debug, clap::Args)]
#[command(after_help = exit::help("uzone report pin.json -o pin.html", &EXITS))]
pub(crate) struct Args {
    /// Documents to show, in this order
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// HTML page, or `-` for standard output; replaced atomically if it exists
    #[arg(short, long, value_name = "HTML")]
    pub(crate) output: Option<PathBuf>,
}

const EXITS: [u8; 6] = [0, 2, 65, 66, 74, 77];

/// `uzone.report/1`: the documents and the files that were written.
#[derive(Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub(crate) struct Written {
    documents: usize,
    /// Paths as given by the arguments.
    files: Vec<String>,
    #[serde(skip)]
    text: Option<String>,
}

impl Report for Written {
    const SCHEMA: &'static str = "uzone.report/1";

    fn text(&self, _style: Style) -> String {
        let mut text = self.text.clone().unwrap_or_default();
        for file in &self.files {
            text.push_str(file);
            text.push('\n');
        }
        text
    }
}

/// Reads the inputs, and writes the page or the tables.
pub(crate) fn run(args: &Args, out: &Output) -> Result<Exit, Failure> {
    check(args)?;
    if let Some(output) = &args.output {
        uzone_report::check_replace(output)?;
    }
    let mut documents: Vec<Document> = Vec::new();
    for file in &args.files {
        documents.append(&mut uzone_report::read(file)?);
    }
    let mut files = Vec::new();
    if let Some(output) = &args.output {
        out.write_page(output, &documents)?;
        files.push(output.display().to_string());
    }
    let text = args.output.is_none().then(|| uzone_report::terminal(&documents));
    let documents = documents.len();
    out.print(&Written { documents, files, text })
}

/// Refuses an input that is given twice, and an output that is an input.
fn check(args: &Args) -> Result<(), Failure> {
    for (number, path) in args.files.iter().enumerate() {
        let is_same = |other: &PathBuf| path == other || is_same_file(path, other);
        if args.files[..number].iter().any(is_same) {
            let text = format!("{} is given twice: name each input once", path.display());
            return Err(Failure::usage(text));
        }
        if args.output.as_ref().is_some_and(is_same) {
            let text = format!("{} is an input: name another -o", path.display());
            return Err(Failure::usage(text));
        }
    }
    Ok(())
}
