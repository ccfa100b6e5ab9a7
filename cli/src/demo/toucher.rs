//! The process that touches the image: this program, started again by the demo ([`run`]).
//!
//! It makes the memory, registers it and hands the userfaultfd over; then it does nothing but read, by
//! the ordinary loads of any program. It keeps a descriptor of its own, so that memory whose server
//! has gone is waited for and never zero, and the kernel ends it with the server.

use std::hash::{DefaultHasher, Hasher};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use uzone_bench::brief;
use uzone_os::uffd::{Features, KernelFaults, Modes, Registered, Uffd};
use uzone_os::{Access, Anonymous, HugeAdvice, Mapping, MessageSocket, Sharing, probe, signals};
use uzone_pages::ByteLen;

use super::protocol::{self, CHUNK, Reply, Request, Touched};
use crate::exit::{Exit, Failure};

/// After how many pages it says how far it is.
const STEP: u64 = 4096;

/// What it fails by, each with the causes of that.
type Answer<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// This was started by hand.
#[derive(Debug, thiserror::Error)]
#[error("--touch is how `uzone demo` starts its second process: leave it out")]
struct NotAsked {
    #[source]
    cause: io::Error,
}

/// Memory that is touched.
enum Memory {
    Lazy(Registered),
    Plain(Mapping),
}

impl Memory {
    fn mapping(&self) -> &Mapping {
        match self {
            Self::Lazy(memory) => memory.mapping(),
            Self::Plain(mapping) => mapping,
        }
    }
}

/// Serves the demo until it ends.
///
/// # Errors
/// If standard input is not the demo's socket.
pub(super) fn run() -> Result<Exit, Failure> {
    let not_asked = |cause| Failure::with(Exit::Usage, NotAsked { cause });
    let fd = io::stdin().as_fd().try_clone_to_owned().map_err(not_asked)?;
    let socket = MessageSocket::from_fd(fd).map_err(not_asked)?;
    // If the demo has ended before this, nothing more comes from the socket.
    signals::end_with_parent()?;
    match serve(&socket) {
        Ok(()) => Ok(Exit::Ok),
        Err(error) => {
            let mut text = error.to_string();
            let mut cause = error.source();
            while let Some(error) = cause {
                let inner = error.to_string();
                if !text.contains(&inner) {
                    text = format!("{text}: {inner}");
                }
                cause = error.source();
            }
            // If nobody listens any more there is nobody to tell.
            let _ = protocol::send(&socket, &Reply::Failed { error: text }, None);
            Ok(Exit::Os)
        }
    }
}

fn serve(socket: &MessageSocket) -> Answer<()> {
    let mut memory = None;
    while let Some((request, image)) = protocol::receive::<Request>(socket)? {
        match request {
            Request::Map { len_bytes } => {
                let len = ByteLen::new(len_bytes);
                let made = match image {
                    Some(image) => plain(image, len)?,
                    None => lazy(len)?,
                };
                let start = made.mapping().addr().get() as u64;
                let fd = match &made {
                    Memory::Lazy(memory) => Some(memory.uffd().as_fd()),
                    Memory::Plain(_) => None,
                };
                protocol::send(socket, &Reply::Mapped { start }, fd)?;
                memory = Some(made);
            }
            Request::Touch { in_order_bytes, is_hashed } => {
                let Some(memory) = memory.take() else {
                    return Err("asked to touch before there is memory".into());
                };
                let touched = touch(socket, memory.mapping(), in_order_bytes)?;
                protocol::send(socket, &Reply::Touched(touched), None)?;
                if is_hashed {
                    hash(socket, memory.mapping())?;
                }
            }
        }
    }
    Ok(())
}

/// Maps the image as anyone would.
fn plain(image: OwnedFd, len: ByteLen) -> Answer<Memory> {
    Ok(Memory::Plain(Mapping::file(image, 0, len, Access::ReadOnly, Sharing::Private)?))
}

/// Makes memory whose pages come from whoever gets its userfaultfd.
fn lazy(len: ByteLen) -> Answer<Memory> {
    let optional = Features::POISON | Features::THREAD_ID;
    let uffd = Uffd::open(Features::NONE, optional, KernelFaults::IfAllowed)?;
    // As an engine maps memory of its own: a window is one range of one page table.
    let align = Some(ByteLen::mib(2));
    let how = Anonymous { huge: HugeAdvice::Default, align, ..Anonymous::default() };
    let mapping = Mapping::anonymous(len, how)?;
    Ok(Memory::Lazy(Registered::new(Arc::new(uffd), mapping, Modes::MISSING)?))
}

/// Reads the number that each page starts with, in order and then here and there.
fn touch(socket: &MessageSocket, mapping: &Mapping, in_order_bytes: u64) -> Answer<Touched> {
    let page = probe::page_size();
    let pages = mapping.len().get() >> page.shift();
    let in_order = 0..(in_order_bytes >> page.shift()).min(pages);
    let scattered = scattered(in_order.end..pages);
    let mut touched = Touched::default();
    let mut done = 0;
    let mut look = |number: u64| -> Answer<()> {
        let mut word = [0; 8];
        mapping.read_at(number << page.shift(), &mut word)?;
        if u64::from_le_bytes(word) != number {
            touched.wrong_page.get_or_insert(number);
        }
        done += 1;
        if done % STEP == 0 {
            protocol::send(socket, &Reply::Progress { pages: done }, None)?;
        }
        Ok(())
    };
    let faults = brief::kernel_faults();
    let started = Instant::now();
    in_order.into_iter().try_for_each(&mut look)?;
    let in_order_ns = nanoseconds(started);
    let started = Instant::now();
    scattered.into_iter().try_for_each(&mut look)?;
    let scattered_ns = nanoseconds(started);
    let kernel_faults = brief::kernel_faults().saturating_sub(faults);
    Ok(Touched { in_order_ns, scattered_ns, kernel_faults, ..touched })
}

/// Returns the pages of a range in an order that has nothing to do with their numbers, the same each
/// time.
fn scattered(pages: std::ops::Range<u64>) -> Vec<u64> {
    let mut pages: Vec<u64> = pages.collect();
    pages.sort_by_cached_key(|page| {
        let mut hasher = DefaultHasher::new();
        hasher.write_u64(*page);
        hasher.finish()
    });
    pages
}

/// Reads all bytes in order and says their hashes.
fn hash(socket: &MessageSocket, mapping: &Mapping) -> Answer<()> {
    let started = Instant::now();
    let len = mapping.len().get();
    let mut whole = blake3::Hasher::new();
    let mut bytes = vec![0; ByteLen::new(CHUNK).to_usize()?];
    for offset in (0..len).step_by(bytes.len()) {
        let left = ByteLen::new((len - offset).min(CHUNK)).to_usize()?;
        mapping.read_at(offset, &mut bytes[..left])?;
        whole.update(&bytes[..left]);
        let hash = blake3::hash(&bytes[..left]).to_hex().to_string();
        protocol::send(socket, &Reply::Hashed { offset, hash }, None)?;
    }
    let hash = whole.finalize().to_hex().to_string();
    protocol::send(socket, &Reply::Whole { hash, elapsed_ns: nanoseconds(started) }, None)?;
    Ok(())
}

fn nanoseconds(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn here_and_there_is_every_page_once_and_not_in_order() {
        let pages = scattered(100..1000);
        assert!(!pages.is_sorted());
        let mut sorted = pages.clone();
        sorted.sort_unstable();
        assert!(sorted.into_iter().eq(100..1000));
        assert_eq!(pages, scattered(100..1000));
        // Neighbours in the order are far from each other.
        let near = pages.windows(2).filter(|two| two[0].abs_diff(two[1]) < 10).count();
        assert!(near < 60, "{near}");
        assert!(scattered(5..5).is_empty());
    }
}
