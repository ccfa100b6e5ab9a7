//! The examples are compiled without a warning, and succeed: alone, under AddressSanitizer, under Valgrind.

use std::process::Command;

use crate::build::{self, Folder, compile, example, is_there, run};

const EXAMPLES: [&str; 5] = ["pool.c", "image.c", "pins.c", "lazy.c", "values.cpp"];

#[test]
fn the_headers_compile_alone_by_each_compiler_without_a_warning() {
    for (compiler, header) in
        [("gcc", "uzone.h"), ("g++", "uzone.hpp"), ("clang", "uzone.h"), ("clang++", "uzone.hpp")]
    {
        // One of them is enough to run the other tests.
        if is_there(compiler) {
            compile(compiler, &build::package().join("include").join(header), &["-fsyntax-only"]);
        } else {
            eprintln!("skipped: {header} by {compiler}: there is no such compiler");
        }
    }
}

/// Returns the examples of a document in a language. Lines that are no whole program become the body of a function.
fn blocks(document: &str, language: &str, header: &str) -> String {
    let fence = format!("\n```{language}\n");
    let blocks = document.split(&fence).skip(1).filter_map(|rest| rest.split("\n```").next());
    let mut program = format!("#include <stdio.h>\n#include \"{header}\"\n");
    for (number, block) in blocks.enumerate() {
        let is_whole = block.contains("static ") || block.starts_with("int main");
        program += &if is_whole {
            format!("{block}\n")
        } else {
            format!("void part_{number}(void);\nvoid part_{number}(void) {{\n{block}\n}}\n")
        };
    }
    program
}

#[test]
fn the_examples_of_the_page_compile() {
    let (folder, page) = (Folder::new("page"), include_str!("../../../docs/C.md"));
    for (compiler, language, header) in [("cc", "c", "uzone.h"), ("c++", "cpp", "uzone.hpp")] {
        let program = blocks(page, language, header);
        assert!(program.contains("part_"), "{program}");
        let source = folder.0.join(format!("page.{language}"));
        std::fs::write(&source, program).unwrap();
        compile(compiler, &source, &["-fsyntax-only", "-Wno-unused-variable"]);
    }
}

#[test]
fn every_example_runs() {
    let folder = Folder::new("examples");
    for name in EXAMPLES {
        let program = example(name, &folder, &[]);
        if let Some(output) = run(name, &folder, &mut Command::new(program)) {
            println!("{name}:\n{output}");
            assert!(!output.is_empty(), "{name} says nothing");
        }
    }
}

#[test]
fn every_example_runs_under_address_sanitizer() {
    let folder = Folder::new("asan");
    for name in EXAMPLES {
        let program = example(name, &folder, &["-fsanitize=address,undefined"]);
        let mut command = Command::new(program);
        // Memory that the library keeps for the process is no leak, and where ptrace(2) is not allowed none is found.
        command.env("ASAN_OPTIONS", "detect_leaks=0:detect_stack_use_after_return=1");
        run(&format!("{name} under AddressSanitizer"), &folder, &mut command);
    }
}

/// Valgrind has no userfaultfd, so these are the examples that need none.
#[test]
fn examples_run_under_valgrind_without_an_error() {
    if !is_there("valgrind") {
        return build::skip("examples under Valgrind", "there is no valgrind");
    }
    let folder = Folder::new("valgrind");
    for name in ["pool.c", "pins.c", "values.cpp"] {
        let program = example(name, &folder, &[]);
        let mut command = Command::new("valgrind");
        command.args(["--quiet", "--error-exitcode=9", "--leak-check=full"]);
        command.arg("--errors-for-leak-kinds=definite").arg(program);
        run(&format!("{name} under Valgrind"), &folder, &mut command);
    }
}
