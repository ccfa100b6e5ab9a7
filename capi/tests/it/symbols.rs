//! The shared library exports the functions of the header, and nothing else.

use std::collections::BTreeSet;
use std::process::Command;

use crate::build::{Folder, archive, compile, output_of, package, run};
use crate::header::functions;

#[test]
fn the_shared_library_exports_the_functions_of_the_header_with_their_version() {
    let folder = Folder::new("symbols");
    let library = folder.0.join("libuzone.so.0.1");
    output_of("sh", &[package().join("link.sh").as_ref(), archive().as_ref(), library.as_ref()]);
    let symbols = output_of(
        "nm",
        &[
            "-D".as_ref(),
            "--defined-only".as_ref(),
            "--with-symbol-versions".as_ref(),
            library.as_ref(),
        ],
    );
    let exported: BTreeSet<&str> = symbols
        .lines()
        .filter_map(|line| line.rsplit(' ').next())
        .filter(|symbol| *symbol != "UZONE_0.1") // the version itself
        .collect();
    let functions = functions();
    let expected: Vec<String> = functions.iter().map(|name| format!("{name}@@UZONE_0.1")).collect();
    assert_eq!(exported, expected.iter().map(String::as_str).collect());

    let program = folder.0.join("pins");
    let (library, output) = (library.to_str().unwrap(), program.to_str().unwrap());
    compile("cc", &package().join("examples/pins.c"), &["-o", output, library, "-lpthread"]);
    let mut command = Command::new(&program);
    run("pins.c with the shared library", &folder, command.env("LD_LIBRARY_PATH", &folder.0));
}

#[test]
fn structures_have_the_sizes_of_version_0_1() {
    // A structure grows at its end, by multiples of 8, and its size here grows with it.
    for (name, size, expected) in [
        ("uzone_pool_options", size_of::<uzone::uzone_pool_options>(), 88),
        ("uzone_pool_stats", size_of::<uzone::uzone_pool_stats>(), 192),
        ("uzone_block", size_of::<uzone::uzone_block>(), 32),
        ("uzone_lazy_options", size_of::<uzone::uzone_lazy_options>(), 32),
        ("uzone_lazy_stats", size_of::<uzone::uzone_lazy_stats>(), 64),
        ("uzone_pack_options", size_of::<uzone::uzone_pack_options>(), 48),
        ("uzone_packed", size_of::<uzone::uzone_packed>(), 104),
        ("uzone_bind_options", size_of::<uzone::uzone_bind_options>(), 16),
        ("uzone_region_stats", size_of::<uzone::uzone_region_stats>(), 40),
    ] {
        assert_eq!(size, expected, "{name}");
    }
}
