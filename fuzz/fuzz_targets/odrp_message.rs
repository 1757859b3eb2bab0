//! Bytes of a peer as a control message of a memory node: no panic, and what parses says the same after another way round.
#![no_main]

#[path = "../../fs-common/tests/chains/messages.rs"]
mod messages;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    messages::look(bytes);
});
