//! A message as a server sends it: header, then body. Whatever parses says the same after another way round.
#![no_main]

use cuttlefs_common::rpc::{HEADER_LEN, Reply, ReplyHeader};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|message: &[u8]| {
    // The body alone, or hardly an input would get past magic, version and length of the header.
    body(message);

    let Ok((header, rest)) = ReplyHeader::parse(message) else {
        return;
    };
    assert_eq!(header.encode(rest.len() as u32), message[..HEADER_LEN], "a header has one encoding");
    body(rest);
});

fn body(bytes: &[u8]) {
    let Ok(reply) = Reply::parse(bytes) else {
        return;
    };
    // Varints may arrive longer than needed, never shorter, so the encoding fits where the input did.
    let mut encoded = vec![0; bytes.len()];
    let len = reply.encode(&mut encoded).expect("an encoding is no longer than what was parsed");
    assert_eq!(Reply::parse(&encoded[..len]).as_ref(), Ok(&reply));
}
