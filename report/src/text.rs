//! Numbers as text, and text that is safe for a page or a terminal.

use std::borrow::Cow;
use std::time::{Duration, UNIX_EPOCH};

use uzone_pages::ByteLen;

/// Returns whether a character must not reach a page or a terminal: it is no XML, is a command to the terminal, or
/// changes the direction of the text around it.
fn is_hostile(character: char) -> bool {
    character.is_control()
        || matches!(character, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
        || matches!(character, '\u{fffe}' | '\u{ffff}' | '\u{2028}' | '\u{2029}')
}

/// Returns `text` with a mark in place of each character that is a command.
#[must_use]
pub fn plain(text: &str) -> Cow<'_, str> {
    if text.contains(is_hostile) {
        text.replace(is_hostile, "\u{fffd}").into()
    } else {
        text.into()
    }
}

/// Returns `text` for an element or a quoted attribute of XML and HTML.
pub(crate) fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in plain(text).chars() {
        match character {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            other => escaped.push(other),
        }
    }
    escaped
}

/// Returns some sentences as one text.
pub(crate) fn sentences(parts: &[&str]) -> String {
    let mut text = String::new();
    for part in parts.iter().filter(|part| !part.is_empty()) {
        if !text.is_empty() {
            text.push(' ');
        }
        let mut letters = part.chars();
        text.extend(letters.next().into_iter().flat_map(char::to_uppercase));
        text.push_str(letters.as_str());
        if !part.ends_with(['.', '!', '?']) {
            text.push('.');
        }
    }
    text
}

/// Returns a count for ratios, rates and pictures, which need less than 54 bits.
#[must_use]
#[expect(clippy::cast_precision_loss, reason = "exact below 2^53, and a rate needs no more")]
pub fn float(count: u64) -> f64 {
    count as f64
}

/// Returns a count of things in memory, as [`float`] does.
pub(crate) fn count(count: usize) -> f64 {
    float(count as u64)
}

/// Returns the cell of `cells` for a share of 0 to 1; for other values, the first or the last.
pub(crate) fn cell(share: f64, cells: usize) -> usize {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a cast of a float saturates at the ends of the integer, as is wanted"
    )]
    let index = (share * count(cells)) as usize;
    index.min(cells.saturating_sub(1))
}

/// Returns a ratio or rate with about three digits.
#[must_use]
pub fn number(value: f64) -> String {
    match value {
        // Larger than any measurement.
        value if value >= 1e12 => format!("{value:.2e}"),
        value if value >= 100.0 => format!("{value:.0}"),
        value if value >= 10.0 => format!("{value:.1}"),
        value if value >= 0.1 || value == 0.0 => format!("{value:.2}"),
        value => format!("{value:.4}"),
    }
}

/// Returns a duration with three digits: `850 ns`, `41.2 us`, `9.82 ms`, `1.20 s`.
#[must_use]
pub fn human_duration(duration: Duration) -> String {
    const UNITS: [(u128, &str); 3] = [(1_000_000_000, "s"), (1_000_000, "ms"), (1000, "us")];
    let ns = duration.as_nanos();
    let secs = duration.as_secs();
    if secs >= 600 {
        return format!("{} min {} s", secs / 60, secs % 60);
    }
    for (unit, name) in UNITS {
        if ns >= unit {
            // Rounded to the last digit that is shown; a value that rounds up past 9.99 shows one more.
            let rounded = |digits: u128| (ns * digits + unit / 2) / unit;
            return match ns / unit {
                0..10 => format!("{}.{:02} {name}", rounded(100) / 100, rounded(100) % 100),
                10..100 => format!("{}.{} {name}", rounded(10) / 10, rounded(10) % 10),
                _ => format!("{} {name}", rounded(1)),
            };
        }
    }
    format!("{ns} ns")
}

/// Returns a count with a comma after each three digits: `1,234,567`.
#[must_use]
pub fn grouped(count: u64) -> String {
    let digits = count.to_string();
    let is_start = |at: usize| at > 0 && (digits.len() - at).is_multiple_of(3);
    let comma = |at| if is_start(at) { "," } else { "" };
    digits.char_indices().map(|(at, digit)| format!("{}{digit}", comma(at))).collect()
}

/// Returns rows of cells as columns of text, each line ended: the first column to the left, the others, which hold
/// numbers, to the right.
#[must_use]
pub fn columns(rows: &[Vec<String>]) -> String {
    let wide = |column: usize| {
        rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max()
    };
    let line = |row: &Vec<String>| {
        let cells = row.iter().enumerate().map(|(column, cell)| match wide(column).unwrap_or(0) {
            wide if column == 0 => format!("{cell:wide$}"),
            wide => format!("  {cell:>wide$}"),
        });
        cells.collect::<String>().trim_end().to_owned() + "\n"
    };
    rows.iter().map(line).collect()
}

/// Returns a time as a number, at most five centuries.
#[must_use]
pub fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Returns a time in nanoseconds as [`human_duration`] does.
pub(crate) fn ns(ns: u64) -> String {
    human_duration(Duration::from_nanos(ns))
}

/// Returns a time that is a fraction of nanoseconds, or many of them.
pub(crate) fn float_ns(value: f64) -> String {
    if value < 1000.0 {
        return format!("{} ns", number(value));
    }
    if value >= 1e15 {
        return format!("{:.0e} s", value / 1e9);
    }
    human_duration(Duration::try_from_secs_f64(value / 1e9).unwrap_or(Duration::MAX))
}

/// Returns a length in IEC units.
pub(crate) fn bytes(bytes: u64) -> String {
    format!("{:.1}", ByteLen::new(bytes))
}

/// Returns a length that is a point of an axis.
pub(crate) fn float_bytes(value: f64) -> String {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "points of an axis are between 0 and the largest number of 64 bits"
    )]
    let whole = value.round() as u64;
    bytes(whole)
}

/// Returns a time as `2026-11-22 06:00 UTC`.
pub(crate) fn date(unix_seconds: u64) -> String {
    // The last second of a year with four digits.
    let since = Duration::from_secs(unix_seconds.min(253_402_300_799));
    let time = humantime::format_rfc3339_seconds(UNIX_EPOCH + since).to_string();
    format!("{} UTC", time[..16].replace('T', " "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_would_be_markup_or_a_command_is_neither() {
        assert_eq!(
            escape("<a href=\"x\">'&\u{1b}[31m\u{202e}"),
            "&lt;a href=&quot;x&quot;&gt;&#39;&amp;\u{fffd}[31m\u{fffd}"
        );
        assert_eq!(plain("2 MiB – “ours”"), "2 MiB – “ours”");
        assert_eq!(plain("a\r\nb\0"), "a\u{fffd}\u{fffd}b\u{fffd}");
    }

    #[test]
    fn dates_are_those_of_the_calendar() {
        for (seconds, text) in [
            (0, "1970-01-01 00:00 UTC"),
            (951_827_696, "2000-02-29 12:34 UTC"),
            (4_107_542_400, "2100-03-01 00:00 UTC"),
            (1_795_327_200, "2026-11-22 06:00 UTC"),
        ] {
            assert_eq!(date(seconds), text);
        }
        date(u64::MAX);
    }

    #[test]
    fn a_share_is_in_a_cell_that_there_is() {
        for (share, expected) in
            [(-1.0, 0), (0.0, 0), (0.49, 1), (1.0, 3), (9e99, 3), (f64::NAN, 0)]
        {
            assert_eq!(cell(share, 4), expected);
        }
    }

    #[test]
    fn durations_have_three_digits_and_a_unit() {
        for (ns, text) in [
            (0, "0 ns"),
            (999, "999 ns"),
            (1_000, "1.00 us"),
            (41_980, "42.0 us"),
            (9_870_000, "9.87 ms"),
            (999_999_999, "1000 ms"),
            (1_250_000_000, "1.25 s"),
            (61_000_000_000, "61.0 s"),
            (723_000_000_000, "12 min 3 s"),
        ] {
            assert_eq!(human_duration(Duration::from_nanos(ns)), text);
        }
        assert_eq!(float_ns(0.25), "0.25 ns");
        assert_eq!(float_ns(1e30), "1e21 s");
    }

    #[test]
    fn columns_have_their_numbers_to_the_right_and_no_blanks_at_the_ends() {
        let rows = [["case", "time", ""], ["zero", "9.8 ms", ""], ["pin", "41 us", ""]];
        let rows = rows.map(|row| row.map(str::to_owned).to_vec());
        assert_eq!(columns(&rows), "case    time\nzero  9.8 ms\npin    41 us\n");
    }

    #[test]
    fn digits_are_in_groups_of_three() {
        for (count, text) in [(0, "0"), (999, "999"), (1000, "1,000"), (1_234_567, "1,234,567")] {
            assert_eq!(grouped(count), text);
        }
    }

    #[test]
    fn a_rate_or_ratio_has_about_three_digits() {
        for (value, text) in
            [(0.0, "0.00"), (0.0042, "0.0042"), (1.456, "1.46"), (24.51, "24.5"), (2039.4, "2039")]
        {
            assert_eq!(number(value), text);
        }
    }
}
