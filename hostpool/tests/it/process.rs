//! Pools when the process forks and when it ends.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::Mutex;
use std::time::Duration;

use uzone_hostpool::{HostPool, HostPoolError};
use uzone_pages::ByteLen;

use crate::driver::Stub;

const LONG: Duration = Duration::from_secs(60);
const ENDS: &str = "UZONE_TEST_ENDS";

#[test]
fn a_forked_child_has_no_part_of_a_pool_and_drops_it_without_harm() {
    let stub = Stub::new("forked", "context");
    let pool = HostPool::open(ByteLen::mib(16), stub.options()).unwrap();
    pool.wait_ready(pool.len(), LONG).unwrap();
    let block = pool.take(LONG).unwrap();
    block.write_at(0, b"parent").unwrap();
    let base = pool.addr().get();
    let calls = stub.calls(base).len();
    let pool = std::sync::Arc::new(Mutex::new(Some(pool)));
    let childs = pool.clone();
    let mut child = Command::new("true");
    let look = move || {
        let pool = childs.lock().unwrap().take().unwrap();
        let is_refused = matches!(pool.take(LONG), Err(HostPoolError::Forked));
        let maps = std::fs::read_to_string("/proc/self/maps")?;
        let is_mapped = maps.contains(&format!("{base:x}-"));
        drop(pool);
        if is_refused && !is_mapped { Ok(()) } else { Err(io::ErrorKind::Other.into()) }
    };
    // SAFETY: `pre_exec` wants code that is safe after fork(2) in a process with threads: no other thread has the lock,
    // and glibc's allocator may be used in a child.
    unsafe { child.pre_exec(look) };
    assert!(child.status().unwrap().success());
    // The parent's is as it was.
    let pool = pool.lock().unwrap().take().unwrap();
    assert_eq!(stub.calls(base).len(), calls);
    let mut bytes = [0; 6];
    block.read_at(0, &mut bytes).unwrap();
    assert_eq!(&bytes, b"parent");
    drop((block, pool));
    assert_eq!(stub.calls(base).len(), calls * 2);
}

#[test]
fn a_process_that_ends_while_a_pool_is_registered_ends_well() {
    let status = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "process::process_that_ends", "--nocapture"])
        .env(ENDS, "1")
        .output()
        .unwrap();
    assert_eq!(status.status.code(), Some(3), "{status:?}");
}

/// Not a test by itself: the process of the test before.
#[test]
fn process_that_ends() {
    if std::env::var_os(ENDS).is_none() {
        return;
    }
    static POOL: Mutex<Option<(HostPool, Stub)>> = Mutex::new(None);
    extern "C" fn look() {
        // Hooks run in reverse order: the pool's and the driver's have run. A panic here aborts the process.
        let (pool, stub) = POOL.lock().unwrap().take().unwrap();
        let base = pool.addr().get();
        let before = stub.calls(base).len(); // none was WRONG
        std::thread::sleep(Duration::from_millis(100));
        assert_eq!(stub.calls(base).len(), before);
        assert!(pool.ready() < pool.len());
        // A language may drop its values as late as this.
        drop(pool);
    }
    uzone_os::at_exit(look).unwrap();
    let stub = Stub::new("ends", "context gb_per_s 1");
    let pool = HostPool::open(ByteLen::mib(512), stub.options()).unwrap();
    drop(pool.take(LONG).unwrap());
    *POOL.lock().unwrap() = Some((pool, stub));
    std::process::exit(3);
}
