//! What the demo prints for people.

use std::fmt::Write as _;

use comfy_table::CellAlignment;
use indicatif::HumanCount;
use uzone_pages::ByteLen;
use uzone_report::number;
use uzone_report::results::{Row, noisy};

use super::{Demo, USER_MODE};
use crate::output::{Report, Style, Tone, ns, table};

/// What a plain row is about, as a length.
fn len(row: &Row) -> ByteLen {
    ByteLen::new(row.items << 12)
}

/// A row that is shown, its plain way, and what it is called.
type Compared = (&'static str, &'static str, fn(&Row) -> String);

const COMPARED: [Compared; 5] = [
    ("demo-map/ours", "demo-map/naive", |row| {
        format!("map a file of {} lazily, and touch it", len(row))
    }),
    ("demo-bind/ours", "demo-bind/naive", |row| format!("describe {}: 64 bytes a page", len(row))),
    ("demo-bind/ours-on-touch", "demo-bind/naive", |row| {
        format!("describe {}: initialised on first use", len(row))
    }),
    ("demo-zero/ours", "demo-zero/naive", |row| format!("clear {} of memory", len(row))),
    ("demo-pin/ours", "demo-pin/naive", |row| format!("pin {} of memory", len(row))),
];

impl Report for Demo {
    const SCHEMA: &'static str = "uzone.demo/1";

    fn text(&self, style: Style) -> String {
        let machine = &self.bench.machine;
        let (size, reserve) = (ByteLen::new(self.size_bytes), ByteLen::new(self.reserve_bytes));
        let mut text = format!(
            "Large memory is managed in pages of 4 KiB. uzone keeps a descriptor of each at almost no cost,\n\
             and can bring their bytes when a program touches them. This was done here:\n\
             {}, {} CPUs, {:.1} of memory.\n\n",
            machine.cpu,
            machine.cpus,
            ByteLen::new(machine.memory_bytes),
        );
        // Writing to a String does not fail.
        let _ =
            writeln!(text, "What was done: {reserve} described and an image of {size} mapped\n");
        let mut done = table(&["step", "took", ""]);
        if let Some(column) = done.column_mut(2) {
            column.set_cell_alignment(CellAlignment::Left);
        }
        for step in &self.steps {
            done.add_row([step.name.to_owned(), ns(step.elapsed_ns), step.what.clone()]);
        }
        let _ = writeln!(text, "{}\n", done.trim_fmt());
        self.write_compared(&mut text);
        let verdict = if self.is_intact {
            style.paint(Tone::Good, "Every byte is as it should be.")
        } else {
            style.paint(Tone::Bad, "Bytes are WRONG: this is a defect of uzone, please report it.")
        };
        let _ = writeln!(text, "{verdict} All of it took {}.", ns(self.elapsed_ns));
        if !self.mode.cannot.is_empty() {
            let what = format!("This user cannot have everything: {USER_MODE}.");
            let _ = writeln!(text, "{}", style.paint(Tone::Hint, what));
        }
        if let [page, trace] = &self.files[..] {
            let _ = writeln!(text, "\nPictures: {page}\nTrace:    {trace}");
        }
        let _ = writeln!(
            text,
            "Next:     uzone doctor (what this machine offers), uzone-bench fault --size 256M (more figures)"
        );
        text
    }
}

impl Demo {
    fn write_compared(&self, text: &mut String) {
        let find = |id: &str| self.bench.results.iter().find(|row| row.id == id);
        let mut compared = table(&["how fast", "plain way", "uzone", "faster", "of the limit"]);
        for (ours, plain, name) in COMPARED {
            let (Some(ours), Some(plain)) = (find(ours), find(plain)) else { continue };
            let noise = noisy(ours.within_noise);
            let ratio = ours.ratio_naive.map(|ratio| format!("{} x{noise}", number(ratio)));
            let share = ours.share_of_limit.map(|share| format!("{:.0} %", share * 100.0));
            compared.add_row([
                name(plain),
                ns(plain.median_ns),
                ns(ours.median_ns),
                ratio.unwrap_or_else(|| String::from("-")),
                share.unwrap_or_else(|| String::from("-")),
            ]);
        }
        let _ = writeln!(text, "{}\n", compared.trim_fmt());
        let waits = |id: &str| {
            find(id)
                .and_then(|row| row.faults)
                .map_or_else(String::new, |faults| HumanCount(faults.count).to_string())
        };
        let _ = writeln!(
            text,
            "The plain way answers the reader page by page ({} waits, uzone {}), writes each descriptor\n\
             field by field, clears and counts page by page. The limit is what this machine can do at most: the\n\
             kernel's own mapping (which copies nothing), a bare fill, bare counting. Medians of {} to {}\n\
             rounds.\n",
            waits("demo-map/naive"),
            waits("demo-map/ours"),
            find("demo-map/ours").map_or(0, |row| row.rounds),
            find("demo-zero/ours").map_or(0, |row| row.rounds),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_user_cannot_have_fits_a_screen() {
        let text = format!("This user cannot have everything: {USER_MODE}.");
        assert!(text.lines().all(|line| line.len() <= 95) && text.lines().count() > 1);
    }
}
