//! The side of Cloud Hypervisor that receives a VM and asks for its pages, composed from the
//! fields of its protocol.
#![allow(dead_code, reason = "each test program uses its part")]
#![allow(clippy::unwrap_used, reason = "helpers of tests fail by panicking, as tests do")]

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};

use uzone_os::peer;

pub(crate) const OK: u16 = 1;
pub(crate) const ERROR: u16 = 2;

/// The parts of a VM in the other process.
pub(crate) struct Machine {
    pub(crate) stream: UnixStream,
    faults: UnixStream,
    /// The memory files, in the order of their slots.
    pub(crate) files: Vec<File>,
}

impl Machine {
    pub(crate) fn header(stream: &mut UnixStream) -> (u16, u64) {
        let mut header = [0; 16];
        stream.read_exact(&mut header).unwrap();
        let code = u16::from_le_bytes(header[..2].try_into().unwrap());
        (code, u64::from_le_bytes(header[8..].try_into().unwrap()))
    }

    pub(crate) fn answer(stream: &mut UnixStream, status: u16) {
        let mut answer = [0; 16];
        answer[..2].copy_from_slice(&status.to_le_bytes());
        stream.write_all(&answer).unwrap();
    }

    /// Takes a VM of these slots and this configuration, up to its state.
    pub(crate) fn receive(listener: &UnixListener, slots: &[u32], config: &[u8]) -> Self {
        let (mut stream, _) = listener.accept().unwrap();
        assert_eq!(Self::header(&mut stream), (1, 0), "the start");
        Self::answer(&mut stream, OK);
        let mut files = Vec::new();
        for expected in slots {
            assert_eq!(Self::header(&mut stream), (7, 4), "a memory file");
            let (mut number, mut fds) = ([0; 4], Vec::new());
            assert_eq!(peer::receive(&stream, &mut number, &mut fds).unwrap(), 4);
            assert_eq!((u32::from_le_bytes(number), fds.len()), (*expected, 1));
            files.extend(fds.into_iter().map(File::from));
            Self::answer(&mut stream, OK);
        }
        let (code, len) = Self::header(&mut stream);
        let mut came = vec![0; usize::try_from(len).unwrap()];
        stream.read_exact(&mut came).unwrap();
        assert!(code == 2 && came == config);
        Self::answer(&mut stream, OK);
        let (mut faults, _) = listener.accept().unwrap();
        let mut role = [0; 2];
        faults.read_exact(&mut role).unwrap();
        assert_eq!(u16::from_le_bytes(role), 2, "it carries faults");
        Self { stream, faults, files }
    }

    /// Takes the rest, with this state. Returns the command that ends it.
    pub(crate) fn complete(&mut self, expected: &[u8]) -> u16 {
        let (code, len) = Self::header(&mut self.stream);
        let mut state = vec![0; usize::try_from(len).unwrap()];
        self.stream.read_exact(&mut state).unwrap();
        assert!(code == 3 && state == expected);
        Self::answer(&mut self.stream, OK);
        let (code, _) = Self::header(&mut self.stream);
        Self::answer(&mut self.stream, OK);
        code
    }

    /// Asks for a range. Returns the status of the answer.
    pub(crate) fn ask(&mut self, address: u64, len: u64) -> u16 {
        let mut request = [0; 32];
        (request[0], request[8]) = (9, 16);
        request[16..24].copy_from_slice(&address.to_le_bytes());
        request[24..].copy_from_slice(&len.to_le_bytes());
        self.faults.write_all(&request).unwrap();
        let (status, len) = Self::header(&mut self.faults);
        assert_eq!(len, 0, "the bytes are in the file");
        status
    }
}
