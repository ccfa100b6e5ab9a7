//! `uzone man` and `uzone completions`: manual pages and scripts that are made from the definitions of the arguments.

use std::path::PathBuf;

use clap::CommandFactory;
use clap_complete::Shell;
use clap_mangen::Man;

use crate::Arguments;
use crate::exit::{self, Exit, Failure};
use crate::output::Output;

/// Print the manual page, or write the pages of all commands into a directory
#[derive(Debug, clap::Args)]
#[command(after_help = exit::help("uzone man | man -l -", &MAN_EXITS))]
pub(crate) struct ManArgs {
    /// Write uzone.1, uzone-demo.1 and so on into this directory, which is created if it is missing
    #[arg(short, long, value_name = "DIR")]
    output: Option<PathBuf>,
}

const MAN_EXITS: [u8; 4] = [0, 2, 74, 77];

/// Print a script that completes arguments in a shell
#[derive(Debug, clap::Args)]
#[command(after_help = exit::help("uzone completions bash > /etc/bash_completion.d/uzone", &COMPLETIONS_EXITS))]
pub(crate) struct CompletionsArgs {
    /// The shell
    shell: Shell,
}

const COMPLETIONS_EXITS: [u8; 3] = [0, 2, 74];

/// Prints or writes manual pages.
pub(crate) fn man(args: &ManArgs, out: &Output) -> Result<Exit, Failure> {
    match &args.output {
        None => {
            let mut command = Arguments::command();
            command.build();
            let mut page = Vec::new();
            Man::new(command).render(&mut page)?;
            out.text(&page)?;
        }
        Some(dir) => {
            uzone_report::make_directory(dir)?;
            let failed = |cause| {
                Failure::of(format!("cannot write the pages into {}", dir.display()), cause)
            };
            clap_mangen::generate_to(Arguments::command(), dir).map_err(failed)?;
        }
    }
    Ok(Exit::Ok)
}

/// Prints the script for a shell.
pub(crate) fn completions(args: &CompletionsArgs, out: &Output) -> Result<Exit, Failure> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Arguments::command(), "uzone", &mut script);
    out.text(&script)?;
    Ok(Exit::Ok)
}
