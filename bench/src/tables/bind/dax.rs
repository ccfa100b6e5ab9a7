//! A DAX device, or a file on a DAX mount, that is bound again and again: `bind-dax`. Its bytes are never touched.
//!
//! The descriptors lie in memory of their own, on the device's node. To put them into the region itself, the caller
//! has to assert that no other process changes it (`Exclusivity::assert`), which this program cannot know.

use std::cell::RefCell;
use std::fs::metadata;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use uzone_harness::ways::bind::{check_descriptors, keeping, linux, rebind};
use uzone_harness::ways::naive_bind as naive;
use uzone_harness::{Result, Role, Session, Suite, fill_lines, index, present};
use uzone_pages::{ByteLen, Order, Tails};
use uzone_zone::{BindError, Region};

/// The id of the table.
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
pub(super) fn table(path: &Path, threads: usize, session: &mut Session<'_>) -> Result {
    let mapped = region(path)?;
    let (size, folio, node) = (mapped.len(), mapped.folio_order(), mapped.node());
    let pages = size.get() >> 12;
    let bytes = pages * 64;
    let zone = &keeping(bytes);
    let limit = &RefCell::new(present(ByteLen::new(bytes))?);
    let shared = &RefCell::new(Some(mapped));
    let mut suite = Suite::new(TABLE, size).writing(bytes);
    let template = naive::template(size, Order::BASE, Some(limit.borrow().addr()))?;
    suite.add(Role::Naive, "naive", "naive, field by field", move |_| {
        naive::rebind(&template, &mut limit.borrow_mut())
    });
    suite.threads = threads;
    suite.add(Role::Limit, "limit", "bare fill, all threads", move |_| {
        fill_lines(&mut limit.borrow_mut().as_bytes_mut()[..index(bytes)], threads)
    });
    let orders = [(Order::BASE, "4k"), (Order::PMD, "2m"), (Order::PUD, "1g")];
    for (order, row) in
        orders.into_iter().filter(|(order, _)| pages.is_multiple_of(order.pages().get()))
    {
        let options = linux(order, Tails::Stored, threads);
        let name = format!("ours, {} folios", ByteLen::new(order.pages().get() << 12));
        suite.add(Role::Ours, row, name, move |row| {
            let check = |pagemap: &_| check_descriptors(pagemap, row);
            Ok(rebind(&mut shared.borrow_mut(), zone, options.clone(), check)?.0)
        });
    }
    suite.naive("naive").limit("limit");
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
