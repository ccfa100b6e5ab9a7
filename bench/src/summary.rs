//! What matters most of a run, one line for each claim: [`Headline`].
//!
//! The declaration of a row states whether it is such a line, and of what; ids are not parsed.

use serde::Serialize;

use crate::report::{Published, Row};

/// One claim: what was published, the naive way, ours, and the limit.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Headline {
    /// What is done, with its amount.
    pub name: String,
    /// The id of our row.
    pub ours: String,
    /// The id of the naive row.
    pub naive: Option<String>,
    /// The id of the limit.
    pub limit: Option<String>,
    /// The time that was published for the way that ours is like.
    pub published_ns: Option<u64>,
    /// The time that was published for the way before that.
    pub published_naive_ns: Option<u64>,
    /// The median of the naive row.
    pub naive_ns: Option<u64>,
    /// The median of our row.
    pub ours_ns: u64,
    /// The median of the limit, for as many bytes as ours writes.
    pub limit_ns: Option<u64>,
    /// How many times the naive row took ours; the median of the rounds' ratios.
    pub ratio_naive: Option<f64>,
    /// The same of the limit, 1 where ours reaches it.
    pub share_of_limit: Option<f64>,
}

/// Returns the lines that rows declare, in their order.
pub(crate) fn headlines(rows: &[Row]) -> Vec<Headline> {
    let find = |id: &Option<String>| {
        let id = id.as_ref()?;
        rows.iter().find(|row| row.id == *id)
    };
    let published = |row: &Row| row.published.map(|Published { ns, .. }| ns);
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
