//! A pool in two processes.

use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::time::Duration;

use uzone_hostpool::{AttachedPool, HostPool, HostPoolError, HostPoolOptions, Peer};
use uzone_pages::ByteLen;

use crate::driver::Stub;

const LONG: Duration = Duration::from_secs(60);
const OWNER: &str = "UZONE_TEST_OWNER";

#[test]
fn a_second_process_registers_its_own_view_and_reads_blocks_by_number() {
    let pool = HostPool::open(ByteLen::mib(32), HostPoolOptions::default().shared()).unwrap();
    pool.wait_ready(pool.len(), LONG).unwrap();
    let mut blocks: Vec<_> = (0..3).map(|_| pool.take(LONG).unwrap()).collect();
    let block = blocks.pop().unwrap();
    block.write_at(7, b"over there").unwrap();

    // The other process: it is this one here, which maps the file a second time.
    let stub = Stub::new("attached", "context");
    let attached = AttachedPool::open(&pool.shared_name().unwrap(), stub.options()).unwrap();
    assert_ne!(attached.addr(), pool.addr());
    assert_eq!(attached.wait_ready(attached.len(), LONG).unwrap(), pool.len());
    let at = block.number() as u64 * (2 << 20);
    let mut bytes = [0; 10];
    attached.read_at(at + 7, &mut bytes).unwrap();
    assert_eq!(&bytes, b"over there");
    attached.write_at(at, b"and back").unwrap();
    block.read_at(0, &mut bytes).unwrap();
    assert_eq!(&bytes[..8], b"and back");
    let registered: u64 = stub.calls(attached.addr().get()).iter().map(|call| call.2).sum();
    assert_eq!(registered, 32 << 20);
    drop(attached);
    assert!(pool.take(LONG).is_ok());
}

#[test]
fn a_pool_is_attached_by_a_descriptor_that_was_passed() {
    let pool = HostPool::open(ByteLen::mib(4), HostPoolOptions::default().shared()).unwrap();
    let (here, _there) = UnixStream::pair().unwrap();
    let file = pool.shared_file().unwrap().try_clone_to_owned().unwrap();
    let owner = Peer::of(&here).unwrap();
    let attached = AttachedPool::attach(file, owner, HostPoolOptions::default()).unwrap();
    assert!(attached.is_owner_alive());
    let private = HostPool::open(ByteLen::mib(4), HostPoolOptions::default()).unwrap();
    assert!(private.shared_file().is_none() && private.shared_name().is_none());
    for name in ["", "/proc/self/fd/3", "/dev/null", "/proc/4194305/fd/3"] {
        let refused = AttachedPool::open(name, HostPoolOptions::default());
        assert!(matches!(refused, Err(HostPoolError::Attach { .. })), "{name}");
    }
}

#[test]
fn the_death_of_the_owner_is_seen_and_its_bytes_stay() {
    let mut owner = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "attached::owner_of_a_shared_pool", "--nocapture"])
        .env(OWNER, "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = std::io::BufRead::lines(std::io::BufReader::new(owner.stdout.take().unwrap()));
    let name = lines
        .map_while(Result::ok)
        .find_map(|line| line.split_once("/proc/").map(|(_, name)| format!("/proc/{name}")))
        .unwrap();
    let attached = AttachedPool::open(&name, HostPoolOptions::default()).unwrap();
    assert!(attached.is_owner_alive());
    owner.kill().unwrap();
    owner.wait().unwrap();
    assert!(!attached.is_owner_alive());
    let mut bytes = [0; 5];
    attached.read_at(0, &mut bytes).unwrap();
    assert_eq!(&bytes, b"owned");
    assert!(AttachedPool::open(&name, HostPoolOptions::default()).is_err());
}

/// Not a test by itself: the process that the test before kills.
#[test]
fn owner_of_a_shared_pool() {
    if std::env::var_os(OWNER).is_none() {
        return;
    }
    let pool = HostPool::open(ByteLen::mib(4), HostPoolOptions::default().shared()).unwrap();
    let block = pool.take(LONG).unwrap();
    block.write_at(0, b"owned").unwrap();
    println!("{}", pool.shared_name().unwrap());
    std::io::stdin().read_line(&mut String::new()).unwrap();
}
