//! Memory that is zero: [`ZeroBacking`].

use uzone_os::uffd::in_thread::Source;
use uzone_pages::FaultAround;

use crate::backing::hooks::Backing;
use crate::backing::window::Window;
use crate::error::BackingError;

/// Pages of zeroes, as many as are asked for.
#[derive(Clone, Copy, Debug, Default)]
pub struct ZeroBacking;

impl Backing for ZeroBacking {
    fn map_pages(&self, window: &mut Window<'_>) {
        while let Some(run) = window.next_run() {
            if window.zero(run).is_err() {
                return;
            }
        }
    }

    fn fault(&self, window: &mut Window<'_>) -> Result<(), BackingError> {
        let range = window.range();
        let _ = window.zero(range)?;
        Ok(())
    }

    fn in_thread(&self) -> Option<Source> {
        Some(Source::Zero)
    }

    fn largest_window(&self) -> FaultAround {
        FaultAround::MAX
    }
}
