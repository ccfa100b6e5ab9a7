//! Work on numbered parts, which threads share: [`each_frame`].

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use uzone_os::lock;

/// Calls `work` once for each number below `count`, on `threads` threads, at least one. Each thread
/// passes its own `T` to all its calls.
///
/// # Errors
/// The error of the lowest number. After an error, no further number is taken.
pub(crate) fn each_frame<T: Default, E: Send>(
    threads: usize,
    count: u64,
    work: impl Fn(&mut T, u64) -> Result<(), E> + Sync,
) -> Result<(), E> {
    let (next, first) = (AtomicU64::new(0), Mutex::new(None::<(u64, E)>));
    let run = || {
        let mut kept = T::default();
        loop {
            // Relaxed: the numbers alone are shared, and the scope ends with a join. Threads take
            // them in order, so all below that of an error are worked on.
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= count {
                return;
            }
            if let Err(error) = work(&mut kept, number) {
                next.fetch_max(count, Ordering::Relaxed);
                let mut first = lock(&first);
                if first.as_ref().is_none_or(|(lowest, _)| number < *lowest) {
                    *first = Some((number, error));
                }
            }
        }
    };
    uzone_os::share_work("uzone-frames", threads, |_| run());
    let first = first.into_inner().unwrap_or_else(PoisonError::into_inner);
    first.map_or(Ok(()), |(_, error)| Err(error))
}
