//! Bytes of a peer as a message about memory that may not be there: no panic, and what parses encodes to the same bytes.
#![no_main]

use cuttlefs_common::np::Message;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(message) = Message::parse(bytes) {
        assert_eq!(message.encode(), bytes);
    }
});
