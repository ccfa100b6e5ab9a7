//! How far a long step is, on standard error: [`Progress`].
//!
//! Shown to a terminal only, and never with `--quiet`. It is taken away when the step is over, for
//! the result says what came of it.

use std::borrow::Cow;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::output::{Output, Verbosity};

/// A step under way. It disappears when dropped.
#[derive(Debug)]
pub(crate) struct Progress(ProgressBar);

impl Progress {
    /// Starts a step of `total` rounds.
    pub(crate) fn new(out: &Output, what: impl Into<Cow<'static, str>>, total: u64) -> Self {
        let target = if out.verbosity() == Verbosity::Quiet {
            ProgressDrawTarget::hidden()
        } else {
            // Nothing is drawn where no terminal reads.
            ProgressDrawTarget::stderr()
        };
        let bar = ProgressBar::with_draw_target(Some(total), target);
        // A template that cannot be read is one with a typing error: the plain bar does too.
        let style = ProgressStyle::with_template("{msg} {wide_bar} {pos}/{len} {eta}");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        bar.set_message(what);
        Self(bar)
    }

    /// Shows that `done` rounds are behind us.
    pub(crate) fn set(&self, done: u64) {
        self.0.set_position(done);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
