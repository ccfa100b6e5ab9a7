#![no_main]

#[path = "../../server/tests/it/targets.rs"]
mod targets;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| targets::handshake(bytes));
