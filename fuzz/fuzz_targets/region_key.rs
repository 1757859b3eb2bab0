//! A region key as a client was handed it: bytes, and a text. Whatever parses has that one form, names a range that files can have, and gives a right.
#![no_main]

use cuttlefs_common::ids::MAX_FILE_SIZE;
use cuttlefs_common::rpc::{REGION_KEY_LEN, RegionKey};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(key) = RegionKey::parse(bytes) {
        check(key);
        assert_eq!(key.to_bytes(), bytes);
    }
    // Hardly an input begins as a key does.
    let mut made = [0; REGION_KEY_LEN];
    let len = bytes.len().min(REGION_KEY_LEN - 4);
    made[..4].copy_from_slice(b"CFRK");
    made[4..4 + len].copy_from_slice(&bytes[..len]);
    if let Ok(key) = RegionKey::parse(&made) {
        check(key);
        assert_eq!(key.to_bytes(), made);
    }
    if let Ok(text) = std::str::from_utf8(bytes)
        && let Ok(key) = text.parse::<RegionKey>()
    {
        check(key);
        assert_eq!(key.to_string(), text);
    }
});

fn check(key: RegionKey) {
    assert!(key.rights.read || key.rights.write);
    assert!(key.len > 0 && key.end() <= MAX_FILE_SIZE && key.end() > key.offset);
    assert_eq!(RegionKey::parse(&key.to_bytes()), Ok(key));
    assert_eq!(key.to_string().parse(), Ok(key));
    assert_eq!(key.signed_bytes(), key.to_bytes()[..72]);
}
