//! What a lazily mapped page costs, by back end and window, beside a handler that answers one page
//! per fault and the kernel's own mapping of the same memory. A first look; no benchmark.
//!
//! `cargo run --release -p uzone-fault --example fault_cost [MIB]`

use std::error::Error;
use std::fs::File;
use std::io::Write;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::{Duration, Instant};

use uzone_fault::{Backing, Engine, FileBacking, LazyOptions, MemoryBacking};
use uzone_os::{Access, Mapping, Sharing};
use uzone_pages::{Advice, ByteLen, FaultAround};

const PAGE: u64 = 4096;
const ROUNDS: usize = 7;

fn main() -> Result<(), Box<dyn Error>> {
    let mib = std::env::args().nth(1).map_or(Ok(128), |text| text.parse())?;
    let len = ByteLen::mib(mib);
    let pages = len.get() / PAGE;
    let engine = Engine::new(NonZeroUsize::MIN)?;

    let memory = Arc::new(Mapping::memfd("cost", len, None)?);
    let path = std::env::current_exe()?.with_extension("data");
    let mut file =
        File::options().read(true).write(true).create(true).truncate(true).open(&path)?;
    std::fs::remove_file(&path)?;
    let mut bytes = vec![0; 1 << 20];
    for offset in (0..len.get()).step_by(1 << 20) {
        for (index, page) in bytes.chunks_mut(4096).enumerate() {
            page[..8].copy_from_slice(&(offset / PAGE + index as u64).to_ne_bytes());
        }
        memory.write_at(offset, &bytes)?;
        file.write_all(&bytes)?;
    }
    let in_order: Vec<u64> = (0..pages).collect();
    let mut shuffled = in_order.clone();
    let mut state = 88_172_645_463_325_252_u64;
    for at in (1..shuffled.len()).rev() {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let other = state % (at as u64 + 1);
        shuffled.swap(at, usize::try_from(other)?);
    }
    let sparse: Vec<u64> = shuffled.iter().copied().filter(|page| page % 512 == 77).collect();

    println!("{len}, ns for each page touched: median (least) of {ROUNDS}, and faults");
    for (what, order) in [("in order", &in_order), ("shuffled", &shuffled), ("1 of 512", &sparse)] {
        for (how, advice, size) in [
            ("one page", Advice::Random, FaultAround::MIN),
            ("16 pages", Advice::Normal, FaultAround::DEFAULT),
            ("auto", Advice::Auto, FaultAround::DEFAULT),
        ] {
            for spin in [Duration::ZERO, Duration::from_micros(20)] {
                let options =
                    LazyOptions { advice, fault_around: size, spin, ..LazyOptions::default() };
                let spins = if spin.is_zero() { "" } else { ", spins" };
                measure(&format!("{what}, memory file, {how}{spins}"), order, || {
                    let backing = MemoryBacking::new(memory.clone(), Sharing::Private)?;
                    lazily(&engine, len, Arc::new(backing), &options, order)
                })?;
                measure(&format!("{what}, file, {how}{spins}"), order, || {
                    let backing = FileBacking::new(file.try_clone()?)?;
                    lazily(&engine, len, Arc::new(backing), &options, order)
                })?;
            }
        }
        measure(&format!("{what}, memory file, the kernel's mapping"), order, || {
            let fd = memory.fd().ok_or("no file")?.try_clone_to_owned()?;
            plainly(&Mapping::file(fd, 0, len, Access::ReadOnly, Sharing::Private)?, order)
        })?;
        measure(&format!("{what}, file, the kernel's mapping"), order, || {
            let file = file.try_clone()?;
            plainly(&Mapping::file(file, 0, len, Access::ReadOnly, Sharing::Private)?, order)
        })?;
    }
    Ok(())
}

type Touched = Result<(Duration, u64), Box<dyn Error>>;

fn lazily(
    engine: &Engine,
    len: ByteLen,
    backing: Arc<dyn Backing>,
    options: &LazyOptions,
    order: &[u64],
) -> Touched {
    let memory = engine.map(len, backing, options)?;
    let begin = Instant::now();
    for &page in order {
        let mut word = [0; 8];
        memory.read_at(page * PAGE, &mut word)?;
        assert_eq!(u64::from_ne_bytes(word), page);
    }
    Ok((begin.elapsed(), memory.stats().faults))
}

fn plainly(memory: &Mapping, order: &[u64]) -> Touched {
    let begin = Instant::now();
    for &page in order {
        let mut word = [0; 8];
        memory.read_at(page * PAGE, &mut word)?;
        assert_eq!(u64::from_ne_bytes(word), page);
    }
    Ok((begin.elapsed(), 0))
}

fn measure(
    what: &str,
    order: &[u64],
    mut run: impl FnMut() -> Touched,
) -> Result<(), Box<dyn Error>> {
    let mut times = Vec::new();
    let mut faults = 0;
    for _ in 0..ROUNDS {
        let (time, told) = run()?;
        times.push(time.as_nanos() / order.len() as u128);
        faults = told;
    }
    times.sort_unstable();
    println!("{what:<44} {:>7} ({:>6})  {faults:>6}", times[ROUNDS / 2], times[0]);
    Ok(())
}
