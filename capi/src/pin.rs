//! Zones, and pins by address: [`uzone_pin`], [`uzone_unpin`].

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;

use uzone_rust::{ByteLen, Zone};

use crate::argument::given;
use crate::error::{ENOMEM, Failure, call};
use crate::token;

/// A set of regions whose pages are pinned by address.
pub struct uzone_zone(pub(crate) Zone);

/// Makes an empty zone. Costs a few microseconds.
#[unsafe(no_mangle)]
pub extern "C" fn uzone_zone_open(
    zone: Option<&mut MaybeUninit<Option<Box<uzone_zone>>>>,
) -> c_int {
    call("uzone_zone_open", || {
        given("zone", zone)?.write(Some(Box::new(uzone_zone(Zone::new()))));
        Ok(())
    })
}

/// Closes a zone. Regions that are bound in it stay bound, and pins stay.
#[unsafe(no_mangle)]
pub extern "C" fn uzone_zone_close(zone: Option<Box<uzone_zone>>) {
    call("uzone_zone_close", || {
        drop(zone);
        Ok(())
    });
}

/// Pins the pages that `len_bytes` from `address` on have a part of, in whichever regions of the zone they lie: until
/// uzone_unpin() they are not unbound, cleared or given back. Pages that are not present, as of lazily mapped memory, are
/// read first, and the call waits for them. A pin holds off this library's own calls; the kernel may still migrate a page or
/// swap it out.
///
/// `token` becomes a number that names the pin, never 0.
///
/// Costs some atomic steps for each region and for each 512 pages, or for each folio; no memory is allocated.
///
/// Errors: -ENOENT if no region of the zone has an address, -EBUSY if a page is being cleared or its region is being
/// unbound, -EHWPOISON if a page is bad, -EINVAL. Then no page is pinned.
#[unsafe(no_mangle)]
pub extern "C" fn uzone_pin(
    zone: Option<&uzone_zone>,
    address: *const c_void,
    len_bytes: u64,
    token: Option<&mut MaybeUninit<u64>>,
) -> c_int {
    call("uzone_pin", || {
        let (zone, out) = (given("zone", zone)?, given("token", token)?);
        let guard = zone.0.pin(address.addr(), ByteLen::new(len_bytes))?;
        out.write(token::park(guard).map_err(|_| full())?);
        Ok(())
    })
}

#[cold]
fn full() -> Failure {
    Failure::new(ENOMEM, "there are as many pins as there may be: give some back")
}

/// Gives the pin of a token back. Any thread may do so. Costs a few atomic steps.
///
/// Errors: -EINVAL for a token that was given back before, or that no pin has. Then nothing changes.
#[unsafe(no_mangle)]
pub extern "C" fn uzone_unpin(token: u64) -> c_int {
    call("uzone_unpin", || match token::redeem(token) {
        Some(guard) => {
            drop(guard);
            Ok(())
        }
        None => Err(unknown(token)),
    })
}

#[cold]
fn unknown(token: u64) -> Failure {
    Failure::input(format!("no pin has the token {token:#x}: each is given back once"))
}
