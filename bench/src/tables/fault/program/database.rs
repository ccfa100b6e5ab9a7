//! SQLite, which reads a database through a VFS whose file is memory.
//!
//! SQLite keeps 64 pages of its own, so that it reads the others again. The database is that of a shop: sales
//! in the order in which they came, of customers at random, with an index of each customer's. The queries are a
//! mix: by key, by index, a join, and parts of the tables in order.

use std::io;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rusqlite::{Connection, OpenFlags};
use sqlite_vfs::wip::{WalIndex, WalIndexLock};
use sqlite_vfs::{DatabaseHandle, LockKind, OpenKind, OpenOptions, Vfs};
use uzone_pages::ByteLen;

use super::super::source::Source;
use super::{Answers, Memory, Program};
use crate::harness::Result;

pub(super) const TABLE: &str = "fault-program-sqlite";

/// What the VFS is called.
const VFS: &str = "uzone-bench";

/// How much of the database a sale takes, with its share of the index and its customer.
const SALE: u64 = 88;

const SCHEMA: &str = "
    PRAGMA page_size = 4096;
    CREATE TABLE customer (id INTEGER PRIMARY KEY, city INTEGER, name TEXT);
    CREATE TABLE sale (id INTEGER PRIMARY KEY, customer INTEGER, cents INTEGER, note TEXT);
    BEGIN;";

/// What is asked; ?1 is how many sales there are, and a fiftieth of it how many customers.
const QUERIES: [&str; 6] = [
    "WITH RECURSIVE pick(n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM pick WHERE n < ?1 / 500)
     SELECT sum(cents) || max(note) FROM pick CROSS JOIN sale ON sale.id = 1 + n * 2654435761 % ?1",
    "WITH RECURSIVE pick(n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM pick WHERE n < ?1 / 50000)
     SELECT sum(cents) || max(note) FROM pick
     CROSS JOIN sale ON customer = 1 + n * 2654435761 % (?1 / 50)",
    "SELECT count(*) || ' ' || sum(cents * length(name)) FROM customer
     CROSS JOIN sale ON sale.customer = customer.id WHERE city = 17 AND customer.id <= ?1 / 100",
    "SELECT group_concat(note, '|') FROM
     (SELECT note FROM sale WHERE id > ?1 - ?1 / 10 ORDER BY cents DESC, id LIMIT 10)",
    "SELECT sum(cents) || ' ' || sum(length(note)) FROM sale WHERE id BETWEEN ?1 / 4 AND ?1 / 3",
    "SELECT group_concat(city || ':' || customers, ' ') FROM
     (SELECT city, count(*) AS customers FROM customer WHERE id <= ?1 GROUP BY city ORDER BY 2 DESC, 1 LIMIT 10)",
];

/// Makes a database of about `size`.
pub(super) fn program(directory: &Path, size: ByteLen) -> Result<Program<'static>> {
    let sales = i64::try_from(size.get() / SALE).unwrap_or(i64::MAX);
    let mut connection = Connection::open_in_memory()?;
    connection.execute_batch(SCHEMA)?;
    fill(&connection, sales)?;
    connection.execute_batch("COMMIT; CREATE INDEX of_customer ON sale (customer);")?;
    let expected = answers(&connection, sales)?;
    let file = Source::of(directory, &connection.serialize("main")?)?;
    let title = format!("SQLite, {} queries of a database of {:.1}", QUERIES.len(), file.len);
    let len = file.len.get();
    let ask = Box::new(move |memory| ask(memory, len, sales));
    Ok(Program { table: TABLE, title, file, expected, ask })
}

fn fill(connection: &Connection, sales: i64) -> Result {
    let mut random = fastrand::Rng::with_seed(0x73_71_6c);
    let customers = (sales / 50).max(1);
    let mut customer = connection.prepare("INSERT INTO customer (city, name) VALUES (?1, ?2)")?;
    for number in 1..=customers {
        customer
            .execute((random.i64(0..100), format!("customer {number} {:x}", random.u32(..))))?;
    }
    let mut sale =
        connection.prepare("INSERT INTO sale (customer, cents, note) VALUES (?1, ?2, ?3)")?;
    for number in 1..=sales {
        let note = format!("sale {number} of {:x}, and what the customer said", random.u64(..));
        sale.execute((random.i64(1..=customers), random.i64(0..100_000), note))?;
    }
    Ok(())
}

fn answers(connection: &Connection, sales: i64) -> Result<Answers> {
    let answer = |query| Ok((query, connection.query_row(query, [sales], |row| row.get(0))?));
    QUERIES.into_iter().map(answer).collect()
}

/// Opens the database that memory holds, and asks it everything.
fn ask(memory: Memory, len: u64, sales: i64) -> Result<Answers> {
    let mut is_registered = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    if !*is_registered {
        sqlite_vfs::register(VFS, MemoryVfs, false)?;
        *is_registered = true;
    }
    *FILE.lock().unwrap_or_else(PoisonError::into_inner) = Some(MemoryFile { memory, len });
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY
        | OpenFlags::SQLITE_OPEN_URI
        | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    // The VFS has no locks, and no journal to look for.
    let connection = Connection::open_with_flags_and_vfs("file:shop?immutable=1", flags, VFS)?;
    connection.execute_batch("PRAGMA cache_size = 64; PRAGMA temp_store = MEMORY;")?;
    let answers = answers(&connection, sales)?;
    connection.close().map_err(|(_, error)| error)?;
    Ok(answers)
}

/// Whether the VFS is registered; held while a database is open, because the VFS has one file.
static TURN: Mutex<bool> = Mutex::new(false);
/// The file that the VFS opens next.
static FILE: Mutex<Option<MemoryFile>> = Mutex::new(None);

/// A VFS with one file, which is only read.
struct MemoryVfs;

/// Memory as a file.
struct MemoryFile {
    memory: Memory,
    len: u64,
}

fn read_only<T>() -> io::Result<T> {
    Err(io::ErrorKind::ReadOnlyFilesystem.into())
}

impl Vfs for MemoryVfs {
    type Handle = MemoryFile;

    fn open(&self, _: &str, options: OpenOptions) -> io::Result<MemoryFile> {
        if options.kind != OpenKind::MainDb {
            return read_only();
        }
        let file = FILE.lock().unwrap_or_else(PoisonError::into_inner).take();
        file.ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    fn delete(&self, _: &str) -> io::Result<()> {
        read_only()
    }

    fn exists(&self, _: &str) -> io::Result<bool> {
        Ok(false)
    }

    fn temporary_name(&self) -> String {
        String::new()
    }

    fn random(&self, buffer: &mut [i8]) {
        buffer.fill(0);
    }

    fn sleep(&self, duration: Duration) -> Duration {
        std::thread::sleep(duration);
        duration
    }
}

impl DatabaseHandle for MemoryFile {
    type WalIndex = NoWal;

    fn size(&self) -> io::Result<u64> {
        Ok(self.len)
    }

    fn read_exact_at(&mut self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        if offset + buffer.len() as u64 > self.len {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.memory.read(offset, buffer).map_err(io::Error::other)
    }

    fn write_all_at(&mut self, _: &[u8], _: u64) -> io::Result<()> {
        read_only()
    }

    fn sync(&mut self, _: bool) -> io::Result<()> {
        Ok(())
    }

    fn set_len(&mut self, _: u64) -> io::Result<()> {
        read_only()
    }

    fn lock(&mut self, _: LockKind) -> io::Result<bool> {
        Ok(true)
    }

    fn reserved(&mut self) -> io::Result<bool> {
        Ok(false)
    }

    fn current_lock(&self) -> io::Result<LockKind> {
        Ok(LockKind::None)
    }

    fn wal_index(&self, _: bool) -> io::Result<NoWal> {
        read_only()
    }
}

/// The index of a log that no database here has.
struct NoWal;

impl WalIndex for NoWal {
    fn enabled() -> bool {
        false
    }

    fn map(&mut self, _: u32) -> io::Result<[u8; 32768]> {
        read_only()
    }

    fn lock(&mut self, _: std::ops::Range<u8>, _: WalIndexLock) -> io::Result<bool> {
        read_only()
    }

    fn delete(self) -> io::Result<()> {
        read_only()
    }
}
