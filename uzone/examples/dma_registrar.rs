//! A driver registers memory with its device once, and has the device copy between pieces of it. No `unsafe`.
//!
//! `cargo run --release -p uzone --example dma_registrar`
//!
//! The memory is pinned by uzone, so that it is neither unbound nor cleared, and by the kernel, so that its pages stay where
//! they are. The registrar gets the scatter list, of physical addresses where this process may see them, and returns a
//! key. Requests carry a pin of their own as 64 bits, which their completions bring back. The device is played by a thread.
//! Prints the list, and the holders of the memory when it is to be unbound; fails if a page was moved, or a copy has other bytes.

use std::error::Error;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

use uzone::{BindOptions, ByteLen, ErrorKind, MemoryKind, PinOptions, Pinned};
use uzone::{RawGuard, Redeemed, Region, Zone};

type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

const LEN: ByteLen = ByteLen::mib(4);
const COPY: u64 = 64 << 10;
const REQUESTS: u64 = 200;

/// A piece of the memory, by the address that the device has for it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Piece {
    address: u64,
    len_bytes: u64,
}

/// Where a driver registers memory: an RDMA card's protection domain, a VFIO container, a table of its own.
trait Registrar {
    fn register(&mut self, pieces: &[Piece]) -> Outcome<u32>;
    fn unregister(&mut self, key: u32) -> Vec<Piece>;
}

/// The table of a device without an IOMMU.
#[derive(Default)]
struct Table(Vec<Vec<Piece>>);

impl Registrar for Table {
    fn register(&mut self, pieces: &[Piece]) -> Outcome<u32> {
        self.0.push(pieces.to_vec());
        Ok(u32::try_from(self.0.len() - 1)?)
    }

    fn unregister(&mut self, key: u32) -> Vec<Piece> {
        usize::try_from(key).map_or(Vec::new(), |key| std::mem::take(&mut self.0[key]))
    }
}

/// A copy that the device makes, between bytes of the registered memory.
struct Request {
    from: u64,
    to: u64,
    /// The pin of both, which the completion brings back.
    token: u64,
}

/// Returns the scatter list of pinned memory.
fn pieces(pinned: &Pinned) -> Outcome<Vec<Piece>> {
    match pinned.physical() {
        Ok(physical) => Ok(physical
            .iter()
            .map(|part| Piece { address: part.start, len_bytes: part.end - part.start })
            .collect()),
        // A driver of the kernel takes the addresses of this process, and looks the others up.
        Err(error) if error.kind() == ErrorKind::PermissionDenied => {
            println!("{error}");
            let segments = pinned.segments();
            Ok(segments
                .map(|part| Piece { address: part.address as u64, len_bytes: part.len_bytes })
                .collect())
        }
        Err(error) => Err(error.into()),
    }
}

/// Copies by the pin that the device has of its driver, and completes each request.
fn device(memory: &Pinned, requests: &Receiver<Request>, completions: &Sender<u64>) -> Outcome<()> {
    let mut bytes = vec![0; usize::try_from(COPY)?];
    for Request { from, to, token } in requests {
        memory.read_at(from, &mut bytes)?;
        memory.write_at(to, &bytes)?;
        completions.send(token)?;
    }
    Ok(())
}

fn main() -> Outcome<()> {
    let zone = Zone::new();
    let pagemap = zone.bind(Region::anonymous(LEN)?, BindOptions::new(MemoryKind::Generic))?;
    pagemap.pin_and_write(0, &vec![7; usize::try_from(COPY)?])?;

    let pinned = match pagemap.pin_with(pagemap.range(), PinOptions::default().kernel()) {
        Ok(pinned) => pinned,
        // The error names the limit, or the right that is missing.
        Err(error) => {
            println!("{error}");
            return Ok(());
        }
    };
    let mut registrar = Table::default();
    let registered = pieces(&pinned)?;
    let key = registrar.register(&registered)?;
    println!(
        "{LEN} registered as {} pieces, the first {:x?}",
        registered.len(),
        registered.first()
    );

    let ((requests, todo), (done, completions), memory) = (channel(), channel(), &pinned);
    thread::scope(|scope| {
        // Its end closes the channel of completions.
        let device = scope.spawn(move || device(memory, &todo, &done));
        for number in 0..REQUESTS {
            let slots = LEN.get() / COPY;
            let (from, to) = (number % slots * COPY, (number + 1) % slots * COPY);
            // A pin for the time of the request, beside the one of the registration. It becomes 64 bits.
            let range = pagemap.range_at(from.min(to), ByteLen::new(from.abs_diff(to) + COPY))?;
            let token = pagemap.pin(range)?.into_raw().map_err(|refused| refused.1)?.to_bits();
            requests.send(Request { from, to, token })?;
        }
        drop(requests);
        for token in completions {
            match zone.redeem(RawGuard::from_bits(token))? {
                Redeemed::Pinned(pin) => drop(pin),
                Redeemed::Referenced(_) => return Err("it was a pin".into()),
            }
        }
        device.join().map_err(|_| "the device panicked")?
    })?;

    let busy = pagemap.unbind().err().ok_or("memory of a device was unbound")?;
    println!("{busy}");
    if pieces(&pinned)? != registrar.unregister(key) {
        return Err("a page was moved while it was registered".into());
    }
    let mut last = vec![0; usize::try_from(COPY)?];
    pinned.read_at(LEN.get() - COPY, &mut last)?;
    drop(pinned);
    busy.pagemap.unbind()?;
    if last.iter().any(|byte| *byte != 7) {
        return Err("the device copied other bytes".into());
    }
    println!("{REQUESTS} requests came back, and the memory is free again");
    Ok(())
}
