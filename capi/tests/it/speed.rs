//! The cost of the interface: a pin by its token against a pin by its guard.
//!
//! It asserts nothing, and measures an optimised build alone: `CARGO_PROFILE_TEST_OPT_LEVEL=3
//! CARGO_PROFILE_TEST_DEBUG_ASSERTIONS=false CARGO_PROFILE_TEST_CODEGEN_UNITS=16 CARGO_INCREMENTAL=0 cargo test
//! -p uzone-capi --test it -- --ignored --nocapture speed`

use std::ffi::{c_int, c_void};
use std::hint::black_box;
use std::mem::MaybeUninit;
use std::ptr::null;
use std::time::Instant;

use uzone::*;
use uzone_rust::{BindOptions, ByteLen, MemoryKind, Redeemed, Region, Zone};

const LEN: u64 = 2 << 20; // 512 pages
const ROUNDS: usize = 201;
const CALLS: u32 = 20_000;

type Pin =
    extern "C" fn(Option<&uzone_zone>, *const c_void, u64, Option<&mut MaybeUninit<u64>>) -> c_int;
type Unpin = extern "C" fn(u64) -> c_int;

/// Returns the nanoseconds of a call.
fn time(mut call: impl FnMut()) -> f64 {
    let started = Instant::now();
    for _ in 0..CALLS {
        call();
    }
    started.elapsed().as_secs_f64() * 1e9 / f64::from(CALLS)
}

fn median(times: &mut [f64]) -> f64 {
    times.sort_unstable_by(f64::total_cmp);
    times[times.len() / 2]
}

#[test]
#[ignore = "it measures and asserts nothing: only an optimised build on an idle machine gives a figure"]
fn a_pin_by_token_costs_little_more_than_a_pin_in_rust() {
    let zone = Zone::new();
    let region = Region::anonymous(ByteLen::new(LEN)).unwrap();
    let pagemap = zone.bind(region, BindOptions::new(MemoryKind::Generic)).unwrap();
    let address = pagemap.region().addr().get();

    let mut place = MaybeUninit::new(None);
    assert_eq!(uzone_zone_open(Some(&mut place)), 0);
    // SAFETY: It was written.
    let c_zone = unsafe { place.assume_init() }.unwrap();
    let mut place = MaybeUninit::new(None);
    assert_eq!(uzone_region_open(LEN, 0, Some(&mut place)), 0);
    // SAFETY: It was written.
    let mut c_region = unsafe { place.assume_init() }.unwrap();
    // SAFETY: The options are NULL.
    assert_eq!(unsafe { uzone_region_bind(Some(&mut c_region), Some(&c_zone), null()) }, 0);
    let c_address = uzone_region_address(Some(&c_region));
    // As C calls them: by address, and not inlined.
    let (pin, unpin) = (black_box(uzone_pin as Pin), black_box(uzone_unpin as Unpin));

    let (mut rust, mut raw, mut c) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        rust.push(time(|| {
            drop(black_box(zone.pin(black_box(address), ByteLen::new(LEN)).unwrap()));
        }));
        raw.push(time(|| {
            let guard = pagemap.pin(black_box(pagemap.range())).unwrap();
            let token = guard.into_raw().ok().unwrap();
            let Ok(Redeemed::Pinned(guard)) = zone.redeem(black_box(token)) else { panic!() };
            drop(guard);
        }));
        c.push(time(|| {
            let mut token = MaybeUninit::new(0);
            assert_eq!(pin(Some(&c_zone), c_address, LEN, Some(&mut token)), 0);
            // SAFETY: It was written.
            assert_eq!(unpin(unsafe { token.assume_init() }), 0);
        }));
    }
    let [rust, raw, c] = [rust, raw, c].map(|mut times| median(&mut times));
    println!(
        "pin and unpin 512 pages, medians of {ROUNDS} rounds: Rust {rust:.1} ns, C {c:.1} ns (+ {:.1}); by Zone::redeem {raw:.1} ns",
        c - rust
    );
}
