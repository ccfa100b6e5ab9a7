//! The output of a command: [`Output`], and helpers for text.
//!
//! Results go to standard output, as text or as one JSON object; progress, logs and errors go to standard error, and
//! results too where a command writes a file to standard output. A reader that goes away (`uzone doctor | head -0`) is
//! no error: the rest is not printed and the command keeps its exit code.

use std::env;
use std::ffi::{OsStr, OsString};
use std::fmt::{self, Write as _};
use std::io::{self, IsTerminal, Write as _};
use std::path::Path;
use std::time::{Duration, SystemTime};

use clap::{Args, ColorChoice, ValueEnum};
use serde::Serialize;
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};
use uzone_snapshot::files::is_stdout;

use uzone_report::Document;
pub use uzone_report::{columns, human_duration};

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
    /// Use of colour; with auto, on a terminal unless NO_COLOR is set
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
    /// In order.
    Good,
    /// A remark.
    Hint,
    /// A problem to come.
    Caution,
    /// A failure.
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
struct Object<'a, R> {
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
        // Times are for a command that runs for long. A second call has no effect.
        let style = self.style(io::stderr().is_terminal());
        let events = Events { style, level, has_times: usual == Level::INFO };
        let _ = tracing::subscriber::set_global_default(events);
    }

    /// Writes documents as an HTML page.
    pub fn write_page(&self, page: &Path, documents: &[Document]) -> Result<(), Failure> {
        uzone_report::replace(page, uzone_report::html(documents).as_bytes())?;
        self.log(format_args!("wrote {}", page.display()));
        Ok(())
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
        self.error(&failure.text());
        if self.is_json
            && let Ok(line) = serde_json::to_string(&failure.object())
        {
            self.line(&line);
        }
        failure.exit()
    }

    /// Prints an error, or help in place of one, to standard error.
    fn error(&self, text: &str) {
        let style = self.style(io::stderr().is_terminal());
        match text.strip_prefix("error:") {
            Some(rest) => to_stderr(&format!("{}{rest}", style.paint(Tone::Bad, "error:"))),
            None => to_stderr(text),
        }
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
        if !error.use_stderr() {
            // A reader that went away has seen enough, here as elsewhere.
            let _ = to_stdout(plain.as_bytes());
            return Exit::Ok;
        }
        self.error(&visible(&plain));
        if self.is_json {
            let first = plain.lines().next().unwrap_or_default();
            let first = first.strip_prefix("error: ").unwrap_or(first);
            let object = ErrorObject::new(first.to_owned(), Vec::new(), Exit::Usage);
            let _ = json(&object).map(|text| to_stdout(text.as_bytes()));
        }
        Exit::Usage
    }
}

/// Prints the events of the libraries to standard error. Spans are not used. A confined process may print them: the
/// terminal was asked before.
struct Events {
    style: Style,
    level: Level,
    has_times: bool,
}

impl Subscriber for Events {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= self.level
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(LevelFilter::from_level(self.level))
    }

    fn event(&self, event: &Event<'_>) {
        let mut text = EventText::default();
        event.record(&mut text);
        let EventText { message, fields } = text;
        let (tone, word) = match *event.metadata().level() {
            Level::ERROR => (Tone::Bad, "error:"),
            Level::WARN => (Tone::Caution, "warning:"),
            _ => (Tone::Hint, "note:"),
        };
        let time = humantime::format_rfc3339_millis(SystemTime::now());
        let time = if self.has_times { format!("{time} ") } else { String::new() };
        let word = self.style.paint(tone, word);
        to_stderr(&format!("{time}{word} {}{}\n", visible(&message), visible(&fields)));
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

/// The message of an event, and its fields as ` name=value`.
#[derive(Default)]
struct EventText {
    message: String,
    fields: String,
}

impl Visit for EventText {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        // Writing to a String does not fail.
        let _ = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            name => write!(self.fields, " {name}={value:?}"),
        };
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

/// Returns whether two paths name one file that exists.
pub fn is_same_file(one: &Path, other: &Path) -> bool {
    matches!((one.canonicalize(), other.canonicalize()), (Ok(one), Ok(other)) if one == other)
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

/// Returns the first row of a table: its headings.
pub fn headings(headings: &[&str]) -> Vec<String> {
    headings.iter().map(|heading| (*heading).to_owned()).collect()
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
}
