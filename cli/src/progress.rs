//! The progress of a long run on standard error: [`Progress`].
//!
//! Shown on a terminal only, and never with `--quiet`. The bar is removed when its work is over.

use std::borrow::Cow;
use std::cell::RefCell;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use uzone_harness::{BenchError, Watch};

use crate::output::{Output, Verbosity};

/// A bar of a known number of rounds or bytes, and one of an unknown number.
const KNOWN: &str = "{msg} {wide_bar} {percent} %, {eta} left";
const UNKNOWN: &str = "{msg} {spinner} {elapsed}";

/// A step under way. Its bar disappears when it is dropped.
#[derive(Debug)]
pub struct Progress {
    title: Cow<'static, str>,
    bar: ProgressBar,
}

impl Progress {
    /// Starts a step of `total` rounds or bytes; 0 is an unknown number.
    pub fn new(out: &Output, title: impl Into<Cow<'static, str>>, total: u64) -> Self {
        let target = match out.verbosity() {
            Verbosity::Quiet => ProgressDrawTarget::hidden(),
            _ => ProgressDrawTarget::stderr(), // draws on a terminal only
        };
        let (total, template) = if total == 0 { (None, UNKNOWN) } else { (Some(total), KNOWN) };
        let bar = ProgressBar::with_draw_target(total, target);
        // The templates are valid; the plain bar would do as well.
        let style = ProgressStyle::with_template(template);
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        let title = title.into();
        bar.set_message(title.clone());
        Self { title, bar }
    }

    /// Shows that `done` rounds or bytes are done.
    pub fn set(&self, done: u64) {
        self.bar.set_position(done);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

/// Runs measurements with a bar for each of their steps.
///
/// # Errors
/// [`BenchError`] if `run` returns it.
pub fn with_progress<T>(
    out: &Output,
    run: impl FnOnce(Watch<'_>) -> Result<T, BenchError>,
) -> Result<T, BenchError> {
    let shown = RefCell::new(None::<Progress>);
    run(&|phase| {
        let title = match phase.part {
            Some((name, number, of)) => format!("part {number} of {of}, {name}: {}", phase.step),
            None => phase.step.to_owned(),
        };
        let mut shown = shown.borrow_mut();
        if shown.as_ref().is_none_or(|step| step.title != title) {
            // The old bar is removed before the new one is drawn.
            *shown = None;
            *shown = Some(Progress::new(out, title, phase.total));
        }
        if let Some(step) = &*shown {
            step.set(phase.done);
        }
    })
}
