//! `uzone man` and `uzone completions`: pages and scripts made from the command's own definitions,
//! so that they cannot contradict them.

use std::io;
use std::path::{Path, PathBuf};

use clap::{Command, CommandFactory};
use clap_complete::Shell;
use clap_mangen::Man;
use serde::Serialize;

use crate::Arguments;
use crate::exit::{self, Exit, Failure};
use crate::output::{Output, Report, Style};

/// Print the manual page, or write the pages of all commands into a directory
#[derive(Debug, clap::Args)]
#[command(after_help = exit::help("uzone man | man -l -", &MAN_EXITS))]
pub(crate) struct ManArgs {
    /// Write uzone.1, uzone-bench.1 and so on into this directory, which is made if it is not there
    #[arg(short, long, value_name = "DIR")]
    output: Option<PathBuf>,
}

const MAN_EXITS: [u8; 4] = [0, 2, 74, 77];

/// Print a script that completes arguments in a shell
#[derive(Debug, clap::Args)]
#[command(after_help = exit::help("uzone completions bash > /etc/bash_completion.d/uzone", &COMPLETIONS_EXITS))]
pub(crate) struct CompletionsArgs {
    /// For which shell
    shell: Shell,
}

const COMPLETIONS_EXITS: [u8; 3] = [0, 2, 74];

/// `uzone.man/1`: the first page, or where all were written.
#[derive(Debug, Serialize)]
struct Manual {
    /// In the language of `man`; null if they were written to files.
    page: Option<String>,
    files: Vec<String>,
}

impl Report for Manual {
    const SCHEMA: &'static str = "uzone.man/1";

    fn text(&self, _style: Style) -> String {
        match &self.page {
            Some(page) => page.clone(),
            None => self.files.iter().map(|file| format!("{file}\n")).collect(),
        }
    }
}

/// `uzone.completions/1`: a script.
#[derive(Debug, Serialize)]
struct Completions {
    shell: String,
    script: String,
}

impl Report for Completions {
    const SCHEMA: &'static str = "uzone.completions/1";

    fn text(&self, _style: Style) -> String {
        self.script.clone()
    }
}

/// Prints or writes manual pages.
pub(crate) fn man(args: &ManArgs, out: &Output) -> Result<Exit, Failure> {
    let mut command = Arguments::command();
    command.build();
    let mut manual = Manual { page: None, files: Vec::new() };
    match &args.output {
        None => manual.page = Some(text(page(&command)?)?),
        Some(dir) => {
            uzone_report::make_directory(dir)?;
            write_pages(&command, dir, &mut manual.files)?;
        }
    }
    out.print(&manual)
}

/// Writes the page of a command, and those of its subcommands.
fn write_pages(command: &Command, dir: &Path, files: &mut Vec<String>) -> Result<(), Failure> {
    let name = command.get_display_name().unwrap_or_else(|| command.get_name());
    let path = dir.join(format!("{name}.1"));
    uzone_report::replace(&path, &page(command)?)?;
    files.push(path.display().to_string());
    for command in command.get_subcommands().filter(|command| is_shown(command)) {
        write_pages(command, dir, files)?;
    }
    Ok(())
}

fn is_shown(command: &Command) -> bool {
    !command.is_hide_set() && command.get_name() != "help"
}

fn page(command: &Command) -> io::Result<Vec<u8>> {
    let mut page = Vec::new();
    Man::new(command.clone()).render(&mut page)?;
    Ok(page)
}

fn text(bytes: Vec<u8>) -> io::Result<String> {
    String::from_utf8(bytes).map_err(io::Error::other)
}

/// Prints the script for a shell.
pub(crate) fn completions(args: &CompletionsArgs, out: &Output) -> Result<Exit, Failure> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Arguments::command(), "uzone", &mut script);
    out.print(&Completions { shell: args.shell.to_string(), script: text(script)? })
}
