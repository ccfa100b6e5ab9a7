//! The text of an error by itself, without its causes: what failed, on what, and what would help.

use std::error::Error;
use std::path::Path;

use uzone_pages::{ByteLen, MemoryKind, Order, PageCount, Pfn, PfnRange};
use uzone_zone::{BindOptions, PoolError, Region, Zone};

/// Refuses a message that lacks the text of one of its causes.
fn assert_complete(error: &(dyn Error + 'static)) -> String {
    let text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        // What the kernel answered is a number with a name: the message states what that means.
        if !inner.is::<std::io::Error>() {
            assert!(text.contains(&inner.to_string()), "'{text}' lacks '{inner}'");
        }
        cause = inner.source();
    }
    text
}

#[test]
fn an_error_that_is_printed_alone_has_the_cure() {
    let nowhere = Region::file(Path::new("/nowhere/at/all"), 0, ByteLen::mib(1)).unwrap_err();
    let text = assert_complete(&nowhere);
    assert!(text.contains("/nowhere/at/all") && text.contains("No such file"), "{text}");

    let device = Region::devdax(Path::new("/dev/null")).unwrap_err();
    assert_complete(&device);

    let too_long = Region::anonymous(ByteLen::tib(1 << 18)).unwrap_err();
    assert_complete(&too_long);

    let zone = Zone::new();
    let region = Region::anonymous(ByteLen::mib(1)).unwrap();
    let refused = zone.bind(region, BindOptions::new(MemoryKind::Generic).order(Order::PMD));
    let text = assert_complete(&refused.unwrap_err());
    assert!(text.contains("a region of 1 MiB of anonymous memory"), "{text}");

    let region = Region::anonymous(ByteLen::mib(1)).unwrap();
    region.write_at(0, &[1]).unwrap();
    let options = BindOptions::new(MemoryKind::Generic).known_zero();
    let text = assert_complete(&zone.bind(region, options).unwrap_err());
    assert!(text.contains("leave out BindOptions::known_zero"), "{text}");

    let region = Region::anonymous(ByteLen::mib(1)).unwrap();
    let options = BindOptions::new(MemoryKind::Generic).absent().base(Pfn::new(512));
    let pagemap = zone.bind(region, options).unwrap();
    let text = assert_complete(&pagemap.try_pin(pagemap.range()).unwrap_err());
    assert!(text.contains("page 0x200") && text.contains("absent"), "{text}");
    let text = assert_complete(&pagemap.pin_and_write(0, &[1]).unwrap_err());
    assert!(text.contains("page 0x200") && text.contains("absent"), "{text}");
    let outside = PfnRange::try_new(Pfn::new(0), PageCount::new(1)).unwrap();
    assert_complete(&pagemap.punch(outside).unwrap_err());

    let failure = pagemap.zero(outside, &uzone_zone::ZeroOptions::default()).unwrap_err();
    assert_complete(&PoolError::Clear(failure));
}
