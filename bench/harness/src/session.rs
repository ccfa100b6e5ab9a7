//! A benchmark run: [`Session`].

use uzone_report::results::{BENCH_SCHEMA, Bench, Headline, Row, Skipped, Table};

use super::error::{BenchError, Result};
use super::machine;
use super::rounds::Watch;
use super::suite::Suite;

/// Measures a table.
pub type Measure<'m> = &'m dyn Fn(&mut Session<'_>) -> Result;

/// A benchmark run: its settings and results so far.
pub struct Session<'a> {
    tables: Vec<String>,
    /// The number of rounds of each suite.
    pub rounds: u32,
    watch: Watch<'a>,
    /// The results so far.
    pub bench: Bench,
}

impl<'a> Session<'a> {
    /// Begins a run of the benchmark `name`. `settings` is a sentence, `parameters` the same for a program. Tables are
    /// measured whose ids begin with one of `tables`, or all tables if it is empty.
    pub fn new(
        name: &str,
        settings: String,
        parameters: serde_json::Value,
        tables: &[String],
        rounds: u32,
        watch: Watch<'a>,
    ) -> Self {
        let bench = Bench {
            schema: BENCH_SCHEMA.to_owned(),
            benchmark: name.to_owned(),
            machine: machine::here(),
            settings,
            parameters: vec![parameters],
            ..Bench::default()
        };
        Self { tables: tables.to_vec(), rounds, watch, bench }
    }

    /// Returns whether a table was asked for: its id begins with one that was named, or none was named.
    pub fn wants(&self, table: &str) -> bool {
        self.tables.is_empty() || self.tables.iter().any(|start| table.starts_with(start.as_str()))
    }

    /// Returns whether a table was asked for by its name.
    pub fn names(&self, table: &str) -> bool {
        !self.tables.is_empty() && self.wants(table)
    }

    /// As [`Self::wants`], for tables that are measured together.
    pub fn wants_any(&self, tables: &[&str]) -> bool {
        tables.iter().any(|table| self.wants(table))
    }

    /// Records that a row or a table is left out.
    pub fn skip(&mut self, id: impl Into<String>, reason: impl Into<String>) {
        self.bench.skipped.push(Skipped { id: id.into(), reason: reason.into() });
    }

    /// Adds a table.
    pub fn table(
        &mut self,
        id: impl Into<String>,
        title: impl Into<String>,
        note: impl Into<String>,
    ) {
        self.bench.tables.push(Table { id: id.into(), title: title.into(), note: note.into() });
    }

    /// Measures a suite in the rounds of the session.
    pub fn run(&mut self, suite: Suite<'_>, title: &str) -> Result {
        self.bench.results.extend(suite.run(title, self.rounds, self.watch)?);
        Ok(())
    }

    /// Measures a suite, and adds its table. Progress shows the id of the table, which `--table` takes.
    pub fn measure(
        &mut self,
        suite: Suite<'_>,
        title: impl Into<String>,
        note: impl Into<String>,
    ) -> Result {
        let table = suite.table.clone();
        self.run(suite, &table)?;
        self.table(table, title, note);
        Ok(())
    }

    /// Measures the tables that were asked for. A table is left out if this host lacks something that it needs.
    pub fn each(&mut self, tables: &[(&str, Measure<'_>)]) -> Result {
        for (table, measure) in tables {
            let measured = if self.wants(table) { measure(self) } else { Ok(()) };
            match measured {
                Err(error) if error.is_of_this_host() => {
                    self.skip(*table, uzone_os::with_causes(&error));
                }
                done => done?,
            }
        }
        Ok(())
    }

    /// Ends the run: the rows with a headline become the summary.
    pub fn finish(mut self) -> Result<Bench> {
        if self.bench.tables.is_empty() && self.bench.skipped.is_empty() {
            return Err(BenchError::no_table(&self.tables));
        }
        self.bench.summary = headlines(&self.bench.results);
        Ok(self.bench)
    }
}

/// Returns the lines of the summary that rows declare, in their order.
pub(crate) fn headlines(rows: &[Row]) -> Vec<Headline> {
    let find = |id: &Option<String>| rows.iter().find(|row| Some(&row.id) == id.as_ref());
    let published = |row: &Row| row.published.as_ref().map(|published| published.ns);
    let headline = |row: &Row| {
        let (naive, limit) = (find(&row.naive_id), find(&row.limit_id));
        Some(Headline {
            name: row.headline.clone()?,
            ours: row.id.clone(),
            naive: row.naive_id.clone(),
            limit: row.limit_id.clone(),
            published_ns: published(row),
            published_naive_ns: naive.and_then(published),
            naive_ns: naive.map(|row| row.median_ns),
            ours_ns: row.median_ns,
            limit_ns: limit.map(|limit| for_as_many_bytes(limit, row.bytes)),
            ratio_naive: row.ratio_naive,
            within_noise: row.within_noise,
            share_of_limit: row.share_of_limit,
        })
    };
    rows.iter().filter_map(headline).collect()
}

/// Returns the time of a limit, scaled to `bytes`; where either writes none, both do the same work.
fn for_as_many_bytes(limit: &Row, bytes: u64) -> u64 {
    if limit.bytes == 0 || bytes == 0 {
        return limit.median_ns;
    }
    let scaled = u128::from(limit.median_ns) * u128::from(bytes) / u128::from(limit.bytes);
    u64::try_from(scaled).unwrap_or(u64::MAX)
}
