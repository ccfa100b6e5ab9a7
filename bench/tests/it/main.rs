//! The program `uzone-bench` on sizes that take seconds.

mod check;
mod common;
mod quick;
mod tables;
