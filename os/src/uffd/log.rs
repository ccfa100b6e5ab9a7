//! Facts that must outlive the process that reads a userfaultfd: [`EventLog`], and its contents for a successor,
//! [`LoggedEvents`].
//!
//! A thread that gives memory back goes on as soon as its event has been read. If the reading process is
//! killed before it has noted that, its successor would fill those pages with old bytes. So the kernel writes
//! the events straight into a memory file that another process holds too, and the notes, a bit a page, lie
//! behind them. The file is sealed: only the process that made it writes to it. Where no process is left to
//! hold it, it is a file with a name instead ([`EventLog::in_file`]).
//!
//! Units: a mark is a bit; its meaning is the caller's.
//! Source: userfaultfd(2); memfd_create(2) and fcntl(2), `F_SEAL_FUTURE_WRITE`.

use core::ops::Range;
use core::sync::atomic::{AtomicU64, Ordering};
use std::fs::File;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;

use rustix::fs::{FallocateFlags, SealFlags};
use uzone_pages::ByteLen;

use crate::map::mapping::Mapping;
use crate::map::options::{Access, Sharing, Vaddr};
use crate::uffd::message::{self, Event, MESSAGE, WORDS};

/// The first word.
const MAGIC: u64 = u64::from_le_bytes(*b"uzonlog1");
/// The words before the messages: the magic, the number of messages, the number of marks.
const HEADER: usize = 4;
/// The most messages of a log.
const MESSAGES: usize = 1 << 16;

/// A memory file with the events that were read last, and marks.
///
/// # Invariants
/// Only this process writes to the file: nothing had its descriptor before it was sealed, or its folder is
/// closed to others, and the mapping is not inherited by a fork.
#[derive(Debug)]
pub struct EventLog {
    mapping: Mapping,
    messages: usize,
    marks: u64,
}

impl EventLog {
    /// Makes a log with room for `messages`, at least one, and `marks`, none of them set.
    ///
    /// # Errors
    /// The error of the system: no memory, or as many descriptors as the process may have.
    pub fn new(messages: usize, marks: u64) -> io::Result<Self> {
        let len = Self::len_of(messages, marks)?;
        let mapping = Mapping::memfd("uzone-events", len, None).map_err(io::Error::other)?;
        mapping.seal_for_readers()?;
        Self::start(mapping, messages, marks)
    }

    /// Makes a log in a file, whose name keeps it when no process has it. If the file has the log of a process
    /// that has ended ([`LoggedEvents::read_trusted`]), its marks stay, and its events until
    /// [`EventLog::forget_events`]. Only this process may write to the file.
    ///
    /// # Errors
    /// The error of the system: the file is not open for reading and writing, or its disk is full.
    pub fn in_file(file: OwnedFd, messages: usize, marks: u64) -> io::Result<Self> {
        let is_log = Self::is_in_file(&File::from(file.try_clone()?))?;
        let before = match is_log {
            true => Some(LoggedEvents::read_trusted(file.try_clone()?, marks)?),
            false => None,
        };
        let messages = before.as_ref().map_or(messages, |before| before.messages);
        let len = Self::len_of(messages, marks)?;
        // A full disk is found now, and not by a signal when an event is read.
        rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, len.get())?;
        let mapping = Mapping::file(file, 0, len, Access::ReadWrite, Sharing::Shared);
        let mapping = mapping.map_err(io::Error::other)?;
        if before.is_none() {
            return Self::start(mapping, messages, marks);
        }
        mapping.keep_from_children().map_err(io::Error::other)?;
        Ok(Self { mapping, messages, marks })
    }

    /// Returns whether a file has a log, as [`EventLog::in_file`] makes it.
    ///
    /// # Errors
    /// The error of the system: the file cannot be read.
    pub fn is_in_file(file: &File) -> io::Result<bool> {
        let mut first = [0; 8];
        match file.read_exact_at(&mut first, 0) {
            Err(cause) if cause.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
            read => read.map(|()| u64::from_ne_bytes(first) == MAGIC),
        }
    }

    fn len_of(messages: usize, marks: u64) -> io::Result<ByteLen> {
        let messages = messages.clamp(1, MESSAGES);
        let words = HEADER as u64 + (messages * WORDS) as u64 + marks.div_ceil(64);
        let len = ByteLen::new(words * 8).align_up(crate::host::kernel::page_size().bytes());
        len.map_err(io::Error::other)
    }

    fn start(mapping: Mapping, messages: usize, marks: u64) -> io::Result<Self> {
        mapping.keep_from_children().map_err(io::Error::other)?;
        let messages = messages.clamp(1, MESSAGES);
        let log = Self { mapping, messages, marks };
        log.forget_events();
        // The magic last: without it, this is no log.
        for (word, value) in log.words().iter().zip([MAGIC, messages as u64, marks]).rev() {
            word.store(value, Ordering::Relaxed);
        }
        Ok(log)
    }

    /// Forgets the events that were read, all of which are marked. Each page that the kernel writes messages
    /// to is present from then on.
    pub fn forget_events(&self) {
        self.slots().iter().for_each(|word| word.store(0, Ordering::Relaxed));
    }

    fn words(&self) -> &[AtomicU64] {
        self.mapping.words()
    }

    /// Returns the words that messages are read to.
    pub(crate) fn slots(&self) -> &[AtomicU64] {
        &self.words()[HEADER..][..self.messages * WORDS]
    }

    /// Returns the number of marks.
    #[must_use]
    pub fn marks(&self) -> u64 {
        self.marks
    }

    /// Returns the descriptor, for the process that keeps it: it can be read there, and not written.
    #[must_use]
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.mapping.fd()
    }

    /// Sets marks; those that there are not are left out.
    pub fn mark(&self, marks: Range<u64>) {
        let words = &self.words()[HEADER + self.messages * WORDS..];
        for mark in marks.start..marks.end.min(self.marks) {
            let Some(word) = usize::try_from(mark / 64).ok().and_then(|at| words.get(at)) else {
                return;
            };
            // Relaxed: it is read when this process has ended.
            word.fetch_or(1 << (mark % 64), Ordering::Relaxed);
        }
    }

    /// Returns the marks that are set.
    pub fn marked(&self) -> impl Iterator<Item = u64> {
        let words = &self.words()[HEADER + self.messages * WORDS..];
        bits(words.iter().map(|word| word.load(Ordering::Relaxed)))
    }
}

/// The log of a process that has ended.
#[derive(Debug)]
pub struct LoggedEvents {
    /// The addresses that were given back or unmapped by the events that were read last, from the first to
    /// the one behind the last.
    pub removed: Vec<Range<Vaddr>>,
    messages: usize,
    count: u64,
    marks: Vec<u64>,
}

impl LoggedEvents {
    /// Reads a log of `marks` marks that [`EventLog::fd`] is the descriptor of. The process that wrote it must have
    /// ended. The descriptor may come from a process that is not trusted: the file is a sealed memory file, so that
    /// reading it never waits, and no more is read than such a log has.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidData`] if it is no such file or has another number of marks, and the error of the system.
    pub fn read(fd: OwnedFd, marks: u64) -> io::Result<Self> {
        let is_sealed = rustix::fs::fcntl_get_seals(&fd)
            .is_ok_and(|seals| seals.contains(SealFlags::FUTURE_WRITE | SealFlags::SHRINK));
        if !is_sealed {
            return Err(no_log("it is no sealed file in memory"));
        }
        Self::read_trusted(fd, marks)
    }

    /// Reads a log as [`LoggedEvents::read`] does, also one with a name ([`EventLog::in_file`]). Only
    /// processes that are trusted may have written to it.
    ///
    /// # Errors
    /// The errors of [`LoggedEvents::read`].
    pub fn read_trusted(fd: OwnedFd, count: u64) -> io::Result<Self> {
        let file = File::from(fd);
        let len = file.metadata()?.len() / 8;
        let mut bytes = vec![0; HEADER * 8];
        file.read_exact_at(&mut bytes, 0)?;
        let header: Vec<u64> = words(&bytes).collect();
        if header[0] != MAGIC || header[1] > MESSAGES as u64 {
            return Err(no_log("its first word is not of a log"));
        }
        if header[2] != count {
            return Err(no_log("it is of other memory"));
        }
        let (messages, marks) = (header[1].saturating_mul(WORDS as u64), header[2].div_ceil(64));
        let end = (HEADER as u64).saturating_add(messages).saturating_add(marks);
        if end > len {
            return Err(no_log("it is cut off"));
        }
        let read = |from: u64, words: u64| {
            // It is as long as the caller's memory needs, and the file has it.
            let mut bytes = vec![0; usize::try_from(words * 8).map_err(io::Error::other)?];
            file.read_exact_at(&mut bytes, from * 8).map(|()| bytes)
        };
        let slots = read(HEADER as u64, messages)?;
        let (slots, _) = slots.as_chunks::<MESSAGE>();
        let removed = slots.iter().filter_map(|slot| match message::parse(slot) {
            Event::Removed { start, end } => Some(start..end),
            // Faults are reported again.
            _ => None,
        });
        let removed = removed.collect();
        let marks = words(&read(HEADER as u64 + messages, marks)?).collect();
        let messages = usize::try_from(header[1]).map_err(io::Error::other)?;
        Ok(Self { removed, messages, count, marks })
    }

    /// Returns the number of marks.
    #[must_use]
    pub fn marks(&self) -> u64 {
        self.count
    }

    /// Returns the marks that were set.
    pub fn marked(&self) -> impl Iterator<Item = u64> {
        bits(self.marks.iter().copied())
    }
}

fn no_log(reason: &str) -> io::Error {
    let text = format!("not a log of events of this memory: {reason}");
    io::Error::new(io::ErrorKind::InvalidData, text)
}

fn words(bytes: &[u8]) -> impl Iterator<Item = u64> {
    bytes.as_chunks::<8>().0.iter().map(|word| u64::from_ne_bytes(*word))
}

/// Returns the numbers of the bits that are set.
fn bits(words: impl Iterator<Item = u64>) -> impl Iterator<Item = u64> {
    words.zip((0..).step_by(64)).filter(|(word, _)| *word != 0).flat_map(|(word, first)| {
        (0..64).filter(move |bit| word >> bit & 1 != 0).map(move |bit| first + bit)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "it makes a memory file")]
    fn marks_and_removals_are_read_by_another_holder_of_the_file() {
        let log = EventLog::new(2, 130).unwrap();
        log.mark(3..5);
        log.mark(127..400);
        assert_eq!(log.marked().collect::<Vec<_>>(), [3, 4, 127, 128, 129]);
        // As the kernel writes it.
        for (word, value) in log.slots()[WORDS..].iter().zip([0x15, 0x1000, 0x3000]) {
            word.store(value, Ordering::Relaxed);
        }
        let fd = log.fd().unwrap().try_clone_to_owned().unwrap();
        let file = File::from(fd.try_clone().unwrap());
        file.write_all_at(&[1], 0).unwrap_err();
        drop(log);
        for marks in [0, 129, 131, u64::MAX] {
            let other = LoggedEvents::read(fd.try_clone().unwrap(), marks);
            assert_eq!(other.unwrap_err().kind(), io::ErrorKind::InvalidData, "{marks}");
        }
        let events = LoggedEvents::read(fd, 130).unwrap();
        assert_eq!(events.marks(), 130);
        assert_eq!(events.removed, [Vaddr::new(0x1000)..Vaddr::new(0x3000)]);
        assert_eq!(events.marked().collect::<Vec<_>>(), [3, 4, 127, 128, 129]);
    }

    #[test]
    #[cfg_attr(miri, ignore = "it maps a file")]
    fn a_log_in_a_file_goes_on_where_its_process_has_ended() {
        let file = || crate::memory_file("log", &[]).unwrap();
        let one = file();
        assert!(!EventLog::is_in_file(&one).unwrap());
        let fd = || OwnedFd::from(one.try_clone().unwrap());
        let log = EventLog::in_file(fd(), 2, 130).unwrap();
        log.mark(127..130);
        for (word, value) in log.slots()[WORDS..].iter().zip([0x15, 0x1000, 0x3000]) {
            word.store(value, Ordering::Relaxed);
        }
        drop(log);
        assert!(EventLog::is_in_file(&one).unwrap());
        assert!(LoggedEvents::read(fd(), 130).is_err(), "it is not sealed");
        // With as many messages as it has.
        let log = EventLog::in_file(fd(), 9, 130).unwrap();
        let events = LoggedEvents::read_trusted(fd(), 130).unwrap();
        assert_eq!(events.removed, [Vaddr::new(0x1000)..Vaddr::new(0x3000)]);
        log.forget_events();
        assert_eq!(log.marked().collect::<Vec<_>>(), [127, 128, 129]);
        assert_eq!(LoggedEvents::read_trusted(fd(), 130).unwrap().removed, []);
        drop(log);
        let error = EventLog::in_file(fd(), 2, 131).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData, "of other memory");
        // A process that was killed while it made one leaves none.
        let part = crate::memory_file("log", &[0; 64]).unwrap();
        assert!(!EventLog::is_in_file(&part).unwrap());
        let log = EventLog::in_file(part.into(), 2, 1).unwrap();
        assert_eq!(log.marked().count(), 0);
    }

    #[test]
    #[cfg_attr(miri, ignore = "it makes a memory file")]
    fn another_file_is_refused() {
        let other = Mapping::memfd("other", ByteLen::new(4096), None).unwrap();
        let read = |mapping: &Mapping, marks: u64| {
            LoggedEvents::read(mapping.fd().unwrap().try_clone_to_owned().unwrap(), marks)
        };
        assert_eq!(read(&other, 0).unwrap_err().kind(), io::ErrorKind::InvalidData, "not sealed");
        let other = Mapping::memfd("other", ByteLen::new(4096), None).unwrap();
        other.seal_for_readers().unwrap();
        for header in [[MAGIC, u64::MAX, 0], [MAGIC, 0, u64::MAX], [MAGIC, 128, 0]] {
            let bytes: Vec<u8> = header.into_iter().flat_map(u64::to_ne_bytes).collect();
            other.write_at(0, &bytes).unwrap();
            let kind = read(&other, header[2]).unwrap_err().kind();
            assert_eq!(kind, io::ErrorKind::InvalidData, "{header:?}");
        }
    }
}
