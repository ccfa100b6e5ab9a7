//! What the first clear and the first take of a process cost beside their own work, in processes of
//! their own: this test binary again.

use std::env;
use std::process::Command;
use std::time::{Duration, Instant};

use uzone_pages::{ByteLen, MemoryKind, Order};
use uzone_zone::{BindOptions, Pool, PoolOptions, Region, ZeroOptions, Zone};

/// Set in a child: what it is to time.
const CHILD: &str = "UZONE_TEST_FIRST_USE";
/// How many children there are. The best counts: noise only ever adds.
const CHILDREN: usize = 8;
/// How much longer the first call may take than the second.
const MOST: Duration = Duration::from_millis(1);

/// Returns the best difference between the first call and the second in processes of their own.
fn first_beyond_second(what: &str) -> Duration {
    (0..CHILDREN)
        .map(|_| {
            let output = Command::new(env::current_exe().unwrap())
                .args(["--exact", "first_use::the_child_times_its_first_call", "--nocapture"])
                .env(CHILD, what)
                .env_remove(uzone_stream::STORE_POLICY)
                .output()
                .unwrap();
            let text = String::from_utf8(output.stdout).unwrap();
            let nanos = text.lines().find_map(|line| line.strip_prefix("beyond: ")).unwrap();
            Duration::from_nanos(nanos.parse().unwrap())
        })
        .min()
        .unwrap()
}

#[test]
fn the_child_times_its_first_call() {
    let Ok(what) = env::var(CHILD) else {
        return; // not a child: the other tests start some
    };
    let len = ByteLen::mib(8);
    let region = Region::anonymous(len).unwrap();
    region.write_at(0, &vec![1; 8 << 20]).unwrap();
    let timed = |act: &dyn Fn()| {
        let start = Instant::now();
        act();
        start.elapsed()
    };
    let (first, second) = if what == "clear" {
        let clear =
            || drop(region.zero_range(0, ByteLen::mib(1), &ZeroOptions::default()).unwrap());
        (timed(&clear), timed(&clear))
    } else {
        let options = BindOptions::new(MemoryKind::Generic).order(Order::new(2));
        let pagemap = Zone::new().bind(region, options).unwrap();
        let pool = Pool::new(pagemap, PoolOptions::default().without_worker()).unwrap();
        let take = || std::mem::forget(pool.take().unwrap());
        (timed(&take), timed(&take))
    };
    println!("\nbeyond: {}", first.saturating_sub(second).as_nanos());
}

#[test]
fn the_first_clear_of_a_process_takes_no_measurement() {
    let beyond = first_beyond_second("clear");
    assert!(beyond <= MOST, "the first clear took {beyond:?} longer than the second");
}

#[test]
fn the_first_take_of_a_process_takes_no_measurement() {
    let beyond = first_beyond_second("take");
    assert!(beyond <= MOST, "the first take took {beyond:?} longer than the second");
}
