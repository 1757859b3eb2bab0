//! How a message's body is written and read: in postcard's format, all of it.

use serde::{Deserialize, Serialize};

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

/// Parses a body; all of it must be used.
pub(super) fn parse<'a, T: Deserialize<'a>>(body: &'a [u8]) -> Result<T, BodyError> {
    match postcard::take_from_bytes(body) {
        Ok((message, [])) => Ok(message),
        Ok((_, rest)) => Err(BodyError::Trailing(rest.len())),
        Err(_) => Err(BodyError::Malformed),
    }
}
