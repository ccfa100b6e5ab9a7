//! The host side of a key-value cache: sessions that the accelerator has no room for are offloaded to host memory, block by
//! block, and fetched back when they go on. No `unsafe`.
//!
//! `cargo run --release -p uzone-hostpool --example kv_offload -- 1G cuda`
//!
//! The pool is usable at once: the first session is offloaded while the pool still fills itself. The accelerator is played
//! by ordinary memory here; with one, `Block::addr` is what its copies take. Each session's bytes are checked when
//! they come back, and no session finds a byte of another in a block that it takes. Prints the rates and the report.

use std::collections::HashMap;
use std::error::Error;
use std::time::{Duration, Instant};

use uzone_hostpool::{Block, HostPool, HostPoolError, HostPoolOptions, Registration};
use uzone_pages::ByteLen;

type Outcome<T> = Result<T, Box<dyn Error>>;

const BLOCK: ByteLen = ByteLen::mib(2);
const SESSION_BLOCKS: usize = 4;
const ROUNDS: u64 = 400;
const WAIT: Duration = Duration::from_secs(10);

/// A session that was offloaded: its blocks, and the seed of its bytes.
struct Session {
    blocks: Vec<Block>,
    seed: u8,
}

/// The accelerator's memory of one block.
fn device_block(seed: u8, index: usize) -> Vec<u8> {
    let first = seed.wrapping_mul(31).wrapping_add(u8::try_from(index).unwrap_or(0));
    vec![first | 1; usize::try_from(BLOCK.get()).unwrap_or(0)]
}

/// The sessions in host memory, the oldest of which makes room.
struct Cache {
    pool: HostPool,
    sessions: HashMap<u64, Session>,
    /// Session numbers, oldest first.
    order: Vec<u64>,
    evicted: usize,
}

impl Cache {
    fn offload(&mut self, number: u64, seed: u8) -> Outcome<()> {
        let mut blocks = Vec::new();
        while blocks.len() < SESSION_BLOCKS {
            match self.pool.take(WAIT) {
                Ok(block) => blocks.push(block),
                Err(HostPoolError::Exhausted { .. }) if !self.order.is_empty() => {
                    let oldest = self.order.remove(0);
                    self.sessions.remove(&oldest); // its blocks go back
                    self.evicted += 1;
                }
                Err(error) => return Err(error.into()),
            }
        }
        let mut head = [1; 64];
        for (index, block) in blocks.iter().enumerate() {
            block.read_at(0, &mut head)?;
            if head != [0; 64] {
                return Err(format!("{block:?} has bytes of another session").into());
            }
            block.write_at(0, &device_block(seed, index))?;
        }
        self.sessions.insert(number, Session { blocks, seed });
        self.order.push(number);
        Ok(())
    }

    /// Fetches a session back, if it is still there, and gives its blocks back.
    fn fetch(&mut self, number: u64) -> Outcome<bool> {
        let Some(session) = self.sessions.remove(&number) else { return Ok(false) };
        self.order.retain(|other| *other != number);
        let mut bytes = vec![0; usize::try_from(BLOCK.get())?];
        for (index, block) in session.blocks.iter().enumerate() {
            block.read_at(0, &mut bytes)?;
            if bytes != device_block(session.seed, index) {
                return Err(format!("session {number} came back with other bytes").into());
            }
        }
        Ok(true)
    }
}

fn main() -> Outcome<()> {
    let size = std::env::args().nth(1).unwrap_or_else(|| "256M".to_owned());
    let registration = match std::env::args().nth(2).as_deref() {
        None | Some("none") => Registration::None,
        Some("cuda") => Registration::Cuda,
        Some("hip") => Registration::Hip,
        Some("mlock") => Registration::Locked,
        Some(other) => return Err(format!("none, cuda, hip or mlock, not {other}").into()),
    };
    let started = Instant::now();
    let options = HostPoolOptions::default().block(BLOCK).register(registration);
    let pool = HostPool::open(size.parse()?, options)?;
    let mut cache = Cache { pool, sessions: HashMap::new(), order: Vec::new(), evicted: 0 };
    cache.offload(0, 7)?;
    println!("the first session was offloaded {:.1?} after the start", started.elapsed());

    let mut random = fastrand::Rng::with_seed(1);
    let (mut fetched, mut missed) = (0, 0);
    let started = Instant::now();
    for number in 1..=ROUNDS {
        cache.offload(number, random.u8(..))?;
        if random.bool() {
            let one = random.u64(..=number);
            *if cache.fetch(one)? { &mut fetched } else { &mut missed } += 1;
        }
    }
    let moved = (ROUNDS + fetched) * SESSION_BLOCKS as u64 * BLOCK.get();
    let micros = u64::try_from(started.elapsed().as_micros())?.max(1);
    let rate = ByteLen::new(moved / micros * 1_000_000);
    println!("{ROUNDS} sessions offloaded, {fetched} fetched, {missed} gone by then; {rate}/s");
    println!("{} were evicted; {:?}", cache.evicted, cache.pool.stats());
    cache.pool.wait_ready(cache.pool.len(), Duration::from_secs(60))?;
    println!("{}", cache.pool.report());
    Ok(())
}
