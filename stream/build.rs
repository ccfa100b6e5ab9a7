//! Sets `uzone_sanitizer` where a sanitizer checks accesses to memory, since assembly is invisible to it, and
//! `uzone_asm` where the assembly of x86-64 is used.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let is_set = |name| std::env::var_os(name).is_some();
    // Cargo sets it for the compilers that have sanitizers.
    let is_sanitized = is_set("CARGO_CFG_SANITIZE");
    if is_sanitized {
        println!("cargo::rustc-cfg=uzone_sanitizer");
    }
    let is_x86_64 = std::env::var("CARGO_CFG_TARGET_ARCH").is_ok_and(|arch| arch == "x86_64");
    // A sanitizer may be named by `--cfg` as well.
    if is_x86_64
        && !is_set("CARGO_CFG_MIRI")
        && !is_sanitized
        && !is_set("CARGO_CFG_UZONE_SANITIZER")
    {
        println!("cargo::rustc-cfg=uzone_asm");
    }
}
