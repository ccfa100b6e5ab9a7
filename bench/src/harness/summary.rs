//! What matters most of a run, one line for each claim: [`Headline`].
//!
//! The declaration of a row states whether it is such a line, and of what; ids are not parsed.

use crate::harness::report::{Headline, Row};

/// Returns the lines that rows declare, in their order.
pub(crate) fn headlines(rows: &[Row]) -> Vec<Headline> {
    let find = |id: &Option<String>| {
        let id = id.as_ref()?;
        rows.iter().find(|row| row.id == *id)
    };
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
            share_of_limit: row.share_of_limit,
        })
    };
    rows.iter().filter_map(headline).collect()
}

/// Returns what a limit would take for so many bytes; where either writes none, both do the same work.
fn for_as_many_bytes(limit: &Row, bytes: u64) -> u64 {
    if limit.bytes == 0 || bytes == 0 {
        return limit.median_ns;
    }
    let scaled = u128::from(limit.median_ns) * u128::from(bytes) / u128::from(limit.bytes);
    u64::try_from(scaled).unwrap_or(u64::MAX)
}
