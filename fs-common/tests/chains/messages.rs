//! Bytes of a peer as a control message of a memory node: what parses says the same after another way round, and is a message of this version within
//! the bound. The fuzz target `odrp_message` looks for its own bytes.

use cuttlefs_common::odrp::{Answer, BadMessage, MESSAGE_MAX, Question, encode, parse};

/// Checks the bytes as a question and as an answer. Returns how many of the two they are.
pub fn look(bytes: &[u8]) -> usize {
    macro_rules! as_a {
        ($message:ty) => {
            match parse::<$message>(bytes) {
                Ok(message) => {
                    // Varints may arrive longer than needed, never shorter.
                    let encoded = encode(&message).expect("an encoding is no longer than what was parsed");
                    assert!(encoded.len() <= bytes.len() && bytes.len() <= MESSAGE_MAX);
                    assert_eq!(encoded[0], bytes[0], "there is one version");
                    assert_eq!(parse::<$message>(&encoded).as_ref(), Ok(&message));
                    1
                }
                Err(BadMessage::Long(len)) => {
                    assert!(len == bytes.len() && len > MESSAGE_MAX);
                    0
                }
                Err(BadMessage::Version(version)) => {
                    assert_eq!(version, bytes.first().copied());
                    0
                }
                Err(BadMessage::Malformed) => 0,
            }
        };
    }
    as_a!(Question) + as_a!(Answer)
}
