//! The RPC bodies on the wire: golden bytes of every request and reply, round trips of random ones, and bytes
//! that are no message at all.

mod counting_allocator;
mod golden_replies;
mod golden_requests;
mod hostile_bytes;
mod round_trip;
mod strategies;

use cuttlefs_common::rpc::MAX_MESSAGE_BYTES;

/// Concatenates golden bytes, which are written field by field so that each can stand beside its name.
fn joined(fields: &[&[u8]]) -> Vec<u8> {
    fields.concat()
}

/// Room for any message.
fn room() -> Vec<u8> {
    vec![0; MAX_MESSAGE_BYTES as usize]
}
