//! A pool of huge pages, made larger for a test.

use uzone_os::hugepages;
use uzone_pages::PageSize;

/// The pool, put back as it was when this ends, also by a panic. Needs root.
pub(crate) struct RaisedPool {
    file: String,
    before: String,
}

impl RaisedPool {
    /// Adds `pages` huge pages to the pool of `size`.
    ///
    /// # Errors
    /// Why not: no permission, or not so many in one piece. Then the pool is as it was.
    pub(crate) fn raise(size: PageSize, pages: u64) -> Result<Self, String> {
        let file = hugepages::nr_path(size);
        let failed =
            |what: &str, error: &dyn std::fmt::Display| format!("cannot {what} {file}: {error}");
        let read = || std::fs::read_to_string(&file).map_err(|error| failed("read", &error));
        let before = read()?;
        let total =
            before.trim().parse::<u64>().map_err(|error| failed("understand", &error))? + pages;
        std::fs::write(&file, total.to_string()).map_err(|error| failed("write", &error))?;
        let pool = Self { file: file.clone(), before };
        let got = read()?;
        if got.trim().parse::<u64>().is_ok_and(|got| got >= total) {
            Ok(pool)
        } else {
            Err(format!("asked for {total} huge pages and got {}", got.trim()))
        }
    }
}

impl Drop for RaisedPool {
    fn drop(&mut self) {
        // The error has no receiver; the next run finds the pool as it is.
        let _ = std::fs::write(&self.file, &self.before);
    }
}
