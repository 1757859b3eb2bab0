//! Encoding and decoding of a message's body, in postcard's format.

use crate::memory::SharedMemory;
use serde::{Deserialize, Serialize};
use std::sync::atomic::Ordering;

/// Bytes that are no message body.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BodyError {
    /// Not in the format.
    #[error("the message body does not parse")]
    Malformed,
    /// Bytes remain after the body.
    #[error("{0} bytes follow the message body")]
    Trailing(usize),
    /// The message does not fit its buffer.
    #[error("the message does not fit {0} bytes")]
    TooLarge(usize),
}

/// Writes a body into `out` and returns its length.
pub(super) fn encode<T: Serialize>(message: &T, out: &mut [u8]) -> Result<usize, BodyError> {
    let room = out.len();
    postcard::to_slice(message, out).map(|used| used.len()).map_err(|_| BodyError::TooLarge(room))
}

/// Writes a body into registered memory, `[offset, offset + room)`, and returns its length.
pub(super) fn encode_into<T: Serialize>(
    message: &T,
    memory: &SharedMemory,
    offset: usize,
    room: usize,
) -> Result<usize, BodyError> {
    let end = postcard::serialize_with_flavor(message, InMemory { memory, at: offset, end: offset + room });
    end.map(|end| end - offset).map_err(|_| BodyError::TooLarge(room))
}

/// Memory that other threads and peers may read while it is written.
struct InMemory<'m> {
    memory: &'m SharedMemory,
    at: usize,
    end: usize,
}

/// Pieces up to this many bytes, as nearly all of a message are, are stored byte by byte, since a string copy takes longer to begin.
const SHORT: usize = 16;

impl postcard::ser_flavors::Flavor for InMemory<'_> {
    /// The end of the message.
    type Output = usize;

    fn try_push(&mut self, byte: u8) -> postcard::Result<()> {
        self.try_extend(&[byte])
    }

    fn try_extend(&mut self, bytes: &[u8]) -> postcard::Result<()> {
        if bytes.len() > self.end - self.at {
            return Err(postcard::Error::SerializeBufferFull);
        }
        if bytes.len() <= SHORT {
            for (at, byte) in (self.at..).zip(bytes) {
                // Relaxed: the post that follows orders these stores before the peer's reads.
                self.memory.atomic_u8(at).store(*byte, Ordering::Relaxed);
            }
        } else {
            self.memory.write(self.at, bytes);
        }
        self.at += bytes.len();
        Ok(())
    }

    fn finalize(self) -> postcard::Result<usize> {
        Ok(self.at)
    }
}

/// Parses a body; all of it must be used.
pub(super) fn parse<'a, T: Deserialize<'a>>(body: &'a [u8]) -> Result<T, BodyError> {
    match postcard::take_from_bytes(body) {
        Ok((message, [])) => Ok(message),
        Ok((_, rest)) => Err(BodyError::Trailing(rest.len())),
        Err(_) => Err(BodyError::Malformed),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn in_memory_a_message_is_the_same_and_nothing_is_written_past_its_room() {
        const AT: usize = 50;
        for len in [0, 1, SHORT, SHORT + 1, 16 << 10] {
            let message = (u64::MAX, serde_bytes::ByteBuf::from(vec![7; len]), "and behind it");
            let mut expected = vec![0; len + 64];
            let body_len = encode(&message, &mut expected).expect("it fits");
            let memory = SharedMemory::new("message", 32 << 10).expect("memory");
            for room in 0..body_len.min(64) {
                assert_eq!(encode_into(&message, &memory, AT, room), Err(BodyError::TooLarge(room)));
                let mut behind = [1; 64];
                memory.read(AT + room, &mut behind);
                assert_eq!(behind, [0; 64]);
            }
            assert_eq!(encode_into(&message, &memory, AT, body_len), Ok(body_len));
            let mut written = vec![1; body_len + 1];
            memory.read(AT, &mut written);
            expected[body_len] = 0;
            assert_eq!(written, expected[..=body_len]);
        }
    }
}
