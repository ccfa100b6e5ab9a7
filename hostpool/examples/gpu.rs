//! The figures of a pool on a machine with CUDA, as JSON: `scripts/gpu.sh` runs it.
//!
//! It loads the driver as the pool does (`libcuda.so.1`, or the library in `UZONE_CUDA_LIBRARY`), and retains the primary
//! context of the first device by itself, as a program with a device has one already.
//!
//! | table | question |
//! |---|---|
//! | `ready` | when the first block and when all of a pool are ready, against populating alone, registering alone, and `cuMemHostAlloc` |
//! | `disturbance` | how long a copy of another thread, and a question of another process, wait while present memory is registered |
//! | `pool_under_load` | the same while a pool fills itself, and while it is dropped |
//! | `fragmented` | how fast a pool is populated on a host whose free memory is single small pages, without a driver |
//! | `copies` | copies of 2 MiB at random, against `cuMemHostAlloc` |
//!
//! `short` as an argument runs all of it at a fraction, for a driver of the tests; `host` runs `fragmented` alone, which needs no
//! driver.
//!
//! Unsafe: the calls of the driver.
#![allow(clippy::cast_precision_loss, reason = "figures with three digits")]

use std::error::Error;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use libloading::Library;
use uzone_hostpool::{Budget, HostPool, HostPoolOptions, Pages, Registration};
use uzone_os::{Anonymous, HugeAdvice, Mapping};
use uzone_pages::ByteLen;
use uzone_zone::{Huge, PopulateOptions, Region};

type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

const GIB: usize = 1 << 30;
const MIB: usize = 1 << 20;
const COPY: usize = 2 * MIB;

/// The driver, and a context of it that is current on the thread that loaded it.
struct Cuda {
    driver: Library,
    context: *mut c_void,
}

// SAFETY: the driver takes calls of any thread, and a context belongs to the process.
unsafe impl Sync for Cuda {}

/// Calls a function of the driver: its name, the types of its arguments, and they.
macro_rules! call {
    ($library:expr, $name:literal, ($($kind:ty),*), $($argument:expr),*) => {{
        type Function = unsafe extern "C" fn($($kind),*) -> c_int;
        // SAFETY: the documentation of the driver gives the function this type.
        let function = unsafe { $library.get::<Function>(concat!($name, "\0").as_bytes()) }?;
        // SAFETY: the pointers are of memory that lives over the call, and has the length that the call gets.
        match unsafe { function($($argument),*) } {
            0 => Ok::<(), Box<dyn Error + Send + Sync>>(()),
            code => Err(format!("{} failed: {code}", $name).into()),
        }
    }};
}

impl Cuda {
    fn load() -> Outcome<Self> {
        let name = std::env::var("UZONE_CUDA_LIBRARY").unwrap_or("libcuda.so.1".to_owned());
        // SAFETY: it is the driver of the machine, whose initialisers any thread may run.
        let library = unsafe { Library::new(&name) }
            .map_err(|error| format!("no driver of CUDA on this machine: {name}: {error}"))?;
        let (mut device, mut context) = (0, std::ptr::null_mut());
        call!(library, "cuInit", (c_uint), 0)?;
        call!(library, "cuDeviceGet", (*mut c_int, c_int), &raw mut device, 0)?;
        call!(
            library,
            "cuDevicePrimaryCtxRetain",
            (*mut *mut c_void, c_int),
            &raw mut context,
            device
        )?;
        let cuda = Self { driver: library, context };
        cuda.make_current()?;
        Ok(cuda)
    }

    fn make_current(&self) -> Outcome<()> {
        call!(self.driver, "cuCtxSetCurrent", (*mut c_void), self.context)
    }

    fn device_name(&self) -> Outcome<String> {
        let mut name = [0_u8; 128];
        let to = name.as_mut_ptr().cast::<c_char>();
        call!(self.driver, "cuDeviceGetName", (*mut c_char, c_int, c_int), to, 127, 0)?;
        let end = name.iter().position(|byte| *byte == 0).unwrap_or(0);
        Ok(String::from_utf8_lossy(&name[..end]).into_owned())
    }

    fn device_memory(&self, len: usize) -> Outcome<usize> {
        let mut start = 0;
        call!(self.driver, "cuMemAlloc_v2", (*mut usize, usize), &raw mut start, len)?;
        Ok(start)
    }

    fn host_alloc(&self, len: usize) -> Outcome<usize> {
        let mut start = std::ptr::null_mut();
        let to = &raw mut start;
        call!(self.driver, "cuMemHostAlloc", (*mut *mut c_void, usize, c_uint), to, len, 1)?;
        Ok(start.expose_provenance())
    }

    fn host_free(&self, start: usize) -> Outcome<()> {
        let start = std::ptr::with_exposed_provenance_mut(start);
        call!(self.driver, "cuMemFreeHost", (*mut c_void), start)
    }

    fn register(&self, start: usize, len: usize) -> Outcome<()> {
        let start = std::ptr::with_exposed_provenance_mut(start);
        call!(self.driver, "cuMemHostRegister_v2", (*mut c_void, usize, c_uint), start, len, 1)
    }

    fn unregister(&self, start: usize) -> Outcome<()> {
        let start = std::ptr::with_exposed_provenance_mut(start);
        call!(self.driver, "cuMemHostUnregister", (*mut c_void), start)
    }

    fn stream(&self) -> Outcome<*mut c_void> {
        let mut stream = std::ptr::null_mut();
        // Not ordered with the default stream.
        call!(self.driver, "cuStreamCreate", (*mut *mut c_void, c_uint), &raw mut stream, 1)?;
        Ok(stream)
    }

    fn synchronize(&self, stream: *mut c_void) -> Outcome<()> {
        call!(self.driver, "cuStreamSynchronize", (*mut c_void), stream)
    }

    fn to_device(&self, to: usize, from: usize, stream: *mut c_void) -> Outcome<()> {
        let from = std::ptr::with_exposed_provenance(from);
        call!(
            self.driver,
            "cuMemcpyHtoDAsync_v2",
            (usize, *const c_void, usize, *mut c_void),
            to,
            from,
            COPY,
            stream
        )
    }

    fn to_host(&self, to: usize, from: usize, stream: *mut c_void) -> Outcome<()> {
        let to = std::ptr::with_exposed_provenance_mut(to);
        call!(
            self.driver,
            "cuMemcpyDtoHAsync_v2",
            (*mut c_void, usize, usize, *mut c_void),
            to,
            from,
            COPY,
            stream
        )
    }

    fn free_memory(&self) -> Outcome<usize> {
        let (mut left, mut all) = (0, 0);
        let (one, two) = (&raw mut left, &raw mut all);
        call!(self.driver, "cuMemGetInfo_v2", (*mut usize, *mut usize), one, two)?;
        Ok(left)
    }
}

/// Another process that asks the driver again and again.
struct Asker {
    child: Child,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Asker {
    fn start() -> Outcome<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .arg("ask")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let (orders, answers) = (child.stdin.take(), child.stdout.take());
        let orders = orders.ok_or("no pipe")?;
        let answers = BufReader::new(answers.ok_or("no pipe")?);
        let mut asker = Self { child, orders, answers };
        asker.longest()?; // it has its context now
        Ok(asker)
    }

    /// Returns its longest wait since this was called last, in milliseconds.
    fn longest(&mut self) -> Outcome<f64> {
        self.orders.write_all(b"\n")?;
        let mut line = String::new();
        self.answers.read_line(&mut line)?;
        Ok(line.trim().parse()?)
    }

    fn run() -> Outcome<()> {
        let cuda = Cuda::load()?;
        let longest = AtomicU64::new(0);
        std::thread::scope(|scope| {
            scope.spawn(|| -> Outcome<()> {
                for line in std::io::stdin().lines() {
                    line?;
                    println!("{}", longest.swap(0, Ordering::Relaxed) as f64 / 1e6);
                }
                std::process::exit(0);
            });
            loop {
                let started = Instant::now();
                cuda.free_memory()?;
                let took = u64::try_from(started.elapsed().as_nanos())?;
                longest.fetch_max(took, Ordering::Relaxed);
                std::thread::sleep(Duration::from_micros(50));
            }
        })
    }
}

/// Runs `work` while another thread copies 2 MiB again and again and another process asks the driver. Returns how long the
/// longest copy and the longest question took, in milliseconds, and what `work` returned.
fn disturbed<T>(
    cuda: &Cuda,
    device: usize,
    asker: &mut Asker,
    work: impl FnOnce() -> Outcome<T>,
) -> Outcome<(f64, f64, T)> {
    let (source, is_done) = (cuda.host_alloc(COPY)?, AtomicBool::new(false));
    asker.longest()?;
    let answer = std::thread::scope(|scope| {
        let copier = scope.spawn(|| -> Outcome<Duration> {
            cuda.make_current()?;
            let (stream, mut longest) = (cuda.stream()?, Duration::ZERO);
            while !is_done.load(Ordering::Relaxed) {
                let started = Instant::now();
                cuda.to_device(device, source, stream)?;
                cuda.synchronize(stream)?;
                longest = longest.max(started.elapsed());
            }
            Ok(longest)
        });
        std::thread::sleep(Duration::from_millis(20));
        let answer = work();
        is_done.store(true, Ordering::Relaxed);
        let longest = copier.join().map_err(|_| "the copying thread panicked")??;
        Ok::<_, Box<dyn Error + Send + Sync>>((longest.as_secs_f64() * 1e3, answer?))
    });
    let question = asker.longest()?;
    cuda.host_free(source)?;
    let (copy, answer) = answer?;
    Ok((copy, question, answer))
}

fn options(pages: Pages) -> HostPoolOptions {
    HostPoolOptions::default().pages(pages)
}

fn seconds(started: Instant) -> f64 {
    started.elapsed().as_secs_f64()
}

fn gb_per_s(bytes: usize, seconds: f64) -> f64 {
    bytes as f64 / 1e9 / seconds
}

/// When a pool of `len` bytes is ready, against its parts alone.
fn ready(cuda: &Cuda, len: usize, pages: Pages, allocates: bool) -> Outcome<String> {
    const LONG: Duration = Duration::from_secs(300);
    let size = ByteLen::new(len as u64);
    // All CPUs, as for the pool.
    let alone = HostPool::open(size, options(pages).budget(Budget::Eager))?;
    let populated = alone.report().all_ready.ok_or("not ready")?.as_secs_f64();
    let started = Instant::now();
    cuda.register(alone.addr().get(), len)?;
    let registered = seconds(started);
    cuda.unregister(alone.addr().get())?;
    drop(alone);

    let started = Instant::now();
    let pool = HostPool::open(size, options(pages).register(Registration::Cuda))?;
    let opened = seconds(started);
    let block = pool.take(LONG)?;
    let first = seconds(started);
    pool.wait_ready(size, LONG)?;
    let all = seconds(started);
    let report = pool.report();
    drop(block);
    let started = Instant::now();
    drop(pool);
    let dropped = seconds(started);

    let mut allocated = "null".to_owned();
    if allocates {
        let started = Instant::now();
        let start = cuda.host_alloc(len)?;
        allocated = format!("{:.3}", seconds(started));
        cuda.host_free(start)?;
    }
    let ratio = all / f64::max(populated, registered);
    Ok(format!(
        "{{\"gib\": {}, \"pages\": \"{pages:?}\", \"open_ms\": {:.2}, \"first_block_ms\": {:.2}, \"all_ready_s\": {all:.3}, \"populate_alone_s\": {populated:.3}, \"register_alone_s\": {registered:.3}, \"ratio_to_larger\": {ratio:.3}, \"cuMemHostAlloc_s\": {allocated}, \"drop_s\": {dropped:.3}, \"populating_s\": {:.3}, \"registering_s\": {:.3}, \"longest_piece_ms\": {:.2}, \"pieces\": {}, \"huge_gib\": {:.1}}}",
        len / GIB,
        opened * 1e3,
        first * 1e3,
        report.populating.as_secs_f64(),
        report.registering.as_secs_f64(),
        report.longest_piece.as_secs_f64() * 1e3,
        report.pieces,
        report.huge.map_or(0.0, |huge| huge.get() as f64 / GIB as f64)
    ))
}

/// Registers present memory in pieces, and returns how long that took.
fn register_in_pieces(
    cuda: &Cuda,
    start: usize,
    len: usize,
    piece: usize,
    pause: impl Fn(Duration) -> Duration,
) -> Outcome<f64> {
    let started = Instant::now();
    for at in (0..len).step_by(piece) {
        let began = Instant::now();
        cuda.register(start + at, piece.min(len - at))?;
        let pause = pause(began.elapsed());
        if !pause.is_zero() {
            std::thread::sleep(pause);
        }
    }
    Ok(seconds(started))
}

fn disturbance(
    cuda: &Cuda,
    device: usize,
    asker: &mut Asker,
    len: usize,
    pages: Pages,
) -> Outcome<Vec<String>> {
    let size = ByteLen::new(len as u64);
    let memory = HostPool::open(size, options(pages).budget(Budget::Eager))?;
    let start = memory.addr().get();
    let micros = Duration::from_micros;
    let fixed = |pause: u64| move |_: Duration| micros(pause);
    let adaptive = |least: u64| move |took: Duration| (took / 10).max(micros(least));
    let mut rows = Vec::new();
    let mut row = |name: &str, piece: usize, pause: &dyn Fn(Duration) -> Duration| {
        let (copy, question, took) =
            disturbed(cuda, device, asker, || register_in_pieces(cuda, start, len, piece, pause))?;
        for at in (0..len).step_by(piece) {
            cuda.unregister(start + at)?;
        }
        rows.push(format!(
            "{{\"row\": \"{name}\", \"pages\": \"{pages:?}\", \"gb_per_s\": {:.1}, \"longest_copy_ms\": {copy:.2}, \"longest_question_ms\": {question:.2}}}",
            gb_per_s(len, took)
        ));
        Ok::<(), Box<dyn Error + Send + Sync>>(())
    };
    row("at once", len, &fixed(0))?;
    row("64 MiB, adaptive of 0.125 ms at least (the default)", 64 * MIB, &adaptive(125))?;
    row("64 MiB, adaptive of 0.25 ms at least", 64 * MIB, &adaptive(250))?;
    row("128 MiB, adaptive of 0.25 ms at least", 128 * MIB, &adaptive(250))?;
    row("64 MiB, none", 64 * MIB, &fixed(0))?;
    Ok(rows)
}

fn pool_under_load(
    cuda: &Cuda,
    device: usize,
    asker: &mut Asker,
    len: usize,
    name: &str,
    options: HostPoolOptions,
) -> Outcome<String> {
    let size = ByteLen::new(len as u64);
    let (copy, question, (took, pool)) = disturbed(cuda, device, asker, || {
        let started = Instant::now();
        let pool = HostPool::open(size, options.register(Registration::Cuda))?;
        pool.wait_ready(size, Duration::MAX)?;
        Ok((seconds(started), pool))
    })?;
    let longest = pool.report().longest_piece.as_secs_f64() * 1e3;
    let (drop_copy, drop_question, dropped) = disturbed(cuda, device, asker, || {
        let started = Instant::now();
        drop(pool);
        Ok(seconds(started))
    })?;
    Ok(format!(
        "{{\"row\": \"{name}\", \"gb_per_s\": {:.1}, \"longest_copy_ms\": {copy:.2}, \"longest_question_ms\": {question:.2}, \"longest_piece_ms\": {longest:.2}, \"drop_s\": {dropped:.3}, \"drop_longest_copy_ms\": {drop_copy:.2}, \"drop_longest_question_ms\": {drop_question:.2}}}",
        gb_per_s(len, took)
    ))
}

/// Copies blocks of 2 MiB at random, and returns GB/s to the device, from it, and both ways at once.
fn copies(cuda: &Cuda, device: usize, start: usize, len: usize) -> Outcome<[f64; 3]> {
    let (up, down) = (cuda.stream()?, cuda.stream()?);
    let mut random = fastrand::Rng::with_seed(7);
    let mut rates = [0.0; 3];
    let count = (len / COPY).min(2000);
    for (rate, ways) in rates.iter_mut().zip([(true, false), (false, true), (true, true)]) {
        for round in 0..2 {
            let started = Instant::now();
            for _ in 0..count {
                let mut block = || start + random.usize(..len / COPY) * COPY;
                if ways.0 {
                    cuda.to_device(device, block(), up)?;
                }
                if ways.1 {
                    cuda.to_host(block(), device + COPY, down)?;
                }
            }
            cuda.synchronize(up)?;
            cuda.synchronize(down)?;
            if round == 1 {
                let ways = usize::from(ways.0) + usize::from(ways.1);
                *rate = gb_per_s(count * ways * COPY, seconds(started));
            }
        }
    }
    Ok(rates)
}

fn row_of_copies(name: &str, [up, down, both]: [f64; 3]) -> String {
    format!(
        "{{\"row\": \"{name}\", \"to_device_gb_per_s\": {up:.1}, \"to_host_gb_per_s\": {down:.1}, \"both_gb_per_s\": {both:.1}}}"
    )
}

/// Takes almost all memory in small pages and gives every other one back.
fn fragment(len: u64) -> Outcome<Mapping> {
    let how = Anonymous { huge: HugeAdvice::Never, ..Anonymous::default() };
    let memory = Mapping::anonymous(ByteLen::new(len), how)?;
    let threads = std::thread::available_parallelism()?.get() as u64;
    let share = len / threads / 8192 * 8192;
    std::thread::scope(|scope| {
        let work = |index: u64| {
            let memory = &memory;
            scope.spawn(move || -> Outcome<()> {
                memory.populate(index * share..(index + 1) * share)?;
                for page in (index * share..(index + 1) * share).step_by(8192) {
                    memory.discard(page..page + 4096)?;
                }
                Ok(())
            })
        };
        let all: Vec<_> = (0..threads).map(work).collect();
        all.into_iter().try_for_each(|one| one.join().map_err(|_| "a thread panicked")?)
    })?;
    Ok(memory)
}

/// How fast memory is populated on a fragmented host.
fn fragmented(len: usize, is_short: bool) -> Outcome<Vec<String>> {
    let size = ByteLen::new(len as u64);
    let available = uzone_os::memory::available(&uzone_os::SystemRoot::host())?.bytes.get();
    let hog = if is_short { 64 << 20 } else { available.saturating_sub(6 << 30) };
    let started = Instant::now();
    let memory = fragment(hog)?;
    let mut rows = vec![format!(
        "{{\"row\": \"fragmenting\", \"bytes\": {hog}, \"seconds\": {:.1}}}",
        seconds(started)
    )];
    let mut row = |name: &str, huge: Huge| {
        let region = Region::anonymous(size)?;
        let (begun, cancel) = (Instant::now(), std::sync::Arc::<AtomicBool>::default());
        let stop = cancel.clone();
        let options =
            PopulateOptions::default().huge(huge).chunk(ByteLen::mib(2)).cancel(cancel).on_present(
                move |_| {
                    stop.store(begun.elapsed() >= Duration::from_secs(25), Ordering::Relaxed);
                },
            );
        let populated = region.populate(0..size.get(), &options)?;
        rows.push(format!(
            "{{\"row\": \"{name}\", \"gb_per_s\": {:.2}, \"huge_gib\": {:.2}, \"base_gib\": {:.2}, \"is_compacting\": {}}}",
            populated.done.get() as f64 / 1e9 / populated.elapsed.as_secs_f64(),
            populated.huge.get() as f64 / GIB as f64,
            populated.base.get() as f64 / GIB as f64,
            populated.is_compacting
        ));
        Ok::<(), Box<dyn Error + Send + Sync>>(())
    };
    // The first makes the memory warm in the host of a virtual machine.
    for _ in 0..3 {
        row("transparent, watched (the default of a pool)", Huge::Watched)?;
        row("small pages", Huge::Never)?;
    }
    drop(memory);
    Ok(rows)
}

fn main() -> Outcome<()> {
    let argument = std::env::args().nth(1);
    let is_short = argument.as_deref() == Some("short");
    match argument.as_deref() {
        Some("ask") => return Asker::run(),
        Some("host") => {
            let rows = fragmented(4 * GIB, is_short)?;
            println!("[\n  {}\n]", rows.join(",\n  "));
            return Ok(());
        }
        _ => {}
    }
    let gib = if is_short { 4 * MIB } else { GIB };
    let cuda = Cuda::load()?;
    let device = cuda.device_memory(2 * COPY)?;
    println!("{{\"device\": \"{}\",", cuda.device_name()?);
    println!("\"kernel\": \"{}\",", uzone_os::probe::kernel_release());
    println!("\"cpus\": {},", std::thread::available_parallelism()?);

    let huge = Pages::Transparent;
    let mut rows = Vec::new();
    // The first makes the memory warm in the host of a virtual machine.
    for (size, rounds) in [(64, 3), (4, 2), (16, 2)] {
        for round in 0..rounds {
            rows.push(ready(&cuda, size * gib, huge, round == 0 && size <= 16)?);
        }
    }
    rows.push(ready(&cuda, 16 * gib, Pages::Small, false)?);
    println!("\"ready\": [\n  {}\n],", rows.join(",\n  "));

    let mut asker = Asker::start()?;
    let rows = disturbance(&cuda, device, &mut asker, 24 * gib, huge)?;
    println!("\"disturbance\": [\n  {}\n],", rows.join(",\n  "));

    let mut rows = Vec::new();
    for (name, options) in [
        ("default", options(huge)),
        ("default, small pages", options(Pages::Small)),
        ("a quarter of the CPUs left alone", options(huge).spare_cpus(25)),
        ("half of the CPUs left alone", options(huge).spare_cpus(50)),
    ] {
        rows.push(pool_under_load(&cuda, device, &mut asker, 24 * gib, name, options)?);
    }
    println!("\"pool_under_load\": [\n  {}\n],", rows.join(",\n  "));
    drop(asker.orders);
    asker.child.wait()?;

    let len = 4 * gib;
    let options = options(huge).register(Registration::Cuda).budget(Budget::Eager);
    let pool = HostPool::open(ByteLen::new(len as u64), options)?;
    let theirs = cuda.host_alloc(len)?;
    let mut rows = Vec::new();
    for _ in 0..2 {
        rows.push(row_of_copies("pool", copies(&cuda, device, pool.addr().get(), len)?));
        rows.push(row_of_copies("cuMemHostAlloc", copies(&cuda, device, theirs, len)?));
    }
    cuda.host_free(theirs)?;
    println!("\"copies\": [\n  {}\n],", rows.join(",\n  "));
    drop(pool);

    let rows = fragmented(16 * gib, is_short);
    let rows = rows.unwrap_or_else(|error| vec![format!("\"{error}\"")]);
    println!("\"fragmented\": [\n  {}\n]}}", rows.join(",\n  "));
    Ok(())
}
