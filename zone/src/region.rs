//! Memory to be managed: [`Region`], a range of anonymous memory, a memory file, huge pages, a file,
//! a DAX device, or memory that the caller mapped.
//!
//! The memory of a CXL device is one of two things, and `daxctl reconfigure-device` changes which: a
//! DAX device ([`Region::devdax`]), or system RAM. The latter is a NUMA node like any other, and
//! an anonymous region gets its memory there.
//!
//! A region is bytes; the state of its pages is a [`Pagemap`](crate::Pagemap), which takes
//! the region in and gives it back at unbind. Its bytes may change under us (a device writes them,
//! another process maps the file), so they are copied in and out and never lent as a slice.
//!
//! Core dumps leave out the memory of a region that this process makes, until it is populated: the kernel would look for
//! each page of reserved addresses. It includes memory in steps of 1 GiB, as it has a mapping of its own for each change.
//!
//! Units: lengths are bytes; pages are the host's base pages, whatever is behind the region.
//! Cost: making a region reserves addresses. Memory is taken when a page is first touched, except
//! from a hugetlb pool, which promises its pages at once.

use std::fs::{File, OpenOptions};
use std::ops::{Deref, Range};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use uzone_os::{
    Access, AccessError, Addr, Anonymous, HugeAdvice, MapError, Mapping, MappingError, Rejected,
    Sharing, SystemRoot, dax, numa,
};
use uzone_pages::{AddrError, ByteLen, Order, PageCount, PageSize, Pfn, PfnRange};

use crate::error::BindError;
use crate::source::RegionSource;

/// The bytes of a file that are behind a region, or its addresses if it is adopted, as far as two
/// regions may have the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FileExtent {
    /// `None` where `start` and `end` are addresses of this process.
    file: Option<(u64, Option<u64>)>,
    start: u64,
    end: u64,
}

impl FileExtent {
    pub(crate) fn overlaps(&self, other: &Self) -> bool {
        self.file == other.file && self.start < other.end && other.start < self.end
    }
}

/// A range of memory, unmapped when dropped unless the caller keeps it ([`Mapping::adopt`]). Methods that
/// a bound region has as well are those of [`RegionView`].
///
/// # Examples
///
/// ```
/// use uzone_zone::{PopulateOptions, Region};
/// use uzone_pages::ByteLen;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let region = Region::anonymous(ByteLen::gib(64))?; // addresses alone
/// let report = region.populate(0..2 << 20, &PopulateOptions::default())?; // 2 MiB are present
/// println!("{report}");
///
/// region.write_at(4096, b"hello")?; // bytes are copied in and out
/// let mut bytes = [0; 5];
/// region.read_at(4096, &mut bytes)?;
/// assert_eq!(&bytes, b"hello");
///
/// region.punch(0..2 << 20)?; // the kernel has the memory again, and it reads as zero
/// region.read_at(4096, &mut bytes)?;
/// assert_eq!(bytes, [0; 5]);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Region(RegionView);

impl Deref for Region {
    type Target = RegionView;

    fn deref(&self) -> &RegionView {
        &self.0
    }
}

/// The memory of a region, to look at and to read: a mapping, and the facts that were learnt of it.
#[derive(Debug)]
pub struct RegionView {
    mapping: Mapping,
    backing: RegionSource,
    /// The NUMA node that DAX memory is nearest to.
    node: Option<u32>,
    /// The pages that were bad when the region was unbound last, counted from its first, ascending.
    bad: Vec<PageCount>,
    /// Whether no byte can have been written since the kernel made the memory.
    untouched: Untouched,
    /// Whether core dumps include the memory that is populated, and no other.
    dumps_populated: AtomicBool,
}

/// The memory that a populated byte has included in core dumps, at multiples of that address.
const DUMP_STEP: u64 = 1 << 30;

/// Returns whether a region of this source is memory that the kernel makes for this process.
fn is_made(backing: &RegionSource) -> bool {
    matches!(backing, RegionSource::Anonymous | RegionSource::Memfd | RegionSource::Hugetlb(_))
}

/// Whether memory is as the kernel made it, until its addresses are given out.
#[derive(Debug)]
struct Untouched(AtomicBool);

impl Untouched {
    /// Memory that the kernel has just made is zero; other memory may have any bytes.
    fn of(backing: &RegionSource) -> Self {
        Self(AtomicBool::new(is_made(backing)))
    }

    fn end(&self) {
        // Relaxed: the thread that binds the region owns it alone, and so has seen all that was done to it.
        self.0.store(false, Ordering::Relaxed);
    }
}

impl Region {
    /// Reserves private memory of no file, all zero. Nothing is taken before a page is touched, so
    /// `len` may be larger than the memory of the machine. The kernel is asked for huge pages
    /// (`MADV_HUGEPAGE`); whether there are any is a setting of the host. Costs a few system calls at
    /// any size.
    ///
    /// # Errors
    /// [`BindError`] if `len` cuts a page, or names the limit that forbids the mapping.
    pub fn anonymous(len: ByteLen) -> Result<Self, BindError> {
        let how = Anonymous { huge: HugeAdvice::Advise, ..Anonymous::default() };
        Self::mapped(len, RegionSource::Anonymous, || Mapping::anonymous(len, how))
    }

    /// Makes a memory file (memfd_create(2)) that [`Region::mapping`] can hand to other processes.
    /// Nothing is taken before a page is touched.
    ///
    /// # Errors
    /// [`BindError`] if `len` cuts a page, or names the limit that forbids it.
    pub fn memfd(name: &str, len: ByteLen) -> Result<Self, BindError> {
        Self::mapped(len, RegionSource::Memfd, || Mapping::memfd(name, len, None))
    }

    /// Takes huge pages from the pool of `size`. They are promised at once, and taken one by one when
    /// they are touched.
    ///
    /// # Errors
    /// [`BindError`] if `len` cuts a huge page, or with the numbers of the pool if it is too
    /// small.
    pub fn hugetlb(len: ByteLen, page: PageSize) -> Result<Self, BindError> {
        if !len.get().is_multiple_of(page.bytes()) {
            return Err(BindError::EndsInsidePage { len_bytes: len.get(), page });
        }
        Self::mapped(len, RegionSource::Hugetlb(page), || Mapping::hugetlb(len, page))
    }

    /// Maps `len` bytes of a file from `offset_bytes` on, shared with every other mapping of it: a
    /// write to the region is a write to the file.
    ///
    /// # Errors
    /// [`BindError`] if the file cannot be opened for reading and writing, or is too short, or
    /// `offset_bytes` or `len` cut a page.
    pub fn file(path: &Path, offset_bytes: u64, len: ByteLen) -> Result<Self, BindError> {
        let file = open(path)?;
        let backing = RegionSource::File { path: path.to_owned(), offset_bytes };
        Self::mapped(len, backing, || {
            Mapping::file(file, offset_bytes, len, Access::ReadWrite, Sharing::Shared)
        })
    }

    /// Maps a DAX device, such as `/dev/dax0.0`, from its first byte to its last. A write to
    /// the region is a write to the device, and lasts on persistent memory once its cache lines are
    /// flushed.
    ///
    /// Costs one mmap(2) and the reading of a few files of sysfs, about 100 us at any size. The
    /// device maps whole pages of its alignment, each at its first touch;
    /// [`RegionView::folio_order`] is the order of one.
    ///
    /// # Errors
    /// [`BindError`] if the file cannot be opened for reading and writing, is no DAX device, or
    /// the kernel refuses to map it.
    pub fn devdax(path: &Path) -> Result<Self, BindError> {
        let file = open(path)?;
        let device = dax::device(&SystemRoot::host(), &file)
            .map_err(|cause| BindError::Device { path: path.to_owned(), cause })?;
        let backing = RegionSource::Devdax { path: path.to_owned() };
        let region = Self::mapped(device.size, backing, || Mapping::devdax(file, 0, device.size))?;
        Ok(Self(RegionView { node: device.node, ..region.0 }))
    }

    /// Maps `len` bytes of a file on a DAX mount from `offset_bytes` on: the memory of the file, and
    /// no copy of it. A write lasts once its cache lines are flushed.
    ///
    /// Costs a few system calls. There is no fallback: where the file system offers no DAX, this
    /// fails, and [`Region::file`] works there.
    ///
    /// # Errors
    /// [`BindError`] as [`Region::file`], and with [`MapError::NoDax`] if the file system does
    /// not offer it for this file.
    pub fn fsdax(path: &Path, offset_bytes: u64, len: ByteLen) -> Result<Self, BindError> {
        let file = open(path)?;
        let node = dax::node_of(&SystemRoot::host(), &file);
        let backing = RegionSource::Fsdax { path: path.to_owned(), offset_bytes };
        let region = Self::mapped(len, backing, || Mapping::fsdax(file, offset_bytes, len))?;
        Ok(Self(RegionView { node, ..region.0 }))
    }

    /// Takes a mapping that the caller made, of whatever is behind it. With
    /// [`Mapping::adopt`], whose safety contract then holds until the region is dropped or taken
    /// apart by [`Region::into_mapping`], memory that the caller mapped stays its own.
    ///
    /// A zone refuses to describe adopted addresses twice at a time, as it does for the bytes of a
    /// file. A read-only mapping makes a region to which nothing can be written. Costs no system
    /// call.
    ///
    /// # Errors
    /// [`Rejected`] with the mapping if its length is no multiple of the host's page.
    pub fn adopt(mapping: Mapping) -> Result<Self, Rejected<Mapping, BindError>> {
        let (addr, len, page) = (mapping.addr(), mapping.len(), uzone_os::probe::page_size());
        if check_len(len).is_ok() {
            return Ok(Self::new(mapping, RegionSource::Adopted));
        }
        let cause = BindError::Adopt { addr, len_bytes: len.get(), page };
        Err(Rejected { value: Box::new(mapping), cause })
    }

    fn new(mapping: Mapping, backing: RegionSource) -> Self {
        let (bad, untouched) = (Vec::new(), Untouched::of(&backing));
        // Where the kernel refuses, a dump has more than it needs.
        let is_left_out = is_made(&backing) && mapping.leave_out_of_dumps().is_ok();
        let dumps_populated = AtomicBool::new(is_left_out);
        Self(RegionView { mapping, backing, node: None, bad, untouched, dumps_populated })
    }

    fn mapped(
        len: ByteLen,
        backing: RegionSource,
        map: impl FnOnce() -> Result<Mapping, MapError>,
    ) -> Result<Self, BindError> {
        check_len(len)?;
        match map() {
            Ok(mapping) => Ok(Self::new(mapping, backing)),
            Err(cause) => Err(BindError::Region { len, backing, cause }),
        }
    }

    /// Notes the pages that are bad, of a region whose pages have the numbers of `range`.
    pub(crate) fn remember_bad(&mut self, bad: &[Pfn], range: PfnRange) {
        self.0.bad.clear();
        self.0.bad.extend(bad.iter().filter_map(|pfn| pfn.checked_since(range.start())));
    }

    /// Notes pages that are bad before all that are known to be.
    pub(crate) fn remember_bad_front(&mut self, bad: Vec<PageCount>) {
        self.0.bad.splice(0..0, bad);
    }

    /// Returns the pages that were bad when the region was unbound last, counted from its first, in
    /// ascending order. [`BindOptions::keep_poison`](crate::BindOptions::keep_poison) makes them bad
    /// again.
    #[must_use]
    pub fn bad_pages(&self) -> &[PageCount] {
        &self.bad
    }

    /// Returns the memory, for its address, its descriptor and its kernel accounting.
    #[must_use]
    pub fn mapping(&self) -> &Mapping {
        self.untouched.end(); // the caller may write there
        &self.mapping
    }

    /// Returns the memory, for callers that change no byte.
    pub(crate) fn memory(&self) -> &Mapping {
        &self.mapping
    }

    /// Returns whether every byte is zero because the kernel made it so, and no caller has had the
    /// memory's address or written to it since. Populating a region does not change that; binding it
    /// does, for its pages may be written to.
    #[must_use]
    pub fn is_untouched(&self) -> bool {
        self.untouched.0.load(Ordering::Relaxed) // as in `Untouched::end`
    }

    /// Has core dumps include a range that is about to be populated, unless the whole region is left out.
    pub(crate) fn dump_populated(&self, range: &Range<u64>) {
        // Relaxed: it publishes nothing.
        if self.dumps_populated.load(Ordering::Relaxed) {
            // Addresses have 64 bits: the package below compiles for nothing else.
            let base = self.mapping.addr().get() as u64;
            let start = ((base + range.start) / DUMP_STEP * DUMP_STEP).saturating_sub(base);
            let end = (base + range.end).next_multiple_of(DUMP_STEP) - base;
            // Where the kernel refuses, a dump lacks it.
            let _ = self.mapping.include_in_dumps(start..end.min(self.len().get()));
        }
    }

    /// Takes note that pages are about to be handed out.
    pub(crate) fn touch(&self) {
        self.untouched.end();
    }

    /// Returns the memory and forgets that it was a region.
    #[must_use = "dropping it unmaps the memory, unless that was adopted"]
    pub fn into_mapping(self) -> Mapping {
        self.0.mapping
    }

    /// Returns the NUMA node that the memory of a DAX device, or of a file on a DAX mount, is nearest to. Of other
    /// memory, whose node is decided when a page is touched first, it is that of more than half of a sample of 16
    /// pages, of those that are present; `None` where there is no such node, or the host has one node alone. The
    /// descriptors of the region are asked of the same node.
    ///
    /// Costs a system call where a host has several nodes and the memory is not DAX.
    #[must_use]
    pub fn node(&self) -> Option<u32> {
        self.node.or_else(|| numa::has_several_nodes().then(|| self.mapping.node_of_most())?)
    }

    /// Returns the bytes of a file that are behind the region, or the addresses that were adopted;
    /// `None` for memory that no other process can have.
    pub(crate) fn extent(&self) -> Option<FileExtent> {
        let (file, start) = if self.mapping.is_adopted() {
            // Addresses have 64 bits: the package below compiles for nothing else.
            (None, self.mapping.addr().get() as u64)
        } else {
            (Some(self.mapping.file_id()?), self.mapping.file_offset()?)
        };
        // The range was mapped, so it has an end.
        Some(FileExtent { file, start, end: start.saturating_add(self.len().get()) })
    }

    /// Cuts the first `pages` off, as a mapping.
    ///
    /// # Errors
    /// The region as it was, if nothing would be left of one part, or a page of the backing would
    /// be cut.
    pub(crate) fn cut_front(self, pages: PageCount) -> Result<(Mapping, Self), Box<Self>> {
        let Ok(len) = pages.to_bytes(self.page_size()) else { return Err(Box::new(self)) };
        match self.0.mapping.cut(len) {
            Ok((front, mapping)) => {
                let backing = self.0.backing.moved(|offset| offset.saturating_add(len.get()));
                let before = pages.get();
                let bad = self.0.bad.iter().filter_map(|page| page.get().checked_sub(before));
                let bad = bad.map(PageCount::new).collect();
                Ok((front, Self(RegionView { mapping, backing, bad, ..self.0 })))
            }
            Err(refused) => Err(Box::new(Self(RegionView { mapping: *refused.value, ..self.0 }))),
        }
    }

    /// Joins the part that [`Region::cut_front`] cut off, but for its bad pages.
    pub(crate) fn join_front(self, front: Mapping) -> Self {
        let len = front.len();
        let before = len.get() >> self.page_size().shift();
        match front.join(self.0.mapping) {
            Ok(mapping) => Self(RegionView {
                mapping,
                backing: self.0.backing.moved(|offset| offset.saturating_sub(len.get())),
                bad: self.0.bad.iter().map(|page| PageCount::new(page.get() + before)).collect(),
                ..self.0
            }),
            Err(refused) => unreachable!("parts of one region: {}", refused.cause),
        }
    }

    /// Copies bytes into the region, from byte `offset_bytes` on. A page behind the end of a
    /// truncated file raises `SIGBUS`.
    ///
    /// # Errors
    /// [`AccessError`] unless all bytes are inside; then none is copied.
    pub fn write_at(&self, offset_bytes: u64, bytes: &[u8]) -> Result<(), AccessError> {
        self.untouched.end();
        self.mapping.write_at(offset_bytes, bytes)
    }
}

impl RegionView {
    /// Returns the address of the first byte.
    #[must_use]
    pub fn addr(&self) -> Addr {
        self.untouched.end(); // the caller may write there
        self.mapping.addr()
    }

    /// Returns a pointer to the first byte, as [`Mapping::as_ptr`].
    #[must_use]
    pub fn as_ptr(&self) -> *mut u8 {
        self.untouched.end(); // as above
        self.mapping.as_ptr()
    }

    /// Returns the length of the region; never zero.
    #[must_use]
    pub fn len(&self) -> ByteLen {
        self.mapping.len()
    }

    /// Returns the size of a base page.
    #[must_use]
    pub fn page_size(&self) -> PageSize {
        uzone_os::probe::page_size()
    }

    /// Returns how many base pages the region has; never zero.
    #[must_use]
    pub fn pages(&self) -> PageCount {
        PageCount::new(self.len().get() >> self.page_size().shift())
    }

    /// Returns the source of the region's memory.
    #[must_use]
    pub fn backing(&self) -> &RegionSource {
        &self.backing
    }

    /// Returns the order of the folios that the backing suggests: of the pages in which a DAX device
    /// or a hugetlb pool maps, or that [`Mapping::adopt`] was given, and [`Order::BASE`] for memory that is
    /// mapped in base pages. A bind may take another.
    #[must_use]
    pub fn folio_order(&self) -> Order {
        // No page of a mapping is smaller than the host's; one beyond every order gets none.
        self.page_size().order_of(self.mapping.page_size().bytes()).unwrap_or(Order::BASE)
    }

    /// Copies bytes out of the region, from byte `offset_bytes` on. A page behind the end of a
    /// truncated file raises `SIGBUS`.
    ///
    /// # Errors
    /// [`AccessError`] unless all bytes are inside; then none is copied.
    pub fn read_at(&self, offset_bytes: u64, out: &mut [u8]) -> Result<(), AccessError> {
        self.mapping.read_at(offset_bytes, out)
    }

    /// Leaves the whole region out of core dumps from now on ([`Mapping::leave_out_of_dumps`]), its populated ranges included.
    /// Use it for secrets that a dump must not contain, and for memory so large that the kernel would write the dump for
    /// minutes.
    ///
    /// # Errors
    /// [`MappingError`] if the kernel refuses.
    pub fn leave_out_of_dumps(&self) -> Result<(), MappingError> {
        self.dumps_populated.store(false, Ordering::Relaxed); // as in `dump_populated`
        self.mapping.leave_out_of_dumps()
    }

    /// Has core dumps include a range of bytes. It is for memory that is touched without being populated: of a region that
    /// this process makes, dumps have the populated ranges alone, each widened to 1 GiB.
    ///
    /// # Errors
    /// [`MappingError`] if the range is not inside, or the kernel refuses.
    pub fn include_in_dumps(&self, range: Range<u64>) -> Result<(), MappingError> {
        self.mapping.include_in_dumps(range)
    }

    /// Returns how much memory the region has from the kernel now. It costs a walk over the region's
    /// page tables.
    ///
    /// # Errors
    /// [`MappingError`] if the kernel does not say.
    pub fn resident(&self) -> Result<ByteLen, MappingError> {
        self.mapping.resident()
    }

    /// As [`RegionView::resident`], of a range of bytes.
    ///
    /// # Errors
    /// [`MappingError`] if the range is not inside, or the kernel does not say.
    pub fn resident_in(&self, range: Range<u64>) -> Result<ByteLen, MappingError> {
        self.mapping.resident_in(range)
    }

    /// Returns how many bytes of the region are in huge pages now.
    ///
    /// # Errors
    /// [`MappingError`] if the kernel does not say.
    pub fn huge_backed(&self) -> Result<ByteLen, MappingError> {
        self.mapping.huge_backed()
    }
}

/// Opens a file or device for reading and writing.
fn open(path: &Path) -> Result<File, BindError> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .open(path)
        .map_err(|cause| BindError::Open { path: path.to_owned(), cause })
}

/// Refuses a length that cuts a base page.
fn check_len(len: ByteLen) -> Result<(), BindError> {
    let page = uzone_os::probe::page_size();
    let ends_inside = |_: AddrError| BindError::EndsInsidePage { len_bytes: len.get(), page };
    page.pages_in(len).map(drop).map_err(ends_inside)
}
