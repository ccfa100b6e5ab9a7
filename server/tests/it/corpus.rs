//! Every input that fuzzing has kept: no target panics.

#[test]
fn every_kept_message_is_parsed_or_refused() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../fuzz/corpus/handshake");
    let mut count = 0;
    for entry in std::fs::read_dir(folder).expect("the corpus") {
        let path = entry.expect("an entry").path();
        crate::targets::handshake(&std::fs::read(&path).expect("it is read"));
        count += 1;
    }
    assert!(count > 0, "the corpus is empty");
}
