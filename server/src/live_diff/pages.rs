//! The pages of a VM as they were when it was paused: [`CapturedPages`]. They are read from the VM's memory and from the
//! pages that its worker kept, or from a copy.

use std::fs::File;
use std::io::{self, Read};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::thread;

use crate::message_socket::MessageSocket;
use uzone_fault::KeptPages;
use uzone_os::{Anonymous, Exclusive, HugeAdvice, lock, share_work};
use uzone_pages::ByteLen;
use uzone_snapshot::{Image, Source};

use crate::messages::{self, CaptureReply, CaptureRequest};

/// The bytes that a thread copies at once.
pub(super) const PIECE: u64 = 4 << 20;
/// The worker learns of the progress of reading after so many bytes, so that writes to pages that were read go on.
const READ_EVERY: u64 = 32 << 20;

/// The usual length of a frame.
const USUAL_FRAME: u64 = 64 << 10;
/// The number of frames that are compared to choose the length of an image's frames.
const LOOKED_AT: u64 = 512;

/// The reason for the lack of a worker's answer.
const GONE: &str = "its VM has ended, or the worker that kept its pages";

/// Reads the first bytes of a run, as many as there is room for.
fn read(memory: &File, run: &Run, out: &mut [u8]) -> io::Result<()> {
    memory.read_exact_at(out, run.address).map_err(|cause| {
        let text = format!("cannot read the memory at {:#x}: {cause}", run.address);
        io::Error::new(cause.kind(), text)
    })
}

/// Copies runs by `read`, on as many threads.
fn copy(
    runs: &[Run],
    threads: usize,
    read: impl Fn(&Run, &mut [u8]) -> io::Result<()> + Sync,
) -> io::Result<Option<Exclusive>> {
    let bytes = len_of(runs);
    if bytes == 0 {
        return Ok(None);
    }
    // Huge pages take fewer faults of this process, while the VM waits.
    let how = Anonymous { huge: HugeAdvice::Advise, ..Anonymous::default() };
    let mut copy = Exclusive::anonymous(ByteLen::new(bytes), how).map_err(io::Error::other)?;
    let mut pieces = Vec::with_capacity(runs.len());
    let mut rest = copy.as_bytes_mut();
    // Runs are numbered in the order of their copies.
    let mut in_order: Vec<_> = runs.iter().collect();
    in_order.sort_unstable_by_key(|run| run.at);
    for run in in_order {
        let len = usize::try_from(run.bytes.end - run.bytes.start).map_err(io::Error::other)?;
        let (piece, behind) = rest.split_at_mut(len);
        pieces.push((run, piece));
        rest = behind;
    }
    let pieces = Mutex::new(pieces.into_iter());
    let work = || loop {
        let next = lock(&pieces).next();
        let Some((run, piece)) = next else { return Ok(()) };
        read(run, piece)?;
    };
    let answers = share_work("uzone-capture", threads, |_| work());
    answers.into_iter().collect::<io::Result<()>>()?;
    Ok(Some(copy))
}

fn len_of(runs: &[Run]) -> u64 {
    runs.iter().map(|run| run.bytes.end - run.bytes.start).sum()
}

/// Consecutive pages that are present.
#[derive(Clone, Debug)]
pub(super) struct Run {
    /// The bytes of the image in their place.
    pub(super) bytes: Range<u64>,
    pub(super) address: u64,
    /// The offset of their copy.
    pub(super) at: u64,
}

/// The places of the bytes of the pages.
#[derive(Debug)]
struct Held {
    memory: File,
    /// The pages that the worker keeps before they change; `None` if all are copied.
    kept: Option<KeptPages>,
    /// The copy. While it is made, pages are read from the memory; the worker ends the capture after that.
    copy: RwLock<Option<Exclusive>>,
    /// Whether all pages were read, so that no copy is needed.
    is_read: AtomicBool,
}

impl Held {
    /// Reads bytes of a run, from `from` on.
    fn read(&self, run: &Run, from: u64, out: &mut [u8]) -> io::Result<()> {
        // Held while the memory is read, so that no copy takes its place meanwhile.
        let copy = self.copy.read().unwrap_or_else(PoisonError::into_inner);
        match (&*copy, &self.kept) {
            (Some(copy), _) => {
                let start = usize::try_from(run.at + from).map_err(io::Error::other)?;
                out.copy_from_slice(&copy.as_bytes()[start..start + out.len()]);
                Ok(())
            }
            (None, Some(kept)) => self.read_memory(kept, run, from, out),
            (None, None) => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }

    fn read_memory(
        &self,
        kept: &KeptPages,
        run: &Run,
        from: u64,
        out: &mut [u8],
    ) -> io::Result<()> {
        let (bytes, address) = (run.bytes.start + from..run.bytes.end, run.address + from);
        let start = bytes.start;
        // In this order: the worker has kept a page before the page is written to.
        read(&self.memory, &Run { bytes, address, at: 0 }, out)?;
        kept.read_over(start, out)
    }
}

/// The worker, and its report of the end.
#[derive(Debug)]
struct WorkerLink {
    socket: Arc<MessageSocket>,
    ended: Receiver<io::Result<u64>>,
    /// The end, once it was looked at.
    end: Option<Result<u64, String>>,
}

/// Pages of a VM, as they were when it was paused.
#[derive(Debug)]
pub struct CapturedPages {
    /// The runs, by their offset in the image.
    runs: Arc<[Run]>,
    removed: Vec<Range<u64>>,
    held: Arc<Held>,
    /// `None` if all are copied.
    worker: Option<Mutex<WorkerLink>>,
}

impl CapturedPages {
    /// Copies pages, on as many threads.
    pub(super) fn copied(
        memory: File,
        removed: Vec<Range<u64>>,
        runs: Vec<Run>,
        threads: usize,
    ) -> io::Result<Self> {
        let copy = copy(&runs, threads, |run, piece| read(&memory, run, piece))?;
        let (copy, is_read) = (RwLock::new(copy), AtomicBool::new(false));
        let held = Arc::new(Held { memory, kept: None, copy, is_read });
        Ok(Self { runs: runs.into(), removed, held, worker: None })
    }

    /// Pages that the worker keeps before they change.
    pub(super) fn live(
        memory: File,
        removed: Vec<Range<u64>>,
        runs: Vec<Run>,
        kept: KeptPages,
        worker: MessageSocket,
    ) -> Self {
        let (kept, copy, is_read) = (Some(kept), RwLock::default(), AtomicBool::new(false));
        let held = Arc::new(Held { memory, kept, copy, is_read });
        let (socket, runs): (_, Arc<[Run]>) = (Arc::new(worker), runs.into());
        let (answer, ended) = sync_channel(1);
        let listens = {
            let (socket, held, runs) = (socket.clone(), held.clone(), runs.clone());
            move || drop(answer.try_send(listen(&socket, &held, &runs)))
        };
        // Without that thread there is no answer, which the end finds.
        let _ = thread::Builder::new().name("uzone-capture".into()).spawn(listens);
        let worker = Some(Mutex::new(WorkerLink { socket, ended, end: None }));
        Self { runs, removed, held, worker }
    }

    /// Returns the number of bytes of these pages.
    #[must_use]
    pub fn present(&self) -> ByteLen {
        ByteLen::new(len_of(&self.runs))
    }

    /// Returns the best length of a frame: the usual one if the changed pages fill half of their frames or more, and
    /// otherwise a page, so that no page is stored for its neighbour's sake. Only some of the frames are compared, evenly
    /// over all.
    ///
    /// # Errors
    /// A page cannot be read.
    pub fn frame_bytes(&self, image: &Image) -> io::Result<u64> {
        let (frame, page) = (image.frame_bytes().max(USUAL_FRAME), image.page_bytes());
        let present: u64 =
            self.runs.iter().map(|run| (run.bytes.end - run.bytes.start).div_ceil(frame)).sum();
        let step = present.div_ceil(LOOKED_AT).max(1);
        let (mut number, mut changed, mut in_frames) = (0_u64, 0, 0);
        for run in &*self.runs {
            let first = run.bytes.start / frame * frame;
            for at in
                (first..run.bytes.end).step_by(usize::try_from(frame).map_err(io::Error::other)?)
            {
                number += 1;
                if number.is_multiple_of(step) {
                    let pages = self.changed_in(image, at..(at + frame).min(image.byte_len()))?;
                    changed += pages;
                    in_frames += if pages > 0 { frame / page } else { 0 };
                }
            }
        }
        Ok(if changed * 2 >= in_frames && in_frames > 0 { frame } else { page })
    }

    /// Returns the number of pages of a part of the image that changed.
    fn changed_in(&self, image: &Image, bytes: Range<u64>) -> io::Result<u64> {
        let (start, len) =
            (bytes.start, usize::try_from(bytes.end - bytes.start).map_err(io::Error::other)?);
        let (mut now, mut before) = (vec![0; len], vec![0; len]);
        let mut memory = Memory { pages: self, image, at: start, noted: start };
        memory.read_exact(&mut now)?;
        Source::read_at(image, start, &mut before)?;
        let page = usize::try_from(image.page_bytes()).map_err(io::Error::other)?;
        let pages = now.chunks(page).zip(before.chunks(page));
        Ok(pages.filter(|(now, before)| now != before).count() as u64)
    }

    /// Ends the capture, after all pages were read. Returns the number of pages that the VM wrote to meanwhile.
    ///
    /// # Errors
    /// The pages are not the memory of one moment: a worker that kept pages has died, or the VM gave memory back before
    /// it could be read. Capture it again.
    pub fn finish(&self) -> io::Result<u64> {
        // Release pairs with the Acquire of `listen`: all was read before.
        self.held.is_read.store(true, Ordering::Release);
        self.end()
    }

    /// Ends the capture as [`CapturedPages::finish`] does, also before all pages were read.
    fn end(&self) -> io::Result<u64> {
        let Some(worker) = &self.worker else { return Ok(0) };
        let mut worker = lock(worker);
        if worker.end.is_none() {
            // The worker may have ended the capture: its report is there.
            let _ = messages::send(&worker.socket, &CaptureRequest::End, &[]);
            let end = match worker.ended.recv() {
                Ok(answer) => answer.map_err(|cause| match cause.kind() {
                    io::ErrorKind::UnexpectedEof => GONE.to_owned(),
                    _ => cause.to_string(),
                }),
                Err(_) => Err(GONE.to_owned()),
            };
            worker.end = Some(end);
        }
        worker.end.clone().unwrap_or(Ok(0)).map_err(io::Error::other)
    }

    /// Returns the whole memory: these pages, zeroes for pages that were given back, and the image elsewhere. It is read
    /// once, in order.
    #[must_use]
    pub fn over<'a>(&'a self, image: &'a dyn Source) -> impl Read + Send + 'a {
        Memory { pages: self, image, at: 0, noted: 0 }
    }

    fn has_read(&self, until: u64) {
        if let Some(worker) = &self.worker {
            let worker = lock(worker);
            // A worker that has gone is found at the end.
            let _ = messages::send(&worker.socket, &CaptureRequest::Read(until), &[]);
        }
    }

    /// Returns the end and the origin of the bytes from `at` on.
    fn part(&self, at: u64) -> (u64, Origin) {
        let index = self.runs.partition_point(|run| run.bytes.end <= at);
        let run = self.runs.get(index);
        if let Some(run) = run.filter(|run| run.bytes.start <= at) {
            return (run.bytes.end, Origin::Run(index, at - run.bytes.start));
        }
        let until = run.map_or(u64::MAX, |run| run.bytes.start);
        let index = self.removed.partition_point(|removed| removed.end <= at);
        match self.removed.get(index) {
            Some(removed) if removed.start <= at => (removed.end.min(until), Origin::Zeroes),
            removed => (removed.map_or(until, |removed| removed.start.min(until)), Origin::Image),
        }
    }
}

/// Waits for the end of a capture. If the VM waits for that, all its pages are copied first.
fn listen(worker: &MessageSocket, held: &Held, runs: &[Run]) -> io::Result<u64> {
    let mut copied = Ok(());
    loop {
        match messages::receive(worker)?.title {
            CaptureReply::Hurry => {
                let Some(kept) = &held.kept else { continue };
                let threads = thread::available_parallelism().map_or(1, Into::into);
                let copy = copy(runs, threads, |run, piece| held.read_memory(kept, run, 0, piece))
                    .map(|copy| *held.copy.write().unwrap_or_else(PoisonError::into_inner) = copy);
                // A page that could not be copied after all was read is not missing: the capture may have ended by then.
                if copy.is_err() && !held.is_read.load(Ordering::Acquire) {
                    copied = copy;
                }
                // It may have ended before, and its answer is there.
                let _ = messages::send(worker, &CaptureRequest::End, &[]);
            }
            // A page that was given back before it was read cannot be copied: the worker states that reason.
            CaptureReply::Ended(Err(reason)) => return Err(io::Error::other(reason)),
            CaptureReply::Ended(Ok(kept_pages)) => return copied.map(|()| kept_pages),
            CaptureReply::Begun(_) => return Err(io::ErrorKind::InvalidData.into()),
        }
    }
}

/// The origin of bytes.
#[derive(Debug, PartialEq, Eq)]
enum Origin {
    /// A run with this number, from this byte on.
    Run(usize, u64),
    Zeroes,
    Image,
}

struct Memory<'a> {
    pages: &'a CapturedPages,
    image: &'a dyn Source,
    at: u64,
    /// The progress that the worker knows.
    noted: u64,
}

impl Read for Memory<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        if self.at - self.noted >= READ_EVERY {
            self.pages.has_read(self.at);
            self.noted = self.at;
        }
        let left = self.image.byte_len() - self.at;
        let most = usize::try_from(left).unwrap_or(usize::MAX).min(out.len());
        if most == 0 {
            // The end of the input is where an image is completed, which must not be of several moments.
            return if out.is_empty() { Ok(0) } else { self.pages.finish().map(|_| 0) };
        }
        let (end, from) = self.pages.part(self.at);
        let len = usize::try_from(end - self.at).unwrap_or(usize::MAX).min(most);
        let now = &mut out[..len];
        match from {
            Origin::Run(index, from) => {
                if let Err(cause) = self.pages.held.read(&self.pages.runs[index], from, now) {
                    // The worker knows of memory that was given back.
                    return Err(self.pages.end().err().unwrap_or(cause));
                }
            }
            Origin::Zeroes => now.fill(0),
            Origin::Image => self.image.read_at(self.at, now)?,
        }
        self.at += len as u64;
        Ok(len)
    }
}

#[cfg(test)]
mod tests {
    use uzone_fault::RemoteRegion;

    use super::*;

    const PAGE: u64 = 4096;

    #[test]
    fn memory_that_was_given_back_is_the_reason_why_a_page_cannot_be_read() {
        for (lost, reason) in [(Some("given back".to_owned()), "given back"), (None, GONE)] {
            let (pages, worker) = of_a_page_that_is_gone();
            messages::send(&worker, &CaptureReply::Hurry, &[]).unwrap();
            let end = CaptureReply::Ended(lost.map_or(Ok(0), Err));
            messages::send(&worker, &end, &[]).unwrap();
            let image: Vec<u8> = vec![0; usize::try_from(PAGE).unwrap()];
            let error = pages.over(&image).read_to_end(&mut Vec::new()).unwrap_err();
            assert!(error.to_string().contains(reason), "{error}");
        }
    }

    /// A capture of a page that was given back since and cannot be copied, and its worker's end of the socket.
    fn of_a_page_that_is_gone() -> (CapturedPages, MessageSocket) {
        let (here, worker) = MessageSocket::pair().unwrap();
        let region = RemoteRegion {
            start: uzone_os::Vaddr::new(0),
            len: ByteLen::new(PAGE),
            offset: 0,
            page: uzone_os::probe::page_size(),
        };
        let kept = KeptPages::new(&[region]).unwrap();
        let memory = uzone_os::memory_file("memory", &[]).unwrap();
        let run = Run { bytes: 0..PAGE, address: 0, at: 0 };
        (CapturedPages::live(memory, Vec::new(), vec![run], kept, here), worker)
    }

    #[test]
    fn once_all_was_read_the_answer_of_the_worker_alone_counts() {
        let (pages, worker) = of_a_page_that_is_gone();
        let end = thread::scope(|scope| {
            let finish = scope.spawn(|| pages.finish());
            let asked = messages::receive::<CaptureRequest>(&worker).unwrap();
            assert!(matches!(asked.title, CaptureRequest::End), "{asked:?}");
            // It had sent that before.
            messages::send(&worker, &CaptureReply::Hurry, &[]).unwrap();
            let end = CaptureReply::Ended(Ok(3));
            messages::send(&worker, &end, &[]).unwrap();
            drop(worker);
            finish.join().unwrap()
        });
        assert_eq!(end.unwrap(), 3);
    }

    #[test]
    fn memory_that_could_not_be_copied_before_all_was_read_is_lost() {
        let (pages, worker) = of_a_page_that_is_gone();
        messages::send(&worker, &CaptureReply::Hurry, &[]).unwrap();
        let asked = messages::receive::<CaptureRequest>(&worker).unwrap();
        assert!(matches!(asked.title, CaptureRequest::End), "{asked:?}");
        let end = CaptureReply::Ended(Ok(3));
        messages::send(&worker, &end, &[]).unwrap();
        assert!(pages.finish().is_err());
    }

    #[test]
    fn what_is_copied_comes_before_what_was_given_back_and_that_before_the_image() {
        let run = |bytes: Range<u64>, at| Run { bytes, address: 0, at };
        let mut copy = Exclusive::anonymous(ByteLen::new(8), Anonymous::default()).unwrap();
        (1..).zip(&mut copy.as_bytes_mut()[..8]).for_each(|(number, byte)| *byte = number);
        let memory = uzone_os::memory_file("memory", &[]).unwrap();
        let (copy, is_read) = (RwLock::new(Some(copy)), AtomicBool::new(true));
        let held = Held { memory, kept: None, copy, is_read };
        let pages = CapturedPages {
            runs: vec![run(2..6, 4), run(10..14, 0)].into(),
            removed: vec![0..3, 5..9, 14..15],
            held: Arc::new(held),
            worker: None,
        };
        let image: Vec<u8> = vec![99; 16];
        let expected = [0, 0, 5, 6, 7, 8, 0, 0, 0, 99, 1, 2, 3, 4, 0, 99];
        for most in 1..=17 {
            let mut memory = pages.over(&image);
            let (mut seen, mut part) = (Vec::new(), vec![1; most]);
            while let len @ 1.. = memory.read(&mut part).unwrap() {
                seen.extend_from_slice(&part[..len]);
            }
            assert_eq!(seen, expected, "{most} at once");
        }
        assert_eq!((pages.present().get(), pages.finish().unwrap()), (8, 0));
    }
}
