//! The progress of a long run on standard error: [`Progress`].
//!
//! Shown on a terminal only, and never with `--quiet`. The line is removed when its work is over.

use std::borrow::Cow;
use std::cell::RefCell;
use std::io::{self, IsTerminal, Write};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use uzone_harness::{BenchError, Watch};
use uzone_report::human_duration;

use crate::output::{Output, Verbosity};

/// The time between two drawings.
const REDRAW: Duration = Duration::from_millis(100);

/// A step under way. Its line disappears when it is dropped.
#[derive(Debug)]
pub struct Progress {
    title: Cow<'static, str>,
    total: u64,
    started: Instant,
    /// The time of the next drawing; `None` where nothing is drawn.
    next: Option<Mutex<Instant>>,
}

impl Progress {
    /// Starts a step of `total` rounds or bytes; 0 is an unknown number.
    pub fn new(out: &Output, title: impl Into<Cow<'static, str>>, total: u64) -> Self {
        let started = Instant::now();
        let is_shown = out.verbosity() != Verbosity::Quiet && io::stderr().is_terminal();
        let next = is_shown.then(|| Mutex::new(started));
        let progress = Self { title: title.into(), total, started, next };
        progress.set(0);
        progress
    }

    /// Shows that `done` rounds or bytes are done.
    pub fn set(&self, done: u64) {
        let Some(next) = &self.next else { return };
        let (mut next, now) = (next.lock().unwrap_or_else(PoisonError::into_inner), Instant::now());
        if now < *next {
            return;
        }
        *next = now + REDRAW;
        let left = self.started.elapsed().as_secs() * self.total.saturating_sub(done) / done.max(1);
        draw(&match self.total {
            0 => self.title.to_string(),
            total if done == 0 => format!("{} 0/{total}", self.title),
            total => {
                let left = human_duration(Duration::from_secs(left));
                format!("{} {} %, {left} left", self.title, done * 100 / total)
            }
        });
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if self.next.is_some() {
            draw("");
        }
    }
}

/// Replaces the line. A terminal that is gone shows nothing.
fn draw(text: &str) {
    let _ = write!(io::stderr(), "\r\x1b[2K{text}");
}

/// Runs measurements with a line for each of their steps.
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
            // The old line is removed before the new one is drawn.
            *shown = None;
            *shown = Some(Progress::new(out, title, phase.total));
        }
        if let Some(step) = &*shown {
            step.set(phase.done);
        }
    })
}
