//! A build with AddressSanitizer sees the stores of this package: streaming stores are assembly, which a
//! sanitizer does not check, so such a build takes none (`build.rs`).
#![cfg(uzone_sanitizer)]

use std::process::Command;

const CHILD: &str = "UZONE_STREAM_TEST_FREED";

#[test]
fn a_store_to_freed_memory_is_reported() {
    if std::env::var_os(CHILD).is_some() {
        write_to_freed_memory();
        return;
    }
    let name = "a_store_to_freed_memory_is_reported";
    let child = Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", name, "--nocapture"])
        .env(CHILD, "1")
        .output()
        .expect("the child ran");
    let text = String::from_utf8_lossy(&child.stderr);
    assert!(!child.status.success(), "the child ended well:\n{text}");
    assert!(text.contains("heap-use-after-free"), "the sanitizer reported:\n{text}");
}

/// Breaks the rules on purpose, in a process that is expected to be ended for it.
fn write_to_freed_memory() {
    let mut memory = vec![1_u8; 1 << 20];
    let (start, len) = (memory.as_mut_ptr(), memory.len());
    drop(memory);
    // SAFETY: none: the memory was freed in the line above. AddressSanitizer ends the process at the first store, which is
    // the outcome that the test asks for.
    let freed = unsafe { std::slice::from_raw_parts_mut(start, len) };
    uzone_stream::zero_by(uzone_stream::best(), freed);
}
