//! Atomic replacement of files ([`replace`]).

use std::fs;
use std::io::Write;
use std::path::Path;

use uzone_snapshot::files::OutFile;

use crate::error::ReportError;

/// Creates a directory and its parents, unless it exists.
///
/// # Errors
/// [`ReportError`] if the system refuses.
pub fn make_directory(path: &Path) -> Result<(), ReportError> {
    let failed = |cause| ReportError::write(path, "make the directory", cause);
    fs::create_dir_all(path).map_err(failed)
}

/// Writes `bytes` to a file next to `target`, and renames that to it.
///
/// Readers of `target` see the old file or the new one, and if this fails the old one stays. A symbolic
/// link stays one: its target is replaced. A pipe or a device gets the bytes, and `-` is standard output.
///
/// # Errors
/// [`ReportError`] if `target` is a directory or a socket, or the system refuses. Nothing is left behind then.
pub fn replace(target: &Path, bytes: &[u8]) -> Result<(), ReportError> {
    let failed = |step| move |cause| ReportError::write(target, step, cause);
    let new = OutFile::create(target, |_| 0o666).map_err(failed("create"))?;
    new.file().write_all(bytes).map_err(failed("write"))?;
    new.finish().map_err(failed("replace"))
}

/// Checks that [`replace`] can write to `target`, before there is anything to write.
///
/// # Errors
/// As for [`replace`].
pub fn check_replace(target: &Path) -> Result<(), ReportError> {
    OutFile::check(target).map_err(|cause| ReportError::write(target, "create", cause))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_replaced_as_a_whole_and_nothing_else_is_left() {
        let dir = std::env::temp_dir().join(format!("uzone-report-{}", std::process::id()));
        fs::create_dir(&dir).expect("a directory of our own");
        let target = dir.join("out.html");
        replace(&target, b"one").expect("it can be created");
        let link = dir.join("link.html");
        std::os::unix::fs::symlink(&target, &link).expect("a link");
        replace(&link, b"two").expect("it can be replaced");
        assert_eq!(fs::read(&target).expect("the file"), b"two");
        assert!(fs::symlink_metadata(&link).expect("the link").is_symlink());
        // A name that another program left is passed over.
        for number in 0..8 {
            let taken = format!(".out.html.{}-{number}.part", std::process::id());
            fs::write(dir.join(taken), b"").expect("a name that is taken");
        }
        replace(&target, b"three").expect("it can be replaced");
        assert_eq!(fs::read(&target).expect("the file"), b"three");
        let error = replace(&dir, b"").expect_err("it is no file");
        assert!(error.to_string().contains("it is a directory"), "{error}");
        let missing = replace(&dir.join("no/out.html"), b"").expect_err("there is no directory");
        assert!(missing.to_string().ends_with("make its directory first"), "{missing}");
        assert_eq!(fs::read_dir(&dir).expect("the directory").count(), 2 + 8);
        fs::remove_dir_all(&dir).expect("it is ours");
    }
}
