//! The text of an error with those of its causes: the failure, the resource, and the cure.

use std::error::Error;
use std::iter::successors;
use std::path::Path;

use uzone_pages::{ByteLen, MemoryKind, Order, PageCount, Pfn, PfnRange};
use uzone_zone::{BindOptions, PoolError, Region, Zone};

/// Returns the messages of an error and of its causes, each of which is printed once.
fn whole(error: &(dyn Error + 'static)) -> String {
    let texts: Vec<_> =
        successors(Some(error), |&error| error.source()).map(ToString::to_string).collect();
    for (at, text) in texts.iter().enumerate() {
        let repeats = texts[at + 1..].iter().find(|cause| text.contains(*cause));
        assert_eq!(repeats, None, "'{text}' repeats its cause");
    }
    texts.join(": ")
}

#[test]
fn an_error_that_is_printed_with_its_causes_has_the_cure() {
    let nowhere = Region::file(Path::new("/nowhere/at/all"), 0, ByteLen::mib(1)).unwrap_err();
    let text = whole(&nowhere);
    assert!(text.contains("/nowhere/at/all") && text.contains("No such file"), "{text}");

    let device = Region::devdax(Path::new("/dev/null")).unwrap_err();
    whole(&device);

    let too_long = Region::anonymous(ByteLen::tib(1 << 18)).unwrap_err();
    whole(&too_long);

    let zone = Zone::new();
    let region = Region::anonymous(ByteLen::mib(1)).unwrap();
    let refused = zone.bind(region, BindOptions::new(MemoryKind::Generic).order(Order::PMD));
    let text = whole(&refused.unwrap_err());
    assert!(text.contains("a region of 1 MiB of anonymous memory"), "{text}");

    let region = Region::anonymous(ByteLen::mib(1)).unwrap();
    region.write_at(0, &[1]).unwrap();
    let options = BindOptions::new(MemoryKind::Generic).known_zero();
    let text = whole(&zone.bind(region, options).unwrap_err());
    assert!(text.contains("leave out BindOptions::known_zero"), "{text}");

    let region = Region::anonymous(ByteLen::mib(1)).unwrap();
    let options = BindOptions::new(MemoryKind::Generic).absent().base(Pfn::new(512));
    let pagemap = zone.bind(region, options).unwrap();
    let text = whole(&pagemap.try_pin(pagemap.range()).unwrap_err());
    assert!(text.contains("page 0x200") && text.contains("absent"), "{text}");
    let text = whole(&pagemap.pin_and_write(0, &[1]).unwrap_err());
    assert!(text.contains("page 0x200") && text.contains("absent"), "{text}");
    let outside = PfnRange::try_new(Pfn::new(0), PageCount::new(1)).unwrap();
    whole(&pagemap.punch(outside).unwrap_err());

    let failure = pagemap.zero(outside, &uzone_zone::ZeroOptions::default()).unwrap_err();
    whole(&PoolError::Clear(failure));
}
