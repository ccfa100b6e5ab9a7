//! Records the faults of lazily mapped memory into a file that `uzone report` shows.
//!
//! `cargo run --release -p uzone-report --example trace -- faults.json`
//!
//! A file's bytes are stood in for by a function that takes half a millisecond for one page in sixteen,
//! as a disk would. They are read in order, then here and there, then written to.

use std::error::Error;
use std::path::Path;
use std::sync::Arc;
use std::thread::sleep;
use std::time::Duration;

use uzone_fault::{BackingError, Engine, EngineOptions, FunctionBacking, LazyOptions};
use uzone_pages::{ByteLen, PageSize};
use uzone_report::{Machine, Trace};

const LEN: ByteLen = ByteLen::mib(64);

fn main() -> Result<(), Box<dyn Error>> {
    let Some(path) = std::env::args_os().nth(1) else {
        return Err("usage: trace FILE".into());
    };
    let engine = Engine::with(EngineOptions::default())?;
    let backing = FunctionBacking::slow(|offset, pages: &mut [u8]| -> Result<(), BackingError> {
        if (offset >> 16) % 16 == 3 {
            sleep(Duration::from_micros(500));
        }
        pages.fill(offset.to_le_bytes()[2]);
        Ok(())
    });
    let options = LazyOptions::default().trace(1 << 20);
    let memory = engine.map(LEN, Arc::new(backing), &options)?;
    let mut byte = [0];
    for offset in (0..LEN.get() / 2).step_by(4096) {
        memory.read_at(offset, &mut byte)?;
    }
    let mut at = 12345_u64;
    for _ in 0..2000 {
        at = at.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        memory.read_at((at >> 20) % LEN.get(), &mut byte)?;
    }
    let (records, lost) = memory.take_trace();
    let machine = Machine { cpu: "this machine".into(), ..Machine::default() };
    let trace = Trace::new(machine, PageSize::KIB_4, LEN, &records, lost, &memory.latencies());
    let mut text = Vec::new();
    trace.write_to(&mut text)?;
    uzone_report::replace(Path::new(&path), &text)?;
    Ok(())
}
