//! `uzone`: host checks, a demo, images, a page server and reports.
//!
//! This file reads the arguments and turns a command's result into an exit code. A command is a module
//! with `Args` and `run(&Args, &Output) -> Result<Exit, Failure>`; it prints through [`Output`].
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::too_many_lines))]

mod demo;
mod diff;
mod doctor;
mod generate;
mod image;
mod offload;
mod report;
#[cfg(test)]
mod schemas;
mod serve;
mod status;
mod user;

use std::env;
use std::path::Path;
use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

use exit::{Exit, Failure};
use output::{Flags, Output};
use tracing::Level;
use uzone_cli::{exit, output, progress};

/// A memory manager for big memory, in user space.
#[derive(Debug, Parser)]
#[command(
    name = "uzone",
    version,
    arg_required_else_help = true,
    subcommand_required = true,
    after_help = exit::help("uzone doctor", &Exit::all().map(Exit::code).collect::<Vec<_>>())
)]
struct Arguments {
    #[command(flatten)]
    flags: Flags,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Doctor(doctor::Args),
    Demo(demo::Args),
    Report(report::Args),
    Pack(image::pack::Args),
    Unpack(image::unpack::Args),
    Inspect(image::inspect::Args),
    Verify(image::verify::Args),
    Serve(serve::Args),
    Status(status::StatusArgs),
    Drain(status::DrainArgs),
    Diff(diff::Args),
    Offload(offload::Args),
    Man(generate::ManArgs),
    Completions(generate::CompletionsArgs),
}

impl Command {
    /// Returns the level of the libraries' events that are printed. A server also prints events that an operator may ask
    /// for later, such as an image that was opened without a root hash.
    fn usual_level(&self) -> Level {
        match self {
            Self::Serve(_) | Self::Offload(_) => Level::INFO,
            _ => Level::WARN,
        }
    }

    /// Returns the file that the command writes beside its result.
    fn output(&self) -> Option<&Path> {
        match self {
            Self::Pack(args) => Some(&args.image),
            Self::Unpack(args) => Some(&args.output),
            Self::Diff(args) => Some(&args.output),
            Self::Report(args) => args.output.as_deref(),
            Self::Inspect(args) => args.report.as_deref(),
            _ => None,
        }
    }

    fn run(&self, out: &Output) -> Result<Exit, Failure> {
        match self {
            Self::Doctor(args) => doctor::run(args, out),
            Self::Demo(args) => demo::run(args, out),
            Self::Report(args) => report::run(args, out),
            Self::Pack(args) => image::pack::run(args, out),
            Self::Unpack(args) => image::unpack::run(args, out),
            Self::Inspect(args) => image::inspect::run(args, out),
            Self::Verify(args) => image::verify::run(args, out),
            Self::Serve(args) => serve::run(args, out),
            Self::Status(args) => status::status(args, out),
            Self::Drain(args) => status::drain(args, out),
            Self::Diff(args) => diff::run(args, out),
            Self::Offload(args) => offload::run(args, out),
            Self::Man(args) => generate::man(args, out),
            Self::Completions(args) => generate::completions(args, out),
        }
    }
}

fn main() -> ExitCode {
    let early = Output::new(Flags::peek(env::args_os().skip(1)));
    let parsed = Arguments::command()
        .color(early.clap_color())
        .try_get_matches()
        .and_then(|matches| Arguments::from_arg_matches(&matches));
    let exit = match parsed {
        Ok(Arguments { flags, command }) => {
            let out = Output::new(flags).beside(command.output());
            out.print_events(command.usual_level());
            command.run(&out).unwrap_or_else(|failure| out.fail(&failure))
        }
        Err(error) => early.usage(&error),
    };
    exit.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_arguments_hold_together_and_every_command_ends_its_help_with_an_example() {
        let mut command = Arguments::command();
        command.clone().debug_assert();
        command.build();
        for command in command.get_subcommands().filter(|command| command.get_name() != "help") {
            let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            assert!(help.contains("Example:\n  uzone "), "{}: {help}", command.get_name());
            assert!(help.contains("Exit codes:\n   0  ok"), "{}: {help}", command.get_name());
        }
    }
}
