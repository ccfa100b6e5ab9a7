//! Memory that can be touched: [`Reads`].

use uzone_fault::LazyMapping;
use uzone_os::Mapping;

use crate::harness::error::BenchError;

/// Memory that is read through its page tables.
pub(crate) trait Reads: Sync {
    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), BenchError>;
}

impl Reads for Mapping {
    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), BenchError> {
        Ok(self.read_at(offset, out)?)
    }
}

impl Reads for LazyMapping {
    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), BenchError> {
        Ok(self.read_at(offset, out)?)
    }
}
