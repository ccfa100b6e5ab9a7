//! The progress of a long run on standard error: [`Progress`] of one step, [`Steps`] of several.
//!
//! Shown on a terminal only, and never with `--quiet`. A bar is removed when its work is over.

use std::borrow::Cow;
use std::cell::RefCell;

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use uzone_harness::{BenchError, Phase, Watch};

use crate::output::{Output, Verbosity};

/// The templates of a bar of rounds and of a bar of bytes.
const ROUNDS: &str = "{msg} {wide_bar} {pos}/{len} {eta}";
const BYTES: &str = "{msg} {wide_bar} {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec}";

/// The bars of a run: one for the step under way, below one for the parts where there are several.
#[derive(Debug)]
pub struct Steps {
    bars: MultiProgress,
    shown: RefCell<Shown>,
}

#[derive(Debug, Default)]
struct Shown {
    /// The number of the part, and the bar that counts parts.
    part: Option<(usize, Progress)>,
    /// The name of the step, and the bar that counts its rounds.
    step: Option<(String, Progress)>,
}

/// A step under way. It disappears when dropped.
#[derive(Debug)]
pub struct Progress(ProgressBar);

impl Progress {
    /// Starts a step of `total` rounds.
    pub fn new(out: &Output, title: impl Into<Cow<'static, str>>, total: u64) -> Self {
        Self::dressed(ProgressBar::with_draw_target(Some(total), target(out)), title, ROUNDS)
    }

    /// Starts work on `total` bytes, or with 0 on an unknown number of bytes.
    pub fn bytes(out: &Output, title: &'static str, total: u64) -> Self {
        let total = (total > 0).then_some(total);
        Self::dressed(ProgressBar::with_draw_target(total, target(out)), title, BYTES)
    }

    /// Sets the style of a bar.
    fn dressed(bar: ProgressBar, title: impl Into<Cow<'static, str>>, template: &str) -> Self {
        // The templates are valid; the plain bar would do as well.
        let style = ProgressStyle::with_template(template);
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        bar.set_message(title);
        Self(bar)
    }

    /// Shows that `done` rounds are done.
    pub fn set(&self, done: u64) {
        self.0.set_position(done);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

fn target(out: &Output) -> ProgressDrawTarget {
    if out.verbosity() == Verbosity::Quiet {
        ProgressDrawTarget::hidden()
    } else {
        // A bar is drawn on a terminal only.
        ProgressDrawTarget::stderr()
    }
}

/// Runs measurements with a progress bar for each of their parts.
///
/// # Errors
/// [`BenchError`] if `run` returns it.
pub fn with_progress<T>(
    out: &Output,
    run: impl FnOnce(Watch<'_>) -> Result<T, BenchError>,
) -> Result<T, BenchError> {
    let steps = Steps::new(out);
    run(&|phase| steps.show(phase))
}

impl Steps {
    /// Starts a run.
    pub fn new(out: &Output) -> Self {
        Self { bars: MultiProgress::with_draw_target(target(out)), shown: RefCell::default() }
    }

    /// Shows the progress of the run.
    pub fn show(&self, phase: Phase<'_>) {
        let mut shown = self.shown.borrow_mut();
        if let Some((name, number, of)) = phase.part
            && shown.part.as_ref().is_none_or(|(known, _)| *known != number)
        {
            // The new step's bar comes below the new bar of parts.
            shown.step = None;
            shown.part = None;
            let bar = self.bar(of as u64, format!("part {number} of {of}: {name}"));
            bar.set(number as u64 - 1);
            shown.part = Some((number, bar));
        }
        if shown.step.as_ref().is_none_or(|(known, _)| known != phase.step) {
            shown.step = None;
            shown.step =
                Some((phase.step.to_owned(), self.bar(phase.total, phase.step.to_owned())));
        }
        if let Some((_, bar)) = &shown.step {
            bar.set(phase.done);
        }
    }

    fn bar(&self, total: u64, title: String) -> Progress {
        Progress::dressed(self.bars.add(ProgressBar::new(total)), title, ROUNDS)
    }
}
