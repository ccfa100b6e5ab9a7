//! What transparent huge pages are for: reading at random what is there, from memory that was filled in
//! small pages, filled in huge ones, or made huge afterwards.

use uzone_fault::{Engine, HugePages, LazyMapping, LazyOptions};
use uzone_os::{Anonymous, HugeAdvice, Mapping};
use uzone_pages::ByteLen;

use super::run::{Ours, Run};
use super::source::{Source, word};
use super::touch::Placement;
use crate::harness::{Reads, Result, Role, Suite, check_word, sentence, timed};

/// The row of a mapping in transparent huge pages.
pub(super) const ROW: &str = "thp";
/// How many words are read.
const READS: usize = 1 << 20;
/// How much memory each row reads in at most; more than the host's TLB has of small pages.
const MOST: ByteLen = ByteLen::mib(512);

/// A mapping in transparent huge pages, each filled whole.
pub(super) fn transparent(placement: &Placement) -> Result<Ours> {
    let options = Ours::new(None, placement)?.options.huge(HugePages::Transparent);
    Ok(Ours { row: ROW.to_owned(), name: "ours, transparent huge pages".to_owned(), options })
}

/// Makes one huge page as the rows will. Returns why that is not possible here.
pub(super) fn is_possible(file: &Source) -> Result<Result<(), String>> {
    let placement = Placement::anywhere()?;
    let engine = placement.engine()?;
    let options = LazyOptions::default().huge(HugePages::Transparent);
    let memory = match engine.map(ByteLen::mib(2), file.backing()?, &options) {
        Ok(memory) => memory,
        Err(error) => return Ok(Err(sentence(&error))),
    };
    memory.populate(0..2 << 20)?;
    Ok(match memory.stats().huge_pages {
        0 => Err("no huge page is free: too little memory is in one piece".to_owned()),
        _ => Ok(()),
    })
}

/// Fills a mapping of the file.
fn filled(engine: &Engine, file: &Source, len: ByteLen, huge: HugePages) -> Result<LazyMapping> {
    let options = LazyOptions::default().huge(huge);
    let memory = engine.map(len, file.backing()?, &options)?;
    memory.populate(0..len.get())?;
    Ok(memory)
}

/// Returns private memory in huge pages with the bytes of the file.
fn plain(file: &Source, len: ByteLen) -> Result<Mapping> {
    let how = Anonymous { huge: HugeAdvice::Advise, ..Anonymous::default() };
    let (memory, from) = (Mapping::anonymous(len, how)?, file.map(len)?);
    let mut bytes = vec![0; 1 << 20];
    for at in (0..len.get()).step_by(bytes.len()) {
        from.read_at(at, &mut bytes)?;
        memory.write_at(at, &bytes)?;
    }
    Ok(memory)
}

pub(super) fn table(run: &mut Run<'_>, file: &Source) -> Result {
    const TABLE: &str = "fault-read";
    if !run.wants(TABLE) || !run.has_huge {
        return Ok(());
    }
    let len = file.len.min(MOST);
    file.warm(len)?;
    let placement = Placement::anywhere()?;
    let engine = placement.engine()?;
    let small = filled(&engine, file, len, HugePages::None)?;
    let huge = filled(&engine, file, len, HugePages::Transparent)?;
    let collapsed = filled(&engine, file, len, HugePages::None)?;
    let made = collapsed.collapse(0..len.get())?;
    if made.skipped != 0 || huge.stats().huge_pages << 21 != len.get() {
        run.skip(TABLE, "not all pages are huge: too little memory is in one piece");
        return Ok(());
    }
    let own = file.map(len)?;
    own.populate(0..len.get())?;
    let limit = plain(file, len)?;
    let mut random = fastrand::Rng::with_seed(11);
    let offsets: Vec<u64> =
        std::iter::repeat_with(|| random.u64(0..len.get() / 8) * 8).take(READS).collect();
    let offsets = &offsets;
    let mut suite = Suite::new(TABLE, ByteLen::new((READS as u64) << 12));
    let rows: [(Role, &str, &str, &dyn Reads); 5] = [
        (Role::Naive, "small", "ours, small pages", &small),
        (Role::Ours, ROW, "ours, transparent huge pages", &huge),
        (Role::Ours, "collapsed", "ours, small pages that were collapsed", &collapsed),
        (Role::Peer, "kernel", "the kernel's own mapping of the file", &own),
        (Role::Limit, "plain", "limit, plain memory in huge pages", &limit),
    ];
    for (role, row, name, memory) in rows {
        suite.add(role, row, name, move |row| {
            let mut offsets = offsets.iter();
            timed(|| offsets.try_for_each(|&at| check_word(row, memory, at, word(at))))
        });
    }
    suite.naive("small").limit("plain");
    run.session.measure(
        suite,
        format!("Reading what is there: {READS} words at random of {len}"),
        "each word is compared; nothing is filled meanwhile; naive is ours in small pages",
    )
}
