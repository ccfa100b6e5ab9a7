//! Axes: which points are named, and where a value is.

use crate::canvas::{Anchor, Canvas, width};
use crate::chart::Unit;

/// From a range of values to a range of pixels.
#[derive(Clone, Debug)]
pub(super) struct Axis {
    low: f64,
    high: f64,
    is_log: bool,
    unit: Unit,
    from: f64,
    to: f64,
}

impl Axis {
    /// An axis from 0 to a round number that is no smaller than `most`.
    pub(super) fn from_zero(most: f64, unit: Unit, pixels: (f64, f64)) -> Self {
        let most = if most.is_finite() && most > 0.0 { most } else { 1.0 };
        let step = round_step(most / 5.0, unit);
        let high = (most / step).ceil() * step;
        Self { low: 0.0, high, is_log: false, unit, from: pixels.0, to: pixels.1 }
    }

    /// An axis between two values, which are its ends.
    pub(super) fn between(low: f64, high: f64, unit: Unit, pixels: (f64, f64)) -> Self {
        let high = if high > low { high } else { low + 1.0 };
        Self { low, high, is_log: false, unit, from: pixels.0, to: pixels.1 }
    }

    /// A logarithmic axis that holds all of `values` that are above 0.
    pub(super) fn log(values: impl Iterator<Item = f64>, unit: Unit, pixels: (f64, f64)) -> Self {
        let above = values.filter(|value| value.is_finite() && *value > 0.0);
        let (low, high) = above.fold((f64::MAX, 0.0), |(low, high): (f64, f64), value| {
            (low.min(value), high.max(value))
        });
        let (low, high) = if high > 0.0 { (low, high) } else { (1.0, 10.0) };
        let (low, mut high) =
            (round_below(low * 1.000_001, unit), round_above(high * 0.999_999, unit));
        if high <= low {
            high = low * 10.0;
        }
        Self { low, high, is_log: true, unit, from: pixels.0, to: pixels.1 }
    }

    /// Returns where a value is; beyond the ends, at the end.
    pub(super) fn at(&self, value: f64) -> f64 {
        let share = if self.is_log {
            (value.max(self.low) / self.low).ln() / (self.high / self.low).ln()
        } else {
            (value - self.low) / (self.high - self.low)
        };
        let share = if share.is_finite() { share.clamp(0.0, 1.0) } else { 0.0 };
        self.from + (self.to - self.from) * share
    }

    /// Returns the points that are named: evenly spaced, and at most `most`.
    pub(super) fn ticks(&self, most: usize) -> Vec<f64> {
        let most = most.max(2);
        let room = crate::text::count(most);
        if self.is_log {
            return self.log_ticks(most);
        }
        // How many there are depends on where the axis begins.
        let inside =
            |step: f64| (self.high / step + 1e-9).floor() - (self.low / step - 1e-9).ceil() + 1.0;
        let mut step = round_step((self.high - self.low) / (room + 1.0), self.unit);
        while inside(step) > room {
            step = round_step(step * 1.01, self.unit);
        }
        let first = (self.low / step - 1e-9).ceil();
        let at = |index: usize| (first + crate::text::count(index)) * step;
        (0..most).map(at).take_while(|value| *value <= self.high + step * 1e-6).collect()
    }

    /// All round values between the ends, or if these are too many, powers at even distances.
    fn log_ticks(&self, most: usize) -> Vec<f64> {
        let mut all = vec![round_above(self.low * 0.999_999, self.unit)];
        while let Some(last) = all.last().copied().filter(|last| *last < self.high * 0.999_999) {
            let next = round_above(last * 1.1, self.unit);
            if next > last && next <= self.high * 1.000_001 && all.len() < 4000 {
                all.push(next);
            } else {
                break;
            }
        }
        if all.len() <= most {
            return all;
        }
        let is_power = |value: &f64| {
            let power = value.log10();
            self.unit == Unit::Bytes || (power - power.round()).abs() < 1e-6
        };
        all.retain(is_power);
        let stride = all.len().div_ceil(most).max(1);
        // An even stride through powers of two is easy to read.
        let stride =
            if self.unit == Unit::Bytes && stride > 2 { stride.div_ceil(2) * 2 } else { stride };
        all.into_iter().step_by(stride).collect()
    }

    /// Draws the axis below a plot between two heights, with its name.
    pub(super) fn below(&self, canvas: &mut Canvas, top: f64, bottom: f64, name: &str) {
        let widest = [self.low, self.high]
            .into_iter()
            .chain(self.ticks(6))
            .map(|tick| width(&self.unit.text(tick)))
            .fold(20.0, f64::max);
        let most =
            crate::text::cell((self.to - self.from) / (widest + 14.0) / 64.0, 64).clamp(2, 10);
        let mut free = 0.0;
        for tick in self.ticks(most) {
            let x = self.at(tick);
            canvas.line((x, top), (x, bottom + 4.0), "rule", 1.0, "");
            let text = self.unit.text(tick);
            let half = width(&text) / 2.0;
            // At the edge of the picture a label moves inwards.
            let middle = x.min(canvas.width - half - 1.0).max(half + 1.0);
            if middle - half >= free {
                canvas.text(middle, bottom + 14.5, Anchor::Middle, "faint", &text);
                free = middle + half + 6.0;
            }
        }
        canvas.line((self.from, bottom), (self.to, bottom), "faint", 1.0, "");
        let name = crate::canvas::fit(name, canvas.width - 2.0);
        let wide = width(&name);
        let x = ((self.from + self.to) / 2.0).min(canvas.width - wide / 2.0).max(wide / 2.0);
        canvas.text(x, bottom + 32.0, Anchor::Middle, "", &name);
    }

    /// Draws the axis at the left of a plot between two widths; its name stands above.
    pub(super) fn left(&self, canvas: &mut Canvas, left: f64, right: f64) {
        for tick in self.left_ticks() {
            let y = self.at(tick);
            canvas.line((left - 4.0, y), (right, y), "rule", 1.0, "");
            let text = self.unit.text(tick);
            canvas.text(left - 7.0, y, Anchor::End, "faint", &text);
        }
    }

    /// Returns the points that are named on a left axis: as many as its height has room for.
    fn left_ticks(&self) -> Vec<f64> {
        self.ticks(crate::text::cell((self.from - self.to) / 26.0 / 64.0, 64).clamp(2, 9))
    }

    /// Returns how much room the labels of a left axis need.
    pub(super) fn label_room(&self) -> f64 {
        let widths = self.left_ticks().into_iter().map(|tick| width(&self.unit.text(tick)));
        widths.fold(0.0, f64::max) + 10.0
    }
}

/// Returns the next of 1, 2 and 5 times a power of ten, or of two for bytes, from `least` on.
fn round_step(least: f64, unit: Unit) -> f64 {
    let least = if least.is_finite() && least > 0.0 { least } else { 1.0 };
    if unit == Unit::Bytes {
        return 2.0_f64.powf(least.log2().ceil()).max(1.0);
    }
    let power = 10.0_f64.powf(least.log10().floor());
    let steps = [1.0, 2.0, 5.0, 10.0];
    let step = steps.into_iter().find(|step| step * power >= least * (1.0 - 1e-9)).unwrap_or(10.0);
    step * power
}

/// Returns the smallest round value that is no smaller.
fn round_above(value: f64, unit: Unit) -> f64 {
    let value = value.clamp(1e-9, 1e30);
    if unit == Unit::Bytes { 2.0_f64.powf(value.log2().ceil()) } else { round_step(value, unit) }
}

/// Returns the largest round value that is no larger.
fn round_below(value: f64, unit: Unit) -> f64 {
    let value = value.clamp(1e-9, 1e30);
    if unit == Unit::Bytes {
        return 2.0_f64.powf(value.log2().floor());
    }
    let power = 10.0_f64.powf(value.log10().floor());
    let steps = [5.0, 2.0, 1.0];
    steps.into_iter().map(|step| step * power).find(|step| *step <= value).unwrap_or(power)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_few_and_inside() {
        let axis = Axis::from_zero(43.7, Unit::Plain, (0.0, 100.0));
        assert_eq!(axis.ticks(6), [0.0, 10.0, 20.0, 30.0, 40.0, 50.0]);
        let axis = Axis::log([3e3, 7e7].into_iter(), Unit::Ns, (0.0, 100.0));
        assert_eq!((axis.low.round(), axis.high.round()), (2e3, 1e8));
        assert!(axis.ticks(3).len() <= 3 && axis.ticks(3).len() >= 2);
        for values in [vec![], vec![0.0], vec![f64::NAN], vec![f64::MAX, 1e-300], vec![5.0]] {
            for unit in [Unit::Plain, Unit::Ns, Unit::Bytes] {
                let axis = Axis::log(values.iter().copied(), unit, (10.0, 90.0));
                assert!(axis.ticks(5).len() <= 5);
                for value in [0.0, 1.0, f64::MAX, f64::NAN, f64::INFINITY] {
                    assert!((10.0..=90.0).contains(&axis.at(value)), "{values:?} {value}");
                }
                let axis =
                    Axis::from_zero(values.first().copied().unwrap_or(0.0), unit, (10.0, 90.0));
                assert!(axis.ticks(5).len() <= 5);
            }
        }
    }
}
