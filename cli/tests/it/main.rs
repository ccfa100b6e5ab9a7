//! The commands of `uzone`, each module by its own name. Tests that change their process, or need it to themselves, are
//! programs of their own beside this folder.

mod attach;
mod command;
mod common;
mod demo;
mod diff;
mod disk_cache;
mod doctor;
mod errors;
mod generate;
mod habits;
mod image;
mod offload;
#[path = "../../../server/tests/it/receiver.rs"]
mod receiver;
mod recover;
mod remote;
mod report;
#[path = "../../../snapshot/tests/s3/mod.rs"]
mod s3;
mod serve;
