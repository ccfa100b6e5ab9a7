//! The process that has the threads of a value: [`Process`]. A child that was forked off has the value and none of
//! its threads, and locks may be as another thread left them, so nothing is waited for there.

/// The process in which a value was made.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Process(u32);

impl Process {
    /// Returns this process.
    pub(crate) fn this() -> Self {
        Self(std::process::id())
    }

    /// Returns whether it is this one.
    pub(crate) fn is_this(self) -> bool {
        self.0 == std::process::id()
    }
}
