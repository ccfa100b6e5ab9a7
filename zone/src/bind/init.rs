//! Writing the descriptors of a memmap: the slow path, and the fast path that copies templates.
//!
//! The slow path sets one field after another ([`Template::init`]) and defines a descriptor.
//! The fast path asks it for one descriptor of a run and for that one's neighbour, and streams
//! whole cache lines of the arithmetic progression between them: whatever depends on the pfn is
//! refreshed in the template, in registers, and never patched in written descriptors.
//!
//! Inside a folio the order is head, first tail, tails. Linux writes the head's metadata into the
//! first tail after all tails, and has to drain its streaming stores before that. Here the first
//! tail's template has the metadata in it already, so nothing is written twice and one drain is
//! enough: the one at the end of each [`SECTION_BYTES`].
//!
//! Cost: 64-byte descriptors at the rate at which this core streams; a template for each run, that
//! is, each folio where tails are stored, by a vector addition.

use uzone_pages::{Class, MemoryKind, Payload, Refresh, Template};
use uzone_stream::{Path, Streaming};

use crate::bind::runs::{self, Runs};
use crate::bind::trace;

/// How much memmap is written between two drains, two looks at the cancellation and two populated
/// huge pages.
pub(crate) const SECTION_BYTES: usize = 2 << 20;

/// Writes the descriptors from index `first` on that `bytes` has room for: from templates by a store, or without one
/// field after field in place, one descriptor after the other, which is the oracle and the baseline.
pub(crate) fn init<P: Payload>(
    template: &Template<P>,
    kind: MemoryKind,
    stamp: Option<Path>,
    first: u64,
    bytes: &mut [u8],
) {
    match stamp {
        None => field_by_field(template, kind, first, bytes),
        Some(path) => {
            Streaming::scope(path, |stream| by_template(template, stream, first, bytes));
        }
    }
}

/// Writes descriptors by the slow path, and reports each but the first of the memmap, whose report
/// was the question whether a tracer listens.
fn field_by_field<P: Payload>(
    template: &Template<P>,
    kind: MemoryKind,
    first: u64,
    bytes: &mut [u8],
) {
    let size = Template::<P>::DESCRIPTOR_BYTES;
    for (index, descriptor) in (first..).zip(bytes.chunks_exact_mut(size)) {
        init_descriptor(template, index, descriptor);
        if index != 0 {
            report(template, index, kind);
        }
    }
}

/// Writes one descriptor by the slow path.
// Never inlined: a straightforward port would cost one call a page.
#[inline(never)]
fn init_descriptor<P: Payload>(template: &Template<P>, index: u64, descriptor: &mut [u8]) {
    let (payload, stored) = descriptor.split_at_mut(size_of::<P>());
    let pfn = template.layout().pfn(index);
    match P::mut_from_bytes(payload) {
        Ok(payload) => {
            let is_ours = template.init(pfn, payload);
            debug_assert!(is_ours, "the descriptor {index} belongs to the layout");
        }
        // Descriptors lie at multiples of their size from the start of a page.
        Err(_) => unreachable!("a descriptor is aligned for its payload"),
    }
    // The difference to the template: none.
    stored.fill(0);
}

/// Tells a listener of the reference-set probe about the descriptor `index`. Returns whether there
/// is one.
pub(crate) fn report<P: Payload>(template: &Template<P>, index: u64, kind: MemoryKind) -> bool {
    let pfn = template.layout().pfn(index);
    let references = match template.layout().class(pfn) {
        Class::Base | Class::Head => kind.initial_references(),
        Class::FirstTail | Class::Tail => 0,
    };
    trace::page_ref_set(pfn, references)
}

fn by_template<'mem, P: Payload>(
    template: &Template<P>,
    stream: &mut Streaming<'mem>,
    first: u64,
    mut bytes: &'mem mut [u8],
) {
    let size = Template::<P>::DESCRIPTOR_BYTES;
    if size > runs::MAX_BYTES || template.refresh() == Refresh::EachPage {
        for (index, descriptor) in (first..).zip(bytes.chunks_exact_mut(size)) {
            copy_descriptor(template, stream, index, descriptor);
        }
        return;
    }
    let end = first + (bytes.len() / size) as u64;
    let mut runs = Runs::new(template);
    let mut index = first;
    while index < end {
        let (pattern, until) = runs.at(index);
        let until = until.min(end);
        #[expect(clippy::cast_possible_truncation, reason = "at most the length of the slice")]
        let (run, rest) = bytes.split_at_mut((until - index) as usize * size);
        stream.fill(run, pattern);
        bytes = rest;
        index = until;
    }
}

/// Writes one descriptor from a template that is refreshed for it.
fn copy_descriptor<'mem, P: Payload>(
    template: &Template<P>,
    stream: &mut Streaming<'mem>,
    index: u64,
    descriptor: &'mem mut [u8],
) {
    let mut payload = P::new_zeroed();
    template.init(template.layout().pfn(index), &mut payload);
    let (payload_bytes, stored) = descriptor.split_at_mut(size_of::<P>());
    stream.copy(payload_bytes, payload.as_mut_bytes());
    stream.zero(stored);
}
