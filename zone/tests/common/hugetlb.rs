//! The pool of 2 MiB huge pages, made larger for a test.

/// The pool, put back as it was when this ends, also by a panic. Needs root.
pub(crate) struct RaisedPool {
    before: String,
}

impl RaisedPool {
    const FILE: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";

    /// Adds `pages` huge pages to the pool.
    ///
    /// # Errors
    /// Why not: no permission, or not so many in one piece. Then the pool is as it was.
    pub(crate) fn raise(pages: u64) -> Result<Self, String> {
        let failed = |what: &str, error: &dyn std::fmt::Display| {
            format!("cannot {what} {}: {error}", Self::FILE)
        };
        let read = || std::fs::read_to_string(Self::FILE).map_err(|error| failed("read", &error));
        let before = read()?;
        let total =
            before.trim().parse::<u64>().map_err(|error| failed("understand", &error))? + pages;
        std::fs::write(Self::FILE, total.to_string()).map_err(|error| failed("write", &error))?;
        let pool = Self { before };
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
        let _ = std::fs::write(Self::FILE, &self.before);
    }
}
