//! Sets `uzone_sanitizer` where a sanitizer checks accesses to memory: assembly is invisible to it.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // Cargo sets it for the compilers that have sanitizers.
    if std::env::var_os("CARGO_CFG_SANITIZE").is_some() {
        println!("cargo::rustc-cfg=uzone_sanitizer");
    }
}
