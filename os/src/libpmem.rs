//! libpmem, if it is installed: the yardstick that clearing and copying are measured against.
//!
//! It is loaded at run time and never linked: nothing of uzone needs it, and only benchmarks ask for
//! it. It stays loaded until the process ends.
//!
//! Unsafe: loading a library, and calling two of its functions by their documented types.
//! Source: libpmem(7), pmem_memset(3), pmem_memcpy(3), dlopen(3).

use core::ffi::{CStr, c_int, c_uint, c_void};
use std::io;

/// `PMEM_F_MEM_NONTEMPORAL`: past the cache, at any length.
const NONTEMPORAL: c_uint = 1 << 1;

type Memset = unsafe extern "C" fn(*mut c_void, c_int, usize, c_uint) -> *mut c_void;
type Memcpy = unsafe extern "C" fn(*mut c_void, *const c_void, usize, c_uint) -> *mut c_void;

/// The functions of a library that is loaded.
///
/// # Invariants
/// Both are functions of libpmem with these names, and stay so: the library is never unloaded.
#[derive(Clone, Copy, Debug)]
pub struct LibPmem {
    memset: Memset,
    memcpy: Memcpy,
}

impl LibPmem {
    /// Loads the library.
    ///
    /// # Errors
    /// [`io::ErrorKind::Unsupported`] if it is not installed, or too old.
    pub fn load() -> io::Result<Self> {
        let refused = |why: String| io::Error::new(io::ErrorKind::Unsupported, why);
        // SAFETY: dlopen(3) runs the initialisers of the library, which only look at the CPU and the
        // environment; the name is a C string.
        let library = unsafe { libc::dlopen(c"libpmem.so.1".as_ptr(), libc::RTLD_NOW) };
        if library.is_null() {
            let why = "libpmem.so.1 cannot be loaded: install the package libpmem1 (or libpmem)";
            return Err(refused(why.to_owned()));
        }
        let find = |name: &'static CStr| {
            // SAFETY: dlsym(3) wants a library that is loaded, which was just tested, and a C string.
            let function = unsafe { libc::dlsym(library, name.as_ptr()) };
            if !function.is_null() {
                return Ok(function);
            }
            let name = name.to_str().unwrap_or("?");
            Err(refused(format!(
                "libpmem.so.1 has no function {name}: it is older than version 1.5"
            )))
        };
        let (memset, memcpy) = (find(c"pmem_memset")?, find(c"pmem_memcpy")?);
        Ok(Self {
            // SAFETY: a function's address becomes a pointer to a function of the type that
            // pmem_memset(3) gives it; it is not null.
            memset: unsafe { core::mem::transmute::<*mut c_void, Memset>(memset) },
            // SAFETY: as above, for pmem_memcpy(3).
            memcpy: unsafe { core::mem::transmute::<*mut c_void, Memcpy>(memcpy) },
        })
    }

    /// Zeroes memory past the cache, and drains.
    pub fn zero(&self, dst: &mut [u8]) {
        let start = dst.as_mut_ptr().cast();
        // SAFETY: pmem_memset(3) writes `len` bytes from `start`, which are borrowed mutably. Any
        // memory will do.
        unsafe { (self.memset)(start, 0, dst.len(), NONTEMPORAL) };
    }

    /// Copies past the cache, and drains.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn copy(&self, dst: &mut [u8], src: &[u8]) {
        assert!(dst.len() == src.len(), "a copy of {} bytes to {}", src.len(), dst.len());
        let (to, from) = (dst.as_mut_ptr().cast(), src.as_ptr().cast());
        // SAFETY: pmem_memcpy(3) reads as many bytes as it writes: both slices are that long, one of
        // them borrowed mutably, so they do not overlap.
        unsafe { (self.memcpy)(to, from, dst.len(), NONTEMPORAL) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_installed_clears_and_copies_and_what_is_not_says_what_to_install() {
        let peer = match LibPmem::load() {
            Ok(peer) => peer,
            Err(error) => {
                assert!(error.to_string().contains("libpmem1"), "{error}");
                eprintln!("skipped: libpmem: {error}");
                return;
            }
        };
        let src: Vec<u8> = (0..=255).cycle().take(5000).collect();
        let mut dst = vec![9; 5002];
        peer.copy(&mut dst[1..5001], &src);
        assert!(dst[1..5001] == src && dst[0] == 9 && dst[5001] == 9);
        peer.zero(&mut dst[1..5001]);
        assert!(dst[1..5001].iter().all(|byte| *byte == 0) && dst[0] == 9 && dst[5001] == 9);
    }
}
