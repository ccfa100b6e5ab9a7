//! A length that is printed is read back as the same length.
#![cfg(not(loom))]

use proptest::prelude::*;
use uzone_pages::ByteLen;

proptest! {
    #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 10 } else { 1000 }, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_is_printed_is_read_back_as_the_same_length(bytes: u64, shift in 0_u32..64) {
        // Of every magnitude, exact in some unit and not.
        for bytes in [bytes, bytes >> shift, (bytes >> shift) << shift, 1 << shift, bytes >> shift << 10] {
            let len = ByteLen::new(bytes);
            prop_assert_eq!(len.to_string().parse(), Ok(len));
        }
    }

    #[test]
    fn what_has_a_precision_is_off_by_half_a_decimal_at_most(bytes: u64, shift in 0_u32..64) {
        let len = ByteLen::new(bytes >> shift);
        let text = format!("{len:.1}");
        let (number, unit) = text.split_once(' ').expect("a number and a unit");
        let scale = 2_f64.powi(["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"]
            .iter()
            .position(|name| *name == unit)
            .and_then(|index| i32::try_from(index * 10).ok())
            .expect("a unit"));
        let shown = number.parse::<f64>().expect("a number") * scale;
        #[expect(clippy::cast_precision_loss, reason = "a bound with a margin")]
        let held = len.get() as f64;
        prop_assert!((shown - held).abs() <= scale * 0.050_001, "{} of {}", text, bytes >> shift);
        prop_assert!(shown < scale * 1024.0, "{}", text);
    }
}
