//! `uzone-bench`: every benchmark of uzone, beside the naive way, the limit of the machine, and peers.
//!
//! `command` reads the arguments and prints, `settings` holds the arguments of a benchmark, `parts` their sizes on this
//! machine, and `tables` the cases. The harness that runs them is the package `uzone-harness`.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::too_many_lines))]

mod command;
mod parts;
mod settings;
mod tables;

use std::process::ExitCode;

use clap::Parser;
use uzone_cli::Program;
use uzone_cli::exit::{Exit, Failure};
use uzone_cli::output::{Flags, Output};

/// Measure this machine: naive, ours, the limit, and the published figure
///
/// Without a benchmark, all of them are run at sizes that fit the machine, in three to four minutes,
/// and the headlines are printed as one table; -v prints all tables, and --json everything.
#[derive(Debug, Parser)]
#[command(
    name = "uzone-bench",
    version,
    after_help = uzone_cli::exit::help(
        "uzone-bench --json > base.json && uzone-bench --check base.json",
        &command::EXITS,
    )
)]
struct Arguments {
    #[command(flatten)]
    flags: Flags,
    #[command(flatten)]
    args: command::Args,
}

impl Program for Arguments {
    fn flags(&self) -> Flags {
        self.flags
    }

    fn run(&self, out: &Output) -> Result<Exit, Failure> {
        command::run(&self.args, out)
    }
}

fn main() -> ExitCode {
    uzone_cli::main::<Arguments>()
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_arguments_hold_together_and_every_benchmark_ends_its_help_with_an_example() {
        let mut command = Arguments::command();
        command.clone().debug_assert();
        command.build();
        for command in command.get_subcommands().filter(|command| command.get_name() != "help") {
            let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            assert!(help.contains("Example:\n  uzone-bench "), "{}: {help}", command.get_name());
            assert!(help.contains("Exit codes:\n   0  ok"), "{}: {help}", command.get_name());
        }
    }
}
