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
