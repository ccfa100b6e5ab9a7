//! The target of fuzzing: the message of a monitor, which may be any bytes. `fuzz/` calls this without an end, and
//! `tests/corpus.rs` with the bytes that are kept in `fuzz/corpus`.

use uzone_server::regions;

/// Takes the bytes as the message of a monitor, which may come in parts.
///
/// # Panics
/// If the result of parsing contradicts itself.
pub(crate) fn handshake(bytes: &[u8]) {
    let Ok(Some(found)) = regions(bytes) else { return };
    assert!(!found.is_empty());
    assert!(found.iter().all(|region| [4096, 2 << 20].contains(&region.page.bytes())));
    // A message that ends earlier is the same one, and one that is not whole waits for the rest.
    for len in 0..bytes.len() {
        match regions(&bytes[..len]) {
            Ok(None) => {}
            Ok(Some(part)) => assert_eq!(part, found),
            Err(error) => panic!("{len} of {} bytes: {error}", bytes.len()),
        }
    }
}
