#![no_main]

#[allow(dead_code, reason = "each target is a program of its own")]
#[path = "../../snapshot/tests/targets/mod.rs"]
mod targets;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    targets::working_set(bytes);
});
