//! `uzone man` and `uzone completions`: every command is in them, and shells read them.

use std::process::{Command, Stdio};

use crate::common::{Dir, refuses, run, text};

const COMMANDS: [&str; 6] = ["doctor", "demo", "pack", "report", "man", "completions"];

#[test]
fn each_command_has_a_page_with_its_arguments_and_exit_codes() {
    let dir = Dir::new("man");
    assert!(run(&["man", "--output", &dir.name("man1")]).status.success());
    let page = |name: &str| {
        let path = dir.name(&format!("man1/{name}.1"));
        std::fs::read_to_string(path).expect("it was written")
    };
    assert!(page("uzone").contains(".TH uzone 1"));
    for command in COMMANDS {
        let page = page(&format!("uzone-{command}"));
        assert!(page.contains("Exit codes:"), "{command}: {page}");
        assert!(page.contains("\\-\\-json"), "{command}: {page}");
    }
    let files: Vec<_> =
        std::fs::read_dir(dir.name("man1")).expect("a directory").flatten().collect();
    assert!(files.iter().all(|file| !file.file_name().to_string_lossy().contains("help")));
}

#[test]
fn without_a_directory_the_first_page_is_printed() {
    let output = run(&["man"]);
    assert!(text(&output.stdout).contains(".TH uzone 1"));
    // A formatter finds nothing wrong with it, where there is one.
    let Ok(mut formatter) = Command::new("man")
        .args(["--warnings", "-E", "UTF-8", "-l", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
    else {
        println!("skipped: formatting the manual page: man is not installed");
        return;
    };
    let mut stdin = formatter.stdin.take().expect("a pipe");
    std::io::Write::write_all(&mut stdin, &output.stdout).expect("it reads");
    drop(stdin);
    let formatted = formatter.wait_with_output().expect("it ends");
    assert!(formatted.stderr.is_empty(), "{}", text(&formatted.stderr));
}

#[test]
fn a_directory_that_cannot_be_made_is_named() {
    let dir = Dir::new("man-file");
    let file = dir.file("file", "");
    refuses(&["man", "--output", &file], 74, &file);
    assert_eq!(dir.names(), ["file"]);
}

#[test]
fn scripts_for_shells_know_every_command_and_are_valid() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let output = run(&["completions", shell]);
        assert!(output.status.success(), "{}", text(&output.stderr));
        let script = text(&output.stdout);
        for command in COMMANDS {
            assert!(script.contains(command), "{shell}: {command}");
        }
        // Where the shell is installed, it reads the script without executing it.
        if matches!(shell, "bash" | "zsh" | "fish") {
            let dir = Dir::new(&format!("completions-{shell}"));
            let file = dir.file("script", script);
            match Command::new(shell).args(["-n", &file]).output() {
                Ok(read) => assert!(read.status.success(), "{shell}: {}", text(&read.stderr)),
                Err(_) => println!("skipped: reading the script: {shell} is not installed"),
            }
        }
    }
    assert_eq!(run(&["completions", "tcsh"]).status.code(), Some(2));
    assert_eq!(run(&["completions"]).status.code(), Some(2));
}
