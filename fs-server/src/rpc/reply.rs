//! Replies before they are sent.
//!
//! Composes a reply's bytes with as few copies as possible. Most replies are encoded behind room for their header. The file bytes of a short fetch
//! are copied from their frame straight into the reply buffer:
//!
//! ```text
//! reply buffer:  [ ... | header 48 | head of `Fetched` | file bytes ... ]
//!                                                      ^ FETCHED_AT: a page boundary
//! ```
//!
//! # Invariants
//! * A reply buffer holds bytes of an earlier reply, maybe of another file: only bytes that this reply put there are
//!   sent.
//! * No request waits for a reply buffer while it holds a turn: a client that takes no replies would keep others from
//!   their turns.

use super::connection::{Connection, ReplyBuffer};
use cuttlefs_common::ids::PAGE_SIZE;
use cuttlefs_common::rpc::{
    FETCHED_HEAD_MAX, FetchedHead, HEADER_LEN, MAX_INLINE_BYTES, MAX_MESSAGE_BYTES, Reply, ReplyHeader,
    RequestHeader,
};
use cuttlefs_common::status::Status;
use std::sync::Arc;

/// Where a fetch's file bytes begin in a reply buffer: at a page boundary, as they lie in their frames.
const FETCHED_AT: usize = PAGE_SIZE;
const _: () = assert!(HEADER_LEN + FETCHED_HEAD_MAX <= FETCHED_AT);
const _: () = assert!(FETCHED_AT + MAX_INLINE_BYTES <= MAX_MESSAGE_BYTES as usize);

/// A reply without its header.
pub enum Body {
    /// Encoded behind `HEADER_LEN` bytes of room.
    Encoded(Vec<u8>),
    /// A short fetch, whose file bytes are in the reply buffer.
    Fetched(FetchedBody),
}

/// Encodes a reply's body. Replies are made so that they fit one message; one that does not is an internal error (`Io`).
pub(crate) fn body(reply: &Reply<'_>) -> Result<Body, Status> {
    let encoded = reply.encode_behind(vec![0; HEADER_LEN]).map_err(|error| {
        tracing::error!(%error, "a reply does not fit one message");
        Status::ValueTooLarge
    })?;
    Ok(Body::Encoded(encoded))
}

/// A reply buffer into which a short fetch reads its bytes.
pub struct FetchedBody {
    buffer: ReplyBuffer,
    head: FetchedHead,
    /// The length of the file bytes behind the head.
    len: usize,
}

impl FetchedBody {
    /// Takes one of the connection's reply buffers, if one is free.
    pub fn begin(connection: &Arc<Connection>) -> Option<Self> {
        let buffer = connection.try_reserve()?;
        buffer.memory().spoil(buffer.offset() + FETCHED_AT, MAX_INLINE_BYTES);
        Some(Self { buffer, head: FetchedHead::new(0, 0), len: 0 })
    }

    /// The memory for the fetch, and the offset of the request's first byte in it. There is room for `MAX_INLINE_BYTES`.
    pub fn place(&self) -> (&cuttlefs_common::memory::SharedMemory, usize) {
        (self.buffer.memory(), self.buffer.offset() + FETCHED_AT)
    }

    /// Ends the fetch: moves the wanted `runs` (offset in the request, length) together.
    pub fn finish(mut self, valid_len: u32, runs: &[(usize, usize)]) -> Body {
        let (memory, at) = self.place();
        let mut len = 0;
        for &(start, run) in runs {
            if start != len {
                // Mostly there is one run, which begins at 0, so few reads take this branch.
                let mut moved = vec![0; run];
                memory.read(at + start, &mut moved);
                memory.write(at + len, &moved);
            }
            len += run;
        }
        self.head = FetchedHead::new(valid_len, len);
        self.len = len;
        Body::Fetched(self)
    }
}

/// A reply with its header.
pub(crate) enum Message {
    /// Bytes that are copied to a reply buffer.
    Bytes(Vec<u8>),
    /// Bytes that are in a reply buffer already.
    InPlace {
        /// The buffer.
        buffer: ReplyBuffer,
        /// Where the message begins in the buffer.
        start: usize,
        /// The message's length in bytes.
        len: usize,
    },
}

impl Message {
    /// The message of a request's result.
    pub(crate) fn new(header: &RequestHeader, result: Result<Body, Status>) -> Self {
        let (outcome, body) = match result {
            Ok(body) => (Ok(()), body),
            Err(status) => (Err(status), Body::Encoded(vec![0; HEADER_LEN])),
        };
        let reply = ReplyHeader { slot: header.slot, seq: header.seq, trace: header.trace, result: outcome };
        match body {
            Body::Encoded(mut message) => {
                let len = message.len() - HEADER_LEN;
                message[..HEADER_LEN].copy_from_slice(&reply.encode(len as u32));
                Self::Bytes(message)
            }
            Body::Fetched(FetchedBody { buffer, head, len }) => {
                let body_len = head.as_slice().len() + len;
                let start = FETCHED_AT - head.as_slice().len() - HEADER_LEN;
                let at = buffer.offset() + start;
                buffer.memory().write(at, &reply.encode(body_len as u32));
                buffer.memory().write(at + HEADER_LEN, head.as_slice());
                Self::InPlace { buffer, start, len: HEADER_LEN + body_len }
            }
        }
    }

    /// The message's bytes, to keep them or to send them over another connection than the request's.
    pub(crate) fn to_vec(&self) -> Vec<u8> {
        match self {
            Self::Bytes(bytes) => bytes.clone(),
            Self::InPlace { buffer, start, len } => {
                let mut bytes = vec![0; *len];
                buffer.memory().read(buffer.offset() + start, &mut bytes);
                bytes
            }
        }
    }

    /// Sends it over the connection on which its request came.
    pub(crate) async fn send(self, connection: &Arc<Connection>) {
        match self {
            Self::Bytes(bytes) => connection.send(&bytes).await,
            Self::InPlace { buffer, start, len } => buffer.post(start, len),
        }
    }
}
