//! Wrong calls return an errno with a text, and change nothing.

use std::ffi::{CStr, CString, c_int, c_void};
use std::mem::{MaybeUninit, zeroed};
use std::path::Path;
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicU64, Ordering};

use uzone::*;

use crate::build::{Folder, skip};

const EPERM: c_int = 1;
const ENOENT: c_int = 2;
const E2BIG: c_int = 7;
const EBADF: c_int = 9;
const ENOMEM: c_int = 12;
const EBUSY: c_int = 16;
const EEXIST: c_int = 17;
const EINVAL: c_int = 22;
const ENOSPC: c_int = 28;
const EBADMSG: c_int = 74;
const ENOTSUP: c_int = 95;
const ECANCELED: c_int = 125;

fn last() -> String {
    // SAFETY: The text is valid until the next call of this thread that fails.
    unsafe { CStr::from_ptr(uzone_last_error()) }.to_str().unwrap().to_owned()
}

/// Opens something: `open` is given the place for the handle.
fn opened<T>(
    open: impl FnOnce(Option<&mut MaybeUninit<Option<Box<T>>>>) -> c_int,
) -> Result<Box<T>, c_int> {
    let mut place = MaybeUninit::new(None);
    let code = open(Some(&mut place));
    // SAFETY: It was written when it was made, and each write since was of a value.
    let handle = unsafe { place.assume_init() };
    if code == 0 { Ok(handle.unwrap()) } else { Err(code) }
}

fn bound() -> (Box<uzone_zone>, Box<uzone_region>) {
    let zone = opened(|out| uzone_zone_open(out)).unwrap();
    let mut region = opened(|out| uzone_region_open(4 << 20, 0, out)).unwrap();
    // SAFETY: The options are NULL.
    assert_eq!(unsafe { uzone_region_bind(Some(&mut region), Some(&zone), null()) }, 0);
    (zone, region)
}

fn pool_options() -> uzone_pool_options {
    // SAFETY: Zeroes are its defaults.
    let options: uzone_pool_options = unsafe { zeroed() };
    uzone_pool_options { size: size_of::<uzone_pool_options>(), ..options }
}

fn pool_with(options: &uzone_pool_options) -> Result<Box<uzone_pool>, c_int> {
    // SAFETY: The structure has its size, and its functions need no memory.
    opened(|out| unsafe { uzone_pool_open(16 << 20, options, out) })
}

fn token(zone: &uzone_zone, region: &uzone_region, offset: usize) -> Result<u64, c_int> {
    let address = uzone_region_address(Some(region)).cast::<u8>().wrapping_add(offset);
    let mut token = MaybeUninit::new(0);
    let code = uzone_pin(Some(zone), address.cast::<c_void>(), 4096, Some(&mut token));
    // SAFETY: It was written when it was made.
    if code == 0 { Ok(unsafe { token.assume_init() }) } else { Err(code) }
}

#[test]
fn null_is_an_error_that_names_the_argument() {
    assert_eq!(uzone_zone_open(None), -EINVAL);
    assert_eq!(last(), "uzone_zone_open: zone is NULL");
    assert_eq!(uzone_pin(None, null(), 1, None), -EINVAL);
    assert_eq!(last(), "uzone_pin: zone is NULL");
    assert_eq!(uzone_pool_take(None, 1, 0, None), -EINVAL);
    // SAFETY: NULL is allowed everywhere.
    let code = unsafe { uzone_pack(null(), null(), null(), null_mut()) };
    assert_eq!((code, last().as_str()), (-EINVAL, "uzone_pack: source is NULL"));
    // SAFETY: As above.
    let code = unsafe { uzone_lazy_open_function(4096, None, null_mut(), null(), None) };
    assert_eq!((code, last().as_str()), (-EINVAL, "uzone_lazy_open_function: memory is NULL"));
    // No handle is closed, and has nothing.
    uzone_zone_close(None);
    uzone_lazy_close(None);
    uzone_region_close(None);
    assert_eq!(uzone_pool_close(None), 0);
    assert!(uzone_lazy_address(None).is_null() && uzone_image_root(None).is_null());
    assert_eq!((uzone_region_len_bytes(None), uzone_lazy_len_bytes(None)), (0, 0));
}

#[test]
fn a_structure_of_another_size_is_refused_or_read_as_far_as_it_goes() {
    let refused = |size| pool_with(&uzone_pool_options { size, ..pool_options() }).err();
    assert_eq!(refused(0), Some(-EINVAL));
    assert!(last().contains("sizeof"), "{}", last());
    assert_eq!(refused(12), Some(-EINVAL));
    assert_eq!(refused(1 << 30), Some(-E2BIG));
    // An older program knows the size of a block and no more.
    let older = uzone_pool_options { size: 16, block_bytes: 1 << 20, clear: 77, ..pool_options() };
    let pool = pool_with(&older).unwrap();
    // SAFETY: Zeroes are a value of it.
    let mut stats: uzone_pool_stats = unsafe { zeroed() };
    stats.size = size_of::<uzone_pool_stats>();
    // SAFETY: The structure has its size.
    assert_eq!(unsafe { uzone_pool_read_stats(Some(&pool), &mut stats) }, 0);
    assert_eq!((stats.block_bytes, stats.blocks), (1 << 20, 16));
    assert_eq!(uzone_pool_close(Some(pool)), 0);
    assert_eq!(pool_with(&uzone_pool_options { clear: 77, ..pool_options() }).err(), Some(-EINVAL));
    assert!(last().contains("clear 0x4d"), "{}", last());
}

#[test]
fn a_token_is_given_back_once_by_any_thread() {
    let (zone, mut region) = bound();
    let pin = token(&zone, &region, 4096).unwrap();
    assert_eq!(uzone_region_unbind(Some(&mut region), 0), -EBUSY);
    assert!(last().contains("1 pins"), "{}", last());
    let codes: Vec<c_int> = std::thread::scope(|scope| {
        let unpin = || uzone_unpin(pin);
        let threads = [scope.spawn(unpin), scope.spawn(unpin)];
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(codes == [0, -EINVAL] || codes == [-EINVAL, 0], "{codes:?}");
    for wrong in [pin, 0, 1, u64::MAX, pin ^ 1 << 33] {
        assert_eq!(uzone_unpin(wrong), -EINVAL, "{wrong:#x}");
    }
    assert_eq!(token(&zone, &region, 1 << 30), Err(-ENOENT));
    // SAFETY: The options are NULL.
    let code = unsafe { uzone_region_bind(Some(&mut region), Some(&zone), null()) };
    assert_eq!(code, -EEXIST);
    assert_eq!(uzone_region_unbind(Some(&mut region), 0), 0);
    assert_eq!(uzone_region_unbind(Some(&mut region), -1), -EINVAL);
    assert_eq!(token(&zone, &region, 0), Err(-ENOENT));
}

#[test]
fn the_text_of_an_error_is_that_of_its_thread() {
    assert_eq!(uzone_unpin(12), -EINVAL);
    let text = last();
    assert!(text.starts_with("uzone_unpin: ") && text.contains("0xc"), "{text}");
    std::thread::spawn(|| {
        assert_eq!(last(), "");
        assert_eq!(uzone_zone_open(None), -EINVAL);
    })
    .join()
    .unwrap();
    assert_eq!(last(), text);
}

#[test]
fn memory_closed_while_it_is_pinned_stays_until_the_last_pin_is_given_back() {
    let (zone, region) = bound();
    let address = uzone_region_address(Some(&region)).cast::<u8>();
    // SAFETY: The region is mapped.
    unsafe { address.write_volatile(7) };
    let pin = token(&zone, &region, 0).unwrap();
    uzone_region_close(Some(region));
    uzone_zone_close(Some(zone));
    // SAFETY: The pin keeps it mapped.
    assert_eq!(unsafe { address.read_volatile() }, 7);
    assert_eq!(uzone_unpin(pin), 0);
}

static REGISTERED: AtomicU64 = AtomicU64::new(0);

unsafe extern "C" fn refuse_the_second(_: *mut c_void, _: *mut c_void, _: u64) -> c_int {
    if REGISTERED.fetch_add(1, Ordering::SeqCst) == 1 { -ENOSPC } else { 0 }
}

unsafe extern "C" fn accept(_: *mut c_void, _: *mut c_void) -> c_int {
    0
}

#[test]
fn an_error_of_a_registration_is_the_error_of_the_call() {
    let options = uzone_pool_options {
        piece_bytes: 2 << 20,
        start: UZONE_START_EAGER,
        flags: UZONE_POOL_ALL_OR_NOTHING,
        register_memory: Some(refuse_the_second),
        unregister_memory: Some(accept),
        ..pool_options()
    };
    assert_eq!(pool_with(&options).err(), Some(-ENOSPC));
    let text = last();
    for part in
        ["uzone_pool_open: ", "cannot register 2 MiB at 0x", "returned -28", "No space left"]
    {
        assert!(text.contains(part), "{text}");
    }
    let one = uzone_pool_options { unregister_memory: None, ..options };
    assert_eq!(pool_with(&one).err(), Some(-EINVAL));
    let two = uzone_pool_options { registration: UZONE_REGISTER_MLOCK, ..options };
    assert_eq!(pool_with(&two).err(), Some(-EINVAL));
}

#[test]
fn a_pool_refuses_blocks_that_it_does_not_have() {
    let pool = pool_with(&pool_options()).unwrap();
    let take = |count| {
        let mut block = MaybeUninit::uninit();
        let code = uzone_pool_take(Some(&pool), count, -1, Some(&mut block));
        // SAFETY: It was written if the call succeeded.
        (code == 0).then(|| unsafe { block.assume_init() }).ok_or(code)
    };
    let all = take(8).unwrap();
    assert_eq!((all.number, all.count, all.len_bytes), (0, 8, 16 << 20));
    assert_eq!(take(1).err(), Some(-ENOMEM));
    assert!(last().contains("0 of 8 are free"), "{}", last());
    assert_eq!(take(0).err(), Some(-EINVAL));
    let free =
        |number, count| uzone_pool_free(Some(&pool), Some(&uzone_block { number, count, ..all }));
    assert_eq!(free(7, 2), -EINVAL);
    assert_eq!(free(u64::MAX, 1), -EINVAL);
    assert_eq!((free(2, 1), free(2, 1), free(0, 8), free(3, 5)), (0, -EINVAL, -EINVAL, 0));
    assert_eq!(uzone_pool_file(Some(&pool)), -ENOTSUP);
    // SAFETY: The options are NULL, and -1 is no descriptor.
    assert_eq!(opened(|out| unsafe { uzone_pool_attach(-1, 1, null(), out) }).err(), Some(-EBADF));
    assert_eq!(uzone_pool_close(Some(pool)), 0);
}

#[test]
fn a_shared_pool_is_seen_by_its_descriptor() {
    let pool =
        pool_with(&uzone_pool_options { flags: UZONE_POOL_SHARED, ..pool_options() }).unwrap();
    let mut block = MaybeUninit::uninit();
    assert_eq!(uzone_pool_take(Some(&pool), 1, -1, Some(&mut block)), 0);
    // SAFETY: It was written.
    let block = unsafe { block.assume_init() };
    // SAFETY: The block is this test's.
    unsafe { block.address.cast::<u8>().write_volatile(9) };
    let (file, own) = (uzone_pool_file(Some(&pool)), std::process::id().cast_signed());
    // SAFETY: The options are NULL, and the descriptor is open.
    let view = opened(|out| unsafe { uzone_pool_attach(file, own, null(), out) }).unwrap();
    // SAFETY: Zeroes are a value of it.
    let mut stats: uzone_pool_stats = unsafe { zeroed() };
    stats.size = size_of::<uzone_pool_stats>();
    // SAFETY: The structure has its size.
    assert_eq!(unsafe { uzone_pool_read_stats(Some(&view), &mut stats) }, 0);
    assert_eq!((stats.is_owner_alive, stats.blocks, stats.used), (1, 8, 0));
    let there =
        stats.address.cast::<u8>().wrapping_add(usize::try_from(block.number << 21).unwrap());
    // SAFETY: The view is mapped.
    assert_eq!(unsafe { there.read_volatile() }, 9);
    assert_eq!(uzone_pool_take(Some(&view), 1, 0, Some(&mut MaybeUninit::uninit())), -ENOTSUP);
    assert_eq!(uzone_pool_close(Some(view)), 0);
    assert_eq!(uzone_pool_close(Some(pool)), 0);
}

fn text(path: &Path) -> CString {
    CString::new(path.to_str().unwrap()).unwrap()
}

/// Writes an image of 4 MiB. Returns its path and the bytes of the file.
fn image(folder: &Folder) -> (CString, u64) {
    let memory: Vec<u32> =
        (0..1 << 20).map(|number: u32| number.wrapping_mul(2_654_435_761)).collect();
    let path = text(&folder.0.join("image.uz"));
    // SAFETY: Zeroes are a value of it.
    let mut packed: uzone_packed = unsafe { zeroed() };
    packed.size = size_of::<uzone_packed>();
    let bytes = memory.as_ptr().cast();
    // SAFETY: The memory has 4 MiB, and the structure its size.
    let code = unsafe { uzone_pack_memory(bytes, 4 << 20, path.as_ptr(), null(), &mut packed) };
    assert_eq!((code, packed.image_bytes), (0, 4 << 20));
    (path, packed.file_bytes)
}

fn mapped(
    name: &str,
    path: &CString,
    options: *const uzone_lazy_options,
) -> Option<Box<uzone_lazy>> {
    // SAFETY: The path and the options are valid.
    match opened(|out| unsafe { uzone_image_open(path.as_ptr(), options, out) }) {
        Err(code) if [-EPERM, -ENOTSUP, -38].contains(&code) => {
            skip(name, &last());
            None
        }
        opened => Some(opened.unwrap()),
    }
}

#[test]
fn a_damaged_image_is_an_error_of_the_call_that_reads_it() {
    let folder = Folder::new("damage");
    let (path, len) = image(&folder);
    let mut bytes = std::fs::read(path.to_str().unwrap()).unwrap();
    bytes[usize::try_from(len / 2).unwrap()] ^= 1;
    std::fs::write(path.to_str().unwrap(), bytes).unwrap();
    let Some(memory) = mapped("a damaged image", &path, null()) else { return };
    for call in [uzone_image_verify, uzone_lazy_populate] {
        assert_eq!(call(Some(&memory), 0, 4 << 20, None, null_mut()), -EBADMSG);
        let text = last();
        assert!(text.contains("frame") && text.contains("restore the file from a copy"), "{text}");
    }
    assert_eq!(uzone_image_verify(Some(&memory), 4 << 20, 1, None, null_mut()), -EINVAL);
    // Its first part is sound.
    assert_eq!(uzone_lazy_populate(Some(&memory), 0, 4096, None, null_mut()), 0);
    uzone_lazy_close(Some(memory));
}

unsafe extern "C" fn stop(user: *mut c_void, _: u64, total: u64) -> c_int {
    // SAFETY: The pointer is of a number of the test.
    unsafe { user.cast::<u64>().write(total) };
    -ECANCELED
}

#[test]
fn the_error_of_a_progress_function_is_the_error_of_the_call() {
    let folder = Folder::new("progress");
    let (path, _) = image(&folder);
    let Some(memory) = mapped("progress", &path, null()) else { return };
    let mut total = 0_u64;
    let user = (&raw mut total).cast();
    assert_eq!(uzone_image_verify(Some(&memory), 0, 4 << 20, Some(stop), user), -ECANCELED);
    assert_eq!(total, 4 << 20);
    uzone_lazy_close(Some(memory));
}

#[test]
fn an_image_that_is_not_the_wanted_one_is_refused() {
    let folder = Folder::new("root");
    let (path, _) = image(&folder);
    let root = CString::new("0".repeat(64)).unwrap();
    let size = size_of::<uzone_lazy_options>();
    let mut options =
        uzone_lazy_options { size, zone: null(), root: root.as_ptr(), deadline_ms: 0, flags: 0 };
    let open = |path: &CString, options: &uzone_lazy_options| {
        // SAFETY: The path and the options are valid.
        opened(|out| unsafe { uzone_image_open(path.as_ptr(), options, out) }).err()
    };
    assert_eq!(open(&path, &options), Some(-EBADMSG));
    assert!(last().contains("root hash mismatch"), "{}", last());
    options.root = c"short".as_ptr();
    assert_eq!(open(&path, &options), Some(-EINVAL));
    (options.root, options.flags) = (null(), 2);
    assert_eq!(open(&path, &options), Some(-EINVAL));
    options.flags = 0;
    let none = text(&folder.0.join("none.uz"));
    assert_eq!(open(&none, &options), Some(-ENOENT));
    assert!(last().contains("none.uz"), "{}", last());
}
