//! The files that programs write: a file that appears as a whole ([`NewFile`]), the output of a command ([`OutFile`]),
//! files of a directory that others may write to ([`Folder`]), the room in a directory ([`room()`]), and the holes of
//! sparse files ([`next_data`], [`data_from`], [`hole_problem`]).

mod folder;
mod holes;
mod new_file;
mod room;

pub use folder::{Folder, lock_within};
pub use holes::{data_from, hole_problem, next_data};
pub use new_file::{NewFile, OutFile, is_stdout, mode_for};
pub use room::{Room, room};
