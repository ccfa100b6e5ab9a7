//! Eviction where threads answer their faults themselves.

use std::fs::File;
use std::num::NonZeroUsize;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread;

use uzone_os::Mapping;
use uzone_os::uffd::in_thread::{FileSource, Source};
use uzone_os::uffd::{Features, KernelFaults};
use uzone_pages::ByteLen;

use crate::backing::Backing;
use crate::backing::hooks::sealed::Sealed;
use crate::engine::Engine;
use crate::engine::window::Window;
use crate::error::BackingError;
use crate::options::{Answer, LazyOptions, WriteTracking};
use crate::tests::userfaultfd;

/// A file of which a thread that populates reads the bytes, and installs them when it may go on.
struct Late {
    file: Arc<File>,
    mapped: Arc<Mapping>,
    has_read: SyncSender<()>,
    goes_on: Mutex<Receiver<()>>,
}

impl Backing for Late {
    fn map_pages(&self, window: &mut Window<'_>) {
        while let Some(run) = window.next_run() {
            let _ = window.copy_with(run.clone(), |out| {
                self.file.read_exact_at(out, run.start).unwrap();
                self.has_read.send(()).unwrap();
                self.goes_on.lock().unwrap().recv().unwrap();
                Ok::<_, BackingError>(out.len())
            });
        }
    }

    fn fault(&self, _: &mut Window<'_>) -> Result<(), BackingError> {
        Err(BackingError::Other("the thread that faults fills the page".into()))
    }

    fn write_back(&self, offset: u64, bytes: &[u8]) -> Result<(), BackingError> {
        self.file.write_all_at(bytes, offset).unwrap();
        Ok(())
    }

    fn in_thread(&self, _: Sealed) -> Option<Source> {
        let (file, mapped) = (self.file.clone(), &self.mapped);
        Some(Source::file(FileSource::new(file, mapped.clone(), mapped.len())))
    }
}

#[test]
#[cfg_attr(miri, ignore = "it takes faults")]
fn bytes_that_were_read_before_a_thread_wrote_to_its_own_page_do_not_come_back() {
    let features = Features::SIGBUS | Features::POISON;
    if userfaultfd("bytes_that_were_read_before", features, KernelFaults::Never).is_none() {
        return;
    }
    let page = uzone_os::probe::page_size().bytes();
    let mapped = Arc::new(Mapping::memfd("late", ByteLen::new(page), None).unwrap());
    let file = Arc::new(File::from(mapped.fd().unwrap().as_fd().try_clone_to_owned().unwrap()));
    let ((has_read, reads), (goes_on, may_go_on)) = (sync_channel(1), sync_channel(1));
    let backing = Late { file, mapped, has_read, goes_on: Mutex::new(may_go_on) };
    let engine = Engine::new(NonZeroUsize::MIN).unwrap();
    let options = LazyOptions::default().answer(Answer::InThread).track_writes(WriteTracking::Sync);
    let memory = engine.map(ByteLen::new(page), Arc::new(backing), &options).unwrap();
    assert_eq!(memory.answered_in_thread(), Ok(()));
    thread::scope(|scope| {
        let late = scope.spawn(|| memory.populate_cached(0..page).unwrap());
        reads.recv().unwrap();
        // This thread fills the page, and no other learns of it.
        memory.write_at(8, &[5; 8]).unwrap();
        assert_eq!(memory.write_back(0..page).unwrap(), 1);
        assert_eq!(memory.evict(0..page).unwrap(), 1);
        goes_on.send(()).unwrap();
        assert_eq!(late.join().unwrap(), 0);
    });
    let mut seen = [0; 8];
    memory.read_at(8, &mut seen).unwrap();
    assert_eq!(seen, [5; 8], "what was written is lost");
}
