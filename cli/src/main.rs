//! `uzone`: host checks, a demo, images, a page server and reports.
//!
//! A command is a module with `Args` and `run(&Args, &Output) -> Result<Exit, Failure>`; it prints through [`Output`].
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

use std::path::Path;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

use exit::{Exit, Failure};
use output::{Flags, Output};
use tracing::Level;
use uzone_cli::{Program, exit, output, progress};

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

impl Program for Arguments {
    fn flags(&self) -> Flags {
        self.flags
    }

    fn output(&self) -> Option<&Path> {
        match &self.command {
            Command::Pack(args) => Some(&args.image),
            Command::Unpack(args) => Some(&args.output),
            Command::Diff(args) => Some(&args.output),
            Command::Report(args) => args.output.as_deref(),
            Command::Inspect(args) => args.report.as_deref(),
            _ => None,
        }
    }

    /// A server also prints events that an operator may ask for later, such as an image that was opened without a root
    /// hash.
    fn level(&self) -> Level {
        match self.command {
            Command::Serve(_) | Command::Offload(_) => Level::INFO,
            _ => Level::WARN,
        }
    }

    fn run(&self, out: &Output) -> Result<Exit, Failure> {
        match &self.command {
            Command::Doctor(args) => doctor::run(args, out),
            Command::Demo(args) => demo::run(args, out),
            Command::Report(args) => report::run(args, out),
            Command::Pack(args) => image::pack::run(args, out),
            Command::Unpack(args) => image::unpack::run(args, out),
            Command::Inspect(args) => image::inspect::run(args, out),
            Command::Verify(args) => image::verify::run(args, out),
            Command::Serve(args) => serve::run(args, out),
            Command::Status(args) => status::status(args, out),
            Command::Drain(args) => status::drain(args, out),
            Command::Diff(args) => diff::run(args, out),
            Command::Offload(args) => offload::run(args, out),
            Command::Man(args) => generate::man(args, out),
            Command::Completions(args) => generate::completions(args, out),
        }
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
