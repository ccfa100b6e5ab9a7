#![no_main]

#[path = "../../server/tests/targets/mod.rs"]
mod targets;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| targets::handshake(bytes));
