//! Restoring a VM of Cloud Hypervisor from an image, page by page: [`Offload`].
//!
//! Cloud Hypervisor takes a VM from a daemon as it does from another host: it listens (`receive-migration` with
//! `memory_mode=postcopy`), and the daemon connects and sends the VM's configuration, its state, and a memory file for
//! each slot of its memory. A second connection carries page faults the other way: the daemon writes the page into the
//! file, and answers.
//!
//! A VM maps its files shared, so each VM has files of its own. A page is written there once: a page in the file belongs
//! to the VM from then on, and a page that the VM has given back is zero.
//!
//! All numbers are little-endian. A request is a command (2 bytes), 6 bytes and the length of its payload (8 bytes); an
//! answer has a status in place of the command.
//! Source: Cloud Hypervisor, `docs/snapshot_restore.md` and the protocol that it names, version 0.

use std::collections::HashSet;
use std::fs::File;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::ops::Range;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::thread;

use serde::Deserialize;
use uzone_os::{Mapping, peer};
use uzone_pages::ByteLen;
use uzone_snapshot::files::data_from;
use uzone_snapshot::{Image, SnapshotError};

use crate::error::ServeError;
use crate::sandbox::{Files, Sandbox, ThreadKind};

/// The length of a page. The other side asks for whole pages.
const PAGE_LEN: usize = 4096;
const PAGE: u64 = PAGE_LEN as u64;
/// The aligned block around a requested page that is written with it: all of it in one read and few writes.
const WINDOW_LEN: usize = 64 << 10;
const WINDOW: u64 = WINDOW_LEN as u64;
/// The longest range of a request.
const LONGEST: u64 = 64 << 20;
/// The most slots of a VM.
const SLOTS: usize = 1024;

/// The length of a request, and of an answer.
const HEADER: usize = 16;
/// The commands that a daemon sends or gets, and the statuses of an answer.
const START: u16 = 1;
const CONFIG: u16 = 2;
const STATE: u16 = 3;
const COMPLETE: u16 = 5;
const MEMORY_FD: u16 = 7;
const COMPLETE_PAUSED: u16 = 8;
const PAGE_FAULT: u16 = 9;
const OK: u16 = 1;
const ERROR: u16 = 2;
/// The first bytes of the second connection: it carries faults.
const FAULTS: u16 = 2;

/// A slot of memory, as the configuration of a VM has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Slot {
    number: u32,
    /// The guest address.
    address: u64,
    len: u64,
    /// The offset in the memory file of the slot, and in the image.
    in_file: u64,
    in_image: u64,
}

impl Slot {
    fn addresses(&self) -> Range<u64> {
        self.address..self.address + self.len
    }
}

#[derive(Deserialize)]
struct Config {
    memory_manager_data: MemoryConfig,
}

#[derive(Deserialize)]
struct MemoryConfig {
    guest_ram_mappings: Vec<SlotConfig>,
}

#[derive(Deserialize)]
struct SlotConfig {
    slot: u32,
    gpa: u64,
    size: u64,
    file_offset: u64,
}

/// Returns the slots of a configuration, by their addresses. The image has one behind the other in that
/// order.
fn slots(config: &[u8]) -> Result<Vec<Slot>, ServeError> {
    let unusable = |why: String| ServeError::MachineConfig { why };
    let config: Config =
        serde_json::from_slice(config).map_err(|error| unusable(error.to_string()))?;
    let mut mappings = config.memory_manager_data.guest_ram_mappings;
    if !(1..=SLOTS).contains(&mappings.len()) {
        return Err(unusable(format!(
            "it has {} slots: 1 to {SLOTS} are possible",
            mappings.len()
        )));
    }
    mappings.sort_by_key(|mapping| mapping.gpa);
    let (mut slots, mut numbers, mut in_image) = (Vec::<Slot>::new(), HashSet::new(), 0_u64);
    for SlotConfig { slot: number, gpa: address, size: len, file_offset: in_file } in mappings {
        let ends = [address, in_file, in_image].map(|start| start.checked_add(len));
        let is_cut = len == 0 || (address | len | in_file) % PAGE != 0;
        let overlaps = slots.last().is_some_and(|last| last.addresses().end > address);
        if is_cut || overlaps || ends.contains(&None) || !numbers.insert(number) {
            return Err(unusable(format!(
                "slot {number} of {len} bytes at {address:#x} cuts a page, overlaps another slot, or is there twice"
            )));
        }
        slots.push(Slot { number, address, len, in_file, in_image });
        in_image += len;
    }
    Ok(slots)
}

fn header(code: u16, version: u16, len: usize) -> [u8; HEADER] {
    let mut header = [0; HEADER];
    header[..2].copy_from_slice(&code.to_le_bytes());
    header[2..4].copy_from_slice(&version.to_le_bytes());
    header[8..].copy_from_slice(&(len as u64).to_le_bytes());
    header
}

/// Returns the code of a header, and the length of the payload.
fn parse(header: [u8; HEADER]) -> (u16, u64) {
    let [a, b, .., c, d, e, f, g, h, i, j] = header;
    (u16::from_le_bytes([a, b]), u64::from_le_bytes([c, d, e, f, g, h, i, j]))
}

/// The counts of a restored VM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Offloaded {
    /// Requests for pages.
    pub faults: u64,
    /// Bytes that were written for requests.
    pub asked_bytes: u64,
    /// Bytes that were written along with them.
    pub around_bytes: u64,
}

/// A VM of Cloud Hypervisor that is to be restored.
pub struct Offload {
    bytes: Image,
    config: Vec<u8>,
    state: Vec<u8>,
    slots: Vec<Slot>,
    sandbox: bool,
}

impl Offload {
    /// Takes the memory, the configuration and the state of a VM. The image has its slots, one behind the other by their
    /// guest addresses.
    ///
    /// # Errors
    /// [`ServeError::MachineConfig`], or [`ServeError::OtherMachine`] if there are fewer bytes.
    pub fn new(bytes: Image, config: Vec<u8>, state: Vec<u8>) -> Result<Self, ServeError> {
        let slots = slots(&config)?;
        let asked_bytes = slots.iter().map(|slot| slot.len).sum();
        let has_bytes = bytes.byte_len();
        if asked_bytes > has_bytes {
            return Err(ServeError::OtherMachine { asked_bytes, has_bytes });
        }
        Ok(Self { bytes, config, state, slots, sandbox: false })
    }

    /// Sets whether [`Offload::restore`] confines the calling thread, and the threads that it starts, for good, before it
    /// answers the first fault: not by default. They keep their connections, read the image and write the memory files.
    /// They open and connect nothing else, and start no other program. So this is for a process of its own that restores
    /// one VM.
    #[must_use]
    pub fn sandbox(mut self, sandbox: bool) -> Self {
        self.sandbox = sandbox;
        self
    }

    /// Restores the VM in the process that listens on `socket`, and answers its faults until it needs no more pages, or
    /// ends. It runs at once if it is to be resumed, and is paused otherwise. The call may be repeated for another VM:
    /// each has memory of its own.
    ///
    /// # Errors
    /// [`ServeError`]. The connection is closed before the VM sees a byte that the image lacks; a page that cannot be
    /// produced is answered by an error.
    pub fn restore(&self, socket: &Path, resumes: bool) -> Result<Offloaded, ServeError> {
        let connect = || {
            UnixStream::connect(socket)
                .map_err(|cause| ServeError::Connect { path: socket.to_owned(), cause })
        };
        let stream = connect()?;
        send(&stream, "its start", START, &[])?;
        let memory = self.slots.iter().map(|slot| SlotMemory::new(*slot));
        let memory = memory.collect::<Result<Vec<_>, ServeError>>()?;
        for one in &memory {
            one.hand_over(&stream)?;
        }
        send(&stream, "its configuration", CONFIG, &self.config)?;
        // The other side reads pages while it takes the state.
        let faults = connect()?;
        broken("the role of a connection", (&faults).write_all(&FAULTS.to_le_bytes()))?;
        let mut sandbox = if self.sandbox { Some(self.confine()?) } else { None };
        let mut server = Server { bytes: &self.bytes, memory, done: Offloaded::default() };
        thread::scope(|scope| {
            let sending = scope.spawn(|| {
                let complete = if resumes { COMPLETE } else { COMPLETE_PAUSED };
                let sent = send(&stream, "its state", STATE, &self.state)
                    .and_then(|()| send(&stream, "its end", complete, &[]));
                if sent.is_err() {
                    // It may be closed already.
                    let _ = faults.shutdown(Shutdown::Both);
                }
                sent
            });
            let mut answer = || server.answer(&faults).map(|()| server.done);
            let answered = match &mut sandbox {
                Some(sandbox) => sandbox
                    .confine_threads(ThreadKind::MemoryFiles, answer)
                    .unwrap_or_else(|cause| Err(ServeError::Sandbox(cause))),
                None => answer(),
            };
            if answered.is_err() {
                // The other thread does not wait for a VM that cannot be restored.
                let _ = stream.shutdown(Shutdown::Both);
            }
            let sent = sending.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            // A failed page is the reason why the other side refuses the rest.
            answered.and_then(|done| sent.map(|()| done))
        })
    }

    /// Confines this thread, and the threads that it starts.
    fn confine(&self) -> Result<Sandbox, ServeError> {
        let mut sandbox = Sandbox::without_capabilities().map_err(ServeError::Sandbox)?;
        let read: Vec<_> = self.bytes.sources().into_iter().map(PathBuf::from).collect();
        if read.iter().any(|path| uzone_snapshot::is_url(path)) {
            sandbox.missing.push("the threads that fetch the image are started before".to_owned());
        }
        sandbox.confine_files(&Files { read, ..Files::default() });
        sandbox.confine_calls(false);
        if sandbox.missing.is_empty() {
            tracing::debug!("faults are answered as {sandbox}");
        } else {
            tracing::warn!("faults are answered as {sandbox}");
        }
        Ok(sandbox)
    }
}

impl std::fmt::Debug for Offload {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Offload").field("slots", &self.slots).finish_non_exhaustive()
    }
}

fn broken<T>(what: &'static str, result: io::Result<T>) -> Result<T, ServeError> {
    result.map_err(|cause| ServeError::Broken { what, cause })
}

/// Sends a request and its payload, and waits for the answer.
fn send(
    mut stream: &UnixStream,
    what: &'static str,
    command: u16,
    payload: &[u8],
) -> Result<(), ServeError> {
    broken(what, stream.write_all(&header(command, 0, payload.len())))?;
    broken(what, stream.write_all(payload))?;
    expect_ok(stream, what)
}

fn expect_ok(mut stream: &UnixStream, what: &'static str) -> Result<(), ServeError> {
    let mut answer = [0; HEADER];
    broken(what, stream.read_exact(&mut answer))?;
    match parse(answer) {
        (OK, 0) => Ok(()),
        (OK, _) => broken(what, Err(io::ErrorKind::InvalidData.into())),
        _ => Err(ServeError::Refused { what }),
    }
}

/// The memory file of a slot.
struct SlotMemory {
    slot: Slot,
    file: File,
    /// The pages that were written, a bit each. A written page that the file lacks was given back.
    written: Vec<u64>,
}

impl SlotMemory {
    fn new(slot: Slot) -> Result<Self, ServeError> {
        let len = ByteLen::new(slot.in_file + slot.len);
        let mapping = Mapping::memfd(&format!("uzone-slot-{}", slot.number), len, None)?;
        let fd = mapping.fd().ok_or(io::ErrorKind::Unsupported.into());
        let fd = fd.and_then(|fd| fd.try_clone_to_owned());
        let file = File::from(broken("a memory file", fd)?);
        let words = usize::try_from((slot.len / PAGE).div_ceil(64)).unwrap_or(usize::MAX);
        Ok(Self { slot, file, written: vec![0; words] })
    }

    fn hand_over(&self, mut stream: &UnixStream) -> Result<(), ServeError> {
        let (what, number) = ("a memory file", self.slot.number.to_le_bytes());
        broken(what, stream.write_all(&header(MEMORY_FD, 0, number.len())))?;
        let sent = peer::send(stream, &number, &[self.file.as_fd()]);
        // A stream that blocks sends 4 bytes as a whole.
        broken(what, sent.and_then(|len| stream.write_all(&number[len..])))?;
        expect_ok(stream, what)
    }

    /// Returns the word and the bit of the page at an offset in the slot.
    fn bit(offset: u64) -> (usize, u64) {
        let page = offset / PAGE;
        (usize::try_from(page / 64).unwrap_or(usize::MAX), 1 << (page % 64))
    }

    fn is_written(&self, offset: u64) -> bool {
        let (word, bit) = Self::bit(offset);
        self.written.get(word).is_some_and(|word| word & bit != 0)
    }

    /// Returns the first run of pages of a range in the slot that the file lacks. Pages that were written are passed over,
    /// but for those that are `asked` for. Pages are looked at one by one: the kernel looks for the end of a run of data
    /// as far as the run goes.
    fn next_hole(&self, range: Range<u64>, asked: &Range<u64>) -> io::Result<Option<Range<u64>>> {
        let mut at = range.start;
        while at < range.end {
            if asked.contains(&at) || !self.is_written(at) {
                let data = data_from(&self.file, self.slot.in_file + at)?;
                let data = data.map_or(range.end, |data| data - self.slot.in_file);
                if data > at {
                    return Ok(Some(at..data.min(range.end)));
                }
            }
            at += PAGE;
        }
        Ok(None)
    }

    /// Writes pages. The kernel shows each to the VM when it is whole.
    fn write(&mut self, pages: Range<u64>, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all_at(bytes, self.slot.in_file + pages.start)?;
        for page in pages.step_by(PAGE_LEN) {
            let (word, bit) = Self::bit(page);
            if let Some(word) = self.written.get_mut(word) {
                *word |= bit;
            }
        }
        Ok(())
    }
}

/// Answers the faults of a VM.
struct Server<'a> {
    bytes: &'a Image,
    memory: Vec<SlotMemory>,
    done: Offloaded,
}

impl Server<'_> {
    /// Answers until the other side closes the connection.
    fn answer(&mut self, mut faults: &UnixStream) -> Result<(), ServeError> {
        let what = "a page fault";
        loop {
            let mut request = [0; HEADER + 16];
            match faults.read_exact(&mut request) {
                Ok(()) => {}
                // All pages are there, or the VM has ended.
                Err(cause) if is_end(&cause) => return Ok(()),
                Err(cause) => return broken(what, Err(cause)),
            }
            let filled = self.asked(&request).and_then(|(index, asked)| {
                self.done.faults += 1;
                let (start, end) =
                    (asked.start / WINDOW * WINDOW, asked.end.next_multiple_of(WINDOW));
                let window = start..end.min(self.memory[index].slot.len);
                // A neighbour may be damaged.
                self.fill(index, window, &asked)
                    .or_else(|_| self.fill(index, asked.clone(), &asked))
            });
            let status = if filled.is_ok() { OK } else { ERROR };
            match faults.write_all(&header(status, 0, 0)) {
                Err(cause) if is_end(&cause) && filled.is_ok() => return Ok(()),
                sent => broken(what, sent)?,
            }
            filled?;
        }
    }

    /// Returns the slot and the range of a request.
    fn asked(&self, request: &[u8; HEADER + 16]) -> Result<(usize, Range<u64>), ServeError> {
        let (head, range) = request.split_at(HEADER);
        let number = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().unwrap_or_default());
        let (address, len) = (number(&range[..8]), number(&range[8..]));
        let code = parse(head.try_into().unwrap_or_default());
        let is_valid = code == (PAGE_FAULT, 16)
            && (address | len) % PAGE == 0
            && (PAGE..=LONGEST).contains(&len);
        let index = self.memory.iter().position(|one| {
            let addresses = one.slot.addresses();
            addresses.contains(&address) && len <= addresses.end - address
        });
        let why = || {
            let why = format!("request {code:?} for {len} bytes at guest address {address:#x}");
            io::Error::new(io::ErrorKind::InvalidData, why)
        };
        let index = broken("a page fault", index.filter(|_| is_valid).ok_or_else(why))?;
        let start = address - self.memory[index].slot.address;
        Ok((index, start..start + len))
    }

    /// Writes the pages of a range in a slot that its file lacks. But for pages that are `asked` for, zero pages are left
    /// out, and so are pages that the VM has given back.
    fn fill(
        &mut self,
        index: usize,
        range: Range<u64>,
        asked: &Range<u64>,
    ) -> Result<(), ServeError> {
        let (bytes, memory, done) = (self.bytes, &mut self.memory[index], &mut self.done);
        let address = memory.slot.address;
        let failed = |at: u64, cause| ServeError::Page { address: address + at, cause };
        let of_file = |at: u64, cause| {
            let name = "the memory of the VM".to_owned();
            failed(at, SnapshotError::Read { name, offset: at, len_bytes: PAGE, cause })
        };
        let (mut room, mut at) = ([0; WINDOW_LEN], range.start);
        while let Some(hole) =
            memory.next_hole(at..range.end, asked).map_err(|cause| of_file(at, cause))?
        {
            let part = hole.start..hole.end.min(hole.start + WINDOW);
            at = part.end;
            let part_len = usize::try_from(part.end - part.start).unwrap_or(room.len());
            let read = &mut room[..part_len];
            bytes
                .read_at(memory.slot.in_image + part.start, read)
                .map_err(|cause| failed(part.start, cause))?;
            let mut is_kept = |(offset, page): (u64, &mut [u8])| {
                let (is_asked, was_removed) = (asked.contains(&offset), memory.is_written(offset));
                if was_removed {
                    page.fill(0);
                }
                let is_kept = is_asked || !was_removed && page.iter().any(|byte| *byte != 0);
                let count = if is_asked { &mut done.asked_bytes } else { &mut done.around_bytes };
                *count += if is_kept { PAGE } else { 0 };
                is_kept
            };
            let pages = part.clone().step_by(PAGE_LEN).zip(read.chunks_mut(PAGE_LEN));
            let kept: Vec<bool> = pages.map(&mut is_kept).collect();
            let mut start = 0;
            for run in kept.chunk_by(|page, next| page == next) {
                let (first, end) = (start, start + run.len() * PAGE_LEN);
                start = end;
                if run[0] {
                    let pages = part.start + first as u64..part.start + end as u64;
                    memory
                        .write(pages, &read[first..end])
                        .map_err(|cause| of_file(part.start, cause))?;
                }
            }
        }
        Ok(())
    }
}

/// Returns whether the other side has ended.
fn is_end(cause: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
    matches!(cause.kind(), UnexpectedEof | BrokenPipe | ConnectionReset)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Composed from the fields of the protocol.
    fn config(slots: &[(u32, u64, u64, u64)]) -> Vec<u8> {
        let slot = |(slot, gpa, size, file_offset): &(u32, u64, u64, u64)| {
            serde_json::json!({
                "slot": slot, "gpa": gpa, "size": size, "file_offset": file_offset, "virtio_mem": false
            })
        };
        let slots: Vec<_> = slots.iter().map(slot).collect();
        let memory = serde_json::json!({ "guest_ram_mappings": slots, "next_memory_slot": 2 });
        serde_json::to_vec(&serde_json::json!({ "vm_config": {}, "memory_manager_data": memory }))
            .unwrap()
    }

    #[test]
    fn slots_are_in_the_image_by_their_addresses() {
        let slots = slots(&config(&[(3, 4 << 30, 8192, 4096), (0, 0, 4096, 0)])).unwrap();
        let first = Slot { number: 0, address: 0, len: 4096, in_file: 0, in_image: 0 };
        let second = Slot { number: 3, address: 4 << 30, len: 8192, in_file: 4096, in_image: 4096 };
        assert_eq!(slots, [first, second]);
    }

    #[test]
    fn a_configuration_that_cannot_be_is_refused_by_name() {
        let refused = |bytes: &[u8]| {
            let error = slots(bytes).unwrap_err();
            assert!(matches!(error, ServeError::MachineConfig { .. }), "{error}");
        };
        refused(b"");
        refused(b"{}");
        for wrong in [
            &[][..],
            &[(0, 0, 0, 0)],
            &[(0, 0, 4095, 0)],
            &[(0, 1, 4096, 0)],
            &[(0, 0, 4096, 1)],
            &[(0, 0, 8192, 0), (1, 4096, 4096, 0)],
            &[(0, 0, 4096, 0), (0, 4096, 4096, 0)],
            &[(0, !0xfff, 8192, 0)],
            &[(0, 0, 8192, !0xfff)],
        ] {
            refused(&config(wrong));
        }
    }

    #[test]
    fn a_header_has_its_fields_where_the_protocol_has_them() {
        let bytes = header(PAGE_FAULT, 0, 16);
        assert_eq!(bytes, [9, 0, 0, 0, 0, 0, 0, 0, 16, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(parse(bytes), (PAGE_FAULT, 16));
        assert_eq!(header(START, 0x102, 0)[..4], [1, 0, 2, 1]);
    }
}
