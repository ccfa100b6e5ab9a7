//! Describing memory of a DAX device, or of a file on a DAX mount: the region of the published experiment. Its bytes
//! are never touched.
//!
//! Its descriptors lie in memory of their own, on the device's node. To put them into the region itself, the caller
//! has to assert that no other process changes it (`Exclusivity::assert`), which this program cannot know.

use std::cell::RefCell;
use std::fs::metadata;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use uzone_pages::{ByteLen, Order, Tails};
use uzone_zone::{BindError, Region};

use uzone_harness::fill_lines;
use uzone_harness::ways::bind::{check_descriptors, keeping, linux, rebind};
use uzone_harness::ways::naive_bind as naive;

use super::SHAPES;
use crate::settings::BindSettings;
use uzone_harness::{Result, Role, Session, Suite, index, present};

/// What its ids begin with.
pub(super) const TABLE: &str = "bind-dax";

/// Takes a DAX device, or a file on a DAX mount, whole.
fn region(path: &Path) -> Result<Region, BindError> {
    let open = |cause| BindError::Open { path: path.to_owned(), cause };
    let file = metadata(path).map_err(open)?;
    if file.file_type().is_char_device() {
        return Region::devdax(path);
    }
    Region::fsdax(path, 0, ByteLen::new(file.len()))
}

/// Binds and unbinds it, in base pages and in the folios that it has whole.
pub(super) fn table(path: &Path, settings: &BindSettings, session: &mut Session<'_>) -> Result {
    let mapped = region(path)?;
    let (size, folio, node) = (mapped.len(), mapped.folio_order(), mapped.node());
    let (pages, threads) = (size.get() >> 12, settings.threads.get());
    let bytes = pages * 64;
    let zone = &keeping(bytes);
    let limit = &RefCell::new(present(ByteLen::new(bytes))?);
    let shared = &RefCell::new(Some(mapped));
    let mut suite = Suite::new(TABLE, size).writing(bytes);
    let template = naive::template(size, Order::BASE, Some(limit.borrow().addr()))?;
    let naive_row = move |_: &str| naive::rebind(&template, &mut limit.borrow_mut());
    suite
        .add(Role::Naive, "naive", "naive, field by field", naive_row)
        .naive("naive")
        .limit("limit");
    suite.threads = threads;
    suite.add(Role::Limit, "limit", "bare fill, all threads", move |_| {
        fill_lines(&mut limit.borrow_mut().as_bytes_mut()[..index(bytes)], threads)
    });
    let orders = [(Order::BASE, "4k"), (Order::PMD, "2m"), (Order::PUD, "1g")];
    for (order, row) in
        orders.into_iter().filter(|(order, _)| pages.is_multiple_of(order.pages().get()))
    {
        let options = linux(order, Tails::Stored, threads);
        let bind = move |row: &str| {
            let check = |pagemap: &_| check_descriptors(pagemap, row);
            let (bound, _) = rebind(&mut shared.borrow_mut(), zone, options.clone(), check)?;
            Ok(bound)
        };
        let name = format!("ours, {} folios", ByteLen::new(order.pages().get() << 12));
        let spec = suite.add(Role::Ours, row, name, bind).naive("naive").limit("limit");
        let shape = SHAPES.iter().find(|shape| shape.order == order);
        spec.row.published = shape.and_then(|shape| shape.published("ours-1", size));
    }
    let node = node.map_or_else(|| "no node".to_owned(), |node| format!("node {node}"));
    session.measure(
        suite,
        format!("Rebind of {}: {size} of DAX memory, 64-byte descriptors", path.display()),
        format!(
            "it is mapped in pages of {}, on {node}; descriptors in memory of their own; {threads} threads",
            ByteLen::new(folio.pages().get() << 12)
        ),
    )
}
