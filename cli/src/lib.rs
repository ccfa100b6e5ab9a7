//! Shared parts of uzone's programs: exit codes and errors, output as text or JSON, and progress.
//!
//! The program `uzone` is in this package, and the program `uzone-bench` in the package of that name.
#![forbid(unsafe_code)]
#![expect(
    clippy::missing_errors_doc,
    clippy::must_use_candidate,
    reason = "each error is a `Failure` with its exit code, or the error of the caller's closure"
)]

use std::path::Path;
use std::process::ExitCode;

use clap::Parser;
use exit::{Exit, Failure};
use output::{Flags, Output};
use tracing::Level;

pub mod exit;
pub mod output;
pub mod progress;
#[cfg(feature = "schema")]
pub mod schema;

/// The arguments of a program, and its work.
pub trait Program: Parser {
    /// Returns the flags that every command has.
    fn flags(&self) -> Flags;

    /// Returns the file that the program writes beside its result.
    fn output(&self) -> Option<&Path> {
        None
    }

    /// Returns the level of the libraries' events that are printed.
    fn level(&self) -> Level {
        Level::WARN
    }

    /// Does the work, and prints the result.
    fn run(&self, out: &Output) -> Result<Exit, Failure>;
}

/// Runs a program with the arguments of the process.
pub fn main<P: Program>() -> ExitCode {
    let exit = match P::try_parse() {
        Ok(program) => {
            let out = Output::new(program.flags()).beside(program.output());
            out.print_events(program.level());
            program.run(&out).unwrap_or_else(|failure| out.fail(&failure))
        }
        Err(error) => Output::new(Flags::peek(std::env::args_os().skip(1))).usage(&error),
    };
    exit.into()
}
