//! What the bytes say, done by hostile peers to a served region of memory that may not be there: no panic, nothing that does not end, no byte changed or
//! told that should not be, and nobody else notices.
#![no_main]

#[path = "../../fs-common/tests/np/sandbox/mod.rs"]
mod sandbox;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    sandbox::run(bytes);
});
