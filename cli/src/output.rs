//! The output of a command: [`Output`], and helpers for text.
//!
//! Results go to standard output, as text or as one JSON object; progress, logs and errors go to standard error, and
//! results too where a command writes a file to standard output. A reader that goes away (`uzone doctor | head -0`) is
//! no error: the rest is not printed and the command keeps its exit code.

use std::env;
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::io::{self, IsTerminal, Write};
use std::path::Path;
use std::time::Duration;

use clap::{Args, ColorChoice, ValueEnum};
use comfy_table::{CellAlignment, Table};
use serde::Serialize;
use tracing::Level;
use uzone_os::file_system::is_stdout;

pub use uzone_report::human_duration;

use crate::exit::{ErrorObject, Exit, Failure, visible};

/// The flags that every command has.
#[derive(Args, Clone, Copy, Debug, Default)]
#[command(next_help_heading = "Output")]
pub struct Flags {
    /// Print one JSON object instead of text
    #[arg(long, global = true)]
    json: bool,
    /// Print only warnings and errors
    #[arg(short, long, global = true, conflicts_with = "verbose")]
    quiet: bool,
    /// Print logs and details too
    #[arg(short, long, global = true)]
    verbose: bool,
    /// When to use colour; with auto, on a terminal unless NO_COLOR is set
    #[arg(long, global = true, value_enum, value_name = "WHEN", default_value_t)]
    color: ColorChoice,
}

impl Flags {
    /// Finds `--json` and `--color` in arguments that are not parsed yet, or cannot be: wrong usage is reported in the
    /// form that was asked for.
    pub fn peek(arguments: impl Iterator<Item = OsString>) -> Self {
        let color = |value: Option<&str>| {
            value.and_then(|value| ColorChoice::from_str(value, false).ok()).unwrap_or_default()
        };
        let mut flags = Self::default();
        let mut arguments = arguments.take_while(|argument| argument != "--");
        while let Some(argument) = arguments.next() {
            let Some(argument) = argument.to_str() else {
                continue;
            };
            if argument == "--json" {
                flags.json = true;
            } else if argument == "--color" {
                let value = arguments.next();
                flags.color = color(value.as_deref().and_then(OsStr::to_str));
            } else if let Some(value) = argument.strip_prefix("--color=") {
                flags.color = color(Some(value));
            }
        }
        flags
    }
}

/// Returns whether to use colour, given the value of `NO_COLOR` and whether a terminal reads.
/// As no-color.org has it, an empty `NO_COLOR` has no effect, and an explicit flag wins.
fn is_wanted(when: ColorChoice, no_color: Option<&OsStr>, is_terminal: bool) -> bool {
    match when {
        ColorChoice::Always => true,
        ColorChoice::Never => false,
        ColorChoice::Auto => is_terminal && no_color.is_none_or(OsStr::is_empty),
    }
}

/// The amount of output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verbosity {
    /// Only warnings and errors.
    Quiet,
    /// The default.
    Normal,
    /// Logs and details too.
    Verbose,
}

/// A colour, named by its meaning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tone {
    /// As it should be.
    Good,
    /// Worth knowing.
    Hint,
    /// It will hurt.
    Caution,
    /// It does not work.
    Bad,
    /// Of less weight than the text around it.
    Faint,
}

/// The colour and the amount of a text.
#[derive(Clone, Copy, Debug)]
pub struct Style {
    /// The amount of output.
    pub verbosity: Verbosity,
    color: bool,
}

impl Style {
    /// Returns a style without colour, for a text that is compared or written to a file.
    #[must_use]
    pub const fn plain(verbosity: Verbosity) -> Self {
        Self { verbosity, color: false }
    }

    /// Returns `text` in the colour of `tone`, or as it is where there is no colour.
    pub fn paint(self, tone: Tone, text: impl fmt::Display) -> String {
        let code = match tone {
            Tone::Good => "32",
            Tone::Hint => "36",
            Tone::Caution => "33",
            Tone::Bad => "1;31",
            Tone::Faint => "2",
        };
        if self.color { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_string() }
    }
}

/// The result of a command: an object by `Serialize`, and a text by [`Report::text`].
pub trait Report: Serialize {
    /// The name of the schema, the first field of the object; empty if the type has that field itself.
    const SCHEMA: &'static str;

    /// Returns the result for people, each line ended.
    fn text(&self, style: Style) -> String;
}

/// A report with its schema, as a JSON object.
#[derive(Serialize)]
pub struct Object<'a, R> {
    #[serde(skip_serializing_if = "str::is_empty")]
    schema: &'static str,
    #[serde(flatten)]
    report: &'a R,
}

impl<'a, R: Report> From<&'a R> for Object<'a, R> {
    fn from(report: &'a R) -> Self {
        Self { schema: R::SCHEMA, report }
    }
}

/// The streams and the form of a command's output.
#[derive(Clone, Copy, Debug)]
pub struct Output {
    is_json: bool,
    verbosity: Verbosity,
    when: ColorChoice,
    /// Whether standard output is for the bytes of a file.
    is_taken: bool,
}

impl Output {
    /// Returns the output for these flags.
    pub fn new(flags: Flags) -> Self {
        Self {
            is_json: flags.json,
            verbosity: match (flags.quiet, flags.verbose) {
                (true, _) => Verbosity::Quiet,
                (false, true) => Verbosity::Verbose,
                (false, false) => Verbosity::Normal,
            },
            when: flags.color,
            is_taken: false,
        }
    }

    /// Leaves standard output to the file, if the command writes it there.
    pub fn beside(self, file: Option<&Path>) -> Self {
        Self { is_taken: file.is_some_and(is_stdout), ..self }
    }

    /// Returns the amount of output.
    pub fn verbosity(&self) -> Verbosity {
        self.verbosity
    }

    /// Returns whether clap may print in colour.
    pub fn clap_color(&self) -> ColorChoice {
        self.when
    }

    fn style(&self, is_terminal: bool) -> Style {
        Style { verbosity: self.verbosity, color: self.has_color(is_terminal) }
    }

    fn has_color(&self, is_terminal: bool) -> bool {
        is_wanted(self.when, env::var_os("NO_COLOR").as_deref(), is_terminal)
    }

    /// Prints a result to standard output, as text or JSON, and returns the exit code of success.
    pub fn print(&self, report: &impl Report) -> Result<Exit, Failure> {
        let is_terminal =
            if self.is_taken { io::stderr().is_terminal() } else { io::stdout().is_terminal() };
        let text = match self.is_json {
            true => json(&Object::from(report))?,
            false => report.text(self.style(is_terminal)),
        };
        match self.is_taken {
            true if self.is_json || self.verbosity != Verbosity::Quiet => to_stderr(&text),
            true => {}
            false => to_stdout(text.as_bytes())?,
        }
        Ok(Exit::Ok)
    }

    /// Prints a text that is no result, the same with `--json`.
    pub fn text(&self, text: &[u8]) -> Result<(), Failure> {
        to_stdout(text)
    }

    /// Prints a warning to standard error, unless `--quiet`.
    pub fn warn(&self, line: impl fmt::Display) {
        if self.verbosity != Verbosity::Quiet {
            let style = self.style(io::stderr().is_terminal());
            let line = visible(&line.to_string());
            to_stderr(&format!("{} {line}\n", style.paint(Tone::Caution, "warning:")));
        }
    }

    /// Prints the events of the libraries from the level `usual` on; a level more with `--verbose`, and errors alone with
    /// `--quiet`.
    pub fn print_events(&self, usual: Level) {
        let level = match self.verbosity {
            Verbosity::Quiet => Level::ERROR,
            Verbosity::Normal => usual,
            Verbosity::Verbose => usual.max(Level::INFO),
        };
        let events = tracing_subscriber::fmt()
            .with_max_level(level)
            .with_writer(io::stderr)
            .with_ansi(false)
            .with_target(false)
            .compact();
        // Times are for a command that runs for long. A second call has no effect.
        let _ = match usual {
            Level::INFO => events.try_init(),
            _ => events.without_time().try_init(),
        };
    }

    /// Prints a line to standard error, with `--verbose` only.
    pub fn log(&self, line: impl fmt::Display) {
        if self.verbosity == Verbosity::Verbose {
            to_stderr(&format!("{line}\n"));
        }
    }

    /// Prints one of many events: a line on standard error, unless `--quiet`; with `--json` an object on a line of
    /// standard output.
    pub fn event(&self, event: &impl Report) {
        if self.is_json {
            // A reader that went away has seen enough; other threads and the work go on.
            if let Ok(line) = serde_json::to_string(&Object::from(event)) {
                self.line(&line);
            }
        } else if self.verbosity != Verbosity::Quiet {
            to_stderr(&event.text(self.style(io::stderr().is_terminal())));
        }
    }

    /// Prints a failure to standard error, and with `--json` as an object to standard output too.
    /// Returns the code to exit with.
    pub fn fail(&self, failure: &Failure) -> Exit {
        let style = self.style(io::stderr().is_terminal());
        let text = failure.text();
        let (first, rest) = text.split_at("error:".len());
        to_stderr(&format!("{}{rest}", style.paint(Tone::Bad, first)));
        // On a line, as events are.
        if self.is_json
            && let Ok(line) = serde_json::to_string(&failure.object())
        {
            self.line(&line);
        }
        failure.exit()
    }

    /// Prints an object on a line. A failure to print it is lost.
    fn line(&self, object: &str) {
        let line = format!("{object}\n");
        if self.is_taken {
            to_stderr(&line);
        } else {
            let _ = to_stdout(line.as_bytes());
        }
    }

    /// Prints a message of clap: help and the version to standard output, wrong usage to standard error, and with
    /// `--json` as an object to standard output too. Returns the code to exit with.
    pub fn usage(&self, error: &clap::Error) -> Exit {
        let plain = error.render().to_string();
        // A terminal would take escapes in an argument for a style.
        let has_escapes = env::args_os().any(|argument| {
            let argument = argument.to_string_lossy();
            visible(&argument) != argument
        });
        if error.use_stderr() && has_escapes {
            to_stderr(&visible(&plain));
        } else {
            // A reader that went away has seen enough, here as elsewhere.
            let _ = error.print();
        }
        if !error.use_stderr() {
            return Exit::Ok;
        }
        if self.is_json {
            let first = plain.lines().next().unwrap_or_default();
            let first = first.strip_prefix("error: ").unwrap_or(first);
            let object = ErrorObject::new(first.to_owned(), Vec::new(), Exit::Usage);
            let _ = json(&object).map(|text| to_stdout(text.as_bytes()));
        }
        Exit::Usage
    }
}

fn json(value: &impl Serialize) -> serde_json::Result<String> {
    serde_json::to_string_pretty(value).map(|text| text + "\n")
}

fn to_stdout(text: &[u8]) -> Result<(), Failure> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(text).and_then(|()| stdout.flush()) {
        Err(cause) if cause.kind() != io::ErrorKind::BrokenPipe => {
            Err(Failure::of("cannot write the result to standard output", cause))
        }
        _ => Ok(()),
    }
}

fn to_stderr(text: &str) {
    // There is no stream left to report a failure to; `eprint!` would panic.
    let _ = io::stderr().write_all(text.as_bytes());
}

/// Returns a number of nanoseconds as a time for people.
#[must_use]
pub fn ns(ns: u64) -> String {
    human_duration(Duration::from_nanos(ns))
}

/// Returns numbers in ascending order as a list of runs: `0-3,8,10-11`.
pub fn number_list(numbers: &[u32]) -> String {
    let mut runs: Vec<(u32, u32)> = Vec::new();
    for &number in numbers {
        match runs.last_mut() {
            Some((_, last)) if last.checked_add(1) == Some(number) => *last = number,
            _ => runs.push((number, number)),
        }
    }
    let runs = runs.into_iter().map(|(first, last)| {
        if first == last { first.to_string() } else { format!("{first}-{last}") }
    });
    runs.collect::<Vec<_>>().join(",")
}

/// Returns an empty table without rules, for text: the first column to the left, the others, which
/// hold numbers, to the right. Print it with `trim_fmt`, which leaves no blanks at the ends of lines.
pub fn table(header: &[impl AsRef<str>]) -> Table {
    let mut table = Table::new();
    table.load_style(comfy_table::presets::NOTHING);
    table.set_header(header.iter().map(AsRef::as_ref));
    for (index, column) in table.column_iter_mut().enumerate() {
        // The gap between columns.
        column.set_padding((if index == 0 { 0 } else { 2 }, 0));
        if index != 0 {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colour_wants_a_terminal_and_no_veto_unless_a_flag_says_otherwise() {
        let (set, empty) = (Some(OsStr::new("1")), Some(OsStr::new("")));
        // The flag, NO_COLOR, whether a terminal reads, and whether there is colour.
        let table = [
            (ColorChoice::Auto, None, true, true),
            (ColorChoice::Auto, None, false, false),
            (ColorChoice::Auto, set, true, false),
            (ColorChoice::Auto, empty, true, true),
            (ColorChoice::Always, set, false, true),
            (ColorChoice::Never, None, true, false),
        ];
        for (when, no_color, is_terminal, expected) in table {
            let wanted = is_wanted(when, no_color, is_terminal);
            assert_eq!(wanted, expected, "{when:?} {no_color:?} {is_terminal}");
        }
    }

    #[test]
    fn flags_are_seen_before_arguments_are_parsed_and_not_behind_two_dashes() {
        let peek = |line: &str| Flags::peek(line.split(' ').map(OsString::from));
        assert!(peek("uzone --json").json);
        assert!(peek("uzone doctor --bogus --json").json);
        assert!(!peek("uzone doctor -- --json").json);
        assert_eq!(peek("uzone --color never doctor").color, ColorChoice::Never);
        assert_eq!(peek("uzone doctor --color=always").color, ColorChoice::Always);
        assert_eq!(peek("uzone doctor --color").color, ColorChoice::Auto);
        assert_eq!(peek("uzone doctor --color=red").color, ColorChoice::Auto);
    }

    #[test]
    fn a_list_of_numbers_names_runs_by_their_ends() {
        assert_eq!(number_list(&[]), "");
        assert_eq!(number_list(&[7]), "7");
        assert_eq!(number_list(&[0, 1, 2, 3, 8, 10, 11]), "0-3,8,10-11");
        assert_eq!(number_list(&[u32::MAX]), "4294967295");
    }

    #[test]
    fn paint_without_colour_leaves_the_text_alone() {
        let plain = Style::plain(Verbosity::Normal);
        assert_eq!(plain.paint(Tone::Bad, "x"), "x");
        let color = Style { color: true, ..plain };
        assert_eq!(color.paint(Tone::Bad, "x"), "\x1b[1;31mx\x1b[0m");
    }

    #[test]
    fn a_table_has_its_numbers_to_the_right_and_no_blanks_at_the_ends() {
        let mut table = table(&["case", "time"]);
        table.add_row(["zero", "9.8 ms"]);
        table.add_row(["pin", "41 us"]);
        let text = table.trim_fmt();
        assert_eq!(text, "case    time\nzero  9.8 ms\npin    41 us");
    }
}
