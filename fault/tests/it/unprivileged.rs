//! A user without any privilege has lazily mapped memory too, and its errors name what it lacks: system
//! calls that are given a missing page fail. The case runs in a child with the user id 65534, with no
//! privilege left.

use std::io::{self, Read, Write};
use std::num::NonZeroUsize;
use std::os::unix::process::CommandExt;
use std::sync::Arc;
use std::thread;

use crate::common::{
    CHILD, bytes_of, check_all, ends, engine, file_with, function, page, skip, usize_of, words,
};
use uzone_fault::{Answer, Engine, FileBacking, LazyMapping, LazyOptions, MapError, WriteTracking};
use uzone_os::uffd::{KernelFaults, UffdError};
use uzone_pages::ByteLen;

const UNPRIVILEGED: u32 = 65534;
const EFAULT: i32 = 14;
/// The child cannot have a userfaultfd at all.
const NOT_HERE: i32 = 9;

fn no_address() -> io::ErrorKind {
    io::Error::from_raw_os_error(EFAULT).kind()
}

/// Writes a page of the memory to a pipe: a system call that reads it.
fn give_to_the_kernel(memory: &LazyMapping, offset: u64) -> Result<usize, io::ErrorKind> {
    let (_reader, mut writer) = io::pipe().unwrap();
    let start = std::ptr::with_exposed_provenance::<u8>(memory.addr().get() + usize_of(offset));
    // SAFETY: the bytes have to be mapped and to stay as they are while the slice lives.
    // 1. Mapped: they are of `memory`, which is borrowed; a page that is missing is produced when
    //    our code reads it, and the kernel answers EFAULT where it may not wait for that.
    // 2. They stay: no thread writes to it or evicts it meanwhile.
    let bytes = unsafe { std::slice::from_raw_parts(start, usize_of(page())) };
    writer.write(bytes).map_err(|error| {
        assert_eq!(error.raw_os_error(), Some(EFAULT), "{error}");
        error.kind()
    })
}

/// Reads a page of sevens from a pipe into the memory: a system call that writes to it.
fn take_from_the_kernel(memory: &LazyMapping, offset: u64) -> Result<usize, io::ErrorKind> {
    let (mut reader, mut writer) = io::pipe().unwrap();
    writer.write_all(&vec![7; usize_of(page())]).unwrap();
    let start = std::ptr::with_exposed_provenance_mut::<u8>(memory.addr().get() + usize_of(offset));
    // SAFETY: the bytes have to be mapped and this thread's alone while the slice lives: as above, and no
    // other thread looks at them meanwhile.
    let bytes = unsafe { std::slice::from_raw_parts_mut(start, usize_of(page())) };
    reader.read(bytes).map_err(|error| {
        assert_eq!(error.raw_os_error(), Some(EFAULT), "{error}");
        error.kind()
    })
}

fn be_unprivileged() {
    let engine = Engine::new(NonZeroUsize::MIN).unwrap();
    let len = ByteLen::new(256 * page());
    let is_child = rustix::process::getuid().as_raw() == UNPRIVILEGED;
    let memory = match engine.map(len, Arc::new(function()), &LazyOptions::default()) {
        Ok(memory) => memory,
        Err(MapError::Open(error)) => {
            println!("{error}");
            std::process::exit(NOT_HERE);
        }
        Err(error) => panic!("{error:?}"),
    };
    check_all(&memory);
    crate::common::settles(&memory, |stats| stats.demand + stats.around == 256);
    assert_eq!(memory.evict(0..len.get()).unwrap(), 256);
    if memory.sees_kernel_faults() {
        // The host lets every user: vm.unprivileged_userfaultfd, or the device.
        assert_eq!(give_to_the_kernel(&memory, 0), Ok(usize_of(page())));
        println!(
            "{} sees faults of the kernel",
            if is_child { "an unprivileged user" } else { "this user" }
        );
        return;
    }
    // What is missing cannot be given to a system call; what is there can be.
    assert_eq!(give_to_the_kernel(&memory, 0), Err(no_address()));
    memory.populate(0..page()).unwrap();
    assert_eq!(give_to_the_kernel(&memory, 0), Ok(usize_of(page())));
    // The error for a caller that requires those faults names the fix.
    let required = LazyOptions::default().kernel_faults(KernelFaults::Required);
    let error = engine.map(len, Arc::new(function()), &required).unwrap_err();
    assert!(matches!(error, MapError::Open(UffdError::NotForKernel { .. })), "{error:?}");
    let help =
        std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string);
    assert!(help.contains("vm.unprivileged_userfaultfd"), "{help}");
    // And a caller that does not want them can refuse them.
    let never = LazyOptions::default().kernel_faults(KernelFaults::Never);
    let memory = engine.map(len, Arc::new(function()), &never).unwrap();
    assert!(!memory.sees_kernel_faults());
    assert!(bytes_of(&memory, 0, len.get()) == words(len.get()));
}

#[test]
fn an_unprivileged_user_reads_lazily_mapped_memory_and_learns_what_system_calls_do() {
    let name = "an_unprivileged_user_reads_lazily_mapped_memory_and_learns_what_system_calls_do";
    if std::env::var_os(CHILD).is_some() {
        return be_unprivileged();
    }
    let mut command = crate::common::again(name);
    if rustix::process::geteuid().is_root() {
        command.uid(UNPRIVILEGED).gid(UNPRIVILEGED);
    }
    let mut child = match command.spawn() {
        Ok(child) => child,
        // That user may not look into the directory of this program.
        Err(error) => {
            return skip(name, &format!("another user cannot start this program: {error}"));
        }
    };
    let status = ends(&mut child).expect("the process hangs");
    let output = child.wait_with_output().unwrap();
    if status.code() == Some(NOT_HERE) {
        return skip(name, &String::from_utf8_lossy(&output.stdout));
    }
    assert!(status.success(), "{status}: {output:?}");
    assert!(String::from_utf8_lossy(&output.stdout).contains("1 passed"), "{output:?}");
}

#[test]
fn a_user_who_may_have_them_can_ask_for_no_faults_of_the_kernel() {
    let engine = engine();
    let never = LazyOptions::default().kernel_faults(KernelFaults::Never);
    let Some(memory) =
        crate::common::map("no_faults_of_the_kernel", &engine, 4 * page(), function(), &never)
    else {
        return;
    };
    assert!(!memory.sees_kernel_faults());
    assert_eq!(give_to_the_kernel(&memory, 0), Err(no_address()));
    check_all(&memory);
    assert_eq!(give_to_the_kernel(&memory, 0), Ok(usize_of(page())));
}

#[test]
fn a_system_call_writes_to_pages_that_are_pinned_for_it_and_they_are_dirty() {
    let name = "a_system_call_writes_to_pages_that_are_pinned_for_it";
    let whole = 0..8 * page();
    for answer in [Answer::Reader, Answer::InThread] {
        for track in [WriteTracking::Sync, WriteTracking::Async] {
            let options = LazyOptions::default()
                .kernel_faults(KernelFaults::Never)
                .answer(answer)
                .track_writes(track);
            let backing = FileBacking::new(file_with(&words(8 * page()))).unwrap();
            let mapped = crate::common::map(name, &engine(), 8 * page(), backing, &options);
            let Some(memory) = mapped else { return };
            let (at, one) = (3 * page(), 3 * page()..4 * page());
            assert_eq!(take_from_the_kernel(&memory, at), Err(no_address()), "{answer:?}");
            let pinned = memory.pin(one.clone()).unwrap();
            if track == WriteTracking::Sync {
                let answer = take_from_the_kernel(&memory, at);
                assert_eq!(answer, Err(no_address()), "it is protected");
                assert_eq!(memory.dirty(whole.clone()).unwrap(), []);
            }
            drop(pinned);
            let pinned = memory.pin_for_write(one.clone()).unwrap();
            let dirty = [one];
            assert_eq!(memory.dirty(whole.clone()).unwrap(), dirty, "{track:?}");
            // Taking and evicting changes nothing while it is pinned.
            for _ in 0..2 {
                assert_eq!(take_from_the_kernel(&memory, at), Ok(usize_of(page())));
                assert_eq!(bytes_of(&memory, at, page()), vec![7; usize_of(page())]);
                assert_eq!(memory.take_dirty(whole.clone()).unwrap(), dirty);
                let _ = memory.evict_all(whole.clone()).unwrap();
            }
            // Not even while they are being taken.
            thread::scope(|scope| {
                let calls = scope.spawn(|| {
                    (0..500).try_for_each(|_| take_from_the_kernel(&memory, at).map(drop))
                });
                while !calls.is_finished() {
                    assert_eq!(memory.take_dirty(whole.clone()).unwrap(), dirty);
                }
                assert_eq!(calls.join().unwrap(), Ok(()), "{answer:?} {track:?}");
            });
            drop(pinned);
            assert_eq!(memory.take_dirty(whole.clone()).unwrap(), dirty);
            assert_eq!(memory.take_dirty(whole.clone()).unwrap(), []);
            memory.pin_for_write(7 * page()..9 * page()).unwrap_err();
        }
    }
}
