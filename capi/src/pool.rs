//! Pools of host memory for accelerators.

use std::error::Error;
use std::ffi::{c_char, c_int, c_void};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use uzone_os::Addr;
use uzone_rust::hostpool::{
    AttachedPool, Budget, HostPool, HostPoolOptions, HostPoolReport, HostPoolStats, Pages, Pause,
    Peer, Place, Register, Registration, Zeroing, leaked,
};
use uzone_rust::{ByteLen, PageSize};

use crate::argument::{Structure, answer, given, options, timeout};
use crate::error::{CallerError, EIO, ENOTSUP, Failure, call};

/// The memory is not registered, or by the functions of the options.
pub const UZONE_REGISTER_NONE: u32 = 0;
/// The driver of CUDA registers it, in the context that is current on the calling thread.
pub const UZONE_REGISTER_CUDA: u32 = 1;
/// The driver of HIP registers it, in the context that is current on the calling thread.
pub const UZONE_REGISTER_HIP: u32 = 2;
/// mlock(2) keeps it present.
pub const UZONE_REGISTER_MLOCK: u32 = 3;

/// Memory is made present and registered by threads of the pool, while blocks are handed out already.
pub const UZONE_START_BACKGROUND: u32 = 0;
/// All memory is made present and registered before uzone_pool_open() returns.
pub const UZONE_START_EAGER: u32 = 1;
/// Each block is made present and registered by the thread that takes it first.
pub const UZONE_START_ON_DEMAND: u32 = 2;

/// A block that had an owner is cleared ahead of need, by a thread of the pool.
pub const UZONE_CLEAR_AHEAD: u32 = 0;
/// It is cleared by the thread that takes it.
pub const UZONE_CLEAR_ON_TAKE: u32 = 1;
/// It is cleared by the thread that gives it back.
pub const UZONE_CLEAR_ON_RELEASE: u32 = 2;
/// It is never cleared: it has the bytes of its last owner.
pub const UZONE_CLEAR_NEVER: u32 = 3;

/// Memory comes from the NUMA nodes of the threads that make it present.
pub const UZONE_NODE_ANY: u32 = 0;
/// Memory comes from the node `node` of the options.
pub const UZONE_NODE_ONE: u32 = 1;
/// Memory comes from all nodes in turn, page by page.
pub const UZONE_NODE_INTERLEAVED: u32 = 2;

/// No block is handed out before all are registered, and none if one cannot be.
pub const UZONE_POOL_ALL_OR_NOTHING: u32 = 1;
/// The pool lies in a memory file, to which another process attaches.
pub const UZONE_POOL_SHARED: u32 = 2;

/// A pool of host memory, or the view of another process's pool.
pub struct uzone_pool(Kind);

enum Kind {
    Own(HostPool),
    Attached(AttachedPool),
}

/// A function that registers memory with a device. Threads of the pool call it, and threads that take blocks, one at a time
/// but with UZONE_START_ON_DEMAND. The pages are present. It returns 0, or a negative errno; nothing is registered then.
pub type uzone_register_function =
    Option<unsafe extern "C" fn(user: *mut c_void, address: *mut c_void, len_bytes: u64) -> c_int>;

/// A function that ends the registration that began at `address`. It returns 0, or a negative errno: then the device may
/// still use the memory, so that it stays mapped for as long as the process.
pub type uzone_unregister_function =
    Option<unsafe extern "C" fn(user: *mut c_void, address: *mut c_void) -> c_int>;

/// How a pool is made.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct uzone_pool_options {
    /// The size of this structure.
    pub size: usize,
    /// The bytes of a block, a multiple of a page; 0 is 2 MiB.
    pub block_bytes: u64,
    /// The bytes of a page: 0 for transparent huge pages as far as the host has them, the page size of the host for small
    /// pages, and otherwise the size of pages of the host's hugetlb pool, which are reserved now.
    pub page_bytes: u64,
    /// The most bytes that are registered at a time; 0 is 64 MiB. A run of blocks inside one piece is one registration.
    pub piece_bytes: u64,
    /// The microseconds between two registrations, in which other threads use the driver; 0 is a tenth of the time that
    /// the last one took.
    pub pause_us: u64,
    /// UZONE_REGISTER_NONE, UZONE_REGISTER_CUDA, UZONE_REGISTER_HIP or UZONE_REGISTER_MLOCK.
    pub registration: u32,
    /// UZONE_START_BACKGROUND, UZONE_START_EAGER or UZONE_START_ON_DEMAND.
    pub start: u32,
    /// UZONE_CLEAR_AHEAD, UZONE_CLEAR_ON_TAKE, UZONE_CLEAR_ON_RELEASE or UZONE_CLEAR_NEVER.
    pub clear: u32,
    /// UZONE_NODE_ANY, UZONE_NODE_ONE or UZONE_NODE_INTERLEAVED.
    pub place: u32,
    /// The number of the NUMA node, with UZONE_NODE_ONE.
    pub node: u32,
    /// UZONE_POOL_ALL_OR_NOTHING and UZONE_POOL_SHARED, or 0.
    pub flags: u32,
    /// With UZONE_REGISTER_NONE: the caller's functions, both or none. They may be called until uzone_pool_close() returns.
    pub register_memory: uzone_register_function,
    /// As `register_memory`.
    pub unregister_memory: uzone_unregister_function,
    /// The first argument of both functions.
    pub user: *mut c_void,
}

// SAFETY: A `usize`, numbers of 8 bytes, six of 4 bytes, and three pointers, of which NULL is a value.
unsafe impl Structure for uzone_pool_options {}

/// Blocks in a row that were handed out. This structure never changes.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct uzone_block {
    /// The address of the first byte.
    pub address: *mut c_void,
    /// The bytes of all of them.
    pub len_bytes: u64,
    /// The number of the first block in its pool.
    pub number: u64,
    /// How many blocks there are.
    pub count: u64,
}

/// Numbers of a pool. Times count from the opening of the pool.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct uzone_pool_stats {
    /// The size of this structure, which the caller sets.
    pub size: usize,
    /// The address of the pool: block `n` starts `n * block_bytes` behind it.
    pub address: *mut c_void,
    /// The bytes of the pool.
    pub len_bytes: u64,
    /// The bytes of a block.
    pub block_bytes: u64,
    /// How many blocks there are.
    pub blocks: u64,
    /// The bytes that are present and registered, handed out or not.
    pub ready_bytes: u64,
    /// The bytes in huge pages; 0 before all are present.
    pub huge_bytes: u64,
    /// The bytes in small pages; 0 before all are present.
    pub small_bytes: u64,
    /// How many blocks are handed out. This number and the next seven are 0 for the view of another process's pool.
    pub used: u64,
    /// How many are free and zero.
    pub zero: u64,
    /// How many are free and have to be cleared or made present.
    pub dirty: u64,
    /// How many are being made ready or cleared.
    pub in_work: u64,
    /// How many are bad, and never handed out.
    pub bad: u64,
    /// How many were cleared ahead of need.
    pub cleared_ahead: u64,
    /// How many a taker cleared.
    pub cleared_on_take: u64,
    /// How many were cleared when they were given back.
    pub cleared_on_release: u64,
    /// How many registrations there are.
    pub pieces: u64,
    /// How long memory was made present.
    pub populating_ns: u64,
    /// How long all registrations took, without pauses.
    pub registering_ns: u64,
    /// How long the longest registration took.
    pub longest_piece_ns: u64,
    /// When the first block was ready; 0 before.
    pub first_ready_ns: u64,
    /// When all blocks were ready; 0 before.
    pub all_ready_ns: u64,
    /// The NUMA node that most of the memory is on; -1 if that is not known.
    pub node: i64,
    /// Whether the process that opened the pool is alive.
    pub is_owner_alive: u64,
}

// SAFETY: Numbers of 8 bytes, the first of them the size, and a pointer, of which NULL is a value.
unsafe impl Structure for uzone_pool_stats {}

/// The caller's functions, and the pointer that they want.
struct Caller {
    register: unsafe extern "C" fn(*mut c_void, *mut c_void, u64) -> c_int,
    unregister: unsafe extern "C" fn(*mut c_void, *mut c_void) -> c_int,
    user: *mut c_void,
}

// SAFETY: The caller vouches that threads of the pool may call the functions with the pointer.
unsafe impl Send for Caller {}
// SAFETY: As above.
unsafe impl Sync for Caller {}

fn pointer(addr: Addr) -> *mut c_void {
    std::ptr::with_exposed_provenance_mut(addr.get())
}

impl Register for Caller {
    fn register(&self, start: Addr, len: ByteLen) -> Result<(), Box<dyn Error + Send + Sync>> {
        // SAFETY: The caller vouches for its functions until the pool is closed.
        let code = unsafe { (self.register)(self.user, pointer(start), len.get()) };
        Ok(CallerError::check(code)?)
    }

    fn unregister(&self, start: Addr) -> Result<(), Box<dyn Error + Send + Sync>> {
        // SAFETY: As above.
        let code = unsafe { (self.unregister)(self.user, pointer(start)) };
        Ok(CallerError::check(code)?)
    }
}

fn no_such(field: &str, value: u32) -> Failure {
    Failure::input(format!("{field} {value:#x}: there is no such choice in uzone.h"))
}

fn registration(from: &uzone_pool_options) -> Result<Registration, Failure> {
    let functions = match (from.register_memory, from.unregister_memory) {
        (None, None) => None,
        (Some(register), Some(unregister)) => {
            Some(Arc::new(Caller { register, unregister, user: from.user }))
        }
        _ => return Err(Failure::input("register_memory and unregister_memory go together")),
    };
    match (from.registration, functions) {
        (UZONE_REGISTER_NONE, None) => Ok(Registration::None),
        (UZONE_REGISTER_NONE, Some(functions)) => Ok(Registration::With(functions)),
        (_, Some(_)) => {
            Err(Failure::input("register_memory goes with UZONE_REGISTER_NONE: choose one"))
        }
        (UZONE_REGISTER_CUDA, None) => Ok(Registration::Cuda),
        (UZONE_REGISTER_HIP, None) => Ok(Registration::Hip),
        (UZONE_REGISTER_MLOCK, None) => Ok(Registration::Locked),
        (other, None) => Err(no_such("registration", other)),
    }
}

fn pages(bytes: u64) -> Result<Pages, Failure> {
    if bytes == 0 {
        return Ok(Pages::Transparent);
    }
    let page = PageSize::try_from_bytes(bytes);
    let page = page.map_err(|error| Failure::input(format!("page_bytes: {error}")))?;
    Ok(if page == uzone_os::probe::page_size() { Pages::Small } else { Pages::Hugetlb(page) })
}

impl uzone_pool_options {
    fn into_options(self) -> Result<HostPoolOptions, Failure> {
        let mut how = HostPoolOptions::default().register(registration(&self)?);
        how = how.pages(pages(self.page_bytes)?);
        how = how.budget(match self.start {
            UZONE_START_BACKGROUND => Budget::Background,
            UZONE_START_EAGER => Budget::Eager,
            UZONE_START_ON_DEMAND => Budget::OnDemand,
            other => return Err(no_such("start", other)),
        });
        how = how.zeroing(match self.clear {
            UZONE_CLEAR_AHEAD => Zeroing::default(),
            UZONE_CLEAR_ON_TAKE => Zeroing::OnTake,
            UZONE_CLEAR_ON_RELEASE => Zeroing::OnRelease,
            UZONE_CLEAR_NEVER => Zeroing::Never,
            other => return Err(no_such("clear", other)),
        });
        how = how.place(match self.place {
            UZONE_NODE_ANY => Place::Anywhere,
            UZONE_NODE_ONE => Place::Node(self.node),
            UZONE_NODE_INTERLEAVED => Place::Interleaved,
            other => return Err(no_such("place", other)),
        });
        if self.block_bytes != 0 {
            how = how.block(ByteLen::new(self.block_bytes));
        }
        if self.piece_bytes != 0 {
            how = how.piece(ByteLen::new(self.piece_bytes));
        }
        if self.pause_us != 0 {
            how = how.pause(Pause::Fixed(Duration::from_micros(self.pause_us)));
        }
        if self.flags & UZONE_POOL_ALL_OR_NOTHING != 0 {
            how = how.all_or_nothing();
        }
        if self.flags & UZONE_POOL_SHARED != 0 {
            how = how.shared();
        }
        match self.flags & !(UZONE_POOL_ALL_OR_NOTHING | UZONE_POOL_SHARED) {
            0 => Ok(how),
            other => Err(no_such("flags", other)),
        }
    }
}

impl uzone_pool {
    fn own(&self) -> Result<&HostPool, Failure> {
        match &self.0 {
            Kind::Own(pool) => Ok(pool),
            Kind::Attached(_) => {
                let text = "the process that opened the pool hands its blocks out, and tells their numbers";
                Err(Failure::new(ENOTSUP, text))
            }
        }
    }

    fn report(&self) -> HostPoolReport {
        match &self.0 {
            Kind::Own(pool) => pool.report(),
            Kind::Attached(pool) => pool.report(),
        }
    }
}

/// Opens a pool of as many whole blocks as fit into `len_bytes`. Returns in milliseconds at any size, but with
/// UZONE_START_EAGER: threads make the memory present, and one registers it behind them, in pieces with pauses.
///
/// A driver registers in the context that is current on the calling thread: the caller makes one before. A process that is
/// forked off has no part of the pool. `options` may be NULL.
///
/// Errors: -ENOMEM with the numbers if the host has less memory; -ENOTSUP if there is no driver, or no context of it;
/// -EINVAL for options that do not go together; with UZONE_START_EAGER also the error that `register_memory` returned.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn uzone_pool_open(
    len_bytes: u64,
    options: *const uzone_pool_options,
    pool: Option<&mut MaybeUninit<Option<Box<uzone_pool>>>>,
) -> c_int {
    call("uzone_pool_open", || {
        let out = given("pool", pool)?;
        // SAFETY: The head of the header demands it.
        let options = unsafe { self::options(options) }?.into_options()?;
        let pool = HostPool::open(ByteLen::new(len_bytes), options)?;
        out.write(Some(Box::new(uzone_pool(Kind::Own(pool)))));
        Ok(())
    })
}

/// Maps the pool of another process, by its memory file (uzone_pool_file()), of which a descriptor was passed. The view is
/// registered as `options` say, and has blocks of the owner's size. The descriptor stays the caller's.
///
/// The owner hands blocks out and tells their numbers: block `n` starts `n * block_bytes` behind the address of the view
/// (uzone_pool_read_stats()). Blocks have no owner any more when the owning process has ended.
///
/// Errors: -EBADF, -ESRCH if there is no process `owner`, and as for uzone_pool_open().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn uzone_pool_attach(
    file: c_int,
    owner: c_int,
    options: *const uzone_pool_options,
    pool: Option<&mut MaybeUninit<Option<Box<uzone_pool>>>>,
) -> c_int {
    call("uzone_pool_attach", || {
        let out = given("pool", pool)?;
        // SAFETY: The head of the header demands it.
        let options = unsafe { self::options(options) }?.into_options()?;
        if file < 0 {
            return Err(std::io::Error::from_raw_os_error(9).into());
        }
        // SAFETY: It is not -1, and the caller vouches that it is open; it is used for this call alone.
        let file = unsafe { BorrowedFd::borrow_raw(file) }.try_clone_to_owned()?;
        let owner = u32::try_from(owner).map_err(|_| Failure::input("owner is no process"))?;
        let owner = Peer::of_number_now(owner)?;
        let pool = AttachedPool::attach(file, owner, options)?;
        out.write(Some(Box::new(uzone_pool(Kind::Attached(pool)))));
        Ok(())
    })
}

/// Closes a pool: all of its blocks end with it, and its memory is unregistered and unmapped. Waits for the threads of the
/// pool. No other call uses the pool meanwhile or afterwards. NULL is no pool.
///
/// Errors: -EIO if memory could not be unregistered. It stays mapped, since a device may use it; the pool is closed.
#[unsafe(no_mangle)]
pub extern "C" fn uzone_pool_close(pool: Option<Box<uzone_pool>>) -> c_int {
    call("uzone_pool_close", || {
        let before = leaked();
        drop(pool);
        match leaked().get().saturating_sub(before.get()) {
            0 => Ok(()),
            bytes => {
                let len = ByteLen::new(bytes);
                let text = format!("{len} cannot be unregistered, and stay mapped for the device");
                Err(Failure::new(EIO, text))
            }
        }
    })
}

/// Returns the descriptor of the memory file of a pool, to be passed to another process; it stays the pool's.
///
/// Errors: -ENOTSUP without UZONE_POOL_SHARED.
#[unsafe(no_mangle)]
pub extern "C" fn uzone_pool_file(pool: Option<&uzone_pool>) -> c_int {
    let mut file = 0;
    let code = call("uzone_pool_file", || {
        let shared = given("pool", pool)?.own()?.shared_file();
        let none =
            || Failure::new(ENOTSUP, "the pool is not shared: open it with UZONE_POOL_SHARED");
        file = shared.ok_or_else(none)?.as_raw_fd();
        Ok(())
    });
    if code == 0 { file } else { code }
}

/// Takes `count` blocks in a row that are ready, every byte of them zero (but with UZONE_CLEAR_NEVER). Waits until blocks
/// are made ready or cleared, and not until some are given back: up to `timeout_ms` milliseconds, not at all for 0, and
/// without end for a negative number. Costs a lock and a few steps if one is ready and zero.
///
/// Errors: -ETIMEDOUT if not as many became ready in time, -ENOMEM if there are not as many free blocks in a row, -ENOTSUP
/// for the view of another process's pool, and the error that ended filling the pool, such as an error of `register_memory`.
#[unsafe(no_mangle)]
pub extern "C" fn uzone_pool_take(
    pool: Option<&uzone_pool>,
    count: usize,
    timeout_ms: c_int,
    block: Option<&mut MaybeUninit<uzone_block>>,
) -> c_int {
    call("uzone_pool_take", || {
        let (pool, out) = (given("pool", pool)?.own()?, given("block", block)?);
        let taken = pool.take_run(count, timeout(timeout_ms))?;
        let (address, len_bytes) = (pointer(taken.addr()), taken.len().get());
        let numbers = taken.into_numbers();
        let (number, count) = (numbers.start as u64, numbers.len() as u64);
        out.write(uzone_block { address, len_bytes, number, count });
        Ok(())
    })
}

/// Gives back blocks that uzone_pool_take() handed out, all of a run or some, by `number` and `count`; the other fields
/// are not read.
///
/// Errors: -EINVAL if one of them is free; then none is given back.
#[unsafe(no_mangle)]
pub extern "C" fn uzone_pool_free(pool: Option<&uzone_pool>, block: Option<&uzone_block>) -> c_int {
    call("uzone_pool_free", || {
        let (pool, block) = (given("pool", pool)?.own()?, given("block", block)?);
        let end = block.number.checked_add(block.count).filter(|end| *end <= pool.blocks() as u64);
        let none = || Failure::input(format!("there is no block {}", block.number));
        let end = end.ok_or_else(none)?;
        let number = |number| usize::try_from(number).unwrap_or(usize::MAX);
        Ok(pool.give_back(number(block.number)..number(end))?)
    })
}

/// Waits until `len_bytes` are present and registered, all of them for UINT64_MAX; `timeout_ms` is as for
/// uzone_pool_take().
///
/// Errors: -ETIMEDOUT if the time is up, or at once with UZONE_START_ON_DEMAND; the error that ended filling the pool.
#[unsafe(no_mangle)]
pub extern "C" fn uzone_pool_wait_ready(
    pool: Option<&uzone_pool>,
    len_bytes: u64,
    timeout_ms: c_int,
) -> c_int {
    call("uzone_pool_wait_ready", || {
        let (bytes, within) = (ByteLen::new(len_bytes), timeout(timeout_ms));
        match &given("pool", pool)?.0 {
            Kind::Own(pool) => pool.wait_ready(bytes, within)?,
            Kind::Attached(pool) => pool.wait_ready(bytes, within)?,
        };
        Ok(())
    })
}

fn ns(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Fills in the numbers of a pool. The caller sets `stats->size`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn uzone_pool_read_stats(
    pool: Option<&uzone_pool>,
    stats: *mut uzone_pool_stats,
) -> c_int {
    call("uzone_pool_read_stats", || {
        let pool = given("pool", pool)?;
        let report = pool.report();
        let (address, blocks, counts, is_alive) = match &pool.0 {
            Kind::Own(pool) => (pool.addr(), pool.blocks(), Some(pool.stats()), true),
            Kind::Attached(pool) => (pool.addr(), pool.blocks(), None, pool.is_owner_alive()),
        };
        let count = |of: fn(&HostPoolStats) -> u64| counts.as_ref().map_or(0, of);
        let bytes = |len: Option<ByteLen>| len.map_or(0, ByteLen::get);
        let now = uzone_pool_stats {
            size: 0,
            address: pointer(address),
            len_bytes: report.len.get(),
            block_bytes: report.block.get(),
            blocks: blocks as u64,
            ready_bytes: report.ready.get(),
            huge_bytes: bytes(report.huge),
            small_bytes: bytes(report.small),
            used: count(|counts| counts.used as u64),
            zero: count(|counts| counts.zero as u64),
            dirty: count(|counts| counts.dirty as u64),
            in_work: count(|counts| counts.in_work as u64),
            bad: count(|counts| counts.bad as u64),
            cleared_ahead: count(|counts| counts.cleared_ahead),
            cleared_on_take: count(|counts| counts.cleared_on_demand),
            cleared_on_release: count(|counts| counts.cleared_on_release),
            pieces: report.pieces as u64,
            populating_ns: ns(report.populating),
            registering_ns: ns(report.registering),
            longest_piece_ns: ns(report.longest_piece),
            first_ready_ns: report.first_ready.map_or(0, ns),
            all_ready_ns: report.all_ready.map_or(0, ns),
            node: report.node.map_or(-1, i64::from),
            is_owner_alive: is_alive.into(),
        };
        // SAFETY: The head of the header demands it.
        unsafe { answer(stats, &now) }
    })
}

/// Writes a report of a pool as text: how much is ready, in which pages, how long it took, and why it is not better, a line
/// each. At most `size` bytes are written to `text`, a zero at the end among them, as by snprintf(3).
///
/// Returns the bytes of the whole report, without the zero, or a negative errno.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn uzone_pool_describe(
    pool: Option<&uzone_pool>,
    text: *mut c_char,
    size: usize,
) -> c_int {
    let mut len = 0;
    let code = call("uzone_pool_describe", || {
        let report = given("pool", pool)?.report().to_string();
        len = c_int::try_from(report.len()).unwrap_or(c_int::MAX);
        if size == 0 {
            return Ok(());
        }
        let text = given("text", (!text.is_null()).then_some(text.cast::<u8>()))?;
        let written = report.len().min(size - 1);
        // SAFETY: The caller vouches for `size` writable bytes, and `written` is less.
        unsafe { text.copy_from_nonoverlapping(report.as_ptr(), written) };
        // SAFETY: As above.
        unsafe { text.wrapping_add(written).write(0) };
        Ok(())
    });
    if code == 0 { len } else { code }
}
