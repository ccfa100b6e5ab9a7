//! The types of arguments and results can be named by a program that depends on this package alone.
#![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]

use uzone::{
    BindOptions, ByteLen, Content, FaultError, MemoryKind, Pagemap, PagemapOps, Pfn, PfnRange,
    Pinned, Redeemed, Referenced, Region, ZeroOptions, Zone,
};

/// The state of a driver.
struct Kept {
    pagemap: Pagemap,
    pinned: Pinned,
    referenced: Referenced,
}

#[test]
fn guards_hooks_and_options_have_names() {
    let zone = Zone::new();
    let region = Region::anonymous(ByteLen::mib(2)).unwrap();
    let pagemap = zone.bind(region, BindOptions::new(MemoryKind::Generic)).unwrap();
    let range = pagemap.range_at(0, ByteLen::kib(64)).unwrap();
    let _ = pagemap.zero(range, &ZeroOptions::default().batch(ByteLen::mib(8))).unwrap();
    let (pinned, referenced) = (pagemap.pin(range).unwrap(), pagemap.get(range).unwrap());
    let kept = Kept { pagemap, pinned, referenced };
    let bits = kept.pinned.into_raw().unwrap().to_bits();
    match zone.redeem(uzone::RawGuard::from_bits(bits)).unwrap() {
        Redeemed::Pinned(pinned) => drop(pinned),
        Redeemed::Referenced(_) => panic!("it was a pin"),
    }
    drop(kept.referenced);
    kept.pagemap.unbind().unwrap();

    let region = Region::anonymous(ByteLen::mib(2)).unwrap();
    let fault = |_: Pfn| Err(FaultError::new("there is nothing"));
    let ops = PagemapOps::default().populate(|_: PfnRange| {}, fault);
    let options = BindOptions::new(MemoryKind::Generic).absent().ops(ops);
    let pagemap = zone.bind(region, options).unwrap();
    assert_eq!(pagemap.page_at(0).unwrap().word().content(), Content::Absent);
    let refused = pagemap.pin(pagemap.range()).unwrap_err();
    let text = uzone_os::with_causes(&refused);
    assert!(text.contains("there is nothing"), "{text}");
}
