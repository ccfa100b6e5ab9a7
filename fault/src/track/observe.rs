//! Statistics and advice of both kinds of memory: [`observe`].

/// Defines the statistics and the advice of memory whose faults are answered, by its `core`.
/// `$of` is the origin of byte offsets.
macro_rules! observe {
    ($memory:ty, $of:literal) => {
        impl $memory {
            /// Returns the counts so far.
            #[must_use]
            pub fn stats(&self) -> $crate::FaultStats {
                self.core.stats()
            }

            /// Returns how long faults took so far, by class and outcome. Those that threads answer
            /// themselves are among them with [`LazyOptions::trace`](crate::LazyOptions::trace), as far as
            /// the trace had room for them since it was looked at last.
            #[must_use]
            pub fn latencies(&self) -> Vec<$crate::Latency> {
                self.core.all_recorded().latencies()
            }

            /// Takes the faults that were recorded since the last call: the last
            /// [`LazyOptions::trace`](crate::LazyOptions::trace) of them, in the order in which they were
            /// answered, and how many were forgotten before them.
            #[must_use]
            pub fn take_trace(&self) -> (Vec<$crate::FaultRecord>, u64) {
                self.core.all_recorded().take_trace()
            }

            /// Returns the last page that could not be produced for a waiting thread, and why.
            #[must_use]
            pub fn last_failure(&self) -> Option<$crate::Failure> {
                self.core.recorder.last_failure()
            }

            /// Changes how faults are answered from now on.
            pub fn advise(&self, advice: uzone_pages::Advice, fault_around: uzone_pages::FaultAround) {
                self.core.pattern().set(advice, fault_around);
            }

            #[doc = concat!("Returns the state of the page with byte `offset` of ", $of, ", or `None` if there is none.")]
            #[must_use]
            pub fn content(&self, offset: u64) -> Option<uzone_pages::Content> {
                self.core.page_at(offset).map(|page| self.core.content(page))
            }
        }
    };
}
pub(crate) use observe;
