//! Where pages come from: [`Backing`], and the back ends there are.
//!
//! A backing has Linux's two hooks. `map_pages` is offered a window and fills what is ready; it never
//! blocks, because the thread that calls it answers all faults of the mapping. `fault` must produce one
//! page and may block; it is called by an I/O thread, or by the thread that populates.

mod file;
mod function;
pub(crate) mod hooks;
mod memory;
mod shared;
pub(crate) mod window;
mod zero;

pub use file::FileBacking;
pub use function::FunctionBacking;
pub use hooks::Backing;
pub use memory::MemoryBacking;
#[cfg(test)]
pub(crate) use memory::continue_or_zero;
pub use shared::SharedBacking;
pub use zero::ZeroBacking;
