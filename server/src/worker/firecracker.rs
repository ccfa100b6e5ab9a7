//! The message of Firecracker when it connects: [`regions`], from bytes to regions.
//!
//! Firecracker sends one array of JSON and one userfaultfd, and waits for no answer. The array has one
//! object a region: `base_host_virt_addr`, `size` and `offset` in bytes, from 1.7 on also `page_size_kib`,
//! which is bytes although its name has KiB, and from 1.12 on `page_size` with the same number. Unknown
//! fields are skipped.
//! Source: Firecracker, `docs/snapshotting/handling-page-faults-on-snapshot-resume.md`.

use serde::Deserialize;
use uzone_fault::RemoteRegion;
use uzone_os::Vaddr;
use uzone_pages::{ByteLen, PageSize};

use crate::error::ServeError;
use crate::machine::REGIONS;

/// The sizes of pages that memory of a VM has.
const SMALL: u64 = 4 << 10;
const HUGE: u64 = 2 << 20;

#[derive(Deserialize)]
struct Region {
    base_host_virt_addr: u64,
    size: u64,
    offset: u64,
    page_size: Option<u64>,
    page_size_kib: Option<u64>,
}

impl Region {
    fn page_bytes(&self) -> u64 {
        match self.page_size.or(self.page_size_kib) {
            // A sender that takes the name at its word.
            Some(kib @ 1..SMALL) => kib << 10,
            Some(bytes) => bytes,
            None => SMALL,
        }
    }
}

/// Returns whether a message ends within a number, which the parser takes for a wrong number.
fn is_cut_in_number(bytes: &[u8], error: &serde_json::Error) -> bool {
    let last_line = bytes.rsplit(|byte| *byte == b'\n').next().unwrap_or(bytes);
    let lines = bytes.iter().filter(|byte| **byte == b'\n').count() + 1;
    matches!(bytes, [.., b'-' | b'+' | b'.' | b'e' | b'E'])
        && (error.line(), error.column()) == (lines, last_line.len())
}

/// Returns the regions of a message, or `None` if the message is not whole yet.
/// [`Engine::adopt`](uzone_fault::Engine::adopt) checks whether regions overlap, and whether they fit the image.
///
/// # Errors
/// [`ServeError`] if it is not a message of regions.
pub fn regions(bytes: &[u8]) -> Result<Option<Vec<RemoteRegion>>, ServeError> {
    let mut values = serde_json::Deserializer::from_slice(bytes).into_iter::<Vec<Region>>();
    let regions = match values.next() {
        None => return Ok(None),
        Some(Err(error)) if error.is_eof() || is_cut_in_number(bytes, &error) => return Ok(None),
        Some(Err(error)) => {
            let reason = format!("the message is no array of regions in JSON: {error}");
            return Err(ServeError::Message(reason));
        }
        Some(Ok(regions)) => regions,
    };
    if !(1..=REGIONS).contains(&regions.len()) {
        let count = regions.len();
        return Err(ServeError::Message(format!(
            "the message has {count} regions: 1 to {REGIONS} are possible"
        )));
    }
    let region = |(index, region): (usize, &Region)| {
        let page_bytes = region.page_bytes();
        let page = PageSize::try_from_bytes(page_bytes).ok();
        let page = page.filter(|page| matches!(page.bytes(), SMALL | HUGE));
        Ok(RemoteRegion {
            start: Vaddr::new(region.base_host_virt_addr),
            len: ByteLen::new(region.size),
            offset: region.offset,
            page: page.ok_or_else(|| {
                ServeError::Message(format!(
                    "region {index} has pages of {page_bytes} bytes: {SMALL} and {HUGE} are possible"
                ))
            })?,
        })
    };
    regions.iter().enumerate().map(region).collect::<Result<_, _>>().map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Messages of Firecracker.
    const RECORDED: [(&str, &str); 3] = [
        (
            "1.10.1",
            r#"[{"base_host_virt_addr":139769516392448,"size":134217728,"offset":0,"page_size_kib":4096}]"#,
        ),
        (
            "1.16.1",
            r#"[{"base_host_virt_addr":140168510046208,"size":134217728,"offset":0,"page_size":4096,"page_size_kib":4096}]"#,
        ),
        (
            "1.16.1, two regions",
            r#"[{"base_host_virt_addr":140712995717120,"size":3221225472,"offset":0,"page_size":4096,"page_size_kib":4096},{"base_host_virt_addr":140712861499392,"size":134217728,"offset":3221225472,"page_size":4096,"page_size_kib":4096}]"#,
        ),
    ];
    /// Composed from the fields of a version.
    const COMPOSED: [(&str, &str, u64); 4] = [
        ("1.1", r#"[{"base_host_virt_addr":4194304,"size":8192,"offset":0}]"#, 4096),
        (
            "1.16.1, 2M",
            r#"[{"base_host_virt_addr":4194304,"size":2097152,"offset":0,"page_size":2097152,"page_size_kib":2097152}]"#,
            2 << 20,
        ),
        (
            "fields to come",
            r#"[{"base_host_virt_addr":4194304,"size":8192,"offset":0,"gpa_start":0,"is_guest_memfd":{"a":[1]}}]"#,
            4096,
        ),
        (
            "KiB as the name has it",
            r#" [{"base_host_virt_addr":4194304,"size":8192,"offset":0,"page_size_kib":4}] "#,
            4096,
        ),
    ];

    #[test]
    fn recorded_messages_have_their_regions() {
        for (version, text) in RECORDED {
            let regions = regions(text.as_bytes()).unwrap().expect(version);
            assert!(regions.iter().all(|region| region.page == PageSize::KIB_4), "{version}");
            assert_eq!(regions.len(), text.matches("offset").count(), "{version}");
            assert_eq!(regions[0].offset, 0, "{version}");
        }
        let two = regions(RECORDED[2].1.as_bytes()).unwrap().unwrap();
        assert!(two[1].start.get() < two[0].start.get(), "the second lies below the first");
        assert_eq!(two[1].offset, two[0].len.get());
    }

    #[test]
    fn composed_messages_have_the_page_size_of_their_version() {
        for (version, text, bytes) in COMPOSED {
            let regions = regions(text.as_bytes()).unwrap().expect(version);
            assert_eq!(regions[0].page.bytes(), bytes, "{version}");
        }
    }

    #[test]
    fn every_part_of_a_message_waits_for_the_rest() {
        for (version, text) in RECORDED {
            for len in 0..text.len() {
                assert_eq!(
                    regions(&text.as_bytes()[..len]).unwrap(),
                    None,
                    "{version}: {len} bytes"
                );
            }
        }
    }

    proptest::proptest! {
        #[test]
        fn a_changed_message_is_parsed_or_refused(
            which in 0..RECORDED.len(),
            changes in proptest::collection::vec((proptest::prelude::any::<proptest::sample::Index>(), proptest::prelude::any::<u8>()), 1..6),
        ) {
            let mut bytes = RECORDED[which].1.as_bytes().to_vec();
            for (at, byte) in changes {
                let at = at.index(bytes.len());
                bytes[at] = byte;
            }
            if let Ok(Some(regions)) = regions(&bytes) {
                proptest::prop_assert!((1..=REGIONS).contains(&regions.len()));
                proptest::prop_assert!(regions.iter().all(|it| matches!(it.page.bytes(), SMALL | HUGE)));
            }
        }
    }

    #[test]
    fn what_is_no_message_is_refused_by_name() {
        let is_refused = |text: &str, reason: &str| {
            let error = regions(text.as_bytes()).unwrap_err();
            assert!(matches!(error, ServeError::Message(_)), "{text}: {error:?}");
            assert!(error.to_string().starts_with(reason), "{text}: {error}");
        };
        let not_regions = "the message is no array of regions in JSON: ";
        is_refused("GET / HTTP/1.1", not_regions);
        is_refused("[1]", not_regions);
        is_refused("{}", not_regions);
        is_refused(r#"[{"size":1}]"#, not_regions);
        is_refused("[]", "the message has 0 regions: 1 to 1024 are possible");
        let region = |page: u64| {
            format!(r#"{{"base_host_virt_addr":0,"size":4096,"offset":0,"page_size":{page}}}"#)
        };
        is_refused(
            &format!("[{}]", region(8192)),
            "region 0 has pages of 8192 bytes: 4096 and 2097152 are possible",
        );
        is_refused(
            &format!("[{},{}]", region(4096), region(1 << 30)),
            "region 1 has pages of 1073741824 bytes: ",
        );
        let many = vec![region(4096); REGIONS + 1].join(",");
        is_refused(&format!("[{many}]"), "the message has 1025 regions: ");
    }
}
