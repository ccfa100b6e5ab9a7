//! The result of the demo for people.

use std::fmt::Write as _;

use uzone_pages::ByteLen;
use uzone_report::results::{Row, noisy};
use uzone_report::{grouped, number};

use super::Demo;
use crate::output::{Report, Style, Tone, columns, headings, ns};

impl Report for Demo {
    const SCHEMA: &'static str = "uzone.demo/1";

    fn text(&self, style: Style) -> String {
        let (machine, size) = (&self.bench.machine, ByteLen::new(self.size_bytes));
        let mut text = format!(
            "{}, {} CPUs, {:.1} of memory.\n\n\
             An image of {size} was made in {}, and mapped lazily: a touch brings bytes.\n\
             A reader touched all {} pages in {}, and waited {} times; {} pages came along.\n\
             Comparing every byte took {}: BLAKE3 {}...\n\n",
            machine.cpu,
            machine.cpus,
            ByteLen::new(machine.memory_bytes),
            ns(self.make_ns),
            grouped(self.touch.pages),
            ns(self.touch.touch_ns),
            grouped(self.touch.faults),
            grouped(self.touch.pages_around),
            ns(self.touch.compare_ns),
            &self.touch.hash[..8],
        );
        self.write_compared(&mut text);
        let verdict = if self.is_intact {
            style.paint(Tone::Good, "Every byte is as it should be.")
        } else {
            style.paint(Tone::Bad, "Bytes are WRONG: this is a defect of uzone, please report it.")
        };
        // Writing to a String does not fail.
        let _ = writeln!(text, "{verdict} All of it took {}.", ns(self.elapsed_ns));
        if !self.sees_kernel_faults {
            let hint = "For this user, a system call such as read(2) fails with EFAULT where it is given a page that\n\
                 is not there yet. Root, access to /dev/userfaultfd, or vm.unprivileged_userfaultfd = 1 (sysctl)\n\
                 changes that.";
            let _ = writeln!(text, "{}", style.paint(Tone::Hint, hint));
        }
        if let [page, trace] = &self.files[..] {
            let _ = writeln!(text, "\nPictures: {page}\nTrace:    {trace}");
        }
        text.push_str("Next:     uzone doctor (shows this machine), uzone-bench (measures more)\n");
        text
    }
}

impl Demo {
    fn write_compared(&self, text: &mut String) {
        let find = |id: &str| self.bench.results.iter().find(|row| row.id == id);
        let names = ["how fast", "plain way", "uzone", "faster", "of the limit"];
        let mut compared = vec![headings(&names)];
        for line in &self.bench.summary {
            let ratio = |ratio| format!("{} x{}", number(ratio), noisy(line.within_noise));
            let share = |share: f64| format!("{:.0} %", share * 100.0);
            let cell = |cell: Option<String>| cell.unwrap_or_else(|| String::from("-"));
            compared.push(vec![
                line.name.clone(),
                cell(line.naive_ns.map(ns)),
                ns(line.ours_ns),
                cell(line.ratio_naive.map(ratio)),
                cell(line.share_of_limit.map(share)),
            ]);
        }
        let rounds = |id: &str| find(id).map_or(0, |row| row.rounds);
        let time = |id: &str| find(id).map_or_else(String::new, |row: &Row| ns(row.median_ns));
        let _ = writeln!(
            text,
            "{}\nThe plain way answers the reader page by page, writes each descriptor field by field, clears and\n\
             counts page by page. The limit is a bare copy, a bare fill, bare counting. The kernel's own mapping,\n\
             which copies nothing, takes {}. Medians of {} to {} rounds.\n\
             This pin keeps memory from uzone's own eviction. PinOptions::kernel() keeps it from the kernel's\n\
             migration and swap too; a HostPool registers it with a device.\n",
            columns(&compared),
            time("demo-map/kernel"),
            rounds("demo-map/ours"),
            rounds("demo-zero/ours"),
        );
    }
}
