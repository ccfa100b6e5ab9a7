//! The model of uzone: frame numbers, page descriptors, folios and content states.
#![no_std]
#![forbid(unsafe_code)]

mod addr;

pub use addr::{AddrError, ByteLen, Order, PageCount, PageSize, ParseByteLenError, Pfn, PfnRange};
