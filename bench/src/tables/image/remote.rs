//! A packed image in object storage: read in order beside the link.

use std::slice::from_ref;

use uzone_pages::ByteLen;
use uzone_snapshot::Source;

use super::material::{FRAME, Material};
use super::pack::read_each;
use super::store::{Store, distance};
use uzone_harness::{Result, Role, Session, Suite, index};

/// The number of connections that fill the link, and the length of their requests.
const CONNECTIONS: usize = 8;
const CHUNK: u64 = 2 << 20;

/// How far the reader announces its bytes, and in what steps.
const AHEAD: u64 = 32 << 20;
const STEP: u64 = 2 << 20;

/// Reads the whole image in order.
pub(super) fn in_order(material: &Material, session: &mut Session<'_>) -> Result {
    let store = &Store::start(&material.packed)?;
    let (bytes, packed) = (ByteLen::new(material.len as u64), material.packed_len);
    let chunks = (0..packed).step_by(index(CHUNK));
    let chunks: Vec<_> = chunks.map(|start| start..packed.min(start + CHUNK)).collect();
    let mut suite = Suite::new("snapshot-s3-seq", ByteLen::new(packed)).writing(packed);
    suite
        .add(Role::Limit, "link", "the link, by 8 connections", move |_| {
            store.ask(CONNECTIONS, &chunks)
        })
        .row
        .threads = CONNECTIONS;
    let spec = suite.add(Role::Ours, "ours", "ours, read in order", move |_| {
        let image = store.open_image(ByteLen::ZERO)?;
        read_each((0..bytes.get()).step_by(FRAME), |at, out| {
            if at.is_multiple_of(STEP) {
                Source::will_need(&image, from_ref(&(at..bytes.get().min(at + AHEAD))));
            }
            Ok(image.read_at(at, out)?)
        })
    });
    spec.headline(format!("read an image of {bytes} from S3, in order"));
    suite.limit("link");
    session.measure(
        suite,
        format!("A packed image of {bytes} in S3, read in order"),
        format!(
            "{}; sizes and rates count stored bytes; the limit asks for {} at a time",
            distance(),
            ByteLen::new(CHUNK)
        ),
    )
}
